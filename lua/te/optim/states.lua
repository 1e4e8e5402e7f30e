--- What an optimizer keeps per parameter: { step =, float32 tensors by the names of its slots, master = a copy in a
--- larger dtype }. How states come to be, are read from what was saved, and take the place of others.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local core = te._core

local states = {}

local function new_master(group, parameter)
    local dtype, master = group.master_dtype, nil
    if core.is_quantized(parameter) then
        master = require("te.recipe.parameters").master(parameter, dtype)
    elseif group.master_weights and parameter.dtype ~= dtype
        and (parameter.dtype == "bfloat16" or parameter.dtype == "float16") then
        master = parameter:detach():to(dtype)
    end
    if master then core.follow_masters({ master }, { parameter }) end
    return master
end

--- The state, or a new one, with everything that a step needs: dtypes change with te.Module's to, slots with a group's
--- options. And whether it has slots that no step has seen.
---@param state table|nil
---@param group table
---@param parameter te.Tensor
---@return table state
---@return boolean fresh
function states.complete(state, group, parameter)
    state = state or { step = 0 }
    local fresh = state.step == 0
    for _, slot in ipairs(group.slots) do
        if not state[slot] then
            state[slot], fresh = te.zeros(parameter.shape, { dtype = "float32", device = parameter.device }), true
        end
    end
    state.master = state.master or new_master(group, parameter)
    return state, fresh
end

--- The state that was saved of a parameter of a group, checked; `who` names the parameter, too. What the group has come
--- to ask for since is as before a first step: no slot, and a master with the parameter's values.
---@param optimizer te.Optimizer
---@param who string
---@param group table
---@param parameter te.Tensor
---@param saved table
---@return table state
function states.loaded(optimizer, who, group, parameter, saved)
    options.argument(who, "state", saved, { "table" })
    local state, required = states.complete(nil, group, parameter), { step = true }
    local least = options.check(who, optimizer.essential and optimizer.essential(group) or {}, optimizer.declared)
    for _, slot in ipairs(optimizer.slots(least)) do required[slot] = true end
    for name, value in pairs(state) do
        local given = saved[name]
        if given == nil and required[name] then
            fail("%s: %s is missing", who, name)
        elseif given == nil then
            state[name] = name == "master" and value or nil
        elseif name == "step" then
            state.step = options.argument(who, name, given, { "integer", min = 0 })
        elseif not te.is_tensor(given) then
            fail("%s: %s: expected a tensor, got %s", who, name, core.describe(given))
        elseif options.shape(given) ~= options.shape(value) then
            fail("%s: %s has shape %s, the parameter %s", who, name, options.shape(given), options.shape(parameter))
        else
            value:copy_(given)
        end
    end
    return state
end

-- Whether a tensor of a state can take the values of another one.
local function fits(own, value)
    return te.is_tensor(own) and te.is_tensor(value) and own.dtype == value.dtype and own.device == value.device
        and options.shape(own) == options.shape(value) and own:is_contiguous()
end

-- A graph that makes the optimizer's steps goes on with a state's table and tensors: they take over what was loaded.
local function overwrite(state, loaded)
    for name, value in pairs(loaded) do
        local able, same = pcall(fits, state[name], value) -- a released tensor raises
        if able and same then state[name]:copy_(value) else state[name] = value end
    end
    for name in pairs(state) do
        if loaded[name] == nil then state[name] = nil end
    end
end

-- Likewise where nothing was loaded: the next step is a first one.
local function reset(state)
    for name, value in pairs(state) do
        if name ~= "master" and te.is_tensor(value) then pcall(value.zero_, value) end
    end
    state.step = 0
end

--- Puts loaded states in place of an optimizer's.
---@param optimizer te.Optimizer
---@param loaded table  by parameter
function states.replace(optimizer, loaded)
    for parameter, state in pairs(optimizer.state) do
        if loaded[parameter] then
            overwrite(state, loaded[parameter])
            loaded[parameter] = state
        else
            reset(state)
        end
    end
    for _, state in pairs(loaded) do
        if state.master then core.forget_masters { state.master } end -- whether the parameter was loaded, too
    end
    optimizer.state = loaded
end

return states
