--- Rows of any length, few and many: sums in their fixed order, extremes, what cross entropy picks, and whole numbers
--- of 64 bits along rows, repeated along rows and columns, and the best ones of them.

local te = require "te"
local ffi = require "ffi"

local LANES = 64

local function numbers(seed, n, fn)
    local values, state = {}, seed
    for i = 1, n do
        state = (state * 48271) % 2147483647
        values[i] = fn(state)
    end
    return values
end

local function fraction(state) return tonumber(ffi.new("float[1]", state / 2147483647 * 8 - 4)[0]) end

--- Many comparisons: luassert's take long.
local function check(fine, ...)
    if not fine then error(table.concat({ "differs:", ... }, " "), 2) end
end

local function same(v, w) return v == w or (v ~= v and w ~= w) end

--- The sum of a row in float32: element i goes to lane i % 64, and lanes are joined as a balanced tree.
local function sum_of(values, first, n)
    local lane = ffi.new("float[64]")
    for i = 0, n - 1 do lane[i % LANES] = lane[i % LANES] + values[first + i] end
    local half = LANES / 2
    while half >= 1 do
        for i = 0, half - 1 do lane[i] = lane[i] + lane[i + half] end
        half = half / 2
    end
    return tonumber(lane[0])
end

local function extreme_of(values, first, n, sign)
    local most = -math.huge
    for i = first, first + n - 1 do
        local v = values[i] * sign
        if v ~= v then return v end
        most = math.max(most, v)
    end
    return most * sign
end

local function equal(x, y)
    local v, w = x:contiguous():view(-1):totable(), y:contiguous():view(-1):totable()
    check(#v == #w)
    for i = 1, #v do
        if not same(tonumber(v[i]), tonumber(w[i])) then return false end
    end
    return true
end

local function on_threads(fn)
    local threads = te.get_num_threads()
    for _, n in ipairs { 1, 2 } do
        te.set_num_threads(n)
        local ok, message = pcall(fn, n)
        te.set_num_threads(threads)
        assert(ok, message)
    end
end

describe("rows of any length", function()
    for _, n in ipairs { 2, 15, 16, 17, 31, 33, 63, 64, 65, 79, 80, 95, 97, 127, 129, 191, 193, 300 } do
        it("are added and compared, " .. n, function()
            on_threads(function()
                for _, rows in ipairs { 1, 2, 3, 4, 5, 7, 130 } do
                    for _, dtype in ipairs { "float32", "bfloat16" } do
                        local x = te.tensor(numbers(n + rows, rows * n, fraction)):to(dtype):view(rows, n)
                        if rows > 2 then x:select(1, 1):narrow(1, n - 1, 1):fill_(0 / 0) end
                        local values = x:to("float32"):view(-1):totable()
                        local sum, most, least = x:to("float32"):sum(-1), x:max(-1), x:min(-1)
                        local sums, mosts, leasts = sum:totable(), most:totable(), least:totable()
                        for r = 1, rows do
                            local first = (r - 1) * n + 1
                            check(same(sum_of(values, first, n), sums[r]), rows, dtype, r)
                            check(same(extreme_of(values, first, n, 1), mosts[r]), rows, dtype, r)
                            check(same(extreme_of(values, first, n, -1), leasts[r]), rows, dtype, r)
                        end
                        if rows > 1 and n > 2 then -- the same rows, apart in memory
                            local wide = te.cat({ x, x }, 2):narrow(2, 1, n)
                            assert.is_true(equal(wide:max(-1), most))
                            assert.is_true(equal(wide:min(-1), least))
                        end
                    end
                end
            end)
        end)
    end
end)

describe("cross entropy of rows of any length", function()
    for _, classes in ipairs { 2, 10, 17, 65, 129 } do
        it("has the target's logit, " .. classes, function()
            on_threads(function()
                for _, rows in ipairs { 1, 3, 65, 200 } do
                    for _, dtype in ipairs { "float32", "bfloat16", "float64" } do
                        local x = te.tensor(numbers(classes, rows * classes, fraction)):to(dtype):view(rows, classes)
                        local target = numbers(rows, rows, function(s) return s % 7 == 0 and -100 or s % classes end)
                        local values = x:to("float64"):view(-1):totable()
                        local of = te.tensor(target, { dtype = "int64" })
                        local loss = te.cross_entropy(x, of, { reduction = "none" }):totable()
                        for r = 1, rows do
                            local total, base = 0, (r - 1) * classes
                            for c = 1, classes do total = total + math.exp(values[base + c]) end
                            local expected = target[r] == -100 and 0 or math.log(total) - values[base + target[r] + 1]
                            check(math.abs(expected - loss[r]) < 1e-5, rows, dtype, r)
                        end
                    end
                end
            end)
        end)
    end
end)

describe("whole numbers of 64 bits", function()
    local function whole(most) return function(s) return s % (2 * most + 1) - most end end
    local function limited(v) return math.max(math.min(v, 2 ^ 63), -2 ^ 63) end
    local operations = {
        { te.add, function(a, b) return a + b end }, { te.sub, function(a, b) return a - b end },
        { te.mul, function(a, b) return a * b end }, { te.maximum, math.max }, { te.minimum, math.min },
    }

    for _, scale in ipairs { 1, 2 ^ 27, 2 ^ 40, 2 ^ 52 } do
        it("are repeated along rows and columns, times " .. scale, function()
            on_threads(function()
                for _, shape in ipairs { { 101, 7 }, { 37, 300 }, { 3, 1030 } } do
                    local R, C = shape[1], shape[2]
                    local function made(rows, columns)
                        local values = numbers(rows + 3 * columns, rows * columns, whole(40))
                        for i, v in ipairs(values) do values[i] = v * (i % 5 == 0 and scale or 1) end
                        return te.tensor(values, { dtype = "float64" }):to("int64"):view(rows, columns), values
                    end
                    local x, v = made(R, C)
                    for _, other in ipairs { { R, C }, { 1, C }, { R, 1 } } do
                        local y, w = made(other[1], other[2])
                        for _, op in ipairs(operations) do
                            local got, turned = op[1](x, y):view(-1):totable(), op[1](y, x):view(-1):totable()
                            for i = 1, R do
                                for j = 1, C do
                                    local at = (i - 1) * C + j
                                    local b = w[((i - 1) % other[1]) * other[2] + (j - 1) % other[2] + 1]
                                    check(limited(op[2](v[at], b)) == tonumber(got[at]), v[at], b)
                                    check(limited(op[2](b, v[at])) == tonumber(turned[at]), b, v[at])
                                end
                            end
                        end
                        local here = x:clone():add_(y)
                        assert.is_true(equal(here, x + y))
                    end
                    assert.is_true(equal(x:clone():clamp_(-3, 9), te.minimum(te.maximum(x, -3), 9)))
                    assert.is_true(equal(te.abs(x), te.maximum(x, -x)))
                end
            end)
        end)
    end

    it("have their extremes in short rows", function()
        for _, n in ipairs { 1, 2, 3, 5, 8, 11, 12, 13, 16, 25, 65 } do
            for _, rows in ipairs { 1, 7, 8, 9, 700 } do
                local values = numbers(n + rows, rows * n, whole(1e6))
                local x = te.tensor(values, { dtype = "int64" }):view(rows, n)
                local most, least, sum = x:max(-1):totable(), x:min(-1):totable(), x:sum(-1):totable()
                for r = 1, rows do
                    local total = 0
                    for i = (r - 1) * n + 1, r * n do total = total + values[i] end
                    check(extreme_of(values, (r - 1) * n + 1, n, 1) == tonumber(most[r]), rows, n, r)
                    check(extreme_of(values, (r - 1) * n + 1, n, -1) == tonumber(least[r]), rows, n, r)
                    check(total == tonumber(sum[r]), rows, n, r)
                end
            end
        end
    end)

    it("have their best ones, of equal ones the first", function()
        for _, dtype in ipairs { "int64", "int32", "uint8", "bool" } do
            for _, most in ipairs { 3, 2 ^ 24, 2 ^ 26 } do
                for _, n in ipairs { 1, 5, 31, 33, 100 } do
                    local rows = 6
                    local x = te.tensor(numbers(n, rows * n, whole(most)), { dtype = "int64" }):to(dtype):view(rows, n)
                    local values = x:to("float64"):view(-1):totable()
                    for _, k in ipairs { 1, math.min(n, 5), math.min(n, 33) } do
                        for _, largest in ipairs { true, false } do
                            local best, index = te.topk(x, k, -1, { largest = largest })
                            best, index = best:to("float64"):view(-1):totable(), index:view(-1):totable()
                            for r = 1, rows do
                                local order = {}
                                for i = 1, n do order[i] = i end
                                table.sort(order, function(i, j)
                                    local a, b = values[(r - 1) * n + i], values[(r - 1) * n + j]
                                    if a ~= b then return (a > b) == largest end
                                    return i < j
                                end)
                                for i = 1, k do
                                    check(order[i] - 1 == tonumber(index[(r - 1) * k + i]), dtype, n, k, i)
                                    check(values[(r - 1) * n + order[i]] == best[(r - 1) * k + i], dtype, n, k, i)
                                end
                            end
                        end
                    end
                end
            end
        end
    end)

    it("are refused as indices outside, wherever they stand", function()
        local x = te.zeros { 9, 40 }
        for _, n in ipairs { 1, 7, 40 } do
            for _, bad in ipairs { -1, 9, 2 ^ 40, -2 ^ 62 } do
                for at = 1, n, 3 do
                    local index = te.zeros({ 1, n }, { dtype = "int64" })
                    index[1][at] = bad
                    assert.has_error(function() te.gather(x, 1, index) end)
                    assert.has_error(function() te.scatter_add(x, 1, index, te.ones { 1, n }) end)
                end
            end
        end
    end)
end)
