--- te.BasicOperation and te.FusedOperation: the bases of fusible operations.
--
-- A basic operation holds parameters and computes y, extra outputs … = op_forward(ctx, x, extra inputs …). With an
-- op_backward it is recorded as one node: op_backward(ctx, dy, gradients of extra outputs …) returns dx, a list with
-- the gradients of its own parameters in the order of their registration, and a list with those of the extra inputs.
-- Without one, the engine's tape sees what op_forward does, which is how the built-in operations get their gradients.
--
-- A fused operation stands for several basic ones and owns no state.
--
-- Lowering. An operation that has a method
--
--     y, extra outputs … = lower(self, g, x, extra inputs …)
--
-- describes itself as operations of the engine over symbolic values, so that it can be planned together with its
-- neighbours. x, the extra inputs and what comes back are values of the recorder g, which offers
--
--     g:op(name, inputs, attributes)   an operation of the engine, by its name or itself (te._core.define): inputs in
--                                      the order of its signature, false where absent, a number where it takes one;
--                                      attributes by name. Returns one value per result, or nil and why it is not
--                                      taken, which lower hands on
--     g:param(self, "weight")          the parameter in that field, by its name in the module: "weight.2" in a list;
--                                      false when there is none
--     g:seq_lens()                     the lengths of packed sequences, false when the caller gave none
--
-- nil and a reason come back when there is no such description; the operation then runs by itself. A description holds
-- while the fields named in plan_fields keep their values, those of children included. It may not look at values.

local te = require "te"
local fail = require "te.fail"
local Module = require "te.module"

local BasicOperation = Module:extend("BasicOperation")

BasicOperation.is_operation = true
BasicOperation.num_extra_inputs = 0
BasicOperation.num_extra_outputs = 0
BasicOperation.plan_fields = {}

local function check_extra_inputs(self, given)
    if given ~= self.num_extra_inputs then
        fail("%s: takes %d extra inputs, got %d", self.__name, self.num_extra_inputs, given)
    end
end

-- The first n values of a list as arguments, nils included.
local function values(list, n) return unpack(list or {}, 1, n) end

-- Concatenates dx, n parameter gradients and m extra gradients in the order of the node's inputs.
local function gradients(dx, of_parameters, n, of_extras, m)
    local all = { dx }
    for i = 1, n do all[1 + i] = of_parameters and of_parameters[i] end
    for i = 1, m do all[1 + n + i] = of_extras and of_extras[i] end
    return values(all, 1 + n + m)
end

-- Runs forward and backward as one node whose inputs are x, the parameters and the extra inputs.
local function record(parameters, forward, backward, x, ...)
    local n, m = #parameters, select("#", ...)
    local inputs = { x }
    for i = 1, n do inputs[1 + i] = parameters[i] end
    for i = 1, m do inputs[1 + n + i] = select(i, ...) end
    return te._core.custom(
        function(ctx, first, ...) return forward(ctx, first, select(n + 1, ...)) end,
        function(ctx, ...)
            local dx, of_parameters, of_extras = backward(ctx, ...)
            return gradients(dx, of_parameters, n, of_extras, m)
        end,
        values(inputs, 1 + n + m))
end

local RUNS = { "forward", "op_forward", "op_backward" }

--- The method that lowers `op`; nil and the reason when it has none, or when what runs was written in a class further
--- down, or in the instance, than what describes it.
local function lowering(op)
    if not Module.is(op, Module) then return nil, "not an operation" end
    for _, name in ipairs(RUNS) do
        if rawget(op, name) then return nil, ("this %s has its own %s"):format(op.__name, name) end
    end
    local class = getmetatable(op)
    while class do
        local lower, super = rawget(class, "lower"), rawget(class, "super")
        if lower then return lower end
        for _, name in ipairs(RUNS) do
            if rawget(class, name) then return nil, ("%s has no method lower"):format(op.__name) end
        end
        if super and class.__call ~= super.__call then return nil, ("%s has its own __call"):format(class.__name) end
        class = super
    end
    return nil, ("%s has no method lower"):format(op.__name)
end

--- Lowers a module inside another one: what its method lower returns, or nil and the reason.
local function lower_child(child, g, x, ...)
    local lower, reason = lowering(child)
    if not lower then return nil, reason end
    if g.watch then g:watch(child) end
    return lower(child, g, x, ...)
end

function BasicOperation:forward(x, ...)
    check_extra_inputs(self, select("#", ...))
    if not self.op_backward then return self:op_forward(nil, x, ...) end
    return record(self:parameters(),
        function(ctx, ...) return self:op_forward(ctx, ...) end,
        function(ctx, ...) return self:op_backward(ctx, ...) end, x, ...)
end

local FusedOperation = Module:extend("FusedOperation")

FusedOperation.is_operation = true

--- Says which basic operations this one stands for, in their order.
function FusedOperation:set_basic_ops(...)
    local ops = { ... }
    self.num_extra_inputs, self.num_extra_outputs = 0, 0
    for i, op in ipairs(ops) do
        if not Module.is(op, BasicOperation) then
            fail("%s:set_basic_ops: argument %d is no basic operation", self.__name, i)
        end
        self.num_extra_inputs = self.num_extra_inputs + op.num_extra_inputs
        self.num_extra_outputs = self.num_extra_outputs + op.num_extra_outputs
    end
    self.basic_ops = ops
end

-- Deals a flat sequence of extra inputs out to the basic operations that take them.
local function deal(ops, count, ...)
    local lists, next_value = {}, 1
    for i, op in ipairs(ops) do
        lists[i] = {}
        for k = 1, op[count] do
            lists[i][k] = (select(next_value, ...))
            next_value = next_value + 1
        end
    end
    return lists
end

local function flatten(ops, count, lists)
    local flat, n = {}, 0
    for i, op in ipairs(ops) do
        for k = 1, op[count] do flat[n + k] = lists and lists[i] and lists[i][k] end
        n = n + op[count]
    end
    return flat, n
end

-- One context for all basic operations: each has its own table, and what any of them saves is kept by the node.
local function split_context(ctx, n)
    local parts = {}
    for i = 1, n do
        parts[i] = { tensors = {} }
        parts[i].save_for_backward = function(part, ...) part.tensors = { n = select("#", ...), ... } end
        parts[i].saved_tensors = function(part) return unpack(part.tensors, 1, part.tensors.n or 0) end
    end
    if ctx then ctx.parts = parts end
    return parts
end

--- y, extra outputs … = fuser_forward(ctxs, x, extra_inputs); with a fuser_backward(ctxs, dy, extra_gradients) that
--- returns dx, parameter gradients and extra input gradients, both per basic operation, it is one node of the tape.
function FusedOperation:forward(x, ...)
    local ops = self.basic_ops
    check_extra_inputs(self, select("#", ...))
    local function forward(ctx, input, ...)
        local y, extra_outputs = self:fuser_forward(split_context(ctx, #ops), input, deal(ops, "num_extra_inputs", ...))
        local flat, n = flatten(ops, "num_extra_outputs", extra_outputs)
        return y, values(flat, n)
    end
    if not self.fuser_backward then return forward(nil, x, ...) end

    local parameters, counts = {}, {}
    for i, op in ipairs(ops) do
        local own = op:parameters()
        counts[i] = { own = #own }
        for _, parameter in ipairs(own) do parameters[#parameters + 1] = parameter end
    end
    return record(parameters, forward, function(ctx, dy, ...)
        local dx, of_parameters, of_extras = self:fuser_backward(ctx.parts, dy, deal(ops, "num_extra_outputs", ...))
        return dx, (flatten(counts, "own", of_parameters)), (flatten(ops, "num_extra_inputs", of_extras))
    end, x, ...)
end

return {
    BasicOperation = BasicOperation, FusedOperation = FusedOperation,
    lowering = lowering, lower_child = lower_child,
}
