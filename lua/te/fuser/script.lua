--- Scripts: basic operations that run by the methods their authors wrote, some of them together.
--
-- A script is a short chain of basic operations and the units that it runs as: a unit is one operation, or a fused operation
-- that stands for a few neighbours. Forward and backward have units of their own:
--
--     steps       scale      add      linear            each { op =, x =, extras = {}, lens =, y =, outs = {} }
--     forward    [ ForwardAxpy   ]  [ linear ]          each { first =, last =, op = fused operation, or nothing, rule = }
--     backward   [ scale ]  [ BackwardAddLinear ]
--
-- A script with backward units is one node of the tape; without, the tape sees what forward does. Backward walks its units
-- from the end and finds what forward kept in the contexts, one for each basic operation:
--
-- * An operation with an op_backward saves what that wants.
-- * For one without, its input and its extra inputs are saved, unless its op_forward saves something else itself. Backward
--   runs op_forward again on them, recorded.
-- * fuser_forward does both for the operations that it stands for, as far as another unit reads it in backward. When it saves
--   nothing at all, backward runs those operations one by one on its inputs first.
--
-- ctx.seq_lens are the lengths of packed sequences, for operations that take them. A value that one operation of a unit hands
-- to another one's extra input stays inside the unit: nothing stands for it among the extra inputs, and no gradient is
-- expected.

local te = require "te"
local fail = require "te.fail"
local core = te._core

local Script = {}
Script.__index = Script

local function gather(values, list)
    local found = {}
    for i, v in ipairs(list) do found[i] = values[v] end
    return found
end

local function title(unit, op, method)
    local who = ("%s:%s"):format(op.__name, method)
    return unit.rule and ("fusion rule %s: %s"):format(unit.rule, who) or who
end

-- Calls a method of a fused operation. What goes wrong in the work of a rule names the rule.
local function call_fused(unit, method, ...)
    local op = unit.op
    if not unit.rule then return op[method](op, ...) end
    local function explain(message)
        if type(message) == "string" then message = ("%s: %s"):format(title(unit, op, method), message) end
        return core.remember(message)
    end
    local function pass(ok, ...)
        if ok then return ... end
        error((...), 0)
    end
    return pass(xpcall(op[method], explain, op, ...))
end

-- Checks that `given` is a list with n entries; nil does when n is 0. false stands for an entry that is missing.
local function check_list(who, given, n, what)
    if given == nil and n == 0 then return {} end
    if type(given) ~= "table" then fail("%s: expected a list of %d %s, got %s", who, n, what, type(given)) end
    local count = 0
    for k in pairs(given) do count = math.max(count, type(k) == "number" and k or 0) end
    if count ~= n then fail("%s: expected %d %s, got %d; false stands for one that is missing", who, n, what, count) end
    return given
end

-- Checks one list for each basic operation of a unit against the numbers in `counts`.
local function check_lists(self, unit, method, given, counts, what)
    local who, total, lists = title(unit, unit.op, method), 0, {}
    for _, count in ipairs(counts) do total = total + count end
    if given == nil and total == 0 then given = {} end
    if type(given) ~= "table" then fail("%s: expected a list of lists of %s, got %s", who, what, type(given)) end
    if #given > #counts then fail("%s: %s for %d basic operations, there are %d", who, what, #given, #counts) end
    for i, count in ipairs(counts) do
        local name = ("%s: basic operation %d (%s)"):format(who, i, self.steps[unit.first + i - 1].op.__name)
        lists[i] = check_list(name, given[i], count, what)
    end
    return lists
end

-- Forward -----------------------------------------------------------------------------------------------------------

-- Whether an operation runs by op_forward and op_backward; one with another forward runs as a whole.
local function is_basic(op) return op.forward == te.BasicOperation.forward end

local function has_backward(op) return is_basic(op) and op.op_backward ~= nil end

-- Runs an operation by itself.
local function run_basic(op, ctx, x, ...)
    if is_basic(op) then return op:op_forward(ctx, x, ...) end
    if ctx.seq_lens then return op(x, ctx.seq_lens, ...) end
    return op(x, ...)
end

local function store(step, values, y, ...)
    if not te.is_tensor(y) then fail("%s:op_forward: expected a tensor, got %s", step.op.__name, type(y)) end
    values[step.y] = y
    for i, v in ipairs(step.outs) do values[v] = (select(i, ...)) end
end

local function forward_basic(step, ctx, values)
    local extras, n = gather(values, step.extras), #step.extras
    if not has_backward(step.op) then ctx:save_for_backward(values[step.x], unpack(extras, 1, n)) end
    store(step, values, run_basic(step.op, ctx, values[step.x], unpack(extras, 1, n)))
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
    local inputs = { [self.steps[unit.first].x] = values[self.steps[unit.first].x] }
    for i = unit.first, unit.last do
        if not is_empty(contexts[i]) then return end
        for _, v in ipairs(self.steps[i].extras) do inputs[v] = values[v] end
    end
    contexts.unsaved[#contexts.unsaved + 1] = { unit = unit, values = inputs }
end

local function forward_fused(self, unit, contexts, values)
    local ctxs, extra_inputs, counts = {}, {}, {}
    for i = unit.first, unit.last do
        local step, at = self.steps[i], i - unit.first + 1
        ctxs[at], extra_inputs[at], counts[at] = contexts[i], gather(values, step.extras), #step.outs
    end
    local y, extra_outputs = call_fused(unit, "fuser_forward", ctxs, values[self.steps[unit.first].x], extra_inputs)
    if not te.is_tensor(y) then fail("%s: expected a tensor, got %s", title(unit, unit.op, "fuser_forward"), type(y)) end
    extra_outputs = check_lists(self, unit, "fuser_forward", extra_outputs, counts, "extra outputs")
    if self.backward then note_unsaved(self, unit, contexts, values) end
    values[self.steps[unit.last].y] = y
    for at, outs in ipairs(extra_outputs) do
        for k, v in ipairs(self.steps[unit.first + at - 1].outs) do values[v] = outs[k] or nil end
    end
end

local function forward(self, contexts, ...)
    local values = {}
    contexts.unsaved = {}
    for i, v in ipairs(self.inputs) do values[v] = (select(i, ...)) end
    for i, step in ipairs(self.steps) do
        contexts[i] = core.context()
        contexts[i].seq_lens = values[step.lens]
    end
    for _, unit in ipairs(self.forward) do
        if unit.op then
            forward_fused(self, unit, contexts, values)
        else
            forward_basic(self.steps[unit.first], contexts[unit.first], values)
        end
    end
    return unpack(gather(values, self.outputs), 1, #self.outputs)
end

-- Backward ----------------------------------------------------------------------------------------------------------

local function detached_leaf(t)
    if not te.is_tensor(t) then return t end
    local leaf = t:detach()
    leaf.requires_grad = t.requires_grad or t.dtype:find("float") ~= nil
    return leaf
end

-- Gradients of results with respect to the tensors in `leaves`, by their numbers there.
local function gradients_of(results, n_results, douts, leaves, n_leaves)
    local outputs, seeds, wanted, numbers, grads = {}, {}, {}, {}, {}
    for i = 1, n_results do
        if douts[i] and results[i].requires_grad then
            outputs[#outputs + 1], seeds[#seeds + 1] = results[i], douts[i]
        end
    end
    for i = 1, n_leaves do
        grads[i] = false
        if te.is_tensor(leaves[i]) and leaves[i].requires_grad then
            wanted[#wanted + 1], numbers[#numbers + 1] = leaves[i], i
        end
    end
    if #outputs == 0 or #wanted == 0 then return grads end
    for k, grad in ipairs(te.grad(outputs, wanted, { grad_outputs = seeds })) do grads[numbers[k]] = grad end
    return grads
end

-- Runs an operation of a fused forward again, in the dtype of the first time.
local function again(kept, op, fn, ...)
    local random = te.rng_state()
    local results = { te.autocast({ enabled = kept.dtype ~= nil, dtype = kept.dtype }, fn, ...) }
    if te.rng_state() ~= random then
        fail("%s: a fused forward drew its random numbers, so a backward of its own is impossible", op.__name)
    end
    return results
end

-- Fills the contexts of fused operations that saved nothing.
local function fill_contexts(self, kept)
    for _, entry in ipairs(kept.contexts.unsaved) do
        for i = entry.unit.first, entry.unit.last do
            again(kept, self.steps[i].op, forward_basic, self.steps[i], kept.contexts[i], entry.values)
        end
    end
    kept.contexts.unsaved = {}
end

-- The backward of an operation without one: forward once more, recorded.
local function derive(kept, step, ctx, douts)
    local op, n, saved, leaves, scratch = step.op, 1 + #step.extras, { ctx:saved_tensors() }, {}, core.context()
    if not te.is_tensor(saved[1]) then
        fail("%s: a fused forward saved nothing in its context, where its backward looks for its input", op.__name)
    end
    for i = 1, n do leaves[i] = detached_leaf(saved[i]) end
    scratch.seq_lens = ctx.seq_lens
    local results = again(kept, op, te.enable_grad, run_basic, op, scratch, unpack(leaves, 1, n))
    local parameters = op:parameters()
    for i, parameter in ipairs(parameters) do leaves[n + i] = parameter end
    local grads = gradients_of(results, 1 + #step.outs, douts, leaves, n + #parameters)
    return grads[1], { unpack(grads, n + 1, n + #parameters) }, { unpack(grads, 2, n) }
end

-- All three return the gradient of x, and lists of those of parameters and of extra inputs for each basic operation.

local function backward_basic(self, unit, kept, dy, extra_gradients)
    local step, ctx, n = self.steps[unit.first], kept.contexts[unit.first], #self.steps[unit.first].outs
    local dx, of_parameters, of_extras
    if has_backward(step.op) then
        dx, of_parameters, of_extras = step.op:op_backward(ctx, dy, unpack(extra_gradients[1], 1, n))
    else
        dx, of_parameters, of_extras = derive(kept, step, ctx, { dy or false, unpack(extra_gradients[1], 1, n) })
    end
    local who = title(unit, step.op, "op_backward")
    return dx, { check_list(who, of_parameters, kept.counts[unit.first], "gradients of parameters") },
        { check_list(who, of_extras, #step.extras, "gradients of extra inputs") }
end

local function backward_fused(self, unit, kept, dy, extra_gradients, made_inside)
    local ctxs, parameters, extras = {}, {}, {}
    for i = unit.first, unit.last do
        local at = i - unit.first + 1
        ctxs[at], parameters[at], extras[at] = kept.contexts[i], kept.counts[i], #self.steps[i].extras
    end
    local dx, of_parameters, of_extras = call_fused(unit, "fuser_backward", ctxs, dy, extra_gradients)
    -- A gradient that stays inside the unit may be left out of the lists.
    for at = 1, type(of_extras) == "table" and #extras or 0 do
        for k, v in ipairs(self.steps[unit.first + at - 1].extras) do
            if made_inside[v] and type(of_extras[at]) == "table" then of_extras[at][k] = of_extras[at][k] or false end
        end
    end
    return dx, check_lists(self, unit, "fuser_backward", of_parameters, parameters, "gradients of parameters"),
        check_lists(self, unit, "fuser_backward", of_extras, extras, "gradients of extra inputs")
end

local function accumulate(who, grads, v, grad)
    if not grad then return end
    if not te.is_tensor(grad) then fail("%s: expected a tensor as gradient, got %s", who, type(grad)) end
    grads[v] = grads[v] and te.add(grads[v], grad) or grad
end

local function backward_unit(self, unit, kept, grads, of_parameters)
    local dy, extra_gradients, made_inside, any = grads[self.steps[unit.last].y], {}, {}, false
    for i = unit.first, unit.last do
        local outs = self.steps[i].outs
        extra_gradients[i - unit.first + 1] = gather(grads, outs)
        for _, v in ipairs(outs) do made_inside[v], any = true, any or grads[v] ~= nil end
    end
    if not dy and not any then return end
    local run = unit.op and backward_fused or backward_basic
    local dx, parameters, extras = run(self, unit, kept, dy, extra_gradients, made_inside)
    local who = title(unit, unit.op or self.steps[unit.first].op, unit.op and "fuser_backward" or "op_backward")
    accumulate(who, grads, self.steps[unit.first].x, dx)
    for at = 1, unit.last - unit.first + 1 do
        local i = unit.first + at - 1
        of_parameters[i] = parameters[at]
        for k, v in ipairs(self.steps[i].extras) do
            if not made_inside[v] then accumulate(who, grads, v, extras[at][k]) end
        end
    end
end

local function backward(self, kept, ...)
    local grads, of_parameters = {}, {}
    fill_contexts(self, kept)
    for i, v in ipairs(self.outputs) do grads[v] = (select(i, ...)) end
    for u = #self.backward, 1, -1 do backward_unit(self, self.backward[u], kept, grads, of_parameters) end
    local all, n = gather(grads, self.inputs), #self.inputs
    for i = 1, #self.steps do
        for k = 1, kept.counts[i] do all[n + k] = of_parameters[i] and of_parameters[i][k] end
        n = n + kept.counts[i]
    end
    return unpack(all, 1, n)
end

-- Scripts -----------------------------------------------------------------------------------------------------------

--- Runs a script on the values of its inputs, in their order; returns those of its outputs.
function Script:__call(...)
    if not self.backward or not core.grad_enabled() then return forward(self, {}, ...) end
    local inputs, n, counts = { ... }, #self.inputs, {}
    for i, step in ipairs(self.steps) do
        local parameters = step.op:parameters()
        counts[i] = #parameters
        for k, parameter in ipairs(parameters) do inputs[n + k] = parameter end
        n = n + #parameters
    end
    local n_inputs = #self.inputs
    return core.custom(
        function(ctx, ...)
            ctx.kept = { contexts = {}, counts = counts, dtype = core.compute_dtype() }
            return forward(self, ctx.kept.contexts, unpack({ ... }, 1, n_inputs))
        end,
        function(ctx, ...) return backward(self, ctx.kept, ...) end,
        unpack(inputs, 1, n))
end

--- Why the engine does not plan it.
function Script:reason()
    for _, unit in ipairs(self.backward or self.forward) do
        if unit.rule then return ("fusion rule %s runs it"):format(unit.rule) end
    end
    return "it runs as written"
end

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

--- A script from steps, units, and the values that others read, y first. Without backward units the tape sees its forward.
function script.new(steps, forward_units, backward_units, outputs)
    local names = {}
    for i, unit in ipairs(forward_units) do names[i] = (unit.op or steps[unit.first].op).__name end
    return setmetatable({ steps = steps, forward = forward_units, backward = backward_units, outputs = outputs,
        inputs = inputs_of(steps), __name = table.concat(names, " + ") }, Script)
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

--- A basic operation with an op_backward by itself.
function script.of_basic(op)
    local steps, outputs = standalone({ op })
    local units = { { first = 1, last = 1 } }
    return script.new(steps, units, units, outputs)
end

--- A fused operation by itself.
function script.of_fused(op)
    local steps, outputs = standalone(op.basic_ops)
    local units = { { first = 1, last = #steps, op = op } }
    return script.new(steps, units, op.fuser_backward and units, outputs)
end

return script
