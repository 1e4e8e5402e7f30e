local te = require "te"

local function parameter(values, dtype)
    return te.tensor(values, { dtype = dtype or "float32", requires_grad = true })
end

describe("te.optim.SGD", function()
    it("has no nesterov without momentum, or with dampening", function()
        local p = { te.zeros { 2 } }
        for _, options in ipairs { { nesterov = true }, { nesterov = true, momentum = 0.9, dampening = 0.1 } } do
            assert.error_matches(function() te.optim.SGD(p, options) end,
                "te%.optim%.SGD: option nesterov: it needs momentum")
        end
    end)

    it("has momentum and nesterov", function()
        for _, nesterov in ipairs { false, true } do
            local p, expected, buffer = parameter { 1 }, 1, 0
            local opt = te.optim.SGD({ p }, { lr = 0.1, momentum = 0.9, nesterov = nesterov })
            for t, g in ipairs { 1, 2, -1 } do
                p.grad = te.tensor { g }
                opt:step()
                buffer = t == 1 and g or 0.9 * buffer + g
                expected = expected - 0.1 * (nesterov and g + 0.9 * buffer or buffer)
            end
            assert.is_true(math.abs(p:item() - expected) < 1e-6)
        end
    end)

    it("takes groups with momentum and without in one step", function()
        local a, b = te.ones({ 2 }, { requires_grad = true }), te.ones({ 2 }, { requires_grad = true })
        local opt = te.optim.SGD({ { params = { a }, momentum = 0.5 }, { params = { b } } }, { lr = 0.25 })
        for _ = 1, 2 do
            a.grad, b.grad = te.ones { 2 }, te.ones { 2 }
            opt:step()
        end
        assert.same({ 1 - 0.25 - 0.375, 1 - 0.25 - 0.375 }, a:totable())
        assert.same({ 0.5, 0.5 }, b:totable())
    end)
end)
