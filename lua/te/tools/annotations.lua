--- te.tools.annotations: tetrain.d.lua, which tells the Lua language server what `te` offers. Made
--- from te.tools.reference.

local options = require "te.options"
local reference = require "te.tools.reference"
local without_first = require("te.tools.source").without_first

local HEAD = [[
---@meta te
--- Made from the declarations of tetrain; not to be edited.

---@alias te.Dtype "float32"|"bfloat16"|"float16"|"float64"|"int64"|"int32"|"uint8"|"bool"|"float8_e4m3"|"float8_e5m2"
---@alias te.Shape integer|integer[]

---@class te.TensorOptions
---@field dtype? te.Dtype
---@field device? string
---@field requires_grad? boolean

---@class te.MemoryStats
---@field current integer
---@field peak integer
---@field reserved integer
---@field allocations integer

---@class te.Tensor
---@field dtype te.Dtype
---@field device string
---@field shape integer[]
---@field grad te.Tensor|nil
---@field main_grad te.Tensor|nil
---@field requires_grad boolean
---@field is_leaf boolean
---@operator add(te.Tensor|number): te.Tensor
---@operator sub(te.Tensor|number): te.Tensor
---@operator mul(te.Tensor|number): te.Tensor
---@operator div(te.Tensor|number): te.Tensor
---@operator mod(te.Tensor|number): te.Tensor
---@operator pow(te.Tensor|number): te.Tensor
---@operator unm: te.Tensor
---@operator len: integer
local Tensor = {}

---@class te.Module
---@field training boolean
---@operator call: te.Tensor
local Module = {}

local te = {}
]]

-- A type of an annotation as the language server reads it.
local function type_of(text)
    return (text == "" or not text:find "^[%a\"{]") and "any" or text
end

local function add_doc(out, doc)
    for line in (doc .. "\n"):gmatch "(.-)\n" do
        if line ~= "" then out[#out + 1] = "---" .. line end
    end
end

local TYPES = { size = "integer", callable = "function", string = "string", number = "number", boolean = "boolean",
    integer = "integer", table = "table" }

-- The class te.NAME.Options of what a function or class takes in its table, and the name of that class.
local function add_options(out, entry)
    if not entry.options then return nil end
    local name = ("te.%s.Options"):format(entry.name)
    out[#out + 1] = "---@class " .. name
    for _, key in ipairs(options.names(entry.options)) do
        local d = entry.options[key]
        local kind = d.choices and '"' .. table.concat(d.choices, '"|"') .. '"' or TYPES[d[1]] or "any"
        local text = d[2] ~= nil and ("%s (%s)"):format(d.help or "", options.default(d)) or d.help or ""
        out[#out + 1] = ("---@field %s? %s %s"):format(key, kind, text)
    end
    out[#out + 1] = ""
    return name
end

local IS_OPTIONS = { opts = true, config = true }

local function add_params(out, params, options_class)
    local names = {}
    for i, p in ipairs(params) do
        names[i] = p.name
        local kind, optional = type_of(p.type):gsub("|nil$", "")
        if options_class and IS_OPTIONS[p.name] then
            kind, optional = options_class, (i == #params or optional > 0) and 1 or 0
        end
        out[#out + 1] = ("---@param %s%s %s%s"):format(p.name, optional > 0 and "?" or "", kind,
            p.doc and " " .. p.doc or "")
    end
    return table.concat(names, ", ")
end

local function add_function(out, target, entry, params)
    local options_class = add_options(out, entry)
    add_doc(out, entry.doc)
    local names = add_params(out, params, options_class)
    for _, result in ipairs(entry.results) do
        out[#out + 1] = "---@return " .. type_of((result:gsub(" %.%.%.$", "")))
    end
    out[#out + 1] = ("function %s(%s) end\n"):format(target, names)
end

local function sorted_names(class)
    local names = {}
    for name, value in pairs(class) do
        if type(name) == "string" and type(value) == "function" and not name:find "^_" and name ~= "init" then
            names[#names + 1] = name
        end
    end
    table.sort(names)
    return names
end

-- A class's own methods but those of a list, as methods of the annotated class.
local function add_methods(out, target, class, others)
    for _, entry in ipairs(others or {}) do others[entry.name] = true end
    for _, name in ipairs(sorted_names(class)) do
        local known = reference.of_function(class[name])
        if known and not (others and others[name]) then
            known.name, known.options = target .. "." .. name, options.of(class[name])
            add_function(out, target .. (known.is_method and ":" or ".") .. name, known, known.params)
        end
    end
end

-- Classes that those of te.models derive from, and theirs.
local BASES = { LanguageModel = "Module", Decoder = "LanguageModel", Encoder = "LanguageModel" }

local function add_class(out, entry)
    if entry.name == "Module" then
        add_methods(out, "Module", entry.class)
        out[#out + 1] = "---@type te.Module\nte.Module = Module\n"
        return
    end
    local here, options_class = entry.name:match "[%w_]+$", add_options(out, entry)
    local super = entry.class.super.__name
    super = BASES[super] and super or "Module"
    out[#out + 1] = ("---@class te.%s: te.%s"):format(entry.name, super)
    out[#out + 1] = ("local %s = {}\n"):format(here)
    local written = reference.written(entry.name)
    add_methods(out, here, entry.class, written)
    for _, known in ipairs(written) do add_function(out, here .. ":" .. known.name, known, known.params) end
    add_doc(out, entry.doc)
    local names = add_params(out, entry.params, options_class)
    out[#out + 1] = ("---@return te.%s\nfunction te.%s(%s) end\n"):format(entry.name, entry.name, names)
end

-- What is called to make something: an optimizer; a te.KVCache, a table with functions of its own.
local function add_maker(out, entry)
    if #entry.results > 0 then return add_function(out, "te." .. entry.name, entry, entry.params) end
    local options_class = add_options(out, entry)
    add_doc(out, entry.doc)
    out[#out + 1] = ("---@class te.%s\n---@overload fun(opts?: %s): te.%s\nte.%s = {}\n"):format(entry.name,
        options_class or "table", entry.name, entry.name)
    for _, name in ipairs(sorted_names(entry.value)) do
        local known = reference.of_function(entry.value[name])
        if known then add_function(out, ("te.%s%s%s"):format(entry.name, known.is_method and ":" or ".", name), known,
            known.params) end
    end
end

local add_entry

local function add_module(out, entry)
    out[#out + 1] = ("te.%s = {}\n"):format(entry.name)
    if entry.name == "ops" then return end -- the classes of te
    local made = {}
    for _, member in ipairs(reference.members(entry.name)) do
        local inner = member.name:match "^(.*)%.[^.]+$"
        if inner ~= entry.name and not made[inner] then
            made[inner], out[#out + 1] = true, ("te.%s = {}\n"):format(inner)
        end
        add_entry(out, member)
    end
end

function add_entry(out, entry)
    if entry.kind == "class" then
        add_class(out, entry)
    elseif entry.kind == "maker" then
        add_maker(out, entry)
    elseif entry.kind == "module" then
        add_module(out, entry)
    else
        add_function(out, "te." .. entry.name, entry, entry.params)
    end
end

-- What functions return.
local function add_kinds(out)
    for _, entry in ipairs(reference.kinds()) do
        local methods = {}
        for name, method in pairs(entry.class) do
            local known = type(method) == "function" and reference.of_function(method)
            if known and known.is_method then methods[name] = method end
        end
        add_doc(out, entry.doc)
        local base = BASES[entry.name]
        out[#out + 1] = ("---@class te.%s%s"):format(entry.name, base and ": te." .. base or "")
        for _, field in ipairs(entry.params) do
            out[#out + 1] = ("---@field %s %s"):format(field.name, field.type)
        end
        out[#out + 1] = ("local %s = {}\n"):format(entry.name)
        add_methods(out, entry.name, methods)
    end
end

--- The text of tetrain.d.lua.
---@return string
return function()
    local te = require "te"
    local out = { HEAD }
    for _, entry in ipairs(reference.methods()) do
        local params = entry.native and entry.params or without_first(entry.params)
        add_function(out, "Tensor:" .. entry.name, entry, params)
    end
    add_kinds(out)
    for _, entry in ipairs(reference.entries()) do add_entry(out, entry) end
    for _, op in ipairs(te.ops_list()) do
        if op.inplace then out[#out + 1] = ("te.%s_ = Tensor.%s_\n"):format(op.name, op.name) end
    end
    out[#out + 1] = ("te.version = %q\n\nreturn te\n"):format(te.version)
    return table.concat(out, "\n")
end
