--- Traced functions: the same bits as the function on plain tensors, gradients by differences, and every way in which a
--- function cannot be traced.

local te = require "te"
local operation = require "te.operation"
local executor = require "spec.support.executor"
local reference = require "spec.support.reference"
local trials = require "spec.support.trials"

local close = reference.assert_close

local function draw(shape, opts) return te.rand(shape, opts) * 2 - 1 end

-- Functions of one to three tensors; every one also runs on plain tensors.
local FUNCTIONS = {
    mish = function(x) return x * te.tanh(te.log(1 + te.exp(x))) end,
    operators = function(x, y) return (x - 2 * y) / (3 + x ^ 2) - -y end,
    order = function(x, y) return x - (y - (x - y)) + x * (y * x) - (x / (y + 3)) * y end,
    methods = function(x) return x:exp():sqrt() + x:sigmoid() * x:abs() + x:neg():square() end,
    choice = function(x, y) return te.where(te.lt(x, 0), y * 0.1, x:clamp(-0.5, 0.5)) end,
    comparisons = function(x, y)
        return te.where(te.ge(x, y), x, te.where(te.ne(y, 0.25), te.maximum(x, y), te.minimum(x, 2)))
    end,
    masks = function(x, y) return te.masked_fill(x, te.gt(y, 0), -3) + te.lerp(x, y, 0.25) end,
    activations = function(x) return te.gelu(x) + te.gelu(x, { approximate = "none" }) * te.silu(x) - te.srelu(x) end,
    shared = function(x, y)
        local a = te.exp(x) * y
        local b = a * a + te.exp(x)
        return b * a - b
    end,
    loop = function(x)
        local y = x
        for i = 1, 12 do y = y * x / i + 1 end
        return y
    end,
    three = function(x, y, z) return te.addcmul(x, y, z, { value = 0.5 }) + te.addcdiv(x, y, te.exp(z)) end,
    rows = function(x)
        local d = x - te.mean(x, -1, true)
        return d * te.rsqrt(te.mean(d * d, -1, true) + 1e-5)
    end,
    extremes = function(x, y) return (x - te.min(x, -1, true)) / (te.max(x, -1, true) + 2) + te.sum(y, -1, true) end,
    softmax = function(x) return te.softmax(x) * te.log_softmax(x, -1) end,
    norm = function(x, y) return te.layer_norm(x * y, nil, nil, { eps = 0.1 }) + te.l2_normalize(y) end,
    far = function(x) return x * 1e-30 * 1e30 + math.huge * te.maximum(x, 0.5) * 0 + 1 / 3 end,
}

-- Where gradients jump, or where the derivative of the plain function is a different (but also right) one.
local WITHOUT_DIFFERENCES = { far = true }

local function count(fn) return debug.getinfo(fn, "u").nparams end

describe("te.pointwise", function()
    before_each(function() te.manual_seed(9) end)

    for name, fn in pairs(FUNCTIONS) do
        local function inputs(dtype, wanted)
            local list = {}
            for i = 1, count(fn) do list[i] = draw({ 3, 5 }, { dtype = dtype, requires_grad = false }) end
            for _, t in ipairs(list) do t.requires_grad = wanted or false end
            return list
        end

        it("gives what the function gives: " .. name, function()
            for _, dtype in ipairs { "float64", "float32" } do
                local given = inputs(dtype)
                close(fn(unpack(given)):totable(), te.pointwise(fn)(unpack(given)),
                    dtype == "float64" and 1e-14 or 1e-6)
            end
        end)

        if not WITHOUT_DIFFERENCES[name] then
            it("has the gradient that differences give: " .. name, function()
                assert.is_true(te.gradcheck(te.pointwise(fn), inputs("float64")))
            end)
        end
    end

    it("computes in one pass what plain tensors compute in several, to the same bits", function()
        local names = { "operators", "methods", "choice", "shared", "loop", "order" }
        for _, name in ipairs(names) do
            local fn, given = FUNCTIONS[name], {}
            for i = 1, count(fn) do given[i] = draw({ 40, 33 }) end
            assert.equal(0, te.ne(fn(unpack(given)), te.pointwise(fn)(unpack(given))):to("float32"):sum():item(), name)
        end
    end)

    it("agrees for random functions", function()
        local unary = { "exp", "tanh", "sigmoid", "abs", "neg", "square", "relu", "sin" }
        local binary = { "add", "sub", "mul", "maximum", "minimum" }
        local function program(choices, x, y)
            local values = { x, y }
            for _, choice in ipairs(choices) do
                local a, b = values[choice.a], values[choice.b]
                local v = choice.unary and te[choice.op](a) or te[choice.op](a, choice.number or b)
                values[#values + 1] = te.tanh(v)
            end
            return values[#values] + values[math.ceil(#values / 2)] - x * y
        end
        math.randomseed(4)
        for _ = 1, trials(60, 4) do
            local choices = {}
            for i = 1, math.random(3, 14) do
                local is_unary = math.random() < 0.4
                local list = is_unary and unary or binary
                choices[i] = { unary = is_unary, op = list[math.random(#list)], a = math.random(i + 1),
                    b = math.random(i + 1),
                    number = math.random() < 0.3 and math.random() - 0.5 or nil }
            end
            local function fn(x, y) return program(choices, x, y) end
            local x, y = draw({ 7, 9 }), draw({ 9 })
            assert.same(fn(x, y):totable(), te.pointwise(fn)(x, y):totable())
            x.requires_grad, y.requires_grad = true, true
            fn(x, y):sum():backward()
            local dx, dy = x.grad, y.grad
            x.grad, y.grad = nil, nil
            te.pointwise(fn)(x, y):sum():backward()
            close(dx:totable(), x.grad, 1e-5)
            close(dy:totable(), y.grad, 1e-5)
        end
    end)

    it("broadcasts, takes numbers and promotes like plain tensors", function()
        local f = te.pointwise(function(x, y) return x * y + 1 end)
        local x, row, column = draw({ 3, 4 }), draw({ 4 }), draw({ 3, 1 })
        assert.same((x * row + 1):totable(), f(x, row):totable())
        assert.same((column * row + 1):totable(), f(column, row):totable())
        assert.same((x * 3 + 1):totable(), f(x, 3):totable())
        assert.same((3 * x + 1):totable(), f(3, x):totable())
        assert.equal("float32", f(x:to("bfloat16"), row).dtype)
        assert.equal("bfloat16", f(x:to("bfloat16"), 2).dtype)
        assert.error_matches(function() f(x, draw({ 5 })) end, "te%.pointwise: shapes do not broadcast: {3,4} and {5}")
        assert.error_matches(function() f(x, "y") end, "te%.pointwise: y: expected a tensor or number")
    end)

    it("reduces what has one value per row as plain tensors do", function()
        local x, narrow, row = draw({ 3, 4 }), draw({ 3, 1 }), draw({ 4 })
        for _, fn in ipairs {
            function(a, b) return a + te.sum(b, -1, true) end,
            function(a, b) return te.sum(b, -1, true) * a end,
            function(a, b) return a * te.softmax(b) end,
            function(a, b) return a - te.layer_norm(b * 2) end,
            function(a, b) return te.sum(a * b, -1, true) * te.tanh(b) + a end,
            function(a, b) return a - te.sum(te.mean(a * b, -1, true), -1, true) end,
            function(a, b) return te.sum(te.mean(b, -1, true):to("float32") + b, -1, true) - a end,
        } do
            for _, args in ipairs { { x, narrow }, { narrow, x }, { x, row }, { row, x }, { x, te.tensor { 2 } } } do
                close(fn(unpack(args)):totable(), te.pointwise(fn)(unpack(args)), 1e-6)
                local wanted = {}
                for i, f in ipairs { fn, te.pointwise(fn) } do
                    local a, b = args[1]:clone(), args[2]:clone()
                    a.requires_grad, b.requires_grad = true, true
                    f(a, b):square():sum():backward()
                    if i == 1 then wanted = { a.grad:totable(), b.grad:totable() } end
                    if i == 2 then close(wanted[1], a.grad, 1e-5) close(wanted[2], b.grad, 1e-5) end
                end
            end
        end
        local function one(a) return a + te.softmax(te.mean(a, -1, true)) end
        assert.error_matches(function() te.pointwise(one)(x) end, "te%.softmax works along rows.*one value per row")
        assert.error_matches(function() te.pointwise(function(a) return te.sum(a, -1, true):to("bfloat16") end)(x) end,
            "one value per row")
    end)

    it("keeps dtypes under te.autocast, whatever its arguments' shapes", function()
        local norm = te.pointwise(function(a, b) return te.layer_norm(b), a end)
        local ids = te.arange(1, 12):view { 3, 4 }
        for _, dtype in ipairs { "float32", "float16" } do
            local x, narrow, row = draw({ 3, 4 }):to(dtype), draw({ 3, 1 }):to(dtype), draw({ 4 }):to(dtype)
            for _, args in ipairs { { x, x }, { x, narrow }, { row, x }, { x, ids } } do
                local y, plain = te.autocast({ dtype = "bfloat16" }, norm, unpack(args)), norm(unpack(args))
                assert.equal(args[2] == ids and "float32" or dtype, y.dtype)
                assert.same(plain:totable(), y:totable())
            end
        end
        te.autocast({ dtype = "bfloat16" }, function()
            norm(draw({ 3, 4 }), ids)
            assert.equal("bfloat16", te._core.compute_dtype())
        end)
    end)

    it("gives one value per row where it is made of those alone, as plain tensors do", function()
        local x = draw({ 3, 4 })
        for _, fn in ipairs {
            function(a, b) return te.sum(a, -1, true) + b end,
            function(a, b) return te.tanh(te.mean(a, -1, true) * b) - 2 end,
            function(a, b) return a - te.max(a, -1, true), te.sum(a, -1, true):to("bfloat16") * b end,
            function(a, b)
                local m = te.mean(a, -1, true)
                return te.where(te.gt(m * b, 0), te.max(a, -1, true), te.min(a * b, -1, true))
            end,
        } do
            for _, b in ipairs { draw({ 3, 1 }), draw({ 1 }), draw({}), draw({ 3, 4 }), draw({ 4 }), 0.5 } do
                local plain, traced
                for i, f in ipairs { fn, te.pointwise(fn) } do
                    local a = te.tensor(x, { requires_grad = true })
                    local other = te.is_tensor(b) and te.tensor(b, { requires_grad = true }) or b
                    local first, second = f(a, other)
                    local loss = first:square():sum()
                    if second then loss = loss + second:square():sum() end
                    loss:backward()
                    local found = { a.grad, te.is_tensor(other) and other.grad or a.grad, first, second }
                    if i == 1 then plain = found else traced = found end
                end
                assert.equal(#plain, #traced)
                for i, want in ipairs(plain) do
                    assert.same(want.shape, traced[i].shape)
                    close(want:totable(), traced[i], 2e-2)
                end
            end
        end
        local empty = te.pointwise(function(a, b) return te.sum(a, -1, true) + b end)(te.zeros { 3, 0 }, te.ones { 1 })
        assert.same({ { 1 }, { 1 }, { 1 } }, empty:totable())
        -- without a part of what was reduced, a result fills the shape of the arguments, as where nothing is
        local _, fills = te.pointwise(function(a, b) return a - te.max(a, -1, true), b * 2 end)(x, te.ones { 3, 1 })
        assert.same({ 3, 4 }, fills.shape)
    end)

    it("fills the shape of its arguments where it comes to one value per row, or to one", function()
        local x, dy = draw({ 3, 4 }), draw({ 3, 4 })
        for _, fn in ipairs {
            function(a) local m = te.mean(a, -1, true) return te.where(te.gt(a, 0), m, m) end,
            function(a) local m = te.mean(a, -1, true) return te.where(te.gt(a, 0), m, m):tanh() * 2 + 1 end,
            function(a) return te.where(te.gt(a, 0), te.sum(a, -1, true), te.sum(a, -1, true)) * te.pow(a, 0) end,
            function(a) return te.where(te.gt(a, 0), 2, 2) end,
        } do
            close(fn(x):totable(), te.pointwise(fn)(x), 1e-6)
            for _, fused in ipairs { true, false } do
                te.set_fusion(fused)
                local a, b = x:clone(), x:clone()
                a.requires_grad, b.requires_grad = true, true
                local plain, traced = te.gelu(fn(a)), te.Sequential(te.Pointwise(fn), te.GELU())(b)
                if plain.requires_grad then
                    plain:backward(dy)
                    traced:backward(dy)
                    close(a.grad:totable(), b.grad, 1e-6)
                end
                te.set_fusion(true)
                close(plain:totable(), traced, 1e-6)
            end
        end
    end)

    it("computes with whole numbers as plain tensors do", function()
        local function tensor(dtype, values) return te.tensor(values, { dtype = dtype }) end
        local cases = {
            { function(x) return x + 1 end, tensor("int64", { 2 ^ 40 + 1 }) },
            { function(x) return x * 2 - 300 end, tensor("uint8", { 200, 3 }) },
            { function(x) return x / 2, x * 0.5, te.gt(x, 2) end, tensor("int32", { 2 ^ 24 + 1, -3 }) },
            { function(x, y) return x + y * 1.5 end, tensor("bfloat16", { 1 / 128 }), tensor("int64", { 1001 }) },
            { function(x, y) return x + y end, tensor("bfloat16", 0.25), tensor("int32", { 2 ^ 24 + 1 }) },
            { function(x, y) return x + y end, tensor("bool", { true, true }), tensor("bool", { true, false }) },
            { function(x, y) return te.where(x, y, 0) end, tensor("bool", { true, false }),
                tensor("bfloat16", { 3, 4 }) },
            { function(x, y) return x * y end, 3, tensor("int32", { 2 ^ 24 + 1 }) },
            { function(x, y) return te.softmax(x) + y end, tensor("bfloat16", { 1, 2 }), tensor("float64", { 1, 2 }) },
            { function(condition) return condition * 2 end, tensor("float64", { 1 / 3 }) },
        }
        for i, case in ipairs(cases) do
            local fn, arguments = case[1], { unpack(case, 2) }
            local expected, got = { fn(unpack(arguments)) }, { te.pointwise(fn)(unpack(arguments)) }
            assert.equal(#expected, #got)
            for k, want in ipairs(expected) do
                assert.equal(want.dtype, got[k].dtype, "case " .. i)
                -- between the operations plain bfloat16 is rounded
                close(want:totable(), got[k], i == 9 and 4e-3 or 0)
            end
        end
        local x = te.tensor({ 1, 2 }, { requires_grad = true })
        te.pointwise(function(v, w) return v * w end)(x, tensor("int64", { 3, 4 })):sum():backward()
        assert.same({ 3, 4 }, x.grad:totable())
        local row = te.pointwise(function(v) return te.sum(v, -1, true) end)
        assert.error_matches(function() row(tensor("int64", { 3 })) end, "one value per row")
    end)

    it("returns several results", function()
        local f = te.pointwise(function(x, y) return x + y, x * y, te.gt(x, y) end)
        local x, y = draw({ 2, 3 }, { dtype = "float64" }), draw({ 2, 3 }, { dtype = "float64" })
        local sum, product, larger = f(x, y)
        assert.same((x + y):totable(), sum:totable())
        assert.same((x * y):totable(), product:totable())
        assert.same(te.gt(x, y):to("float64"):totable(), larger:totable())
        assert.equal("bool", te.pointwise(function(a) return te.gt(a, 0) end)(x).dtype)
        assert.is_true(te.gradcheck(function(a, b)
            local p, q = f(a, b)
            return p * q
        end, { x, y }))
    end)

    it("drops and rounds where the function says so", function()
        local x = te.ones({ 4000 })
        te.manual_seed(1)
        local dropped = te.pointwise(function(a) return te.dropout(a, { p = 0.25 }) + 0 * a end)(x)
        te.manual_seed(1)
        assert.same(te.dropout(x, { p = 0.25 }):totable(), dropped:totable())
        local y = draw({ 50 })
        local rounded = te.pointwise(function(a) return a:to("bfloat16") * 3 end)(y)
        assert.same((y:to("bfloat16"):to("float32") * 3):totable(), rounded:totable())
    end)

    it("shows its formula", function()
        local f = te.pointwise(function(x, y) return 0.5 * x + te.tanh(y) end)
        assert.equal("pointwise(x, y) { result = 0.5 * x + tanh(y) }", tostring(f))
        assert.equal("result = 0.5 * x + tanh(y)", f.formula)
        local shared = te.pointwise(function(x)
            local e = te.exp(x)
            return (e - 1) / (e + 1)
        end)
        assert.equal("t1 = exp(x); y = (t1 - 1) / (t1 + 1)", shared.formula)
    end)

    it("names inputs and parameters as the function does, as far as a formula can", function()
        local function fn(n, t1, ...) return n + t1 + (...) end
        local x = te.ones({ 1 })
        local f = te.pointwise(fn)
        f(x, x, x)
        assert.equal("y = x1 + x2 + x3", f.formula)
        assert.equal("y = x * slope + p_x", te.Pointwise({ params = { slope = te.ones({ 1 }), x = te.ones({ 1 }) } },
            function(x, p) return x * p.slope + p.x end).formula)
    end)

    it("traces a function once for each number of arguments", function()
        local runs = 0
        local function fn(...)
            runs = runs + 1
            local sum = 0
            for i = 1, select("#", ...) do sum = sum + select(i, ...) end
            return sum
        end
        local f, g = te.pointwise(fn), te.pointwise(fn)
        local x = te.tensor { 1, 2 }
        assert.same({ 2, 4 }, f(x, x):totable())
        assert.same({ 2, 4 }, g(x, x):totable())
        assert.equal(1, runs)
        assert.same({ 3, 6 }, f(x, x, x):totable())
        assert.equal(2, runs)
    end)

    it("may be used inside another one", function()
        local square = te.pointwise(function(x) return x * x end)
        local f = te.pointwise(function(x, y) return square(x + y) - square(y) end)
        local x, y = draw({ 6 }), draw({ 6 })
        assert.same(((x + y) * (x + y) - y * y):totable(), f(x, y):totable())
    end)

    it("goes when nobody holds it, after the gradients that need it", function()
        local x = te.tensor({ 1, 2, 3 }, { requires_grad = true })
        local y = te.pointwise(function(a) return a * a * a end)(x)
        collectgarbage()
        collectgarbage()
        y:sum():backward()
        assert.same({ 3, 12, 27 }, x.grad:totable())
        for i = 1, 300 do
            local z = te.pointwise(function(a) return a * i end)(x)
            if i % 100 == 0 then assert.same({ i, 2 * i, 3 * i }, z:totable()) end
        end
        collectgarbage()
    end)

    local refused = {
        ["if on a value"] = { function(x) if x < x * 2 then return x end return -x end,
            "decides nothing; use te%.where" },
        ["comparison with a number"] = { function(x) if x > 0 then return x end return -x end,
            "attempt to compare .*%(while te%.pointwise traces function at .*pointwise_spec.lua:%d+; .*te%.where" },
        equality = { function(x) return x == x * 1 and x or -x end, "use te%.where with te%.eq" },
        ["conversion to text"] = { function(x) return x * #tostring(x) end, "a traced value is no text" },
        concatenation = { function(x) return x .. "" end, "a traced value is no text" },
        ["functions of math"] = { function(x) return math.exp(x) end, "use te%.exp, te%.sqrt" },
        ["a tensor from outside"] = { function(x) return x * te.ones({ 3 }) end,
            "a tensor {3} from outside; make it an argument" },
        ["a tensor from outside on the left"] = { function(x) return te.ones({ 3 }) - x end,
            "a tensor {3} from outside" },
        ["a number as result"] = { function(_) return 1 end, "result 1 is a number" },
        ["a tensor as result"] = { function(_) return te.ones({ 3 }) end, "result 1 is a tensor {3}" },
        ["no result"] = { function(_) end, "returned nothing" },
        ["a shape"] = { function(x) return x * x.shape[1] end, "a traced value has no shape" },
        ["writing in place"] = { function(x) return x:add_(1) end,
            "te%.add_: a traced value cannot be written in place" },
        ["other kinds of operations"] = { function(x) return te.matmul(x, x) end,
            "te%.matmul is not computed element by element" },
        ["gated operations"] = { function(x) return te.swiglu(x) end, "te%.swiglu is not computed element by element" },
        ["sums of everything"] = { function(x) return x - x:mean() end,
            "te%.mean: only along the last dimension, keeping it" },
        ["one value per row as result"] = { function(x) return te.sum(x, -1, true) end, "one value per row" },
        ["functions of tensors written in Lua"] = { function(x) return x:chunk(2)[1] end,
            "takes tensors, not traced values" },
        ["unknown options"] = { function(x) return te.clamp(x, { mix = 1 }) end,
            'unknown option "mix"; did you mean "max"' },
        ["arguments that are too much"] = { function(x) return te.exp(x, 2) end, "te%.exp: argument 2 is too much" },
        ["arguments that are missing"] = { function(x) return te.maximum(x) end,
            "te%.maximum: argument other is missing" },
        ["attributes that are traced"] = { function(x) return te.clamp(x, x) end,
            "te%.clamp: min: expected a number, got a traced value" },
        detaching = { function(x) return x:detach() * x end, "te%.detach" },
        errors = { function(_) error("my own") end, "my own %(while te%.pointwise traces" },
    }
    for what, case in pairs(refused) do
        it("refuses " .. what, function()
            assert.error_matches(function() te.pointwise(case[1])(te.ones({ 3 })) end, case[2])
        end)
    end

    it("names the line of the function", function()
        local line = debug.getinfo(1, "l").currentline + 1
        local f = te.pointwise(function(x) return 1 + x:view(3) end)
        local _, problem = pcall(f, te.ones({ 3 }))
        assert.is_truthy(problem:find("pointwise_spec.lua:" .. line .. ": .*function at .*:" .. line), problem)
    end)

    it("refuses symbols outside their function", function()
        local kept
        local f = te.pointwise(function(x)
            kept = x
            return x * 1
        end)
        f(te.ones({ 1 }))
        assert.error_matches(function() return kept * 2 end, "it cannot leave its function")
        assert.error_matches(function() te.pointwise(function(x) return x + kept end)(te.ones({ 1 })) end,
            "a value of another function")
    end)

    it("takes functions only, of as many tensors as an operation can have", function()
        assert.error_matches(function() te.pointwise(3) end, "te%.pointwise: fn: expected a function, got number")
        local x = te.ones({ 2 })
        local f = te.pointwise(function(a, b, c, d, e, g, h) return a + b + c + d + e + g + (h or 0) end)
        assert.same({ 6, 6 }, f(x, x, x, x, x, x):totable())
        assert.error_matches(function() f(x, x, x, x, x, x, x) end, "7 inputs and 0 attributes, at most 6")
    end)
end)

describe("te.Pointwise", function()
    before_each(function() te.manual_seed(2) end)

    local function mish(x) return x * te.tanh(te.log(1 + te.exp(x))) end

    it("is a module", function()
        local m = te.Pointwise(mish)
        local x = draw({ 2, 3 })
        assert.same(mish(x):totable(), m(x):totable())
        assert.is_true(te.is(m, te.BasicOperation))
        assert.equal("Pointwise(y = x * tanh(log(1 + exp(x))))", tostring(m))
        assert.equal(te.Pointwise, te.ops.Pointwise)
        assert.same((x:square() * 2):totable(),
            te.Sequential(te.Pointwise(function(v) return v * v end), te.ConstantScale(2))(x):totable())
    end)

    it("has parameters", function()
        local g, b = draw({ 4 }, { dtype = "float64" }), te.full({}, 0.5, { dtype = "float64" })
        local m = te.Pointwise({ params = { g = g, b = b } }, function(x, p) return te.sigmoid(x) * p.g + p.b end)
        assert.equal(2, #m:parameters())
        assert.same({ "b", "g" }, (function()
            local names = {}
            for name in m:named_parameters() do names[#names + 1] = name end
            return names
        end)())
        local x = draw({ 3, 4 }, { dtype = "float64" })
        close((te.sigmoid(x) * g + b):totable(), m(x))
        assert.is_true(te.gradcheck(function(v, first, second)
            m.g, m.b = first, second
            return m(v)
        end, { x, g:detach(), b:detach() }))
    end)

    it("takes its options before or behind the function", function()
        local x = te.randn { 2, 4 }
        local function scale(v, p) return v * p.g end
        local first, last = te.Pointwise({ params = { g = te.ones { 4 } } }, scale),
            te.Pointwise(scale, { params = { g = te.ones { 4 } } })
        assert.same(first(x):totable(), last(x):totable())
        assert.same(first.formula, last.formula)
        assert.error_matches(function() te.Pointwise(scale, { parms = {} }) end, 'did you mean "params"')
    end)

    it("keeps the dtype of x, or that of te.autocast", function()
        local m = te.Pointwise({ params = { g = te.ones({ 4 }) } }, function(x, p) return x * p.g end)
        assert.equal("bfloat16", m(te.ones({ 2, 4 }, { dtype = "bfloat16" })).dtype)
        assert.equal("float32", m(te.ones({ 2, 4 })).dtype)
        te.autocast({ dtype = "bfloat16" }, function() assert.equal("bfloat16", m(te.ones({ 2, 4 })).dtype) end)
    end)

    it("computes with whole numbers as float32", function()
        local y = te.Pointwise(function(x) return x + 1 end)(te.tensor({ 2 ^ 24 - 2, 3 }, { dtype = "int64" }))
        assert.equal("float32", y.dtype)
        assert.same({ 2 ^ 24 - 1, 4 }, y:totable())
    end)

    it("refuses to reduce what has one value per row", function()
        local x, narrow = draw({ 3, 4 }), draw({ 3, 1 })
        local extra = te.Pointwise({ extra_inputs = 1 }, function(a, b) return a + te.sum(b, -1, true) end)
        close((x + te.sum(x * 2, -1, true)):totable(), extra(x, x * 2), 1e-6)
        local own = te.Pointwise({ params = { p = te.ones { 1 } } },
            function(a, p) return a + te.sum(p.p, -1, true) end)
        for _, fused in ipairs { true, false } do
            te.set_fusion(fused)
            local message = "te%.Pointwise: what is reduced along the rows of x {3,4} is made of {%d?,?1} alone"
            local sequence, owner = te.Sequential(te.Identity(), extra), te.Sequential(te.GELU(), own)
            local ok, problem = pcall(sequence, x, narrow)
            local too, problem_too = pcall(owner, x)
            te.set_fusion(true)
            assert.is_false(ok or too)
            assert.is_truthy(problem:find(message) and problem_too:find(message), problem .. problem_too)
        end
    end)

    it("refuses results that have one value per row", function()
        local x = draw({ 3, 4 })
        local extra = te.Pointwise({ extra_inputs = 1 }, function(a, b) return te.sum(a, -1, true) + b end)
        local function owning(shape)
            return te.Pointwise({ params = { p = te.ones(shape) } },
                function(a, p) return te.mean(a, -1, true) * p.p end)
        end
        close((te.sum(x, -1, true) + x * 2):totable(), extra(x, x * 2), 1e-6)
        for _, fused in ipairs { true, false } do
            te.set_fusion(fused)
            local row = te.Sequential(te.Identity(), owning { 4 })(x)
            local ok, problem = pcall(te.Sequential(te.Identity(), extra), x, draw({ 3, 1 }))
            local too, problem_too = pcall(te.Sequential(te.Identity(), owning {}), x)
            te.set_fusion(true)
            close((te.mean(x, -1, true) * te.ones { 4 }):totable(), row, 1e-6)
            assert.is_false(ok or too)
            local message = "te%.Pointwise: a result has one value for each row of x {3,4}: beside sums, it is made of "
            assert.is_truthy(problem:find(message .. "{3,1} alone") and problem_too:find(message .. "{} alone"),
                problem .. problem_too)
        end
    end)

    it("takes extra inputs and makes extra outputs", function()
        local m = te.Pointwise({ extra_inputs = 1 }, function(x, e) return x + e, x * e end)
        local y, extra = te.Sequential(m, te.ConstantScale(2))(te.tensor { 3 }, te.tensor { 5 })
        assert.equal(16, y:item())
        assert.equal(15, extra:item())
    end)

    it("describes itself to the fuser", function()
        local m = te.Pointwise({ params = { g = draw({ 4 }) }, extra_inputs = 1 },
            function(x, e, p) return x * p.g - e end)
        local x, e = draw({ 2, 4 }), draw({ 2, 4 })
        assert.same(m(x, e):totable(), operation.lowering(m)(m, executor(), x, e):totable())
    end)

    -- Gradients of the results are added up in another order.
    it("with several results fuses with its neighbours", function()
        local m = te.Pointwise({ params = { g = draw({ 4 }) }, extra_inputs = 1 },
            function(x, e, p) return te.tanh(x) * p.g - e, te.tanh(x) * p.g, x * te.sigmoid(e) end)
        local seq = te.Sequential(te.ConstantScale(2), m, te.GELU())
        local x, e = draw({ 3, 4 }), draw({ 3, 4 })
        x.requires_grad, e.requires_grad = true, true
        local function outcome()
            local y, first, second = seq(x, e)
            te.sum(y * y + 2 * first * first + 3 * second * second):backward()
            local got = { y, first, second, x.grad, e.grad, m.g.grad }
            x.grad, e.grad, m.g.grad = nil, nil, nil
            return got
        end
        local want
        local before = te.set_fusion(false)
        local ok, problem = pcall(function() want = outcome() end)
        te.set_fusion(before)
        assert(ok, problem)
        for i, got in ipairs(outcome()) do
            assert.is_true((got - want[i]):abs():max():item() <= 1e-5 * math.max(1, want[i]:abs():max():item()),
                "value " .. i)
        end
        local plan = seq:explain(x, e)
        assert.equal(1, #plan.forward)
        assert.equal(1, #plan.backward)
    end)

    it("with several results of the same random numbers is called", function()
        local m = te.Pointwise(function(x)
            local dropped = te.dropout(x, { p = 0.5 })
            return dropped, dropped
        end)
        local x = te.ones({ 64 })
        local y, same = te.Sequential(te.ConstantScale(2), m)(x)
        assert.same(y:totable(), same:totable())
        assert.equal("call", te.Sequential(te.ConstantScale(2), m):explain(x).forward[2].kind)
    end)

    it("can be extended", function()
        local Scaled = te.Pointwise:extend("Scaled")
        function Scaled:init(n)
            te.Pointwise.init(self, { params = { s = te.ones({ n }) } }, function(x, p) return x * p.s end)
        end
        assert.same({ 1, 2 }, Scaled(2)(te.tensor { 1, 2 }):totable())
    end)

    it("takes no more than the function does", function()
        local f, x = te.pointwise(function(a, b) return a + b end), te.ones { 2 }
        assert.error_matches(function() f(x, x, x) end, "te.pointwise: the function takes 2 tensors, got 3", 1, true)
        local outer = te.pointwise(function(a) return f(a, a, a) end)
        assert.error_matches(function() outer(x) end, "the function takes 2 tensors, got 3", 1, true)
        assert.error_matches(function() te.pointwise(function(a) return a end, {}) end, "te.pointwise: argument 2")
        local sum = te.pointwise(function(...) return select(1, ...) + select(select("#", ...), ...) end)
        assert.same({ 2, 2 }, sum(x, x, x):totable())
    end)

    it("finds mistakes when it is made", function()
        assert.error_matches(function() te.Pointwise(function(x) return x.shape end) end,
            "te%.Pointwise: function at .* no shape")
        assert.error_matches(function() te.Pointwise({ param = {} }, mish) end,
            'unknown option "param"; did you mean "params"')
        assert.error_matches(function() te.Pointwise({ params = { g = 1 } }, mish) end,
            "params%.g: expected a tensor, got number")
        assert.error_matches(function() te.Pointwise({ params = { forward = te.ones({ 1 }) } }, mish) end,
            "params%.forward: the name is taken")
        assert.error_matches(function() te.Pointwise({}) end, "expected a function, got nil")
    end)

    it("refuses a function that does too much", function()
        local function chain(n)
            return te.pointwise(function(x, y)
                for _ = 1, n do x = x * y + 1 end
                return x
            end)
        end
        assert.same({ 501, 501 }, chain(500)(te.ones { 2 }, te.ones { 2 }):totable())
        assert.error_matches(function() chain(5000)(te.ones { 2 }, te.ones { 2 }) end,
            "te.pointwise: function at .*: pointwise: the formula has more than 4096 operations and names")
        assert.error_matches(function() te._core.define("f(x)", ("t = x; "):rep(5000) .. "y = x") end, "more than 4096")
    end)
end)
