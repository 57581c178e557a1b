# Flags that every target of the project shares.
find_package(Threads REQUIRED)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(MLA_CCACHE ccache)
if(MLA_CCACHE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_C_COMPILER_LAUNCHER ${MLA_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${MLA_CCACHE})
endif()

add_library(mla_warnings INTERFACE)
set(host_warnings -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion)
target_compile_options(mla_warnings INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:${host_warnings}>")
# Not under sanitizers: their checks between a value and its use make gcc warn of what cannot be.
if(PROJECT_IS_TOP_LEVEL AND NOT MLA_SANITIZE AND NOT MLA_FUZZ)
  target_compile_options(mla_warnings INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>
                                                $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()

if(MLA_SANITIZE)
  add_compile_options(-fsanitize=${MLA_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${MLA_SANITIZE})
endif()
if(MLA_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
  add_link_options(-fsanitize=address,undefined)
endif()
