--- te.distributed.split_sequence, join_sequence and sequence_positions: sequences that are cut between processes.
--
-- For a group of n a sequence is cut in 2 n chunks, and rank r owns chunks r and 2 n - 1 - r, in this order. Where
-- later tokens see more, as in causal attention, each rank then has the same share of the work:
--
--     group of two     chunks  0 1 2 3      rank 0 owns  0 3      rank 1 owns  1 2
--
-- In the place of a group may stand two, { heads, ring } of cp_comm_type a2a+p2p: those who exchange heads are
-- neighbours, so rank h of `heads` and r of `ring` is rank r n + h of all, where `heads` has n. What such neighbours
-- have is one chunk of `ring`'s, and another one.
--
-- Attention between such parts: te.ops.context_parallel.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local sequence = {}

-- Numbers of chunks, from 0, as the ranks own them one after the other.
local function owned(size)
    local order = {}
    for rank = 0, size - 1 do order[2 * rank + 1], order[2 * rank + 2] = rank, 2 * size - 1 - rank end
    return order
end

-- Where among them each chunk is.
local function places(size)
    local order = {}
    for place, chunk in ipairs(owned(size)) do order[chunk + 1] = place - 1 end
    return order
end

-- Chunks of x along dimension `dim` in another order, or some of them; a copy.
local function chunks(x, dim, order, number)
    local each, parts = x.shape[dim] / number, {}
    for i, chunk in ipairs(order) do parts[i] = x:narrow(dim, chunk * each + 1, each) end
    return te.cat(parts, dim)
end

--- The parts of all ranks, one after the other along dimension 1, as the sequence that they are.
function sequence.in_order(x, group) return chunks(x, 1, places(group.size), 2 * group.size) end

--- A sequence along dimension 1 as the parts of all ranks, one after the other.
function sequence.by_rank(x, group) return chunks(x, 1, owned(group.size), 2 * group.size) end

--- Whether v is a list of two groups.
function sequence.is_pair(v)
    local is_group = te.distributed.is_group
    return type(v) == "table" and not is_group(v) and #v == 2 and is_group(v[1]) and is_group(v[2])
end

--- Of a list of two groups what a group says of its processes, and the list: { heads, ring, rank, size }.
function sequence.both(pair)
    local heads, ring = pair[1], pair[2]
    return { heads, ring, rank = ring.rank * heads.size + heads.rank, size = heads.size * ring.size }
end

local function cut_over(who, group)
    if sequence.is_pair(group) then return sequence.both(group) end
    return options.group(who, "group", group) or te.distributed.world()
end

local function check(who, x, group, dim)
    if not te.is_tensor(x) then fail("%s: x: expected a tensor, got %s", who, options.shown(x)) end
    group = cut_over(who, group)
    dim = dim or 2
    options.argument(who, "dim", dim, { "integer", min = 1 })
    if dim > x:dim() then fail("%s: dim: x %s has no dimension %d", who, options.shape(x), dim) end
    return group, dim
end

--- This process's part of a sequence that all processes have: of tokens, targets, positions, hidden states.
---@param x te.Tensor
---@param group table|nil    te.distributed.world() unless given; or two groups, { heads, ring }
---@param dim integer|nil    along which the sequence lies: 2, as in {batch, seq}
---@return te.Tensor part     a copy; in a group of one x itself
function sequence.split_sequence(x, group, dim)
    local who = "te.distributed.split_sequence"
    group, dim = check(who, x, group, dim)
    local size, n = group.size, x.shape[dim]
    if size == 1 then return x end
    if n % (2 * size) ~= 0 then
        fail("%s: a sequence of %d cannot be cut in 2 x %d chunks of equal size", who, n, size)
    end
    return chunks(x, dim, { group.rank, 2 * size - 1 - group.rank }, 2 * size)
end

--- The whole sequence from every process's part, in all of them. The gradient of a part is that of its tokens, added
--- over all processes.
---@param x te.Tensor
---@param group table|nil    te.distributed.world() unless given; or two groups, { heads, ring }
---@param dim integer|nil    along which the sequence lies (2)
---@return te.Tensor whole    in a group of one x itself
function sequence.join_sequence(x, group, dim)
    local who = "te.distributed.join_sequence"
    group, dim = check(who, x, group, dim)
    if group.size == 1 then return x end
    if x.shape[dim] % 2 ~= 0 then fail("%s: a part of %d is not two chunks of equal size", who, x.shape[dim]) end
    local rows = x:transpose(1, dim):contiguous()
    local gather = require("te.ops.collective").gather
    local all = group[2] and gather(group[2], gather(group[1], rows)) or gather(group, rows)
    return sequence.in_order(all, group):transpose(1, dim):contiguous()
end

--- Where the n tokens of this process's part stand in the sequence, from 0: int32 {n}.
---@param n integer
---@param group table|nil    te.distributed.world() unless given; or two groups, { heads, ring }
---@param device string|nil
---@return te.Tensor positions
function sequence.sequence_positions(n, group, device)
    local who = "te.distributed.sequence_positions"
    options.argument(who, "n", n, { "size" })
    group = cut_over(who, group)
    local size, parts = group.size, {}
    local owns = size == 1 and { 0 } or { group.rank, 2 * size - 1 - group.rank }
    if n % #owns ~= 0 then fail("%s: a part of %d is not two chunks of equal size", who, n) end
    local each = n / #owns
    for i, chunk in ipairs(owns) do
        parts[i] = te.arange(chunk * each, (chunk + 1) * each - 1, 1, { dtype = "int32", device = device })
    end
    return te.cat(parts, 1)
end

return sequence
