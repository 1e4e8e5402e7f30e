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

local te = require "te"
local fail = require "te.fail"
local Module = require "te.module"
local options = require "te.options"

local gradients = {}

local ALONE = 2 ^ 20 -- bytes from which on copying a gradient costs more than a collective of its own
local BYTES = { float64 = 8, float32 = 4, bfloat16 = 2, float16 = 2 }

local function tensors_of(who, params)
    if Module.is(params, Module) then params = params:parameters() end
    if type(params) ~= "table" or getmetatable(params) then
        fail("%s: params: expected a list of tensors or a module, got %s", who, type(params))
    end
    options.list(who, "params", params)
    for i, parameter in ipairs(params) do
        if not te.is_tensor(parameter) then
            fail("%s: params[%d]: expected a tensor, got %s", who, i, type(parameter))
        end
    end
    return params
end

local function group_of(who, group)
    if group == nil then return te.distributed.world() end
    if not te.distributed.is_group(group) then
        fail("%s: option group: expected a group of processes, got %s", who, type(group))
    end
    return group
end

-- Which parameters have a gradient in some process, as a list of 0 and 1; 2 is one that is float32, which a main_grad
-- may be, so that a layout does not outlive the dtypes that it is for.
local function agree(group, n, grads)
    local mask = {}
    for i = 1, n do mask[i] = not grads[i] and 0 or grads[i].dtype == "float32" and 2 or 1 end
    return group:all_reduce_(te.tensor(mask, { dtype = "int32", device = "cpu" }), "max"):totable()
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
-- the same in all processes.
local function make_layout(params, mask, grads, limit)
    local layout = { params = { unpack(params) }, mask = mask, limit = limit, alone = {}, buckets = {} }
    local open = {}
    for i = 1, #params do
        local grad = grads[i]
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

--- Replaces the gradients by their averages over the processes of a group, which all call it with the same parameters
--- in the same order. A gradient that only some processes have counts as zeros in the others, and gets there; one that
--- none has stays away, and one that is a main_grad in some process becomes one in all. On the CPU averages have the
--- same bits in all processes. Small gradients are averaged together up to bucket_bytes (25e6).
---@param params table  a list of parameters, or a module
---@param opts table|nil  group: te.distributed.world() unless given; bucket_bytes
function gradients.average_gradients(params, opts)
    local who = "te.distributed.average_gradients"
    local o = options.check(who, opts, { group = { "any" }, bucket_bytes = { "number", 25e6, min = 1 } })
    local list, group = tensors_of(who, params), group_of(who, o.group)
    if group.size == 1 or #list == 0 then return end
    local grads = {}
    for i, parameter in ipairs(list) do grads[i] = te._core.gradient(parameter) or false end
    local mask = agree(group, #list, grads)
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
        average(group, layout_of(params, list, mask, grads, o.bucket_bytes), grads)
    end)
    for i = 1, #list do
        if grads[i] then grads[i]:release() end -- this handle; the collector would keep a model's gradients for a while
    end
end

-- Tensors by name: a module's whole state, or the list.
local function state_of(who, params)
    if Module.is(params, Module) then return params:state_dict(), params end
    local state = {}
    for i, tensor in ipairs(tensors_of(who, params)) do
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

--- Gives all processes of a group the values that one of them has: of a module parameters, buffers and what its recipe
--- remembers, of a list its tensors.
---@param params table  a module, or a list of tensors
---@param opts table|nil  group: te.distributed.world() unless given; root (0): the rank whose values they are
function gradients.broadcast_parameters(params, opts)
    local who = "te.distributed.broadcast_parameters"
    local o = options.check(who, opts, { group = { "any" }, root = { "integer", 0, min = 0 } })
    local state, module = state_of(who, params)
    local group = group_of(who, o.group)
    if group.size == 1 then return end
    te.no_grad(function()
        for _, name in ipairs(options.names(state)) do broadcast(group, state[name], o.root) end
        if module then module:load_state_dict(state) end -- parts of quantized parameters: others depend on them
    end)
end

return gradients
