-- Look-ups, sums along rows and orders of rows against plain loops: rows of one element, short and long ones,
-- dimensions that lie across memory, whole numbers and floats, with one thread and two.
local te = require "te"

local DTYPES = { "float32", "bfloat16", "int64", "uint8", "float64" }

--- Runs `check` with one thread and with two.
local function with_threads(check)
    local threads = te.get_num_threads()
    local fine, message
    for n = 1, 2 do
        te.set_num_threads(n)
        fine, message = pcall(check)
        te.set_num_threads(threads)
        if not fine then error(message, 0) end
    end
end

--- Whole numbers from 0 to most, as rows and as a tensor; across: whose rows lie across memory.
local function numbers(rows, columns, most, dtype, across)
    local list = {}
    for r = 1, rows do
        list[r] = {}
        for c = 1, columns do list[r][c] = (r * 7919 + c * c * 104729 + r * c * 31) % (most + 1) end
    end
    local t = te.tensor(list, { dtype = dtype })
    return list, across and t:transpose(1, 2):contiguous():transpose(1, 2) or t
end

local function same(expected, tensor)
    local got = tensor:totable()
    for r, row in ipairs(expected) do
        for c, value in ipairs(row) do
            if got[r][c] ~= value then error(("[%d][%d]: %s, not %s"):format(r, c, got[r][c], value), 2) end
        end
    end
end

--- What a sum becomes in a tensor: rounded once.
local function stored(rows, dtype)
    for _, row in ipairs(rows) do
        for c, value in ipairs(row) do row[c] = dtype == "uint8" and math.min(value, 255) or value end
    end
    return te.tensor(rows, { dtype = dtype }):totable()
end

local function map(rows, columns, fn)
    local out = {}
    for r = 1, rows do
        out[r] = {}
        for c = 1, columns do out[r][c] = fn(r, c) end
    end
    return out
end

local function each_case(fn)
    for _, dtype in ipairs(DTYPES) do
        for _, across in ipairs { false, true } do
            for _, index_type in ipairs { "int64", "int32" } do fn(dtype, across, index_type) end
        end
    end
end

describe("Look-ups beside plain loops", function()
    for _, shape in ipairs { { 3000, 16, 1 }, { 3000, 9, 4 }, { 40, 700, 700 }, { 5, 3, 3 } } do
        local rows, columns, wide = unpack(shape)
        it(("gather and scatter_add along rows of %d by %d"):format(columns, wide), function()
            with_threads(function()
                each_case(function(dtype, across, index_type)
                    local list, x = numbers(rows, columns, 100, dtype, across)
                    local at, index = numbers(rows, wide, columns - 1, index_type, across)
                    local terms, src = numbers(rows, wide, 1, dtype, across)
                    same(map(rows, wide, function(r, c) return list[r][at[r][c] + 1] end), te.gather(x, 2, index))
                    local sums = map(rows, columns, function(r, c) return list[r][c] end)
                    for r = 1, rows do
                        for c = 1, wide do sums[r][at[r][c] + 1] = sums[r][at[r][c] + 1] + terms[r][c] end
                    end
                    same(stored(sums, dtype), te.scatter_add(x, 2, index, src))
                end)
            end)
        end)
    end

    for _, width in ipairs { 1, 2, 3, 5, 12, 33, 300 } do
        it(("rows of %d by a vector of indices"):format(width), function()
            with_threads(function()
                each_case(function(dtype, across, index_type)
                    local n = width < 100 and 2000 or 200
                    local list, x = numbers(50, width, 100, dtype, across)
                    local at, index = numbers(1, n, 49, index_type)
                    local vector = index:reshape { n }
                    local found = map(n, width, function(r, c) return list[at[1][r] + 1][c] end)
                    same(found, te.index_select(x, 1, vector))
                    if dtype == "float32" or dtype == "bfloat16" then same(found, te.embedding(x, vector)) end
                    same(map(width, n, function(r, c) return found[c][r] end),
                        te.index_select(x:transpose(1, 2), 2, vector))
                    local terms, src = numbers(n, width, 1, dtype, across)
                    local sums = map(50, width, function(r, c) return list[r][c] end)
                    for r = 1, n do
                        local row = sums[at[1][r] + 1]
                        for c = 1, width do row[c] = row[c] + terms[r][c] end
                    end
                    same(stored(sums, dtype), te.index_add(x, 1, vector, src))
                end)
            end)
        end)
    end

    it("gradients of an embedding, with ids that lie across memory as well", function()
        with_threads(function()
            for _, across in ipairs { false, true } do
                local ids, index = numbers(300, 7, 12, "int64", across)
                local terms, dy = numbers(2100, 20, 3, "float32")
                local w = te.zeros { 13, 20 }
                w.requires_grad = true
                te.embedding(w, index):backward(dy:reshape { 300, 7, 20 })
                local sums = map(13, 20, function() return 0 end)
                for r = 1, 2100 do
                    local row = sums[ids[math.floor((r - 1) / 7) + 1][(r - 1) % 7 + 1] + 1]
                    for c = 1, 20 do row[c] = row[c] + terms[r][c] end
                end
                same(sums, w.grad)
            end
        end)
    end)

    it("saturates sums of uint8, as additions of them do", function()
        local x, src = te.tensor({ 250, 3, 4 }, { dtype = "uint8" }), te.tensor({ 3, 4, 255 }, { dtype = "uint8" })
        local at = te.tensor({ 0, 0, 1 }, { dtype = "int64" })
        assert.same({ 255, 255, 4 }, te.index_add(x, 1, at, src):totable())
        assert.same({ 255, 255, 4 }, te.scatter_add(x, 1, at, src):totable())
        assert.same({ 253, 7, 255 }, (x + src):totable())
    end)

    it("names the first index that is outside, and writes nothing", function()
        local x, index = te.zeros { 4, 600 }, te.zeros({ 4, 600 }, { dtype = "int64" })
        index[3][599] = 600
        index[4][1] = -1
        local place = "index 600 at position 1799 is outside 0 to 599"
        assert.error_matches(function() te.gather(x, 2, index):totable() end, place, nil, true)
        assert.error_matches(function() x:scatter_add_(2, index, te.ones { 4, 600 }):totable() end, place, nil, true)
        assert.equal(0, x:sum():item())
        local rows = te.tensor({ 1, 4, 0 }, { dtype = "int64" })
        assert.error_matches(function() te.index_select(x, 1, rows):totable() end,
            "index 4 at position 2 is outside 0 to 3", nil, true)
        assert.error_matches(function() te.embedding(te.zeros { 4, 0 }, rows):totable() end,
            "id 4 at position 2 is outside 0 to 3", nil, true)
    end)

    it("of the best of one number look at no others", function()
        for _, dtype in ipairs { "float64", "int64", "int32", "bool" } do
            local x = te.zeros({ 3, 2000000 }, { dtype = dtype }):transpose(1, 2):narrow(2, 1, 1)
            assert.equal(0, x:argmax(-1):sum():item())
        end
    end)

    it("turns round and shifts, and gives no part of its operand", function()
        for _, dtype in ipairs(DTYPES) do
            local list, x = numbers(30, 601, 200, dtype)
            same(map(30, 601, function(r, c) return list[r][602 - c] end), te.flip(x, { 2 }))
            same(map(30, 601, function(r, c) return list[31 - r][602 - c] end), te.flip(x, { 1, 2 }))
            same(map(30, 601, function(r, c) return list[r][(c - 3) % 601 + 1] end), te.roll(x, { 2 }, { 2 }))
            for _, y in ipairs { te.roll(x, { 0 }, { 1 }), te.roll(x, { 30 * 601 }), te.flip(x, {}) } do
                y:zero_()
                same(list, x)
            end
        end
    end)
end)

describe("Rows beside plain loops", function()
    for _, shape in ipairs { { 3000, 3 }, { 700, 8 }, { 40, 64 }, { 20, 65 }, { 300, 33 }, { 2, 700 }, { 600, 1 } } do
        local rows, n = unpack(shape)
        it(("of %d elements: cumsum, argmax, sort, topk"):format(n), function()
            with_threads(function()
                for _, dtype in ipairs(DTYPES) do
                    for _, across in ipairs { false, true } do
                        local list, x = numbers(rows, n, 3, dtype, across)
                        if dtype ~= "bfloat16" or n < 60 then
                            local sums = map(rows, n, function() return 0 end)
                            for r = 1, rows do
                                for c = 1, n do sums[r][c] = (sums[r][c - 1] or 0) + list[r][c] end
                            end
                            same(sums, te.cumsum(x, 2))
                            same(map(n, rows, function(c, r) return sums[r][c] end), te.cumsum(x:transpose(1, 2), 1))
                        end
                        local order = map(rows, n, function(_, c) return c - 1 end)
                        for r, row in ipairs(order) do
                            table.sort(row, function(a, b)
                                local p, q = list[r][a + 1], list[r][b + 1]
                                return p < q or (p == q and a < b)
                            end)
                        end
                        local values, places = te.sort(x, 2)
                        same(order, places)
                        same(map(rows, n, function(r, c) return list[r][order[r][c] + 1] end), values)
                        same(map(rows, 1, function(r) return order[r][1] end), te.argmin(x, 2, true))
                        for _, k in ipairs { math.min(n, 5), math.ceil(n / 2) } do
                            local _, least = te.topk(x, k, 2, { largest = false })
                            same(map(rows, k, function(r, c) return order[r][c] end), least)
                            local _, least_across = te.topk(x:transpose(1, 2), k, 1, { largest = false })
                            same(map(k, rows, function(c, r) return order[r][c] end), least_across)
                        end
                    end
                end
            end)
        end)
    end

    it("of short rows with NaN and infinities", function()
        local nan, inf = 0 / 0, math.huge
        local x = te.tensor { { 1, nan, inf }, { -inf, -inf, -inf }, { nan, 2, nan }, { 0, -0.0, -1 } }
        local tall = x:expand { 20, 4, 3 }:reshape { 80, 3 }
        local best, least, _, places = te.argmax(tall, 2):totable(), te.argmin(tall, 2):totable(), te.sort(tall, 2)
        for r = 0, 76, 4 do
            assert.same({ 1, 0, 0, 0 }, { best[r + 1], best[r + 2], best[r + 3], best[r + 4] })
            assert.same({ 1, 0, 0, 2 }, { least[r + 1], least[r + 2], least[r + 3], least[r + 4] })
            assert.same({ { 0, 2, 1 }, { 0, 1, 2 }, { 1, 0, 2 }, { 2, 0, 1 } },
                places:narrow(1, r + 1, 4):totable())
        end
    end)
end)

--- Terms of 16 bits are added to sums in float32, in the order of their positions, and rounded once.
describe("sums of bfloat16 by index", function()
    it("are those of float32, rounded", function()
        for _, shape in ipairs { { 5, 7 }, { 40, 300 }, { 300, 40 }, { 17, 1 } } do
            local x, y = te.randn(shape):to("bfloat16"), te.randn(shape):to("bfloat16")
            local index, rows = te.randint(0, shape[1] - 1, shape), te.randint(0, shape[1] - 1, { shape[1] })
            local wide = te.cat({ y, y }, 2):narrow(2, 1, shape[2]) -- apart in memory
            local function rounded(op, ...) return op(x:to("float32"), 1, ..., y:to("float32")):to("bfloat16") end
            for _, term in ipairs { y, wide } do
                assert.equal(0, te.ne(te.scatter_add(x, 1, index, term), rounded(te.scatter_add, index)):sum():item())
                assert.equal(0, te.ne(te.index_add(x, 1, rows, term), rounded(te.index_add, rows)):sum():item())
                local here = x:clone()
                here:index_add_(1, rows, term)
                assert.equal(0, te.ne(here, te.index_add(x, 1, rows, term)):sum():item())
            end
        end
    end)
end)
