local te = require "te"
local reference = require "spec.support.reference"

local close = reference.assert_close

local PAIRS = {
    ReLU = "relu", GELU = "gelu", QuickGELU = "quick_gelu", SReLU = "srelu", SiLU = "silu", GLU = "glu",
    ReGLU = "reglu", GEGLU = "geglu", QGEGLU = "qgeglu", SReGLU = "sreglu", SwiGLU = "swiglu",
    ClampedSwiGLU = "clamped_swiglu", SiTUGLU = "situglu",
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

local function sigmoid(v) return 1 / (1 + math.exp(-v)) end
local function clamp(v, low, high) return math.min(math.max(v, low), high) end
local function tanh(v) return math.tanh(v) end
local function gelu(v) return 0.5 * v * (1 + tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v ^ 3))) end

-- f(a, b) of gated activations in plain Lua, with the defaults of their options.
local GATED = {
    GLU = function(a, b) return sigmoid(a) * b end,
    GEGLU = function(a, b) return gelu(a) * b end,
    QGEGLU = function(a, b) return a * sigmoid(1.702 * a) * b end,
    ReGLU = function(a, b) return math.max(a, 0) * b end,
    SReGLU = function(a, b) return math.max(a, 0) ^ 2 * b end,
    SwiGLU = function(a, b) return a * sigmoid(a) * b end,
    ClampedSwiGLU = function(a, b)
        local g = math.min(a, 7)
        return g * sigmoid(1.702 * g) * (clamp(b, -7, 7) + 1)
    end,
    SiTUGLU = function(a, b) return 4 * tanh(a / 4) * sigmoid(a) * 25 * tanh(b / 25) end,
}
local SCALED = { ScaledSwiGLU = "SwiGLU", ScaledClampedQGeGLU = "ClampedSwiGLU", ScaledSiTUGLU = "SiTUGLU" }

describe("gated activations", function()
    te.manual_seed(6)
    local x = te.randn({ 3, 8 }, { dtype = "float64" }) * 6
    local rows, scale = x:totable(), te.tensor({ 0.5, -2, 3 }, { dtype = "float64" })

    local function expected(fn, factor)
        local result = {}
        for i, row in ipairs(rows) do
            result[i] = {}
            for k = 1, 4 do result[i][k] = fn(row[k], row[4 + k]) * (factor and scale[i]:item() or 1) end
        end
        return result
    end

    -- The features of x stored as alternating blocks of `size`.
    local function interleaved(size)
        local parts = {}
        for first = 1, 4, size do
            parts[#parts + 1] = x:narrow(-1, first, size)
            parts[#parts + 1] = x:narrow(-1, 4 + first, size)
        end
        return te.cat(parts, -1)
    end

    for name, fn in pairs(GATED) do
        it(name .. " has its formula", function() close(expected(fn), te[name]()(x), 1e-7) end)
    end

    for name, plain in pairs(SCALED) do
        it(name .. " multiplies every row by its scale", function()
            close(expected(GATED[plain], true), te[name]()(x, scale), 1e-12)
            assert.is_true(te.gradcheck(te[name](), { x / 4, scale }))
            assert.error_matches(function() te[name]()(x) end, name .. ": takes 1 extra inputs, got 0")
        end)
    end

    it("ScaledSReLU multiplies every row by its scale", function()
        local y = te.ScaledSReLU()(x, scale)
        close((te.srelu(x) * scale:unsqueeze(-1)):totable(), y)
        assert.equal("bfloat16", te.ScaledSReLU()(x:to("bfloat16"), scale:to("float32")).dtype)
    end)

    -- Shapes of x and of the scale, which broadcasts over rows.
    local SHAPES = {
        { { 6, 8 }, { 6 } }, { { 6, 8 }, { 1 } }, { { 6, 8 }, {} }, { { 1, 8 }, { 1 } }, { { 1, 8 }, { 3 } },
        { { 6, 8 }, { 1, 1, 1 } }, { { 6, 2 }, { 6 } }, { { 1, 2 }, { 1 } }, { { 0, 8 }, { 0 } }, { { 0, 8 }, { 1 } },
        { { 2, 3, 4 }, { 2, 3 } }, { { 2, 3, 4 }, { 3 } }, { { 2, 3, 4 }, { 1, 3 } }, { { 2, 3, 4 }, { 2, 1 } },
        { { 2, 3, 4 }, { 1 } }, { { 2, 3, 2 }, { 3 } }, { { 0, 3, 4 }, { 3 } }, { { 2, 1, 4 }, { 3 } },
        { { 4, 4 }, { 4, 4 } }, { { 8 }, {} },
    }
    local ALL = { ScaledSReLU = "SReLU", ScaledSwiGLU = "SwiGLU" }
    for scaled, class in pairs(ALL) do
        it(scaled .. " and its gradients are those of the product, fused or not", function()
            for _, shapes in ipairs(SHAPES) do
                local function outcome(run)
                    te.manual_seed(8)
                    local v = te.randn(shapes[1], { dtype = "float64", requires_grad = true })
                    local s = te.randn(shapes[2], { dtype = "float64", requires_grad = true })
                    local y = run(v, s)
                    local grads = te.grad((y * te.randn(y.shape, { dtype = "float64" })):sum(), { v, s })
                    assert.same(shapes[2], grads[2].shape)
                    return { y, unpack(grads) }
                end
                local want = outcome(function(v, s) return te[class]()(v) * s:unsqueeze(-1) end)
                for _, fused in ipairs { true, false } do
                    local before = te.set_fusion(fused)
                    for i, got in ipairs(outcome(te.Sequential(te[scaled]()))) do
                        assert.same(want[i].shape, got.shape)
                        if got:numel() > 0 then close(want[i]:totable(), got) end
                    end
                    te.set_fusion(before)
                end
            end
        end)
    end

    it("ScaledSReLU in a container takes no scale for every column", function()
        for _, shape in ipairs { { 8 }, { 6, 8 }, { 5 } } do
            assert.error_matches(function() te.Sequential(te.ScaledSReLU())(te.ones({ 6, 8 }), te.ones(shape)) end,
                "te%.scaled_srelu: shapes do not broadcast: {6,8} and {" .. table.concat(shape, ",") ..
                "}, which has one number per row")
        end
    end)

    for _, name in ipairs { "SwiGLU", "ClampedSwiGLU", "SiTUGLU", "ScaledSwiGLU", "ScaledClampedQGeGLU",
        "ScaledSiTUGLU" } do
        it(name .. " takes blocks", function()
            local extra = name:find("^Scaled") and { scale } or {}
            for size = 1, 4 do
                if 4 % size == 0 then
                    local op = te[name]({ glu_interleave_size = size })
                    assert.same(te[name]()(x, unpack(extra)):totable(), op(interleaved(size), unpack(extra)):totable())
                    assert.is_true(te.gradcheck(op, { interleaved(size) / 4, unpack(extra) }))
                end
            end
            assert.error_matches(function() te[name]({ glu_interleave_size = 3 })(x, unpack(extra)) end,
                "multiple of 2 %* interleave = 6")
        end)
    end

    it("a NaN stays one behind ClampedSwiGLU, forward and backward", function()
        local nan = 0 / 0
        local function is_nan(v) return v ~= v end
        for _, op in ipairs { te.ClampedSwiGLU(), te.ScaledClampedQGeGLU() } do
            local v = te.tensor({ { nan, 1, 8, 1, 1, 2, nan, 3, 7.5, -7 } }, { requires_grad = true })
            local y = op.num_extra_inputs == 1 and op(v, te.ones { 1 }) or op(v)
            y:sum():backward()
            local out, grad = y:totable()[1], v.grad:totable()[1]
            assert.is_true(is_nan(out[1]) and is_nan(out[2]) and not is_nan(out[3]))
            -- da = f'(a) l dy, db = f(a) dy: 0 only outside of the limits
            assert.is_true(is_nan(grad[1]) and is_nan(grad[2]) and is_nan(grad[6]))
            assert.is_true(math.abs(grad[7] - 1 / (1 + math.exp(-1.702))) < 1e-6)
            assert.is_true(grad[3] == 0 and grad[9] == 0 and grad[10] > 0)
        end
    end)

    it("have their options", function()
        local op = te.ClampedSwiGLU({ limit = 2, alpha = 1.5, glu_linear_offset = 0.25 })
        close(expected(function(a, b)
            local g = math.min(a, 2)
            return g * sigmoid(1.5 * g) * (clamp(b, -2, 2) + 0.25)
        end), op(x))
        assert.equal("ClampedSwiGLU(alpha=1.5, glu_linear_offset=0.25, limit=2)", tostring(op))
        op = te.SiTUGLU({ beta1 = 2, beta2 = 3 })
        close(expected(function(a, b) return 2 * tanh(a / 2) * sigmoid(a) * 3 * tanh(b / 3) end), op(x))
        assert.error_matches(function() te.SwiGLU({ cache_quantized_input = 3 }) end,
            "te%.SwiGLU: option cache_quantized_input: expected boolean, got 3")
        assert.error_matches(function() te.ScaledSReLU({ activation_recompute_in_mlp = true }) end,
            "option activation_recompute_in_mlp: ")
    end)

    it("clamp gradients at their limits", function()
        local v = te.tensor({ 8, 3, -8, 9 }, { dtype = "float64", requires_grad = true })
        te.ClampedSwiGLU()(v):sum():backward()
        local grad = v.grad:totable()
        assert.equal(0, grad[1])
        assert.is_true(grad[2] ~= 0)
        assert.equal(0, grad[3])
        assert.equal(0, grad[4])
    end)
end)

describe("te.ops", function()
    it("has the operations and nothing else", function()
        assert.equal(te.Linear, te.ops.Linear)
        assert.error_matches(function() return te.ops.Sequential end, "te%.ops: no operation named Sequential")
    end)
end)
