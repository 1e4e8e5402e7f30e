--- te.tokenizer: text to token ids and back. Ids count from 0.
--
-- byte: every byte is a token; 256 of them, any text. char: one token for each code point that occurs in a text, in
-- their order. A byte that is no UTF-8 stands for the code point 0xDC00 + byte, as surrogates cannot occur in UTF-8, so
-- that every text survives the way there and back. load: BPE from a tokenizer.json file, see
-- te.tokenizer.bpe.

local fail = require "te.fail"
local files = require "te.files"
local options = require "te.options"
local each = require "te.tokenizer.ids"
local beside = require "te.tokenizer.beside"

local tokenizer = {}

local BAD = 0xDC00

local MULTIBYTE = {
    -- least first byte, bytes, bits in the first byte, least and most code point
    { 0xF0, 4, 0x07, 0x10000, 0x10FFFF }, { 0xE0, 3, 0x0F, 0x800, 0xFFFF }, { 0xC0, 2, 0x1F, 0x80, 0x7FF },
}

-- Code point at position i of text, and its length in bytes.
local function code_point(text, i)
    local first = text:byte(i)
    if first < 0x80 then return first, 1 end
    for _, form in ipairs(MULTIBYTE) do
        local least, length, mask, low, high = unpack(form)
        if first >= least then
            local point = first % (mask + 1)
            for k = i + 1, i + length - 1 do
                local byte = text:byte(k)
                if not byte or byte < 0x80 or byte > 0xBF then return BAD + first, 1 end
                point = point * 64 + byte - 0x80
            end
            if first > 0xF4 or point < low or point > high or (point >= 0xD800 and point <= 0xDFFF) then
                return BAD + first, 1
            end
            return point, length
        end
    end
    return BAD + first, 1
end

local function bytes_of(point)
    if point >= BAD and point < BAD + 256 then return string.char(point - BAD) end
    if point < 0x80 then return string.char(point) end
    local tail = {}
    local lead = { 0xC0, 0xE0, 0xF0 }
    local n = point < 0x800 and 1 or point < 0x10000 and 2 or 3
    for k = n, 1, -1 do
        tail[k] = string.char(0x80 + point % 64)
        point = math.floor(point / 64)
    end
    return string.char(lead[n] + point) .. table.concat(tail)
end

local function each_point(text)
    local i = 1
    return function()
        if i > #text then return nil end
        local point, length = code_point(text, i)
        i = i + length
        return point
    end
end

-- As BPE has them; without special tokens and spaces of its own none makes a difference.
local ENCODE = { special = { "boolean", false }, prompt = { "boolean", false } }
local DECODE = { continues = { "boolean", false }, skip_special_tokens = { "boolean", false } }

local function check_text(text, opts)
    options.argument("te.tokenizer", "text", text, { "string" })
    options.check("te.tokenizer", opts, ENCODE)
end

--- The text of a list of ids or a tensor {n}; of a tensor {batch, n} a list of texts.
---@param ids integer[]|te.Tensor
---@return string|string[]
local function decode(self, ids, opts)
    if type(self) ~= "table" or not self.texts then options.method("tokenizer:decode", self) end
    options.check("te.tokenizer", opts, DECODE)
    return each(ids, function(list)
        local pieces = {}
        for i = 1, options.list("te.tokenizer", "ids", list) do
            pieces[i] = self.texts[list[i]]
                or fail("te.tokenizer: token %s of a vocabulary of %d", tostring(list[i]), self.vocab_size)
        end
        return table.concat(pieces)
    end)
end

local Byte = { kind = "byte", vocab_size = 256, texts = {}, decode = decode }
Byte.__index = Byte
for id = 0, 255 do Byte.texts[id] = string.char(id) end

function Byte:encode(text, opts)
    options.method("tokenizer:encode", self, Byte)
    check_text(text, opts)
    local ids = {}
    for i = 1, #text do ids[i] = text:byte(i) end
    return ids
end

--- A token that a text may begin after: the newline.
function Byte.start() return 10 end

--- The ids that end a text: none.
function Byte.ends() return {} end

function Byte.describe() return "byte" end

-- Writes a tokenizer.json into a folder, and what makes Transformers read it.
local function save(folder, text)
    options.argument("tokenizer:save", "folder", folder, { "string" })
    files.need "tokenizer:save"
    beside.write(folder, { ["tokenizer.json"] = text })
end

--- Writes tokenizer.json and tokenizer_config.json into a folder, as Transformers reads them.
---@param folder string
function Byte:save(folder)
    options.method("tokenizer:save", self, Byte)
    save(folder, require("te.tokenizer.characters").byte_file())
end

local Char = { kind = "char", decode = decode }
Char.__index = Char

local function new_char(points)
    local self = setmetatable({ points = points, vocab_size = #points, ids = {}, texts = {}, ascends = true }, Char)
    for i, point in ipairs(points) do
        self.ascends = self.ascends and (i == 1 or points[i - 1] < point)
        self.ids[point] = i - 1
        self.texts[i - 1] = bytes_of(point)
    end
    return self
end

function Char:encode(text, opts)
    options.method("tokenizer:encode", self, Char)
    check_text(text, opts)
    local ids, n = {}, 0
    for point in each_point(text) do
        local id = self.ids[point]
        if not id then
            fail("te.tokenizer: %s is not among the %d known ones", point >= BAD and point < BAD + 256
                and ("byte 0x%02x, which is no UTF-8,"):format(point - BAD)
                or ("character %q (code point %d)"):format(bytes_of(point), point), self.vocab_size)
        end
        n = n + 1
        ids[n] = id
    end
    return ids
end

--- A token that a text may begin after: the newline, where the vocabulary has it.
function Char:start()
    options.method("tokenizer:start", self, Char)
    return self.ids[10] or 0
end

--- The ids that end a text: none.
function Char.ends() return {} end

function Char:describe()
    options.method("tokenizer:describe", self, Char)
    return "char " .. table.concat(self.points, " ")
end

--- Writes tokenizer.json and tokenizer_config.json into a folder, as Transformers reads them.
---@param folder string
function Char:save(folder)
    options.method("tokenizer:save", self, Char)
    local characters, texts = require "te.tokenizer.characters", {}
    characters.check("tokenizer:save", self)
    for i = 1, self.vocab_size do texts[i] = self.texts[i - 1] end
    save(folder, characters.file(texts))
end

--- A tokenizer whose tokens are the bytes of a text.
---@return te.Tokenizer
function tokenizer.byte() return setmetatable({}, Byte) end

--- A tokenizer of the characters of `text`.
---@return te.Tokenizer
function tokenizer.char(text)
    options.argument("te.tokenizer.char", "text", text, { "string" })
    local points, seen = {}, {}
    for point in each_point(text) do
        if not seen[point] then
            seen[point] = true
            points[#points + 1] = point
        end
    end
    table.sort(points)
    return new_char(points)
end

--- A tokenizer of the given code points, sorted.
---@param points integer[]
---@return te.Tokenizer
function tokenizer.from_points(points)
    local who = "te.tokenizer.from_points"
    options.argument(who, "points", points, { "table" })
    for i = 1, options.list(who, "points", points) do
        options.argument(who, ("points[%d]"):format(i), points[i], { "integer", min = 0, max = 0x10FFFF })
    end
    return new_char(points)
end

--- A tokenizer of these characters, in the order of their ids.
---@param texts string[]  each the UTF-8 of one
---@return te.Tokenizer
function tokenizer.of_characters(texts)
    local who, points = "te.tokenizer.of_characters", {}
    options.argument(who, "texts", texts, { "table" })
    for i = 1, options.list(who, "texts", texts) do
        local text = options.argument(who, ("texts[%d]"):format(i), texts[i], { "string" })
        local length = 0
        if text ~= "" then points[i], length = code_point(text, 1) end
        if text == "" or length < #text then
            fail("%s: texts[%d]: expected one character, got %s", who, i, options.shown(text))
        end
    end
    return new_char(points)
end

--- The tokenizer of a tokenizer.json file, as GPT-2, Llama, Qwen and Gemma come with: BPE.
---@param path string  the file, or the folder that holds it
---@return te.Tokenizer
function tokenizer.load(path) return require("te.tokenizer.bpe").load(path) end

--- The tokenizer that describe() described.
---@param text string
---@param folder string|nil  where the names of files start from
---@return te.Tokenizer
function tokenizer.parse(text, folder)
    if text == "byte" then return tokenizer.byte() end
    local path = type(text) == "string" and text:match("^bpe (.+)$")
    if path then
        local full = folder and not path:find "^/" and folder .. "/" .. path or path
        return tokenizer.load(full):call(path)
    end
    local list = type(text) == "string" and text:match("^char ([%d ]*)$")
    if not list then fail("te.tokenizer.parse: %q is no description of a tokenizer", tostring(text)) end
    local points = {}
    for number in list:gmatch("%d+") do points[#points + 1] = tonumber(number) end
    return tokenizer.from_points(points)
end

return options.library("te.tokenizer", tokenizer)
