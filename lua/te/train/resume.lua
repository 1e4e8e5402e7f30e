--- te.train.resume: runs of train_gpt.lua that go on from a checkpoint.

local te = require "te"
local checkpoint = require "te.train.checkpoint"
local script = require "te.train.run"
local text = require "te.train.text"

local resume = {}

-- Options that a model in a checkpoint has for good: others for it would have no effect.
local MODEL = { "tokenizer", "hugging-face", "vocab-size", "model", "n-layer", "n-head", "n-kv-head", "n-expert",
    "n-expert-active", "expert-aux-loss", "n-embd", "dropout", "bias", "init-std", "fp8-params",
    "lora-rank", "lora-alpha", "lora-dropout", "lora-targets" }
local STORED = { "recipe", unpack(MODEL) } -- of one whose weights are quantized

--- The newest checkpoint of the run in o.out, whose options hold unless the command line gives others. Ends the script
--- where there is none, or where an option is the model's for good.
---@param command_line table  of te.train.command_line
---@param o table             values of options, which become the checkpoint's
---@param given table         those of the command line
---@return table saved        of te.train.checkpoint.load
function resume.open(command_line, o, given)
    local path = script.io(checkpoint.latest, o.out)
    if not path then script.fail(script.exit.io, ("--resume: no checkpoint in %s"):format(o.out)) end
    local saved = script.io(checkpoint.load, path)
    local function refuse(...) command_line:refuse(...) end
    text.check_options(given, saved.metadata.tokenizer, refuse)
    local function keeps(names, format)
        local name, asked, kept = command_line:changed(given, saved.metadata, names)
        if name then refuse(format, name, asked, kept) end
    end
    local stored = saved.metadata["option.fp8_params"] == "true" -- in the recipe's format
    keeps(stored and STORED or MODEL, "--resume: --%s=%s, but the model in the checkpoint has %s")
    keeps({ "val-fraction", "optimizer" }, "--resume: --%s=%s, but the run began with %s")
    script.of_file(path, command_line.restore, command_line, o, given, saved.metadata)
    return saved
end

--- The model of a checkpoint.
---@param o table
---@param saved table
---@param ranks table  of te.train.ranks, which say how it is split
---@param refuse function
---@return table model
function resume.model(o, saved, ranks, refuse)
    local model = script.of_file(saved.path, te.models.from_checkpoint, saved, ranks.split)
    local limit = model.config.block_size
    if o.block > limit then refuse("--resume: --block=%d, but the model in the checkpoint sees %d", o.block, limit) end
    return model
end

return resume
