local te = require "te"
local plans = require "spec.support.plans"

local input, steps, reason = plans.input, plans.steps, plans.reason

describe("reshapes in a group", function()
    before_each(function() te.manual_seed(1) end)

    it("are wiring where rows keep their width: programs fuse across them", function()
        local seq = te.Sequential(te.Linear(8, 8), te.GELU(), te.Reshape { -1, 8 }, te.RMSNorm(8),
            te.Reshape { 3, -1, 8 }, te.Linear(8, 8))
        local plan = seq:explain(input { 2, 3, 8 })
        assert.same({ "Linear:linear", "GELU + RMSNorm:gelu_tanh+rms_norm", "Linear:linear" }, steps(plan.forward))
        assert.is_nil(reason(plan, "GELU", "Reshape"))
        assert.same({ 3, 2, 8 }, plans.assert_unchanged(seq, input { 2, 3, 8 }).shape)
    end)

    it("are views where the width changes, and the group goes on", function()
        local seq = te.Sequential(te.Linear(8, 8), te.GELU(), te.Reshape { -1, 4 }, te.RMSNorm(4), te.Linear(4, 8))
        local plan = seq:explain(input { 2, 3, 8 })
        assert.same({ "Linear:linear", "GELU:gelu_tanh", "RMSNorm:rms_norm", "Linear:linear" }, steps(plan.forward))
        assert.matches("rows have another width", reason(plan, "GELU", "Reshape"))
        assert.equal(2 * 12 * 4 * 4 + 4 * 4 + 12 * 4, plan.forward[3].bytes) -- twice the rows of x
        assert.equal(2 * 12 * 4 * 8, plan.forward[4].flops)
        plans.assert_unchanged(seq, input { 2, 3, 8 })
    end)

    it("leave and come back inside a residual: heads are normalized by themselves", function()
        local seq = te.Sequential(te.LayerNorm(8),
            te.Residual(te.Linear(8, 8), te.Reshape { 2, 3, 4, 2 }, te.RMSNorm(2),
            te.Reshape { 2, 3, 8 }, te.ReLU()), te.LayerNorm(8))
        local plan = seq:explain(input { 2, 3, 8 })
        assert.same({ "LayerNorm:layer_norm", "Linear:linear", "RMSNorm:rms_norm",
            "ReLU + AddExtraInput + LayerNorm:relu+add+layer_norm" }, steps(plan.forward))
        plans.assert_unchanged(seq, input { 2, 3, 8 })
    end)

    it("give attention the sequences that they make", function()
        local seq = te.Sequential(te.Linear(8, 8), te.Reshape { 3, -1, 8 },
            te.MultiHeadedSelfAttention(8, 2, { causal = true }), te.ReLU())
        local x = input { 12, 8 }
        local kinds = {}
        for i, step in ipairs(seq:explain(x).forward) do kinds[i] = step.kind end
        assert.same({ "gemm", "gemm", "attention", "gemm", "program" }, kinds)
        assert.equal(4 * 12 * 4 * 8, seq:explain(x).forward[3].flops) -- sequences of 4
        assert.same({ 3, 4, 8 }, plans.assert_unchanged(seq, x).shape)
    end)

    it("take extra inputs in the dimensions that rows have there", function()
        local seq = te.Sequential(te.GELU(), te.Reshape { -1, 4 }, te.AddExtraInput(), te.RMSNorm(4),
            te.Reshape { -1, 2, 4 }, te.AddExtraInput())
        local x = input { 2, 3, 8 }
        assert.same({ "GELU:gelu_tanh", "AddExtraInput + RMSNorm + AddExtraInput:add+rms_norm+add" },
            steps(seq:explain(x, input { 12, 4 }, input { 6, 2, 4 }).forward))
        plans.assert_unchanged(seq, x, input { 12, 4 }, input { 6, 2, 4 })
        plans.assert_unchanged(seq, x, input { 4, 12 }:transpose(1, 2):detach(), input { 6, 2, 4 })
        plans.assert_unchanged(seq, x, input { 12, 4 }, input { 4 }) -- broadcast
        assert.matches("cannot be planned", seq:explain(x, input { 12, 4 }, input { 2, 4 }).reasons[1].reason)
        plans.assert_unchanged(seq, x, input { 12, 4 }, input { 2, 4 })
    end)

    it("spread an extra input with more dimensions than the rows that it meets have in memory", function()
        local one = te.Sequential(te.GELU(), te.Reshape { 1, 1, 4 }, te.AddExtraInput())
        assert.equal(1, #one:explain(input { 4 }, input { 1, 4 }).forward)
        plans.assert_unchanged(one, input { 4 }, input { 1, 4 })
        local two = te.Sequential(te.GELU(), te.Reshape { 1, -1, 4 }, te.AddExtraInput())
        plans.assert_unchanged(two, input { 3, 4 }, input { 1, 1, 4 })
    end)

    it("copy inputs that do not lie so that they can be seen otherwise", function()
        local seq = te.Sequential(te.Reshape { -1, 4 }, te.GELU(), te.Linear(4, 4))
        plans.assert_unchanged(seq, input { 8, 3, 2 }:permute { 2, 3, 1 }:detach())
        plans.assert_unchanged(te.Sequential(te.Reshape { 3, 4 }, te.ReLU()), input { 4, 3 }:transpose(1, 2):detach())
    end)

    it("hold for any number of rows", function()
        local seq = te.Sequential(te.Linear(8, 8), te.Reshape { -1, 4 }, te.RMSNorm(4),
            te.Reshape { -1, 2, 4 }, te.GELU())
        for _, shape in ipairs { { 2, 3, 8 }, { 1, 1, 8 }, { 5, 7, 8 }, { 4, 0, 8 } } do
            assert.same({ shape[1] * shape[2], 2, 4 }, plans.assert_unchanged(seq, input(shape)).shape)
        end
        for _, shape in ipairs { { 2, 3, 8 }, { 1, 1, 8 }, { 5, 7, 8 } } do seq(input(shape)) end
        assert.equal(1, plans.count(seq, input { 2, 3, 8 }))
    end)

    it("raise what the operation raises where elements do not fit", function()
        local seq = te.Sequential(te.GELU(), te.Reshape { 4, -1, 8 }, te.RMSNorm(8))
        local fused = plans.assert_unchanged(seq, input { 3, 8 })
        assert.matches("te.reshape: {3,8} %(24 elements%) cannot take the shape {4,%-1,8}", fused.y)
        assert.same({ 4, 2, 8 }, plans.assert_unchanged(seq, input { 8, 8 }).shape)
    end)

    it("are called where the length of rows is left open", function()
        local seq = te.Sequential(te.GELU(), te.Reshape { 4, -1 }, te.ReLU())
        local plan = seq:explain(input { 2, 2, 8 })
        assert.same({ "GELU:gelu_tanh", "Reshape:call", "ReLU:relu" }, steps(plan.forward))
        assert.matches("no length that is known before it runs", reason(plan, "Reshape", "Reshape"))
        plans.assert_unchanged(seq, input { 2, 2, 8 })
    end)

    it("refuse an operation on values that are seen in different shapes", function()
        local seq = te.Sequential(te.Residual(te.Linear(8, 8), te.Reshape { -1, 8 }))
        local x = input { 2, 3, 8 }
        assert.matches("seen in different shapes", seq:explain(x).reasons[1].reason)
        plans.assert_unchanged(seq, x)
        plans.assert_unchanged(seq, input { 6, 8 })
        assert.equal(2, #seq:explain(input { 6, 8 }).forward)
    end)

    it("give stochastic depth the samples that they make", function()
        local seq = te.Sequential(te.Dropout(0.2), te.Reshape { 2, -1, 8 }, te.StochasticDepth(0.5), te.ReLU(),
            te.Reshape { -1, 4 }, te.StochasticDepth(0.5), te.RMSNorm(4))
        local x = input { 6, 8 }
        for _, step in ipairs(seq:explain(x).forward) do assert.is_not.equal("call", step.kind) end
        plans.assert_unchanged(seq, x)
    end)

    for name, recipe in pairs { delayed = te.recipe.DelayedScaling, current = te.recipe.Float8CurrentScaling,
        block = te.recipe.Float8BlockScaling, mxfp8 = te.recipe.MXFP8BlockScaling,
        nvfp4 = te.recipe.NVFP4BlockScaling } do
        it("hold under a recipe, whose operands programs behind them leave quantized: " .. name, function()
            local x, dy, kept = input { 3, 700, 256 }, nil, {}
            for i, fused in ipairs { true, false } do
                local before = te.set_fusion(fused)
                te.manual_seed(1)
                local seq = te.Sequential(te.Linear(256, 250), te.Reshape { -1, 125 }, te.GELU(),
                    te.Linear(125, 320), te.SwiGLU(),
                    te.Linear(160, 50), te.Reshape { 2, -1, 25 }, te.Dropout(0.1), te.Linear(25, 300),
                    te.GELU(), te.Linear(300, 5))
                local scope = { recipe = recipe(name == "nvfp4" and { disable_stochastic_rounding = true } or {}),
                    dtype = "bfloat16" }
                te.manual_seed(2)
                x.grad = nil
                local y = te.autocast(scope, seq, x)
                dy = dy or te.randn(y.shape, { dtype = "bfloat16" })
                y:backward(dy)
                te.set_fusion(before)
                kept[i] = { te._core.tensor_bytes(y:detach():to "cpu"), te._core.tensor_bytes(x.grad:to "cpu"),
                    te._core.tensor_bytes(seq[4].weight.grad:to "cpu"),
                    te._core.tensor_bytes(seq[11].weight.grad:to "cpu") }
            end
            -- a GPU sums the gradients of rows in the order of its kernels
            local on_cpu = te.get_default_device() == "cpu"
            for k = 1, on_cpu and 4 or 1 do assert.is_true(kept[1][k] == kept[2][k], name .. " " .. k) end
        end)
    end

    it("count rows anew for what programs leave quantized, and leave what lies between to kernels of their own",
        function()
        local seq = te.Sequential(te.Linear(64, 256), te.Reshape { -1, 128 }, te.GELU(), te.Linear(128, 128), te.GELU(),
            te.Reshape { -1, 256 }, te.Linear(256, 64))
        te.autocast({ recipe = te.recipe.MXFP8BlockScaling {}, dtype = "bfloat16" }, function()
            local plan = seq:explain(input { 4096, 64 })
            assert.matches("quantized to float8_e4m3 in blocks of 1 x 32 by the program that makes it",
                reason(plan, "GELU", "Linear"))
            assert.matches("a program before it cannot leave the product's operand quantized",
                reason(plan, "Reshape", "Linear"))
        end)
    end)

    it("notice saved values that were changed in place since", function()
        local seq = te.Sequential(te.Reshape { -1, 4 }, te.GELU())
        local x = input { 2, 8 }
        local y = seq(x)
        te.no_grad(function() x:mul_(2) end)
        assert.has_error(function() te.sum(y):backward() end)
    end)
end)
