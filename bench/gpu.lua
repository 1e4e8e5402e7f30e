-- Kernels of the CUDA device against what the card can do. Lines that begin with BENCH are the results;
-- steps are in gpu_steps.lua.
--
--     build/tetrain bench/gpu.lua [--quick | --once]
--     build/tetrain bench/gpu.lua --products [--quick]     the times of matrix products alone, for the other form
--
-- Memory-bound kernels are given as a share of the bandwidth of a large copy, in bytes that they must read and write;
-- products and attention in operations a second. Each time is the fastest of several runs of ten calls in a
-- row. Products are measured again in a process that times every algorithm which cuBLASLt names, and given as a
-- share of the best of these.

local te = require "te"
local clock = te._core.clock
local only_products = arg[1] == "--products"
local quick = arg[only_products and 2 or 1] == "--quick" -- sizes for machines where only the way is tested
local once = quick or arg[1] == "--once" -- full sizes, for kernels that are to be compiled
local device = "cuda"

local function best_of(fn)
    for _ = 1, 2 do fn() end
    te.synchronize(device)
    local best = math.huge
    for _ = 1, once and 1 or 7 do
        local start = clock()
        for _ = 1, once and 1 or 10 do fn() end
        te.synchronize(device)
        best = math.min(best, (clock() - start) / (once and 1 or 10))
    end
    return best
end

local function bench(format, ...) print("BENCH " .. format:format(...)) end

local rows, width = quick and 16 or 32768, quick and 64 or 768
local function random(shape, dtype) return te.randn(shape, { device = device }):to(dtype or "bfloat16") end

local bandwidth -- of a large copy, bytes a second

local function copying()
    local big = random({ quick and 1000 or 64 * 1024 * 1024 }, "float32")
    local copy = te.empty(big.shape, { device = device })
    bandwidth = 2 * 4 * big:numel() / best_of(function() copy:copy_(big) end)
    bench("copy: %.0f GB/s", bandwidth / 1e9)
end

local function report(name, bytes, call)
    local seconds = best_of(call)
    bench("%s: %.1f us, %.0f%% of the copy's bandwidth", name, seconds * 1e6, 100 * bytes / seconds / bandwidth)
end

local function memory_bound()
    local x, y, w = random { rows, width }, random { rows, width }, random({ width }, "float32")
    local bytes = x:numel() * 2
    for _, case in ipairs {
        { "gelu", 2 * bytes, function() te.gelu(x):release() end },
        { "add", 3 * bytes, function() te.add(x, y):release() end },
        { "layer_norm", 2 * bytes, function() te.layer_norm(x, w, w):release() end },
        { "softmax", 2 * bytes, function() te.softmax(x, -1):release() end },
        { "sum over rows", bytes, function() te.sum(x, 1):release() end },
        { "transposed copy", 2 * bytes, function() te.clone(x:transpose()):release() end },
        { "rms_norm", 2 * bytes, function() te.rms_norm(x, w):release() end },
        { "dropout", 2 * bytes, function() te.dropout(x, 0.1):release() end },
        { "to float32", 3 * bytes, function() x:to("float32"):release() end },
    } do
        report(("%s %dx%d bfloat16"):format(case[1], rows, width), case[2], case[3])
    end
end

-- Forward and backward together: gradients of x and of the weight are written, nothing but y is kept beside x.
local function gradients()
    local x, w = random { rows, width }, random({ width }, "float32")
    local dy = random { rows, width }
    local bytes = x:numel() * 2
    x.requires_grad, w.requires_grad = true, true
    for _, case in ipairs {
        { "gelu", 5 * bytes, function() return te.gelu(x) end },
        { "layer_norm", 5 * bytes, function() return te.layer_norm(x, w, w) end },
    } do
        report(("%s and its gradient %dx%d bfloat16"):format(case[1], rows, width), case[2], function()
            case[3]():backward(dy)
            x.grad, w.grad = nil, nil
        end)
    end
    local classes, tokens = quick and 64 or 50304, quick and 16 or 4096
    local logits, table_ = random { tokens, classes }, random({ classes, width }, "float32")
    local ids = te.randint(0, classes - 1, { tokens }, { dtype = "int32", device = device })
    logits.requires_grad, table_.requires_grad = true, true
    report(("cross_entropy and its gradient %dx%d bfloat16"):format(tokens, classes), 3 * 2 * logits:numel(), function()
        te.cross_entropy(logits, ids):backward()
        logits.grad = nil
    end)
    local rows_dy = random({ tokens, width }, "float32")
    report(("embedding and its gradient, %d of %dx%d float32"):format(tokens, classes, width),
        (3 * rows_dy:numel() + table_:numel()) * 4, function()
            te.embedding(table_, ids):backward(rows_dy)
            table_.grad = nil
        end)
end

-- AdamW on as many numbers as GPT-2 124M has, in tensors of its sizes: parameter, gradient and two
-- moments, three are written.
local function optimizer()
    local parameters, n = {}, 0
    for i = 1, quick and 3 or 48 do
        local p = random({ quick and 64 or 768, quick and 64 or ({ 2304, 768, 3072, 3072 })[i % 4 + 1] }, "float32")
        p.requires_grad = true
        p.grad = random(p.shape, "float32")
        parameters[i], n = p, n + p:numel()
    end
    local adam = te.optim.AdamW(parameters, { lr = 1e-4 })
    report(("AdamW on %.1f million numbers"):format(n / 1e6), 28 * n, function() adam:step() end)
    report("AdamW after clipping", 32 * n, function()
        adam:step { clip = te.optim.grad_clip(parameters, { max = 1 }) }
    end)
end

-- A byte an element, or half of one, is written for each direction; the factor of a whole tensor needs a look before.
local function quantizing()
    local x = random { rows, quick and 128 or 1024 }
    local recipes = {
        { "E4M3, a factor a tensor", function() return te.recipe.Float8CurrentScaling {} end, 2 },
        { "E4M3, blocks", function() return te.recipe.Float8BlockScaling {} end, 1 },
        { "MXFP8", function() return te.recipe.MXFP8BlockScaling {} end, 1 },
        { "NVFP4", function() return te.recipe.NVFP4BlockScaling {} end, 2, 0.5 },
    }
    for _, recipe in ipairs(recipes) do
        local how = recipe[2]()
        report(("quantize %dx%d in both directions: %s"):format(x.shape[1], x.shape[2], recipe[1]),
            x:numel() * (2 * recipe[3] + 2 * (recipe[4] or 1)), function()
                for _, part in pairs(te.quantize(x, how, "input", { columnwise = true }):state_dict()) do
                    part:release()
                end
            end)
    end
end

-- Layers on few rows, as a token has them, read every weight once. A recorded graph of several, whose weights are more
-- than the caches hold; in FP8 x is quantized as well.
local function few_rows()
    local sizes = quick and { { 64, 64 } } or { { 768, 768 }, { 3072, 768 }, { 4096, 4096 }, { 4096, 14336 },
        { 28672, 4096 } }
    local fp8 = { recipe = te.recipe.Float8CurrentScaling {} }
    for _, size in ipairs(sizes) do
        local n, k = unpack(size)
        for _, options in ipairs { { dtype = "bfloat16" }, fp8 } do
            local kind, bytes = options.recipe and "FP8" or "bfloat16", n * k * (options.recipe and 1 or 2)
            local count = quick and 2 or math.min(math.max(math.ceil(3e8 / bytes), 4), 64)
            local layers = {}
            for i = 1, count do
                layers[i] = te.quantized_model_init({ recipe = fp8.recipe, enabled = options.recipe ~= nil }, te.Linear,
                    k, n, { bias = false }):to(device)
                if not options.recipe then layers[i]:to "bfloat16" end
            end
            for _, m in ipairs { 1, 8, 9 } do
                local x = random { m, k }
                local graph = te.graph(function()
                    te.no_grad(te.autocast, options, function() for i = 1, count do layers[i](x) end end)
                end, {})
                local seconds = best_of(graph) / count
                bench("linear %dx%dx%d %s: %.2f us, weights at %.0f%% of the copy's bandwidth", m, n, k, kind,
                    seconds * 1e6, 100 * bytes / seconds / bandwidth)
                graph:release()
            end
        end
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

-- The seconds of all products in another process, where as many algorithms are timed as there are.
-- Its choices are not kept.
local function exhaustive()
    local command = 'cache=$(mktemp -d) && TETRAIN_GEMM_CANDIDATES=10000 TETRAIN_CACHE=$cache '
        .. '"$(readlink /proc/$PPID/exe)" "%s" '
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
    bench("attention causal %dx%dx%dx%d: %.0f TFLOP/s forward, %.0f backward", batch, heads, seq, dim,
        work / forward / 1e12, 2.5 * work / (both - forward) / 1e12)
end

if only_products then
    for _, case in ipairs(PRODUCTS) do print(seconds_of(case)) end
    os.exit(0)
end

local failed = 0
for _, part in ipairs { copying, few_rows, attention, products, memory_bound, gradients, optimizer, quantizing } do
    local ok, problem = pcall(part)
    if not ok then
        bench("failed: %s", tostring(problem))
        failed = failed + 1
    end
    collectgarbage()
    te.empty_cache()
end
if failed > 0 then os.exit(1) end
