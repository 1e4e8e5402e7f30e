--- Whole numbers are computed in float32 while they are small enough: with the same results as in float64, whatever
--- their size, layout and the number of threads.

local te = require "te"
local ffi = require "ffi"

local R, C = 67, 259 -- more than a small run, and no multiple of anything

local function rounded(v) return tonumber(ffi.new("float[1]", v)[0]) end
local function same(v, w) return v == w or (v ~= v and w ~= w) end

local function list(seed, most)
    local values, state = {}, seed
    for i = 1, R * C do
        state = (state * 48271) % 2147483647
        values[i] = state % (2 * most + 1) - most
    end
    return values
end

local function sign(v) return v > 0 and 1 or v < 0 and -1 or 0 end
local function limited(v, dtype)
    local most = dtype == "int64" and 2 ^ 63 or 2 ^ 31 - 1
    return math.max(math.min(v, most), dtype == "int64" and -2 ^ 63 or -2 ^ 31)
end

local function int(fn) return { fn, function(v, dtype) return limited(v, dtype) end } end
local function bool(fn) return { function(a, b) return fn(a, b) and 1 or 0 end, function(v) return v end } end
local function real(fn) return { fn, function(v) return rounded(v) end } end

-- what a tensor function gives for each pair of elements
local cases = {
    { "negated", function(x) return -x end, int(function(a) return -a end) },
    { "abs", function(x) return x:abs() end, int(math.abs) },
    { "sign", function(x) return x:sign() end, int(sign) },
    { "clamp", function(x) return x:clamp(-1, 1) end, int(function(a) return math.max(math.min(a, 1), -1) end) },
    { "1 - x", function(x) return 1 - x end, int(function(a) return 1 - a end) },
    { "3 x", function(x) return x * 3 end, int(function(a) return a * 3 end) },
    { "x + y", function(x, y) return x + y end, int(function(a, b) return a + b end) },
    { "x - y", function(x, y) return x - y end, int(function(a, b) return a - b end) },
    { "x y", function(x, y) return x * y end, int(function(a, b) return a * b end) },
    { "max", function(x, y) return te.maximum(x, y) end, int(math.max) },
    { "min", function(x, y) return te.minimum(x, y) end, int(math.min) },
    { "x < y", function(x, y) return x:lt(y) end, bool(function(a, b) return a < b end) },
    { "x == y", function(x, y) return x:eq(y) end, bool(function(a, b) return a == b end) },
    { "1 / x", function(x) return x:reciprocal() end, real(function(a) return 1 / a end) },
    { "x / y", function(x, y) return x / y end, real(function(a, b) return a / b end) },
    { "x + 0.5", function(x) return x + 0.5 end, real(function(a) return a + 0.5 end) },
    { "0.1 x", function(x) return x * 0.1 end, real(function(a) return a * 0.1 end) },
    { "as float32", function(x) return x:to("float32") end, real(function(a) return a end) },
}

-- tensors of the values in another layout, and the value of element (i, j)
local layouts = {
    rows = function(x) return x, function(v, i, j) return v[(i - 1) * C + j] end end,
    turned = function(x) return x:view(C, R):transpose(1, 2), function(v, i, j) return v[(j - 1) * R + i] end end,
    half = function(x)
        return te.cat({ x, x }, 2):narrow(2, 1, C), function(v, i, j) return v[(i - 1) * C + j] end
    end,
    apart = function(x)
        return te.stack({ x, x }, 3):select(3, 2), function(v, i, j) return v[(i - 1) * C + j] end
    end,
    column = function(x) return x:narrow(2, 1, 1), function(v, i) return v[(i - 1) * C + 1] end end,
    row = function(x) return x:narrow(1, 1, 1), function(v, _, j) return v[j] end end,
    one = function(x) return x:narrow(1, 1, 1):narrow(2, 1, 1), function(v) return v[1] end end,
}

local function check(dtype, first, second, a, b)
    local x, at = layouts[first](te.tensor(a, { dtype = dtype }):view(R, C))
    local y, beside = layouts[second](te.tensor(b, { dtype = dtype }):view(R, C))
    for _, case in ipairs(cases) do
        local name, fn, want = case[1], case[2], case[3]
        local found = fn(x, y)
        if found:dim() == 2 and found:size(1) == R and found:size(2) == C then
            assert.is_true(found:is_contiguous())
            local flat = found:to("float64"):view(-1):totable()
            for i = 1, R do
                for j = 1, C do
                    local v, w = at(a, i, j), beside(b, i, j)
                    local expected, got = want[2](want[1](v, w), dtype), flat[(i - 1) * C + j]
                    if not same(expected, got) then
                        error(("%s of %g and %g: %.17g instead of %.17g"):format(name, v, w, got, expected))
                    end
                end
            end
        end
    end
end

describe("whole numbers", function()
    local threads = te.get_num_threads()
    after_each(function() te.set_num_threads(threads) end)

    -- 2^12 and 2^23: limits of products and sums; the last one is for float64
    for _, most in ipairs { 5, 2 ^ 12, 2 ^ 23, 2 ^ 24 + 1 } do
        for _, dtype in ipairs { "int64", "int32" } do
            it(("of at most %d give what float64 gives, %s"):format(most, dtype), function()
                local a, b = list(1 + most, most), list(7 + most, most)
                for n = 1, 2 do
                    te.set_num_threads(n)
                    check(dtype, "rows", n == 1 and "rows" or "column", a, b)
                    check(dtype, "turned", n == 1 and "turned" or "rows", a, b)
                    check(dtype, n == 1 and "half" or "apart", n == 1 and "row" or "one", a, b)
                end
            end)
        end
    end

    it("that are small but for one give what float64 gives", function()
        for _, at in ipairs { 1, 400, R * C } do
            local a, b = list(3, 100), list(5, 100)
            a[at], b[R * C + 1 - at] = -2 ^ 24 - 1, 2 ^ 31 - 1
            for _, dtype in ipairs { "int64", "int32" } do check(dtype, "rows", "rows", a, b) end
            a[at] = 2 ^ 53
            check("int64", "turned", "rows", a, b)
        end
    end)

    it("beside float32 give what float64 gives", function()
        local a, b = list(11, 3000), list(13, 2 ^ 23)
        b[1], b[2], b[3], b[4] = 0 / 0, math.huge, 3e38, 1e-42
        for i = 5, R * C do b[i] = rounded(b[i] / 1024 / 7) end
        b[3], b[4] = rounded(b[3]), rounded(b[4])
        local x, y = te.tensor(a, { dtype = "int64" }), te.tensor(b)
        for _, case in ipairs { { x + y, function(v, w) return v + w end }, { x * y, function(v, w) return v * w end },
            { x / y, function(v, w) return v / w end } } do
            assert.equal("float32", case[1].dtype)
            local flat = case[1]:totable()
            for i = 1, R * C do assert.is_true(same(rounded(case[2](a[i], b[i])), flat[i]), i) end
        end
    end)
end)

describe("conversions", function()
    it("between whole numbers keep all bits or the nearest value", function()
        local large = te.full({ 3000 }, 2 ^ 53, { dtype = "int64" }) + te.ones({ 3000 }, { dtype = "int64" })
        local one = te.zeros({ 3000 }, { dtype = "int64" }):copy_(te.full({ 3000 }, 2 ^ 31 - 1, { dtype = "int32" }))
        assert.equal(2 ^ 31 - 1, one:max():item())
        assert.equal(2 ^ 31 - 1, one:min():item())
        local narrow = te.zeros({ 60, 50 }, { dtype = "int32" })
        assert.equal(2 ^ 31 - 1, narrow:copy_(large:view(50, 60):transpose(1, 2)):min():item())
        assert.equal(-2 ^ 31, narrow:copy_(-large:view(60, 50)):max():item())
        local bytes = te.zeros({ 3000 }, { dtype = "uint8" })
        assert.equal(255, bytes:copy_(large):to("int32"):min():item())
        assert.equal(0, bytes:copy_(-large):to("int32"):max():item())
        assert.equal(3000, te.zeros({ 3000 }, { dtype = "bool" }):copy_(large):sum():item())
    end)

    it("of float32 to whole numbers leave out the fraction", function()
        local values = { 0.5, -0.5, 1.9, -1.9, 2 ^ 31, -2 ^ 31, 2 ^ 31 - 128, 2 ^ 40, -2 ^ 40, 1e30, -1e30, math.huge,
            -math.huge, 0 / 0, 16777217, -3 }
        local function trunc(v) return v ~= v and 0 or v < 0 and math.ceil(v) or math.floor(v) end
        for _, group in ipairs { { 1, 4 }, { 1, 16 }, { 7, 7 }, { 14, 14 } } do
            local list_of, n = {}, group[2] - group[1] + 1
            for i = 1, 2000 do list_of[i] = values[group[1] + i % n] end
            local x = te.tensor(list_of)
            for _, dtype in ipairs { "int64", "int32" } do
                local found = te.zeros({ 2000 }, { dtype = dtype }):copy_(x):to("float64"):totable()
                for i, v in ipairs(list_of) do
                    assert.equal(limited(trunc(rounded(v)), dtype) + 0, found[i] + 0)
                end
            end
        end
    end)
end)

describe("Comparisons of bools", function()
    local OPS = {
        eq = function(a, b) return a == b end, ne = function(a, b) return a ~= b end,
        lt = function(a, b) return a < b end, le = function(a, b) return a <= b end,
        gt = function(a, b) return a > b end, ge = function(a, b) return a >= b end,
    }

    it("are those of 0 and 1, also with numbers that are neither", function()
        local a, b = {}, {}
        for i = 1, 3001 do a[i], b[i] = i % 2, math.floor(i / 2) % 2 end
        local x, y = te.tensor(a, { dtype = "bool" }), te.tensor(b, { dtype = "bool" })
        for name, op in pairs(OPS) do
            for _, other in ipairs { y, 0, 1, 2, -1, 0.5 } do
                local found = te[name](x, other)
                assert.equal("bool", found.dtype)
                for i, v in ipairs(found:to("int64"):totable()) do
                    local wanted = op(a[i], other == y and b[i] or other) and 1 or 0
                    if v ~= wanted then error(("%s of %d: %d"):format(name, i, v)) end
                end
            end
        end
    end)
end)

describe("te.arange", function()
    it("counts the same in every type", function()
        for _, case in ipairs { { 0, 70000, 1 }, { 5, -70000, -3 }, { 2 ^ 24 - 5, 2 ^ 24 + 9, 2 },
            { -2 ^ 40, 2 ^ 40, 2 ^ 30 }, { 0.5, 9000, 0.75 } } do
            for _, dtype in ipairs { "int64", "int32", "float32", "float64", "bfloat16" } do
                local whole = case[1] == math.floor(case[1])
                local found = te.arange(case[1], case[2], case[3], { dtype = dtype })
                local wanted = {}
                for i = 1, found:numel() do wanted[i] = case[1] + (i - 1) * case[3] end
                if whole or dtype:find "float" then
                    local expected = te.tensor(wanted, { dtype = "float64" }):to(dtype)
                    assert.equal(found:numel(), expected:eq(found):sum():item(), dtype)
                end
                assert.equal(math.floor((case[2] - case[1]) / case[3]) + 1, found:numel())
            end
        end
    end)
end)
