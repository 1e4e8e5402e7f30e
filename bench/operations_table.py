#!/usr/bin/env python3
"""The table of bench/operations.sh: operations_table.py OURS THEIRS, two files of JSON lines."""

import json
import statistics
import sys


def fastest(path):
    best = {}
    with open(path) as file:
        for line in map(json.loads, file):
            key = line["dtype"], line["name"], line["size"]
            best[key] = min(line["us"], best.get(key, float("inf")))
    return best


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ours, theirs = fastest(sys.argv[1]), fastest(sys.argv[2])
    rows = sorted(((ours[key] / theirs[key], key) for key in ours if key in theirs), reverse=True)
    if not rows:
        sys.exit("operations_table.py: no case was measured on both sides")
    print("microseconds a call; ratio: tetrain / PyTorch")
    for size in sorted({key[2] for _, key in rows}):
        ratios = [ratio for ratio, key in rows if key[2] == size]
        print("%-10s %3d cases, median ratio %.2f, slower than PyTorch: %d, by more than a fifth: %d" %
              (size, len(ratios), statistics.median(ratios), sum(ratio > 1 for ratio in ratios),
               sum(ratio > 1.2 for ratio in ratios)))
    print("%-6s %-44s %-10s %10s %10s %6s" % ("dtype", "operation", "size", "tetrain", "PyTorch", "ratio"))
    for ratio, key in rows:
        print("%-6s %-44s %-10s %10.1f %10.1f %6.2f" % (*key, ours[key], theirs[key], ratio))
    for key in sorted(set(ours) ^ set(theirs)):
        print("measured on one side only: %s %s %s" % key)


if __name__ == "__main__":
    main()
