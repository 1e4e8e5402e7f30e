--- Parameter groups of an optimizer: which parameters each has, and its options, which may be changed between steps.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local Module = require "te.module"
local shards = require "te.distributed.shards"

local groups = {}

--- What was given instead of parameters, for messages.
---@param params any
---@return string
function groups.described(params)
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
    if Module.is(params, Module) then params = params:parameters() end
    if type(params) ~= "table" or getmetatable(params) or params[1] == nil or not is_list_of_tensors(params) then
        fail("%s: params: expected a list of tensors, a module, or a list of groups { params = … }, got %s", who,
            groups.described(params))
    end
    options.list(who, "params", params)
    for i, parameter in ipairs(params) do options.tensor(who, "params", parameter, i) end
    return params
end

--- A value of an option, for one group alone.
function groups.own(value) return type(value) == "table" and { unpack(value) } or value end

--- The options of a group: checked, those in `given` before those in `defaults`.
---@param self te.Optimizer
---@param who string  for messages
---@param given table
---@param defaults table
---@return table
function groups.options(self, who, given, defaults)
    local all = {}
    for name, value in pairs(defaults) do all[name] = value end
    for name, value in pairs(given) do
        if name ~= "params" then all[name] = value end
    end
    local complete = options.check(who, all, self.declared)
    if self.check then self.check(who, complete) end
    for name, value in pairs(complete) do complete[name] = groups.own(value) end
    complete.slots = self.slots(complete)
    return complete
end

-- Raises where an optimizer cannot have them; those that were seen before among them.
local function check_parameters(who, params, seen)
    for i, parameter in ipairs(params) do
        options.tensor(who, "params", parameter, i)
        if not te.is_tensor(parameter) then
            fail("%s: parameter %d: expected a tensor, got %s", who, i, options.shown(parameter))
        end
        if not parameter.is_leaf or not parameter.dtype:find("float", 1, true) then
            fail("%s: parameter %d of a group is %s; a floating tensor that no operation made is needed", who, i,
                parameter.is_leaf and "of " .. parameter.dtype or "the result of an operation")
        end
        if not parameter:is_contiguous() then
            fail("%s: parameter %d of a group is %s and not contiguous", who, i, options.shape(parameter))
        end
        if seen[parameter] then fail("%s: parameter %d of a group came before", who, i) end
        seen[parameter] = true
    end
end

--- Adds a group to an optimizer.
---@param self te.Optimizer
---@param who string      for messages
---@param group table     { params = …, options … }
---@param defaults table  the optimizer's options
---@param seen table<te.Tensor, boolean>  parameters of this and other groups
function groups.add(self, who, group, defaults, seen)
    local complete = groups.options(self, who, group, defaults)
    complete.params = as_parameters(who, group.params)
    check_parameters(who, complete.params, seen)
    if self.takes then self.takes(who, complete, complete.params) end
    for _, parameter in ipairs(complete.params) do
        self.order[#self.order + 1], shards.of[parameter] = parameter, nil -- no earlier optimizer's from here on
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

--- Parameters that somebody put into the lists of groups, or took out of them, are the optimizer's from then on, or no
--- longer.
---@param self te.Optimizer
function groups.collect(self)
    local order, n, same = self.order, 0, true
    for _, group in ipairs(self.groups) do
        local params = group.params
        for i = 1, #params do
            n = n + 1
            same = same and params[i] == order[n]
        end
    end
    if same and n == #order then return end
    local seen, all = {}, {}
    for g, group in ipairs(self.groups) do
        check_parameters(("te.optim.%s: group %d"):format(self.name, g), group.params, seen)
        if self.takes then self.takes(("te.optim.%s: group %d"):format(self.name, g), group, group.params) end
        for _, parameter in ipairs(group.params) do all[#all + 1] = parameter end
    end
    self.order, self.memory = all, nil
end

--- Before a step: whoever changed options of a group hears what is wrong with them, and gets the states that they need.
---@param self te.Optimizer
function groups.check(self)
    groups.collect(self)
    for g, group in ipairs(self.groups) do
        local known = self.known[group]
        if not (known and are_known(self.declared, group, known)) then
            local who, given = ("te.optim.%s:step: group %d"):format(self.name, g), {}
            for name, declaration in pairs(self.declared) do
                given[name] = options.argument(who, "option " .. name, group[name], declaration)
            end
            local now = groups.options(self, who, given, {})
            if self.takes then self.takes(who, now, group.params) end
            if not same_names(group.slots, now.slots) then group.slots = now.slots end
            if known and asks_for_masters(now) ~= asks_for_masters(known) then self.memory = nil end
            self.known[group] = now
        end
    end
end

return groups
