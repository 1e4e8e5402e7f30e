# Device code and its simulator: libraries that need no CUDA toolkit. te_cuda_program makes the source of kernels,
# te_cuda_sim runs it on the host. Run with -P, OUTPUT being the file to write, NAME the array's name and FILES a list
# separated by commas, this file makes a C array of their text without their #include lines.
if(CMAKE_SCRIPT_MODE_FILE)
  string(REPLACE "," ";" FILES "${FILES}")
  set(bytes "")
  foreach(file IN LISTS FILES)
    file(READ ${file} hex HEX)
    # "#include" to the end of its line, at the beginning of one; bytes are set apart first, so that none is met halfway
    string(REGEX REPLACE "(..)" "\\1 " hex "${hex}")
    string(REGEX REPLACE "0a 23 69 6e 63 6c 75 64 65 ([1-9a-f]. |0[0-9b-f] )*" "" hex "${hex}")
    string(REGEX REPLACE "[89a-f][0-9a-f] " "2e " hex "${hex}") # not ASCII: in comments only
    string(REGEX REPLACE "(..) " "0x\\1," hex "${hex}")
    string(APPEND bytes "${hex}")
  endforeach()
  file(WRITE ${OUTPUT} "/* Made by cmake/TetrainCudaSim.cmake. */\nextern const char ${NAME}[];\n"
    "const char ${NAME}[] = {${bytes}0};\n")
  return()
endif()

set(TE_CUDA_SIM_CMAKE ${CMAKE_CURRENT_LIST_FILE})
function(te_embed_text name)
  string(REPLACE ";" "," files "${ARGN}")
  add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/${name}.c
    COMMAND ${CMAKE_COMMAND} -DNAME=${name} -DOUTPUT=${CMAKE_BINARY_DIR}/${name}.c -DFILES=${files}
            -P ${TE_CUDA_SIM_CMAKE}
    DEPENDS ${ARGN} ${TE_CUDA_SIM_CMAKE} COMMENT "Embedding ${name}")
  set_property(GLOBAL APPEND PROPERTY TE_CUDA_TEXTS ${CMAKE_BINARY_DIR}/${name}.c)
endfunction()

set(TE_KERNELS ${CMAKE_SOURCE_DIR}/src/kernels)
set(TE_CUDA_PRELUDE ${TE_KERNELS}/cuda/device/types.h ${CMAKE_SOURCE_DIR}/include/tetrain/types.h ${TE_KERNELS}/dtype.h
  ${TE_KERNELS}/elementary.h ${TE_KERNELS}/philox.h)
te_embed_text(te_cuda_program_prelude ${TE_CUDA_PRELUDE})
te_embed_text(te_cuda_program_device ${TE_KERNELS}/cuda/device/ops.h ${TE_KERNELS}/program_values.h
  ${TE_KERNELS}/cuda/device/elements.h ${TE_KERNELS}/cuda/device/reduce.h ${TE_KERNELS}/cuda/device/join.h)
te_embed_text(te_cuda_program_tables ${TE_KERNELS}/cuda/device/tables.h)
te_embed_text(te_cuda_program_shares ${TE_KERNELS}/cuda/device/shares.h)
set(TE_CUDA_HAND ${TE_KERNELS}/cuda/kernels)
te_embed_text(te_cuda_hand_device ${TE_KERNELS}/quant.h ${TE_KERNELS}/cuda/device/elements.h
  ${TE_CUDA_HAND}/args.h ${TE_CUDA_HAND}/common.h)
foreach(file move routes mma product_few attention_common attention attention_mma attention_mma_passes
    attention_mma_decode attention_rounded attention_unseen)
  te_embed_text(te_cuda_hand_${file} ${TE_CUDA_HAND}/${file}.cu)
endforeach()
set(TE_CUDA_SCAN ${TE_KERNELS}/cuda/device/scan.h)
te_embed_text(te_cuda_hand_index ${TE_CUDA_SCAN} ${TE_CUDA_HAND}/plus.cu ${TE_CUDA_HAND}/index.cu)
te_embed_text(te_cuda_hand_add ${TE_CUDA_SCAN} ${TE_CUDA_HAND}/plus.cu ${TE_CUDA_HAND}/add.cu)
te_embed_text(te_cuda_hand_order ${TE_CUDA_SCAN} ${TE_CUDA_HAND}/keys.cu ${TE_CUDA_HAND}/order.cu)
te_embed_text(te_cuda_hand_select ${TE_CUDA_HAND}/keys.cu ${TE_CUDA_HAND}/select.cu)
set(TE_CUDA_TILES ${TE_CUDA_HAND}/quantize_tile.cu ${TE_CUDA_HAND}/quantize_codes.cu)
te_embed_text(te_cuda_hand_quantize ${TE_CUDA_TILES} ${TE_CUDA_HAND}/quantize.cu)
te_embed_text(te_cuda_hand_quantized ${TE_CUDA_TILES} ${TE_CUDA_HAND}/quantized.cu)
te_embed_text(te_cuda_program_quantize ${TE_KERNELS}/quant.h ${TE_CUDA_HAND}/args.h ${TE_CUDA_TILES}
  ${TE_CUDA_HAND}/quantize_whole.cu)

# What the CUDA module needs beside src/kernels/cuda/*.c.
file(GLOB TE_CUDA_TEXT_SOURCES CONFIGURE_DEPENDS ${TE_CUDA_HAND}/*.c)
get_property(texts GLOBAL PROPERTY TE_CUDA_TEXTS)
list(APPEND TE_CUDA_TEXT_SOURCES ${texts})
te_embed_text(te_cuda_sim_prelude ${TE_KERNELS}/cuda_sim/abi.h ${TE_KERNELS}/cuda_sim/device.h)
file(GLOB TE_CUDA_PROGRAM_SOURCES CONFIGURE_DEPENDS ${TE_KERNELS}/cuda/program_source*.c)
add_library(te_cuda_program STATIC ${TE_CUDA_PROGRAM_SOURCES} ${TE_CUDA_TEXT_SOURCES})
target_include_directories(te_cuda_program PUBLIC ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
target_link_libraries(te_cuda_program PUBLIC te_flags)

file(GLOB TE_CUDA_SIM_SOURCES CONFIGURE_DEPENDS ${TE_KERNELS}/cuda_sim/*.c)
add_library(te_cuda_sim STATIC ${TE_CUDA_SIM_SOURCES} ${CMAKE_BINARY_DIR}/te_cuda_sim_prelude.c
  ${CMAKE_BINARY_DIR}/te_cuda_program_device.c)
target_include_directories(te_cuda_sim PUBLIC ${CMAKE_SOURCE_DIR}/src)
target_link_libraries(te_cuda_sim PUBLIC te_flags Threads::Threads ${CMAKE_DL_LIBS})
# What stands in for a GPU runs where it was built and is slow enough.
include(CheckCCompilerFlag)
check_c_compiler_flag(-march=native TE_COMPILER_HAS_NATIVE)
set(TE_CUDA_SIM_FLAGS -O3 $<$<BOOL:${TE_COMPILER_HAS_NATIVE}>:-march=native>)
target_compile_options(te_cuda_sim PRIVATE ${TE_CUDA_SIM_FLAGS})

include(TetrainCudaKernels)
