#!/bin/sh
# Runs train_step.py on top of a memory allocator:
#
#     PYTHON=venv/bin/python bench/peers/peer.sh system|retain|jemalloc --config=char …
#
# system is glibc as it comes. retain is glibc told to keep what was freed and to use huge pages: large buffers are not
# given back to the kernel and faulted in again in every step. jemalloc has the settings that PyTorch's tuning guide
# recommends; JEMALLOC names the library where the linker does not know it. Status 3: there is no such allocator here.
allocator=$1
shift
case $allocator in
system) ;;
retain)
    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 THP_MEM_ALLOC_ENABLE=1
    ;;
jemalloc)
    library=${JEMALLOC:-$(/sbin/ldconfig -p | sed -n 's/.*libjemalloc\.so\.2 .*=> //p' | head -n 1)}
    [ -e "$library" ] || { echo "libjemalloc.so.2 is not installed" >&2; exit 3; }
    export LD_PRELOAD="$library" THP_MEM_ALLOC_ENABLE=1
    export MALLOC_CONF=oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1
    ;;
*)
    echo "unknown allocator: $allocator" >&2
    exit 2
    ;;
esac
exec "${PYTHON:-python3}" "$(dirname "$0")/train_step.py" "$@"
