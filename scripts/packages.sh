# Debian packages that tetrain is built and tested with, and how to install those that are missing. To be sourced.

TETRAIN_BUILD_PACKAGES="build-essential cmake ninja-build pkg-config libluajit-5.1-dev libdnnl-dev libjansson-dev"
TETRAIN_BUILD_PACKAGES="$TETRAIN_BUILD_PACKAGES libpcre2-dev libutf8proc-dev libedit-dev"
TETRAIN_TEST_PACKAGES="clang file libomp-dev lua-busted openmpi-bin libopenmpi-dev"

# install_packages NAME…: installs what is not there yet, as root or through sudo.
install_packages() {
    missing=""
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
    done
    [ -z "$missing" ] && return 0
    as_root=""
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "needed packages:$missing (run as root, or install sudo)" >&2; return 1; }
        as_root="sudo"
    fi
    $as_root apt-get update -qq &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
}
