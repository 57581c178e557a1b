# Defines mla::onednn where oneDNN is installed. Its own package file also asks for the OpenCL
# headers, which nothing here needs.
if(NOT TARGET mla::onednn)
  find_path(MLA_ONEDNN_INCLUDE_DIR dnnl.hpp)
  find_library(MLA_ONEDNN_LIBRARY dnnl)
  mark_as_advanced(MLA_ONEDNN_INCLUDE_DIR MLA_ONEDNN_LIBRARY)
  if(MLA_ONEDNN_INCLUDE_DIR AND MLA_ONEDNN_LIBRARY)
    add_library(mla::onednn UNKNOWN IMPORTED GLOBAL)
    set_target_properties(mla::onednn PROPERTIES
                          IMPORTED_LOCATION ${MLA_ONEDNN_LIBRARY}
                          INTERFACE_INCLUDE_DIRECTORIES ${MLA_ONEDNN_INCLUDE_DIR})
  endif()
endif()
