--- te.GroupedLinear: rows in contiguous groups, each with its own weight (mixture of experts).

local te = require "te"
local fail = require "te.fail"
local declared = require "te.ops.declared"
local options = require "te.options"
local mode = require "te.recipe.mode"
local initializers = require "te.initializers"
local BasicOperation = require("te.operation").BasicOperation

local GroupedLinear = BasicOperation:extend("GroupedLinear")
GroupedLinear.pure, GroupedLinear.takes = true, 4
GroupedLinear.module_type = "grouped_linear" -- of roles

local GROUPED = declared.join(declared.PLACE, {
    bias = declared.BIAS,
    scale_bias = { "boolean", false, help = "a second extra input {rows} scales the bias, row by row" },
    init_method = declared.INIT,
    name = declared.NAME,
})

function GroupedLinear:init(num_groups, in_features, out_features, opts)
    local who = "te.GroupedLinear"
    opts = declared.check(who, opts, GROUPED, { "accumulate_into_main_grad", "delay_wgrad_compute",
        "rng_state_tracker_function" })
    self.num_groups = options.argument(who, "num_groups", num_groups, { "size" })
    self.in_features = options.argument(who, "in_features", in_features, { "size" })
    self.out_features = options.argument(who, "out_features", out_features, { "size" })
    if opts.scale_bias and not opts.bias then fail("%s: option scale_bias: there is no bias to scale", who) end
    self.scale_bias, self.name = opts.scale_bias, opts.name
    self.num_extra_inputs = opts.scale_bias and 2 or 1
    self.weight, self.bias = {}, opts.bias and {} or nil
    for i = 1, num_groups do
        self.weight[i] = mode.weight(self, "weight." .. i, initializers.parameter({ out_features, in_features },
            opts.init_method or initializers.default, opts))
        if opts.bias then self.bias[i] = initializers.parameter({ out_features }, initializers.constant(0), opts) end
    end
end
options.declare(GroupedLinear.init, GROUPED)

local INTEGERS = { int32 = true, int64 = true, uint8 = true }

-- Those in a tensor are read by the host, since it starts a product for each group; from a device that is a wait.
local function list_of_sizes(self, split_sizes)
    local sizes = split_sizes
    if te.is_tensor(split_sizes) then
        if not INTEGERS[split_sizes.dtype] then
            fail("te.GroupedLinear: split_sizes: expected a tensor of integers {%d}, got %s", self.num_groups,
                te._core.describe(split_sizes))
        end
        local read
        read, sizes = pcall(split_sizes.totable, split_sizes)
        if not read then fail("te.GroupedLinear: split_sizes are read by the host: %s", tostring(sizes)) end
    end
    if type(sizes) ~= "table" or getmetatable(sizes) then
        fail("te.GroupedLinear: split_sizes: expected a tensor or a list of %d sizes, got %s", self.num_groups,
            type(sizes))
    end
    return sizes
end

-- The sizes as a list of numbers that fit the rows of x.
local function read_sizes(self, x, split_sizes)
    if not te.is_tensor(x) or x:dim() == 0 then
        fail("te.GroupedLinear: x: expected a tensor of rows, got %s", te.is_tensor(x) and "a number" or type(x))
    end
    local sizes = list_of_sizes(self, split_sizes)
    local total, least = 0, 0
    for i, size in ipairs(sizes) do
        options.argument("te.GroupedLinear", ("split_sizes[%d]"):format(i), size, { "integer" })
    end
    for _, size in ipairs(sizes) do total, least = total + size, math.min(least, size) end
    if #sizes ~= self.num_groups or total ~= x:size(1) or least < 0 then
        fail("te.GroupedLinear: split_sizes {%s} for %d groups and %d rows", table.concat(sizes, ", "),
            self.num_groups, x:size(1))
    end
    return sizes
end

function GroupedLinear:product_keys()
    local keys = {}
    for i = 1, self.num_groups do keys[i] = "weight." .. i end
    return keys
end

-- Rows of one group times its weight.
local function multiply(self, i, rows, bias)
    if mode.on then return mode.linear(self, "weight." .. i, rows, self.weight[i], bias) end
    return te.linear(rows, self.weight[i], bias)
end

-- The products of all groups; their biases are added unless they are scaled.
local function products(self, x, split_sizes)
    local results, first = {}, 1
    for i, size in ipairs(read_sizes(self, x, split_sizes)) do
        results[i] = multiply(self, i, x:narrow(1, first, size),
            not self.scale_bias and self.bias and self.bias[i] or nil)
        first = first + size
    end
    return te.cat(results, 1)
end

local function check_scales(x, scales)
    local lead = x.shape
    lead[#lead] = nil
    local fits = te.is_tensor(scales) and #scales.shape == #lead
    for i, size in ipairs(lead) do fits = fits and scales.shape[i] == size end
    if not fits then
        fail("te.GroupedLinear: scales: expected a tensor of one number for every row, %s, got %s", options.shape(lead),
            te.is_tensor(scales) and options.shape(scales) or type(scales))
    end
end

-- y with every row's bias added, that of its group, times the row's scale.
local function add_scaled_biases(self, y, scales, split_sizes)
    check_scales(y, scales)
    local results, first = {}, 1
    for i, size in ipairs(read_sizes(self, y, split_sizes)) do
        results[i] = te.addcmul(y:narrow(1, first, size), scales:narrow(1, first, size):unsqueeze(-1), self.bias[i])
        first = first + size
    end
    return te.cat(results, 1)
end

--- split_sizes, the extra input, holds the number of rows of every group; zeros are fine. scales: see scale_bias.
function GroupedLinear:op_forward(_, x, split_sizes, scales)
    local y = products(self, x, split_sizes)
    return self.scale_bias and add_scaled_biases(self, y, scales, split_sizes) or y
end

-- What the engine reads: a tensor of integers on the device.
local function integers(self, split_sizes, device)
    local is_integer = te.is_tensor(split_sizes) and (split_sizes.dtype == "int64" or split_sizes.dtype == "int32")
    if not is_integer then split_sizes = te.tensor(list_of_sizes(self, split_sizes), { dtype = "int64" }) end
    return split_sizes:to(device)
end

local WAYS = { integers = integers, products = products, add_scaled_biases = add_scaled_biases }

function GroupedLinear:lower(g, x, split_sizes, scales)
    if g:chooses_by_rows() then return nil, "te.autocast chooses by the rows of each group whether it is quantized" end
    local y = g:grouped_linear(self, x, split_sizes, WAYS)
    return scales and g:add_scaled_biases(self, y, scales, split_sizes, WAYS) or y
end

function GroupedLinear:describe()
    return ("num_groups=%d, in_features=%d, out_features=%d, bias=%s%s"):format(self.num_groups, self.in_features,
        self.out_features, tostring(self.bias ~= nil), self.scale_bias and ", scale_bias" or "")
end

return { GroupedLinear = GroupedLinear }
