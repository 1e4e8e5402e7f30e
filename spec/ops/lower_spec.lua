--- What an operation says of itself to the fuser is what it does: its description, run by the engine's operations one
--- by one, gives the same bits as calling it, and the same gradients.

local te = require "te"
local operation = require "te.operation"
local executor = require "spec.support.executor"

local function hidden() return { te.randn({ 6, 8 }, { requires_grad = true }) } end

local function heads()
    local inputs = {}
    for i = 1, 3 do inputs[i] = te.randn({ 2, 2, 5, 4 }, { requires_grad = true }) end
    return inputs
end

-- { operation, inputs, sequence lengths }: each a function, run with the same seed.
local CASES = {
    Linear = { function() return te.Linear(8, 5) end },
    ["Linear without bias"] = { function() return te.Linear(8, 5, { bias = false }) end },
    ["Linear that returns its bias"] = { function() return te.Linear(8, 5, { return_bias = true }) end },
    BasicLinear = { function() return te.BasicLinear(8, 5) end },
    Bias = { function() return te.Bias(8) end },
    LayerNorm = { function() return te.LayerNorm(8) end },
    ["LayerNorm without bias"] = { function() return te.LayerNorm(8, { bias = false, eps = 0.1 }) end },
    ["LayerNorm around gamma 1"] = { function() return te.LayerNorm(8, { zero_centered_gamma = true }) end },
    RMSNorm = { function() return te.RMSNorm(8) end },
    ["RMSNorm around gamma 1"] = { function() return te.RMSNorm(8, { zero_centered_gamma = true, eps = 0.1 }) end },
    L2Normalization = { function() return te.L2Normalization({ eps = 0.1 }) end },
    Identity = { function() return te.Identity() end },
    Reshape = { function() return te.Reshape({ -1, 4 }) end },
    ConstantScale = { function() return te.ConstantScale(3) end },
    Dropout = { function() return te.Dropout(0.4) end },
    ["Dropout in evaluation"] = { function() return te.Dropout(0.4):eval() end },
    MakeExtraOutput = { function() return te.MakeExtraOutput() end },
    AddExtraInput = { function() return te.AddExtraInput() end,
        function() return { te.randn({ 6, 8 }), te.randn({ 6, 8 }, { requires_grad = true }) } end },
    Embedding = { function() return te.Embedding(5, 3) end,
        function() return { te.randint(0, 4, { 2, 7 }, { dtype = "int32" }) } end },
    GroupedLinear = { function() return te.GroupedLinear(3, 8, 5) end,
        function()
            return { te.randn({ 6, 8 }, { requires_grad = true }), te.tensor({ 2, 0, 4 }, { dtype = "int32" }) }
        end },
    ["GroupedLinear with scaled biases"] = { function() return te.GroupedLinear(2, 8, 5, { scale_bias = true }) end,
        function() return { te.randn({ 6, 8 }, { requires_grad = true }), te.tensor({ 2, 4 }, { dtype = "int32" }),
            te.randn({ 6 }, { requires_grad = true }) } end },
    MultiHeadedSelfAttention = { function() return te.MultiHeadedSelfAttention(8, 2, { dropout = 0.3 }) end },
    GroupedQueryAttention = { function() return te.GroupedQueryAttention(8, 4, 2, { causal = false }) end,
        function() return { te.randn({ 2, 6, 8 }, { requires_grad = true }) } end },
    MultiQuerySelfAttention = { function() return te.MultiQuerySelfAttention(8, 2, { window_left = 1 }) end, hidden,
        function() return te.tensor({ 4, 0, 2 }, { dtype = "int32" }) end },
    DotProductAttention = { function()
        return te.DotProductAttention({ causal = true, window_left = 2, scale = 0.3 })
    end, heads },
    ["StochasticDepth of a batch"] = { function() return te.StochasticDepth(0.5) end,
        function() return { te.randn({ 8, 3, 2 }, { requires_grad = true }) } end },
    ["StochasticDepth of packed sequences"] = { function() return te.StochasticDepth(0.5) end, hidden,
        function() return te.tensor({ 1, 2, 0, 3 }, { dtype = "int64" }) end },
    ["StochasticDepth in evaluation"] = { function() return te.StochasticDepth(0.5):eval() end },
    ["AddExtraInput of a channel"] = { function() return te.AddExtraInput({ channel = "a", in_place = true }) end,
        function() return { te.randn({ 6, 8 }), te.randn({ 6, 8 }, { requires_grad = true }) } end },
    ["SwiGLU of blocks"] = { function() return te.SwiGLU({ glu_interleave_size = 2 }) end },
    ["ScaledSiTUGLU of blocks"] = { function() return te.ScaledSiTUGLU({ glu_interleave_size = 4, beta1 = 2 }) end,
        function()
            return { te.randn({ 6, 8 }, { requires_grad = true }), te.randn({ 6 }, { requires_grad = true }) }
        end },
    ["Pointwise with a parameter"] = { function()
        return te.Pointwise({ params = { g = te.randn({ 8 }) } }, function(x, p) return te.tanh(x) * p.g, x - 1 end)
    end },
    ["GELU through erf"] = { function() return te.GELU({ approximate = "none" }) end },
    ["ClampedSwiGLU with options"] = { function() return te.ClampedSwiGLU({ limit = 0.5, alpha = 1.3 }) end },
}
for _, name in ipairs { "ReLU", "GELU", "QuickGELU", "SReLU", "SiLU", "GLU", "ReGLU", "GEGLU",
    "QGEGLU", "SReGLU", "SwiGLU", "ClampedSwiGLU", "SiTUGLU" } do
    CASES[name] = { te[name] }
end
for _, name in ipairs { "ScaledSReLU", "ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU" } do
    CASES[name] = { te[name],
        function()
            return { te.randn({ 6, 8 }, { requires_grad = true }), te.randn({ 6 }, { requires_grad = true }) }
        end }
end

-- Fields that may be nil.
local OPTIONAL = { scale = true, window_right = true, channel = true, glu_interleave_size = true, q_norm = true,
    k_norm = true, qk_norm_before_rope = true, cp_group = true, tp_group = true,
    sequence_group = true }

-- Results of run(inputs) and the gradients of all that it reads.
local function outcome(op, inputs, run)
    te.manual_seed(5)
    local results = { run(inputs) }
    local total
    for i, result in ipairs(results) do
        local part = te.sum(te.mul(result, i + 0.5) * result)
        total = total and total + part or part
    end
    local numbers = {}
    for i, result in ipairs(results) do numbers[i] = result:totable() end
    local leaves = op:parameters()
    for _, input in ipairs(inputs) do leaves[#leaves + 1] = input end
    if total.requires_grad then total:backward() end
    for _, leaf in ipairs(leaves) do
        numbers[#numbers + 1] = leaf.grad and leaf.grad:totable() or "none"
        leaf.grad = nil
    end
    return numbers, results
end

describe("lower", function()
    for name, case in pairs(CASES) do
        it("describes " .. name, function()
            te.manual_seed(3)
            local op, inputs = case[1](), (case[2] or hidden)()
            for _, parameter in ipairs(op:parameters()) do parameter:detach():uniform_({ low = -1 }) end
            local seq_lens = case[3] and case[3]() or nil
            local direct = outcome(op, inputs, function(values)
                if seq_lens then return op(values[1], seq_lens) end
                return op(unpack(values))
            end)
            local described, results = outcome(op, inputs, function(values)
                return assert(operation.lowering(op))(op, executor(seq_lens), unpack(values))
            end)
            assert.same(direct, described)
            assert.equal(1 + op.num_extra_outputs, #results)
        end)
    end

    it("gives a reason when there is no description", function()
        local y, reason = te.Reshape({ 2, -1 }):lower(executor(), te.ones({ 2, 4 }))
        assert.is_nil(y)
        assert.equal("its rows have no length that is known before it runs", reason)
        local attention = te.MultiHeadedSelfAttention(8, 2)
        attention.proj = te.Reshape({ 8, -1 })
        y, reason = attention:lower(executor(), te.ones({ 3, 8 }))
        assert.is_nil(y)
        assert.equal("proj: its rows have no length that is known before it runs", reason)
        local unjoined = setmetatable({ join = function() return nil, "rows of one dimension" end },
            { __index = executor() })
        y, reason = te.LayerNorm({ 2, 4 }):lower(unjoined, te.ones({ 3, 2, 4 }))
        assert.same({ nil, "rows of one dimension" }, { y, reason })
    end)

    it("hands on why an operation is not taken", function()
        local picky = setmetatable({ refused = "" }, { __index = executor() })
        function picky.op(_, op, inputs, attributes)
            if op == picky.refused then return nil, "no " .. op end
            return executor():op(op, inputs, attributes)
        end
        for refused, op in pairs {
            linear = te.Linear(8, 8, { return_bias = true }), self_attention = te.MultiHeadedSelfAttention(8, 2),
            situglu = te.SiTUGLU({ glu_interleave_size = 2 }),
        } do
            picky.refused = refused
            local y, reason = op:lower(picky, te.ones({ 2, 8 }))
            assert.is_nil(y)
            assert.equal("no " .. refused, reason)
        end
    end)

    it("is not inherited by a class or an instance that runs something else", function()
        local Doubled = te.Linear:extend("Doubled")
        assert.is_function(operation.lowering(Doubled(2, 2)))
        function Doubled:op_forward(ctx, x) return te.Linear.op_forward(self, ctx, x) * 2 end
        local lower, reason = operation.lowering(Doubled(2, 2))
        assert.is_nil(lower)
        assert.equal("Doubled has no method lower", reason)
        function Doubled:lower(g, x) return g:op("mul", { te.Linear.lower(self, g, x), 2 }) end
        local doubled, x = Doubled(2, 2), te.ones({ 1, 2 })
        assert.same(doubled(x):totable(), operation.lowering(doubled)(doubled, executor(), x):totable())
        local gelu = te.GELU()
        function gelu:forward(x) return x end -- luacheck: ignore
        lower, reason = operation.lowering(gelu)
        assert.is_nil(lower)
        assert.equal("this GELU has its own forward", reason)
        lower, reason = operation.lowering(te.Module:extend("Plain")())
        assert.is_nil(lower)
        assert.equal("Plain has no method lower", reason)
    end)

    it("follows the fields that plan_fields names", function()
        local x = te.randn({ 2, 4 })
        local gelu = te.GELU()
        gelu.approximate = "none"
        assert.same(te.gelu(x, { approximate = "none" }):totable(), gelu(x):totable())
        assert.same({ "approximate", "cache_quantized_input" }, gelu.plan_fields)
        local norm = te.LayerNorm(4)
        norm.eps = 3
        assert.same(te.layer_norm(x, norm.weight, norm.bias, { eps = 3 }):totable(), norm(x):totable())
        for name, case in pairs(CASES) do
            local op = case[1]()
            for _, field in ipairs(op.plan_fields) do
                assert.is_true(OPTIONAL[field] or op[field] ~= nil, name .. ": " .. field)
            end
        end
    end)
end)
