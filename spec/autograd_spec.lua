--- Gradients: backward, te.grad, scopes, checkpoints, operations defined in Lua.

local te = require "te"
local close = require("spec.support.reference").assert_close

local function leaf(values) return te.tensor(values, { dtype = "float64", requires_grad = true }) end

describe("backward", function()
    it("fills .grad and adds to what is there", function()
        local x = leaf { 1, 2, 3 }
        te.sum(x * x):backward()
        close({ 2, 4, 6 }, x.grad)
        te.sum(x):backward()
        close({ 3, 5, 7 }, x.grad)
        x.grad = nil
        assert.is_nil(x.grad)
    end)

    it("takes the gradient of a result that is no number", function()
        local x = leaf { 1, 2 }
        local y = x * 3
        assert.error_matches(function() y:backward() end, "te%.backward")
        y:backward(te.tensor({ 1, 10 }, { dtype = "float64" }))
        close({ 3, 30 }, x.grad)
        assert.error_matches(function() (x * 1):backward(te.ones(3)) end, "gradient")
    end)

    it("goes through branches and shared inputs", function()
        local x = leaf { 2 }
        local y = x * x
        te.sum(y * x + y):backward()
        close({ 3 * 4 + 2 * 2 }, x.grad)
    end)

    it("sums a sum's own gradient for what was broadcast over leading dimensions", function()
        for _, dtype in ipairs { "bfloat16", "float32", "float64" } do
            for _, shape in ipairs { { 7, 3, 5 }, { 2, 3, 1, 5 }, { 1, 4, 3, 5 } } do
                local x = te.zeros(shape, { dtype = dtype, requires_grad = true })
                local p = te.zeros(shape[3] == 1 and { 3, 1, 5 } or { 3, 5 }, { dtype = dtype, requires_grad = true })
                local dy = te.randint(-8, 8, shape, { dtype = "int32" }):to(dtype)
                local ran = {}
                for _, event in ipairs(te.profile(function() te.add(x, p):backward(dy) end).events) do
                    ran[event.name] = true
                end
                assert.is_nil(ran["add.backward"])
                local want = {}
                for i, v in ipairs(dy:reshape(-1):totable()) do
                    want[(i - 1) % 15 + 1] = (want[(i - 1) % 15 + 1] or 0) + v
                end
                close(want, p.grad:reshape(-1))
                close(dy:reshape(-1):totable(), x.grad:reshape(-1))
            end
        end
    end)

    it("refuses a second pass unless the graph is kept", function()
        local x = leaf { 2 }
        local y = te.sum(te.exp(x) * x)
        y:backward(nil, { retain_graph = true })
        y:backward()
        assert.error_matches(function() y:backward() end, "used before")
        assert.error_matches(function() y:backward({ retain = true }) end,
            'unknown option "retain"; did you mean "retain_graph"')
    end)

    it("has the digits of float64 where a step without them adds to it", function()
        local ones = te.ones { 3 }
        for _, step in ipairs { te.floor, te.ceil, te.round, te.trunc, te.sign,
            function(x) return te.sum(x * ones * 0) end } do
            local x = te.tensor(0.1, { dtype = "float64", requires_grad = true })
            te.sum(step(x) + x * x):backward()
            assert.equal(0.2, x.grad:item())
        end
    end)

    it("of a p-norm is 0 at zeros", function()
        local function of(values, p)
            local x = te.tensor(values, { dtype = "float64", requires_grad = true })
            return te.grad(te.norm(x, { p = p }), x)
        end
        for _, p in ipairs { 0.5, 1.5, 3 } do
            close({ 0, 0 }, of({ 0, 0 }, p))
            close({ 0, 1, 0 }, of({ 0, 2, 0 }, p))
            close({ -1 }, of({ -3 }, p))
        end
        close({ -9 / 35 ^ (2 / 3), 4 / 35 ^ (2 / 3) }, of({ -3, 2 }, 3))
    end)

    it("refuses what has no gradient", function()
        assert.error_matches(function() te.ones(1):backward() end, "does not depend")
    end)

    it("sees writes into what was saved", function()
        local x = leaf { 1, 2 }
        local w = te.tensor({ 3, 4 }, { dtype = "float64" })
        local y = te.sum(x * w)
        w:mul_(2)
        assert.error_matches(function() y:backward() end, "changed in place")
        assert.error_matches(function() x:mul_(2) end, "te%.no_grad")
    end)

    it("refuses writes in place that would lose a gradient", function()
        local x, t = leaf { 1, 2 }, te.zeros({ 2, 2 }, { dtype = "float64" })
        local y = x * 2
        local refused = {
            ["te%.copy_: source takes part in gradients.*source:detach"] = function() t:copy_(x) end,
            ["te%.copy: source takes part in gradients.*source:detach"] = function() te.copy(t, x) end,
            ["te%.add_: other takes part in gradients.*other:detach"] = function() t:add_(y) end,
            ["te%.copy_: x takes part in gradients.*te%.no_grad"] = function() y:copy_(t[1]) end,
            ["te%.fill_: x takes part in gradients.*te%.no_grad"] = function() y:fill_(1) end,
            ["te%.zero_: x takes part in gradients"] = function() x:narrow(1, 1, 1):zero_() end,
            ["te%.normal_: x takes part in gradients"] = function() te.normal_(y) end,
            ["t%[i%] = value: value takes part in gradients.*value:detach"] = function() t[1] = x end,
            ["t%[i%] = value: t takes part in gradients"] = function() y[1] = 3 end,
        }
        for message, write in pairs(refused) do
            assert.error_matches(write, message)
            te.no_grad(write)
        end
        t:copy_(x:detach())
        t[2] = y:detach()
        x:fill_(3) -- a leaf: what it was is in no graph
        assert.is_true(te.zeros({ 9 }, { dtype = "bfloat16", requires_grad = true }):uniform_().requires_grad)
        close({ 3, 3 }, x)
    end)

    it("survives long graphs", function()
        local x = leaf { 1 }
        local y = x
        for _ = 1, 20000 do y = y + 1 end
        te.sum(y):backward()
        close({ 1 }, x.grad)
    end)
end)

describe("one tensor for several inputs", function()
    -- The gradient by tensor, once by backward and once by te.grad, of leaves and of results.
    local function gradients(f, tensors, picks, weights, how)
        local given = {}
        for i, t in ipairs(tensors) do
            t.grad = nil
            given[i] = how.results and t * 1 or t
        end
        local chosen = {}
        for i, k in ipairs(picks) do chosen[i] = given[k] end
        local results, loss = { f(unpack(chosen)) }, 0
        for i, r in ipairs(results) do
            local seen = how.uses == 3 or how.uses == i
            if seen and r.requires_grad then loss = loss + (r * weights:narrow(1, i, 1)):sum() end
        end
        local found = {}
        if loss == 0 then return found end
        if how.asks then
            for i, g in ipairs(te.grad(loss, tensors)) do found[i] = g end
        else
            loss:backward()
            for i, t in ipairs(tensors) do found[i] = t.grad end
        end
        return found
    end

    it("gets the sum of what each of them gets", function()
        for _, dtype in ipairs { "float32", "float64" } do
            local x = te.tensor({ 1, 2, 3 }, { dtype = dtype, requires_grad = true })
            local ones = te.ones({ 3 }, { dtype = dtype })
            te.pointwise(function(a, b) return b - a end)(x, x):sum():backward()
            assert.same({ 0, 0, 0 }, x.grad:totable())
            x.grad = nil
            te.layer_norm(x, ones, x):sum():backward()
            close({ 1, 1, 1 }, x.grad)
            local h = x * 1
            local twice = te.pointwise(function(a, b) return a * a + b end)
            close({ 3, 5, 7 }, te.grad(twice(h, h):sum(), x, { retain_graph = true }))
            close({ 3, 5, 7 }, te.grad(twice(h, h):sum(), h))
        end
    end)

    local random = math.random

    local function pick(list) return list[random(#list)] end

    local TERMS = { "%A + %B", "%A - %B", "%A * %B", "%A / (1 + %B * %B)", "%A - rowmean(%A)", "tanh(%A)", "-%A",
        "where(%A > %B, %B, %A)", "exp(tanh(%A))" }

    -- Some steps on inputs and on steps before; the results add whatever stands there.
    local function formula()
        local names, steps = { "x", "y", "w", "s" }, {}
        for i = 1, random(4) do
            local a, b = pick(names), pick(names)
            steps[i] = ("t%d = %s"):format(i, (pick(TERMS):gsub("%%A", a):gsub("%%B", b)))
            names[#names + 1] = "t" .. i
        end
        steps[#steps + 1] = "r = " .. names[#names] .. " + " .. pick(names)
        steps[#steps + 1] = "z = " .. pick(names) .. " - (" .. pick(names) .. ")"
        return table.concat(steps, "; ")
    end

    it("gets it in random formulas", function()
        math.randomseed(31)
        te.manual_seed(31)
        local compared = 0
        for _ = 1, 150 do
            local text = formula()
            local defined, f = pcall(te._core.define, "repeating(x, y, w, s)", text,
                { outputs = "r z", rows = true, elements = true })
            if defined then
                local shapes = { { 2, 3 }, pick { { 2, 3 }, { 2, 1 }, { 3 } }, pick { { 3 }, { 1 } } }
                local picks = { 1, random(2), random(3), random(3) }
                local dtype = pick { "float64", "float32" }
                local tensors, apart, apart_from = {}, {}, {}
                for i, shape in ipairs(shapes) do
                    tensors[i] = te.randn(shape, { dtype = dtype })
                    tensors[i].requires_grad = true
                end
                for i, k in ipairs(picks) do
                    apart[i] = tensors[k]:detach():clone()
                    apart[i].requires_grad, apart_from[i] = true, k
                end
                local weights = te.randn({ 2 }, { dtype = dtype })
                local how = { results = random(2) == 1, asks = random(2) == 1, uses = random(3) }
                local got = gradients(f, tensors, picks, weights, how)
                local want = {}
                for i, g in pairs(gradients(f, apart, { 1, 2, 3, 4 }, weights, { uses = how.uses })) do
                    local k = apart_from[i]
                    if g then want[k] = want[k] and want[k] + g or g end
                end
                for k, g in pairs(want) do
                    assert.is_truthy(got[k], text)
                    close(g:totable(), got[k], dtype == "float64" and 1e-10 or 1e-4)
                    compared = compared + 1
                end
                if dtype == "float64" then -- at values of which no two are alike, where minima have kinks
                    for i, t in ipairs(apart) do apart[i] = t:detach() * (1 + i / 8) end
                    assert.is_true(te.gradcheck(f, apart))
                end
            end
        end
        assert.is_true(compared > 150)
    end)
end)

describe("a result that nothing came back for", function()
    local function two(v) return te.sigmoid(v), te.sqrt(v) end

    it("has no part in the gradient, not even where its own would be infinite", function()
        for _, dtype in ipairs { "float32", "float64" } do
            local x = te.tensor({ 0, 4 }, { dtype = dtype, requires_grad = true })
            local first = te.pointwise(two)(x)
            first:sum():backward()
            assert.equal(0.25, x.grad[1]:item())
            local expected = te.grad(te.sigmoid(x):sum(), { x })[1]
            assert.same(expected:totable(), x.grad:totable())
            local _, second = te.pointwise(two)(x)
            x.grad = nil
            second:sum():backward()
            assert.same({ math.huge, 0.25 }, x.grad:totable())
        end
    end)

    it("gives none to what it alone was made of, fused or not", function()
        for _, fused in ipairs { true, false } do
            local x = te.tensor({ { 0, 4 } }, { requires_grad = true })
            local before = te.set_fusion(fused)
            local root = te.Sequential(te.Pointwise(te.sigmoid), te.MakeExtraOutput(),
                te.Pointwise(function(v) return te.sqrt(v - 0.5) end), te.Linear(2, 2))
            local _, extra = root(x)
            te.set_fusion(before)
            extra:sum():backward()
            assert.equal(0.25, x.grad[1][1]:item())
            assert.is_nil(root[4].weight.grad)
        end
        local x = te.ones({ 3 }, { requires_grad = true })
        local w = te.ones({ 3 }, { requires_grad = true })
        local first = te.pointwise(function(a, b) return a * 2, b * 3 end)(x, w)
        first:sum():backward()
        assert.same({ 2, 2, 2 }, x.grad:totable())
        assert.is_nil(w.grad)
    end)
end)

describe("te.cast", function()
    it("says at which dtypes gradients end", function()
        local x = te.ones({ 2 }, { requires_grad = true })
        for _, dtype in ipairs { "bfloat16", "float16", "float64" } do assert.is_true(x:to(dtype).requires_grad) end
        for _, dtype in ipairs { "int64", "int32", "uint8", "bool", "float8_e4m3", "float8_e5m2" } do
            assert.is_false(x:to(dtype):to("float32").requires_grad)
        end
        assert.is_truthy(te.help("cast"):find("Gradients end at integers, bool and float8", 1, true))
    end)
end)

describe("positions and truth values among results", function()
    it("have no gradient, so they are targets and inputs like any other", function()
        local x = te.tensor({ { 3, 1, 2 }, { 0, 5, 4 } }, { requires_grad = true })
        local values, positions = te.topk(x, 2)
        assert.is_true(values.requires_grad)
        assert.is_false(positions.requires_grad)
        local labels = positions:narrow(2, 1, 1):reshape { 2 }
        te.cross_entropy(x, labels):backward()
        assert.is_true(x.grad:sum():abs():item() < 1e-6)
        x.grad = nil
        values:sum():backward()
        assert.same({ { 1, 0, 1 }, { 0, 1, 1 } }, x.grad:totable())
        positions:add_(1)
        positions[1] = 0
        assert.same({ { 0, 0 }, { 2, 3 } }, positions:totable())
    end)

    it("of te.checkpoint and of operations of one's own have none", function()
        local x = te.tensor({ 3, 1, 2 }, { requires_grad = true })
        local y, place = te.checkpoint(function(v) return v * 2, te.argmax(v) end, x)
        assert.is_false(place.requires_grad)
        y:sum():backward()
        assert.same({ 2, 2, 2 }, x.grad:totable())
        local only = te.checkpoint(function(v) return te.argmax(v) end, x)
        assert.is_false(only.requires_grad)
        assert.equal(0, only:item())
    end)

    it("keep no graph", function()
        local kept = {}
        collectgarbage()
        local before = te.memory_stats().current
        for i = 1, 8 do
            local x = te.randn({ 100, 100 }, { requires_grad = true })
            kept[i] = select(2, te.topk(x:exp(), 1))
        end
        collectgarbage()
        collectgarbage()
        assert.is_true(te.memory_stats().current - before < 8 * 100 * 8 + 40000)
    end)
end)

describe("te.grad", function()
    it("gives gradients without touching .grad", function()
        local x, y, z = leaf { 2 }, leaf { 3 }, leaf { 4 }
        local gx, gy = unpack(te.grad(te.sum(x * y), { x, y }))
        close({ 3 }, gx)
        close({ 2 }, gy)
        assert.is_nil(x.grad)
        close({ 12 }, te.grad(te.sum(x ^ 3), x))
        assert.is_nil(te.grad(te.sum(x), z))
        assert.same(false, te.grad(te.sum(x), { x, z })[2])
        close({ 10 }, te.grad(x * 2, x, { grad_outputs = te.tensor({ 5 }, { dtype = "float64" }) }))
    end)

    it("reaches results inside the graph", function()
        local x = leaf { 2 }
        local y = x * x
        close({ 12 }, te.grad(te.sum(y * 3), y) * 4)
    end)

    it("gives memory that nobody else sees", function()
        local x = leaf { 1, 1, 1 }
        local a, b = x * 1, x * 2
        local y = a + b
        local ga, gb = unpack(te.grad((y * y):sum(), { a, b }))
        ga:zero_()
        close({ 6, 6, 6 }, gb)

        local seed = te.ones({ 3 }, { dtype = "float64" })
        y = x * 1
        te.grad(y, y, { grad_outputs = seed }):zero_()
        close({ 1, 1, 1 }, seed)
        y = x * 1
        te.grad(y:view { 3, 1 }, y, { grad_outputs = seed:view { 3, 1 } }):zero_()
        close({ 1, 1, 1 }, seed)

        y = x * 1
        local seen = y:view { 3, 1 }
        local both = te.grad(seen, { y, seen }, { grad_outputs = te.ones({ 3, 1 }, { dtype = "float64" }) })
        both[1]:zero_()
        close({ { 1 }, { 1 }, { 1 } }, both[2])

        local twice = te.grad((x * x):sum(), { x, x })
        twice[1]:zero_()
        close({ 2, 2, 2 }, twice[2])
    end)
end)

describe("scopes", function()
    it("te.no_grad records nothing, returns results, restores after errors", function()
        local x = leaf { 1 }
        local y, n = te.no_grad(function(a) return a * 2, 7 end, x)
        assert.is_false(y.requires_grad)
        assert.equal(7, n)
        local problem = { "mine" }
        local ok, caught = pcall(te.no_grad, function() error(problem) end)
        assert.is_false(ok)
        assert.equal(problem, caught)
        assert.is_true((x * 2).requires_grad)
        assert.is_true(te.no_grad(te.enable_grad, function() return x * 2 end).requires_grad)
        assert.error_matches(function() te.no_grad(3) end, "te%.no_grad: fn: expected a function, got number 3")
    end)

    it("keep the traceback of errors", function()
        local function inner() error("deep") end
        local ok, text = xpcall(function() te.no_grad(function() inner() return 1 end) end, function(e) return e end)
        assert.is_false(ok)
        assert.is_truthy(text:find("autograd_spec.lua:%d+: deep"))
    end)

    it("may be left by a coroutine", function()
        local co = coroutine.wrap(function() te.no_grad(function() coroutine.yield(1) end) return 2 end)
        assert.equal(1, co())
        assert.equal(2, co())
        assert.is_true(te._core.grad_enabled())
    end)

    it("te.autocast sets the compute dtype", function()
        local x, w = te.ones(2, 4), te.ones(3, 4)
        assert.equal("bfloat16", te.autocast({ dtype = "bfloat16" }, function() return te.linear(x, w).dtype end))
        assert.equal("float32", te.autocast({ dtype = "bfloat16", enabled = false },
            function() return te.linear(x, w).dtype end))
        assert.equal("float32", te.linear(x, w).dtype)
        pcall(te.autocast, { dtype = "bfloat16" }, error, "x")
        assert.equal("float32", te.linear(x, w).dtype)
        assert.error_matches(function() te.autocast({ recipe = {} }, print) end, "recipe")
        assert.error_matches(function() te.autocast({ dtyp = "bfloat16" }, print) end, 'did you mean "dtype"')
        assert.error_matches(function() te.autocast({ dtype = "int64" }, print) end, "int64")
    end)
end)

describe("te.gradcheck", function()
    it("takes one input without a list", function()
        assert.is_true(te.gradcheck(te.gelu, te.randn({ 3 }, { dtype = "float64" })))
    end)

    it("accepts right gradients and says where wrong ones are", function()
        local x = te.tensor({ { 0.3, 0.7 }, { 1.1, -0.4 } }, { dtype = "float64" })
        assert.is_true(te.gradcheck(function(a) return te.exp(a) * a end, { x }))
        local function wrong(a)
            return te._core.custom(function(_, v) return v * v end, function(_, d) return d * 3 end, a)
        end
        assert.error_matches(function() te.gradcheck(wrong, { x }) end,
            "te%.gradcheck: input 1, element 1: backward gives .*, differences give")
        local random = te.rng_state()
        assert.error_matches(function() te.gradcheck(function() return te.ones(1) end, { x }) end, "does not depend")
        assert.has_error(function() te.gradcheck(function(v) return error(te.randn { 1 }, 0) or v end, { x }) end)
        assert.equal(random, te.rng_state())
    end)
end)

describe("te.gradcheck of float32", function()
    local functions = { te.gelu, te.exp, te.tanh, te.softmax, function(a) return te.exp(a) * a end,
        function(a) return te.layer_norm(a * a) end, function(a) return te.matmul(a, a:transpose()) end }

    it("accepts right gradients, also of large and small values", function()
        te.manual_seed(1)
        for _, fn in ipairs(functions) do assert.is_true(te.gradcheck(fn, te.randn { 4, 6 })) end
        for _, scale in ipairs { 1e-3, 1e3 } do
            assert.is_true(te.gradcheck(function(a) return a * a * a end, te.randn { 30, 40 } * scale))
        end
    end)

    it("finds wrong ones, and wants float64 instead of fewer bits", function()
        local function nearly(a)
            return te._core.custom(function(_, v) return v * v end, function(_, d) return d * 2.1 end, a)
        end
        assert.error_matches(function() te.gradcheck(nearly, te.ones { 3 }) end, "input 1, element 1: backward gives")
        for _, dtype in ipairs { "bfloat16", "float16", "float8_e4m3" } do
            assert.error_matches(function() te.gradcheck(te.exp, te.ones({ 3 }):to(dtype)) end,
                "te.gradcheck: input 1: differences say little in " .. dtype .. "; use float64", 1, true)
        end
    end)
end)

describe("operations defined in Lua", function()
    local function square(x)
        return te._core.custom(function(ctx, a)
            ctx:save_for_backward(a)
            return a * a
        end, function(ctx, d)
            local a = ctx:saved_tensors()
            return d * a * 2
        end, x)
    end

    it("take part in gradients", function()
        local x = leaf { 1, 2, 3 }
        te.sum(square(x) * x):backward()
        close({ 3, 12, 27 }, x.grad)
        assert.is_true(te.gradcheck(square, { te.tensor({ 0.5, -2 }, { dtype = "float64" }) }))
        assert.is_false(te.no_grad(square, x).requires_grad)
    end)

    it("have several inputs and outputs, some without gradient", function()
        local function both(a, factor, b)
            return te._core.custom(function(_, u, f, v) return u * f, v + 1 end, function(_, du, dv)
                return du and du * factor, nil, dv
            end, a, factor, b)
        end
        local a, b = leaf { 1, 2 }, leaf { 3, 4 }
        local p, q = both(a, 5, b)
        te.sum(p + q):backward()
        close({ 5, 5 }, a.grad)
        close({ 1, 1 }, b.grad)
        local _, r = both(a, 5, b)
        te.sum(r):backward()
        close({ 5, 5 }, a.grad)
    end)

    it("pass errors unchanged", function()
        local x, mine = leaf { 1 }, setmetatable({}, { __tostring = function() return "mine" end })
        local y = te._core.custom(function(_, a) return a * 1 end, function() error(mine) end, x)
        local ok, caught = pcall(y.backward, y)
        assert.is_false(ok)
        assert.equal(mine, caught)
        local z = te._core.custom(function(_, a) return a * 1 end, function() error("no such luck") end, x)
        assert.error_matches(function() te.sum(z):backward() end, "^no such luck")
        assert.is_true(te._core.grad_enabled())
    end)

    it("check what backward returns", function()
        local x = leaf { 1, 2 }
        for _, wrong in ipairs { te.ones({ 3 }, { dtype = "float64" }), "x", 5 } do
            local y = te._core.custom(function(_, a) return a * 1 end, function() return wrong end, x)
            assert.error_matches(function() te.sum(y):backward() end, "gradient of input 1")
        end
        assert.error_matches(function() te._core.custom(function() return 1 end, function() end, x) end,
            "expected a tensor, got number 1")
        assert.error_matches(function() te._core.custom(function() end, function() end, x) end, "returned 0 values")
    end)

    it("do not leak when they save their own results", function()
        collectgarbage()
        local before = te.memory_stats().current
        for _ = 1, 20 do
            local x = te.ones({ 1000, 100 }, { requires_grad = true })
            te._core.custom(function(ctx, a)
                local y = te.exp(a)
                ctx:save_for_backward(y)
                return y
            end, function(ctx, d) return d * ctx:saved_tensors() end, x)
        end
        collectgarbage()
        collectgarbage()
        assert.is_true(te.memory_stats().current <= before + 1e6)
    end)

    it("may run backward inside backward", function()
        local x = leaf { 2 }
        local y = te._core.custom(function(_, a) return a * a end, function(_, d)
            local inner = leaf { 3 }
            te.enable_grad(function() te.sum(inner * inner):backward() end)
            return d * inner.grad
        end, x)
        te.sum(y):backward()
        close({ 6 }, x.grad)
    end)
end)

describe("te.checkpoint", function()
    it("raises when what it reads again was changed in place since", function()
        local function nested(layer, x)
            return te.checkpoint(function(v) return te.checkpoint(layer, v) * 1 end, x)
        end
        for _, run in ipairs { te.checkpoint, nested } do
            for _, name in ipairs { "x", "weight", "nothing" } do
                local layer, other = te.Linear(2, 2), te.Linear(2, 2)
                local x = te.tensor({ { 1, 2 } }, { requires_grad = true })
                local y, changed = run(layer, x), name == "x" and x or name == "weight" and layer.weight or other.weight
                te.no_grad(function() changed:mul_(2) end)
                local ok, problem = pcall(function() y:sum():backward() end)
                assert.equal(name == "nothing", ok)
                if not ok then
                    assert.is_truthy(problem:find("te%.checkpoint: backward: .* changed in place since"), problem)
                end
                other(te.ones({ 1, 2 })):sum():backward() -- a stretch of its own
            end
        end
    end)

    it("raises for what takes no part in gradients as well, but not for what it writes itself", function()
        local frozen, plan = te.Linear(2, 2):requires_grad_(false), te.Sequential(te.Linear(2, 2), te.GELU())
        local leaf, count, offset = te.ones({ 2 }, { requires_grad = true }), te.zeros { 1 }, te.zeros { 2 }
        local made = leaf * 1
        plan:requires_grad_(false)
        local cases = {
            { frozen.weight, frozen },
            { plan[1].weight, plan },
            { made, function(v) return v * made end },
            { offset, function(v) return v * te.ge(offset + 1, 1) end }, -- no part of this is recorded
            { te.ones { 1 }, function(v) -- reads nothing that was written after it
                te.no_grad(function() count:add_(1) end)
                return v * te.sum(count)
            end, true },
        }
        for i, case in ipairs(cases) do
            local changed, fn, fine = unpack(case)
            local y = te.checkpoint(fn, te.tensor({ { 1, 2 } }, { requires_grad = true }))
            te.no_grad(function() changed:mul_(2) end)
            local ok, problem = pcall(function() y:sum():backward() end)
            assert.equal(fine or false, ok, i)
            if not fine then
                assert.is_truthy(problem:find("te%.checkpoint: backward: .* changed in place since"), problem)
            end
        end
    end)

    it("needs a gradient where something in it does, whatever that is", function()
        local x, leaf = te.ones { 2, 2 }, te.ones({ 2, 2 }, { requires_grad = true })
        local made, layer, inner = leaf * 2, te.Linear(2, 2), te.Sequential(te.Linear(2, 2), te.GELU())
        local opened = te.autocast({ dtype = "bfloat16" }, te.Linear(2, 2), x):detach()
        local square = function(v)
            return te._core.custom(function(_, u) return u * u end, function(_, dy) return dy end, v)
        end
        local function apply(fn) return te.checkpoint(fn, x).requires_grad end
        for name, fn in pairs {
            leaf = function(v) return v + leaf end, ["what is no leaf"] = function(v) return te.matmul(v, made) end,
            layer = layer, container = inner, module = te.Residual(layer),
            ["a layer beside others"] = function(v) return v * 2, layer(v) end,
            ["the leaf itself"] = function() return leaf end, row = function() return leaf[1] end,
            view = function() return leaf:transpose() end, custom = function() return square(leaf) end,
            nested = function(v) return te.checkpoint(layer, v) end,
            ["one caught"] = function(v)
                pcall(te.checkpoint, function() error(tostring(v * leaf)) end)
                return layer(v)
            end,
            ["a list"] = function() return te.cat { x, leaf } end,
            autocast = function(v) return te.autocast({ dtype = "bfloat16" }, layer, v) end,
        } do
            assert.is_true(apply(fn), name)
        end
        layer:requires_grad_(false)
        inner:requires_grad_(false)
        for name, fn in pairs {
            input = function(v) return v * 2 end, layer = layer, container = inner,
            ["what stands outside"] = function() return opened end,
            nested = function(v) return te.checkpoint(inner, te.checkpoint(layer, v)) end,
            custom = function(v) return square(v) end,
        } do
            assert.is_false(apply(fn), name)
        end
        assert.is_true(te.checkpoint(inner, leaf).requires_grad)
        assert.is_true(te.checkpoint(function(v) return v end, leaf).requires_grad)
    end)

    local w = te.randn({ 4, 4 }, { dtype = "float64" })

    local function block(x) return te.dropout(te.tanh(te.matmul(x, w)), { p = 0.3 }) end

    it("gives the same results and gradients as running directly", function()
        w.requires_grad = true
        local results = {}
        for _, run in ipairs { function(f, x) return f(x) end, te.checkpoint } do
            te.manual_seed(5)
            local x = te.randn({ 3, 4 }, { dtype = "float64", requires_grad = true })
            local y = run(block, x)
            local after = te.rand { 1 }:item()
            te.sum(y * y):backward()
            results[#results + 1] = { y:totable(), x.grad:totable(), w.grad:totable(), after, te.rng_state() }
            w.grad = nil
        end
        assert.same(results[1], results[2])
    end)

    it("computes parameters' gradients also when no input needs one", function()
        te.manual_seed(5)
        te.sum(te.checkpoint(block, te.ones({ 2, 4 }, { dtype = "float64" }))):backward()
        assert.is_not_nil(w.grad)
        w.grad = nil
    end)

    it("gives te.grad the gradients of parameters, and touches no .grad", function()
        local make = {
            function(layer, x) return layer(x) end,
            function(layer, x) return te.checkpoint(layer, x) end,
            function(layer, x) return te.checkpoint(function(v) return te.checkpoint(layer, v) * 1 end, x) end,
            function(layer, x) -- the weight is used outside, too
                return te.checkpoint(layer, x) + te.linear(x, layer.weight) * 0
            end,
        }
        local layer, other = te.Linear(4, 3, { params_dtype = "float64" }), te.ones({ 2 }, { requires_grad = true })
        local values = te.randn({ 2, 4 }, { dtype = "float64" })
        local expected
        for _, run in ipairs(make) do
            local x = te.tensor(values, { requires_grad = true })
            local y = run(layer, x)
            local got = te.grad((y * y):sum(), { layer.weight, x, layer.bias, other })
            assert.is_false(got[4])
            assert.is_nil(layer.weight.grad)
            assert.is_nil(x.grad)
            expected = expected or got
            for i = 1, 3 do close(expected[i]:totable(), got[i]) end
        end
        te.checkpoint(layer, values):sum():backward() -- and a backward pass fills them
        assert.is_not_nil(layer.weight.grad)
        layer:zero_grad()
    end)

    it("gives results from outside, which it reads as they are, their gradients", function()
        local x = leaf { 2, 3 }
        local h = x * x
        close({ 3, 3 }, te.grad(te.checkpoint(function() return h * 3 end):sum(), h))

        h = x * x
        local y, z = te.checkpoint(function() return h * 3 end), te.checkpoint(function() return h * 5 end)
        te.sum(z + y):backward()
        close({ 32, 48 }, x.grad)

        x.grad, h = nil, x * x
        local twice = te.checkpoint(function() return h * h end):sum()
        twice:backward(nil, { retain_graph = true })
        close({ 32, 108 }, x.grad)
        twice:backward()
        close({ 64, 216 }, x.grad)
        assert.error_matches(function() twice:backward() end, "used before")
    end)

    -- A graph in which stretches read whatever was made before them: run plainly, and with stretches recomputed.
    local function random_graph(seed, stretch, leaves)
        math.randomseed(seed)
        local made = { unpack(leaves) }
        local function pick() return made[math.random(#made)] end
        local function body(depth)
            local a, b, kind = pick(), pick(), math.random(3)
            local function compute(v)
                if kind == 1 then return te.tanh(v * b) end
                return kind == 2 and v * a + b or v * 0.5 - te.sin(a), te.tanh(a)
            end
            if depth == 0 then return compute, pick() end
            local inside, x = body(depth - 1)
            return function(v) return stretch(inside, compute(v)) * 0.5 + (math.pi - b * a) end, x
        end
        for _ = 1, math.random(3, 6) do
            local choice = math.random(4)
            if choice == 1 then
                made[#made + 1] = pick() * pick()
            else
                local first, second = stretch(body(choice == 2 and 1 or 0))
                made[#made + 1] = first
                made[#made + 1] = second
            end
        end
        local total = made[#made]
        for i = #leaves + 1, #made - 1 do
            if math.random(3) == 1 then total = total + made[i] * (i / 10) end
        end
        return total:sum(), made
    end

    it("gives the gradients of running directly, whatever its functions read", function()
        te.manual_seed(5)
        local function direct(fn, ...) return fn(...) end
        for seed = 1, 60 do
            local leaves = { te.randn({ 3 }, { dtype = "float64" }), te.randn({ 3 }, { dtype = "float64" }) }
            for _, t in ipairs(leaves) do t.requires_grad = true end
            local function run(stretch, way)
                local loss, made = random_graph(seed, stretch, leaves)
                if way == "asked" then return te.grad(loss, made) end
                for _, t in ipairs(leaves) do t.grad = nil end
                loss:backward(nil, { retain_graph = way == "twice" })
                if way == "twice" then loss:backward() end
                return { leaves[1].grad or false, leaves[2].grad or false }
            end
            for _, way in ipairs { "once", "twice", "asked" } do
                local want, got = run(direct, way), run(te.checkpoint, way)
                for i, g in ipairs(want) do
                    if g then close(g:totable(), got[i], 1e-11) else assert.is_false(got[i]) end
                end
            end
        end
    end)

    it("has several results and passes other arguments", function()
        local x = leaf { 1, 2 }
        local a, b = te.checkpoint(function(v, k) return v * k, v * v end, x, 3)
        te.sum(a + b):backward()
        close({ 5, 7 }, x.grad)
    end)

    it("recomputes with the compute dtype of forward", function()
        local dtypes = {}
        local x = te.ones({ 2, 4 }, { requires_grad = true })
        local y = te.autocast({ dtype = "bfloat16" }, te.checkpoint, function(v)
            local z = te.linear(v, te.ones(3, 4))
            dtypes[#dtypes + 1] = z.dtype
            return z
        end, x)
        te.sum(y):backward()
        assert.same({ "bfloat16", "bfloat16" }, dtypes)
        assert.equal("float32", x.grad.dtype)
    end)
end)

describe("main_grad", function()
    before_each(function() te.manual_seed(3) end)

    local ids = te.randint(0, 10, { 2, 20 }, { dtype = "int32" })
    local models = {
        products = { function() return te.Sequential(te.Linear(32, 48), te.GELU(), te.Linear(48, 16)) end },
        norms = { function() return te.Sequential(te.LayerNorm(32), te.Linear(32, 48), te.RMSNorm(48)) end },
        attention = { function()
            return te.Sequential(te.Residual(te.RMSNorm(32), te.MultiHeadedSelfAttention(32, 4)))
        end },
        embedding = { function() return te.Sequential(te.Embedding(11, 32), te.Linear(32, 8)) end, ids },
    }
    for name, model in pairs(models) do
        for dtype, bound in pairs { float32 = 1e-6, bfloat16 = 4e-3, float16 = 1e-3 } do
            it(("takes the gradients of %s in %s, fused or not"):format(name, dtype), function()
                local plain, own = model[1](), model[1]()
                own:load_state_dict(plain:state_dict())
                plain:to(dtype)
                own:to(dtype)
                local x, main = model[2] or te.randn({ 2, 20, 32 }, { dtype = dtype }), {}
                for key, p in own:named_parameters() do
                    main[key] = te.ones(p.shape)
                    p.main_grad = main[key]
                end
                for _, fused in ipairs { true, false } do
                    te.set_fusion(fused)
                    plain(x):sum():backward()
                    own(x):sum():backward()
                end
                te.set_fusion(true)
                local kept = {}
                for key, p in own:named_parameters() do
                    assert.is_nil(p.grad)
                    kept[key] = p.main_grad
                end
                for key, p in plain:named_parameters() do
                    local grad = p.grad:to "float32"
                    local off = (main[key] - 1 - grad):abs():max():item()
                    assert.is_true(off <= bound * grad:abs():max():item(), key .. " " .. off)
                    assert.same(main[key]:totable(), kept[key]:totable())
                end
            end)
        end
    end

    it("adds what 16 bits would lose", function()
        local p = te.zeros({ 1 }, { dtype = "bfloat16", requires_grad = true })
        p.main_grad = te.zeros { 1 }
        for _ = 1, 1000 do (p * 1):sum():backward() end
        assert.equal(1000, p.main_grad:item())
        p:backward(te.ones({ 1 }, { dtype = "bfloat16" })) -- the leaf itself
        assert.equal(1001, p.main_grad:item())
        assert.equal(1, te.grad((p * 1):sum(), p):item()) -- asked for, not added
        assert.equal(1001, p.main_grad:item())
        p.main_grad = nil
        p:sum():backward()
        assert.equal(1, p.grad:item())
    end)

    it("stays with a parameter that becomes another dtype", function()
        local m, buffer = te.Linear(2, 2, { bias = false }), te.zeros { 4 }
        m.weight.main_grad = buffer:view { 2, 2 }
        m:to "bfloat16"
        m(te.ones({ 1, 2 }, { dtype = "bfloat16" })):sum():backward()
        assert.is_nil(m.weight.grad)
        assert.same({ 1, 1, 1, 1 }, buffer:totable())
        m.weight.main_grad = te.ones({ 2, 2 }, { dtype = "bfloat16" })
        m:to "float16"
        assert.equal("float16", m.weight.main_grad.dtype)
        assert.equal(4, m.weight.main_grad:sum():item())
    end)

    it("is memory that others may see, and nothing else", function()
        local buffer = te.zeros { 10 }
        local p = te.ones({ 2, 2 }, { requires_grad = true })
        p.main_grad = buffer:narrow(1, 3, 4):view { 2, 2 }
        te.sum(p * 3):backward()
        assert.same({ 0, 0, 3, 3, 3, 3, 0, 0, 0, 0 }, buffer:totable())
        local function refused(message, grad, of)
            assert.error_matches(function() (of or p).main_grad = grad end, message, 1, true)
        end
        refused(("t.main_grad = value: {4} of float32 on %s for a tensor {2,2} of"):format(p.device), te.zeros { 4 })
        refused("its dtype or float32 is needed", te.zeros({ 2, 2 }, { dtype = "bfloat16" }))
        refused("t.main_grad = value: elements share memory", te.zeros({ 1, 2 }):expand { 2, 2 })
        refused("t.main_grad = value: contiguous memory", te.zeros({ 2, 2 }):transpose(1, 2))
        refused("of a leaf", te.zeros { 2, 2 }, p * 2)
        refused("t.main_grad = value: expected a tensor", 3)
    end)
end)

describe("a gradient that is assigned", function()
    for _, field in ipairs { "grad", "main_grad" } do
        it("is a view of what it was made of: " .. field, function()
            local p, g = te.ones({ 2, 2 }, { requires_grad = true }), te.ones { 2, 2 }
            p[field] = g
            g:mul_(3)
            assert.same({ { 3, 3 }, { 3, 3 } }, p[field]:totable())
            te.sum(p * 2):backward()
            assert.same({ { 5, 5 }, { 5, 5 } }, g:totable())
            te.no_grad(function() p[field]:zero_() end)
            assert.same({ { 0, 0 }, { 0, 0 } }, g:totable())
            p[field] = p[field]
            assert.same({ { 0, 0 }, { 0, 0 } }, p[field]:totable())
            p[field] = nil
            assert.is_nil(p[field])
        end)

        it("holds nobody in a circle: " .. field, function()
            local function count()
                for _ = 1, 3 do collectgarbage() end
                return te.memory_stats(te.zeros({ 0 }).device).current
            end
            local before = count()
            for _ = 1, 100 do
                local a, b, c = te.zeros { 1000 }, te.zeros { 1000 }, te.zeros { 1000 }
                a[field], b[field], c[field] = b, c, a
                a[field][field], b[field][field] = a, a[field]
            end
            assert.equal(before, count())
        end)

        it("may have one in its turn, and so on: " .. field, function()
            local first = te.zeros { 1 }
            local last, g = first, te.zeros { 1 }
            for _ = 1, 300000 do
                last[field] = g
                last = last[field]
            end
            last = nil
            collectgarbage() -- the handles in between
            collectgarbage()
            assert.is_truthy(first[field][field][field])
            first = nil
            collectgarbage()
            collectgarbage()
        end)
    end

    it("stands outside the graph", function()
        local p, g = te.ones({ 2 }, { requires_grad = true }), te.ones({ 2 }, { requires_grad = true })
        p.grad = g
        assert.is_false(p.grad.requires_grad)
        assert.is_true(g.requires_grad)
        p.grad = g * 2
        assert.is_true(p.grad.is_leaf)
    end)
end)
