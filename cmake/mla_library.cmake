# mla_add_part(NAME sources...): one folder of src/, an object library that mla::mla gathers.
define_property(GLOBAL PROPERTY MLA_PARTS BRIEF_DOCS "object libraries that make up mla::mla")

function(mla_add_part name)
  add_library(${name} OBJECT ${ARGN})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/include PRIVATE
                                            ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PUBLIC Threads::Threads PRIVATE mla_warnings)
  set_property(GLOBAL APPEND PROPERTY MLA_PARTS ${name})
endfunction()
