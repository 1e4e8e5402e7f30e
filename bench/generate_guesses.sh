#!/bin/sh
# Guessed tokens checked in one pass: what a pass over several tokens costs, and what generation takes with guesses and
# without, in tetrain and in Transformers, in turns.
#
#     PYTHON=venv/bin/python bench/generate_guesses.sh [--rounds=2] [--threads=2] [--keep=NAME]
#
# How many guesses stay depends on what a model has learnt, so two small ones are trained first, for a few minutes, on
# ../shared/data/tinyshakespeare.txt (DATA): one of 19 million parameters and one of 0.4 million, by characters. They
# stay in out/bench. --keep stores the tables as bench/results/NAME.txt. Without a PYTHON that has transformers its
# lines are left out. BUILD is the build folder, build unless set.
cd "$(dirname "$0")/.." || exit 1
rounds=2
threads=2
keep=
. bench/options.sh
read_options "rounds threads keep" "$@"
tetrain=${BUILD:-build}/tetrain
python=${PYTHON:-python3}
data=${DATA:-../shared/data/tinyshakespeare.txt}
out=out/bench/guesses
mkdir -p "$out"

# train NAME: a run with these options, unless it is there.
train() {
    name=$1
    shift
    [ -d "$out/$name" ] || "$tetrain" train --data="$data" --out="$out/$name" --block=256 --batch=8 --warmup=20 \
        --eval-batches=2 --sample-tokens=0 --threads="$threads" "$@" || exit 1
    [ -d "$out/hf-$name" ] || "$tetrain" export --out="$out/$name" --to="$out/hf-$name" || exit 1
}
train target --n-layer=6 --n-head=8 --n-embd=512 --steps=110 --lr=0.001 --dtype=bfloat16 --eval-interval=110
train draft --n-layer=2 --n-head=4 --n-embd=128 --steps=500 --lr=0.002 --eval-interval=500

measure() {
    cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
    echo "$cpu, $threads threads, $(date -I), load $(cut -d ' ' -f 1 /proc/loadavg)"
    "$tetrain" bench/generate_rows.lua --threads="$threads"
    for dtype in float32 bfloat16; do
        for temperature in 0 0.8; do
            round=0
            while [ $round -lt "$rounds" ]; do
                echo "$dtype, temperature $temperature"
                "$tetrain" bench/generate_guesses.lua --out="$out/target" --assistant="$out/draft" --dtype=$dtype \
                    --threads="$threads" --temperature=$temperature --rounds=4 --ids="$out/ids.safetensors" || exit 1
                "$python" -c "import transformers" 2>/dev/null &&
                    "$python" bench/peers/guesses.py --model="$out/hf-target" --assistant="$out/hf-draft" --rounds=2 \
                        --ids="$out/ids.safetensors" --dtype=$dtype --threads="$threads" --temperature=$temperature \
                        2>/dev/null
                round=$((round + 1))
            done
        done
    done
}
measure | tee "$out/table.txt"
[ -z "$keep" ] || cp "$out/table.txt" "bench/results/$keep.txt"
