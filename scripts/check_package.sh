#!/bin/sh
# The Debian package on a clean Debian 12: made from a finished build, installed in a chroot with what it depends on,
# run, and used by a C program through pkg-config. Needs root, debootstrap and a mirror.
#
#     scripts/check_package.sh [BUILD]        the folder of the build, otherwise build/
#
# TETRAIN_MIRROR is another mirror than Debian's own; TETRAIN_CHROOT a folder with a clean system, which is copied
# instead of made.
set -eu
cd "$(dirname "$0")/.."
build=$(cd "${1:-build}" && pwd)
mirror=${TETRAIN_MIRROR:-http://deb.debian.org/debian}
if [ "$(id -u)" -ne 0 ] || { [ -z "${TETRAIN_CHROOT:-}" ] && ! command -v debootstrap >/dev/null; }; then
    echo "check_package.sh: root and debootstrap are needed" >&2
    exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

inside() {
    chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C \
        DEBIAN_FRONTEND=noninteractive "$@"
}
step() { printf '%s\n' "$1"; }
install() {
    inside apt-get install -y -qq --no-install-recommends "$@" >"$work/log" 2>&1 || { tail -n 30 "$work/log"; exit 1; }
}

step "making the package"
(cd "$work" && cpack -G DEB --config "$build/CPackConfig.cmake" -B "$work/package" >"$work/log" 2>&1) ||
    { tail -n 30 "$work/log"; exit 1; }

if [ -n "${TETRAIN_CHROOT:-}" ]; then
    step "copying $TETRAIN_CHROOT"
    cp -a "$TETRAIN_CHROOT" "$root"
else
    step "making a Debian 12 from $mirror"
    debootstrap --variant=minbase bookworm "$root" "$mirror" >"$work/log" 2>&1 || { tail -n 30 "$work/log"; exit 1; }
fi
! inside sh -c 'command -v tetrain' || { echo "this system has tetrain already"; exit 1; }

step "installing it"
cp "$work"/package/tetrain_*.deb "$root/tmp/tetrain.deb"
inside apt-get update -qq >"$work/log" 2>&1 || { tail -n 30 "$work/log"; exit 1; }
install /tmp/tetrain.deb

step "running it"
[ "$(inside tetrain -e 'print(te.ones { 2 })')" = "$(printf 'float32 tensor {2}\n{1, 1}')" ]
inside tetrain doctor
inside tetrain /usr/share/tetrain/scripts/examples/residual_branches.lua >/dev/null
inside tetrain -e 'local m = te.Sequential(te.Linear(64, 64), te.GELU()) m(te.ones { 512, 64 }):sum():backward()'

step "embedding it"
install gcc libc6-dev pkg-config
sed -n '/^```c$/,/^```$/{/^```/!p}' README.md >"$root/tmp/host.c"
inside sh -c 'cc -std=c11 -Wall -Werror /tmp/host.c $(pkg-config --cflags --libs tetrain) -o /tmp/host && /tmp/host'
inside sh -c 'cc -std=c11 /usr/share/doc/tetrain/examples/embed/embed.c \
        $(pkg-config --cflags --libs tetrain) -o /tmp/embed &&
    cd /usr/share/doc/tetrain/examples/embed && /tmp/embed'

step "removing it"
inside apt-get purge -y -qq tetrain >"$work/log" 2>&1 || { tail -n 30 "$work/log"; exit 1; }
[ -z "$(inside find /usr -name '*tetrain*')" ] || { echo "left behind:"; inside find /usr -name '*tetrain*'; exit 1; }
echo "the package installs, runs, serves a C program and goes"
