--- Tokenizers of single characters, or bytes, as tokenizer.json files: a BPE that merges nothing.

local fail = require "te.fail"
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

--- Raises where a tokenizer has a byte that is no UTF-8, and so stands in no file, or a zero byte, which te._core.json
--- reads in no name.
---@param who string
---@param tokenizer table
function characters.check(who, tokenizer)
    for _, point in ipairs(tokenizer.points or {}) do
        if point == 0 then fail("%s: a zero byte has no place in a tokenizer.json", who) end
        if point >= 0xDC00 and point < 0xDD00 then
            fail("%s: byte 0x%02x, which is no UTF-8, has no place in a tokenizer.json", who, point - 0xDC00)
        end
    end
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

local function none(list) return type(list) == "table" and next(list) == nil end

local function single(text) return text:find "^[%z\1-\127\192-\255][\128-\191]*$" ~= nil end

--- The texts of a file that characters.file made, or one that says the same; nil of another.
---@param parsed table
---@return string[]|nil
function characters.texts(parsed)
    local model = parsed.model
    local plain = type(model) == "table" and type(model.vocab) == "table" and none(model.merges)
        and none(parsed.added_tokens or {}) and not (model.byte_fallback or model.unk_token or parsed.pre_tokenizer
            or parsed.normalizer or parsed.post_processor)
    local decoder = parsed.decoder
    if not plain or decoder and (type(decoder) ~= "table" or decoder.type ~= "Fuse") then return nil end
    local texts, n = {}, 0
    for text, id in pairs(model.vocab) do
        if type(id) ~= "number" or type(text) ~= "string" or not single(text) or texts[id + 1] then return nil end
        texts[id + 1], n = text, n + 1
    end
    return n > 0 and #texts == n and texts or nil
end

return characters
