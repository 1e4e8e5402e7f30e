local te = require "te"

describe("small operations", function()
    local x = te.tensor { { 1, 2, 3, 4 } }

    it("Identity returns its input", function() assert.equal(x, te.Identity()(x)) end)

    it("Reshape reshapes and sends the gradient back", function()
        local p = te.ones({ 1, 4 }, { requires_grad = true })
        local y = te.Reshape({ 2, -1 })(p)
        assert.same({ 2, 2 }, y.shape)
        y:sum():backward()
        assert.same({ 1, 4 }, p.grad.shape)
        assert.equal("Reshape({2, -1})", tostring(te.Reshape({ 2, -1 })))
    end)

    it("ConstantScale multiplies", function()
        assert.same({ { 3, 6, 9, 12 } }, te.ConstantScale(3)(x):totable())
        assert.error_matches(function() te.ConstantScale("a") end, "te%.ConstantScale: scale: expected number")
    end)

    it("Dropout drops while training and keeps the mean", function()
        te.manual_seed(1)
        local dropout = te.Dropout(0.25)
        local y = dropout(te.ones({ 10000 }))
        local zeros = te.eq(y, 0):to("float32"):mean():item()
        assert.is_true(math.abs(zeros - 0.25) < 0.02)
        assert.is_true(math.abs(y:max():item() - 1 / 0.75) < 1e-6)
        dropout:eval()
        assert.equal(x, dropout(x))
        assert.error_matches(function() te.Dropout(1.5) end, "te%.Dropout: p: expected number from 0 to 1, got 1.5")
    end)

    it("MakeExtraOutput and AddExtraInput carry a residual", function()
        local p = te.tensor({ { 1, 2 } }, { requires_grad = true })
        local y, residual = te.Sequential(te.MakeExtraOutput(), te.ConstantScale(3))(p)
        y = te.Sequential(te.ConstantScale(2), te.AddExtraInput())(y, residual)
        assert.same({ { 7, 14 } }, y:totable())
        y:sum():backward()
        assert.same({ { 7, 7 } }, p.grad:totable())
    end)
end)
