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
  gtest_discover_tests(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} DISCOVERY_MODE PRE_TEST)
  # Several labels do not survive as a property there; the list of tests is known to ctest only.
  set(labels_file ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
  file(WRITE ${labels_file} "if(${name}_TESTS)
  set_tests_properties(\${${name}_TESTS} PROPERTIES LABELS \"${arg_LABELS}\")
endif()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels_file})
  list(GET arg_LABELS 0 kind)
  mla_test_kind(${kind} ${name})
endfunction()
