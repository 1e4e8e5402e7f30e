local te = require "te"

-- Operands of quantized weight gradients that backward computes again: the same bytes as forward's, whatever
-- scales have become since.
local recipes = {
    delayed = function() return te.recipe.DelayedScaling { amax_history_len = 2 } end,
    current = function() return te.recipe.Float8CurrentScaling {} end,
    blocks = function() return te.recipe.Float8BlockScaling {} end,
    mxfp8 = function() return te.recipe.MXFP8BlockScaling {} end,
    nvfp4 = function() return te.recipe.NVFP4BlockScaling {} end,
    ["current, backward in high precision"] = function()
        return te.recipe.Float8CurrentScaling { backward_override = "high_precision" }
    end,
    ["current, backward from dequantized operands"] = function()
        return te.recipe.Float8CurrentScaling { backward_override = "dequantized" }
    end,
}

local WIDTH = 48

local function model_of()
    te.manual_seed(4)
    return te.Sequential(
        te.Residual(te.LayerNorm(WIDTH), te.Linear(WIDTH, 4 * WIDTH), te.GELU(), te.Dropout(0.1),
            te.Linear(4 * WIDTH, WIDTH)),
        te.RMSNorm(WIDTH), te.Linear(WIDTH, 6 * WIDTH), te.SwiGLU(), te.Linear(3 * WIDTH, WIDTH, { bias = false }))
end

-- Values of all parameters after some steps, and the bytes that the last one held between forward and backward.
local function train(recipe, on, forward)
    local before = te.set_recompute(on)
    local model, kept = model_of(), nil
    local optimizer = te.optim.SGD(model:parameters(), { lr = 0.01 })
    for step = 1, 3 do
        local x = te.randn { 40, WIDTH } * step -- so that amaxes grow
        x.requires_grad = true
        collectgarbage()
        collectgarbage()
        local start = te.memory_stats().current
        local y = te.autocast({ dtype = "bfloat16", recipe = recipe }, function()
            if forward then return forward(x, model) end
            return model(x)
        end)
        kept = te.memory_stats().current - start
        optimizer:zero_grad()
        y:backward(te.ones(y.shape, { dtype = y.dtype }))
        optimizer:step()
    end
    te.set_recompute(before)
    return model, kept
end

-- The same bits; on a device, whose sums go by the kernel that takes them, the same but for their last bits.
local function same(keeping, computing)
    for i, p in ipairs(keeping:parameters()) do
        local other = computing:parameters()[i]
        if te.get_default_device() == "cpu" then
            assert.same(p:totable(), other:totable())
        else
            assert.is_true(((p - other):norm() / p:norm()):item() < 1e-3)
        end
    end
end

describe("operands that backward quantizes once more", function()
    for name, make in pairs(recipes) do
        it("have the bytes of forward: " .. name, function()
            local keeping, more = train(make(), false)
            local computing, less = train(make(), true)
            same(keeping, computing)
            if not name:find "dequantized" then assert.is_true(less < more) end
        end)
    end

    -- On the host programs leave bytes of many rows alone, in stripes. Sums over rows go by stripe then, so all but the
    -- products' own gradients may differ in their last bits.
    local striped = te.get_default_device() == "cpu" and { "delayed", "blocks", "mxfp8", "nvfp4" } or {}
    for _, name in ipairs(striped) do
        it("have them where the gradient program leaves them: " .. name, function()
            local function gradients(on)
                local before = te.set_recompute(on)
                local model = model_of()
                local x = te.randn({ 5500, WIDTH }, { requires_grad = true })
                local y = te.autocast({ dtype = "bfloat16", recipe = recipes[name]() }, model, x)
                y:backward(te.randn(y.shape):to "bfloat16")
                te.set_recompute(before)
                return model
            end
            local keeping, computing = gradients(false), gradients(true)
            for i, p in ipairs(keeping:parameters()) do
                local one, other = p.grad, computing:parameters()[i].grad
                if p:dim() == 2 then assert.same(one:totable(), other:totable()) end
                assert.is_true(((one - other):norm() / one:norm()):item() < 1e-6)
            end
        end)
    end

    it("have them where a stretch of forward runs twice", function()
        local function forward(x, model) return te.checkpoint(model, x) end
        same(train(recipes.delayed(), false), (train(recipes.delayed(), true, forward)))
    end)

    it("can be made twice from one recording", function()
        local function gradients(on)
            local before = te.set_recompute(on)
            te.manual_seed(6)
            local model = te.Sequential(te.GELU(), te.Linear(WIDTH, WIDTH))
            local x = te.randn { 32, WIDTH } * 3
            x.requires_grad = true
            local y = te.autocast({ dtype = "bfloat16", recipe = te.recipe.DelayedScaling {} }, model, x)
            local weight, dy = model[2].weight, te.ones({ 32, WIDTH }, { dtype = "bfloat16" })
            local first = te.grad(y, weight, { grad_outputs = dy, retain_graph = true })
            local second = te.grad(y, weight, { grad_outputs = dy }) -- dy has another scale
            te.set_recompute(before)
            return { first:totable(), second:totable() }
        end
        assert.same(gradients(false), gradients(true))
    end)

    it("are in the plan, which moves what it says", function()
        local before = te.set_recompute(true)
        local model = te.Sequential(te.LayerNorm(64), te.Linear(64, 128, { bias = false }), te.GELU(),
            te.Linear(128, 64, { bias = false }))
        local x = te.randn({ 64, 64 }, { dtype = "bfloat16" })
        x.requires_grad = true
        local options = { dtype = "bfloat16", recipe = te.recipe.MXFP8BlockScaling {} }
        local plan = te.autocast(options, function() return model:explain(x) end)
        local predicted, again, moved = 0, 0, 0
        for _, step in ipairs(plan.backward) do
            predicted = predicted + step.bytes
            if step.kernels[1]:find("operand again", 1, true) then again = again + 1 end
        end
        assert.equal(2, again)
        local y, dy = te.autocast(options, model, x), te.ones({ 64, 64 }, { dtype = "bfloat16" })
        for _, event in ipairs(te.profile(function() y:backward(dy) end).events) do moved = moved + event.bytes end
        assert.equal(predicted, moved)
        te.set_recompute(before)
    end)
end)
