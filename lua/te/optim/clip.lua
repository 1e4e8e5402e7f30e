--- Gradient norms. One pass over all gradients gives the norm and, when it is not finite, which tensor broke it.
-- Squares of what processes hold parts of (te.distributed.parts), or stages have (te.distributed.stages), are added up
-- between them: they find the same norm. Gradients of sharded parameters are those of their slices, which are parts.

local te = require "te"
local fail = require "te.fail"
local Module = require "te.module"
local options = require "te.options"
local parameter_list = require "te.parameter_list"
local parts = require "te.distributed.parts"
local shards = require "te.distributed.shards"
local stages = require "te.distributed.stages"

local clip = {}

-- Gradients; the parameters that they belong to; by gradient's number the group that has parts of it, if one has; a
-- list of these groups; and the group of stages, if there are any.
local function gradients(who, params)
    local list, owners, held, groups, parameters = {}, {}, {}, {}, parameter_list(who, params)
    for _, parameter in ipairs(parameters) do
        local shard = shards.of[parameter]
        local group = shard and shard.summed_over or parts[parameter]
        local grad = te._core.gradient(shard and shard:holder(who) or parameter)
        if group and not groups[group] then
            groups[#groups + 1], groups[group] = group, 0
        end
        if grad then
            list[#list + 1] = grad
            owners[#list], held[#list] = parameter, group
        end
    end
    return list, owners, held, groups, stages.group_of(parameters)
end

local function sum_over(group, value)
    return group:all_reduce(te.tensor({ value }, { dtype = "float64", device = "cpu" })):item()
end

-- The sum of all squares where some belong to parts, or to stages: what several of these have counts once.
local function sum_of_parts(squares, owners, held, groups, staged)
    local common, own = 0, 0
    for i, square in ipairs(squares) do
        local group, stage = held[i], stages.held[owners[i]]
        if stage and stage.copy then square = 0 end
        if group then
            groups[group] = groups[group] + square
        elseif stage then
            own = own + square
        else
            common = common + square
        end
    end
    for _, group in ipairs(groups) do own = own + sum_over(group, groups[group]) end
    return common + (staged and sum_over(staged, own) or own)
end

--- The 2-norm of all gradients together. Where processes hold parts of parameters all of them call it, and the parts of
--- the others count.
---@param params table  a list of parameters, or a module
---@return number norm  NaN or infinite when a gradient is
---@return table|nil broken  then: the list of parameters whose gradients are not finite in this process
function clip.grad_norm(params)
    local grads, owners, held, groups, staged = gradients("te.optim.grad_norm", params)
    local divided = #groups > 0 or staged
    if #grads == 0 and not divided then return 0 end
    local squares, total = te._core.sum_squares(grads)
    if divided then total = sum_of_parts(squares, owners, held, groups, staged) end
    for i = 1, #grads do grads[i]:release() end -- these handles, not the gradients
    if total - total == 0 then return math.sqrt(total) end
    local broken = {}
    for i, square in ipairs(squares) do
        if square - square ~= 0 then broken[#broken + 1] = owners[i] end
    end
    return math.sqrt(total), broken
end

local CLIP = {
    max = { "number", 0, min = 0, help = "largest norm; 0: no limit" },
    scale = { "number", 1, help = "1 / the number of batches that the gradients sum over" },
    loss = { "any", help = "a tensor of one element, which must be finite as well" },
}

--- The norm of all gradients together and the factor to multiply them by, on the device: a float64 tensor {3} of the
--- norm times `scale`; the factor, `scale` or less so that the norm is at most `max`; and 1 if the norm, and the loss
--- if given, are finite, else 0. For `opt:step{ clip = … }`, which changes nothing if the last is 0.
---@param params table  a list of parameters, or a module
---@param opts table
function clip.grad_clip(params, opts)
    local o = options.check("te.optim.grad_clip", opts, CLIP)
    local grads, _, _, groups, staged = gradients("te.optim.grad_clip", params)
    if #groups > 0 or staged then
        fail("te.optim.grad_clip: params: some are split between processes; te.optim.grad_norm adds what all have")
    end
    if #grads == 0 then -- the norm of nothing is 0
        local first = o.loss or (Module.is(params, Module) and params:parameters() or params)[1]
        grads[1] = te.zeros({ 0 }, { device = first and first.device })
    end
    local result = te._core.grad_clip(grads, o.loss, o.scale, o.max)
    for i = 1, #grads do grads[i]:release() end
    return result
end
options.declare(clip.grad_clip, CLIP)

--- Scales the gradients so that their norm is at most `max`; leaves them alone when it is not finite. Returns the norm
--- before. `opt:step{ grad_scale = … }` does the same without a pass of its own, and leaves the gradients as they are;
--- the results differ in the last bits: AdamW multiplies its coefficients by the factor in float64, here every
--- gradient is rounded once more.
---@param params table  a list of parameters, or a module
---@return number
function clip.clip_grad_norm(params, max, ...)
    options.last("te.optim.clip_grad_norm", 2, ...)
    if type(max) ~= "number" or not (max > 0) then
        fail("te.optim.clip_grad_norm: max: expected a number above 0, got %s", tostring(max))
    end
    local grads = gradients("te.optim.clip_grad_norm", params)
    local norm, broken = clip.grad_norm(params)
    if norm > max and not broken then
        te.no_grad(function()
            for _, grad in ipairs(grads) do grad:mul_(max / norm) end
        end)
    end
    return norm
end

--- Limits every element of the gradients to [-limit, limit]; NaN stays.
---@param params table  a list of parameters, or a module
---@param limit number
function clip.clip_grad_value(params, limit, ...)
    options.last("te.optim.clip_grad_value", 2, ...)
    if type(limit) ~= "number" or not (limit > 0) then
        fail("te.optim.clip_grad_value: limit: expected a number above 0, got %s", options.shown(limit))
    end
    local grads = gradients("te.optim.clip_grad_value", params)
    te.no_grad(function()
        for _, grad in ipairs(grads) do grad:clamp_(-limit, limit) end
    end)
end

return clip
