--- Settings for the duration of a function, and operations defined in Lua.
---
--- A scope returns what its function returns, and restores the setting also when it raises; the error passes
--- unchanged. A coroutine that yields from inside takes the setting with it: outside it does not hold, and
--- holds again once resumed.

local te = require "te"
local mode = require "te.recipe.mode"
local settle = require "te.settle"
local core = te._core

local function pack(...) return { n = select("#", ...), ... } end

-- In a coroutine the function of a scope runs in one of its own, which says when it yields.
local create, resume, status, yield, running = coroutine.create, coroutine.resume, coroutine.status, coroutine.yield,
    coroutine.running

local suspend

-- After a resume: what the inner one made of the setting is taken out while others run.
local function stepped(swap, before, inner, ok, ...)
    local inside = swap(before)
    if status(inner) ~= "dead" then return suspend(swap, inner, inside, yield(...)) end
    if ok then return ... end
    return false, ...
end

function suspend(swap, inner, inside, ...)
    local before = swap(inside)
    return stepped(swap, before, inner, resume(inner, ...))
end

local function ended_scope(swap, before, ...)
    swap(before)
    return ...
end

--- Runs fn(...) under a setting: swap(value) sets it and returns the one before. Returns what xpcall returns.
function core.under(swap, value, fn, ...)
    if running() then
        local function run(...) return xpcall(fn, core.remember, ...) end
        return suspend(swap, create(run), value, ...)
    end
    return ended_scope(swap, swap(value), xpcall(fn, core.remember, ...))
end

--- Of what core.under or core.within return: the results, or the error.
function core.pass(ok, ...)
    if ok then return ... end
    error((...), 0)
end
local pass = core.pass

local function check_function(name, fn)
    if type(fn) ~= "function" and not (type(fn) == "table" and getmetatable(fn) and getmetatable(fn).__call) then
        error(("te.%s: fn: expected a function, got %s"):format(name, core.describe(fn)), 3)
    end
end

-- Gradients -------------------------------------------------------------------------------------------------------

--- Runs fn(...) without recording gradients.
---@return any ...
function te.no_grad(fn, ...)
    check_function("no_grad", fn)
    return pass(core.under(core.set_grad_enabled, false, fn, ...))
end

--- Runs fn(...) with gradients recorded, also inside te.no_grad.
---@return any ...
function te.enable_grad(fn, ...)
    check_function("enable_grad", fn)
    if mode.step then mode.step.trains = true end
    return pass(core.under(core.set_grad_enabled, true, fn, ...))
end

local in_backward = false

local function ended(ok, ...)
    in_backward = false
    if not ok then
        pcall(mode.products.forget, true)
        error((...), 0)
    end
    mode.products.end_backward()
    return ...
end

-- Scales of gradients change when the outermost backward pass has ended.
local function with_updates(backward)
    return function(...)
        if in_backward or not mode.products then return backward(...) end
        in_backward = true
        return ended(xpcall(backward, core.remember, ...))
    end
end

te.backward = with_updates(core.backward)
local run_grad, run_replayed = with_updates(core.grad), with_updates(core.replayed_grad)

settle.when_stopped(function() in_backward = false end)

function te.grad(outputs, inputs, ...)
    local opts = ...
    if type(opts) == "table" and opts.create_graph == true then
        core.fail "te.grad: option create_graph: gradients of gradients are not recorded"
    end
    return run_grad(outputs, inputs, ...)
end

core.tensor_methods.backward = te.backward

-- Operations with a backward in Lua -------------------------------------------------------------------------------

local Kept = {}
Kept.__index = Kept

local function version(value) return te.is_tensor(value) and select(2, value:storage_id()) end

--- Values that backward reads, with the versions of the tensors among them.
function core.keep(values)
    local versions = {}
    for i = 1, values.n do versions[i] = version(values[i]) end
    return setmetatable({ values = values, versions = versions }, Kept)
end

--- The values; raises where one was written in place since.
function Kept:read(who)
    local values = self.values
    for i = 1, values.n do
        if version(values[i]) ~= self.versions[i] then
            core.fail(("%s: a tensor of shape {%s} that it saved was changed in place since"):format(who,
                table.concat(values[i].shape, ",")))
        end
    end
    return unpack(values, 1, values.n)
end

local Context = {}
Context.__index = Context

--- Keeps values for backward.
function Context:save_for_backward(...) self.saved = core.keep(pack(...)) end

--- The values kept, in their order; raises where one was written in place since.
function Context:saved_tensors()
    if self.saved then return self.saved:read("ctx:saved_tensors") end
end

function core.context() return setmetatable({}, Context) end

-- Hands the results of forward and the inputs to the engine.
local function connect(backward, ctx, inputs, ...)
    local n = select("#", ...)
    local all = { ... }
    for i = 1, inputs.n do all[n + i] = inputs[i] end
    return core.record(backward, ctx, n, unpack(all, 1, n + inputs.n))
end

--- One operation from two functions: forward(ctx, inputs…) gives up to three tensors and is not recorded; backward(ctx,
--- gradients of those…) gives one gradient (or nil) for each input. Inputs that are no tensors pass through.
function core.custom(forward, backward, ...)
    check_function("_core.custom", forward)
    check_function("_core.custom", backward)
    local ctx = core.context()
    if not core.grad_enabled() then
        core.gradient_uses(...)
        return te.no_grad(forward, ctx, ...)
    end
    return connect(backward, ctx, pack(...), te.no_grad(forward, ctx, ...))
end

-- Checkpointing ---------------------------------------------------------------------------------------------------

-- Runs fn with the random state, compute dtype, recipe and scales of the first run, recording, and puts all back.
local replay
function replay(state, fn, inputs)
    local outer, now = settle.unfinished[replay], core.rng_state()
    settle.unfinished[replay] = outer or function() core.rng_state(now) end
    local rng, dtype, before = core.rng_state(state.rng), core.set_compute_dtype(state.dtype), mode.set(state.mode)
    local replaying = mode.replaying
    mode.replaying = true
    core.replay_scales(state.scales)
    local since, began = core.replay_since(state.time, core.writing_time())
    local results = pack(xpcall(te.enable_grad, core.remember, fn, unpack(inputs, 1, inputs.n)))
    core.replay_since(since, began)
    core.replay_scales()
    mode.replaying = replaying
    core.rng_state(rng)
    settle.unfinished[replay] = outer
    core.set_compute_dtype(dtype)
    mode.set(before)
    if not results[1] then error(results[2], 0) end
    for i = 2, results.n do
        if not te.is_tensor(results[i]) then
            core.fail(("te.checkpoint: backward: result %d of fn, run again: expected a tensor, got %s"):format(i - 1,
                core.describe(results[i])))
        end
    end
    return results
end

local function check_again(position, result, dout)
    local shape, before = table.concat(result.shape, ","), table.concat(dout.shape, ",")
    if shape == before then return end
    core.fail(("te.checkpoint: backward: result %d of fn, run again, has shape {%s}, not {%s} as before"):format(
        position, shape, before))
end

-- What fn met beside its inputs, parameters and earlier results, gets its gradients from the pass that runs this.
local function checkpoint_backward(ctx, ...)
    local inputs, douts = pack(ctx.inputs:read("te.checkpoint: backward")), { ... }
    local wanted, places = {}, {}
    for i = 1, inputs.n do
        local x = inputs[i]
        if te.is_tensor(x) then
            inputs[i] = x:detach()
            inputs[i].requires_grad = x.requires_grad
            if x.requires_grad then wanted[#wanted + 1], places[#places + 1] = inputs[i], i end
        end
    end
    local since = core.next_node()
    local results, outputs, seeds, grads = replay(ctx.state, ctx.fn, inputs), {}, {}, {}
    for i = 2, results.n do
        if douts[i - 1] and results[i].requires_grad then
            check_again(i - 1, results[i], douts[i - 1])
            outputs[#outputs + 1], seeds[#seeds + 1] = results[i], douts[i - 1]
        end
    end
    if #outputs > 0 then
        local found = run_replayed(outputs, wanted, { grad_outputs = seeds }, since)
        for k, i in ipairs(places) do grads[i + 1] = found[k] end -- the first input is the anchor
    end
    return unpack(grads, 1, inputs.n + 1)
end

-- The results need a gradient where something that fn met does.
local function recorded(state, before, uses, ok, ...)
    state.scales, mode.recording, state.time = core.recorded_scales(), before, core.writing_time()
    if not ok then error((...), 0) end
    state.anchor.requires_grad, state.anchor = core.gradient_uses() > uses, nil
    return ...
end

-- The first run: what delayed scaling multiplied by is written down, and its amaxes count.
local function run_recorded(state, fn, ...)
    local before = mode.recording
    mode.recording = true
    core.record_scales()
    return recorded(state, before, core.gradient_uses(), core.within(fn, ...))
end

-- What fn gave, which a graph node can only have as tensors.
local function tensors(...)
    local n = select("#", ...)
    for i = 1, n do
        local value = (select(i, ...))
        if not te.is_tensor(value) then
            core.fail(("te.checkpoint: result %d: expected a tensor, got %s"):format(i, core.describe(value)))
        end
    end
    if n == 0 then core.fail("te.checkpoint: the function gave nothing, not a tensor") end
    return ...
end

--- fn(...), keeping only its inputs: what happens inside is computed again in backward, with the same random numbers,
--- compute dtype, recipe and scales. Parameters and earlier results that fn uses get their gradients as usual; results
--- need none where nothing in fn does. fn gives tensors.
---@return te.Tensor ...
function te.checkpoint(fn, ...)
    check_function("checkpoint", fn)
    if not core.grad_enabled() then return fn(...) end
    local anchor = te.zeros({}) -- an input that needs a gradient where fn meets something that does
    local inputs, state = pack(...), { anchor = anchor, rng = core.rng_state(), dtype = core.compute_dtype(),
        mode = mode.get() }
    local function forward(ctx, _, ...)
        ctx.title, ctx.fn, ctx.state = "te.checkpoint", fn, state
        ctx.inputs = core.keep(inputs)
        return tensors(run_recorded(state, fn, ...))
    end
    return core.custom(forward, checkpoint_backward, anchor, ...)
end
