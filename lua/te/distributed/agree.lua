--- What processes find out about each other's tensors before these go together: whether they are the same ones.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local agree = {}

--- A number from 0 to 2^29 - 1 that says what a tensor is, by a name and unless it is a part by its dtype and shape.
---@param name string
---@param tensor te.Tensor
---@param is_part any
---@return integer
function agree.number_of(name, tensor, is_part)
    local text = is_part and name or ("%s %s %s"):format(name, tensor.dtype, options.shape(tensor))
    local number = 0
    for i = 1, #text do number = (number * 16777619 + text:byte(i)) % 2 ^ 29 end
    return number
end

--- The largest of every process's flags, which are 0 to 3, by tensor. What goes together would be mixed up where lists
--- of the same length are of other tensors; numbers say what these are.
---@param who string
---@param group table
---@param flags integer[]
---@param numbers integer[]
---@param describe fun(i: integer): string
---@return integer[]
function agree.largest(who, group, flags, numbers, describe)
    local values, n = {}, #flags
    for i = 1, n do values[i], values[n + i] = 4 * numbers[i] + flags[i], -numbers[i] end
    local all, largest = group:all_reduce_(te.tensor(values, { dtype = "int32", device = "cpu" }), "max"):totable(), {}
    for i = 1, n do
        largest[i] = all[i] % 4
        if all[i] - largest[i] ~= -4 * all[n + i] then
            fail("%s: %s here, and another tensor in another process", who, describe(i))
        end
    end
    return largest
end

local numbers = setmetatable({}, { __mode = "k" }) -- by parameter: { its dtype, number }

local function number_of_parameter(parameter)
    local known, dtype = numbers[parameter], parameter.dtype
    if not known or known[1] ~= dtype then
        known = { dtype, agree.number_of("", parameter) }
        numbers[parameter] = known
    end
    return known[2]
end

--- The largest flags of parameters.
---@param who string
---@param group table
---@param list te.Tensor[]
---@param flags integer[]
---@param parts table|nil  by parameter: whether others in the group may have another part of it, of another shape
---@return integer[]
function agree.on_parameters(who, group, list, flags, parts)
    local own = {}
    for i, parameter in ipairs(list) do
        local is_part = parts and parts[parameter]
        own[i] = is_part and agree.number_of("a part", parameter, true) or number_of_parameter(parameter)
    end
    return agree.largest(who, group, flags, own, function(i)
        return ("parameter %d is %s %s"):format(i, list[i].dtype, options.shape(list[i]))
    end)
end

return agree
