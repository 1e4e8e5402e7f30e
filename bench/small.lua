-- What small work costs, called from Lua on one core: the time of kernels hardly counts, that of everything else does.
--
--     tetrain bench/small.lua [--seconds=0.3] [--json]
--
-- A Sequential of LayerNorm, Linear, GELU, Linear on a {1, 16} input: forward, forward and backward, AdamW on its six
-- parameters; one addition of two tensors of 16 elements; and planning such a container. Each stands beside
-- its target. The figure is the fastest of many batches: what the call costs when nobody disturbs it. Only
-- the first plan runs once.

local te = require "te"
local measure = dofile((arg[0]:match("^(.*/)") or "./") .. "measure.lua")
local clock = te._core.clock

local WIDTH = 16

local command_line = te.train.command_line {
    script = "small.lua",
    about = "Times calls on small tensors.",
    { "seconds", "number", 0.3, min = 0.01, max = 60, help = "spent on each figure" },
    { "json", "boolean", false, help = "one JSON object a line instead of text" },
}

local function build()
    return te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, WIDTH), te.GELU(), te.Linear(WIDTH, WIDTH))
end

-- Microseconds of one call: the fastest batch of `count`.
local function cost(fn, count, seconds)
    return measure.best(function()
        local start = clock()
        for _ = 1, count do fn() end
        return (clock() - start) / count
    end, seconds) * 1e6
end

local function forward(seconds)
    local model, x = build(), te.randn { 1, WIDTH }
    return te.no_grad(cost, function() model(x):release() end, 200, seconds)
end

local function forward_backward(seconds)
    local model, x, dy = build(), te.randn { 1, WIDTH }, te.ones { 1, WIDTH }
    return cost(function() model(x):backward(dy) end, 100, seconds)
end

local function adamw(seconds)
    local model = build()
    model(te.randn { 1, WIDTH }):sum():backward()
    local optimizer = te.optim.AdamW(model:parameters(), { lr = 1e-3 })
    assert(#optimizer.order == 6)
    return cost(function() optimizer:step() end, 100, seconds)
end

local function addition(seconds)
    local a, b = te.randn { WIDTH }, te.randn { WIDTH }
    return cost(function() te.add(a, b):release() end, 1000, seconds)
end

-- Containers share no plan. The very first one of a process, run once, also loads modules and compiles programs.
local function plan(seconds)
    local x, dy = te.randn { 1, WIDTH }, te.ones { 1, WIDTH }
    return measure.best(function()
        local model = build()
        local start = clock()
        model(x):backward(dy)
        return clock() - start
    end, seconds) * 1e6
end

local function first_plan()
    local model, x, dy = build(), te.randn { 1, WIDTH }, te.ones { 1, WIDTH }
    local start = clock()
    model(x):backward(dy)
    return (clock() - start) * 1e6
end

local FIGURES = {
    { "first plan of the process, and its run", 1000, first_plan },
    { "forward of LayerNorm, Linear, GELU, Linear", 4, forward },
    { "forward and backward", 12, forward_backward },
    { "AdamW.step on six parameters", 3, adamw },
    { "te.add of two tensors of 16", 0.4, addition },
    { "plan of a further container, and its run", 1000, plan },
}

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(1)
    te.manual_seed(1)
    if not o.json then print(("%-44s %10s %10s %8s"):format("", "us", "target us", "share")) end
    for _, figure in ipairs(FIGURES) do
        local name, target, run = unpack(figure)
        local us = run(o.seconds)
        print(o.json and measure.json { "name", name, "us", us, "target_us", target }
            or ("%-44s %10.2f %10.1f %7.0f%%"):format(name, us, target, 100 * us / target))
    end
end)
