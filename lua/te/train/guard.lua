--- te.train.guard: what is not finite never reaches the weights, nor a checkpoint.
--
-- A step whose loss or gradients are not finite is skipped and counted; three in a row end the run with the name of the
-- tensor that holds the damage and of the layer it belongs to. So does damage that a step itself has made (a learning
-- rate far too high, say) before it is saved.

local te = require "te"
local options = require "te.options"
local shards = require "te.distributed.shards"
local run = require "te.train.run"

local Guard = {}
Guard.__index = Guard

local PATIENCE = 3
local ELSEWHERE = "a part in another process"

local function finite(x) return x - x == 0 end

--- Keeps what is not finite from the weights: allows(loss, grad_norm) says whether a step may be applied.
---@param model table
---@param ranks table|nil  te.train.ranks of a model that several processes train: one alone gives the reason
local function new(model, ranks)
    return setmetatable({ model = model, ranks = ranks, skipped = 0, in_a_row = 0 }, Guard)
end

local function tensor_of(parameter, kind, optimizer)
    local shard = shards.of[parameter]
    local slice = shard and shard.slice or parameter
    if kind == "gradient" then return te._core.gradient(slice) end
    if kind == "parameter" then return parameter:detach() end
    return (optimizer.state[slice] or {})[kind]
end

-- "parameter blocks.3.mlp.2.weight of Linear(…)" for the first tensor of the kind that is not finite, here or in
-- another process of a group. Kinds are "gradient", "parameter" and the names of what the optimizer keeps of one.
local function culprit(model, kind, optimizer, group)
    local tensors, places, texts = {}, {}, {}
    for name, parameter, module in model:named_parameters() do
        local tensor = tensor_of(parameter, kind, optimizer)
        texts[#texts + 1] = ("%s %s of %s"):format(kind, name, tostring(module):match("^[^\n]*"))
        if tensor then tensors[#tensors + 1], places[#tensors + 1] = tensor, #texts end
    end
    local first = #texts + 1
    for i, square in ipairs(#tensors > 0 and te._core.sum_squares(tensors) or {}) do
        if not finite(square) then first = math.min(first, places[i]) end
    end
    if group then first = group:all_reduce(te.tensor({ first }, { dtype = "int32", device = "cpu" }), "min"):item() end
    return texts[first]
end

-- The processes that have shares of this one's gradients, where it is so.
local function sharing(self)
    for _, parameter in ipairs(self.ranks and self.model:parameters() or {}) do
        if shards.of[parameter] then return self.ranks.alike end
    end
end

--- Whether the step may be applied. Ends the run at the third refusal in a row.
---@param loss number
---@param grad_norm number
---@param backward function|nil  makes the gradients of the step again, where a graph has taken them with it
function Guard:allows(loss, grad_norm, backward)
    if finite(loss) and finite(grad_norm) then
        self.in_a_row = 0
        return true
    end
    self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
    if self.in_a_row < PATIENCE then return false end
    local group = sharing(self)
    local what = culprit(self.model, "parameter", nil, group)
    if not what and backward then backward() end
    what = what or culprit(self.model, "gradient", nil, group)
    if self.ranks and not self.ranks:speaks(what ~= nil) then run.fail(run.exit.not_finite) end
    what = what or ("the loss of %s"):format(self.model.__name)
    run.fail(run.exit.not_finite, ("%d steps in a row were not finite (loss %s, gradient norm %s): %s"):format(
        PATIENCE, tostring(loss), tostring(grad_norm), what))
end

--- The first parameter that is not finite, or the first thing that the optimizer keeps of one; nil where all are.
---@param optimizer te.Optimizer|nil
---@return string|nil name  with its layer
function Guard:damage(optimizer)
    local found, slots = culprit(self.model, "parameter"), {}
    for _, state in pairs(optimizer and optimizer.state or {}) do
        for name, value in pairs(state) do slots[name] = te.is_tensor(value) or nil end
    end
    for _, name in ipairs(options.names(slots)) do found = found or culprit(self.model, name, optimizer) end
    return found
end

--- For whoever is about to save: ends the run where there is damage, which would take a good checkpoint's place.
---@param optimizer te.Optimizer
function Guard:check(optimizer)
    local found = self:damage(optimizer)
    local any = self.ranks and self.ranks:any_part(found ~= nil)
    if sharing(self) then any = self.ranks:sums(found and 1 or 0) > 0 end
    if any then found = found or ELSEWHERE end
    if not found then return end
    local speaks = not self.ranks or self.ranks:speaks(found ~= ELSEWHERE)
    run.fail(run.exit.not_finite, speaks and found .. " is not finite: it is not saved" or nil)
end

return new
