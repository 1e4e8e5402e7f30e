--- Modules whose layers are divided between the processes of a group as stages: the option pipeline_parallel of
-- te.models. What is here knows which parameters are in some stages alone, and brings the state of all together.
--
-- A stage is a table in the module's field `stage`:
--
--     group, rank, size     the processes, of which each is a stage
--     elsewhere             names of what other stages alone have: a name or the beginning of names, up to a dot
--     count                 how many numbers the parameters of all stages are
--     before, behind        groups of two with the neighbours, in which this process is the second, the first; nil at
--                           the ends
--     ends                  in the first and the last stage a group of these two, else nil

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local texts_of = require "te.distributed.texts"

local stages = {}

--- By parameter: { group = that of its stages, copy = whether an earlier stage has it as well }.
stages.held = setmetatable({}, { __mode = "k" })

local known = setmetatable({}, { __mode = "k" }) -- what follows from a group: MPI keeps split ones

-- The group of two with a neighbour; all of the group call it, also where one of the two does not exist.
local function pair_with(group, neighbour)
    local there = neighbour >= 0 and neighbour < group.size
    return group:split(there and math.min(group.rank, neighbour) or -1)
end

local function connect(group)
    local rank, size = group.rank, group.size
    local is_end = rank == 0 or rank == size - 1
    if size == 2 then
        return { before = rank == 1 and group or nil, behind = rank == 0 and group or nil, ends = group }
    end
    local even = pair_with(group, rank % 2 == 0 and rank + 1 or rank - 1)
    local odd = pair_with(group, rank % 2 == 0 and rank - 1 or rank + 1)
    local first = rank % 2 == 0
    return { before = first and odd or not first and even or nil, behind = first and even or not first and odd or nil,
        ends = group:split(is_end and 0 or -1) }
end

--- This process's stage of a group of several, which all call it.
---@param group table
---@return table
function stages.new(group)
    known[group] = known[group] or connect(group)
    local links = known[group]
    return { group = group, rank = group.rank, size = group.size, elsewhere = {}, count = 0, before = links.before,
        behind = links.behind, ends = links.ends }
end

--- The group of stages that a list of parameters is divided over; nil: none is.
---@param parameters table
---@return table|nil
function stages.group_of(parameters)
    for _, parameter in ipairs(parameters) do
        if stages.held[parameter] then return stages.held[parameter].group end
    end
end

-- The stage of a module or of what is in it, and where it is; nil: it is not divided.
local function find(module)
    for path, part in module:named_modules() do
        local stage = rawget(part, "stage")
        if type(stage) == "table" and stage.elsewhere then return stage, path == "" and "" or path .. "." end
    end
end
stages.find = find

--- A function that says whether a name in a state of the whole module is that of another stage; nil: there is no other.
---@param module table
---@return function|nil
function stages.elsewhere(module)
    local stage, prefix = find(module)
    if not stage then return nil end
    return function(name)
        if name:sub(1, #prefix) ~= prefix then return false end
        name = name:sub(#prefix + 1)
        for at in name:gmatch "()%." do
            if stage.elsewhere[name:sub(1, at - 1)] then return true end
        end
        return stage.elsewhere[name] or false
    end
end

local function line_of(name, t)
    return ("%s %s %s %s"):format(t.dtype, t.device == "cpu" and "cpu" or "device", table.concat(t.shape, ","), name)
end

-- What all stages have, by name: { rank = of the first one, dtype =, host =, shape = }.
local function manifest(group, shapes)
    local lines, found = {}, {}
    for _, name in ipairs(options.names(shapes)) do lines[#lines + 1] = line_of(name, shapes[name]) end
    for rank, text in ipairs(texts_of(group, table.concat(lines, "\n"))) do
        for dtype, device, sizes, name in text:gmatch "(%S+) (%S+) ([%d,]*) ([^\n]*)" do
            local shape = {}
            for size in sizes:gmatch "%d+" do shape[#shape + 1] = tonumber(size) end
            found[name] = found[name] or { rank = rank - 1, dtype = dtype, host = device == "cpu", shape = shape }
        end
    end
    return found
end

--- Goes over the tensors of all stages by name, in the same order in all processes: take(name, tensor), of which no
--- more than one that another stage has is there at a time unless `take` keeps it.
---@param group table                 of the stages
---@param device string               where this process has tensors that are not the host's
---@param shapes table                by name what has the dtype, shape and device of a tensor here
---@param value_of function           of a name here, the tensor, which takes no part in gradients; released, or given
---  to `take`
---@param take function
function stages.each(group, device, shapes, value_of, take)
    local all = manifest(group, shapes)
    for _, name in ipairs(options.names(all)) do
        local of, own = all[name], nil
        if of.rank == group.rank then
            local value = value_of(name)
            own = value:contiguous()
            if not rawequal(own, value) then value:release() end
        else
            own = te.empty(of.shape, { dtype = of.dtype, device = of.host and "cpu" or device })
        end
        te.no_grad(group.broadcast_, group, own, of.rank)
        take(name, own, of.rank ~= group.rank)
    end
end

--- A state of which each stage has its own tensors, as all have it together.
---@param module table
---@param state table<string, te.Tensor>
---@return table<string, te.Tensor>
function stages.join(module, state)
    local stage, whole = find(module), {}
    if not stage then return state end
    local device = module:parameters()[1].device
    stages.each(stage.group, device, state, function(name) return state[name]:detach() end, function(name, tensor)
        whole[name] = state[name] or tensor
    end)
    return whole
end

--- Raises where a module is divided, for what needs the whole of it.
function stages.refuse(module, who)
    if find(module) then
        fail("%s: the model is divided by pipeline_parallel; te.distributed.join_state(model) has all tensors", who)
    end
end

return stages
