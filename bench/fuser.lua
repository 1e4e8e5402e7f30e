-- What fusion is worth: a pre-norm MLP and a whole GPT block, forward and backward, fused and
-- with te.set_fusion(false).
--
--     tetrain bench/fuser.lua --model=block --dtype=bf16 --width=256 --threads=1 --json
--
-- bench/peers/block.py measures the same in PyTorch; bench/fuser.sh runs both and prints the table. Both ways of
-- running are timed in turns on the same weights. bf16 keeps float32 weights, as in training. Beside the times stand
-- the bytes that the plan predicts (seq:explain) and those that kernels moved (te.profile). y_norm and grad_norm tell
-- whether the peer does the same work.

local te = require "te"
local measure = dofile((arg[0]:match("^(.*/)") or "./") .. "measure.lua")
local clock = te._core.clock

local command_line = te.train.command_line {
    script = "fuser.lua",
    about = "Times a pre-norm MLP or a GPT block, fused and unfused.",
    { "model", "string", "mlp", choices = { "mlp", "block" }, help = "the MLP of a block, or all of it" },
    { "dtype", "string", "fp32", choices = { "fp32", "bf16" }, help = "of the computation; weights stay float32" },
    { "width", "integer", 256, min = 64, max = 16384, help = "of the residual stream; a head is 64 wide" },
    { "tokens", "integer", 0, min = 0, help = "0: 65536 / width, at least 32" },
    { "threads", "integer", 1, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    { "runs", "integer", 9, min = 2, help = "fewest steps timed" },
    { "seconds", "number", 0.5, min = 0, max = 3600, help = "shortest time measured; short steps run more often" },
    { "start", "string", help = "file for weights, input and gradient, so that the peer can start from the same" },
    { "json", "boolean", false, help = "one JSON object instead of text" },
}

-- The sequence of a block is 128 tokens long where there are as many.
local SEQUENCE = 128

local function build(model, width)
    local mlp = te.Residual(te.LayerNorm(width), te.Linear(width, 4 * width), te.GELU { approximate = "none" },
        te.Linear(4 * width, width))
    if model == "mlp" then return te.Sequential(mlp) end
    return te.Sequential(te.Residual(te.LayerNorm(width), te.MultiHeadedSelfAttention(width, width / 64)), mlp)
end

-- A container keeps its plan for one setting, so each setting has a container of its own over the same operations.
local function variants(o)
    local fused = build(o.model, o.width)
    local unfused = te.Sequential(unpack(fused))
    return { fused = fused, unfused = unfused }
end

local function shape(o)
    local tokens = o.tokens > 0 and o.tokens or math.max(32, 65536 / o.width)
    local sequence = math.min(tokens, SEQUENCE)
    return { math.floor(tokens / sequence), sequence, o.width }
end

local function build_step(o)
    te.manual_seed(1)
    local models, dtype = variants(o), o.dtype == "bf16" and "bfloat16" or "float32"
    local autocast = { dtype = dtype, enabled = o.dtype == "bf16" }
    local x, dy = te.randn(shape(o), { dtype = dtype }), te.randn(shape(o), { dtype = dtype })
    x.requires_grad = true
    if o.start then
        local tensors = { x = x:detach():to("float32"), dy = dy:to("float32") }
        for name, parameter in models.fused:named_parameters() do tensors[name] = parameter end
        te.save(o.start, tensors, {})
    end

    local bench = { tokens = x:size(1) * x:size(2) }
    function bench.run(kind)
        local model, before = models[kind], te.set_fusion(kind == "fused")
        model:zero_grad()
        x.grad = nil
        local y = te.autocast(autocast, model, x)
        y:backward(dy)
        te.set_fusion(before)
        return y
    end
    -- A pair of neighbours in time, in alternating order: their ratio is the same on a machine
    -- that is slow for a while.
    local order = { "fused", "unfused" }
    function bench.step()
        local times = {}
        for _, kind in ipairs(order) do
            local start = clock()
            bench.run(kind):release()
            times[kind] = clock() - start
        end
        order[1], order[2] = order[2], order[1]
        times.ratio = times.unfused / times.fused
        return times
    end
    function bench.predicted() return te.autocast(autocast, models.fused.explain, models.fused, x) end
    function bench.grads()
        local grads = { x.grad }
        for _, parameter in ipairs(models.fused:parameters()) do grads[#grads + 1] = parameter.grad end
        return grads
    end
    return bench
end

-- How many times as long as its products and attention alone the unfused step takes, each kernel at its fastest of some
-- profiles: others who use the machine delay one or the other. Both ways of running compute those, so
-- no fusion can give more.
local function ratio_at_most(bench)
    local fastest, is_shared = {}, {}
    for _ = 1, 25 do
        for i, event in ipairs(te.profile(function() bench.run("unfused") end).events) do
            fastest[i] = math.min(fastest[i] or math.huge, event.seconds)
            is_shared[i] = event.name:find("^gemm") or event.name:find("^attention")
        end
    end
    local products, all = 0, 0
    for i, seconds in ipairs(fastest) do all, products = all + seconds, products + (is_shared[i] and seconds or 0) end
    return all / products
end

-- Bytes that kernels moved in one step, and those that the plan says.
local function count_bytes(bench)
    local moved = { fused = 0, unfused = 0 }
    for kind in pairs(moved) do
        bench.run(kind)
        for _, event in ipairs(te.profile(function() bench.run(kind) end).events) do
            moved[kind] = moved[kind] + event.bytes
        end
    end
    local plan, predicted = bench.predicted(), 0
    for _, steps in ipairs { plan.forward, plan.backward } do
        for _, step in ipairs(steps) do predicted = predicted + step.bytes end
    end
    return moved, predicted
end

local function norm_of(tensors)
    local _, total = te._core.sum_squares(tensors)
    return math.sqrt(total)
end

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    local bench = build_step(o)
    local y_norm = norm_of { bench.run("fused"):detach():to("float32") }
    local grad_norm = norm_of(bench.grads())
    if y_norm - y_norm ~= 0 or grad_norm - grad_norm ~= 0 then error("a result is not finite") end
    local moved, predicted = count_bytes(bench)
    local times, at_most = measure.steps(bench.step, o.runs, o.seconds), ratio_at_most(bench)
    local fused, unfused = times.parts.fused, times.parts.unfused
    if o.json then
        for _, kind in ipairs { "fused", "unfused" } do
            print(measure.json { "system", "tetrain", "mode", kind, "model", o.model, "dtype",
                o.dtype, "width", o.width, "tokens", bench.tokens, "threads", te.get_num_threads(), "steps", times.runs,
                "ms", times.parts[kind] * 1e3, "ratio", times.parts.ratio, "bytes", moved[kind],
                "plan_bytes", kind == "fused" and predicted or 0, "at_most", at_most, "y_norm", y_norm,
                "grad_norm", grad_norm })
        end
        return
    end
    print(("%s %s, width %d, %d tokens: fused %.3f ms, unfused %.3f ms, ratio %.2f, at most %.2f"):format(
        o.model, o.dtype, o.width, bench.tokens, fused * 1e3, unfused * 1e3, times.parts.ratio, at_most))
    print(("bytes: fused %.2f MB (plan %.2f MB), unfused %.2f MB"):format(moved.fused / 1e6, predicted / 1e6,
        moved.unfused / 1e6))
end)
