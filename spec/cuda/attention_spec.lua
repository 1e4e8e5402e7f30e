--- Attention on the CUDA device: FP8 gives what the CPU computes, within the rounding of sums, by cuDNN where it takes
--- it, else by a kernel of its own, and the trace says which; gradients whose sums come in any order. Pending without a
--- device.

local ffi = require "ffi"
local te = require "te"
local core = te._core

local devices, reason = te.devices()

ffi.cdef "uint64_t te_fake_count(const char *function);"

-- Runs of cuDNN so far on the made-up machine; nil on others.
local function runs()
    local ok, driver = pcall(ffi.load, (os.getenv "TETRAIN_CUDA_LIBRARIES" or "") .. "/libcuda.so.1")
    local counted, n = pcall(function() return tonumber(driver.te_fake_count "cudnnBackendExecute") end)
    return ok and counted and n or nil
end

local function recipe() return te.recipe.DelayedScaling { fp8_dpa = true, fp8_mha = true, amax_history_len = 4 } end

local function build(heads, kv_heads, opts, seed)
    te.manual_seed(seed or 2)
    return te.Sequential(te.LayerNorm(64), te.GroupedQueryAttention(64, heads, kv_heads, opts))
end

-- Results and gradients of two steps: the second one has factors of the first.
local function steps(model, x, lens, options)
    local results = {}
    for i = 1, 2 do
        for _, p in ipairs(model:parameters()) do p.grad = nil end
        te.manual_seed(i)
        local y = te.autocast({ recipe = options, dtype = "bfloat16" }, function()
            if lens then return model(x, lens) end
            return model(x)
        end)
        local wide = y:to "float32"
        te.sum(wide * wide):backward()
        results[#results + 1] = y
        for _, p in ipairs(model:parameters()) do results[#results + 1] = p.grad end
    end
    return results
end

local function distance(a, b)
    a, b = a:detach():to("cpu"):to("float64"), b:detach():to("cpu"):to("float64")
    return ((a - b):norm() / (b:norm() + 1e-12)):item()
end

describe("FP8 attention on CUDA", function()
    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    for name, case in pairs {
        ["cuDNN"] = { runs = 4, heads = 4, kv_heads = 4 },
        ["cuDNN for gradients alone, grouped queries, packed sequences"] =
            { runs = 2, heads = 4, kv_heads = 2, lens = { 9, 0, 24, 1 } },
        ["cuDNN, a window"] = { runs = 4, heads = 4, kv_heads = 1, opts = { window_left = 5 } },
        ["a kernel of its own, narrow heads"] = { runs = 2, heads = 8, kv_heads = 2 },
        ["a kernel of its own, dropout"] = { runs = 0, heads = 4, kv_heads = 4, opts = { dropout = 0.2 } },
    } do
        -- Errors of few numbers differ between two roundings by chance; those of several draws together hardly do.
        it("is the CPU's within rounding: " .. name, function()
            local errors, least, DRAWS = {}, {}, 4
            for draw = 1, DRAWS do
                te.manual_seed(6 + draw)
                local x = te.randn(case.lens and { 34, 64 } or { 2, 17, 64 }, { device = "cpu" })
                local lens = case.lens and te.tensor(case.lens, { dtype = "int32", device = "cpu" })
                local function made() return build(case.heads, case.kv_heads, case.opts, 1 + draw) end
                local before = runs()
                local seen = steps(made():to("cuda"), x:to("cuda"), lens and lens:to("cuda"), recipe())
                if before then assert.equal(case.runs, runs() - before) end -- gradients are in 16 bits
                local expected, exact = steps(made():to("cpu"), x, lens, recipe()), steps(made():to("cpu"), x, lens)
                for i, t in ipairs(seen) do
                    -- cuDNN rounds probabilities before it divides them by their sum, which errs as much, but elsewhere
                    local off, cpu = distance(t, expected[i]), distance(expected[i], exact[i])
                    assert.is_true(off < (before and 0.06 or 1.5 * cpu), ("result %d is off by %g"):format(i, off))
                    errors[i] = (errors[i] or 0) + distance(t, exact[i]) ^ 2
                    least[i] = (least[i] or 0) + cpu ^ 2
                end
            end
            for i, squares in ipairs(errors) do
                assert.is_true(squares < 1.2 ^ 2 * least[i], ("result %d errs by %g where the CPU errs by %g"):format(i,
                    math.sqrt(squares / DRAWS), math.sqrt(least[i] / DRAWS)))
            end
        end)
    end

    it("quantizes its operands and nothing else between its two products", function()
        local model = build(4, 4):to("cuda")
        local x, fp8 = te.randn({ 2, 32, 64 }):to("cuda"), recipe()
        local function forward() return te.no_grad(te.autocast, { recipe = fp8, dtype = "bfloat16" }, model, x) end
        forward() -- the weights
        local names = {}
        for _, event in ipairs(te.profile(forward).events) do names[event.name] = (names[event.name] or 0) + 1 end
        assert.equal(1, names.quantize) -- the program before the first product quantizes its input
        assert.is_nil(names.dequantize)
    end)

    it("has the same bits in a graph", function()
        local function run(recorded)
            local model, fp8 = build(4, 4):to("cuda"), recipe()
            local function step(x)
                local y = te.autocast({ recipe = fp8, dtype = "bfloat16" }, model, x)
                y:sum():backward()
                for _, p in ipairs(model:parameters()) do te.no_grad(function() p:add_(p.grad * -0.01) end) end
                for _, p in ipairs(model:parameters()) do p.grad:zero_() end
                return y:detach()
            end
            te.manual_seed(4)
            local x = te.randn({ 2, 32, 64 }):to("cuda")
            if recorded then step = te.graph(step, { x }, { device = "cuda" }) end
            local bytes = {}
            for _ = 1, 5 do bytes[#bytes + 1] = core.tensor_bytes(step(x):to("cpu"):contiguous()) end
            return table.concat(bytes)
        end
        assert.is_true(run(false) == run(true))
    end)

    it("is left to own kernels where TETRAIN_CUDNN is 0", function()
        local command = "TETRAIN_CUDNN=0 '%s' -e 'print(require(\"te\")._core.device_title(\"cuda\"))'"
        local pipe = io.popen(command:format(os.getenv "TETRAIN" or core.executable()))
        local title = pipe:read "*a"
        pipe:close()
        assert.truthy(title:find("by own kernels, without cuDNN: TETRAIN_CUDNN is 0", 1, true), title)
    end)
end)

describe("Gradients of attention whose sums come in any order", function()
    it("are wanted where nobody says that results need not repeat", function()
        assert.is_true(te.are_deterministic_algorithms_enabled())
    end)

    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    it("are the CPU's within rounding, also in a graph", function()
        finally(function() te.use_deterministic_algorithms(true) end)
        local function operands(device)
            te.manual_seed(3)
            local list = {}
            for i, heads in ipairs { 4, 2, 2, 4 } do
                list[i] = te.randn({ 2, heads, 128, 16 }, { device = "cpu", dtype = "bfloat16" }):to(device)
                list[i].requires_grad = i < 4
            end
            return list
        end
        local function gradients(list)
            local q, k, v, dy = unpack(list)
            local y = te.scaled_dot_product_attention(q, k, v, nil, { causal = true })
            return te.grad(y, { q, k, v }, { grad_outputs = dy })
        end
        local expected, there = gradients(operands "cpu"), operands "cuda"
        local before = runs()
        te.use_deterministic_algorithms(false)
        assert.is_false(te.are_deterministic_algorithms_enabled())
        local seen = gradients(there)
        if before then assert.equal(2, runs() - before) end
        local graph = te.graph(function() return unpack(gradients(there)) end, {})
        for round, list in ipairs { seen, { graph() }, { graph() } } do
            for i, t in ipairs(list) do
                local off = distance(t, expected[i])
                assert.is_true(off < 1e-2, ("round %d, gradient %d is off by %g"):format(round, i, off))
            end
        end
    end)

    it("gives rows hidden by any finite number what the CPU gives", function()
        local function results(device, low, dtype)
            te.manual_seed(1)
            local list = {}
            for i, rows in ipairs { 20, 40, 40 } do
                list[i] = te.randn({ 1, 2, rows, 64 }, { device = "cpu" }):to("bfloat16"):to(device)
                list[i].requires_grad = true
            end
            local bias = te.full({ 1, 1, 20, 40 }, 0, { device = "cpu" })
            bias:narrow(3, 5, 2):fill_(low)
            local q, k, v = unpack(list)
            local y = te.scaled_dot_product_attention(q, k, v, bias:to(dtype):to(device))
            te.sum(y:to "float32" * y:to "float32"):backward()
            return { y, q.grad, k.grad, v.grad }
        end
        for _, low in ipairs { -60000, -1e9, -3.8e10, -3.2e12, -1e25, -1e38, -3e38, -3.38e38 } do
            for _, dtype in ipairs { "float32", "bfloat16" } do
                local expected, seen = results("cpu", low, dtype), results("cuda", low, dtype)
                for i = 1, 4 do
                    local off = distance(seen[i], expected[i])
                    assert.is_true(off < 1e-2, ("%g in %s: result %d is off by %g"):format(low, dtype, i, off))
                end
            end
        end
    end)
end)
