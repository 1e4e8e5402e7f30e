--- Reductions over dimensions whose elements lie apart, and of whole numbers: large enough for the loops that work on
--- many rows at a time, with sizes that fill neither vectors nor tiles.

local bits = require "spec.support.bits"
local te = require "te"

local INF, NAN = math.huge, 0 / 0

-- Rows as Lua tables: all that x has along dim, for each of the other positions in row-major order.
local function rows_along(x, dim)
    local order = {}
    for d = 1, x:dim() do if d ~= dim then order[#order + 1] = d end end
    order[#order + 1] = dim
    return x:permute(order):contiguous():view { -1, x:size(dim) }:totable()
end

local function extreme(row, better)
    local best
    for _, v in ipairs(row) do
        if v ~= v then return v end
        if not best or better(v, best) then best = v end
    end
    return best
end

local function total(row, of)
    local sum = 0
    for _, v in ipairs(row) do sum = sum + (of and of(v) or v) end
    return sum
end

local SCALAR = {
    sum = function(row) return total(row) end,
    mean = function(row) return total(row) / #row end,
    max = function(row) return extreme(row, function(a, b) return a > b end) end,
    min = function(row) return extreme(row, function(a, b) return a < b end) end,
    var = function(row)
        local mean = total(row) / #row
        return total(row, function(v) return (v - mean) ^ 2 end) / (#row - 1)
    end,
    logsumexp = function(row)
        local m = extreme(row, function(a, b) return a > b end)
        return m + math.log(total(row, function(v) return math.exp(v - m) end))
    end,
}

local SHAPES = { { 7, 2503 }, { 3, 70, 20, 33 }, { 130, 149 }, { 1031, 19 }, { 4, 16, 300 } }
local TOLERANCE = { float32 = 2e-5, float64 = 1e-12, bfloat16 = 1e-2, float16 = 2e-3 }

local function assert_near(expected, value, tolerance, what)
    if expected ~= expected then
        assert.is_true(value ~= value, what)
    elseif math.abs(expected) == INF then
        assert.equal(expected, value, what)
    else
        assert.is_true(math.abs(value - expected) <= tolerance * (1 + math.abs(expected)),
            ("%s: %.9g instead of %.9g"):format(what, value, expected))
    end
end

local function check_against_scalars(x, dim, what, tolerance, ops)
    local rows = rows_along(x:to("float64"), dim)
    for name, scalar in pairs(ops) do
        local values = te[name](x, dim):to("float64"):contiguous():view { -1 }:totable()
        assert.equal(#rows, #values, what .. name)
        for r = 1, #rows, 7 do
            assert_near(scalar(rows[r]), values[r], tolerance, ("%s %s over %d, row %d"):format(what, name, dim, r))
        end
    end
end

describe("reductions across memory", function()
    local threads = te.get_num_threads()
    before_each(function() te.manual_seed(41) end)
    after_each(function() te.set_num_threads(threads) end)

    for dtype, tolerance in pairs(TOLERANCE) do
        it("have the values of a scalar loop in " .. dtype, function()
            for _, shape in ipairs(SHAPES) do
                local x = te.randn(shape):to(dtype)
                for dim = 1, #shape do
                    check_against_scalars(x, dim, dtype, tolerance, SCALAR)
                end
            end
        end)
    end

    it("keep NaN and infinities to their rows", function()
        for _, special in ipairs { NAN, INF, -INF } do
            for _, at in ipairs { { 1, 1 }, { 65, 2503 }, { 130, 2490 } } do
                local x = te.randn { 130, 2503 }
                x:narrow(1, at[1], 1):narrow(2, at[2], 1):fill_(special)
                for _, name in ipairs { "max", "min", "sum" } do
                    check_against_scalars(x, 1, name .. tostring(special), 1e-4, { [name] = SCALAR[name] })
                end
            end
        end
    end)

    it("have the bits of rows that lie along memory, with any number of threads", function()
        for _, shape in ipairs { { 3, 9, 1001 }, { 2, 70, 200 }, { 5, 1031, 17 }, { 2, 33000, 12 }, { 2, 16384, 9 },
            { 3, 2, 64 }, { 1, 33, 67 } } do
            for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64" } do
                local x = te.randn(shape):to(dtype)
                local rows = x:transpose(2, 3):contiguous()
                for _, name in ipairs { "sum", "mean", "max", "var", "std", "logsumexp", "norm" } do
                    local expected = te[name](rows, 3)
                    for n = 1, 2 do
                        te.set_num_threads(n)
                        assert.is_true(bits.equal(expected, te[name](x, 2)), name .. " of " .. dtype)
                        assert.is_true(bits.equal(expected, te[name](x:transpose(2, 3), 3)), name .. " of a view")
                    end
                end
            end
        end
    end)

    it("softmax over them lies as its input does and has the bits of one over rows", function()
        for _, shape in ipairs { { 5, 4001 }, { 3, 140, 130 }, { 600, 35 }, { 700, 30 }, { 2, 33 } } do
            for _, dtype in ipairs { "float32", "float16", "float64" } do
                local x = te.randn(shape):to(dtype)
                for dim = 1, #shape - 1 do
                    for _, name in ipairs { "softmax", "log_softmax" } do
                        local expected = te[name](x:transpose(dim, -1):contiguous(), -1):transpose(dim, -1)
                        for n = 1, 2 do
                            te.set_num_threads(n)
                            local y = te[name](x, dim)
                            assert.is_true(y:is_contiguous())
                            assert.is_true(bits.equal(expected, y), name .. " over " .. dim)
                        end
                    end
                end
            end
        end
    end)

    it("norms over them read their weights, which lie along the rows", function()
        for _, shape in ipairs { { 33, 8, 64 }, { 2, 16, 1040 }, { 3, 40, 500 } } do
            local x, w, b = te.randn(shape):transpose(2, 3), te.randn { shape[2] }, te.randn { shape[2] }
            for n = 1, 2 do
                te.set_num_threads(n)
                assert.is_true(bits.equal(te.layer_norm(x:contiguous(), w, b), te.layer_norm(x, w, b)))
                assert.is_true(bits.equal(te.rms_norm(x:contiguous(), w), te.rms_norm(x, w)))
            end
        end
    end)

    it("gradients pass through them", function()
        local x, dy = te.randn { 6, 1500, 5 }, te.randn { 6, 1500, 5 }
        for _, dim in ipairs { 1, 2 } do
            local a, b = x:clone(), x:transpose(dim, -1):contiguous()
            a.requires_grad, b.requires_grad = true, true
            te.softmax(a, dim):backward(dy)
            te.softmax(b, -1):backward(dy:transpose(dim, -1):contiguous())
            assert.is_true(bits.equal(b.grad:transpose(dim, -1), a.grad))
        end
    end)
end)

describe("reductions of whole numbers", function()
    local threads = te.get_num_threads()
    before_each(function() te.manual_seed(43) end)
    after_each(function() te.set_num_threads(threads) end)

    for _, dtype in ipairs { "int64", "int32" } do
        it("are exact in " .. dtype, function()
            for _, shape in ipairs { { 7, 2503 }, { 3, 7, 20, 33 }, { 1031, 9 }, { 5, 16, 30 } } do
                local x = te.randint(-1000, 1000, shape):to(dtype)
                local views = { x, x:transpose(1, -1), x:narrow(-1, 2, x:size(-1) - 3) }
                for k, view in ipairs(views) do
                    for dim = 1, #shape do
                        for n = 1, 2 do
                            te.set_num_threads(n)
                            check_against_scalars(view, dim, dtype .. " view " .. k, 0,
                                { sum = SCALAR.sum, max = SCALAR.max, min = SCALAR.min })
                        end
                    end
                end
            end
        end)
    end

    it("add up numbers near the limit of float64 as it does", function()
        local big = 2 ^ 51
        local x = te.full({ 3, 1000 }, big):to("int64")
        x:narrow(1, 2, 1):fill_(-big)
        assert.same({ big, big }, x:sum(1):narrow(1, 1, 2):totable())
        assert.equal(3 * big, x:narrow(1, 1, 1):narrow(2, 1, 3):sum(2):totable()[1])
        assert.equal(big, x:max(1):totable()[1000])
        assert.equal(-big, x:min(1):totable()[1])
    end)
end)
