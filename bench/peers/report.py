#!/usr/bin/env python3
"""Reads and prints the JSON lines of the training step benches; run_peers.sh and compare.sh use it.

    report.py record CONFIG DTYPE THREADS MODE ATTENTION ALLOCATOR LINE ERROR   a try as a line of JSON
    report.py line                                                    standard input's tries for people
    report.py best FILE CONFIG DTYPE THREADS        mode, attention and allocator of the fastest try
    report.py same LINE LINE                        whether both systems, started alike, had the same loss
    report.py table FILE                            the comparison, from compare.sh's file
    report.py generation FILE                       the same of generate.sh's
"""

import json
import sys
from statistics import median

from configs import CONFIGS, floor_ms, parameters

# Largest ratio of tetrain's time to PyTorch's that the project accepts: bf16, fp32. Others have to be faster.
TARGETS = {"char": (0.40, 0.50), "baby": (0.50, 0.80), "gpt2_64": (0.60, 0.88), "gpt2_256": (0.65, 0.95)}


def read(path):
    with open(path) as file:
        return [json.loads(line) for line in file if line.strip()]


def record(config, dtype, threads, mode, attention, allocator, line, error):
    try:
        entry = json.loads(line)
    except ValueError:
        entry = {"system": "pytorch", "config": config, "dtype": dtype, "threads": int(threads), "mode": mode,
                 "attention": attention, "failed": error or "no output"}
    entry["allocator"] = allocator
    print(json.dumps(entry))


def line():
    for entry in map(json.loads, sys.stdin):
        how = "%(config)-9s %(dtype)-5s %(mode)-8s %(attention)-7s %(allocator)-9s" % entry
        if "failed" in entry:
            print(how, "failed:", entry["failed"], flush=True)
        else:
            print(how, "%(ms)9.2f ms (%(ms_min).2f to %(ms_max).2f)  %(peak_rss_mib)5.0f MiB" % entry, flush=True)


def best(path, config, dtype, threads):
    tries = [e for e in read(path) if (e["config"], e["dtype"], e["threads"]) == (config, dtype, int(threads))
             and "ms" in e]
    if not tries:
        sys.exit("%s: no try of %s %s on %s threads" % (path, config, dtype, threads))
    fastest = min(tries, key=lambda e: e["ms"])
    print(fastest["mode"], fastest["attention"], fastest["allocator"])


def same(ours, peer):
    """Both made five steps from the same weights on the same tokens. bf16 rounds at other places in each."""
    if not ours or not peer:
        sys.exit("%s did not run" % ("tetrain" if not ours else "PyTorch"))
    a, b = json.loads(ours), json.loads(peer)
    apart = abs(a["loss_5"] - b["loss_5"]) / b["loss_5"]
    verdict = "the same step" if apart < (1e-4 if a["dtype"] == "fp32" else 1e-2) else "NOT THE SAME STEP"
    print("%(config)s %(dtype)s: loss %(loss_5).5f" % a, "and %.5f after five steps," % b["loss_5"], verdict)


def rounds(entries, system):
    """The entries of one system, one per round."""
    return [e for e in entries if e.get("system") == system and "ms" in e]


def row(config, dtype, ours, peer, machine):
    """One line of the table: medians over the rounds; the ratio is that of pairs that ran one after the other."""
    for entry in ours + peer:
        if entry["parameters"] != parameters(CONFIGS[config]):
            sys.exit("%s: %d parameters instead of %d" % (config, entry["parameters"], parameters(CONFIGS[config])))
    ratios = [a["ms"] / b["ms"] for a, b in zip(ours, peer)]
    ms, peer_ms, ratio = median(e["ms"] for e in ours), median(e["ms"] for e in peer), median(ratios)
    target = TARGETS.get(config, (1.0, 1.0))[dtype == "fp32"]
    floor = floor_ms(CONFIGS[config], dtype, machine)
    cpu = median(a["cpu_ms"] / b["cpu_ms"] for a, b in zip(ours, peer))
    return "%-9s %-5s %9.2f %9.2f %6.2f (%.2f to %.2f) %6.2f %-4s %6.2f %7.0f %7.0f %9.2f %4.0f%%  %s" % (
        config, dtype, ms, peer_ms, ratio, min(ratios), max(ratios), target, "met" if ratio <= target else "over", cpu,
        max(e["peak_rss_mib"] for e in ours), max(e["peak_rss_mib"] for e in peer), floor, 100 * floor / ms,
        "%(mode)s %(attention)s %(allocator)s" % peer[0])


def table(path):
    entries = read(path)
    machine = entries[0]
    print("%(cpu)s, %(threads)d threads, %(date)s" % machine)
    print("peaks: float32 %(fp32_gflops).0f and bfloat16 %(bf16_gflops).0f GFLOP/s, memory %(bandwidth_gb_s).0f GB/s"
          % machine)
    print("%-9s %-5s %9s %9s %6s %-14s %6s %-4s %6s %7s %7s %9s %5s  %s" % (
        "config", "dtype", "ours ms", "torch ms", "ratio", "(rounds)", "target", "", "cpu", "MiB", "torch", "floor ms",
        "of it", "fastest PyTorch"))
    for config in CONFIGS:
        for dtype in ("bf16", "fp32"):
            chosen = [e for e in entries[1:] if (e["config"], e["dtype"]) == (config, dtype)]
            ours, peer = rounds(chosen, "tetrain"), rounds(chosen, "pytorch")
            if ours and peer:
                print(row(config, dtype, ours, peer, machine))
    versions = sorted({e["version"] for e in entries if "version" in e})
    print("PyTorch %s; %d rounds in turns" % (", ".join(versions), machine["rounds"]))


def fastest(entries, name):
    return min(entries, key=lambda e: e[name])


def generation(path):
    entries = read(path)
    print("%(cpu)s, %(threads)d threads, %(date)s; memory is read at %(read_gb_s).0f GB/s" % entries[0])
    print("%-9s %-5s %5s %21s %21s %9s %5s  %s" % ("config", "stored", "texts", "prompt, ms: ours/torch",
                                                    "token, ms: ours/torch", "floor ms", "of it",
                                                    "fastest PyTorch, and whether tokens agree"))
    for key in dict.fromkeys((e["config"], e["dtype"], e["batch"]) for e in entries[1:]):
        chosen = [e for e in entries[1:] if (e["config"], e["dtype"], e["batch"]) == key]
        peer = [e for e in chosen if e["system"] == "pytorch"]
        for recipe in dict.fromkeys(e["recipe"] for e in chosen if peer and e["system"] == "tetrain"):
            ours = [e for e in chosen if e.get("recipe") == recipe]
            a, b = fastest(ours, "token_ms"), fastest(peer, "token_ms")
            prompts = fastest(ours, "prompt_ms")["prompt_ms"], fastest(peer, "prompt_ms")["prompt_ms"]
            agree = "the same tokens" if any(e["check"] == a["check"] for e in peer) else "other tokens"
            name = key[1] if recipe == "none" else recipe
            remark = "%s, %s" % (b["mode"], agree) if recipe == "none" else "in %s" % key[1]
            print("%-9s %-5s %5d %8.2f/%-8.2f %4.2f %8.3f/%-8.3f %4.2f %8.3f %4.0f%%  %s" % (
                key[0], name, key[2], *prompts, prompts[0] / prompts[1], a["token_ms"], b["token_ms"],
                a["token_ms"] / b["token_ms"], a["floor_ms"], 100 * a["floor_ms"] / a["token_ms"], remark))


if __name__ == "__main__":
    commands = {"generation": generation, "record": record, "line": line, "best": best, "same": same, "table": table}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
