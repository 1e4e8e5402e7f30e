--- A step of an optimizer that the host does not take part in: whether it changes anything, and the gradients' factor,
--- are the device's (clip); so a graph can make it.

local te = require "te"
local fail = require "te.fail"
local graph = require "te.graph"
local by_step = require "te.optim.batches"
local counted = require "te.optim.counted"
local groups = require "te.optim.groups"
local core = te._core

-- Coefficients of the step that `batches` make next, to where the device reads them.
local function send_step(self, batches, numbers, list, grad_scale, lr)
    groups.check(self) -- a graph's launches do not come through step
    for i = 1, #batches do
        local batch = batches[i]
        self.numbers(list, i, batch.group, by_step.rate(batch.group, lr), batch.states[1].step + 1, grad_scale)
    end
    self.send(numbers, list, self.unmade_known)
end

-- Counts a step that a graph makes, before those that it makes after it are sent.
local function count_launched(self, batches)
    for i = 1, #batches do
        local batch = batches[i]
        batch.step = batch.states[1].step + 1
        for k = 1, #batch.states do
            local state = batch.states[k]
            state.step, self.state[batch.params[k]] = batch.step, state -- a load that had none has taken it away
        end
    end
    self.counted = batches
end

-- The batches of the step; nothing is made anew while a graph is recorded.
local function collect(self, who, recording)
    local batches = {}
    for _, group in ipairs(self.groups) do
        for _, parameter in ipairs(recording and group.params or {}) do
            if core.gradient(parameter) and not self.state[parameter] then
                fail(who .. ": a graph needs the optimizer's states: make a step before")
            end
        end
        by_step.add(self, group, batches)
    end
    return batches
end

-- Which memory the parameters lie in.
local function memory_of(batches)
    local ids = {}
    for _, batch in ipairs(batches) do
        for _, parameter in ipairs(batch.params) do ids[#ids + 1] = (parameter:storage_id()) end
    end
    return ids
end

local function are_there(batches, ids)
    local n = 0
    for b = 1, #batches do
        local params = batches[b].params
        for i = 1, #params do
            n = n + 1
            if params[i]:storage_id() ~= ids[n] then return false end
        end
    end
    return true
end

-- Every launch of the graph sends its step and counts it. Masters see what others wrote to parameters in between.
local function before_launches(self, batches, send)
    graph.before_launch(function()
        send()
        count_launched(self, batches)
    end)
    for _, batch in ipairs(batches) do
        if batch.masters then
            graph.before_launch(function() core.catch_up_masters(batch.masters, batch.params) end)
            graph.after_launch(function() core.follow_masters(batch.masters, batch.params) end)
        end
    end
end

---@param self te.Optimizer
---@param clip table|nil     what te.optim.grad_clip gives
---@param grad_scale number
---@param lr number|nil      instead of the groups' own
return function(self, clip, grad_scale, lr)
    local who, recording = "te.optim." .. self.name .. ":step", graph.before_launch()
    if not self.update_on then fail(who .. ": steps in a graph or with `clip` are AdamW's alone") end
    if recording and lr then fail(who .. ": lr: a graph takes the groups' own; see set_lr") end
    if self.counted and not clip then counted.settle(self) end
    local batches, described, list = collect(self, who, recording), {}, {}
    if counted.before(self, batches) then batches = collect(self, who, recording) end
    if #batches == 0 then return end
    local device = batches[1].params[1].device
    if clip and not self.unmade then
        if recording then fail(who .. ": a graph with `clip` needs a step with it before") end
        self.unmade = te.zeros({ 1 }, { dtype = "float64", device = device })
    end
    for i, batch in ipairs(batches) do
        described[i] = self.describe(batch.group, batch)
        if recording then described[i].states = nil end -- launches count
    end
    local numbers = core.graph_numbers(device, #batches, clip and 16 or 8)
    local order, ids = #self.order, recording and memory_of(batches)
    local function send()
        if recording and not are_there(batches, ids) then
            fail(who .. ": parameters were moved or converted after the recording")
        end
        if recording and self.counted then
            if clip then counted.before(self, batches) else counted.settle(self) end
        end
        send_step(self, batches, numbers, list, grad_scale, lr)
        if #self.order ~= order then fail(who .. ": parameters were added or taken away after the recording") end
    end
    if recording then before_launches(self, batches, send) else send() end
    self.update_on(described, numbers, clip, clip and self.unmade)
    if not recording then self.counted = batches end
    for _, batch in ipairs(batches) do
        for k = 1, #batch.grads do batch.grads[k]:release() end
        batch.grads = nil
    end
end
