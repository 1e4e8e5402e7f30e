--- Copies larger than the caches, which are written past them, against copies of a few rows, which are not. Transposes
--- of squares and of what they leave over. And sums of columns in chains of every length, against sums of whole
--- numbers that float32 holds.

local te = require "te"

local function difference(a, b) return te.sum((a:to("float32") - b:to("float32")):abs()):item() end

describe("a copy larger than the caches", function()
    local cases = {
        { "bfloat16", "float32", { 2900, 2909 } }, { "bfloat16", "float32", { 2880, 2944 } },
        { "float32", "bfloat16", { 4096, 4160 } }, { "float32", "bfloat16", { 4100, 4111 } },
        { "float32", "float32", { 2880, 2944 } },
        { "float32", "float32", { 2901, 2944 } }, { "float32", "float32", { 2928, 2900 } },
        { "bfloat16", "bfloat16", { 4128, 4160 } }, { "bfloat16", "bfloat16", { 4160, 4111 } },
    }
    for _, case in ipairs(cases) do
        local from, to, shape = unpack(case)
        it(("holds the same, %s to %s, %d x %d"):format(from, to, shape[1], shape[2]), function()
            local x = te.randint(-100, 100, shape, { dtype = "int32" }):to(from)
            local same, turned = x:clone():to(to), x:transpose(1, 2):to(to):contiguous()
            for first = 1, shape[1], 509 do
                local n = math.min(7, shape[1] - first + 1)
                local rows = x:narrow(1, first, n):clone():to(to)
                assert.equal(0, difference(same:narrow(1, first, n), rows))
                assert.equal(0, difference(turned:narrow(2, first, n):transpose(1, 2):contiguous(), rows))
            end
        end)
    end
end)

describe("zeros over more memory than one thread is given", function()
    for _, dtype in ipairs { "float32", "bfloat16", "uint8", "int64" } do
        it("are all there, and nothing beside them, " .. dtype, function()
            local threads = te.get_num_threads()
            finally(function() te.set_num_threads(threads) end)
            for _, count in ipairs { 1, 3, 16 } do
                te.set_num_threads(count)
                local x = te.ones({ 3000001 }, { dtype = dtype })
                x:narrow(1, 7, 2999990):zero_()
                assert.equal(11, te.sum(x:to("float32")):item())
                assert.equal(6, te.sum(x:narrow(1, 1, 6):to("float32")):item())
            end
        end)
    end
end)

describe("a transpose within the caches", function()
    for _, dtype in ipairs { "bfloat16", "float32", "int32", "float64", "bool" } do
        for _, shape in ipairs { { 64, 64 }, { 96, 32 }, { 33, 64 }, { 64, 47 }, { 608, 48 },
            { 31, 15 }, { 3, 40, 64 } } do
            it(("holds the same, %s, %s"):format(dtype, table.concat(shape, " x ")), function()
                local whole = te.randint(0, dtype == "bool" and 1 or 250, shape, { dtype = "int32" })
                local x, d = whole:to(dtype), #shape
                local turned = x:transpose(d - 1, d):contiguous()
                assert.is_true(turned:is_contiguous())
                for at = 1, shape[d], 5 do
                    assert.equal(0, difference(turned:select(d - 1, at), whole:select(d, at)))
                end
            end)
        end
    end
end)

describe("sums of columns", function()
    for _, dtype in ipairs { "float32", "bfloat16" } do
        for _, width in ipairs { 40, 128, 130, 200, 384, 777, 3072, 4096, 4100, 9001 } do
            it(("are exact, %s, %d columns"):format(dtype, width), function()
                local numbers = te.randint(-8, 8, { 37, width }, { dtype = "int32" })
                local x, whole = numbers:to(dtype), numbers:to("float64")
                assert.equal(0, difference(te.sum(x:to("float32"), 1), te.sum(whole, 1)))
                local leaf = te.zeros({ width }, { dtype = "float32", requires_grad = true })
                te.sum((x:to("float32") * x:to("float32")) * leaf):backward()
                assert.equal(0, difference(leaf.grad, te.sum(whole * whole, 1)))
                local bias = te.zeros({ width }, { dtype = dtype, requires_grad = true })
                te.sum((x + bias) * x):backward()
                assert.equal(0, difference(bias.grad, te.sum(whole, 1):to(dtype)))
            end)
        end
    end
end)
