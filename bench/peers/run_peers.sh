#!/bin/sh
# Finds the fastest way to run the step in PyTorch on this machine:
#
#     PYTHON=venv/bin/python bench/peers/run_peers.sh [--configs="char baby"] [--dtypes="bf16 fp32"] [--threads=2]
#                                                     [--runs=9] [--out=out/bench/peers.jsonl]
#
# Eager or compiled, fused or written-out attention are tried with glibc's malloc told to keep its memory; the other
# allocators with the fastest of these. Every try is a line of JSON in the output file, which grows; one that fails says
# why.
cd "$(dirname "$0")/../.." || exit 1
configs="char baby gpt2_64 gpt2_256"
dtypes="bf16 fp32"
threads=2
runs=9
out=out/bench/peers.jsonl
for option in "$@"; do
    case $option in
    --configs=*) configs=${option#*=} ;;
    --dtypes=*) dtypes=${option#*=} ;;
    --threads=*) threads=${option#*=} ;;
    --runs=*) runs=${option#*=} ;;
    --out=*) out=${option#*=} ;;
    *) echo "run_peers.sh: unknown option $option" >&2; exit 2 ;;
    esac
done
mkdir -p "$(dirname "$out")"
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
report() { "${PYTHON:-python3}" bench/peers/report.py "$@"; }

# try MODE ATTENTION ALLOCATOR
try() {
    line=$(bench/peers/peer.sh "$3" --config="$config" --dtype="$dtype" --threads="$threads" --runs="$runs" \
        --mode="$1" --attention="$2" --json 2>"$errors")
    report record "$config" "$dtype" "$threads" "$1" "$2" "$3" "$line" "$(tail -n 1 "$errors")" |
        tee -a "$out" | report line
}

for config in $configs; do
    for dtype in $dtypes; do
        for mode in eager compile; do
            for attention in sdpa manual; do try $mode $attention retain; done
        done
        if best=$(report best "$out" "$config" "$dtype" "$threads"); then
            set -- $best
            try "$1" "$2" system
            try "$1" "$2" jemalloc
        fi
    done
done
