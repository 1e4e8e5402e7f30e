--- Where a module's tensors are and in which dtype: what Module:to does.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local tree = require "te.module_tree"
local core = te._core

local FLOATING = { float32 = true, bfloat16 = true, float16 = true, float64 = true } -- dtypes that have gradients

local placing = { floating = FLOATING }

--- The dtype or the device that `where` names, the other one nil. Raises where it names neither.
---@param who string  the method, for messages
---@param where string
---@return string|nil dtype
---@return string|nil device
function placing.check(who, where)
    options.argument(who, "where", where, { "string" })
    if FLOATING[where] then return where end
    if where:find("^cpu") or where:find("^cuda") then
        local problem = options.device_problem(where)
        if problem then fail("%s: where: %s", who, problem) end
        return nil, where
    end
    local hint = options.place_hint(where)
    local near = hint:match 'did you mean "(%w+)"'
    fail("%s: where: expected float32, bfloat16, float16, float64 or a device, got %q%s", who, where,
        near and (FLOATING[near] or near == "cuda") and hint or "")
end

--- What a table for Module:to may hold.
placing.OPTIONS = {
    dtype = { "string", wrong = function(name)
        if not FLOATING[name] then
            return ("dtype: expected float32, bfloat16, float16 or float64, got %q%s"):format(name,
                options.place_hint(name))
        end
    end },
    device = { "string", wrong = options.device_problem },
}

-- A tensor with the dtype or on the device, itself where it is so already. Parameters remain the objects that they are,
-- and keep their gradients, a main_grad in float32 as it is; one that is stored quantized keeps its bytes, a dtype says
-- what they stand for.
local function convert(tensor, kind, dtype, device)
    local stays = dtype and (kind == "constant" or not FLOATING[tensor.dtype])
    if stays or tensor.dtype == dtype or tensor.device == device then return tensor end
    local new, grad, main
    if core.is_quantized(tensor) then
        new = device and core.quantized_on(tensor, device) or core.quantized_as(tensor, dtype)
    else
        new = tensor:detach():to(dtype or device)
    end
    new.requires_grad, grad, main = tensor.requires_grad, tensor.grad, tensor.main_grad
    if kind ~= "parameter" then return new end
    if grad then new.grad = grad:to(dtype or device) end
    if main then new.main_grad = dtype and main.dtype == "float32" and main or main:to(dtype or device) end
    core.become(tensor, new)
    return tensor
end

--- Converts all tensors of a module to a dtype, or moves them to a device.
---@param self te.Module
---@param dtype string|nil
---@param device string|nil  one of both
function placing.move(self, dtype, device)
    local moved = {}
    if device == "cuda:0" then device = "cuda" end
    tree.walk(self, "", function(_, tensor, kind, holder, key)
        local new = moved[tensor] or convert(tensor, kind, dtype, device)
        moved[tensor], moved[new] = new, new
        holder[key] = new
    end)
end

require "te.uncompiled"(placing.move)

return placing
