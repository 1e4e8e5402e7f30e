-- Activations whose input is saved in E4M3, wherever they stand in a container.

local te = require "te"

local function largest(a, b) return (a:to("float64") - b:to("float64")):abs():max():item() end

local function cached(name) return te[name or "SReLU"] { cache_quantized_input = true } end

-- Gradients of x and of the parameters of what `build` makes.
local function gradients(build, fused)
    te.manual_seed(5)
    te.set_fusion(fused)
    local net, x = build(), te.randn { 6, 8 }
    x.requires_grad = true
    net(x):square():sum():backward()
    te.set_fusion(true)
    local list = { x.grad }
    for _, p in ipairs(net:parameters()) do list[#list + 1] = p.grad end
    return list
end

-- E4M3 rounds to a sixteenth: what is fused may save nothing, and be exact.
local function check(build)
    local fused, unfused = gradients(build, true), gradients(build, false)
    assert.equal(#unfused, #fused)
    for i, gradient in ipairs(fused) do
        assert.is_true(largest(gradient, unfused[i]) <= 0.1 * (unfused[i]:abs():max():item() + 1e-6))
    end
end

describe("cache_quantized_input", function()
    for name, build in pairs {
        ["at the head of a residual branch"] = function()
            return te.Sequential(te.LayerNorm(8), te.Residual(cached "GELU", te.Linear(8, 8)))
        end,
        ["at the head of one after a product"] = function()
            return te.Sequential(te.Linear(8, 8), te.Bias(8), te.Residual(cached(), te.Linear(8, 8)))
        end,
        ["beside another branch"] = function()
            return te.Sequential(te.GELU(), te.Residual(cached(), te.Linear(8, 8), { parallel = true }))
        end,
        ["after what needs its own result"] = function()
            return te.Sequential(te.Linear(8, 8), te.pointwise(function(x) return te.exp(te.tanh(x)) end), cached(),
                te.Linear(8, 8))
        end,
        ["in two branches in a row"] = function()
            return te.Sequential(te.Residual(te.LayerNorm(8), cached(), te.Linear(8, 8)),
                te.Residual(cached(), te.Linear(8, 8)))
        end,
        ["of a gated activation after a product"] = function()
            return te.Sequential(te.Linear(8, 16), te.Residual(te.GELU()), cached "SwiGLU", te.Linear(8, 8))
        end,
    } do
        it("gives gradients " .. name, function() check(build) end)
    end

    it("acts where the input is the caller's, of any layout", function()
        te.manual_seed(1)
        local x = te.randn { 8, 6, 2 }:transpose(1, 3):detach()
        x.requires_grad = true
        local exact = te.clamp(x:detach(), 0) * 2
        cached()(x):sum():backward()
        local alone = x.grad:clone()
        x.grad = nil
        te.Sequential(cached())(x):sum():backward()
        assert.is_true(largest(exact, alone) > 0.01)
        assert.equal(0, largest(alone, x.grad))
    end)

    it("lets go of an input that nobody else holds", function()
        local function kept(option)
            local net, x = te.Sequential(te.GELU { cache_quantized_input = option }), te.randn { 256, 1024 }
            x.requires_grad = true
            collectgarbage()
            collectgarbage()
            local before = te.memory_stats().current
            local y = net(x * 1)
            collectgarbage()
            collectgarbage()
            local bytes = te.memory_stats().current - before
            y:sum():backward()
            return bytes / x:numel()
        end
        assert.near(8, kept(false), 0.1) -- the result and the input
        assert.near(5, kept(true), 0.1)
    end)
end)
