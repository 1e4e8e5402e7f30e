--- Declared options: one table says name, type, default and range; checks, messages and --help follow from it.
--
-- A declaration is { type, default, min =, max =, choices =, wrong =, help =, fields = }; wrong(value) says what is
-- wrong with a value of the right type, or nothing. Types are Lua's own, "integer", "size" (an integer above 0),
-- "callable" and "any". An option without a default may stay nil. `help` is for people: what help, annotations and
-- documentation say of it; `fields`, for them as well, declares what a table that is given may hold.

local fail = require "te.fail"

local options = {}

--- The name in the list `known` closest to `name`, nil when none is similar.
options.nearest = require("te")._core.nearest

--- Makes a library say which of its names is nearest to one that it lacks; returns it.
---@param who string
---@param library table
function options.library(who, library)
    return setmetatable(library, { __index = function(_, name)
        local near = options.nearest(tostring(name), options.names(library))
        fail("%s has no %q%s", who, tostring(name), near and ("; did you mean %q?"):format(near) or "")
    end })
end

--- Sorted keys of a table, as strings.
function options.names(t)
    local names = {}
    for name in pairs(t) do names[#names + 1] = tostring(name) end
    table.sort(names)
    return names
end

local function type_matches(kind, value)
    if kind == "any" then return true end
    if kind == "integer" or kind == "size" then
        return type(value) == "number" and value == math.floor(value) and math.abs(value) < 2 ^ 53
            and (kind == "integer" or value >= 1)
    end
    if kind == "callable" then return require("te")._core.is_callable(value) end
    return type(value) == kind and value == value
end

--- How a declaration reads: "integer from 1 to 8", "one of float32, bfloat16".
function options.describe(declared)
    if declared.choices then return "one of " .. table.concat(declared.choices, ", ") end
    local text = declared[1] == "size" and "positive integer" or declared[1]
    if declared.below then return ("%s from %.14g to below %.14g"):format(text, declared.min, declared.below) end
    if declared.min and declared.max then return ("%s from %.14g to %.14g"):format(text, declared.min, declared.max) end
    if declared.min then return ("%s, at least %.14g"):format(text, declared.min) end
    if declared.max then return ("%s, at most %.14g"):format(text, declared.max) end
    return text
end

--- A default as people read it.
function options.default(declared)
    local value = declared[2]
    if type(value) == "table" then
        local parts = {}
        for i, part in ipairs(value) do parts[i] = tostring(part) end
        return parts[1] and "{ " .. table.concat(parts, ", ") .. " }" or "{}"
    end
    return tostring(value)
end

--- Declarations as a list of { name, declaration }, sorted; what stands in the table of another one as "rope.base".
---@param declared table<string, table>
---@return table[]
function options.rows(declared, prefix, rows)
    rows = rows or {}
    for _, name in ipairs(options.names(declared)) do
        local full = (prefix or "") .. name
        rows[#rows + 1] = { full, declared[name] }
        if declared[name].fields then options.rows(declared[name].fields, full .. ".", rows) end
    end
    return rows
end

--- The group of te.distributed that an argument or option names; nil stays nil.
function options.group(who, name, group)
    if group == nil or require("te").distributed.is_group(group) then return group end
    fail("%s: %s: expected a group of te.distributed, got %s", who, name, options.shown(group))
end

--- Classes of what functions return, by the names that te.tools.kinds knows them by.
options.kinds = {}

-- Declarations by the function that takes the options.
local takers = setmetatable({}, { __mode = "k" })

--- Says what options a function takes, an init those of its class: what help, annotations and documentation tell.
---@param taker any
---@param declared table|function  declarations by name, or what gives them when they are asked for
function options.declare(taker, declared) takers[taker] = declared end

--- The declared options of a function or a class; nil where none are known.
---@param taker any
---@return table|nil
function options.of(taker)
    local declared = takers[taker] or type(taker) == "table" and rawget(taker, "__index") and takers[taker.init]
    if type(declared) == "function" then return declared() end
    return declared or nil
end

-- Of these a text says where they lie in memory, unless it is their own.
local PLACED = { table = "a table", ["function"] = "a function", thread = "a coroutine" }

--- A value as messages show it: texts in quotes, long ones cut off, tensors by dtype and shape.
function options.shown(value)
    if type(value) == "userdata" then return require("te")._core.describe(value) end
    if type(value) ~= "string" then
        local mt = getmetatable(value)
        return not (type(mt) == "table" and mt.__tostring) and PLACED[type(value)] or tostring(value)
    end
    return ("%q"):format(#value <= 64 and value or value:sub(1, 61) .. "...")
end

--- A text with spaces behind it up to a width, of any size: that of a format ends at 99.
---@param text string
---@param width integer
---@return string
function options.padded(text, width) return text .. (" "):rep(width - #text) end

--- A value as the shortest text that reads back as it.
---@param value any
---@return string
function options.exact(value)
    if type(value) ~= "number" then return tostring(value) end
    local text
    for digits = 7, 17 do
        text = ("%." .. digits .. "g"):format(value)
        if tonumber(text) == value then break end
    end
    return text
end

--- What is wrong with a device that could not be opened; nil where it is there.
---@param device string
---@return string|nil
function options.device_problem(device)
    local there, why = pcall(require("te")._core.device_info, device)
    return not there and tostring(why):match "te%.device_info: (.*)" or nil
end

--- What a message says behind a text that names neither a dtype nor a device.
---@param where any
---@return string
function options.place_hint(where)
    if type(where) ~= "string" then return "" end
    return where:lower():find "^gpu" and '; did you mean "cuda"?' or require("te")._core.dtype_hint(where)
end

--- A shape, or that of a tensor, as messages show it: {4,3}.
function options.shape(of) return "{" .. table.concat(of.shape or of, ",") .. "}" end

--- nil when `value` is allowed, else what is expected and what came.
function options.reason(declared, value)
    local ok = type_matches(declared[1], value)
    if ok and declared.choices then
        ok = false
        for _, choice in ipairs(declared.choices) do ok = ok or choice == value end
    end
    if ok and declared.min then ok = value >= declared.min end
    if ok and declared.max then ok = value <= declared.max end
    if ok and declared.below then ok = value < declared.below end
    if ok then return nil end
    local whole = (declared[1] == "integer" or declared[1] == "size") and type(value) == "number"
    return ("expected %s%s, got %s"):format(options.describe(declared), whole and value >= 2 ^ 53 and value % 1 == 0
        and not declared.max and ", below 2^53" or "", options.shown(value))
end

--- Checks an options table against its declarations and fills in the defaults.
---@param who string       the function, for messages
---@param given table|nil  what the caller passed
---@param declared table<string, table>
---@return table complete
function options.check(who, given, declared)
    local complete = {}
    if given ~= nil and (type(given) ~= "table" or getmetatable(given)) then
        fail("%s: options: expected a table, got %s", who, type(given) == "table" and "one with a metatable"
            or require("te")._core.describe(given))
    end
    for name, value in pairs(given or {}) do
        local declaration = declared[name]
        if not declaration then
            local near = options.nearest(tostring(name), options.names(declared))
            fail("%s: unknown option %s; %s", who, options.shown(name), near and ("did you mean %q?"):format(near)
                or next(declared) and "known are " .. table.concat(options.names(declared), ", ") or "it takes none")
        end
        local reason = options.reason(declaration, value)
        if reason then fail("%s: option %s: %s", who, name, reason) end
        local wrong = declaration.wrong and declaration.wrong(value)
        if wrong then fail("%s: option %s", who, wrong) end
        complete[name] = value
    end
    for name, declaration in pairs(declared) do
        if complete[name] == nil then complete[name] = declaration[2] end
    end
    return complete
end

--- Whether `value` is an instance of `class` or of a class derived from it.
function options.instance(value, class)
    local c = type(value) == "table" and getmetatable(value)
    while type(c) == "table" do
        if rawequal(c, class) then return true end
        c = rawget(c, "super")
    end
    return false
end

--- Raises where a class of modules stands in the place of one of them.
---@param who string
function options.no_class(who, value)
    if type(value) == "table" and rawget(value, "__index") and value.is_module then
        fail("%s: %s is a class; %s(…) makes a module of it", who, value.__name, value.__name)
    end
end

--- Raises where a method was called with a dot: what should be the object is no instance of its class.
---@param who string  "Module:parameters"
---@param self any
---@param class table
function options.method(who, self, class)
    if options.instance(self, class) then return end
    fail("%s: called without the object; write object:%s() with a colon", who, who:match "[%w_]+$")
end

--- Raises where something follows the last argument that a function takes, the one numbered `takes`.
function options.last(who, takes, ...)
    for i = 1, select("#", ...) do
        local value = (select(i, ...))
        if value ~= nil then
            local text = (type(value) == "number" or type(value) == "string") and " " .. options.shown(value) or ""
            local kind = type(value) == "userdata" and options.shown(value) or type(value)
            fail("%s: argument %d, %s%s, is too much", who, takes + i, kind, text)
        end
    end
end

--- Length of a list. Raises where there is more behind a hole, or under names: a loop would leave it out.
function options.list(who, name, list)
    local n = 0
    while list[n + 1] ~= nil do n = n + 1 end
    for key in pairs(list) do
        local counted = type(key) == "number" and key % 1 == 0
        if counted and key > n then fail("%s: %s: entry %d is nil, but there is one at %d", who, name, n + 1, key) end
        if not counted then fail("%s: %s: a list has no entry %s", who, name, options.shown(key)) end
    end
    return n
end

--- Whether it is a tensor; raises where it was released.
---@param value any
---@param index integer|nil  in the list of that name
---@return boolean
function options.tensor(who, name, value, index)
    if not require("te").is_tensor(value) then return false end
    if not pcall(value.dim, value) then
        fail("%s: %s%s: tensor was released", who, name, index and ("[%d]"):format(index) or "")
    end
    return true
end

--- Checks one positional argument.
function options.argument(who, name, value, declared)
    local reason = options.reason(declared, value)
    if reason then fail("%s: %s: %s", who, name, reason) end
    return value
end

return options
