--- Element by element over broadcast shapes, and powers whose exponent is a number: the bits are those of the same
--- call on tensors that are written out.

local te = require "te"

local function assert_equal_bits(expected, got, what)
    assert.same(expected.shape, got.shape, what)
    local a, b = expected:to("float64"):contiguous(), got:to("float64"):contiguous()
    local equal = (a:eq(b) + (a - a):ne(a - a) * (b - b):ne(b - b)):gt(0) -- NaN in both places counts
    assert.is_true(equal:all():item(), what)
end

describe("broadcast", function()
    before_each(function() te.manual_seed(20261123) end)

    -- on each side of the widths at which rows are worked on together, and of whole vectors
    local widths = { 1, 3, 64, 127, 128, 129, 255, 256, 500, 768, 1537, 2048, 2049, 4500 }

    for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64", "int64" } do
        it("has the values of the shape written out, in " .. dtype, function()
            for _, columns in ipairs(widths) do
                local rows = columns < 300 and 37 or 7
                local x = (te.randn { rows, columns } * 9):to(dtype)
                local row, column = (te.randn { columns } * 9):to(dtype), (te.randn { rows, 1 } * 9):to(dtype)
                for name, other in pairs { row = row, column = column } do
                    local full = other:expand({ rows, columns }):contiguous()
                    local what = ("%s %s %d"):format(dtype, name, columns)
                    assert_equal_bits(x + full, x + other, what)
                    assert_equal_bits(full - x, other - x, what)
                    assert_equal_bits(te.maximum(x, full), te.maximum(x, other), what)
                    assert_equal_bits(x:lt(full), x:lt(other), what)
                    assert_equal_bits(x:clone():mul_(full), x:clone():mul_(other), what)
                    assert_equal_bits(te.where(x:gt(0), full, x), te.where(x:gt(0), other, x), what)
                end
                local narrow = x:narrow(2, 1, math.ceil(columns / 2))
                assert_equal_bits(narrow:contiguous() * column, narrow * column, dtype .. " narrow " .. columns)
            end
        end)
    end

    it("goes over three dimensions in any order", function()
        local x = te.randn { 5, 6, 200 }
        local middle = te.randn { 6, 200 }
        local full = middle:expand({ 5, 6, 200 }):contiguous()
        assert_equal_bits(x + full, x + middle)
        local turned = x:transpose(1, 2)
        local written = turned:contiguous()
        local other = te.randn { 5, 1 }
        assert_equal_bits(written * other:expand({ 6, 5, 200 }):contiguous(), turned * other)
    end)
end)

describe("power", function()
    it("of a number has the bits of one exponent per element", function()
        te.manual_seed(20261124)
        local inf = math.huge
        local hostile = te.tensor { 0, -0.0, 1, -1, inf, -inf, inf - inf, 1e30, -1e30, 1e-30, -1e-40, 3e38, 1e-45 }
        local x = te.cat({ te.randn { 1001 } * 3, hostile }, 1)
        for _, exponent in ipairs { 0, 1, 2, 3, 4, 5, 7, 8, 11, 13, 15, 16, -1, -2, -3, 0.5, 2.5, -0.5, 1e9, inf } do
            for _, dtype in ipairs { "float32", "bfloat16" } do
                local typed = x:to(dtype)
                local each = typed ^ te.full(x.shape, exponent, { dtype = dtype })
                assert_equal_bits(each, typed ^ exponent, dtype .. " " .. exponent)
            end
        end
    end)

    it("is right to the last place but one", function()
        te.manual_seed(7)
        local x = te.randn { 4000 } * 2
        for _, exponent in ipairs { 3, 4, 7, 12, 15 } do
            local exact, got = x:to("float64") ^ exponent, (x ^ exponent):to("float64")
            local normal = te.maximum(exact:abs(), 1e-37) -- below that float32 has fewer digits
            assert.is_true(((got - exact):abs() / normal):max():item() < 1.2e-7)
        end
    end)
end)
