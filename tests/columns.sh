#!/bin/sh
# columns.sh FOLDER: no line of a source file of the project there has more than 120 columns.
set -eu
cd "$1"
long=$(find CMakeLists.txt bench cmake examples include lua scripts spec src tests \
    -path bench/results -prune -o -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.lua' \
    -o -name '*.sh' -o -name '*.py' -o -name '*.cmake' -o -name '*.txt' \) \
    -exec env LC_ALL=C.UTF-8 grep -nHE '^.{121}' {} +) || true
[ -z "$long" ] || { echo "$long"; exit 1; }
