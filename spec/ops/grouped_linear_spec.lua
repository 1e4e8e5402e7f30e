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
end)
