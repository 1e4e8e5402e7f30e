--- te.pointwise: a Lua function of tensors as one operation of the engine.
--
--     local f = te.pointwise(function(x, y) return 0.5 * x + te.tanh(y) end)
--     f(a, b)                       -- one pass over memory, with a derived gradient
--     print(f)                      -- pointwise(x, y) { result = 0.5 * x + tanh(y) }
--
-- The function runs once with symbols in place of tensors; what it does to them is written down as a formula. Every
-- operation of the engine that has a formula of its own may be used, also as a method, and sums, means and extremes
-- along the last dimension that keep it: te.mean(x, -1, true). Since the function runs once for all values, it cannot
-- look at them: te.where and comparisons like te.lt take the place of `if`. Numbers that it captures are frozen in the
-- formula; those that change are arguments: f(x, 0.5). A formula has at most 4096 operations.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local trace = require "te.pointwise.trace"
local core = te._core

local Pointwise = {}

-- Operations of a function by number of arguments; they go with the function.
local known = setmetatable({}, { __mode = "k" })

-- How many arguments the function declares, nil where that is not known.
local function parameters(self)
    local info = debug and debug.getinfo(self.fn, "u")
    return info and not info.isvararg and info.nparams or nil
end

local function check_count(self, count)
    local most = parameters(self) or count
    if count > most then fail("te.pointwise: the function takes %d tensors, got %d", most, count) end
end

local function operation(self, count)
    local entry = self.by_count[count]
    if not entry then
        check_count(self, count)
        local op, _, along = trace("te.pointwise", self.fn, count)
        entry = { op = op, along = along }
        self.by_count[count] = entry
    end
    return entry.op, entry.along
end

-- The operation for as many arguments as the function declares.
local function declared(self)
    local count = parameters(self)
    return count and (operation(self, count)) or nil
end

local WHOLE = { int64 = true, int32 = true, uint8 = true }

-- Whether the program is what the function does with these arguments.
local function suits(along, count, ...)
    if #along == 0 then return true end
    local arguments = { ... }
    return trace.leads(arguments, count) and not trace.narrow(along, arguments, count)
end

-- One program computes with floats. With whole numbers, and with bool alone, each operation has a dtype of its own. And
-- it has one row for all that it reduces along rows: that of the first argument.
function Pointwise:__call(...)
    local count, whole, truth, float = select("#", ...), false, false, false
    for i = 1, count do
        local value = select(i, ...)
        if trace.is_symbol(value) then
            check_count(self, count)
            return self.fn(...)
        elseif te.is_tensor(value) then
            local dtype = value.dtype
            if WHOLE[dtype] then whole = true elseif dtype == "bool" then truth = true else float = true end
        end
    end
    local op, along = operation(self, count)
    if not (whole or truth and not float) and suits(along, count, ...) then return op(...) end
    if not core.compute_dtype() then return self.fn(...) end
    return core.pass(core.under(core.set_compute_dtype, nil, self.fn, ...)) -- as the program, which keeps dtypes
end

--- f.formula: what the function computes, as far as its number of arguments is known.
function Pointwise:__index(name)
    if name == "takes_seq_lens" then return false end
    local op = declared(self)
    if not op then
        local _, some = next(self.by_count)
        op = some and some.op
    end
    if name == "operation" then return op end
    return op and op[name]
end

function Pointwise:__tostring()
    local op = self.operation
    return op and tostring(op) or "pointwise(…)"
end

--- One operation from a function of up to six tensors that returns one or a few. Results have the shape that the
--- arguments broadcast to and the dtype that they promote to, also under te.autocast, bool where all of them are
--- comparisons; numbers may stand for tensors. What lies between is float32, or float64 where an argument is, and
--- rounded only where the function casts. Where an argument is int64, int32 or uint8, or bool and none is of floats,
--- the function runs on the arguments themselves, one operation after the other; so it does where it reduces along rows
--- what has one value per row, or rows that the first argument does not have, and where a result has one value per row
--- because an argument has; a result that always has one is refused.
--- fn runs once, with symbols in place of tensors: numbers from outside stay what they are then,
--- so pass numbers that change as arguments.
---@param fn function
local function pointwise(fn, ...)
    options.last("te.pointwise", 1, ...)
    if type(fn) ~= "function" then fail("te.pointwise: fn: expected a function, got %s", core.describe(fn)) end
    local by_count = known[fn] or {}
    known[fn] = by_count
    return setmetatable({ fn = fn, by_count = by_count }, Pointwise)
end

return pointwise
