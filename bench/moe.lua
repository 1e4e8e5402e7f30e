-- A mixture of experts, timed: forward alone without gradients, and forward with backward.
--
--     tetrain bench/moe.lua --config=wide --dtype=bf16 --threads=2 --json
--
-- bench/peers/moe.py measures the same layer in PyTorch. Weights and tokens are random and of the dtype. floor: the
-- experts' products at the peak that is given.

local te = require "te"
local folder = arg[0]:match("^(.*/)") or "./"
local measure = dofile(folder .. "measure.lua")
local clock = te._core.clock

local CONFIGS = { -- hidden, inner, experts, of which see a token, tokens
    narrow = { 256, 512, 8, 2, 1024 },
    wide = { 768, 2048, 8, 2, 1024 },
    fine = { 512, 256, 64, 8, 1024 },
}

local command_line = te.train.command_line {
    script = "moe.lua",
    about = "Times a mixture of experts.",
    { "config", "string", "wide", choices = { "narrow", "wide", "fine" }, help = "sizes" },
    { "dtype", "string", "fp32", choices = { "fp32", "bf16" }, help = "of weights and tokens" },
    { "threads", "integer", 2, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    { "runs", "integer", 9, min = 2, help = "fewest steps timed" },
    { "seconds", "number", 1, min = 0, max = 3600, help = "shortest time measured" },
    { "peak", "number", 0, min = 0, help = "GFLOP/s of products, for the floor (bench_machine)" },
    { "json", "boolean", false, help = "one JSON object instead of text" },
    { "profile", "boolean", false, help = "the kernels of a step too" },
}

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    te.manual_seed(1)
    local dtype = o.dtype == "bf16" and "bfloat16" or "float32"
    local hidden, inner, experts, topk, tokens = unpack(CONFIGS[o.config])
    local layer = te.MoE(hidden, inner, experts, { topk = topk }):to(dtype)
    local x, dy = te.randn({ tokens, hidden }, { dtype = dtype }), te.randn({ tokens, hidden }, { dtype = dtype })
    x.requires_grad = true
    local function step()
        local start = clock()
        te.no_grad(layer, x)
        local forward = clock()
        layer(x):backward(dy)
        layer:zero_grad()
        x.grad = nil
        return { forward = forward - start, step = clock() - forward }
    end
    local times = measure.steps(step, o.runs, o.seconds).parts
    local flops = 6 * tokens * topk * hidden * inner
    local floor = o.peak > 0 and flops / o.peak * 1e-6 or 0
    if o.json then
        print(measure.json { "system", "tetrain", "config", o.config, "dtype", o.dtype, "forward_ms",
            times.forward * 1e3, "step_ms", times.step * 1e3, "floor_ms", 3 * floor })
    else
        print(("%s %s: %.2f ms forward, %.2f ms with backward"):format(o.config, o.dtype, times.forward * 1e3,
            times.step * 1e3))
    end
    if o.profile then print(te.profile(step)) end
end)
