-- Random containers under every recipe, fused against unfused. On the CPU forward results have the same bits: what is
-- quantized was rounded the same way before. Gradients have other sums, and a value on the border of two that a format
-- has may fall to either side; a container may amplify that, so it is counted in how many gradients it shows.
local te = require "te"
local random_sequential = require "spec.support.random_sequential"
local trials = require "spec.support.trials"

local SAME_BITS = te.get_default_device() == "cpu"
local NEAR, MOST = 0.1, 0.85
local CONTAINERS = tonumber(os.getenv "TETRAIN_RANDOM_SEQUENTIALS") or trials(300, 30)

local RECIPES = {
    function() return te.recipe.DelayedScaling {} end,
    function() return te.recipe.Float8CurrentScaling {} end,
    function() return te.recipe.Float8BlockScaling {} end,
    function() return te.recipe.MXFP8BlockScaling {} end,
    -- units draw in another order
    function() return te.recipe.NVFP4BlockScaling { disable_stochastic_rounding = true } end,
}

-- Results and gradients of two steps, by name.
local function train(seed, fused)
    local case, recipe, kept = random_sequential(seed), RECIPES[seed % #RECIPES + 1](), { results = {}, gradients = {} }
    local before = te.set_fusion(fused)
    for step = 1, 2 do
        case.module:zero_grad()
        for _, t in ipairs(case.inputs) do if t.requires_grad then t.grad = nil end end
        te.manual_seed(5)
        local results, loss = { te.autocast({ recipe = recipe, dtype = case.autocast }, case.module,
            unpack(case.inputs)) }, nil
        te.manual_seed(6)
        for i, y in ipairs(results) do
            local part = (y:to "float64" * te.randn(y.shape, { dtype = "float64" })):sum()
            loss = loss and loss + part or part
            kept.results[("result %d of step %d"):format(i, step)] = y:detach()
        end
        if loss.requires_grad then loss:backward() end
        for name, p in case.module:named_parameters() do
            kept.gradients[step .. " " .. name] = p.grad and p.grad:clone() or false
        end
        for i, t in ipairs(case.inputs) do kept.gradients[step .. " input " .. i] = t.grad or false end
    end
    te.set_fusion(before)
    return kept, case
end

local function bytes_of(t) return te._core.tensor_bytes(t:to("cpu"):contiguous()) end

local function largest(t) return t:numel() == 0 and 0 or t:to("float64"):abs():max():item() end

-- The largest difference beside the size of a tensor, and of all of them, which may cancel in one.
local function distance(expected, got)
    local all, worst = 0, 0
    for _, t in pairs(expected) do
        local size = t and largest(t) or 0
        if size < math.huge then all = math.max(all, size) end
    end
    for name, a in pairs(expected) do
        local size = a and largest(a) or math.huge
        if size < math.huge then
            worst = math.max(worst, largest(a:to "float64" - got[name]:to "float64") / (size + 0.05 * all + 1e-9))
        end
    end
    return worst
end

describe("fused and unfused under a recipe", function()
    it(("agree over %d random containers"):format(CONTAINERS), function()
        local near, n = 0, 0
        for seed = 1, CONTAINERS do
            if random_sequential(seed).dtype ~= "float64" then
                local expected, case = train(seed, false)
                local got, what = train(seed, true), ("seed %d:\n%s"):format(seed, tostring(case.module))
                for name, y in pairs(expected.results) do
                    assert.is_true(not SAME_BITS or bytes_of(y) == bytes_of(got.results[name]),
                        ("%s differs: %s"):format(name, what))
                end
                for name, a in pairs(expected.gradients) do
                    local b = got.gradients[name]
                    assert.equal(a and a.dtype, b and b.dtype, name .. ": " .. what)
                end
                local farther = math.max(distance(expected.gradients, got.gradients),
                    distance(expected.results, got.results))
                near, n = near + (farther <= NEAR and 1 or 0), n + 1
            end
        end
        assert.is_true(near >= MOST * n, ("%d of %d containers are near"):format(near, n))
    end)
end)
