--- te.models: ready-made models, loaded when first used.

local fail = require "te.fail"
local options = require "te.options"

local models = {}

local KINDS = { bert = "te.models.bert", gpt = "te.models.gpt", llama = "te.models.llama",
    modernbert = "te.models.modernbert" }

local SPLIT = { tensor_parallel = { "any" }, sequence_parallel = { "boolean", false },
    pipeline_parallel = { "any" } }

--- The model of a checkpoint that te.train.checkpoint.load read; with options tensor_parallel, sequence_parallel
--- and pipeline_parallel this process's part of it.
---@param saved table
---@param opts table|nil
function models.from_checkpoint(saved, opts)
    opts = options.check("te.models.from_checkpoint", opts, SPLIT)
    if type(saved) ~= "table" or type(saved.metadata) ~= "table" or type(saved.tensors) ~= "table" then
        fail("te.models.from_checkpoint: saved: expected what te.train.checkpoint.load read, got %s",
            options.shown(saved))
    end
    local kind = saved.metadata["model.kind"] or "gpt"
    local class = KINDS[kind] and models[kind] or rawget(models, kind)
    if type(class) ~= "table" then
        fail("te.models.from_checkpoint: model.kind: expected one of %s, got %s",
            table.concat(options.names(KINDS), ", "), options.shown(kind))
    end
    return class.from_checkpoint(saved, opts)
end

--- The model in a folder of Hugging Face's Transformers: config.json and safetensors files.
---@param folder string
---@param opts table|nil
function models.from_hugging_face(folder, opts) return require("te.hugging_face").load(folder, opts) end
options.declare(models.from_hugging_face, function() return require("te.hugging_face").OPTIONS end)

--- Writes a model into a folder as Hugging Face's Transformers reads it: config.json, model.safetensors, a tokenizer.
---@param model table
---@param folder string
---@param opts table|nil
---@return string kind  its model_type
function models.to_hugging_face(model, folder, opts) return require("te.hugging_face").save(model, folder, opts) end
options.declare(models.to_hugging_face, function() return require("te.hugging_face").SAVE end)

--- What gives rows of numbers that stand for texts, of a folder with an encoder: embedder:encode { "a text", … } is
--- {n, width}. It pools and normalizes as the folder's files of sentence-transformers say.
---@param folder string
---@param opts table|nil
---@return table embedder
function models.embedder(folder, opts) return require("te.embedder").load(folder, opts) end
options.declare(models.embedder, function() return require("te.embedder").OPTIONS end)

return setmetatable(models, {
    names = KINDS, -- what loads when it is named, for completion and help
    __index = function(_, name)
        if not KINDS[name] then
            local near = options.nearest(tostring(name), options.names(KINDS))
            fail("te.models has no %q%s", tostring(name), near and ("; did you mean %q?"):format(near) or "")
        end
        models[name] = require(KINDS[name])
        return models[name]
    end,
})
