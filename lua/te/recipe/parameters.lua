--- Parameters that are stored quantized: te.quantized_model_init.
--
--     local model = te.quantized_model_init({ recipe = te.recipe.MXFP8BlockScaling{} }, function()
--         return te.Sequential(te.Linear(512, 2048), te.GELU(), te.Linear(2048, 512))
--     end)
--
-- The weights of linear operations that are made inside exist in the recipe's format alone: row-wise, and
-- column-wise too unless te.no_grad says that nothing will be trained. They are multiplied as they are. Everything
-- else sees their values; copy_ and fill_ quantize what they write. An optimizer keeps a master of each and
-- quantizes it anew at every step. Weights that a te.recipe.Custom leaves in high precision are made as usual.

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local options = require "te.options"
local initializers = require "te.initializers"
local core = te._core

local parameters = {}

-- By parameter { values = those before quantizing, writes = how often it had been written then }, or { awaited = true }
-- until they are loaded; mode.initial_values gives them while they count.
local initial = setmetatable({}, { __mode = "k" })
mode.initial = initial

--- A leaf with the values of `tensor`, quantized for its product; `tensor` itself where the recipe leaves it in high
--- precision.
function parameters.quantized(product, tensor, init)
    require("te.recipe.products").prepare({ product }, init.recipe)
    if not product.made.stores then return tensor end
    local weight = core.quantized_parameter(product.state, tensor, core.grad_enabled())
    product.stored = true
    weight.requires_grad = tensor.requires_grad
    if init.preserve and initializers.leaves_bare() then
        initial[weight] = { awaited = true }
    elseif init.preserve then
        initial[weight] = { values = tensor:detach():to("cpu"), writes = core.quantized_writes(weight) }
    end
    return weight
end

local OPTIONS = {
    enabled = { "boolean", true, help = "false: weights are stored unquantized" },
    recipe = { "any", help = "default: te.recipe.DelayedScaling {}" },
    preserve_high_precision_init_val = { "boolean", false, help = "keep the unquantized initial weights on the CPU, "
        .. "for weight:get_high_precision_init_val(); an optimizer's master copy starts from them, unless the weight "
        .. "was written to" },
}

local function swap(init)
    local before = mode.init
    mode.init = init
    return before
end

local function run(who, opts, fn, ...)
    opts = options.check(who, opts, OPTIONS)
    options.argument(who, "fn", fn, { "callable" })
    local recipes = require "te.recipe"
    if opts.recipe ~= nil and not recipes.is_recipe(opts.recipe) then
        fail("%s: option recipe: expected one of te.recipe's, got %s", who, tostring(opts.recipe))
    end
    local init = opts.enabled and { recipe = opts.recipe or recipes.DelayedScaling {},
        preserve = opts.preserve_high_precision_init_val } or nil
    return core.pass(core.under(swap, init, fn, ...))
end

--- Runs fn(...), which makes a model whose weights are stored only in the recipe's format, and returns its results.
--- Made under te.no_grad they have one copy, for inference; else two, since backward reads them along columns.
---@param opts table
---@return any ...
function parameters.quantized_model_init(opts, fn, ...) return run("te.quantized_model_init", opts, fn, ...) end
options.declare(parameters.quantized_model_init, OPTIONS)

--- The older name of te.quantized_model_init.
---@param opts table
---@return any ...
function parameters.fp8_model_init(opts, fn, ...) return run("te.fp8_model_init", opts, fn, ...) end
options.declare(parameters.fp8_model_init, OPTIONS)

-- State -------------------------------------------------------------------------------------------------------------

local PARTS = { "rowwise_data", "rowwise_scale_inv", "amax", "columnwise_data", "columnwise_scale_inv",
    "columnwise_amax" }

--- Calls visit(name, tensor) for the tensors that a parameter named `name` consists of: "weight.rowwise_data" ….
function parameters.each_part(name, parameter, visit)
    local parts = { core.quantized_parts(parameter) }
    for i, part in ipairs(PARTS) do
        if parts[i] then visit(name .. "." .. part, parts[i]) end
    end
end

--- What puts the parts of a parameter among `state` in their place, nil when there are none; and what is wrong with
--- them: they are all there, as they are in the parameter, or none is. A direction that the parameter has not, as one
--- for inference has not that of backward, is left where it is. The parts' names are added to `known`.
function parameters.loader(name, parameter, state, known)
    local parts, own, any, problem = {}, { core.quantized_parts(parameter) }, false, nil
    for i, part in ipairs(PARTS) do
        local given = own[i <= 3 and 1 or 4] and state[name .. "." .. part]
        known[name .. "." .. part] = true
        parts[i] = given or nil
        any = any or parts[i] ~= nil
        if parts[i] == nil and own[i] then
            problem = problem or ("missing: %s.%s"):format(name, part)
        elseif parts[i] ~= nil and not te.is_tensor(given) then
            problem = problem or ("%s.%s: expected a tensor, got %s"):format(name, part, core.describe(given))
        end
    end
    if not any then return nil end
    problem = problem or core.check_quantized_parts(name, parameter, unpack(parts, 1, #PARTS))
    return function() core.set_quantized_parts(parameter, unpack(parts, 1, #PARTS)) end, problem
end

--- The master of a parameter that is stored quantized.
function parameters.master(parameter, dtype)
    return (mode.initial_values(parameter) or parameter):detach():to(parameter.device):to(dtype):clone()
end

return parameters
