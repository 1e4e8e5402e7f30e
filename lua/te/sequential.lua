--- te.Sequential: runs modules one after the other.
--
-- The modules stand in the array part, so #, ipairs, seq[i] = m and table.remove work. Operations may take extra
-- inputs, which follow x in the order of the operations that take them, and make extra outputs, which follow y. One more
-- tensor in front of the extra inputs is seq_lens, the lengths of packed sequences; it goes to whatever attends across
-- tokens.
--
-- An intermediate result is released as soon as the next module has read it. That needs the promise `pure` on both
-- sides: a pure module keeps neither its input nor its result, and returns a fresh tensor or its input. (What backward
-- needs is held by the tape, not by these references.)

local te = require "te"
local fail = require "te.fail"
local Module = require "te.module"

local Sequential = Module:extend("Sequential")

Sequential.takes_seq_lens = true

local function check_member(self, value)
    local mt = getmetatable(value)
    if type(value) ~= "function" and not (type(mt) == "table" and mt.__call) then
        fail("%s: expected a module or something callable, got %s", self.__name, type(value))
    end
    return value
end

function Sequential:init(...)
    self:extend({ ... })
end

--- Adds a module at the end.
function Sequential:append(m)
    self[#self + 1] = check_member(self, m)
    return self
end

--- Adds the modules of a list or of another container at the end. On the class itself, called with a name, makes a
--- subclass like every module's extend.
function Sequential:extend(list)
    if type(list) == "string" then return Module.extend(self, list) end
    if type(list) ~= "table" then
        fail("%s:extend: expected a list of modules, got %s", self.__name, type(list))
    end
    for i = 1, #list do self[#self + 1] = check_member(self, list[i]) end
    return self
end

--- Inserts a module before position i (negative: from the end).
function Sequential:insert(i, m)
    local n = #self
    if i < 0 then i = n + 1 + i end
    if i < 1 or i > n + 1 then fail("%s:insert: position %d of %d modules", self.__name, i, n) end
    table.insert(self, i, check_member(self, m))
    return self
end

--- Removes and returns the module at i (the last one; negative: from the end).
function Sequential:pop(i)
    local n = #self
    i = i or n
    if i < 0 then i = n + 1 + i end
    if i < 1 or i > n then fail("%s:pop: position %d of %d modules", self.__name, i, n) end
    return table.remove(self, i)
end

-- How many extra inputs the module takes; containers count their own.
local function extra_inputs(m)
    if type(m) ~= "table" then return 0 end
    if m.count_extra_inputs then return m:count_extra_inputs() end
    return m.num_extra_inputs or 0
end

function Sequential:count_extra_inputs()
    local n = 0
    for i = 1, #self do n = n + extra_inputs(self[i]) end
    return n
end

-- Whether the first of the values beyond x is seq_lens: one tensor more than the operations take, 1-D and of integers.
local function has_seq_lens(self, n, first)
    local takes = self:count_extra_inputs()
    if n == takes then return false end
    local lens = n == takes + 1 and te.is_tensor(first) and first:dim() == 1
        and (first.dtype == "int32" or first.dtype == "int64")
    if not lens then
        fail("%s: takes %d extra inputs, got %d", self.__name, takes, n)
    end
    return true
end

-- Appends what follows the first value to the extra outputs and returns the first value.
local function keep(extras, y, ...)
    for i = 1, select("#", ...) do
        extras.n = extras.n + 1
        extras[extras.n] = (select(i, ...))
    end
    return y
end

-- Calls m with x, seq_lens if it wants them, and its share of the extra inputs, which starts at given[first].
local function call(m, extras, x, seq_lens, given, first, n)
    if seq_lens ~= nil and type(m) == "table" and m.takes_seq_lens then
        return keep(extras, m(x, seq_lens, unpack(given, first, first + n - 1)))
    end
    return keep(extras, m(x, unpack(given, first, first + n - 1)))
end

--- Runs the chain. Returns y, whether y is a tensor nobody else holds, and the table of extra outputs.
function Sequential:run_chain(x, ...)
    local given, n_given, seq_lens = nil, select("#", ...), nil
    local position, extras = 1, { n = 0 }
    if n_given > 0 or self:count_extra_inputs() > 0 then
        given = { ... }
        if has_seq_lens(self, n_given, given[1]) then seq_lens, position = given[1], 2 end
    end
    local owned, all_pure = false, true
    for i = 1, #self do
        local m = self[i]
        local y
        if given then
            local takes = extra_inputs(m)
            y = call(m, extras, x, seq_lens, given, position, takes)
            position = position + takes
        else
            y = keep(extras, m(x))
        end
        local pure = type(m) == "table" and m.pure
        local same = rawequal(x, y)
        if owned and pure and not same then x:release() end
        owned = pure and (owned or not same)
        all_pure = all_pure and pure
        x = y
    end
    rawset(self, "pure", all_pure)
    return x, owned, extras
end

function Sequential:forward(x, ...)
    local y, _, extras = self:run_chain(x, ...)
    return y, unpack(extras, 1, extras.n)
end

return Sequential
