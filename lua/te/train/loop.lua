--- te.train.loop: a run from its first step to its last, with validations, samples, checkpoints and requests to stop.
--
-- Rank 0 alone prints and writes. What is not finite never reaches a file (te.train.guard), and a validation that a
-- request to stop has ended is made up for by the run that resumes.

local te = require "te"
local checkpoint = require "te.train.checkpoint"
local script = require "te.train.run"

local function asked() return te._core.interrupt_flag() and 1 or 0 end

-- Whether one of the processes was asked to stop.
local function stopping(run) return run.ranks:sums(asked()) > 0 end

-- The loss on the validation part, nil where that is too small; whether a request to stop came before, and why a batch
-- cannot be read, here or in another process.
local function validate(run)
    local problem, stops = nil, 0
    local function loss(x, y)
        problem, stops = run.ranks:agree(nil, asked())
        return stops == 0 and problem == nil and run.loss(x, y):item()
    end
    run.model:eval()
    local mean, unread = te.no_grad(run.set.validation_loss, run.set, run.options.eval_batches, loss)
    run.model:train()
    if unread then problem, stops = run.ranks:agree(unread, asked()) end -- where the others ask before the batch
    return mean and run.ranks:mean(mean), stops > 0, problem
end

-- Saves after a step, with its loss where it has yet to be validated.
local function save(run, step, unvalidated)
    local o, ranks = run.options, run.ranks
    run.guard:check(run.optimizer)
    if not ranks.holds and not run.optimizer.sharding then return end
    local texts = { unvalidated = unvalidated and ("%.17g"):format(unvalidated),
        processes = ranks.row_ranks > 1 and tostring(ranks.row_ranks) or nil } -- with rows of their own
    return script.io(checkpoint.save, { folder = o.out, step = step, model = run.model, optimizer = run.optimizer,
        keep = o.keep, group = ranks.parts, metadata = { run.texts(), run.set:texts(), run.model:texts(), texts } })
end

-- Shows a step; the record of the metrics.
local function report(run, s)
    s.tokens_per_s = run.step_tokens / s.ms * 1000
    run.progress:update(s)
    local record = {}
    for _, name in ipairs { "step", "loss", "lr", "grad_norm", "ms", "tokens_per_s" } do
        record[#record + 1], record[#record + 2] = name, s[name]
    end
    if not s.allowed then
        record[#record + 1], record[#record + 2] = "skipped", true
        run.progress:print("step %d skipped: loss %g, gradient norm %g (%d so far)", s.step, s.loss,
            s.grad_norm, run.guard.skipped)
    end
    return record
end

-- Returns the step's loss where a request to stop or a problem, which comes second, ends the validation: it is to be
-- made up for.
local function validate_and_sample(run, s, record)
    local val_loss, stopped, problem = validate(run)
    if stopped or problem then return s.loss, problem end
    if val_loss then record[#record + 1], record[#record + 2] = "val_loss", val_loss end
    local validation = val_loss and ("validation loss %.4f"):format(val_loss) or "too few tokens for a validation"
    run.progress:print("step %d: train loss %.4f, %s", s.step, s.loss, validation)
    local text = run.ranks.holds and run.sample and run.sample()
    if text then run.progress:print("%s\n", text) end
end

-- Saves after a step and returns nothing, or the exit code where the run ends there on request. A problem with the data
-- ends it, too.
local function save_and_stop(run, step, unvalidated, stop, problem)
    local path = save(run, step, unvalidated)
    if not stop and not problem then return end
    run.progress:print("%s after step %d; %s", problem and "ended" or "interrupted", step, path)
    run.ranks:barrier() -- mpirun ends the others when the first one has left
    if problem then script.io(error, problem, 0) end
    return script.exit.interrupted
end

-- Ends the run before a step whose batches cannot be read; what it has trained is saved.
local function end_before(run, step, problem)
    for s in run.steps:finished(true) do
        local record = report(run, s)
        if run.metrics then script.io(run.metrics.write, run.metrics, record) end
    end
    if step > run.first_step then save_and_stop(run, step - 1, nil, nil, problem) end
    error(problem, 0)
end

-- Makes up for the validation that a stop has ended; returns as save_and_stop does.
local function catch_up(run)
    local s, record = { step = run.first_step - 1, loss = run.unvalidated }, {}
    local unvalidated, problem = validate_and_sample(run, s, record)
    if run.metrics then script.io(run.metrics.add, run.metrics, s.step, record) end
    return save_and_stop(run, s.step, unvalidated, stopping(run), problem)
end

--- Makes the steps of a run that are left. Steps are reported when their figures are there: at once, or on CUDA while
--- the next one runs; all, before the model is looked at.
---@param run table  model, optimizer, loss(x, y), sample() (a text, or nothing), texts() (what a checkpoint keeps of
---  options); set (te.data), steps, guard, ranks, progress and metrics (nil: none are written) of te.train; first_step,
---  step_tokens, unvalidated (the loss of the step before, whose validation is to be made up for); options: steps,
---  eval_interval, eval_batches, watch_numerics, out, keep
---@return integer code  of te.train.exit
return function(run)
    local o, every = run.options, run.options.watch_numerics
    te._core.ignore_sigpipe() -- who reads what is printed may leave, as head does
    local code = run.unvalidated and catch_up(run)
    if code then return code end
    for step = run.first_step, o.steps do
        local stop, problem = run.steps:start(step)
        if problem then end_before(run, step, problem) end
        local pause = step % o.eval_interval == 0 or step == o.steps
        local looks, unvalidated = every > 0 and step % every == 0, nil
        for s in run.steps:finished(pause or stop or looks) do
            local record = report(run, s)
            if s.step == step and pause and s.allowed then
                unvalidated, problem = validate_and_sample(run, s, record)
                stop = stopping(run)
            end
            if run.metrics then script.io(run.metrics.write, run.metrics, record) end
        end
        -- of its last batch
        if looks and run.metrics then script.io(run.metrics.write_numerics, run.metrics, step, te.numerics.values()) end
        code = (pause or stop) and save_and_stop(run, step, unvalidated, stop, problem)
        if code then return code end
    end
    return script.exit.ok
end
