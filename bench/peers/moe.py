#!/usr/bin/env python3
"""A mixture of experts in PyTorch, timed: the peer of bench/moe.lua, whose sizes it has.

`loop` takes the experts one after the other (index_select, two products, index_add); `grouped` sorts the rows by expert
and multiplies them by torch.nn.functional.grouped_mm. Both must agree. --table FILE prints the lines that both systems
left there, with the faster of the two ways.
"""

import argparse
import json
import statistics
import sys
import time

CONFIGS = {"narrow": (256, 512, 8, 2, 1024), "wide": (768, 2048, 8, 2, 1024), "fine": (512, 256, 64, 8, 1024)}


def route(x, router, topk):
    values, experts = F.linear(x, router).topk(topk, -1)
    return values.softmax(-1, dtype=torch.float32).to(x.dtype), experts


def mlp(h):
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def loop(x, router, first, second, topk):
    probs, experts = route(x, router, topk)
    y = torch.zeros_like(x)
    for e in range(first.shape[0]):
        token, slot = torch.where(experts == e)
        if token.numel():
            h = F.linear(mlp(F.linear(x[token], first[e])), second[e])
            y.index_add_(0, token, h * probs[token, slot, None])
    return y


def grouped(x, router, first, second, topk):
    probs, experts = route(x, router, topk)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=first.shape[0]).cumsum(0).to(torch.int32)
    h = mlp(F.grouped_mm(x[order // topk], first.transpose(1, 2), offs=ends))
    h = F.grouped_mm(h, second.transpose(1, 2), offs=ends) * probs.flatten()[order, None]
    return torch.zeros_like(h).index_copy(0, order, h).view(x.shape[0], topk, -1).sum(1)


def timed(run, seconds):
    for _ in range(3):
        run()
    times, begin = [], time.perf_counter()
    while len(times) < 9 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def table(path):
    best, floors = {}, {}
    for line in open(path):
        r = json.loads(line)
        key = r["config"], r["dtype"]
        floors[key] = r.get("floor_ms", floors.get(key, 0))
        for part in ("forward_ms", "step_ms"):
            at = best.setdefault((*key, part), {})
            at[r["system"]] = min(r[part], at.get(r["system"], float("inf")))
    print("milliseconds; PyTorch: the faster of a loop over experts and grouped_mm; floor: products at their peak")
    print(f"{'experts':8} {'dtype':6} {'what':9} {'tetrain':>9} {'PyTorch':>9} {'ratio':>6} {'of floor':>9}")
    for (config, dtype, part), t in best.items():
        floor = floors[config, dtype] / (3 if part == "forward_ms" else 1)
        print(f"{config:8} {dtype:6} {part[:-3]:9} {t['tetrain']:9.2f} {t['pytorch']:9.2f} "
              f"{t['tetrain'] / t['pytorch']:6.2f} {100 * floor / t['tetrain']:8.0f}%")


parser = argparse.ArgumentParser()
parser.add_argument("--config", choices=CONFIGS, default="wide")
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--seconds", type=float, default=1)
parser.add_argument("--table")
o = parser.parse_args()
if o.table:
    table(o.table)
    sys.exit()

import torch
from torch.nn import functional as F

torch.manual_seed(1)
torch.set_num_threads(o.threads)
dtype = torch.bfloat16 if o.dtype == "bf16" else torch.float32
hidden, inner, experts, topk, tokens = CONFIGS[o.config]
weights = [torch.randn(shape, dtype=dtype).mul_(0.02).requires_grad_()
           for shape in ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))]
x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
dy = torch.randn(tokens, hidden, dtype=dtype)
a, b = loop(x, *weights, topk), grouped(x, *weights, topk)
assert (a - b).norm() < 0.02 * a.norm()
for way in (loop, grouped):
    def forward():
        with torch.no_grad():
            way(x, *weights, topk)

    def step():
        way(x, *weights, topk).backward(dy)
        for t in (x, *weights):
            t.grad = None

    print(json.dumps({"system": "pytorch", "way": way.__name__, "config": o.config, "dtype": o.dtype,
                      "forward_ms": timed(forward, o.seconds), "step_ms": timed(step, o.seconds)}), flush=True)
