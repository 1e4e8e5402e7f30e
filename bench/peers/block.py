#!/usr/bin/env python3
"""A pre-norm MLP or a GPT block in PyTorch, forward and backward, timed eager and compiled.

The peer of bench/fuser.lua.

Both modes run in turns on the same weights. bf16 keeps float32 weights and computes under torch.autocast on a bfloat16
input, so that the residual stream has the dtype that it has in tetrain.
"""

import argparse
import contextlib
import json
import math
import mmap
import statistics
import struct
import time

import torch
from torch import nn
from torch.nn import functional as F

SEQUENCE = 128


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        q, k, v = (part.view(batch, sequence, self.heads, 64).transpose(1, 2)
                   for part in self.qkv(self.norm(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(batch, sequence, width))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.gelu(self.up(self.norm(x))))


# Where bench/fuser.lua keeps the modules; the MLP is the last of the container.
NAMES = {"mlp": {"0.norm": "1.1", "0.up": "1.2", "0.down": "1.4"},
         "block": {"0.norm": "1.1", "0.qkv": "1.2.qkv", "0.proj": "1.2.proj", "1.norm": "2.1", "1.up": "2.2",
                   "1.down": "2.4"}}


def load_start(path, model, kind):
    """Copies the weights that bench/fuser.lua --start wrote into the model; returns input and gradient."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])

    def tensor(name):
        first, last = header[name]["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.float32, count=(last - first) // 4, offset=8 + size + first)
        return flat.view(header[name]["shape"])

    with torch.no_grad():
        for here, there in NAMES[kind].items():
            for name in ("weight", "bias"):
                model.get_parameter(here + "." + name).copy_(tensor(there + "." + name))
    return tensor("x"), tensor("dy")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mlp", "block"], default="mlp")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=0, help="0: 65536 / width, at least 32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=9, help="fewest steps timed")
    parser.add_argument("--seconds", type=float, default=0.5, help="shortest time measured")
    parser.add_argument("--modes", default="eager compile", help="of PyTorch, timed in turns")
    parser.add_argument("--start", help="weights, input and gradient that bench/fuser.lua --start wrote")
    return parser.parse_args()


def build_step(o):
    """A function that runs one forward and backward in a mode, and what it works on."""
    model = nn.Sequential(*([Attention(o.width)] if o.model == "block" else []), MLP(o.width))
    tokens = o.tokens or max(32, 65536 // o.width)
    sequence = min(tokens, SEQUENCE)
    x, dy = (torch.randn(tokens // sequence, sequence, o.width) for _ in range(2))
    if o.start:
        x, dy = load_start(o.start, model, o.model)
    dtype = torch.bfloat16 if o.dtype == "bf16" else torch.float32
    x, dy = x.to(dtype).requires_grad_(), dy.to(dtype)
    runs = {"eager": model, "compile": torch.compile(model)}

    def run(mode):
        model.zero_grad(set_to_none=True)
        x.grad = None
        low = torch.autocast("cpu", dtype=torch.bfloat16) if o.dtype == "bf16" else contextlib.nullcontext()
        with low:
            y = runs[mode](x)
        y.backward(dy)
        return y

    return run, x, list(model.parameters())


def time_modes(run, modes, runs, seconds):
    """Medians in seconds by mode, after a warm-up of three steps and a second."""
    for mode in modes:
        run(mode)  # compiling is not warming up
    started, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - started < min(1.0, seconds):
        for mode in modes:
            run(mode)
        count += 1
    walls, total = {mode: [] for mode in modes}, 0.0
    while len(walls[modes[0]]) < runs or total < seconds:
        for mode in modes:
            before = time.perf_counter()
            run(mode)
            walls[mode].append(time.perf_counter() - before)
            total += walls[mode][-1]
    return {mode: (statistics.median(list_), len(list_)) for mode, list_ in walls.items()}


def main():
    o = arguments()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    run, x, parameters = build_step(o)
    y_norm = run("eager").float().norm().item()
    grad_norm = math.sqrt(sum(t.grad.double().square().sum().item() for t in [x] + parameters))
    for mode, (seconds, steps) in time_modes(run, o.modes.split(), o.runs, o.seconds).items():
        print(json.dumps({
            "system": "pytorch", "version": torch.__version__, "mode": mode, "model": o.model, "dtype": o.dtype,
            "width": o.width, "tokens": x.shape[0] * x.shape[1], "threads": o.threads, "steps": steps,
            "ms": seconds * 1e3, "y_norm": y_norm, "grad_norm": grad_norm}))


if __name__ == "__main__":
    main()
