--- Random models recorded by te.graph beside the same ones run plainly: every value and every weight has the same bits,
--- in inference and training, under all recipes, while inputs and weights change between launches. Pending without a
--- device that records.

local te = require "te"

local SEEDS = tonumber(os.getenv "TETRAIN_RANDOM_SEQUENTIALS") or 60
local RECIPES = { false, "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
    "NVFP4BlockScaling" }

local devices, reason = te.devices()

local function values(t) return t:detach():to("cpu"):to("float64"):reshape(-1):totable() end

-- What a seed stands for: a model, how it computes, and what happens before each of seven calls.
local function drawn(seed)
    math.randomseed(seed)
    local r = math.random
    local case = { seed = seed, width = ({ 16, 32, 48, 64 })[r(4)], rows = ({ 1, 2, 4, 7, 16, 33 })[r(6)],
        recipe = RECIPES[r(#RECIPES)], stored = r(3) == 1, dtype = ({ "bfloat16", "float32" })[r(2)],
        trains = r(2) == 1, layers = {}, changes = {} }
    for i = 1, 1 + r(4) do case.layers[i] = r(7) end
    for i = 1, 7 do case.changes[i] = r(4) end
    return case
end

local function build(case, recipe)
    local width = case.width
    local kinds = {
        function() return te.Linear(width, width) end,
        function() return te.Linear(width, width, { bias = false }) end,
        function() return te.LayerNorm(width) end,
        function() return te.GELU() end,
        function() return te.Residual(te.RMSNorm(width), te.Linear(width, 2 * width), te.SwiGLU(),
            te.Linear(width, width)) end,
        function() return te.MultiHeadedSelfAttention(width, 2, { causal = true }) end,
        function() return te.Residual(te.LayerNorm(width),
            te.MultiHeadedSelfAttention(width, 2, { causal = true }), te.Dropout(0.2)) end,
    }
    return te.quantized_model_init({ recipe = recipe, enabled = recipe ~= nil and case.stored }, function()
        local list = {}
        for i, kind in ipairs(case.layers) do list[i] = kinds[kind]() end
        return te.Sequential(unpack(list))
    end):to "cuda"
end

-- What seven calls give, and the weights after them.
local function run(case, graphed)
    te.manual_seed(case.seed)
    local recipe = case.recipe and te.recipe[case.recipe] {} or nil
    local model = build(case, recipe)
    local parameters, results = model:parameters(), {}
    local trains = case.trains and #parameters > 0
    if not trains then model:eval() end
    local optimizer = trains and te.optim.AdamW(parameters, { lr = 0.01 })
    local options = { dtype = case.dtype, recipe = recipe, enabled = case.dtype ~= "float32" or recipe ~= nil }
    local function input() return te.randn({ 2, case.rows, case.width }, { device = "cuda" }) end
    local function call(x)
        if not trains then return te.no_grad(te.autocast, options, model, x) end
        local y = te.autocast(options, model, x):to "float32"
        local loss = (y * y):mean()
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
        return loss:detach()
    end
    local x = input()
    local f = graphed and te.graph(call, { x }, { warmup = 1 }) or call
    for _, change in ipairs(case.changes) do
        if change == 1 then x = input() end
        if change == 2 and not (recipe and case.stored) then
            te.no_grad(function() for _, p in ipairs(parameters) do p:mul_(0.9) end end)
        end
        if change == 3 then results[#results + 1] = values(te.no_grad(te.autocast, options, model, x)) end
        results[#results + 1] = values(f(x))
    end
    for _, p in ipairs(parameters) do results[#results + 1] = values(p) end
    return results
end

describe("Random models in te.graph", function()
    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    it("compute what they compute plainly, to the bit", function()
        for seed = 1, SEEDS do
            local case = drawn(seed)
            local plain, recorded = run(case, false), run(case, true)
            assert.equal(#plain, #recorded)
            for i, expected in ipairs(plain) do
                for k, value in ipairs(expected) do
                    local seen = recorded[i][k]
                    if seen ~= value and (seen == seen or value == value) then
                        error(("seed %d, result %d, value %d: %.9g, in the graph %.9g"):format(seed, i, k, value, seen))
                    end
                end
            end
            collectgarbage()
        end
    end)
end)
