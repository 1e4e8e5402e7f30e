--- te.models: ready-made models, loaded when first used.

local fail = require "te.fail"

local models = {}

--- The model of a checkpoint that te.train.checkpoint.load read.
function models.from_checkpoint(saved)
    return models[saved.metadata["model.kind"] or "gpt"].from_checkpoint(saved)
end

--- The model in a folder of Hugging Face's Transformers (te.hugging_face).
function models.from_hugging_face(folder, opts) return require("te.hugging_face").load(folder, opts) end

return setmetatable(models, {
    __index = function(_, name)
        local found, model = pcall(require, "te.models." .. tostring(name))
        if not found then fail("te.models.%s: %s", tostring(name), tostring(model)) end
        models[name] = model
        return model
    end,
})
