#!/usr/bin/env python3
"""The table of bench/fuser.sh from its JSON lines, and the check that both sides do the same work.

    fuser_table.py table FILE      one row per case: times, ratios, bytes; unf/fus is the median of the ratios of steps
                                   that ran one after the other
    fuser_table.py same FILE       fails unless the norms of results and gradients agree
"""

import json
import statistics
import sys


def cases(path):
    """Medians by case (model, dtype, width, tokens, threads), mode and field, in the order of the file."""
    rows = {}
    with open(path) as file:
        for line in map(json.loads, file):
            key = tuple(line[name] for name in ("model", "dtype", "width", "tokens", "threads"))
            rows.setdefault(key, {}).setdefault(line["mode"], []).append(line)
    return {key: {mode: {name: statistics.median(line[name] for line in lines)
                         for name in ("ms", "ratio", "bytes", "plan_bytes", "at_most", "y_norm", "grad_norm")
                         if name in lines[0]}
                  for mode, lines in modes.items()} for key, modes in rows.items()}


def table(path):
    head = ("model", "dtype", "width", "tokens", "threads", "fused", "unfused", "eager", "compile", "unf/fus",
            "at most", "eag/fus", "com/fus", "moved", "plan", "moved/plan", "unfused MB")
    print("times in ms, bytes of the fused step in MB")
    print(("%-6s %-5s %5s %6s %7s" + " %8s" * 4 + " %7s" * 4 + " %8s %8s %10s %10s") % head)
    for key, modes in cases(path).items():
        fused, unfused = modes["fused"], modes["unfused"]
        peers = [modes.get(mode, {}).get("ms") for mode in ("eager", "compile")]
        times = [fused["ms"], unfused["ms"]] + peers
        cells = ["%8.3f" % t if t else "%8s" % "-" for t in times]
        ratios = [fused["ratio"], unfused.get("at_most")] + [t / fused["ms"] if t else None for t in peers]
        cells += ["%7.2f" % r if r else "%7s" % "-" for r in ratios]
        cells += ["%8.2f" % (fused["bytes"] / 1e6), "%8.2f" % (fused["plan_bytes"] / 1e6),
                  "%10.3f" % (fused["bytes"] / fused["plan_bytes"]), "%10.2f" % (unfused["bytes"] / 1e6)]
        print("%-6s %-5s %5d %6d %7d" % key, *cells)


def same(path):
    for key, modes in cases(path).items():
        mine, theirs = modes["fused"], modes["eager"]
        limit = 2e-2 if key[1] == "bf16" else 1e-5
        for name in ("y_norm", "grad_norm"):
            if not abs(mine[name] - theirs[name]) <= limit * theirs[name]:
                sys.exit("%s %s: %s is %.7g in tetrain and %.7g in PyTorch"
                         % (*key[:2], name, mine[name], theirs[name]))
        print("%s %s: norm of the result %.7g and %.7g, of all gradients %.7g and %.7g: the same work" %
              (*key[:2], mine["y_norm"], theirs["y_norm"], mine["grad_norm"], theirs["grad_norm"]))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("table", "same"):
        sys.exit(__doc__)
    {"table": table, "same": same}[sys.argv[1]](sys.argv[2])
