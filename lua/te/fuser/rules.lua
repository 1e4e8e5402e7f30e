--- Fusions that users register.
--
-- A rule is a function rule(ops, opts). It gets the basic operations of one run of neighbours in order, and returns the list
-- with some neighbours replaced by instances of te.FusedOperation that stand for them. Rules run in the order of their
-- registration, each on what the one before returned, and before anything else is fused. opts says what the input is like:
--
--     opts.dtype      what operations compute in: that of te.autocast, otherwise that of the input
--     opts.device     where the input is
--     opts.training   whether the container is in training mode
--     opts.recipe     the quantization, nil without
--
-- Forward and backward are planned apart. A fused operation from a forward rule that has a fuser_backward is joint: backward
-- rules find it in their list in place of the operations it stands for, which otherwise they find as they are. Backward
-- rules apply when something wants a gradient.
--
-- Operations that no rule fused are planned by the engine as ever. The others become scripts (te.fuser.script); forward and
-- backward units that overlap run as one.
--
-- A rule runs when a container is planned: at its first call, and again when the rules, opts, the container, or a field that
-- an operation names in plan_fields have changed.

local te = require "te"
local fail = require "te.fail"
local core = te._core
local options = require "te.options"
local operation = require "te.operation"
local script = require "te.fuser.script"

local is, BasicOperation, FusedOperation = te.is, operation.BasicOperation, operation.FusedOperation

-- `version` counts changes, `count` is how many rules there are.
local rules = { version = 0, count = 0 }
local registered = { forward = {}, backward = {} }
local METHOD = { forward = "fuser_forward", backward = "fuser_backward" }

-- Registration ------------------------------------------------------------------------------------------------------

local function find(list, fn)
    for i, rule in ipairs(list) do
        if rule.fn == fn then return i end
    end
end

-- Where a function was written.
local function place_of(fn)
    local info = debug and type(fn) == "function" and debug.getinfo(fn, "S")
    return info and ("%s:%d"):format(info.short_src, info.linedefined) or tostring(fn)
end

local function register(kind, fn, opts)
    local who, list = ("te.register_%s_fusion"):format(kind), registered[kind]
    options.argument(who, "rule", fn, { "callable" })
    opts = options.check(who, opts, { name = { "string" } })
    if find(list, fn) then fail("%s: the rule %s is registered already", who, list[find(list, fn)].name) end
    list[#list + 1] = { fn = fn, name = opts.name or place_of(fn) }
    rules.version, rules.count = rules.version + 1, rules.count + 1
    return fn
end

local function unregister(kind, fn)
    local at = find(registered[kind], fn)
    if not at then return false end
    table.remove(registered[kind], at)
    rules.version, rules.count = rules.version + 1, rules.count - 1
    return true
end

--- Adds a rule for forward; returns it. Option `name` stands in messages instead of the place where it was written.
---@param fn fun(ops: table, opts: table): table
function rules.register_forward_fusion(fn, opts) return register("forward", fn, opts) end

--- Adds a rule for backward; returns it.
---@param fn fun(ops: table, opts: table): table
function rules.register_backward_fusion(fn, opts) return register("backward", fn, opts) end

--- Takes a rule away; returns whether it was there.
function rules.unregister_forward_fusion(fn) return unregister("forward", fn) end
function rules.unregister_backward_fusion(fn) return unregister("backward", fn) end

function rules.unregister_fusion(fn)
    local forward, backward = unregister("forward", fn), unregister("backward", fn)
    return forward or backward
end

-- Running rules -----------------------------------------------------------------------------------------------------

local function copy(list)
    local new = {}
    for key, value in pairs(list) do new[key] = value end
    return new
end

local function describe(value)
    if type(value) ~= "table" then return tostring(value) end
    local mt = getmetatable(value)
    return type(mt) == "table" and mt.__name or "a table"
end

-- The basic operations that one entry of a list stands for.
local function stands_for(entry)
    return is(entry, FusedOperation) and entry.basic_ops or { entry }
end

local function check_entry(who, kind, i, entry)
    if is(entry, BasicOperation) then return end
    if not is(entry, FusedOperation) then fail("%s: entry %d is no operation: %s", who, i, describe(entry)) end
    if not entry.basic_ops or #entry.basic_ops == 0 then
        fail("%s: entry %d (%s) stands for no operation; set_basic_ops says which", who, i, entry.__name)
    elseif not entry[METHOD[kind]] then
        fail("%s: entry %d (%s) has no method %s", who, i, entry.__name, METHOD[kind])
    end
end

-- How often each operation is in a list.
local function tally(ops)
    local counts = {}
    for _, op in ipairs(ops) do counts[op] = (counts[op] or 0) + 1 end
    return counts
end

-- Checks that `got` are the operations `want` in their order.
local function check_order(who, want, got)
    local wanted, counts = tally(want), tally(got)
    for i, op in ipairs(want) do
        if (counts[op] or 0) < wanted[op] then fail("%s: it dropped operation %d (%s)", who, i, op.__name) end
    end
    for _, op in ipairs(got) do
        if not wanted[op] then fail("%s: it added an operation (%s)", who, op.__name) end
        if counts[op] > wanted[op] then fail("%s: it duplicated an operation (%s)", who, op.__name) end
    end
    for i, op in ipairs(want) do
        if got[i] ~= op then
            fail("%s: it reordered the operations: %s stands in place %d, where %s was", who, got[i].__name, i, op.__name)
        end
    end
end

-- Checks what a rule made of operations that stand for `basic`.
local function check_result(who, kind, basic, result)
    if type(result) ~= "table" or getmetatable(result) then
        fail("%s: expected the list of operations, got %s", who, describe(result))
    end
    local got = {}
    for i, entry in ipairs(result) do
        check_entry(who, kind, i, entry)
        for _, op in ipairs(stands_for(entry)) do got[#got + 1] = op end
    end
    for key, value in pairs(result) do
        if type(key) ~= "number" or key > #result or key < 1 then check_entry(who, kind, tostring(key), value) end
    end
    check_order(who, basic, got)
end

local function call_rule(who, rule, ops, opts)
    local function explain(message)
        return core.remember(type(message) == "string" and ("%s: %s"):format(who, message) or message)
    end
    local ok, result = xpcall(rule.fn, explain, ops, opts)
    if not ok then error(result, 0) end
    return result
end

-- What the rules of one kind make of a list that stands for `basic`. `authors` gets the rule of every fused operation.
local function apply(kind, basic, ops, opts, authors)
    for _, rule in ipairs(copy(registered[kind])) do
        local who = "fusion rule " .. rule.name
        local result = call_rule(who, rule, copy(ops), copy(opts))
        check_result(who, kind, basic, result)
        ops = copy(result)
        for _, entry in ipairs(ops) do
            if is(entry, FusedOperation) then authors[entry] = authors[entry] or rule.name end
        end
    end
    return ops
end

-- From lists to scripts ---------------------------------------------------------------------------------------------

local function units_of(list, authors)
    local units, at = {}, 1
    for i, entry in ipairs(list) do
        local n = #stands_for(entry)
        units[i] = { first = at, last = at + n - 1 }
        if authors[entry] then units[i].op, units[i].rule = entry, authors[entry] end
        at = at + n
    end
    return units
end

-- Fused units of operations first … last, counted from `first`; and whether any is fused.
local function cut(units, first, last)
    local list, fused = {}, false
    for _, unit in ipairs(units) do
        if unit.first >= first and unit.last <= last then
            list[#list + 1] = { first = unit.first - first + 1, last = unit.last - first + 1, op = unit.op, rule = unit.rule }
            fused = fused or unit.op ~= nil
        end
    end
    return list, fused
end

-- Ranges { first, last } of operations that share units, forward or backward; the others stay alone and `plain`.
local function ranges(n, forward, backward)
    local plain, joined = {}, {}
    for i = 1, n do plain[i], joined[i] = true, false end
    for _, units in ipairs { forward, backward } do
        for _, unit in ipairs(units) do
            for i = unit.first, unit.last do
                plain[i] = plain[i] and not unit.op
                joined[i] = joined[i] or i > unit.first
            end
        end
    end
    local list = {}
    for i = 1, n do
        if joined[i] then list[#list].last = i else list[#list + 1] = { first = i, last = i, plain = plain[i] } end
    end
    return list
end

-- The item that runs items first … last of the walk.
local function script_item(walk, readers, items, forward_units, backward_units)
    local last, outputs = items[#items], { items[#items].y }
    local function consider(v)
        if v ~= last.y and readers[v] and readers[v] > last.number then outputs[#outputs + 1] = v end
    end
    for _, item in ipairs(items) do
        consider(item.y)
        for _, v in ipairs(item.outs) do consider(v) end
    end
    local op = script.new(items, forward_units, backward_units, outputs)
    return { op = op, x = op.inputs[1], extras = { unpack(op.inputs, 2) }, y = outputs[1], outs = { unpack(outputs, 2) } }
end

-- The number of the item that reads each value last.
local function last_readers(walk)
    local readers = {}
    for i, item in ipairs(walk.items) do
        item.number, readers[item.x] = i, i
        for _, v in ipairs(item.extras) do readers[v] = i end
    end
    for _, v in ipairs(walk.outputs) do readers[v] = math.huge end
    return readers
end

-- Appends what becomes of neighbouring items to `result`.
local function rewrite_run(walk, readers, items, situation, result)
    local basic, authors = {}, {}
    for i, item in ipairs(items) do basic[i] = item.op end
    local forward, joint = apply("forward", basic, basic, situation.opts, authors), {}
    for _, entry in ipairs(forward) do
        local whole = is(entry, FusedOperation) and entry.fuser_backward
        for _, op in ipairs(whole and { entry } or stands_for(entry)) do joint[#joint + 1] = op end
    end
    local backward = situation.wants_grad and apply("backward", basic, joint, situation.opts, authors) or joint
    local forward_units, backward_units = units_of(forward, authors), units_of(backward, authors)
    for _, range in ipairs(ranges(#items, forward_units, backward_units)) do
        if range.plain then
            result[#result + 1] = items[range.first]
        else
            local own_forward = cut(forward_units, range.first, range.last)
            local own_backward, fused = cut(backward_units, range.first, range.last)
            result[#result + 1] = script_item(walk, readers, { unpack(items, range.first, range.last) }, own_forward,
                fused and own_backward or nil)
        end
    end
end

--- Replaces items of a walk (te.fuser.flatten) that rules fuse by scripts. Returns the fields that the rules may have looked
--- at, as checks of a program: { operation, field, value }.
function rules.rewrite(walk, situation)
    local readers, result, checks, at = last_readers(walk), {}, {}, 1
    local items = walk.items
    while items[at] do
        local run = {}
        while items[at] and is(items[at].op, BasicOperation) and (#run == 0 or run[#run].y == items[at].x) do
            for _, field in ipairs(items[at].op.plan_fields) do
                checks[#checks + 1] = { items[at].op, field, items[at].op[field] }
            end
            run[#run + 1], at = items[at], at + 1
        end
        if #run > 0 then
            rewrite_run(walk, readers, run, situation, result)
        else
            result[#result + 1], at = items[at], at + 1
        end
    end
    walk.items = result
    return checks
end

local function wants_grad(module, ...)
    if not core.grad_enabled() then return false end
    for i = 1, select("#", ...) do
        local t = select(i, ...)
        if te.is_tensor(t) and t.requires_grad then return true end
    end
    for _, parameter in ipairs(module:parameters()) do
        if parameter.requires_grad then return true end
    end
    return false
end

--- What rules may depend on when a module runs on x and extra inputs, and `key` extended by it.
function rules.situation(key, module, x, ...)
    local tensor = te.is_tensor(x)
    local opts = {
        dtype = core.compute_dtype() or tensor and x.dtype or nil, device = tensor and x.device or nil,
        training = module.training,
    }
    local situation = { opts = opts, wants_grad = wants_grad(module, x, ...) }
    return situation, ("%d %s %s %s"):format(key, tostring(opts.dtype), tostring(opts.device), tostring(situation.wants_grad))
end

return rules
