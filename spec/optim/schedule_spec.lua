local te = require "te"

describe("te.optim.cosine", function()
    it("warms up, falls and stays", function()
        local lr = te.optim.cosine { max = 1, min = 0.1, warmup = 10, steps = 110 }
        assert.is_true(lr(1) > 0 and lr(1) < lr(10) and lr(10) < 1)
        assert.near(10 / 11, lr(10), 1e-12)
        assert.equal(1, lr(11))
        assert.is_true(lr(10.999) < 1 and lr(12) < 1)
        assert.near(0.55, lr(60.5), 1e-9)
        assert.equal(0.1, lr(110))
        assert.equal(0.1, lr(1000))
        local short = te.optim.cosine { max = 1, warmup = 3, steps = 10 }
        for step, rate in ipairs { 0.25, 0.5, 0.75, 1, 0.933012701892, 0.75, 0.5, 0.25, 0.066987298108, 0, 0 } do
            assert.near(rate, short(step), 1e-9)
        end
        local two = te.optim.cosine { max = 1, min = 0.5, steps = 2 }
        assert.same({ 1, 0.5 }, { two(1), two(2) })
        for _, steps in ipairs { 3, 4 } do
            assert.error_matches(function() te.optim.cosine { max = 1, warmup = 4, steps = steps } end,
                ("te.optim.cosine: option warmup: expected fewer than the %d steps, got 4"):format(steps), 1, true)
        end
        assert.error_matches(function() te.optim.cosine { max = 1 } end, "max and steps are needed")
        for _, step in ipairs { -5, 0, "x" } do
            assert.error_matches(function() lr(step) end, "te.optim.cosine: step: expected number, at least 1, got ")
        end
        assert.error_matches(function() lr() end, "te.optim.cosine: step: expected number, at least 1, got nil")
    end)
end)
