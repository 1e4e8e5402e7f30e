#!/bin/sh
# tetrain against PyTorch: the whole training step, both measured in turns in one run.
#
#     PYTHON=venv/bin/python bench/compare.sh [--configs="char baby"] [--dtypes="bf16 fp32"] [--rounds=3] [--runs=9]
#                                             [--threads=2] [--keep=NAME]
#
# The first time it looks for PyTorch's fastest settings (run_peers.sh, minutes; out/bench/peers.jsonl remembers them).
# Before it measures, both make five steps from the same weights, and the losses must agree: they do the same work.
# --keep stores table and figures as bench/results/NAME.txt and .jsonl. BUILD is the build folder, build unless set.
cd "$(dirname "$0")/.." || exit 1
configs="char baby gpt2_64 gpt2_256"
dtypes="bf16 fp32"
rounds=3
runs=9
threads=2
keep=
. bench/options.sh
read_options "configs dtypes rounds runs threads keep" "$@"
build=${BUILD:-build}
peers=out/bench/peers.jsonl
results=out/bench/compare.jsonl
checks=out/bench/compare-losses.txt
start=out/bench/start.safetensors
report() { "${PYTHON:-python3}" bench/peers/report.py "$@"; }

"${PYTHON:-python3}" -c "import torch" 2>/dev/null ||
    { echo "compare.sh: ${PYTHON:-python3} has no torch; set PYTHON (bench/README.md)" >&2; exit 1; }
mkdir -p out/bench
: >"$checks"
trap 'rm -f "$start"' EXIT
cmake --build "$build" --target tetrain_executable bench_machine >out/bench/build.log ||
    { cat out/bench/build.log; exit 1; }
cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
"$build/bench_machine" "$threads" 0.5 --json |
    sed "s|^{|{\"cpu\": \"$cpu\", \"date\": \"$(date -I)\", \"rounds\": $rounds, |" >"$results"

for config in $configs; do
    for dtype in $dtypes; do
        if ! best=$(report best "$peers" "$config" "$dtype" "$threads" 2>/dev/null); then
            bench/peers/run_peers.sh --configs="$config" --dtypes="$dtype" --threads="$threads" --runs="$runs" \
                --out="$peers" >&2
            best=$(report best "$peers" "$config" "$dtype" "$threads") || continue
        fi
        set -- $best
        step="--config=$config --dtype=$dtype --threads=$threads --json"
        mine="$build/tetrain bench/train_step.lua $step"
        theirs="bench/peers/peer.sh $3 $step --mode=$1 --attention=$2"
        report same "$($mine --runs=2 --seconds=0 --start="$start")" \
            "$($theirs --runs=2 --seconds=0 --start="$start" 2>/dev/null)" | tee -a "$checks"
        round=0
        while [ $round -lt "$rounds" ]; do
            $mine --runs="$runs" >>"$results"
            line=$($theirs --runs="$runs" 2>/dev/null)
            report record "$config" "$dtype" "$threads" "$1" "$2" "$3" "$line" "" >>"$results"
            round=$((round + 1))
        done
    done
done
report table "$results"
if [ -n "$keep" ]; then
    cp "$results" "bench/results/$keep.jsonl"
    { report table "$results"; cat "$checks"; } >"bench/results/$keep.txt"
fi
