--- Puts what rules fused in the place of operations.
--
-- A walk (te.fuser.flatten) is cut into runs of basic operations, each the only reader of what the one before makes.
-- Forward and backward rules (te.fuser.rules) each make a list of a run; where units of the two overlap, they belong
-- together, and what belongs together becomes one item that runs a script (te.fuser.script):
--
--     operations   1    2    3    4    5    6    7
--     forward          [ F     ]
--     backward              [ B     ]      [ J ]            J is joint: a unit of both lists
--     items        1   {2 3 4   }      5   { 6 7 }

local operation = require "te.operation"
local rules = require "te.fuser.rules"
local script = require "te.fuser.script"
local is = require("te.module").is

local BasicOperation, FusedOperation = operation.BasicOperation, operation.FusedOperation

local rewrite = {}

local function units_of(list, authors)
    local units, at = {}, 1
    for i, entry in ipairs(list) do
        local n = #rules.stands_for(entry)
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
            list[#list + 1] = { first = unit.first - first + 1, last = unit.last - first + 1,
                op = unit.op, rule = unit.rule }
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
    for _, item in ipairs(items) do
        for _, v in ipairs(item.outs) do
            if readers[v] and readers[v].last > last.number then outputs[#outputs + 1] = v end
        end
    end
    local op = script.new(items, forward_units, backward_units, outputs)
    return { op = op, x = op.inputs[1], extras = { unpack(op.inputs, 2) }, y = outputs[1],
        outs = { unpack(outputs, 2) } }
end

-- For each value how many items read it, and the number of the last one; the caller comes after all.
local function readers_of(walk)
    local readers = {}
    local function note(v, i) readers[v] = { count = readers[v] and readers[v].count + 1 or 1, last = i } end
    for i, item in ipairs(walk.items) do
        item.number = i
        note(item.x, i)
        for _, v in ipairs(item.extras) do note(v, i) end
    end
    for _, v in ipairs(walk.outputs) do note(v, math.huge) end
    return readers
end

-- Appends what becomes of neighbouring items to `result`.
local function rewrite_run(walk, readers, items, situation, result)
    local basic, authors = {}, {}
    for i, item in ipairs(items) do basic[i] = item.op end
    local forward, joint = rules.apply("forward", basic, basic, situation.opts, authors), {}
    for _, entry in ipairs(forward) do
        local whole = is(entry, FusedOperation) and entry.fuser_backward
        for _, op in ipairs(whole and { entry } or rules.stands_for(entry)) do joint[#joint + 1] = op end
    end
    local backward = situation.wants_grad and rules.apply("backward", basic, joint, situation.opts, authors) or joint
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

-- Whether the item at `at` is the one reader of what the last item of a run makes.
local function continues(items, at, run, readers)
    local before = run[#run]
    return before == nil or before.y == items[at].x and readers[before.y].count == 1
end

-- Whether rules may fuse an item. One with an adapter (te.lora) or hooks is more than what they know it to be.
local function is_offered(item)
    return is(item.op, BasicOperation) and not item.op.lora and not rawget(item.op, "_hooks")
end

--- Replaces items of a walk (te.fuser.flatten) that rules fuse by scripts. Returns the fields that the rules may have
--- looked at, as checks of a program: { operation, field, value }.
function rewrite.walk(walk, situation)
    local readers, result, checks, at = readers_of(walk), {}, {}, 1
    local items = walk.items
    while items[at] do
        local run = {}
        while items[at] and is_offered(items[at]) and continues(items, at, run, readers) do
            for _, field in ipairs(operation.plan_fields(items[at].op)) do
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

return rewrite
