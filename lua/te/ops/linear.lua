--- te.Linear, te.BasicLinear and te.Bias: y = x W^T + b, together and in its parts. W has shape {out, in}.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local declared = require "te.ops.declared"
local mode = require "te.recipe.mode"
local initializers = require "te.initializers"
local BasicOperation = require("te.operation").BasicOperation

local WEIGHT = declared.join(declared.PLACE, { init_method = { "callable" } })
local LINEAR = declared.join(WEIGHT, {
    bias = { "boolean", true },
    return_bias = { "boolean", false }, -- the bias is not added but returned, as an extra output
})
local REFUSED = {
    "tensor_parallel_mode", "tensor_parallel_group", "sequence_parallel", "rng_state_tracker_function",
    "accumulate_into_main_grad", "userbuffers_options", "delay_wgrad_compute",
}

local function check_width(self, x)
    if not self.in_features then
        fail("te.%s: it has no weight; an init of your own calls the inherited one: "
            .. "te.Linear.init(self, in_features, …)", self.__name)
    end
    if te.is_tensor(x) and x:dim() > 0 and x:size(-1) ~= self.in_features then
        fail("te.%s: the input has shape %s, its last size must be in_features = %d", self.__name,
            options.shape(x), self.in_features)
    end
end

local function init_weight(self, in_features, out_features, opts)
    local who = "te." .. self.__name
    self.in_features = options.argument(who, "in_features", in_features, { "size" })
    self.out_features = options.argument(who, "out_features", out_features, { "size" })
    self.weight = mode.weight(self, "weight",
        initializers.parameter({ out_features, in_features }, opts.init_method or initializers.default, opts))
end

-- The weights that recipes quantize.
local function product_keys() return { "weight" } end

local BasicLinear = BasicOperation:extend("BasicLinear")
BasicLinear.pure, BasicLinear.takes = true, 3
BasicLinear.product_keys = product_keys

function BasicLinear:init(in_features, out_features, opts)
    init_weight(self, in_features, out_features, declared.check("te.BasicLinear", opts, WEIGHT, REFUSED))
end

-- By itself, not in a group.
local function multiply(self, x, bias)
    check_width(self, x)
    if mode.on then return mode.linear(self, "weight", x, self.weight, bias) end
    return te.linear(x, self.weight, bias)
end

-- In a group.
local function lower_product(self, g, x, bias)
    return g:op("linear", { x, g:param(self, "weight"), bias }, nil, g:product(self, "weight"))
end

function BasicLinear:op_forward(_, x) return multiply(self, x) end

function BasicLinear:lower(g, x) return lower_product(self, g, x, false) end

function BasicLinear:describe()
    return ("in_features=%d, out_features=%d"):format(self.in_features, self.out_features)
end

local Bias = BasicOperation:extend("Bias")
Bias.pure, Bias.takes = true, 2

--- Adds a vector to the last dimension; the result has the dtype that both promote to.
function Bias:init(size, opts)
    opts = declared.check("te.Bias", opts, declared.PLACE, { "tensor_parallel", "tensor_parallel_group" })
    self.size = options.argument("te.Bias", "size", size, { "size" })
    self.bias = initializers.parameter({ size }, initializers.constant(0), opts)
end

function Bias:op_forward(_, x) return te.add(x, self.bias) end

function Bias:lower(g, x) return g:op("add", { x, g:param(self, "bias") }) end

function Bias:describe() return ("size=%d"):format(self.size) end

local Linear = BasicOperation:extend("Linear")
Linear.pure, Linear.takes = true, 3
Linear.product_keys = product_keys
Linear.plan_fields = { "return_bias" }

function Linear:init(in_features, out_features, opts)
    opts = declared.check("te.Linear", opts, LINEAR, REFUSED)
    if opts.return_bias and not opts.bias then fail("te.Linear: option return_bias: there is no bias to return") end
    init_weight(self, in_features, out_features, opts)
    if opts.bias then self.bias = initializers.parameter({ out_features }, initializers.constant(0), opts) end
    self.return_bias = opts.return_bias
    self.num_extra_outputs = opts.return_bias and 1 or 0
end

function Linear:op_forward(_, x)
    if self.return_bias then return multiply(self, x), self.bias end
    return multiply(self, x, self.bias)
end

function Linear:lower(g, x)
    local bias = g:param(self, "bias")
    if not self.return_bias then return lower_product(self, g, x, bias) end
    local y, reason = lower_product(self, g, x, false)
    return y, y and bias or reason
end

function Linear:describe()
    return ("in_features=%d, out_features=%d, bias=%s"):format(self.in_features, self.out_features,
        tostring(self.bias ~= nil))
end

return { Linear = Linear, BasicLinear = BasicLinear, Bias = Bias }
