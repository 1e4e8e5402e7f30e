--- te.Linear, te.BasicLinear and te.Bias: y = x W^T + b, together and in its parts. W has shape {out, in}.
--
-- With tensor_parallel_mode the processes of a group hold parts of one layer: "column" some rows of W and b each, so
-- that every process makes some columns of y from the whole of x (where they do not divide, the first ranks make one
-- more); "row" some columns of W, so that x's columns are split and the products are added up. sequence_parallel keeps
-- what stands outside split by rows: gathered before a column-parallel layer, scattered behind a row-parallel one. The
-- weights drawn from one seed are those of the whole.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local declared = require "te.ops.declared"
local mode = require "te.recipe.mode"
local initializers = require "te.initializers"
local collective = require "te.ops.collective"
local flatten = require "te.fuser.flatten"
local whole = require "te.distributed.whole"
local operation = require "te.operation"
local BasicOperation = operation.BasicOperation

local WEIGHT = declared.join(declared.join(declared.PLACE, collective.PARALLEL),
    { init_method = declared.INIT, name = declared.NAME })
local LINEAR = declared.join(WEIGHT, {
    bias = declared.BIAS,
    return_bias = { "boolean", false, help = "the bias is not added but returned as an extra output" },
})
local REFUSED = {
    "rng_state_tracker_function", "accumulate_into_main_grad", "userbuffers_options", "delay_wgrad_compute",
}

local function check_width(self, x)
    if not self.in_features then
        fail("te.%s: it has no weight; an init of your own calls the inherited one: "
            .. "te.Linear.init(self, in_features, …)", self.__name)
    end
    local width = self.local_in_features or self.in_features
    if te.is_tensor(x) and x:dim() > 0 and x:size(-1) ~= width then
        fail("te.%s: the input has shape %s, its last size must be in_features = %d%s", self.__name,
            options.shape(x), self.in_features,
            self.local_in_features and (", of which %d are here"):format(width) or "")
    end
end

local function describe_split(self)
    local split = self.split
    return split and (", tensor_parallel_mode=%q, %s"):format(split.mode, tostring(split.group)) or ""
end

-- The sizes of the products that the layer joins, nil for one.
local function sections_of(who, out_features, opts)
    local sections, sum = opts.tensor_parallel_sections, 0
    if not sections then return nil end
    local name = "option tensor_parallel_sections"
    if opts.tensor_parallel_mode ~= "column" then fail("%s: %s: needs tensor_parallel_mode = column", who, name) end
    for i = 1, options.list(who, name, sections) do
        sum = sum + options.argument(who, ("%s[%d]"):format(name, i), sections[i], { "size" })
    end
    if sum ~= out_features then fail("%s: %s: they sum to %d, out_features is %d", who, name, sum, out_features) end
    return sections
end

-- This process's part of the weight.
local function split_weight(self, who, weight, split)
    local by_columns = split.mode == "column"
    self.split = split
    split.uneven = by_columns and weight.shape[1] % split.group.size ~= 0
    weight = collective.part(who, by_columns and "out_features" or "in_features", weight:detach(),
        by_columns and 1 or 2, split.group, by_columns, split.sections)
    self.local_out_features, self.local_in_features = weight.shape[1], weight.shape[2]
    return weight
end

local function init_weight(self, in_features, out_features, opts)
    local who = "te." .. self.__name
    self.in_features = options.argument(who, "in_features", in_features, { "size" })
    self.out_features = options.argument(who, "out_features", out_features, { "size" })
    self.name = opts.name
    local weight = initializers.parameter({ out_features, in_features }, opts.init_method or initializers.default,
        opts)
    local split, sections = collective.split(who, opts), sections_of(who, out_features, opts)
    if split then
        split.sections = sections
        weight = split_weight(self, who, weight, split)
    end
    self.weight = mode.weight(self, "weight", weight)
    if split then
        local by_columns = split.mode == "column"
        whole.hold(self.weight, split.group, by_columns and 1 or 2,
            split.sections or { by_columns and out_features or in_features })
    end
end

-- The weights that recipes quantize.
local function product_keys() return { "weight" } end

-- By itself, not in a group.
local function multiply(self, x, bias)
    check_width(self, x)
    local y = mode.on and mode.linear(self, "weight", x, self.weight, bias) or te.linear(x, self.weight, bias)
    if not self.lora then return y end
    local adapted = self.lora(y, x)
    if adapted ~= y then y:release() end
    return adapted
end

-- In a group.
local function lower_product(self, g, x, bias)
    local y, reason = g:op("linear", { x, g:param(self, "weight"), bias }, nil, g:product(self, "weight"))
    if not y or not self.lora then return y, reason end
    return operation.lower_child(self.lora, g, y, x)
end

-- A layer that is split runs as a chain: what goes between the processes, and its product as it would be by itself.
local Product = BasicOperation:extend("Linear")
Product.pure, Product.takes = true, 3

-- Of `layer`, whose parameters and states it uses; not as a module of its own, which would have them twice.
function Product:init(layer, adds_bias)
    rawset(self, "_layer", layer)
    self.adds_bias = adds_bias
end

function Product:op_forward(_, x)
    local layer = rawget(self, "_layer")
    return multiply(layer, x, self.adds_bias and layer.bias or nil)
end

function Product:lower(g, x)
    local layer = rawget(self, "_layer")
    return lower_product(layer, g, x, self.adds_bias and g:param(layer, "bias"))
end

-- Adds the bias behind what a row-parallel layer adds up. Where every process has some rows only, so has each
-- gradient.
local SharedBias = BasicOperation:extend("Bias")
SharedBias.pure, SharedBias.takes = true, 2

function SharedBias:init(layer) rawset(self, "_layer", layer) end

function SharedBias:op_forward(_, x)
    local layer = rawget(self, "_layer")
    local split = layer.split
    return te.add(x, split.sequence and collective.copy(split.group, layer.bias) or layer.bias)
end

function SharedBias:lower(g, x)
    local layer = rawget(self, "_layer")
    if layer.split.sequence then return nil, "its gradient waits for other processes" end
    return g:op("add", { x, g:param(layer, "bias") })
end

-- Makes a container of a layer that is split.
local function split_layer(self)
    local by_columns = self.split.mode == "column"
    if self.bias and by_columns then
        whole.hold(self.bias, self.split.group, 1, self.split.sections or { self.out_features })
    end
    local first, last = collective.around(self.split)
    local chain = {}
    if first then chain[#chain + 1] = first end
    chain[#chain + 1] = Product(self, by_columns and self.bias ~= nil)
    if last then chain[#chain + 1] = last end
    if self.bias and not by_columns then chain[#chain + 1] = SharedBias(self) end
    rawset(self, "forward", flatten.forward or require("te.fuser").forward)
    rawset(self, "chain", function() return chain end)
end

local BasicLinear = BasicOperation:extend("BasicLinear")
BasicLinear.pure, BasicLinear.takes = true, 3
BasicLinear.product_keys = product_keys
BasicLinear.lora = false -- the adapter of te.lora, where there is one
BasicLinear.plan_fields = { "lora" }

--- te.Linear without a bias: y = x W^T.
function BasicLinear:init(in_features, out_features, opts)
    init_weight(self, in_features, out_features, declared.check("te.BasicLinear", opts, WEIGHT, REFUSED))
    if self.split then split_layer(self) end
end
options.declare(BasicLinear.init, WEIGHT)

-- The chain of a copy would be that of what was copied.
local function cloned(self) if self.split then split_layer(self) end end
BasicLinear.cloned = cloned

-- For a model: whether the tokens {batch, seq, features} outside the layer, where it is split, are split as well.
local function set_sequence_parallel(self, on)
    if not self.split then return end
    self.split.sequence, self.split.dim = on, on and 2 or 1
    split_layer(self)
end
BasicLinear.set_sequence_parallel = set_sequence_parallel

function BasicLinear:op_forward(_, x) return multiply(self, x) end

function BasicLinear:lower(g, x) return lower_product(self, g, x, false) end

function BasicLinear:describe()
    return ("in_features=%d, out_features=%d%s"):format(self.in_features, self.out_features, describe_split(self))
end

local Bias = BasicOperation:extend("Bias")
Bias.pure, Bias.takes = true, 2

local BIAS = declared.join(declared.PLACE, {
    tensor_parallel = { "boolean", false, help = "each process of the group holds its part of the bias" },
    tensor_parallel_group = collective.PARALLEL.tensor_parallel_group,
})

--- Adds a vector to the last dimension; the result has the dtype that both promote to. With tensor_parallel each
--- process of the group holds its part of the vector.
function Bias:init(size, opts)
    opts = declared.check("te.Bias", opts, BIAS)
    if opts.tensor_parallel_group and not opts.tensor_parallel then
        fail("te.Bias: option tensor_parallel_group: needs tensor_parallel")
    end
    self.size = options.argument("te.Bias", "size", size, { "size" })
    local group = opts.tensor_parallel
        and collective.group("te.Bias", "tensor_parallel_group", opts.tensor_parallel_group)
    if group then size = select(2, collective.share("te.Bias", "size", size, group, true)) end
    self.bias = initializers.parameter({ size }, initializers.constant(0), opts)
    if group then whole.hold(self.bias, group, 1, { self.size }) end
end
options.declare(Bias.init, BIAS)

--- Raises unless the last size of x is that of the bias.
function Bias:check_input(x)
    local size = self.bias:size(1)
    if te.is_tensor(x) and (x:dim() == 0 or x:size(-1) ~= size) then
        fail("te.%s: the input has shape %s, its last size must be %d", self.__name, options.shape(x), size)
    end
end

function Bias:op_forward(_, x)
    self:check_input(x)
    return te.add(x, self.bias)
end

function Bias:lower(g, x)
    local bias, reason = g:along_row(self, "bias")
    if not bias then return nil, reason end
    return g:op("add", { x, bias })
end

function Bias:describe() return ("size=%d"):format(self.size) end

local Linear = BasicOperation:extend("Linear")
Linear.pure, Linear.takes = true, 3
Linear.product_keys = product_keys
Linear.lora = false
Linear.plan_fields = { "return_bias", "lora" }

--- y = x W^T + b over the last dimension; W has shape {out_features, in_features}. Recipes quantize its products.
function Linear:init(in_features, out_features, opts)
    opts = declared.check("te.Linear", opts, LINEAR, REFUSED)
    if opts.return_bias and not opts.bias then fail("te.Linear: option return_bias: there is no bias to return") end
    init_weight(self, in_features, out_features, opts)
    if opts.return_bias and self.split then
        fail("te.Linear: option return_bias: not together with tensor_parallel_mode")
    end
    if opts.bias then
        local size = self.split and self.split.mode == "column" and self.local_out_features or out_features
        self.bias = initializers.parameter({ size }, initializers.constant(0), opts)
    end
    self.return_bias = opts.return_bias
    self.num_extra_outputs = opts.return_bias and 1 or 0
    if self.split then split_layer(self) end
end
options.declare(Linear.init, LINEAR)

Linear.cloned, Linear.set_sequence_parallel = cloned, set_sequence_parallel

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
    return ("in_features=%d, out_features=%d, bias=%s%s"):format(self.in_features, self.out_features,
        tostring(self.bias ~= nil), describe_split(self))
end

return { Linear = Linear, BasicLinear = BasicLinear, Bias = Bias }
