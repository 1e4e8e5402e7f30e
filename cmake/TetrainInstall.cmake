# Installing, packaging, and use by other projects: cmake --install, find_package(tetrain), pkg-config tetrain, cpack -G
# DEB. The same description serves the build folder, so that a project can use tetrain without installing it:
# -DCMAKE_PREFIX_PATH=BUILD, or PKG_CONFIG_PATH=BUILD.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(tetrain_shared PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${TE_SOVERSION}
  LINK_DEPENDS ${CMAKE_SOURCE_DIR}/cmake/tetrain.map)
# The library calls its own functions, whatever else the process has of the same names: a plugin may bring a copy.
target_link_options(tetrain_shared PRIVATE -Wl,--version-script=${CMAKE_SOURCE_DIR}/cmake/tetrain.map
  -Wl,-Bsymbolic-functions)

# What a program needs beside libtetrain.a.
set(TE_STATIC_FLAGS "-lluajit-5.1 -ljansson -lpcre2-8 -lutf8proc -fopenmp -pthread -lm")
set(TE_STATIC_LIBRARIES "luajit-5.1;jansson;pcre2-8;utf8proc;-fopenmp;-pthread;m")
if(TE_WITH_ONEDNN)
  string(PREPEND TE_STATIC_FLAGS "-ldnnl ")
  string(PREPEND TE_STATIC_LIBRARIES "dnnl;")
endif()

# describe FOLDER: writes tetrainConfig.cmake, its version file and tetrain.pc with the CONFIG_ and PC_ variables of the
# caller.
function(describe folder)
  configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/tetrainConfig.cmake.in ${folder}/tetrainConfig.cmake
    INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tetrain NO_CHECK_REQUIRED_COMPONENTS_MACRO)
  write_basic_package_version_file(${folder}/tetrainConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  configure_file(${CMAKE_SOURCE_DIR}/cmake/tetrain.pc.in ${folder}/tetrain.pc @ONLY)
endfunction()

set(CONFIG_INCLUDE_DIRS ${CMAKE_SOURCE_DIR}/include)
set(CONFIG_LIBRARY_DIR ${CMAKE_BINARY_DIR})
set(CONFIG_EXECUTABLE ${CMAKE_BINARY_DIR}/tetrain)
set(PC_PREFIX ${CMAKE_BINARY_DIR})
set(PC_LIBDIR ${CMAKE_BINARY_DIR})
set(PC_INCLUDEDIR ${CMAKE_SOURCE_DIR}/include)
describe(${CMAKE_BINARY_DIR})

set(CONFIG_INCLUDE_DIRS "\${PACKAGE_PREFIX_DIR}/${CMAKE_INSTALL_INCLUDEDIR}")
set(CONFIG_LIBRARY_DIR "\${PACKAGE_PREFIX_DIR}/${CMAKE_INSTALL_LIBDIR}")
set(CONFIG_EXECUTABLE "\${PACKAGE_PREFIX_DIR}/${CMAKE_INSTALL_BINDIR}/tetrain")
set(PC_PREFIX "\${pcfiledir}/../..") # the folder may be moved
if(CMAKE_INSTALL_LIBDIR MATCHES "/")
  set(PC_PREFIX "\${pcfiledir}/../../..")
endif()
set(PC_LIBDIR "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
set(PC_INCLUDEDIR "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
describe(${CMAKE_BINARY_DIR}/installed)

# Made by the executable from what is declared: annotations for editors, manual page, shell completion.
if(CMAKE_CROSSCOMPILING AND NOT CMAKE_CROSSCOMPILING_EMULATOR)
  message(FATAL_ERROR "Cross-compiling takes a CMAKE_CROSSCOMPILING_EMULATOR to run the executable with.")
endif()
set(TE_GENERATED ${CMAKE_BINARY_DIR}/tetrain.d.lua ${CMAKE_BINARY_DIR}/tetrain.1 ${CMAKE_BINARY_DIR}/tetrain.bash)
add_custom_command(OUTPUT ${TE_GENERATED}
  COMMAND tetrain_executable -e "io.write(require('te.tools.annotations')())" > ${CMAKE_BINARY_DIR}/tetrain.d.lua
  COMMAND tetrain_executable --man > ${CMAKE_BINARY_DIR}/tetrain.1
  COMMAND tetrain_executable --completion > ${CMAKE_BINARY_DIR}/tetrain.bash
  DEPENDS tetrain_executable VERBATIM COMMENT "Writing annotations, manual page and completion")
add_custom_target(generated ALL DEPENDS ${TE_GENERATED})

install(TARGETS tetrain_executable tetrain_shared tetrain_static)
install(DIRECTORY include/tetrain TYPE INCLUDE)
install(DIRECTORY scripts DESTINATION ${CMAKE_INSTALL_DATADIR}/tetrain FILES_MATCHING PATTERN "*.lua")
install(FILES ${CMAKE_BINARY_DIR}/installed/tetrainConfig.cmake ${CMAKE_BINARY_DIR}/installed/tetrainConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tetrain)
install(FILES ${CMAKE_BINARY_DIR}/installed/tetrain.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${CMAKE_BINARY_DIR}/tetrain.d.lua DESTINATION ${CMAKE_INSTALL_DATADIR}/tetrain)
install(FILES ${CMAKE_BINARY_DIR}/tetrain.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${CMAKE_BINARY_DIR}/tetrain.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
    RENAME tetrain)
# Of what the pages link to, scripts and headers stand elsewhere.
file(RELATIVE_PATH TE_DOC_TO_SCRIPTS /${CMAKE_INSTALL_DOCDIR} /${CMAKE_INSTALL_DATADIR}/tetrain/scripts)
file(RELATIVE_PATH TE_DOC_TO_HEADERS /${CMAKE_INSTALL_DOCDIR} /${CMAKE_INSTALL_INCLUDEDIR})
install(CODE "
  foreach(page README.md docs/guide.md)
    file(READ \"${CMAKE_SOURCE_DIR}/\${page}\" text)
    string(REPLACE \"](scripts/\" \"](${TE_DOC_TO_SCRIPTS}/\" text \"\${text}\")
    string(REPLACE \"](include/\" \"](${TE_DOC_TO_HEADERS}/\" text \"\${text}\")
    string(REPLACE \"](../include/\" \"](../${TE_DOC_TO_HEADERS}/\" text \"\${text}\")
    file(WRITE \"${CMAKE_BINARY_DIR}/installed/\${page}\" \"\${text}\")
  endforeach()")
install(FILES LICENSE ${CMAKE_BINARY_DIR}/installed/README.md ARCHITECTURE.md CONTRIBUTING.md TYPE DOC)
install(FILES bench/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/bench)
install(DIRECTORY bench/results DESTINATION ${CMAKE_INSTALL_DOCDIR}/bench FILES_MATCHING PATTERN "*.txt")
install(FILES ${CMAKE_BINARY_DIR}/installed/docs/guide.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs)
install(DIRECTORY docs examples TYPE DOC PATTERN config.ld EXCLUDE PATTERN guide.md EXCLUDE
  REGEX "examples/CMakeLists[.]txt$" EXCLUDE) # tests of this build

# Pages of the Lua library: cmake --build BUILD --target api_docs
find_program(LDOC ldoc)
if(LDOC)
  add_custom_target(api_docs
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/api_source
    COMMAND tetrain_executable -e "io.write(require('te.tools.api_source')())" > ${CMAKE_BINARY_DIR}/api_source/te.lua
    COMMAND ${LDOC} -c ${CMAKE_SOURCE_DIR}/docs/config.ld -d ${CMAKE_BINARY_DIR}/api ${CMAKE_BINARY_DIR}/api_source
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}/docs VERBATIM COMMENT "Pages in ${CMAKE_BINARY_DIR}/api")
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tetrain)
set(CPACK_PACKAGE_CONTACT "tetrain maintainers <tetrain@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Runtime for training and running Transformers, scripted in Lua")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON) # and the trigger of ldconfig
# for programs that link libtetrain.a
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libdnnl-dev, libjansson-dev, libluajit-5.1-dev, libpcre2-dev, libutf8proc-dev")
set(CPACK_DEBIAN_PACKAGE_SECTION science)
# What needs MPI is a package of its own, tetrain-mpi.
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_COMPONENTS_ALL Unspecified)
if(TARGET tetrain_mpi)
  list(APPEND CPACK_COMPONENTS_ALL mpi)
endif()
set(CPACK_DEBIAN_UNSPECIFIED_PACKAGE_NAME tetrain)
set(CPACK_DEBIAN_UNSPECIFIED_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_MPI_PACKAGE_NAME tetrain-mpi)
set(CPACK_DEBIAN_MPI_PACKAGE_DEPENDS "tetrain (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_MPI_PACKAGE_RECOMMENDS openmpi-bin)
set(CPACK_DEBIAN_MPI_FILE_NAME DEB-DEFAULT)
include(CPack)
