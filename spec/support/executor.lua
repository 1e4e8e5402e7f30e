--- A recorder for the method lower of operations (see te.operation) that runs what it is told at
--- once: values are tensors.

local te = require "te"

local Executor = {}
Executor.__index = Executor

-- The inputs and attributes as arguments of the function: false is absent, a number stands for itself.
local function arguments(inputs, attributes)
    local args, n = {}, #inputs
    for i = 1, n do args[i] = inputs[i] or nil end
    args[n + 1] = attributes
    return args, n + 1
end

function Executor:op(op, inputs, attributes)
    self.calls[#self.calls + 1] = tostring(op)
    for i = 1, #inputs do
        local input = inputs[i]
        if input and not te.is_tensor(input) and type(input) ~= "number" then
            error(("input %d of %s is a %s"):format(i, tostring(op), type(input)))
        end
    end
    local args, n = arguments(inputs, attributes)
    return (type(op) == "string" and te._core.operation(op) or op)(unpack(args, 1, n))
end

function Executor:param(module, name)
    for known, parameter in module:named_parameters() do
        if known == name then return parameter end
    end
    return false
end

Executor.along_row = Executor.param

function Executor:cache_quantized() end -- a saving that these comparisons do without

function Executor:product() end -- nothing is quantized here

function Executor:chooses_by_rows() return false end

function Executor:grouped_linear(module, x, sizes, ways)
    self.calls[#self.calls + 1] = "grouped_linear"
    return ways.products(module, x, ways.integers(module, sizes, x.device))
end

function Executor:add_scaled_biases(module, y, scales, sizes, ways)
    self.calls[#self.calls + 1] = "addcmul_rows"
    return ways.add_scaled_biases(module, y, scales, sizes)
end

function Executor:seq_lens() return self.lens end

function Executor:rows_kept(draw, x) return draw(x, self.lens or nil) end

--- A recorder; `calls` lists the operations that ran.
---@param seq_lens userdata|nil
return function(seq_lens)
    return setmetatable({ lens = seq_lens or false, calls = {} }, Executor)
end
