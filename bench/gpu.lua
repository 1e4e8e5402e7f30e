-- Kernels of the CUDA device against what the card can do. Lines that begin with BENCH are the results; steps are in gpu_steps.lua.
--
--     build/tetrain bench/gpu.lua [--quick]
--     build/tetrain bench/gpu.lua --products [--quick]     the times of matrix products alone, for the other form
--
-- Memory-bound kernels are given as a share of the bandwidth of a large copy, in bytes that they must read and write;
-- products and attention in operations a second. Each time is the fastest of several runs of ten calls in a row. Products are
-- measured again in a process that times every algorithm which cuBLASLt names, and given as a share of the best of these.

local te = require "te"
local clock = te._core.clock
local only_products = arg[1] == "--products"
local quick = arg[only_products and 2 or 1] == "--quick" -- sizes for machines where only the way is tested
local device = "cuda"

local function best_of(fn)
    for _ = 1, 2 do fn() end
    te.synchronize(device)
    local best = math.huge
    for _ = 1, quick and 1 or 7 do
        local start = clock()
        for _ = 1, quick and 1 or 10 do fn() end
        te.synchronize(device)
        best = math.min(best, (clock() - start) / (quick and 1 or 10))
    end
    return best
end

local function bench(format, ...) print("BENCH " .. format:format(...)) end

local rows, width = quick and 16 or 32768, quick and 64 or 768
local function random(shape, dtype) return te.randn(shape, { device = device }):to(dtype or "bfloat16") end

local function memory_bound()
    local x, y, w = random { rows, width }, random { rows, width }, random({ width }, "float32")
    local bytes = x:numel() * 2
    local big = random({ quick and 1000 or 64 * 1024 * 1024 }, "float32")
    local copy = te.empty(big.shape, { device = device })
    local bandwidth = 2 * 4 * big:numel() / best_of(function() copy:copy_(big) end)
    bench("copy: %.0f GB/s", bandwidth / 1e9)
    for _, case in ipairs {
        { "gelu", 2 * bytes, function() te.gelu(x):release() end },
        { "add", 3 * bytes, function() te.add(x, y):release() end },
        { "layer_norm", 2 * bytes, function() te.layer_norm(x, w, w):release() end },
        { "softmax", 2 * bytes, function() te.softmax(x, -1):release() end },
        { "sum over rows", bytes, function() te.sum(x, 1):release() end },
        { "transposed copy", 2 * bytes, function() te.clone(x:transpose()):release() end },
    } do
        local seconds = best_of(case[3])
        bench("%s %dx%d bfloat16: %.1f us, %.0f%% of the copy's bandwidth", case[1], rows, width, seconds * 1e6,
            100 * case[2] / seconds / bandwidth)
    end
end

local PRODUCTS = {
    { "bfloat16", 8192, 8192, 8192 }, { "bfloat16", 32768, 3072, 768 }, { "bfloat16", 32768, 768, 3072 },
    { "bfloat16", 32768, 2304, 768 }, { "float32", 4096, 4096, 4096 },
}
if quick then PRODUCTS = { { "bfloat16", 192, 192, 128 }, { "float32", 160, 160, 160 } } end

local function seconds_of(case)
    local dtype, m, n, k = unpack(case)
    local a, b = random({ m, k }, dtype), random({ n, k }, dtype)
    return best_of(function() te.linear(a, b):release() end)
end

-- The seconds of all products in another process, where as many algorithms are timed as there are. Its choices are not kept.
local function exhaustive()
    local command = 'cache=$(mktemp -d) && TETRAIN_GEMM_CANDIDATES=10000 TETRAIN_CACHE=$cache "$(readlink /proc/$PPID/exe)" "%s" '
        .. '--products %s; rm -rf "$cache"'
    local pipe, seconds = assert(io.popen(command:format(arg[0], quick and "--quick" or ""))), {}
    for line in pipe:lines() do seconds[#seconds + 1] = tonumber(line) end
    pipe:close()
    assert(#seconds == #PRODUCTS, "products cannot be measured in another process")
    return seconds
end

local function products()
    local chosen = {}
    for i, case in ipairs(PRODUCTS) do chosen[i] = seconds_of(case) end
    te.empty_cache()
    local best = exhaustive()
    for i, case in ipairs(PRODUCTS) do
        local dtype, m, n, k = unpack(case)
        bench("product %dx%dx%d %s: %.1f TFLOP/s, %.1f%% of the best algorithm's", m, n, k, dtype,
            2 * m * n * k / chosen[i] / 1e12, 100 * best[i] / chosen[i])
    end
end

local function attention()
    local batch, heads, seq, dim = quick and 1 or 4, quick and 2 or 16, quick and 32 or 4096, quick and 16 or 128
    local function operand()
        local t = random { batch, heads, seq, dim }
        t.requires_grad = true
        return t
    end
    local q, k, v = operand(), operand(), operand()
    local work = 4 * batch * heads * seq * seq * dim / 2
    local forward = te.no_grad(function()
        return best_of(function() te.scaled_dot_product_attention(q, k, v, nil, { causal = true }):release() end)
    end)
    local grad = random { batch, heads, seq, dim }
    local both = best_of(function()
        local out = te.scaled_dot_product_attention(q, k, v, nil, { causal = true })
        out:backward(grad)
        q.grad, k.grad, v.grad = nil, nil, nil
    end)
    bench("attention causal %dx%dx%dx%d: %.0f TFLOP/s forward, %.0f backward", batch, heads, seq, dim, work / forward / 1e12,
        2.5 * work / (both - forward) / 1e12)
end

if only_products then
    for _, case in ipairs(PRODUCTS) do print(seconds_of(case)) end
    os.exit(0)
end

local failed = 0
for _, part in ipairs { memory_bound, products, attention } do
    local ok, problem = pcall(part)
    if not ok then
        bench("failed: %s", tostring(problem))
        failed = failed + 1
    end
    collectgarbage()
    te.empty_cache()
end
if failed > 0 then os.exit(1) end
