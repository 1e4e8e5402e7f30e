local te = require "te"

describe("te.initializers", function()
    local init = te.initializers

    local function weight(fill) return te.Linear(20, 30, { init_method = fill }).weight:detach() end

    it("fill parameters with constants", function()
        for value, fill in pairs { [0] = init.zeros, [1] = init.ones, [0.5] = init.constant(0.5) } do
            local w = weight(fill)
            assert.equal(value, w:min():item())
            assert.equal(value, w:max():item())
        end
    end)

    it("fill parameters with random numbers", function()
        te.manual_seed(3)
        local w = weight(init.uniform(2, 3))
        assert.is_true(w:min():item() >= 2 and w:max():item() < 3 and w:max():item() > 2.8)
        w = weight(init.normal(5, 0.1))
        assert.is_true(math.abs(w:mean():item() - 5) < 0.02)
    end)

    it("say what is wrong with their arguments", function()
        for message, fn in pairs {
            ["te.initializers.uniform: low: expected number, got nil"] = function() init.uniform() end,
            ["te.initializers.uniform: high: expected number, at least 1, got 0"] = function() init.uniform(1, 0) end,
            ["te.initializers.normal: mean: expected number, got nil"] = function() init.normal(nil, 1) end,
            ["te.initializers.normal: std: expected number, at least 0, got -1"] = function() init.normal(0, -1) end,
            ["te.initializers.constant: value: expected number, got \"x\""] = function() init.constant "x" end,
        } do assert.error_matches(fn, message, 1, true) end
    end)
end)

describe("te.initializers", function()
    it("fill tensors and nothing else", function()
        for _, name in ipairs { "zeros", "ones" } do
            assert.error_matches(function() te.initializers[name](5) end,
                ("te.initializers.%s: t: expected a tensor, got 5"):format(name), 1, true)
        end
    end)
end)

describe("the libraries of te", function()
    it("name the nearest of their names where one is misspelled", function()
        for name, near in pairs { initializers = { "zero", "zeros" }, tokenizer = { "laod", "load" },
            data = { "opne", "open" }, numerics = { "wach", "watch" }, train = { "metrics", "Metrics" },
            optim = { "Adamw", "AdamW" }, models = { "gtp", "gpt" } } do
            assert.error_matches(function() return te[name][near[1]] end,
                ('te.%s has no "%s"; did you mean "%s"?'):format(name, near[1], near[2]), 1, true)
        end
    end)
end)
