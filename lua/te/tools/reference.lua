--- te.tools.reference: everything that `te` offers, as one list, from where it is declared: operations from the engine,
--- functions and classes from the annotations in their source, the rest from te.tools.natives.
--
-- Help, the editor's annotations and the tables of the documentation read it.

local te = require "te"
local options = require "te.options"
local natives = require "te.tools.natives"
local kinds = require "te.tools.kinds"
local source = require "te.tools.source"
local file_doc, opening, without_first = source.file_doc, source.opening, source.without_first

local reference = { of_function = source.of_function }

-- Entries -------------------------------------------------------------------------------------------------------------

local function is_class(value)
    return type(value) == "table" and (rawget(value, "is_module") ~= nil or type(rawget(value, "__name")) == "string")
end

local function arguments(params)
    local names = {}
    for i, p in ipairs(params) do names[i] = p.name end
    return table.concat(names, ", ")
end

-- The sentence of the engine's operation of that name.
local function doc_of_operation(name)
    for _, op in ipairs(te.ops_list()) do
        if op.name == name then return op.doc end
    end
end

-- A text that begins with the name of what it is about, as files do: "te.NAME: sentences". Behind a signature the name
-- says nothing more.
local function without_name(name, text)
    local rest = text:match("^te%." .. name:gsub("%.", "%%.") .. ": (.*)$")
    return rest and rest:sub(1, 1):upper() .. rest:sub(2) or text
end

local function class_entry(name, class)
    local entry = { name = name, kind = "class", params = {}, results = {}, options = options.of(class) }
    local init = class.init
    local known = type(init) == "function" and reference.of_function(init)
    if known then entry.params, entry.file = known.params, known.file end
    local sentence, own = rawget(class, "sentence"), rawget(class, "init") or rawget(class, "forward")
    entry.doc = known and known.doc ~= "" and known.doc or sentence or doc_of_operation(class.engine_operation)
        or type(own or init) == "function" and without_name(name, file_doc(own or init)) or ""
    entry.signature = ("te.%s(%s)"):format(name, arguments(entry.params))
    entry.class = class
    return entry
end

local function function_entry(name, fn)
    local known = reference.of_function(fn) or { doc = "", params = {}, results = {} }
    if known.doc == "" then -- a file that is about this function
        local doc = file_doc(fn)
        known.doc = doc:find("^te%." .. name:gsub("%.", "%%.") .. "[:(]") and without_name(name, doc) or ""
    end
    local called = known.is_method and name:gsub("[.:]([^.:]+)$", ":%1") or name
    return { name = name, kind = "function", signature = ("te.%s(%s)"):format(called, arguments(known.params)),
        doc = known.doc, params = known.params, results = known.results, returned = known.returned, file = known.file,
        options = options.of(fn) }
end

-- What the file says in which a table's functions stand.
local function doc_of_members(value)
    for _, name in ipairs(options.names(value)) do
        local member = rawget(value, name)
        local doc = type(member) == "function" and not name:find "^_" and file_doc(member) or ""
        if doc ~= "" then return doc end
    end
    return ""
end

local function call_of(value)
    local mt = getmetatable(value)
    return type(mt) == "table" and mt.__call or nil
end

-- A table that is called to make something and is no class of modules: an optimizer, a te.KVCache.
local function maker_entry(name, value)
    local entry = function_entry(name, call_of(value))
    if entry.doc == "" then entry.doc = without_name(name, doc_of_members(value)) end
    entry.kind, entry.value, entry.options = "maker", value, options.of(value)
    return entry
end

-- "shape: te.Shape, opts?: table" as a list.
local function declared_params(text)
    local params = {}
    for name, optional, kind in text:gmatch "([%w_.]+)(%??): ([^,]+)" do
        params[#params + 1] = { name = name, type = kind .. (optional == "?" and "|nil" or "") }
    end
    return params
end

local function native_entry(prefix, row)
    local params, results = declared_params(row[2]), {}
    if row[2]:find "^shape: te.Shape, opts" then params[1].doc = natives.shape end
    for kind in row[3]:gmatch "[^,]+" do results[#results + 1] = kind:match "^%s*(.*)" end
    return { name = row[1], kind = "function", native = true, params = params,
        results = results, common = row[2]:find "te.TensorOptions" and natives.options or nil,
        signature = ("%s%s(%s)"):format(prefix, row[1], arguments(params)), doc = row[4] }
end

local OP_TYPES = { tensor = "te.Tensor", tensors = "te.Tensor[]", number = "number", int = "integer", bool = "boolean",
    dim = "integer", index = "integer", dims = "integer|integer[]", shape = "te.Shape", dtype = "te.Dtype",
    device = "string", text = "string" }

local function operation_entry(op)
    local params, results = {}, {}
    for i, p in ipairs(op.params) do
        local kind = p.choices and '"' .. p.choices:gsub("|", '"|"') .. '"' or OP_TYPES[p.type] or "any"
        if p.type == "tensor" and op.numbers then kind = kind .. "|number" end
        params[i] = { name = p.name, type = kind .. (p.optional and "|nil" or ""), by_name = p.by_name }
    end
    for i = 1, op.n_outputs do results[i] = "te.Tensor" end
    return { name = op.name, kind = "operation", signature = "te." .. op.signature, doc = op.doc, params = params,
        results = results, op = op }
end

local function module_entry(name, value)
    local lines = source.lines(("=%s.lua"):format((require("te.modules")[name] or ""):gsub("%.", "/")))
    return { name = name, kind = "module", params = {}, results = {}, signature = "te." .. name, value = value,
        doc = lines and opening(lines) or doc_of_members(value) }
end

local function entry_of(name, value)
    if is_class(value) then return class_entry(name, value) end
    if type(value) == "function" then return function_entry(name, value) end
    if type(value) == "table" and call_of(value) then return maker_entry(name, value) end
    if type(value) == "table" then return module_entry(name, value) end
end

local function by_name(a, b) return a.name < b.name end

--- Everything in `te`, sorted by name: { name, kind = operation, function, class or module,
--- signature, doc, params, results }.
---@return table[]
function reference.entries()
    local entries, known = {}, {}
    local function add(entry)
        if not entry or known[entry.name] then return end
        known[entry.name] = true
        entries[#entries + 1] = entry
    end
    for _, op in ipairs(te.ops_list()) do
        add(operation_entry(op))
        if op.inplace then known[op.name .. "_"] = true end
    end
    for _, row in ipairs(natives.functions) do
        if rawget(te, row[1]) ~= nil then add(native_entry("te.", row)) end
    end
    local names = {}
    for name in pairs(te) do names[name] = true end
    for name in pairs(require "te.modules") do names[name] = true end
    for name in pairs(names) do
        if type(name) == "string" and not name:find "^_" then add(entry_of(name, te[name])) end
    end
    table.sort(entries, by_name)
    return entries
end

--- Methods of tensors: operations in both forms, natives, and those written in Lua, sorted by name.
---@return table[]
function reference.methods()
    local entries, ops, rows = {}, {}, {}
    for _, op in ipairs(te.ops_list()) do
        if op.method then ops[op.name] = op end
        if op.inplace then ops[op.name .. "_"] = op end
    end
    for _, row in ipairs(natives.methods) do rows[row[1]] = row end
    for name, method in pairs(te._core.tensor_methods) do
        local entry
        if ops[name] then
            entry = operation_entry(ops[name])
            entry.name = name
        elseif rows[name] then
            entry = native_entry("x:", rows[name])
        else
            entry = function_entry(name, method)
            entry.signature = ("x:%s(%s)"):format(name, arguments(without_first(entry.params)))
        end
        entries[#entries + 1] = entry
    end
    table.sort(entries, by_name)
    return entries
end

-- Methods of objects ----------------------------------------------------------------------------------------------

--- What an object or a class inherits methods from; nil at the end.
local function parent(class)
    local mt = getmetatable(class)
    local super = rawget(class, "super") or type(mt) == "table" and rawget(mt, "__index")
    return type(super) == "table" and super ~= class and super or nil
end

--- What classes write that extend the class of this name: entries.
---@param base string
---@return table[]
function reference.written(base)
    local entries = {}
    for i, row in ipairs(natives.written[base] or {}) do entries[i] = native_entry("te." .. base .. ":", row) end
    return entries
end

--- Names of the methods of a class that are documented, sorted.
---@param class table
---@param of_objects boolean|nil  those that objects have, inherited ones too
---@return string[]
function reference.methods_of(class, of_objects)
    local names = {}
    repeat
        for name, method in pairs(class) do
            local known = type(method) == "function" and type(name) == "string" and name ~= "init"
                and not name:find "^_" and reference.of_function(method)
            if known and known.doc ~= "" and (known.is_method or not of_objects) then names[name] = true end
        end
        for base, rows in pairs(natives.written) do
            for _, row in ipairs(te[base] == class and rows or {}) do names[row[1]] = true end
        end
        class = of_objects and parent(class)
    until not class
    return options.names(names)
end

--- What functions return that is no class of modules (te.tools.kinds), as entries.
---@return table[]
function reference.kinds()
    local entries = {}
    for i, kind in ipairs(kinds.list()) do
        entries[i] = { name = kind.name, object = kind.object, kind = "kind", signature = kind.name, doc = kind.doc,
            params = declared_params(kind.fields), results = {}, class = kind.class }
    end
    return entries
end

--- Methods by this name of every class: entries.
---@param name string
---@param class string|nil  of this one alone, or of what signatures call its objects
---@return table[]
function reference.methods_named(name, class)
    local found = {}
    local function add(entry)
        if entry and entry.doc ~= "" then found[#found + 1] = entry end
    end
    for base in pairs(natives.written) do
        for _, entry in ipairs((class or base) == base and reference.written(base) or {}) do
            if entry.name == name then add(entry) end
        end
    end
    for _, kind in ipairs(reference.kinds()) do
        local method = (not class or class == kind.name or class == kind.object) and rawget(kind.class, name)
        if type(method) == "function" and not name:find "^_" then
            local entry = function_entry(kind.object .. ":" .. name, method)
            entry.signature = entry.signature:gsub("^te%.", "")
            add(entry)
        end
    end
    for _, base in ipairs(class and {} or { "Module", "Sequential", "KVCache", "QuantizedTensor" }) do
        local method = rawget(te[base], name)
        if type(method) == "function" and name ~= "init" and not name:find "^_" then
            add(function_entry(base .. ":" .. name, method))
        end
    end
    return found
end

--- Names in a library of `te`, those that load when they are named included, sorted.
---@param library table
---@return string[]
function reference.names(library)
    local names, mt = {}, getmetatable(library)
    for name in pairs(type(mt) == "table" and mt.names or {}) do names[name] = true end
    for name, value in pairs(library) do
        local is_something = type(value) == "function" or type(value) == "table"
        if type(name) == "string" and not name:find "^_" and is_something then names[name] = true end
    end
    return options.names(names)
end

local function add_members(entries, library, prefix, seen)
    for _, name in ipairs(reference.names(library)) do
        local value = library[name]
        if not seen[value] then
            seen[value] = true
            local entry = entry_of(prefix .. name, value)
            if entry.kind ~= "module" then
                entry.value = value
                entries[#entries + 1] = entry
            else
                add_members(entries, value, entry.name .. ".", seen)
            end
        end
    end
end

--- Everything in a library of `te`: entries with names like "optim.AdamW", and the value of each.
---@param name string
---@return table[]
function reference.members(name)
    local entries = {}
    add_members(entries, te[name], name .. ".", { [te[name]] = true })
    return entries
end

--- The entry of a name in `te`, "softmax", "Linear", "optim.AdamW" or "Module:clone"; nil when there is none.
---@param name string
---@return table|nil
function reference.find(name)
    for _, entry in ipairs(reference.entries()) do
        if entry.name == name then return entry end
    end
    local library, path = name:gsub(":", "."):match "^([%w_]+)%.([%w_.]+)$"
    if natives.written[library] then
        local written = reference.methods_named(path, library)[1]
        if written then return written end
    end
    local found, value = pcall(function() return te[library] end)
    for part in (path or ""):gmatch "[^.]+" do
        if not found or type(value) ~= "table" then return nil end
        local inside = value
        found, value = pcall(function() return inside[part] end)
        if is_class(inside) and (type(value) ~= "function" or part:find "^_") then return nil end
    end
    return path and found and entry_of(name, value) or nil
end

return reference
