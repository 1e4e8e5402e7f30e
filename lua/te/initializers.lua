--- te.initializers: functions that fill a new parameter, for init_method options.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local initializers = {}

local function checked(who, name, value, min)
    return options.argument("te.initializers." .. who, name, value, { "number", min = min })
end

--- N(mean, std).
---@param mean number
---@param std number
function initializers.normal(mean, std)
    checked("normal", "mean", mean)
    checked("normal", "std", std, 0)
    --- Fills t with such numbers.
    return function(t)
        local values = te.randn(t.shape, { device = t.device })
        values:mul_(std)
        if mean ~= 0 then values:add_(mean) end
        t:copy_(values)
        values:release()
    end
end

--- U(low, high).
---@param low number
---@param high number
function initializers.uniform(low, high)
    checked("uniform", "low", low)
    checked("uniform", "high", high, low)
    return function(t)
        local values = te.rand(t.shape, { device = t.device })
        values:mul_(high - low)
        values:add_(low)
        t:copy_(values)
        values:release()
    end
end

--- One value everywhere.
---@param value number
function initializers.constant(value)
    checked("constant", "value", value)
    --- Fills t with it.
    return function(t) t:fill_(value) end
end

local function fill(who, t, value)
    if not te.is_tensor(t) then
        fail("te.initializers.%s: t: expected a tensor, got %s", who, options.shown(t))
    end
    t:fill_(value)
end

--- Fills t with zeros: te.Linear(4, 4, { init_method = te.initializers.zeros }).
---@param t te.Tensor
function initializers.zeros(t) fill("zeros", t, 0) end

--- Fills t with ones.
---@param t te.Tensor
function initializers.ones(t) fill("ones", t, 1) end

local bare -- the dtype of parameters that nobody fills; nil: all are filled
require("te.settle").when_stopped(function() bare = nil end)

local function swap(dtype)
    local before = bare
    bare = dtype or nil
    return before or false
end

--- fn(...), whose parameters are of that dtype and hold whatever their memory held: they are about to be loaded.
function initializers.bare(dtype, fn, ...) return te._core.pass(te._core.under(swap, dtype, fn, ...)) end

--- Whether parameters are left so now.
function initializers.leaves_bare() return bare ~= nil end

--- A leaf tensor that requires a gradient, filled by `init`.
---@param shape integer[]
---@param init function
---@param opts table  { dtype =, device = }
function initializers.parameter(shape, init, opts)
    local t = te.empty(shape, { dtype = bare or opts.params_dtype or opts.dtype, device = opts.device })
    local replaced = not bare and init(t)
    if te.is_tensor(replaced) then t:copy_(replaced) end
    t.requires_grad = true
    return t
end

initializers.default = initializers.normal(0, 0.023)

return options.library("te.initializers", initializers)
