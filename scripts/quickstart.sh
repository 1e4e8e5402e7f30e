#!/bin/sh
# From a fresh Debian 12 to a trained model: installs packages, builds, and trains on the project's own text.
# Arguments go to scripts/train_gpt.lua.
set -eu
cd "$(dirname "$0")/.."
. scripts/packages.sh

install_packages $TETRAIN_BUILD_PACKAGES
cmake --preset release
cmake --build --preset release
exec build/tetrain scripts/train_gpt.lua "$@"
