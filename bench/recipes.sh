#!/bin/sh
# Training quality under every recipe: the same GPT, data and seed, once in bfloat16 and once per recipe.
#
#     bench/recipes.sh --data=input.txt [--steps=2000] [--threads=1] [--recipes="none mxfp8"] [--keep]
#
# The setting is nanogpt-char's with a width of 256. Runs lie in out/recipes/, one folder each; those that were stopped
# go on, finished ones are not run again. Prints final validation losses and times next to bfloat16's (recipes.lua);
# --keep stores the table as bench/results/recipes.txt and the curves as docs/recipes.svg. BUILD is the build folder,
# build unless set.
cd "$(dirname "$0")/.." || exit 1
data=
steps=2000
threads=1
recipes="none delayed current block mxfp8 nvfp4"
keep=
. bench/options.sh
read_options "data steps threads recipes keep?" "$@"
[ -n "$data" ] || { echo "recipes.sh: --data=FILE is missing" >&2; exit 2; }
tetrain=${BUILD:-build}/tetrain
mkdir -p out/recipes

folders=
for recipe in $recipes; do
    out=out/recipes/$recipe
    folders="$folders $out"
    if ls "$out"/checkpoint-*.safetensors >/dev/null 2>&1; then resume=--resume; else resume=; fi
    "$tetrain" scripts/train_gpt.lua --preset=nanogpt-char --n-embd=256 --dtype=bfloat16 --recipe="$recipe" \
        --data="$data" --steps="$steps" --threads="$threads" --eval-interval=500 --sample-tokens=0 --seed=1 \
        --out="$out" $resume || exit 1
done

cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
{
    echo "$cpu, $threads threads, $(date -I)"
    "$tetrain" bench/recipes.lua $folders
} | tee out/recipes/table.txt
"$tetrain" plot $folders --terminal=false --panel=loss --from=200 --smooth=0.95 --svg=out/recipes/recipes.svg || exit 1
if [ -n "$keep" ]; then
    cp out/recipes/table.txt bench/results/recipes.txt
    cp out/recipes/recipes.svg docs/recipes.svg
fi
