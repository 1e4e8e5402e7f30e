-- Kernels whose floor is memory, on tensors larger than the caches: elements and bytes per nanosecond, and the share of
-- what the machine streams.
--
--     tetrain bench/kernels.lua --threads=2 --machine=build/bench_machine
--
-- Bytes are those of inputs and outputs, each once: what a perfect kernel would move. What the machine streams
-- changes from second to second where others use its memory, so every kernel is measured in rounds, all kernels of a
-- group in turn, with bench_machine before and after each: the share is the kernel's best round to the best that was
-- streamed. The machine does not stream as much when it writes other memory than it reads, so there is a second
-- share, of the fastest loop that reads and writes in the same proportion: read writes nothing, copy one byte for each
-- that is read, triad one for two; what reads and writes in place is held against the fastest of all, bandwidth.

local te = require "te"
local measure = dofile((arg[0]:match("^(.*/)") or "./") .. "measure.lua")
local clock = te._core.clock

local command_line = te.train.command_line {
    script = "kernels.lua",
    about = "Measures kernels that memory limits.",
    { "threads", "integer", 2, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    { "machine", "string", "", help = "path of bench_machine, which says what memory streams; empty: no shares" },
    { "seconds", "number", 0.5, min = 0.001, max = 60, help = "per kernel" },
    { "rounds", "integer", 3, min = 1, max = 100, help = "over which the seconds are spread" },
    { "only", "string", "", help = "part of the names of the kernels to measure" },
}

local ROWS, WIDTH = 8192, 3072
local TOKENS, VOCABULARY = 1024, 50304

local function tensor(dtype, rows, width, requires_grad)
    return te.randn({ rows, width }, { dtype = dtype, requires_grad = requires_grad })
end

-- Cases are { name, bytes moved per element of the large tensor, function, the loop with such traffic }.
-- What the function returns, if anything, is the time that counts. The loop is copy, or triad where a
-- gradient is made, unless said.

local function forward(fn) return function() fn():release() end end

-- Only the backward of `fn`, whose inputs are `leaves`.
local function backward(leaves, fn, dy)
    return function()
        local y = fn()
        local start = clock()
        y:backward(dy)
        local seconds = clock() - start
        for _, leaf in ipairs(leaves) do leaf.grad = nil end
        y:release() -- or the next gradient takes new pages
        return seconds
    end
end

local function pointwise(dtype, size)
    local x, y = tensor(dtype, ROWS, WIDTH), tensor(dtype, ROWS, WIDTH)
    local leaf = tensor(dtype, ROWS, WIDTH, true)
    local function gelu(kind) return function() return te.gelu(leaf, { approximate = kind }) end end
    return {
        { "add", 3 * size, forward(function() return te.add(x, y) end), "triad" },
        { "GELU tanh", 2 * size, forward(function() return te.gelu(x) end) },
        { "GELU tanh backward", 3 * size, backward({ leaf }, gelu("tanh"), y) },
        { "GELU exact", 2 * size, forward(function() return te.gelu(x, { approximate = "none" }) end) },
        { "GELU exact backward", 3 * size, backward({ leaf }, gelu("none"), y) },
        { "cast", 6, forward(function() return x:to(dtype == "float32" and "bfloat16" or "float32") end) },
        { "transpose", 2 * size, forward(function() return x:transpose(1, 2):contiguous() end) },
    }
end

local function rows(dtype, size)
    local x, dy = tensor(dtype, ROWS, WIDTH), tensor(dtype, ROWS, WIDTH)
    local leaf = tensor(dtype, ROWS, WIDTH, true)
    local gamma = te.ones({ WIDTH }, { requires_grad = true })
    return {
        { "LayerNorm", 2 * size, forward(function() return te.layer_norm(x, gamma:detach()) end) },
        { "LayerNorm backward", 3 * size,
            backward({ leaf, gamma }, function() return te.layer_norm(leaf, gamma) end, dy) },
        { "RMSNorm", 2 * size, forward(function() return te.rms_norm(x, gamma:detach()) end) },
        { "softmax", 2 * size, forward(function() return te.softmax(x, -1) end) },
        { "softmax backward", 3 * size, backward({ leaf }, function() return te.softmax(leaf, -1) end, dy) },
        { "column sum", size, forward(function() return te.sum(x, 1) end), "read" },
    }
end

local function losses(dtype, size)
    local logits = tensor(dtype, TOKENS, VOCABULARY, true)
    local targets = te.randint(0, VOCABULARY - 1, { TOKENS }, { dtype = "int32" })
    local function loss() return te.cross_entropy(logits, targets) end
    return {
        { "cross entropy", size, forward(function() return te.no_grad(loss) end), "read" },
        { "cross entropy backward", 2 * size, backward({ logits }, loss), "copy" },
    }
end

-- A quantizer reads x (twice where its factor is that of the whole tensor) and writes a byte, or half of one, per
-- element and direction; factors of blocks are not counted.
local function quantizers(dtype, size)
    local x = tensor(dtype, ROWS, WIDTH)
    local recipe = te.recipe
    local kinds = {
        { "delayed", recipe.DelayedScaling {}, 1, 1 }, { "current", recipe.Float8CurrentScaling {}, 1, 2 },
        { "MXFP8", recipe.MXFP8BlockScaling {}, 1, 1 }, { "1x128", recipe.Float8BlockScaling {}, 1, 1 },
        { "128x128", recipe.Float8BlockScaling {}, 1, 1, "weight" },
        { "NVFP4", recipe.NVFP4BlockScaling { disable_rht = true }, 0.5, 2 },
        { "NVFP4 RHT", recipe.NVFP4BlockScaling {}, 0.5, 2 },
        { "NVFP4 stochastic", recipe.NVFP4BlockScaling {}, 0.5, 2, "grad_output" },
        { "NVFP4 16x16", recipe.NVFP4BlockScaling {}, 0.5, 2, "weight" },
        { "NVFP4 4over6", recipe.NVFP4BlockScaling { nvfp4_4over6 = "weights" }, 0.5, 2, "weight" },
    }
    local cases = {}
    for _, kind in ipairs(kinds) do
        local name, how, written, reads, role = unpack(kind)
        for columns = 0, 1 do
            local options = { columnwise = columns == 1 }
            cases[#cases + 1] = { name .. (columns == 1 and " both" or ""), reads * size + written * (1 + columns),
                function()
                    for _, part in pairs(te.quantize(x, how, role, options):state_dict()) do part:release() end
                end }
        end
        local q = te.quantize(x, how, role)
        cases[#cases + 1] = { name .. " back", size + written, forward(function() return q:dequantize() end) }
    end
    return cases
end

local function optimizer()
    local function one(fill) return { te.full({ ROWS, WIDTH }, fill) } end
    local params, grads, m, v = one(1), one(1e-3), one(0), one(0)
    return {
        { "AdamW", 28, function()
            te._core.adamw_step { { params = params, grads = grads, exp_avg = m, exp_avg_sq = v, lr = 1e-3, beta1 = 0.9,
                beta2 = 0.99, eps = 1e-8, weight_decay = 0.1, step = 1, grad_scale = 1 } }
        end, "bandwidth" },
        { "gradient norm", 4, function() te._core.sum_squares(grads) end, "read" },
    }
end

-- GB/s of every loop at the moment; nil without bench_machine.
local function streams(o)
    if o.machine == "" then return end
    local pipe = assert(io.popen(("%s %d 0.02 --streams"):format(o.machine, te.get_num_threads())))
    local text, rates = pipe:read("*a"), {}
    pipe:close()
    for loop, rate in text:gmatch('"(%w+)_gb_s": ([%d.]+)') do rates[loop] = tonumber(rate) end
    if not rates.bandwidth then error(("kernels.lua: %s printed no bandwidth: %s"):format(o.machine, text)) end
    return rates
end

-- Raises `best` to `rates`, loop by loop.
local function raise(best, rates)
    for loop, rate in pairs(rates or {}) do best[loop] = math.max(best[loop] or 0, rate) end
end

-- Time of the fastest run of every case, in seconds, and the rates of the loops beside it.
local function in_rounds(o, cases)
    local times, rates = {}, {}
    local before = streams(o)
    for _ = 1, o.rounds do
        for i, case in ipairs(cases) do
            local seconds, after = measure.best(case[3], o.seconds / o.rounds), streams(o)
            times[i], rates[i] = math.min(times[i] or math.huge, seconds), rates[i] or {}
            raise(rates[i], before)
            raise(rates[i], after)
            before = after
        end
    end
    return times, rates
end

local function share(rate, loop, rates)
    return rates[loop] and ("%5.0f%% of %s"):format(100 * rate / rates[loop], loop) or ""
end

local function print_cases(o, dtype, elements, all)
    local cases = {}
    for _, case in ipairs(all) do
        if case[1]:find(o.only, 1, true) then cases[#cases + 1] = case end
    end
    local times, rates = in_rounds(o, cases)
    for i, case in ipairs(cases) do
        local name, bytes, _, loop = unpack(case)
        loop = loop or (name:find("backward", 1, true) and "triad" or "copy")
        local rate = bytes * elements / times[i] * 1e-9
        print(("%-24s %-9s %9.2f ms %7.2f Gel/s %8.1f GB/s %s %s"):format(name, dtype, times[i] * 1e3,
            elements / times[i] * 1e-9, rate, share(rate, "bandwidth", rates[i]), share(rate, loop, rates[i])))
    end
    collectgarbage()
end

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    te.manual_seed(1)
    for _, kind in ipairs { { "float32", 4 }, { "bfloat16", 2 } } do
        local dtype, size = unpack(kind)
        print_cases(o, dtype, ROWS * WIDTH, pointwise(dtype, size))
        print_cases(o, dtype, ROWS * WIDTH, rows(dtype, size))
        print_cases(o, dtype, TOKENS * VOCABULARY, losses(dtype, size))
        print_cases(o, dtype, ROWS * WIDTH, quantizers(dtype, size))
    end
    print_cases(o, "float32", ROWS * WIDTH, optimizer())
end)
