-- A container's input that others read too: what they gave its gradient is added before the sum is rounded, as single
-- operations do it. For wide rows that is nearly every second element of a norm's gradient.

local te = require "te"

-- Gradients of the inputs of call(module, inputs...) with fusion and without. Where both are one program each, their
-- bits are the same.
local function gradients(make, call, inputs, dtype)
    local results = {}
    for _, fused in ipairs { true, false } do
        local before = te.set_fusion(fused)
        te.manual_seed(3)
        local module, leaves = make():to(dtype), {}
        for i, shape in ipairs(inputs) do
            leaves[i] = te.randn(shape):to(dtype)
            leaves[i].requires_grad = true
        end
        local loss
        for _, y in ipairs { call(module, unpack(leaves)) } do
            local part = (y:to("float32") * te.randn(y.shape):to(dtype):to("float32")):sum()
            loss = loss and loss + part or part
        end
        loss:backward()
        te.set_fusion(before)
        for i, leaf in ipairs(leaves) do
            results[i] = results[i] or {}
            table.insert(results[i], leaf.grad:to("float64"):totable())
        end
    end
    return results
end

local function assert_same(make, call, ...)
    for _, dtype in ipairs { "bfloat16", "float16", "float32" } do
        for i, both in ipairs(gradients(make, call, { ... }, dtype)) do
            assert.same(both[2], both[1], dtype .. ", input " .. i)
        end
    end
end

local function apply(module, ...) return module(...) end

describe("the gradient of an input that others read too is rounded once", function()
    it("where MakeExtraOutput is the first operation", function()
        assert_same(function() return te.Sequential(te.MakeExtraOutput(), te.RMSNorm(256)) end, apply, { 16, 256 })
        assert_same(function() return te.Sequential(te.MakeExtraOutput(), te.SwiGLU()) end, apply, { 16, 64 })
        assert_same(function() return te.Sequential(te.MakeExtraOutput(), te.LayerNorm(64)) end, apply, { 4, 5, 64 })
    end)

    it("beside the container", function()
        local function beside(module, x) return x * 0.75 + module(x) end
        assert_same(function() return te.Sequential(te.RMSNorm(256)) end, beside, { 16, 256 })
        assert_same(function() return te.Sequential(te.Reshape { -1, 64 }, te.SiLU(), te.Reshape { 3, 4, 64 }) end,
            beside, { 3, 4, 64 })
        assert_same(function() return te.Sequential(te.GELU()) end, function(module, x)
            local y = x:view { 8, 32 }
            return y:sin() + module(y), x:cos()
        end, { 16, 16 })
    end)

    it("with rows of an extra input", function()
        assert_same(function() return te.Sequential(te.ScaledSReLU()) end, function(module, x, scale)
            return module(x, scale), scale:sin(), x:cos()
        end, { 16, 64 }, { 16 })
    end)

    it("and not written twice where it is the input twice over", function()
        local x = te.ones({ 2, 2 }, { requires_grad = true })
        te.Sequential(te.ConstantScale(3), te.AddExtraInput())(x, x):sum():backward()
        assert.same({ { 4, 4 }, { 4, 4 } }, x.grad:totable())
        te.Sequential(te.ConstantScale(3), te.AddExtraInput(), te.ConstantScale(2))(x, x):sum():backward()
        assert.same({ { 12, 12 }, { 12, 12 } }, x.grad:totable())
    end)

    it("and added to the gradient of a pass before", function()
        local x = te.ones({ 2, 2 }, { requires_grad = true })
        local seq = te.Sequential(te.MakeExtraOutput(), te.ConstantScale(3))
        for pass = 1, 3 do
            local y, extra = seq(x)
            te.sum(y + extra * 2):backward()
            assert.same({ { 5 * pass, 5 * pass }, { 5 * pass, 5 * pass } }, x.grad:totable())
        end
        local y = seq(x)
        local taken = te.grad(y:sum(), { x })
        assert.same({ { 3, 3 }, { 3, 3 } }, taken[1]:totable())
        assert.same({ { 15, 15 }, { 15, 15 } }, x.grad:totable())
    end)
end)
