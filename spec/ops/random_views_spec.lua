--- Operations on random views of random tensors, small and large, give what they give in float64 on a contiguous copy
--- whose last dimension is the one that they go along; so do their gradients, and two threads give the bits of one.

local bits = require "spec.support.bits"
local te = require "te"

local CASES = te.get_default_device() == "cpu" and 1000 or 60
local SIZES = { 1, 2, 3, 8, 16, 17, 31, 33, 64, 130, 300 }
local LARGEST = 60000
local TOLERANCE = { float32 = 2e-4, float64 = 1e-9, bfloat16 = 4e-2, float16 = 8e-3 }

-- Each takes x {…, n}, its last dimension `dim`, and a table of vectors of n numbers.
local along = {
    sum = function(x, dim) return x:sum(dim, true) end,
    mean = function(x, dim) return x:mean(dim, true) end,
    max = function(x, dim) return x:max(dim, true) end,
    min = function(x, dim) return x:min(dim, true) end,
    var = function(x, dim) return te.var(x, dim, true, { correction = 0 }) end,
    logsumexp = function(x, dim) return te.logsumexp(x, dim, true) end,
    norm = function(x, dim) return te.norm(x + 5, dim, true) end,
    softmax = function(x, dim) return te.softmax(x, dim) end,
    log_softmax = function(x, dim) return te.log_softmax(x, dim) end,
    cumsum = function(x, dim) return te.cumsum(x * 0.1, dim) end,
    sort = function(x, dim) return (te.sort(x, dim)) end,
    flip = function(x, dim) return te.flip(x, { dim }) end,
    roll = function(x, dim) return te.roll(x, { 3 }, { dim }) end,
    topk = function(x, dim) return (te.topk(x, math.ceil(x:size(dim) / 3), dim)) end,
    cat = function(x, dim) return te.cat({ x, x:narrow(dim, 1, 1), x }, dim) end,
    index_select = function(x, dim, v) return te.index_select(x, dim, v.index) end,
    index_add = function(x, dim, v) return te.index_add(x, dim, v.index, x) end,
    gather = function(x, dim) return te.gather(x, dim, te.argmax(x, dim, true)) end,
    scatter_add = function(x, dim) return te.scatter_add(x, dim, te.argmax(x, dim, true), x:narrow(dim, 1, 1)) end,
}
local norms = {
    layer_norm = function(x, v) return te.layer_norm(x, v.weight, v.bias) end,
    rms_norm = function(x, v) return te.rms_norm(x, v.weight) end,
    l2_normalize = function(x) return te.l2_normalize(x) end,
    linear = function(x, v) return te.linear(x, v.matrix, v.three) end,
    vector = function(x, v) return te.matmul(x, v.weight):unsqueeze(-1) end,
}
local each = {
    gelu = function(x) return te.gelu(x) end,
    exp = function(x) return te.exp(x) end,
    silu = function(x) return te.silu(x) end,
    row = function(x, v) return x * v.weight + v.bias end,
    column = function(x) return x - x:narrow(-1, 1, 1) end,
    where = function(x) return te.where(x:gt(0), x, x * 0.5) end,
    clamp = function(x) return x:clamp(-1, 1) end,
    tril = function(x) return x:dim() > 1 and te.tril(x, 1) or x end,
}
local whole = {
    sum = along.sum, max = along.max, min = along.min, sort = along.sort, flip = along.flip, gather = along.gather,
    cat = along.cat, index_select = along.index_select, index_add = along.index_add, topk = along.topk,
    scatter_add = along.scatter_add,
    cumsum = function(x, dim) return te.cumsum(x, dim) end,
    negative = function(x) return -x end,
    magnitude = function(x) return x:abs() end,
    limited = function(x) return x:clamp(-100, 7) end,
    less = function(x, dim) return te.minimum(x, x:narrow(dim, 1, 1)) end,
    steps = function(x) return x * 3 - 5 end,
}

local function names_of(ops)
    local names = {}
    for name in pairs(ops) do names[#names + 1] = name end
    table.sort(names)
    return names
end

local random = math.random -- seeded below

local function one_of(list) return list[random(#list)] end

local function random_shape()
    local shape, numel = {}, 1
    for d = 1, random(4) do
        local n = one_of(SIZES)
        if numel * n > LARGEST then break end
        shape[d], numel = n, numel * n
    end
    return #shape > 0 and shape or { 7 }
end

-- A function that makes the same view of every tensor of the shape.
local function random_view(shape)
    local order, cut_dim, cut = {}, random(#shape), random(3)
    for d = 1, #shape do table.insert(order, random(#order + 1), d) end
    return function(x)
        x = x:permute(order)
        local n = x:size(cut_dim)
        if cut == 1 and n > 2 then x = x:narrow(cut_dim, 2, n - 2) end
        if cut == 2 and n % 2 == 0 then
            local halves = x.shape
            halves[cut_dim] = n / 2
            table.insert(halves, cut_dim + 1, 2)
            x = x:view(halves):select(cut_dim + 1, 1)
        end
        return x
    end
end

local function vectors_for(n, dtype)
    return {
        weight = te.randn { n }:to(dtype), bias = te.randn { n }:to(dtype), matrix = te.randn { 3, n }:to(dtype),
        three = te.randn { 3 }:to(dtype), index = te.randint(0, n - 1, { n }),
    }
end

local function in_float64(vectors)
    local wide = {}
    for name, v in pairs(vectors) do wide[name] = name == "index" and v or v:to("float64") end
    return wide
end

local function assert_near(expected, value, tolerance, what)
    assert.same(expected.shape, value.shape, what)
    local off = (value:to("float64") - expected):abs():max():item()
    local scale = 1 + expected:abs():max():item()
    assert.is_true(off <= tolerance * scale, ("%s: off by %g of %g"):format(what, off, scale))
end

-- The operation on x, and its gradient where dy is given.
local function both(run, x, dy)
    x = x:detach()
    if not dy then return run(x) end
    x.requires_grad = true
    local y = run(x)
    y:backward(dy(y))
    return y:detach(), x.grad
end

local function check(name, run, base, view, dim, vectors, tolerance)
    local what = ("%s over %d of a view of %s %s"):format(name, dim, base.dtype, table.concat(base.shape, "x"))
    local integer = tolerance == 0
    local y, grad, dy
    local function weights(of)
        dy = dy or te.randn(of.shape):to(of.dtype)
        return dy
    end
    for threads = 1, 2 do
        te.set_num_threads(threads)
        local z, dz = both(function(x) return run(view(x), dim, vectors) end, base, not integer and weights)
        if y then
            assert.is_true(bits.equal(y, z) and (integer or bits.equal(grad, dz)), what .. ": bits of two threads")
        end
        y, grad = z, dz
    end
    local wide = in_float64(vectors)
    local x = view(base:to("float64")):transpose(dim, -1):contiguous()
    local expected, dx = both(function(v) return run(v, v:dim(), wide) end, x,
        not integer and function() return dy:to("float64"):transpose(dim, -1):contiguous() end)
    assert_near(expected:transpose(dim, -1), y, tolerance, what)
    if integer then return end
    assert_near(dx:transpose(dim, -1), view(grad), tolerance, what .. ", gradient")
end

describe("operations on views", function()
    local threads = te.get_num_threads()
    before_each(function()
        te.manual_seed(61)
        math.randomseed(61)
    end)
    after_each(function() te.set_num_threads(threads) end)

    local function run_cases(dtypes, tolerance_of, values)
        for case = 1, CASES do
            local dtype, shape = dtypes[case % #dtypes + 1], random_shape()
            local base, view = values(shape, dtype), random_view(shape)
            local x = view(base)
            local dim = random(x:dim())
            local kinds = tolerance_of[dtype] == 0 and { whole } or { along, along, norms, each }
            local ops = one_of(kinds)
            if ops == norms or ops == each then dim = x:dim() end
            local name = one_of(names_of(ops))
            local op = ops[name]
            local run = (ops == norms or ops == each) and function(v, _, vectors) return op(v, vectors) end or op
            check(name, run, base, view, dim, vectors_for(x:size(dim), dtype), tolerance_of[dtype])
        end
    end

    it("of floating point numbers have the values and gradients of contiguous float64", function()
        run_cases({ "float32", "float64", "bfloat16", "float32", "float16" }, TOLERANCE, function(shape, dtype)
            return te.randn(shape):to(dtype)
        end)
    end)

    it("of whole numbers are exact", function()
        run_cases({ "int64", "int32" }, { int64 = 0, int32 = 0 }, function(shape, dtype)
            local most = one_of { 3, 100, 5000, 2 ^ 20, 2 ^ 23, 2 ^ 25 }
            return te.randint(-most, most, shape):to(dtype)
        end)
    end)
end)
