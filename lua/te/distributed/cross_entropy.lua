--- te.parallel_cross_entropy: te.cross_entropy of logits whose columns, the classes, are split between processes.
--
-- Every process has some classes of all rows. Three numbers of a row go between processes, four with label smoothing:
--
--     m   the largest logit of the part        lse = M + log(sum over parts of s exp(m - M)), M = max over parts of m
--     s   sum of exp(x - m)                    x[target] = sum over parts of the target's logit
--     the target's logit, 0 elsewhere          mean(x) = sum over parts of the sums / classes
--     the sum of x
--
-- Backward needs nothing of the others: exp(x - lse) - [target] is of the part alone. Kept are logits, targets and lse.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local collective = require "te.ops.collective"
local core = te._core

local WHO = "te.parallel_cross_entropy"

local OPTIONS = {
    group = { "any", help = "of te.distributed: who has the classes; all processes unless given" },
    vocab_start = { "integer", min = 0,
        help = "the first class of this process's logits; they follow the ranks unless given" },
    ignore_index = { "integer", -100, help = "targets that do not count" },
    label_smoothing = { "number", 0, min = 0, max = 1, help = "the part of a target that all classes share" },
    reduction = { "string", "mean", choices = { "mean", "sum", "none" }, help = "of the rows' losses" },
}
local MEAN, SUM, NONE = 0, 1, 2
local REDUCTIONS = { mean = MEAN, sum = SUM, none = NONE }
local ALIKE = { "ignore_index", "label_smoothing", "reduction" } -- behind a part's size and start

-- What all processes say of their parts, as a list of { size, start or -1, options… }.
local function agree(group, size, o)
    local own = { size, o.vocab_start or -1, o.ignore_index, o.label_smoothing, REDUCTIONS[o.reduction] }
    local all = group:all_gather(te.tensor({ own }, { dtype = "float64", device = "cpu" })):totable()
    for rank = 1, #all - 1 do
        for i, name in ipairs(ALIKE) do
            if all[rank + 1][2 + i] ~= all[1][2 + i] then
                fail("%s: option %s: rank %d has another one than rank 0", WHO, name, rank)
            end
        end
        if (all[rank + 1][2] < 0) ~= (all[1][2] < 0) then
            fail("%s: option vocab_start: given by some processes and not by all", WHO)
        end
    end
    return all
end

-- The first class here, and how many there are: the parts stand one after the other.
local function place(group, size, o)
    local all, at, first = agree(group, size, o), 0, nil
    for i, part in ipairs(all) do part.rank = i - 1 end
    if o.vocab_start then
        table.sort(all, function(a, b)
            if a[2] ~= b[2] then return a[2] < b[2] end
            return a[1] < b[1]
        end)
    end
    for _, part in ipairs(all) do
        if o.vocab_start and part[2] ~= at then
            fail("%s: option vocab_start: %d of rank %d, but %d classes stand before it", WHO, part[2], part.rank, at)
        end
        if part.rank == group.rank then first = at end
        at = at + part[1]
    end
    return first, at
end

-- Of every row what all parts of it make: log of the sum of exponentials, the target's logit, and the sum of logits.
local function join(group, statistics)
    local shape, n = statistics[1].shape, statistics[1]:numel()
    local parts = group:all_gather(te.stack(statistics, 1):view { 1, #statistics, n })
    local largest = parts:select(2, 1)
    local most = te.max(largest, 1)
    local lse = most + te.log(te.sum(parts:select(2, 2) * te.exp(largest - most), 1))
    local sums = te.sum(parts, 1)
    local function row(t) return t:view(shape) end
    return row(lse), row(sums:select(1, 3)), statistics[4] and row(sums:select(1, 4))
end

local operations = {}

local function operation(name)
    operations[name] = operations[name] or core.operation(name)
    return operations[name]
end

-- The loss of every row.
local function losses_of(group, logits, targets, o)
    local first, classes = place(group, logits:size(-1), o)
    local m, s, picked, total = operation "parallel_cross_entropy"(logits, targets,
        { first = first, classes = classes, ignore_index = o.ignore_index })
    local lse, target, sum = te.no_grad(join, group, { m, s, picked, o.label_smoothing > 0 and total or nil })
    return operation "cross_entropy_of_part"(logits, targets, lse, target, sum, { first = first, classes = classes,
        ignore = o.ignore_index, smoothing = o.label_smoothing })
end

local function alone(logits, targets, o)
    if (o.vocab_start or 0) ~= 0 then
        fail("%s: option vocab_start: %d, but no other process has the classes before it", WHO, o.vocab_start)
    end
    return te.cross_entropy(logits, targets,
        { ignore_index = o.ignore_index, label_smoothing = o.label_smoothing, reduction = o.reduction })
end

--- Cross entropy of logits {..., classes} that are split between the processes of a group: each has the logits of some
--- classes, one part after the other in the order of the ranks, or from vocab_start on, and all the same targets {...}.
--- The parts may differ in size. The loss, on every process, is that of te.cross_entropy on the joined logits, and each
--- gets the gradient of its part. All processes of the group call it. In a group of one it is te.cross_entropy.
---@param logits userdata   {..., classes here}
---@param targets userdata  {...}, whole numbers from 0, of all classes
---@param opts table|nil
---@return userdata loss
local function parallel_cross_entropy(logits, targets, opts, ...)
    options.last(WHO, 3, ...)
    local o = options.check(WHO, opts, OPTIONS)
    for name, value in pairs { logits = logits or false, targets = targets or false } do
        if not te.is_tensor(value) then fail("%s: %s: expected a tensor, got %s", WHO, name, type(value)) end
    end
    if logits:dim() == 0 then fail("%s: logits: expected {..., classes}, got {}", WHO) end
    local group = collective.group(WHO, "group", o.group)
    if not group then return alone(logits, targets, o) end
    local losses = losses_of(group, logits, targets, o)
    if o.reduction == "none" then return losses end
    local n = targets:numel()
    return operation(o.reduction == "mean" and "mean_counted" or "sum_counted")(losses:reshape { n },
        targets:reshape { n }, { ignore = o.ignore_index })
end

options.declare(parallel_cross_entropy, OPTIONS)

return parallel_cross_entropy
