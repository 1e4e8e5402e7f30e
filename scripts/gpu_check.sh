#!/bin/sh
# Tests and measures tetrain on a GPU, from machines that have none.
#
#     gpu_check.sh kernels [FOLDER]
#                                  from a build (in $BUILD, default build/): the kernels that `run` needs, compiled for
#                                  $TARGET (default sm_90a), in FOLDER (default $BUILD/gpu-kernels), the most needed
#                                  first, for at most $SECONDS_TO_COMPILE (default 1200). Without them the GPU waits for
#                                  its compiler half of the time
#     gpu_check.sh pack [FILE]     from a build: one archive with all that is needed, and these kernels where they are
#     gpu_check.sh run [--quick] [REPORT]
#                                  in the unpacked archive, on a machine with an NVIDIA driver and the CUDA 13
#                                  libraries: specs, training, sanitizer, benches, and what became of each aim; writes
#                                  REPORT (default gpu_report.txt). --quick: benches of small sizes, which only show
#                                  that they run
#
# `run` exits 0 when all passed, 1 when something failed, 3 when there is no usable GPU. It keeps under $SECONDS_TO_RUN
# (default 520): every step has a limit, and steps that no time is left for are reported as left out.
set -u
here=$(cd "$(dirname "$0")" && pwd)
bin=$here/bin
# The specs that compare the device with the CPU; they come first.
made_of="spec/cuda_spec.lua spec/cuda/attention_spec.lua spec/cuda/emission_spec.lua spec/cuda/parameters_spec.lua
    spec/cuda/reports_spec.lua spec/cuda/host_spec.lua spec/cuda/packed_spec.lua spec/recipe/faster_spec.lua
    spec/graph/*_spec.lua spec/train/steps_spec.lua spec/models/recorded_spec.lua"

# from_here PATH: from the folder that the user stands in, which is left later on.
from_here() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }

# --- kernels ----------------------------------------------------------------------------------------------------------

# Everything runs once on the made-up GPU: benches and training of full size on one that does nothing, specs in full.
# Its cache then has the source of each kernel under the name that its binary has on a card with this NVRTC. What is
# made first is compiled first: the benches' steps, which wait for most, then training, kernels one by one, and the
# specs' many small shapes.
kernels() {
    root=$(dirname "$here")
    build=$(cd "${BUILD:-$root/build}" && pwd) || exit 2
    folder=$(from_here "${1:-$build/gpu-kernels}")
    nvrtc=$(ls /usr/local/cuda/lib64/libnvrtc.so.13 "${CUDA_HOME:-/usr/local/cuda}"/lib64/libnvrtc.so.13 2>/dev/null |
        head -n 1)
    for part in tetrain cuda_compile cuda_fake/libcuda.so.1; do
        [ -e "$build/$part" ] || { echo "gpu_check.sh: $build/$part is missing; build first" >&2; exit 2; }
    done
    [ -n "$nvrtc" ] || { echo "gpu_check.sh: there is no NVRTC 13" >&2; exit 2; }
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    export TETRAIN_CUDA_LIBRARIES="$build/cuda_fake" TETRAIN_CACHE="$work/sources" TETRAIN="$build/tetrain"
    cd "$root" || exit 2
    here=$root bin=$build
    export TE_FAKE_IDLE=1
    idle_bench "gpu_steps.lua --once"
    repeat_training float32 >/dev/null 2>&1
    repeat_training bfloat16 >/dev/null 2>&1
    idle_bench "gpu.lua --once"
    idle_bench "gpu_sizes.lua --once"
    idle_bench "gpu_steps.lua --quick"
    unset TE_FAKE_IDLE
    printf '%s\n' $made_of |
        TE_DEVICE=cpu OMP_NUM_THREADS=1 xargs -P "$(nproc)" -I FILE busted --lua="$TETRAIN" -o TAP FILE |
        grep '^not ok'
    mkdir -p "$folder"
    "$build/cuda_compile" "$nvrtc" "$TETRAIN_CACHE" "${TARGET:-sm_90a}" 100000 "$(nproc)" "$folder" \
        "${SECONDS_TO_COMPILE:-1200}"
    echo "$folder: $(ls "$folder" | wc -l) kernels, $(du -sm "$folder" | cut -f 1) MiB"
}

idle_bench() { "$TETRAIN" bench/$1 >"$work/log" 2>&1 || grep failed "$work/log"; }

# --- pack -------------------------------------------------------------------------------------------------------------

# Libraries of the executable, except those that come with every system: they must fit its kernel and loader.
needed_libraries() {
    ldd "$1" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' |
        grep -v -E '/(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux-x86-64)\.so'
}

pack() {
    root=$(dirname "$here")
    build=${BUILD:-$root/build}
    file=${1:-$build/tetrain-gpu-check.tar.gz}
    for part in tetrain libtetrain_cuda.so; do
        [ -e "$build/$part" ] || { echo "gpu_check.sh: $build/$part is missing; build first" >&2; exit 2; }
    done
    stage=$(mktemp -d)
    trap 'rm -rf "$stage"' EXIT
    bundle=$stage/tetrain-gpu-check
    mkdir -p "$bundle/bin" "$bundle/lib" "$bundle/lua" "$bundle/clua"
    cp "$build/tetrain" "$build/libtetrain_cuda.so" "$bundle/bin/"
    [ -e "$build/test_cuda_backend_collectives" ] &&
        cp "$build/test_cuda_backend_collectives" "$bundle/bin/test_collectives"
    needed_libraries "$build/tetrain" | while read -r library; do cp -L "$library" "$bundle/lib/"; done
    cp "$0" "$bundle/gpu_check.sh"
    cp "$root/README.md" "$root/ARCHITECTURE.md" "$bundle/" 2>/dev/null
    mkdir -p "$bundle/bench"
    cp -r "$root/spec" "$root/scripts" "$bundle/"
    cp "$root"/bench/*.lua "$root/bench/peers/gpu.py" "$bundle/bench/"
    [ -d "$build/gpu-kernels" ] && cp -r "$build/gpu-kernels" "$bundle/kernels"
    # busted and what it is made of
    for module in busted cliargs luassert mediator pl say system term; do
        for found in /usr/share/lua/5.1/$module /usr/share/lua/5.1/$module.lua; do
            [ -e "$found" ] && cp -r "$found" "$bundle/lua/"
        done
    done
    for module in lfs.so system term; do
        cp -rL "/usr/lib/$(uname -m)-linux-gnu/lua/5.1/$module" "$bundle/clua/" || exit 2
    done
    echo "require 'busted.runner' { standalone = false }" >"$bundle/lua/busted_run.lua"
    strip "$bundle"/bin/* 2>/dev/null
    tar -C "$stage" -czf "$file" tetrain-gpu-check || exit 2
    bytes=$(wc -c <"$file")
    echo "$file: $((bytes / 1048576)) MiB"
    [ "$bytes" -le $((60 * 1048576)) ] || { echo "gpu_check.sh: larger than 60 MiB" >&2; exit 1; }
}

# --- run --------------------------------------------------------------------------------------------------------------

# left: seconds until the report must be finished.
left() { echo $((deadline - $(date +%s))); }

say() { echo "$*" | tee -a "$report"; }

# step NAME LIMIT COMMAND…: a function of this file, run in a process of its own; its output goes to the report, one
# line says how it ended.
step() {
    name=$1
    limit=$2
    shift 2
    remaining=$(left)
    [ "$limit" -gt "$remaining" ] && limit=$remaining
    if [ "$limit" -lt 5 ]; then
        echo "LEFT OUT  $name" >>"$summary"
        return
    fi
    say "== $name"
    started=$(date +%s)
    timeout "$limit" "$here/gpu_check.sh" "$@" >>"$report" 2>&1
    code=$?
    verdict=passed
    [ "$code" -eq 0 ] || verdict="FAILED ($code)"
    echo "$verdict  $name, $(($(date +%s) - started)) s" | tee -a "$summary"
    [ "$code" -eq 0 ] || failed=$((failed + 1))
}

tetrain() { "$bin/tetrain" "$@"; }

# What this machine lacks of the executable's libraries, from the bundle; its own ones come first, for NVIDIA's need
# them.
find_libraries() {
    mkdir -p "$work/lib"
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$work/lib"
    for round in 1 2 3; do
        ldd "$here/bin/tetrain" | sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | while read -r name; do
            ln -sf "$here/lib/$name" "$work/lib/$name"
        done
    done
}

# NVIDIA's libraries from Python's packages, where python3 has some and nothing says which Python is meant: before those
# of the system, so that PyTorch is measured with the same ones.
find_python() {
    python=${PYTHON:-python3}
    prefix=$("$python" -c 'import sys; print(sys.prefix)' 2>/dev/null)
    [ -n "$prefix" ] && export VIRTUAL_ENV="${VIRTUAL_ENV:-$prefix}"
    for folder in "${VIRTUAL_ENV:-/nowhere}"/lib/python3*/site-packages/nvidia/*/lib; do
        [ -d "$folder" ] && LD_LIBRARY_PATH=$folder:$LD_LIBRARY_PATH
    done
    export python LD_LIBRARY_PATH
}

# What the device and its libraries are, and what they decline of small steps: the kernels that stand in, and why.
first_look() {
    tetrain -e 'print(require("te")._core.device_info("cuda"))' || return 1
    TE_TRACE=dispatch timeout 30 "$bin/tetrain" bench/gpu_steps.lua --quick >"$work/look" 2>&1
    code=$?
    grep '^BENCH failed' "$work/look"
    grep '^dispatch: ' "$work/look" | grep -E 'two passes|declines|own kernels|decoded|cuDNN' |
        sed -E 's/[0-9]+x[0-9]+x[0-9]+ x[0-9]+/MxNxK/; s/from [0-9]+ x [0-9]+ to.*/to whole multiples/
            s/[0-9]+ bytes/N bytes/; s/ \([0-9.e-]+ ms fused.*//' |
        sort | uniq -c | sort -rn | head -n 40
    return $code
}

# together: the commands that come as lines, side by side, for most of their time goes to compiling and to the CPU that
# they compare with. What fails is printed, whole.
together() {
    mkdir -p "$work/together"
    tr '\n' '\0' | OMP_NUM_THREADS=2 xargs -0 -P "$(nproc)" -I COMMAND "$here/gpu_check.sh" apart COMMAND
}

apart() {
    log=$(mktemp "$work/together/XXXXXX")
    sh -c "$1" >"$log" 2>&1 && return 0
    code=$?
    echo "FAILED ($code): $1"
    grep -v '^ok ' "$log" | head -n 60
    return 1
}

# specs DEVICE FILE…
specs() {
    device=$1
    shift
    for file in "$@"; do
        echo "TE_DEVICE=$device TETRAIN='$bin/tetrain' '$bin/tetrain' lua/busted_run.lua -o TAP '$file'"
    done | together
}

# What compares the device with the CPU; and what PyTorch compiles meanwhile, for its benches to find.
against_cpu() {
    export TETRAIN_RANDOM_SEQUENTIALS=16 # each has kernels of its own, which are compiled here
    {
        "$python" -c 'import torch' 2>/dev/null && for part in gpt2 llama generation small gpt2_xl_block; do
            echo "'$python' bench/gpu.py --once --parts=$part $1 || true"
        done
        for file in $made_of; do
            echo "TE_DEVICE=cpu TETRAIN='$bin/tetrain' '$bin/tetrain' lua/busted_run.lua -o TAP '$file'"
        done
        tetrain bench/gpu_sizes.lua --list | while read -r name; do
            echo "'$bin/tetrain' bench/gpu_sizes.lua $1 '$name'"
            case $name in attention*) echo "TETRAIN_CUDNN=0 '$bin/tetrain' bench/gpu_sizes.lua $1 '$name'" ;; esac
            case $name in
            attention*bias* | attention*mask* | attention*sinks* | attention*last*)
                echo "TETRAIN_CUDNN=all '$bin/tetrain' bench/gpu_sizes.lua $1 '$name'"
                ;;
            esac
        done
    } | together
}

repeats() {
    for dtype in float32 bfloat16; do
        echo "work='$work/$dtype' ./gpu_check.sh repeat_training $dtype $1"
    done | together
}

# sanitize TOOL: every operation, and own kernels for attention.
sanitize() {
    check="compute-sanitizer --tool $1 --error-exitcode 9 --print-limit 5 '$bin/tetrain'"
    {
        tetrain bench/gpu_touch.lua --list | xargs -n 9 echo "$check bench/gpu_touch.lua"
        tetrain bench/gpu_sizes.lua --list | grep attention | while read -r name; do
            echo "TETRAIN_CUDNN=0 $check bench/gpu_sizes.lua --quick '$name'"
        done
    } | together
}

# The same training in recorded steps, twice, and in plain ones: the files of metrics agree in every loss to the last
# digit.
repeat_training() {
    mkdir -p "$work"
    rm -rf "$work/first" "$work/second" "$work/plain"
    steps=60 sizes="--n-layer=2 --n-head=4 --n-embd=64 --block=64 --batch=8"
    [ "${2:-}" = --quick ] && steps=8 sizes="--n-layer=1 --n-head=2 --n-embd=32 --block=16 --batch=2"
    for name in first second plain; do
        graph=true
        [ "$name" = plain ] && graph=false
        tetrain "$here/scripts/train_gpt.lua" --device=cuda --data="$here/ARCHITECTURE.md" \
            --out="$work/$name" --steps=$steps $sizes --dtype="$1" --eval-interval=$steps --eval-batches=2 \
            --sample-tokens=0 --warmup=5 --graph=$graph || return 1
        grep -o '"loss":[^,}]*' "$work/$name/metrics.jsonl" >"$work/$name.losses"
    done
    [ -s "$work/first.losses" ] && cmp "$work/first.losses" "$work/second.losses" &&
        cmp "$work/first.losses" "$work/plain.losses"
}

# What NCCL does for a group of one process.
collectives() { "$bin/test_collectives" --card; }

# The kernels of tokens in a graph: how many of some 400, microseconds each and together, the dearest first.
token_kernels() {
    ncu --clock-control none --cache-control none --metrics gpu__time_duration.sum --csv --launch-skip 900 \
        --launch-count 400 "$bin/tetrain" bench/gpu_token.lua >"$work/ncu" 2>&1
    awk -F '","' '$13 == "gpu__time_duration.sum" {
        gsub(/[",]/, "", $15)
        n[$5 " " $9]++
        us[$5 " " $9] += $15 / 1e3
    }
    END { for (k in n) printf "%8.1f us = %3d x %6.2f  %s\n", us[k], n[k], us[k] / n[k], k }' "$work/ncu" |
        sort -rn >"$work/token"
    head -n 20 "$work/token"
    [ -s "$work/token" ] && return 0
    tail -n 5 "$work/ncu"
    grep -q ERR_NVGPUCTRPERM "$work/ncu" # where nobody may read counters, that is how it is
}

peer() { "$python" "$here/bench/gpu.py" "$@"; }

run() {
    quick=
    [ "${1:-}" = --quick ] && { quick=--quick; shift; }
    report=$(from_here "${1:-gpu_report.txt}")
    deadline=$(($(date +%s) + ${SECONDS_TO_RUN:-520}))
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    summary=$work/summary
    failed=0
    : >"$summary"
    find_libraries
    export work here bin LUA_PATH="$here/lua/?.lua;$here/lua/?/init.lua;$here/?.lua;;" LUA_CPATH="$here/clua/?.so;;"
    export TETRAIN_CACHE="${TETRAIN_CACHE:-$work/cache}"
    mkdir -p "$TETRAIN_CACHE"
    [ -d "$here/kernels" ] && cp -r "$here/kernels/." "$TETRAIN_CACHE/"
    PATH=$PATH:/usr/local/cuda/bin
    cd "$here" || exit 2
    find_python
    reason=$(tetrain -e 'local d, r = require("te").devices() if not d[2] then print(r) end') || exit 1
    if [ -n "$reason" ]; then
        echo "no usable GPU: $reason"
        exit 3
    fi
    echo "tetrain $(tetrain --version), $(uname -srm), $(date -u)" >"$report"
    { nvidia-smi || true; } >>"$report" 2>&1

    # Most telling first; the last ones get the time that is left.
    step "a first look" 40 first_look
    step "benches of steps" 100 tetrain bench/gpu_steps.lua $quick
    step "benches of kernels" 80 tetrain bench/gpu.lua $quick
    step "every operation against the CPU" 150 against_cpu "$quick"
    step "training repeats bit for bit" 40 repeats "$quick"
    if command -v ncu >/dev/null; then
        step "kernels of a token" 40 token_kernels
    else
        echo "LEFT OUT  kernels of a token: no ncu" >>"$summary"
    fi
    if [ -e "$bin/test_collectives" ]; then
        step "collectives of one process" 30 collectives
    fi
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        step "benches of PyTorch" 130 peer $quick
    else
        echo "LEFT OUT  benches of PyTorch: no $python with a PyTorch that sees a GPU" >>"$summary"
    fi
    if command -v compute-sanitizer >/dev/null; then
        step "memcheck" 60 sanitize memcheck
        step "racecheck" 90 sanitize racecheck
    else
        echo "LEFT OUT  memcheck, racecheck: no compute-sanitizer" >>"$summary"
    fi
    step "specs on the device" 200 specs cuda spec/autograd/*_spec.lua spec/optim/*_spec.lua spec/module_spec.lua \
        spec/sequential_spec.lua spec/tensor_spec.lua spec/models/*_spec.lua spec/ops_spec.lua spec/ops/*_spec.lua \
        spec/recipe/*_spec.lua spec/fuser/*_spec.lua
    # The last lines are whole steps, and of those GPT-2's.
    say "== summary"
    cat "$summary" >>"$report"
    grep '^BENCH ' "$report" | sed 's/^BENCH //' >"$work/all"
    {
        grep -v ' step, ' "$work/all"
        grep ' step, ' "$work/all" | grep -v 'GPT-2 124M'
        grep 'GPT-2 124M.* step, ' "$work/all"
    } >"$work/benches"
    tee -a "$report" <"$work/benches"
    say "== aims"
    tetrain bench/gpu_aims.lua "$report" >"$work/aims" || failed=$((failed + 1))
    tee -a "$report" <"$work/aims"
    say "$failed steps failed; report in $report"
    [ "$failed" -eq 0 ]
}

case ${1:-} in
pack) shift; pack "$@" ;;
run) shift; run "$@" ;;
kernels) shift; kernels "$@" ;;
# a step of run
specs | against_cpu | repeats | collectives | token_kernels | apart | repeat_training | sanitize | tetrain | peer | \
    first_look) "$@" ;;
*) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
