--- te.parallel_cross_entropy: te.cross_entropy of logits whose columns, the classes, are split between processes.
--
-- Every process has some classes of all rows. Three numbers of a row go between processes, four with label smoothing:
--
--     m   the largest logit of the part        M = max over parts of m, S = log(sum over parts of s exp(m - M))
--     s   sum of exp(x - m)                    x[target] = sum over parts of the target's logit
--     the target's logit, 0 elsewhere          sum of x - M = sum over parts of their sums + classes (m - M)
--     the sum of x - m
--
-- The loss is S - (x[target] - M). Backward needs nothing of the others: exp(x - M - S) - [target] is of the part
-- alone. Kept are logits, targets, M and S.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local collective = require "te.ops.collective"
local core = te._core

local WHO = "te.parallel_cross_entropy"

local OPTIONS = {
    group = { "any", help = "group of te.distributed that holds the classes; default: all processes" },
    vocab_start = { "integer", min = 0,
        help = "first class of these logits; default: by the order of the ranks" },
    ignore_index = { "integer", -100, help = "targets that are ignored" },
    label_smoothing = { "number", 0, min = 0, max = 1, help = "share of a target that is spread over all classes" },
    reduction = { "string", "mean", choices = { "mean", "sum", "none" }, help = "reduction of the rows' losses" },
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

-- The first class here, how many there are, and the parts' sizes by rank: the parts stand one after the other.
local function place(group, size, o)
    local all, at, first, sizes = agree(group, size, o), 0, nil, {}
    for i, part in ipairs(all) do part.rank, sizes[i] = i - 1, part[1] end
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
    return first, at, sizes
end

-- The sum of x - M over all parts. One without classes has no m.
local function total_below(parts, most, sizes)
    local total = te.zeros_like(most)
    for i, size in ipairs(sizes) do
        if size > 0 then total = total + parts[i][4] + (parts[i][1] - most) * size end
    end
    return total
end

-- Of every row what all parts of it make: M, S, the target's logit, and the sum of x - M where the parts' are given.
local function join(group, statistics, sizes)
    local shape, n = statistics[1].shape, statistics[1]:numel()
    local parts = group:all_gather(te.stack(statistics, 1):view { 1, #statistics, n })
    local largest = parts:select(2, 1)
    local most = te.max(largest, 1)
    local sum = te.log(te.sum(parts:select(2, 2) * te.exp(largest - most), 1))
    local function row(t) return t:view(shape) end
    return row(most), row(sum), row(te.sum(parts:select(2, 3), 1)),
        statistics[4] and row(total_below(parts, most, sizes))
end

local operations = {}

local function operation(name)
    operations[name] = operations[name] or core.operation(name)
    return operations[name]
end

-- The loss of every row.
local function losses_of(group, logits, targets, o)
    local first, classes, sizes = place(group, logits:size(-1), o)
    local m, s, picked, total = operation "parallel_cross_entropy"(logits, targets,
        { first = first, classes = classes, ignore_index = o.ignore_index })
    local most, sum, target, below = te.no_grad(join, group, { m, s, picked, o.label_smoothing > 0 and total or nil },
        sizes)
    return operation "cross_entropy_of_part"(logits, targets, most, sum, target, below, { first = first,
        classes = classes, ignore = o.ignore_index, smoothing = o.label_smoothing })
end

local function alone(logits, targets, o)
    if (o.vocab_start or 0) ~= 0 then
        fail("%s: option vocab_start: %d, but no other process has the classes before it", WHO, o.vocab_start)
    end
    return te.cross_entropy(logits, targets,
        { ignore_index = o.ignore_index, label_smoothing = o.label_smoothing, reduction = o.reduction })
end

--- Cross entropy of logits {..., classes} that are split over the processes of a group: each has the logits of some
--- classes, in the order of the ranks or from vocab_start on, and all have the same targets {...}. The parts may differ
--- in size. On every process the loss is that of te.cross_entropy on the joined logits, and each gets the gradient of
--- its part. All processes of the group must call it. In a group of one it is te.cross_entropy.
---@param logits te.Tensor   {..., classes here}
---@param targets te.Tensor  {...}, whole numbers from 0, of all classes
---@param opts table|nil
---@return te.Tensor loss
local function parallel_cross_entropy(logits, targets, opts, ...)
    options.last(WHO, 3, ...)
    local o = options.check(WHO, opts, OPTIONS)
    for name, value in pairs { logits = logits or false, targets = targets or false } do
        if not options.tensor(WHO, name, value) then
            fail("%s: %s: expected a tensor, got %s", WHO, name, core.describe(value))
        end
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
