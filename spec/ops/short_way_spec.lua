-- Operations on contiguous tensors alike run a short way: with the bits, dtypes, gradients and errors of the long one.

local te = require "te"

-- The same values seen with other strides, so that the long way runs.
local function strided(t) return te.stack({ t, t }, -1):select(-1, 1) end

-- Values with their signs of zero, as text: NaN is like NaN.
local function text(t)
    local parts = {}
    for i, x in ipairs(t:numel() > 0 and t:reshape({ -1 }):totable() or {}) do
        parts[i] = x ~= x and "nan" or ("%.17g"):format(x)
    end
    return table.concat(parts, " ")
end

describe("tensors alike", function()
    for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64", "int32" } do
        it("give what strided ones give: " .. dtype, function()
            te.manual_seed(5)
            for _, shape in ipairs { {}, { 1 }, { 16 }, { 3, 5 }, { 2, 1, 700 }, { 0, 4 } } do
                local a, b = te.randn(shape):mul(8):to(dtype), te.randn(shape):mul(8):to(dtype)
                for _, name in ipairs { "add", "sub", "mul", "maximum", "minimum", "div" } do
                    local got, want = nil, te[name](strided(a), strided(b))
                    for _ = 1, 2 do got = te[name](a, b) end -- the first call may only compile
                    assert.equal(want.dtype, got.dtype)
                    assert.same(want.shape, got.shape)
                    assert.equal(text(want), text(got))
                end
                assert.equal(text(te.tanh(strided(a))), text(te.tanh(a)))
            end
        end)
    end

    it("may be one tensor twice, and operators take the same way", function()
        local a = te.tensor { 1, 2, 3 }
        assert.same({ 2, 4, 6 }, te.add(a, a):totable())
        assert.same({ 2, 4, 6 }, (a + a):totable())
        assert.same({ -1, -2, -3 }, (-a):totable())
        assert.same({ 1, 2, 3 }, a:totable())
    end)

    it("record gradients", function()
        local a, b = te.ones({ 4 }, { requires_grad = true }), te.full({ 4 }, 3)
        te.no_grad(function() return te.mul(a, b) end)
        local y = te.mul(a, b)
        assert.is_true(y.requires_grad)
        y:sum():backward()
        assert.same({ 3, 3, 3, 3 }, a.grad:totable())
    end)

    it("fail as ever", function()
        local a, b = te.ones({ 4 }), te.ones({ 4 })
        te.add(a, b)
        b:release()
        assert.error_matches(function() te.add(a, b) end, "te%.add: other: tensor was released")
        assert.error_matches(function() return a + b end, "te%.add: other: tensor was released")
        assert.error_matches(function() te.add(a, te.ones({ 3 })) end, "shapes do not broadcast: {4} and {3}")
        assert.error_matches(function() te.add(a) end, "other is missing")
        assert.error_matches(function() te.add(a, a, a) end, "argument 3")
    end)
end)
