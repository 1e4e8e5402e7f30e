#!/bin/sh
# From a fresh Debian 12 to a trained model: installs packages, builds, and trains on the project's own text.
# Arguments go to scripts/train_gpt.lua.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/packages.sh"

install_packages $TETRAIN_BUILD_PACKAGES
(cd "$root" && cmake --preset release && cmake --build --preset release)
exec "$root/build/tetrain" "$root/scripts/train_gpt.lua" "$@"
