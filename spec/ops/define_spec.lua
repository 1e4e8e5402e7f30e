--- Operations as values: what te._core.define and te._core.operation hand out.

local te = require "te"

describe("te._core.define", function()
    local define = te._core.define

    it("makes an operation that is called like the others", function()
        local axpy = define("axpy(x, y; a: number = 2)", "r = a * x + y", { outputs = "r" })
        local x, y = te.tensor { 1, 2 }, te.tensor { 10, 20 }
        assert.same({ 12, 24 }, axpy(x, y):totable())
        assert.same({ 13, 26 }, axpy(x, y, { a = 3 }):totable())
        assert.same({ 12, 14 }, axpy(x, 10):totable())
        assert.same({ { 12, 22 }, { 14, 24 } }, axpy(te.tensor { { 1 }, { 2 } }, y):totable())
        assert.error_matches(function() axpy(x) end, "te%.axpy: argument y is missing")
        assert.error_matches(function() axpy(x, y, { b = 1 }) end, 'te%.axpy: unknown option "b"')
        assert.error_matches(function() axpy(x, te.ones({ 3 })) end, "te%.axpy: shapes do not broadcast: {2} and {3}")
    end)

    it("has a derived gradient", function()
        local f = define("f(x, y)", "d = x - y; a = d * d; b = exp(d) * y", { outputs = "a b" })
        local x, y = te.rand({ 3, 4 }, { dtype = "float64" }), te.rand({ 4 }, { dtype = "float64" })
        assert.is_true(te.gradcheck(function(...)
            local a, b = f(...)
            return a * b + a
        end, { x, y }))
    end)

    it("promotes, or takes the dtype of the first input or of te.autocast", function()
        local half, single = te.ones({ 2 }, { dtype = "bfloat16" }), te.ones({ 2 })
        local promoting = define("f(x, y)", "r = x + y", { outputs = "r" })
        local computing = define("f(x, y)", "r = x + y", { outputs = "r", compute = true })
        assert.equal("float32", promoting(half, single).dtype)
        assert.equal("bfloat16", computing(half, single).dtype)
        assert.equal("float32", computing(single, half).dtype)
        te.autocast({ dtype = "bfloat16" }, function()
            assert.equal("float32", promoting(single, single).dtype)
            assert.equal("bfloat16", computing(single, single).dtype)
        end)
        assert.equal("bool", define("f(x)", "y = x > 0", { truth = true })(single).dtype)
        assert.equal("float32", define("f(x)", "y = x / 2")(te.ones({ 2 }, { dtype = "int32" })).dtype)
    end)

    it("reduces along rows", function()
        local f = define("f(x)", "y = x - rowmean(x)", { rows = true })
        assert.same({ { -1, 1 }, { -2, 2 } }, f(te.tensor { { 1, 3 }, { 2, 6 } }):totable())
        assert.is_true(te.gradcheck(f, { te.rand({ 3, 5 }, { dtype = "float64" }) }))
    end)

    it("shows what it is", function()
        local f = define("f(x; a: number = 1.5)", "y = a * x")
        assert.equal("f(x; a: number = 1.5) { y = a * x }", tostring(f))
        assert.equal("f", f.name)
        assert.equal("y = a * x", f.formula)
        assert.equal("y", f.outputs)
        assert.equal("a", f.params[2].name)
        assert.equal(1.5, f.params[2].default)
        assert.is_nil(f.nothing)
    end)

    it("raises for texts that are no declaration", function()
        for _, case in ipairs {
            { { "f(x)", "y = z" }, "te%.f: f: formula at position 5, near 'z': unknown name" },
            { { "f(x", "y = x" }, "te%.define: \"f%(x\" is no signature" },
            { { "f()", "y = 1" }, "0 inputs and 1 results" },
            { { "f(x)", "y = x", { output = "y" } }, 'unknown option "output"' },
            { { "f(x)" }, "string expected" }, { {}, "string expected" },
            { { "f(x)", "y = x", 3 }, "expected a table" },
        } do
            assert.error_matches(function() define(unpack(case[1])) end, case[2])
        end
    end)

    it("cannot be taken apart", function()
        local f = define("f(x)", "y = x")
        assert.is_false(getmetatable(f))
        assert.has_error(function() f.name = "g" end)
        assert.has_error(function() return f + 1 end)
        for _ = 1, 3 do
            f = define("f(x)", "y = x * 2")
            collectgarbage()
        end
        assert.same({ 2 }, f(te.ones({ 1 })):totable())
    end)
end)

describe("te._core.operation", function()
    it("finds every operation, building blocks of others too", function()
        local x = te.randn({ 3, 4 })
        assert.same(te.silu(x):totable(), te._core.operation("silu")(x):totable())
        assert.same(te.gelu(x):totable(), te._core.operation("gelu_tanh")(x):totable())
        assert.equal("y = x * sigmoid(x)", te._core.operation("silu").formula)
        assert.is_nil(te._core.operation("linear").formula)
        assert.is_true(te._core.operation("swiglu").gated)
        assert.is_nil(te._core.operation("nothing"))
    end)
end)
