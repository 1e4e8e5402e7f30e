--- The recipe that products run under now: what te.autocast sets and operations ask. Small, since every operation with
--- a product loads it; te.recipe.products does the work once a recipe is used.

local te = require "te"
local settle = require "te.settle"
local names = require "te.recipe.names"
local core = te._core

local mode = {
    recipe = nil,        -- of the innermost te.autocast that named one
    enabled = false,     -- products are quantized
    calibrating = false, -- amaxes are collected without
    faster = false,      -- only products that the recipe makes faster are quantized
    group = nil,         -- processes that share the amaxes of delayed scaling; nil: none
    on = false,          -- either: products have to be prepared
    step = nil,          -- the outermost te.autocast with either, where the step ends; trains: gradients were recorded
    recording = false,   -- a stretch of forward runs that will run again in backward (te.checkpoint)
    replaying = false,   -- what runs is no step: a stretch of forward that backward runs again, or an explain
    watching = nil,      -- te.numerics, once something is watched: called where a step begins
    init = nil,          -- of te.quantized_model_init: { recipe =, preserve = }
    initial = {},        -- by parameter: values before it was quantized, where they are kept
    products = nil,      -- te.recipe.products once some product has a history: scales have to be updated
}

--- What mode.set restores.
function mode.get()
    return { recipe = mode.recipe, enabled = mode.enabled, calibrating = mode.calibrating, faster = mode.faster,
        group = mode.group, step = mode.step, place = names.place }
end

--- Sets recipe, enabled, calibrating, faster, group, step and place (te.recipe.names) from a table of them; returns the
--- ones before.
function mode.set(new)
    local before = mode.get()
    mode.recipe, mode.enabled, mode.calibrating, mode.faster, mode.group = new.recipe, new.enabled or false,
        new.calibrating or false, new.faster or false, new.group
    mode.step = new.step
    mode.on = mode.enabled or mode.calibrating
    names.set(mode.on and mode.recipe ~= nil and not mode.recipe:is_uniform(), new.place)
    core.set_recipe_mode(mode.enabled, mode.calibrating)
    return before
end

settle.when_stopped(function()
    mode.set {}
    mode.replaying = false
    if mode.recording then core.recorded_scales() end
    mode.recording = false
    mode.init = nil
    core.replay_since()
    core.replay_scales()
    core.pause_recorded_scales(false)
    core.pause_amaxes(false)
end)

--- The state of a product: what `module` keeps for the parameter named `key`, or where that is the module's
--- `attention_key`, for the operands of its attention. Made when first asked for.
function mode.product(module, key)
    local products = rawget(module, "_products")
    if not products then
        products = {}
        rawset(module, "_products", products)
    end
    if not products[key] then
        local attends = module.attention_key == key
        products[key] = { state = core.recipe_state(), name = key, module = module.__name, owner = module,
            attends = attends, type = attends and "attention" or module.module_type or "linear",
            rules = {}, earlier = {} }
    end
    return products[key]
end

--- The weight named `key` of a new operation: the tensor itself, or under te.quantized_model_init one stored quantized.
function mode.weight(module, key, tensor)
    if not mode.init then return tensor end
    return require("te.recipe.parameters").quantized(mode.product(module, key), tensor, mode.init)
end

--- Makes products ready to run under the recipe in force, on the rows of x; beyond it what an attention among them has
--- beside: the lengths of packed sequences, or k and v.
function mode.prepare(products, x, ...)
    require("te.recipe.products").prepare(products, mode.recipe, mode.faster and mode.enabled and x or nil, ...)
end

--- The values that a parameter had before it was quantized, where they are kept and it has not been written since; nil
--- otherwise.
function mode.initial_values(parameter)
    local initial = mode.initial[parameter]
    if initial == nil then return nil end
    if initial.writes == core.quantized_writes(parameter) then return initial.values end
    if not initial.awaited then mode.initial[parameter] = nil end
    return nil
end

--- Notes the values that a parameter, which nobody filled, has been given: a tensor or te.rows of its shape.
function mode.note_initial(parameter, given)
    local initial = mode.initial[parameter]
    if initial == nil or not initial.awaited then return end
    local values = te.empty(parameter.shape, { dtype = parameter.dtype, device = "cpu" })
    if te.is_tensor(given) then values:copy_(given) else given:copy_to(values) end
    mode.initial[parameter] = { values = values, writes = core.quantized_writes(parameter) }
end

--- y = x weight^T + bias under the recipe in force, which is not None.
function mode.linear(module, key, x, weight, bias)
    local product = mode.product(module, key)
    mode.prepare({ product }, x)
    return core.quantized_linear(product.state, x, weight, bias)
end

--- fn(...), an attention, with operands quantized as the recipe in force says.
function mode.attention(module, fn, ...)
    local product = mode.product(module, module.attention_key)
    mode.prepare({ product }, ...)
    return core.with_product(product.state, fn, ...)
end

return mode
