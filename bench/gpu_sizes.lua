-- Kernels of the CUDA device on sizes as models have them, against the CPU: the specs go through every operation, but
-- on a few numbers. A line per case; the exit status is 1 when a case is too far off.
--
--     build/tetrain bench/gpu_sizes.lua [--quick | --once] [NAME…]
--     build/tetrain bench/gpu_sizes.lua --list
--
-- The distance is the norm of the difference beside the norm of what the CPU has; bytes of quantized tensors are equal
-- or not. Both sides start from the same numbers. --once: the device's side alone, for kernels that are to be compiled.

local te = require "te"
local clock = te._core.clock

local given, wanted = {}, {}
for _, a in ipairs(arg) do
    if a:match "^%-%-" then given[a] = true else wanted[#wanted + 1] = a end
end
local quick, list, once = given["--quick"], given["--list"], given["--once"]

-- A size, divided for machines where only the way is tested.
local function n(size) return quick and math.max(1, math.floor(size / 16)) or size end

local cases = {}
local function case(name, bound, run) cases[#cases + 1] = { name = name, bound = bound, run = run } end

local function randn(shape, dtype, scale)
    return (te.randn(shape, { device = "cpu" }) * (scale or 1)):to(dtype or "float32")
end

local function ids(shape, most) return te.randint(0, most - 1, shape, { dtype = "int32", device = "cpu" }) end

-- What `fn` makes of the inputs, and gradients of the floating ones with `leaf`, of a sum with random weights.
local function results_on(device, inputs, fn, leaves)
    local there, grads = {}, {}
    for i, t in ipairs(inputs) do
        there[i] = t:detach():to(device)
        if leaves and leaves[i] then there[i].requires_grad = true end
    end
    te.manual_seed(9)
    local out = { fn(unpack(there)) }
    if leaves then
        te.manual_seed(10)
        local dy = te.randn(out[1].shape, { device = "cpu" }):to(out[1].dtype):to(device)
        out[1]:backward(dy)
        for i, t in ipairs(there) do if leaves[i] then grads[#grads + 1] = t.grad end end
    end
    for _, g in ipairs(grads) do out[#out + 1] = g end
    return out
end

local function distance(a, b)
    a, b = a:detach():to("cpu"):to("float64"), b:detach():to("cpu"):to("float64")
    return ((a - b):norm() / (b:norm() + 1e-30)):item()
end

local function compare(inputs, fn, leaves)
    local there = results_on("cuda", inputs, fn, leaves)
    if once then return 0, "" end
    local here = results_on("cpu", inputs, fn, leaves)
    local worst, each = 0, {}
    for i, t in ipairs(here) do
        local off = distance(there[i], t)
        if off ~= off then off = math.huge end
        each[i] = ("%.1e"):format(off)
        worst = math.max(worst, off)
    end
    return worst, table.concat(each, " ")
end

-- --- elementwise, rows, columns --------------------------------------------------------------------------------------

local ALL = { true, true, true, true, true }

for _, dtype in ipairs { "bfloat16", "float32" } do
    local bound = dtype == "bfloat16" and 8e-3 or 2e-5
    case("gelu " .. dtype, bound, function()
        return compare({ randn({ n(8192), 768 }, dtype) }, te.gelu, ALL)
    end)
    case("swiglu " .. dtype, bound, function()
        return compare({ randn({ n(4096), 2 * n(14336) }, dtype) }, te.swiglu, ALL)
    end)
    case("broadcast " .. dtype, bound, function()
        return compare({ randn({ n(512), 7, 33 }, dtype), randn({ 7, 1 }, dtype), randn({ 33 }, dtype) },
            function(a, b, c) return a * b + c end, ALL)
    end)
    case("transposed " .. dtype, bound, function()
        return compare({ randn({ n(2048), 777 }, dtype), randn({ 777, n(2048) }, dtype) },
            function(a, b) return te.clone(a:transpose()) + b end, ALL)
    end)
    case("sums " .. dtype, bound, function()
        return compare({ randn({ n(4096), 1111 }, dtype) }, function(x)
            return te.sum(x, 1), te.sum(x, 2), te.sum(x), te.max(x, 1), te.var(x, 2), te.norm(x)
        end)
    end)
    for _, width in ipairs { 1, 33, 768, 1600, 4096, 5001, 16384 } do
        local rows = n(width > 4000 and 1000 or 4097)
        case(("layer_norm %d %s"):format(width, dtype), bound, function()
            return compare({ randn({ rows, width }, dtype), randn { width }, randn { width } }, te.layer_norm,
                width > 1 and ALL or nil)
        end)
        case(("rms_norm %d %s"):format(width, dtype), bound, function()
            return compare({ randn({ rows, width }, dtype), randn { width } }, te.rms_norm, ALL)
        end)
        case(("softmax %d %s"):format(width, dtype), bound, function()
            return compare({ randn({ rows, width }, dtype) }, function(x) return te.softmax(x, -1) end,
                width > 1 and ALL or nil)
        end)
    end
    for _, classes in ipairs { 65, 50304, 128256 } do
        case(("cross_entropy %d %s"):format(classes, dtype), bound, function()
            local rows = n(classes > 1000 and 512 or 8192)
            return compare({ randn({ rows, n(classes) }, dtype), ids({ rows }, n(classes)) }, te.cross_entropy,
                { true })
        end)
    end
    case("embedding " .. dtype, bound, function()
        return compare({ randn({ 50304, n(768) }, dtype), ids({ n(8192) }, 50304) }, te.embedding, { true })
    end)
    case("embedding of equal ids " .. dtype, dtype == "bfloat16" and 2e-2 or 2e-5, function()
        return compare({ randn({ 100, 96 }, dtype), ids({ n(20000) }, 5) }, te.embedding, { true })
    end)
    case("rope " .. dtype, bound, function()
        return compare({ randn({ 2, 8, n(2048), 128 }, dtype), te.rand({ 64 }, { device = "cpu" }) }, te.rope,
            { true })
    end)
end

case("scatter_add, gather, index_add, index_copy", 1e-6, function()
    return compare({ randn { n(2048), 512 }, ids({ n(2048), 512 }, 512):to "int64", randn { n(2048), 512 },
        ids({ n(2048) }, n(2048)):to "int64" }, function(x, index, src, rows)
        return te.scatter_add(x, 2, index, src), te.gather(x, 2, index), te.index_add(x, 1, rows, src),
            te.index_copy(x, 1, te.flip(te.arange(1, x:size(1) - 1, 1, { dtype = "int64", device = x.device }), { 1 }),
                src:narrow(1, 1, x:size(1) - 1))
    end)
end)
case("topk, sort, cumsum, argmax", 1e-5, function()
    return compare({ randn { n(512), 4096 }, randn { 3, n(50304) } }, function(x, y)
        local v, i = te.topk(x, 50)
        local w, j = te.topk(y, 50)
        local s, k = te.sort(x)
        return v, i, w, j, s, k, te.cumsum(x, 2), te.cumsum(x, 1), te.argmax(y, 2), te.argmin(x, 1)
    end)
end)
case("sort of long rows", 0, function()
    return compare({ randn { 3, n(100000) } }, te.sort)
end)
case("multinomial, dropout, normal", 1e-6, function()
    return compare({ te.rand({ 64, n(50304) }, { device = "cpu" }), randn { n(4096), 1000 } }, function(w, x)
        return te.multinomial(w, 3), te.dropout(x, 0.1), te.normal(x)
    end)
end)
case("mixture of experts", 8e-3, function()
    local tokens, experts = n(4096), 32
    return compare({ randn({ tokens, 1024 }, "bfloat16"), randn { tokens, experts } }, function(x, logits)
        local probs, map = te.fused_topk_with_score_function(logits, 4)
        local rows, permuted, row_map = te.moe_permute_with_probs(x, probs, map)
        return te.moe_unpermute(rows, row_map, probs), rows, permuted
    end, { true })
end)

-- --- products --------------------------------------------------------------------------------------------------------

for _, size in ipairs { { 4096, 768, 3072 }, { 1000, 1111, 333 }, { 1, 4096, 4096 }, { 128, 1024, 1024 } } do
    for _, dtype in ipairs { "bfloat16", "float16", "float32" } do
        local rows, inner, outer = n(size[1]), n(size[2]), n(size[3])
        case(("linear %dx%dx%d %s"):format(size[1], size[2], size[3], dtype), dtype == "float32" and 1e-5 or 8e-3,
            function()
            return compare({ randn({ rows, inner }, dtype), randn({ outer, inner }, dtype, inner ^ -0.5),
                randn({ outer }, dtype) }, te.linear, ALL)
        end)
    end
end
case("matmul, batches", 8e-3, function()
    return compare({ randn({ 4, 3, n(512), 128 }, "bfloat16"), randn({ 3, 128, n(384) }, "bfloat16", 0.1) }, te.matmul,
        ALL)
end)

-- A layer with all that its products fuse, in a recipe, two steps: the second one has factors of the first.
local RECIPES = {
    { "delayed", function() return te.recipe.DelayedScaling { amax_history_len = 4 } end, 0.08 },
    { "current", function() return te.recipe.Float8CurrentScaling {} end, 0.08 },
    { "blocks", function() return te.recipe.Float8BlockScaling {} end, 0.08 },
    { "MXFP8", function() return te.recipe.MXFP8BlockScaling {} end, 0.08 },
    { "NVFP4", function() return te.recipe.NVFP4BlockScaling { disable_stochastic_rounding = true } end, 0.3 },
}
local function mlp_steps(recipe)
    return function(x, w1, b1, w2)
        local model = te.Sequential(te.LayerNorm(w1.shape[2]), te.Linear(w1.shape[2], w1.shape[1]),
            te.GELU { approximate = "tanh" }, te.Linear(w2.shape[2], w2.shape[1], { bias = false })):to(x.device)
        te.no_grad(function()
            model[2].weight:copy_(w1)
            model[2].bias:copy_(b1)
            model[4].weight:copy_(w2)
        end)
        local kept = {}
        for step = 1, 2 do
            te.manual_seed(step)
            local y = te.autocast({ recipe = recipe, dtype = "bfloat16" }, model, x)
            te.sum(y:to "float32" * y:to "float32"):backward()
            kept[#kept + 1] = y
            for _, p in ipairs(model:parameters()) do
                kept[#kept + 1] = p.grad:clone()
                p.grad = nil
            end
        end
        return unpack(kept)
    end
end
for _, recipe in ipairs(RECIPES) do
    for _, rows in ipairs { 2048, 37 } do
        case(("steps under %s, %d tokens"):format(recipe[1], rows), recipe[3], function()
            local width = n(1024)
            local how = { cpu = recipe[2](), cuda = recipe[2]() }
            return compare({ randn({ rows == 37 and 37 or n(rows), width }, "bfloat16"),
                randn({ 4 * width, width }, nil, 0.03), randn { 4 * width },
                randn({ width, 4 * width }, nil, 0.03) }, function(x, ...)
                return mlp_steps(how[x.device:match "%a+"])(x, ...)
            end)
        end)
    end
end

-- --- quantizing ------------------------------------------------------------------------------------------------------

local function bytes_of(t) return te._core.tensor_bytes(t:detach():to("cpu"):contiguous()) end

local QUANTIZERS = {
    { "E4M3, a factor a tensor", function() return te.recipe.Float8CurrentScaling {} end },
    { "E4M3, 1 x 128", function() return te.recipe.Float8BlockScaling {} end },
    { "E4M3, 128 x 128", function() return te.recipe.Float8BlockScaling {} end, "weight" },
    { "E4M3, 1 x 128, float32 factors", function() return te.recipe.Float8BlockScaling { use_f32_scales = true } end },
    { "MXFP8", function() return te.recipe.MXFP8BlockScaling {} end },
    { "MXFP8, 32 x 32", function() return te.recipe.MXFP8BlockScaling { enable_2d_quantization = true } end, "weight" },
    { "NVFP4", function() return te.recipe.NVFP4BlockScaling {} end },
    { "NVFP4, 16 x 16", function() return te.recipe.NVFP4BlockScaling {} end, "weight" },
    { "NVFP4, stochastic", function() return te.recipe.NVFP4BlockScaling {} end, "grad_output" },
    { "NVFP4, 4 or 6", function()
        return te.recipe.NVFP4BlockScaling { nvfp4_4over6 = "weights" }
    end, "weight" },
}
for _, q in ipairs(QUANTIZERS) do
    for _, dtype in ipairs { "bfloat16", "float32" } do
        for _, size in ipairs { { 1024, 2048 }, { 208, 176 } } do
            case(("quantize %dx%d %s: %s"):format(size[1], size[2], dtype, q[1]), 0, function()
                local x = randn({ n(size[1]), n(size[2]) }, dtype)
                te.no_grad(function()
                    x:narrow(1, 1, 1):mul_(1000)
                    x:narrow(2, 3, 1):fill_(0)
                end)
                local parts, wrong = {}, {}
                for _, device in ipairs { "cpu", "cuda" } do
                    te.manual_seed(3)
                    local t = te.quantize(x:to(device), q[2](), q[3] or "input", { columnwise = true })
                    parts[device] = t:state_dict()
                    parts[device].dequantized = t:dequantize()
                end
                for name, part in pairs(parts.cpu) do
                    local a, b = bytes_of(part), bytes_of(parts.cuda[name])
                    local differ = 0
                    for i = 1, #a do if a:byte(i) ~= b:byte(i) then differ = differ + 1 end end
                    if #a ~= #b or differ > 0 then
                        wrong[#wrong + 1] = ("%s: %d of %d bytes"):format(name, differ, #a)
                    end
                end
                return #wrong, table.concat(wrong, ", ")
            end)
        end
    end
end

-- --- attention -------------------------------------------------------------------------------------------------------

local function attention(name, opts, sizes)
    for _, dtype in ipairs(sizes.dtypes or { "bfloat16", "float16" }) do
        case(("attention %s, head %d %s"):format(name, sizes.dim, dtype), dtype == "float32" and 3e-5 or 1.5e-2,
            function()
                local batch, heads, dim = sizes.batch or 2, sizes.heads or 4, sizes.dim
                local kv, seq, keys = sizes.kv or heads, n(sizes.seq or 512), n(sizes.keys or sizes.seq or 512)
                local inputs = { randn({ batch, heads, seq, dim }, dtype), randn({ batch, kv, keys, dim }, dtype),
                    randn({ batch, kv, keys, dim }, dtype) }
                return compare(inputs, function(q, k, v)
                    return te.scaled_dot_product_attention(q, k, v, nil, opts)
                end, not sizes.forward and ALL or nil)
            end)
    end
end

attention("causal", { causal = true }, { dim = 64, seq = 1024 })
attention("causal", { causal = true }, { dim = 128, seq = 1024 })
attention("causal", { causal = true }, { dim = 64, dtypes = { "float32" } })
attention("causal", { causal = true }, { dim = 40, seq = 500 })
attention("causal", { causal = true }, { dim = 256, seq = 256 })
attention("full, ragged", {}, { dim = 64, seq = 333, keys = 777 })
attention("grouped", { causal = true }, { dim = 128, heads = 8, kv = 2 })
attention("window", { causal = true, window_left = 100 }, { dim = 64 })
attention("dropout", { causal = true, dropout = 0.1 }, { dim = 64 })
attention("dropout", { causal = true, dropout = 0.1 }, { dim = 128, heads = 8, kv = 2 })
attention("dropout", { dropout = 0.1 }, { dim = 64, dtypes = { "float32" } })

local HALF = { "bfloat16" }
attention("window that own kernels are faster with", { causal = true, window_left = 64 },
    { dim = 64, seq = 4096, heads = 2, dtypes = HALF })
attention("window of 64", { causal = true, window_left = 64 }, { dim = 64, seq = 1024, dtypes = HALF })
attention("window of 200, grouped", { causal = true, window_left = 200 },
    { dim = 128, seq = 4096, heads = 4, kv = 2, batch = 1, dtypes = HALF })
attention("window, own kernels, odd", { causal = true, window_left = 64 },
    { dim = 64, seq = 3001, heads = 2, dtypes = HALF })
attention("last position", { causal = true, bottom_right = true }, { dim = 64, seq = 256, keys = 2048, dtypes = HALF })
attention("last position", { causal = true, bottom_right = true }, { dim = 128, seq = 512, keys = 1024, dtypes = HALF })
attention("last position, odd", { causal = true, bottom_right = true },
    { dim = 64, seq = 333, keys = 777, dtypes = HALF })
attention("last position, as many keys, odd", { causal = true, bottom_right = true },
    { dim = 64, seq = 777, dtypes = HALF })
attention("last position, more queries", { causal = true, bottom_right = true },
    { dim = 64, seq = 777, keys = 333, dtypes = HALF })
attention("last position, window", { causal = true, bottom_right = true, window_left = 100 },
    { dim = 64, seq = 300, keys = 1000, dtypes = HALF })
attention("last position, grouped", { causal = true, bottom_right = true },
    { dim = 128, heads = 8, kv = 2, seq = 200, keys = 1111, dtypes = HALF })
attention("decoding", {}, { dim = 128, seq = 16, keys = 4096, heads = 8, kv = 2, forward = true })
case("attention with a bias", 1.5e-2, function()
    return compare({ randn({ 2, 4, n(256), 64 }, "bfloat16"), randn({ 2, 4, n(256), 64 }, "bfloat16"),
        randn({ 2, 4, n(256), 64 }, "bfloat16"), randn({ 4, n(256), n(256) }) }, te.scaled_dot_product_attention, ALL)
end)

-- A bias that takes no gradient goes another way: `of` the dimensions of the scores that it names, with keys that are
-- hidden in a share of all places, and rows or batch entries in which all of them are. The gradients are those of the
-- operands. A dtype of bool: a mask of what is seen.
local function biased(name, opts, sizes, bias)
    for _, dtype in ipairs(sizes.dtypes or HALF) do
        local own = bias.dtype == "like" and dtype or bias.dtype
        case(("attention %s, head %d %s"):format(name, sizes.dim, dtype), 1.5e-2, function()
            local batch, heads, dim, seq = sizes.batch or 2, sizes.heads or 4, sizes.dim, n(sizes.seq or 512)
            local kv, keys = sizes.kv or heads, n(sizes.keys or sizes.seq or 512)
            local full, shape = { batch, heads, seq, keys }, {}
            for i = 1, 4 do shape[i] = bias.of:find(("bhqk"):sub(i, i), 1, true) and full[i] or 1 end
            local b = randn(shape)
            local seen = te.ge(te.rand(shape, { device = "cpu" }), bias.hidden or 0):to "float32"
            if bias.rows then -- all keys of every third row, or of every batch entry but the first
                local of = shape[3] > 1 and 3 or 1
                te.no_grad(function()
                    for i = 2, shape[of], of do seen:narrow(of, i, 1):fill_(0) end
                end)
            end
            local added = bias.lowest and (seen - 1) * bias.lowest or te.log(seen)
            local given = bias.dtype == "bool" and te.gt(seen, 0) or (b + added):to(own)
            local inputs = { randn({ batch, heads, seq, dim }, dtype), randn({ batch, kv, keys, dim }, dtype),
                randn({ batch, kv, keys, dim }, dtype), given }
            return compare(inputs, function(q, k, v, added)
                return te.scaled_dot_product_attention(q, k, v, added, opts)
            end, not (bias.lowest and bias.rows) and { true, true, true, false } or nil)
        end)
    end
end

biased("bias of all", {}, { dim = 64, seq = 512 }, { of = "bhqk", dtype = "like" })
biased("bias of heads and queries", {},
    { dim = 128, seq = 1024, dtypes = { "float16" } }, { of = "hqk", dtype = "like" })
biased("bias of queries, causal", { causal = true }, { dim = 64, seq = 1024 }, { of = "qk", dtype = "like" })
biased("bias of batch entries", {}, { dim = 64, seq = 1024 }, { of = "bk", dtype = "like" })
biased("bias of heads", {}, { dim = 64, seq = 512 }, { of = "hk", dtype = "like" })
biased("bias of keys", {}, { dim = 64, seq = 512 }, { of = "k", dtype = "like" })
biased("bias in float32", {}, { dim = 64, seq = 512 }, { of = "bhqk", dtype = "float32" })
biased("bias of heads in float32", {}, { dim = 128, seq = 512 }, { of = "hqk", dtype = "float32" })
biased("bias, grouped", { causal = true }, { dim = 128, heads = 8, kv = 2, seq = 640 }, { of = "hqk", dtype = "like" })
biased("bias, window", { causal = true, window_left = 64 }, { dim = 64, seq = 1024 }, { of = "hqk", dtype = "like" })
biased("bias, odd", {}, { dim = 64, seq = 333, keys = 777 }, { of = "bhqk", dtype = "like" })
biased("bias, odd, causal", { causal = true }, { dim = 128, seq = 1001 }, { of = "hqk", dtype = "like" })
biased("bias in float32, odd", {}, { dim = 64, seq = 333, keys = 777 }, { of = "qk", dtype = "float32" })
biased("bias of batch entries, odd", {}, { dim = 64, seq = 130, keys = 131 }, { of = "bk", dtype = "like" })
biased("bias at lengths that cuDNN errs in", {}, { dim = 64, seq = 704 }, { of = "qk", dtype = "like" })
biased("bias at the last position", { causal = true, bottom_right = true }, { dim = 64, seq = 256, keys = 512 },
    { of = "qk", dtype = "like" })
biased("bias with hidden keys", {}, { dim = 64, seq = 512 }, { of = "bhqk", dtype = "like", hidden = 0.5 })
biased("bias with hidden rows", {},
    { dim = 64, seq = 512, dtypes = { "bfloat16", "float16" } },
    { of = "hqk", dtype = "like", hidden = 0.5, rows = true })
biased("bias with hidden rows, causal", { causal = true }, { dim = 128, seq = 640 },
    { of = "bhqk", dtype = "like", hidden = 0.9, rows = true }) -- also rows that see nothing by both
biased("bias with hidden rows, grouped, window", { causal = true, window_left = 10 },
    { dim = 64, heads = 8, kv = 2, seq = 512 }, { of = "qk", dtype = "like", hidden = 0.8, rows = true })
biased("bias in float32 with hidden rows, odd", {}, { dim = 64, seq = 333, keys = 777 },
    { of = "hqk", dtype = "float32", hidden = 0.5, rows = true })
-- Hidden by large numbers: rows in which all keys are see them all alike. Their gradients are nobody's.
biased("bias with keys at -1e9", {}, { dim = 64, seq = 512 },
    { of = "hqk", dtype = "like", hidden = 0.5, lowest = 1e9 })
biased("bias with rows of -1e9", {}, { dim = 64, seq = 512 },
    { of = "hqk", dtype = "like", hidden = 0.5, rows = true, lowest = 1e9 })
biased("bias with rows of -3e38", {}, { dim = 64, seq = 512 },
    { of = "hqk", dtype = "like", hidden = 0.5, rows = true, lowest = 3e38 })
biased("mask of batch entries", {}, { dim = 64, seq = 1024, batch = 4 }, { of = "bk", dtype = "bool", hidden = 0.3 })
biased("mask of batch entries, hidden ones", {}, { dim = 64, seq = 512, batch = 4 },
    { of = "bk", dtype = "bool", hidden = 0.3, rows = true })
biased("mask of all, hidden rows", {}, { dim = 128, seq = 512 },
    { of = "bhqk", dtype = "bool", hidden = 0.5, rows = true })
for _, dim in ipairs { 64, 128 } do
    for _, window in ipairs { 0, 100 } do
        local opts = { causal = true, window_left = window > 0 and window or nil }
        case(("attention sinks, window %d, head %d bfloat16"):format(window, dim), 1.5e-2, function()
            local heads, kv, seq = 8, dim == 128 and 2 or 8, n(dim == 128 and 777 or 1024)
            return compare({ randn({ 2, heads, seq, dim }, "bfloat16"), randn({ 2, kv, seq, dim }, "bfloat16"),
                randn({ 2, kv, seq, dim }, "bfloat16"), randn({ heads }) }, function(q, k, v, sinks)
                return te.scaled_dot_product_attention(q, k, v, nil, sinks, opts)
            end, ALL)
        end)
    end
end
case("attention of packed sequences", 1.5e-2, function()
    local lens = te.tensor({ n(300), 1, n(17), n(512) }, { dtype = "int32", device = "cpu" })
    local tokens = te.sum(lens):item()
    return compare({ randn({ tokens, 3 * 8 * 64 }, "bfloat16"), lens }, function(qkv, l)
        return te.self_attention(qkv, l, nil, { heads = 8, causal = true })
    end, { true })
end)

-- --- optimizers ------------------------------------------------------------------------------------------------------

case("AdamW with clipping", 1e-5, function()
    local inputs = {}
    for i = 1, 12 do inputs[i] = randn { n(768), ({ n(2304), 1, n(3072), 33 })[i % 4 + 1] } end
    return compare(inputs, function(...)
        local parameters = {}
        for i, t in ipairs { ... } do
            parameters[i] = t:clone()
            parameters[i].requires_grad = true
        end
        local optimizer = te.optim.AdamW(parameters, { lr = 1e-3, weight_decay = 0.1 })
        for step = 1, 3 do
            for i, p in ipairs(parameters) do p.grad = te.sin(select(i, ...) * step) end
            optimizer:step { clip = te.optim.grad_clip(parameters, { max = 1 }) }
        end
        return unpack(parameters)
    end)
end)

-- ---------------------------------------------------------------------------------------------------------------------

local failed, ran = 0, 0
for _, c in ipairs(cases) do
    local chosen = #wanted == 0
    for _, name in ipairs(wanted) do chosen = chosen or name == c.name end
    if list then
        print(c.name)
    elseif chosen then
        te.manual_seed(1)
        local start = clock()
        local ok, off, each = xpcall(c.run, debug.traceback)
        local good = ok and off <= c.bound
        ran = ran + 1
        if not good then failed = failed + 1 end
        print(("%s  %s: %s, %.1f s"):format(good and "ok" or "NOT OK", c.name,
            ok and ("%.2g (%s)"):format(off, each) or tostring(off):sub(1, 600), clock() - start))
        collectgarbage()
    end
end
if not list then print(("%d of %d cases failed"):format(failed, ran)) end
if failed > 0 or not list and ran == 0 then os.exit(1) end
