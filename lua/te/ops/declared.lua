--- Options of operations: those that are declared, and those of other systems that could not act here. The latter are
--- taken when they ask for nothing (nil, false, 0) and refused with the reason otherwise.

local fail = require "te.fail"
local options = require "te.options"

local REFUSED = {
    userbuffers_options = "products and what goes between processes do not overlap",
    rng_state_tracker_function = "the processes of a group draw one weight and keep their parts",
    accumulate_into_main_grad = "gradients accumulate in the main_grad of every parameter that has one",
    delay_wgrad_compute = "weight gradients are computed in backward",
    sm_margin = "kernels leave no multiprocessors aside",
    activation_recompute_in_mlp = "what is recomputed follows from the plan",
}

local declared = {}

--- Checks an options table as te.options does.
---@param who string
---@param given table|nil
---@param declarations table
---@param refused string[]|nil  names of options that the operation has elsewhere
---@return table
function declared.check(who, given, declarations, refused)
    if type(given) ~= "table" or getmetatable(given) or not refused then
        return options.check(who, given, declarations)
    end
    local own = {}
    for name, value in pairs(given) do own[name] = value end
    for _, name in ipairs(refused) do
        local value = own[name]
        if value and value ~= 0 then fail("%s: option %s: %s", who, name, REFUSED[name]) end
        own[name] = nil
    end
    return options.check(who, own, declarations)
end

--- The declarations of `first` with those of `second`.
function declared.join(first, second)
    local all = {}
    for name, declaration in pairs(first) do all[name] = declaration end
    for name, declaration in pairs(second) do all[name] = declaration end
    return all
end

local function wrong_device(name)
    local problem = options.device_problem(name)
    return problem and "device: " .. problem
end

--- Where and in which dtype parameters are made.
declared.PLACE = {
    params_dtype = { "string", "float32", choices = { "float32", "bfloat16", "float16", "float64" },
        help = "dtype of the parameters" },
    device = { "string", wrong = wrong_device,
        help = "device of the parameters; default: te.get_default_device()" },
}

--- What fills a weight.
declared.INIT = { "callable",
    help = "function(weight) that fills it, such as te.initializers.normal(0, 0.02); default: N(0, 0.023)" }

--- What a layer is called, its field `name`.
declared.NAME = { "string", help = "role.name for te.recipe.Custom's qfactory; default: the path in the model" }

--- The bias of a layer.
declared.BIAS = { "boolean", true, help = "add a bias" }

return declared
