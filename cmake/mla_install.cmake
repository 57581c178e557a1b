# What `cmake --install` lays down: headers, the library, the tool, and the files by which CMake's
# find_package(mla) and pkg-config find them.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mla)

install(TARGETS mla EXPORT mlaTargets
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/mla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

if(TARGET mla_layer)
  install(TARGETS mla_layer EXPORT mlaLayerTargets
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  set_target_properties(mla_layer PROPERTIES INSTALL_RPATH $ORIGIN)
  install(EXPORT mlaLayerTargets NAMESPACE mla:: DESTINATION ${config_dir})
  install(FILES cmake/mla_onednn.cmake DESTINATION ${config_dir})
endif()

install(EXPORT mlaTargets NAMESPACE mla:: DESTINATION ${config_dir})
configure_package_config_file(cmake/mlaConfig.cmake.in ${PROJECT_BINARY_DIR}/mlaConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
# Before 1.0 a minor version may break what an earlier one promised.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mlaConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/mlaConfig.cmake ${PROJECT_BINARY_DIR}/mlaConfigVersion.cmake
        DESTINATION ${config_dir})

# Relative to the file itself, so that the tree can be moved.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
set(pc_private_libs "-lstdc++ -lm -pthread")
if(MLA_HAS_CUDA)
  string(PREPEND pc_private_libs "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl ")
endif()
configure_file(cmake/mla.pc.in ${PROJECT_BINARY_DIR}/mla.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/mla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(TARGET mla_layer)
  configure_file(cmake/mla_layer.pc.in ${PROJECT_BINARY_DIR}/mla_layer.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/mla_layer.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

if(TARGET mla_tool)
  install(TARGETS mla_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  file(RELATIVE_PATH bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  set_target_properties(mla_tool PROPERTIES INSTALL_RPATH $ORIGIN/${bin_to_lib})
endif()
