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
    device = { "string" },
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

local function gamma(self) return self.zero_centered_gamma and self.weight + 1 or self.weight end

local function describe(self)
    return ("size=%d, eps=%g%s"):format(self.size, self.eps, self.zero_centered_gamma and ", zero_centered_gamma" or "")
end

local LayerNorm = BasicOperation:extend("LayerNorm")
LayerNorm.pure, LayerNorm.describe = true, describe

function LayerNorm:init(size, opts)
    opts = options.check("te.LayerNorm", opts, with(NORM, { bias = { "boolean", true } }))
    init_norm(self, size, opts)
    if opts.bias then self.bias = initializers.parameter({ size }, initializers.constant(0), opts) end
end

function LayerNorm:op_forward(_, x) return te.layer_norm(x, gamma(self), self.bias, { eps = self.eps }) end

local RMSNorm = BasicOperation:extend("RMSNorm")
RMSNorm.pure, RMSNorm.describe = true, describe

function RMSNorm:init(size, opts)
    init_norm(self, size, options.check("te.RMSNorm", opts, NORM))
end

function RMSNorm:op_forward(_, x) return te.rms_norm(x, gamma(self), { eps = self.eps }) end

local L2Normalization = BasicOperation:extend("L2Normalization")
L2Normalization.pure = true

--- x / sqrt(sum of x^2 + eps).
function L2Normalization:init(opts)
    self.eps = options.check("te.L2Normalization", opts, { eps = { "number", 1e-6, min = 0 } }).eps
end

function L2Normalization:op_forward(_, x) return te.l2_normalize(x, { eps = self.eps }) end

function L2Normalization:describe() return ("eps=%g"):format(self.eps) end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm, L2Normalization = L2Normalization }
