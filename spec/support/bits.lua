--- Whether tensors have the same bits, as far as numbers tell: NaN is NaN, and zeros have no sign.

local assert = require "luassert"
local te = require "te"

local bits = {}

function bits.equal(a, b)
    if table.concat(a.shape, "x") ~= table.concat(b.shape, "x") then return false end
    if a.dtype ~= b.dtype then a, b = a:to("float64"), b:to("float64") end
    a, b = a:detach():contiguous():view(-1), b:detach():contiguous():view(-1)
    if te._core.tensor_bytes(a:to("cpu")) == te._core.tensor_bytes(b:to("cpu")) then return true end
    local differ = a:ne(b)
    if not differ:any():item() then return true end
    local other = te.nonzero(differ):view(-1)
    a, b = a:index_select(1, other), b:index_select(1, other)
    return (a:ne(a) * b:ne(b)):all():item()
end

function bits.assert_equal(expected, got, what)
    assert.same(expected.shape, got.shape, what)
    assert.is_true(bits.equal(expected, got), what)
end

return bits
