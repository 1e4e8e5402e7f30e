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
local is_module = require("te.module").is
local Module = require "te.module"
local graph = require "te.graph"
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
        help = "what lr is multiplied by, whether the group's, set_lr's or that of step{ lr = … }" },
    master_weights = { "boolean", false,
        help = "parameters in 16 bits get the rounding of copies, which are what is updated" },
    master_dtype = { "string", "float32", choices = { "float32", "bfloat16" },
        help = "of the copies, and of those that parameters stored quantized always have" },
}

local function text_of(self)
    local n = 0
    for _, group in ipairs(self.groups) do n = n + #group.params end
    return ("te.optim.%s of %d parameters in %d group%s, lr %g"):format(self.name, n, #self.groups,
        #self.groups == 1 and "" or "s", self.lr or 0)
end

--- Makes an optimizer class. An option of an optimizer, `lr`, is that of its first group; who sets it sets that of all.
--- The class may have check(who, group), which raises where options contradict each other.
---@param name string
---@param declared table  options of a group, besides those of all optimizers
---@param slots function  names of the float32 tensors that a group keeps per parameter, zero at first
function Optimizer.define(name, declared, slots)
    for option, declaration in pairs(SHARED) do declared[option] = declaration end
    local class = { name = name, declared = declared, slots = slots, super = Optimizer, __tostring = text_of }
    function class.__index(self, key)
        local first = declared[key] and self.groups[1]
        if first then return first[key] end
        return class[key]
    end
    function class.__newindex(self, key, value)
        if declared[key] then self:set_option(key, value) else rawset(self, key, value) end
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

local function called_on(name, self)
    if type(self) == "table" and self.order then return end -- a step takes microseconds
    options.method("Optimizer:" .. name, self, Optimizer)
end

-- What was given instead of parameters.
local function described(params)
    if te.is_tensor(params) then return "a tensor " .. options.shape(params) end
    if type(params) == "function" then return "a function (an iterator, as of named_parameters, is no list)" end
    if type(params) ~= "table" or getmetatable(params) then return options.shown(params) end
    for i, value in ipairs(params) do
        if not te.is_tensor(value) then return ("a list whose entry %d is %s"):format(i, options.shown(value)) end
    end
    return next(params) == nil and "an empty table" or "a table without entries 1, 2, …"
end

local function is_list_of_tensors(list)
    for _, value in ipairs(list) do
        if not te.is_tensor(value) then return false end
    end
    return true
end

local function as_parameters(who, params)
    if is_module(params, Module) then params = params:parameters() end
    if type(params) ~= "table" or getmetatable(params) or params[1] == nil or not is_list_of_tensors(params) then
        fail("%s: params: expected a list of tensors, a module, or a list of groups { params = … }, got %s", who,
            described(params))
    end
    options.list(who, "params", params)
    return params
end

-- A value of an option, for one group alone.
local function own(value) return type(value) == "table" and { unpack(value) } or value end

-- The options of a group: checked, those in `given` before those in `defaults`.
local function group_options(self, who, given, defaults)
    local all = {}
    for name, value in pairs(defaults) do all[name] = value end
    for name, value in pairs(given) do
        if name ~= "params" then all[name] = value end
    end
    local complete = options.check(who, all, self.declared)
    if self.check then self.check(who, complete) end
    for name, value in pairs(complete) do complete[name] = own(value) end
    complete.slots = self.slots(complete)
    return complete
end

local function add_group(self, who, group, defaults, seen)
    local complete = group_options(self, who, group, defaults)
    complete.params = as_parameters(who, group.params)
    for i, parameter in ipairs(complete.params) do
        if not parameter.is_leaf or not parameter.dtype:find("float", 1, true) then
            fail("%s: parameter %d of a group is %s; a floating tensor that no operation made is needed", who, i,
                parameter.is_leaf and "of " .. parameter.dtype or "the result of an operation")
        end
        if not parameter:is_contiguous() then
            fail("%s: parameter %d of a group is %s and not contiguous", who, i, options.shape(parameter))
        end
        if seen[parameter] then fail("%s: parameter %d of a group came before", who, i) end
        seen[parameter] = true
        self.order[#self.order + 1] = parameter
    end
    self.groups[#self.groups + 1] = complete
end

-- Whether the options of a group are those that were checked last.
local function are_known(declared, group, known)
    for name in pairs(declared) do
        local value, before = group[name], known[name]
        if type(before) == "table" and type(value) == "table" then
            if #value ~= #before then return false end
            for i = 1, #before do
                if value[i] ~= before[i] then return false end
            end
        elseif value ~= before then
            return false
        end
    end
    return true
end

local function same_names(a, b)
    for i = 1, math.max(#a, #b) do
        if a[i] ~= b[i] then return false end
    end
    return true
end

-- What masters a group makes.
local function asks_for_masters(group) return group.master_weights and group.master_dtype end

-- Before a step: whoever changed options of a group hears what is wrong with them, and gets the states that they need.
local function check_groups(self)
    for g, group in ipairs(self.groups) do
        local known = self.known[group]
        if not (known and are_known(self.declared, group, known)) then
            local who, given = ("te.optim.%s:step: group %d"):format(self.name, g), {}
            for name, declaration in pairs(self.declared) do
                given[name] = options.argument(who, "option " .. name, group[name], declaration)
            end
            local now = group_options(self, who, given, {})
            if not same_names(group.slots, now.slots) then group.slots = now.slots end
            if known and asks_for_masters(now) ~= asks_for_masters(known) then self.memory = nil end
            self.known[group] = now
        end
    end
end

function Optimizer.new(class, params, opts)
    local who = "te.optim." .. class.name
    local self = setmetatable({ groups = {}, state = {}, order = {}, unmade_known = 0,
        known = setmetatable({}, { __mode = "k" }) }, class)
    options.check(who, opts, class.declared)
    local grouped = type(params) == "table" and not getmetatable(params) and type(params[1]) == "table"
        and not getmetatable(params[1])
    if grouped then options.list(who, "params", params) end
    local seen = {}
    for g, group in ipairs(grouped and params or { { params = params } }) do
        if type(group) ~= "table" or getmetatable(group) then
            fail("%s: params: group %d: expected a table { params = … }, got %s", who, g, described(group))
        end
        add_group(self, who, group, opts or {}, seen)
    end
    return self
end

-- Adds to `list` the parameters of a group that have a gradient, in batches that the engine can take at once: alike in
-- their step count, in having a master copy and in what `complete` says. There is one batch unless somebody froze or
-- added parameters on the way.
local function add_batches(self, group, list)
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

-- A group's learning rate; `lr` in place of its own.
local function rate(group, lr) return (lr or group.lr) * group.lr_scale end

-- Whether the step that was prepared was made.
local function step_again(self, memory, grad_scale, lr)
    if not prepared.holds(self, memory) then return false end
    local batches, numbers = memory.batches, memory.numbers
    for b = 1, #batches do
        local batch = batches[b]
        self.numbers(numbers, b, batch.group, rate(batch.group, lr), batch.step + 1, grad_scale)
    end
    if not self.again(memory.prepared, numbers, batches) then return false end
    prepared.count(memory)
    return true
end

local function step_anew(self, grad_scale, lr)
    local batches, described = {}, {}
    for _, group in ipairs(self.groups) do add_batches(self, group, batches) end
    for i, batch in ipairs(batches) do
        batch.lr, batch.grad_scale = rate(batch.group, lr), grad_scale
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

-- Coefficients of the step that `batches` make next, to where the device reads them.
local function send_step(self, batches, numbers, list, grad_scale, lr)
    check_groups(self) -- a graph's launches do not come through step
    for i = 1, #batches do
        local batch = batches[i]
        self.numbers(list, i, batch.group, rate(batch.group, lr), batch.states[1].step + 1, grad_scale)
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

-- A step that the host does not take part in: whether it changes anything, and the gradients' factor, are the device's
-- (clip); so a graph can make it.
local function step_on_device(self, clip, grad_scale, lr)
    local who, recording = "te.optim." .. self.name .. ":step", graph.before_launch()
    if not self.update_on then fail(who .. ": steps in a graph or with `clip` are AdamW's alone") end
    if recording and lr then fail(who .. ": lr: a graph takes the groups' own; see set_lr") end
    local batches, described, list = {}, {}, {}
    for _, group in ipairs(self.groups) do
        for _, parameter in ipairs(recording and group.params or {}) do
            if core.gradient(parameter) and not self.state[parameter] then
                fail(who .. ": a graph needs the optimizer's states: make a step before")
            end
        end
        add_batches(self, group, batches)
    end
    if #batches == 0 then
        self.counted = nil -- by this step, which a call of take_back would be about
        return
    end
    local device = batches[1].params[1].device
    if clip and not self.unmade then
        if recording then fail(who .. ": a graph with `clip` needs a step with it before") end
        self.unmade = te.zeros({ 1 }, { dtype = "float64", device = device })
    end
    for i, batch in ipairs(batches) do
        described[i] = self.describe(batch.group, batch)
        if recording then described[i].states = nil end -- launches count
    end
    local numbers = te._core.graph_numbers(device, #batches, clip and 16 or 8)
    local function send() send_step(self, batches, numbers, list, grad_scale, lr) end
    if recording then
        graph.before_launch(function()
            send()
            count_launched(self, batches)
        end)
    else
        send()
    end
    for _, batch in ipairs(recording and batches or {}) do
        if batch.masters then
            graph.before_launch(function() core.catch_up_masters(batch.masters, batch.params) end)
            graph.after_launch(function() core.follow_masters(batch.masters, batch.params) end)
        end
    end
    self.update_on(described, numbers, clip, clip and self.unmade)
    if not recording then self.counted = batches end
    for _, batch in ipairs(batches) do
        for k = 1, #batch.grads do batch.grads[k]:release() end
        batch.grads = nil
    end
end

--- Takes back the count of a step that `clip` did not allow: the last one, or the one before where that is known a
--- step later, when the device has left it out of its counts already.
function Optimizer:take_back()
    called_on("take_back", self)
    if not self.counted then return end
    for _, batch in ipairs(self.counted) do
        for _, state in ipairs(batch.states) do state.step = state.step - 1 end
    end
    self.unmade_known = self.unmade_known + 1
end

local STEP = {
    grad_scale = { "number", 1, help = "multiplies every gradient, so clipping and averaging cost no pass" },
    clip = { "any", help = "te.optim.grad_clip's result, whose factor stays on the device; AdamW's alone" },
    lr = { "number", nil, min = 0, wrong = Optimizer.finite "lr",
        help = "instead of the groups' own; times their lr_scale" },
}

--- Updates the parameters from their gradients: all of them, or none when something fails.
---@param opts table|nil
function Optimizer:step(opts)
    called_on("step", self)
    local grad_scale, lr = 1, nil
    if opts ~= nil then
        opts = options.check("te.optim." .. self.name .. ":step", opts, STEP)
        grad_scale, lr = opts.grad_scale, opts.lr
    end
    check_groups(self)
    if opts and opts.clip or graph.before_launch() then
        return step_on_device(self, opts and opts.clip, grad_scale, lr)
    end
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
    called_on("zero_grad", self)
    options.last("te.optim." .. self.name .. ":zero_grad", 0, ...)
    for _, parameter in ipairs(self.order) do core.zero_gradient(parameter) end
end

--- Sets the learning rate of all groups, each of which multiplies it by its lr_scale; as `optimizer.lr = …` does.
function Optimizer:set_lr(lr)
    called_on("set_lr", self)
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
function Optimizer:set_option(name, value)
    called_on("set_option", self)
    local who, declaration = "te.optim." .. self.name, self.declared[name]
    if name == "lr" then return self:set_lr(value) end
    if not declaration then
        fail("%s:set_option: unknown option %s; known are %s", who, options.shown(name),
            table.concat(options.names(self.declared), ", "))
    end
    options.argument(who, "option " .. name, value, declaration)
    for _, group in ipairs(self.groups) do group[name] = own(value) end
end

--- Has the copies of parameters (master_weights) take over what others wrote to these since the last step, as the next
--- step would.
function Optimizer:catch_up()
    called_on("catch_up", self)
    for _, parameter in ipairs(self.order) do
        local master = self.state[parameter] and self.state[parameter].master
        if master and master.device == parameter.device then core.catch_up_masters({ master }, { parameter }) end
    end
end

--- { state = { [i] = { step =, … tensors … } }, groups = { { … options …, optimizer =, parameters = } } }, i counting
--- parameters over all groups; optimizer: its name, parameters: how many the group has.
--- The tensors are copies: steps that follow do not change them.
function Optimizer:state_dict()
    called_on("state_dict", self)
    local saved = { state = {}, groups = {} }
    self:catch_up()
    for i, parameter in ipairs(self.order) do
        local state = self.state[parameter]
        if state then
            local copy = {}
            for name, value in pairs(state) do copy[name] = te.is_tensor(value) and value:clone() or value end
            saved.state[i] = copy
        end
    end
    for i, group in ipairs(self.groups) do
        saved.groups[i] = { optimizer = self.name, parameters = #group.params }
        for name in pairs(self.declared) do saved.groups[i][name] = own(group[name]) end
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
    return group_options(self, who, known, before)
end

--- Takes over what state_dict returned; the parameters must be the same ones in the same order. Nothing is changed
--- unless everything fits.
function Optimizer:load_state_dict(saved) -- no more is looked at: te.load(path) gives three values
    called_on("load_state_dict", self)
    local who = "te.optim." .. self.name .. ":load_state_dict"
    if type(saved) ~= "table" or type(saved.state) ~= "table" or type(saved.groups) ~= "table" then
        fail("%s: expected what state_dict returns, got %s", who, type(saved) ~= "table" and options.shown(saved)
            or ("a table whose state is %s and whose groups are %s"):format(type(saved.state), type(saved.groups)))
    elseif #saved.groups ~= #self.groups then
        fail("%s: %d groups for an optimizer of %d", who, #saved.groups, #self.groups)
    end
    local groups, state, i = {}, {}, 0
    for g, group in ipairs(self.groups) do
        groups[g] = saved_options(self, who, group, saved.groups[g])
        for _, parameter in ipairs(group.params) do
            i = i + 1
            local given, name = saved.state[i], ("%s: parameter %d"):format(who, i)
            if given ~= nil then state[parameter] = states.loaded(self, name, groups[g], parameter, given) end
        end
    end
    for key in pairs(saved.state) do
        if not self.order[key] then fail("%s: a state of parameter %s, of %d", who, options.shown(key), i) end
    end
    if self.unmade then self.unmade_known = self.unmade:item() end -- the counts are those of steps that were made
    for g, group in ipairs(self.groups) do
        for name, value in pairs(groups[g]) do group[name] = value end
    end
    states.replace(self, state)
end

return Optimizer
