#!/bin/sh
# The CPU backend on a 64-bit Arm processor that QEMU plays: cross-compiled against Debian 12's libraries for it, then
# the C tests and the specs, but for those of the CUDA backend, of installing and of commands in documents. Says nothing
# about speed. Needs the packages gcc-aarch64-linux-gnu, qemu-user-static, mmdebstrap, lua-busted and those of
# scripts/packages.sh.
#
#     scripts/check_arm.sh [FOLDER [SPEC…]]   works in FOLDER, otherwise build-arm/, which is kept; SPECs alone
#
# TETRAIN_MIRROR is another mirror than Debian's own. QEMU_CPU=cortex-a72 plays a processor without bfloat16.
set -eu
cd "$(dirname "$0")/.."
for tool in aarch64-linux-gnu-gcc qemu-aarch64-static mmdebstrap busted ninja; do
    command -v $tool >/dev/null || { echo "check_arm.sh: $tool is needed" >&2; exit 2; }
done
folder=${1:-build-arm}
[ $# -eq 0 ] || shift
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
root=$folder/root
libraries=$root/usr/lib/aarch64-linux-gnu

if [ ! -e "$root/usr/include/luajit-2.1" ]; then
    echo "fetching Debian 12's libraries for Arm"
    packages=$(. scripts/packages.sh && echo "$TETRAIN_BUILD_PACKAGES" | tr ' ' '\n' | grep '^lib' | paste -sd,)
    packages=$packages,libc6-dev,libgomp1,lua-busted
    mmdebstrap --variant=extract --architectures=arm64 --include="$packages" bookworm "$root" \
        "${TETRAIN_MIRROR:-http://deb.debian.org/debian}" >"$folder/log" 2>&1 || { tail -n 30 "$folder/log"; exit 1; }
fi

echo "building"
export PKG_CONFIG_SYSROOT_DIR="$root" PKG_CONFIG_LIBDIR="$libraries/pkgconfig:$root/usr/share/pkgconfig"
cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc \
    -DCMAKE_LIBRARY_ARCHITECTURE=aarch64-linux-gnu -DCMAKE_SYSROOT="$root" -DCMAKE_FIND_ROOT_PATH="$root" \
    -DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY \
    -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY -DCMAKE_FIND_ROOT_PATH_MODE_PACKAGE=ONLY \
    "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static;-L;$root" >"$folder/log"
ninja -C "$folder" >"$folder/log" || { tail -n 30 "$folder/log"; exit 1; }

# What busted starts, and what specs start. Modules of busted are those of Arm there.
export TETRAIN="$folder/run" TETRAIN_CACHE="$folder/cache"
cat >"$TETRAIN" <<END
#!/bin/sh
export LUA_CPATH="$libraries/lua/5.1/?.so;;"
exec qemu-aarch64-static -L "$root" "$folder/tetrain" "\$@"
END
chmod +x "$TETRAIN"

failed=0
if [ $# -eq 0 ]; then
    # The simulator of GPUs compiles for this machine, and interrupts are timed.
    ctest --test-dir "$folder" -j "$(nproc)" --output-on-failure \
        -E '^(test_cuda_.*|test_interrupt.*|test_host|package|size)$' || failed=1
    set -- $(find spec -name '*_spec.lua' | grep -v -e '^spec/cuda' -e gpu_check -e readme -e guide | sort)
fi
printf '%s\n' "$@" | xargs -P "$(nproc)" -I FILE timeout 3600 busted --lua="$TETRAIN" -o TAP \
    --filter-out=OpenMP.binds FILE >"$folder/specs" 2>&1 || failed=1 # QEMU has a thread of its own
grep '^not ok' -A 8 "$folder/specs" || true
echo "specs: $(grep -c '^ok' "$folder/specs") passed, $(grep -c '^not ok' "$folder/specs") failed"
exit $failed
