--- Elements that are only put elsewhere, small and narrow ones among them: copies of permuted views, flips, triangles,
--- stacks and what is repeated, each against positions counted in Lua.

local bits = require "spec.support.bits"
local te = require "te"
local trials = require "spec.support.trials"

local DTYPES = { "float32", "bfloat16", "int64", "uint8", "float64", "bool" }
local SIZES = { 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64, 65, 100 }

local function steps_of(shape)
    local steps, step = {}, 1
    for d = #shape, 1, -1 do steps[d], step = step, step * shape[d] end
    return steps
end

--- For each position in row-major order of `shape`, the one at which walking `steps` arrives, from 1.
local function walk(shape, steps)
    local places, at, place, n = {}, {}, 1, 1
    for d = 1, #shape do at[d], n = 0, n * shape[d] end
    for i = 1, n do
        places[i] = place
        for d = #shape, 1, -1 do
            at[d], place = at[d] + 1, place + steps[d]
            if at[d] < shape[d] then break end
            at[d], place = 0, place - steps[d] * shape[d]
        end
    end
    return places
end

local function numbers(x) return x:contiguous():view { -1 }:to("float64"):totable() end

local function assert_walked(source, places, got, what)
    local values, found = numbers(source), numbers(got)
    assert.equal(#places, #found, what)
    for i, place in ipairs(places) do
        if values[place] ~= found[i] then
            error(("%s: place %d holds %g, not %g"):format(what, i, found[i], values[place]))
        end
    end
end

local function random_shape(most)
    local shape, n = {}, 1
    for d = 1, math.random(2, 4) do
        local size = SIZES[math.random(#SIZES)]
        shape[d] = n * size <= most and size or 1
        n = n * shape[d]
    end
    return shape
end

local function random_order(n)
    local order = {}
    for d = 1, n do order[d] = d end
    for d = n, 2, -1 do
        local other = math.random(d)
        order[d], order[other] = order[other], order[d]
    end
    return order
end

describe("moved elements", function()
    local threads = te.get_num_threads()
    before_each(function()
        te.manual_seed(71)
        math.randomseed(71)
    end)
    after_each(function() te.set_num_threads(threads) end)

    --- A tensor of `shape` inside a larger one, whose border must stay as it is.
    local function framed(shape, dtype)
        local wide = {}
        for d, size in ipairs(shape) do wide[d] = size + 2 end
        local whole = te.full(wide, 3):to(dtype)
        local part = whole
        for d, size in ipairs(shape) do part = part:narrow(d, 2, size) end
        return whole, part
    end

    it("of permuted views are where they belong, and nothing else is written", function()
        for case = 1, trials(500) do
            te.set_num_threads(case % 2 + 1)
            local shape, dtype = random_shape(20000), DTYPES[case % #DTYPES + 1]
            local order = random_order(#shape)
            local x = te.randint(0, 200, shape):to(dtype)
            local steps, turned, walked = steps_of(shape), {}, {}
            for d, from in ipairs(order) do turned[d], walked[d] = shape[from], steps[from] end
            local view, what = x:permute(unpack(order)), dtype .. " " .. table.concat(shape, "x") .. " by " ..
                table.concat(order, ",")
            local places = walk(turned, walked)
            assert_walked(x, places, view:contiguous(), what)
            local whole, part = framed(turned, dtype)
            part:copy_(view)
            assert_walked(x, places, part, what .. ", framed")
            part:copy_(te.full({ 1 }, 3):to(dtype):expand(turned))
            bits.assert_equal(te.full(whole.shape, 3):to(dtype), whole, what .. ", frame")
        end
    end)

    it("of large matrices with odd sides are where they belong", function()
        for _, dtype in ipairs(DTYPES) do
            for _, shape in ipairs { { 1001, 67 }, { 3, 20011 }, { 20011, 3 }, { 6007, 13 }, { 700, 129 } } do
                local x = te.randint(0, 200, shape):to(dtype)
                assert_walked(x, walk({ shape[2], shape[1] }, { 1, shape[2] }), x:transpose(1, 2):contiguous(),
                    dtype .. " " .. table.concat(shape, "x"))
            end
        end
    end)

    it("of flipped views are where they belong", function()
        for case = 1, trials(200) do
            te.set_num_threads(case % 2 + 1)
            local shape, dtype = random_shape(20000), DTYPES[case % #DTYPES + 1]
            local order = random_order(#shape)
            local x = te.randint(0, 200, shape):to(dtype)
            local view = x:permute(unpack(order)):contiguous()
            if case % 3 == 0 then view = x:permute(unpack(order)) end
            local steps, dims, first = steps_of(shape), {}, 0
            local turned, walked = {}, {}
            for d, from in ipairs(order) do
                turned[d], walked[d] = shape[from], steps[from]
                if math.random(2) == 1 then
                    dims[#dims + 1] = d
                    first = first + (turned[d] - 1) * walked[d]
                    walked[d] = -walked[d]
                end
            end
            local places = walk(turned, walked)
            for i = 1, #places do places[i] = places[i] + first end
            assert_walked(x, places, te.flip(view, dims), dtype .. " " .. table.concat(turned, "x"))
        end
    end)

    it("of triangles are where they belong, in whole numbers of any size too", function()
        for case = 1, trials(200) do
            te.set_num_threads(case % 2 + 1)
            local shape, dtype = random_shape(20000), DTYPES[case % #DTYPES + 1]
            local x = te.randint(1, 200, shape):to(dtype)
            if dtype == "int64" then x = x + 2 ^ 52 end
            local view = case % 3 == 0 and x:transpose(-1, -2) or x
            local rows, columns, diagonal = view:size(-2), view:size(-1), math.random(-40, 40)
            local values = numbers(view)
            local lower, upper = numbers(te.tril(view, diagonal)), numbers(te.triu(view, diagonal))
            for i, value in ipairs(values) do
                local column, row = (i - 1) % columns, math.floor((i - 1) / columns) % rows
                assert.equal(column <= row + diagonal and value or 0, lower[i])
                assert.equal(column >= row + diagonal and value or 0, upper[i])
            end
        end
        assert.same({ { 0, 0 }, { 0, 0 } }, te.tril(te.ones { 2, 2 }, -2 ^ 52):totable())
        assert.same({ { 1, 1 }, { 1, 1 } }, te.tril(te.ones { 2, 2 }, 2 ^ 52):totable())
    end)

    it("of stacks are where they belong", function()
        for case = 1, 60 do
            local shape = random_shape(300)
            if #shape == 4 then shape = { shape[1], shape[2] * shape[3], shape[4] } end
            local list, wide, n = {}, {}, math.random(1, 5)
            for k = 1, n do
                local turned = {}
                for d = #shape, 1, -1 do turned[#turned + 1] = shape[d] end
                local x = te.randint(0, 99, k % 2 == 0 and turned or shape):to(k == 3 and "int32" or "float32")
                local back = {}
                for d = #shape, 1, -1 do back[#back + 1] = d end
                list[k] = k % 2 == 0 and x:permute(unpack(back)) or x
            end
            local dim = math.random(#shape + 1)
            for k = 1, n do wide[k] = list[k]:to("float32"):unsqueeze(dim) end
            local y = te.stack(list, dim)
            bits.assert_equal(te.cat(wide, dim), y:to("float32"), "case " .. case)
            for k = 1, n do
                bits.assert_equal(list[k]:to("float32"), y:select(dim, k):to("float32"), "case " .. case)
            end
        end
    end)

    it("have the gradients of what they were moved from", function()
        local a, b = te.randn({ 5, 7 }), te.randn({ 5, 7 })
        a.requires_grad, b.requires_grad = true, true
        local dy = te.randn { 5, 2, 7 }
        te.stack({ a, b }, 2):backward(dy)
        bits.assert_equal(dy:select(2, 1), a.grad)
        bits.assert_equal(dy:select(2, 2), b.grad)
        a.grad = nil
        te.flip(a, { 1, 2 }):backward(dy:select(2, 1))
        bits.assert_equal(te.flip(dy:select(2, 1), { 2, 1 }), a.grad)
        a.grad = nil
        te.triu(a, 1):backward(dy:select(2, 2))
        bits.assert_equal(te.triu(dy:select(2, 2), 1), a.grad)
    end)

    it("that repeat are written out", function()
        for _, dtype in ipairs(DTYPES) do
            local x = te.randint(0, 200, { 37 }):to(dtype)
            for _, n in ipairs { 1, 2, 3, 5, 8, 16, 31, 33, 64, 100, 129, 517 } do
                assert_walked(x, walk({ 37, n }, { 1, 0 }), x:view(37, 1):expand({ 37, n }):contiguous(), dtype .. n)
                assert_walked(x, walk({ n, 37 }, { 0, 1 }), x:expand({ n, 37 }):contiguous(), dtype .. n)
            end
        end
    end)
end)
