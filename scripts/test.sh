#!/bin/sh
# Builds and runs all tests: GCC without warnings, clang without warnings, the C tests and the Lua specs on the release
# build, both again under AddressSanitizer and UndefinedBehaviorSanitizer, and what uses threads under ThreadSanitizer.
# Headers show the seconds since the start. Tests and files of specs are named as they end, and nothing may take for
# ever: what hangs is ended and named. The last line reads "N passed, N failed"; the exit status is 0 when nothing
# failed.
set -u
cd "$(dirname "$0")/.."
. scripts/packages.sh

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
passed=0
failed=0
started=$(date +%s)
# Several programs share the processors here, so a thread that waits should sleep and not spin.
export OMP_WAIT_POLICY=passive

header() { echo "== [$(($(date +%s) - started)) s] $*"; }

# limited SECONDS COMMAND…: the command and all that it starts end after so many seconds.
limited() { timeout -k 10 "$@"; }

# count PASSED FAILED
count() {
    passed=$((passed + $1))
    failed=$((failed + $2))
}

# step NAME COMMAND…: one check that passes or fails as a whole.
step() {
    name=$1
    shift
    header "$name"
    if "$@" >"$logs/step" 2>&1; then
        count 1 0
    else
        cat "$logs/step"
        echo "FAILED: $name"
        count 0 1
    fi
}

finish() {
    header "end"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

build() {
    cmake --preset "$1" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON && limited 3000 cmake --build --preset "$1"
}

# Every file as GCC compiles it, parsed by clang, which knows fewer flags of optimization; <omp.h> alone comes from GCC.
clang_warnings() {
    mkdir -p "$logs/include"
    sed 's/__malloc__ (omp_free),//' "$(gcc -print-file-name=include)/omp.h" >"$logs/include/omp.h" # GCC's alone
    sed -n 's/^ *"command": "\(.*\)",\{0,1\}$/\1/p' build/compile_commands.json | sed 's/\\"/"/g; s/\\\\/\\/g' |
        sed "s|^[^ ]*|clang -fsyntax-only -Werror -Wno-ignored-optimization-argument -idirafter $logs/include|" |
        sed "s| -o [^ ]*||" |
        sed 's/ -fno-[a-z-]*loops[a-z-]*//g; s/ -fno-ipa-[a-z-]*//g; s/ -fsched-pressure//g; s/ --param=[^ ]*//g' |
        tr '\n' '\0' | limited 1200 xargs -0 -n 1 -P "$(nproc)" sh -c
}

# follow LOG FILTER COMMAND…: runs a command, showing its log through FILTER as it grows; the exit status is the
# command's.
follow() {
    log=$1 filter=$2
    shift 2
    : >"$log"
    "$@" >>"$log" 2>&1 &
    pid=$!
    tail -n +1 -s 0.3 --pid=$pid -f "$log" | $filter
    wait $pid
}

test_names() { sed -u -n 's|^ *[0-9]*/[0-9]* Test *#[0-9]*: \([^ ]*\) [ .]*|   \1 |p'; }

# c_tests FOLDER OPTIONS…: each test has a limit of its own (cmake/TetrainTests.cmake).
c_tests() {
    header "C tests in $1"
    follow "$logs/ctest" test_names limited 3600 ctest --test-dir "$@" --output-on-failure -j "$(nproc)"
    bad=$(sed -n 's/.*tests passed, \([0-9]*\) tests failed out of \([0-9]*\).*/\1/p' "$logs/ctest")
    all=$(sed -n 's/.*tests passed, \([0-9]*\) tests failed out of \([0-9]*\).*/\2/p' "$logs/ctest")
    if [ -z "$all" ]; then
        cat "$logs/ctest"
        count 0 1
    else
        [ "$bad" -eq 0 ] || cat "$logs/ctest"
        count $((all - bad)) "$bad"
    fi
}

# count_specs STATUS LOG: what a run of specs said. A process that died, or a log without a test, is a failure of its
# own.
count_specs() {
    good=$(grep -c '^ok ' "$2")
    bad=$(grep -c '^not ok ' "$2")
    if [ "$bad" -eq 0 ] && { [ "$1" -ne 0 ] || [ "$good" -eq 0 ]; }; then
        echo "FAILED: $good tests, then exit status $1, in ${2##*/}"
        bad=1
    fi
    [ "$bad" -eq 0 ] || grep -v -e '^ok ' -e '^# spec/.* @ [0-9]*: ' "$2"
    case $1 in # of timeout
    124 | 137) echo "FAILED: the time was over in $(grep '^# spec/.* @ [0-9]*: ' "$2" | tail -n 1 | cut -c 3-)" ;;
    esac
    count "$good" "$bad"
}

# spec_files FOLDER VARIABLES FILES…: specs under FOLDER/tetrain, each file in a process of its own, shared out to all
# processors. VARIABLES stand in their environment.
spec_files() {
    folder=$PWD/$1 variables=$2
    shift 2
    rm -rf "$logs/specs"
    mkdir -p "$logs/specs"
    printf '%s\n' "$@" | env TETRAIN="$folder/tetrain" $variables xargs -P "$(nproc)" -I FILE sh -c '
        log=$2/$(echo "$1" | tr / -)
        started=$(date +%s)
        timeout -k 10 900 busted --lua="$TETRAIN" -v -o TAP "$1" >"$log" 2>&1
        echo $? >"$log.status"
        echo "   $1 $(($(date +%s) - started)) s"' - FILE "$logs/specs"
    for log in "$logs"/specs/*.lua; do count_specs "$(cat "$log.status")" "$log"; done
}

# long_first FILES…: these, then all others that have specs.
long_first() {
    echo $* | tr ' ' '\n'
    find spec -name '*_spec.lua' | LC_ALL=C sort | grep -v -x -F "$(echo $* | tr ' ' '\n')"
}

# specs FOLDER [LEFT OUT…]: the Lua specs under FOLDER/tetrain, but for some files.
specs() {
    header "Lua specs in $1"
    folder=$1
    shift
    spec_files "$folder" "" $(long_first $long | grep -v -x -F -e "$(printf '%s\n' - "$@")")
}

# The files that take longest, those first.
long="spec/robustness_spec.lua spec/scripts/train_gpt_spec.lua spec/recipe/quantize_spec.lua
    spec/train/distributed_spec.lua spec/fuser/random_spec.lua spec/recipe/emission_spec.lua spec/cpu/layout_spec.lua
    spec/distributed/*_spec.lua spec/recipe/optim_spec.lua spec/ops/moe_spec.lua"

# Specs that say themselves which device computes what.
names_devices="spec/cuda_spec.lua spec/cuda/*_spec.lua spec/graph/*_spec.lua spec/recipe/faster_spec.lua"

# Those among them that compare products of fp8 with the CPU's.
adds_fp8="spec/cuda_spec.lua spec/graph/copies_spec.lua spec/cuda/attention_spec.lua spec/cuda/emission_spec.lua
    spec/cuda/parameters_spec.lua"

# Specs that show nothing new on a device. They compare what programs and documents print, which names the device of a
# tensor; scripts/train_gpt.lua is started many times, and its models are in other specs.
prints="spec/cli_spec.lua spec/gpu_check_spec.lua spec/options_spec.lua spec/prompt_spec.lua spec/readme_spec.lua
    spec/scripts/train_gpt_spec.lua spec/scripts/train_gpt_pretrained_spec.lua spec/tools/*_spec.lua
    spec/train/command_line_spec.lua"

# device_files: what runs with a device in place of the CPU, whose loops spec/cpu is about.
device_files() {
    long_first spec/ops/broadcast_spec.lua spec/ops_spec.lua spec/pointwise_spec.lua spec/recipe/autocast_spec.lua \
        spec/recipe/emission_spec.lua spec/recipe/quantize_spec.lua spec/recipe/hostile_spec.lua \
        spec/recipe/memory_spec.lua |
        grep -v -x -F "$(ls $names_devices $prints spec/cpu/*_spec.lua)"
}

# made_up_gpu FOLDER DEVICE FILES…: specs on the CUDA backend, whose GPU is made up (src/kernels/cuda_fake), with DEVICE
# as the default device. Kernels are compiled one by one and run on the CPU. Only specs that name devices have products
# timed, each of which is some forty.
made_up_gpu() {
    folder=$1 device=$2 ways=
    shift 2
    [ "$device" = cpu ] || ways=TE_FAKE_ONE_PRODUCT=1
    spec_files "$folder" "TE_DEVICE=$device TETRAIN_CUDA_LIBRARIES=$PWD/$folder/cuda_fake
        TETRAIN_CACHE=$logs/cache-$folder OMP_NUM_THREADS=1 $ways" "$@"
}

# device_specs FOLDER: what the CPU computes, again on the CUDA backend.
device_specs() {
    [ -d "$1/cuda_fake" ] || return 0
    header "Lua specs on the CUDA backend in $1"
    made_up_gpu "$1" cuda $(device_files)
    made_up_gpu "$1" cpu $names_devices
    header "Lua specs on the CUDA backend in $1, products of fp8 as short as Hopper's"
    export TE_FAKE_SHORT_SUMS=1
    made_up_gpu "$1" cpu $adds_fp8
    unset TE_FAKE_SHORT_SUMS
}

# compiles TARGET FOLDER MOST: NVRTC takes so many of the sources there, for that GPU.
compiles() {
    if limited 900 build/cuda_compile "$nvrtc" "$2" "$1" "$3" "$(nproc)"; then
        count 1 0
    else
        count 0 1
    fi
}

# step_sources FOLDER: the kernels of a training step that the build has not compiled for the module itself.
step_sources() {
    cmake --build build --target cuda_sources && mkdir -p "$1" && build/cuda_sources "$1" rest
}

# real_compilers: NVRTC, where it is there, takes what the specs have made; and what a training step runs, which nvcc
# takes where it is alone.
real_compilers() {
    what="kernels of a training step for sm_80, sm_90a and sm_100, without spills" # others: the build's own
    nvrtc=$(ls /usr/local/cuda/lib64/libnvrtc.so.* 2>/dev/null | head -n 1)
    if [ -n "$nvrtc" ] && [ -x build/cuda_compile ]; then
        header "kernels of the specs for sm_90a, without spills"
        compiles sm_90a "$logs/cache-build" 200
        step "$what" step_sources "$logs/sources"
        for target in sm_80 sm_90a sm_100; do compiles $target "$logs/sources" 1000; done
    elif command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
        step "$what" limited 900 cmake --build build --target cuda_kernels
    fi
}

install_packages $TETRAIN_BUILD_PACKAGES $TETRAIN_TEST_PACKAGES || { count 0 1; finish; }

step "build with GCC, warnings are errors" build release
[ -x build/tetrain ] || finish
step "warnings of clang" clang_warnings
c_tests build
specs build
device_specs build
real_compilers

# Compiled by clang, which brings its own OpenMP, whose reductions begin otherwise, and links libraries that GCC drops;
# and without oneDNN, with our own GEMM alone. What is compiled for instruction sets knows of neither.
others() {
    cmake -S . -B build-clang -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER=clang -DTE_WITH_ONEDNN=OFF \
        -DTE_ISA_OBJECTS="$PWD/build" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON &&
        limited 1800 cmake --build build-clang --target tetrain_executable test_gemm test_gemm_ways test_engine &&
        limited 300 build-clang/test_gemm && limited 300 build-clang/test_gemm_ways &&
        limited 300 build-clang/test_engine || return 1
    if [ -x build/te_cuda_make_ready ]; then
        cmake --build build-clang --target te_cuda_make_ready || return 1
        build-clang/te_cuda_make_ready # starts, and says how it is used
        [ $? -eq 2 ] || return 1
    fi
}
step "build with clang, without oneDNN" others
[ ! -x build-clang/tetrain ] ||
    spec_files build-clang "" spec/ops/*_spec.lua spec/models/*_spec.lua spec/autograd/*_spec.lua

# Where threads meet.
threads() {
    tests="test_host test_interrupt_stress test_tetrain test_tokens test_workers"
    cmake --preset tsan -DCMAKE_COMPILE_WARNING_AS_ERROR=ON && limited 1200 cmake --build --preset tsan --target $tests
}
step "build with ThreadSanitizer" threads
if [ -x build-tsan/test_tokens ]; then
    TSAN_OPTIONS=allocator_may_return_null=1 c_tests build-tsan \
            -R '^test_(host|interrupt_stress|tetrain|tokens|workers)$'
fi

step "build with sanitizers" build asan
if [ -x build-asan/tetrain ]; then
    # the specs ask for tensors of impossible sizes, which must end in an error of ours
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 ASAN_OPTIONS=allocator_may_return_null=1
    c_tests build-asan -E '^test_cuda_dnn$' # most of which is NVIDIA's own library
    # less of what is random, and without what is of Lua and the shell alone
    TETRAIN_SPEC_SHARE=4 specs build-asan spec/gpu_check_spec.lua spec/readme_spec.lua spec/tools/guide_spec.lua \
        spec/tools/help_spec.lua spec/distributed/tensor_spec.lua spec/distributed/pipeline_spec.lua \
        spec/train/distributed_spec.lua
    [ ! -d build-asan/cuda_fake ] || {
        header "Lua specs on the CUDA backend in build-asan"
        made_up_gpu build-asan cuda spec/autograd/*_spec.lua spec/optim/*_spec.lua spec/module_spec.lua \
            spec/sequential_spec.lua spec/tensor_spec.lua spec/ops/attention_spec.lua spec/ops/embedding_spec.lua \
            spec/fuser/plan_spec.lua spec/recipe/parameters_spec.lua \
            spec/train/checkpoint_spec.lua
        made_up_gpu build-asan cpu spec/cuda/parameters_spec.lua spec/cuda/reports_spec.lua
    }
fi
finish
