--- Tensor parallelism of attention and of models: heads and the width of MLPs split between the processes of a group.
--
--     x ─ norm ─ [qkv] ─ heads of this process ─ [proj] ─ + ─ norm ─ [up] ─ GELU ─ [down] ─ +
--               column                          row                column          row
--
-- Without sequence_parallel all processes have the whole of what stands outside of the brackets. With it each has its
-- part of the tokens there, the n-th of as many equal ones: {batch, seq / processes, features}.
--
-- Random numbers: what all processes have whole draws the same ones in all. What is split draws in each process from a
-- seed of its own; the numbers go on at the same place in all.
--
-- Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198), 4.2.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local collective = require "te.ops.collective"
local whole = require "te.distributed.whole"
local core = te._core
local differentiable = collective.differentiable

local tensor_parallel = {}

-- Of a model.
tensor_parallel.OPTIONS = {
    tensor_parallel = { "any", help = "group of te.distributed that heads, MLPs and the vocabulary are split over" },
    sequence_parallel = { "boolean", false,
        help = "with tensor_parallel: between layers, each process has its part of the tokens" },
}

-- Of self-attention.
tensor_parallel.ATTENTION = {
    tp_group = { "any", help = "group of te.distributed that the heads are split over" },
    sequence_parallel = { "boolean", false,
        help = "with tp_group: outside the module, tokens {batch, seq, hidden} are split between the processes" },
}

--- The group, nil for one of one, and whether sequences are split; raises where they are none.
---@param who string
---@param option string  the group's name
---@param given any
---@param sequence boolean|nil
function tensor_parallel.check(who, option, given, sequence)
    options.group(who, option, given)
    if sequence and not given then fail("%s: sequence_parallel has no effect without %s", who, option) end
    if not given or given.size == 1 then return nil, false end
    return given, sequence or false
end

--- Raises where a number of heads, say, cannot be split evenly.
function tensor_parallel.check_divides(who, name, number, group)
    if number % group.size ~= 0 then
        fail("%s: %s = %d cannot be split between %d processes", who, name, number, group.size)
    end
end

--- The options of a te.Linear with where and how it is split: "column", "row" or nothing.
---@param group table|nil
---@param sequence boolean|nil
---@param mode string
---@param opts table
function tensor_parallel.linear(group, sequence, mode, opts)
    if not group then return opts end
    opts.tensor_parallel_mode, opts.tensor_parallel_group, opts.sequence_parallel = mode, group, sequence
    if sequence then opts.sequence_dim = 2 end
    return opts
end

--- The options of a norm that sees the tokens of this process, where sequences are split.
function tensor_parallel.norm(group, sequence, opts)
    if group and sequence then opts.sequence_parallel, opts.tensor_parallel_group = true, group end
    return opts
end

-- Random numbers ------------------------------------------------------------------------------------------------------

local STRIDE, SEEDS = 274177006583489, 2 ^ 53 -- any large odd number, not te.train.ranks'; seeds are whole in a double

-- Goes on with another seed at the same place; returns the one before.
local function swap(seed)
    local before, offset = core.rng_state():match "^(%d+) (%d+)$"
    core.rng_state(("%s %s"):format(seed, offset))
    return before
end

--- fn(...), which draws from a seed of this process's.
function tensor_parallel.apart(group, fn, ...)
    local seed = tonumber(core.rng_state():match "^%d+") % SEEDS
    for _ = 1, group.rank do seed = (seed + STRIDE) % SEEDS end
    return core.pass(core.under(swap, ("%.0f"):format(seed), fn, ...))
end

-- Between processes ---------------------------------------------------------------------------------------------------

local function along(dim, fn)
    return function(group, x) return fn(group, x:transpose(1, dim):contiguous()):transpose(1, dim):contiguous() end
end

local function own_part(dim)
    return function(group, x)
        local each = x.shape[dim] / group.size
        return x:narrow(dim, group.rank * each + 1, each):contiguous()
    end
end

local function gather(group, x) return group:all_gather(x) end
local function scatter(group, x) return group:reduce_scatter(x) end

--- This process's tokens of x {batch, seq, features}, which all have.
local split_tokens = differentiable(own_part(2), along(2, gather))

--- The tokens of all. With `alike` all go on alike, so that each has the gradient of its own already.
local gather_tokens = differentiable(along(2, gather), along(2, scatter))
local gather_tokens_alike = differentiable(along(2, gather), own_part(2))

--- x {batch, seq, features} as the part of it that is this process's.
function tensor_parallel.split_tokens(who, group, x)
    local seq = x.shape[2]
    if seq % group.size ~= 0 then
        fail("%s: sequence_parallel: a sequence of %d tokens cannot be split between %d processes", who, seq,
            group.size)
    end
    return split_tokens(group, x)
end

--- The whole of it again, for what all processes go on with alike.
function tensor_parallel.join_tokens(group, x) return gather_tokens_alike(group, x) end

--- x {batch, seq, features}, of which each process has its tokens or all have all, for a product whose columns are
--- split: whole, and its gradient the sum of all.
function tensor_parallel.before_columns(group, sequence, x)
    return sequence and gather_tokens(group, x) or collective.copy(group, x)
end

--- y {..., columns here}, made with a weight whose rows are split, as all columns, with which all go on alike.
function tensor_parallel.join_columns(group, y, weight)
    local columns = whole.shape(weight)[1]
    local before, count = whole.share(columns, group)
    local function join(_, value)
        local shape = value.shape
        local rows = value:reshape { -1, count }:transpose(1, 2):contiguous()
        shape[#shape] = columns
        return whole.join(weight, rows):transpose(1, 2):reshape(shape)
    end
    local function own(_, dy) return dy:narrow(-1, before + 1, count):contiguous() end
    return differentiable(join, own)(group, y)
end

return tensor_parallel
