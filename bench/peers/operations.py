#!/usr/bin/env python3
"""Times the single operations of bench/operations.txt in PyTorch, eager: the peer of bench/operations.lua."""

import argparse
import gc
import json
import pathlib
import re
import time

import torch
from torch.nn import functional as F

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def environment(dtype):
    """What the expressions see: each maker remembers its tensors."""
    made, leaves = {}, []

    def maker(kind, make):
        def get(*key):
            if (kind, key) not in made:
                made[kind, key] = make(*key)
            return made[kind, key]
        return get

    def normal(*shape):
        return torch.randn(shape).to(dtype)

    def leaf(*shape):
        leaves.append(normal(*shape).requires_grad_())
        return leaves[-1]

    def module(name, *sizes):
        result = getattr(torch.nn, name)(*sizes).to(dtype)
        leaves.extend(result.parameters())
        return result

    def back(y, dy=None):
        y.backward(dy)
        for tensor in leaves:
            tensor.grad = None

    def gated(activation, x):
        a, b = x.chunk(2, -1)
        return activation(a) * b

    def attend(q, k, v, is_causal=False):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return {"torch": torch, "F": F, "gated": gated, "back": back, "attend": attend, "causal": True,
            "many": lambda x: [x] * 64,
            "other": torch.bfloat16 if dtype == torch.float32 else torch.float32,
            "r": maker("r", normal), "r2": maker("r2", normal), "w": maker("w", normal), "g": maker("g", leaf),
            "p": maker("p", lambda *shape: (torch.randn(shape).abs() + 0.5).to(dtype)),
            "m": maker("m", lambda *shape: torch.randn(shape) > 0),
            "i": maker("i", lambda n, *shape: torch.randint(0, n, shape)),
            "mod": maker("mod", module)}


def prepared(expression, names):
    """The expression with a name for everything that a maker makes, which is no part of what is timed."""
    def make(match):
        name = "made%d" % len(names)
        names[name] = eval(match.group(0), names)
        return name
    return re.sub(r"\b(?:r2|r|w|g|p|m|i|mod)\([^()]*\)", make, expression)


def time_of(call, seconds):
    for _ in range(3):
        call()
    clock, once = time.perf_counter, float("inf")
    for _ in range(5):
        before = clock()
        call()
        once = min(once, clock() - before)
    calls, best = max(1, int(seconds / 5 / once)), float("inf")
    for _ in range(5):
        before = clock()
        for _ in range(calls):
            call()
        best = min(best, (clock() - before) / calls)
    return best


def cases():
    """Names and the last of the expressions below each."""
    found = {}
    for line in (pathlib.Path(__file__).parent.parent / "operations.txt").read_text().splitlines():
        if line.startswith("    "):
            found[name] = line.strip()
        elif not line.startswith("#"):
            name = line
    return found.items()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of names, with | between them")
    parser.add_argument("--dtypes", default="fp32 bf16")
    parser.add_argument("--sizes", default="16x64 1024x768 4096x3072")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.03)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    for dtype in options.dtypes.split():
        for name, expression in cases():
            if not any(part in name for part in options.only.split("|")):
                continue
            for size in options.sizes.split() if re.search(r"\b[RC]\b", expression) else ["-"]:
                if size != "-":
                    rows, columns = size.split("x")
                    filled = re.sub(r"\bC\b", columns, re.sub(r"\bR\b", rows, expression))
                else:
                    filled = expression
                names = environment(NAMES[dtype])
                call = eval("lambda: " + prepared(filled, names), names)
                gc.collect()
                with torch.set_grad_enabled("backward" in name):
                    us = time_of(call, options.seconds) * 1e6
                print(json.dumps({"name": name, "size": size, "dtype": dtype, "us": us}), flush=True)


if __name__ == "__main__":
    main()
