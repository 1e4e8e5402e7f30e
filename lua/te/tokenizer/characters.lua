--- Tokenizers of single characters, or bytes, as tokenizer.json files: a BPE that merges nothing.

local json = require "te.json"
local byte_level = require "te.tokenizer.byte_level"

local characters = {}

local function file(vocabulary, pre_tokenizer, decoder)
    local null = json.null
    return json.encode { version = "1.0", truncation = null, padding = null, added_tokens = json.empty_list,
        normalizer = null, pre_tokenizer = pre_tokenizer or null, post_processor = null, decoder = decoder,
        model = { type = "BPE", dropout = null, unk_token = null, continuing_subword_prefix = null,
            end_of_word_suffix = null, fuse_unk = false, byte_fallback = false, ignore_merges = false,
            vocab = vocabulary, merges = json.empty_list } }
end

--- The file of a tokenizer whose token number i - 1 is the text texts[i].
---@param texts string[]
---@return string
function characters.file(texts)
    local vocabulary = {}
    for i, text in ipairs(texts) do vocabulary[text] = i - 1 end
    return file(vocabulary, nil, { type = "Fuse" })
end

--- The file of the tokenizer of bytes.
---@return string
function characters.byte_file()
    local vocabulary = {}
    for character, byte in pairs(byte_level.alphabet) do vocabulary[character] = byte:byte() end
    local step = { type = "ByteLevel", add_prefix_space = false, trim_offsets = true, use_regex = false }
    return file(vocabulary, step, step)
end

local function single(text) return text:find "^[%z\1-\127\192-\255][\128-\191]*$" ~= nil end

--- The texts of a file that characters.file made, or one that says the same; nil of another.
---@param parsed table
---@return string[]|nil
function characters.texts(parsed)
    local model = parsed.model
    local plain = type(model) == "table" and type(model.vocab) == "table" and type(model.merges) == "table"
        and not (next(model.merges) or model.byte_fallback or model.unk_token or parsed.pre_tokenizer
            or parsed.normalizer or parsed.post_processor or next(parsed.added_tokens or {}))
    if not plain then return nil end
    local texts, n = {}, 0
    for text, id in pairs(model.vocab) do
        if type(id) ~= "number" or type(text) ~= "string" or not single(text) or texts[id + 1] then return nil end
        texts[id + 1], n = text, n + 1
    end
    return #texts == n and texts or nil
end

return characters
