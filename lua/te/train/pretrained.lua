--- te.train.pretrained: runs of train_gpt.lua that start with the model in a folder of Hugging Face's Transformers.

local te = require "te"
local script = require "te.train.run"

local pretrained = {}

-- What the folder's model has for good, by the options' names.
local MODEL = { "vocab_size", "model", "n_layer", "n_head", "n_kv_head", "n_expert", "n_expert_active",
    "expert_aux_loss", "n_embd", "bias", "init_std" }

--- Ends the script where the command line says something else of the model, or how text becomes ids.
---@param o table         all options of train_gpt.lua
---@param given table     those of the command line
---@param refuse function
function pretrained.check(o, given, refuse)
    for _, name in ipairs(MODEL) do
        if given[name] ~= nil then
            refuse("--%s: the model in --hugging-face=%s has its own", name:gsub("_", "-"), o.hugging_face)
        end
    end
    if given.tokenizer == "byte" or given.tokenizer == "char" then
        refuse("--tokenizer=%s: the model in --hugging-face=%s knows other ids", given.tokenizer, o.hugging_face)
    end
end

--- The model in the folder o.hugging_face; the options say then what it is. What is wrong ends the script.
---@param o table
---@param quantized string|nil  the recipe in whose format weights are stored
---@param refuse function
---@return table model
function pretrained.load(o, quantized, refuse)
    local model = script.io(te.models.from_hugging_face, o.hugging_face, { dropout = o.dropout, quantized = quantized })
    local config = model.config
    if o.block > config.block_size then
        refuse("--block=%d, but the model in --hugging-face=%s sees %d", o.block, o.hugging_face, config.block_size)
    end
    for _, name in ipairs(MODEL) do
        if config[name] ~= nil then o[name] = config[name] end
    end
    o.model = model.KIND
    return model
end

return pretrained
