--- Putting adapters into a model, for te.lora.add and for what reads them: te.lora.load and checkpoints.

local fail = require "te.fail"
local stages = require "te.distributed.stages"
local options = require "te.options"
local tree = require "te.module_tree"
local targets = require "te.lora.targets"
local Adapter = require "te.ops.adapter"
local initializers = require "te.initializers"

local attach = {}

attach.OPTIONS = {
    rank = { "size", 8, help = "rows of A and columns of B" },
    alpha = { "number", 16, help = "the adapter's share is multiplied by alpha / rank" },
    dropout = { "number", 0, min = 0, below = 1, help = "of what A multiplies with, in training" },
    targets = { "any", help = "name of layers, or a list of names: of Transformers or the path here, whole or its end; "
        .. "with any of ^$*+?[]% a Lua pattern. Default: all linear layers, of te.models those of the blocks" },
    init_std = { "number", min = 0, help = "A begins as N(0, init_std); default: U(-b, b), b = 1 / sqrt(inputs)" },
    rslora = { "boolean", false, help = "multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023)" },
}

--- The layers that have adapters: { path =, module = }.
---@param model te.Module
---@return table[]
function attach.adapted(model)
    local list = {}
    for path, module in model:named_modules() do
        if tree.is_module(module.lora) and module.lora.is_adapter then
            list[#list + 1] = { path = path == "" and module.__name or path, module = module }
        end
    end
    return list
end

local function init_of(opts, module)
    if opts.init_std then return initializers.normal(0, opts.init_std) end
    local bound = 1 / math.sqrt(module.weight.shape[2]) -- Kaiming's with a = sqrt(5), as of Linear layers elsewhere
    return initializers.uniform(-bound, bound)
end

--- What the options of adapters are, complete; raises where they are wrong.
---@param who string
---@param opts table|nil
---@return table opts
function attach.check(who, opts)
    opts = options.check(who, opts, attach.OPTIONS)
    if math.abs(opts.alpha) == math.huge then
        fail("%s: option alpha: expected a finite number, got %s", who, opts.alpha)
    end
    if type(opts.targets) == "string" then opts.targets = { opts.targets } end
    if opts.targets ~= nil then
        options.argument(who, "option targets", opts.targets, { "table" })
        if opts.targets[1] == nil then fail("%s: option targets: the list is empty", who) end
    end
    return opts
end

local function new_adapter(layer, opts)
    local module = layer.module
    return Adapter(module.weight, layer.parts, { rank = opts.rank, alpha = opts.alpha, rslora = opts.rslora,
        dropout = opts.dropout, init = init_of(opts, module) }):train(module.training)
end

--- Freezes a model and gives the layers that are wanted adapters. Raises, and leaves the model as it was, where one
--- cannot be made.
---@param who string
---@param model te.Module
---@param opts table        of attach.check
---@param whole boolean|nil  whether targets are names in full, as of te.lora.config
---@return te.Module model
function attach.add(who, model, opts, whole)
    local before, made = attach.adapted(model)[1], {}
    if stages.find(model) then fail("%s: model: it is divided by pipeline_parallel, which takes no adapters", who) end
    if before then fail("%s: model: %s has adapters already; te.lora.remove takes them off", who, before.path) end
    local found = targets.find(who, model, opts.targets, whole)
    for i, layer in ipairs(found) do made[i] = new_adapter(layer, opts) end
    model:requires_grad_(false)
    for i, layer in ipairs(found) do layer.module.lora = made[i] end
    return model
end

return attach
