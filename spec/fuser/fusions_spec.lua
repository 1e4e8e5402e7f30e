-- Every fusion that is promised: the steps of its plan, forward and backward; that it computes what single operations
-- compute, what float64 gives and what differences say; and each condition that must prevent it.

local te = require "te"
local plans = require "spec.support.plans"

local input, steps = plans.input, plans.steps

-- { make container, forward, backward, shapes of extra inputs }. A program behind a product sums
-- its bias gradient as well.
local FUSIONS = {
    ["linear, bias, activation"] = {
        function() return te.Sequential(te.BasicLinear(8, 6), te.Bias(6), te.SiLU()) end,
        { "BasicLinear:linear", "Bias + SiLU:add+silu" },
        { "Bias + SiLU:add+silu.backward", "BasicLinear:dgrad", "BasicLinear:wgrad" },
    },
    ["linear, bias, add"] = {
        function() return te.Sequential(te.BasicLinear(8, 8), te.Bias(8), te.AddExtraInput(), te.GELU()) end,
        { "BasicLinear:linear", "Bias + AddExtraInput + GELU:add+add+gelu_tanh" },
        { "Bias + AddExtraInput + GELU:add+add+gelu_tanh.backward", "BasicLinear:dgrad", "BasicLinear:wgrad" },
        { { 4, 8 } },
    },
    ["linear, scale, add"] = {
        function() return te.Sequential(te.Linear(8, 8), te.ConstantScale(0.5), te.AddExtraInput()) end,
        { "Linear:linear", "ConstantScale + AddExtraInput:mul+add" },
        { "ConstantScale + AddExtraInput:mul+add.backward", "Linear:dgrad", "Linear:wgrad" }, -- with the bias gradient
        { { 4, 8 } },
    },
    ["linear, dropout, residual, norm: the sum is the next residual"] = {
        function()
            return te.Sequential(te.Residual(te.Linear(8, 8), te.Dropout(0.2)),
                te.Residual(te.RMSNorm(8), te.Linear(8, 8)))
        end,
        { "Linear:linear", "Dropout + AddExtraInput + RMSNorm:dropout_apply+add+rms_norm", "Linear:linear",
            "AddExtraInput:add" },
        { "AddExtraInput:add.backward", "Linear:dgrad", "Linear:wgrad",
            "Dropout + AddExtraInput + RMSNorm:dropout_apply+add+rms_norm.backward", "Linear:dgrad", "Linear:wgrad" },
    },
    ["a chain of gated activations"] = {
        function()
            return te.Sequential(te.Linear(8, 16), te.SwiGLU(), te.ConstantScale(2), te.LayerNorm(8), te.Linear(8, 4))
        end,
        { "Linear:linear", "SwiGLU + ConstantScale + LayerNorm:swiglu+mul+layer_norm", "Linear:linear" },
        { "Linear:dgrad", "Linear:wgrad", "Linear:bias gradient",
            "SwiGLU + ConstantScale + LayerNorm:swiglu+mul+layer_norm.backward", "Linear:dgrad", "Linear:wgrad" },
    },
    ["activation, dropout, activation without a product"] = {
        function() return te.Sequential(te.GELU(), te.Dropout(0.5), te.ReLU(), te.L2Normalization()) end,
        { "GELU + Dropout + ReLU + L2Normalization:gelu_tanh+dropout_apply+relu+l2_norma" },
        { "GELU + Dropout + ReLU + L2Normalization:gelu_tanh+dropout_apply+relu+l2_norma.backward" },
    },
    ["two branches that read one activation"] = {
        function()
            return te.Sequential(te.Residual(te.Sequential(te.LayerNorm(8), te.Linear(8, 8)),
                te.Sequential(te.RMSNorm(8), te.Linear(8, 8)), { parallel = true }))
        end,
        { "LayerNorm + RMSNorm:layer_norm+rms_norm", "Linear:linear", "Linear:linear",
            "AddExtraInput + AddExtraInput:add+add" },
        { "AddExtraInput + AddExtraInput:add+add.backward", "Linear:dgrad", "Linear:wgrad",
            "Linear:dgrad", "Linear:wgrad", "LayerNorm + RMSNorm:layer_norm+rms_norm.backward" },
    },
    ["a traced function between built-in operations"] = {
        function()
            return te.Sequential(te.Linear(8, 8), te.Pointwise(function(x) return x * te.sigmoid(x + 1) end),
                te.RMSNorm(8))
        end,
        { "Linear:linear", "Pointwise + RMSNorm:pointwise+rms_norm" },
        { "Pointwise + RMSNorm:pointwise+rms_norm.backward", "Linear:dgrad", "Linear:wgrad" },
    },
    ["a traced function with two results"] = {
        function()
            return te.Sequential(te.Linear(8, 8), te.Pointwise(function(x) return te.tanh(x), x * x end), te.GELU())
        end,
        { "Linear:linear", "Pointwise.pointwise + GELU:pointwise+pointwise+gelu_tanh" },
        { "Pointwise.pointwise + GELU:pointwise+pointwise+gelu_tanh.backward", "Linear:dgrad", "Linear:wgrad" },
    },
}

-- A sum over all results, each weighted otherwise, with the same random numbers at every call.
local function loss_of(seq)
    return function(...)
        te.manual_seed(9)
        local total
        for i, y in ipairs { seq(...) } do
            local part = te.sum(y * y * (0.3 + i))
            total = total and total + part or part
        end
        return total
    end
end

local function inputs_of(case, dtype)
    local list = { input({ 4, 8 }, dtype) }
    for _, shape in ipairs(case[4] or {}) do list[#list + 1] = input(shape, dtype) end
    return list
end

describe("the fusion of", function()
    for name, case in pairs(FUSIONS) do
        describe(name, function()
            before_each(function() te.manual_seed(2) end)

            it("has these steps", function()
                local plan = case[1]():explain(unpack(inputs_of(case)))
                assert.same(case[2], steps(plan.forward))
                assert.same(case[3], steps(plan.backward))
            end)

            it("computes what single operations do", function()
                plans.assert_unchanged(case[1](), unpack(inputs_of(case)))
            end)

            it("has the gradient that differences give, in float64", function()
                local seq, inputs = case[1]():to("float64"), inputs_of(case, "float64")
                local all, n = { unpack(inputs) }, #inputs
                for _, parameter in ipairs(seq:parameters()) do all[#all + 1] = parameter end
                local loss = loss_of(seq)
                assert.is_true(te.gradcheck(function(...) return loss(unpack({ ... }, 1, n)) end, all))
            end)

            it("is near float64 in float32", function()
                local single, double = case[1](), case[1]():to("float64")
                double:load_state_dict(single:state_dict())
                local inputs = inputs_of(case)
                local wide = {}
                for i, x in ipairs(inputs) do wide[i] = x:to("float64"):detach() end
                local a, b = loss_of(single)(unpack(inputs)):item(), loss_of(double)(unpack(wide)):item()
                assert.is_true(math.abs(a - b) <= 1e-5 * math.abs(b), ("%.9g, float64 %.9g"):format(a, b))
            end)
        end)
    end

    it("weight gradients with what .grad holds is part of the product: no step adds", function()
        local seq = te.Sequential(te.Linear(8, 8), te.ReLU())
        local x = input { 4, 8 }
        seq(x):sum():backward()
        local once = seq[1].weight.grad:totable()
        x.grad = nil
        local names = {}
        for i, event in ipairs(te.profile(function() seq(x):sum():backward() end).events) do names[i] = event.name end
        assert.is_nil(table.concat(names, " "):find("%f[%w]add%f[%W]"))
        for i, row in ipairs(seq[1].weight.grad:totable()) do
            for k, value in ipairs(row) do assert.is_true(math.abs(value - 2 * once[i][k]) < 1e-5) end
        end
    end)
end)

-- { what, container, steps of its forward, from, to, why not, input }
local PREVENTED = {
    { "products, whose second reads whole rows", function() return te.Sequential(te.Linear(8, 8), te.Linear(8, 8)) end,
        { "Linear:linear", "Linear:linear" }, "Linear", "Linear", "needs whole rows of the first" },
    { "a program before a product", function() return te.Sequential(te.GELU(), te.Linear(8, 8)) end,
        { "GELU:gelu_tanh", "Linear:linear" }, "GELU", "Linear", "reads its operand from memory" },
    { "an activation and the gate that reads its halves", function() return te.Sequential(te.GELU(), te.SwiGLU()) end,
        { "GELU:gelu_tanh", "SwiGLU:swiglu" }, "GELU", "SwiGLU", "rows of another width" },
    { "attention and its neighbours", function() return te.Sequential(te.ReLU(), te.MultiHeadedSelfAttention(8, 2)) end,
        { "ReLU:relu", "MultiHeadedSelfAttention.linear:linear",
            "MultiHeadedSelfAttention.self_attention:self_attention", "MultiHeadedSelfAttention.linear:linear" },
        "MultiHeadedSelfAttention.self_attention", "MultiHeadedSelfAttention.linear",
            "attention reads and writes whole sequences" },
    { "programs around a function", function() return te.Sequential(te.ReLU(), function(x) return x end, te.ReLU()) end,
        { "ReLU:relu", "function:call", "ReLU:relu" }, "function", "function", "not an operation" },
    { "rows before and behind a reshape of another width",
        function() return te.Sequential(te.ReLU(), te.Reshape { -1, 4 }, te.ReLU()) end,
        { "ReLU:relu", "ReLU:relu" }, "ReLU", "Reshape", "rows have another width" },
    { "norms over several dimensions and over one",
        function() return te.Sequential(te.LayerNorm { 4, 8 }, te.LayerNorm(8)) end,
        { "LayerNorm:layer_norm", "LayerNorm:layer_norm" }, "LayerNorm", "LayerNorm",
        "rows of several dimensions beside rows of one",
        { 2, 4, 8 } },
    { "an operation with a backward of its own",
        function()
            local Double = te.BasicOperation:extend("Double")
            function Double:op_forward(_, x) return x * 2 end
            function Double:op_backward(_, dy) return dy * 2 end
            return te.Sequential(te.ReLU(), Double(), te.ReLU())
        end,
        { "ReLU:relu", "Double:call", "ReLU:relu" }, "Double", "Double", "has no method lower" },
}

describe("fusion is prevented of", function()
    for _, case in ipairs(PREVENTED) do
        it(case[1], function()
            local seq, x = case[2](), input(case[7] or { 4, 8 })
            local plan = seq:explain(x)
            assert.same(case[3], steps(plan.forward))
            assert.matches(case[6], plans.reason(plan, case[4], case[5]), 1, true)
            plans.assert_unchanged(seq, x)
        end)
    end

    it("anything when it is switched off", function()
        local seq, x = te.Sequential(te.ReLU(), te.GELU()), input { 4, 8 }
        local before = te.set_fusion(false)
        local plan = seq:explain(x)
        te.set_fusion(before)
        assert.same({ "ReLU:call", "GELU:call" }, steps(plan.forward))
        assert.matches("fusion is switched off", plans.reason(plan, "ReLU", "ReLU"))
    end)
end)
