--- What tokenizer.json files say of tokens beside a model's: added ones, and special ones around texts.

local reader = require "te.tokenizer.reader"
local refuse, typed, silent, entries, sequence = reader.refuse, reader.typed, reader.silent, reader.entries,
    reader.sequence

local around = {}

-- Added tokens ----------------------------------------------------------------------------------------------------

--- The added tokens of a file, checked.
function around.added(path, list)
    local seen = {}
    for i = 1, entries(path, "added_tokens", list) do
        local prefix, token = ("added_tokens[%d]"):format(i - 1), list[i]
        if type(token) ~= "table" then refuse(path, prefix, token, "an object") end
        local content = typed(path, token, prefix .. ".", "content", "string")
        if content == "" or seen[content] then
            refuse(path, prefix .. ".content", content, "a text that no other added token has")
        end
        seen[content] = true
        typed(path, token, prefix .. ".", "id", "number")
        typed(path, token, prefix .. ".", "normalized", "boolean")
        typed(path, token, prefix .. ".", "special", "boolean", true)
        for _, name in ipairs { "lstrip", "rstrip", "single_word" } do
            local strips = name ~= "single_word" and token.normalized == false and token[name] == true
            if not strips then silent(path, token, prefix .. ".", name, { false }) end
        end
    end
    return list
end

-- Whitespace as Unicode has it.
local SPACES = {}
for _, space in ipairs { "\t", "\n", "\v", "\f", "\r", " ", "\194\133", "\194\160", "\225\154\128", "\226\128\168",
    "\226\128\169", "\226\128\175", "\226\129\159", "\227\128\128" } do SPACES[space] = true end
for last = 128, 138 do SPACES["\226\128" .. string.char(last)] = true end

-- Where the whitespace in front of `at` begins.
local function before(text, at)
    while at > 1 do
        local n = 1
        while n < 3 and not SPACES[text:sub(at - n, at - 1)] do n = n + 1 end
        if not SPACES[text:sub(at - n, at - 1)] then return at end
        at = at - n
    end
    return at
end

-- Where the whitespace from `at` on ends.
local function behind(text, at)
    while true do
        local n = 1
        while n < 3 and not SPACES[text:sub(at, at + n - 1)] do n = n + 1 end
        if not SPACES[text:sub(at, at + n - 1)] then return at end
        at = at + n
    end
end

--- The added tokens that take whitespace beside them away; nil where there are none.
function around.strippers(added)
    local list = {}
    for _, token in ipairs(added) do
        if token.lstrip or token.rstrip then list[#list + 1] = token end
    end
    return list[1] and list
end

--- A text without the whitespace that added tokens in it take away.
---@param strippers table[]|nil
---@param text string
function around.strip(strippers, text)
    for _, token in ipairs(strippers or {}) do
        local parts, at = {}, 1
        local first, last = text:find(token.content, 1, true)
        while first do
            local from = token.lstrip and math.max(before(text, first), at) or first
            parts[#parts + 1] = text:sub(at, from - 1) .. token.content
            at = token.rstrip and behind(text, last + 1) or last + 1
            first, last = text:find(token.content, at, true)
        end
        text = table.concat(parts) .. text:sub(at)
    end
    return text
end

-- Special tokens around texts --------------------------------------------------------------------------------------

-- Ids of the template's entry.
local function special_ids(path, step, field, place, name, n)
    local known = typed(path, step, field .. ".", "special_tokens", "table")[name]
    local ids = type(known) == "table" and known.ids
    if type(ids) ~= "table" then refuse(path, place, name, "one of special_tokens") end
    for i = 1, entries(path, place, ids) do
        local id = ids[i]
        if type(id) ~= "number" or id < 0 or id % 1 ~= 0 or id >= n then refuse(path, place, id, "a token's id") end
    end
    return ids
end

-- A template as a list of { ids =, text = "A" or "B", type = }; the texts are those that must stand in it, in order.
local function read_template(path, step, field, name, texts, n)
    local list, made, found = typed(path, step, field .. ".", name, "table"), {}, ""
    for i = 1, entries(path, field .. "." .. name, list) do
        local place, entry = ("%s.%s[%d]"):format(field, name, i - 1), list[i]
        local special = type(entry) == "table" and entry.SpecialToken
        local text = type(entry) == "table" and entry.Sequence
        local part = type(special) == "table" and special or text
        if type(part) ~= "table" or part == text and found .. tostring(text.id) ~= texts:sub(1, #found + 1) then
            refuse(path, place, entry, #texts == 1 and "a SpecialToken, or once the Sequence A"
                or "a SpecialToken, or once each of the Sequences A and B")
        end
        if part == text then found = found .. text.id end
        made[i] = { text = part == text and text.id or nil, type = part.type_id or 0,
            ids = part == special and special_ids(path, step, field, place, special.id, n) or nil }
    end
    if found ~= texts then
        refuse(path, field .. "." .. name, list, ("a template with the Sequence%s"):format(texts == "A" and " A"
            or "s A and B"))
    end
    return made
end

-- [CLS] A [SEP] and [CLS] A [SEP] B [SEP] with other names: as BERT has them, or RoBERTa with two between.
local function fixed(path, step, field, n)
    local function id_of(name)
        local pair = typed(path, step, field .. ".", name, "table")
        local id = pair[2]
        if type(id) ~= "number" or id < 0 or id % 1 ~= 0 or id >= n then
            refuse(path, ("%s.%s"):format(field, name), id, "a token and its id")
        end
        return id
    end
    local first, last, roberta = id_of "cls", id_of "sep", step.type == "RobertaProcessing"
    local second = roberta and 0 or 1
    local function special(id, kind) return { ids = { id }, type = kind } end
    local single = { special(first, 0), { text = "A", type = 0 }, special(last, 0) }
    local pair = { special(first, 0), { text = "A", type = 0 }, special(last, 0) }
    if roberta then pair[#pair + 1] = special(last, 0) end
    pair[#pair + 1], pair[#pair + 2] = { text = "B", type = second }, special(last, second)
    return { single = single, pair = pair }
end

--- What a file puts around texts: the templates single and pair, nil where it has none.
function around.post_processor(path, post_processor, n)
    local templates
    for _, entry in ipairs(sequence(path, post_processor, "post_processor", "processors")) do
        local step, field = entry[1], entry[2]
        if step.type == "TemplateProcessing" and not templates then
            templates = { single = read_template(path, step, field, "single", "A", n) }
            local pair = typed(path, step, field .. ".", "pair", "table", true)
            templates.pair = pair and #pair > 0 and pcall(read_template, path, step, field, "pair", "AB", n)
                and read_template(path, step, field, "pair", "AB", n) or nil
        elseif (step.type == "BertProcessing" or step.type == "RobertaProcessing") and not templates then
            templates = fixed(path, step, field, n)
        elseif step.type ~= "ByteLevel" then -- which is about offsets
            refuse(path, field .. ".type", step.type, '"ByteLevel" or one "TemplateProcessing"')
        end
    end
    return templates or {}
end

--- Ids in front of a text and behind it.
function around.single(templates)
    local before, after = {}, {}
    local into = before
    for _, part in ipairs(templates.single or {}) do
        if part.text then into = after end
        for _, id in ipairs(part.ids or {}) do into[#into + 1] = id end
    end
    return before, after
end

--- The ids of a text with what a tokenizer puts around it: all, or with opts.prompt what stands before, unless it does.
---@param tokenizer table  before, after
---@param ids integer[]
---@param opts table|nil   special, prompt
---@return integer[]
function around.put(tokenizer, ids, opts)
    if not opts or not (opts.special or opts.prompt) then return ids end
    local all, written = {}, #tokenizer.before > 0
    for i, id in ipairs(tokenizer.before) do written = written and ids[i] == id end
    for _, list in ipairs { opts.prompt and written and {} or tokenizer.before, ids,
        opts.special and tokenizer.after or nil } do
        for _, id in ipairs(list) do all[#all + 1] = id end
    end
    return all
end

--- Ids of two texts with what a template puts around them, and the type of each.
---@param who string
---@param templates table
---@param texts table<string, integer[]>  ids of A and B
function around.pair(who, templates, texts)
    local ids, types = {}, {}
    local parts = templates.pair or require("te.fail")("%s: option pair: the file has no template for two texts", who)
    for _, part in ipairs(parts) do
        for _, id in ipairs(part.ids or texts[part.text]) do
            ids[#ids + 1], types[#types + 1] = id, part.type
        end
    end
    return ids, types
end

return around
