--- Fields of tokenizer.json files, checked: what a file says either acts or is an error that names it.

local fail = require "te.fail"
local options = require "te.options"

local reader = { WHO = "te.tokenizer.load" }

--- Raises: what the file has in a field, and what is expected there.
function reader.refuse(path, field, value, expected)
    fail("%s: %s: %s: expected %s, got %s", reader.WHO, path, field, expected, options.shown(value))
end
local refuse = reader.refuse

--- Value of a field, of the given type; nil where it is not there and may be absent.
function reader.typed(path, from, prefix, name, kind, optional)
    local value = from[name]
    if type(value) ~= kind and not (optional and value == nil) then
        refuse(path, prefix .. name, value, kind == "table" and "a list or an object" or "a " .. kind)
    end
    return value
end

--- Raises where a field says something; `values` are those that say nothing.
function reader.silent(path, from, prefix, name, values)
    local value = from[name]
    if value == nil then return end
    for _, allowed in ipairs(values) do
        if value == allowed then return end
    end
    refuse(path, prefix .. name, value, "none, which is all that is supported")
end

--- How many entries a list has; raises where nulls are among them.
function reader.entries(path, field, list)
    local n = #list
    for key in pairs(list) do
        if type(key) ~= "number" or key > n then refuse(path, field, list, "a list without nulls") end
    end
    return n
end

--- Steps of { type = "Sequence", [name] = { … } }, or the one step that there is; none for null. Each is
--- { step, field }.
function reader.sequence(path, value, field, name)
    if value == nil then return {} end
    if type(value) ~= "table" then refuse(path, field, value, "an object or null") end
    if value.type ~= "Sequence" then return { { value, field } } end
    local list = reader.typed(path, value, field .. ".", name, "table")
    local steps = {}
    for i = 1, reader.entries(path, field .. "." .. name, list) do
        local place = ("%s.%s[%d]"):format(field, name, i - 1)
        if type(list[i]) ~= "table" then refuse(path, place, list[i], "an object") end
        steps[i] = { list[i], place }
    end
    return steps
end

--- What a step cuts by: a text, and whether it is taken literally.
function reader.pattern(path, step, field)
    local pattern = reader.typed(path, step, field .. ".", "pattern", "table")
    local literal = pattern.String ~= nil
    local text = literal and pattern.String or pattern.Regex
    if type(text) ~= "string" or text == "" then refuse(path, field .. ".pattern", text, "a Regex or a String") end
    return text, literal
end

return reader
