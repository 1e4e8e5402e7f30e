local te = require "te"
local plans = require "spec.support.plans"

local input, steps, reason = plans.input, plans.steps, plans.reason

local function sizes(list) return te.tensor(list, { dtype = "int32" }) end

local function experts(groups, bias) return te.GroupedLinear(groups, 8, 16, { bias = bias }) end

describe("a grouped linear operation in a group", function()
    before_each(function() te.manual_seed(4) end)

    it("is products of ranges of rows, with programs around them", function()
        local seq = te.Sequential(te.LayerNorm(8), experts(3), te.SwiGLU(), te.Dropout(0.1),
            te.GroupedLinear(3, 8, 8, { bias = false }), te.AddExtraInput())
        local x, extra = input { 6, 8 }, input { 6, 8 }
        local plan = seq:explain(x, sizes { 1, 0, 5 }, sizes { 3, 2, 1 }, extra)
        assert.same({ "LayerNorm:layer_norm", "GroupedLinear:grouped_linear", "SwiGLU + Dropout:swiglu+dropout_apply",
            "GroupedLinear:grouped_linear", "AddExtraInput:add" }, steps(plan.forward))
        assert.same({ "GroupedLinear:grouped dgrad", "GroupedLinear:grouped wgrad",
            "SwiGLU + Dropout:swiglu+dropout_apply.backward",
            "GroupedLinear:grouped dgrad", "GroupedLinear:grouped wgrad", "GroupedLinear:bias gradients",
            "LayerNorm:layer_norm.backward" },
            steps(plan.backward))
        assert.equal(2 * 6 * 8 * 16, plan.forward[2].flops)
        assert.equal(4 * (48 + 3 * (8 * 16 + 16)), plan.forward[2].reads)
        assert.matches("products of ranges of rows", reason(plan, "LayerNorm", "GroupedLinear"))
        for _, split in ipairs { { 1, 0, 5 }, { 2, 2, 2 }, { 0, 0, 6 } } do
            plans.assert_unchanged(seq, x, sizes(split), sizes { 3, 2, 1 }, extra)
        end
    end)

    it("may have groups without rows where all rows are one", function()
        local seq = te.Sequential(experts(2), te.GELU())
        for _, shape in ipairs { { 1, 8 }, { 1, 5, 8 }, { 1, 0, 8 } } do
            for _, split in ipairs { { 0, 1 }, { 1, 0 } } do plans.assert_unchanged(seq, input(shape), sizes(split)) end
        end
        plans.assert_unchanged(seq, input { 0, 5, 8 }, sizes { 0, 0 })
    end)

    it("moves the bytes that the plan says, as reshapes and look-ups do", function()
        local seq = te.Sequential(te.Embedding(50, 32), te.RMSNorm(32), te.Reshape { -1, 16 },
            te.GroupedLinear(2, 16, 64), te.SwiGLU(), te.Reshape { -1, 64 }, te.Linear(64, 8))
        local ids, split, predicted, moved = te.randint(0, 49, { 4, 16 }), sizes { 100, 28 }, 0, 0
        local dy = te.randn { 64, 8 }
        local function run()
            seq:zero_grad()
            seq(ids, split):backward(dy)
        end
        run()
        local plan = seq:explain(ids, split)
        for _, pass in ipairs { plan.forward, plan.backward } do
            for _, step in ipairs(pass) do predicted = predicted + step.bytes end
        end
        for _, event in ipairs(te.profile(run).events) do moved = moved + event.bytes end
        assert.is_true(math.abs(moved / predicted - 1) < 0.1,
            ("moved %d bytes, the plan says %d"):format(moved, predicted))
    end)

    it("takes sizes as a list, as floats, and counts the first dimension", function()
        local seq = te.Sequential(experts(2), te.SwiGLU())
        local x = input { 3, 2, 8 }
        plans.assert_unchanged(seq, x, { 2, 1 })
        plans.assert_unchanged(seq, x, te.tensor { 0, 3 })
        assert.same(seq(x, { 2, 1 }):totable(), seq(x, sizes { 2, 1 }):totable())
        local reshaped = te.Sequential(te.Reshape { -1, 8 }, experts(2), te.ReLU())
        plans.assert_unchanged(reshaped, x, { 5, 1 })
    end)

    it("is planned once for any sizes and numbers of rows", function()
        local seq = te.Sequential(experts(2), te.SwiGLU())
        for _, split in ipairs { { 2, 1 }, { 0, 3 }, { 40, 2 }, { 0, 0 } } do
            seq(input { split[1] + split[2], 8 }, sizes(split))
        end
        assert.equal(1, plans.count(seq, input { 3, 8 }, sizes { 2, 1 }))
    end)

    it("adds to the gradients that are there, in bfloat16 under te.autocast as well", function()
        for _, dtype in ipairs { "float32", "bfloat16" } do
            local seq, x = te.Sequential(experts(2), te.GELU()), input { 5, 8 }
            local function run()
                te.autocast({ dtype = dtype }, seq, x, sizes { 3, 2 }):to("float32"):sum():backward()
            end
            run()
            local once = seq[1].weight[2].grad:clone()
            run()
            assert.is_true((seq[1].weight[2].grad - once * 2):abs():max():item() <= 2e-2 * once:abs():max():item())
            assert.equal("float32", seq[1].bias[1].grad.dtype)
        end
    end)

    it("raises what the operation raises", function()
        local seq = te.Sequential(te.ReLU(), experts(3), te.ReLU())
        assert.matches("split_sizes {2, 2, 2} for 3 groups and 5 rows",
            plans.assert_unchanged(seq, input { 5, 8 }, sizes { 2, 2, 2 }).y)
        assert.matches("split_sizes {7, %-2, 0}", plans.assert_unchanged(seq, input { 5, 8 }, sizes { 7, -2, 0 }).y)
        assert.matches("for 3 groups", plans.assert_unchanged(seq, input { 5, 8 }, sizes { 5 }).y)
        assert.matches("a list of 3 sizes, got number", plans.assert_unchanged(seq, input { 5, 8 }, 3).y)
    end)

    it("runs by itself where its group cannot be planned", function()
        local seq = te.Sequential(experts(2), te.SwiGLU(), te.AddExtraInput(), te.StochasticDepth(0.5))
        local x, broadcast = input { 3, 2, 8 }, input { 2, 1 }
        assert.matches("cannot be planned", seq:explain(x, { 2, 1 }, broadcast).reasons[1].reason)
        plans.assert_unchanged(seq, x, { 2, 1 }, broadcast)
    end)

    it("shares a weight with another operation", function()
        local first, second = experts(2, false), te.Linear(8, 16, { bias = false })
        second.weight = first.weight[1]
        local seq = te.Sequential(te.Residual(te.Sequential(second, te.SwiGLU()), te.Sequential(first, te.SwiGLU()),
            { parallel = true }))
        plans.assert_unchanged(seq, input { 4, 8 }, sizes { 3, 1 })
        te.no_grad(function() assert.same({ 4, 8 }, seq(input { 4, 8 }, sizes { 3, 1 }).shape) end)
    end)

    it("notices a weight that was changed in place since", function()
        local seq = te.Sequential(experts(2), te.GELU())
        local y = seq(input { 4, 8 }, sizes { 3, 1 })
        te.no_grad(function() seq[1].weight[2]:mul_(2) end)
        assert.error_matches(function() y:sum():backward() end, "changed in place")
    end)

    it("scales its biases in the program behind it", function()
        local seq = te.Sequential(te.ReLU(), te.GroupedLinear(3, 8, 16, { scale_bias = true }), te.SwiGLU())
        for _, p in ipairs(seq:parameters()) do te.no_grad(function() p:uniform_({ low = -1 }) end) end
        local x, scales = input { 6, 8 }, input { 6 }
        local plan = seq:explain(x, sizes { 1, 0, 5 }, scales)
        assert.same({ "ReLU:relu", "GroupedLinear.grouped_linear:grouped_linear",
            "GroupedLinear.grouped_biases:grouped_biases",
            "GroupedLinear.addcmul_rows:addcmul_rows", "SwiGLU:swiglu" }, steps(plan.forward))
        assert.matches("spread over the rows",
            reason(plan, "GroupedLinear.grouped_biases", "GroupedLinear.addcmul_rows"))
        for _, split in ipairs { { 1, 0, 5 }, { 2, 2, 2 }, { 0, 0, 6 } } do
            plans.assert_unchanged(seq, x, sizes(split), scales)
            plans.assert_unchanged(seq, x, sizes(split), scales:detach())
        end
        seq[2].bias[1].requires_grad = false
        plans.assert_unchanged(seq, x, { 3, 2, 1 }, scales)
        for _, p in ipairs(seq[2].bias) do p.requires_grad = false end
        plans.assert_unchanged(seq, x, { 3, 2, 1 }, scales)
    end)

    it("scales biases of another dtype, along leading dimensions, and where its group cannot be planned", function()
        for _, dtypes in ipairs { { "bfloat16", "float32" }, { "float32", "bfloat16" }, { "float32", "float64" },
            { "bfloat16", "float16" } } do
            local seq = te.Sequential(te.GroupedLinear(2, 8, 16, { scale_bias = true, params_dtype = dtypes[1] }),
                te.GELU())
            for _, p in ipairs(seq:parameters()) do te.no_grad(function() p:uniform_({ low = -1 }) end) end
            plans.assert_unchanged(seq, input({ 4, 8 }, dtypes[1]), { 3, 1 }, input({ 4 }, dtypes[2]))
            local unplanned = te.Sequential(seq[1], te.AddExtraInput(), te.StochasticDepth(0.5))
            plans.assert_unchanged(unplanned, input({ 3, 2, 8 }, dtypes[1]), { 2, 1 }, input({ 3, 2 }, dtypes[2]),
                input({ 2, 1 }, dtypes[1]))
        end
        local seq = te.Sequential(te.GroupedLinear(2, 8, 8, { scale_bias = true }), te.ReLU())
        assert.matches("one number for every row, {4}, got {4,1}",
            plans.assert_unchanged(seq, input { 4, 8 }, { 3, 1 }, input { 4, 1 }).y)
        assert.matches("one number for every row", plans.assert_unchanged(seq, input { 4, 8 }, { 3, 1 }, input { 3 }).y)
        assert.matches("for 2 groups and 4 rows", plans.assert_unchanged(seq, input { 4, 8 }, { 3, 3 }, input { 4 }).y)
    end)

    it("keeps no biases of rows for backward", function()
        local seq, x = te.Sequential(te.GroupedLinear(2, 8, 512, { scale_bias = true, params_dtype = "float32" })),
            input { 64, 8 }
        local scales = input { 64 }
        local function kept(fused)
            local before = te.set_fusion(fused)
            collectgarbage()
            local start = te.memory_stats().current
            local y = seq(x, { 60, 4 }, scales)
            collectgarbage()
            local bytes = te.memory_stats().current - start
            te.set_fusion(before)
            return bytes, y
        end
        assert.is_true(kept(true) <= 64 * 512 * 4 + 8192)
    end)

    it("reads the sizes that several operations share once, and never again in backward", function()
        local seq, x, split = te.Sequential(experts(2), te.SwiGLU(), te.GroupedLinear(2, 8, 8)),
            input { 4, 8 }, sizes { 3, 1 }
        local y = seq(x, split, split)
        split:copy_(sizes { 1, 3 })
        local before = te.set_fusion(false)
        local expected = seq(x, { 3, 1 }, { 3, 1 })
        te.set_fusion(before)
        expected:sum():backward()
        local dx = x.grad:clone()
        x.grad = nil
        y:sum():backward()
        assert.is_true((x.grad - dx):abs():max():item() < 1e-6)
    end)
end)
