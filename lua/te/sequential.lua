--- te.Sequential: runs modules one after the other, neighbouring operations fused (te.fuser).
--
-- The modules stand in the array part, so #, ipairs, seq[i] = m and table.remove work. What cannot be a module is
-- refused where it is added, and by the next run where it takes the place of another one. Operations may take extra
-- inputs, which follow x in the order of the operations that take them, and make extra outputs, which follow y. One
-- more tensor in front of the extra inputs is seq_lens, the lengths of packed sequences. It goes to whatever attends
-- across tokens, and as second argument to other callables that have one: a module of one's own, a function. The class
-- may say so with takes_seq_lens = true or false. Self-attention in a module that takes none would see across
-- sequences, and raises (te.packed), unless takes_seq_lens = false says that they do not concern it.
--
-- An intermediate result is released as soon as its last reader has run. That needs the promise `pure`: a pure module
-- keeps neither its input nor its result, and returns a fresh tensor or its input. (What backward needs is held by the
-- tape, not by these references.)

local fail = require "te.fail"
local fuser = require "te.fuser"
local flatten = require "te.fuser.flatten"
local Module = require "te.module"
local options = require "te.options"
local tree = require "te.module_tree"

local Sequential = Module:extend("Sequential")
Sequential.records = true -- te.decoding

Sequential.forward = fuser.forward

--- The plan for inputs like these: print it. Only what a later step's plan depends on runs.
---@return te.Plan
function Sequential:explain(x, ...) return fuser.explain(self, x, ...) end

-- A position from 1 to `last`; negative ones count from the end.
local function check_position(self, method, i, last)
    options.argument(("%s:%s"):format(self.__name, method), "i", i, { "integer" })
    local position = i < 0 and last + 1 + i or i
    if position < 1 or position > last then fail("%s:%s: position %d of %d modules", self.__name, method, i, #self) end
    return position
end

-- A class whose instances count their modules from the end as well: seq[-1] is the last one.
local function counting(class)
    function class.__index(self, key)
        if type(key) == "number" and key < 0 then return rawget(self, #self + 1 + key) end
        return class[key]
    end
    return class
end
counting(Sequential)

function Sequential:init(...)
    for i = 1, select("#", ...) do self[#self + 1] = flatten.check_member(self, #self + 1, (select(i, ...))) end
end

-- Runs for positions that are free: one further than behind the last module would leave a gap.
function Sequential:__newindex(name, value)
    if type(name) == "number" and value ~= nil then
        local position = name < 0 and #self + 1 + name or name
        if position < 1 or position > #self + 1 or name % 1 ~= 0 then
            fail("%s: position %g of %d modules", self.__name, name, #self)
        end
        name = position
        flatten.check_member(self, name, value)
    end
    Module.__newindex(self, name, value)
end

--- Adds a module at the end.
function Sequential:append(m, ...)
    options.method("Sequential:append", self, Sequential)
    options.last(self.__name .. ":append", 1, ...)
    self[#self + 1] = flatten.check_member(self, #self + 1, m)
    return self
end

--- Adds the modules of a list or of another container at the end. On the class itself, called with a name, makes a
--- subclass like every module's extend.
function Sequential:extend(list, ...)
    options.last("Sequential:extend", 1, ...)
    if type(list) == "string" then return counting(Module.extend(self, list)) end
    options.method("Sequential:extend", self, Sequential)
    local plain = type(list) == "table" and not getmetatable(list)
    if not plain and not Module.is(list, Sequential) then
        fail("%s:extend: expected a list of modules or a container, got %s", self.__name,
            type(list) == "table" and list.__name or options.shown(list))
    end
    local n = plain and options.list(self.__name .. ":extend", "list", list) or tree.count(list, list)
    for i = 1, n do self[#self + 1] = flatten.check_member(self, #self + 1, list[i]) end
    return self
end

--- Inserts a module before position i (negative: from the end).
function Sequential:insert(i, m, ...)
    options.method("Sequential:insert", self, Sequential)
    options.last(self.__name .. ":insert", 2, ...)
    local n = #self
    if i == n + 1 then return self:append(m) end
    local position = check_position(self, "insert", i, n)
    table.insert(self, position, flatten.check_member(self, position, m))
    return self
end

--- Removes and returns the module at i (the last one; negative: from the end).
function Sequential:pop(i, ...)
    options.method("Sequential:pop", self, Sequential)
    options.last(self.__name .. ":pop", 1, ...)
    return table.remove(self, check_position(self, "pop", i or -1, #self))
end

return Sequential
