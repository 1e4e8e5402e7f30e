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
---@return boolean pretrained  whether the run began with a model of Transformers
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
    return model, tokenizer, path, read.metadata["option.hugging_face"] ~= nil
end

return saved
