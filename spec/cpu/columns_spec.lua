--- Sums of few columns, which go side by side, and over dimensions that lie apart: against sums in Lua, with the same
--- bits for any number of threads and whether operations are fused or not.

local bits = require "spec.support.bits"
local te = require "te"

local TOLERANCE = { float32 = 1e-5, float64 = 1e-12, bfloat16 = 1e-2, float16 = 2e-3 }
local ROWS, COLUMNS = { 1, 15, 16, 47, 1000, 4097, 20001 }, { 1, 2, 3, 7, 8, 16, 33, 63, 64, 100 }

--- What the rows of a table of numbers add up to, and their sizes.
local function added(rows, columns)
    local sums, sizes = {}, {}
    for c = 1, columns do sums[c], sizes[c] = 0, 1 end
    for _, row in ipairs(rows) do
        for c = 1, columns do sums[c], sizes[c] = sums[c] + row[c], sizes[c] + math.abs(row[c]) end
    end
    return sums, sizes
end

local function check(x, tolerance, what)
    local sums, sizes = added(x:to("float64"):totable(), x:size(2))
    local values = x:sum(1):to("float64"):totable()
    for c, sum in ipairs(sums) do
        -- the rounding of the result, and that of so many additions
        local most = tolerance * (math.abs(sum) + 0.01 * sizes[c])
        local near = math.abs(values[c] - sum) <= most
        assert.is_true(near, ("%s, column %d: %.9g, not %.9g"):format(what, c, values[c], sum))
    end
end

describe("sums of columns", function()
    local threads = te.get_num_threads()
    before_each(function() te.manual_seed(20261127) end)
    after_each(function() te.set_num_threads(threads) end)

    for dtype, tolerance in pairs(TOLERANCE) do
        it("are those of a loop in " .. dtype, function()
            for _, rows in ipairs(ROWS) do
                for _, columns in ipairs(COLUMNS) do
                    if rows * columns <= 300000 then
                        local what = ("%d x %d"):format(rows, columns)
                        check(te.randn { rows, columns }:to(dtype), tolerance, what)
                        local wide = te.randn { rows, columns + 5 }:to(dtype)
                        check(wide:narrow(2, 3, columns), tolerance, what .. " narrow")
                    end
                end
            end
        end)
    end

    it("and extremes of whole numbers are exact", function()
        for _, rows in ipairs { 600, 1025, 9999 } do
            for _, columns in ipairs(COLUMNS) do
                local x = te.randint(-1000, 1000, { rows, columns })
                assert.same(added(x:totable(), columns), x:sum(1):totable())
                local turned = x:transpose(1, 2):contiguous()
                assert.same(turned:max(2):totable(), x:max(1):totable())
                assert.same(turned:min(2):totable(), x:min(1):totable())
            end
        end
    end)

    it("keep what is no number to its column", function()
        local inf = math.huge
        for _, columns in ipairs { 3, 8, 33 } do
            local x = te.zeros { 5000, columns }
            x:narrow(1, 4999, 1):narrow(2, 2, 1):fill_(0 / 0)
            x:narrow(1, 17, 1):narrow(2, 3, 1):fill_(-inf)
            local sums = x:sum(1):totable()
            for c = 1, columns do
                local holds = sums[c] == (c == 3 and -inf or 0)
                if c == 2 then holds = sums[c] ~= sums[c] end
                assert.is_true(holds, columns .. ", " .. c)
            end
        end
    end)

    it("have the same bits with more threads", function()
        for _, shape in ipairs { { 40000, 3 }, { 30001, 8 }, { 9000, 33 }, { 300, 12, 40, 5 } } do
            local x = te.randn(shape)
            local dims = #shape == 4 and { 1, 3 } or 1
            te.set_num_threads(1)
            local one = x:sum(dims)
            te.set_num_threads(2)
            assert.is_true(bits.equal(one, x:sum(dims)))
        end
    end)

    it("are the gradients of biases, fused or not", function()
        for _, columns in ipairs { 1, 3, 8, 33, 63 } do
            local module = te.Sequential(te.GELU(), te.Bias(columns), te.SiLU(), te.Bias(columns), te.ReLU())
            local x, dy = te.randn { 3001, columns }, te.randn { 3001, columns }
            local grads = {}
            for _, fused in ipairs { true, false } do
                local before = te.set_fusion(fused)
                module:zero_grad()
                module(x):backward(dy)
                te.set_fusion(before)
                for name, p in module:named_parameters() do
                    if fused then grads[name] = p.grad:clone()
                    else bits.assert_equal(grads[name], p.grad, columns .. name) end
                end
            end
        end
    end)
end)

describe("sums over dimensions that lie apart", function()
    before_each(function() te.manual_seed(20261127) end)

    local DIMS = { { 1, 3 }, { 2, 4 }, { 1, 4 }, { 1, 2, 4 }, { 1, 3, 4 } }

    for dtype, tolerance in pairs(TOLERANCE) do
        it("are those over each by itself, in " .. dtype, function()
            for _, shape in ipairs { { 32, 3, 17, 20 }, { 5, 64, 6, 70 }, { 2, 1, 300, 3 }, { 3, 0, 4, 5 } } do
                for _, view in ipairs { function(x) return x end, function(x) return x:transpose(2, 3) end } do
                    local x = view((te.randn(shape) + 1):to(dtype))
                    for _, dims in ipairs(DIMS) do
                        local expected = x:to("float64")
                        for k = #dims, 1, -1 do expected = expected:contiguous():sum(dims[k]) end
                        local got = x:sum(dims)
                        assert.same(expected.shape, got.shape)
                        assert.equal(x.dtype, got.dtype)
                        if got:numel() > 0 then
                            local off = (got:to("float64") - expected):abs():max():item()
                            local most = tolerance * (1 + expected:abs():max():item())
                            assert.is_true(off <= most, table.concat(dims, ","))
                        end
                        assert.same(got.shape, x:mean(dims).shape)
                    end
                end
            end
        end)
    end

    it("of whole numbers are exact, their means too", function()
        for _, dtype in ipairs { "int64", "int32", "uint8", "bool" } do
            local x = te.randint(0, 200, { 30, 12, 34, 6 }):to(dtype)
            for _, dims in ipairs(DIMS) do
                local expected = x:to("float64")
                for k = #dims, 1, -1 do expected = expected:sum(dims[k]) end
                local got = x:sum(dims)
                assert.equal("int64", got.dtype)
                bits.assert_equal(expected, got:to("float64"), dtype)
                local count = x:numel() / math.max(got:numel(), 1)
                bits.assert_equal((expected / count):to("float32"), x:mean(dims), dtype .. " mean")
            end
        end
    end)
end)
