--- te.GroupedLinear: rows in contiguous groups, each with a weight of its own (mixture of experts).

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local initializers = require "te.initializers"
local BasicOperation = require("te.operation").BasicOperation

local GroupedLinear = BasicOperation:extend("GroupedLinear")
GroupedLinear.pure = true
GroupedLinear.num_extra_inputs = 1

local GROUPED = {
    bias = { "boolean", true },
    init_method = { "callable" },
    params_dtype = { "string", "float32" },
    device = { "string" },
}

function GroupedLinear:init(num_groups, in_features, out_features, opts)
    local who = "te.GroupedLinear"
    opts = options.check(who, opts, GROUPED)
    self.num_groups = options.argument(who, "num_groups", num_groups, { "size" })
    self.in_features = options.argument(who, "in_features", in_features, { "size" })
    self.out_features = options.argument(who, "out_features", out_features, { "size" })
    self.weight, self.bias = {}, opts.bias and {} or nil
    for i = 1, num_groups do
        self.weight[i] = initializers.parameter({ out_features, in_features },
            opts.init_method or initializers.default, opts)
        if opts.bias then self.bias[i] = initializers.parameter({ out_features }, initializers.constant(0), opts) end
    end
end

--- split_sizes, the extra input, holds the number of rows of every group; zeros are fine.
function GroupedLinear:op_forward(_, x, split_sizes)
    local sizes = te.is_tensor(split_sizes) and split_sizes:totable() or split_sizes
    local total = 0
    for _, size in ipairs(sizes) do total = total + size end
    if #sizes ~= self.num_groups or total ~= x:size(1) then
        fail("te.GroupedLinear: split_sizes {%s} for %d groups and %d rows", table.concat(sizes, ", "),
            self.num_groups, x:size(1))
    end
    local results, first = {}, 1
    for i, size in ipairs(sizes) do
        results[i] = te.linear(x:narrow(1, first, size), self.weight[i], self.bias and self.bias[i])
        first = first + size
    end
    return te.cat(results, 1)
end

function GroupedLinear:describe()
    return ("num_groups=%d, in_features=%d, out_features=%d, bias=%s"):format(self.num_groups, self.in_features,
        self.out_features, tostring(self.bias ~= nil))
end

return { GroupedLinear = GroupedLinear }
