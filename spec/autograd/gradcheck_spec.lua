--- te.gradcheck.

local te = require "te"

describe("te.gradcheck", function()
    it("takes one input without a list", function()
        assert.is_true(te.gradcheck(te.gelu, te.randn({ 3 }, { dtype = "float64" })))
    end)

    it("accepts right gradients and says where wrong ones are", function()
        local x = te.tensor({ { 0.3, 0.7 }, { 1.1, -0.4 } }, { dtype = "float64" })
        assert.is_true(te.gradcheck(function(a) return te.exp(a) * a end, { x }))
        local function wrong(a)
            return te._core.custom(function(_, v) return v * v end, function(_, d) return d * 3 end, a)
        end
        assert.error_matches(function() te.gradcheck(wrong, { x }) end,
            "te%.gradcheck: input 1, element 1: backward gives .*, differences give")
        local random = te.rng_state()
        assert.error_matches(function() te.gradcheck(function() return te.ones(1) end, { x }) end, "does not depend")
        assert.has_error(function() te.gradcheck(function(v) return error(te.randn { 1 }, 0) or v end, { x }) end)
        assert.equal(random, te.rng_state())
    end)
end)

describe("te.gradcheck of float32", function()
    local functions = { te.gelu, te.exp, te.tanh, te.softmax, function(a) return te.exp(a) * a end,
        function(a) return te.layer_norm(a * a) end, function(a) return te.matmul(a, a:transpose()) end }

    it("accepts right gradients, also of large and small values", function()
        te.manual_seed(1)
        for _, fn in ipairs(functions) do assert.is_true(te.gradcheck(fn, te.randn { 4, 6 })) end
        for _, scale in ipairs { 1e-3, 1e3 } do
            assert.is_true(te.gradcheck(function(a) return a * a * a end, te.randn { 30, 40 } * scale))
        end
    end)

    it("finds wrong ones, and wants float64 instead of fewer bits", function()
        local function nearly(a)
            return te._core.custom(function(_, v) return v * v end, function(_, d) return d * 2.1 end, a)
        end
        assert.error_matches(function() te.gradcheck(nearly, te.ones { 3 }) end, "input 1, element 1: backward gives")
        for _, dtype in ipairs { "bfloat16", "float16", "float8_e4m3" } do
            assert.error_matches(function() te.gradcheck(te.exp, te.ones({ 3 }):to(dtype)) end,
                "te.gradcheck: input 1: differences say little in " .. dtype .. "; use float64", 1, true)
        end
    end)
end)
