--- What goes between the processes of a group that shard an optimizer: of gradients each process gets its share of the
--- averages, of weights all that the others have updated.
--
-- Shares travel in buckets: flat tensors of one dtype in which those of each process lie together. A large parameter
-- whose shares are all of the same size is a bucket as it is. What has an owner is averaged and sent by itself.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local shards = require "te.distributed.shards"
local core = te._core

local scatter = {}

local ALONE = 2 ^ 20 -- bytes from which on a copy costs more than a collective of its own
local LIMIT = 25e6
local BYTES = { float64 = 8, float32 = 4, bfloat16 = 2, float16 = 2 }

-- Entries { shard =, tensor = } in buckets of up to `limit` bytes. It follows from dtypes and sizes only, so it is the
-- same in all processes.
local function buckets_of(entries, limit)
    local buckets, open = {}, {}
    for _, entry in ipairs(entries) do
        local t, shard = entry.tensor, entry.shard
        local opened, key = open[shard.group] or {}, t.dtype .. " " .. t.device
        open[shard.group] = opened
        local bytes, bucket = shard.n * BYTES[t.dtype], opened[key]
        local alone = bytes >= math.min(ALONE, limit)
        if alone or not bucket or bucket.bytes + bytes > limit then
            bucket = { group = shard.group, dtype = t.dtype, device = t.device, each = 0, bytes = 0, even = true }
            buckets[#buckets + 1] = bucket
            if not alone then opened[key] = bucket end
        end
        entry.at, bucket.each, bucket.bytes = bucket.each + 1, bucket.each + shard.each, bucket.bytes + bytes
        bucket.even = bucket.even and shard.n == shard.each * shard.group.size
        bucket[#bucket + 1] = entry
    end
    return buckets
end

local function new_buffer(bucket, shape)
    return (bucket.even and te.empty or te.zeros)(shape, { dtype = bucket.dtype, device = bucket.device })
end

-- Every process's share of each tensor in a bucket, as a buffer {size, elements}.
local function packed(bucket)
    local first = bucket[1]
    if #bucket == 1 and bucket.even and first.tensor:is_contiguous() then
        return first.tensor:view { bucket.group.size, bucket.each }
    end
    local buffer = new_buffer(bucket, { bucket.group.size, bucket.each })
    for _, entry in ipairs(bucket) do entry.shard:scatter(buffer, entry.at, entry.tensor) end
    return buffer
end

-- Gives a slice a gradient, which adds to what it has. The handle is let go: the collector would keep the memory.
local function receive(slice, gradient)
    local there = core.gradient(slice)
    if there then
        there:add_(gradient)
        there:release()
    elseif gradient.dtype == slice.dtype then
        slice.grad = gradient
    else
        slice.main_grad = gradient
    end
    gradient:release()
end

-- The gradient of the parameter is let go.
local function reduce_bucket(bucket)
    local buffer = packed(bucket)
    local flat = buffer:view { buffer:numel() }
    local own = bucket.group:reduce_scatter(flat, "average")
    flat:release()
    buffer:release()
    for _, entry in ipairs(bucket) do
        local shard = entry.shard
        receive(shard.slice, own:narrow(1, entry.at, shard.count))
        entry.tensor:release()
        core.zero_gradient(shard.parameter)
    end
    own:release()
end

-- The same of one that has an owner, who keeps it. Of a weight that is stored quantized the slice is the parameter, and
-- nobody could tell what was averaged from what was added to it.
local function reduce_owned(shard, gradient)
    local parameter = shard.parameter
    if core.is_quantized(parameter) then
        if shard.averaged then
            fail("te.distributed.average_gradients: a sharded weight that is stored quantized, %s, was averaged "
                .. "before: zero_grad comes between", options.shape(parameter))
        end
        shard.averaged = true
    end
    local dense = gradient:is_contiguous() and gradient or gradient:contiguous()
    shard.group:all_reduce_(dense, "average")
    if not shard.whole then
        local lent = parameter.main_grad and dense:clone() or dense
        receive(shard.slice, shard:cut(lent))
        core.zero_gradient(parameter)
    elseif not rawequal(dense, gradient) then
        gradient:copy_(dense)
    end
    dense:release()
    gradient:release()
end

--- Gives slices their shares of the averages of gradients, which are let go. A parameter that comes twice has one.
---@param group table
---@param list te.Tensor[]  sharded parameters
---@param grads table       their gradients, the same ones in all processes; false: none
---@param limit number      bytes that go together
function scatter.reduce(group, list, grads, limit)
    local entries, seen = {}, {}
    for i, parameter in ipairs(list) do
        local shard = shards.of[parameter]
        shard:follow()
        if grads[i] and seen[shard] then
            grads[i]:release()
        elseif grads[i] and shard.owner then
            reduce_owned(shard, grads[i])
        elseif grads[i] then
            entries[#entries + 1] = { shard = shard, tensor = grads[i] }
        end
        grads[i], seen[shard] = false, true
    end
    for _, bucket in ipairs(buckets_of(entries, limit)) do reduce_bucket(bucket) end
end

-- This process's shares of a bucket's weights, one after the other.
local function own_shares(bucket)
    if #bucket == 1 and bucket.even then return bucket[1].shard.slice:detach() end
    local buffer = new_buffer(bucket, { bucket.each })
    for _, entry in ipairs(bucket) do
        local shard = entry.shard
        local place, slice = buffer:narrow(1, entry.at, shard.count), shard.slice:detach()
        place:copy_(slice)
        place:release()
        slice:release()
    end
    return buffer
end

-- What this process has of a bucket's weights, to all.
local function gather_bucket(bucket)
    local own = own_shares(bucket)
    local all = bucket.group:all_gather(own)
    own:release()
    local rows = all:view { bucket.group.size, bucket.each }
    for _, entry in ipairs(bucket) do
        entry.shard:collect(rows, entry.at, entry.tensor)
        entry.tensor:release()
    end
    all:release()
    rows:release()
end

-- The parts of a weight that is stored quantized are sent as they are, so that all have the same bits; and the amax of
-- delayed scaling counts in all.
local function gather_quantized(shard)
    local parameter, group = shard.parameter, shard.group
    local parts = { core.quantized_parts(parameter) }
    for i = 1, 6 do
        if parts[i] then group:broadcast_(parts[i], shard.owner) end
    end
    if not shard.whole then
        core.set_quantized_parts(parameter, unpack(parts, 1, 6))
        core.count_quantized(parameter)
    end
    for i = 1, 6 do
        if parts[i] then parts[i]:release() end -- handles that are left would have the next ones lie elsewhere
    end
end

--- Gives all processes the weights that shards have.
---@param list table[]  shards
function scatter.gather(list)
    local entries = {}
    for _, shard in ipairs(list) do
        local parameter = shard.parameter
        if not shard.owner then
            entries[#entries + 1] = { shard = shard, tensor = parameter:detach() }
        elseif core.is_quantized(parameter) then
            gather_quantized(shard)
        else
            shard.group:broadcast_(parameter:detach(), shard.owner)
        end
    end
    for _, bucket in ipairs(buckets_of(entries, LIMIT)) do gather_bucket(bucket) end
end

return scatter
