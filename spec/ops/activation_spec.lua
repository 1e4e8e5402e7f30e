local te = require "te"

local PAIRS = {
    ReLU = "relu", GELU = "gelu", QuickGELU = "quick_gelu", SReLU = "srelu", SiLU = "silu", GLU = "glu",
    ReGLU = "reglu", GEGLU = "geglu", QGEGLU = "qgeglu", SReGLU = "sreglu", SwiGLU = "swiglu",
    ClampedSwiGLU = "clamped_swiglu",
}

describe("activations", function()
    te.manual_seed(4)
    local x = te.randn({ 3, 8 })
    for class, name in pairs(PAIRS) do
        it(class .. " is te." .. name, function()
            assert.same(te[name](x):totable(), te[class]()(x):totable())
            assert.equal(te[class], te.ops[class])
        end)
    end

    it("has the other spellings", function()
        assert.equal(te.GEGLU, te.GeGLU)
        assert.equal(te.QuickGELU, te.QGELU)
    end)

    it("takes options", function()
        local exact = te.GELU({ approximate = "none" })
        assert.same(te.gelu(x, { approximate = "none" }):totable(), exact(x):totable())
        assert.equal("GELU(approximate=none)", tostring(exact))
        local clamped = te.ClampedSwiGLU({ limit = 0.5 })
        assert.same(te.clamped_swiglu(x, { limit = 0.5 }):totable(), clamped(x):totable())
        assert.error_matches(function() te.ReLU({ slope = 1 }) end, 'te%.ReLU: unknown option "slope"')
    end)

    it("gated ones activate the first half", function()
        assert.same({ { 8 } }, te.ReGLU()(te.tensor { { 2, 4 } }):totable())
        assert.same({ { 0 } }, te.ReGLU()(te.tensor { { -2, 4 } }):totable())
    end)
end)

describe("te.ops", function()
    it("has the operations and nothing else", function()
        assert.equal(te.Linear, te.ops.Linear)
        assert.error_matches(function() return te.ops.Sequential end, "te%.ops: no operation named Sequential")
    end)
end)
