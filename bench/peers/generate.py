#!/usr/bin/env python3
"""Generation with a GPT in PyTorch, timed: the peer of bench/generate.lua.

Keys and values are kept in tensors made once for the whole context. `eager` attends to the part that is filled;
`compile` compiles the step of one token and attends to all of it behind a mask, so that shapes stay the same. bf16
converts the weights once: nothing is cast while it runs.
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn import functional as F

from configs import CONFIGS, GPTS
from train_step import GPT, load_start


class Generator:
    def __init__(self, model, c, batch, dtype, mode):
        self.model, self.c, self.batch, self.compiled = model, c, batch, mode == "compile"
        shape = (c.layers, batch, c.heads, c.sequence, c.width // c.heads)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.places = torch.arange(c.sequence)
        self.one = torch.compile(self.masked) if self.compiled else self.filled

    def project(self, block, x):
        batch, tokens, width = x.shape
        heads = (batch, tokens, self.c.heads, width // self.c.heads)
        return (part.view(heads).transpose(1, 2) for part in block.attention.qkv(block.norm1(x)).split(width, dim=2))

    def finish(self, block, x, y):
        x = x + block.attention.out(y.transpose(1, 2).reshape(x.shape))
        return x + block.down(block.gelu(block.up(block.norm2(x))))

    def likeliest(self, x):
        return self.model.head(self.model.norm(x[:, -1:])).argmax(-1)

    def embed(self, ids, places):
        return self.model.tokens(ids) + self.model.positions(places)

    def filled(self, ids, at):
        tokens = ids.shape[1]
        x = self.embed(ids, self.places[at:at + tokens])
        for i, block in enumerate(self.model.blocks):
            q, k, v = self.project(block, x)
            self.keys[i, :, :, at:at + tokens], self.values[i, :, :, at:at + tokens] = k, v
            y = F.scaled_dot_product_attention(q, self.keys[i, :, :, :at + tokens], self.values[i, :, :, :at + tokens],
                                               is_causal=tokens > 1)
            x = self.finish(block, x, y)
        return self.likeliest(x)

    def masked(self, ids, place):
        x, seen = self.embed(ids, place), (self.places <= place).view(1, 1, 1, -1)
        for i, block in enumerate(self.model.blocks):
            q, k, v = self.project(block, x)
            self.keys[i].index_copy_(2, place, k)
            self.values[i].index_copy_(2, place, v)
            x = self.finish(block, x, F.scaled_dot_product_attention(q, self.keys[i], self.values[i], attn_mask=seen))
        return self.likeliest(x)

    def run(self, ids):
        """The ids with those that follow, and the seconds of each."""
        times = []
        while ids.shape[1] < self.c.sequence:
            before, at = time.perf_counter(), ids.shape[1] - 1
            if not times:
                token = self.filled(ids, 0)
            elif self.compiled:
                token = self.one(ids[:, -1:], self.places[at:at + 1])
            else:
                token = self.one(ids[:, -1:], at)
            ids = torch.cat((ids, token), 1)
            times.append(time.perf_counter() - before)
        return ids, times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=GPTS, default="char")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager")
    parser.add_argument("--start", help="weights and prompt that bench/generate.lua --start wrote")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(1)
    c = CONFIGS[o.config]
    model = GPT(c, "sdpa")
    prompt = torch.randint(c.vocabulary, (o.batch, c.sequence // 2))
    if o.start:
        prompt, _ = load_start(o.start, model)
    dtype = torch.bfloat16 if o.dtype == "bf16" else torch.float32
    generator = Generator(model.to(dtype).eval(), c, o.batch, dtype, o.mode)
    first = each = float("inf")
    with torch.inference_mode():
        for _ in range(o.runs + 1):  # the first one warms up
            ids, times = generator.run(prompt)
            first, each = min(first, times[0]), min(each, statistics.median(times[1:]))
    check = 0
    for row in ids.tolist():
        for i, token in enumerate(row, 1):
            check = (check * 31 + token * i) % 1000003
    report = {"system": "pytorch", "config": o.config, "dtype": o.dtype, "threads": o.threads, "batch": o.batch,
              "mode": o.mode, "prompt_ms": first * 1e3, "token_ms": each * 1e3, "check": check}
    if o.json:
        print(json.dumps(report))
    else:
        print("%(config)s %(dtype)s %(mode)s, %(batch)d texts: %(prompt_ms).2f ms for the prompt, then "
              "%(token_ms).3f ms a token" % report)


if __name__ == "__main__":
    main()
