--- Elements put elsewhere, against loops over numbers; and tensors made like others.

local te = require "te"
local reference = require "spec.support.reference"

local close = reference.assert_close
local INF, NAN = math.huge, 0 / 0

local function ids(values, dtype) return te.tensor(values, { dtype = dtype or "int64" }) end

-- Positions of numbers in order, by insertion; NaN is the largest.
local function order_of(list, descending)
    local function before(a, b)
        if descending then a, b = b, a end
        return a < b or (b ~= b and a == a)
    end
    local order = {}
    for i = 1, #list do
        local k = #order
        while k > 0 and before(list[i], list[order[k] + 1]) do order[k + 1], k = order[k], k - 1 end
        order[k + 1] = i - 1
    end
    return order
end

describe("te.sort", function()
    it("is stable, with NaN as the largest, in every dtype and along every dimension", function()
        local special = { NAN, INF, -INF, 0, -0.0, 2, NAN, 0, 2, -3 }
        for _, n in ipairs { 1, 2, 10, 48, 49, 300 } do
            local list = {}
            for i = 1, n do list[i] = i <= #special and special[i] or (i * 37) % 101 - 50 end
            for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8" } do
                local x = te.tensor(list, { dtype = dtype })
                local held = x:to("float64"):totable()
                for _, descending in ipairs { false, true } do
                    local order, sorted = order_of(held, descending), {}
                    for i, at in ipairs(order) do sorted[i] = held[at + 1] end
                    local values, indices = te.sort(x, 1, descending)
                    assert.same(order, indices:totable(), dtype .. " " .. n)
                    close(sorted, values:to "float64")
                    assert.same({ dtype, "int64" }, { values.dtype, indices.dtype })
                    local columns = te.argsort(te.stack({ x, x }, 2), 1, { descending = descending })
                    assert.same(order, columns:select(2, 2):totable())
                end
            end
        end
        assert.same({ 0, 2, 1 }, te.argsort(te.tensor { false, true, false }):totable())
        assert.error_matches(function() te.sort(te.ones { 2 }, 2) end,
            "te.sort: dimension 2 is not in a tensor with 1 dimensions", 1, true)
    end)

    it("orders long rows of long keys that are spread out, partly the same, or seem spread out", function()
        local n, wide = 9000, 2 ^ 47
        local function number(i) return i * 7919 % 20011 * 2 ^ 32 + i * 104729 % 65536 end
        local kinds = {
            spread = number,
            half = function(i) return i % 2 == 0 and number(i) or 5 end,
            -- where every sample is taken from they differ, elsewhere in their lower bits alone, and descend
            seeming = function(i) return (i - 1) % 94 == 0 and number(i) or wide - i end,
            twice = function(i) return number(i % 4500) end,
        }
        for name, kind in pairs(kinds) do
            local list = {}
            for i = 1, n do list[i] = kind(i) end
            for _, descending in ipairs { false, true } do
                local got = te.argsort(te.tensor(list, { dtype = "int64" }), 1, { descending = descending }):totable()
                assert.same(order_of(list, descending), got, name)
            end
        end
    end)

    it("orders long rows of large and close numbers", function()
        te.manual_seed(5)
        for _, x in ipairs { te.randn { 20000 }, te.randn { 20000 }:to "float64" * 1e-300,
            te.randint(-2 ^ 52, 2 ^ 52, { 20000 }), te.randint(0, 3, { 20000 }) } do
            for _, descending in ipairs { false, true } do
                local values, indices = te.sort(x, { descending = descending })
                assert.same(x:totable()[indices[1]:item() + 1], values[1]:item())
                local list, at = values:totable(), indices:totable()
                for i = 2, #list do
                    local rises = list[i - 1] < list[i]
                    if rises == descending then assert.equal(list[i - 1], list[i]) end
                    if list[i - 1] == list[i] then assert.is_true(at[i - 1] < at[i]) end
                end
            end
        end
    end)

    it("hands gradients back to where values came from", function()
        local x = te.tensor({ 3, 1, 2 }, { requires_grad = true })
        local values = te.sort(x)
        values:backward(te.tensor { 10, 20, 30 })
        assert.same({ 30, 10, 20 }, x.grad:totable())
    end)
end)

describe("te.scatter_add and te.index_add", function()
    it("round a sum once, and so do the gradients of te.gather and te.index_select", function()
        local n = 1000
        local zeros = te.zeros({ n }, { dtype = "int64" })
        for dtype, most in pairs { bfloat16 = n, float16 = n, float8_e4m3 = 448 } do
            local ones, none = te.ones({ n }):to(dtype), te.zeros({ 1 }):to(dtype)
            local function is_most(x, limit) assert.equal(limit, x:to("float32"):flatten()[1]:item(), dtype) end
            is_most(te.scatter_add(none, 1, zeros, ones), most)
            is_most(te.index_add(none, 1, zeros, ones), most)
            is_most(none:clone():scatter_add_(1, zeros, ones), most)
            is_most(none:clone():index_add_(1, zeros, ones), most)
            for _, op in ipairs(most == n and { "gather", "index_select" } or {}) do
                local x = te.zeros({ 1 }):to(dtype)
                x.requires_grad = true
                te[op](x, 1, zeros):backward(ones)
                is_most(x.grad, n)
                te[op](x, 1, zeros):backward(ones)
                is_most(x.grad, 2 * n)
            end
        end
    end)

    it("limit whole numbers to what their dtype holds", function()
        local function sum(dtype, first, ...)
            local x, src = te.tensor({ first }, { dtype = dtype }), te.tensor({ ... }, { dtype = dtype })
            return te.index_add(x, 1, ids { 0, 0 }, src):item()
        end
        assert.equal(255, sum("uint8", 200, 100, 3))
        assert.equal(2 ^ 31 - 1, sum("int32", 2 ^ 31 - 2, 5, 5))
        assert.equal(-2 ^ 31 + 1, sum("int32", -2 ^ 31 + 2, -5, 4))
        assert.equal(2 ^ 53, sum("int64", 2 ^ 53 - 2, 1, 1))
    end)

    it("add in the order of src, where the index says", function()
        local x = te.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
        local index, src = ids { { 0, 2, 0 }, { 1, 1, 1 } }, te.tensor { { 1, 10, 100 }, { 1, 10, 100 } }
        close({ { 102, 2, 13 }, { 4, 116, 6 } }, te.scatter_add(x, 2, index, src))
        close({ { 2, 2, 103 }, { 5, 25, 106 } }, te.scatter_add(x, 1, ids { { 0, 1, 0 }, { 1, 1, 1 } }, src))
        close({ { 2, 2, 3 }, { 4, 5, 6 } }, te.scatter_add(x, 1, ids({ { 0 } }, "int32"), src)) -- a part of src
        close({ { 1, 2, 3 }, { 6, 25, 206 } }, te.index_add(x, 1, ids { 1, 1 }, src))
        close({ { 1, 2, 103 }, { 4, 5, 106 } }, te.index_add(x, -1, ids { 2 }, src:narrow(2, 3, 1)))
        close({ { 1, 2, 3 }, { 4, 5, 6 } }, x)
        assert.error_matches(function() x:index_add_(1, ids { 0 }, te.ones({ 1, 3 }, { dtype = "bfloat16" })) end,
            "te.index_add_: x is float32, src bfloat16: both must have one dtype")
        local big = te.tensor { 2 ^ 24 } -- 1 is lost beside it, one by one
        assert.equal(2 ^ 24, te.index_add(big, 1, ids { 0, 0 }, te.ones { 2 }):item())
    end)

    it("work in place", function()
        local x = te.zeros({ 3 }, { dtype = "int64" })
        assert.is_true(x:index_add_(1, ids { 2, 2, 0 }, ids { 1, 2, 3 }) == x)
        assert.same({ 3, 0, 3 }, x:totable())
        x:scatter_add_(1, ids { 2, 2, 1 }, x)
        assert.same({ 3, 3, 6 }, x:totable())
        local leaf = te.zeros({ 3 }, { requires_grad = true })
        assert.error_matches(function() leaf:index_add_(1, ids { 0 }, te.ones { 1 }) end, "te.index_add_: x takes part",
            1, true)
        local y = leaf * 2
        local kept = te.exp(y)
        te.no_grad(function() y:detach():index_add_(1, ids { 0 }, te.ones { 1 }) end)
        assert.error_matches(function() kept:sum():backward() end, "changed in place since", 1, true)
    end)

    it("give src the gradient of its places, and none to what was left out", function()
        local x, src = te.zeros({ 2, 2 }, { requires_grad = true }), te.ones({ 3, 2 }, { requires_grad = true })
        te.scatter_add(x, 1, ids { { 1, 0 } }, src):backward(te.tensor { { 1, 2 }, { 3, 4 } })
        assert.same({ { 1, 2 }, { 3, 4 } }, x.grad:totable())
        assert.same({ { 3, 2 }, { 0, 0 }, { 0, 0 } }, src.grad:totable())
    end)

    it("refuse what does not fit", function()
        for message, fn in pairs {
            ["te.scatter_add: index must be int64 or int32, not float32"] = function()
                te.scatter_add(te.ones { 2 }, 1, te.ones { 2 }, te.ones { 2 })
            end,
            ["te.scatter_add: x is float32, src int64: both must have one dtype"] = function()
                te.scatter_add(te.ones { 2 }, 1, ids { 1 }, ids { 1 })
            end,
            ["te.scatter_add: index {3} does not fit src {2} and x {2}"] = function()
                te.scatter_add(te.ones { 2 }, 1, ids { 0, 1, 0 }, te.ones { 2 })
            end,
            ["te.index_add: index {2} and src {3} do not fit x {2}"] = function()
                te.index_add(te.ones { 2 }, 1, ids { 0, 1 }, te.ones { 3 })
            end,
            ["scatter_add: index 2 at position 2 is outside 0 to 1"] = function()
                te.index_add(te.ones { 2 }, 1, ids { 0, 2 }, te.ones { 2 }):totable()
            end,
        } do
            local ok, problem = pcall(fn)
            assert.is_false(ok)
            local text = message:gsub("^scatter_add: index 2 .*", "index 2")
            assert.is_truthy(problem:find(text, 1, true), problem)
        end
    end)
end)

describe("te.index_copy", function()
    it("puts slices in place of those at an index, of any dtype and layout", function()
        local dtypes = { "float32", "float64", "bfloat16", "float16", "float8_e5m2", "int64", "int32", "uint8" }
        for _, dtype in ipairs(dtypes) do
            local x = te.arange(1, 24):to(dtype):view { 2, 3, 4 }
            local src = te.arange(101, 116):to(dtype):view { 2, 2, 4 }
            local before, y = x:to("float64"):totable(), te.index_copy(x, 2, ids { 2, 0 }, src)
            local want, from = x:to("float64"):totable(), src:to("float64"):totable()
            for b = 1, 2 do want[b][3], want[b][1] = from[b][1], from[b][2] end
            assert.same(want, y:to("float64"):totable(), dtype)
            assert.same(before, x:to("float64"):totable())
            local turned = x:transpose(1, 3) -- {4, 3, 2}
            assert.is_true(turned:index_copy_(2, ids({ 1 }, "int32"), src:narrow(2, 2, 1):transpose(1, 3)) == turned)
            for b = 1, 2 do before[b][2] = from[b][2] end
            assert.same(before, x:to("float64"):totable(), dtype)
        end
        local flags = te.zeros({ 300, 2 }, { dtype = "bool" })
        flags:index_copy_(1, te.arange(0, 298, 2, { dtype = "int64" }), te.ones({ 150, 2 }, { dtype = "bool" }))
        assert.equal(300, te.sum(flags:to "int64"):item())
        local none = te.index_copy(te.ones { 2, 0 }, 1, ids { 1 }, te.ones { 1, 0 })
        assert.same({ 2, 0 }, none.shape)
        local nowhere = te.zeros({ 0 }, { dtype = "int64" })
        assert.same({ 1 }, te.index_copy(te.ones { 1 }, 1, nowhere, te.ones { 0 }):totable())
    end)

    it("reads a source and an index in its own memory before it writes", function()
        local x = te.arange(1, 4)
        x:index_copy_(1, ids { 1, 2 }, x:narrow(1, 1, 2))
        assert.same({ 1, 1, 2, 4 }, x:totable())
        local own = ids { 3, 2, 1, 0 }
        own:index_copy_(1, own, ids { 9, 8, 7, 6 })
        assert.same({ 6, 7, 8, 9 }, own:totable())
        local rows = ids { { 1, 0 }, { 5, 5 } }
        rows:index_copy_(1, rows:select(1, 1), ids { { 1, 1 }, { 0, 0 } })
        assert.same({ { 0, 0 }, { 1, 1 } }, rows:totable())
        own = ids { 1, 0, 2 }
        own:index_add_(1, own, ids { 5, 6, 7 })
        assert.same({ 7, 5, 9 }, own:totable())
    end)

    it("gives both their gradients", function()
        local x, src = te.zeros({ 3, 2 }, { requires_grad = true }), te.ones({ 1, 2 }, { requires_grad = true })
        te.index_copy(x, 1, ids { 1 }, src):backward(te.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } })
        assert.same({ { 1, 2 }, { 0, 0 }, { 5, 6 } }, x.grad:totable())
        assert.same({ { 3, 4 } }, src.grad:totable())
    end)

    it("refuses what does not fit", function()
        for message, fn in pairs {
            ["te.index_copy: index must be int64 or int32, not float32"] = function()
                te.index_copy(te.ones { 2 }, 1, te.ones { 1 }, te.ones { 1 })
            end,
            ["te.index_copy: x is float32, src int64: both must have one dtype"] = function()
                te.index_copy(te.ones { 2 }, 1, ids { 1 }, ids { 1 })
            end,
            ["te.index_copy: index {2} and src {3} do not fit x {2}"] = function()
                te.index_copy(te.ones { 2 }, 1, ids { 0, 1 }, te.ones { 3 })
            end,
            ["index 2 at position 2 is outside 0 to 1"] = function()
                te.index_copy(te.ones { 2 }, 1, ids { 0, 2 }, te.ones { 2 }):totable()
            end,
        } do
            assert.error_matches(fn, message, 1, true)
        end
    end)
end)

describe("te.nonzero and te.masked_select", function()
    it("find places and values", function()
        local x = te.tensor { { 0, 1.5, 0 }, { NAN, 0, -2 } }
        assert.same({ { 0, 1 }, { 1, 0 }, { 1, 2 } }, te.nonzero(x):totable())
        assert.same({ { 1 } }, te.nonzero(te.tensor { false, true }):totable())
        for shape, n in pairs { [{ 2, 0 }] = 0, [{ 2 }] = 0 } do
            assert.same({ n, #shape }, te.nonzero(te.zeros(shape)).shape)
        end
        assert.same({ 1, 0 }, te.nonzero(te.tensor(3)).shape)
        close({ 1.5, -2 }, te.masked_select(x, te.tensor { { false, true, false }, { false, false, true } }))
        close({ 0, 1.5, 0 }, te.masked_select(x, te.tensor { { true }, { false } }))
        close({ 1, 2, 1, 2 }, te.masked_select(te.tensor { 1, 2 }, te.tensor { { true, true }, { true, true } }))
        assert.same({ 0 }, te.masked_select(x, te.zeros({ 2, 3 }, { dtype = "bool" })).shape)
    end)

    it("hand gradients back, added up where values were repeated", function()
        local x = te.tensor({ 1, 2 }, { requires_grad = true })
        te.masked_select(x, te.tensor { { true, false }, { true, true } }):backward(te.tensor { 1, 10, 100 })
        assert.same({ 11, 100 }, x.grad:totable())
    end)

    it("refuse a mask that is none", function()
        assert.error_matches(function() te.masked_select(te.ones { 2 }, te.ones { 2 }) end,
            "te.masked_select: mask must be bool, not float32", 1, true)
        assert.error_matches(function() te.masked_select(te.ones { 2 }, te.tensor { true, true, true }) end,
            "te.masked_select: mask {3} does not fit x {2}", 1, true)
    end)
end)

describe("te.flip, te.roll and te.pad", function()
    local x = te.tensor { { 1, 2, 3 }, { 4, 5, 6 } }

    it("turn round", function()
        close({ { 4, 5, 6 }, { 1, 2, 3 } }, te.flip(x, 1))
        close({ { 6, 5, 4 }, { 3, 2, 1 } }, te.flip(x, { 1, -1 }))
        close({ { 3, 2, 1 }, { 6, 5, 4 } }, x:flip(2))
        assert.same({ 0, 2 }, te.flip(te.zeros { 0, 2 }, 1).shape)
        assert.error_matches(function() te.flip(x, { 1, -2 }) end, "te.flip: dimension 1 is named twice", 1, true)
        assert.error_matches(function() te.flip(x, 3) end, "te.flip: dimension 3 is not in", 1, true)
    end)

    it("shift round", function()
        close({ { 3, 1, 2 }, { 6, 4, 5 } }, te.roll(x, 1, 2))
        close({ { 2, 3, 1 }, { 5, 6, 4 } }, te.roll(x, -4, 2))
        close({ { 5, 6, 4 }, { 2, 3, 1 } }, te.roll(x, { 1, -1 }, { 1, 2 }))
        close({ { 5, 6, 1 }, { 2, 3, 4 } }, te.roll(x, 2))
        close({ { 1, 2, 3 }, { 4, 5, 6 } }, te.roll(x, 3, 2))
        assert.is_true(te.roll(x, 0):storage_id() ~= x:storage_id())
        assert.error_matches(function() te.roll(x, { 1, 2 }) end,
            "te.roll: 2 shifts for 1 dimensions: without dims for the flattened tensor", 1, true)
    end)

    it("add a border and take it away", function()
        close({ { 0, 1, 2, 3, 0, 0 }, { 0, 4, 5, 6, 0, 0 } }, te.pad(x, { 1, 2 }))
        close({ { 9, 9 }, { 2, 3 }, { 5, 6 }, { 9, 9 } }, te.pad(x, { -1, 0, 1, 1 }, 9))
        close({ { 5 } }, te.pad(x, { -1, -1, -1, 0 }))
        assert.same({ 2, 0 }, te.pad(x, { -1, -2 }).shape)
        assert.same({ { true, false } }, te.pad(te.tensor { { true } }, { 0, 1 }):totable())
        assert.equal("int64", te.pad(ids { 1 }, { 1, 1 }, { value = 7 }).dtype)
        assert.same({ 7, 1 }, te.pad(ids { 1 }, { 1, 0 }, 7.5):totable()) -- a fraction is cut off
        assert.error_matches(function() te.pad(x, { 1 }) end, "te.pad: pad has 1 entries, but needs two", 1, true)
        assert.error_matches(function() te.pad(x, { -3, -1 }) end,
            "te.pad: -3 before and -1 behind 3 positions of dimension 2", 1, true)
    end)
end)

describe("tensors like others", function()
    local x = te.ones({ 2, 3 }, { dtype = "bfloat16" })

    it("have their shape, dtype and device", function()
        for name, value in pairs { zeros_like = 0, ones_like = 1, full_like = 7 } do
            local y = name == "full_like" and te.full_like(x, 7) or te[name](x)
            assert.same({ x.shape, x.dtype, x.device }, { y.shape, y.dtype, y.device })
            assert.same({ value, value, value }, y:totable()[1])
        end
        for _, name in ipairs { "empty_like", "rand_like", "randn_like" } do
            local y = te[name](x, { dtype = "float64", requires_grad = true })
            assert.same({ { 2, 3 }, "float64", true }, { y.shape, y.dtype, y.requires_grad })
        end
        te.manual_seed(3)
        local expected = te.rand({ 2, 3 }):totable()
        te.manual_seed(3)
        assert.same(expected, te.rand_like(te.ones { 2, 3 }):totable())
        assert.error_matches(function() te.zeros_like(x, { dtyp = "int64" }) end, "te.zeros_like: unknown option", 1,
            true)
        assert.error_matches(function() te.full_like(x) end, "te.full_like: value: expected a number", 1, true)
        assert.error_matches(function() te.rand_like(ids { 1 }) end, "te.rand_like: dtype: int64 holds no such", 1,
            true)
    end)

    it("te.randperm gives every position once, in another order each time", function()
        te.manual_seed(3)
        for _, n in ipairs { 0, 1, 2, 1000 } do
            local list = te.randperm(n):totable()
            table.sort(list)
            for i = 1, n do assert.equal(i - 1, list[i]) end
        end
        local a, b = te.randperm(100), te.randperm(100, { dtype = "int32" })
        assert.equal("int32", b.dtype)
        assert.is_false(te.eq(a, b):all():item())
        te.manual_seed(3)
        local first = te.randperm(100):totable()
        te.manual_seed(3)
        assert.same(first, te.randperm(100):totable())
        local counts = te.zeros { 3, 3 } -- where each of three lands
        for _ = 1, 600 do counts:scatter_add_(2, te.randperm(3):unsqueeze(2), te.ones { 3, 1 }) end
        assert.is_true(counts:min():item() > 140 and counts:max():item() < 260)
        assert.error_matches(function() return (te.randperm(-1)) end, "te.randperm: n: -1 is no size", 1, true)
        for dtype, n in pairs { uint8 = 256, bool = 2, float16 = 2049, bfloat16 = 257, float8_e4m3 = 17,
            float8_e5m2 = 9 } do
            local list, sum = te.randperm(n, { dtype = dtype }):to("float64"):totable(), 0
            table.sort(list)
            for i = 1, n do sum = sum + math.abs(list[i] - (i - 1)) end
            assert.equal(0, sum, dtype)
            assert.error_matches(function() return (te.randperm(n + 1, { dtype = dtype })) end, ("te.randperm: n: %d "
                .. "in %s, which has all whole numbers up to %d"):format(n + 1, dtype, n - 1), 1, true)
        end
    end)
end)

describe("on a device that records graphs", function()
    local devices, reason = te.devices()
    if not devices[2] then
        pending(reason)
        return
    end

    local function graph(fn, x) return te.graph(fn, { x:to "cuda" }, { device = "cuda", warmup = 1 }) end

    it("arrangements whose sizes are known are part of a graph", function()
        local function arranged(x)
            local values, indices = te.sort(x)
            return te.roll(te.flip(te.pad(values, { 1, 0 }), 1), 2, 1), indices,
                te.index_add(x, 2, indices:select(1, 1), x * x)
        end
        local run = graph(arranged, te.rand { 3, 4 })
        for _ = 1, 3 do
            local x = te.rand({ 3, 3 }, { device = "cpu" })
            local given = te.cat({ x, te.full({ 3, 1 }, 0, { device = "cpu" }) }, 2) -- the smallest is the last one
            local found, expected = { run(given) }, { arranged(given) }
            for i = 1, 3 do assert.same(expected[i]:totable(), found[i]:totable()) end
        end
        local long = graph(function(x) return te.argsort(x, { descending = true }) end, te.rand { 5000 })
        for _ = 1, 3 do
            local x = te.floor(te.rand({ 5000 }, { device = "cpu" }) * 100)
            assert.same(te.argsort(x, { descending = true }):totable(), long(x:to "cuda"):totable())
        end
        local drawn = graph(function(x) return te.randperm(50), x end, te.ones { 1 })
        local seen = {}
        for i = 1, 4 do
            local list = drawn(te.ones { 1 }):totable()
            seen[i] = table.concat(list, " ")
            table.sort(list)
            for k = 1, 50 do assert.equal(k - 1, list[k]) end
        end
        assert.is_true(seen[3] ~= seen[4] and seen[2] ~= seen[3])
    end)

    it("what the host reads says so", function()
        for name, fn in pairs {
            ["te.nonzero: the mask is read by the host: .*a copy to the host cannot be part of a graph"] = te.nonzero,
            ["te.masked_select: the mask is read by the host"] = function(x)
                return te.masked_select(x, te.gt(x, 0))
            end,
        } do
            local run = graph(fn, te.ones { 2 })
            run(te.ones { 2 })
            assert.error_matches(function() run(te.ones { 2 }) end, name)
            te.synchronize "cuda"
        end
    end)
end)
