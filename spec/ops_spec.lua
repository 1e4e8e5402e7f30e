--- Every operation of the engine, by its declaration: documentation, gradients, strided inputs, empty tensors, wrong
--- arguments; then particular ones against plain Lua.

local te = require "te"
local support = require "spec.support.op_cases"
local reference = require "spec.support.reference"

local close = reference.assert_close
local random_results = { dropout = true, stochastic_depth = true, uniform = true, normal = true, integers = true,
    bernoulli = true, multinomial = true }

local function call(op, args) return te[op.name](unpack(args, 1, support.count(args))) end

-- The tensors among arguments, replaced by fn(tensor, position).
local function replace(args, fn)
    local result = {}
    for i = 1, support.count(args) do
        local value = args[i]
        if te.is_tensor(value) then
            value = fn(value, i)
        elseif type(value) == "table" and te.is_tensor(value[1]) then
            local list = {}
            for k, t in ipairs(value) do list[k] = fn(t, i) end
            value = list
        end
        result[i] = value
    end
    return result
end

local function is_float(t) return t.dtype:find("^float") ~= nil or t.dtype == "bfloat16" end

-- The same values in memory that is not contiguous.
local function strided(t)
    if t:dim() == 0 then return t end
    local shape = t.shape
    shape[#shape] = 2 * shape[#shape]
    local wide = te.zeros(shape, { dtype = t.dtype })
    local part = wide:narrow(-1, 1, t:size(-1))
    part:copy_(t)
    return part
end

-- fn of the tensors that take gradients, as te.gradcheck wants it; lists are spread out.
local function as_function(op, args, wanted)
    local leaves, places = {}, {}
    local takes = {}
    for _, i in ipairs(wanted or {}) do takes[i] = true end
    replace(args, function(t, i)
        if is_float(t) and (not wanted or takes[i]) then
            leaves[#leaves + 1] = t
            places[t] = #leaves
        end
        return t
    end)
    return function(...)
        local given = { ... }
        return call(op, replace(args, function(t) return places[t] and given[places[t]] or t end))
    end, leaves
end

-- What is expanded is written where it has one element.
local function write(t, op)
    for d = 1, op.name == "expand" and t:dim() or 0 do t = t:narrow(d, 1, 1) end
    if is_float(t) then t:mul_(0.5):add_(0.25) else t:copy_(t:eq(0)) end
end

-- Gradients of a weighted sum of the results, after the `changed`-th tensor among arguments and results was written in
-- place, and how many tensors there are; nil and the message when backward raises.
local function gradients(op, changed)
    te.manual_seed(7)
    local args, wanted = support.arguments(op, "float32")
    local fn, leaves = as_function(op, args, wanted)
    for _, leaf in ipairs(leaves) do leaf.requires_grad = true end
    local tensors, results, total = {}, { fn(unpack(leaves)) }, 0
    replace(args, function(t) tensors[#tensors + 1] = t return t end)
    for i, result in ipairs(results) do
        tensors[#tensors + 1] = result
        if result.requires_grad then total = total + te.sum(result * (result:detach() * 0.3 + i)) end
    end
    if changed then te.no_grad(write, tensors[changed], op) end
    local ok, problem = pcall(function() total:backward() end)
    if not ok then return nil, problem end
    local found = {}
    for i, leaf in ipairs(leaves) do found[i] = leaf.grad and leaf.grad:totable() or false end
    return found, #tensors
end

local docs = {}
for _, op in ipairs(te.ops_list()) do docs[op.name] = op.doc end

-- Whether an operation's sentences, or those that they refer to, speak of te.autocast.
local function says_autocast(doc)
    local other = docs[doc:match "as for ([%w_]+)" or doc:match "^([%w_]+) with "]
    return doc:find("te.autocast", 1, true) ~= nil or other ~= nil and says_autocast(other)
end

describe("te.help", function()
    it("knows what is no operation as well", function()
        assert.equal("te.Linear(in_features, out_features, opts)", te.help("Linear"):match "^[^\n]*")
        assert.equal(te.help("Linear"), te.help(te.Linear))
        assert.equal(te.help("matmul"), te.help(te.matmul))
    end)
end)

describe("every operation", function()
    for _, op in ipairs(te.ops_list()) do
        describe(op.name, function()
            before_each(function() te.manual_seed(7) end)
            -- what a device found wrong is said here, not in the next spec
            after_each(function() pcall(te.synchronize) end)

            it("is documented", function()
                assert.is_true(#op.doc > 3)
                assert.is_truthy(op.doc:find("[%.%)]$"), op.doc)
                assert.is_truthy(te.help(op.name):find(op.name, 1, true))
            end)

            it("says whether te.autocast sets the dtype of its result", function()
                local function result(opts)
                    te.manual_seed(7)
                    return (te.autocast(opts, call, op, (support.arguments(op, "float32")))).dtype
                end
                assert.equal(says_autocast(op.doc), result { dtype = "bfloat16" } ~= result { enabled = false })
            end)

            if op.differentiable and not random_results[op.name] then
                it("has the gradient that differences give", function()
                    local args, wanted = support.arguments(op, "float64")
                    local fn, leaves = as_function(op, args, wanted)
                    assert.is_true(te.gradcheck(fn, leaves))
                end)
            end

            if op.differentiable and not random_results[op.name] then
                it("has that gradient or raises when a tensor was changed in place since", function()
                    local expected, n = gradients(op)
                    for which = 1, n do
                        local found, problem = gradients(op, which)
                        if found then
                            assert.same(expected, found)
                        else
                            assert.is_truthy(problem:find("changed in place since", 1, true), problem)
                        end
                    end
                end)
            end

            if op.differentiable then
                it("gives te.grad the gradient of one input, or of none", function()
                    te.manual_seed(7)
                    local args, wanted = support.arguments(op, "float32")
                    local fn, leaves = as_function(op, args, wanted)
                    for _, leaf in ipairs(leaves) do leaf.requires_grad = true end
                    local beside = te.ones({ 2 }, { requires_grad = true })
                    local function total()
                        te.manual_seed(8)
                        return (fn(unpack(leaves))):to("float32"):sum() + beside:sum()
                    end
                    if not total().requires_grad then return end
                    total():backward()
                    for _, leaf in ipairs(leaves) do
                        local expected = leaf.grad and leaf.grad:totable()
                        local found = te.grad(total(), { leaf })[1]
                        assert.same(expected or false, found and found:totable())
                    end
                    assert.same({ 1, 1 }, te.grad(total(), beside):totable())
                end)
            end

            if not random_results[op.name] and op.name ~= "view" then
                it("gives the same for inputs that are not contiguous", function()
                    local args = support.arguments(op, "float32")
                    local expected = { call(op, replace(args, function(t) return t end)) }
                    local actual = { call(op, replace(args, strided)) }
                    for i = 1, #expected do close(expected[i]:totable(), actual[i], 1e-6) end
                end)
            end

            it("does not crash on empty tensors", function()
                local args = support.arguments(op, "float32")
                local expected = { call(op, replace(args, function(t) return t:clone() end)) }
                local results = { pcall(call, op, replace(args, function(t)
                    local shape = t.shape
                    if #shape > 0 then shape[1] = 0 end
                    return te.empty(shape, { dtype = t.dtype })
                end)) }
                if not table.remove(results, 1) then
                    assert.is_truthy(results[1]:find("te." .. op.name, 1, true), results[1])
                    return
                end
                assert.equal(#expected, #results)
                for i, result in ipairs(results) do
                    assert.same({ expected[i].dtype, expected[i]:dim() }, { result.dtype, result:dim() })
                    local n = 1
                    for _, size in ipairs(result.shape) do n = n * size end
                    assert.equal(n, result:numel())
                    result:totable() -- waits for a device
                end
            end)

            it("computes or raises for every dtype", function()
                for _, dtype in ipairs { "bfloat16", "float16", "int64", "int32", "uint8", "bool",
                    "float8_e4m3", "float8_e5m2" } do
                    local ok, problem = pcall(call, op, replace(support.arguments(op, "float32"), function(t)
                        return is_float(t) and t:to(dtype) or t
                    end))
                    if not ok then assert.is_truthy(tostring(problem):find("te%."), problem) end
                end
            end)

            it("raises for wrong arguments", function()
                local args = support.arguments(op, "float32")
                local released = te.ones(2)
                released:release()
                local fails = { {}, { "x" }, { true }, { {} }, { print }, { released },
                    { te.ones(1), te.ones(1), 1, 2, 3, 4, 5, 6 } }
                for _, wrong in ipairs(fails) do
                    local ok, problem = pcall(te[op.name], unpack(wrong))
                    assert.is_false(ok)
                    assert.is_truthy(problem:find("te." .. op.name, 1, true) or problem:find("te%."), problem)
                end
                local n = support.count(args)
                local with_options = type(args[n]) == "table" and not te.is_tensor(args[n])
                    and not te.is_tensor(args[n][1])
                    and not args[n][1]
                if with_options then args[n] = nil else n = n + 1 end
                args[n] = { no_such_option = 1 }
                assert.error_matches(function() te[op.name](unpack(args, 1, n)) end,
                    "te%." .. op.name .. ": unknown option")
            end)
        end)
    end
end)

-- Particular operations ---------------------------------------------------------------------------------------------

local A = { { 1, -2, 3.5 }, { 0.25, 4, -6 } }
local B = { { 2, 0.5, -1 }, { 3, -0.125, 8 } }

local function sigmoid(v) return 1 / (1 + math.exp(-v)) end

local UNARY = {
    neg = function(v) return -v end, abs = math.abs, floor = math.floor, ceil = math.ceil,
    exp = math.exp, sin = math.sin,
    cos = math.cos, tanh = math.tanh, sigmoid = sigmoid, square = function(v) return v * v end,
    reciprocal = function(v) return 1 / v end, relu = function(v) return math.max(v, 0) end,
    silu = function(v) return v * sigmoid(v) end, quick_gelu = function(v) return v * sigmoid(1.702 * v) end,
    srelu = function(v) return math.max(v, 0) ^ 2 end, sign = function(v) return v > 0 and 1 or v < 0 and -1 or 0 end,
    gelu = function(v) return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v ^ 3))) end,
}

local BINARY = {
    add = function(a, b) return a + b end, sub = function(a, b) return a - b end, mul = function(a, b) return a * b end,
    div = function(a, b) return a / b end, maximum = math.max, minimum = math.min,
    eq = function(a, b) return a == b end, ne = function(a, b) return a ~= b end, lt = function(a, b) return a < b end,
    le = function(a, b) return a <= b end, gt = function(a, b) return a > b end, ge = function(a, b) return a >= b end,
}

describe("elementwise operations", function()
    for _, dtype in ipairs { "float64", "float32", "bfloat16" } do
        local a, b = te.tensor(A, { dtype = dtype }), te.tensor(B, { dtype = dtype })
        for name, fn in pairs(UNARY) do
            it(("te.%s, %s"):format(name, dtype), function() close(reference.map(fn, A), te[name](a)) end)
        end
        for name, fn in pairs(BINARY) do
            it(("te.%s, %s"):format(name, dtype), function()
                close(reference.map(fn, A, B), te[name](a, b))
                close(reference.map(function(v) return fn(v, 2) end, A), te[name](a, 2))
            end)
        end
    end

    it("are as exact in float64 as their definitions", function()
        local list = {}
        for i = -30, 30 do list[#list + 1] = i / 10 end
        local x = te.tensor(list, { dtype = "float64" })
        for _, name in ipairs { "exp", "tanh", "sigmoid", "silu", "quick_gelu", "gelu", "sin", "cos" } do
            for i, got in ipairs(te[name](x):totable()) do
                local want = UNARY[name](list[i])
                assert.is_true(math.abs(got - want) <= 1e-14 * math.max(1, math.abs(want)), name .. " of " .. list[i])
            end
        end
    end)

    it("te.log, te.sqrt and te.rsqrt of positive numbers", function()
        local positive = { 0.25, 1, 2, 1e6 }
        local x = te.tensor(positive, { dtype = "float64" })
        close(reference.map(math.log, positive), te.log(x))
        close(reference.map(math.sqrt, positive), te.sqrt(x))
        close(reference.map(function(v) return 1 / math.sqrt(v) end, positive), te.rsqrt(x))
    end)

    it("passes NaN and infinities", function()
        local x = te.tensor { 0 / 0, math.huge, -math.huge, 0 }
        close({ 0 / 0, math.huge, 0, 1 }, te.exp(x))
        close({ 0 / 0, 1, -1, 0 }, te.tanh(x))
        assert.same({ true, false, false, false }, te.isnan(x):totable())
        close({ 0 / 0, math.huge, 1, 1 }, te.maximum(x, 1))
    end)

    it("broadcasts", function()
        local row, column = te.tensor { { 1, 2, 3 } }, te.tensor { { 10 }, { 20 } }
        close({ { 11, 12, 13 }, { 21, 22, 23 } }, row + column)
        close({ { 9, 8, 7 }, { 19, 18, 17 } }, column - row)
        assert.error_matches(function() return te.ones(2) + te.ones(3) end, "te%.add")
    end)

    it("has operators with numbers on either side", function()
        local x = te.tensor { 1, 2, 4 }
        close({ 2, 3, 5 }, 1 + x)
        close({ 0, -1, -3 }, 1 - x)
        close({ 1, 0.5, 0.25 }, 1 / x)
        close({ 2, 4, 16 }, 2 ^ x)
        close({ 1, 4, 16 }, x ^ 2)
        close({ -1, -2, -4 }, -x)
    end)

    it("writes in place and returns the tensor itself", function()
        local x = te.tensor { 1, 2 }
        assert.is_true(x:add_(1) == x)
        x:mul_(te.tensor { 2, 3 })
        close({ 4, 9 }, x)
        x:clamp_(5, 8)
        close({ 5, 8 }, x)
        x:fill_(3):zero_()
        close({ 0, 0 }, x)
        x:copy_(te.tensor { 7 })
        close({ 7, 7 }, x)
    end)
end)

describe("reductions", function()
    local x = te.tensor(A, { dtype = "float64" })

    it("sums over everything, one dimension or several", function()
        close(0.75, te.sum(x))
        close({ 1.25, 2, -2.5 }, te.sum(x, 1))
        close({ { 2.5 }, { -1.75 } }, te.sum(x, -1, true))
        close(0.75, te.sum(x, { 1, 2 }))
        close({ { 0.75 } }, x:sum({ 1, 2 }, true))
    end)

    it("keeps its digits along columns, however many rows there are", function()
        local tenth = te.tensor(0.1):item()
        for _, n in ipairs(te.get_default_device() == "cpu" and { 1000, 4097, 30000, 1e6 } or { 1000 }) do
            for _, width in ipairs { 1, 3 } do
                local rows = te.full({ n, width }, 0.1)
                assert.near(1, rows:sum(1)[-1]:item() / (n * tenth), 1e-5)
                assert.near(1, rows:sum():item() / (n * width * tenth), 1e-5)
                assert.near(tenth, rows:mean(1)[1]:item(), 1e-6)
            end
        end
    end)

    it("shares the gradient of max and min among equal ones", function()
        for _, name in ipairs { "max", "min" } do
            local t = te.tensor({ { 3, 3, 3 }, { 3, 3, 3 } }, { requires_grad = true })
            te[name](t, 1):backward(te.tensor { 1, 2, 3 })
            close({ { 0.5, 1, 1.5 }, { 0.5, 1, 1.5 } }, t.grad)
        end
    end)

    it("says in its help who has the gradient of a tensor beside an equal number", function()
        for name, has in pairs { maximum = { "second", 0, 1 }, minimum = { "first", 1, 0 } } do
            assert.is_truthy(te.help(name):find("of a tensor and a number, the " .. has[1] .. " has it", 1, true))
            for position, gradient in ipairs { has[2], has[3] } do
                local t = te.tensor({ 3 }, { requires_grad = true })
                local y = position == 1 and te[name](t, 3) or te[name](3, t)
                y:backward(te.ones { 1 })
                assert.equal(gradient, t.grad:item())
            end
        end
    end)

    it("has mean, max, min, var, norm, argmax and argmin", function()
        close({ 2.5 / 3, -1.75 / 3 }, te.mean(x, 2))
        close({ 3.5, 4 }, te.max(x, 2))
        close({ 0.25, -2, -6 }, te.min(x, 1))
        close(4, te.max(x))
        assert.same({ 2, 1 }, te.argmax(x, 2):totable())
        assert.same({ 1, 2 }, te.argmin(x, 2):totable())
        close({ math.sqrt(1 + 4 + 12.25), math.sqrt(0.0625 + 16 + 36) }, te.norm(x, 2))
        close(2.5, te.var(te.tensor({ 1, 2, 3, 4, 5 }, { dtype = "float64" })))
    end)

    it("has norms of nothing, which are 0", function()
        for _, p in ipairs { 1, 2, 3, math.huge } do
            assert.equal(0, te.norm(te.zeros { 0 }, nil, { p = p }):item())
            assert.same({ 0, 0 }, te.norm(te.zeros { 2, 0 }, 2, { p = p }):totable())
            local nan = te.norm(te.tensor { 1, 0 / 0 }, nil, { p = p }):item()
            assert.is_true(nan ~= nan)
        end
        local zero = te.tensor({ 0, 0 }, { requires_grad = true })
        te.norm(zero, nil, { p = math.huge }):backward()
        assert.same({ 0, 0 }, zero.grad:totable())
    end)

    it("has no mean and no variance of nothing", function()
        local empty = te.zeros { 0, 3 }
        for _, name in ipairs { "mean", "var" } do
            local all, columns = te[name](empty):item(), te[name](empty, 1):totable()
            assert.is_true(all ~= all and columns[1] ~= columns[1] and columns[3] ~= columns[3])
            assert.same({ 0 }, te[name](empty, 2).shape)
        end
        assert.is_true(te.mse_loss(empty, empty):item() ~= 0)
        assert.equal(math.huge, te.var(te.tensor { 1, 2 }, { correction = 3 }):item())
        assert.same({ 0 }, te.argmax(empty, 2).shape)
        assert.error_matches(function() te.argmax(empty, 1) end,
            "te%.argmax: {0,3} has no elements along the dimension")
        for _, name in ipairs { "max", "min" } do
            assert.same({ 0 }, te[name](empty, 2).shape)
            assert.error_matches(function() te[name](empty, 1) end,
                "te%." .. name .. ": {0,3} has no elements along the dim")
            assert.error_matches(function() te[name](empty) end, "te%." .. name .. ": {0,3} has no elements$")
        end
    end)

    it("has all and any", function()
        local flags = te.tensor { { true, false }, { true, true } }
        assert.same({ false, true }, te.all(flags, 2):totable())
        assert.is_true(te.any(flags):item())
        assert.same({ { true, true } }, te.any(flags, 1, true):totable())
        assert.same({ true, false }, te.all(flags, 1):totable())
        assert.same({ {} }, { te.all(flags).shape })
        local numbers = te.tensor { { 0 / 0, -0.0 }, { 0, 0 }, { -1e-45, 2 } }
        for _, dtype in ipairs { "float32", "float64" } do
            assert.same({ true, false, true }, te.any(numbers:to(dtype), 2):totable())
            assert.same({ false, false, true }, te.all(numbers:to(dtype), 2):totable())
        end
        assert.same({ true, true }, te.all(te.zeros(2, 0), 2):totable())
        assert.same({ false, false }, te.any(te.zeros(2, 0), 2):totable())
        assert.same({ 0 }, te.all(te.zeros(2, 0), 1).shape)
        assert.is_true(te.all(te.zeros(2, 0)):item())
        assert.error_matches(function() te.any(flags, 3) end,
            "te%.any: dimension 3 is not in a tensor with 2 dimensions")
    end)

    it("finds the only one of many that is different", function()
        local many = te.zeros(300, 701)
        many:select(1, 299):narrow(1, 700, 1):fill_(1)
        for _, x in ipairs { many, many:to("bool"), many:to("int64"), many:to("uint8"), many:transpose(1, 2) } do
            assert.is_true(te.any(x):item())
            assert.is_false(te.all(x:eq(0)):item())
            assert.equal(1, te.any(x, 1):sum():item())
            assert.equal(1, te.any(x, 2):sum():item())
        end
        assert.is_false(te.any(te.zeros(300, 701)):item())
        assert.is_true(te.all(te.ones(300, 701)):item())
    end)
end)

describe("matrix products, rows and indices", function()
    it("te.matmul and te.linear", function()
        local b = { { 1, 2 }, { 3, 4 }, { -1, 0.5 } }
        close(reference.matmul(A, b), te.matmul(te.tensor(A), te.tensor(b)))
        local linear = te.linear(te.tensor(A), te.tensor(b):transpose(), te.tensor { 10, 20 })
        local expected = reference.matmul(A, b)
        for i = 1, 2 do expected[i] = { expected[i][1] + 10, expected[i][2] + 20 } end
        close(expected, linear)
        assert.error_matches(function() te.matmul(te.ones(4, 3), te.ones(5, 2)) end,
            "inner sizes differ: {4,3} x {5,2}")
    end)

    it("te.softmax and te.log_softmax along any dimension", function()
        local x = te.tensor(A, { dtype = "float64" })
        close({ reference.softmax(A[1]), reference.softmax(A[2]) }, te.softmax(x))
        local columns = te.softmax(x, 1):totable()
        for j = 1, 3 do
            local column = reference.softmax { A[1][j], A[2][j] }
            close(column, { columns[1][j], columns[2][j] })
        end
        close(reference.map(math.log, { reference.softmax(A[1]), reference.softmax(A[2]) }), te.log_softmax(x))
        for _, name in ipairs { "softmax", "log_softmax" } do
            local deep, weights = te.randn({ 2, 3, 4 }, { dtype = "float64" }), te.randn({ 4, 3, 2 })
            for dim = 1, 3 do
                local y = te[name](deep, dim)
                assert.is_true(y:is_contiguous(), name)
                local rows = te[name](deep:transpose(dim, 3):contiguous())
                close(rows:transpose(dim, 3):totable(), y:view { 24 }:view { 2, 3, 4 })
            end
            assert.is_true(te.gradcheck(function(v)
                return te.sum(te[name](v, 2):view { 4, 6 } * weights:view { 4, 6 })
            end, { deep }))
        end
    end)

    it("te.cross_entropy with its options", function()
        local logits, targets = te.tensor(A, { dtype = "float64" }), te.tensor({ 2, 0 }, { dtype = "int64" })
        local first, second = -math.log(reference.softmax(A[1])[3]), -math.log(reference.softmax(A[2])[1])
        close((first + second) / 2, te.cross_entropy(logits, targets))
        close({ first, second }, te.cross_entropy(logits, targets, { reduction = "none" }))
        close(first + second, te.cross_entropy(logits, targets, { reduction = "sum" }))
        close(first, te.cross_entropy(logits, targets, { ignore_index = 0 }))
        assert.error_matches(function() te.cross_entropy(logits, targets, { reduction = "meen" }) end,
            'reduction: "meen" is none of mean|sum|none; did you mean "mean"')
    end)

    it("te.integers draws the whole numbers between bounds that are none", function()
        local x = te.zeros(1000)
        for _, case in ipairs { { 0.5, 2.5, 1, 2 }, { -2.5, 1.5, -2, 1 }, { 0, 3, 0, 3 }, { 2.5, 3, 3, 3 } } do
            local y = te.integers(x, case[1], case[2])
            assert.same({ case[3], case[4] }, { y:min():item(), y:max():item() })
        end
    end)

    it("te.cross_entropy takes no notice of the logits of ignored rows, whatever they are", function()
        local rows = { { 0 / 0, 1, 2 }, { 0, 1, 2 }, { math.huge, 1, -math.huge }, { -math.huge, 1, 2 } }
        local targets = te.tensor({ -100, 1, -100, -100 }, { dtype = "int64" })
        for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
            for _, label_smoothing in ipairs { 0, 0.1 } do
                for _, reduction in ipairs { "mean", "sum", "none" } do
                    local opts = { label_smoothing = label_smoothing, reduction = reduction }
                    local x = te.tensor(rows, { dtype = dtype, requires_grad = true })
                    local alone = te.tensor({ rows[2] }, { dtype = dtype, requires_grad = true })
                    local loss = te.cross_entropy(x, targets, opts):sum()
                    loss:backward()
                    local expected = te.cross_entropy(alone, targets:narrow(1, 2, 1), opts):sum()
                    expected:backward()
                    assert.equal(expected:item(), loss:item())
                    local zero = { 0, 0, 0 }
                    assert.same({ zero, alone.grad:totable()[1], zero, zero }, x.grad:totable())
                end
            end
        end
    end)

    it("te.cross_entropy over a large vocabulary, forward and backward", function()
        local n, ids = 50304, { 0, 50303, 25000 }
        te.manual_seed(3)
        local logits = te.randn(#ids, n)
        logits.requires_grad = true
        local loss = te.cross_entropy(logits, te.tensor(ids, { dtype = "int64" }))
        loss:backward()
        local expected, worst = 0, 0
        local rows, gradients = logits:detach():totable(), logits.grad:totable()
        for r, row in ipairs(rows) do
            local sum = 0
            for _, v in ipairs(row) do sum = sum + math.exp(v) end
            expected = expected + (math.log(sum) - row[ids[r] + 1]) / #ids
            for c, v in ipairs(row) do
                local gradient = (math.exp(v) / sum - (c == ids[r] + 1 and 1 or 0)) / #ids
                worst = math.max(worst, math.abs(gradients[r][c] - gradient) - 1e-5 * math.abs(gradient))
            end
        end
        assert.near(expected, loss:item(), 1e-5 * expected)
        assert.is_true(worst <= 1e-9, "a gradient is off by " .. worst)
    end)

    it("joins, gathers, selects, sorts and accumulates", function()
        local x = te.tensor { { 1, 5, 3 }, { 4, 2, 6 } }
        close({ { 1, 5, 3 }, { 4, 2, 6 }, { 1, 5, 3 }, { 4, 2, 6 } }, te.cat({ x, x }, 1))
        close({ { 1, 5, 3, 1, 5, 3 }, { 4, 2, 6, 4, 2, 6 } }, te.cat({ x, x }, -1))
        assert.same({ 2, 2, 3 }, te.stack({ x, x }).shape)
        close({ { 3, 1 }, { 6, 4 } }, te.gather(x, 2, te.tensor({ { 2, 0 }, { 2, 0 } }, { dtype = "int64" })))
        close({ { 3, 1 }, { 6, 4 } }, te.index_select(x, 2, te.tensor({ 2, 0 }, { dtype = "int32" })))
        local values, positions = te.topk(x, 2)
        close({ { 5, 3 }, { 6, 4 } }, values)
        assert.same({ { 1, 2 }, { 2, 0 } }, positions:totable())
        close({ { 1, 6, 9 }, { 4, 6, 12 } }, te.cumsum(x, 2))
        local narrow = te.full({ 1000 }, 1):to("float8_e4m3") -- whose largest value is 448
        close(1000, narrow:sum())
        close(1000, narrow:cumsum()[1000])
        assert.equal("float32", narrow:mean().dtype)
        local far = te.ones({ 1, 2 ^ 24 + 4 }, { dtype = "uint8" }) -- columns that float32 does not tell apart
        assert.equal(2 ^ 24 + 2, te.tril(far, 2 ^ 24 + 1):sum():item())
        assert.equal(3, te.triu(far, 2 ^ 24 + 1):sum():item())
        close({ { 1, 0, 0 }, { 4, 2, 0 } }, te.tril(x))
        close({ { 1, 5, 3 }, { 0, 2, 6 } }, te.triu(x))
    end)

    it("writes in place through views in any order of dimensions", function()
        te.manual_seed(9)
        local function views(t)
            return { t:transpose(1, 2), t:transpose(2, 3), t:permute(3, 1, 2), t:permute(3, 2, 1):narrow(1, 2, 3),
                t:transpose(1, 3):narrow(2, 1, 1) }
        end
        for i = 1, 5 do
            for _, dtype in ipairs { "float32", "bfloat16", "int64", "float64" } do
                local base = (te.randn { 4, 5, 6 } * 8):to(dtype)
                local view, apart = views(base)[i], views(base:clone())[i]:contiguous()
                local other = views((te.randn { 4, 5, 6 } * 8):to "float32")[i]
                local row = (te.randn { view:size(3) } * 8):to(dtype)
                for _, write in ipairs {
                    function(t) return t:mul_(3) end, function(t) return t:add_(row) end,
                    function(t) return t:copy_(other) end, function(t) return t:sub_(row:narrow(1, 1, 1)) end,
                    function(t) return t:add_(t:clone():transpose(1, 3):contiguous():transpose(1, 3)) end,
                } do
                    write(view)
                    write(apart)
                    assert.equal(0, te.ne(view, apart):sum():item())
                end
            end
        end
        local square = te.randn { 7, 7 }
        local expected = square + square:transpose()
        assert.equal(0, te.ne(square:transpose():add_(square), expected):sum():item())
    end)

    it("te.embedding refuses ids outside the table", function()
        local rows = te.tensor { { 1, 2 }, { 3, 4 } }
        close({ { 3, 4 }, { 1, 2 } }, te.embedding(rows, te.tensor({ 1, 0 }, { dtype = "int64" })))
        -- a device says so when the values are read
        assert.error_matches(function() te.embedding(rows, te.tensor({ 2 }, { dtype = "int64" })):totable() end,
            "embedding: .*2")
    end)
end)

describe("random operations", function()
    it("repeat with the seed and state, and differ otherwise", function()
        te.manual_seed(3)
        local first, state = te.randn { 100 }, te.rng_state()
        local second = te.randn { 100 }
        te.manual_seed(3)
        assert.same(first:totable(), te.randn({ 100 }):totable())
        assert.same(second:totable(), te.randn({ 100 }):totable())
        assert.not_same(first:totable(), second:totable())
        te.rng_state(state)
        assert.same(second:totable(), te.randn({ 100 }):totable())
    end)

    it("uniform numbers stay below their upper bound in every dtype", function()
        te.manual_seed(1)
        for _, dtype in ipairs { "bfloat16", "float16", "float32", "float64" } do
            local function within(x, low, high)
                x = x:to("float64")
                local least, most = x:min():item(), x:max():item()
                assert.is_true(low <= least and most < high, ("%s: %.17g to %.17g"):format(dtype, least, most))
                assert.is_true(least < low + (high - low) / 50 and most > high - (high - low) / 50)
            end
            within(te.rand({ 200000 }, { dtype = dtype }), 0, 1)
            within(te.zeros({ 200000 }, { dtype = dtype }):uniform_ { low = 3, high = 5 }, 3, 5)
            within(te.uniform(te.zeros({ 50000 }, { dtype = dtype }), { low = -0.3, high = 0.3 }), -0.3, 0.3)
            within(te.zeros({ 50000 }, { dtype = dtype }):uniform_ { low = -1, high = 0 }, -1, 0)
            assert.same({ 2, 2 }, te.ones({ 2 }, { dtype = dtype }):uniform_({ low = 2, high = 2 }):totable())
        end
        for dtype, last in pairs { float8_e4m3 = 0.9375, float8_e5m2 = 0.875 } do
            assert.equal(last, te.rand({ 20000 }, { dtype = dtype }):to("float32"):max():item())
            local below = te.zeros({ 20000 }, { dtype = dtype }):uniform_ { low = -1, high = 0 }:to("float32")
            assert.is_true(below:max():item() < 0 and below:min():item() == -1)
        end
    end)

    it("are refused where nothing could be drawn", function()
        local x, nan = te.zeros { 2 }, 0 / 0
        for message, cases in pairs {
            ["te.bernoulli: p must lie in [0, 1], not"] = { { "bernoulli", { p = 1.5 } }, { "bernoulli", { p = -1 } },
                { "bernoulli", { p = nan } } },
            ["te.integers: there are no whole numbers from"] = { { "integers", 5, 2 }, { "integers", 1.2, 1.8 },
                { "integers", nan, 1 }, { "integers", 0, math.huge } },
            ["te.uniform: there are no numbers from"] = { { "uniform", { low = 2, high = 1 } },
                { "uniform", { low = nan } }, { "uniform", { high = math.huge } } },
            ["te.normal: there is no normal distribution of"] = { { "normal", { std = -1 } },
                { "normal", { std = nan } }, { "normal", { mean = nan } } },
        } do
            for _, case in ipairs(cases) do
                assert.error_matches(function() te[case[1]](x, unpack(case, 2)) end, message, 1, true)
            end
        end
        assert.error_matches(function() x:normal_ { std = -1 } end, "te.normal_: there is no normal", 1, true)
    end)

    it("have the distribution they claim", function()
        te.manual_seed(11)
        local n = 100000
        local uniform, normal = te.rand { n }, te.randn { n }
        assert.is_true(math.abs(uniform:mean():item() - 0.5) < 5e-3 and uniform:min():item() >= 0
            and uniform:max():item() < 1)
        assert.is_true(math.abs(normal:mean():item()) < 2e-2 and math.abs(normal:var():item() - 1) < 2e-2)
        local dice = te.randint(1, 6, { n })
        assert.equal("int64", dice.dtype)
        for face = 1, 6 do
            assert.is_true(math.abs(te.eq(dice, face):to("float32"):mean():item() - 1 / 6) < 6e-3)
        end
        local dropped = te.dropout(te.ones(n), { p = 0.25 })
        assert.is_true(math.abs(te.eq(dropped, 0):to("float32"):mean():item() - 0.25) < 6e-3)
        assert.is_true(math.abs(dropped:max():item() - 4 / 3) < 1e-6)
    end)
end)
