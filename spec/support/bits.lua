--- Whether tensors have the same bits, as far as numbers tell: NaN is NaN, and zeros have no sign.

local assert = require "luassert"

local bits = {}

function bits.equal(a, b)
    if table.concat(a.shape, "x") ~= table.concat(b.shape, "x") then return false end
    if a.dtype ~= b.dtype then a, b = a:to("float64"), b:to("float64") end
    a, b = a:detach():contiguous(), b:detach():contiguous()
    return (a:eq(b) + a:ne(a) * b:ne(b)):gt(0):all():item()
end

function bits.assert_equal(expected, got, what)
    assert.same(expected.shape, got.shape, what)
    assert.is_true(bits.equal(expected, got), what)
end

return bits
