#!/usr/bin/env python3
"""Times the single operations of bench/operations.txt in PyTorch, eager: the peer of bench/operations.lua."""

import argparse
import functools
import gc
import json
import pathlib
import re
import sys
import time
import types

import torch
from torch.nn import functional as F

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def library(device):
    """PyTorch as the expressions see it: what it makes is on the device. A default device would slow every call."""
    makers = {name: functools.partial(getattr(torch, name), device=device)
              for name in ("arange", "zeros", "rand", "randn", "randint")}
    return torch if device == "cpu" else types.SimpleNamespace(**{**vars(torch), **makers})


def environment(dtype, device):
    """What the expressions see: each maker remembers its tensors."""
    made, leaves = {}, []

    def maker(kind, make):
        def get(*key):
            if (kind, key) not in made:
                made[kind, key] = make(*key)
            return made[kind, key]
        return get

    def normal(*shape):
        return torch.randn(shape, device=device).to(dtype)

    def leaf(*shape):
        leaves.append(normal(*shape).requires_grad_())
        return leaves[-1]

    def module(name, *sizes):
        result = getattr(torch.nn, name)(*sizes).to(device, dtype)
        leaves.extend(result.parameters())
        return result

    def back(y, dy=None):
        y.backward(dy)
        for tensor in leaves:
            tensor.grad = None

    def gated(activation, x):
        a, b = x.chunk(2, -1)
        return activation(a) * b

    def attend(q, k, v, is_causal=False, dropout_p=0.0, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)

    return {"torch": library(device), "F": F, "gated": gated, "back": back, "attend": attend,
            "causal": True, "whole": False,
            "many": lambda x: [x] * 64,
            "other": torch.bfloat16 if dtype == torch.float32 else torch.float32,
            "r": maker("r", normal), "r2": maker("r2", normal), "w": maker("w", normal), "g": maker("g", leaf),
            "p": maker("p", lambda *shape: (torch.randn(shape, device=device).abs() + 0.5).to(dtype)),
            "m": maker("m", lambda *shape: torch.randn(shape, device=device) > 0),
            "i": maker("i", lambda n, *shape: torch.randint(0, n, shape, device=device)),
            "mod": maker("mod", module)}


def prepared(expression, names):
    """The expression with a name for everything that a maker makes, which is no part of what is timed."""
    def make(match):
        name = "made%d" % len(names)
        names[name] = eval(match.group(0), names)
        return name
    return re.sub(r"\b(?:r2|r|w|g|p|m|i|mod)\([^()]*\)", make, expression)


def settle(device):
    """Waits until a device that works on its own has finished."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def fastest(call, calls, seconds, device):
    """The time of a call in the fastest of five rounds of `calls`, or of fewer where these take long."""
    clock, best, rounds = time.perf_counter, float("inf"), 0
    enough = clock() + 10 * seconds
    while rounds < 5 and (rounds == 0 or clock() < enough):
        before = clock()
        for _ in range(calls):
            call()
        settle(device)
        best, rounds = min(best, (clock() - before) / calls), rounds + 1
    return best


def time_of(call, seconds, device):
    for _ in range(3):
        call()
    settle(device)
    once = fastest(call, 1, seconds, device)
    return fastest(call, max(1, int(seconds / 5 / once)), seconds, device)


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
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as problem: # the latter from a PyTorch without CUDA
        parser.error("--device=%s: %s" % (options.device, problem))
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    status = 0
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
                names = environment(NAMES[dtype], options.device)
                gc.collect()
                try:
                    call = eval("lambda: " + prepared(filled, names), names)
                    with torch.set_grad_enabled("backward" in name):
                        us = time_of(call, options.seconds, options.device) * 1e6
                except RuntimeError as problem:
                    print("operations.py: %s, %s: %s" % (name, size, problem), file=sys.stderr)
                    status = 1
                    continue
                print(json.dumps({"name": name, "size": size, "dtype": dtype, "us": us}), flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
