local te = require "te"

describe("small operations", function()
    local x = te.tensor { { 1, 2, 3, 4 } }

    it("Identity returns its input", function() assert.equal(x, te.Identity()(x)) end)

    it("collectives stand for a group of one process", function()
        local p = te.ones({ 2, 3 }, { requires_grad = true })
        for _, name in ipairs { "AllReduce", "AllGather", "ReduceScatter" } do
            p.grad = nil
            local y = te.Sequential(te.ConstantScale(2), te.ops[name](), te.ConstantScale(3))(p)
            assert.same({ { 6, 6, 6 }, { 6, 6, 6 } }, y:totable())
            y:sum():backward()
            assert.same({ { 6, 6, 6 }, { 6, 6, 6 } }, p.grad:totable())
            assert.equal(name .. "()", tostring(te[name]()))
            assert.error_matches(function() te[name] { group = {} } end,
                "te%." .. name .. ": option group: expected a group of te%.distributed, got a table")
        end
        assert.equal(p, te.AllReduce { reduce_in_backward = false }(p))
    end)

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

    it("StochasticDepth drops whole samples while training and keeps the mean", function()
        te.manual_seed(1)
        local drop, p = te.StochasticDepth(0.25), te.ones({ 4000, 2, 3 }, { requires_grad = true })
        local y = drop(p)
        local samples = y:view(4000, 6)
        assert.same(samples:min(2):totable(), samples:max(2):totable())
        local zeros = te.eq(samples:max(2), 0):to("float32"):mean():item()
        assert.is_true(math.abs(zeros - 0.25) < 0.03)
        assert.is_true(math.abs(y:max():item() - 1 / 0.75) < 1e-6)
        y:sum():backward()
        assert.same(y:totable(), p.grad:totable())
        drop:eval()
        assert.equal(p, drop(p))
        assert.equal(0, te.StochasticDepth(1)(x):abs():max():item())
        assert.error_matches(function() te.StochasticDepth(2) end,
            "te%.StochasticDepth: p: expected number from 0 to 1")
    end)

    it("StochasticDepth knows packed sequences, and takes a matrix for one", function()
        te.manual_seed(1)
        local drop, lens = te.StochasticDepth(0.5), te.tensor({ 3, 0, 1, 2 }, { dtype = "int32" })
        local seen = {}
        for _ = 1, 40 do
            local y = drop(te.ones({ 6, 2 }), lens):select(2, 1):totable()
            assert.is_true(y[1] == y[2] and y[2] == y[3] and y[5] == y[6])
            seen[("%g %g %g"):format(y[1], y[4], y[5])] = true
            local whole = drop(te.ones({ 6, 2 }))
            assert.equal(whole:min():item(), whole:max():item())
        end
        local n = 0
        for _ in pairs(seen) do n = n + 1 end
        assert.equal(8, n)
        assert.error_matches(function() drop(te.ones({ 5, 2 }), lens) end, "seq_lens%[4%] = 2 does not fit 5 tokens")
        assert.error_matches(function() drop(te.ones({ 7, 2 }), lens) end, "seq_lens add up to 6 of 7 tokens")
        assert.error_matches(function() drop(te.ones({ 7, 2, 1 }), lens) end, "seq_lens must be {batch}")
    end)

    it("residual operations never write where the caller sees it", function()
        local a, b = te.tensor { 1, 2 }, te.tensor { 10, 20 }
        local y = te.AddExtraInput({ in_place = true })(a, b)
        assert.same({ 11, 22 }, y:totable())
        assert.same({ 1, 2 }, a:totable())
        assert.same({ 10, 20 }, b:totable())
        local p = te.tensor({ 1, 2 }, { requires_grad = true })
        local first, second = te.MakeExtraOutput({ in_place = true })(p)
        te.add(first * 2, second * 3):sum():backward()
        assert.same({ 5, 5 }, p.grad:totable())
        assert.equal('MakeExtraOutput(channel="skip")', tostring(te.MakeExtraOutput({ channel = "skip" })))
        assert.error_matches(function() te.AddExtraInput({ inplace = true }) end, 'did you mean "in_place"')
    end)

    it("Reshape keeps the shape that it was given", function()
        local shape = { -1, 2 }
        local reshape = te.Reshape(shape)
        shape[2] = 3
        assert.same({ 3, 2 }, reshape(te.ones { 6 }).shape)
    end)

    it("Reshape checks its shape", function()
        assert.error_matches(function() te.Reshape({ -1, -1 }) end, "te%.Reshape: shape: 2 sizes are %-1")
        assert.error_matches(function() te.Reshape({ 2, "x" }) end, "te%.Reshape: shape%[2%]: expected integer")
        assert.error_matches(function() te.Reshape(2) end, "te%.Reshape: shape: expected table")
    end)
end)
