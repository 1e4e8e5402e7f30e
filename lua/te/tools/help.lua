--- te.tools.help: what a name or value is, for ?name and help(x) at the prompt.

local te = require "te"
local options = require "te.options"
local reference = require "te.tools.reference"

local help = {}

local function parameter_lines(entry)
    local lines = {}
    for _, p in ipairs(entry.params) do
        if p.doc and p.doc ~= "" then lines[#lines + 1] = ("  %s (%s): %s"):format(p.name, p.type, p.doc) end
    end
    return lines
end

local function result_lines(entry)
    local lines = {}
    for _, r in ipairs(entry.returned or {}) do
        local class = r.type:match "^te%.(%u%w+)"
        local more = class and class ~= "Tensor" and ("; ?%s lists its methods"):format(class) or ""
        lines[#lines + 1] = ("  returns %s%s%s"):format(r.type, r.doc and ": " .. r.doc or "", more)
    end
    if #lines == 0 and #entry.results > 0 and entry.kind ~= "operation" then
        lines[1] = "  returns " .. table.concat(entry.results, ", ")
    end
    return lines
end

-- "  bias (boolean, default true): whether a bias is added".
local function option_lines(entry)
    local lines = {}
    for _, row in ipairs(options.rows(entry.options or entry.common or {})) do
        local d = row[2]
        local kind = d[1] == "callable" and "function" or options.describe(d)
        lines[#lines + 1] = ("  %s (%s%s)%s"):format(row[1], kind,
            d[2] == nil and "" or ", default " .. options.default(d), d.help and ": " .. d.help or "")
    end
    if #lines > 0 then table.insert(lines, 1, "options:") end
    return lines
end

-- "kind: name name …" in lines that fit the terminal.
local function wrapped(kind, names)
    local lines, line = {}, kind .. ":"
    for _, name in ipairs(names) do
        if #line + #name + 1 > te._core.terminal_width() then
            lines[#lines + 1], line = line, "   "
        end
        line = line .. " " .. name
    end
    lines[#lines + 1] = line
    return table.concat(lines, "\n") .. "\n"
end

-- Names in a library; te.ops loads its when they are named.
local function members_of(entry)
    local names = reference.names(entry.value)
    if entry.name ~= "ops" then return names end
    for name, path in pairs(require "te.modules") do
        if path:find "^te%.ops%." then names[#names + 1] = name end
    end
    table.sort(names)
    return names
end

local function describe(entry)
    local lines = { entry.signature }
    if entry.doc ~= "" then lines[#lines + 1] = entry.doc end
    for _, part in ipairs { parameter_lines, result_lines, option_lines } do
        for _, line in ipairs(part(entry)) do lines[#lines + 1] = line end
    end
    if entry.kind == "kind" and #entry.params > 0 then
        local fields = {}
        for i, field in ipairs(entry.params) do fields[i] = ("%s (%s)"):format(field.name, field.type) end
        lines[#lines + 1] = "fields: " .. table.concat(fields, ", ")
    end
    local list, names = "methods", {}
    if entry.kind == "module" then
        list, names = "members", members_of(entry)
    elseif entry.class or entry.kind == "maker" then
        names = reference.methods_of(entry.class or entry.value, entry.kind == "kind")
    end
    if #names > 0 then lines[#lines + 1] = wrapped(list, names):gsub("\n$", "") end
    return table.concat(lines, "\n")
end

-- "te.optim.AdamW" as a value; the names on the way are those of tables.
local function resolve(path)
    local value = _G
    for name in path:gmatch "[^.:]+" do
        if type(value) ~= "table" then return nil end
        local ok, found = pcall(function(t, key) return t[key] end, value, name)
        value = ok and found or nil
    end
    return value
end

local function names_of(entries)
    local names = {}
    for _, entry in ipairs(entries) do names[#names + 1] = entry.name end
    return names
end

local function of_lua_function(fn)
    local known = reference.of_function(fn)
    if not known then
        return debug.getinfo(fn, "S").what == "C" and "a function written in C"
            or "a Lua function whose source is not at hand"
    end
    local names = {}
    for i, p in ipairs(known.params) do names[i] = p.name end
    known.signature = ("function(%s)  %s:%d"):format(table.concat(names, ", "), known.file, known.line)
    known.options = options.of(fn)
    return describe(known)
end

local function of_instance(value)
    local mt = getmetatable(value)
    local text = tostring(value)
    if type(mt) ~= "table" then return text end
    local name, names = rawget(mt, "__name"), reference.methods_of(mt, true)
    return (name and ("an instance of %s\n"):format(name) or "") .. text
        .. (#names > 0 and "\n" .. wrapped("Methods", names):gsub("\n$", "") or "")
end

-- The entry of `te`, or of one of its libraries, that holds this very value.
local function entry_holding(value)
    local entries = reference.entries()
    for _, entry in ipairs(entries) do
        if rawget(te, entry.name) == value then return entry end
    end
    for _, library in ipairs(entries) do
        for _, entry in ipairs(library.kind == "module" and reference.members(library.name) or {}) do
            if entry.value == value then return entry end
        end
    end
end

local function of_value(value)
    if te.is_tensor(value) then
        return tostring(value):match "^[^\n]*" .. "\nMethods: " .. table.concat(names_of(reference.methods()), " ")
    end
    local entry = (type(value) == "function" or type(value) == "table") and entry_holding(value)
    if entry then return describe(entry) end
    if type(value) == "function" then return of_lua_function(value) end
    if type(value) == "table" then return of_instance(value) end
    return require("te.tools.show")(value)
end

local overview = [[
te.NAME: ?NAME explains each of them.
]]

local function all()
    local kinds, order = {}, { "operation", "function", "class", "module" }
    for _, entry in ipairs(reference.entries()) do
        local kind = entry.kind == "maker" and "class" or entry.kind
        kinds[kind] = kinds[kind] or {}
        table.insert(kinds[kind], entry.name)
    end
    local lines = { overview }
    for _, kind in ipairs(order) do lines[#lines + 1] = wrapped(kind, kinds[kind] or {}) end
    return (table.concat(lines, "\n"):gsub("%s+$", ""))
end

-- The nearest name to one that is not there, among those of the library that it begins with.
local function nearest(what)
    local name = what:gsub("^te%.", "")
    local library, last = name:match "^([%w_.]+)%.([%w_]+)$"
    local entry = library and reference.find(library)
    if not entry or entry.kind ~= "module" then return te._core.nearest(name, names_of(reference.entries())) end
    local near = te._core.nearest(last, reference.names(entry.value))
    return near and library .. "." .. near
end

--- Text about a value, or about what a string names: an operation, a function, a class, something in a library
--- ("optim.AdamW"), a global, a method of tensors.
---@param what any
---@return string
function help.text(what)
    if what == nil or what == "" or what == "te" or rawequal(what, te) then return all() end
    if type(what) ~= "string" then return of_value(what) end
    local entry = reference.find((what:gsub("^te%.", "")))
    if entry then return describe(entry) end
    local value = resolve(what)
    if value ~= nil then return of_value(value) end
    local name = what:gsub("^te%.", "")
    local class, method = name:match "^([%w_]*)[:.]?([%w_]+)$"
    if not what:find "[:.]" then class, method = "", name end
    for _, candidate in ipairs(reference.methods()) do
        if candidate.name == method then return describe(candidate) end
    end
    for _, kind in ipairs(reference.kinds()) do
        if kind.name == name then return describe(kind) end
    end
    local texts = {}
    for i, entry in ipairs(method and reference.methods_named(method, class ~= "" and class or nil) or {}) do
        texts[i] = describe(entry)
    end
    if #texts > 0 then return table.concat(texts, "\n\n") end
    local here = require("te.tools.elsewhere").names[name]
    if here then return ("%s is no name here: %s"):format(name, here) end
    local near = nearest(what)
    error(("nothing is known of %q%s"):format(what, near and ("; did you mean %s?"):format(near) or ""), 0)
end

return help
