#!/bin/sh
# layers.sh ROOT: no file includes what its layer does not know (ARCHITECTURE.md, "Layers"). Prints those that do, but
# for exceptions that say what they are for: #include "../core/nearest.h" /* of the engine's insides, this alone */
set -eu
cd "$1"
found=0

# refuse FOLDER PATTERN: includes under FOLDER that match PATTERN are mistakes.
refuse() {
    if grep -rnE "^ *#include [\"<]($2)" --include='*.[ch]' --include='*.cu' --include='*.cuh' "$1" |
        grep -v 'alone \*/$'; then
        found=1
    fi
}

refuse src/core '(\.\./)*(kernels/(cpu|cuda|mpi|cuda_sim|cuda_fake)|lua_bindings|tetrain/tetrain\.h)'
refuse src/core '(lua|lauxlib|cuda|nccl|mpi)'
refuse src/kernels '(\.\./)*(core|lua_bindings)/|lua|lauxlib|tetrain/(te|tetrain|recipe|comm)\.h'
refuse src/kernels/cpu '(\.\./)*(cuda|mpi)/'
refuse src/kernels/cuda '(\.\./)*(cpu|mpi)/'
refuse src/lua_bindings '(kernels/(cpu|cuda|mpi))'
refuse src/tetrain '(\.\./)*(core|kernels|lua_bindings)/'
refuse include '(core|kernels|lua_bindings)/'
exit $found
