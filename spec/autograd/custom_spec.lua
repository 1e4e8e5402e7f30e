--- Operations that a script defines.

local close = require("spec.support.reference").assert_close
local te = require "te"

local function leaf(values) return te.tensor(values, { dtype = "float64", requires_grad = true }) end

describe("operations defined in Lua", function()
    local function square(x)
        return te._core.custom(function(ctx, a)
            ctx:save_for_backward(a)
            return a * a
        end, function(ctx, d)
            local a = ctx:saved_tensors()
            return d * a * 2
        end, x)
    end

    it("take part in gradients", function()
        local x = leaf { 1, 2, 3 }
        te.sum(square(x) * x):backward()
        close({ 3, 12, 27 }, x.grad)
        assert.is_true(te.gradcheck(square, { te.tensor({ 0.5, -2 }, { dtype = "float64" }) }))
        assert.is_false(te.no_grad(square, x).requires_grad)
    end)

    it("have several inputs and outputs, some without gradient", function()
        local function both(a, factor, b)
            return te._core.custom(function(_, u, f, v) return u * f, v + 1 end, function(_, du, dv)
                return du and du * factor, nil, dv
            end, a, factor, b)
        end
        local a, b = leaf { 1, 2 }, leaf { 3, 4 }
        local p, q = both(a, 5, b)
        te.sum(p + q):backward()
        close({ 5, 5 }, a.grad)
        close({ 1, 1 }, b.grad)
        local _, r = both(a, 5, b)
        te.sum(r):backward()
        close({ 5, 5 }, a.grad)
    end)

    it("pass errors unchanged", function()
        local x, mine = leaf { 1 }, setmetatable({}, { __tostring = function() return "mine" end })
        local y = te._core.custom(function(_, a) return a * 1 end, function() error(mine) end, x)
        local ok, caught = pcall(y.backward, y)
        assert.is_false(ok)
        assert.equal(mine, caught)
        local z = te._core.custom(function(_, a) return a * 1 end, function() error("no such luck") end, x)
        assert.error_matches(function() te.sum(z):backward() end, "^no such luck")
        assert.is_true(te._core.grad_enabled())
    end)

    it("check what backward returns", function()
        local x = leaf { 1, 2 }
        for _, wrong in ipairs { te.ones({ 3 }, { dtype = "float64" }), "x", 5 } do
            local y = te._core.custom(function(_, a) return a * 1 end, function() return wrong end, x)
            assert.error_matches(function() te.sum(y):backward() end, "gradient of input 1")
        end
        assert.error_matches(function() te._core.custom(function() return 1 end, function() end, x) end,
            "expected a tensor, got number 1")
        assert.error_matches(function() te._core.custom(function() end, function() end, x) end, "returned 0 values")
    end)

    it("do not leak when they save their own results", function()
        collectgarbage()
        local before = te.memory_stats().current
        for _ = 1, 20 do
            local x = te.ones({ 1000, 100 }, { requires_grad = true })
            te._core.custom(function(ctx, a)
                local y = te.exp(a)
                ctx:save_for_backward(y)
                return y
            end, function(ctx, d) return d * ctx:saved_tensors() end, x)
        end
        collectgarbage()
        collectgarbage()
        assert.is_true(te.memory_stats().current <= before + 1e6)
    end)

    it("may run backward inside backward", function()
        local x = leaf { 2 }
        local y = te._core.custom(function(_, a) return a * a end, function(_, d)
            local inner = leaf { 3 }
            te.enable_grad(function() te.sum(inner * inner):backward() end)
            return d * inner.grad
        end, x)
        te.sum(y):backward()
        close({ 6 }, x.grad)
    end)
end)
