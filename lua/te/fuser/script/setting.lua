--- What the forward of a script runs under, for operations of it that backward runs again: compute dtype, recipe and
--- scales.

local te = require "te"
local mode = require "te.recipe.mode"
local core = te._core

local setting = {}

--- What is in force now, for setting.again.
function setting.now() return { dtype = core.compute_dtype(), mode = mode.get(), replaying = true } end

local function recorded(now, before, ok, ...)
    now.scales, mode.recording = core.recorded_scales(), before
    return core.pass(ok, ...)
end

--- Runs fn(...), where gradients are not recorded but will be wanted: amaxes count, and scales are written down.
function setting.record(now, fn, ...)
    local before = mode.recording
    mode.recording = true
    core.record_scales()
    return recorded(now, before, core.within(fn, ...))
end

local function swap(new)
    local dtype = core.set_compute_dtype(new.dtype)
    local before = { dtype = dtype, mode = mode.set(new.mode), replaying = mode.replaying }
    mode.replaying = new.replaying
    core.replay_scales(new.scales)
    return before
end

--- Runs fn(...) under what was in force then; what recipes remember stays as it is.
function setting.again(kept, fn, ...) return core.pass(core.under(swap, kept, fn, ...)) end

return setting
