#!/usr/bin/env python3
"""Generation with guesses in Transformers against generation without: the peer of bench/generate_guesses.lua.

    tetrain export --out=RUN --to=out/hf && bench/peers/guesses.py --model=out/hf --assistant=out/hf-draft --ids=FILE

The ids are those that generate_guesses.lua --ids wrote. Ways take turns, and the fastest run of each counts; the time
of the first token, which reads the prompt, is that of a run for one token and is taken off.
"""

import argparse
import time

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def run(model, ids, tokens, options):
    start = time.perf_counter()
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                          pad_token_id=0, **options)
    return time.perf_counter() - start, made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--assistant")
    parser.add_argument("--ids", required=True)
    parser.add_argument("--tokens", type=int, default=180)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    dtype = getattr(torch, o.dtype)

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    model, ids = load(o.model), load_file(o.ids)["ids"].long()
    draws = dict(do_sample=True, temperature=o.temperature, top_k=0) if o.temperature > 0 else dict(do_sample=False)
    ways = {"plain": {}, "lookup 3": dict(prompt_lookup_num_tokens=3), "lookup 7": dict(prompt_lookup_num_tokens=7)}
    if o.assistant:
        assistant = load(o.assistant)
        ways["assistant"] = dict(assistant_model=assistant)
    best, first, made = {}, float("inf"), {}
    with torch.inference_mode():
        run(model, ids, o.tokens, draws)
        for _ in range(o.rounds):
            first = min(first, run(model, ids, 1, draws)[0])
            for name, options in ways.items():
                torch.manual_seed(1)
                seconds, made[name] = run(model, ids, o.tokens, {**draws, **options})
                best[name] = min(best.get(name, seconds), seconds)
    for name in ways:
        seconds = best[name] - first
        what = "drawn" if o.temperature > 0 else "the same" if made[name].equal(made["plain"]) else "others"
        print(f"{'Transformers, ' + name:24} {1e3 * seconds / (o.tokens - 1):9.3f} ms/token "
              f"{seconds / (best['plain'] - first):7.2f}  {what}")


main()
