--- Scripts: basic operations that run by the methods their authors wrote, some of them together.
--
-- A script is a short chain of basic operations and the units that it runs as: a unit is one operation, or a fused
-- operation that stands for a few neighbours. Forward and backward have units of their own:
--
--     steps       scale      add      linear        each { op =, x =, extras = {}, lens =, y =, outs = {} }
--     forward    [ ForwardAxpy   ]  [ linear ]      each { first =, last =, op = fused operation or nothing, rule = }
--     backward   [ scale ]  [ BackwardAddLinear ]
--
-- A script with backward units is one node of the tape; without, the tape sees what forward does. Backward walks its
-- units from the end and finds what forward kept in the contexts, one for each basic operation:
--
-- * An operation with an op_backward saves what that wants.
-- * For one without, its input and its extra inputs are saved, unless its op_forward saves something else itself.
--   Backward runs op_forward again on them, recorded, under the dtype, recipe and scales of the first time.
-- * fuser_forward does both for the operations that it stands for, as far as another unit reads it in backward. When
--   it saves nothing at all, backward runs those operations one by one on its inputs first.
--
-- ctx.seq_lens are the lengths of packed sequences, for operations that take them. A value that one operation of a
-- unit hands to another one's extra input stays inside the unit: nothing stands for it among the extra inputs, and
-- no gradient is expected.

local core = require("te")._core
local backward = require "te.fuser.script.backward"
local forward = require "te.fuser.script.forward"
local setting = require "te.fuser.script.setting"

local Script = {}
Script.__index = Script

-- An op_backward reads the parameters of its operation, which must be those that forward read. What has no gradient may
-- be a statistic that changes as it likes.
local function kept_parameters(self, kept, n, inputs, ...)
    local values = { n = 0 }
    for i = #self.inputs + 1, n do
        if inputs[i].requires_grad then
            values.n = values.n + 1
            values[values.n] = inputs[i]
        end
    end
    kept.parameters = core.keep(values)
    return ...
end

--- Runs a script on the values of its inputs, in their order; returns those of its outputs.
function Script:__call(...)
    if not self.backward or not core.grad_enabled() then return forward.run(self, {}, ...) end
    local inputs, n, counts = { ... }, #self.inputs, {}
    for i, step in ipairs(self.steps) do
        local parameters = step.op:parameters()
        counts[i] = #parameters
        for k, parameter in ipairs(parameters) do inputs[n + k] = parameter end
        n = n + #parameters
    end
    return core.custom(
        function(ctx, ...) -- parameters follow the inputs: the operations know their own
            local contexts, now = { shapes = {} }, setting.now()
            ctx.title = self.__name
            ctx.kept = { contexts = contexts, counts = counts, setting = now }
            return kept_parameters(self, ctx.kept, n, inputs, setting.record(now, forward.run, self, contexts, ...))
        end,
        function(ctx, ...)
            ctx.kept.parameters:read(self.__name .. ": backward")
            return backward(self, ctx.kept, ...)
        end,
        unpack(inputs, 1, n))
end

local function rule_of(units)
    for _, unit in ipairs(units or {}) do
        if unit.rule then return unit.rule end
    end
end

--- Why the engine does not plan it.
function Script:reason()
    local forward_rule, backward_rule = rule_of(self.forward), rule_of(self.backward)
    if not forward_rule and not backward_rule then return "it runs as written" end
    if not backward_rule or forward_rule == backward_rule then
        return ("fusion rule %s runs it"):format(forward_rule)
    end
    return (forward_rule and ("fusion rule %s runs it, "):format(forward_rule) or "it runs as written, ")
        .. ("its backward by fusion rule %s"):format(backward_rule)
end

-- What units are called by: their fused operation, or their basic one.
local function names_of(steps, units)
    local names = {}
    for i, unit in ipairs(units) do names[i] = (unit.op or steps[unit.first].op).__name end
    return names
end

--- The names of what runs forward, or backward.
function Script:ops(pass) return names_of(self.steps, pass == "backward" and self.backward or self.forward) end

-- The values that steps read and do not make: x first.
local function inputs_of(steps)
    local known, inputs = {}, {}
    local function enter(v)
        if v and not known[v] then inputs[#inputs + 1] = v end
        if v then known[v] = true end
    end
    for _, step in ipairs(steps) do
        enter(step.x)
        for _, v in ipairs(step.extras) do enter(v) end
        enter(step.lens)
        known[step.y] = true
        for _, v in ipairs(step.outs) do known[v] = true end
    end
    return inputs
end

local script = {}

--- A script from steps, units, and the values that others read, y first. Without backward units
--- the tape sees its forward.
function script.new(steps, forward_units, backward_units, outputs)
    return setmetatable({ steps = steps, forward = forward_units, backward = backward_units, outputs = outputs,
        inputs = inputs_of(steps), __name = table.concat(names_of(steps, forward_units), " + ") }, Script)
end

function script.is(value) return getmetatable(value) == Script end

-- Neighbouring operations whose extra inputs and outputs are the caller's.
local function standalone(ops)
    local steps, outputs, last = {}, {}, 1
    local function fresh(n)
        local made = {}
        for i = 1, n do made[i] = last + i end
        last = last + n
        return made
    end
    local x = 1
    for i, op in ipairs(ops) do
        local y, extras, outs = fresh(1)[1], fresh(op.num_extra_inputs), fresh(op.num_extra_outputs)
        steps[i] = { op = op, x = x, extras = extras, y = y, outs = outs }
        for _, v in ipairs(outs) do outputs[#outputs + 1] = v end
        x = y
    end
    return steps, { x, unpack(outputs) }
end

-- The script of an operation by itself, kept with it for as long as it takes and makes as many values.
local function kept(op, ops, make)
    local known = rawget(op, "_script")
    if not known or #known.inputs ~= 1 + op.num_extra_inputs or #known.outputs ~= 1 + op.num_extra_outputs then
        known = make(standalone(ops))
        rawset(op, "_script", known)
    end
    return known
end

local function make_basic(steps, outputs)
    local units = { { first = 1, last = 1 } }
    return script.new(steps, units, units, outputs)
end

--- A basic operation with an op_backward by itself.
function script.of_basic(op) return kept(op, { op }, make_basic) end

--- A fused operation by itself.
function script.of_fused(op)
    local own = kept(op, op.basic_ops, function(steps, outputs)
        return script.new(steps, { { first = 1, last = #steps, op = op } }, nil, outputs)
    end)
    own.backward = op.fuser_backward and own.forward
    return own
end

return script
