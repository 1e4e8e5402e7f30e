--- te.distributed.shards: parameters of which each process of a group updates a share, its shard, and has the rest of
--- the values from the others.
--
-- Most parameters are cut as a row of elements, each process having the same number; the last ones, fewer or none:
--
--     parameter {5, 2}      0 1 2 3 4 5 6 7 8 9      three processes      0 1 2 3 | 4 5 6 7 | 8 9
--
-- What only makes sense as a whole has an owner, and is nothing elsewhere: weights that are stored quantized, and
-- matrices that te.optim.Muon makes orthogonal.
--
-- A shard's `slice` is a leaf that lies in the memory of the parameter, and what the optimizer has in its place: slices
-- get gradients and states. Of what is nothing here it is empty.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local core = te._core

local Shard = {}
local WEAK = { __mode = "v" }

-- By parameter, until another optimizer has it. A shard does not keep its parameter, which is its slice where that is
-- stored quantized; its optimizer does.
local shards = { of = setmetatable({}, { __mode = "k" }) }

function Shard.__index(self, key)
    if key == "parameter" or key == "slice" then return self.held[1] end
    return Shard[key]
end

local function empty(parameter)
    return te.empty({ 0, 0 }, { dtype = parameter.dtype, device = parameter.device })
end

-- The slice of the memory that the parameter has now.
local function slice_of(self)
    local parameter, owner = self.parameter, self.owner
    if owner and owner ~= self.group.rank then return empty(parameter) end
    if owner then return parameter:detach() end
    return parameter:detach():view { self.n }:narrow(1, self.first + 1, self.count)
end

--- The shard of a parameter in this process.
---@param parameter te.Tensor
---@param group table
---@param owner integer|nil  the rank that has all of it
---@return table shard
function shards.new(parameter, group, owner)
    local n = parameter:numel()
    local each = math.ceil(n / group.size)
    local first = math.min(group.rank * each, n)
    local self = setmetatable({ held = setmetatable({ parameter }, WEAK), group = group, owner = owner, n = n,
        each = each, first = first, count = math.min(each, n - first), storage = parameter:storage_id(),
        whole = owner == group.rank and core.is_quantized(parameter) }, Shard)
    if not self.whole then
        self.slice = slice_of(self)
        self.slice.requires_grad = true
    end
    shards.of[parameter] = self
    return self
end

--- Has the slice lie in the parameter's memory again, which te.Module's to replaces; gradients go with it as there.
function Shard:follow()
    local parameter, slice = self.parameter, self.slice
    local storage = parameter:storage_id()
    if storage == self.storage and parameter.dtype == slice.dtype then return end
    self.storage = storage
    if self.whole then return end
    local new, grad, main = slice_of(self), slice.grad, slice.main_grad
    new.requires_grad = true
    if grad then new.grad = grad:to(new.dtype):to(new.device) end
    if main then new.main_grad = main:to(new.device) end
    core.become(slice, new)
end

--- Takes away the gradient of the slice.
function Shard:zero_gradient()
    if not self.whole then self.slice.grad, self.slice.main_grad = nil, nil end
    self.averaged = false
end

-- Calls copy(place in the buffer, place in the row) and lets both go: handles that are left would keep the memory until
-- the collector comes.
local function copy_places(copy, place, own)
    copy(place, own)
    place:release()
    own:release()
end

-- Calls copy(place in the buffer, place in the row) for where the shares of a row {n} lie in a buffer {size, elements},
-- from column `at` on. The row is let go.
local function visit_shares(self, buffer, at, row, copy)
    local rows = self.n > 0 and math.floor(self.n / self.each) or 0
    local full = rows * self.each
    local rest = self.n - full
    if rows > 0 then
        local first, own = buffer:narrow(1, 1, rows), row:narrow(1, 1, full)
        copy_places(copy, first:narrow(2, at, self.each), own:view { rows, self.each })
        first:release()
        own:release()
    end
    if rest > 0 then
        local last = buffer:select(1, rows + 1)
        copy_places(copy, last:narrow(1, at, rest), row:narrow(1, full + 1, rest))
        last:release()
    end
    row:release()
end

--- Writes a tensor like the parameter to its place in a buffer {size, elements}, from column `at` on.
function Shard:scatter(buffer, at, whole)
    local dense = whole:contiguous()
    visit_shares(self, buffer, at, dense:view { self.n }, function(place, own) place:copy_(own) end)
    if not rawequal(dense, whole) then dense:release() end
end

--- Reads it from there.
function Shard:collect(buffer, at, whole)
    visit_shares(self, buffer, at, whole:view { self.n }, function(place, own) own:copy_(place) end)
end

--- This process's share of a tensor like the parameter: a view, or what is nothing here.
function Shard:cut(t)
    if not self.owner then return t:reshape { self.n }:narrow(1, self.first + 1, self.count) end
    return self.owner == self.group.rank and t or empty(t)
end

--- The whole of a tensor like the slice, a new one on its device; all processes call it.
---@param t te.Tensor
---@param dtype string|nil  of the tensor that the owner has, unless t's
---@return te.Tensor
function Shard:join(t, dtype)
    local parameter, group = self.parameter, self.group
    local shape, device = parameter.shape, parameter.device
    if self.owner then
        local whole = self.owner == group.rank and t:detach():clone()
            or te.empty(shape, { dtype = dtype or t.dtype, device = device })
        return group:broadcast_(whole, self.owner)
    end
    local own = te.zeros({ self.each }, { dtype = t.dtype, device = t.device })
    local place = own:narrow(1, 1, self.count)
    place:copy_(t:detach())
    local all = group:all_gather(own)
    local row = all:narrow(1, 1, self.n)
    local whole = row:view(shape)
    for _, t in ipairs { own, place, all, row } do t:release() end -- the collector may come late
    return whole
end

local function has_gradient(t)
    local gradient = core.gradient(t)
    if gradient then gradient:release() end
    return gradient ~= nil
end

--- What has the gradient of the parameter: the slice. Raises where the parameter's own was not averaged.
---@param who string
---@return te.Tensor
function Shard:holder(who)
    local parameter, slice = self.parameter, self.slice
    if not self.whole and has_gradient(parameter) and not (parameter.main_grad and has_gradient(slice)) then
        fail("%s: the gradient of a sharded parameter %s was not averaged: te.distributed.average_gradients comes "
            .. "before", who, options.shape(parameter))
    end
    return slice
end

--- The parameters of an optimizer, in its order; of a sharded one those that it has slices of.
---@param optimizer te.Optimizer
---@return te.Tensor[]
function shards.parameters(optimizer)
    local list, by_slice = {}, optimizer.sharding and optimizer.sharding.by_slice or {}
    for i, slice in ipairs(optimizer.order) do list[i] = by_slice[slice] and by_slice[slice].parameter or slice end
    return list
end

--- Raises unless parameters are sharded over the group.
function shards.check(group, list)
    for _, parameter in ipairs(list) do
        local own = shards.of[parameter].group
        if not rawequal(own, group) then
            fail("te.distributed.average_gradients: option group: a parameter %s is sharded over %s, got %s",
                options.shape(parameter), tostring(own), tostring(group))
        end
    end
end

return shards
