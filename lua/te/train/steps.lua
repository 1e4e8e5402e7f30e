--- te.train.steps: the optimizer steps of a run, and what they come to.
--
-- On the CPU, and with graph = false, a step is done when start returns. On CUDA it is one launch of a graph in which
-- the device decides by itself whether the step is finite and how to clip it. What the host wants to know of it, the
-- loss and the norm, comes in one copy, which it looks at when the next step is under way:
--
--     host      feed k, launch k   feed k+1, launch k+1   look at k   feed k+2 …
--     device                       step k                  step k+1
--
-- So the device never waits for the host. A step that is not finite changes nothing, whenever the host hears of it.
--
-- Several processes (ranks) make a step together: gradients are averaged before they are looked at, the loss is the
-- mean over all, and so every process decides and changes the same.

local te = require "te"
local ranks = require "te.train.ranks"
local core = te._core

local Steps = {}
Steps.__index = Steps

--- The optimizer steps of a run: one after the other, or as launches of a graph where the device has them.
---@param opts table  next_batch() and loss(x, y); parameters, optimizer, schedule(step) and guard; device, graph, clip
---                   (the largest norm; 0: no limit) and grad_accumulation (batches of a step); ranks (te.train.ranks;
---                   this process alone unless given) and interrupted(), whether this process was asked to stop; of a
---                   model in stages (pipeline_parallel) the model and autocast, te.autocast's options
---@return table steps  start(step), finished(all)
local function new(opts)
    local together = opts.ranks or ranks.alone()
    -- what goes between processes may go through the host, which no graph can record
    local recorder = opts.graph and core.device_traits(opts.device).graphs and together.size == 1
        and opts.optimizer.update_on -- AdamW alone makes steps without the host
    return setmetatable({ o = opts, started = {}, finished_at = 0, recorder = recorder, ranks = together }, Steps)
end

-- 1 where this process was asked to stop.
local function asked(self) return self.o.interrupted and self.o.interrupted() and 1 or 0 end

-- All batches of a step, so that it fails before it has changed anything where one cannot be read.
local function next_batches(self)
    local batches = {}
    for i = 1, 2 * self.o.grad_accumulation, 2 do batches[i], batches[i + 1] = self.o.next_batch() end
    return batches
end

local function backward(self, batches)
    local total
    for i = 1, #batches, 2 do
        local loss = self.o.loss(batches[i], batches[i + 1])
        local value = loss:detach():to "float64" -- summed as the host would
        total = total and total + value or value
        loss:backward()
    end
    return total
end

-- Forward, backward, clipping and update without the host: what a graph can hold. Takes all batches of a step; gives
-- norm, factor, whether the step is made, and the sum of the losses.
local function device_step(self, ...)
    local o = self.o
    local total = backward(self, { ... })
    self.ranks:average_gradients(o.parameters)
    total = self.ranks:average(total:view { 1 })
    local clip = te.optim.grad_clip(o.parameters, { max = o.clip, scale = 1 / o.grad_accumulation, loss = total })
    o.optimizer:step { clip = clip }
    o.optimizer:zero_grad()
    return te.cat { clip, total }
end

local function start_graph(self, s, batches)
    local o = self.o
    if not self.graph then
        self.graph = te.graph(function(...) return device_step(self, ...) end, batches, { device = o.device })
    end
    o.optimizer:set_lr(s.lr)
    s.batches, s.figures = batches, core.fetch(self.graph(unpack(batches)))
    return self.ranks:sums(asked(self)) > 0
end

local function finish_graph(self, s)
    local figures = core.fetched(s.figures)
    s.loss, s.grad_norm = figures[4] / self.o.grad_accumulation, figures[1]
    s.allowed = self.o.guard:allows(s.loss, s.grad_norm, function() backward(self, s.batches) end)
    if not s.allowed then self.o.optimizer:take_back() end
    s.batches, s.figures = nil, nil
end

-- Gradients of all batches; the sum of their losses.
local function add_gradients(self, batches)
    local o, total = self.o, 0
    for i = 1, #batches, 2 do
        local loss = o.loss(batches[i], batches[i + 1])
        total = total + loss:item()
        loss:backward()
    end
    return total
end

-- The same where processes have stages of the model, in which batches follow each other.
local function add_gradients_in_stages(self, batches)
    local o, list, total = self.o, {}, 0
    for i, tensor in ipairs(batches) do batches[i] = self.ranks:part(tensor):to(o.device) end
    for i = 1, #batches, 2 do list[#list + 1] = { batches[i], batches[i + 1] } end
    local _, losses = te.distributed.pipeline_step(o.model, list, { autocast = o.autocast, scale = 1 })
    for _, loss in ipairs(losses) do total = total + loss end
    return total
end

local function make(self, s, batches)
    local o = self.o
    local total = (o.model and o.model.stage and add_gradients_in_stages or add_gradients)(self, batches)
    local sum, stops = self.ranks:sums(total, asked(self))
    self.ranks:average_gradients(o.parameters)
    -- gradients are sums over the batches; the optimizer divides, in the pass that it makes anyway
    local scale = 1 / o.grad_accumulation
    s.loss, s.grad_norm = sum / self.ranks.size * scale, te.optim.grad_norm(o.parameters) * scale
    s.allowed = o.guard:allows(s.loss, s.grad_norm)
    if s.allowed then
        if o.clip > 0 and s.grad_norm > o.clip then scale = scale * o.clip / s.grad_norm end
        o.optimizer:step { lr = s.lr, grad_scale = scale }
    end
    o.optimizer:zero_grad()
    return stops > 0
end

--- Starts a step. Returns whether to stop after it: true in all processes when one was asked to. Nothing is started
--- where a process cannot read its batches; returns nil, then, and what next_batch raised, here or in another process.
function Steps:start(step)
    if self.unfinished then self.o.optimizer:zero_grad() end -- what one that raised, or was interrupted, has left
    local s = { step = step, lr = self.o.schedule(step), at = core.clock() }
    local read, batches = pcall(next_batches, self)
    local problem = self.ranks:agree(not read and batches or nil)
    if problem ~= nil then return nil, problem end
    self.unfinished = true
    local stop = (self.recorder and start_graph or make)(self, s, batches)
    self.unfinished = false
    self.started[#self.started + 1] = s
    return stop
end

--- For a loop: steps that are over, in order: { step =, loss =, grad_norm =, lr =, ms =, allowed = }. One that is not
--- allowed has not touched the weights.
---@param all boolean  waits for all that were started; else one launched graph may be under way
function Steps:finished(all)
    local under_way = not all and self.graph and self.graph:recorded() and 1 or 0
    return function()
        if #self.started <= under_way then return nil end
        local s = table.remove(self.started, 1)
        if s.figures then finish_graph(self, s) end
        local now = core.clock()
        s.ms = (now - math.max(s.at, self.finished_at)) * 1000
        self.finished_at = now
        return s
    end
end

return new
