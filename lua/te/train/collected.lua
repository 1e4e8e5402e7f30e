--- te.train.collected: the tensors that a checkpoint holds, of a model that processes may have parts or stages of.

local te = require "te"
local stages = require "te.distributed.stages"
local texts_of = require "te.distributed.texts"
local whole = require "te.distributed.whole"

local collected = {}

-- The counts of all stages, each parameter's once.
local function join_counts(metadata, group)
    local lines, known = {}, {}
    for _, text in ipairs(texts_of(group, metadata["optimizer.counts"])) do
        for line, name in text:gmatch "(%d+ ([^\n]*))" do
            if not known[name] then lines[#lines + 1] = line end
            known[name] = true
        end
    end
    metadata["optimizer.counts"] = table.concat(lines, "\n")
end

-- Keeps a tensor that other processes had a part in: only the process that writes, in the host's memory.
local function keep(tensors, writes, name, joined)
    if writes then tensors[name] = joined.device == "cpu" and joined or joined:to "cpu" end
    if tensors[name] ~= joined then joined:release() end
end

-- Reads a split tensor's parts from all processes of the group; nil of what is not split.
local function join(parameter, tensor)
    return parameter and whole.layouts[parameter] and whole.join(parameter, tensor) or nil
end

-- Where the model is whole or split.
local function of_parts(tensors, writes)
    return function(name, tensor, parameter, make)
        local made = make and make()
        tensor = made or tensor
        local joined = join(parameter, tensor)
        if made and joined then tensor:release() end
        joined = joined or made
        if joined then keep(tensors, writes, name, joined) else tensors[name] = tensor end
    end, function() end
end

-- Where it is divided: what other stages have comes behind the last.
local function of_stages(tensors, metadata, writes, model, stage)
    local shapes, values = {}, {}
    local function put(name, tensor, parameter, make)
        values[name] = function()
            local made = make and make()
            local joined = join(parameter, made or tensor)
            if made and joined then made:release() end
            return joined or made or tensor:detach()
        end
        shapes[name] = not make and not (parameter and whole.layouts[parameter]) and tensor or
            { dtype = tensor.dtype, device = tensor.device, shape = whole.shape(parameter) }
    end
    return put, function()
        local device = model:parameters()[1].device
        stages.each(stage.group, device, shapes, function(name) return values[name]() end, function(name, tensor, came)
            local own = shapes[name]
            if came or not te.is_tensor(own) then keep(tensors, writes, name, tensor) else tensors[name] = own end
        end)
        join_counts(metadata, stage.group)
    end
end

--- What takes the tensors that are written, put(name, tensor, parameter, make), and what is to be called behind the
--- last. All processes that have the model together put; who writes has all of it in the end. Of a share of a sharded
--- optimizer, `make` makes what is written, one tensor at a time, which is kept there alone.
---@param tensors table       by name, which is filled
---@param metadata table      whose counts are joined
---@param writes boolean      whether this process does
---@param model table
---@param stage table|nil     of te.distributed.stages
---@return function put
---@return function finish
function collected.new(tensors, metadata, writes, model, stage)
    if stage then return of_stages(tensors, metadata, writes, model, stage) end
    return of_parts(tensors, writes)
end

return collected
