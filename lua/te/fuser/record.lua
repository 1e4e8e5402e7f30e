--- From items to parts: what the engine plans as a group, and what is called as it is.
--
-- An operation with a method lower(g, x, extra inputs …) describes itself to the recorder `g`:
--
--     g:op(name, inputs, attributes)   applies an engine operation; inputs are values, false where absent
--     g:param(module, field)           the module's parameter as a value; false when it has none
--     g:seq_lens()                     the lengths of packed sequences as a value, or false
--     g:lower(module, x, …)            another module's description
--
-- and returns y and its extra outputs; or nil and a reason, and then it is called. Consecutive described operations form one
-- group of the engine.

local te = require "te"
local core = te._core
local Module = require "te.module"

local record = {}

local Recorder = {}
Recorder.__index = Recorder

local function value(g)
    g.n_values = g.n_values + 1
    return g.n_values
end

function Recorder:op(name, inputs, attributes)
    local result = value(self)
    self.steps[#self.steps + 1] = { name = name, inputs = inputs, attributes = attributes, result = result, label = self.label }
    return result
end

function Recorder:param(module, field)
    local tensor = rawget(module, field)
    self.checks[#self.checks + 1] = { module, field, tensor ~= nil, true }
    if tensor == nil then return false end
    local known = self.parameters[tensor]
    if known then return known end
    known = value(self)
    self.parameters[tensor] = known
    self.sources[known] = { module, field }
    return known
end

function Recorder:seq_lens() return self.lens or false end

-- The `lower` that describes what the instance runs: not one of a class below which forward was written anew.
local function lowering(m)
    if type(m) ~= "table" or rawget(m, "forward") or rawget(m, "op_forward") then return nil end
    local class = getmetatable(m)
    if not class or class.__call ~= Module.__call then return nil end
    while class do
        if rawget(class, "lower") then return class.lower end
        if rawget(class, "forward") or rawget(class, "op_forward") then return nil end
        class = rawget(class, "super")
    end
end

function Recorder:lower(m, x, ...)
    local lower = lowering(m)
    if not lower then return nil, "it does not describe itself in engine operations" end
    for _, field in ipairs(m.plan_fields or {}) do self.checks[#self.checks + 1] = { m, field, m[field] } end
    return lower(m, self, x, ...)
end

-- Describes one item; false and a reason when it has to be called. Nothing is left behind then.
local function describe(g, item, values)
    local n_steps, n_checks, extras = #g.steps, #g.checks, {}
    for i, v in ipairs(item.extras) do extras[i] = values[v] end
    g.label, g.lens = item.label, item.lens and values[item.lens]
    local results = { g:lower(item.op, values[item.x], unpack(extras)) }
    if results[1] then
        values[item.y] = results[1]
        for i, v in ipairs(item.outs) do values[v] = results[1 + i] end
        return true
    end
    for i = #g.steps, n_steps + 1, -1 do g.steps[i] = nil end
    for i = #g.checks, n_checks + 1, -1 do g.checks[i] = nil end
    return false, results[2]
end

local function call(g, item, values)
    local step = { item = item, x = values[item.x], extras = {}, label = item.label, results = { value(g) } }
    for i, v in ipairs(item.extras) do step.extras[i] = values[v] end
    step.lens = item.lens and values[item.lens]
    values[item.y] = step.results[1]
    for i, v in ipairs(item.outs) do
        step.results[1 + i] = value(g)
        values[v] = step.results[1 + i]
    end
    g.steps[#g.steps + 1] = step
end

-- Numbers of the steps that read each value last; the caller's outputs are read after all.
local function last_readers(g, outputs)
    local last = {}
    for i, step in ipairs(g.steps) do
        for _, v in ipairs(step.inputs or step.extras) do
            if v then last[v] = i end
        end
        if step.x then last[step.x] = i end
    end
    for _, v in ipairs(outputs) do last[v] = math.huge end
    return last
end

-- Steps first … last as a group of the engine.
local function make_group(g, first, last, readers)
    local part = { group = core.group_new(), inputs = {}, params = {}, outputs = {}, steps = {}, sources = g.sources }
    local numbers, entries = {}, {}
    local function enter(v)
        if numbers[v] or not v then return end
        numbers[v] = true
        entries[#entries + 1] = v
    end
    for i = first, last do -- activations stand before parameters
        for _, v in ipairs(g.steps[i].inputs) do if v and not g.sources[v] then enter(v) end end
        numbers[g.steps[i].result] = true
    end
    for i = first, last do
        for _, v in ipairs(g.steps[i].inputs) do if v and g.sources[v] then enter(v) end end
    end
    for _, v in ipairs(entries) do
        local source = g.sources[v]
        numbers[v] = core.group_input(part.group, source ~= nil)
        local list = source and part.params or part.inputs
        list[#list + 1] = source or v
    end
    for i = first, last do
        local step, inputs = g.steps[i], {}
        part.steps[#part.steps + 1] = step
        for k, v in ipairs(step.inputs) do inputs[k] = v and numbers[v] end
        numbers[step.result] = core.group_op(part.group, step.label, step.name, inputs, step.attributes)
    end
    for i = first, last do
        local v = g.steps[i].result
        if (readers[v] or 0) > last then
            core.group_output(part.group, numbers[v])
            part.outputs[#part.outputs + 1] = v
        end
    end
    return part
end

--- Items as parts. With `fuse` false every item is called.
function record.parts(walk, fuse)
    local g = setmetatable({ steps = {}, checks = {}, parameters = {}, sources = {}, n_values = walk.n_inputs,
        reasons = {} }, Recorder)
    local values = {}
    for v = 1, walk.n_inputs do values[v] = v end
    for i, item in ipairs(walk.items) do
        item.label = i
        local described, reason = false, nil
        if fuse then described, reason = describe(g, item, values) end
        g.reasons[i] = reason
        if not described then call(g, item, values) end
    end
    local outputs = { values[walk.y] }
    for i, v in ipairs(walk.outputs) do outputs[1 + i] = values[v] end

    local readers, parts, at = last_readers(g, outputs), {}, 1
    while at <= #g.steps do
        if g.steps[at].item then
            parts[#parts + 1] = g.steps[at]
        else
            local first = at
            while g.steps[at + 1] and not g.steps[at + 1].item do at = at + 1 end
            parts[#parts + 1] = make_group(g, first, at, readers)
        end
        parts[#parts].last_step = at
        at = at + 1
    end
    return { parts = parts, outputs = outputs, checks = g.checks, reasons = g.reasons, readers = readers,
        n_inputs = walk.n_inputs }
end

return record
