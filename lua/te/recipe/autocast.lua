--- te.autocast and its older names: the precision that operations compute in, for the duration of a function.
--
--     te.autocast({ dtype = "bfloat16", recipe = te.recipe.DelayedScaling{} }, function() return model(x) end)
--
-- Processes that share amaxes (option group) end their steps and backward passes together.

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local names = require "te.recipe.names"
local options = require "te.options"
local core = te._core

local OPTIONS = {
    enabled = { "boolean", true, help = "false: compute in the tensors' own dtypes, without a recipe" },
    dtype = { "string", help = "compute dtype of products, norms, attention and embeddings" },
    recipe = { "any", help = "how products quantize their operands; that of the enclosing te.autocast unless given, or "
        .. "where there is none and no dtype either, te.recipe.DelayedScaling {}" },
    when = { "string", choices = { "always", "faster" },
        help = "faster: products that the recipe does not make faster on this device stay in dtype" },
    calibrating = { "boolean", false,
        help = "with enabled = false: amaxes are collected, and scales are updated when the function ends" },
    group = { "any", help = "group of te.distributed whose processes share the amaxes of delayed scaling; that of "
        .. "the enclosing te.autocast unless given" },
}

local CALLABLE = { "callable" }
local recipes -- te.recipe, once one is given

-- The options `recipe` and `group`, whose names begin with a prefix.
local function check_values(who, opts, prefix)
    local group, recipe = prefix .. "group", prefix .. "recipe"
    options.group(who, "option " .. group, opts[group])
    recipes = recipes or opts[recipe] ~= nil and require "te.recipe"
    if opts[recipe] ~= nil and not recipes.is_recipe(opts[recipe]) then
        fail("%s: option %s: expected one of te.recipe's, got %s", who, recipe, options.shown(opts[recipe]))
    end
end

local default
local function default_recipe()
    default = default or require("te.recipe").DelayedScaling {}
    return default
end

-- What te.autocast with these options makes of the mode around it.
local function inner(opts)
    local recipe, quantizes = opts.recipe or mode.recipe, mode.enabled or opts.recipe ~= nil or opts.dtype == nil
    if not recipe and (opts.calibrating or opts.enabled and quantizes) then recipe = default_recipe() end
    local scope = {
        recipe = recipe,
        enabled = opts.enabled and recipe ~= nil and quantizes,
        calibrating = opts.calibrating and not opts.enabled,
        group = opts.group or mode.group,
        place = names.place,
        faster = opts.when and opts.when == "faster" or opts.when == nil and opts.recipe == nil and mode.faster,
    }
    scope.step = mode.step or (scope.enabled or scope.calibrating) and scope or nil
    return scope
end

-- The beginning of the outermost scope of a step, where none is around it.
local function begin(scope)
    if mode.replaying or not scope.enabled then return end
    if core.grad_enabled() or mode.recording then mode.watching() end
end

-- Its end; a step that failed leaves no amaxes to the next one.
local function finish(scope, ok)
    if mode.replaying then return end
    local trains = core.grad_enabled() or scope.trains or mode.recording or scope.calibrating
    if not (trains and mode.products and (scope.enabled or scope.calibrating)) then return end
    if ok then mode.products.end_step(scope) else pcall(mode.products.forget) end
end

local function swap(new)
    local dtype = core.set_compute_dtype(new.dtype) -- which may refuse
    local before = mode.set(new)
    before.dtype = dtype
    return before
end

local function pass(scope, outermost, ok, ...)
    if outermost then finish(scope, ok) end
    if not ok then error((...), 0) end
    return ...
end

local function run(who, opts, fn, ...)
    opts = options.check(who, opts, OPTIONS)
    check_values(who, opts, "")
    if options.reason(CALLABLE, fn) then fail("%s: fn: expected a function, got %s", who, core.describe(fn)) end
    local dtype = opts.dtype
    if not opts.enabled then dtype = nil elseif dtype == nil then dtype = core.compute_dtype() end
    local scope, outermost = inner(opts), mode.step == nil
    scope.dtype = dtype
    if mode.watching and outermost then begin(scope) end
    return pass(scope, outermost, core.under(swap, scope, fn, ...))
end

local autocast = {}

--- Runs fn(...), in which operations compute with this dtype and recipe; returns its results.
---@return any ...
function autocast.autocast(opts, fn, ...) return run("te.autocast", opts, fn, ...) end
options.declare(autocast.autocast, OPTIONS)

local OLDER = { fp8_recipe = { "any", help = "recipe" }, fp8_group = { "any", help = "group" } }
for name, declared in pairs(OPTIONS) do OLDER[name] = declared end

--- The older name of te.autocast: fp8_recipe and fp8_group are recipe and group; the default is delayed scaling.
---@return any ...
function autocast.fp8_autocast(opts, fn, ...)
    opts = options.check("te.fp8_autocast", opts, OLDER)
    for _, name in ipairs { "recipe", "group" } do
        if opts[name] ~= nil and opts["fp8_" .. name] ~= nil then
            fail("te.fp8_autocast: options %s and fp8_%s are the same", name, name)
        end
    end
    check_values("te.fp8_autocast", opts, "fp8_")
    opts.recipe = opts.recipe or opts.fp8_recipe or opts.enabled and default_recipe() or nil
    opts.group, opts.dtype = opts.group or opts.fp8_group, opts.dtype or core.compute_dtype()
    opts.fp8_recipe, opts.fp8_group = nil, nil
    return run("te.fp8_autocast", opts, fn, ...)
end
options.declare(autocast.fp8_autocast, OLDER)

return autocast
