--- te.tools.complete: names that may follow at the prompt: globals, fields, methods, and files inside a string.
--
-- Nothing of the user's is called: fields are looked up along tables and their __index tables alone. `te` itself is the
-- exception, whose parts load when they are first named.

local te = require "te"
local options = require "te.options"
local core = te._core

local complete = {}

local KEYWORDS = { "and", "break", "do", "else", "elseif", "end", "false", "for", "function",
    "if", "in", "local", "nil", "not", "or", "repeat", "return", "then", "true", "until", "while" }
local TENSOR_FIELDS = { "dtype", "device", "shape", "grad", "main_grad", "requires_grad", "is_leaf" }

-- Calls visit(table) for a value's own fields and those it inherits.
local function each_table(value, visit)
    local seen = {}
    if type(value) == "string" then value = string end
    if te.is_tensor(value) then return visit(core.tensor_methods) end
    while type(value) == "table" and not seen[value] do
        seen[value] = true
        visit(value)
        local mt = debug.getmetatable(value)
        value = mt and rawget(mt, "__index")
        if type(value) == "function" and rawget(mt, "super") then value = mt end -- a container's looks there, too
    end
end

local function field(value, name)
    if value == te then
        local ok, found = pcall(function() return te[name] end)
        return ok and found or nil
    end
    if te.is_tensor(value) and (name == "grad" or name == "shape") then return value[name] end
    local found
    each_table(value, function(t) if found == nil then found = rawget(t, name) end end)
    return found
end

local function is_callable(value)
    local mt = debug.getmetatable(value)
    return type(value) == "function" or type(mt) == "table" and mt.__call ~= nil
end

-- Names in `value` that begin with `start`, only callable ones for a method.
local function names_in(value, start, method)
    local found, seen = {}, {}
    local function add(name, what)
        if type(name) ~= "string" or seen[name] or name:sub(1, #start) ~= start or not name:find "^[%a_][%w_]*$" then
            return
        end
        if name:sub(1, 1) == "_" and start == "" then return end
        if method and what ~= nil and not is_callable(what) then return end
        seen[name] = true
        found[#found + 1] = name
    end
    each_table(value, function(t) for name, what in next, t do add(name, what) end end)
    if value == te then for name in pairs(require "te.modules") do add(name) end end
    local mt = type(value) == "table" and debug.getmetatable(value)
    for name in pairs(mt and type(rawget(mt, "names")) == "table" and mt.names or {}) do add(name) end
    if te.is_tensor(value) and not method then for _, name in ipairs(TENSOR_FIELDS) do add(name) end end
    if value == _G and not method then for _, name in ipairs(KEYWORDS) do add(name) end end
    return found
end

-- The value that "a.b[1].c" names among globals, or in a library; nil when something on the way is not there.
local function value_of(path, library)
    local name, rest = path:match "^([%a_][%w_]*)(.*)$"
    local value = name and (library and field(library, name) or rawget(_G, name))
    while value ~= nil and rest and rest ~= "" do
        local dotted, after = rest:match "^[.:]([%a_][%w_]*)(.*)$"
        local index = not dotted and rest:match "^%[(%d+)%]"
        if dotted then
            value, rest = field(value, dotted), after
        elseif index then
            local position = tonumber(index)
            rest = rest:match "^%[%d+%](.*)$"
            value = type(value) == "table" and rawget(value, position) or nil
        else
            return nil
        end
    end
    return value
end

-- The text of a string that the line has begun and not ended.
local function open_string(before)
    local quote, start
    local i = 1
    while i <= #before do
        local c = before:sub(i, i)
        if quote then
            if c == "\\" then i = i + 1 elseif c == quote then quote = nil end
        elseif c == '"' or c == "'" then
            quote, start = c, i + 1
        end
        i = i + 1
    end
    return quote and before:sub(start)
end

local function files(start)
    local folder, name = start:match "^(.*/)([^/]*)$"
    folder, name = folder or "", name or start
    local ok, list = pcall(core.list_dir, folder == "" and "." or folder)
    local found = {}
    for _, entry in ipairs(ok and list or {}) do
        if entry:sub(1, #name) == name and (name ~= "" or entry:sub(1, 1) ~= ".") then
            local stat = core.stat(folder .. entry)
            found[#found + 1] = entry .. (stat and stat.type == "directory" and "/" or "")
        end
    end
    return found, name
end

local function candidates(before)
    local string_text = open_string(before)
    if string_text then return files(string_text) end
    if before:find "^%s*%?[%w_]*$" then -- ?name
        local start = before:match "[%w_]*$"
        return names_in(te, start), start
    end
    local path, separator, start = before:match "([%a_][%w_.%[%]]*)([.:])([%w_]*)$"
    if path then
        local value = value_of(path)
        if value == nil and before:find "^%s*%?" then value = value_of(path, te) end -- ?optim.AdamW
        return value ~= nil and names_in(value, start, separator == ":") or {}, start
    end
    start = before:match "[%a_][%w_]*$" or ""
    return names_in(_G, start), start
end

local function common_start(names)
    local first, n = names[1], #names[1]
    for _, name in ipairs(names) do
        while name:sub(1, n) ~= first:sub(1, n) do n = n - 1 end
    end
    return first:sub(1, n)
end

local function columns(names)
    local width = 0
    for _, name in ipairs(names) do width = math.max(width, #name + 2) end
    local per_line = math.max(1, math.floor(core.terminal_width() / width))
    local lines, parts = {}, {}
    for i, name in ipairs(names) do
        parts[#parts + 1] = options.padded(name, width)
        if i % per_line == 0 or i == #names then
            lines[#lines + 1] = table.concat(parts):gsub("%s+$", "")
            parts = {}
        end
    end
    return table.concat(lines, "\n")
end

--- The names themselves, sorted, and how much of them stands before the cursor already.
---@param before string
---@return string[] names
---@return string start
function complete.candidates(before)
    local names, start = candidates(before)
    table.sort(names)
    return names, start
end

--- What to insert behind `before`, and the names in columns when there are several.
---@param before string
---@return string insert
---@return string|nil show
function complete.complete(before)
    local names, start = complete.candidates(before)
    if #names == 0 then return "" end
    local insert = common_start(names):sub(#start + 1)
    if #names == 1 or insert ~= "" then return insert end
    return "", columns(names)
end

return complete
