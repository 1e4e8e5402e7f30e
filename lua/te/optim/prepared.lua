--- The next step of an optimizer, prepared while one is made. It is taken as long as nothing is other than it was:
--- groups, parameters, states, step counts, and which parameters have a gradient. So a step over small parameters makes
--- no tables.

local prepared = {}

--- What must not have changed when a prepared step is made: the list of groups, and for each its parameters, each with
--- its state (false: none yet) and what the state holds.
---@param optimizer te.Optimizer
---@param batches table[]  of the step that was made; their gradients are let go
---@return table memory
function prepared.remember(optimizer, batches)
    local memory, idle, active = { groups = {}, list = optimizer.groups, batches = batches, numbers = {} }, {}, {}
    for _, batch in ipairs(batches) do
        for _, parameter in ipairs(batch.params) do active[parameter] = true end
    end
    for g, group in ipairs(optimizer.groups) do
        local entry = { group = group, list = group.params, slots = group.slots, params = {}, states = {},
            held = {}, steps = {} }
        for i, parameter in ipairs(group.params) do
            local state = optimizer.state[parameter]
            entry.params[i], entry.states[i] = parameter, state or false
            for _, slot in ipairs(group.slots) do table.insert(entry.held, state and state[slot] or false) end
            table.insert(entry.held, state and state.master or false)
            entry.steps[i] = state and state.step or false
            if not active[parameter] then idle[#idle + 1] = parameter end
        end
        memory.groups[g] = entry
    end
    for _, batch in ipairs(batches) do batch.grads = nil end
    memory.prepared = optimizer.prepare(batches, idle)
    return memory
end

local function is_same_state(entry, i, state)
    if state ~= entry.states[i] or state.step ~= entry.steps[i] then return false end
    local slots, held = entry.slots, entry.held
    local n = #slots
    local at = (i - 1) * (n + 1)
    for k = 1, n do
        if not rawequal(state[slots[k]], held[at + k]) then return false end
    end
    return rawequal(state.master or false, held[at + n + 1])
end

--- Whether the optimizer is as it was.
---@param optimizer te.Optimizer
---@param memory table
---@return boolean
function prepared.holds(optimizer, memory)
    local groups, states = optimizer.groups, optimizer.state
    if groups ~= memory.list or #groups ~= #memory.groups then return false end
    for g = 1, #groups do
        local group, entry = groups[g], memory.groups[g]
        local params = group.params
        if group ~= entry.group or params ~= entry.list or group.slots ~= entry.slots or #params ~= #entry.params then
            return false
        end
        for i = 1, #params do
            local parameter = params[i]
            if not rawequal(parameter, entry.params[i]) then return false end
            local state = states[parameter] or false
            if not state and entry.states[i] then return false end
            if state and not is_same_state(entry, i, state) then return false end
        end
    end
    return true
end

--- After a step that the engine has counted.
---@param memory table
function prepared.count(memory)
    for g = 1, #memory.groups do
        local entry = memory.groups[g]
        local states, steps = entry.states, entry.steps
        for i = 1, #states do steps[i] = states[i] and states[i].step end
    end
end

return prepared
