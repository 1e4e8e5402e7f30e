--- Runs the parts of a program: groups by the engine, everything else by calling it.
--
-- A value that nobody reads any more is given back at once when none of its readers may keep it. That needs the promise
-- `pure` of what is called: it keeps neither its input nor its result, and returns a fresh tensor or its input.

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local packed = require "te.packed"
local joined = require "te.fuser.joined"
local core = te._core
local tree = require "te.module_tree"
local parameters, parameter_in = tree.parameters, tree.parameter_in

local run = {}

local function is_pure(part)
    return part.group ~= nil or type(part.item.op) == "table" and part.item.op.pure == true
end

local function each_read(part, visit)
    for _, v in ipairs(part.inputs or part.extras) do visit(v) end
    if part.x then visit(part.x) end
end

-- Lays down what nobody reads after each part: given back at once when none of its readers may keep it.
local function plan_releases(program)
    local kept = {}
    for _, part in ipairs(program.parts) do
        if not is_pure(part) then each_read(part, function(v) kept[v] = true end) end
    end
    for _, part in ipairs(program.parts) do
        part.releases = {}
        each_read(part, function(v)
            local last = program.readers[v]
            if not kept[v] and v > program.n_inputs and last and last <= part.last_step then
                part.releases[#part.releases + 1] = v
            end
        end)
    end
end

-- Whether a program is one group that takes the caller's inputs and gives the caller's outputs, in order.
local function is_single(program)
    local part = program.parts[1]
    if #program.parts ~= 1 or not part.group or part.joined or part.convert then return false end
    if #part.outputs ~= #program.outputs or #part.inputs ~= program.n_inputs then return false end
    for i, v in ipairs(part.outputs) do
        if program.outputs[i] ~= v then return false end
    end
    for i, v in ipairs(part.inputs) do
        if v ~= i then return false end
    end
    return true
end

--- Lays down once what every run needs to know.
function run.prepare(program)
    program.pure, program.tensors = true, {}
    for _, part in ipairs(program.parts) do
        program.pure = program.pure and is_pure(part)
        program.calls = program.calls or part.group == nil
        for _, v in ipairs(part.group and part.inputs or {}) do
            program.tensors[v] = not (part.convert and part.convert[v])
        end
    end
    for _, part in ipairs(program.parts) do
        part.feeds = {}
        for i, v in ipairs(part.results or {}) do part.feeds[i] = program.tensors[v] end
    end
    plan_releases(program)
    program.single = is_single(program)
end

local function store(env, names, ...)
    for i = 1, #names do env[names[i]] = (select(i, ...)) end
end

-- One engine operation after the other: for inputs that cannot be planned.
local function run_singly(part, env)
    for _, step in ipairs(part.steps) do
        local args, n, checked = {}, #step.inputs, step.checked
        if checked then checked.op:check_input(env[checked.x], env[checked.extra]) end
        for k, v in ipairs(step.inputs) do
            local source = part.sources[v]
            if source then args[k] = parameter_in(source[1], source[2]) elseif v then args[k] = env[v] end
            if step.numbers and step.numbers[k] then args[k] = step.numbers[k] end
        end
        args[n + 1] = step.attributes
        local apply = step.instead or type(step.name) == "string" and te[step.name] or step.name
        if step.instead then
            env[step.result] = step.instead(unpack(args, 1, n))
        elseif mode.on and step.product and step.product.attends then
            env[step.result] = core.with_product(step.product.state, apply, unpack(args, 1, n + 1))
        elseif mode.on and step.product then
            env[step.result] = core.quantized_linear(step.product.state, args[1], args[2], args[3] or nil)
        else
            if step.attributes then n = n + 1 end
            if step.joined then
                env[step.result] = joined.apply(step.joined_by, step.joined, apply, unpack(args, 1, n))
            else
                env[step.result] = apply(unpack(args, 1, n))
            end
        end
    end
end

-- Stores the outputs of a group; when it has no plan for these inputs it runs unfused and remembers why.
local function finish(part, env, first, second, ...)
    part.reason = nil
    if first ~= nil then return store(env, part.outputs, first, second, ...) end
    part.reason = second
    return run_singly(part, env)
end

-- A group whose rows are several dimensions: made one before, and taken apart after it.
local function run_joined(part, env, owned)
    local args = joined.arguments(part, env)
    local results = args and { core.group_run(part.group, args) } or { nil, joined.REFUSAL }
    if results[1] == nil then return finish(part, env, nil, results[2]) end
    local shape = env[part.inputs[1]].shape
    for i, v in ipairs(part.outputs) do
        env[v], owned[v] = results[i]:view(shape), true
        results[i]:release()
    end
    for i = 1, #part.inputs do args[i]:release() end
end

-- Inputs that callers may give as lists, as tensors.
local function convert_inputs(part, env)
    for v, convert in pairs(part.convert) do env[v] = convert(env[v], env[part.inputs[1]].device) end
end

-- Behind n arguments, what stands now where parameters are.
local function add_parameters(args, n, params)
    for i = 1, #params do
        local source = params[i]
        local value = rawget(source[1], source[2])
        args[n + i] = parameters[value] and value or parameter_in(source[1], source[2])
    end
end

local function run_group(part, env, owned)
    if part.convert then convert_inputs(part, env) end
    if part.joined then return run_joined(part, env, owned) end
    if mode.on and part.products then mode.prepare(part.products, env[part.inputs[1]], env[part.lens]) end
    local inputs, params, args, n = part.inputs, part.params, {}, #part.inputs
    for i = 1, n do args[i] = env[inputs[i]] end
    add_parameters(args, n, params)
    finish(part, env, core.group_run(part.group, args))
    for _, v in ipairs(part.outputs) do owned[v] = part.reason == nil end
end

-- What lengths of packed sequences do not concern runs as if there were none.
local function call(op, ...)
    if packed.container and type(op) == "table" and op.takes_seq_lens == false then
        return core.pass(core.under(packed.swap, nil, op, ...))
    end
    return op(...)
end

-- Raises where result i of what was called is missing, or no tensor where a group reads it.
local function check_result(op, i, value, feeds)
    if value ~= nil and (not feeds or te.is_tensor(value)) then return end
    fail("te.Sequential: %s returned %s%s", type(op) == "table" and op.__name or "a function in it",
        value == nil and "nothing" or core.describe(value) .. ", where a tensor is needed",
        i > 1 and (" as extra output %d"):format(i - 1) or "")
end

-- A pure operation gives a fresh tensor, or its input: then it is nobody's to release but the input's owner's.
local function run_call(part, env, owned)
    local extras, op, n = {}, part.item.op, #part.extras
    for i, v in ipairs(part.extras) do extras[i] = env[v] end
    if part.lens then
        store(env, part.results, call(op, env[part.x], env[part.lens], unpack(extras, 1, n)))
    else
        store(env, part.results, call(op, env[part.x], unpack(extras, 1, n)))
    end
    for i, v in ipairs(part.results) do check_result(op, i, env[v], part.feeds[i]) end
    local y = env[part.results[1]]
    local fresh = is_pure(part) and te.is_tensor(y) and not rawequal(y, env[part.x])
    for _, extra in ipairs(extras) do fresh = fresh and not rawequal(y, extra) end
    owned[part.results[1]] = fresh
end

--- Runs all parts; env holds the caller's inputs and then every value.
function run.program(program, env)
    local owned, parts = {}, program.parts
    for i = 1, #parts do
        local part = parts[i]
        if part.group then run_group(part, env, owned) else run_call(part, env, owned) end
        for _, v in ipairs(part.releases) do
            local passed_on = part.x and rawequal(env[v], env[part.results[1]])
            if owned[v] and not passed_on then env[v]:release() end
            owned[v] = nil
        end
    end
    for v, source in pairs(program.handed) do env[v] = rawget(source[1], source[2]) end
    local outputs, results = program.outputs, {}
    if #outputs == 1 then return env[outputs[1]] end
    for i = 1, #outputs do results[i] = env[outputs[i]] end
    return unpack(results, 1, #outputs)
end

-- Hands on what a single group gave; without a plan it runs the long way. The arguments are forgotten.
local function settle(program, args, n, first, ...)
    local env
    if first == nil then env = { unpack(args, 1, n) } end
    for i = 1, n do args[i] = false end
    program.args = args
    if env then return run.program(program, env) end
    return first, ...
end

--- The same with lengths of packed sequences in force for what is called.
function run.packed(program, module, env)
    return core.pass(core.under(packed.swap, module, run.program, program, env))
end

--- The short way for a single group: no tables are made.
function run.single(program, ...)
    local part, args, n = program.parts[1], program.args or {}, program.n_inputs
    local params = part.params
    if mode.on and part.products then mode.prepare(part.products, (...), part.lens and (select(part.lens, ...))) end
    program.args = nil -- in use
    for i = 1, n do args[i] = (select(i, ...)) end
    add_parameters(args, n, params)
    return settle(program, args, n, core.group_run(part.group, args))
end

--- One part by itself, for what the plan of a later one must know.
function run.part(part, env)
    if part.group then run_group(part, env, {}) else run_call(part, env, {}) end
end

return run
