#!/bin/sh
# Single operations beside PyTorch's, as they are called at a prompt: with results that become garbage, forward alone
# and with backward, small, in the caches and beyond them; with --device=cuda on a GPU.
#
#     PYTHON=venv/bin/python bench/operations.sh [--only="sum|max"] [--dtypes="fp32 bf16"] [--rounds=1] [--seconds=0.03]
#                                                [--sizes="16x64 1024x768 4096x3072"] [--threads=2] [--device=cpu]
#                                                [--keep=NAME]
#
# A dtype is fp32, bf16 or fp64. The table is sorted by ratio, slowest first. --keep stores it as
# bench/results/NAME.txt. A case that fails on a side is named and has no ratio; the exit status is then 1. PyTorch runs
# with the allocator that JEMALLOC names, if any. BUILD is the build folder, build unless set.
cd "$(dirname "$0")/.." || exit 1
only=
dtypes="fp32 bf16"
sizes="16x64 1024x768 4096x3072"
rounds=1
seconds=0.03
threads=2
device=cpu
keep=
. bench/options.sh
read_options "only dtypes sizes rounds seconds threads device keep" "$@"
build=${BUILD:-build}
python=${PYTHON:-python3}
mine=out/bench/operations.jsonl
theirs=out/bench/operations-peer.jsonl
"$python" -c "import torch" 2>/dev/null || { echo "operations.sh: $python has no torch (bench/README.md)" >&2; exit 1; }
mkdir -p out/bench
: >"$mine"
: >"$theirs"
export OMP_NUM_THREADS="$threads"
status=0
round=0
while [ $round -lt "$rounds" ]; do
    for dtype in $dtypes; do
        set -- --only="$only" --dtypes="$dtype" --sizes="$sizes" --threads="$threads" --seconds="$seconds" \
            --device="$device"
        "$build/tetrain" bench/operations.lua "$@" >>"$mine" || status=1
        LD_PRELOAD=$JEMALLOC "$python" bench/peers/operations.py "$@" >>"$theirs" || status=1
    done
    round=$((round + 1))
done
"$python" bench/operations_table.py "$mine" "$theirs" >out/bench/operations.txt || exit 1
cat out/bench/operations.txt
[ -z "$keep" ] || cp out/bench/operations.txt "bench/results/$keep.txt"
exit $status
