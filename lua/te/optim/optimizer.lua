--- What AdamW and SGD share: parameter groups, state per parameter, saving and loading.
--
-- params is a list of tensors, a module, or a list of groups { params = …, lr = …, weight_decay = … } whose options
-- replace the optimizer's. A group's rate is its lr, or what step is given, times its lr_scale. One step updates every
-- group in one pass of the engine; parameters without a gradient are left alone, and each counts its own steps.
--
-- A class may prepare the next step from the one that was made (prepare, again and numbers, see AdamW);
-- prepared.lua says when that is taken.
--
-- master_weights keeps float32 copies of parameters in smaller dtypes: the copies are updated, the parameters receive
-- their rounding. What others write to a parameter between two steps its copy takes over (core/optim.h). Parameters
-- that are stored quantized always have one, in master_dtype: bfloat16 takes half the memory, and loses steps smaller
-- than its rounding.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local graph = require "te.graph"
local by_step = require "te.optim.batches"
local counted = require "te.optim.counted"
local device_step = require "te.optim.device_step"
local groups = require "te.optim.groups"
local prepared = require "te.optim.prepared"
local states = require "te.optim.states"
local core = te._core

local Optimizer = {}
Optimizer.__index = Optimizer

--- What is wrong with an option that must be finite: its declaration's `wrong`.
function Optimizer.finite(name)
    return function(value)
        if math.abs(value) == math.huge then return ("%s: expected a finite number, got %g"):format(name, value) end
    end
end

-- Options of a group of any optimizer.
local SHARED = {
    lr = { "number", 1e-3, min = 0, wrong = Optimizer.finite "lr", help = "learning rate" },
    lr_scale = { "number", 1, min = 0, wrong = Optimizer.finite "lr_scale",
        help = "factor of lr, whether the group's, set_lr's or that of step{ lr = … }" },
    master_weights = { "boolean", false,
        help = "16-bit parameters get the rounded values of copies, which are updated" },
    master_dtype = { "string", "float32", choices = { "float32", "bfloat16" },
        help = "dtype of the copies, which quantized parameters always have" },
}

-- Options of other optimizers, here or in PyTorch.
local elsewhere = { learning_rate = true, amsgrad = true, maximize = true, foreach = true, fused = true }

local function text_of(self)
    local n = 0
    for _, group in ipairs(self.groups) do n = n + #group.params end
    return ("te.optim.%s of %d parameters in %d group%s, lr %g"):format(self.name, n, #self.groups,
        #self.groups == 1 and "" or "s", self.lr or 0)
end

--- Makes an optimizer class. An option of an optimizer, `lr`, is that of its first group; who sets it sets that of all.
--- The class may have check(who, group), which raises where options contradict each other, takes(who, group, params),
--- which does where parameters are not for it, and essential(group), the options without which a saved state has other
--- slots.
---@param name string
---@param declared table  options of a group, besides those of all optimizers
---@param slots function  names of the float32 tensors that a group keeps per parameter, zero at first
function Optimizer.define(name, declared, slots)
    for option, declaration in pairs(SHARED) do declared[option] = declaration end
    for option in pairs(declared) do elsewhere[option] = true end
    local class = { name = name, declared = declared, slots = slots, super = Optimizer, __tostring = text_of }
    function class.__index(self, key)
        local first = declared[key] and self.groups[1]
        if first then return first[key] end
        return class[key]
    end
    local fields = {} -- names of no option, and of none misspelt
    function class.__newindex(self, key, value)
        if declared[key] then return self:set_option(key, value) end
        if type(key) == "string" and not fields[key] then
            local near = options.nearest(key, options.names(declared))
            local alike = near and near:sub(1, 1) == key:sub(1, 1) and math.abs(#near - #key) <= 2
            if alike then fail("te.optim.%s: no option %s; did you mean %q?", name, key, near) end
            if elsewhere[key] then fail("te.optim.%s: no option %s", name, key) end
            fields[key] = true
        end
        rawset(self, key, value)
    end
    options.declare(class, declared)
    return setmetatable(class, {
        __index = Optimizer,
        ---@param params table  a list of tensors, a module, or a list of groups { params = …, options of the group … }
        ---@param opts table|nil  of all groups
        ---@return te.Optimizer
        __call = function(_, params, opts, ...)
            options.last("te.optim." .. name, 2, ...)
            return Optimizer.new(class, params, opts)
        end,
        __tostring = function() return "class te.optim." .. name end,
    })
end

-- Raises where there is no optimizer, or more than the `takes` arguments of the method.
local function method(self, name, takes, ...)
    if type(self) ~= "table" or not self.order then options.method("Optimizer:" .. name, self, Optimizer) end
    if select("#", ...) > 0 then -- a step takes microseconds
        options.last(("te.optim.%s:%s"):format(self.name, name), takes, ...)
    end
end

function Optimizer.new(class, params, opts)
    local who = "te.optim." .. class.name
    local self = setmetatable({ groups = {}, state = {}, order = {}, unmade_known = 0,
        known = setmetatable({}, { __mode = "k" }) }, class)
    self.defaults = options.check(who, opts, class.declared)
    local grouped = type(params) == "table" and not getmetatable(params) and type(params[1]) == "table"
        and not getmetatable(params[1])
    if grouped then options.list(who, "params", params) end
    local seen = {}
    for g, group in ipairs(grouped and params or { { params = params } }) do
        if type(group) ~= "table" or getmetatable(group) then
            fail("%s: params: group %d: expected a table { params = … }, got %s", who, g, groups.described(group))
        end
        groups.add(self, who, group, opts or {}, seen)
    end
    return self
end

--- Adds a group { params = …, options … }, behind those that there are, as for layers that are trained from some step
--- on. Options that it lacks are those that the optimizer was made with, and lr that of the first group.
---@param group table
function Optimizer:add_group(group, ...)
    method(self, "add_group", 1, ...)
    local who, seen, defaults = "te.optim." .. self.name .. ":add_group", {}, {}
    if type(group) ~= "table" or getmetatable(group) then
        fail("%s: group: expected a table { params = … }, got %s", who, groups.described(group))
    end
    groups.collect(self)
    for _, parameter in ipairs(self.order) do seen[parameter] = true end
    for name, value in pairs(self.defaults) do defaults[name] = value end
    defaults.lr = self.lr
    groups.add(self, who, group, defaults, seen)
    self.memory = nil
end

-- Whether the step that was prepared was made.
local function step_again(self, memory, grad_scale, lr)
    if not prepared.holds(self, memory) then return false end
    local batches, numbers = memory.batches, memory.numbers
    for b = 1, #batches do
        local batch = batches[b]
        self.numbers(numbers, b, batch.group, by_step.rate(batch.group, lr), batch.step + 1, grad_scale)
    end
    if not self.again(memory.prepared, numbers, batches) then return false end
    prepared.count(memory)
    return true
end

local function step_anew(self, grad_scale, lr)
    local batches, described = {}, {}
    for _, group in ipairs(self.groups) do by_step.add(self, group, batches) end
    for i, batch in ipairs(batches) do
        batch.lr, batch.grad_scale = by_step.rate(batch.group, lr), grad_scale
        described[i] = self.describe(batch.group, batch)
    end
    self.update(described)
    for i = 1, #batches do
        local batch = batches[i]
        for k = 1, #batch.states do
            batch.grads[k]:release() -- this handle; the collector would keep a whole model's gradients for a while
        end
    end
    return batches
end

--- How many steps were made of each parameter, in their order over all groups.
---@return integer[]
function Optimizer:step_counts(...)
    method(self, "step_counts", 0, ...)
    groups.collect(self)
    local late, of, counts = counted.late(self), {}, {}
    for _, batch in ipairs(late > 0 and self.counted or {}) do
        for _, state in ipairs(batch.states) do of[state] = late end
    end
    for i, parameter in ipairs(self.order) do
        local state = self.state[parameter]
        counts[i] = state and state.step - (of[state] or 0) or 0
    end
    return counts
end

--- Takes back the count of a step that `clip` did not allow: the last one, or the one before where that is known a
--- step later. Without it the device leaves such steps out of its counts as well, and state_dict asks it.
function Optimizer:take_back(...)
    method(self, "take_back", 0, ...)
    if not self.counted then return end
    for _, batch in ipairs(self.counted) do
        for _, state in ipairs(batch.states) do state.step = state.step - 1 end
    end
    self.unmade_known = self.unmade_known + 1
end

local STEP = {
    grad_scale = { "number", 1, help = "factor of every gradient: clips or averages without an extra pass" },
    clip = { "any", help = "te.optim.grad_clip's result, whose factor stays on the device; AdamW only" },
    lr = { "number", nil, min = 0, wrong = Optimizer.finite "lr",
        help = "in place of the groups' own; multiplied by their lr_scale" },
}

--- Updates the parameters from their gradients: all of them, or none when something fails.
---@param opts table|nil
function Optimizer:step(opts, ...)
    method(self, "step", 1, ...)
    local grad_scale, lr = 1, nil
    if opts ~= nil then
        opts = options.check("te.optim." .. self.name .. ":step", opts, STEP)
        grad_scale, lr = opts.grad_scale, opts.lr
    end
    groups.check(self)
    if opts and opts.clip or graph.before_launch() then
        return device_step(self, opts and opts.clip, grad_scale, lr)
    end
    if self.counted then counted.settle(self) end
    local memory = self.memory
    if memory and step_again(self, memory, grad_scale, lr) then return end
    self.memory = nil
    local batches = step_anew(self, grad_scale, lr)
    if not self.prepare then return end
    local made, result = pcall(prepared.remember, self, batches) -- the step is made, whatever happens here
    self.memory = made and result or nil
end
options.declare(Optimizer.step, STEP)

--- Takes the gradients away; a main_grad stays, as zeros.
function Optimizer:zero_grad(...)
    method(self, "zero_grad", 0, ...)
    groups.collect(self)
    for _, parameter in ipairs(self.order) do core.zero_gradient(parameter) end
end

--- Sets the learning rate of all groups, each of which multiplies it by its lr_scale; as `optimizer.lr = …` does.
function Optimizer:set_lr(lr, ...)
    method(self, "set_lr", 1, ...)
    local who = "te.optim." .. self.name .. ":set_lr"
    options.argument(who, "lr", lr, { "number", min = 0 })
    local wrong = Optimizer.finite "lr" (lr)
    if wrong then fail("%s: %s", who, wrong) end
    for _, group in ipairs(self.groups) do group.lr = lr end
end

--- Sets an option of all groups, as `optimizer.weight_decay = …` does. Whether it goes with the others the next step
--- says.
---@param name string
---@param value any
function Optimizer:set_option(name, value, ...)
    method(self, "set_option", 2, ...)
    local who, declaration = "te.optim." .. self.name, self.declared[name]
    if name == "lr" then return self:set_lr(value) end
    if not declaration then
        fail("%s:set_option: unknown option %s; known are %s", who, options.shown(name),
            table.concat(options.names(self.declared), ", "))
    end
    options.argument(who, "option " .. name, value, declaration)
    for _, group in ipairs(self.groups) do group[name] = groups.own(value) end
end

--- Has the copies of parameters (master_weights) take over what others wrote to these since the last step, as the next
--- step would.
function Optimizer:catch_up(...)
    method(self, "catch_up", 0, ...)
    groups.collect(self)
    for _, parameter in ipairs(self.order) do
        local master = self.state[parameter] and self.state[parameter].master
        if master and master.device == parameter.device then core.catch_up_masters({ master }, { parameter }) end
    end
end

--- { state = { [i] = { step =, … tensors … } }, groups = { { … options …, optimizer =, parameters = } } }, i counting
--- parameters over all groups; optimizer: its name, parameters: how many the group has.
--- The tensors are copies: steps that follow do not change them.
function Optimizer:state_dict(...)
    method(self, "state_dict", 0, ...)
    local saved = { state = {}, groups = {} }
    self:catch_up()
    local counts = self:step_counts()
    for i, parameter in ipairs(self.order) do
        local state = self.state[parameter]
        if state then
            local copy = {}
            for name, value in pairs(state) do copy[name] = te.is_tensor(value) and value:clone() or value end
            copy.step = counts[i]
            saved.state[i] = copy
        end
    end
    for i, group in ipairs(self.groups) do
        saved.groups[i] = { optimizer = self.name, parameters = #group.params }
        for name in pairs(self.declared) do saved.groups[i][name] = groups.own(group[name]) end
    end
    return saved
end

-- The options that were saved of a group, those that it does not know left out.
local function saved_options(self, who, group, saved)
    options.argument(who, "group", saved, { "table" })
    if saved.optimizer ~= nil and saved.optimizer ~= self.name then -- files of before do not say
        fail("%s: a state of te.optim.%s", who, tostring(saved.optimizer))
    elseif saved.parameters ~= nil and saved.parameters ~= #group.params then
        fail("%s: %s parameters for a group of %d", who, tostring(saved.parameters), #group.params)
    end
    local known, before = {}, {}
    for name in pairs(self.declared) do known[name], before[name] = saved[name], group[name] end
    return groups.options(self, who, known, before)
end

--- Takes over what state_dict returned; the parameters must be the same ones in the same order. Nothing is changed
--- unless everything fits.
function Optimizer:load_state_dict(saved) -- no more is looked at: te.load(path) gives three values
    method(self, "load_state_dict")
    local who = "te.optim." .. self.name .. ":load_state_dict"
    if type(saved) ~= "table" or type(saved.state) ~= "table" or type(saved.groups) ~= "table" then
        fail("%s: expected what state_dict returns, got %s", who, type(saved) ~= "table" and options.shown(saved)
            or ("a table whose state is %s and whose groups are %s"):format(type(saved.state), type(saved.groups)))
    elseif #saved.groups ~= #self.groups then
        fail("%s: %d groups for an optimizer of %d", who, #saved.groups, #self.groups)
    end
    groups.collect(self)
    local loaded, state, i = {}, {}, 0
    for g, group in ipairs(self.groups) do
        loaded[g] = saved_options(self, who, group, saved.groups[g])
        if self.takes then self.takes(("%s: group %d"):format(who, g), loaded[g], group.params) end
        for _, parameter in ipairs(group.params) do
            i = i + 1
            local given, name = saved.state[i], ("%s: parameter %d"):format(who, i)
            if given ~= nil then state[parameter] = states.loaded(self, name, loaded[g], parameter, given) end
        end
    end
    for key in pairs(saved.state) do
        if not self.order[key] then fail("%s: a state of parameter %s, of %d", who, options.shown(key), i) end
    end
    if self.unmade then self.unmade_known = self.unmade:item() end -- the counts are those of steps that were made
    self.counted = nil
    for g, group in ipairs(self.groups) do
        for name, value in pairs(loaded[g]) do group[name] = value end
    end
    states.replace(self, state)
end

return Optimizer
