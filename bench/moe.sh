#!/bin/sh
# A mixture of experts, tetrain against PyTorch in turns: milliseconds forward, and with backward.
#
#     PYTHON=venv/bin/python bench/moe.sh [--configs="narrow wide fine"] [--dtypes="fp32 bf16"] [--rounds=2]
#                                         [--threads=2] [--keep=NAME]
#
# --keep stores the table as bench/results/NAME.txt. PyTorch runs with the allocator that JEMALLOC names, if any. BUILD
# is the build folder, build unless set.
cd "$(dirname "$0")/.." || exit 1
configs="narrow wide fine"
dtypes="fp32 bf16"
rounds=2
threads=2
keep=
. bench/options.sh
read_options "configs dtypes rounds threads keep" "$@"
build=${BUILD:-build}
results=out/bench/moe.jsonl
python=${PYTHON:-python3}
"$python" -c "import torch" 2>/dev/null ||
    { echo "moe.sh: $python has no torch; set PYTHON (bench/README.md)" >&2; exit 1; }
mkdir -p out/bench
cmake --build "$build" --target tetrain_executable bench_machine >out/bench/build.log ||
    { cat out/bench/build.log; exit 1; }
pattern="s/^matrix product: float32 \([0-9.]*\), bfloat16 \([0-9.]*\).*/fp32=\1 bf16=\2/p"
peaks=$("$build/bench_machine" "$threads" 0.3 | sed -n "$pattern")
: >"$results"
export OMP_NUM_THREADS="$threads"
for config in $configs; do
    for dtype in $dtypes; do
        peak=$(echo "$peaks" | sed -n "s/.*$dtype=\([0-9.]*\).*/\1/p")
        round=0
        while [ $round -lt "$rounds" ]; do
            same="--config=$config --dtype=$dtype --threads=$threads"
            "$build/tetrain" bench/moe.lua $same --peak="${peak:-0}" --json >>"$results" || exit 1
            LD_PRELOAD=$JEMALLOC "$python" bench/peers/moe.py $same >>"$results" || exit 1
            round=$((round + 1))
        done
    done
done
"$python" bench/peers/moe.py --table "$results" | tee out/bench/moe.txt
[ -z "$keep" ] || cp out/bench/moe.txt "bench/results/$keep.txt"
