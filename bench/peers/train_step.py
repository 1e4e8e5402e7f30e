#!/usr/bin/env python3
"""One training step of a GPT or a Llama in PyTorch, timed: the peer of bench/train_step.lua.

The GPT is the one nanoGPT describes: pre-norm blocks, learned positions, a head that shares the token embedding's
table, LayerNorm and Linear without biases, exact GELU, no dropout. The Llama has RMSNorm, rotary positions, grouped
queries, SwiGLU and a head of its own. A step is everything that a training loop does: zero_grad, forward, loss,
backward, clipping to norm 1, AdamW. Tokens are random: what they are does not change the work.

bf16 keeps float32 weights, gradients and optimizer state and computes under torch.autocast, as nanoGPT does.
"""

import argparse
import contextlib
import json
import math
import mmap
import resource
import statistics
import struct
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

from configs import CONFIGS


class Norm(nn.Module):
    """LayerNorm with a weight and no bias."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Attention(nn.Module):
    """Causal self-attention; `manual` writes the scores out, `sdpa` asks PyTorch's fused kernel."""

    def __init__(self, width, heads, sequence, kind):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.manual = kind == "manual"
        if self.manual:
            future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
            self.register_buffer("future", future, persistent=False)

    def forward(self, x):
        batch, sequence, width = x.shape
        heads = (batch, sequence, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        if self.manual:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(heads[-1]))
            y = scores.masked_fill(self.future, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    def __init__(self, width, heads, sequence, kind):
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attention = Attention(width, heads, sequence, kind)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Embedding(c.sequence, c.width)
        self.blocks = nn.ModuleList(Block(c.width, c.heads, c.sequence, kind) for _ in range(c.layers))
        self.norm = Norm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * c.layers) if residual else 0.02)

    def forward(self, ids, targets):
        position = torch.arange(ids.shape[1])
        x = self.tokens(ids) + self.positions(position)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class RootNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def rotate(x, cosines, sines):
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class GroupedAttention(nn.Module):
    """Causal self-attention with rotary positions and fewer heads of keys and values than of queries."""

    def __init__(self, c, kind):
        super().__init__()
        self.heads, self.kv_heads, self.size = c.heads, c.kv_heads, c.width // c.heads
        self.qkv = nn.Linear(c.width, (c.heads + 2 * c.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(c.width, c.width, bias=False)
        self.manual = kind == "manual"
        if self.manual:
            future = torch.ones(c.sequence, c.sequence, dtype=torch.bool).triu(1)
            self.register_buffer("future", future, persistent=False)

    def forward(self, x, cosines, sines):
        batch, sequence, width = x.shape
        parts = [count * self.size for count in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(batch, sequence, -1, self.size).transpose(1, 2) for part in self.qkv(x).split(parts, 2))
        q, k = rotate(q, cosines, sines).to(v.dtype), rotate(k, cosines, sines).to(v.dtype)
        if self.manual:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(self.size))
            y = scores.masked_fill(self.future, float("-inf")).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class LlamaBlock(nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        self.norm1, self.norm2 = RootNorm(c.width), RootNorm(c.width)
        self.attention = GroupedAttention(c, kind)
        self.up = nn.Linear(c.width, 2 * c.inner, bias=False)
        self.down = nn.Linear(c.inner, c.width, bias=False)

    def forward(self, x, cosines, sines):
        x = x + self.attention(self.norm1(x), cosines, sines)
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Llama(nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(LlamaBlock(c, kind) for _ in range(c.layers))
        self.norm = RootNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * c.layers) if residual else 0.02)
        size = c.width // c.heads
        angles = torch.arange(c.sequence)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


# Where tetrain keeps the weights of a model, and those of a block.
NAMES = {"tokens": "wte", "positions": "wpe", "norm": "norm", "head": "lm_head"}
BLOCK_NAMES = {"norm1": "attention.1", "attention.qkv": "attention.2.qkv", "attention.out": "attention.2.proj",
               "norm2": "mlp.1", "up": "mlp.2", "down": "mlp.4"}


def load_start(path, model):
    """Copies the weights that bench/train_step.lua --start wrote into the model; returns ids and targets."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])

    def tensor(name):
        entry = header[name]
        first, last = entry["data_offsets"]
        dtype = {"F32": torch.float32, "I32": torch.int32}[entry["dtype"]]
        flat = torch.frombuffer(data, dtype=dtype, count=(last - first) // 4, offset=8 + size + first)
        return flat.view(entry["shape"])

    with torch.no_grad():
        for here, there in NAMES.items():
            if hasattr(model, here) and there + ".weight" in header: # not where it is shared
                model.get_parameter(here + ".weight").copy_(tensor(there + ".weight"))
        for i, block in enumerate(model.blocks, 1):
            for here, there in BLOCK_NAMES.items():
                block.get_parameter(here + ".weight").copy_(tensor("blocks.%d.%s.weight" % (i, there)))
    return tensor("ids").long(), tensor("targets").long()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="char")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", choices=["eager", "compile", "autotune"], default="eager",
                        help="compile: torch.compile of the model; autotune: its max-autotune mode")
    parser.add_argument("--attention", choices=["sdpa", "manual"], default="sdpa")
    parser.add_argument("--start", help="weights and tokens that bench/train_step.lua --start wrote")
    parser.add_argument("--runs", type=int, default=9, help="fewest steps timed, at least 2")
    parser.add_argument("--seconds", type=float, default=2.0, help="shortest time measured; short steps run more often")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser.parse_args()


def build_step(o):
    """The training step as a function that returns the loss and when its parts ended, and the number of parameters."""
    c = CONFIGS[o.config]
    model = (Llama if c.inner else GPT)(c, o.attention)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, fused=True)
    run = model
    if o.mode != "eager":
        run = torch.compile(model, mode="max-autotune" if o.mode == "autotune" else None)
    ids = torch.randint(c.vocabulary, (c.batch, c.sequence))
    targets = torch.randint(c.vocabulary, (c.batch, c.sequence))
    if o.start:
        ids, targets = load_start(o.start, model)
    parameters = list(model.parameters())

    def step():
        optimizer.zero_grad(set_to_none=True)
        low = torch.autocast("cpu", dtype=torch.bfloat16) if o.dtype == "bf16" else contextlib.nullcontext()
        with low:
            loss = run(ids, targets)
        value, forward = loss.item(), time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return value, forward, backward

    return step, sum(p.numel() for p in parameters)


def time_steps(step, runs, seconds):
    """Medians over the steps, in milliseconds, after a warm-up of three steps and a second; the fifth step's loss."""
    started, losses = time.perf_counter(), []
    while len(losses) < 3 or time.perf_counter() - started < min(1.0, seconds):
        losses.append(step()[0])
        if len(losses) == 1:  # compiling is not warming up
            started = time.perf_counter()
    rows, total = [], 0.0
    while len(rows) < runs or total < seconds:
        processor, before = time.process_time(), time.perf_counter()
        loss, forward, backward = step()
        after = time.perf_counter()
        losses.append(loss)
        rows.append((after - before, time.process_time() - processor, forward - before, backward - forward,
                     after - backward))
        total += after - before
    walls, *others = zip(*rows)
    medians = dict(zip(("cpu_ms", "forward_ms", "backward_ms", "optimizer_ms"),
                       (statistics.median(column) * 1e3 for column in others)))
    return {"steps": len(rows), "ms": statistics.median(walls) * 1e3, "ms_min": min(walls) * 1e3,
            "ms_max": max(walls) * 1e3, **medians, "loss_5": losses[4]}


def main():
    o = arguments()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    step, parameters = build_step(o)
    times = time_steps(step, o.runs, o.seconds)
    c = CONFIGS[o.config]
    report = {
        "system": "pytorch", "version": torch.__version__, "config": o.config, "dtype": o.dtype, "threads": o.threads,
        "mode": o.mode, "attention": o.attention, "parameters": parameters, **times,
        "tokens_per_s": c.batch * c.sequence / times["ms"] * 1e3,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if not math.isfinite(times["loss_5"]):
        sys.exit("the loss is not finite: %r" % times["loss_5"])
    if o.json:
        print(json.dumps(report))
    else:
        print("%(config)s %(dtype)s %(mode)s %(attention)s: %(ms).2f ms a step (%(ms_min).2f to %(ms_max).2f, "
              "%(steps)d steps), %(tokens_per_s).0f tokens/s, %(peak_rss_mib).0f MiB, PyTorch %(version)s" % report)


if __name__ == "__main__":
    main()
