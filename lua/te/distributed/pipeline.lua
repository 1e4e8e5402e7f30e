--- te.distributed.pipeline_step: forward and backward of a model whose blocks are divided over processes, for the
-- micro-batches of a step, one forward and one backward in turn (1F1B; PipeDream-Flush). Of six in three stages:
--
--     rank 0    F1 F2 F3 .. .. B1 F4 B2 F5 B3 F6 B4 .. B5 .. B6
--     rank 1    .. F1 F2 .. B1 F3 B2 F4 B3 F5 B4 F6 B5 .. B6
--     rank 2    .. .. F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6
--
-- So rank r keeps what backward needs of no more than size - r micro-batches, and gradients are added in the order of
-- the micro-batches, as one process adds them. Activations and their gradients pass between neighbours alone, whose
-- groups of two meet in Group:exchange; where one sends an activation while the other sends a gradient, both at once.
--
-- A stage that fails says so to its neighbours in place of its next call, they to theirs, and all in what ends a step:
-- so there is an error in every process, and none waits.
--
-- Sources: Narayanan et al., PipeDream-2BW (arXiv 2006.09503), section 3; Megatron-LM (arXiv 2104.04473), section 2.2.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local staged = require "te.staged_decoder"
local mode = require "te.recipe.mode"
local core = te._core

local WHO = "te.distributed.pipeline_step"

local OPTIONS = {
    autocast = { "table", help = "options of te.autocast, in which every micro-batch is computed" },
    scale = { "number",
        help = "factor of the losses' gradients; default: 1 / number of micro-batches, for those of the mean loss" },
}

-- Neighbours ------------------------------------------------------------------------------------------------------

-- The way to a neighbour, the stage `rank`, which is `other` in a group of two, and how many calls are left of it in
-- the step. `broken`: a call of it has failed.
local function link(group, other, rank, calls)
    return group and { group = group, other = other, rank = rank, left = calls }
end

-- Sends x, or receives what is like it, or both.
local function call(to, x, sends, receives)
    to.left = to.left - 1
    local none = -1
    local done, came = pcall(to.group.exchange, to.group, x, sends and to.other or none, receives and to.other or none)
    if done then return came end
    to.left, to.broken = 0, true
    local said = tostring(came):gsub("^[^:]+:%d+: ", "") -- its ranks are those of the two
    fail("%s: with the stage of rank %d: %s", WHO, to.rank, said)
end

local function send(to, x) call(to, x, true, false):release() end

local function receive(from, like)
    local came = call(from, like, false, true)
    like:release()
    return came
end

-- Tells a neighbour that waits, or will, that there is nothing more to come.
local function call_off(to, x)
    if not to or to.left == 0 then return end
    to.left = 0
    pcall(to.group.exchange, to.group, x, to.group.size, -1) -- nobody: the call fails on both sides
end

-- The stage's work ------------------------------------------------------------------------------------------------

local Work = {}
Work.__index = Work

-- A tensor like what stages pass on.
function Work:like()
    self.dtype = self.dtype or self:under(staged.dtype_of, self.model)
    return staged.like(self.model, self.batches[1][1], self.dtype)
end

function Work:under(fn, ...)
    if self.autocast then return te.autocast(self.autocast, fn, ...) end
    return fn(...)
end

-- Forward of micro-batch i, which x came for; returns what is to be sent.
function Work:forward(i, x)
    if x then x.requires_grad = true end
    local batch = self.batches[i]
    local y = self:under(self.model.forward_stage, self.model, batch[1], batch[2], x)
    self.kept[i] = { x = x, y = y }
    if self.behind then return y:detach() end
    self.losses[i] = y:detach():to "float64"
end

-- Backward of micro-batch i, of whose result dy is the gradient; returns what is to be sent.
function Work:backward(i, dy)
    local kept = self.kept[i]
    local x, y = kept.x, kept.y
    dy = dy or te.full({}, self.scale, { dtype = y.dtype, device = y.device })
    if y.requires_grad then y:backward(dy) end
    local dx = x and (x.grad or te.zeros_like(x)):contiguous()
    self.kept[i] = nil
    for _, t in ipairs { y, dy, x } do t:release() end
    return dx
end

-- Sends what a forward made and releases it, for a gradient where one is due.
function Work:pass_forward(y, gradient)
    if not self.behind then return end
    local came
    if gradient then came = call(self.behind, y, true, true) else send(self.behind, y) end
    y:release()
    return came
end

-- The same of a backward, for the input of micro-batch `next`, where there is one to come.
function Work:pass_backward(dx, next)
    if not self.before then return end
    local came
    if next then came = call(self.before, dx, true, true) else send(self.before, dx) end
    dx:release()
    return came
end

local function receive_input(self) return self.before and receive(self.before, self:like()) end

local function run_schedule(self)
    local count, ahead = #self.batches, self.ahead
    for i = 1, ahead do self:pass_forward(self:forward(i, receive_input(self))) end
    local x = ahead < count and receive_input(self) or nil
    for i = 1, count - ahead do
        local dy = self:pass_forward(self:forward(i + ahead, x), true)
        x = self:pass_backward(self:backward(i, dy), i < count - ahead)
    end
    for i = count - ahead + 1, count do
        self:pass_backward(self:backward(i, receive(self.behind, self:like())))
    end
end

-- Each loss in turn where the model is in one process.
local function run_alone(self)
    for i = 1, #self.batches do
        self:forward(i)
        self:backward(i)
    end
end

-- The parameter that the first and the last stage both have -----------------------------------------------------------

-- Lays the gradient of before aside, where there is such a parameter. Returns what adds that of the step over both
-- stages.
local function begin_tied(model, stage)
    local parameter = stage.ends and model:tied_table()
    if not parameter or not parameter.requires_grad then return function() end end
    local before = core.gradient(parameter)
    local aside = before and te.no_grad(te.clone, before)
    if before then te.no_grad(before.zero_, before) end
    return function()
        local grad = core.gradient(parameter)
        te.no_grad(function()
            stage.ends:all_reduce_(grad)
            if aside then grad:add_(aside) end
        end)
        grad:release()
    end
end

-- The step --------------------------------------------------------------------------------------------------------

local function check_batches(batches)
    if options.list(WHO, "batches", batches) == 0 then fail("%s: batches: there is none", WHO) end
    local first
    for i, batch in ipairs(batches) do
        local ids = options.argument(WHO, ("batches[%d]"):format(i), batch, { "table" })[1]
        if not te.is_tensor(ids) or not te.is_tensor(batch[2]) then
            fail("%s: batches[%d]: expected { ids, targets }, got { %s, %s }", WHO, i, options.shown(ids),
                options.shown(batch[2]))
        end
        first = first or options.shape(ids)
        if options.shape(ids) ~= first then
            fail("%s: batches[%d]: ids are %s, those of the first are %s: micro-batches are of one shape", WHO, i,
                options.shape(ids), first)
        end
    end
end

local FAILED, STOPPED = 2, 1 -- by itself; because a neighbour has

-- Every loss in all processes, and random numbers from the same place; raises where a stage has failed.
local function conclude(self, stage, problem)
    local count, far = #self.batches, 0
    local stopped = self.before and self.before.broken or self.behind and self.behind.broken
    local own = { problem == nil and 0 or stopped and STOPPED or FAILED, staged.drawn() }
    for i = 1, count do own[2 + i] = self.losses[i] and self.losses[i]:item() or 0 end
    local row = te.tensor({ own }, { dtype = "float64", device = "cpu" })
    local met, all = pcall(stage.group.all_gather, stage.group, row)
    if own[1] == FAILED or not met then error(problem == nil and all or problem, 0) end
    all = all:totable()
    for rank, numbers in ipairs(all) do
        if numbers[1] == FAILED then fail("%s: rank %d failed, whose message says why", WHO, rank - 1) end
        far = math.max(far, numbers[2])
    end
    if problem ~= nil then error(problem, 0) end
    staged.draw_from(far)
    return { unpack(all[stage.size], 3, 2 + count) }
end

local uniform = setmetatable({}, { __mode = "k" }) -- groups whose processes have the same stage

-- Raises where processes of several stages would share the amaxes of delayed scaling: their products are others.
local function check_sharing(stage, group)
    if not te.distributed.is_group(group) or group.size == 1 or uniform[group] then return end
    local own = te.tensor({ stage.rank, -stage.rank }, { dtype = "int32", device = "cpu" })
    local most = group:all_reduce(own, "max"):totable()
    if most[1] ~= -most[2] then
        fail("%s: option autocast: group: %s is of several stages, which have no products in common", WHO,
            tostring(group))
    end
    uniform[group] = true
end

local function new_work(model, batches, o)
    local stage, count = model.stage, #batches
    local work = setmetatable({ model = model, batches = batches, scale = o.scale or 1 / count, autocast = o.autocast,
        kept = {}, losses = {}, ahead = 0 }, Work)
    if not stage then return work end
    local function calls(rank) return count + math.min(stage.size - 1 - rank, count) end -- with the stage behind
    work.ahead = math.min(stage.size - 1 - stage.rank, count)
    work.before = link(stage.before, 0, stage.rank - 1, calls(stage.rank - 1))
    work.behind = link(stage.behind, 1, stage.rank + 1, calls(stage.rank))
    return work
end

local function run_stage(work, stage)
    local finish_tied = begin_tied(work.model, stage)
    local done, problem = pcall(staged.apart, stage, run_schedule, work)
    if not done then
        local x = te.zeros { 1 }
        call_off(work.before, x)
        call_off(work.behind, x)
    end
    local losses = conclude(work, stage, not done and problem or nil)
    finish_tied()
    return losses
end

--- Forward and backward of a model with pipeline_parallel for micro-batches { { ids, targets }, … } of one shape, which
--- are the same in all its processes; all call it. Gradients are added to those that are there, as by loss:backward();
--- those of a table that the first and the last stage share are complete in both. Of a model that is not divided it
--- does the same, one micro-batch after the other. What a step that fails has made of gradients is of no use.
---@param model table          of te.models
---@param batches table        list of { ids, targets }, both {batch, seq}
---@param opts table|nil
---@return number loss         the mean of the micro-batches' losses, in all processes
---@return number[] losses     of each
local function pipeline_step(model, batches, opts)
    local o = options.check(WHO, opts, OPTIONS)
    if not te.is(model, require "te.decoder") then
        fail("%s: model: expected a model of te.models, got %s", WHO, options.shown(model))
    end
    check_batches(batches)
    if not core.grad_enabled() then fail("%s: within te.no_grad there is nothing to train", WHO) end
    local work, losses, sum = new_work(model, batches, o), {}, 0
    if model.stage then
        check_sharing(model.stage, o.autocast and o.autocast.group or mode.group)
        losses = run_stage(work, model.stage)
    else
        run_alone(work)
        for i, loss in ipairs(work.losses) do losses[i] = loss:item() end
    end
    for _, loss in ipairs(losses) do sum = sum + loss end
    return sum / #losses, losses
end
options.declare(pipeline_step, OPTIONS)

return { pipeline_step = pipeline_step }
