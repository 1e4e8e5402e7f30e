--- Element by element over broadcast shapes, and powers whose exponent is a number: the bits are those of the same
--- call on tensors that are written out.

local bits = require "spec.support.bits"
local te = require "te"

--- A simulated device takes its time: there the same paths are taken with less.
local elsewhere = te.get_default_device() ~= "cpu"

local assert_equal_bits = bits.assert_equal

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

describe("copying", function()
    local sizes = { { 7, 5 }, { 300, 411 } } -- the interpreter's, and copy.c's

    it("stores a number as the dtype holds it", function()
        local held = { float32 = 1.2999999523162842, bfloat16 = 1.296875, float16 = 1.2998046875, int64 = 1, int32 = 1,
            uint8 = 1, bool = 1, float64 = 1.3, float8_e4m3 = 1.25, float8_e5m2 = 1.25 }
        for dtype, value in pairs(held) do
            for _, shape in ipairs(sizes) do
                local whole = te.zeros({ shape[1], shape[2] + 1 }, { dtype = dtype })
                local filled = te.zeros(shape, { dtype = dtype }):fill_(1.3)
                for _, x in ipairs { te.full(shape, 1.3, { dtype = dtype }), filled,
                    whole:narrow(2, 1, shape[2]):fill_(1.3) } do
                    local wide = x:to("float64")
                    assert.equal(value, wide:min():item(), dtype)
                    assert.equal(value, wide:max():item(), dtype)
                end
                assert.equal(0, whole:select(2, -1):to("float64"):abs():max():item())
            end
        end
    end)

    it("converts, turns and spreads alike in place and anew", function()
        te.manual_seed(3)
        for _, shape in ipairs(sizes) do
            local x = te.randn(shape) * 300
            for _, from in ipairs { "float32", "bfloat16", "float16", "float64", "int64", "uint8" } do
                local source = x:to(from)
                assert_equal_bits(source, source:clone(), from)
                assert_equal_bits(source:transpose(1, 2):contiguous(), source:transpose(1, 2):clone(), from)
                for _, to in ipairs { "float32", "bfloat16", "float16", "float64", "int32", "bool", "float8_e4m3" } do
                    local what = from .. " to " .. to
                    local target = te.zeros(shape, { dtype = to })
                    assert_equal_bits(source:to(to), target:copy_(source), what)
                    local turned = te.zeros({ shape[2], shape[1] }, { dtype = to }):transpose(1, 2)
                    assert_equal_bits(source:to(to), turned:copy_(source), what)
                    local column = source:narrow(2, 1, 1)
                    assert_equal_bits(column:expand(shape):contiguous():to(to), target:copy_(column), what)
                end
            end
        end
    end)

    it("adds the gradients of rows that were selected", function()
        te.manual_seed(4)
        for _, shape in ipairs { { 40, 1000 }, { 9, 7, 300 } } do
            for dim = 1, #shape do
                local index = te.randint(0, shape[dim] - 1, { 61 }, { dtype = dim == 1 and "int32" or "int64" })
                local x = te.randn(shape)
                local wide, narrow = x:to("float64"), x:clone()
                local gradients = {}
                for i, leaf in ipairs { wide, narrow } do
                    leaf.requires_grad = true
                    local y = te.index_select(leaf, dim, index)
                    assert_equal_bits(te.index_select(x, dim, index), y:detach():to("float32"))
                    te.manual_seed(5)
                    y:backward(te.randn(y.shape):to(y.dtype))
                    gradients[i] = leaf.grad:to("float64")
                end
                assert.is_true((gradients[1] - gradients[2]):abs():max():item() < 1e-5)
            end
        end
        local here = { device = "cpu" } -- others say so when the values are read
        local x = te.ones({ 5, 2 }, here)
        local function refuses(dim, index, dtype, message)
            index = te.tensor(index, here):to(dtype)
            assert.error_matches(function() te.index_select(x, dim, index) end, message, 1, true)
        end
        refuses(1, { 1, 5, -1 }, "int64", "index 5 at position 2 is outside 0 to 4")
        refuses(1, { 1, -1 }, "int32", "index -1 at position 2 is outside 0 to 4")
        refuses(2, { 1, 0, 2 }, "int64", "index 2 at position 3 is outside 0 to 1")
    end)

    --- x, and the same values in memory of another order.
    local function laid_out(x)
        local order, back = {}, {}
        for d = 1, x:dim() do order[d] = x:dim() + 1 - d end
        for d = 1, x:dim() do back[d] = order[d] end
        return { x, x:permute(unpack(order)):contiguous():permute(unpack(back)) }
    end

    --- Sums, at the places of `index` along `dim`, what `values` has there; and what stands there in x.
    local function by_loops(x, dim, index, values)
        local stride, at, shape = {}, 1, x.shape
        for d = #shape, 1, -1 do
            stride[d] = at
            at = at * shape[d]
        end
        local flat, ids, given = x:flatten():totable(), index:flatten():totable(), values:flatten():totable()
        local picked, sums = {}, {}
        for i = 1, #flat do sums[i] = 0 end
        for i = 1, #ids do
            local rest, place = i - 1, ids[i] * stride[dim] + 1
            for d = #shape, 1, -1 do
                if d ~= dim then place = place + rest % index.shape[d] * stride[d] end
                rest = math.floor(rest / index.shape[d])
            end
            picked[i] = flat[place]
            sums[place] = sums[place] + given[i]
        end
        return te.tensor(picked):view(index.shape), te.tensor(sums):view(shape)
    end

    it("gathers and adds gradients back, in any order of memory and with any number of threads", function()
        te.manual_seed(6)
        local threads = te.get_num_threads()
        for _, shapes in ipairs { { { 7, 40, 6 }, { 5, 3, 6 } }, { { 70000, 2 }, { 40000, 2 } }, { { 3, 4, 2, 5 },
            { 3, 4, 2, 5 } }, { { 2, 40000 }, { 2, 50001 } } } do
            for dim = 1, #shapes[1] do
                local taken = { unpack(shapes[1]) }
                for d = 1, #taken do taken[d] = math.min(taken[d], shapes[2][d]) end
                taken[dim] = shapes[2][dim]
                local index = te.randint(0, shapes[1][dim] - 1, taken, { dtype = dim == 1 and "int32" or "int64" })
                local x = te.randint(-99, 99, shapes[1]):to("float32")
                local given = te.randint(-9, 9, taken):to("float32")
                local picked, sums = by_loops(x, dim, index, given)
                for n = 1, elsewhere and 1 or 2 do
                    te.set_num_threads(n)
                    for _, from in ipairs(laid_out(x)) do
                        for _, ids in ipairs(laid_out(index)) do
                            local leaf = from:detach()
                            leaf.requires_grad = true
                            local y = te.gather(leaf, dim, ids)
                            assert_equal_bits(picked, y:detach():contiguous())
                            y:backward(given)
                            assert_equal_bits(sums, leaf.grad:contiguous())
                        end
                    end
                end
                te.set_num_threads(threads)
            end
        end
    end)

    it("refuses to write where elements share memory", function()
        local wide = te.zeros { 1, 3 }:expand { 4, 3 }
        for name, write in pairs {
            ["te.add_: "] = function() wide:add_(1) end,
            ["te.copy_: "] = function() wide:copy_(te.ones { 4, 3 }) end,
            ["te.fill_: "] = function() wide:fill_(1) end,
            [""] = function() wide[2] = 1 end,
        } do
            assert.error_matches(write, name .. "elements share memory, as where a tensor was expanded; write to")
        end
        assert.equal(0, wide:sum():item())
        te.zeros({ 1, 3 }):expand({ 1, 3 }):add_(1)
        te.zeros({ 1, 0 }):expand({ 4, 0 }):add_(1)
        local h = te.ones({ 3 }, { requires_grad = true }) * 1
        local g = te.grad(h:sum(), h)
        g[2] = 7
        assert.same({ 1, 7, 1 }, g:totable())
    end)

    it("names the first index that is outside, whichever thread finds one", function()
        local here, threads = { device = "cpu" }, te.get_num_threads()
        local index = te.zeros({ 300, 500 }, { dtype = "int64", device = "cpu" })
        for _, at in ipairs { { 299, 3, 7 }, { 280, 1, -2 }, { 40, 77, 5 }, { 41, 1, -1 } } do
            index[at[1]][at[2]]:fill_(at[3])
        end
        for n = 1, 2 do
            te.set_num_threads(n)
            assert.error_matches(function() te.gather(te.ones({ 5, 500 }, here), 1, index) end,
                "te.gather: index 5 at position 19577 is outside 0 to 4", 1, true)
        end
        te.set_num_threads(threads)
    end)
end)

describe("rows that run across memory", function()
    local inf = math.huge
    local hostile = te.tensor { 0, -0.0, inf, -inf, inf - inf, 1e30, -1e30, 1e-40 }
    local shapes = elsewhere and { { 17, 300 }, { 300, 17 }, { 3, 70, 40 }, { 5, 7, 130 }, { 2, 500, 15 }, { 1, 6000 } }
        or { { 70, 300 }, { 300, 70 }, { 3, 200, 40 }, { 5, 17, 260 }, { 2, 2000, 15 }, { 1, 20000 } }

    before_each(function() te.manual_seed(11) end)

    --- Whole numbers, so that there are ties, with hostile ones strewn in for every other shape.
    local function some(shape, dtype, strewn)
        local x = te.randint(-40, 40, shape):to("float32") / 4
        if strewn then
            local flat = x:view { x:numel() }
            for i = 1, hostile:numel() do
                flat:narrow(1, (i * 7919) % x:numel() + 1, 1):copy_(hostile:narrow(1, i, 1))
            end
        end
        return x:to(dtype)
    end

    for _, dtype in ipairs { "float32", "bfloat16", "float64", "int64" } do
        it("give the same as rows that follow it, in " .. dtype, function()
            for n, shape in ipairs(shapes) do
                local x = some(shape, dtype, n % 2 == 0 and dtype ~= "int64")
                for dim = 1, #shape - 1 do
                    local turned = x:transpose(dim, #shape)
                    local rows = turned:contiguous()
                    local what = ("%s, shape %d, dimension %d"):format(dtype, n, dim)
                    for _, name in ipairs { "max", "min", "argmax", "argmin", "norm", "sum" } do
                        local got, expected = x[name](x, dim, true), rows[name](rows, #shape, true)
                        assert_equal_bits(expected:transpose(dim, #shape), got, name .. " " .. what)
                    end
                    for _, f in ipairs { te.cumsum, dtype ~= "int64" and te.softmax or nil } do
                        assert_equal_bits(f(rows, #shape):transpose(dim, #shape), f(x, dim), what)
                    end
                    assert_equal_bits(rows + rows, turned + turned, what)
                    assert_equal_bits(rows:lt(rows:narrow(#shape, 1, 1)), turned:lt(turned:narrow(#shape, 1, 1)), what)
                end
            end
        end)
    end

    it("are chosen from as wider numbers are", function()
        for n, shape in ipairs(shapes) do
            for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
                local x = some(shape, dtype, n % 2 == 0)
                local wide = x:to("float64")
                for dim = 1, #shape do
                    assert_equal_bits(wide:argmax(dim), x:argmax(dim), dtype .. n)
                    assert_equal_bits(wide:argmin(dim), x:argmin(dim), dtype .. n)
                end
                assert.equal(wide:argmax():item(), x:argmax():item())
                assert.equal(wide:argmin():item(), x:argmin():item())
            end
        end
        assert.equal(0, te.full({ 20 }, -inf):argmax():item())
        assert.equal(0, te.full({ 300, 20 }, -inf):argmax(1):max():item())
        assert.equal(0, te.full({ 300, 20 }, inf):argmin(1):max():item())
        local least = -0x1.fffffep127
        assert.equal(1, te.tensor({ -inf, least, -inf }):argmax():item())
        assert.equal(2, te.tensor({ inf, inf, -least }):argmin():item())
        assert.equal(1, te.tensor({ -inf, 0 / 0, least }):argmax():item())
    end)

    it("give the same largest as wider numbers do", function()
        for _, n in ipairs(elsewhere and { 1, 33, 257, 1000, 4097 } or
            { 1, 31, 32, 33, 64, 255, 257, 300, 1000, 4096, 4097 }) do
            for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
                for _, k in ipairs(elsewhere and { 1, 10, 17, 1000 } or { 1, 2, 10, 16, 17, 33, 1000 }) do
                    local rows = elsewhere and { 2, 2 } or { 4, 9 }
                    local equal = te.randint(0, 2 + 5 * k, { rows[1], n }):to(dtype) -- ones in every row
                    local x = some({ rows[2], n }, dtype, n % 2 == 1)
                    x = te.cat({ x, equal, te.zeros({ 1, n }):to(dtype) }, 1)
                    for _, largest in ipairs(k <= n and { true, false } or {}) do
                        local values, where = te.topk(x, k, -1, { largest = largest })
                        local wide, at = te.topk(x:to("float64"), k, -1, { largest = largest })
                        local what = ("%s, %d of %d, %s"):format(dtype, k, n, largest)
                        assert_equal_bits(at, where, what)
                        assert_equal_bits(wide:to(dtype), values, what)
                    end
                end
            end
        end
    end)

    it("have their extreme where argmax and argmin find it, however long they are", function()
        for n, length in ipairs { 4096, 32767, 32768, 32769, 36864, 40001, 300007 } do
            for _, dtype in ipairs { "float32", "bfloat16", "float16", "float64", "int64" } do
                local pairs_of = some({ length, 2 }, dtype, false)
                pairs_of[length][1] = -77 -- in what is left behind whole pieces
                pairs_of[length][2] = 77
                for column = 1, 2 do
                    local x = pairs_of:select(2, column)
                    for _, row in ipairs { x, x:contiguous() } do
                        assert.equal(row[row:argmax():item() + 1]:item(), row:max():item())
                        assert.equal(row[row:argmin():item() + 1]:item(), row:min():item())
                    end
                end
                assert.equal(77, pairs_of:max():item())
                assert.equal(-77, pairs_of:min():item())
                if dtype ~= "int64" then
                    pairs_of[(n * 4095) % length + 1][1] = inf - inf
                    local x = pairs_of:max():item()
                    assert.is_true(x ~= x)
                    x = pairs_of:view { 1, 2 * length }:min(2):item()
                    assert.is_true(x ~= x)
                end
            end
        end
        local x = te.zeros { 40000 }
        x.requires_grad = true
        x:max():backward()
        assert.near(1, x.grad:sum():item(), 1e-5)
        assert.equal(x.grad:max():item(), x.grad:min():item())
    end)

    it("give the same alone and among others", function()
        for _, shape in ipairs { { 3, 64 }, { 200, 128 }, { 37, 3072 }, { 17, 4096 }, { 5, 4160 } } do
            for _, dtype in ipairs { "float32", "bfloat16" } do
                local rows, columns = shape[1], shape[2]
                local wide = te.randn({ rows, columns + 24 }):to(dtype)
                local apart = wide:narrow(2, 9, columns)
                for _, x in ipairs { apart, apart:contiguous(), wide:narrow(2, 1, columns) } do
                    for _, name in ipairs { "sum", "mean", "max", "min", "norm" } do
                        local all = x[name](x, 2)
                        for i = 1, rows, 7 do
                            local row = x:narrow(1, i, 1)
                            assert_equal_bits(row[name](row, 2), all:narrow(1, i, 1), name .. columns .. dtype)
                        end
                    end
                end
            end
        end
    end)

    it("give sums and extremes of bfloat16 as of the same float32", function()
        for _, shape in ipairs { { 1 }, { 17 }, { 70 }, { 8191 }, { 16385 }, { 100001 }, { 3, 64 }, { 40, 1000 } } do
            for strewn = 0, 1 do
                local x = some(shape, "bfloat16", strewn == 1 and shape[1] > 1)
                local wide, last = x:to("float32"), #shape
                for _, name in ipairs { "sum", "max", "min", "norm" } do
                    assert_equal_bits(wide[name](wide):to("bfloat16"), x[name](x), name)
                    assert_equal_bits(wide[name](wide, last):to("bfloat16"), x[name](x, last), name)
                end
                assert_equal_bits(te.softmax(wide, last):to("bfloat16"), te.softmax(x, last), "softmax")
            end
        end
    end)
end)
