# Target cuda_kernels: nvcc compiles the sources of a training step for each target, and a kernel that spills registers
# fails it. Run with -P, this file does it: NVCC, FOLDER with the sources, TARGETS separated by commas.
if(CMAKE_SCRIPT_MODE_FILE)
  string(REPLACE "," ";" TARGETS "${TARGETS}")
  file(GLOB sources ${FOLDER}/*.cu)
  set(report "")
  set(failed 0)
  foreach(target IN LISTS TARGETS)
    foreach(source IN LISTS sources)
      get_filename_component(name ${source} NAME_WE)
      execute_process(
        COMMAND ${NVCC} -arch=${target} -std=c++17 -fmad=false -cubin -Xptxas -v -o ${FOLDER}/${name}.cubin ${source}
        RESULT_VARIABLE result OUTPUT_VARIABLE log ERROR_VARIABLE log)
      string(APPEND report "${target} ${name}\n${log}\n")
      if(NOT result EQUAL 0)
        message(SEND_ERROR "${name} does not compile for ${target}:\n${log}")
        math(EXPR failed "${failed} + 1")
      elseif(log MATCHES "[1-9][0-9][0-9]+ bytes spill") # less goes around divisions of 64 bits
        message(SEND_ERROR "${name} spills registers on ${target}:\n${log}")
        math(EXPR failed "${failed} + 1")
      endif()
    endforeach()
  endforeach()
  file(WRITE ${FOLDER}/report.txt "${report}")
  list(LENGTH sources n)
  message(STATUS "${n} sources for ${TARGETS}: ${failed} failures; report in ${FOLDER}/report.txt")
  return()
endif()

find_program(TE_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
add_executable(cuda_sources EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/cuda_sources.c)
target_include_directories(cuda_sources PRIVATE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/tests)
target_link_libraries(cuda_sources PRIVATE te_cuda_program tetrain_static)
if(TE_NVCC)
  add_custom_target(cuda_kernels
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda_kernels
    COMMAND cuda_sources ${CMAKE_BINARY_DIR}/cuda_kernels
    COMMAND ${CMAKE_COMMAND} -DNVCC=${TE_NVCC} -DFOLDER=${CMAKE_BINARY_DIR}/cuda_kernels -DTARGETS=sm_80,sm_90a,sm_100
            -P ${CMAKE_CURRENT_LIST_FILE}
    DEPENDS cuda_sources COMMENT "Compiling CUDA kernels with nvcc" VERBATIM)
endif()
