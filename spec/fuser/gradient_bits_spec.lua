-- Gradients of programs that were joined have the bits of those that single programs give one after the other: between
-- two of them a gradient is rounded to its tensor's dtype, and no factor of one meets a factor of the other. A GPU
-- divides sums as the kernel's operands allow.

local te = require "te"

local CONTAINERS = {
    ["two activations"] = function() return te.Sequential(te.GELU(), te.SiLU()) end,
    ["two factors"] = function() return te.Sequential(te.ConstantScale(1.7), te.ConstantScale(0.3)) end,
    ["factors that would cancel"] = function()
        return te.Sequential(te.ConstantScale(3), te.ConstantScale(-1 / 3), te.ConstantScale(-0.7), te.ReLU())
    end,
    ["a gated activation"] = function() return te.Sequential(te.SwiGLU(), te.ConstantScale(0.3), te.GELU()) end,
    ["a bias"] = function() return te.Sequential(te.QGELU(), te.Bias(64), te.GELU(), te.Bias(64), te.SiLU()) end,
    ["a residual"] = function() return te.Sequential(te.Residual(te.GELU()), te.SiLU()) end,
    ["residuals"] = function()
        return te.Sequential(te.Residual(te.GELU(), te.SiLU()), te.Residual(te.ConstantScale(0.3), te.QGELU()),
            te.SReLU())
    end,
    ["an extra output"] = function() return te.Sequential(te.SiLU(), te.MakeExtraOutput(), te.GELU()) end,
    ["a norm"] = function() return te.Sequential(te.GELU(), te.RMSNorm(64), te.SiLU()) end,
    ["norms in residuals"] = function()
        return te.Sequential(te.Residual(te.LayerNorm(64), te.GELU()), te.Residual(te.RMSNorm(64), te.SiLU()))
    end,
    ["dropout"] = function() return te.Sequential(te.GELU(), te.Dropout(0.3), te.SiLU(), te.Dropout(0.1)) end,
    ["a function of its own"] = function()
        local own = te.pointwise(function(x) return te.tanh(x) * x + te.sigmoid(x * 3) end)
        return te.Sequential(te.SiLU(), te.Residual(own), own)
    end,
}

local function gradients(make, dtype, autocast, fused)
    local before = te.set_fusion(fused)
    te.manual_seed(4)
    local module, x = make():to(dtype), te.randn { 32, 64 }:to(dtype) * 3
    x = x:detach()
    x.requires_grad = true
    te.manual_seed(5)
    local function forward() return { module(x) } end
    local results = autocast and te.autocast({ dtype = autocast }, forward) or forward()
    local loss
    te.manual_seed(6)
    for _, y in ipairs(results) do
        local part = (y:to("float64") * te.randn(y.shape, { dtype = "float64" })):sum()
        loss = loss and loss + part or part
    end
    loss:backward()
    te.set_fusion(before)
    local all = { input = x.grad }
    for name, p in module:named_parameters() do all[name] = p.grad end
    return all
end

-- What is infinite or no number stays no number behind a factor 0, and where it is taken from itself.
local HOSTILE = {
    ["a factor 0"] = function() return te.ConstantScale(0) end,
    ["a factor 0 and an activation"] = function() return te.Sequential(te.ConstantScale(0), te.SiLU()) end,
    ["an activation and a factor 0"] = function() return te.Sequential(te.SiLU(), te.ConstantScale(0)) end,
    ["a residual with its opposite"] = function() return te.Residual(te.ConstantScale(-1)) end,
    ["a factor 0 in a function"] = function() return te.Pointwise(function(x) return 0 * x + 1 end) end,
    ["a difference in a function"] = function() return te.Pointwise(function(x) return x - x end) end,
}

describe("an infinite gradient", function()
    for name, make in pairs(HOSTILE) do
        it("becomes NaN behind " .. name .. ", fused or not", function()
            local before = te.set_fusion(true)
            for _, fused in ipairs { true, false } do
                te.set_fusion(fused)
                local x = te.ones({ 4 }, { requires_grad = true })
                local y = te.Sequential(make(), te.Identity())(x)
                local grad = te.grad(y, x, { grad_outputs = te.tensor { 1, math.huge, -math.huge, 0 / 0 } })
                assert.same({ 0, 1, 1, 1 }, te.ne(grad, grad):to("float32"):totable(), tostring(fused))
                assert.equal(0, grad:select(1, 1):item())
            end
            te.set_fusion(before)
        end)
    end
end)

local SUMS_TOO = te.get_default_device() == "cpu"

describe("joined gradients have the bits of single ones behind", function()
    for name, make in pairs(CONTAINERS) do
        it(name, function()
            for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
                for _, autocast in ipairs { false, "bfloat16" } do
                    local expected = gradients(make, dtype, autocast, false)
                    for which, got in pairs(gradients(make, dtype, autocast, true)) do
                        local differ = te.ne(expected[which], got):to("float32"):sum():item()
                        local sums = which ~= "input" or name:match("norm")
                        assert.is_true(differ == 0 or sums and not SUMS_TOO,
                            ("%d of %s, %s%s"):format(differ, which, dtype, autocast and ", autocast" or ""))
                    end
                end
            end
        end)
    end
end)
