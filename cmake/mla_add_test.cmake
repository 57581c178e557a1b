# mla_add_test(name [SOURCES file...] [LIBS target...] LABELS label...): one gtest program whose
# cases ctest lists one by one. SOURCES defaults to name.cpp.
find_package(GTest REQUIRED)
include(GoogleTest)

function(mla_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT arg_SOURCES)
    set(arg_SOURCES ${name}.cpp)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE mla::mla mla_warnings ${arg_LIBS} GTest::gmock
                                        GTest::gtest_main)
  gtest_discover_tests(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
                       DISCOVERY_MODE PRE_TEST)
endfunction()
