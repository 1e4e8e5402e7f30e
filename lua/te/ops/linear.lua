--- te.Linear, te.BasicLinear and te.Bias: y = x W^T + b, together and in its parts. W has shape {out, in}.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local initializers = require "te.initializers"
local BasicOperation = require("te.operation").BasicOperation

local WEIGHT = {
    init_method = { "callable" },
    params_dtype = { "string", "float32" },
    device = { "string" },
}
local LINEAR = {
    bias = { "boolean", true },
    return_bias = { "boolean", false },
    init_method = WEIGHT.init_method, params_dtype = WEIGHT.params_dtype, device = WEIGHT.device,
}

local function check_width(self, x)
    if te.is_tensor(x) and x:dim() > 0 and x:size(-1) ~= self.in_features then
        fail("te.%s: the input has shape {%s}, its last size must be in_features = %d", self.__name,
            table.concat(x.shape, ", "), self.in_features)
    end
end

local function init_weight(self, in_features, out_features, opts)
    local who = "te." .. self.__name
    self.in_features = options.argument(who, "in_features", in_features, { "size" })
    self.out_features = options.argument(who, "out_features", out_features, { "size" })
    self.weight = initializers.parameter({ out_features, in_features }, opts.init_method or initializers.default, opts)
end

local BasicLinear = BasicOperation:extend("BasicLinear")
BasicLinear.pure = true

function BasicLinear:init(in_features, out_features, opts)
    init_weight(self, in_features, out_features, options.check("te.BasicLinear", opts, WEIGHT))
end

function BasicLinear:op_forward(_, x)
    check_width(self, x)
    return te.linear(x, self.weight)
end

function BasicLinear:describe()
    return ("in_features=%d, out_features=%d"):format(self.in_features, self.out_features)
end

local Bias = BasicOperation:extend("Bias")
Bias.pure = true

function Bias:init(size, opts)
    opts = options.check("te.Bias", opts, { params_dtype = WEIGHT.params_dtype, device = WEIGHT.device })
    self.size = options.argument("te.Bias", "size", size, { "size" })
    self.bias = initializers.parameter({ size }, initializers.constant(0), opts)
end

function Bias:op_forward(_, x) return te.add(x, self.bias) end

function Bias:describe() return ("size=%d"):format(self.size) end

local Linear = BasicOperation:extend("Linear")
Linear.pure = true

--- return_bias leaves the bias out and returns it as an extra output.
function Linear:init(in_features, out_features, opts)
    opts = options.check("te.Linear", opts, LINEAR)
    init_weight(self, in_features, out_features, opts)
    if opts.bias then self.bias = initializers.parameter({ out_features }, initializers.constant(0), opts) end
    self.return_bias = opts.return_bias
    self.num_extra_outputs = opts.return_bias and 1 or 0
end

function Linear:op_forward(_, x)
    check_width(self, x)
    if self.return_bias then return te.linear(x, self.weight), self.bias end
    return te.linear(x, self.weight, self.bias)
end

function Linear:describe()
    return ("in_features=%d, out_features=%d, bias=%s"):format(self.in_features, self.out_features,
        tostring(self.bias ~= nil))
end

return { Linear = Linear, BasicLinear = BasicLinear, Bias = Bias }
