--- Steps that were counted and, since `clip` did not allow them, not made: the device leaves them out of the numbers
--- that it computes with, and the host hears of them later, or never. `optimizer.counted` has the batches of the last
--- step that was counted so. All that are outstanding are steps of those parameters: before it is others' turn, and
--- before a step that the host computes the numbers of, the counts are settled.

local counted = {}

--- How many are outstanding. Waits for the device.
---@param self te.Optimizer
---@return integer
function counted.late(self) return self.counted and self.unmade and self.unmade:item() - self.unmade_known or 0 end

--- Takes outstanding ones out of the counts. Returns whether there were any.
---@param self te.Optimizer
---@return boolean
function counted.settle(self)
    local late = counted.late(self)
    for _, batch in ipairs(late > 0 and self.counted or {}) do
        for _, state in ipairs(batch.states) do state.step = state.step - late end
    end
    self.unmade_known, self.counted = self.unmade_known + late, nil
    if late > 0 then self.memory = nil end
    return late > 0
end

-- Whether a step of these batches is one of the parameters that were counted last.
local function are_those(self, batches)
    if #batches ~= #self.counted then return false end
    for i, batch in ipairs(batches) do
        local states, before = batch.states, self.counted[i].states
        if #states ~= #before then return false end
        for k = 1, #states do
            if states[k] ~= before[k] then return false end
        end
    end
    return true
end

--- Before a step of these batches. Returns whether counts have changed.
---@param self te.Optimizer
---@param batches table[]
---@return boolean
function counted.before(self, batches)
    return self.counted ~= nil and not are_those(self, batches) and counted.settle(self)
end

return counted
