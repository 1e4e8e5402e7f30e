--- JSON of Lua values, for files that other programs read; te._core.json reads them.

local options = require "te.options"

local json = {}

--- What stands for null, as nil is nothing at all.
json.null = {}

local EMPTY = {}

--- An empty list: an empty table is an object.
json.empty_list = EMPTY

local Real = {}

--- A number that reads as a real one where it is whole as well.
---@param value number
function json.real(value) return setmetatable({ value = value }, Real) end

--- A text in quotes. What is no UTF-8 is the caller's.
---@param text string
function json.text(text)
    return '"' .. text:gsub('[%c"\\]', function(c) return ("\\u%04x"):format(c:byte()) end) .. '"'
end

local function number(value)
    if value - value ~= 0 then return "null" end -- JSON has no NaN and no infinities
    return value % 1 == 0 and math.abs(value) < 2 ^ 53 and ("%.0f"):format(value) or options.exact(value)
end

local encode

-- Entries between brackets, each in a line of its own.
local function lines(open, entries, close, margin)
    local inner = "\n" .. margin .. "  "
    return open .. inner .. table.concat(entries, "," .. inner) .. "\n" .. margin .. close
end

local function object(value, margin)
    local entries = {}
    for i, name in ipairs(options.names(value)) do
        entries[i] = json.text(name) .. ": " .. encode(value[name], margin .. "  ")
    end
    return entries[1] and lines("{", entries, "}", margin) or "{}"
end

local function list(value, margin)
    local entries = {}
    for i, entry in ipairs(value) do entries[i] = encode(entry, margin .. "  ") end
    return lines("[", entries, "]", margin)
end

function encode(value, margin)
    if value == json.null then return "null" end
    if value == EMPTY then return "[]" end
    if getmetatable(value) == Real then
        local text = number(value.value)
        return text:find "^-?%d+$" and text .. ".0" or text
    end
    if type(value) == "table" then return (value[1] ~= nil and list or object)(value, margin) end
    if type(value) == "number" then return number(value) end
    return type(value) == "boolean" and tostring(value) or json.text(value)
end

--- The text of a value: numbers, booleans, texts, null, lists, and tables by names, which are sorted.
---@return string
function json.encode(value) return encode(value, "") .. "\n" end

return json
