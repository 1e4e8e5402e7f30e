--- The backward of a script.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local forward = require "te.fuser.script.forward"
local setting = require "te.fuser.script.setting"
local units = require "te.fuser.script.unit"
local core = te._core

local function detached_leaf(t)
    if not te.is_tensor(t) then return t end
    local leaf = t:detach()
    leaf.requires_grad = t.dtype:find("float") ~= nil
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

-- Runs an operation of a fused forward again, under what the first time ran under.
local function again(kept, op, fn, ...)
    local random = core.rng_state()
    local results = { setting.again(kept.setting, fn, ...) }
    if core.rng_state() ~= random then
        fail("%s: a fused forward drew its random numbers, so a backward of its own is impossible", op.__name)
    end
    return results
end

-- Fills the contexts of fused operations that saved nothing.
local function fill_contexts(self, kept)
    for _, entry in ipairs(kept.contexts.unsaved or {}) do
        local values, inputs = {}, { entry.inputs:read(units.title(entry.unit, entry.unit.op, "fuser_forward")) }
        for i, v in ipairs(entry.names) do values[v] = inputs[i] end
        for i = entry.unit.first, entry.unit.last do
            again(kept, self.steps[i].op, forward.step, self.steps[i], kept.contexts[i], values)
        end
    end
    kept.contexts.unsaved = nil
end

-- The backward of an operation without one: forward once more, recorded.
local function derive(kept, step, ctx, douts)
    local op, n, saved, leaves, scratch = step.op, 1 + #step.extras, { ctx:saved_tensors() }, {}, core.context()
    if not te.is_tensor(saved[1]) then
        fail("%s: a fused forward saved nothing in its context, where its backward looks for its input", op.__name)
    end
    for i = 1, n do leaves[i] = detached_leaf(saved[i]) end
    scratch.seq_lens = ctx.seq_lens
    local results = again(kept, op, te.enable_grad, units.run_basic, op, scratch, unpack(leaves, 1, n))
    local parameters = op:parameters()
    for i, parameter in ipairs(parameters) do leaves[n + i] = parameter end
    local grads = gradients_of(results, 1 + #step.outs, douts, leaves, n + #parameters)
    return grads[1], { unpack(grads, n + 1, n + #parameters) }, { unpack(grads, 2, n) }
end

-- All three return the gradient of x, and lists of those of parameters and of extra inputs for each basic operation.

local function backward_basic(self, unit, kept, dy, extra_gradients)
    local step, ctx, n = self.steps[unit.first], kept.contexts[unit.first], #self.steps[unit.first].outs
    local dx, of_parameters, of_extras
    if units.has_backward(step.op) then
        dx, of_parameters, of_extras = step.op:op_backward(ctx, dy, unpack(extra_gradients[1], 1, n))
    else
        dx, of_parameters, of_extras = derive(kept, step, ctx, { dy or false, unpack(extra_gradients[1], 1, n) })
    end
    local who = units.title(unit, step.op, "op_backward")
    return dx, { units.check_list(who, of_parameters, kept.counts[unit.first], "gradients of parameters") },
        { units.check_list(who, of_extras, #step.extras, "gradients of extra inputs") }
end

-- A copy of the lists without the gradients that stay inside a unit: they count as given, and go nowhere.
local function with_inner(self, unit, of_extras, made_inside)
    if next(made_inside) == nil or of_extras ~= nil and type(of_extras) ~= "table" then return of_extras end
    local lists = {}
    for at, list in pairs(of_extras or {}) do lists[at] = list end
    for i = unit.first, unit.last do
        local at = i - unit.first + 1
        for k, v in ipairs(self.steps[i].extras) do
            if made_inside[v] then
                lists[at] = { unpack(lists[at] or {}) }
                lists[at][k] = false
            end
        end
    end
    return lists
end

local function backward_fused(self, unit, kept, dy, extra_gradients, made_inside)
    local ctxs, parameters, extras = {}, {}, {}
    for i = unit.first, unit.last do
        local at = i - unit.first + 1
        ctxs[at], parameters[at], extras[at] = kept.contexts[i], kept.counts[i], #self.steps[i].extras
    end
    local dx, of_parameters, of_extras = units.call(unit, "fuser_backward", ctxs, dy, extra_gradients)
    of_extras = with_inner(self, unit, of_extras, made_inside)
    return dx, units.check_lists(self.steps, unit, "fuser_backward", of_parameters, parameters,
        "gradients of parameters"),
        units.check_lists(self.steps, unit, "fuser_backward", of_extras, extras, "gradients of extra inputs")
end

-- `what` is number k of its kind, in a fused operation of that basic operation.
local function check(who, grad, shape, what, k, basic)
    if not te.is_tensor(grad) then fail("%s: expected a tensor as gradient, got %s", who, core.describe(grad)) end
    local whole = not grad.dtype:find "float"
    if shape and (whole or options.shape(grad) ~= shape) then
        what = k and ("%s %d"):format(what, k) or what
        if basic then what = ("%s of basic operation %d"):format(what, basic) end
        if whole then fail("%s: the gradient of %s has dtype %s, not one of floats", who, what, grad.dtype) end
        fail("%s: the gradient of %s has shape %s, not %s", who, what, options.shape(grad), shape)
    end
end

local function accumulate(who, kept, grads, v, grad, ...)
    if not grad then return end
    check(who, grad, kept.contexts.shapes[v], ...)
    grads[v] = grads[v] and te.add(grads[v], grad) or grad
end

local function backward_unit(self, unit, kept, grads, of_parameters)
    local dy, extra_gradients, made_inside, any = grads[self.steps[unit.last].y], {}, {}, false
    for i = unit.first, unit.last do
        local outs = self.steps[i].outs
        extra_gradients[i - unit.first + 1] = units.gather(grads, outs)
        for _, v in ipairs(outs) do made_inside[v], any = true, any or grads[v] ~= nil end
    end
    if not dy and not any then return end
    local run = unit.op and backward_fused or backward_basic
    local dx, parameters, extras = run(self, unit, kept, dy, extra_gradients, made_inside)
    local who = units.title(unit, unit.op or self.steps[unit.first].op, unit.op and "fuser_backward" or "op_backward")
    local x = self.steps[unit.first].x
    if dx == nil and kept.contexts.shapes[x] then
        fail("%s: expected a tensor as gradient of x, got nil; false stands for none", who)
    end
    accumulate(who, kept, grads, x, dx, "x")
    for at = 1, unit.last - unit.first + 1 do
        local i = unit.first + at - 1
        of_parameters[i] = parameters[at]
        for k, parameter in ipairs(self.steps[i].op:parameters()) do
            local grad = parameters[at][k]
            if grad and parameter.requires_grad then
                check(who, grad, options.shape(parameter), "parameter", k, unit.op and at)
            end
        end
        for k, v in ipairs(self.steps[i].extras) do
            accumulate(who, kept, grads, v, extras[at][k], "extra input", k, unit.op and at)
        end
    end
end

--- Gradients of the inputs of a script and of the parameters of its operations, from those of its outputs.
local function backward(self, kept, ...)
    local grads, of_parameters = {}, {}
    fill_contexts(self, kept)
    for i, v in ipairs(self.outputs) do grads[v] = (select(i, ...)) end
    for u = #self.backward, 1, -1 do backward_unit(self, self.backward[u], kept, grads, of_parameters) end
    local all, n = units.gather(grads, self.inputs), #self.inputs
    for i = 1, #self.steps do
        for k = 1, kept.counts[i] do all[n + k] = of_parameters[i] and of_parameters[i][k] end
        n = n + kept.counts[i]
    end
    return unpack(all, 1, n)
end

return backward
