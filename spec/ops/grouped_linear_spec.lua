local te = require "te"

describe("te.GroupedLinear", function()
    te.manual_seed(1)
    local m = te.GroupedLinear(3, 4, 2)
    local x = te.randn({ 5, 4 })

    it("multiplies every group of rows by its own weight; empty groups are fine", function()
        local y = m(x, te.tensor({ 2, 0, 3 }, { dtype = "int32" }))
        local first = te.linear(x:narrow(1, 1, 2), m.weight[1], m.bias[1])
        local third = te.linear(x:narrow(1, 3, 3), m.weight[3], m.bias[3])
        assert.is_true((y - te.cat({ first, third }, 1)):abs():max():item() < 1e-6)
        assert.equal(6, #m:parameters())
    end)

    it("names the sizes that do not fit", function()
        assert.error_matches(function() m(x, te.tensor({ 2, 2, 2 }, { dtype = "int32" })) end,
            "split_sizes {2, 2, 2} for 3 groups and 5 rows")
    end)

    it("scales the bias row by row", function()
        local scaled = te.GroupedLinear(2, 4, 3, { scale_bias = true })
        te.no_grad(function() for i = 1, 2 do scaled.bias[i]:uniform_() end end)
        local sizes, scales = te.tensor({ 3, 2 }, { dtype = "int64" }),
            te.tensor({ 1, 2, 0, -1, 4 }, { requires_grad = true })
        local y = scaled(x, sizes, scales)
        for row = 1, 5 do
            local g = row <= 3 and 1 or 2
            local expected = te.linear(x[row], scaled.weight[g]) + scaled.bias[g] * scales[row]
            assert.is_true((y[row] - expected):abs():max():item() < 1e-6)
        end
        y:sum():backward()
        assert.is_true((scales.grad[1] - scaled.bias[1]:sum()):abs():item() < 1e-5)
        assert.is_true((scaled.bias[2].grad - 3):abs():max():item() < 1e-6)
        assert.error_matches(function() scaled(x, sizes) end, "takes 2 extra inputs, got 1")
        assert.error_matches(function() te.GroupedLinear(2, 4, 3, { scale_bias = true, bias = false }) end,
            "option scale_bias: there is no bias to scale")
    end)

    it("refuses sizes that are none", function()
        assert.error_matches(function() m(x, te.tensor({ 7, -2, 0 }, { dtype = "int32" })) end,
            "split_sizes {7, %-2, 0}")
        for _, module in ipairs { m, te.Sequential(m) } do
            assert.error_matches(function() module(x, te.tensor { 2, 3, 0 }) end,
                "split_sizes: expected a tensor of integers {3}, got float32 tensor {3}", 1, true)
        end
        assert.error_matches(function() m(x, 3) end, "split_sizes: expected a tensor or a list of 3 sizes, got number")
    end)
end)
