--- Learning rates as functions of the step, which counts from 1. They hold no state, so resuming needs none.

local fail = require "te.fail"
local options = require "te.options"

local schedule = {}

local COSINE = {
    max = { "number", nil, min = 0, help = "learning rate after the warm-up; required" },
    min = { "number", 0, min = 0, help = "learning rate from the last step on" },
    warmup = { "integer", 0, min = 0, help = "steps of linear growth before the first at max" },
    steps = { "size", help = "step at which min is reached; required" },
}

--- Linear warm-up to max, then half a cosine down to min, which is reached at step `steps` and kept.
---@param opts table
---@return fun(step: integer): number
function schedule.cosine(opts)
    opts = options.check("te.optim.cosine", opts, COSINE)
    if not opts.max or not opts.steps then fail("te.optim.cosine: options max and steps are needed") end
    local first = opts.warmup + 1 -- step at max
    if first > opts.steps then
        fail("te.optim.cosine: option warmup: expected fewer than the %d steps, got %d", opts.steps, opts.warmup)
    end
    return function(step)
        options.argument("te.optim.cosine", "step", step, { "number", min = 1 })
        if step >= opts.steps then return opts.min end
        if step <= first then return opts.max * step / first end
        local progress = (step - first) / (opts.steps - first)
        return opts.min + 0.5 * (1 + math.cos(math.pi * progress)) * (opts.max - opts.min)
    end
end
options.declare(schedule.cosine, COSINE)

return schedule
