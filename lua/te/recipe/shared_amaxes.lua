--- What processes that train together share of delayed scaling: the amaxes of a step, of which each takes the largest.

local te = require "te"
local fail = require "te.fail"
local core = te._core

local shared = {}

local ROLES = { "input", "weight", "grad_output" }
local NUMBER = { input = 1, weight = 2, grad_output = 3 }

-- By group of processes that share amaxes: { order = in which groups were first used, n =, numbers =, states = }.
-- Products have numbers from 1 to n in the order of their first use in a step. Those are what the processes agree on;
-- which products the collector has taken away is not, until it has in all of them. states, by product, lose what is
-- finalized even where a finalizer still reaches the product.
local sharing, groups = setmetatable({}, { __mode = "k" }), 0

local function sharing_of(group)
    if not sharing[group] then
        groups = groups + 1
        sharing[group] = { order = groups, n = 0, numbers = setmetatable({}, { __mode = "k" }),
            states = setmetatable({}, { __mode = "kv" }) }
    end
    return sharing[group]
end

--- Whether any group has products.
---@return boolean
function shared.any() return next(sharing) ~= nil end

--- The step in progress uses a product of a group; it stays in a list until it has a number.
---@param step table     te.recipe.mode.step
---@param product table  with a group
function shared.note_use(step, product)
    step.shares = step.shares or {}
    local list = step.shares[product.group] or {}
    step.shares[product.group] = list
    if sharing_of(product.group).numbers[product] or list[product] then return end
    list[#list + 1], list[product] = product, true
end

--- Gives numbers to products that a step has used. What one process alone evaluates or explains has none.
---@param shares table<table, table>  the step's products by group
function shared.number(shares)
    for group, list in pairs(shares) do
        local s = sharing_of(group)
        for _, product in ipairs(list) do
            if not s.numbers[product] then
                s.n = s.n + 1
                s.numbers[product], s.states[product] = s.n, product.state
            end
        end
        shares[group] = {}
    end
end

--- Whether processes share the amaxes of a role, by what the recipe says.
---@param product table
---@param role string
---@return boolean|nil
function shared.reduces(product, role)
    local rule = product.rules[role] or product.earlier[role]
    return rule and rule.reduce_amax
end

-- What a process says of the products of its group: the step's amaxes by number, 0 of one that has none, GONE of one
-- that is no more here. Behind them the role, up and down, so that their largest tell whether all say the same. Also
-- the histories by device: { numbers =, amaxes = }.
local GONE = -1

local function own_amaxes(group, s, role)
    local values, devices = {}, {}
    for number = 1, s.n do values[number] = GONE end
    for product in pairs(s.states) do
        local number = s.numbers[product]
        values[number] = 0
        if product.group == group and shared.reduces(product, ROLES[role]) then
            local _, history = core.recipe_state_tensors(product.state, ROLES[role])
            local list = devices[history.device] or { numbers = {}, amaxes = {} }
            devices[history.device] = list
            table.insert(list.numbers, number)
            table.insert(list.amaxes, history:narrow(1, 1, 1))
        end
    end
    for _, list in pairs(devices) do
        for k, amax in ipairs(te.cat(list.amaxes):totable()) do values[list.numbers[k]] = amax end
    end
    values[s.n + 1], values[s.n + 2] = role, -role
    return values, devices
end

-- Takes away the numbers of products that are no more in any process, and lets those behind them move up.
local function renumber(s, largest)
    local kept, moved = 0, {}
    for number = 1, s.n do
        if largest[number] ~= GONE then
            kept = kept + 1
            moved[number] = kept
        end
    end
    if kept == s.n then return end
    s.n = kept
    for product, number in pairs(s.numbers) do s.numbers[product] = moved[number] end
end

-- The step's amaxes of a group's products become the largest of all its processes. They travel from the host, since
-- histories of what has not run yet lie there.
local function share_role(group, role)
    local s = sharing[group]
    local values, devices = own_amaxes(group, s, role)
    local all = group:all_reduce_(te.tensor(values, { dtype = "float32", device = "cpu" }), "max")
    local largest = all:totable()
    local most, least = largest[s.n + 1], -largest[s.n + 2]
    if most ~= least then
        fail("te.recipe: option reduce_amax: the processes differ: rank %d shares the amaxes of %s, another those of "
            .. "%s", group.rank, ROLES[role], ROLES[most ~= role and most or least])
    end
    for device, list in pairs(devices) do
        local parts = {}
        for k, number in ipairs(list.numbers) do parts[k] = all:narrow(1, number, 1) end
        local there = te.cat(parts):to(device)
        for k, amax in ipairs(list.amaxes) do amax:copy_(there:narrow(1, k, 1)) end
    end
    renumber(s, largest)
end

--- The step's amaxes of the groups that it has used (so one process may run another model alone) become the largest of
--- all processes, those of the roles named. All processes of a group call this together.
---@param used table<table, any>  by group
---@param ... string              roles
function shared.share(used, ...)
    local order = {}
    for group in pairs(used) do order[#order + 1] = group end
    table.sort(order, function(a, b) return sharing[a].order < sharing[b].order end)
    for _, group in ipairs(order) do
        for i = 1, select("#", ...) do share_role(group, NUMBER[(select(i, ...))]) end
    end
end

return shared
