--- Nested tables in files of named tensors, for te.save and te.load. A tensor in { state = { { m = t } } } is named
--- "state/1/m"; a number, text or boolean stands in the metadata, as "te.nested/groups/1/lr" = "number 0.1".
--- Tables that are empty stand there, too, and the outermost one, by which a file is known.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local nested = {}

local PREFIX, DEEPEST = "te.nested/", 64

-- The name of what stands at a key of the table at `path`.
local function name_of(path, key)
    local below = path == "" and path or path .. "/"
    if type(key) == "number" and key % 1 == 0 and math.abs(key) <= 2 ^ 53 then return below .. ("%.0f"):format(key) end
    local is_name = type(key) == "string" and key ~= "" and not key:find "/" and not key:find "^-?%d+$"
    if is_name then return below .. key end
    fail("te.save: %s%s: in nested tables a name is a whole number up to 2^53, or a text that is none, is not empty "
        .. "and has no \"/\"", below, options.shown(key))
end

local function flatten(path, value, entries, texts, depth)
    if te.is_tensor(value) then
        entries[#entries + 1] = { path, value }
    elseif type(value) == "table" and not getmetatable(value) then
        if depth > DEEPEST then fail("te.save: %s: tables are nested more than %d deep", path, DEEPEST) end
        if depth == 0 or next(value) == nil then texts[PREFIX .. path] = "table" end
        for key, inner in pairs(value) do
            flatten(name_of(path, key), inner, entries, texts, depth + 1)
        end
    elseif type(value) == "number" or type(value) == "string" or type(value) == "boolean" then
        local text = type(value) == "number" and ("%.17g"):format(value) or tostring(value)
        texts[PREFIX .. path] = ("%s %s"):format(type(value), text)
    else
        fail("te.save: %s: expected a tensor, a table, a number, a text or a boolean, got %s",
            path, te._core.describe(value))
    end
end

--- A list of {name, tensor}, and texts by name with those of `metadata`.
function nested.flatten(tables, metadata)
    local entries, texts = {}, {}
    for name, text in pairs(metadata or {}) do texts[name] = text end
    flatten("", tables, entries, texts, 0)
    table.sort(entries, function(a, b) return a[1] < b[1] end)
    return entries, texts
end

local READ = {
    table = function() return {} end,
    number = function(text) return tonumber(text) end,
    string = function(text) return text end,
    boolean = function(text) return text == "true" end,
}

-- Puts a value at its path; false where something else stands there, or above it what is no table.
local function put(all, path, value)
    local at, key = all, nil
    for name in path:gmatch "[^/]+" do
        if key ~= nil then
            if at[key] == nil then at[key] = {} end
            at = at[key]
            if type(at) ~= "table" then return false end
        end
        key = tonumber(name:match "^-?%d+$") or name
    end
    if key == nil then return true end
    local is_table = type(value) == "table" -- an empty one: more may be in it already
    if at[key] == nil then at[key] = value elseif not is_table or type(at[key]) ~= "table" then return false end
    return true
end

--- What nested.flatten was given, from what it made of it and the file at `file` holds.
function nested.restore(file, tensors, metadata)
    local all, texts = {}, {}
    local function add(name, path, value)
        if put(all, path, value) then return end
        fail("te.load: %s: header: %s: another value stands there, or above it one that is no table", file,
            options.shown(name))
    end
    for path, tensor in pairs(tensors) do add(path, path, tensor) end
    for name, text in pairs(metadata) do
        if name:sub(1, #PREFIX) == PREFIX then
            local kind, rest = text:match "^(%a+) ?(.*)$"
            if READ[kind] then add(name, name:sub(#PREFIX + 1), READ[kind](rest)) end
        else
            texts[name] = text
        end
    end
    return all, texts
end

return nested
