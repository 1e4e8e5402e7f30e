# libtetrain_mpi.so: what moves bytes between processes that were started together (src/kernels/messenger.h), made where
# MPI is. Nothing else links it: it is opened when such a process first asks for the others.
include(GNUInstallDirs)
find_package(MPI QUIET COMPONENTS C)
if(NOT MPI_C_FOUND)
  message(STATUS "MPI not found: building without groups of processes")
  return()
endif()
message(STATUS "MPI ${MPI_C_VERSION}: building the MPI module")

find_package(Threads REQUIRED)
file(GLOB TE_MPI_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/mpi/*.c)
add_library(tetrain_mpi MODULE ${TE_MPI_SOURCES} ${CMAKE_SOURCE_DIR}/src/kernels/exec.c)
target_include_directories(tetrain_mpi PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
target_include_directories(tetrain_mpi SYSTEM PRIVATE ${MPI_C_INCLUDE_DIRS})
target_link_libraries(tetrain_mpi PRIVATE te_flags ${MPI_C_LIBRARIES} Threads::Threads)
# MPI leaves handlers behind that outlive a dlclose
target_link_options(tetrain_mpi PRIVATE -Wl,-z,nodelete)
install(TARGETS tetrain_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT mpi)
