--- te.autocast{ when = "faster" }: whether a product's low precision pays on this device.
--
-- A linear layer of the product's shape makes a step both ways, forward and backward, and the faster way is kept: in
-- memory, and on disk beside compiled kernels, by device, recipe, dtype and shape. So does an attention that the recipe
-- would give FP8 operands (te.recipe.faster_attention). The CPU multiplies no bytes, so there it never pays. Nothing is
-- measured where it would leave traces, while a graph is recorded: the recipe is used, and nothing is kept.

local te = require "te"
local mode = require "te.recipe.mode"
local forms = require "te.recipe.forms"
local core = te._core

local faster = {}

local WARMUP, REPEATS = 2, 5
local known = {} -- by key: high precision's time over the recipe's
local plain

--- Stands for a recipe where that does not pay.
function faster.plain()
    local recipes = require "te.recipe"
    plain = plain or recipes.Custom { qfactory = function() return recipes.HighPrecision end }
    return plain
end

-- A step of a linear layer {tokens, in} to {tokens, out}.
local function linear_step(case, recipe)
    local layer = te.Linear(case.width_in, case.width_out, { bias = false }):to(case.device)
    mode.product(layer, "weight").stands_for = case.product
    local count = case.tokens * case.width_in
    local angles = te.arange(1, count, 1, { dtype = "float32", device = case.device })
    local x = te.sin(angles):view { case.tokens, case.width_in }:to(case.dtype):detach()
    x.requires_grad = true
    return function()
        local y = te.autocast({ dtype = case.dtype, recipe = recipe, when = "always" }, layer, x)
        y:backward(y:detach())
        te.no_grad(layer.weight.mul_, layer.weight, 1) -- as an optimizer would: it is quantized in every step
    end
end

--- Seconds of a step of the case under a recipe.
function faster.seconds(case, recipe)
    local step = case.attention and require("te.recipe.faster_attention").step(case, recipe)
        or linear_step(case, recipe)
    for _ = 1, WARMUP do step() end
    te.synchronize(case.device)
    local start = core.clock()
    for _ = 1, REPEATS do step() end
    te.synchronize(case.device)
    return (core.clock() - start) / REPEATS
end

-- Disk ----------------------------------------------------------------------------------------------------------------

--- The file of what was measured; nil: nowhere.
function faster.path()
    local folder = core.cache_folder and core.cache_folder() -- not where the host lets scripts reach no files
    return folder and folder .. "/faster.txt"
end

local loaded

local function load()
    loaded = true
    local file = faster.path() and io.open(faster.path(), "r")
    if not file then return end
    for line in file:lines() do
        local ratio, key = line:match "^(%S+) (.+)$"
        if tonumber(ratio) then known[key] = tonumber(ratio) end
    end
    file:close()
end

local function keep(key, ratio)
    known[key] = ratio
    if key:find "function: " then return end -- another one in the next process
    local path = faster.path()
    local file = path and pcall(core.mkdir, path:match "^(.*)/") and io.open(path, "a")
    if not file then return end -- measured again by the next process
    file:write(("%.4g %s\n"):format(ratio, key))
    file:close()
end

-- Deciding ------------------------------------------------------------------------------------------------------------

-- Within the te.autocast that asks, so that no step ends here, and without a trace in it.
local function measure(case, recipe)
    local rng, paused = te.rng_state(), core.pause_recorded_scales(true)
    local function both()
        return te.enable_grad(faster.seconds, case, faster.plain()), te.enable_grad(faster.seconds, case, recipe)
    end
    local ok, high, low = pcall(both)
    core.pause_recorded_scales(paused)
    te.rng_state(rng)
    if not ok then error(high, 0) end
    return high / low
end

local function shape_text(case)
    if case.attention then return "attention of " .. tostring(case.attention) end
    return ("%d x %d to %d"):format(case.tokens, case.width_in, case.width_out)
end

-- What a recipe that looks at layers is asked with; of others nothing.
local function role_text(case, recipe)
    if recipe:is_uniform() or not case.product then return "" end
    local role = forms.role(case.product, "input")
    return (", %s %q %s"):format(role.module_type, role.name, role.group or "")
end

--- Whether `recipe` pays for a product, and the reason as text.
---@param case table  device, name (of the device), dtype, product; tokens, width_in, width_out, or attention
function faster.decide(case, recipe)
    if not core.device_traits(case.device).narrow_products then
        return false, ("the %s multiplies no low precision"):format(case.device)
    end
    if not loaded then load() end
    local key = ("%s, %s, %s, %s%s"):format(case.name, tostring(recipe), case.dtype, shape_text(case),
        role_text(case, recipe))
    if not known[key] then
        if require("te.graph").before_launch() then return true, "not measured while a graph is recorded" end
        keep(key, measure(case, recipe))
    end
    return known[key] > 1, ("measured %.2f times as fast as %s"):format(known[key], case.dtype)
end

--- Forgets what was measured in this process.
function faster.forget() known, loaded = {}, false end

return faster
