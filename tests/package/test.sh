#!/bin/sh
# Another project builds against the install prefix and the build folder: find_package and pkg-config, shared and
# static, C and C++. Two copies of the library work in one process. The exported symbols are the headers' and no others.
# The Debian package unpacks into a tetrain that runs.
#
#     test.sh BUILD        a finished build of tetrain
set -eu
build=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# consume NAME FOLDER PKGCONFIG: builds and runs the consumer with what FOLDER describes.
consume() {
    cmake -S "$here" -B "$work/$1" -DCMAKE_PREFIX_PATH="$2" >"$work/log" 2>&1 &&
        cmake --build "$work/$1" >>"$work/log" 2>&1 ||
        { cat "$work/log"; echo "find_package: $1 failed"; exit 1; }
    export PKG_CONFIG_PATH="$3"
    libdir=$(pkg-config --variable=libdir tetrain)
    for language in c c++; do
        cc -x $language "$here/consumer.c" -x none $(pkg-config --cflags --libs tetrain) -Wl,-rpath,"$libdir" \
            -o "$work/shared"
        "$work/shared" >/dev/null
        cc -x $language "$here/consumer.c" -x none $(pkg-config --cflags tetrain) "$libdir/libtetrain.a" \
            $(pkg-config --static --libs tetrain | sed 's/-ltetrain//') -o "$work/static"
        ! ldd "$work/static" | grep -q libtetrain
        "$work/static" >/dev/null
    done
    echo "$1: find_package and pkg-config, shared and static, C and C++"
}

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix" # the prefix may be moved
consume installed "$work/prefix" "$(dirname "$(find "$work/prefix" -name tetrain.pc)")"
consume uninstalled "$build" "$build"

library=$(find "$work/prefix" -name 'libtetrain.so')
export PKG_CONFIG_PATH="$build"
cc "$here/copy.c" $(pkg-config --cflags --libs tetrain) -ldl -Wl,-rpath,"$build" -o "$work/copy"
"$work/copy" "$library"
echo "two copies of the library in one process"

nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort >"$work/exported"
cat "$here"/../../include/tetrain/*.h | tr '\n' ' ' | sed 's,/\*[^*]*\*\+\([^/*][^*]*\*\+\)*/,,g' | tr ';' '\n' |
    sed -n 's/.*\(TE_API\|TETRAIN_API\) [^(]*[ *]\([a-z_0-9]*\)(.*/\2/p' | sort >"$work/declared"
diff "$work/declared" "$work/exported" || { echo "exported symbols differ from the headers"; exit 1; }
[ "$(wc -l <"$work/declared")" -gt 50 ]
objdump -p "$library" | grep -q "SONAME *libtetrain.so.0" && objdump -p "$library" | grep -q "TETRAIN_0"
echo "exported symbols: $(wc -l <"$work/exported"), those of the headers"

doc=$work/prefix/share/doc/tetrain
for page in README.md ARCHITECTURE.md CONTRIBUTING.md docs/guide.md docs/operations.md bench/README.md; do
    for link in $(grep -o '](\([^)#:]*\)[#)]' "$doc/$page" | sed 's/](//; s/[#)]$//'); do
        [ -e "$(dirname "$doc/$page")/$link" ] || { echo "$page: nothing is at $link"; exit 1; }
    done
done
echo "links of the installed pages lead somewhere"

[ -s "$(find "$work/prefix" -name tetrain.d.lua)" ] && [ -s "$(find "$work/prefix" -name 'tetrain.1')" ]
cd "$work"
cpack -G DEB --config "$build/CPackConfig.cmake" -B "$work/deb" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
package=$(ls deb/tetrain_*.deb)
dpkg -x "$package" root
"$work/root/usr/bin/tetrain" -e 'print(require("te").ones(3))' | grep -q "float32 tensor {3}"
"$work/root/usr/bin/tetrain" train_gpt.lua --help | grep -q -- --preset
dpkg-deb -f "$package" Depends | grep -q libluajit
! dpkg-deb -f "$package" Depends | grep mpi || { echo "the package needs MPI"; exit 1; }
for other in deb/tetrain-mpi_*.deb; do
    [ ! -e "$other" ] || dpkg -x "$other" root
done
echo "package: $(basename "$package"), $(($(stat -c %s "$package") / 1024)) KB; depends on" \
        "$(dpkg-deb -f "$package" Depends)"
