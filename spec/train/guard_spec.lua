local te = require "te"

describe("te.train.guard", function()
    local model
    before_each(function() model = te.Sequential(te.Linear(2, 3), te.ReLU(), te.Linear(3, 1)) end)

    it("allows what is finite and counts what is not", function()
        local guard = te.train.guard(model)
        assert.is_true(guard:allows(1, 2))
        assert.is_false(guard:allows(0 / 0, 2))
        assert.is_false(guard:allows(1, math.huge))
        assert.is_true(guard:allows(1, 2))
        assert.is_false(guard:allows(-math.huge, 2))
        assert.equal(3, guard.skipped)
    end)

    local function third(guard)
        guard:allows(0 / 0, 1)
        guard:allows(0 / 0, 1)
        local ok, problem = pcall(guard.allows, guard, 0 / 0, 1)
        assert.is_false(ok)
        assert.equal(77, problem.code)
        return problem.message
    end

    it("ends at the third in a row, naming tensor and layer", function()
        te.no_grad(function() model[3].weight:fill_(0 / 0) end)
        assert.is_truthy(third(te.train.guard(model)):find("parameter 3.weight of Linear(in_features=3", 1, true))
    end)

    it("ends before damage is saved, naming parameters and states", function()
        local guard, optimizer = te.train.guard(model), te.optim.AdamW(model)
        model(te.ones { 1, 2 }):sum():backward()
        optimizer:step()
        guard:check(optimizer)
        optimizer.state[model[3].bias].exp_avg_sq:fill_(math.huge)
        local ok, problem = pcall(guard.check, guard, optimizer)
        assert.is_false(ok)
        assert.equal(77, problem.code)
        assert.matches("exp_avg_sq 3.bias of Linear(in_features=3", problem.message, 1, true)
        assert.is_nil(guard:damage())
        te.no_grad(function() model[1].weight:fill_(0 / 0) end)
        assert.matches("parameter 1.weight of Linear(in_features=2", guard:damage(optimizer), 1, true)
    end)

    it("names a quantized parameter", function()
        local quantized = te.quantized_model_init({ recipe = te.recipe.MXFP8BlockScaling {} }, te.Linear, 32, 32)
        local guard = te.train.guard(quantized)
        assert.is_nil(guard:damage())
        te.no_grad(function() quantized.weight:copy_(te.full({ 32, 32 }, 0 / 0)) end)
        assert.matches("parameter weight of Linear(in_features=32", guard:damage(), 1, true)
    end)

    it("names a gradient", function()
        model[1].bias.grad = te.full({ 3 }, math.huge)
        assert.is_truthy(third(te.train.guard(model)):find("gradient 1.bias of Linear(in_features=2", 1, true))
    end)

    it("blames the loss when all tensors are fine", function()
        assert.is_truthy(third(te.train.guard(model)):find("the loss of Sequential", 1, true))
    end)
end)
