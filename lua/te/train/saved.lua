--- te.train.saved: the model of a training run and its tokenizer, for scripts that use them.

local te = require "te"
local checkpoint = require "te.train.checkpoint"
local guard = require "te.train.guard"
local script = require "te.train.run"
local text = require "te.train.text"

local saved = {}

--- Ends the script where a weight of a model that came from `path` is not finite.
---@param path string
---@param model table
function saved.check(path, model)
    local damage = guard(model):damage()
    if damage then script.fail(script.exit.io, ("%s: %s is not finite"):format(path, damage)) end
end

--- The model of a run and its tokenizer. What is wrong with the files ends the script.
---@param folder string       of the run, whose newest checkpoint is taken
---@param path string|nil     of a checkpoint instead
---@return table model
---@return table|nil tokenizer  nil of a run on ids
---@return string path        of the checkpoint
---@return string|nil base     the folder of the model of Transformers that the run began with
function saved.load(folder, path)
    path = path or script.io(checkpoint.latest, folder)
    if not path then
        script.fail(script.exit.io, ("no checkpoint in %s; train_gpt.lua makes one"):format(folder))
    end
    local read = script.io(checkpoint.load, path)
    local model = script.of_file(path, te.models.from_checkpoint, read)
    local tokenizer = script.of_file(path, text.of_checkpoint, read)
    checkpoint.release(read)
    saved.check(path, model)
    return model, tokenizer, path, read.metadata["option.hugging_face"]
end

--- Folds a model's adapters into its weights, where it has some and no weight is stored quantized.
---@param model table
function saved.merge(model)
    for _, parameter in ipairs(model:parameters()) do
        if te._core.is_quantized(parameter) then return end
    end
    if te.lora.config(model) then te.lora.merge(model) end
end

return saved
