local te = require "te"

-- Bytes that a step holds between forward and backward, at most during backward, and its gradients.
local function run(model, x, on)
    local before = te.set_recompute(on)
    model:zero_grad()
    x.grad = nil
    collectgarbage()
    collectgarbage()
    te.reset_peak_memory()
    local start = te.memory_stats().current
    local y = model(x)
    local kept = te.memory_stats().current - start
    y:backward(te.ones(y.shape, { dtype = y.dtype }))
    local peak, grads = te.memory_stats().peak - start, { x.grad and x.grad:totable() }
    for name, parameter in model:named_parameters() do grads[name] = parameter.grad:totable() end
    te.set_recompute(before)
    return { kept = kept, peak = peak, grads = grads, y = y:totable() }
end

local function input(shape, dtype)
    local x = te.randn(shape):to(dtype or "float32"):detach()
    x.requires_grad = true
    return x
end

local function kernels(plan)
    local list = {}
    for i, step in ipairs(plan.backward) do list[i] = step.kernels[1] end
    return list
end

describe("operands of weight gradients", function()
    before_each(function() te.manual_seed(3) end)

    for _, dtype in ipairs { "float32", "bfloat16" } do
        it("are computed again from what backward reads anyway: fewer bytes, the same bits in " .. dtype, function()
            local rows, width, size = 96, 64, dtype == "float32" and 4 or 2
            local options = { params_dtype = dtype }
            local blocks = {}
            for i = 1, 3 do
                blocks[i] = te.Residual(te.LayerNorm(width, options), te.Linear(width, 4 * width, options), te.GELU(),
                    te.Dropout(0.1), te.Linear(4 * width, width, options))
            end
            local model = te.Sequential(unpack(blocks))
            local x = input({ rows, width }, dtype)
            local threads = te.get_num_threads()
            finally(function() te.set_num_threads(threads) end)
            te.set_num_threads(1) -- the products of many want more room than such rows take
            te.manual_seed(5)
            local keeping = run(model, x, false)
            te.manual_seed(5)
            local computing = run(model, x, true)
            assert.same(keeping.y, computing.y)
            assert.same(keeping.grads, computing.grads)
            assert.equal(3 * rows * 5 * width * size, keeping.kept - computing.kept) -- of the norm, and of the dropout
            assert.is_true(computing.peak < keeping.peak)
        end)
    end

    it("are one more output of the gradient program, and the product waits for it", function()
        local model = te.Sequential(te.Linear(8, 16), te.GELU(), te.Linear(16, 8))
        local x = input { 4, 8 }
        local before = te.set_recompute(true)
        local plan = model:explain(x)
        assert.same({ "dgrad", "bias gradient", "gelu_tanh.backward, operand again", "wgrad", "dgrad", "wgrad" },
            kernels(plan))
        local predicted, moved = 0, 0
        for _, step in ipairs(plan.backward) do predicted = predicted + step.bytes end
        local y, dy = model(x), te.ones { 4, 8 }
        for _, event in ipairs(te.profile(function() y:backward(dy) end).events) do moved = moved + event.bytes end
        assert.equal(predicted, moved)
        te.set_recompute(false)
        assert.same({ "dgrad", "wgrad", "bias gradient", "gelu_tanh.backward", "dgrad", "wgrad" },
            kernels(model:explain(x)))
        te.set_recompute(before)
    end)

    it("are kept where they follow from tensors that backward would not keep, or others read them", function()
        local function recomputes(model, ...)
            local extras = { ... }
            for _, kernel in ipairs(kernels(model:explain(input { 4, 8 }, unpack(extras)))) do
                if kernel:find("operand again", 1, true) then return true end
            end
            return false
        end
        local before = te.set_recompute(true)
        assert.is_true(recomputes(te.Sequential(te.LayerNorm(8), te.Linear(8, 8))))
        assert.is_true(recomputes(te.Sequential(te.SwiGLU(), te.Linear(4, 8))))
        assert.is_false(recomputes(te.Sequential(te.ConstantScale(2), te.Linear(8, 8))))
        assert.is_false(recomputes(te.Sequential(te.AddExtraInput(), te.Linear(8, 8)), input { 4, 8 }))
        assert.is_false(recomputes(te.Sequential(te.GELU(), te.MakeExtraOutput(), te.Linear(8, 8))))
        assert.is_false(recomputes(te.Sequential(te.GELU({ cache_quantized_input = true }), te.Linear(8, 8))))
        local frozen = te.Sequential(te.GELU(), te.Linear(8, 8, { bias = false }))
        frozen[2].weight.requires_grad = false
        assert.is_false(recomputes(frozen))
        te.set_recompute(before)
    end)

    it("are kept for narrow products unless asked for", function()
        local function recomputes(width)
            local plan = te.Sequential(te.GELU(), te.Linear(8, width)):explain(input { 4, 8 })
            return plan.backward[1].kernels[1] == "dgrad" and plan.backward[2].kernels[1] ~= "wgrad"
                and kernels(plan)[#plan.backward] == "wgrad"
        end
        local first = te.set_recompute(256)
        assert.equal(256, first)
        assert.same({ false, true }, { recomputes(255), recomputes(256) })
        assert.equal(256, te.set_recompute(true))
        assert.is_true(recomputes(8))
        assert.equal(0, te.set_recompute(false))
        assert.is_false(recomputes(256))
        te.set_recompute(first)
        assert.error_matches(function() te.set_recompute("on") end,
            "te%.set_recompute: expected true, false or a number of columns, got string")
        assert.error_matches(function() te.set_recompute(-1) end, "a number of columns is 0 or more, not %-1")
    end)

    it("serve several products, kept graphs and passes that want some gradients only", function()
        local function build()
            te.manual_seed(4)
            local branches = { te.Sequential(te.GELU(), te.Linear(8, 8)), te.Sequential(te.GELU(), te.Linear(8, 8)) }
            return te.Sequential(te.Linear(8, 8), te.Residual(branches[1], branches[2], { parallel = true }))
        end
        local x = input { 4, 8 }
        local results = {}
        for i, on in ipairs { false, true } do
            local before, model = te.set_recompute(on), build()
            local y = model(x)
            local wanted = { model[2][1][2].weight, x }
            local first = te.grad(te.sum(y * y), wanted, { retain_graph = true })
            local second = te.grad(te.sum(y * y), { model[1].weight }, { retain_graph = true })
            te.sum(y * y):backward()
            results[i] = { first[1]:totable(), first[2]:totable(), second[1]:totable(),
                model[2][2][2].weight.grad:totable(), model[2][1][2].weight.grad:totable() }
            assert.same(results[i][1], results[i][5])
            x.grad = nil
            te.set_recompute(before)
        end
        assert.same(results[1], results[2])
    end)
end)
