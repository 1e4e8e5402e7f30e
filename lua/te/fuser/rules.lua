--- Fusions that users register.
--
-- A rule is a function rule(ops, opts). It gets the basic operations of one run of neighbours in order, and
-- returns the list with some neighbours replaced by instances of te.FusedOperation that stand for them. Rules run
-- in the order of their registration, each on what the one before returned, and before anything else is fused.
-- opts says what the input is like:
--
--     opts.dtype      what operations compute in: that of te.autocast, otherwise that of the input
--     opts.device     where the input is
--     opts.training   whether the container is in training mode
--     opts.recipe     the quantization, nil without
--
-- Forward and backward are planned apart. A fused operation from a forward rule that has a fuser_backward is joint:
-- backward rules find it in their list in place of the operations it stands for, which otherwise they find as they are.
-- Backward rules apply when something wants a gradient.
--
-- te.fuser.rewrite puts what they fused in the place of the operations; the others are planned by the engine as ever.
--
-- A run ends where several operations read a result: what a fused operation computes on its way is known to nobody
-- else. An operation called by itself, and a fused operation that stands in a container, run as they are.
--
-- A rule runs when a container is planned: at its first call, and again when the rules, opts, the container, or a field
-- that an operation names in plan_fields have changed.

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local core = te._core
local options = require "te.options"
local settle = require "te.settle"
local operation = require "te.operation"

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

local RULE = { name = { "string", help = "name in messages; default: the place where the rule was written" } }

local function register(kind, fn, opts)
    local who, list = ("te.register_%s_fusion"):format(kind), registered[kind]
    options.argument(who, "rule", fn, { "callable" })
    opts = options.check(who, opts, RULE)
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

--- Adds a rule for forward; returns it.
---@param fn fun(ops: table, opts: table): table
function rules.register_forward_fusion(fn, opts, ...)
    options.last("te.register_forward_fusion", 2, ...)
    return register("forward", fn, opts)
end
options.declare(rules.register_forward_fusion, RULE)

--- Adds a rule for backward; returns it.
---@param fn fun(ops: table, opts: table): table
function rules.register_backward_fusion(fn, opts, ...)
    options.last("te.register_backward_fusion", 2, ...)
    return register("backward", fn, opts)
end
options.declare(rules.register_backward_fusion, RULE)

--- Takes a rule for forward away; returns whether it was there.
function rules.unregister_forward_fusion(fn, ...)
    options.last("te.unregister_forward_fusion", 1, ...)
    return unregister("forward", fn)
end

--- Takes a rule for backward away; returns whether it was there.
function rules.unregister_backward_fusion(fn, ...)
    options.last("te.unregister_backward_fusion", 1, ...)
    return unregister("backward", fn)
end

--- Removes a rule wherever it is registered; returns whether it was.
function rules.unregister_fusion(fn, ...)
    options.last("te.unregister_fusion", 1, ...)
    options.argument("te.unregister_fusion", "rule", fn, { "callable" })
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
    options.no_class(("%s: entry %d"):format(who, i), entry)
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
            fail("%s: it reordered the operations: %s stands in place %d, where %s was", who,
                got[i].__name, i, op.__name)
        end
    end
end

-- Checks what a rule made of operations that stand for `basic`.
local function check_result(who, kind, basic, result)
    if type(result) ~= "table" or getmetatable(result) then
        fail("%s: expected the list of operations, got %s", who, describe(result))
    end
    local got, n = {}, 0
    for i, entry in ipairs(result) do
        n = i
        check_entry(who, kind, i, entry)
        for _, op in ipairs(stands_for(entry)) do got[#got + 1] = op end
    end
    check_order(who, basic, got)
    for key in pairs(result) do
        if type(key) ~= "number" or key < 1 or key > n or key % 1 ~= 0 then -- or behind a gap
            fail("%s: entry %s stands outside the list", who, tostring(key))
        end
    end
end

local MOST_NESTED = 8
local nested = setmetatable({}, { __mode = "k" }) -- by coroutine: how many rules wait for one that runs

settle.when_stopped(function() nested[rules] = nil end)

-- A rule may run containers, which have rules of their own; but it would not end where it does so each time.
local function call_rule(who, rule, ops, opts)
    local function explain(message)
        local named = type(message) ~= "string" or message:find(who .. ": ", 1, true)
        return core.remember(named and message or ("%s: %s"):format(who, message))
    end
    local thread = coroutine.running() or rules
    local depth = nested[thread] or 0
    if depth == MOST_NESTED then
        fail("%s: it runs a container, which applies it again, %d deep", who, depth)
    end
    nested[thread] = depth + 1
    local ok, result = xpcall(rule.fn, explain, ops, opts)
    nested[thread] = depth
    if not ok then error(result, 0) end
    return result
end

--- What the rules of one kind make of a list that stands for `basic`. `authors` gets the rule of every fused operation.
function rules.apply(kind, basic, ops, opts, authors)
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

-- What rules depend on ----------------------------------------------------------------------------------------------

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
        training = module.training, recipe = mode.enabled and mode.recipe or nil,
    }
    local situation = { opts = opts, wants_grad = wants_grad(module, x, ...) }
    return situation, ("%d %s %s %s %s"):format(key, tostring(opts.dtype), tostring(opts.device),
        tostring(situation.wants_grad), tostring(opts.recipe))
end

rules.stands_for = stands_for

return rules
