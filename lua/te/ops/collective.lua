--- Operations between processes: AllReduce, AllGather, ReduceScatter, and what tensor-parallel layers are made of.
--
-- In a group of one they change nothing and cost nothing. In a larger one they wait for the others, so they stand
-- between fused groups and not in them. Each has the other's direction as its gradient:
--
--     forward                          backward
--     sum of all processes' x          the gradient as it is: the same everywhere (reduce_in_backward: their sum)
--     x as it is (copy)                the sum of all processes' gradients
--     all rows, one after the other    this process's rows of the sum
--     this process's rows of the sum   all rows, one after the other
--
-- Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198), 4.2.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local declared = require "te.ops.declared"
local whole = require "te.distributed.whole"
local BasicOperation = require("te.operation").BasicOperation
local core = te._core

local collective = {}

--- The group that an option names: all processes unless it says so; nil where that is this process alone.
function collective.group(who, option, given)
    options.group(who, "option " .. option, given)
    if given == nil and not te.distributed.launched() then return nil end
    local group = given or te.distributed.world()
    return group.size > 1 and group or nil
end

-- Directions --------------------------------------------------------------------------------------------------------

local alone = false -- for as long as a plan is made: the others do not take part

-- fn for processes, or what has the shape of its result.
local function with_others(fn, shaped)
    return function(group, x) return (alone and shaped or fn)(group, x) end
end

local function same(_, x) return x end
local sum = with_others(function(group, x) return group:all_reduce(x) end, function(_, x) return x:view(x.shape) end)
local gather = with_others(function(group, x) return group:all_gather(x) end, function(group, x)
    local rows = {}
    for i = 1, group.size do rows[i] = x end
    return te.cat(rows, 1)
end)
local scatter = with_others(function(group, x) return group:reduce_scatter(x) end,
    function(group, x) return x:narrow(1, 1, math.floor(x.shape[1] / group.size)) end)

local function finish(before, done, ...)
    alone = before
    if not done then error((...), 0) end
    return ...
end

--- fn(…) without the other processes: of what a collective gives only the shape is right.
function collective.without_others(fn, ...)
    local before = alone
    alone = true
    return finish(before, pcall(fn, ...))
end

-- forward(group, x), whose gradient is backward(group, dy).
local function differentiable(forward, backward)
    return function(group, x)
        return core.custom(function(_, value) return forward(group, value) end,
            function(_, dy) return backward(group, dy) end, x)
    end
end

collective.differentiable = differentiable

--- x itself; the gradients of all processes are added.
collective.copy = differentiable(function(_, x) return x:view(x.shape) end, sum)
collective.reduce = differentiable(sum, same)
collective.gather = differentiable(gather, scatter)
collective.scatter = differentiable(scatter, gather)
local reduce_both = differentiable(sum, sum)

-- Random numbers go on at the same place in all processes: where parts differ in size, rounding gradients at random
-- (te.recipe.NVFP4BlockScaling) has drawn more for some. Else layers that all have whole would be rounded otherwise.
local function align_random(group)
    local seed, offset = core.rng_state():match "^(%d+) (%d+)$"
    local own = te.tensor({ tonumber(offset) }, { dtype = "float64", device = "cpu" })
    local furthest = ("%.0f"):format(group:all_reduce(own, "max"):item())
    if furthest ~= offset then core.rng_state(seed .. " " .. furthest) end
end

local function sum_and_align(group, dy)
    if not alone then align_random(group) end
    return sum(group, dy)
end

local copy_to_uneven = differentiable(function(_, x) return x:view(x.shape) end, sum_and_align)

-- Operations --------------------------------------------------------------------------------------------------------

local GROUP = { group = { "any", help = "group of te.distributed; default: all processes" } }
local ROWS = { dim = { "size", 1, help = "dimension that the rows lie along" } }

local function check_dim(self, x)
    if te.is_tensor(x) and x:dim() >= self.dim then return end
    fail("te.%s: option dim: %d, but the input is %s", self.__name, self.dim,
        te.is_tensor(x) and options.shape(x) or options.shown(x))
end

-- An operation that runs `way` in a group of several, and is not there in a group of one.
local function define(name, sentence, way, declarations)
    local rows_of = declarations == ROWS -- dimension 1, unless it is said
    local class = BasicOperation:extend(name)
    class.pure, class.takes, class.way, class.sentence = true, 1, way, sentence
    declarations = declared.join(declarations, GROUP)

    function class:init(opts)
        opts = declared.check("te." .. name, opts, declarations)
        self.group = collective.group("te." .. name, "group", opts.group)
        if opts.reduce_in_backward then self.way = reduce_both end
        if opts.uneven then self.way = copy_to_uneven end
        if rows_of then self.dim = opts.dim end
    end
    options.declare(class.init, declarations)

    function class:op_forward(_, x)
        if not self.group then return x end
        local dim = rows_of and self.dim or 1
        if dim == 1 then return self.way(self.group, x) end
        check_dim(self, x)
        return self.way(self.group, x:transpose(1, dim):contiguous()):transpose(1, dim):contiguous()
    end

    function class:lower(_, x)
        if not self.group then return x end
        return nil, "it waits for other processes"
    end

    function class:describe() return self.group and tostring(self.group) or "" end

    return class
end

-- Its gradient goes back as it is, which is right where all of them go on alike.
collective.AllReduce = define("AllReduce", "The sum over all processes.", collective.reduce,
    { reduce_in_backward = { "boolean", false, help = "sum gradients over the processes, too" } })
collective.AllGather = define("AllGather", "The rows of all processes, one after the other.", collective.gather,
    ROWS)
collective.ReduceScatter = define("ReduceScatter", "This process's part of the rows of the sum.",
    collective.scatter, ROWS)
collective.CopyToGroup = define("CopyToGroup", "What it is given; gradients are added.", collective.copy,
    { uneven = { "boolean", false, help = "what follows is split into parts of different size" } })

-- Tensor parallelism ------------------------------------------------------------------------------------------------

local PARALLEL = {
    tensor_parallel_mode = { "string", choices = { "column", "row" },
        help = "dimension of the weight that is split over processes; default: not split" },
    tensor_parallel_group = { "any", help = "group of te.distributed with the parts; default: all processes" },
    sequence_parallel = { "boolean", false, help = "outside the layer, rows are split between the processes" },
    sequence_dim = { "size", 1, help = "dimension that those rows lie along: 2 for {batch, seq, features}" },
    tensor_parallel_sections = { "table",
        help = "with column: list of sizes of the products that the layer joins, each of which is split" },
}
collective.PARALLEL = PARALLEL

--- How a layer is split: { mode =, group =, sequence =, rank =, size = }; nil when it is whole.
function collective.split(who, opts)
    local mode = opts.tensor_parallel_mode
    if not mode then
        for _, name in ipairs { "sequence_parallel", "tensor_parallel_group", "tensor_parallel_sections" } do
            if opts[name] then fail("%s: option %s: needs tensor_parallel_mode", who, name) end
        end
        if (opts.sequence_dim or 1) ~= 1 then fail("%s: option sequence_dim: needs tensor_parallel_mode", who) end
        return nil
    end
    local group = collective.group(who, "tensor_parallel_group", opts.tensor_parallel_group)
    if opts.sequence_dim and opts.sequence_dim ~= 1 and not opts.sequence_parallel then
        fail("%s: option sequence_dim: needs sequence_parallel", who)
    end
    return group and { mode = mode, group = group, sequence = opts.sequence_parallel, dim = opts.sequence_dim }
end

--- How much of `size` comes before this process's part, and how much is in it (te.distributed.whole). Raises where
--- there is nothing for some process, or parts would not be alike and may not be `uneven`.
function collective.share(who, name, size, group, uneven)
    if size % group.size ~= 0 and not uneven or size < group.size then
        fail("%s: %s = %d cannot be split between %d processes", who, name, size, group.size)
    end
    return whole.share(size, group)
end

--- The part of t along dimension `dim` that is this process's, of each section where there are several: a leaf that
--- requires a gradient and is known as a part.
function collective.part(who, name, t, dim, group, uneven, sections)
    sections = sections or { t.shape[dim] }
    for i, size in ipairs(sections) do
        local which = #sections == 1 and name or ("tensor_parallel_sections[%d]"):format(i)
        collective.share(who, which, size, group, uneven and #sections == 1)
    end
    local own = te.no_grad(whole.part, t, { group = group, dim = dim, sections = sections })
    if #sections == 1 then own = own:clone() end
    own.requires_grad = true
    return whole.hold(own, group, dim, sections)
end

--- What runs before and after the product of a layer that is split so; nil: nothing.
function collective.around(split)
    local group = { group = split.group, dim = split.sequence and split.dim or nil }
    local first, last = collective.CopyToGroup, nil
    if split.mode ~= "column" then
        first, last = nil, split.sequence and collective.ReduceScatter or collective.AllReduce
    elseif split.sequence then
        first = collective.AllGather
    end
    if first == collective.CopyToGroup then group.uneven = split.uneven end
    return first and first(group), last and last(group)
end

return collective
