# libtetrain: engine, kernels and bindings as one set of objects, linked statically and shared; and the executable.
include(TetrainEmbed)

file(GLOB TE_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/core/*.c ${CMAKE_SOURCE_DIR}/src/core/ops/*.c
  ${CMAKE_SOURCE_DIR}/src/core/fuser/*.c ${CMAKE_SOURCE_DIR}/src/kernels/*.c
  ${CMAKE_SOURCE_DIR}/src/kernels/cpu/*.c ${CMAKE_SOURCE_DIR}/src/lua_bindings/*.c)
if(TE_FORETELL)
  list(REMOVE_ITEM TE_SOURCES ${CMAKE_SOURCE_DIR}/src/kernels/cpu/workers.c)
  list(APPEND TE_SOURCES ${CMAKE_SOURCE_DIR}/bench/foretell/workers.c)
endif()
file(GLOB TE_ISA_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/*.c)
list(REMOVE_ITEM TE_ISA_SOURCES # for one alone
  ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_amx.c ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_amx_f32.c
  ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/quantize_vbmi.c ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_coded.c)

file(GLOB TE_SOURCES_THAT_RAISE CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/lua_bindings/*.c)
set_source_files_properties(${TE_SOURCES_THAT_RAISE} PROPERTIES COMPILE_OPTIONS "${TE_FLAGS_THAT_RAISE}")

add_library(te_objects OBJECT ${TE_SOURCES} ${TE_LUA_SOURCES_C})
target_include_directories(te_objects PUBLIC ${CMAKE_SOURCE_DIR}/include PRIVATE ${CMAKE_SOURCE_DIR}/src)
target_link_libraries(te_objects PUBLIC te_flags PkgConfig::LUAJIT PkgConfig::JANSSON PkgConfig::PCRE2
  PkgConfig::UTF8PROC OpenMP::OpenMP_C Threads::Threads ${CMAKE_DL_LIBS} m)
if(TE_WITH_ONEDNN)
  target_link_libraries(te_objects PUBLIC te_dnnl)
endif()

# These have loops over data of their own.
file(GLOB TE_KERNEL_SOURCES CONFIGURE_DEPENDS
  ${CMAKE_SOURCE_DIR}/src/kernels/*.c ${CMAKE_SOURCE_DIR}/src/kernels/cpu/*.c)
set_source_files_properties(${TE_KERNEL_SOURCES} PROPERTIES COMPILE_OPTIONS "${TE_KERNEL_FLAGS};${TE_NOTHING_THROWN}")
# Loops over places that data names gain nothing by what -O3 adds, which is size.
set_source_files_properties(src/kernels/cpu/index_gather.c src/kernels/cpu/index_scatter.c src/kernels/cpu/sort.c
  src/kernels/cpu/triangle.c
  PROPERTIES COMPILE_OPTIONS "${TE_NOTHING_THROWN}")
# Errors of Lua end in the bindings; what the engine calls back is called protected.
file(GLOB TE_CORE_SOURCES CONFIGURE_DEPENDS
  ${CMAKE_SOURCE_DIR}/src/core/*.c ${CMAKE_SOURCE_DIR}/src/core/ops/*.c ${CMAKE_SOURCE_DIR}/src/core/fuser/*.c)
set_source_files_properties(${TE_CORE_SOURCES} PROPERTIES COMPILE_OPTIONS "${TE_NOTHING_THROWN}")
# Operations prepare calls of kernels; most of their code sees little data.
file(GLOB TE_OP_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/core/ops/*.c)
set_source_files_properties(${TE_OP_SOURCES} PROPERTIES COMPILE_OPTIONS "$<$<CONFIG:Release>:-Os>;${TE_NOTHING_THROWN}")
# What calls the loops of others, and what makes plans of programs.
foreach(name program_across program_across_plan program_whole_rows index program_plan program_registers program_chain
    program_compile program_lookup)
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/cpu/${name}.c PROPERTIES COMPILE_OPTIONS
    "$<$<CONFIG:Release>:-Os>;${TE_NOTHING_THROWN}")
endforeach()
# What scripts do now and then: all bindings but those of operations, tensors, their memory and optimizers, what makes
# plans, programs, recipes and texts of them, and what reads and writes files.
file(GLOB TE_SELDOM CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/lua_bindings/*.c)
list(FILTER TE_SELDOM EXCLUDE REGEX "/(operations|tensor|collect|arguments|optim|optim_prepared)\\.c$")
foreach(name fuser/describe fuser/compile fuser/plan fuser/infer fuser/cluster fuser/frame fuser/recompute fuser/ranges
    formula program op_program op_variant op_gradient recipe_kinds recipe_value recipe_update safetensors io tokens bpe
    profile graph context comm tensor_transfer optimizer quantized nearest op_define op_signature tokenizer regex nfc
    numerics device_module recipe_factors recipe_quantize autocast)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/core/${name}*.c)
  list(APPEND TE_SELDOM ${sources})
endforeach()
set_property(SOURCE ${TE_SELDOM} APPEND PROPERTY COMPILE_OPTIONS "$<$<CONFIG:Release>:-Os>")
# Its loops say which of them are to be vectors.
set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/cpu/program_whole.c PROPERTIES COMPILE_OPTIONS
  "${TE_NOTHING_THROWN}")
if(TE_FORETELL)
  file(GLOB sources ${CMAKE_SOURCE_DIR}/src/kernels/cpu/*.c)
  set_property(SOURCE ${sources} APPEND PROPERTY
    COMPILE_OPTIONS -include ${CMAKE_SOURCE_DIR}/bench/foretell/named_loops.h)
endif()

set(TE_ALL_OBJECTS $<TARGET_OBJECTS:te_objects>)
if(TE_COMPILER_HAS_AVX512BF16)
  list(APPEND TE_ISAS avx512bf16)
  set(TE_ISA_FLAGS_avx512bf16 ${TE_ISA_FLAGS_avx512} -mavx512bf16 -DTE_ISA_avx512=1)
endif()
if(TE_COMPILER_HAS_AVX512VBMI)
  list(APPEND TE_ISAS avx512vbmi)
  set(TE_ISA_FLAGS_avx512vbmi ${TE_ISA_FLAGS_avx512} -mavx512vbmi -DTE_ISA_avx512=1)
endif()
if(TE_HAS_AMX)
  list(APPEND TE_ISAS amx)
  set(TE_ISA_FLAGS_amx ${TE_ISA_FLAGS_avx512} -mavx512bf16 -mamx-tile -mamx-bf16 -DTE_ISA_avx512=1)
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU") # a fifth smaller, at the same speed: products are not in loops of C
    list(APPEND TE_ISA_FLAGS_amx -fno-ipa-cp-clone -fno-peel-loops)
  endif()
endif()
if(TE_COMPILER_HAS_NEONBF16)
  list(APPEND TE_ISAS neonbf16)
  set(TE_ISA_FLAGS_neonbf16 ${TE_ISA_FLAGS_portable} -march=armv8.2-a+bf16)
endif()
# A tile's loop is all of a product; placed elsewhere than at half a cache line it was seen 3 % slower. On Arm GCC loads
# all elements of a at once, for which there are no registers.
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
  set(in_order $<$<BOOL:${TE_ARM}>:-fno-schedule-insns>)
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_micro.c PROPERTIES COMPILE_OPTIONS
    "-falign-loops=32;${in_order}")
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_dots.c PROPERTIES COMPILE_OPTIONS
    -falign-loops=64)
endif()
# The links of a chain work on four vectors, one after the other as they are written. Interleaved, they hide each
# other's latency.
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/program_blocks.c PROPERTIES COMPILE_OPTIONS
    "-fschedule-insns;-fsched-pressure")
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/attention_blocks.c PROPERTIES COMPILE_OPTIONS
    --param=vect-epilogues-nomask=0) # its loops have few ends
endif()
# Float64 is seldom: vectors as they are written, and nothing that -O3 adds for their ends.
set(seldom $<$<CONFIG:Release>:-Os> $<$<CONFIG:Release>:-ftree-vectorize>)
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
  list(APPEND seldom --param=vect-epilogues-nomask=0)
endif()
set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/program_f64.c PROPERTIES COMPILE_OPTIONS
  "${seldom}")
# Sanitized, these take most of the time of tests that run models.
if(TE_SANITIZE)
  foreach(name attention_blocks gemm_micro)
    set_property(SOURCE ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/${name}.c APPEND PROPERTY COMPILE_OPTIONS -O2)
  endforeach()
endif()

if(TE_ISA_SOURCES)
  foreach(isa IN LISTS TE_ISAS)
    if(TE_ISA_OBJECTS)
      file(GLOB objects ${TE_ISA_OBJECTS}/CMakeFiles/te_isa_${isa}.dir/src/kernels/cpu/isa/*.o)
      list(APPEND TE_ALL_OBJECTS ${objects})
      continue()
    endif()
    set(sources ${TE_ISA_SOURCES})
    if(isa STREQUAL avx512bf16)
      set(sources ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/attention_blocks.c)
    elseif(isa STREQUAL avx512vbmi)
      set(sources ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/quantize_vbmi.c
        ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_coded.c)
    elseif(isa STREQUAL amx)
      set(sources ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_amx.c
        ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/gemm_amx_f32.c
        ${CMAKE_SOURCE_DIR}/src/kernels/cpu/isa/attention_blocks.c)
    elseif(isa STREQUAL neonbf16)
      list(FILTER sources INCLUDE REGEX "/gemm_[a-z]*[.]c$")
    endif()
    add_library(te_isa_${isa} OBJECT ${sources})
    target_include_directories(te_isa_${isa} PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
    target_compile_definitions(te_isa_${isa} PRIVATE TE_ISA=${isa} TE_ISA_${isa}=1)
    target_compile_options(te_isa_${isa} PRIVATE ${TE_ISA_FLAGS_${isa}})
    target_link_libraries(te_isa_${isa} PRIVATE te_flags OpenMP::OpenMP_C)
    if(NOT isa STREQUAL portable)
      target_link_libraries(te_isa_${isa} PRIVATE te_further_isa)
    endif()
    list(APPEND TE_ALL_OBJECTS $<TARGET_OBJECTS:te_isa_${isa}>)
  endforeach()
endif()

add_library(tetrain_static STATIC ${TE_ALL_OBJECTS})
set_target_properties(tetrain_static PROPERTIES OUTPUT_NAME tetrain)
target_link_libraries(tetrain_static PUBLIC te_objects)

# Only what the public headers mark with TE_API is visible.
add_library(tetrain_shared SHARED ${TE_ALL_OBJECTS})
set_target_properties(tetrain_shared PROPERTIES OUTPUT_NAME tetrain)
target_link_libraries(tetrain_shared PUBLIC te_objects)
add_library(tetrain::tetrain ALIAS tetrain_shared)

file(GLOB TE_EXECUTABLE_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/tetrain/*.c)
add_executable(tetrain_executable ${TE_EXECUTABLE_SOURCES})
set_target_properties(tetrain_executable PROPERTIES OUTPUT_NAME tetrain)
target_link_libraries(tetrain_executable PRIVATE tetrain_static ${TE_PACKED_RELOCATIONS})
if(EDIT_INCLUDE_DIR AND EDIT_LIBRARY)
  target_include_directories(tetrain_executable SYSTEM PRIVATE ${EDIT_INCLUDE_DIR})
  target_link_libraries(tetrain_executable PRIVATE ${EDIT_LIBRARY})
  target_compile_definitions(tetrain_executable PRIVATE TETRAIN_WITH_EDIT=1)
endif()
