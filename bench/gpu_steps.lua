-- Training steps on the CUDA device: small layers, a block of GPT-2 1.5B, a layer of Llama 8B, GPT-2 124M; in bfloat16
-- and in FP8, run as they are and as recorded graphs. And tokens that GPT-2 124M generates. Lines that begin with BENCH
-- are the results; what matters most comes first, in case that time runs out.
--
--     build/tetrain bench/gpu_steps.lua [--quick | --once]
--
-- Each figure is the median of several measurements; `host` is what the host works for one step while the device goes
-- on. bench/peers/gpu.py measures the same in PyTorch.

local te = require "te"
local clock = te._core.clock
local quick = arg[1] == "--quick" -- sizes for machines where only the way is tested
local once = quick or arg[1] == "--once" -- full sizes, for kernels that are to be compiled
local device = "cuda"

local function bench(format, ...) print("BENCH " .. format:format(...)) end

-- Milliseconds of a call: until the device is done, of several in a row, and on the host alone, of one that finds the
-- device idle. The driver takes some 1000 launches and then makes the host wait, which is not its own work.
local function measure(fn, calls)
    calls = once and 1 or calls
    for _ = 1, once and 1 or 3 do fn() end
    te.synchronize(device)
    local walls, hosts = {}, {}
    for i = 1, once and 1 or 5 do
        local start = clock()
        fn()
        hosts[i] = (clock() - start) * 1e3
        te.synchronize(device)
        start = clock()
        for _ = 1, calls do fn() end
        te.synchronize(device)
        walls[i] = (clock() - start) / calls * 1e3
    end
    table.sort(walls)
    table.sort(hosts)
    return walls[math.ceil(#walls / 2)], hosts[math.ceil(#hosts / 2)]
end

-- How products compute: a recipe, or bfloat16 alone.
local MODES = {
    { "bfloat16" },
    { "FP8 delayed", function() return te.recipe.DelayedScaling {} end },
    { "FP8 blocks", function() return te.recipe.Float8BlockScaling {} end },
    { "MXFP8", function() return te.recipe.MXFP8BlockScaling {} end },
}

local function options_of(mode) return { dtype = "bfloat16", recipe = mode[2] and mode[2]() or nil } end

-- Runs a figure's function; what fails is a line of its own, since the others still count.
local failed = 0
local function figure(name, fn)
    local ok, problem = pcall(fn)
    if not ok then
        bench("failed: %s: %s", name, tostring(problem))
        failed = failed + 1
    end
    collectgarbage()
    te.empty_cache()
end

-- Forward and backward of a module on {tokens, width} or {1, tokens, width}; weights get gradients.
local function forward_backward(name, build, shape, mode, work, calls)
    figure(name .. ", " .. mode[1], function()
        te.manual_seed(1)
        local model = build():to(device)
        local opts = options_of(mode)
        local x = te.randn(shape, { device = device, dtype = "bfloat16" })
        local dy
        x.requires_grad = true
        local function run()
            local y = te.autocast(opts, model, x)
            dy = dy or te.randn(y.shape, { device = device, dtype = y.dtype })
            y:backward(dy)
            for _, p in ipairs(model:parameters()) do p.grad = nil end
            x.grad = nil
        end
        local wall, host = measure(run, calls)
        bench("%s forward and backward, %s: %.3f ms%s, host %.3f ms", name, mode[1], wall,
            work and (" (%.0f TFLOP/s)"):format(work / wall / 1e9) or "", host)
    end)
end

-- A whole step: forward, backward, clipping that stays on the device, AdamW.
local function whole_step(name, build, inputs, loss_of, mode, tokens, calls, graphed)
    figure(name .. ", " .. mode[1], function()
        te.manual_seed(1)
        local model = build():to(device)
        local opts, parameters = options_of(mode), model:parameters()
        local optimizer = te.optim.AdamW(parameters, { lr = 1e-4 })
        local given = inputs()
        local function step(x)
            local loss = te.autocast(opts, function() return loss_of(model, x) end)
            loss:backward()
            optimizer:step { clip = te.optim.grad_clip(parameters, { max = 1, loss = loss }) }
            optimizer:zero_grad()
        end
        local run = graphed and te.graph(step, { given }) or step
        local wall, host = measure(function() run(given) end, calls)
        bench("%s step, %s%s: %.2f ms, host %.2f ms, %.0f tokens/s, %.1f GB at most", name, mode[1],
            graphed and ", graph" or "", wall, host, tokens / wall * 1e3, te.memory_stats(device).peak / 1e9)
    end)
end

-- --- small layers, where launches and the host count -----------------------------------------------------------------

local function small()
    local rows, width = quick and 16 or 128, quick and 64 or 1024
    local layers = {
        { "LayerNorm " .. width, function() return te.Sequential(te.LayerNorm(width), te.Linear(width, width)) end },
        { "Linear " .. width, function() return te.Linear(width, width) end },
        { "GELU", function() return te.Sequential(te.Linear(width, width), te.GELU(), te.Linear(width, width)) end },
    }
    for _, layer in ipairs(layers) do
        for _, mode in ipairs(MODES) do
            forward_backward(("%s on %d tokens"):format(layer[1], rows), layer[2], { rows, width }, mode, nil, 50)
        end
    end
end

-- --- blocks ----------------------------------------------------------------------------------------------------------

local function transformer_block(width, heads)
    return te.Sequential(
        te.Residual(te.LayerNorm(width), te.MultiHeadedSelfAttention(width, heads, { causal = true })),
        te.Residual(te.LayerNorm(width), te.Linear(width, 4 * width), te.GELU { approximate = "tanh" },
            te.Linear(4 * width, width)))
end

local LLAMA = quick and { width = 64, inner = 128, heads = 4, kv_heads = 2, tokens = 16 } or
    { width = 4096, inner = 14336, heads = 32, kv_heads = 8, tokens = 4096 }

-- Without rotary positions, here and in the peer.
local function llama_layer()
    local c = LLAMA
    return te.Sequential(
        te.Residual(te.RMSNorm(c.width),
            te.GroupedQueryAttention(c.width, c.heads, c.kv_heads, { causal = true, bias = false })),
        te.Residual(te.RMSNorm(c.width), te.Linear(c.width, 2 * c.inner, { bias = false }), te.SwiGLU(),
            te.Linear(c.inner, c.width, { bias = false })))
end

-- Operations of forward and backward: three times the forward ones, attention half masked.
local function llama_work()
    local c = LLAMA
    local weights = 2 * c.width * c.width + 2 * c.width * c.width * c.kv_heads / c.heads + 3 * c.width * c.inner
    return 6 * c.tokens * weights + 6 * c.tokens * c.tokens * c.width
end

local function gpt2_xl_block()
    local width, heads, seq, batch = 1600, 25, 1024, 8
    if quick then width, heads, seq, batch = 64, 2, 16, 1 end
    local work = 6 * batch * seq * 12 * width * width + 6 * batch * seq * seq * width
    for _, mode in ipairs(MODES) do
        forward_backward(("GPT-2 1.5B block, %d x %d"):format(batch, seq),
            function() return transformer_block(width, heads) end,
            { batch, seq, width }, mode, work, 10)
    end
end

local function llama()
    local shape = { 1, LLAMA.tokens, LLAMA.width }
    local function inputs() return te.randn(shape, { device = device, dtype = "bfloat16" }) end
    local function loss(model, x) return te.sum(model(x):to("float32")) end
    for _, mode in ipairs(MODES) do
        forward_backward(("Llama 8B layer, %d tokens"):format(LLAMA.tokens), llama_layer, shape, mode, llama_work(), 10)
        whole_step(("Llama 8B layer, %d tokens"):format(LLAMA.tokens), llama_layer, inputs, loss, mode,
            LLAMA.tokens, 10, false)
    end
    whole_step(("Llama 8B layer, %d tokens"):format(LLAMA.tokens), llama_layer, inputs, loss, MODES[1],
        LLAMA.tokens, 10, true)
end

-- --- GPT-2 124M, 32 x 1024 -------------------------------------------------------------------------------------------

local function gpt2()
    local batch, seq = quick and 1 or 32, quick and 8 or 1024
    local function build()
        return te.models.gpt { vocab_size = quick and 64 or 50304, block_size = seq, n_layer = quick and 1 or 12,
            n_head = quick and 2 or 12, n_embd = quick and 64 or 768 }
    end
    local function inputs() return te.randint(0, 63, { batch, seq }, { dtype = "int32", device = device }) end
    local function loss_of(model, ids)
        local logits, loss = model(ids, ids)
        logits:release()
        return loss
    end
    local name = ("GPT-2 124M, %d x %d"):format(batch, seq)
    whole_step(name, build, inputs, loss_of, MODES[1], batch * seq, 10, true)
    te.use_deterministic_algorithms(false) -- as PyTorch's gradients of attention are
    whole_step(name, build, inputs, loss_of, { "bfloat16, sums in any order" }, batch * seq, 10, true)
    te.use_deterministic_algorithms(true)
    for _, mode in ipairs(MODES) do
        whole_step(name, build, inputs, loss_of, mode, batch * seq, 10, false)
    end
    for _, mode in ipairs { MODES[3], MODES[4] } do
        whole_step(name, build, inputs, loss_of, mode, batch * seq, 10, true)
    end
end

-- --- tokens, one after the other -------------------------------------------------------------------------------------

local function generation()
    local seq, prompt, tokens = quick and 32 or 1024, quick and 4 or 128, once and 16 or 256
    local model = te.models.gpt { vocab_size = quick and 64 or 50304, block_size = seq, n_layer = quick and 1 or 12,
        n_head = quick and 2 or 12, n_embd = quick and 64 or 768 }
    model:to(device)
    for _, case in ipairs { { 1, true }, { 1, false }, { 8, true }, { 8, false } } do
        local texts, graph = unpack(case)
        local name = ("GPT-2 124M generation, %d text%s, bfloat16%s"):format(texts, texts > 1 and "s" or "",
            graph and ", graph" or "")
        figure(name, function()
            local ids = te.randint(0, 63, { texts, prompt }, { dtype = "int32", device = device })
            local function generate(n)
                te.autocast({ dtype = "bfloat16" }, function()
                    model:generate(ids, n, { temperature = 0, graph = graph })
                end)
            end
            local function seconds(n)
                local start = clock()
                generate(n)
                te.synchronize(device)
                return clock() - start
            end
            seconds(16)
            -- without the prompt, the steps that run before one is recorded, and the recording
            local short, long = seconds(16), seconds(16 + tokens)
            local ms = math.max(long - short, 1e-9) / tokens * 1e3
            bench("%s: %.3f ms a token (%.0f tokens/s), weights at %.0f GB/s", name, ms, texts / ms * 1e3,
                2 * model:num_parameters() / ms / 1e6)
        end)
    end
end

for _, part in ipairs { gpt2, llama, generation, gpt2_xl_block, small } do part() end
if failed > 0 then os.exit(1) end
