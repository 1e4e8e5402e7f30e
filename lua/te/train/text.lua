--- te.train.text: the tokenizer of a run. One from a file is copied beside the run's checkpoints, which name it there.

local te = require "te"
local beside = require "te.tokenizer.beside"

local text = {}

-- The folder that a path is in, or is.
local function folder_of(path)
    local stat = te._core.stat(path)
    return stat and stat.type == "directory" and path or path:match "^(.*)/[^/]*$" or "."
end

--- What te.data.open takes as tokenizer for the options of train_gpt.lua: "byte", "char", or one that is read from a
--- file; nil for a model in a folder that has none.
---@param o table             options tokenizer, hugging_face, out
---@param saved table|nil     the checkpoint that the run goes on from
---@return string|table|nil
function text.tokenizer(o, saved)
    local named = saved and saved.metadata.tokenizer
    if named then return named:find "^bpe " and te.tokenizer.parse(named, folder_of(saved.path)) or o.tokenizer end
    local path = o.tokenizer
    if o.hugging_face and path == "char" then
        path = o.hugging_face .. "/" .. beside[1]
        if not te._core.stat(path) then return nil end
    end
    if path == "byte" or path == "char" then return path end
    local tokenizer = te.tokenizer.load(path)
    return tokenizer.kind == "bpe" and tokenizer:call(beside[1]) or tokenizer
end

--- Copies a tokenizer that is in a file into the folder of a run.
---@param tokenizer table|nil
---@param folder string
function text.keep(tokenizer, folder)
    if tokenizer and tokenizer.kind == "bpe" then tokenizer:save(folder) end
end

--- The text of ids that a model drew; without those that it has and the tokenizer has not.
---@param tokenizer table
---@param ids integer[]
---@return string
function text.decode(tokenizer, ids)
    local known = {}
    for _, id in ipairs(ids) do
        if id < tokenizer.vocab_size then known[#known + 1] = id end
    end
    return tokenizer:decode(known)
end

--- The tokenizer of a checkpoint that te.train.checkpoint.load read; nil of a run on ids.
---@param saved table
---@return table|nil
function text.of_checkpoint(saved)
    local named = saved.metadata.tokenizer
    return named and te.tokenizer.parse(named, folder_of(saved.path))
end

return text
