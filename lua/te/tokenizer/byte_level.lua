--- What byte-level tokenizer.json files say of bytes and of cutting, as GPT-2, Llama 3 and Qwen come with.
--
-- The vocabulary writes bytes as characters: those that print as themselves, the others as U+0100 and up.
--
-- NFC is that of today, and the one there that of Unicode 9: where several marks follow one another and one of them is
-- newer, it leaves them in their order.

local reader = require "te.tokenizer.reader"
local translate = require "te.tokenizer.pattern"
local refuse, typed, silent, sequence = reader.refuse, reader.typed, reader.silent, reader.sequence

-- Bytes -----------------------------------------------------------------------------------------------------------

local unknown -- whether a character of the token met last stands for no byte
-- The byte that each of the characters stands for.
local alphabet = setmetatable({}, { __index = function()
    unknown = true
    return nil
end })

do
    local function utf8(point) -- below U+0800
        if point < 0x80 then return string.char(point) end
        return string.char(0xC0 + math.floor(point / 64), 0x80 + point % 64)
    end
    local others = 0
    for byte = 0, 255 do
        local prints = byte >= 33 and byte <= 126 or byte >= 161 and byte ~= 173
        rawset(alphabet, utf8(prints and byte or 256 + others), string.char(byte))
        if not prints then others = others + 1 end
    end
end

-- The bytes that a token of the vocabulary stands for; nil where it does not use the alphabet.
local function bytes_of(token)
    if not token:find "[^!-~]" then return token end
    unknown = false
    local bytes = token:gsub("[%z\1-\127\192-\255][\128-\191]*", alphabet)
    return not unknown and bytes or nil
end

-- What stands for characters that have no token acts only where some byte has none.
local function check_unknown(path, model)
    for character in pairs(alphabet) do
        if not model.vocab[character] then
            silent(path, model, "model.", "unk_token", { "" })
            silent(path, model, "model.", "fuse_unk", { false })
        end
    end
end

-- Cutting ---------------------------------------------------------------------------------------------------------

local GPT2 = [['s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]]

local function read_split(path, step, field)
    if step.behavior ~= "Isolated" then refuse(path, field .. ".behavior", step.behavior, '"Isolated"') end
    if step.invert ~= nil and step.invert ~= false then refuse(path, field .. ".invert", step.invert, "false") end
    local text, literal = reader.pattern(path, step, field)
    return literal and text or translate(path, field .. ".pattern.Regex", text), literal
end

-- Patterns and whether they are literal, one after the other; false in place of a pattern is the space in front.
local function read_steps(path, pre_tokenizer)
    local flat, steps = {}, sequence(path, pre_tokenizer, "pre_tokenizer", "pretokenizers")
    for i, entry in ipairs(steps) do
        local step, field = entry[1], entry[2]
        if i < #steps then
            if step.type ~= "Split" then refuse(path, field .. ".type", step.type, '"Split"') end
            flat[#flat + 1], flat[#flat + 2] = read_split(path, step, field)
        else
            if step.type ~= "ByteLevel" then
                refuse(path, field .. ".type", step.type, 'a "ByteLevel", which must be the last step')
            end
            if typed(path, step, field .. ".", "add_prefix_space", "boolean") then
                flat[#flat + 1], flat[#flat + 2] = false, false
            end
            if typed(path, step, field .. ".", "use_regex", "boolean", true) ~= false then
                flat[#flat + 1], flat[#flat + 2] = translate(path, field, GPT2), false
            end
        end
    end
    if #steps == 0 then refuse(path, "pre_tokenizer", pre_tokenizer, 'a "ByteLevel"') end
    return flat
end

local function read_normalizer(path, normalizer)
    local steps = sequence(path, normalizer, "normalizer", "normalizers")
    for _, entry in ipairs(steps) do
        if entry[1].type ~= "NFC" then refuse(path, entry[2] .. ".type", entry[1].type, '"NFC" or null') end
    end
    return #steps > 0
end

local function check_decoder(path, decoder)
    local steps = sequence(path, decoder, "decoder", "decoders")
    for _, entry in ipairs(steps) do
        if entry[1].type ~= "ByteLevel" then refuse(path, entry[2] .. ".type", entry[1].type, '"ByteLevel"') end
    end
    if #steps ~= 1 then refuse(path, "decoder", decoder, 'one "ByteLevel"') end
end

local byte_level = { alphabet = alphabet }

--- What te._core.tokenizer takes, out of a file, and how tokens are written.
---@return table way  fields; bytes_of(token): the text that leads to one of the vocabulary or nil, and whether it does;
--- decoded(token), decoded_added(token): what one of the vocabulary and an added one stand for, where that is another
function byte_level.read(path, file)
    check_unknown(path, file.model)
    check_decoder(path, file.decoder)
    return {
        fields = { steps = read_steps(path, file.pre_tokenizer), nfc = read_normalizer(path, file.normalizer) },
        bytes_of = function(token)
            local bytes = bytes_of(token)
            return bytes, bytes ~= nil
        end,
    }
end

return byte_level
