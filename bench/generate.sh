#!/bin/sh
# Generating text, tetrain against PyTorch in turns: milliseconds for a prompt and for every token after it.
#
#     PYTHON=venv/bin/python bench/generate.sh [--configs="char gpt2_256"] [--dtypes="bf16 fp32"] [--batches="1 4"]
#                                              [--recipes="block nvfp4"] [--rounds=2] [--threads=2] [--keep=NAME]
#
# Both start from the same weights and the same prompt. PyTorch runs eager and compiled, and the faster one counts. In
# bfloat16 tetrain also runs with weights that are stored in the formats of recipes.
# --keep stores the table as bench/results/NAME.txt. BUILD is the build folder, build unless set.
cd "$(dirname "$0")/.." || exit 1
configs="char baby gpt2_256"
dtypes="bf16 fp32"
batches="1 4"
recipes="block nvfp4"
rounds=2
threads=2
keep=
. bench/options.sh
read_options "configs dtypes batches recipes rounds threads keep" "$@"
build=${BUILD:-build}
results=out/bench/generate.jsonl
start=out/bench/generate.safetensors
python=${PYTHON:-python3}
"$python" -c "import torch" 2>/dev/null ||
    { echo "generate.sh: $python has no torch; set PYTHON (bench/README.md)" >&2; exit 1; }
mkdir -p out/bench
trap 'rm -f "$start"' EXIT
cmake --build "$build" --target tetrain_executable bench_machine >out/bench/build.log ||
    { cat out/bench/build.log; exit 1; }
cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
"$build/bench_machine" "$threads" 0.3 --streams |
    sed "s|^{|{\"cpu\": \"$cpu\", \"date\": \"$(date -I)\", |" >"$results"
read=$(sed -n 's/.*"read_gb_s": \([0-9.]*\).*/\1/p' "$results")

for config in $configs; do
    for dtype in $dtypes; do
        for batch in $batches; do
            same="--config=$config --dtype=$dtype --batch=$batch --threads=$threads --start=$start --json"
            round=0
            while [ $round -lt "$rounds" ]; do
                "$build/tetrain" bench/generate.lua $same --read="$read" >>"$results" || exit 1
                for mode in eager compile; do
                    "$python" bench/peers/generate.py $same --mode=$mode 2>/dev/null >>"$results"
                done
                for recipe in $([ "$dtype" = fp32 ] || echo "$recipes"); do
                    "$build/tetrain" bench/generate.lua --config="$config" --dtype="$dtype" --batch="$batch" --json \
                        --threads="$threads" --read="$read" --recipe="$recipe" >>"$results" || exit 1
                done
                round=$((round + 1))
            done
        done
    done
done
"$python" bench/peers/report.py generation "$results" | tee out/bench/generate.txt
[ -z "$keep" ] || cp out/bench/generate.txt "bench/results/$keep.txt"
