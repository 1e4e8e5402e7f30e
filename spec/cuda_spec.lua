--- The CUDA device against the CPU: every operation and its gradient, a training run, memory, files. Without a device
--- the specs are pending, with the reason; TETRAIN_CUDA_LIBRARIES=build/cuda_fake gives every machine one.

local te = require "te"
local support = require "spec.support.op_cases"
local cards = require "spec.support.device"

local devices, reason = te.devices()

-- Values as doubles on the host; bit patterns matter where `exact` compares them.
local function values(t) return t:detach():to("cpu"):to("float64"):reshape(-1):totable() end

local function same(expected, actual, tolerance, what)
    assert.same(expected.shape, actual.shape)
    local a, b = values(expected), values(actual)
    for i = 1, #a do
        local equal = a[i] == b[i] or (a[i] ~= a[i] and b[i] ~= b[i])
        if not equal and not (math.abs(a[i] - b[i]) <= tolerance * (1 + math.abs(a[i]))) then
            error(("%s: element %d is %.9g on the CPU, %.9g on the device"):format(what, i, a[i], b[i]), 2)
        end
    end
end

-- Arguments with their tensors on a device; those of the gradient are fresh leaves.
local function place(args, device, wanted, leaves)
    local takes, result = {}, {}
    for _, i in ipairs(wanted or {}) do takes[i] = true end
    local function put(t, i)
        local there = t:detach():to(device)
        local floating = there.dtype:find("^float") or there.dtype == "bfloat16"
        if leaves and floating and (not wanted or takes[i]) then
            there.requires_grad = true
            leaves[#leaves + 1] = there
        end
        return there
    end
    for i = 1, support.count(args) do
        local value = args[i]
        if te.is_tensor(value) then
            value = put(value, i)
        elseif type(value) == "table" and te.is_tensor(value[1]) then
            local list = {}
            for k, t in ipairs(value) do list[k] = put(t, i) end
            value = list
        elseif value == te.get_default_device() then
            value = device
        end
        result[i] = value
    end
    return result
end

-- In float64 these are the C library's on the CPU, and CUDA's on the device.
local FROM_LIBRARY = { exp = true, log = true, pow = true, sin = true, cos = true, tanh = true, sigmoid = true,
    erf = true, expm1 = true, log1p = true }

-- Results of an operation and gradients of their weighted sum.
local function evaluate(op, args, device, wanted)
    local leaves = op.differentiable and {} or nil
    te.manual_seed(11)
    local placed = place(args, device, wanted, leaves)
    local results = { te[op.name](unpack(placed, 1, support.count(placed))) }
    if not leaves or #leaves == 0 or not results[1].requires_grad then return results, {} end
    local weights = te.arange(1, results[1]:numel(), 1, { dtype = "float32", device = device }):view(results[1].shape)
    te.sum(results[1] * (weights / results[1]:numel())):backward()
    local gradients = {}
    for i, leaf in ipairs(leaves) do gradients[i] = leaf.grad end
    return results, gradients
end

describe("a CUDA device", function()
    if not devices[2] then
        pending(reason)
        return
    end

    -- Sums have another order; products of bfloat16 are rounded from other sums.
    for _, case in ipairs { { "float32", 3e-6 }, { "bfloat16", 2e-2 }, { "float64", 1e-12 } } do
        local dtype, tolerance = case[1], case[2]
        it("computes every operation as the CPU does, in " .. dtype, function()
            for _, op in ipairs(te.ops_list()) do
                te.manual_seed(5)
                local args, wanted = support.arguments(op, dtype)
                local expected, expected_grads = evaluate(op, args, "cpu", wanted)
                local actual, actual_grads = evaluate(op, args, "cuda", wanted)
                for i = 1, #expected do
                    -- element by element the bits are the same, but for functions that are another library's
                    local bits = (op.inplace or op.name == "dropout" or op.name == "gather") and
                        not (dtype == "float64" and FROM_LIBRARY[op.name])
                    same(expected[i], actual[i], bits and 0 or tolerance, "te." .. op.name)
                end
                for i in pairs(expected_grads) do
                    same(expected_grads[i], actual_grads[i], tolerance, ("gradient %d of te.%s"):format(i, op.name))
                end
            end
        end)
    end

    it("reduces few long rows, which several kernels share, as the CPU does", function()
        local long = 70001
        local function results(device, dtype)
            te.manual_seed(6)
            local x = (te.randn({ 2, long }, { device = "cpu" }) * 2):to(dtype):to(device)
            local y = te.sin(x)
            local leaf = x:detach()
            leaf.requires_grad = true
            te.sum(te.log_softmax(leaf) * y):backward()
            return { te.sum(x), te.mean(x), te.max(x), te.min(x), te.norm(x), te.var(x), te.var(x, -1),
                te.mse_loss(x, y), te.softmax(x), te.logsumexp(x, -1), te.layer_norm(x), leaf.grad }
        end
        for dtype, tolerance in pairs { float32 = 3e-6, float64 = 1e-12 } do
            local here, there, again = results("cpu", dtype), results("cuda", dtype), results("cuda", dtype)
            for i = 1, #here do
                same(here[i], there[i], i == 1 and 100 * tolerance or tolerance, "result " .. i)
                same(there[i], again[i], 0, "result " .. i)
            end
        end
    end)

    it("draws the same random numbers", function()
        for _, make in ipairs { te.rand, te.randn } do
            te.manual_seed(3)
            local here = make({ 1001 }, { device = "cpu" })
            te.manual_seed(3)
            same(here, make({ 1001 }, { device = "cuda" }), 0, "random numbers")
        end
    end)

    it("takes gradients across", function()
        local x = te.tensor({ 1, 2, 3 }, { device = "cpu", requires_grad = true })
        te.sum(te.square(x:to("cuda"))):backward()
        assert.equal("cpu", x.grad.device)
        assert.same({ 2, 4, 6 }, x.grad:totable())
        assert.error_matches(function() return x + x:to("cuda") end, "different devices: cpu and cuda")
    end)

    it("refuses gradients from elsewhere", function()
        for _, where in ipairs { { "cpu", "cuda" }, { "cuda", "cpu" } } do
            local x = te.ones({ 2, 3 }, { device = where[1], requires_grad = true })
            local there, y = te.ones({ 2, 3 }, { device = where[2] }), x * x
            local expected = ("gradient on %s for a tensor on %s"):format(where[2], where[1])
            assert.has_error(function() y:backward(there) end, "te.backward: " .. expected)
            assert.has_error(function() te.grad(y, { x }, { grad_outputs = there }) end, "te.grad: " .. expected)
            assert.has_error(function() x.grad = there end, ("t.grad = value: {2,3} of float32 on %s for a tensor " ..
                "{2,3} of float32 on %s"):format(where[2], where[1]))
        end
    end)

    it("trains a model as the CPU does, twice the same", function()
        local function losses(device)
            te.manual_seed(2)
            local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 2, n_head = 2, n_embd = 16 }
            model:to(device)
            local optimizer = te.optim.AdamW(model:parameters(), { lr = 1e-2 })
            local ids = te.randint(0, 10, { 3, 9 }, { dtype = "int32", device = "cpu" }):to(device)
            local list = {}
            for i = 1, 4 do
                local _, loss = model(ids:narrow(2, 1, 8), ids:narrow(2, 2, 8))
                loss:backward()
                local norm = te.optim.grad_norm(model:parameters())
                optimizer:step { grad_scale = norm > 1 and 1 / norm or 1 }
                optimizer:zero_grad()
                list[i] = loss:item()
            end
            return list
        end
        local here, there = losses("cpu"), losses("cuda")
        assert.same(there, losses("cuda"))
        for i = 1, 4 do assert.is_true(math.abs(here[i] - there[i]) < 1e-4 * here[i]) end
        assert.is_true(here[4] < here[1])
    end)

    it("multiplies quantized operands as bytes where it can, and says so", function()
        local recipe = te.recipe
        local function plan(width, r)
            local model = te.Linear(32, width):to "cuda"
            local x = te.randn({ 16, 32 }, { device = "cuda", requires_grad = true })
            return te.autocast({ dtype = "bfloat16", recipe = r },
                function() return tostring(te.Sequential(model):explain(x)) end)
        end
        local function says(text, ...)
            for _, part in ipairs { ... } do assert.truthy(text:find(part, 1, true), part .. " in\n" .. text) end
        end
        if te._core.device_title("cuda"):find("sm_90", 1, true) then
            says(plan(48, recipe.DelayedScaling {}), "linear, float8_e4m3 as it is, fast sums",
                "dgrad, float8_e5m2 as it is ", "wgrad, float8_e5m2 as it is ")
            says(plan(48, recipe.Float8CurrentScaling { fast_accumulation = "all" }),
                "wgrad, float8_e5m2 as it is, fast sums")
            says(plan(48, recipe.Float8CurrentScaling { fast_accumulation = "none" }), "linear, float8_e4m3 as it is ")
            says(plan(48, recipe.MXFP8BlockScaling {}), "linear, decoded: fp8 and fp4 with factors of a byte")
            says(plan(40, recipe.DelayedScaling {}), "linear, float8_e4m3 as it is, fast sums") -- padded inside
        else
            says(plan(48, recipe.DelayedScaling {}), "linear, ")
        end
    end)

    for _, name in ipairs { "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
        "NVFP4BlockScaling" } do
        it("trains a linear layer under " .. name .. " as the CPU does", function()
            local function steps(device)
                te.manual_seed(2)
                local options = name:find "NVFP4" and { disable_stochastic_rounding = true } or {}
                local layer, recipe = te.Linear(128, 128), te.recipe[name](options)
                layer:to(device)
                local x, dy = te.randn({ 128, 128 }, { device = "cpu" }):to(device),
                    te.randn({ 128, 128 }, { device = "cpu" }):to(device)
                x.requires_grad = true
                for _ = 1, 2 do
                    te.autocast({ dtype = "float32", recipe = recipe }, layer, x):backward(dy)
                    te.no_grad(function() layer.weight:mul_(0.75) end)
                end
                local y = te.no_grad(te.autocast, { dtype = "float32", recipe = recipe }, layer, x)
                return { y, x.grad, layer.weight.grad, layer.bias.grad }
            end
            local here, there = steps "cpu", steps "cuda"
            local short = name:find "^Float8" or name == "DelayedScaling"
            for i = 1, 4 do
                local off = cards.distance(there[i], here[i])
                if short and i < 4 and cards.has_short_sums() then
                    assert.is_true(off < 2e-3, ("%s, tensor %d is off by %g"):format(name, i, off))
                else
                    same(here[i], there[i], 2e-5, name .. ", tensor " .. i)
                end
            end
        end)
    end

    -- By a kernel of tetrain's own, whose sums are float32 whatever the device's products of fp8 are.
    it("multiplies few rows as the CPU does, in 16 bits and in fp8 without padding", function()
        te.manual_seed(4)
        for _, options in ipairs { { dtype = "bfloat16" }, { dtype = "float16" },
            { dtype = "bfloat16", recipe = te.recipe.Float8CurrentScaling {} },
            { dtype = "float32", recipe = te.recipe.DelayedScaling {} } } do
            for _, rows in ipairs { 1, 5, 8 } do
                local layer, x = te.Linear(48, 33, { bias = rows > 1 }), te.randn { rows, 48 }
                if rows > 1 then te.no_grad(function() layer.bias:copy_(te.randn { 33 }) end) end
                local function run(device)
                    return te.no_grad(te.autocast, options, layer:clone():to(device), x:to(device))
                end
                same(run "cpu", run "cuda", options.dtype == "float32" and 1e-5 or 2 ^ -7, options.dtype)
            end
        end
    end)

    it("multiplies one row whose elements lie apart as the CPU does", function()
        te.manual_seed(4)
        for _, dtype in ipairs { "bfloat16", "float16" } do
            local m, w = te.randn({ 64, 8 }):to(dtype), te.randn({ 32, 64 }):to(dtype)
            local function run(device, column)
                return te.matmul(m:to(device):narrow(2, column, 1):transpose(), w:to(device):transpose())
            end
            for _, column in ipairs { 1, 2, 8 } do same(run("cpu", column), run("cuda", column), 2 ^ -7, dtype) end
        end
    end)

    it("rounds the operands of float32 products when it may", function()
        finally(function() te.set_float32_matmul_precision("highest") end)
        -- of a size for tensor cores: a library has other kernels for the smallest products
        local a, b = te.rand(128, 64, { device = "cpu" }), te.rand(64, 128, { device = "cpu" })
        local exact = te.matmul(a, b)
        assert.equal("highest", te.get_float32_matmul_precision())
        local function error_of()
            return te.abs(te.matmul(a:to("cuda"), b:to("cuda")):to("cpu") - exact):max():item()
        end
        assert.is_true(error_of() < 2e-5)
        te.set_float32_matmul_precision("high")
        assert.is_true(error_of() > 2e-5 and error_of() < 5e-2)
        assert.error_matches(function() te.set_float32_matmul_precision("low") end, 'got "low"')
    end)

    it("goes on after its memory was exhausted", function()
        local whole = 1e12
        assert.error_matches(function() te.empty({ whole }, { device = "cuda" }) end, "out of memory: .* on cuda")
        assert.equal(8, te.ones(8, { device = "cuda" }):sum():item())
        te.empty_cache()
        assert.is_true(te.memory_stats("cuda").reserved >= te.memory_stats("cuda").current)
    end)

    it("draws the whole numbers that the CPU draws", function()
        local function drawn(device)
            te.manual_seed(9)
            local list = {}
            for _, dtype in ipairs { "int64", "int32", "uint8", "bool", "float32", "bfloat16", "float64" } do
                for _, n in ipairs { 0, 1, 2, 1001 } do
                    list[#list + 1] = te.randint(0, dtype == "bool" and 1 or 100, { n },
                        { dtype = dtype, device = device })
                    assert.equal(dtype, list[#list].dtype)
                end
            end
            list[#list + 1] = te.randint(-2 ^ 53, 2 ^ 53, { 7, 5 }, { device = device })
            list[#list + 1] = te.rand({ 3 }, { device = device })
            return list
        end
        local expected, actual = drawn "cpu", drawn "cuda"
        for i = 1, #expected do same(expected[i], actual[i], 0, "draw " .. i) end
    end)

    it("draws other whole numbers in each launch of a graph, those of the steps themselves", function()
        local function run(graphed)
            te.manual_seed(3)
            local function step(x) return te.randint(1, 6, { 40 }, { device = "cuda" }) + x end
            local none = te.zeros({ 1 }, { dtype = "int64", device = "cuda" })
            local call, list = graphed and te.graph(step, { none }, { device = "cuda", warmup = 1 }) or step, {}
            for i = 1, 4 do list[i] = values(call(none)) end
            return list
        end
        local seen = run(true)
        assert.same(run(false), seen)
        assert.is_false(table.concat(seen[3]) == table.concat(seen[4]))
    end)

    it("chooses and sorts as the CPU does, whatever the rows are like", function()
        te.manual_seed(4)
        for _, shape in ipairs { { 40000 }, { 3, 5000 }, { 700, 40 }, { 2, 300, 9 }, { 65, 1 }, { 0, 5 } } do
            for _, dtype in ipairs { "float32", "bfloat16", "int64", "bool" } do
                local x = te.randint(0, dtype == "bool" and 1 or 30, shape, { device = "cpu" }):to(dtype)
                if dtype == "float32" then x = te.where(te.eq(x, 29), 0 / 0, te.where(te.eq(x, 3), -0.0, x)) end
                for dim = 1, #shape do
                    local function all(t)
                        local values_, order = te.sort(t, dim, true)
                        local best, at = te.topk(t, math.min(70, t:size(dim)), dim, { largest = false })
                        local found = { te.argsort(t, dim), values_, order, best, at }
                        if t:size(dim) > 0 then
                            found[6], found[7] = te.argmax(t, dim), te.argmin(t, dim, true)
                        end
                        return found
                    end
                    local expected, actual = all(x), all(x:to "cuda")
                    for i = 1, #expected do same(expected[i], actual[i], 0, dtype .. " " .. i) end
                end
                if x:numel() > 0 then same(te.argmax(x), te.argmax(x:to "cuda"), 0, dtype) end
            end
        end
    end)

    it("saves and loads", function()
        local path = os.tmpname()
        finally(function() os.remove(path) end)
        local x = te.randn({ 4, 5 }, { device = "cuda" })
        te.save(path, { x = x, turned = x:transpose(), none = te.zeros({ 0 }, { device = "cuda" }) })
        local loaded = te.load(path)
        same(x, loaded.x, 0, "a saved tensor")
        same(x:transpose(), loaded.turned, 0, "a saved view")
    end)

    it("synchronizes, and refuses devices that are not there", function()
        te.synchronize()
        te.synchronize("cuda")
        assert.error_matches(function() te.zeros({ 2 }, { device = "cuda:7" }) end, "CUDA device")
    end)
end)
