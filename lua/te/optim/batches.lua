--- What a step of an optimizer updates, in batches: { group =, step = its number, fresh = whether no step has seen the
--- states, params =, grads =, states =, masters = nil or their copies, and a list for each slot of the group }.

local te = require "te"
local states = require "te.optim.states"
local core = te._core

local batches = {}

--- Adds to `list` the parameters of a group that have a gradient, in batches that the engine can take at once: alike in
--- their step count, in having a master copy and in what `complete` says. There is one batch unless somebody froze or
--- added parameters on the way.
---@param self te.Optimizer
---@param group table
---@param list table[]
function batches.add(self, group, list)
    local by_key = {}
    for _, parameter in ipairs(group.params) do
        local grad = core.gradient(parameter)
        if grad then
            local state, fresh = states.complete(self.state[parameter], group, parameter)
            self.state[parameter] = state
            local step = state.step + 1
            local key = (state.master and -step or step) + (fresh and 0.5 or 0)
            local batch = by_key[key]
            if not batch then
                batch = { group = group, step = step, fresh = fresh, states = {}, params = {}, grads = {},
                    masters = state.master and {} or nil }
                for _, slot in ipairs(group.slots) do batch[slot] = {} end
                by_key[key] = batch
                list[#list + 1] = batch
            end
            local n = #batch.params + 1
            batch.params[n], batch.grads[n], batch.states[n] = parameter, grad, state
            if state.master then batch.masters[n] = state.master end
            for _, slot in ipairs(group.slots) do batch[slot][n] = state[slot] end
        end
    end
end

--- A group's learning rate; `lr` in place of its own.
---@param group table
---@param lr number|nil
---@return number
function batches.rate(group, lr) return (lr or group.lr) * group.lr_scale end

return batches
