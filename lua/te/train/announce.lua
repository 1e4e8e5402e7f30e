--- te.train.announce: what a run says before its first step.

local te = require "te"

-- How many of the parameters are trained, where that is not all.
local function adapters(run)
    local trained = {}
    if run.model.stage then return "" end
    for _, parameter in ipairs(run.model:parameters()) do
        if parameter.requires_grad then trained[#trained + 1] = parameter end
    end
    local n = require("te.split_decoder").count(trained)
    return n < run.model:num_parameters() and (", %d of them trained"):format(n) or ""
end

--- Prints what a run is.
---@param run table  what te.train.loop takes; also device, saved_by (in how many parts the batches of its checkpoint
---  were cut) and set_aside (where an earlier run went); of options: steps, dtype, recipe, out
return function(run)
    local o, progress, ranks = run.options, run.progress, run.ranks
    if run.set_aside then progress:print("%s: the run there moved to %s", o.out, run.set_aside) end
    progress:print("%s: %d tokens for training, %d for validation", run.set.description, run.set.n_train, run.set.n_val)
    local threads, to_do = te.get_num_threads(), run.first_step <= o.steps
    progress:print("%d parameters%s, %s%d thread%s, %s, recipe %s, %s%s", run.model:num_parameters(), adapters(run),
        run.device == "cpu" and "" or run.device .. ", ", threads, threads == 1 and "" or "s", o.dtype, o.recipe,
        to_do and ("steps %d to %d, "):format(run.first_step, o.steps) or "", o.out)
    if ranks.size > 1 then
        local shared = ranks.context and (", each %d on the same rows"):format(ranks.size / ranks.row_ranks)
            or ranks.parts and (", each %d with one model"):format(ranks.parts.size) or ""
        progress:print("%d processes%s%s, %d tokens a step", ranks.size, shared,
            run.optimizer.sharding and ", the optimizer sharded" or "", run.step_tokens)
    end
    if run.saved_by and run.saved_by ~= ranks.row_ranks then
        progress:print("the checkpoint's batches were cut in %d, these are in %d: rows from here on are others",
            run.saved_by, ranks.row_ranks)
    end
    if not to_do and not run.unvalidated then
        progress:print("nothing is left to do: %d steps are done", run.first_step - 1)
    end
end
