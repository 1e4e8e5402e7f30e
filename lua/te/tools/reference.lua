--- te.tools.reference: everything that `te` offers, as one list, from where it is declared: operations from the engine,
--- functions and classes from the annotations in their source, the rest from te.tools.natives.
--
-- Help, the editor's annotations and the tables of the documentation read it.

local te = require "te"
local natives = require "te.tools.natives"

local reference = {}

-- Annotations in sources --------------------------------------------------------------------------------------------

local function lines_of(text)
    local lines = {}
    for line in (text .. "\n"):gmatch "(.-)\r?\n" do lines[#lines + 1] = line end
    return lines
end

local cache = {}

-- Lines of the file that debug.getinfo calls `source`: of the library ("=te/…"), or a script ("@path").
local function source_lines(source)
    if cache[source] then return cache[source] end
    local kind, name = source:sub(1, 1), source:sub(2)
    local text
    if kind == "=" then
        text = te._core.library_sources()[name]
    elseif kind == "@" then
        local file = io.open(name)
        text = file and file:read "*a"
        if file then file:close() end
    end
    local lines = text and lines_of(text)
    if kind == "=" then cache[source] = lines end -- a script may change
    return lines
end

-- The comment that ends right above a line, without its dashes.
local function comment_above(lines, line)
    local first = line
    while first > 1 and lines[first - 1]:find "^%s*%-%-" do first = first - 1 end
    local found = {}
    for i = first, line - 1 do found[#found + 1] = (lines[i]:gsub("^%s*%-%-%-?%s?", "")) end
    return found
end

local function names_in(parameters)
    local names = {}
    for name in parameters:gmatch "[%w_.]+" do
        if name ~= "self" and name ~= "_" then names[#names + 1] = name end
    end
    return names
end

--- What the source says of a Lua function: doc, params {name, type, doc}, results (types); nil when it cannot be found.
---@param fn function
---@return table|nil
function reference.of_function(fn)
    local info = debug.getinfo(fn, "S")
    local lines = info.what ~= "C" and source_lines(info.source)
    if not lines or not lines[info.linedefined] then return nil end
    local typed, results, doc = {}, {}, {}
    local target = doc
    for _, line in ipairs(comment_above(lines, info.linedefined)) do
        local name, rest = line:match "^@param%s+([%w_.]+)%??%s+(.*)$"
        local result = line:match "^@return%s+(.*)$"
        if name then
            local kind, text = rest:match "^(.-)%s%s+(.*)$"
            typed[name] = { type = kind or rest, doc = text }
        elseif result then
            results[#results + 1] = result:match "^(fun%b():?%s*%S*)" or result:match "^%S+"
        elseif not line:find "^@" then
            target[#target + 1] = line
        end
    end
    local params = {}
    for i, name in ipairs(names_in(lines[info.linedefined]:match "function[^(]*%(([^)]*)%)" or "")) do
        local known = typed[name] or {}
        params[i] = { name = name, type = known.type or "any", doc = known.doc }
    end
    return { doc = table.concat(doc, "\n"):gsub("%s+$", ""), params = params, results = results,
        file = info.source:sub(2), line = info.linedefined }
end

-- The first paragraph of the file in which a function stands.
local function file_doc(fn)
    local lines = source_lines(debug.getinfo(fn, "S").source)
    local found = {}
    for _, line in ipairs(lines or {}) do
        local text = line:match "^%-%-%-?%s?(.*)$"
        if not text or text == "" then break end
        found[#found + 1] = text
    end
    return table.concat(found, "\n")
end

-- Entries -------------------------------------------------------------------------------------------------------------

local function is_class(value) return type(value) == "table" and rawget(value, "is_module") ~= nil or
    type(value) == "table" and type(rawget(value, "__name")) == "string" end

local function arguments(params)
    local names = {}
    for i, p in ipairs(params) do names[i] = p.name end
    return table.concat(names, ", ")
end

local function class_entry(name, class)
    local entry = { name = name, kind = "class", params = {}, results = {} }
    local init = class.init
    local known = type(init) == "function" and reference.of_function(init)
    if known then entry.params, entry.file = known.params, known.file end
    entry.doc = known and known.doc ~= "" and known.doc or type(init) == "function" and file_doc(init) or ""
    entry.signature = ("te.%s(%s)"):format(name, arguments(entry.params))
    entry.class = class
    return entry
end

local function function_entry(name, fn)
    local known = reference.of_function(fn) or { doc = "", params = {}, results = {} }
    return { name = name, kind = "function", signature = ("te.%s(%s)"):format(name, arguments(known.params)),
        doc = known.doc, params = known.params, results = known.results, file = known.file }
end

-- "shape: te.Shape, opts?: table" as a list.
local function declared_params(text)
    local params = {}
    for name, optional, kind in text:gmatch "([%w_]+)(%??): ([^,]+)" do
        params[#params + 1] = { name = name, type = kind .. (optional == "?" and "|nil" or "") }
    end
    return params
end

local function native_entry(prefix, row)
    local params = declared_params(row[2])
    return { name = row[1], kind = "function", native = true, params = params,
        results = row[3] ~= "" and { row[3] } or {},
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
    local entry = { name = name, kind = "module", params = {}, results = {}, signature = "te." .. name, doc = "" }
    for _, member in pairs(value) do
        if type(member) == "function" then
            entry.doc = file_doc(member)
            break
        end
    end
    return entry
end

local function entry_of(name, value)
    if is_class(value) then return class_entry(name, value) end
    if type(value) == "function" then return function_entry(name, value) end
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
        end
        entries[#entries + 1] = entry
    end
    table.sort(entries, by_name)
    return entries
end

--- The entry of a name in `te`, "softmax" or "Linear"; nil when there is none.
---@param name string
---@return table|nil
function reference.find(name)
    for _, entry in ipairs(reference.entries()) do
        if entry.name == name then return entry end
    end
end

return reference
