--- Runs containers: neighbouring operations in groups that the engine plans and fuses, anything else by calling it.
--
-- A container is flattened, described and grouped when it first runs, and again when it, a module in it or an option
-- that a module names in `plan_fields` has changed. Parameters are looked up anew at every run.

local te = require "te"
local fail = require "te.fail"
local flatten = require "te.fuser.flatten"
local hooks = require "te.hooks"
local record = require "te.fuser.record"
local rewrite = require "te.fuser.rewrite"
local rules = require "te.fuser.rules"
local run = require "te.fuser.run"
local options = require "te.options"
local packed = require "te.packed"
local mode = require "te.recipe.mode"
local KVCache = require "te.kv_cache"
local tree = require "te.module_tree"
local core = te._core

local fuser = { enabled = true }

local function compile(module, n_extras, has_lens, situation)
    local walk = flatten.module(module, n_extras, has_lens)
    local watched = situation and rewrite.walk(walk, situation) or {}
    local program = record.parts(walk, fuser.enabled)
    for _, check in ipairs(watched) do program.checks[#program.checks + 1] = check end
    program.walk, program.enabled, program.replaced = walk, fuser.enabled, tree.replaced
    for _, item in ipairs(walk.items) do
        if type(item.op) == "table" and item.op.attends_to_rows and item.op.takes_seq_lens then
            program.attention = item.op
        end
    end
    run.prepare(program)
    return program
end

local function is_current(program)
    if program.enabled ~= fuser.enabled or program.replaced ~= tree.replaced then return false end
    if not flatten.is_current(program.walk) then return false end
    local checks = program.checks
    for i = 1, #checks do
        local check = checks[i]
        local other = check[4]
        if other == true then
            if (rawget(check[1], check[2]) ~= nil) ~= check[3] then return false end
        elseif other == "row" then
            local now = rawget(check[1], check[2])
            if now ~= check[3] and now and now:numel() == 1 then return false end
            check[3] = now
        elseif other then
            if rawget(check[1], check[2]) ~= rawget(other[1], other[2]) then return false end
        elseif check[1][check[2]] ~= check[3] then
            return false
        end
    end
    return true
end

--- The program of a module for so many extra inputs, kept with the module until the registered rules change. Rules may
--- look at what the inputs are like, so then there is a program for each kind.
function fuser.program(module, n_extras, has_lens, x, ...)
    local key = n_extras * 8 + (KVCache.active and 4 or 0) + (has_lens and 2 or 0) + (module.training and 1 or 0)
    local situation
    local programs = rawget(module, "_programs")
    if not programs or programs.rules ~= rules.version then
        programs = { rules = rules.version }
        rawset(module, "_programs", programs)
    end
    if rules.count > 0 and fuser.enabled then situation, key = rules.situation(key, module, x, ...) end
    local program = programs[key]
    if not program or not is_current(program) then
        program = compile(module, n_extras, has_lens, situation)
        programs[key] = program
    end
    return program
end

-- Raises where there are more values beyond x than the operations take, or fewer. One more might have been seq_lens.
local function wrong_number(module, takes, n, given)
    local text = ("takes %d extra inputs, got %d"):format(takes, n)
    if n == takes + 1 and pcall(flatten.module, module, takes, true) then
        local tensor = te.is_tensor(given)
        local lens = "seq_lens: expected an int32 or int64 tensor {batch} of lengths, got "
            .. (tensor and ("a %s tensor %s"):format(given.dtype, options.shape(given)) or type(given))
        text = tensor and given:dim() ~= 1 and ("%s; %s"):format(text, lens) or lens
    end
    fail("%s: %s", module.__name, text)
end

-- Whether the first of the values beyond x is seq_lens: one tensor more than the operations take, 1-D and of integers.
-- None of the others may be missing.
local function has_seq_lens(module, takes, ...)
    local n, first = select("#", ...), (...)
    local lens = n == takes + 1 and te.is_tensor(first) and first:dim() == 1
        and (first.dtype == "int32" or first.dtype == "int64")
    if n ~= takes and not lens then wrong_number(module, takes, n, first) end
    for i = 1, takes do
        if (select(n - takes + i, ...)) == nil then fail("%s: extra input %d is nil", module.__name, i) end
    end
    return lens
end

-- Extra inputs that groups read are tensors; what is called may take anything.
local function check_tensors(module, program, lens, ...)
    for i = 1 + lens, select("#", ...) do
        local value = (select(i, ...))
        if program.tensors[1 + i] and not te.is_tensor(value) then
            fail("%s: extra input %d: expected a tensor, got %s", module.__name, i - lens, options.shown(value))
        end
    end
end

-- fn(module, x, ...) without the last of the values, or the first, which is nil.
local function without_nil(fn, module, x, n, ...)
    if (select(n, ...)) == nil then return fn(module, x, unpack({ ... }, 1, n - 1)) end
    return fn(module, x, select(2, ...))
end

-- Whether one of n values, more than a module takes, is nil and as good as not there.
local function has_nil(takes, n, ...) return (select(n, ...)) == nil or n == takes + 1 and (...) == nil end

--- The forward method of every container: x, lengths of packed sequences if any (nil: none), extra inputs.
function fuser.forward(module, x, ...)
    if type(module) ~= "table" then options.method("Sequential:forward", module) end
    if tree.entering then return tree.entering(module, fuser.forward, module, x, ...) end
    local n, takes, lens = select("#", ...), flatten.takes(module), false
    if n > takes and has_nil(takes, n, ...) then return without_nil(fuser.forward, module, x, n, ...) end
    if n > 0 or takes > 0 then lens = has_seq_lens(module, takes, ...) end
    local program = fuser.program(module, takes, lens, x, ...)
    if takes > 0 then check_tensors(module, program, lens and 1 or 0, ...) end
    if flatten.is_plain(module) then rawset(module, "pure", program.pure and not rawget(module, "_hooks")) end
    if lens and program.calls then return run.packed(program, module, { x, ... }) end
    if packed.container and program.attention and not lens then packed.check(program.attention) end
    if program.single then return run.single(program, x, ...) end
    return run.program(program, { x, ... })
end

-- What a run leaves behind beside its results, so that nothing does: the random numbers drawn, and what recipes note.
local function swap_traces(new)
    local before = { random = core.rng_state(), replaying = mode.replaying }
    if new.random then core.rng_state(new.random) end
    mode.replaying, before.silent, hooks.silent = new.replaying, hooks.silent, new.silent
    before.scales, before.amaxes = core.pause_recorded_scales(new.scales), core.pause_amaxes(new.amaxes)
    return before
end

local NO_TRACES = { replaying = true, silent = true, scales = true, amaxes = true }

local function explain(program, env)
    return core.pass(core.under(swap_traces, NO_TRACES, require("te.ops.collective").without_others,
        require("te.fuser.plan").of, program, env, run.part))
end

--- The plan of a container for inputs like these (te.fuser.plan). Only what a later plan depends on runs, and no step
--- that follows is another one for it.
---@return te.Plan
function fuser.explain(module, x, ...)
    if type(module) ~= "table" then options.method("Sequential:explain", module) end
    if not te.is_tensor(x) then fail("%s:explain: x: expected a tensor, got %s", module.__name, core.describe(x)) end
    if tree.entering then return tree.entering(module, fuser.explain, module, x, ...) end
    local n, takes = select("#", ...), flatten.takes(module)
    if n > takes and has_nil(takes, n, ...) then return without_nil(fuser.explain, module, x, n, ...) end
    return explain(fuser.program(module, takes, has_seq_lens(module, takes, ...), x, ...), { x, ... })
end

--- The same for the chain() of a module that does more in its forward than that.
function fuser.explain_chain(module, x, seq_lens)
    if tree.entering then return tree.entering(module, fuser.explain_chain, module, x, seq_lens) end
    return explain(fuser.program(module, 0, seq_lens ~= nil, x, seq_lens), { x, seq_lens })
end

--- Runs the chain() of a module that does more in its forward than that, on packed sequences where seq_lens is there.
function fuser.run_chain(module, x, seq_lens)
    if tree.entering then return tree.entering(module, fuser.run_chain, module, x, seq_lens) end
    local program = fuser.program(module, 0, seq_lens ~= nil, x, seq_lens)
    if seq_lens and program.calls then return run.packed(program, module, { x, seq_lens }) end
    return run.program(program, { x, seq_lens })
end

flatten.forward = fuser.forward

--- Switches fusion off (every basic operation runs by itself) or on; returns the setting before.
---@param on boolean
function fuser.set_fusion(on, ...)
    options.last("te.set_fusion", 1, ...)
    options.argument("te.set_fusion", "on", on, { "boolean" })
    local before = fuser.enabled
    fuser.enabled = on
    return before
end

--- Whether backward computes activations anew that only weight gradients read, instead of keeping them from forward:
--- true, wherever that keeps fewer bytes; false, never; a number, where moreover the products that read them have so
--- many columns together, 256 at first. Returns the setting before, as a number.
function fuser.set_recompute(setting)
    if type(setting) ~= "boolean" and type(setting) ~= "number" then
        fail("te.set_recompute: expected true, false or a number of columns, got %s", core.describe(setting))
    end
    if type(setting) == "number" and not (setting >= 0) then
        fail("te.set_recompute: a number of columns is 0 or more, not %g", setting)
    end
    local columns = setting == true and 0 or setting or math.huge
    return te._core.set_recompute_width(columns)
end

return fuser
