#!/bin/sh
# Every kernel beside its floor: operations and row programs beside the machine's memory, attention beside its
# arithmetic, matrix products beside oneDNN.
#
#     bench/kernels.sh [--threads=2] [--seconds=0.3] [--keep=NAME]
#
# --seconds is spent on every figure. --keep stores the report as bench/results/NAME.txt. BUILD is the build folder.
cd "$(dirname "$0")/.." || exit 1
threads=2
seconds=0.3
keep=
. bench/options.sh
read_options "threads seconds keep" "$@"
build=${BUILD:-build}
mkdir -p out/bench
cmake --build "$build" --target tetrain_executable benches >out/bench/build.log || { cat out/bench/build.log; exit 1; }

title() { printf '\n== %s\n' "$1"; }

measure() {
    sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1
    date -I
    title "Machine"
    "$build/bench_machine" "$threads" "$seconds" --json
    title "Kernels that memory limits: time, rate, share of the bandwidth, share of a loop with the same traffic"
    "$build/tetrain" bench/kernels.lua --threads="$threads" --seconds="$seconds" --machine="$build/bench_machine"
    title "Quantizing: share of a loop with the same traffic in turns with it"
    "$build/bench_quantize" "$threads" "$seconds"
    title "Row programs"
    "$build/bench_program" "$threads" "$seconds"
    title "Attention"
    "$build/bench_attention" "$threads" "$seconds"
    title "Matrix products"
    "$build/bench_gemm" "$threads" "$seconds"
}
measure | tee out/bench/kernels.txt
[ -z "$keep" ] || cp out/bench/kernels.txt "bench/results/$keep.txt"
