--- Parameters that a function takes as a list of tensors, or as the module that has them.

local te = require "te"
local fail = require "te.fail"
local Module = require "te.module"
local options = require "te.options"

local function look_at(params)
    local dim = te._core.tensor_methods.dim
    for i = 1, #params do dim(params[i]) end
end

--- The list, checked.
---@param who string  for messages
---@param params table
---@return te.Tensor[]
return function(who, params)
    if Module.is(params, Module) then params = params:parameters() end
    if type(params) ~= "table" or getmetatable(params) then
        fail("%s: params: expected a list of tensors or a module, got %s", who, te._core.describe(params))
    end
    options.list(who, "params", params)
    if pcall(look_at, params) then return params end
    for i, parameter in ipairs(params) do
        if not options.tensor(who, "params", parameter, i) then
            fail("%s: params[%d]: expected a tensor, got %s", who, i, te._core.describe(parameter))
        end
    end
    return params
end
