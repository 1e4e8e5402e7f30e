#!/usr/bin/env python3
"""The figures of bench/gpu.lua and bench/gpu_steps.lua in PyTorch, on the same GPU: eager, compiled, and FP8 by
torch._scaled_mm, and by Transformer Engine where that is installed.

Lines that begin with BENCH are the results, the most telling ones first, in case that time runs out. Weights are
float32 under torch.autocast in bfloat16, AdamW is the fused one, and weights, inputs and gradients are drawn as in
tetrain's benches: a card multiplies zeros, and what is near them, faster than other numbers; what this PyTorch or card
cannot do is a line that says so. --quick: small sizes, --once: everything once, for what PyTorch compiles and keeps,
--parts: some of gpt2,llama,generation,small,attention,kernels,gpt2_xl_block, --device: another one. FP8 is only
compiled: eager it takes twice as long as bfloat16.
"""

import argparse
import contextlib
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

try:
    import transformer_engine.pytorch as engine
except Exception:  # not there, or not for this PyTorch
    engine = None


def bench(text):
    print("BENCH PyTorch " + text, flush=True)


class Timer:
    def __init__(self, device, once):
        self.device, self.once = device, once

    def wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def measure(self, run, calls):
        """Medians in milliseconds of a call: until the device is done, of several in a row, and on the host alone, of
        one that finds the device idle."""
        calls = 1 if self.once else calls
        for _ in range(1 if self.once else 3):
            run()
        self.wait()
        walls, hosts = [], []
        for _ in range(1 if self.once else 5):
            start = time.perf_counter()
            run()
            hosts.append((time.perf_counter() - start) * 1e3)
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            self.wait()
            walls.append((time.perf_counter() - start) / calls * 1e3)
        return statistics.median(walls), statistics.median(hosts)


def scaled_mm(a, b, scale_a, scale_b):
    """a b^T of FP8 matrices with a factor each, in bfloat16."""
    result = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    return result[0] if isinstance(result, tuple) else result


def quantize(x, dtype):
    """A matrix to FP8 by its own amax, and the factor back."""
    amax = x.abs().amax().float().clamp(min=1e-12)
    scale = torch.finfo(dtype).max / amax
    return (x.float() * scale).to(dtype), 1 / scale


class Fp8Product(torch.autograd.Function):
    """x w^T with all three products of a step in FP8."""

    @staticmethod
    def forward(ctx, x, w):
        flat = x.reshape(-1, x.shape[-1])
        qx, sx = quantize(flat, torch.float8_e4m3fn)
        qw, sw = quantize(w, torch.float8_e4m3fn)
        ctx.save_for_backward(qx, sx, qw, sw)
        ctx.shape = x.shape
        return scaled_mm(qx, qw, sx, sw).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx, dy):
        qx, sx, qw, sw = ctx.saved_tensors
        qd, sd = quantize(dy.reshape(-1, dy.shape[-1]), torch.float8_e5m2)
        dx = scaled_mm(qd, qw.t().contiguous(), sd, sw).view(ctx.shape)
        dw = scaled_mm(qd.t().contiguous(), qx.t().contiguous(), sd, sx)
        return dx, dw.float()


class Fp8Linear(nn.Linear):
    def forward(self, x):
        y = Fp8Product.apply(x.to(torch.bfloat16), self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self, linear, width, heads, kv_heads, bias):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.qkv = linear(width, width + 2 * kv_heads * self.dim, bias=bias)
        self.proj = linear(width, width, bias=bias)

    def forward(self, x):
        batch, seq, width = x.shape
        sizes = [width, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = (t.view(batch, seq, -1, self.dim).transpose(1, 2) for t in self.qkv(x).split(sizes, dim=2))
        grouped = {} if self.heads == self.kv_heads else {"enable_gqa": True}
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, width))


class SwiGLU(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        return F.silu(a) * b


def gpt2_block(linear, width, heads, bias=True, gelu="tanh"):
    return nn.Sequential(
        Residual(nn.LayerNorm(width, bias=bias), Attention(linear, width, heads, heads, bias)),
        Residual(nn.LayerNorm(width, bias=bias), linear(width, 4 * width, bias=bias), nn.GELU(approximate=gelu),
                 linear(4 * width, width, bias=bias)))


def llama_layer(linear, c):
    return nn.Sequential(
        Residual(nn.RMSNorm(c["width"]), Attention(linear, c["width"], c["heads"], c["kv_heads"], False)),
        Residual(nn.RMSNorm(c["width"]), linear(c["width"], 2 * c["inner"], bias=False), SwiGLU(),
                 linear(c["inner"], c["width"], bias=False)))


def draw_weights(model, std):
    """Normal ones in all products and tables, with biases of 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, std(name) if callable(std) else std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class GPT(nn.Module):
    """As te.models.gpt has it: without biases, and the head shares the token embedding's table."""

    def __init__(self, linear, vocabulary, seq, layers, heads, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*[gpt2_block(linear, width, heads, False, "none") for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        into_sums = ("proj.weight", "3.weight")  # what attention and the MLP end in
        draw_weights(self, lambda name: 0.02 / (2 * layers)**0.5 if name.endswith(into_sums) else 0.02)

    def forward(self, ids):
        h = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        logits = F.linear(self.norm(self.blocks(h)), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


MODES = [("compiled, bfloat16", nn.Linear, True), ("compiled, FP8 _scaled_mm", Fp8Linear, True),
         ("eager, bfloat16", nn.Linear, False)]
if engine:
    MODES.append(("eager, FP8 Transformer Engine", engine.Linear, False))  # by its default recipe, delayed scaling


class Benches:
    def __init__(self, device, quick, once):
        self.device, self.quick, self.timer = device, quick, Timer(device, quick or once)

    def figure(self, name, run):
        try:
            run()
        except Exception as problem:  # the other figures still count
            bench("%s: not measured: %s" % (name, str(problem).splitlines()[0][:160]))
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def autocast(self, linear):
        fp8 = engine.fp8_autocast(enabled=True) if engine and linear is engine.Linear else contextlib.nullcontext()
        with torch.autocast(self.device, dtype=torch.bfloat16), fp8:
            yield

    def build(self, make, linear, compiled):
        torch.manual_seed(1)
        if compiled:
            torch._dynamo.reset()
        model = make(linear)
        if not isinstance(model, GPT):
            draw_weights(model, 0.023)
        model = model.to(self.device)
        return torch.compile(model) if compiled else model

    def forward_backward(self, name, make, shape, work=None, calls=10):
        for mode, linear, compiled in MODES:
            def run(mode=mode, linear=linear, compiled=compiled):
                model = self.build(make, linear, compiled)
                x, dy = (torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(2))
                x.requires_grad_()

                def call():
                    with self.autocast(linear):
                        y = model(x)
                    y.backward(dy.to(y.dtype))
                    model.zero_grad(set_to_none=True)
                    x.grad = None

                wall, host = self.timer.measure(call, calls)
                rate = " (%.0f TFLOP/s)" % (work / wall / 1e9) if work else ""
                bench("%s forward and backward, %s: %.3f ms%s, host %.3f ms" % (name, mode, wall, rate, host))
            self.figure("%s, %s" % (name, mode), run)

    def whole_step(self, name, make, given, loss_of, tokens):
        for mode, linear, compiled in MODES:
            def run(mode=mode, linear=linear, compiled=compiled):
                model = self.build(make, linear, compiled)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device == "cuda")
                x = given()

                def call():
                    with self.autocast(linear):
                        loss = loss_of(model, x)
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)

                wall, host = self.timer.measure(call, 10)
                bench("%s step, %s: %.2f ms, host %.2f ms, %.0f tokens/s"
              % (name, mode, wall, host, tokens / wall * 1e3))
            self.figure("%s, %s" % (name, mode), run)

    def kernels(self):
        rows, width, n = (16, 64, 64) if self.quick else (32768, 768, 8192)
        x = torch.randn(rows, width, device=self.device, dtype=torch.bfloat16)
        norm = nn.LayerNorm(width).to(self.device, torch.bfloat16)
        for name, call in [("gelu", lambda: F.gelu(x)), ("layer_norm", lambda: norm(x)),
                           ("softmax", lambda: F.softmax(x, -1)), ("transposed copy", lambda: x.t().contiguous())]:
            with torch.no_grad():
                bench("%s %dx%d bfloat16: %.1f us" % (name, rows, width, self.timer.measure(call, 10)[0] * 1e3))
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        ms = self.timer.measure(lambda: F.linear(a, b), 10)[0]
        bench("product %dx%dx%d bfloat16: %.1f TFLOP/s" % (n, n, n, 2 * n**3 / ms / 1e9))

        def fp8():
            (qa, sa), (qb, sb) = quantize(a, torch.float8_e4m3fn), quantize(b, torch.float8_e4m3fn)
            ms = self.timer.measure(lambda: scaled_mm(qa, qb, sa, sb), 10)[0]
            bench("product %dx%dx%d float8_e4m3: %.1f TFLOP/s" % (n, n, n, 2 * n**3 / ms / 1e9))
        self.figure("product in FP8", fp8)

    def attention(self):
        batch, heads, seq, dim = (1, 2, 32, 16) if self.quick else (4, 16, 4096, 128)
        q, k, v = (torch.randn(batch, heads, seq, dim, device=self.device, dtype=torch.bfloat16, requires_grad=True)
                   for _ in range(3))
        work = 2 * batch * heads * seq * seq * dim

        def both():
            F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)
            q.grad = k.grad = v.grad = None
        grad = torch.randn_like(q)
        with torch.no_grad():
            forward = self.timer.measure(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 10)[0]
        whole = self.timer.measure(both, 10)[0]
        bench("attention causal %dx%dx%dx%d: %.0f TFLOP/s forward, %.0f backward" % (
            batch, heads, seq, dim, work / forward / 1e9, 2.5 * work / max(whole - forward, 1e-9) / 1e9))

    def small(self):
        rows, width = (16, 64) if self.quick else (128, 1024)
        layers = [
            ("LayerNorm %d" % width, lambda linear: nn.Sequential(nn.LayerNorm(width), linear(width, width))),
            ("Linear %d" % width, lambda linear: linear(width, width)),
            ("GELU", lambda linear: nn.Sequential(linear(width, width), nn.GELU(), linear(width, width))),
        ]
        for name, make in layers:
            self.forward_backward("%s on %d tokens" % (name, rows), make, (rows, width), calls=50)

    def generation(self):
        """Keys and values in tensors for all tokens to come, places on the device: what torch.compile can record."""
        seq, prompt, tokens, layers, heads, width, vocabulary = \
            (32, 4, 16, 1, 2, 64, 64) if self.quick else (1024, 128, 256, 12, 12, 768, 50304)
        model = GPT(nn.Linear, vocabulary, seq, layers, heads, width).to(self.device, torch.bfloat16).eval()
        room = prompt + 16 + tokens
        places = torch.arange(room, device=self.device)
        for texts in (1, 8):
            shape = (layers, texts, heads, room, width // heads)
            keys, values = (torch.zeros(shape, device=self.device, dtype=torch.bfloat16) for _ in range(2))
            for cache in (keys, values):
                torch._dynamo.mark_static_address(cache)  # else what a step changes keeps it from being recorded

            def step(ids, place, keys=keys, values=values, texts=texts):
                h, seen = model.wte(ids) + model.wpe(place), (places <= place).view(1, 1, 1, -1)
                for i, (attending, mlp) in enumerate(model.blocks):
                    norm, attention = attending.inner
                    q, k, v = (t.view(texts, 1, heads, -1).transpose(1, 2)
                               for t in attention.qkv(norm(h)).split(width, dim=2))
                    keys[i].index_copy_(2, place, k)
                    values[i].index_copy_(2, place, v)
                    y = F.scaled_dot_product_attention(q, keys[i], values[i], attn_mask=seen)
                    h = mlp(h + attention.proj(y.transpose(1, 2).reshape(texts, 1, width)))
                return F.linear(model.norm(h), model.wte.weight)[:, -1].argmax(-1, keepdim=True)

            for mode in ("compiled", "eager"):
                def run(mode=mode, step=step, texts=texts):
                    torch._dynamo.reset()
                    one = torch.compile(step, mode="reduce-overhead") if mode == "compiled" else step

                    def several(n):
                        ids = torch.zeros(texts, 1, dtype=torch.int64, device=self.device)
                        place = torch.full((1,), prompt, device=self.device)
                        for _ in range(n):
                            torch.compiler.cudagraph_mark_step_begin()
                            ids = one(ids, place).clone()
                            place += 1
                        self.timer.wait()

                    with torch.no_grad():
                        several(4)
                        start = time.perf_counter()
                        several(tokens)
                        ms = (time.perf_counter() - start) / tokens * 1e3
                    bench("GPT-2 124M generation, %d text%s, %s, bfloat16: %.3f ms a token (%.0f tokens/s)" % (
                        texts, "s" if texts > 1 else "", mode, ms, texts / ms * 1e3))
                self.figure("generation of %d, %s" % (texts, mode), run)

    def gpt2_xl_block(self):
        width, heads, seq, batch = (64, 2, 16, 1) if self.quick else (1600, 25, 1024, 8)
        work = 6 * batch * seq * 12 * width**2 + 6 * batch * seq * seq * width
        self.forward_backward("GPT-2 1.5B block, %d x %d" % (batch, seq),
                              lambda linear: gpt2_block(linear, width, heads), (batch, seq, width), work)

    def llama(self):
        c = dict(width=64, inner=128, heads=4, kv_heads=2, tokens=16) if self.quick else \
            dict(width=4096, inner=14336, heads=32, kv_heads=8, tokens=4096)
        weights = 2 * c["width"]**2 * (1 + c["kv_heads"] / c["heads"]) + 3 * c["width"] * c["inner"]
        work = 6 * c["tokens"] * weights + 6 * c["tokens"]**2 * c["width"]
        name, shape = "Llama 8B layer, %d tokens" % c["tokens"], (1, c["tokens"], c["width"])
        self.forward_backward(name, lambda linear: llama_layer(linear, c), shape, work)
        self.whole_step(name, lambda linear: llama_layer(linear, c),
                        lambda: torch.randn(shape, device=self.device, dtype=torch.bfloat16),
                        lambda model, x: model(x).float().sum(), c["tokens"])

    def gpt2(self):
        sizes = (1, 16, 1, 2, 64, 64) if self.quick else (32, 1024, 12, 12, 768, 50304)
        batch, seq, layers, heads, width, vocabulary = sizes
        self.whole_step("GPT-2 124M, %d x %d" % (batch, seq),
                        lambda linear: GPT(linear, vocabulary, seq, layers, heads, width),
                        lambda: torch.randint(0, 63, (batch, seq), device=self.device), lambda model, ids: model(ids),
                        batch * seq)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--parts", default="gpt2,llama,generation,small,attention,kernels,gpt2_xl_block")
    parser.add_argument("--device", default="cuda")
    o = parser.parse_args()
    bench("%s on %s" % (torch.__version__, torch.cuda.get_device_name() if o.device == "cuda" else o.device))
    benches = Benches(o.device, o.quick, o.once)
    for part in o.parts.split(","):
        benches.figure(part, getattr(benches, part))


if __name__ == "__main__":
    main()
