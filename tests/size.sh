#!/bin/sh
# size.sh STRIP EXECUTABLE LIMIT: the executable without its symbols has at most so many bytes.
set -eu
stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
"$1" -o "$stripped" "$2"
bytes=$(wc -c <"$stripped")
echo "$bytes bytes of $3"
[ "$bytes" -le "$3" ]
