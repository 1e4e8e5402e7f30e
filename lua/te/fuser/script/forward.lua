--- The forward of a script.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local units = require "te.fuser.script.unit"
local core = te._core

local function store(step, values, y, ...)
    if not te.is_tensor(y) then fail("%s:op_forward: expected a tensor, got %s", step.op.__name, core.describe(y)) end
    values[step.y] = y
    for i, v in ipairs(step.outs) do values[v] = (select(i, ...)) end
end

local forward = {}

--- Runs one step by itself.
function forward.step(step, ctx, values)
    local extras, n = units.gather(values, step.extras), #step.extras
    if not units.has_backward(step.op) then ctx:save_for_backward(values[step.x], unpack(extras, 1, n)) end
    store(step, values, units.outputs(step.op, units.run_basic(step.op, ctx, values[step.x], unpack(extras, 1, n))))
end

local function is_empty(ctx)
    for key in pairs(ctx) do
        if key ~= "seq_lens" then return false end
    end
    return true
end

-- Keeps the inputs of a fused operation that saved nothing for a backward that runs in other units.
local function note_unsaved(self, unit, contexts, values)
    for _, other in ipairs(self.backward) do
        if other.op == unit.op and other.first == unit.first then return end
    end
    local names, inputs = { self.steps[unit.first].x }, { n = 0 }
    for i = unit.first, unit.last do
        if not is_empty(contexts[i]) then return end
        for _, v in ipairs(self.steps[i].extras) do names[#names + 1] = v end
    end
    for i, v in ipairs(names) do inputs[i], inputs.n = values[v], i end
    contexts.unsaved = contexts.unsaved or {}
    table.insert(contexts.unsaved, { unit = unit, names = names, inputs = core.keep(inputs) })
end

local function is_read_outside(self, v)
    for _, output in ipairs(self.outputs) do
        if output == v then return true end
    end
    return false
end

local function forward_fused(self, unit, contexts, values)
    local ctxs, extra_inputs, counts = {}, {}, {}
    for i = unit.first, unit.last do
        local step, at = self.steps[i], i - unit.first + 1
        ctxs[at], extra_inputs[at], counts[at] = contexts[i], units.gather(values, step.extras), #step.outs
    end
    local y, extra_outputs = units.call(unit, "fuser_forward", ctxs, values[self.steps[unit.first].x], extra_inputs)
    if not te.is_tensor(y) then
        fail("%s: expected a tensor, got %s", units.title(unit, unit.op, "fuser_forward"), core.describe(y))
    end
    extra_outputs = units.check_lists(self.steps, unit, "fuser_forward", extra_outputs, counts, "extra outputs")
    if self.backward then note_unsaved(self, unit, contexts, values) end
    values[self.steps[unit.last].y] = y
    for at, outs in ipairs(extra_outputs) do
        for k, v in ipairs(self.steps[unit.first + at - 1].outs) do
            values[v] = outs[k] or nil
            if not te.is_tensor(outs[k]) and is_read_outside(self, v) then
                fail("%s: extra output %d of basic operation %d: expected a tensor, got %s",
                    units.title(unit, unit.op, "fuser_forward"), k, at, type(outs[k]))
            end
        end
    end
end

-- Of all values whose gradient backward may ask for.
local function note_shapes(self, shapes, values)
    for v, value in pairs(values) do
        shapes[v] = te.is_tensor(value) and value.dtype:find "float" and options.shape(value) or nil
    end
    for _, v in ipairs(self.inputs) do
        if shapes[v] and not values[v].requires_grad then shapes[v] = nil end
    end
end

--- Runs a script on the values of its inputs and fills the contexts; returns the values of its outputs.
function forward.run(self, contexts, ...)
    local values = {}
    for i, v in ipairs(self.inputs) do values[v] = (select(i, ...)) end
    for i, step in ipairs(self.steps) do
        contexts[i] = core.context()
        contexts[i].seq_lens = values[step.lens]
    end
    for _, unit in ipairs(self.forward) do
        if unit.op then
            forward_fused(self, unit, contexts, values)
        else
            forward.step(self.steps[unit.first], contexts[unit.first], values)
        end
    end
    if contexts.shapes then note_shapes(self, contexts.shapes, values) end
    return unpack(units.gather(values, self.outputs), 1, #self.outputs)
end

return forward
