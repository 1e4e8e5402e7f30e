--- Whole numbers: how exact they are, what they become beside others, and what does not go into them.

local te = require "te"

local function of(values, dtype) return te.tensor(values, { dtype = dtype }) end
local function float64_of(x) return x:to("float64"):totable() end

describe("whole numbers", function()
    local yes = of({ true, false }, "bool")

    it("of 8 bits and bools count beyond float32", function()
        local n = 70001
        assert.same({ { 255 * n, 255 * n } }, float64_of(te.full({ n, 2 }, 255, { dtype = "uint8" }):sum(1, true)))
        assert.same({ 255 * n, 255 * n }, float64_of(te.full({ 2, n }, 255, { dtype = "uint8" }):sum(2)))
        assert.equal(2 ^ 24 + 3, te.ones({ 2 ^ 24 + 3 }, { dtype = "bool" }):sum():item())
    end)

    it("leave their range on the way to a sum, whichever dimensions it takes", function()
        local large = 9e18
        local rows = of({ { { large, -large, -large } }, { { large, 0, 0 } }, { { 0, 0, 5 * 2 ^ 10 } } }, "int64")
        local x = te.cat({ rows, rows }, 2) -- {3, 2, 3}
        assert.same({ 0, 0 }, float64_of(x:narrow(1, 1, 2):sum { 1, 3 }))
        assert.same({ 0, 0 }, float64_of(x:narrow(1, 1, 2):mean { 1, 3 }))
        assert.same(float64_of(x:transpose(1, 2):contiguous():reshape({ 2, 9 }):sum(2)), float64_of(x:sum { 1, 3 }))
    end)

    it("are computed as in float64 and limited to what they hold, however many there are", function()
        local n = 5000
        local function list(seed, large, every)
            local values = {}
            for i = 1, n do
                values[i] = (i * seed) % 2001 - 1000
                if every and i % every == 0 then values[i] = values[i] * large end
            end
            return values
        end
        local two, low, high = {
            add = function(a, b) return a + b end, sub = function(a, b) return a - b end,
            mul = function(a, b) return a * b end, maximum = math.max, minimum = math.min,
            gt = function(a, b) return a > b and 1 or 0 end, ge = function(a, b) return a >= b and 1 or 0 end,
            lt = function(a, b) return a < b and 1 or 0 end, le = function(a, b) return a <= b and 1 or 0 end,
            eq = function(a, b) return a == b and 1 or 0 end, ne = function(a, b) return a ~= b and 1 or 0 end,
        }, { int64 = -2 ^ 63, int32 = -2 ^ 31 }, { int64 = 2 ^ 63, int32 = 2 ^ 31 - 1 }
        for dtype in pairs(low) do
            for _, case in ipairs { { 1 }, { 2 ^ 20, 7 }, { 2 ^ 20, 700 }, { 2 ^ 43, 1500, dtype == "int64" } } do
                if case[3] ~= false then
                    local a, b = list(37, case[1], case[2]), list(91, case[1], case[2])
                    local x, y = of(a, dtype), of(b, dtype)
                    for name, fn in pairs(two) do
                        local function limited(v, w) return math.min(math.max(fn(v, w), low[dtype]), high[dtype]) end
                        local pairs_of, beside, before = {}, {}, {}
                        for i = 1, n do
                            pairs_of[i], beside[i] = limited(a[i], b[i]), limited(a[i], 77)
                            before[i] = limited(77, a[i])
                        end
                        assert.same(pairs_of, float64_of(te[name](x, y)))
                        assert.same(beside, float64_of(te[name](x, 77)))
                        assert.same(before, float64_of(te[name](77, x)))
                        if not name:find "^..$" then
                            assert.same(pairs_of, float64_of(x:clone()[name .. "_"](x:clone(), y)))
                        end
                    end
                    local sum, most, least = 0, -math.huge, math.huge
                    for i = 1, n do sum, most, least = sum + a[i], math.max(most, a[i]), math.min(least, a[i]) end
                    assert.same({ sum, most, least }, { x:sum():item(), x:max():item(), x:min():item() })
                    local rows = x:reshape(4, -1):max(2):totable()
                    for r = 1, 4 do assert.equal(math.max(unpack(a, (r - 1) * 1250 + 1, r * 1250)), rows[r]) end
                end
            end
        end
        local a, b, both, one = {}, {}, {}, {}
        for i = 1, n do
            a[i], b[i] = i % 3 == 0, i % 5 < 2
            both[i], one[i] = a[i] and b[i], a[i] or b[i]
        end
        local x, y = te.tensor(a), te.tensor(b)
        assert.same({ both, both, one, one },
            { (x * y):totable(), te.minimum(x, y):totable(), (x + y):totable(), te.maximum(x, y):totable() })
        local most = te.full({ 2000 }, 2 ^ 62, { dtype = "int64" })
        assert.equal(2 ^ 63, most:sum():to("float64"):item()) -- the largest that there is
        assert.equal(2 ^ 63, (most + most):max():to("float64"):item())
        assert.equal(2 ^ 62, most:max():item())
        local least = te.full({ 2000 }, -2 ^ 63, { dtype = "int64" })
        assert.same({ 2000, 0, 0, 2000, 2000 }, { least:lt(most):sum():item(), least:gt(most):sum():item(),
            least:ge(most):sum():item(), most:ne(least):sum():item(), most:eq(2 ^ 62):sum():item() })
    end)

    it("lose the fraction of what is computed for them, of any size and sign", function()
        local function along(step, i) return -100.75 + step * (i - 1) end
        jit.off(along) -- on Arm compiled code would round but once
        for _, step in ipairs { 0.37, -0.37, 2 ^ 43 + 0.5, -2 ^ 44, 2 ^ 56, -2 ^ 70, 1e-9 } do
            for dtype, most in pairs { int64 = 2 ^ 63, int32 = 2 ^ 31 - 1 } do
                local x = te.zeros({ 701 }, { dtype = dtype })
                local found = float64_of(x:sequence_(-100.75, step))
                for i, v in ipairs(found) do
                    local exact = along(step, i)
                    local whole = exact < 0 and math.ceil(exact) or math.floor(exact)
                    local least = dtype == "int64" and -2 ^ 63 or -2 ^ 31
                    assert.equal(math.max(math.min(whole, most), least) + 0, v + 0)
                end
            end
        end
    end)

    it("give exact results beside numbers", function()
        local n = 2 ^ 40 + 1
        for _, case in ipairs {
            { te.where(yes, n, 0), n, 0 }, { yes + (n - 1), n, n - 1 }, { yes * n, n, 0 },
            { te.maximum(yes, n), n, n }, { te.addcmul(yes, yes, n), n + 1, 0 }, { te.lerp(yes, n, 1), n, n },
            { of({ 1, 2 }, "uint8") + of(2 ^ 24, "int32"):expand { 2 }, 2 ^ 24 + 1, 2 ^ 24 + 2 },
        } do
            assert.same({ case[2], case[3] }, float64_of(case[1]))
        end
        for _, dtype in ipairs { "uint8", "bool", "int32" } do
            assert.same({ false }, te.eq(of({ 1 }, dtype), 1.00000001):totable(), dtype)
            assert.same({ true }, te.lt(of({ 1 }, dtype), 1.00000001):totable(), dtype)
        end
        assert.same({ true }, te.eq(te.tensor { 0.1 }, 0.1):totable()) -- a number beside float32 is one
    end)

    it("become floating point beside it, also where that has no dimensions", function()
        for _, scalar in ipairs { "float32", "float64", "bfloat16" } do
            for _, dtype in ipairs { "int64", "int32", "uint8", "bool" } do
                local y = of({ 1, 1 }, dtype) * of(0.5, scalar)
                assert.equal(scalar, y.dtype)
                assert.same({ 0.5, 0.5 }, y:totable())
            end
        end
        assert.same({ 2.5, 3 }, te.maximum(of({ 1, 3 }, "int64"), te.tensor(2.5)):totable())
        assert.equal("float32", (te.ones { 2 } * of(0.5, "float64")).dtype)
        assert.equal("int32", (of({ 1, 2 }, "int32") * of(3, "int64")).dtype)
        assert.same({ 3, 0 }, float64_of(yes * of(3, "int64")))
        assert.same({ 0.5, 2 }, te.where(yes, te.tensor(0.5), te.tensor(2)):totable())
        local scale = te.tensor(0.5, { requires_grad = true })
        te.sum(of({ 1, 2 }, "int64") * scale):backward()
        assert.equal(3, scale.grad:item())
    end)

    it("become floating point where a number among the options has a fraction", function()
        local x = of({ 1, 5 }, "int32")
        local function is(dtype, values, y)
            assert.equal(dtype, y.dtype)
            assert.same(values, y:to("float64"):totable())
        end
        is("float32", { 1, 3.5 }, te.clamp(x, 0, 3.5))
        is("int32", { 1, 3 }, te.clamp(x, 0, 3))
        is("int32", { 2, 5 }, te.clamp(x, 2))
        is("float32", { 1.5, 17.5 }, te.addcmul(x, x, x, { value = 0.5 }))
        is("int32", { 3, 55 }, te.addcmul(x, x, x, { value = 2 }))
        is("float32", { 1.5, 7.5 }, te.addcdiv(x, x, of({ 2, 2 }, "int32")))
        is("float32", { 0.5, 5 }, te.masked_fill(x, yes, 0.5))
        is("int32", { 7, 5 }, te.masked_fill(x, yes, 7))
        is("bool", { 1, 1 }, te.clamp(yes, 2))
        is("float32", { 0.5, 0 }, te.clamp(yes, 0, 0.5))
        is("int32", { 0, 0 }, te.remainder(x, 0))
    end)

    it("keep their dtype whatever says which of them are filled", function()
        local ids = te.tensor({ 5, 6, 7 }, { dtype = "int64" })
        assert.same({ 0, 6, 0 }, ids:masked_fill_(te.tensor { 1, 0, 1 }, 0):totable())
        assert.equal("bfloat16", te.ones({ 2 }, { dtype = "bfloat16" }):masked_fill(te.tensor { 1, 0 }, 0).dtype)
        assert.same({ -math.huge, 6 }, ids:narrow(1, 1, 2):masked_fill(te.tensor { true, false }, -math.huge):totable())
        assert.equal("int64", te.clamp(ids, nil, 6).dtype)
    end)

    it("give float32 in a product, its bias included", function()
        local x, w = { { 1, 1 }, { 2, -1 } }, { { 1, 2 }, { 3, 4 } }
        for _, dtype in ipairs { "int64", "int32" } do
            for _, bias in ipairs { of({ 5, 6 }, "int64"), of({ 5, 6 }, "int32"), of({ 5, 6 }, "uint8"),
                of({ 5, 6 }, "bfloat16") } do
                for _, operands in ipairs { { of(x, dtype), of(w, dtype) }, { te.tensor(x), te.tensor(w) } } do
                    local y = te.linear(operands[1], operands[2], bias)
                    assert.equal("float32", y.dtype)
                    assert.same({ { 8, 13 }, { 5, 8 } }, y:totable())
                end
            end
        end
        assert.same({ { 4, 7 } }, te.linear(te.ones { 1, 2 }, te.tensor(w), yes):totable())
        local wide = of({ 2 ^ 40 + 1 }, "int64")
        local zero = te.zeros({ 1, 1 }, { dtype = "float64" })
        assert.equal(2 ^ 40 + 1, te.linear(zero, zero, wide):item())
        local weight = te.tensor(w, { requires_grad = true })
        te.autocast({ dtype = "bfloat16" }, function()
            local y = te.linear(te.ones { 1, 2 }, weight, of({ 5, 6 }, "int64"))
            assert.equal("bfloat16", y.dtype)
            y:sum():backward()
        end)
        assert.same({ { 1, 1 }, { 1, 1 } }, weight.grad:totable())
    end)

    it("take no floating point in place, but where it is converted", function()
        local x = of({ 1, 5 }, "int32")
        for _, write in ipairs {
            function() x:add_(0.5) end, function() x:mul_(te.tensor(0.5)) end, function() x:add_(te.ones { 2 }) end,
            function() x:div_(2) end, function() x:clamp_(0, 3.5) end, function() x:masked_fill_(yes, 0.5) end,
            function() x:addcmul_(x, x, { value = 0.5 }) end,
        } do
            assert.error_matches(write, "_: the result is float32, which does not fit in place into int32", 1, true)
        end
        assert.same({ 1, 5 }, float64_of(x))
        assert.same({ 2, 6 }, float64_of(x:add_(1)))
        assert.same({ 1, 2 }, float64_of(x:copy_(te.tensor { 1.5, 2.75 })))
        assert.same({ 3, 3 }, float64_of(x:fill_(3.75)))
    end)

    it("are moved with all bits of an int64", function()
        local path = os.tmpname()
        local file = assert(io.open(path, "wb"))
        for i = 1, 4 do file:write(string.char(i, 2, 3, 4, 5, 6, 7, 16 * i)) end -- far beyond 2^53
        file:close()
        local x = te.from_file(path, "int64", { map = false })
        os.remove(path)
        local function same(a, b)
            assert.same({ true, true, true, true }, te.eq(a, b):totable()) -- to 2^53
            local kept = os.tmpname()
            local function bytes(t)
                te.save(kept, { t = t })
                local saved = assert(io.open(kept, "rb"))
                local text = saved:read "*a"
                saved:close()
                return text:sub(-32)
            end
            local one, other = bytes(a), bytes(b)
            os.remove(kept)
            assert.is_true(one == other)
        end
        same(x, x:clone())
        same(x, te.zeros({ 4 }, { dtype = "int64" }):copy_(x))
        local across = te.zeros({ 4, 2 }, { dtype = "int64" })
        across:select(2, 1):copy_(x)
        same(x, across:select(2, 1):contiguous())
        local rows = te.zeros({ 2, 4 }, { dtype = "int64" })
        rows[2] = x
        same(x, rows[2]:clone())
        same(x, x:unsqueeze(1):expand(3, 4):contiguous()[3]:clone())
    end)

    it("round once to what holds fewer digits", function()
        local n = 2 ^ 40 + 2 ^ 32 + 1 -- just above the middle of two bfloat16s
        for _, dtype in ipairs { "int64", "float64" } do
            assert.equal(2 ^ 40 + 2 ^ 33, of({ n }, dtype):to("bfloat16"):item(), dtype)
        end
        local value, zero = 1 + 2 ^ -8 + 2 ^ -40, te.zeros({ 1 }, { dtype = "bfloat16" })
        for _, x in ipairs { te.full({ 1 }, value, { dtype = "bfloat16" }), te.fill(zero, value), zero:fill_(value) } do
            assert.equal(1 + 2 ^ -7, x:item())
        end
    end)
end)
