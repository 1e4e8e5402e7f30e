--- te.train.text: the data of train_gpt.lua and its tokenizer. A tokenizer from a file is copied beside the run's
--- checkpoints, which name it there.

local te = require "te"
local beside = require "te.tokenizer.beside"
local script = require "te.train.run"

local text = {}

-- The folder that a path is in, or is.
local function folder_of(path)
    local stat = te._core.stat(path)
    return stat and stat.type == "directory" and path or path:match "^(.*)/[^/]*$" or "."
end

-- What te.data.open takes as tokenizer: "byte", "char", or one that is read from a file; nil for a model in a folder
-- that has none.
local function tokenizer_of(o, saved)
    local named, path = saved and saved.metadata.tokenizer, o.tokenizer
    local of_data = path == "byte" or path == "char" and not o.hugging_face -- which is compared with that of before
    if named then return of_data and path or te.tokenizer.parse(named, folder_of(saved.path)) end
    if o.hugging_face and path == "char" then
        path = o.hugging_face .. "/" .. beside[1]
        if not te._core.stat(path) then return nil end
    end
    if path == "byte" or path == "char" then return path end
    local tokenizer = te.tokenizer.load(path)
    return tokenizer.kind == "bpe" and tokenizer:call(beside[1]) or tokenizer
end

--- Opens the data of train_gpt.lua. What is wrong ends the script.
---@param o table             options data, out, tokenizer, hugging_face, vocab_size, batch, block, seed, val_fraction
---@param saved table|nil     the checkpoint that the run goes on from
---@param ranks table         of te.train.ranks
---@param path string         of the running script
---@param refuse function
---@return table set          of te.data.open
function text.open(o, saved, ranks, path, refuse)
    local tokenizer = script.io(tokenizer_of, o, saved)
    local model_has = not o.hugging_face and type(tokenizer) == "table" and tokenizer.vocab_size or o.vocab_size
    local set = script.io(te.data.open, { path = o.data, except = o.out, script = path, tokenizer = tokenizer or "byte",
        vocab_size = model_has, batch = o.batch, block = o.block, rank = ranks.row_rank, ranks = ranks.row_ranks,
        seed = o.seed, val_fraction = o.val_fraction })
    if set.tokenizer and not tokenizer then
        refuse("--hugging-face=%s: there is no tokenizer.json for text; --tokenizer names one", o.hugging_face)
    elseif set.tokenizer and o.hugging_face and set.tokenizer.vocab_size > o.vocab_size then
        refuse("the tokenizer has %d tokens, the model in --hugging-face=%s %d", set.tokenizer.vocab_size,
            o.hugging_face, o.vocab_size)
    end
    return set
end

--- Ends the script for options of text, which has a tokenizer, where there are shards, and the other way round.
---@param given table     options of the command line
---@param tokenizer any   nil: there are shards
---@param refuse function
function text.check_options(given, tokenizer, refuse)
    if given.tokenizer and not tokenizer then refuse "--tokenizer is for text: shards hold ids already" end
    if given.vocab_size and tokenizer then refuse "--vocab-size is for shards: a text has its own" end
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
