--- What forward and backward of a script (te.fuser.script) share: calling methods of operations,
--- checking what they return.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local core = te._core

local unit = {}

--- The values of a list of their numbers.
function unit.gather(values, list)
    local found = {}
    for i, v in ipairs(list) do found[i] = values[v] end
    return found
end

--- What the class of an operation says it takes or makes: num_extra_inputs or num_extra_outputs.
function unit.count(op, field)
    local n = op[field]
    return n == 0 and n or options.argument(op.__name, field, n, { "integer", min = 0 })
end

--- What an operation returned, where extra outputs are tensors and as many as it makes.
function unit.outputs(op, y, ...)
    local n, given = unit.count(op, "num_extra_outputs"), select("#", ...)
    for i = 1, n do
        local out = (select(i, ...))
        if not te.is_tensor(out) then
            fail("%s:op_forward: extra output %d: expected a tensor, got %s", op.__name, i, core.describe(out))
        end
    end
    for i = n + 1, given do
        if (select(i, ...)) ~= nil then
            fail("%s:op_forward: expected %d extra outputs, got %d", op.__name, n, given)
        end
    end
    return y, ...
end

--- How messages name a method of an operation of a unit.
function unit.title(of, op, method)
    local who = ("%s:%s"):format(op.__name, method)
    return of.rule and ("fusion rule %s: %s"):format(of.rule, who) or who
end

--- Calls a method of the fused operation of a unit. What goes wrong in the work of a rule names the rule.
function unit.call(of, method, ...)
    local op = of.op
    if not op[method] then fail("%s: the class has no method %s", op.__name, method) end
    if not of.rule then return op[method](op, ...) end
    local function explain(message)
        if type(message) == "string" then message = ("%s: %s"):format(unit.title(of, op, method), message) end
        return core.remember(message)
    end
    local function pass(ok, ...)
        if ok then return ... end
        error((...), 0)
    end
    return pass(xpcall(op[method], explain, op, ...))
end

--- Checks that `given` is a list with n entries; nil does when n is 0. false stands for a gradient that is missing.
function unit.check_list(who, given, n, what)
    if given == nil and n == 0 then return {} end
    if type(given) ~= "table" then fail("%s: expected a list of %d %s, got %s", who, n, what, core.describe(given)) end
    local count = 0
    for k in pairs(given) do count = math.max(count, type(k) == "number" and k or 0) end
    if count ~= n then
        local hint = what:find "gradients" and "; false stands for one that is missing" or ""
        fail("%s: expected %d %s, got %d%s", who, n, what, count, hint)
    end
    return given
end

--- Checks one list for each basic operation of a unit against the numbers in `counts`.
function unit.check_lists(steps, of, method, given, counts, what)
    local who, total, lists = unit.title(of, of.op, method), 0, {}
    for _, count in ipairs(counts) do total = total + count end
    if given == nil and total == 0 then given = {} end
    if type(given) ~= "table" then
        fail("%s: expected a list of lists of %s, got %s", who, what, core.describe(given))
    end
    if #given > #counts then fail("%s: %s for %d basic operations, there are %d", who, what, #given, #counts) end
    for i, count in ipairs(counts) do
        local name = ("%s: basic operation %d (%s)"):format(who, i, steps[of.first + i - 1].op.__name)
        lists[i] = unit.check_list(name, given[i], count, what)
    end
    return lists
end

--- Whether an operation runs by op_forward and op_backward; one with another forward runs as a whole.
local function is_basic(op) return op.forward == te.BasicOperation.forward end

function unit.has_backward(op) return is_basic(op) and op.op_backward ~= nil end

--- Runs an operation by itself.
function unit.run_basic(op, ctx, x, ...)
    if is_basic(op) then return op:op_forward(ctx, x, ...) end
    if ctx.seq_lens then return op(x, ctx.seq_lens, ...) end
    return op(x, ...)
end

return unit
