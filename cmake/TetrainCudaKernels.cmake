# Target cuda_kernels: nvcc compiles the sources of a training step for several GPUs, and a kernel that spills registers
# fails it. Run with -P, this file does it for one: NVCC, FOLDER with the sources, ARCH.
if(CMAKE_SCRIPT_MODE_FILE)
  file(GLOB sources ${FOLDER}/*.cu)
  set(report "")
  set(failed 0)
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME_WE)
    execute_process(
      COMMAND ${NVCC} -arch=${ARCH} -std=c++17 -fmad=false -cubin -Xptxas -v
              -o ${FOLDER}/${name}.${ARCH}.cubin ${source}
      RESULT_VARIABLE result OUTPUT_VARIABLE log ERROR_VARIABLE log)
    string(APPEND report "${name}\n${log}\n")
    if(NOT result EQUAL 0)
      message(SEND_ERROR "${name} does not compile for ${ARCH}:\n${log}")
      math(EXPR failed "${failed} + 1")
    elseif(log MATCHES "[1-9][0-9][0-9]+ bytes spill") # less goes around divisions of 64 bits
      message(SEND_ERROR "${name} spills registers on ${ARCH}:\n${log}")
      math(EXPR failed "${failed} + 1")
    endif()
  endforeach()
  file(WRITE ${FOLDER}/report-${ARCH}.txt "${report}")
  list(LENGTH sources n)
  message(STATUS "${n} sources for ${ARCH}: ${failed} failures; report in ${FOLDER}/report-${ARCH}.txt")
  return()
endif()

find_program(TE_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
add_executable(cuda_sources EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/tests/cuda_sources.c)
target_include_directories(cuda_sources PRIVATE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/tests)
target_link_libraries(cuda_sources PRIVATE te_cuda_program tetrain_static)
if(TE_NVCC)
  set(folder ${CMAKE_BINARY_DIR}/cuda_kernels)
  add_custom_target(cuda_kernel_sources
    COMMAND ${CMAKE_COMMAND} -E rm -rf ${folder}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${folder}
    COMMAND cuda_sources ${folder} DEPENDS cuda_sources VERBATIM)
  add_custom_target(cuda_kernels)
  foreach(arch sm_80 sm_89 sm_90a sm_100)
    add_custom_target(cuda_kernels_${arch}
      COMMAND ${CMAKE_COMMAND} -DNVCC=${TE_NVCC} -DFOLDER=${folder} -DARCH=${arch} -P ${CMAKE_CURRENT_LIST_FILE}
      COMMENT "Compiling CUDA kernels for ${arch} with nvcc" VERBATIM)
    add_dependencies(cuda_kernels_${arch} cuda_kernel_sources)
    add_dependencies(cuda_kernels cuda_kernels_${arch})
  endforeach()
endif()
