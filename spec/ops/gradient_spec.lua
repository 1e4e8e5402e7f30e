--- Gradients of every operation, of its inputs, extra inputs and parameters, against differences in float64.

local te = require "te"

local function draw(shape) return te.rand(shape, { dtype = "float64" }) * 2 - 1 end

local function matrix() return { draw { 3, 8 } } end
local function scaled() return { draw { 3, 8 }, draw { 3 } } end

local function heads()
    local inputs = {}
    for i = 1, 3 do inputs[i] = draw { 1, 2, 4, 3 } end
    return inputs
end

-- Constructor, inputs (a matrix unless given), and what is handed on without a gradient.
local OPERATIONS = {
    Linear = { function() return te.Linear(8, 5) end },
    ["Linear that returns its bias"] = { function() return te.Linear(8, 5, { return_bias = true }) end },
    BasicLinear = { function() return te.BasicLinear(8, 5) end },
    Bias = { function() return te.Bias(8) end },
    GroupedLinear = { function() return te.GroupedLinear(3, 8, 2) end, matrix,
        { te.tensor({ 1, 0, 2 }, { dtype = "int64" }) } },
    ["GroupedLinear with scaled bias"] = {
        function() return te.GroupedLinear(2, 8, 2, { scale_bias = true }) end, matrix,
        { te.tensor({ 1, 2 }, { dtype = "int64" }), te.tensor({ 1, 2, 3 }, { dtype = "float64" }) },
    },
    LayerNorm = { function() return te.LayerNorm(8) end },
    ["LayerNorm over two dimensions"] = { function() return te.LayerNorm({ 2, 4 }, { zero_centered_gamma = true }) end,
        function() return { draw { 3, 2, 4 } } end },
    RMSNorm = { function() return te.RMSNorm(8) end },
    ["RMSNorm around gamma 1"] = { function() return te.RMSNorm(8, { zero_centered_gamma = true }) end },
    L2Normalization = { te.L2Normalization },
    Identity = { te.Identity },
    Reshape = { function() return te.Reshape({ 4, -1 }) end },
    ConstantScale = { function() return te.ConstantScale(-3) end },
    MakeExtraOutput = { te.MakeExtraOutput },
    AddExtraInput = { te.AddExtraInput, function() return { draw { 3, 8 }, draw { 3, 8 } } end },
    MultiHeadedSelfAttention = { function() return te.MultiHeadedSelfAttention(8, 2) end,
        function() return { draw { 2, 3, 8 } } end },
    GroupedQueryAttention = { function()
        return te.GroupedQueryAttention(8, 4, 2, { causal = false, window_right = 1 })
    end,
        function() return { draw { 2, 3, 8 } } end },
    MultiQuerySelfAttention = { function()
        return te.MultiQuerySelfAttention(8, 2, { window_left = 1, scale = 0.7 })
    end,
        function() return { draw { 5, 8 } } end, { te.tensor({ 2, 0, 3 }, { dtype = "int32" }) } },
    DotProductAttention = { function() return te.DotProductAttention({ causal = true, bottom_right = true }) end,
        heads },
    Pointwise = { function()
        return te.Pointwise({ params = { g = draw { 8 }, s = draw {} } }, function(x, p)
            return te.sigmoid(x) * p.g, te.tanh(x * p.s)
        end)
    end },
    GELU = { te.GELU }, ["GELU through erf"] = { function() return te.GELU({ approximate = "none" }) end },
    QuickGELU = { te.QuickGELU }, SiLU = { te.SiLU },
    ScaledSwiGLU = { te.ScaledSwiGLU, scaled }, ScaledSiTUGLU = { te.ScaledSiTUGLU, scaled },
    ScaledClampedQGeGLU = { function() return te.ScaledClampedQGeGLU({ glu_interleave_size = 2 }) end, scaled },
}
for _, name in ipairs { "GLU", "GEGLU", "QGEGLU", "SwiGLU", "ClampedSwiGLU", "SiTUGLU" } do
    OPERATIONS[name] = { te[name] }
end

-- Every parameter as { holder, key, tensor }.
local function parameters(op)
    local list = {}
    for name, tensor in op:named_parameters() do
        local holder, path = op, {}
        for key in name:gmatch("[^.]+") do path[#path + 1] = tonumber(key) or key end
        for i = 1, #path - 1 do holder = holder[path[i]] end
        list[#list + 1] = { holder, path[#path], tensor }
    end
    return list
end

-- One tensor of all results, weighted so that none can hide behind another.
local function joined(...)
    local total
    for i = 1, select("#", ...) do
        local part = (select(i, ...)):flatten()
        total = total and te.cat({ total, part * i }, 1) or part
    end
    return total
end

describe("gradients of operations:", function()
    for name, case in pairs(OPERATIONS) do
        it(name, function()
            te.manual_seed(8)
            local op, inputs = case[1]():to("float64"), (case[2] or matrix)()
            local fields, leaves, n = parameters(op), {}, #inputs
            for i, input in ipairs(inputs) do leaves[i] = input end
            for i, field in ipairs(fields) do leaves[n + i] = draw(field[3].shape) end
            local function run(...)
                local given = { ... }
                for i, field in ipairs(fields) do field[1][field[2]] = given[n + i] end
                for i = n + 1, #given do given[i] = nil end
                for i, constant in ipairs(case[3] or {}) do given[n + i] = constant end
                return joined(op(unpack(given)))
            end
            assert.is_true(te.gradcheck(run, leaves))
        end)
    end
end)
