--- BPE tokenizers from tokenizer.json files: byte-level ones, as GPT-2, Llama 3 and Qwen come with (byte_level.lua),
--- and those of SentencePiece, as Llama 2, Mistral and Gemma do (byte_fallback.lua).
--
-- What a file says either acts here as it does where it was written, or is an error that names it: a tokenizer that
-- leaves something out gives ids that the model has never seen together.

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local options = require "te.options"
local each = require "te.tokenizer.ids"
local reader = require "te.tokenizer.reader"
local byte_level = require "te.tokenizer.byte_level"
local byte_fallback = require "te.tokenizer.byte_fallback"
local around = require "te.tokenizer.around"
local characters = require "te.tokenizer.characters"
local beside = require "te.tokenizer.beside"

local WHO = reader.WHO
local refuse, typed, silent, entries, sequence = reader.refuse, reader.typed, reader.silent, reader.entries,
    reader.sequence

-- Model -----------------------------------------------------------------------------------------------------------

-- By id + 1 the bytes that lead to tokens, and where way says them those that tokens stand for; the ids that text does
-- not lead to.
local function read_vocabulary(path, vocabulary, added, way)
    local texts, opaque, n, largest = {}, {}, 0, -1
    local function put(text, id, field)
        if type(id) ~= "number" or id < 0 or id % 1 ~= 0 or id >= 2 ^ 31 - 1 then
            refuse(path, field, id, "a token's id")
        end
        if texts[id + 1] then
            fail("%s: %s: %s: id %d is that of another token as well, %s", WHO, path, field, id,
                options.shown(texts[id + 1]))
        end
        texts[id + 1] = text
        n = n + 1
        largest = math.max(largest, id)
    end
    for token, id in pairs(vocabulary) do
        if type(token) ~= "string" then refuse(path, "model.vocab", vocabulary, "an object") end
        put(token, id, "model.vocab[" .. options.shown(token) .. "]")
    end
    for i, token in ipairs(added) do
        local known = vocabulary[token.content]
        if known == nil then
            put(token.content, token.id, ("added_tokens[%d].id"):format(i - 1))
            opaque[#opaque + 1] = token.id
        elseif known ~= token.id then
            refuse(path, ("added_tokens[%d].id"):format(i - 1), token.id, ("%d, as in model.vocab"):format(known))
        end
    end
    if n == 0 then fail("%s: %s: model.vocab: there are no tokens", WHO, path) end
    if largest ~= n - 1 then
        local id = 0
        while texts[id + 1] do id = id + 1 end
        fail("%s: %s: model.vocab: no token has the id %d, and one has %d", WHO, path, id, largest)
    end
    for token, id in pairs(vocabulary) do
        local bytes, reached = way.bytes_of(token)
        texts[id + 1] = bytes or token
        if not reached or bytes == "" then opaque[#opaque + 1] = id end
    end
    local decoded = way.decoded and {}
    if decoded then
        for token, id in pairs(vocabulary) do decoded[id + 1] = way.decoded(token) end
        for _, token in ipairs(added) do decoded[token.id + 1] = way.decoded_added(token) end
    end
    return texts, decoded, opaque
end

-- The two tokens of a merge; "a b" and [a, b] are both in use.
local function read_merge(path, field, merge)
    local left, right
    if type(merge) == "string" then
        left, right = merge:match "^([^ ]+) ([^ ]+)$"
    elseif type(merge) == "table" and #merge == 2 then
        left, right = merge[1], merge[2]
    end
    if type(left) ~= "string" or type(right) ~= "string" then refuse(path, field, merge, "two tokens") end
    return left, right
end

-- Flat list of left, right and result.
local function read_merges(path, list, vocabulary)
    local merges, n = {}, 0
    for i = 1, entries(path, "model.merges", list) do
        local merge, field = list[i], ("model.merges[%d]"):format(i - 1)
        if type(merge) ~= "string" or merge:sub(1, 8) ~= "#version" then -- a line of merges.txt that came along
            local left, right = read_merge(path, field, merge)
            for _, token in ipairs { left, right, left .. right } do
                n = n + 1
                merges[n] = vocabulary[token] or fail("%s: %s: %s: model.vocab has no token %s", WHO, path, field,
                    options.shown(token))
            end
        end
    end
    return merges
end

local function check_model(path, model)
    if model.type ~= nil and model.type ~= "BPE" then refuse(path, "model.type", model.type, '"BPE" or "WordPiece"') end
    silent(path, model, "model.", "dropout", { 0 })
    silent(path, model, "model.", "continuing_subword_prefix", { "" })
    silent(path, model, "model.", "end_of_word_suffix", { "" })
    typed(path, model, "model.", "byte_fallback", "boolean", true)
    local ignores = model.ignore_merges
    if ignores ~= nil and type(ignores) ~= "boolean" then refuse(path, "model.ignore_merges", ignores, "a boolean") end
end

-- Added tokens ----------------------------------------------------------------------------------------------------

-- Text, id and whether it is looked for after normalization, one after the other.
local function flat_added(list)
    local flat = {}
    for i, token in ipairs(list) do
        flat[3 * i - 2], flat[3 * i - 1], flat[3 * i] = token.content, token.id, token.normalized
    end
    return flat
end

-- The tokenizer ---------------------------------------------------------------------------------------------------

local Bpe = { kind = "bpe" }
Bpe.__index = Bpe
options.kinds.Tokenizer = Bpe

local ENCODE = {
    special = { "boolean", false, help = "add the special tokens that the file puts around a text" },
    prompt = { "boolean", false, help = "add those that it puts before a text, unless they stand there" },
}

--- Ids of a text. Special tokens that stand in it are found; none are added unless `special` or `prompt` asks for them.
---@param text string
---@param opts table|nil  special, prompt
---@return integer[]
function Bpe:encode(text, opts)
    options.method("tokenizer:encode", self, Bpe)
    options.argument("te.tokenizer", "text", text, { "string" })
    opts = opts and options.check("te.tokenizer", opts, ENCODE)
    local ids = self.core:encode(around.strip(self.strippers, text))
    return around.put(self, ids, opts)
end

local DECODE = {
    continues = { "boolean", false, help = "the ids continue others: keep a leading space" },
    skip_special_tokens = { "boolean", false, help = "leave out the tokens that the file calls special" },
}

local function without(list, left_out)
    local rest = {}
    for _, id in ipairs(list) do
        if not left_out[id] then rest[#rest + 1] = id end
    end
    return rest
end

--- The bytes that ids stand for, special tokens as they are written. A token may end inside a character. The space that
--- a SentencePiece file may put in front of a text is left out unless the ids continue one. A tensor {batch, n} gives a
--- list of texts.
---@param ids integer[]|te.Tensor  a list or a tensor {n} or {batch, n}
---@param opts table|nil  continues, skip_special_tokens
---@return string|string[]
function Bpe:decode(ids, opts)
    options.method("tokenizer:decode", self, Bpe)
    opts = options.check("te.tokenizer", opts, DECODE)
    return each(ids, function(list)
        local text = self.core:decode(opts.skip_special_tokens and without(list, self.special) or list)
        return self.strips and not opts.continues and text:sub(1, 1) == " " and text:sub(2) or text
    end)
end

--- The token that is just this text, such as "<|endoftext|>"; nil where there is none.
---@param text string
---@return integer|nil
function Bpe:id(text)
    options.method("tokenizer:id", self, Bpe)
    options.argument("te.tokenizer", "text", text, { "string" })
    return self.names[text] or self.core:id(text)
end

--- A token that a text may begin after: what the file puts in front of one, or else the end of the text before, or the
--- newline.
---@return integer
function Bpe:start()
    options.method("tokenizer:start", self, Bpe)
    return self.before[1] or self:id "<|endoftext|>" or self:id "\n" or 0
end

local ENDS = { "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|return|>", "</s>", "<eos>",
    "<end_of_turn>", "<|eom_id|>", "<|call|>" }

--- The ids that end a text or a turn: those of the file's added tokens whose names are in use for that.
---@return integer[]
function Bpe:ends()
    options.method("tokenizer:ends", self, Bpe)
    local ids = {}
    for _, name in ipairs(ENDS) do ids[#ids + 1] = self.names[name] end
    return ids
end

--- Names the file, which te.tokenizer.parse reads again.
---@return string
function Bpe:describe()
    options.method("tokenizer:describe", self, Bpe)
    return "bpe " .. self.called
end

--- Has describe() say another name of the file: one from the folder that te.tokenizer.parse is given.
---@param name string
function Bpe:call(name)
    options.method("tokenizer:call", self, Bpe)
    self.called = options.argument("tokenizer:call", "name", name, { "string" })
    return self
end

--- Copies the file, and what stands beside it for tokenizers, into a folder, which keeps nothing of another's. Where no
--- tokenizer_config.json stands there, one is written.
---@param folder string
function Bpe:save(folder)
    options.method("tokenizer:save", self, Bpe)
    options.argument("tokenizer:save", "folder", folder, { "string" })
    files.need "tokenizer:save"
    beside.copy("tokenizer:save", self.path, folder)
end

local bpe = {}

-- The tokenizer of what a file says. How texts are cut and filled up (truncation, padding) is left to whoever makes
-- batches of them: a file has what was last asked for.
local function build(path, file)
    local model = typed(path, file, "", "model", "table")
    check_model(path, model)
    local vocabulary = typed(path, model, "model.", "vocab", "table")
    local added = around.added(path, typed(path, file, "", "added_tokens", "table", true) or {})
    local way = (model.byte_fallback and byte_fallback or byte_level).read(path, file)
    local fields, names, special = way.fields, {}, {}
    for _, token in ipairs(added) do names[token.content], special[token.id] = token.id, token.special or nil end
    fields.tokens, fields.decoded, fields.opaque = read_vocabulary(path, vocabulary, added, way)
    fields.merges = read_merges(path, typed(path, model, "model.", "merges", "table"), vocabulary)
    fields.added, fields.whole_first, fields.name = flat_added(added), model.ignore_merges or false, path
    local size = #fields.tokens
    local templates = around.post_processor(path, file.post_processor, size)
    local before, after = around.single(templates)
    return setmetatable({ core = te._core.tokenizer(fields), path = path, called = path, vocab_size = size,
        names = names, special = special, before = before, after = after, strips = way.strips or false,
        strippers = around.strippers(added) }, Bpe)
end

--- The tokenizer of a tokenizer.json file.
---@param path string  the file, or the folder that holds it
function bpe.load(path)
    options.argument(WHO, "path", path, { "string" })
    files.need(WHO)
    local stat = te._core.stat(path)
    if path:find "vocab%.txt$" then return require("te.tokenizer.wordpiece").of_words(path) end
    if stat and stat.type == "directory" then
        local words = path .. "/vocab.txt"
        if not te._core.stat(path .. "/tokenizer.json") and te._core.stat(words) then
            return require("te.tokenizer.wordpiece").of_words(words)
        end
        path = path .. "/tokenizer.json"
    end
    local file = files.json(WHO, path)
    if type(file) ~= "table" then refuse(path, "the file", file, "an object") end
    local kind = type(file.model) == "table" and file.model.type
    if kind == "WordPiece" then return require("te.tokenizer.wordpiece").build(path, file) end
    local texts = characters.texts(file)
    if not texts then return build(path, file) end
    check_model(path, file.model)
    return te.tokenizer.of_characters(texts)
end

return bpe
