#!/bin/sh
# Builds and runs all tests: GCC without warnings, clang without warnings, the C tests and the Lua specs on the release
# build, and both again under AddressSanitizer and UndefinedBehaviorSanitizer. The last line reads "N passed, N failed";
# the exit status is 0 when nothing failed.
set -u
cd "$(dirname "$0")/.."
. scripts/packages.sh

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
passed=0
failed=0

# count PASSED FAILED
count() {
    passed=$((passed + $1))
    failed=$((failed + $2))
}

# step NAME COMMAND…: one check that passes or fails as a whole.
step() {
    name=$1
    shift
    echo "== $name"
    if "$@" >"$logs/step" 2>&1; then
        count 1 0
    else
        cat "$logs/step"
        echo "FAILED: $name"
        count 0 1
    fi
}

finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

build() {
    cmake --preset "$1" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON && cmake --build --preset "$1"
}

# Every file as GCC compiles it, parsed by clang; <omp.h> alone comes from GCC.
clang_warnings() {
    mkdir -p "$logs/include"
    ln -sf "$(gcc -print-file-name=include)/omp.h" "$logs/include/omp.h"
    sed -n 's/^ *"command": "\(.*\)",\{0,1\}$/\1/p' build/compile_commands.json | sed 's/\\"/"/g; s/\\\\/\\/g' |
        sed "s|^[^ ]*|clang -fsyntax-only -Werror -idirafter $logs/include|; s| -o [^ ]*||" |
        tr '\n' '\0' | xargs -0 -n 1 -P "$(nproc)" sh -c
}

# c_tests FOLDER
c_tests() {
    echo "== C tests in $1"
    ctest --test-dir "$1" --output-on-failure -j "$(nproc)" >"$logs/ctest" 2>&1
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

# count_specs STATUS LOG: what a run of specs said. A process that died, or a file that did not load, is a failure of its own.
count_specs() {
    good=$(grep -c '^ok ' "$2")
    bad=$(grep -c '^not ok ' "$2")
    [ "$1" -ne 0 ] && [ "$bad" -eq 0 ] && bad=1
    [ "$good" -eq 0 ] && [ "$bad" -eq 0 ] && bad=1
    [ "$bad" -eq 0 ] || grep -v '^ok ' "$2"
    count "$good" "$bad"
}

# specs FOLDER: the Lua specs under FOLDER/tetrain.
specs() {
    echo "== Lua specs in $1"
    TETRAIN="$PWD/$1/tetrain" busted --lua="$PWD/$1/tetrain" -o TAP spec >"$logs/specs" 2>&1
    count_specs $? "$logs/specs"
}

# made_up_gpu FOLDER DEVICE LOG FILES…: specs on the CUDA backend, whose GPU is made up (src/kernels/cuda_fake), with DEVICE as
# the default device. Kernels are compiled one by one and run on the CPU.
made_up_gpu() {
    folder=$1 device=$2 log=$3
    shift 3
    TE_DEVICE=$device TETRAIN_CUDA_LIBRARIES=$PWD/$folder/cuda_fake TETRAIN_CACHE=$logs/cache TETRAIN="$PWD/$folder/tetrain" \
        busted --lua="$PWD/$folder/tetrain" -o TAP "$@" >"$log" 2>&1
}

# device_specs FOLDER: what the CPU computes, again on the CUDA backend; the two halves side by side.
device_specs() {
    [ -d "$1/cuda_fake" ] || return 0
    echo "== Lua specs on the CUDA backend in $1"
    made_up_gpu "$1" cuda "$logs/device-1" spec/ops_spec.lua &
    first=$!
    made_up_gpu "$1" cpu "$logs/device-2" spec/cuda_spec.lua
    count_specs $? "$logs/device-2"
    made_up_gpu "$1" cuda "$logs/device-3" spec/autograd_spec.lua spec/optim_spec.lua spec/module_spec.lua \
        spec/sequential_spec.lua spec/tensor_spec.lua spec/models spec/recipe/autocast_spec.lua
    count_specs $? "$logs/device-3"
    wait $first
    count_specs $? "$logs/device-1"
}

install_packages $TETRAIN_BUILD_PACKAGES $TETRAIN_TEST_PACKAGES || { count 0 1; finish; }

step "build with GCC, warnings are errors" build release
[ -x build/tetrain ] || finish
step "warnings of clang" clang_warnings
c_tests build
specs build
device_specs build

# Without oneDNN: our own GEMM alone, in the same tests.
plain() {
    cmake -S . -B build-plain -G Ninja -DCMAKE_BUILD_TYPE=Release -DTE_WITH_ONEDNN=OFF &&
        cmake --build build-plain --target tetrain_executable test_gemm test_engine &&
        build-plain/test_gemm && build-plain/test_engine &&
        busted --lua="$PWD/build-plain/tetrain" spec/autograd_spec.lua spec/models spec/ops/linear_spec.lua
}
step "without oneDNN" plain

step "build with sanitizers" build asan
if [ -x build-asan/tetrain ]; then
    # the specs ask for tensors of impossible sizes, which must end in an error of ours
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 ASAN_OPTIONS=allocator_may_return_null=1
    c_tests build-asan
    specs build-asan
fi
finish
