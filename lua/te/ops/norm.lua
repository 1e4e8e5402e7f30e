--- te.LayerNorm, te.RMSNorm, te.L2Normalization: over the last dimension, statistics in float32.
--
-- zero_centered_gamma stores gamma - 1: weight decay then pulls the factor to 1, not to 0.

local te = require "te"
local options = require "te.options"
local initializers = require "te.initializers"
local BasicOperation = require("te.operation").BasicOperation

local NORM = {
    eps = { "number", 1e-5, min = 0 },
    zero_centered_gamma = { "boolean", false },
    params_dtype = { "string", "float32" },
    device = { "string", "cpu" },
}

local function with(declared, more)
    local all = {}
    for name, declaration in pairs(declared) do all[name] = declaration end
    for name, declaration in pairs(more) do all[name] = declaration end
    return all
end

local function init_norm(self, size, opts)
    self.size = options.argument("te." .. self.__name, "size", size, { "size" })
    self.eps, self.zero_centered_gamma = opts.eps, opts.zero_centered_gamma
    self.weight = initializers.parameter({ size }, initializers.constant(opts.zero_centered_gamma and 0 or 1), opts)
end

local FIELDS = { "eps", "zero_centered_gamma" }

-- The engine's operation: "layer_norm", or the one that adds 1 to the weight in float32.
local function operation(self, name) return self.zero_centered_gamma and name .. "_zero_centered" or name end

local function describe(self)
    return ("size=%d, eps=%g%s"):format(self.size, self.eps, self.zero_centered_gamma and ", zero_centered_gamma" or "")
end

local LayerNorm = BasicOperation:extend("LayerNorm")
LayerNorm.pure, LayerNorm.describe, LayerNorm.plan_fields = true, describe, FIELDS

function LayerNorm:init(size, opts)
    opts = options.check("te.LayerNorm", opts, with(NORM, { bias = { "boolean", true } }))
    init_norm(self, size, opts)
    if opts.bias then self.bias = initializers.parameter({ size }, initializers.constant(0), opts) end
end

function LayerNorm:op_forward(_, x)
    return te[operation(self, "layer_norm")](x, self.weight, self.bias, { eps = self.eps })
end

function LayerNorm:lower(g, x)
    return g:op(operation(self, "layer_norm"), { x, g:param(self, "weight"), g:param(self, "bias") }, { eps = self.eps })
end

local RMSNorm = BasicOperation:extend("RMSNorm")
RMSNorm.pure, RMSNorm.describe, RMSNorm.plan_fields = true, describe, FIELDS

function RMSNorm:init(size, opts)
    init_norm(self, size, options.check("te.RMSNorm", opts, NORM))
end

function RMSNorm:op_forward(_, x) return te[operation(self, "rms_norm")](x, self.weight, { eps = self.eps }) end

function RMSNorm:lower(g, x)
    return g:op(operation(self, "rms_norm"), { x, g:param(self, "weight") }, { eps = self.eps })
end

local L2Normalization = BasicOperation:extend("L2Normalization")
L2Normalization.pure = true
L2Normalization.plan_fields = { "eps" }

--- x / sqrt(sum of x^2 + eps).
function L2Normalization:init(opts)
    self.eps = options.check("te.L2Normalization", opts, { eps = { "number", 1e-6, min = 0 } }).eps
end

function L2Normalization:op_forward(_, x) return te.l2_normalize(x, { eps = self.eps }) end

function L2Normalization:lower(g, x) return g:op("l2_normalize", { x }, { eps = self.eps }) end

function L2Normalization:describe() return ("eps=%g"):format(self.eps) end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm, L2Normalization = L2Normalization }
