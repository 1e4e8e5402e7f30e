--- te.checkpoint: the gradients of running directly.

local close = require("spec.support.reference").assert_close
local te = require "te"

local function leaf(values) return te.tensor(values, { dtype = "float64", requires_grad = true }) end

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
