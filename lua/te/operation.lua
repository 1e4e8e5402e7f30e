--- te.BasicOperation and te.FusedOperation: the bases of fusible operations.
--
-- A basic operation holds parameters and computes y, extra outputs … = op_forward(ctx, x, extra inputs …). With an
-- op_backward it is recorded as one node: op_backward(ctx, dy, gradients of extra outputs …) returns dx, a list with
-- the gradients of its own parameters in the order of their registration, and a list with those of the extra inputs,
-- false standing for no gradient.
-- Without one, the engine's tape sees what op_forward does, which is how the built-in operations get their gradients.
--
-- A fused operation stands for several basic ones and owns no state:
--
--     y, extra outputs = fuser_forward(self, ctxs, x, extra_inputs)
--     dx, parameter gradients, extra input gradients = fuser_backward(self, ctxs, dy, extra_gradients)
--
-- Lists have one entry, itself a list, for each basic operation; ctxs[i] is the context of basic operation i. Without a
-- fuser_backward the tape sees what fuser_forward does. te.fuser.script runs both and says what contexts hold.
--
-- Lowering. An operation that has a method
--
--     y, extra outputs … = lower(self, g, x, extra inputs …)
--
-- describes itself as operations of the engine over symbolic values, so that it can be planned together with its
-- neighbours. x, the extra inputs and what comes back are values of the recorder g, which offers
--
--     g:op(name, inputs, attributes, product)
--                                      an operation of the engine, by its name or itself (te._core.define): inputs in
--                                      the order of its signature, false where absent, a number where it takes one;
--                                      attributes by name. Returns one value per result, or nil and why it is not
--                                      taken, which lower hands on. `product` is of a linear operation that recipes
--                                      quantize
--     g:cache_quantized()              what the operation before saves of its first input takes a byte a value
--     g:product(self, "weight")        what recipes remember of that operation, by the name of its weight
--     g:param(self, "weight")          the parameter in that field, by its name in the module: "weight.2" in a list;
--                                      false when there is none
--     g:along_row(self, "weight")      the same of one that has a number for each of a row's; nil and why not where it
--                                      is one number alone
--     g:join(sizes, name)              the operation that follows takes the last dimensions, of these sizes, for one;
--                                      messages about them begin with `name`, its module's
--     g:grouped_linear(self, x, sizes, ways), g:add_scaled_biases(self, y, scales, sizes, ways)
--                                      the products of a GroupedLinear, and its biases; `ways` does both by itself
--     g:chooses_by_rows()              whether te.autocast chooses what a product runs under; described anew when that
--                                      changes
--     g:seq_lens()                     the lengths of packed sequences, false when the caller gave none
--     g:rows_kept(draw, x, p)          for every row of x whether stochastic depth keeps it, which draw(x, lengths or
--                                      nil) gives as well
--
-- A method check_input(self, x, first extra input) may say what does not fit. It is asked where inputs cannot be
-- planned.
--
-- nil and a reason come back when there is no such description; the operation then runs by itself. A description holds
-- while the fields named in plan_fields keep their values, those of children included. It may not look at values.

local te = require "te"
local fail = require "te.fail"
local Module = require "te.module"
local options = require "te.options"
local script = require "te.fuser.script"
local units = require "te.fuser.script.unit"

local BasicOperation = Module:extend("BasicOperation")

BasicOperation.sentence = "The base of custom operations, which define op_forward and, where possible, "
    .. "op_backward and lower."
BasicOperation.is_operation = true
BasicOperation.num_extra_inputs = 0
BasicOperation.num_extra_outputs = 0
BasicOperation.plan_fields = {}

-- The extra inputs without the nils at the end that are too many. Raises where their number is wrong otherwise.
local function counted(self, ...)
    local n, takes = select("#", ...), units.count(self, "num_extra_inputs")
    while n > takes and (select(n, ...)) == nil do n = n - 1 end
    if n ~= takes then fail("%s: takes %d extra inputs, got %d", self.__name, takes, n) end
    return unpack({ ... }, 1, n)
end

function BasicOperation:op_forward() fail("%s: the class has no method op_forward", self.__name) end

local RUNS = { "forward", "op_forward", "op_backward" }

--- The method that lowers `op`; nil and the reason when it has none, or when what runs was written in a class further
--- down, or in the instance, than what describes it.
local function lowering(op)
    if script.is(op) then return nil, op:reason() end
    if not Module.is(op, Module) then return nil, "not an operation" end
    if rawget(op, "_hooks") then return nil, ("this %s has hooks"):format(op.__name) end
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

--- The names of the fields that what a module's lower returns depends on.
local function plan_fields(module)
    local fields = module.plan_fields or {}
    options.argument(module.__name, "plan_fields", fields, { "table" })
    options.list(module.__name, "plan_fields", fields)
    return fields
end

--- Lowers a module inside another one: what its method lower returns, or nil and the reason.
local function lower_child(child, g, x, ...)
    local lower, reason = lowering(child)
    if not lower then return nil, reason end
    if g.watch then g:watch(child) end
    return lower(child, g, x, ...)
end

function BasicOperation:forward(x, ...)
    if type(self) ~= "table" then options.method("Operation:forward", self, BasicOperation) end
    if select("#", ...) ~= self.num_extra_inputs then return BasicOperation.forward(self, x, counted(self, ...)) end
    if not self.op_backward then return units.outputs(self, self:op_forward(te._core.context(), x, ...)) end
    return script.of_basic(self)(x, ...)
end

local FusedOperation = Module:extend("FusedOperation")

FusedOperation.sentence = "The base of operations that replace several basic operations, as rules of "
    .. "te.register_forward_fusion make them."
FusedOperation.is_operation = true

--- Says which basic operations this one stands for, in their order.
function FusedOperation:set_basic_ops(...)
    local ops = { ... }
    self.num_extra_inputs, self.num_extra_outputs = 0, 0
    for i = 1, select("#", ...) do
        local op = ops[i]
        if not Module.is(op, BasicOperation) then
            fail("%s:set_basic_ops: argument %d is no basic operation", self.__name, i)
        end
        self.num_extra_inputs = self.num_extra_inputs + op.num_extra_inputs
        self.num_extra_outputs = self.num_extra_outputs + op.num_extra_outputs
    end
    self.basic_ops = ops
    rawset(self, "_script", nil)
end

function FusedOperation:forward(x, ...)
    if type(self) ~= "table" then options.method("Operation:forward", self, FusedOperation) end
    if not self.basic_ops then fail("%s: set_basic_ops says which operations it stands for", self.__name) end
    if select("#", ...) ~= self.num_extra_inputs then return FusedOperation.forward(self, x, counted(self, ...)) end
    return script.of_fused(self)(x, ...)
end

return {
    BasicOperation = BasicOperation, FusedOperation = FusedOperation,
    lowering = lowering, lower_child = lower_child, plan_fields = plan_fields,
}
