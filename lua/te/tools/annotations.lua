--- te.tools.annotations: tetrain.d.lua, which tells the Lua language server what `te` offers. Made
--- from te.tools.reference.

local reference = require "te.tools.reference"

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
    text = text:gsub("^userdata$", "te.Tensor")
    return (text == "" or not text:find "^[%a\"{]") and "any" or text
end

local function add_doc(out, doc)
    for line in (doc .. "\n"):gmatch "(.-)\n" do
        if line ~= "" then out[#out + 1] = "---" .. line end
    end
end

local function add_params(out, params)
    local names = {}
    for i, p in ipairs(params) do
        names[i] = p.name
        local kind, optional = type_of(p.type):gsub("|nil$", "")
        out[#out + 1] = ("---@param %s%s %s%s"):format(p.name, optional > 0 and "?" or "", kind,
            p.doc and " " .. p.doc or "")
    end
    return table.concat(names, ", ")
end

local function add_function(out, target, entry, params)
    add_doc(out, entry.doc)
    local names = add_params(out, params)
    for _, result in ipairs(entry.results) do
        out[#out + 1] = "---@return " .. type_of((result:gsub(" %.%.%.$", "")))
    end
    out[#out + 1] = ("function %s(%s) end\n"):format(target, names)
end

local function without_first(params)
    local rest = {}
    for i = 2, #params do rest[i - 1] = params[i] end
    return rest
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

-- A class's own methods, as methods of the annotated class.
local function add_methods(out, target, class)
    for _, name in ipairs(sorted_names(class)) do
        local known = reference.of_function(class[name])
        if known then add_function(out, target .. ":" .. name, known, known.params) end
    end
end

local function add_class(out, entry)
    if entry.name == "Module" then
        add_methods(out, "Module", entry.class)
        out[#out + 1] = "---@type te.Module\nte.Module = Module\n"
        return
    end
    out[#out + 1] = ("---@class te.%s: te.Module"):format(entry.name)
    out[#out + 1] = ("local %s = {}\n"):format(entry.name)
    add_methods(out, entry.name, entry.class)
    add_doc(out, entry.doc)
    local names = add_params(out, entry.params)
    out[#out + 1] = ("---@return te.%s\nfunction te.%s(%s) end\n"):format(entry.name, entry.name, names)
end

local function add_module(out, entry, value)
    out[#out + 1] = ("te.%s = {}\n"):format(entry.name)
    for _, name in ipairs(sorted_names(value)) do
        local known = reference.of_function(value[name])
        if known then add_function(out, ("te.%s.%s"):format(entry.name, name), known, known.params) end
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
    for _, entry in ipairs(reference.entries()) do
        if entry.kind == "class" then
            add_class(out, entry)
        elseif entry.kind == "module" then
            add_module(out, entry, te[entry.name])
        else
            add_function(out, "te." .. entry.name, entry, entry.params)
        end
    end
    for _, op in ipairs(te.ops_list()) do
        if op.inplace then out[#out + 1] = ("te.%s_ = Tensor.%s_\n"):format(op.name, op.name) end
    end
    out[#out + 1] = ("te.version = %q\n\nreturn te\n"):format(te.version)
    return table.concat(out, "\n")
end
