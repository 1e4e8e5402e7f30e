--- Nested tables of numbers, computed on in plain Lua (float64): what the specs compare tensors with.

local assert = require "luassert"

local reference = {}

--- fn over all numbers of nested tables of one shape.
function reference.map(fn, a, ...)
    if type(a) ~= "table" then return fn(a, ...) end
    local result, others = {}, { ... }
    for i = 1, #a do
        local row = {}
        for k, other in ipairs(others) do row[k] = type(other) == "table" and other[i] or other end
        result[i] = reference.map(fn, a[i], unpack(row))
    end
    return result
end

--- All numbers in order.
function reference.flatten(a, into)
    into = into or {}
    if type(a) ~= "table" then
        into[#into + 1] = a
    else
        for i = 1, #a do reference.flatten(a[i], into) end
    end
    return into
end

--- Rows of a matrix.
function reference.matmul(a, b)
    local result = {}
    for i = 1, #a do
        result[i] = {}
        for j = 1, #b[1] do
            local sum = 0
            for k = 1, #b do sum = sum + a[i][k] * b[k][j] end
            result[i][j] = sum
        end
    end
    return result
end

function reference.softmax(row)
    local most, sum, result = -math.huge, 0, {}
    for _, v in ipairs(row) do most = math.max(most, v) end
    for i, v in ipairs(row) do
        result[i] = math.exp(v - most)
        sum = sum + result[i]
    end
    for i = 1, #row do result[i] = result[i] / sum end
    return result
end

-- Relative tolerance by dtype: a few roundings of values around 1.
local TOLERANCE = { float64 = 1e-12, float32 = 2e-6, bfloat16 = 1e-2, float16 = 2e-3 }

local function shape_of(a)
    local shape = {}
    while type(a) == "table" do
        shape[#shape + 1] = #a
        a = a[1]
    end
    return "{" .. table.concat(shape, ", ") .. "}"
end

--- Fails unless the tensor (or nested table) has the expected values; NaN equals NaN.
function reference.assert_close(expected, actual, tolerance)
    if type(actual) == "userdata" then
        tolerance = tolerance or TOLERANCE[actual.dtype] or 0
        actual = actual:totable()
    end
    tolerance = tolerance or 1e-12
    assert.equal(shape_of(expected), shape_of(actual))
    local e, a = reference.flatten(expected), reference.flatten(actual)
    for i = 1, #e do
        local same = e[i] == a[i] or e[i] ~= e[i] and a[i] ~= a[i]
            or type(e[i]) == "number" and math.abs(e[i] - a[i]) <= tolerance * math.max(1, math.abs(e[i]))
        if not same then
            error(("element %d: expected %s, got %s"):format(i, tostring(e[i]), tostring(a[i])), 2)
        end
    end
end

return reference
