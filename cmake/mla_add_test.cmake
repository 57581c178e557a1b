# mla_add_test(name [SOURCES file...] [LIBS target...] [TIMEOUT seconds] LABELS label...): one gtest
# program whose cases ctest lists one by one. SOURCES defaults to name.cpp. Its first label says
# what kind of test it is; `tests_KIND` builds all programs of a kind, so that a sanitizer build
# compiles only what it runs.
find_package(GTest REQUIRED)
include(GoogleTest)

# Makes `target` part of what tests_KIND builds.
function(mla_test_kind kind target)
  if(NOT TARGET tests_${kind})
    add_custom_target(tests_${kind})
  endif()
  add_dependencies(tests_${kind} ${target})
endfunction()

# The kinds that scripts/test.sh asks for; empty where the project has no such test.
foreach(kind IN ITEMS unit property contract)
  add_custom_target(tests_${kind})
endforeach()

# Lists the cases of program `name` in ctest. Several labels do not survive as a property there; the
# list of tests is known to ctest only.
function(mla_list_tests name list)
  cmake_parse_arguments(arg "" "" "LABELS;PROPERTIES;OPTIONS" ${ARGN})
  gtest_discover_tests(${name} TEST_LIST ${list} ${arg_OPTIONS} DISCOVERY_MODE PRE_TEST
                       PROPERTIES ${arg_PROPERTIES})
  set(labels_file ${CMAKE_CURRENT_BINARY_DIR}/${list}_labels.cmake)
  file(WRITE ${labels_file} "if(${list})
  set_tests_properties(\${${list}} PROPERTIES LABELS \"${arg_LABELS}\")
endif()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels_file})
endfunction()

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
  mla_list_tests(${name} ${name}_TESTS LABELS ${arg_LABELS} PROPERTIES TIMEOUT ${arg_TIMEOUT})
  list(GET arg_LABELS 0 kind)
  mla_test_kind(${kind} ${name})
endfunction()

# mla_run_on_cuda(name...): lists programs that link mla_test_device a second time, on the GPU: the
# cases are called Cuda.*, have the label cuda alone, and are skipped where there is no GPU.
function(mla_run_on_cuda)
  if(NOT MLA_HAS_CUDA)
    return()
  endif()
  foreach(name IN LISTS ARGN)
    mla_list_tests(${name} ${name}_CUDA_TESTS LABELS cuda OPTIONS TEST_PREFIX Cuda.
                   PROPERTIES TIMEOUT 300 ENVIRONMENT MLA_TEST_DEVICE=cuda)
    mla_test_kind(cuda ${name})
  endforeach()
endfunction()
