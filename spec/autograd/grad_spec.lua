--- te.grad, and the scopes that say what is recorded.

local close = require("spec.support.reference").assert_close
local te = require "te"

local function leaf(values) return te.tensor(values, { dtype = "float64", requires_grad = true }) end

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
        assert.is_truthy(text:find("grad_spec.lua:%d+: deep"))
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
