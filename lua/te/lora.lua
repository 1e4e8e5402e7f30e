--- te.lora: low-rank adapters (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models").
--
--     local model = te.models.from_hugging_face("Qwen3-0.6B", { quantized = "MXFP8BlockScaling" })
--     te.lora.add(model, { rank = 16, alpha = 32, targets = { "q_proj", "v_proj" } })
--     local optimizer = te.optim.AdamW(model:parameter_groups(0), { lr = 2e-4 })
--     …
--     te.lora.save(model, "tuned")          -- the adapters alone, as PEFT reads them
--     te.models.to_hugging_face(model, "whole")   -- an ordinary model, its weights W + scale B A
--
-- The model's own parameters are frozen: nothing computes or holds gradients of them, and they may be stored quantized
-- (Dettmers et al. 2023, "QLoRA"), since nothing is ever written to them. Adapters are float32, or float64 beside such
-- weights, and their products are in the dtype of te.autocast; no recipe quantizes them. An adapter stands in the field
-- `lora` of its layer, so that its A and B are parameters of the model like all others: "….qkv.lora.A.1".

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local tree = require "te.module_tree"
local attach = require "te.lora.attach"

local lora = {}

local function check_model(who, model)
    if not te.Module.is(model, te.Module) then
        fail("%s: model: expected a module, got %s", who, options.shown(model))
    end
end

-- The layers that have adapters, of which there is one.
local function need_adapted(who, model)
    check_model(who, model)
    local list = attach.adapted(model)
    if not list[1] then fail("%s: model: %s has no adapters", who, model.__name) end
    return list
end

--- Freezes all parameters of a model and gives its linear layers adapters, y = W x + b + alpha / rank B A dropout(x),
--- which begin with B = 0. A product that a model makes of several layers at once, of q, k and v or of gate and up, has
--- an adapter for each; they share one dropout. Experts, and layers that are split over processes, take none.
---@param model te.Module
---@param opts table|nil
---@return te.Module model
function lora.add(model, opts)
    local who = "te.lora.add"
    check_model(who, model)
    return attach.add(who, model, attach.check(who, opts))
end
options.declare(lora.add, attach.OPTIONS)

--- What the adapters of a model were made with: rank, alpha, dropout, rslora, the names of targets in full; and whether
--- they are merged. nil where it has none.
---@param model te.Module
---@return table|nil config
function lora.config(model)
    check_model("te.lora.config", model)
    local config
    for _, layer in ipairs(attach.adapted(model)) do
        local adapter = layer.module.lora
        config = config or { rank = adapter.rank, alpha = adapter.alpha, dropout = adapter.dropout,
            rslora = adapter.rslora, merged = adapter.merged, targets = {} }
        for _, part in ipairs(adapter.parts) do table.insert(config.targets, part.name) end
    end
    return config
end

-- The set of tensors that stand in several modules, as those of an embedding and a head may.
local function shared_tensors(model)
    local holders, shared = {}, {}
    tree.walk(model, "", function(_, tensor, _, holder)
        shared[tensor] = shared[tensor] or holders[tensor] ~= nil and holders[tensor] ~= holder or nil
        holders[tensor] = holder
    end)
    return shared
end

local QUANTIZED = "%s: %s.weight is stored quantized: the sum would be rounded to its format, and much of what the "
    .. "adapter adds would be lost. te.models.to_hugging_face writes the sums in full"

-- The layers that are to be merged, or no more. Not all are where there was no memory for the rest the last time.
local function to_fold(who, model, merged)
    local list, shared, left = need_adapted(who, model), shared_tensors(model), {}
    for _, layer in ipairs(list) do
        local module = layer.module
        if te._core.is_quantized(module.weight) then fail(QUANTIZED, who, layer.path) end
        if shared[module.weight] then fail("%s: %s.weight stands at other places, too", who, layer.path) end
        if module.lora.merged ~= merged then left[#left + 1] = layer end
    end
    if not left[1] then fail("%s: model: its adapters are %s", who, merged and "merged already" or "not merged") end
    return left
end

-- Adds what adapters add to the weights, or takes it away.
local function fold(who, model, merged, sign)
    local list = to_fold(who, model, merged)
    te.no_grad(function()
        for _, layer in ipairs(list) do
            local delta = layer.module.lora:delta()
            layer.module.weight:add_(delta:mul_(sign))
            delta:release()
            layer.module.lora.merged = merged
        end
    end)
    return model
end

--- Adds alpha / rank B A to the weights, so that the model runs as fast as without adapters, which stay where they are
--- but take no part: to train them further, te.lora.unmerge comes first. Not for weights that are stored quantized.
---@param model te.Module
---@return te.Module model
function lora.merge(model) return fold("te.lora.merge", model, true, 1) end

--- Takes what te.lora.merge added away again, but for rounding.
---@param model te.Module
---@return te.Module model
function lora.unmerge(model) return fold("te.lora.unmerge", model, false, -1) end

--- Takes the adapters off. Where they are merged, the model computes what it did with them. Its parameters stay frozen.
---@param model te.Module
---@return te.Module model
function lora.remove(model)
    for _, layer in ipairs(need_adapted("te.lora.remove", model)) do layer.module.lora = nil end
    return model
end

--- Writes the adapters alone into a folder as PEFT reads them: adapter_config.json and adapter_model.safetensors.
---@param model te.Module
---@param folder string
---@param opts table|nil
function lora.save(model, folder, opts)
    need_adapted("te.lora.save", model)
    require("te.lora.folder").save(model, folder, opts)
end
options.declare(lora.save, function() return require("te.lora.folder").SAVE end)

--- Gives a model the adapters in a folder that te.lora.save or PEFT wrote. Raises on what a configuration asks for and
--- adapters here don't have.
---@param model te.Module
---@param folder string
---@return te.Module model
function lora.load(model, folder)
    check_model("te.lora.load", model)
    return require("te.lora.folder").load(model, folder)
end

return options.library("te.lora", lora)
