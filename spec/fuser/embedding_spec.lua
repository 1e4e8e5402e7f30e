local te = require "te"
local plans = require "spec.support.plans"

local function ids(shape, dtype) return te.randint(0, 9, shape, { dtype = dtype or "int64" }) end

describe("an embedding in a group", function()
    before_each(function() te.manual_seed(1) end)

    it("is its head, and what follows is planned with it", function()
        local seq = te.Sequential(te.Embedding(10, 8), te.Dropout(0.2), te.LayerNorm(8), te.Linear(8, 8))
        local plan = seq:explain(ids { 2, 3 })
        assert.same({ "Embedding:embedding", "Dropout + LayerNorm:dropout_apply+layer_norm", "Linear:linear" },
            plans.steps(plan.forward))
        assert.equal("gather", plan.forward[1].kind)
        assert.equal("Embedding:embedding_backward", plans.steps(plan.backward)[#plan.backward])
        assert.matches("looked up are stored", plans.reason(plan, "Embedding", "Dropout"))
        for _, shape in ipairs { { 2, 3 }, { 7 }, { 2, 1, 4 }, { 0, 3 } } do plans.assert_unchanged(seq, ids(shape)) end
        plans.assert_unchanged(seq, ids({ 2, 3 }, "int32"))
    end)

    it("is planned once for ids of any number", function()
        local seq = te.Sequential(te.Embedding(10, 8), te.LayerNorm(8))
        for _, shape in ipairs { { 2, 3 }, { 1, 9 }, { 0, 1 } } do seq(ids(shape)) end
        assert.equal(1, plans.count(seq, ids { 2, 3 }))
        seq(ids { 4 })
        seq(ids({ 2, 3 }, "int32"))
        assert.equal(3, plans.count(seq, ids { 2, 3 }))
    end)

    it("moves the bytes that the plan says", function()
        local seq = te.Sequential(te.Embedding(10, 8), te.LayerNorm(8))
        local x, moved, predicted = ids { 4, 5 }, {}, {}
        seq(x):sum():backward()
        local plan = seq:explain(x)
        for _, pass in ipairs { plan.forward, plan.backward } do
            for _, step in ipairs(pass) do predicted[step.kernels[1]] = step.bytes end
        end
        for _, event in ipairs(te.profile(function() seq(x):sum():backward() end).events) do
            moved[event.name] = event.bytes
        end
        for _, kernel in ipairs { "embedding", "embedding_backward" } do
            assert.is_true(predicted[kernel] > 0)
            assert.equal(predicted[kernel], moved[kernel])
        end
    end)

    it("adds rows of its gradient to what .grad holds", function()
        local seq = te.Sequential(te.Embedding(10, 4), te.ConstantScale(3))
        local x = te.tensor({ { 1, 1 }, { 4, 1 } }, { dtype = "int64" })
        seq(x):sum():backward()
        assert.same({ 0, 9, 0, 0, 3 }, te.narrow(seq[1].weight.grad:select(2, 1), 1, 1, 5):totable())
        seq(x):sum():backward()
        assert.same({ 0, 18, 0, 0, 6 }, te.narrow(seq[1].weight.grad:select(2, 1), 1, 1, 5):totable())
    end)

    it("feeds attention, residuals and reshapes", function()
        local seq = te.Sequential(te.Embedding(10, 8),
            te.Residual(te.RMSNorm(8), te.MultiHeadedSelfAttention(8, 2, { causal = true })),
            te.Residual(te.RMSNorm(8), te.Linear(8, 32), te.SwiGLU(), te.Linear(16, 8)), te.RMSNorm(8),
            te.Reshape { -1, 8 })
        local kinds = {}
        for i, step in ipairs(seq:explain(ids { 2, 5 }).forward) do kinds[i] = step.kind end
        assert.same({ "gather", "program", "gemm", "attention", "gemm", "program", "gemm", "program",
            "gemm", "program" }, kinds)
        assert.same({ 10, 8 }, plans.assert_unchanged(seq, ids { 2, 5 }).shape)
    end)

    it("lets stochastic depth draw for samples of ids", function()
        local seq = te.Sequential(te.Embedding(10, 8), te.StochasticDepth(0.5), te.ReLU())
        assert.matches("ReLU:stochastic_depth_rows+relu", plans.steps(seq:explain(ids { 6, 2 }).forward)[3], 1, true)
        for _, shape in ipairs { { 6, 2 }, { 4 } } do plans.assert_unchanged(seq, ids(shape)) end
    end)

    it("gives the compute dtype under te.autocast", function()
        local seq = te.Sequential(te.Embedding(10, 8), te.GELU())
        local x, fused = ids { 3, 2 }, nil
        te.autocast({ dtype = "bfloat16" }, function()
            fused = seq(x)
            assert.equal("bfloat16", fused.dtype)
            fused:sum():backward()
            local before = te.set_fusion(false)
            assert.same(seq(x):totable(), fused:totable())
            te.set_fusion(before)
        end)
        assert.equal("float32", seq[1].weight.grad.dtype)
    end)

    it("raises what the operation raises: ids without an entry, ids that are no integers", function()
        local seq = te.Sequential(te.Embedding(10, 8), te.GELU())
        local outside = te.tensor({ 3, 10 }, { dtype = "int64" })
        if te.get_default_device() == "cpu" then
            assert.matches("te.embedding", plans.assert_unchanged(seq, outside).y)
        else -- there the host is told when it waits
            assert.error_matches(function() seq(outside):totable() end, "embedding: id 10 at position 2")
        end
        assert.matches("ids must be int64 or int32", plans.assert_unchanged(seq, te.ones { 3 }).y)
    end)

    it("is called by itself where its ids are computed in the group", function()
        local seq = te.Sequential(te.Reshape { 2, 3 }, te.Embedding(10, 8), te.GELU())
        assert.matches("cannot be planned", seq:explain(ids { 6 }).reasons[1].reason)
        assert.same({ 2, 3, 8 }, plans.assert_unchanged(seq, ids { 6 }).shape)
    end)
end)
