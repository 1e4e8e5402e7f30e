--- te.Pointwise: an operation from a Lua function, which is traced (see te.pointwise). It needs no gradient of its own
--- and fuses with its neighbours like the built-in ones.
--
--     te.Pointwise(function(x) return x * te.tanh(te.log(1 + te.exp(x))) end)
--     te.Pointwise({ params = { g = te.ones({ hidden }) } }, function(x, p) return x * p.g end)

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local trace = require "te.pointwise.trace"
local BasicOperation = require("te.operation").BasicOperation

local Pointwise = BasicOperation:extend("Pointwise")
Pointwise.pure, Pointwise.takes = true, 2

local POINTWISE = {
    params = { "table", help = "tensors by name: parameters, and fields of the function's last argument" },
    extra_inputs = { "integer", 0, min = 0, help = "number of arguments of the function after x" },
    name = { "string", "pointwise", help = "name in profiles and messages" },
}

-- Sorted names of parameters that may be fields of the module.
local function check_params(params)
    local names = options.names(params)
    for _, name in ipairs(names) do
        if not te.is_tensor(params[name]) and params[name] ~= nil then
            fail("te.Pointwise: params.%s: expected a tensor, got %s", name, te._core.describe(params[name]))
        elseif not name:find("^%a[%w_]*$") or #name > 20 then
            fail("te.Pointwise: params.%s: the name must be letters, digits and _, at most 20", name)
        end
    end
    return names
end

--- The first result of fn(x, extra inputs …, params) is passed on, others are extra outputs. fn runs once, with symbols
--- in place of tensors: numbers that it reads from outside are fixed then, so pass changing ones as an extra input or a
--- parameter. The result has the dtype of x (float32 if that is an integer or bool), or that of te.autocast. Integers
--- are computed in float32, exact up to 2^24, or in float64 if an argument is float64.
---@overload fun(fn: function)
function Pointwise:init(opts, fn)
    if type(opts) == "function" then opts, fn = fn, opts end -- options may come last, as everywhere
    opts = options.check("te.Pointwise", opts, POINTWISE)
    if type(fn) ~= "function" then fail("te.Pointwise: fn: expected a function, got %s", te._core.describe(fn)) end
    local names = check_params(opts.params or {})
    self.operation, self.singles, self.along = trace("te.Pointwise", fn, 1 + opts.extra_inputs,
        { params = opts.params and names, compute = true, name = opts.name })
    self.formula = self.operation.formula
    self.param_names = names
    self.num_extra_inputs = opts.extra_inputs
    local _, results = self.operation.outputs:gsub("%S+", "")
    self.num_extra_outputs = results - 1
    for _, name in ipairs(names) do
        if self[name] ~= nil then fail("te.Pointwise: params.%s: the name is taken", name) end
        self:register_parameter(name, opts.params[name])
    end
end
options.declare(Pointwise.init, POINTWISE)

local NARROW = "te.Pointwise: what is reduced along the rows of x %s is made of %s alone; reduce it before"
local NARROW_RESULT = "te.Pointwise: a result has one value for each row of x %s: beside sums, it is made of %s alone"

function Pointwise:op_forward(_, ...)
    local inputs, n = { ... }, 1 + self.num_extra_inputs
    for i, name in ipairs(self.param_names) do inputs[n + i] = self[name] end
    n = n + #self.param_names
    local reads, of_result = trace.narrow(self.along, inputs, n)
    if reads then
        local some = inputs[next(reads) or 1]
        fail(of_result and NARROW_RESULT or NARROW, options.shape(inputs[1]),
            te.is_tensor(some) and options.shape(some) or "numbers")
    end
    return self.operation(unpack(inputs, 1, n))
end

-- Whether something that is reduced along rows, or a result, may have one value per row where x has more: what is made
-- of parameters of that kind, or of extra inputs, whose shapes are not known yet.
local function may_be_narrow(self)
    local first = 1 + self.num_extra_inputs
    for _, reads in ipairs(self.along) do
        local wide = false
        for i in pairs(reads) do
            local parameter = self[self.param_names[i - first]]
            local shape = parameter and parameter.shape
            wide = wide or i == 1 or shape and (shape[#shape] or 1) ~= 1
        end
        if not wide then return true end
    end
    return false
end

function Pointwise:lower(g, ...)
    if may_be_narrow(self) then return nil, "x has no part in what it reduces along rows, or in a result" end
    local inputs, n = { ... }, 1 + self.num_extra_inputs
    for i, name in ipairs(self.param_names) do inputs[n + i] = g:param(self, name) end
    if not self.singles then return g:op(self.operation, inputs) end
    local results = {}
    for i, single in ipairs(self.singles) do
        local reason
        results[i], reason = g:op(single, inputs)
        if not results[i] then return nil, reason end
    end
    return unpack(results)
end

function Pointwise:describe() return self.formula end

return { Pointwise = Pointwise }
