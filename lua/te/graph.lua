--- te.graph: a whole training step recorded once on the device and launched again with one call.
--
-- A graph is a function's work on the device: its kernels, with the addresses they read and write. So the first
-- calls run the function as it is (they choose algorithms, make optimizer states), the next one records it, which
-- computes nothing, and from then on a call copies its inputs to where the recording reads them and launches. Lua
-- inside the function runs no more; a learning rate comes from the optimizer's groups (set_lr), random numbers go
-- on as if it had run, and what the function returned is the same tensors every time, with new values. A value that
-- Lua reads inside (item, totable, printing), tensors brought from the host, and other shapes than recorded are
-- errors that name themselves.
--
-- Devices without graphs (the CPU) run the function.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local is_module = require("te.module").is
local Module = require "te.module"
local settle = require "te.settle"
local core = te._core

local function pack(...) return { n = select("#", ...), ... } end

local graphs = {}
local recording -- what is to happen before every launch of the graph that is being recorded; nil: none is

--- Has `fn` called before every launch of the graph that is being recorded; false when none is.
function graphs.before_launch(fn)
    if not recording then return false end
    if fn then recording[#recording + 1] = fn end
    return true
end

--- Likewise after every launch.
function graphs.after_launch(fn) table.insert(recording.after, fn) end

-- Records fn(...), with hooks.follows what comes behind every launch of that. Returns the handle, or nil where the
-- device has no graphs, and fn's results.
local function record(device, hooks, fn, ...)
    local handle = core.graph_begin(device, hooks.follows)
    if not handle then return nil end
    settle.unfinished[graphs] = function()
        recording = nil
        core.graph_end(handle, false)
    end
    recording = hooks
    local results = pack(core.within(fn, ...))
    recording, settle.unfinished[graphs] = nil, nil
    local ended, reason = pcall(core.graph_end, handle, results[1])
    if not results[1] then error(results[2], 0) end
    if not ended then error(reason, 0) end
    return handle, pack(unpack(results, 2, results.n))
end

-- Copies of the samples where a recording will read them.
local function place(samples, device)
    return te.no_grad(function()
        local placed = { n = #samples }
        for i, sample in ipairs(samples) do
            placed[i] = sample
            if te.is_tensor(sample) then
                placed[i] = te.empty(sample.shape, { dtype = sample.dtype, device = device })
                placed[i]:copy_(sample)
            end
        end
        return placed
    end)
end

-- New values for the placed inputs.
local function fill(who, placed, given)
    if given.n ~= placed.n then fail("%s: %d inputs, recorded with %d", who, given.n, placed.n) end
    te.no_grad(function()
        for i = 1, placed.n do
            local input, static = given[i], placed[i]
            if not te.is_tensor(static) then
                if input ~= static then
                    fail("%s: input %d is %s, recorded with %s", who, i, tostring(input), tostring(static))
                end
            elseif not te.is_tensor(input) then
                fail("%s: input %d: expected a tensor, got %s", who, i, core.describe(input))
            elseif input.dtype ~= static.dtype or options.shape(input) ~= options.shape(static) then
                fail("%s: input %d is %s %s, recorded with %s %s", who, i, input.dtype, options.shape(input),
                    static.dtype, options.shape(static))
            elseif not rawequal(input, static) then
                static:copy_(input)
            end
        end
    end)
end

-- `device`, or where the first tensor lies.
local function device_of(who, samples, device)
    for i, sample in ipairs(samples) do
        if options.tensor(who, "sample_inputs", sample, i) then device = device or sample.device end
    end
    return device or te.get_default_device()
end

local function detached(results)
    for i = 1, results.n do
        if te.is_tensor(results[i]) then results[i] = results[i]:detach() end
    end
    return results
end

local OPTIONS = {
    device = { "string", nil, help = "device to record on; default: that of the first sample" },
    warmup = { "size", 2, help = "calls that run the function before the one that records it" },
}

local Graph = {}
Graph.__index = Graph
options.kinds.Graph = Graph

function Graph:__call(...)
    local given = pack(...)
    fill("te.graph", self.inputs, given)
    if self.calls < self.warmup or self.plain then
        self.calls = self.calls + 1
        return self.fn(unpack(self.inputs, 1, self.inputs.n))
    end
    if not self.handle then
        local hooks = { after = {} }
        local handle, results = record(self.device, hooks, self.fn, unpack(self.inputs, 1, self.inputs.n))
        self.plain = not handle
        if self.plain then return self.fn(unpack(self.inputs, 1, self.inputs.n)) end
        self.handle, self.hooks, self.results = handle, hooks, detached(results)
    end
    for i = 1, #self.hooks do self.hooks[i]() end
    core.graph_launch(self.handle)
    for i = 1, #self.hooks.after do self.hooks.after[i]() end
    return unpack(self.results, 1, self.results.n)
end

--- Lets go of the recording and its memory, and so of its results; the next calls begin anew.
function Graph:release()
    if self.handle then core.graph_free(self.handle) end
    self.handle, self.hooks, self.results, self.calls = nil, nil, nil, 0
end

--- Whether calls launch a recording.
---@return boolean
function Graph:recorded() return self.handle ~= nil end

function Graph:__tostring()
    return ("te.graph on %s (%s)"):format(self.device, self.plain and "without graphs" or self.handle and "recorded"
        or ("%d of %d calls before recording"):format(self.calls, self.warmup))
end

--- fn as a graph: call the result like fn. It may hold a whole training step, including zero_grad; its results are
--- detached tensors that the next call overwrites.
---@param fn function
---@param sample_inputs table  tensors like those of the calls, or values that stay the same
---@param opts table|nil
---@return te.Graph
function graphs.graph(fn, sample_inputs, opts)
    local o = options.check("te.graph", opts, OPTIONS)
    options.argument("te.graph", "fn", fn, { "callable" })
    if type(sample_inputs) ~= "table" or te.is_tensor(sample_inputs) then
        fail("te.graph: sample_inputs: expected a list of inputs, got %s", core.describe(sample_inputs))
    end
    local device = device_of("te.graph", sample_inputs, o.device)
    return setmetatable({ fn = fn, device = device, warmup = o.warmup, calls = 0,
        inputs = place(sample_inputs, device) }, Graph)
end
options.declare(graphs.graph, OPTIONS)

-- Callables with a graph for each direction ---------------------------------------------------------------------------

-- Runs fn while the parameters have no gradients; returns theirs, and gives them back what they had.
local function with_fresh_gradients(parameters, fn)
    local before, fresh = {}, {}
    for i, p in ipairs(parameters) do before[i], p.grad = p.grad or false, nil end
    local ok, reason = core.within(fn)
    for i, p in ipairs(parameters) do fresh[i], p.grad = p.grad or false, before[i] or nil end
    if not ok then error(reason, 0) end
    return fresh
end

local function weighted(results, weights)
    local total
    for i = 1, results.n do
        if results[i].requires_grad then
            local term = te.sum(results[i] * weights[i])
            total = total and total + term or term
        end
    end
    return total
end

-- Both directions, recorded; forward alone where there is no other one.
local function record_both(device, fn, inputs, parameters, differentiable)
    local both = { inputs = inputs, hooks = { after = {} }, weights = {}, launches = 0 }
    local handle, results = record(device, both.hooks, fn, unpack(inputs, 1, inputs.n))
    both.forward, both.results, both.hooks.follows = handle, results, handle
    if not differentiable then return both end
    for i = 1, results.n do
        both.weights[i] = te.zeros(results[i].shape, { dtype = results[i].dtype, device = device })
    end
    both.parameter_grads = with_fresh_gradients(parameters, function()
        both.backward = record(device, both.hooks, function()
            if results.n == 1 then
                results[1]:backward(both.weights[1])
            else
                weighted(results, both.weights):backward()
            end
        end)
    end)
    both.input_grads = {}
    for i = 1, inputs.n do
        local input = inputs[i]
        if te.is_tensor(input) then both.input_grads[i], input.grad = input.grad or false, nil end
    end
    both.results = detached(results)
    return both
end

local function launch_backward(both, parameters, douts)
    te.no_grad(function()
        for i, weight in ipairs(both.weights) do
            if douts[i] then weight:copy_(douts[i]) else weight:zero_() end
        end
        core.graph_launch(both.backward)
        for i, p in ipairs(parameters) do
            local grad = both.parameter_grads[i]
            if grad and p.grad then p.grad:add_(grad) elseif grad then p.grad = grad:clone() end
        end
    end)
    local grads = { nil }
    for i = 1, both.inputs.n do
        local grad = both.input_grads[i]
        grads[i + 1] = grad and grad:clone() or nil -- the first input is the anchor
    end
    return unpack(grads, 1, both.inputs.n + 1)
end

-- An input whose gradient the recording does not compute would lose it.
local function check_gradients(who, placed, given)
    for i = 1, core.grad_enabled() and placed.n or 0 do
        local input, static = given[i], placed[i]
        local lost = te.is_tensor(input) and input.requires_grad and te.is_tensor(static) and not static.requires_grad
        if lost then fail("%s: input %d requires a gradient, recorded without one", who, i) end
    end
end

-- A few runs in both directions that leave nothing behind. True where a result has a gradient.
local function warm_up(fn, inputs, parameters, times)
    local rng, differentiable = core.rng_state(), false
    for _ = 1, times do
        with_fresh_gradients(parameters, function()
            local results = pack(fn(unpack(inputs, 1, inputs.n)))
            local weights = {}
            for i = 1, results.n do
                weights[i] = te.zeros(results[i].shape, { dtype = results[i].dtype, device = results[i].device })
            end
            local total = weighted(results, weights)
            if total then total:backward() end
            differentiable = differentiable or total ~= nil
        end)
        for i = 1, inputs.n do
            if te.is_tensor(inputs[i]) then inputs[i].grad = nil end
        end
    end
    core.rng_state(rng)
    return differentiable
end

--- A module or function whose forward and backward are one graph each, for training steps that cannot be a single
--- graph. Parameters collect gradients as usual. The next call overwrites the results.
---@param callable any  a module, or a function of at most three results
---@param sample_inputs table  tensors like those of the calls, requires_grad as there
---@param opts table|nil
function graphs.make_graphed_callables(callable, sample_inputs, opts)
    local who = "te.make_graphed_callables"
    local o = options.check(who, opts, OPTIONS)
    options.argument(who, "callable", callable, { "callable" })
    options.argument(who, "sample_inputs", sample_inputs, { "table" })
    local device = device_of(who, sample_inputs, o.device)
    local parameters = is_module(callable, Module) and callable:parameters() or {}
    local inputs = place(sample_inputs, device)
    for i, sample in ipairs(sample_inputs) do
        if te.is_tensor(sample) and sample.requires_grad then inputs[i].requires_grad = true end
    end
    local probe = core.graph_begin(device)
    if not probe then return callable end
    core.graph_end(probe, false)
    local differentiable = core.pass(core.under(core.pause_amaxes, true, warm_up, callable, inputs, parameters,
        math.max(o.warmup, 1)))
    local both = record_both(device, callable, inputs, parameters, differentiable)
    local function launch(...)
        fill(who, inputs, pack(...))
        core.graph_launch(both.forward)
        both.launches = both.launches + 1
        return unpack(both.results, 1, both.results.n)
    end
    if not differentiable then
        return function(...)
            check_gradients(who, inputs, { ... })
            return launch(...)
        end
    end
    local function forward(ctx, _, ...)
        ctx.launch = both.launches + 1
        return launch(...)
    end
    local function backward(ctx, ...)
        if ctx.launch ~= both.launches then
            fail("%s: backward of call %d, but call %d has overwritten what it kept; call backward before the next "
                .. "call", who, ctx.launch, both.launches)
        end
        return launch_backward(both, parameters, { ... })
    end
    return function(...)
        check_gradients(who, inputs, { ... })
        -- parameters need backward even where no input does
        local anchor = te.zeros({}, { requires_grad = #parameters > 0 })
        return core.custom(forward, backward, anchor, ...)
    end
end

options.declare(graphs.make_graphed_callables, OPTIONS)

return graphs
