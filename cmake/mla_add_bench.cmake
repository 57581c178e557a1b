# mla_add_bench(name [SOURCES file...] [LIBS target...]): one google-benchmark program in
# build/PRESET/bench, run by `make bench`. SOURCES defaults to name.cpp; names end in _bench.
find_package(benchmark REQUIRED)
add_custom_target(benchmarks)

function(mla_add_bench name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  if(NOT arg_SOURCES)
    set(arg_SOURCES ${name}.cpp)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE mla::mla mla_warnings ${arg_LIBS} benchmark::benchmark_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bench)
  add_dependencies(benchmarks ${name})
endfunction()
