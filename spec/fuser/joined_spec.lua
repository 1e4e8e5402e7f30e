local te = require "te"

local function input(shape)
    local x = te.randn(shape)
    x.requires_grad = true
    return x
end

local function kernels(steps)
    local list = {}
    for i, step in ipairs(steps) do list[i] = step.kernels[1] end
    return list
end

-- Results and gradients of a container and its inputs.
local function run(seq, fused, ...)
    local before = te.set_fusion(fused)
    seq:zero_grad()
    te.manual_seed(8)
    local y = seq(...)
    te.manual_seed(9)
    y:backward(te.randn(y.shape))
    te.set_fusion(before)
    local grads = {}
    for name, parameter in seq:named_parameters() do grads[name] = parameter.grad end
    for i = 1, select("#", ...) do
        local t = select(i, ...)
        grads[i], t.grad = t.grad, nil
    end
    return y, grads
end

local function check(seq, ...)
    local expected, expected_grads = run(seq, false, ...)
    local y, grads = run(seq, true, ...)
    assert.same(expected.shape, y.shape)
    assert.same(expected:totable(), y:totable())
    for name, grad in pairs(expected_grads) do
        assert.same(grad.shape, grads[name].shape)
        assert.is_true((grad - grads[name]):abs():max():item() < 1e-5, name)
    end
end

describe("norms over several dimensions", function()
    before_each(function() te.manual_seed(7) end)

    it("are one program with what stands beside them, element by element", function()
        local seq = te.Sequential(te.AddExtraInput(), te.LayerNorm({ 2, 4 }), te.GELU())
        local x, e = input { 3, 5, 2, 4 }, input { 3, 5, 2, 4 }
        local plan = seq:explain(x, e)
        assert.same({ "add+layer_norm+gelu_tanh" }, kernels(plan.forward))
        assert.same({ "add+layer_norm+gelu_tanh.backward" }, kernels(plan.backward))
        check(seq, x, e)
        check(te.Sequential(te.Residual(te.RMSNorm({ 5, 2, 4 }), te.Dropout(0.2), te.SiLU(), te.ConstantScale(2))), x)
    end)

    it("stand apart from products, gated operations and norms over other sizes", function()
        local seq = te.Sequential(te.ReLU(), te.LayerNorm({ 2, 4 }), te.Linear(4, 8), te.SwiGLU(), te.RMSNorm({ 2, 4 }),
            te.RMSNorm(4))
        local x = input { 3, 2, 4 }
        local plan = seq:explain(x)
        assert.same({ "relu+layer_norm", "linear", "swiglu", "rms_norm", "rms_norm" }, kernels(plan.forward))
        local borders = 0
        for _, r in ipairs(plan.reasons) do
            if r.reason == "rows of several dimensions beside rows of one" then borders = borders + 1 end
        end
        assert.equal(3, borders)
        check(seq, x)
    end)

    it("refuse inputs that do not end with their sizes", function()
        local seq = te.Sequential(te.LayerNorm({ 2, 4 }), te.ReLU())
        for _, shape in ipairs { { 3, 4, 2 }, { 8 }, { 3, 2, 8 } } do
            for _, fused in ipairs { true, false } do
                local before = te.set_fusion(fused)
                assert.error_matches(function() seq(te.ones(shape)) end, "its last sizes must be {2,4}")
                te.set_fusion(before)
            end
        end
        assert.same({ 3, 2, 4 }, seq(te.ones({ 3, 4, 2 }):transpose(2, 3)).shape)
    end)
end)
