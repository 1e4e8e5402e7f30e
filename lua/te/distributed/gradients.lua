--- te.distributed.average_gradients and broadcast_parameters: what a training loop of several processes adds to that
--- of one.
--
--     te.distributed.broadcast_parameters(model)            -- once, and after loading
--     loss:backward()
--     te.distributed.average_gradients(model)               -- every step, before clipping
--     optimizer:step()
--
-- Large gradients are averaged where they are. Small ones, of which a model has many, go together: they are copied into
-- buckets, flat tensors of one dtype that are kept for the next step.
--
-- Of parameters whose optimizer is sharded each process gets the share that it updates (te.distributed.scatter).
--
-- Parameters of which each process of a group has parts (te.distributed.parts) are averaged only over those that have
-- the same parts, and those of a stage (te.distributed.stages) over those that have the same stage. Others, such as
-- experts, are held apart: their gradients came from all of the group already, so they are divided by its size, too.

local te = require "te"
local fail = require "te.fail"
local Module = require "te.module"
local options = require "te.options"
local parameter_list = require "te.parameter_list"
local agree = require "te.distributed.agree"
local parts = require "te.distributed.parts"
local shards = require "te.distributed.shards"
local stages = require "te.distributed.stages"

local apart = setmetatable({}, { __mode = "k" }) -- groups by parameter that is held apart, and by the module of it

local gradients = { apart = apart }

--- Says that each process of the group has parameters of its own in the module, to which gradients come from all of
--- them. average_gradients then divides those by the group's size, and broadcast_parameters leaves the values alone.
---@param module table
---@param group table
function gradients.hold_apart(module, group)
    apart[module] = group
    for _, parameter in ipairs(module:parameters()) do apart[parameter], parts[parameter] = group, group end
end

-- A list as lists { group =, apart =, sharded =, parameters… } of what averages alike: `group` of those that processes
-- hold parts of.
local function divide(list)
    local lists, known = {}, {}
    for _, parameter in ipairs(list) do
        local group, is_apart, sharded = parts[parameter], apart[parameter] ~= nil, shards.of[parameter] ~= nil
        local alike = known[group or 0] or {}
        known[group or 0] = alike
        local kind = (is_apart and 2 or 0) + (sharded and 1 or 0)
        if not alike[kind] then
            alike[kind] = { group = group, apart = is_apart, sharded = sharded }
            lists[#lists + 1] = alike[kind]
        end
        table.insert(alike[kind], parameter)
    end
    return lists
end
gradients.divide = divide

local same_parts = setmetatable({}, { __mode = "k" }) -- by group that holds parts: by group of all; true: all have them

-- The processes of `all` that have what this one has of what `group` holds parts of; nil: there is no other.
local function holders(who, all, group)
    local known = same_parts[group] or setmetatable({}, { __mode = "k" })
    same_parts[group] = known
    if not known[all] then
        local same = all:split(group.rank)
        if same.size ~= all.size and same.size * group.size ~= all.size then
            fail("%s: %s holds parts of parameters, but does not divide %s", who, tostring(group), tostring(all))
        end
        known[all] = same.size == all.size or same
    end
    local same = known[all] == true and all or known[all]
    return same.size > 1 and same or nil
end
gradients.holders = holders

-- The processes of `all` that have the same stage of what a list of parameters belongs to: `all` where it is not
-- divided, nil where there is no other.
local function same_stage(who, all, list)
    local group = all.size > 1 and stages.group_of(list)
    if not group then return all.size > 1 and all or nil end
    return holders(who, all, group)
end
gradients.same_stage = same_stage

local ALONE = 2 ^ 20 -- bytes from which on copying a gradient costs more than a collective of its own
local BYTES = { float64 = 8, float32 = 4, bfloat16 = 2, float16 = 2 }

-- Which parameters have a gradient in some process, as a list of 0 and 1; 2 is one that is float32, which a main_grad
-- may be, so that a layout does not outlive the dtypes that it is for.
local function agree_on_gradients(group, list, grads)
    local mask = {}
    for i = 1, #list do mask[i] = not grads[i] and 0 or grads[i].dtype == "float32" and 2 or 1 end
    return agree.on_parameters("te.distributed.average_gradients", group, list, mask)
end

local function new_bucket(dtype, device) return { dtype = dtype, device = device, n = 0, bytes = 0, members = {} } end

-- Memory of a bucket, and a view of it for each member's gradient.
local function allocate(bucket, grads)
    local at = 1
    bucket.flat, bucket.views = te.empty({ bucket.n }, { dtype = bucket.dtype, device = bucket.device }), {}
    for k, i in ipairs(bucket.members) do
        local n = grads[i]:numel()
        bucket.views[k] = bucket.flat:narrow(1, at, n):view(grads[i].shape)
        at = at + n
    end
end

-- How the gradients travel: a list of buckets, and those that go alone. It follows from dtypes and sizes only, so it is
-- the same in all processes. Parameters are not kept by it: one of them may be what it is kept by.
local function make_layout(params, mask, grads, limit)
    local layout = { params = setmetatable({}, { __mode = "v" }), mask = mask, limit = limit, alone = {}, buckets = {} }
    local open = {}
    for i = 1, #params do
        local grad = grads[i]
        layout.params[i] = params[i]
        if grad then
            local dtype, device, n = grad.dtype, grad.device, grad:numel()
            local key, bytes = dtype .. " " .. device, n * BYTES[dtype]
            local bucket = open[key]
            if bytes >= math.min(ALONE, limit) then
                table.insert(layout.alone, i)
            else
                if not bucket or bucket.bytes + bytes > limit then
                    bucket = new_bucket(dtype, device)
                    open[key] = bucket
                    table.insert(layout.buckets, bucket)
                end
                bucket.n, bucket.bytes = bucket.n + n, bucket.bytes + bytes
                table.insert(bucket.members, i)
            end
        end
    end
    for _, bucket in ipairs(layout.buckets) do allocate(bucket, grads) end
    return layout
end

local function same(a, b)
    if #a ~= #b then return false end
    for i = 1, #a do
        if not rawequal(a[i], b[i]) then return false end
    end
    return true
end

local kept = setmetatable({}, { __mode = "k" }) -- layouts by list of parameters, or by module

local function layout_of(owner, params, mask, grads, limit)
    local layout = kept[owner]
    if not (layout and layout.limit == limit and same(layout.mask, mask) and same(layout.params, params)) then
        layout = make_layout(params, mask, grads, limit)
        kept[owner] = layout
    end
    return layout
end

local function average(group, layout, grads)
    for _, i in ipairs(layout.alone) do
        local grad = grads[i]
        local dense = grad:is_contiguous() and grad or grad:contiguous()
        group:all_reduce_(dense, "average")
        if not rawequal(dense, grad) then grad:copy_(dense) end
    end
    for _, bucket in ipairs(layout.buckets) do
        local members, views = bucket.members, bucket.views
        for k = 1, #members do views[k]:copy_(grads[members[k]]) end
        group:all_reduce_(bucket.flat, "average")
        for k = 1, #members do grads[members[k]]:copy_(views[k]) end
    end
end

-- Averages the gradients of a list; `owner` keeps what they travel in. Of sharded parameters each process gets its
-- share.
local function average_list(owner, list, group, limit)
    if list.sharded then shards.check(group, list) end
    local grads = {}
    for i, parameter in ipairs(list) do grads[i] = te._core.gradient(parameter) or false end
    local mask = agree_on_gradients(group, list, grads)
    te.no_grad(function()
        for i, parameter in ipairs(list) do
            local there, wide = grads[i], mask[i] == 2 and parameter.dtype ~= "float32"
            if mask[i] > 0 and (not there or wide and there.dtype ~= "float32") then
                grads[i] = te.zeros(parameter.shape, { dtype = wide and "float32" or parameter.dtype,
                    device = parameter.device })
                if there then grads[i]:copy_(there) end
                parameter[wide and "main_grad" or "grad"] = grads[i]
                if wide then parameter.grad = nil end
            end
        end
        if list.sharded then
            require("te.distributed.scatter").reduce(group, list, grads, limit)
        else
            average(group, layout_of(owner, list, mask, grads, limit), grads)
        end
    end)
    for i = 1, #list do
        if grads[i] then grads[i]:release() end -- this handle; the collector would keep a model's gradients for a while
    end
end

local function scale_list(list, factor)
    te.no_grad(function()
        for _, parameter in ipairs(list) do
            local shard = shards.of[parameter]
            local grad = te._core.gradient(shard and shard.slice or parameter)
            if grad then grad:mul_(factor) grad:release() end
        end
    end)
end

local GROUP = { "any", help = "default: te.distributed.world()" }
local AVERAGE = { group = GROUP,
    bucket_bytes = { "number", 25e6, min = 1, help = "small gradients are averaged together, up to this many bytes" } }
local BROADCAST = { group = GROUP, root = { "integer", 0, min = 0, help = "rank whose values are sent" } }

--- Replaces gradients by their averages over the processes of a group, which must all call it with the same parameters
--- in the same order; others of the same number are an error where shapes or dtypes show it. A gradient that only some
--- processes have counts as zeros in the others, which get the average; one that none has stays absent, and one that is
--- a main_grad in some process becomes one in all. On the CPU, averages have the same bits in all processes. Parts of
--- split layers are averaged over the processes with the same part, stages over those with the same stage; gradients of
--- split experts become those of the average loss. Of parameters whose optimizer is sharded
--- (te.distributed.shard_optimizer) each process gets the share that it updates, and the gradient of the parameter is
--- taken away.
---@param params table  a list of parameters, or a module
---@param opts table|nil
function gradients.average_gradients(params, opts)
    local who = "te.distributed.average_gradients"
    local o = options.check(who, opts, AVERAGE)
    local list = parameter_list(who, params)
    local group = same_stage(who, options.group(who, "option group", o.group) or te.distributed.world(), list)
    if not group then return end
    for _, alike in ipairs(divide(list)) do
        local same = group
        if alike.group then same = holders(who, group, alike.group) end
        if same then average_list(alike.group and alike[1] or params, alike, same, o.bucket_bytes) end
        if alike.apart then scale_list(alike, 1 / alike.group.size) end
    end
end
options.declare(gradients.average_gradients, AVERAGE)

-- Tensors by name: a module's whole state, or the list.
local function state_of(who, params)
    if Module.is(params, Module) then return params:state_dict(), params end
    local state = {}
    for i, tensor in ipairs(parameter_list(who, params)) do
        if te._core.is_quantized(tensor) then
            fail("%s: params[%d] is stored quantized: give the module that it belongs to", who, i)
        end
        state[("%08d"):format(i)] = tensor
    end
    return state
end

local function broadcast(group, tensor, root)
    local dense = tensor:is_contiguous() and tensor or tensor:contiguous()
    group:broadcast_(dense, root)
    if not rawequal(dense, tensor) then tensor:copy_(dense) end
end

-- Of a name in a state: the group whose processes hold others under it, if there is one.
local function find_parts(state, module)
    local prefixes = {}
    for path, part in (module and module:named_modules() or function() end) do
        if apart[part] then prefixes[#prefixes + 1] = { path == "" and "" or path .. ".", apart[part] } end
    end
    for path, parameter in (module and module:named_parameters() or function() end) do
        if parts[parameter] then prefixes[#prefixes + 1] = { path .. ".", parts[parameter] } end -- stored quantized
    end
    return function(name)
        for _, entry in ipairs(prefixes) do
            if name:sub(1, #entry[1]) == entry[1] then return entry[2] end
        end
        return parts[state[name]]
    end
end

-- All processes have tensors of the same names; what is no part is alike.
local function agree_on_state(who, group, names, state, held_in)
    local flags, own = {}, {}
    for i, name in ipairs(names) do flags[i], own[i] = 0, agree.number_of(name, state[name], held_in(name)) end
    agree.largest(who, group, flags, own, function(i)
        return ("tensor %d is %s, %s %s"):format(i, names[i], state[names[i]].dtype, options.shape(state[names[i]]))
    end)
end

-- Where the root stands among its like, which are a group in each process.
local function place_of(all, same, root)
    return all:broadcast_(te.tensor({ same.rank }, { dtype = "int64", device = "cpu" }), root):item()
end

-- To those who have the same ones, from that among them who stands where the root stands among its like.
local function broadcast_parts(who, all, part_of, tensor, root)
    local same = holders(who, all, part_of)
    if same then broadcast(same, tensor, place_of(all, same, root)) end
end

--- Gives all processes of a group the values of one of them: of a module its parameters, buffers and recipe state, of a
--- list its tensors. Other names, shapes or dtypes in a process are an error in all. Processes keep their parts of
--- split layers, stages and experts, or get them from one with the same parts.
---@param params table  a module, or a list of tensors
---@param opts table|nil
function gradients.broadcast_parameters(params, opts)
    local who = "te.distributed.broadcast_parameters"
    local o = options.check(who, opts, BROADCAST)
    local state, module = state_of(who, params)
    local all = options.group(who, "option group", o.group) or te.distributed.world()
    local group = same_stage(who, all, module and module:parameters() or params)
    if not group then return end
    local root = group == all and o.root or place_of(all, group, o.root)
    te.no_grad(function()
        local held_in, names = find_parts(state, module), options.names(state)
        agree_on_state(who, group, names, state, held_in)
        for _, name in ipairs(names) do
            local part_of = held_in(name)
            if part_of then
                broadcast_parts(who, group, part_of, state[name], root)
            else
                broadcast(group, state[name], root)
            end
        end
        if module then module:load_state_dict(state) end -- parts of quantized parameters: others depend on them
    end)
end

options.declare(gradients.broadcast_parameters, BROADCAST)

return gradients
