#!/bin/sh
# What fusion is worth: a pre-norm MLP and a GPT block, forward and backward, fused against unfused against PyTorch
# (eager and compiled), measured in turns in one run.
#
#     PYTHON=venv/bin/python bench/fuser.sh [--models="mlp block"] [--dtypes="bf16 fp32"] [--widths="128 … 4096"]
#                                           [--tokens=0] [--rounds=1] [--seconds=0.5] [--threads=1] [--keep=NAME]
#
# Before it measures, both run one step from the same weights, and the norms of results and gradients must agree.
# --peers= (empty) leaves PyTorch out, --peers=eager its compiler. --keep stores table and figures as
# bench/results/NAME.txt and .jsonl. BUILD is the build folder, build unless set.
cd "$(dirname "$0")/.." || exit 1
models="mlp block"
dtypes="bf16 fp32"
widths="128 256 512 1024 2048 4096"
tokens=0
rounds=1
seconds=0.5
threads=1
peers="eager compile"
keep=
. bench/options.sh
read_options "models dtypes widths tokens rounds seconds threads peers keep" "$@"
build=${BUILD:-build}
python=${PYTHON:-python3}
results=out/bench/fuser.jsonl
checks=out/bench/fuser-checks.jsonl
start=out/bench/fuser-start.safetensors
table() { "$python" bench/fuser_table.py "$@"; }

[ -z "$peers" ] || "$python" -c "import torch" 2>/dev/null ||
    { echo "fuser.sh: $python has no torch; set PYTHON (bench/README.md) or --peers=" >&2; exit 1; }
mkdir -p out/bench
: >"$results"
: >"$checks"
trap 'rm -f "$start"' EXIT
cmake --build "$build" --target tetrain_executable >out/bench/build.log || { cat out/bench/build.log; exit 1; }

if [ -n "$peers" ]; then
    for model in $models; do
        for dtype in $dtypes; do
            case="--model=$model --dtype=$dtype --width=128 --runs=2 --seconds=0"
            "$build/tetrain" bench/fuser.lua $case --start="$start" --json >>"$checks" || exit 1
            "$python" bench/peers/block.py $case --start="$start" --modes=eager >>"$checks" || exit 1
        done
    done
    table same "$checks" || exit 1
fi

for model in $models; do
    for dtype in $dtypes; do
        for width in $widths; do
            case="--model=$model --dtype=$dtype --width=$width --tokens=$tokens --threads=$threads --seconds=$seconds"
            round=0
            while [ $round -lt "$rounds" ]; do
                "$build/tetrain" bench/fuser.lua $case --json >>"$results" || exit 1
                [ -z "$peers" ] || "$python" bench/peers/block.py $case --modes="$peers" >>"$results" || exit 1
                round=$((round + 1))
            done
        done
    done
done
table table "$results"
if [ -n "$keep" ]; then
    cp "$results" "bench/results/$keep.jsonl"
    { [ -z "$peers" ] || table same "$checks"; table table "$results"; } >"bench/results/$keep.txt"
fi
