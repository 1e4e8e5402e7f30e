--- What tokenizer.json files that come of SentencePiece say, as Llama 2, Mistral and Gemma come with.
--
-- Text is merged from characters, and a character that has no token becomes the tokens "<0x00>" to "<0xFF>" of its
-- bytes. Spaces are written U+2581, and one may be put in front of a text. Here tokens have the spaces themselves, so
-- that what is left to do with a text is to make spaces of its own U+2581, which mean the same.

local fail = require "te.fail"
local options = require "te.options"
local reader = require "te.tokenizer.reader"
local refuse, typed = reader.refuse, reader.typed

local BLANK = "\226\150\129" -- U+2581

-- Whether a step replaces `from` by `to`.
local function replaces(path, step, field, from, to)
    if step.type ~= "Replace" then return false end
    local text, literal = reader.pattern(path, step, field)
    return literal and text == from and step.content == to
end

-- { blanks, space } of the normalizer: whether it makes U+2581 of spaces, and puts one in front.
local function read_normalizer(path, normalizer)
    local found = { blanks = false, space = false }
    for _, entry in ipairs(reader.sequence(path, normalizer, "normalizer", "normalizers")) do
        local step, field = entry[1], entry[2]
        if replaces(path, step, field, " ", BLANK) then
            found.blanks = true
        elseif step.type == "Prepend" and step.prepend == BLANK then
            found.space = true
        else
            refuse(path, field, step.type, '"Replace" of " " or "Prepend", by and of ' .. BLANK)
        end
    end
    if found.space and not found.blanks then refuse(path, "normalizer", normalizer, 'a "Replace" of " " as well') end
    return found
end

-- The steps of a Metaspace: the space in front, and cuts before spaces.
local function read_metaspace(path, step, field)
    if step.replacement ~= BLANK then refuse(path, field .. ".replacement", step.replacement, BLANK) end
    local prepends = typed(path, step, field .. ".", "add_prefix_space", "boolean", true) ~= false
    local scheme = typed(path, step, field .. ".", "prepend_scheme", "string", true) or prepends and "always" or "never"
    local flat = {}
    if scheme == "always" or scheme == "first" then
        flat = { false, scheme == "first" }
    elseif scheme ~= "never" then
        refuse(path, field .. ".prepend_scheme", scheme, '"always", "first" or "never"')
    end
    if typed(path, step, field .. ".", "split", "boolean", true) ~= false then
        flat[#flat + 1], flat[#flat + 2] = " [^ ]*", false
    end
    return flat
end

local function read_steps(path, pre_tokenizer, normalized)
    local steps = reader.sequence(path, pre_tokenizer, "pre_tokenizer", "pretokenizers")
    local flat, blanks = {}, normalized.blanks
    for i, entry in ipairs(steps) do
        local step, field = entry[1], entry[2]
        -- nothing is left where it cuts
        local idle = step.type == "Split" and normalized.blanks and reader.pattern(path, step, field) == " "
        if step.type == "Metaspace" and #steps == 1 then
            flat, blanks = read_metaspace(path, step, field), true
        elseif not idle then
            refuse(path, ("%s.type"):format(field), step.type, i == 1 and 'one "Metaspace"' or "nothing more")
        end
    end
    if not blanks then refuse(path, "normalizer", nil, 'a "Replace" of " ", or a "Metaspace" as pre_tokenizer') end
    return flat
end

-- Whether a space in front of a decoded text is left out.
local function read_decoder(path, decoder)
    local steps, at = reader.sequence(path, decoder, "decoder", "decoders"), 0
    local function step_of(kind)
        local entry = steps[at + 1]
        local found = entry and entry[1].type == kind
        if found then at = at + 1 end
        return found and entry[1], entry and entry[2] or "decoder"
    end
    local step, field = step_of "Replace"
    if not step or not replaces(path, step, field, BLANK, " ") then
        refuse(path, field, step and step.content, ('a "Replace" of %s by " "'):format(BLANK))
    end
    for _, kind in ipairs { "ByteFallback", "Fuse" } do
        local found, place = step_of(kind)
        if not found then refuse(path, place, decoder, ("a %q there"):format(kind)) end
    end
    step, field = step_of "Strip"
    local known = not step or step.content == " " and step.start == 1 and step.stop == 0
    if not known then refuse(path, field, step.start, 'the content " ", start 1 and stop 0') end
    if at < #steps then refuse(path, steps[at + 1][2], steps[at + 1][1].type, "nothing more") end
    return step and true or false
end

local byte_fallback = {}

--- What te._core.tokenizer takes, out of a file, and how tokens are written.
---@return table way  { fields, bytes_of, decoded, decoded_added, strips }: see byte_level.read; strips: a decoded text
--- goes without the space in front
function byte_fallback.read(path, file)
    local strips, normalized = read_decoder(path, file.decoder), read_normalizer(path, file.normalizer)
    local vocabulary, fallback = file.model.vocab, {}
    for byte = 0, 255 do
        local token = ("<0x%02X>"):format(byte)
        fallback[byte + 1] = vocabulary[token]
            or fail("%s: %s: model.vocab: byte_fallback needs the token %s", reader.WHO, path, options.shown(token))
    end
    -- The byte that a token stands for; nil for others.
    local function byte_of(token)
        local byte = token:match "^<0x(%x%x)>$"
        byte = byte and tonumber(byte, 16)
        return byte and vocabulary[token] == fallback[byte + 1] and string.char(byte) or nil
    end
    local function spaced(token) return (token:gsub(BLANK, " ")) end
    return {
        fields = { steps = read_steps(path, file.pre_tokenizer, normalized), blanks = true, space = normalized.space,
            fallback = fallback },
        bytes_of = function(token) return spaced(token), not token:find(" ", 1, true) end,
        decoded = function(token) return byte_of(token) or spaced(token) end,
        decoded_added = function(token)
            return (normalized.space and token.normalized and " " or "") .. spaced(token.content)
        end,
        strips = strips,
    }
end

return byte_fallback
