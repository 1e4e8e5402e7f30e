--- te.distributed.join_state and split_state: the state of a module whose layers are split between processes, whole.
--
-- A parameter that is split lies so: along one dimension, its sections one after the other, and each process has its
-- share of every one. Queries, keys and values, which one product makes, are three sections:
--
--     whole    q q q q k k v v        rank 0   q q k v        rank 1   q q k v
--
-- What is said of a parameter holds for what an optimizer keeps of it, which has its shape.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local parts = require "te.distributed.parts"
local rows = require "te.rows"
local stages = require "te.distributed.stages"

local whole = {}

local layouts = setmetatable({}, { __mode = "k" }) -- by parameter: { group =, dim =, sections = sizes of the whole }
whole.layouts = layouts

--- How much of `size` comes before a rank's part, and how much is in it. Uneven parts differ by one: the first ranks
--- have the larger ones.
---@param size integer
---@param group table
---@param rank integer|nil  this process's unless given
---@return integer before
---@return integer count
function whole.share(size, group, rank)
    rank = rank or group.rank
    local rest = size % group.size
    local each = (size - rest) / group.size
    return rank * each + math.min(rank, rest), rank < rest and each + 1 or each
end

--- Says that each process of the group has its share of every section of the parameter along a dimension.
function whole.hold(parameter, group, dim, sections)
    parts[parameter], layouts[parameter] = group, { group = group, dim = dim, sections = sections }
    return parameter
end

-- Of a whole tensor this process's part: a view where there is one section, else a copy.
local function part(t, layout)
    local own, at = {}, 1
    for i, size in ipairs(layout.sections) do
        local before, count = whole.share(size, layout.group)
        own[i] = t:narrow(layout.dim, at + before, count)
        at = at + size
    end
    return #own == 1 and own[1] or te.cat(own, layout.dim)
end
whole.part = part

-- The rows of all ranks, each `longest` with what fills them up, in the order of the whole.
local function in_order(all, layout, longest)
    local group, ordered, at = layout.group, {}, {}
    for _, size in ipairs(layout.sections) do
        for rank = 0, group.size - 1 do
            local _, count = whole.share(size, group, rank)
            ordered[#ordered + 1] = all:narrow(1, rank * longest + (at[rank] or 0) + 1, count)
            at[rank] = (at[rank] or 0) + count
        end
    end
    return te.cat(ordered, 1)
end

local function join(t, layout)
    local own, longest = t:transpose(1, layout.dim):contiguous(), 0
    for _, size in ipairs(layout.sections) do longest = longest + select(2, whole.share(size, layout.group, 0)) end
    local shape = own.shape
    if shape[1] < longest then
        shape[1] = longest - shape[1]
        own = te.cat({ own, te.zeros(shape, { dtype = t.dtype, device = t.device }) }, 1)
    end
    return in_order(layout.group:all_gather(own), layout, longest):transpose(1, layout.dim):contiguous()
end

--- What all processes together have of a tensor like `parameter`: a new tensor; t itself where that is not split. All
--- processes of its group call it.
---@param parameter te.Tensor
---@param t te.Tensor
---@return te.Tensor
function whole.join(parameter, t)
    local layout = layouts[parameter]
    return layout and te.no_grad(join, t:detach(), layout) or t
end

--- This process's part of a tensor like the whole of `parameter`: t itself where that is not split.
function whole.split(parameter, t)
    local layout = layouts[parameter]
    return layout and te.no_grad(part, t, layout) or t
end

--- The shape that a parameter has as a whole.
function whole.shape(parameter)
    local layout, shape = layouts[parameter], parameter.shape
    if layout then
        shape[layout.dim] = 0
        for _, size in ipairs(layout.sections) do shape[layout.dim] = shape[layout.dim] + size end
    end
    return shape
end

local function check_module(who, module)
    if not te.is(module, te.Module) then fail("%s: module: expected a module, got %s", who, options.shown(module)) end
end

-- The parameters that are split, by every name that they have in a state.
local function split_names(who, module)
    local found, state = {}, module:state_dict()
    for name, parameter in module:named_parameters() do
        if layouts[parameter] then
            if state[name] == nil then
                fail("%s: %s is split and stored quantized: its parts are not joined", who, name)
            end
            found[name] = parameter
        end
    end
    return found, state
end

--- The state_dict of a module whose layers are split or divided between processes with whole tensors, as the same
--- module in one process has it. All processes of its groups call it. What is not split is the module's own. Split
--- layers whose weights are stored quantized are refused, and experts of a te.MoE with a group.
---@param module table
---@return table<string, te.Tensor>
function whole.join_state(module)
    local who = "te.distributed.join_state"
    check_module(who, module)
    for name, parameter in module:named_parameters() do
        if parts[parameter] and not layouts[parameter] then
            fail("%s: module: %s is of experts that processes have parts of, which are not joined", who, name)
        end
    end
    local split, state = split_names(who, module)
    local joined = {}
    for _, name in ipairs(options.names(state)) do -- in the same order in all processes
        joined[name] = split[name] and whole.join(split[name], state[name]) or state[name]
    end
    return stages.join(module, joined)
end

--- Of a whole state, such as join_state makes and a checkpoint holds, what this process's module:load_state_dict takes.
--- What other stages of it alone have is left out; names that are not the module's stay as they are.
---@param module table
---@param state table<string, any>
---@return table<string, any>
function whole.split_state(module, state)
    local who = "te.distributed.split_state"
    check_module(who, module)
    options.argument(who, "state", state, { "table" })
    local split, own, elsewhere = split_names(who, module), {}, stages.elsewhere(module)
    for name, tensor in pairs(state) do
        local parameter = split[name]
        if parameter and (te.is_tensor(tensor) or rows.are(tensor)) then
            local want = options.shape(whole.shape(parameter))
            if options.shape(tensor) ~= want then
                fail("%s: %s has shape %s as a whole, the one given has %s", who, name, want, options.shape(tensor))
            end
            if rows.are(tensor) then tensor = te.no_grad(te.cat, tensor.parts, 1) end
            tensor = whole.split(parameter, tensor)
        end
        if not (elsewhere and elsewhere(name)) then own[name] = tensor end
    end
    return own
end

return whole
