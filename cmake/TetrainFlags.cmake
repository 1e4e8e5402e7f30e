# Flags of every target: warnings, floating point rules, sanitizers, and the instruction sets of the CPU backend.
include(CheckCCompilerFlag)
include(CheckCSourceRuns)

add_library(te_flags INTERFACE)
target_compile_options(te_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes
  # every instruction of a program rounds once and nothing is contracted: the same bits everywhere
  -ffp-contract=off -fno-math-errno -fno-trapping-math)
target_compile_definitions(te_flags INTERFACE _POSIX_C_SOURCE=200809L _DEFAULT_SOURCE)
if(CMAKE_C_COMPILER_ID MATCHES Clang) # which otherwise warns of loops that it leaves scalar
  target_compile_options(te_flags INTERFACE -Wno-pass-failed)
endif()
# The engine calls kernels and loops over little itself: what -O3 adds there is size.
set(CMAKE_C_FLAGS_RELEASE "-O2 -DNDEBUG")
set(TE_KERNEL_FLAGS $<$<CONFIG:Release>:-O3>)
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g")

if(TE_SANITIZE)
  set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O1 -g1") # quick to compile; lines, without variables
  target_compile_options(te_flags INTERFACE -fsanitize=${TE_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=undefined)
  target_link_options(te_flags INTERFACE -fsanitize=${TE_SANITIZE})
  if(TE_SANITIZE STREQUAL thread)
    # LuaJIT's errors skip the exits of functions, and each one skipped would stay on the sanitizer's stack until that
    # is full
    check_c_compiler_flag("--param=tsan-instrument-func-entry-exit=0" TE_COMPILER_HAS_TSAN_NO_ENTRY_EXIT)
    if(TE_COMPILER_HAS_TSAN_NO_ENTRY_EXIT)
      set(TE_FLAGS_THAT_RAISE --param=tsan-instrument-func-entry-exit=0)
    endif()
  endif()
endif()
# Sets beside the portable one: what AddressSanitizer sees as well is checked once, since sets take long to compile.
add_library(te_further_isa INTERFACE)
target_link_libraries(te_further_isa INTERFACE te_flags)
if(TE_SANITIZE MATCHES undefined)
  target_compile_options(te_further_isa INTERFACE -fno-sanitize=null,object-size)
endif()

# A bit for each pointer in a table instead of 24 bytes, where the C library that is here reads them.
if(NOT CMAKE_CROSSCOMPILING)
  set(CMAKE_REQUIRED_LINK_OPTIONS -Wl,-z,pack-relative-relocs)
  check_c_source_runs("static int n; int *volatile pointers[] = {&n, &n}; int main(void) { return pointers[1] != &n; }"
    TE_HAS_PACKED_RELOCATIONS)
  if(TE_HAS_PACKED_RELOCATIONS)
    set(TE_PACKED_RELOCATIONS ${CMAKE_REQUIRED_LINK_OPTIONS})
  endif()
  unset(CMAKE_REQUIRED_LINK_OPTIONS)
endif()

# Files in src/kernels/cpu/isa are compiled once per entry.
set(TE_ISAS portable)
# Nothing is thrown through a kernel or the engine, and a debugger finds its way by what -g adds.
set(TE_NOTHING_THROWN $<$<CONFIG:Release>:-fno-asynchronous-unwind-tables>)
set(TE_ISA_FLAGS ${TE_NOTHING_THROWN})
# Loops of kernels are vectors as they are written: copies of them for other strides, conditions and ends would be size
# alone.
if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
  list(APPEND TE_ISA_FLAGS -fno-version-loops-for-strides -fno-unswitch-loops -fno-split-loops
    --param=max-completely-peeled-insns=100)
endif()
if(TE_ARM)
  set(TE_ISA_FLAGS_portable ${TE_ISA_FLAGS} ${TE_KERNEL_FLAGS} -DTE_ISA_neon=1)
  target_compile_definitions(te_flags INTERFACE TE_ISA_HAS_NEON=1)
  check_c_compiler_flag("-march=armv8.2-a+bf16" TE_COMPILER_HAS_NEONBF16)
  if(TE_COMPILER_HAS_NEONBF16)
    target_compile_definitions(te_flags INTERFACE TE_ISA_HAS_NEONBF16=1)
  endif()
else()
  # For machines without AVX2 size counts more: what -O3 adds to the other sets would double this one.
  set(TE_ISA_FLAGS_portable ${TE_ISA_FLAGS} $<$<CONFIG:Release>:-Os> $<$<CONFIG:Release>:-ftree-vectorize>)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  check_c_compiler_flag("-mavx512f" TE_COMPILER_HAS_AVX512)
  if(TE_COMPILER_HAS_AVX512)
    list(APPEND TE_ISAS avx2 avx512)
    set(TE_ISA_FLAGS_avx2 ${TE_ISA_FLAGS} ${TE_KERNEL_FLAGS} -mavx2 -mfma -mf16c -mbmi2)
    set(TE_ISA_FLAGS_avx512 ${TE_ISA_FLAGS} ${TE_KERNEL_FLAGS} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd
      -mfma -mf16c -mbmi2
      -mprfchw -mprefer-vector-width=512)
    target_compile_definitions(te_flags INTERFACE TE_ISA_HAS_X86=1)
    # attention alone has loops for this extension of avx512
    check_c_compiler_flag("-mavx512bf16" TE_COMPILER_HAS_AVX512BF16)
    if(TE_COMPILER_HAS_AVX512BF16)
      target_compile_definitions(te_flags INTERFACE TE_ISA_HAS_AVX512BF16=1)
    endif()
    # and quantizing for this one
    check_c_compiler_flag("-mavx512vbmi" TE_COMPILER_HAS_AVX512VBMI)
    if(TE_COMPILER_HAS_AVX512VBMI)
      target_compile_definitions(te_flags INTERFACE TE_ISA_HAS_AVX512VBMI=1)
    endif()
    # and products of bfloat16 for matrix units
    check_c_compiler_flag("-mamx-bf16" TE_COMPILER_HAS_AMX)
    if(TE_COMPILER_HAS_AMX AND TE_COMPILER_HAS_AVX512BF16)
      target_compile_definitions(te_flags INTERFACE TE_ISA_HAS_AMX=1)
      set(TE_HAS_AMX ON)
    endif()
  endif()
endif()
