--- te.LayerNorm, te.RMSNorm, te.L2Normalization: over the last dimension, or the last few, statistics in float32.
--
-- zero_centered_gamma stores gamma - 1: weight decay then pulls the factor to 1, not to 0.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local declared = require "te.ops.declared"
local initializers = require "te.initializers"
local collective = require "te.ops.collective"
local BasicOperation = require("te.operation").BasicOperation

local NORM = declared.join(declared.PLACE, {
    eps = { "number", 1e-5, min = 0, help = "added to the variance or mean square" },
    zero_centered_gamma = { "boolean", false, help = "the weight is stored minus 1" },
    sequence_parallel = { "boolean", false,
        help = "each process has rows of its own: gradients of the parameters are summed over the group" },
    tensor_parallel_group = { "any",
        help = "with sequence_parallel: group of te.distributed; default: all processes" },
})
local LAYER_NORM = declared.join(NORM, { bias = declared.BIAS })
local L2 = { eps = { "number", 1e-6, min = 0, help = "added to the sum of squares" } }

-- A size or a list of sizes as a list.
local function shape_of(self, size)
    local who = "te." .. self.__name
    if type(size) ~= "table" then return { options.argument(who, "size", size, { "size" }) } end
    if #size == 0 then fail("%s: normalized_shape: at least one size is needed", who) end
    local shape = {}
    for i, extent in ipairs(size) do
        shape[i] = options.argument(who, ("normalized_shape[%d]"):format(i), extent, { "size" })
    end
    return shape
end

local function init_norm(self, size, opts)
    self.normalized_shape = shape_of(self, size)
    self.eps, self.zero_centered_gamma = opts.eps, opts.zero_centered_gamma
    rawset(self, "_attributes", {}) -- used again by every call
    if opts.tensor_parallel_group and not opts.sequence_parallel then
        fail("te.%s: option tensor_parallel_group: needs sequence_parallel", self.__name)
    end
    self.sequence_group = opts.sequence_parallel
        and collective.group("te." .. self.__name, "tensor_parallel_group", opts.tensor_parallel_group) or nil
    self.weight = initializers.parameter(self.normalized_shape,
        initializers.constant(opts.zero_centered_gamma and 0 or 1), opts)
end

local FIELDS = { "eps", "zero_centered_gamma", "sequence_group" }

local function attributes(self)
    self._attributes.eps = self.eps
    return self._attributes
end

-- For a plan; it may have been written since the norm was made.
local function checked_eps(self)
    return { eps = options.argument("te." .. self.__name, "eps", self.eps, NORM.eps) }
end

-- The engine's operation: "layer_norm", or the one that adds 1 to the weight in float32.
local function operation(self, name) return self.zero_centered_gamma and name .. "_zero_centered" or name end

-- Raises unless the last sizes of x are those that the statistics run over.
local function check_shape(self, x)
    local sizes = self.normalized_shape
    if not te.is_tensor(x) and #sizes > 1 then
        fail("te.%s: x: expected a tensor, got %s", self.__name, options.shown(x))
    end
    if not te.is_tensor(x) or #sizes == 1 and x:dim() > 0 and x:size(-1) == sizes[1] then return end
    local fits = x:dim() >= #sizes
    for i = 1, #sizes do fits = fits and x:size(i - 1 - #sizes) == sizes[i] end
    if not fits then
        fail("te.%s: the input has shape %s, its last sizes must be %s", self.__name, options.shape(x),
            options.shape(sizes))
    end
end

-- A parameter, whose gradient is that of the rows of all processes.
local function shared(self, name)
    local parameter = self[name]
    if not self.sequence_group or not parameter then return parameter end
    return collective.copy(self.sequence_group, parameter)
end

-- normalize(x, weight, bias) with the last dimensions made one.
local function flattened(self, x, normalize)
    local n = #self.normalized_shape
    local bias = shared(self, "bias")
    local y = normalize(x:flatten(-n, -1), shared(self, "weight"):flatten(), bias and bias:flatten())
    return y:view(x.shape)
end

-- For the recorder of a description: the inputs of an operation whose row is all dimensions that are normalized, or nil
-- and a reason.
local function inputs_of(self, g, x, ...)
    if self.sequence_group then return nil, "gradients of its parameters wait for other processes" end
    local inputs, joins, reason = { x }, true, nil
    if #self.normalized_shape > 1 then joins, reason = g:join(self.normalized_shape, self.__name) end
    for i, name in ipairs { ... } do
        if joins then inputs[1 + i], reason = g:along_row(self, name) end
        joins = joins and inputs[1 + i] ~= nil
    end
    if not joins then return nil, reason end
    return inputs
end

-- For a model: whether each process of the group has rows of its own.
local function set_sequence_parallel(self, on, group) self.sequence_group = on and group or nil end

local function describe(self)
    local sizes = self.normalized_shape
    local size = #sizes == 1 and "size=" .. sizes[1] or "{" .. table.concat(sizes, ", ") .. "}"
    return ("%s, eps=%g%s"):format(size, self.eps, self.zero_centered_gamma and ", zero_centered_gamma" or "")
end

local LayerNorm = BasicOperation:extend("LayerNorm")
LayerNorm.set_sequence_parallel = set_sequence_parallel
LayerNorm.pure, LayerNorm.takes, LayerNorm.describe, LayerNorm.plan_fields = true, 2, describe, FIELDS

--- te.LayerNorm(size), or te.LayerNorm({ sizes of the last dimensions }): subtracts the mean, divides by the standard
--- deviation, multiplies by a weight and adds a bias.
function LayerNorm:init(size, opts)
    opts = declared.check("te.LayerNorm", opts, LAYER_NORM, { "sm_margin" })
    init_norm(self, size, opts)
    if opts.bias then
        self.bias = initializers.parameter(self.normalized_shape, initializers.constant(0), opts)
    end
end
options.declare(LayerNorm.init, LAYER_NORM)

function LayerNorm:op_forward(_, x)
    check_shape(self, x)
    local normalize, opts = te[operation(self, "layer_norm")], attributes(self)
    if #self.normalized_shape == 1 then
        return normalize(x, shared(self, "weight"), shared(self, "bias"), opts)
    end
    return flattened(self, x, function(rows, weight, bias) return normalize(rows, weight, bias, opts) end)
end

function LayerNorm:lower(g, x)
    local inputs, reason = inputs_of(self, g, x, "weight", "bias")
    if not inputs then return nil, reason end
    return g:op(operation(self, "layer_norm"), inputs, checked_eps(self))
end

local RMSNorm = BasicOperation:extend("RMSNorm")
RMSNorm.set_sequence_parallel = set_sequence_parallel
RMSNorm.pure, RMSNorm.takes, RMSNorm.describe, RMSNorm.plan_fields = true, 2, describe, FIELDS

--- te.RMSNorm(size), or te.RMSNorm({ sizes of the last dimensions }): divides by the root mean square, multiplies by a
--- weight.
function RMSNorm:init(size, opts)
    init_norm(self, size, declared.check("te.RMSNorm", opts, NORM, { "sm_margin" }))
end
options.declare(RMSNorm.init, NORM)

function RMSNorm:op_forward(_, x)
    check_shape(self, x)
    local normalize, opts = te[operation(self, "rms_norm")], attributes(self)
    if #self.normalized_shape == 1 then return normalize(x, shared(self, "weight"), opts) end
    return flattened(self, x, function(rows, weight) return normalize(rows, weight, opts) end)
end

function RMSNorm:lower(g, x)
    local inputs, reason = inputs_of(self, g, x, "weight")
    if not inputs then return nil, reason end
    return g:op(operation(self, "rms_norm"), inputs, checked_eps(self))
end

local L2Normalization = BasicOperation:extend("L2Normalization")
L2Normalization.pure, L2Normalization.takes = true, 1
L2Normalization.plan_fields = { "eps" }

--- x / sqrt(sum of x^2 + eps).
function L2Normalization:init(opts)
    self.eps = options.check("te.L2Normalization", opts, L2).eps
end
options.declare(L2Normalization.init, L2)

function L2Normalization:op_forward(_, x) return te.l2_normalize(x, { eps = self.eps }) end

function L2Normalization:lower(g, x) return g:op("l2_normalize", { x }, checked_eps(self)) end

function L2Normalization:describe() return ("eps=%g"):format(self.eps) end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm, L2Normalization = L2Normalization }
