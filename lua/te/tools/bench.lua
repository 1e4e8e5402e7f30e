--- tetrain bench: the engine's kernels beside what this machine allows, in a few seconds.
---
--- Two floors are measured first: how fast one big copy streams, and the best matrix product. Kernels that read and
--- write memory are shown as a share of the first, those that multiply as a share of the second.

local te = require "te"
local train = te.train
local clock = te._core.clock

local command_line = train.command_line {
    script = "bench",
    about = "Measures the engine's kernels against the limits of the machine.",
    { "dtype", "string", "float32", choices = { "float32", "bfloat16" }, help = "dtype of the operands" },
    { "rows", "size", 16384, max = 2 ^ 20, help = "rows of the operands" },
    { "width", "size", 1024, max = 2 ^ 16, help = "columns" },
    { "seconds", "number", 0.2, min = 0.001, max = 60, help = "seconds per kernel" },
    { "threads", "integer", 0, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
}

-- Seconds of the fastest call.
local function best(fn, seconds)
    local least, start, runs = math.huge, clock(), 0
    while runs < 3 or clock() - start < seconds do
        local before = clock()
        fn():release()
        least = math.min(least, clock() - before)
        runs = runs + 1
    end
    return least
end

-- { name, bytes, operations, function }; one of the two numbers says what limits the kernel.
local function cases(o)
    local size = o.dtype == "float32" and 4 or 2
    local function random(...) return te.randn({ ... }, { dtype = o.dtype }) end
    local x, y, n = random(o.rows, o.width), random(o.rows, o.width), o.rows * o.width
    local weight, gamma = random(o.width, o.width), te.ones { o.width }
    local ids = te.randint(0, o.rows - 1, { o.rows }, { dtype = "int32" })
    local heads = math.max(1, math.floor(o.width / 64))
    local q = random(2, heads, 256, 64)
    return {
        { "copy", 2 * size * n, nil, function() return x:clone() end },
        { "add", 3 * size * n, nil, function() return x + y end },
        { "gelu", 2 * size * n, nil, function() return te.gelu(x) end },
        { "layer_norm", 2 * size * n, nil, function() return te.layer_norm(x, gamma) end },
        { "softmax", 2 * size * n, nil, function() return te.softmax(x) end },
        { "sum of columns", size * n, nil, function() return x:sum(1) end },
        { "transpose", 2 * size * n, nil, function() return x:transpose(1, 2):contiguous() end },
        { "embedding", 2 * size * n, nil, function() return te.embedding(x, ids) end },
        { "linear", nil, 2 * n * o.width, function() return te.linear(x, weight) end },
        { "attention, causal", nil, 2 * 2 * 2 * heads * 256 * 256 * 64 / 2,
            function() return te.scaled_dot_product_attention(q, q, q, { causal = true }) end },
    }
end

return function(words)
    local o = command_line:parse(words)
    if o.threads > 0 then te.set_num_threads(o.threads) end
    te.manual_seed(1)
    te.no_grad(function()
        local big = te.ones { 2 ^ 24 }
        local bandwidth = 8 * 2 ^ 24 / best(function() return big:clone() end, o.seconds)
        big:release()
        local flops = train.peak_flops(o.dtype)
        print(("%d thread%s, %s; a copy streams %.1f GB/s, a matrix product reaches %.2f TFLOP/s in %s"):format(
            te.get_num_threads(), te.get_num_threads() == 1 and "" or "s", te._core.device_info "cpu", bandwidth * 1e-9,
            flops * 1e-12, o.dtype))
        for _, case in ipairs(cases(o)) do
            local name, bytes, operations, fn = unpack(case, 1, 4)
            local seconds = best(fn, o.seconds)
            local rate = (bytes or operations) / seconds
            print(("%-18s %9.3f ms  %8.1f %s  %4.0f%% of the %s"):format(name, seconds * 1e3, rate * 1e-9,
                bytes and "GB/s   " or "GFLOP/s", 100 * rate / (bytes and bandwidth or flops),
                bytes and "copy" or "product"))
        end
    end)
end
