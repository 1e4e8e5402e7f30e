--- te.distributed.shard_optimizer: optimizers of which each process keeps a share (ZeRO stages 1 and 2, Rajbhandari et
--- al. 2020).
--
--     optimizer = te.distributed.shard_optimizer(te.optim.AdamW(model, { lr = 1e-3 }))
--     loss:backward()
--     te.distributed.average_gradients(model)       each process gets its share of the averages
--     te.optim.clip_grad_norm(model, 1)             the norm of all
--     optimizer:step()                              updates the share, and gets what the others have updated
--     optimizer:zero_grad()
--
-- The optimizer's parameters are then slices (te.distributed.shards), for which it does all that it does for others;
-- what follows here stands before or behind its methods. States that are saved are those of whole parameters.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local agree = require "te.distributed.agree"
local gradients = require "te.distributed.gradients"
local graph = require "te.graph"
local parts = require "te.distributed.parts"
local scatter = require "te.distributed.scatter"
local shards = require "te.distributed.shards"
local whole = require "te.distributed.whole"
local groups = require "te.optim.groups"
local Optimizer = require "te.optim.optimizer"
local core = te._core

local WHO = "te.distributed.shard_optimizer"

-- Sums over two groups, of squares of parts that are sharded over one and belong to another.
local Both = {}
Both.__index = Both
function Both:all_reduce(x) return self[2]:all_reduce(self[1]:all_reduce(x)) end

-- Over which processes norms add up what the slices of parameters have, which `same` has shares of.
local function summed_over(sharding, same, held)
    if not held or same.size * held.size == sharding.group.size then return sharding.group end
    sharding.both[held] = sharding.both[held] or setmetatable({ same, held }, Both)
    return sharding.both[held]
end

-- The rank that gets a parameter that is not cut: who has the fewest elements so far.
local function owner_of(sharding, same, parameter)
    local loads, n = sharding.loads[same] or {}, 1
    sharding.loads[same] = loads
    for _, size in ipairs(whole.shape(parameter)) do n = n * size end
    local least = 0
    for rank = 1, same.size - 1 do
        if (loads[rank] or 0) < (loads[least] or 0) then least = rank end
    end
    loads[least] = (loads[least] or 0) + n
    return least
end

local function new_shard(sharding, group, same, parameter)
    local undivided = core.is_quantized(parameter) or group.use_muon
    local shard = shards.new(parameter, same, undivided and owner_of(sharding, same, parameter) or nil)
    shard.summed_over = summed_over(sharding, same, parts[parameter])
    if not rawequal(shard.slice, parameter) then
        parts[shard.slice], whole.layouts[shard.slice] = shard.summed_over, whole.layouts[parameter]
    end
    return shard
end

-- Puts slices in the place of what an optimizer's groups have of parameters. Experts and parts of layers that no other
-- process has stay as they are.
local function shard_groups(self, who)
    local sharding, order = self.sharding, {}
    for _, group in ipairs(self.groups) do
        local params, place = {}, {}
        for i, parameter in ipairs(group.params) do params[i], place[parameter] = parameter, i end
        if not sharding.known[params[1]] then
            for _, alike in ipairs(gradients.divide(params)) do
                local same = alike.group and gradients.holders(who, sharding.group, alike.group)
                if not alike.group then same = sharding.group end
                for _, parameter in ipairs(same and alike or {}) do
                    local shard = new_shard(sharding, group, same, parameter)
                    params[place[parameter]], sharding.by_slice[shard.slice] = shard.slice, shard
                    sharding.parameters[parameter] = true
                end
            end
        end
        group.params = params
        for _, parameter in ipairs(params) do order[#order + 1], sharding.known[parameter] = parameter, true end
    end
    self.order, self.memory = order, nil
end

local function check_alike(who, group, params)
    local flags = {}
    for i, parameter in ipairs(params) do flags[i] = core.is_quantized(parameter) and 1 or 0 end
    agree.on_parameters(who, group, params, flags, parts)
end

-- Methods in the place of the class's --------------------------------------------------------------------------------

local Sharded = {}

local function check_self(self, name)
    if type(self) ~= "table" or not self.sharding then options.method("Optimizer:" .. name, self, Optimizer) end
end

local function check_order(self, who)
    for _, group in ipairs(self.groups) do
        for _, parameter in ipairs(group.params) do
            if not self.sharding.known[parameter] then
                fail("%s: a parameter %s was put into a group of a sharded optimizer: add_group adds some", who,
                    options.shape(parameter))
            end
        end
    end
end

-- Shards that have a gradient, the same ones in all processes.
local function active(self, who)
    local list = {}
    for _, slice in ipairs(self.order) do
        local shard = self.sharding.by_slice[slice]
        if shard then
            if shards.of[shard.parameter] ~= shard then
                fail("%s: a parameter %s is that of an optimizer that was made later", who,
                    options.shape(shard.parameter))
            end
            shard:follow()
            local gradient = core.gradient(shard:holder(who))
            if gradient then
                list[#list + 1] = shard
                gradient:release()
            end
        end
    end
    return list
end

local function follow_masters(self, list)
    for _, shard in ipairs(list) do
        local state = self.state[shard.slice]
        if state and state.master then core.follow_masters({ state.master }, { shard.slice }) end
    end
end

function Sharded:step(opts, ...)
    check_self(self, "step")
    local who = "te.optim." .. self.name .. ":step"
    if type(opts) == "table" and opts.clip ~= nil then
        fail("%s: option clip: not of a sharded optimizer; te.optim.grad_norm adds what all have", who)
    elseif graph.before_launch() then
        fail("%s: a graph cannot hold a step of a sharded optimizer", who)
    end
    check_order(self, who)
    local list = active(self, who)
    self.sharding.class.step(self, opts, ...)
    te.no_grad(scatter.gather, list)
    follow_masters(self, list)
end

function Sharded:zero_grad(...)
    check_self(self, "zero_grad")
    self.sharding.class.zero_grad(self, ...)
    for _, shard in pairs(self.sharding.by_slice) do
        core.zero_gradient(shard.parameter)
        shard:zero_gradient()
    end
end

function Sharded:add_group(group, ...)
    check_self(self, "add_group")
    local who, params = "te.optim." .. self.name .. ":add_group", type(group) == "table" and group.params or nil
    if te.is(params, te.Module) then params = params:parameters() end
    for i, parameter in ipairs(type(params) == "table" and params or {}) do
        if self.sharding.parameters[parameter] then fail("%s: parameter %d of a group came before", who, i) end
    end
    self.sharding.class.add_group(self, group, ...)
    local alike, problem = pcall(check_alike, who, self.sharding.group, self.groups[#self.groups].params)
    if not alike then
        table.remove(self.groups)
        groups.collect(self)
        error(problem, 0)
    end
    shard_groups(self, who)
end

local function group_of(self, slice)
    for _, group in ipairs(self.groups) do
        for _, parameter in ipairs(group.params) do
            if rawequal(parameter, slice) then return group end
        end
    end
end

-- Calls visit(slot, own, join) for what is kept of a slice's parameter: this process's share, and a function that makes
-- the whole tensor, which is the caller's. All processes call that, in the same order.
local function each_share(self, slice, visit)
    local shard, state, group = self.sharding.by_slice[slice], self.state[slice], group_of(self, slice)
    if not state then return end
    local slots = { unpack(group.slots) }
    if state.master or core.is_quantized(shard.parameter) then slots[#slots + 1] = "master" end
    for _, slot in ipairs(slots) do
        local own = state[slot]
        if own == nil and slot == "master" then
            own = te.empty({ 0, 0 }, { dtype = group.master_dtype, device = shard.parameter.device })
        end
        if own then visit(slot, own, function() return te.no_grad(shard.join, shard, own) end) end
    end
end

-- Calls visit(slot, tensor) for the whole tensors.
local function each_whole(self, slice, visit)
    each_share(self, slice, function(slot, _, join) visit(slot, join()) end)
end

-- Slices lie in the memory that others have written to.
function Sharded:catch_up(...)
    check_self(self, "catch_up")
    for _, shard in pairs(self.sharding.by_slice) do
        if shards.of[shard.parameter] == shard then shard:follow() end
    end
    return self.sharding.class.catch_up(self, ...)
end

--- What the class's gives, of whole parameters: all processes call it. Tensors that a group has kept under other
--- options, which nobody loads, are left out.
function Sharded:state_dict(...)
    check_self(self, "state_dict")
    local saved = self.sharding.class.state_dict(self, ...)
    for i, slice in ipairs(self.order) do
        if saved.state[i] and self.sharding.by_slice[slice] then
            local whole_state = {}
            for name, value in pairs(saved.state[i]) do
                if not te.is_tensor(value) then whole_state[name] = value end
            end
            each_whole(self, slice, function(slot, tensor) whole_state[slot] = tensor end)
            saved.state[i] = whole_state
        end
    end
    return saved
end

-- The class would compare with the slice.
local function check_shapes(who, shard, group, state)
    local slots = { "master", unpack(group.slots) }
    for _, slot in ipairs(slots) do
        local value, want = state[slot], options.shape(shard.parameter)
        if te.is_tensor(value) and options.shape(value) ~= want then
            fail("%s: %s has shape %s, the parameter %s", who, slot, options.shape(value), want)
        end
    end
end

-- Of a whole state this process's share; what is none of the parameter is not looked at.
local function cut(shard, state)
    local own = {}
    for slot, value in pairs(state) do
        local fits = te.is_tensor(value) and options.shape(value) == options.shape(shard.parameter)
        own[slot] = fits and te.no_grad(shard.cut, shard, value:detach()) or value
    end
    return own
end

function Sharded:load_state_dict(saved)
    check_self(self, "load_state_dict")
    local who = "te.optim." .. self.name .. ":load_state_dict"
    groups.collect(self)
    check_order(self, who)
    if type(saved) == "table" and type(saved.state) == "table" then
        local own = { groups = saved.groups, state = {} }
        for i, state in pairs(saved.state) do
            local slice = self.order[i]
            local shard = self.sharding.by_slice[slice]
            if shard and type(state) == "table" then
                check_shapes(("%s: parameter %d"):format(who, i), shard, group_of(self, slice), state)
                state = cut(shard, state)
            end
            own.state[i] = state
        end
        saved = own
    end
    return self.sharding.class.load_state_dict(self, saved)
end

--- Divides an optimizer between the processes of a group: each keeps and updates a share of what it keeps of every
--- parameter, and gets the other weights after every step. From then on te.distributed.average_gradients gives each
--- process its share of these parameters' gradients, which te.optim.grad_norm and clip_grad_norm know of. Of an
--- optimizer that has made steps the states are divided. All processes of the group call it, and from then on its
--- methods. In a group of one it changes nothing. Stages (pipeline_parallel) are divided between the processes of the
--- group with the same stage.
---@param optimizer te.Optimizer
---@param group table|nil  te.distributed.world() unless given
---@return te.Optimizer optimizer  itself
local function shard_optimizer(optimizer, group, ...)
    options.last(WHO, 2, ...)
    if type(optimizer) ~= "table" or not rawget(optimizer, "order") or not rawget(optimizer, "groups") then
        fail("%s: optimizer: expected an optimizer, got %s", WHO, options.shown(optimizer))
    elseif rawget(optimizer, "sharding") then
        fail("%s: optimizer: it is sharded already", WHO)
    end
    group = gradients.same_stage(WHO, options.group(WHO, "group", group) or te.distributed.world(), optimizer.order)
    if not group then return optimizer end
    local saved = optimizer:state_dict()
    check_alike(WHO, group, optimizer.order)
    optimizer.sharding = { group = group, class = getmetatable(optimizer), known = {}, by_slice = {},
        parameters = {}, loads = {}, both = {}, each_share = each_share }
    shard_groups(optimizer, WHO)
    for name, fn in pairs(Sharded) do rawset(optimizer, name, fn) end
    optimizer.state, optimizer.counted = {}, nil
    if next(saved.state) then optimizer:load_state_dict(saved) end
    return optimizer
end

return { shard_optimizer = shard_optimizer }
