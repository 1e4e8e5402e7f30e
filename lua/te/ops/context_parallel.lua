--- Context parallelism: attention whose sequence is cut between the processes of a group, as split_sequence of
--- te.distributed cuts it. Every process has the queries, keys and values of its part and gets the result of its part.
--
--     all_gather   all keys and values go to every process, their gradients back as sums (Llama 3, 2024, section 3.3)
--     a2a          each process gives its part of all heads and gets all parts of some heads, and the result goes the
--                  other way (Ulysses: Jacobs et al., arXiv 2309.14509)
--     p2p          keys and values go from one process to the next until each has seen all (te.ops.context_ring)
--     a2a+p2p      heads are exchanged within a group, and the keys and values of these heads go round between groups
--
-- all_gather and p2p move the keys and values of all, whatever the number of processes, and p2p never holds more than
-- three parts of them; a2a moves a part of queries, keys, values and results, but there must be as many heads as
-- processes. a2a+p2p takes two groups: of processes that are near each other, and of those with the same heads. Under
-- all_gather the two chunks of a process attend one by one, each to the keys that it may see. Where causal those are
-- the sequence up to the chunk's end, so the last query is aligned with the last key.

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local options = require "te.options"
local KVCache = require "te.kv_cache"
local core = te._core

local context_parallel = {}

local COMM_TYPE = { "string", choices = { "all_gather", "a2a", "p2p", "a2a+p2p" } }

local function wrong_comm_type(value)
    local reason = options.reason(COMM_TYPE, value)
    return reason and "cp_comm_type: " .. reason
end

context_parallel.OPTIONS = {
    cp_group = { "any", help = "group of te.distributed that sequences are split over; of a2a+p2p a list of two" },
    cp_comm_type = { "string", wrong = wrong_comm_type, help = "all_gather (default), a2a, p2p or a2a+p2p" },
}

local function sequence() return require "te.distributed.sequence" end

-- The two groups as one, or the one of them that has other processes.
local function check_pair(who, option, pair)
    if not sequence().is_pair(pair) then
        fail("%s: %s: cp_comm_type a2a+p2p needs two groups of te.distributed, { heads, ring }, got %s", who, option,
            options.shown(pair))
    end
    if pair[1].size == 1 then return pair[2], "p2p" end
    if pair[2].size == 1 then return pair[1], "a2a" end
    return sequence().both(pair), "a2a+p2p"
end

--- The group, nil for one of one, and the way; raises where they are none.
---@param who string
---@param option string|nil  the group's name, cp_group
function context_parallel.check(who, group, comm_type, option)
    option = option or "cp_group"
    local wrong = comm_type ~= nil and wrong_comm_type(comm_type)
    if comm_type == "a2a+p2p" and group ~= nil then
        group, comm_type = check_pair(who, option, group)
    elseif group ~= nil and sequence().is_pair(group) then
        fail("%s: %s: expected a group of te.distributed, got a list of two, which is for cp_comm_type a2a+p2p", who,
            option)
    else
        options.group(who, option, group)
    end
    if wrong then fail("%s: %s", who, wrong) end
    if comm_type and not group then fail("%s: cp_comm_type has no effect without %s", who, option) end
    if not group or group.size == 1 then return nil, nil end
    return group, comm_type or "all_gather"
end

-- The processes that have heads of their own; nil: each has all.
local function heads_group(group, comm_type)
    return comm_type == "a2a" and group or comm_type == "a2a+p2p" and group[1] or nil
end

local function check_heads(who, group, comm_type, heads, kv_heads)
    local among = heads_group(group, comm_type)
    if not among or heads % among.size == 0 and kv_heads % among.size == 0 then return end
    fail("%s: cp_comm_type %s: %d heads of queries and %d of keys cannot be divided among %d processes", who, comm_type,
        heads, kv_heads, among.size)
end

--- The fields cp_group and cp_comm_type of an attention module.
function context_parallel.set(self, who, group, comm_type)
    group, comm_type = context_parallel.check(who, group, comm_type)
    if group and self.tp_group then fail("%s: cp_group: not together with tp_group", who) end
    if group and self.num_extra_inputs == 3 then fail("%s: cp_group: a bias of the scores is not divided", who) end
    if group and self.num_kv_heads then check_heads(who, group, comm_type, self.num_heads, self.num_kv_heads) end
    self.cp_group, self.cp_comm_type = group, comm_type
end

--- What a module's description ends with.
function context_parallel.describe(self)
    return self.cp_group and (", cp=%d by %s"):format(self.cp_group.size, self.cp_comm_type) or ""
end

-- Between processes -------------------------------------------------------------------------------------------------

local function linear(forward, backward)
    return function(x, group)
        return core.custom(function(_, value) return forward(value, group) end,
            function(_, dy) return backward(dy, group) end, x)
    end
end

-- Rows {n, …} of this process's part to those of the whole sequence.
local gather = linear(
    function(x, group) return sequence().in_order(group:all_gather(x), group) end,
    function(dy, group) return group:reduce_scatter(sequence().by_rank(dy, group)) end)

-- {batch, heads, n, size} of this process's part to {batch, heads / processes, seq, size}, and back.
local function heads_apart(x, group)
    local batch, heads, n, size = unpack(x.shape)
    local own, parts = heads / group.size, group.size
    local sent = x:reshape({ batch, parts, own, n, size }):permute(2, 4, 1, 3, 5):contiguous()
    local rows = group:all_to_all(sent):view { parts * n, batch, own, size }
    return sequence().in_order(rows, group):permute(2, 3, 1, 4)
end

local function heads_together(x, group)
    local batch, own, seq, size = unpack(x.shape)
    local parts = group.size
    local n = seq / parts
    local sent = sequence().by_rank(x:permute(3, 1, 2, 4), group):view { parts, n, batch, own, size }
    return group:all_to_all(sent):permute(3, 2, 1, 4, 5):reshape({ batch, n, parts * own, size }):transpose(2, 3)
end

local to_own_heads = linear(heads_apart, heads_together)
local to_all_heads = linear(heads_together, heads_apart)

-- Attention ---------------------------------------------------------------------------------------------------------

-- Which of `seq` keys the queries of a chunk of n, counted from 0, may see: the number before the first, and how many;
-- the window, its last query aligned with the last of them.
local function seen(chunk, n, seq, o)
    local left, right = o.window_left, o.causal and 0 or o.window_right or -1
    local past = (chunk + 1) * n
    local last = right < 0 and seq or math.min(seq, past + right)
    local first = left < 0 and 0 or math.max(0, chunk * n - left)
    return first, last - first, left < 0 and -1 or left + last - past, right < 0 and -1 or right - (last - past)
end

-- fn(...), after which the random numbers go on as if it had drawn for so many probabilities: processes whose chunks
-- see more or fewer keys stay at the same place. The numbers for a chunk are a multiple of four.
local function drawing(probabilities, fn, ...)
    local seed, offset = core.rng_state():match "^(%d+) (%d+)$"
    local y = fn(...)
    core.rng_state(("%s %.0f"):format(seed, tonumber(offset) + math.ceil(probabilities / 4)))
    return y
end

-- What the queries of both chunks get, each from the keys that they may see.
local function by_chunks(group, q, k, v, sinks, o)
    local n, seq, parts = q.shape[3] / 2, k.shape[3], {}
    for i, chunk in ipairs { group.rank, 2 * group.size - 1 - group.rank } do
        local first, count, left, right = seen(chunk, n, seq, o)
        parts[i] = te.scaled_dot_product_attention(q:narrow(3, (i - 1) * n + 1, n), k:narrow(3, first + 1, count),
            v:narrow(3, first + 1, count), nil, sinks,
            { scale = o.scale, dropout = o.dropout, window_left = left, window_right = right, bottom_right = true })
        parts[i] = parts[i]:transpose(2, 3)
    end
    return te.cat(parts, 2):transpose(2, 3)
end

local function by_gathering(group, q, k, v, sinks, o)
    local all = gather(te.cat({ k:permute(3, 1, 2, 4), v:permute(3, 1, 2, 4) }, 4), group):permute(2, 3, 1, 4)
    k, v = all:narrow(4, 1, k.shape[4]), all:narrow(4, k.shape[4] + 1, v.shape[4])
    if not o.causal and o.window_left < 0 and (o.window_right or -1) < 0 then
        return te.scaled_dot_product_attention(q, k, v, nil, sinks, o)
    end
    if o.dropout == 0 then return by_chunks(group, q, k, v, sinks, o) end
    return drawing(q:numel() / q.shape[4] * k.shape[3] + 8, by_chunks, group, q, k, v, sinks, o)
end

local function whole(_, q, k, v, sinks, o) return te.scaled_dot_product_attention(q, k, v, nil, sinks, o) end

-- attend(ring, …), which has the sequence, or the part of it that the group has, of the group's share of the heads.
local function by_heads(group, q, k, v, sinks, o, attend, ring)
    local size = k.shape[4]
    local kv = to_own_heads(te.cat({ k, v }, 4), group)
    q, k, v = to_own_heads(q, group), kv:narrow(4, 1, size), kv:narrow(4, size + 1, v.shape[4])
    local heads = q.shape[2]
    if sinks then sinks = sinks:narrow(1, group.rank * heads + 1, heads) end
    return to_all_heads((attend or whole)(ring, q, k, v, sinks, o), group)
end

local function by_ring(group, q, k, v, sinks, o)
    local dtype = core.compute_dtype()
    if dtype and q.dtype ~= "float64" then q, k, v = q:to(dtype), k:to(dtype), v:to(dtype) end
    local ring = require("te.ops.context_ring").attend
    if o.dropout == 0 then return ring(group, q, k, v, sinks, o) end
    local probabilities = q:numel() / q.shape[4] * k.shape[3] * group.size
    return drawing(probabilities + 16 * group.size, ring, group, q, k, v, sinks, o)
end

local DTYPES = { float64 = true, float32 = true, bfloat16 = true, float16 = true }
local checked = setmetatable({}, { __mode = "k" }) -- by group that exchanges heads: those that pass round and fit

-- Whether all of the group give the same number.
local function all_alike(group, value)
    local own = te.tensor({ value, -value }, { dtype = "int64", device = "cpu" })
    local least = group:all_reduce(own, "min"):totable()
    return least[1] == -least[2]
end

-- A ring is of processes with the same rank among those that exchange heads, and the other way round: parts of the
-- sequence stand in this order.
local function check_places(who, heads, ring)
    if checked[heads] == ring then return end
    local same_heads, same_part = all_alike(ring, heads.rank), all_alike(heads, ring.rank)
    local fits = te.tensor({ same_heads and same_part and 1 or 0 }, { dtype = "int64", device = "cpu" })
    if heads:all_reduce(ring:all_reduce(fits, "min"), "min"):item() == 0 then
        fail("%s: cp_group: { heads, ring }: the processes of a ring must have one rank in their groups of heads, and "
            .. "the other way round; this one has ranks %d and %d", who, heads.rank, ring.rank)
    end
    checked[heads] = ring
end

local function by_both(pair, q, k, v, sinks, o) return by_heads(pair[1], q, k, v, sinks, o, by_ring, pair[2]) end

local WAYS = { all_gather = by_gathering, a2a = by_heads, p2p = by_ring, ["a2a+p2p"] = by_both }

local function check_length(self, n)
    local size = self.cp_group.size
    if n % 2 == 0 and n > 0 then return end
    fail("te.%s: a sequence of %d tokens, %d in each of %d processes, cannot be cut in %d chunks of equal size",
        self.__name, n * size, n, size, 2 * size)
end

local function check_operands(self, q, k, v, o)
    local who, group = "te." .. self.__name, self.cp_group
    for _, t in ipairs { q, k, v } do
        if not te.is_tensor(t) or t:dim() ~= 4 or t:numel() == 0 then
            fail("%s: under cp_group q, k and v {batch, heads, seq, dim} are needed, not %s", who,
                te.is_tensor(t) and options.shape(t) or options.shown(t))
        end
        check_length(self, t.shape[3])
    end
    if k.shape[1] ~= v.shape[1] or k.shape[2] ~= v.shape[2] or k.shape[3] ~= v.shape[3] then
        fail("%s: k %s and v %s are not of the same tokens and heads", who, options.shape(k), options.shape(v))
    end
    local masked = o.causal or o.window_left >= 0 or (o.window_right or -1) >= 0
    check_heads(who, group, self.cp_comm_type, q.shape[2], k.shape[2])
    if self.cp_comm_type ~= "a2a" and masked and q.shape[3] ~= k.shape[3] then
        fail("%s: cp_comm_type %s: with causal or a window queries and keys must be of equal number, not %d and %d",
            who, self.cp_comm_type, q.shape[3], k.shape[3])
    end
end

-- What only a process of its own would find wrong, which then is missing in the ring.
local function check_ring(self, q, k, v, sinks)
    local who, dtype = "te." .. self.__name, core.compute_dtype()
    local function computed(t) return t.dtype ~= "float64" and dtype or t.dtype end
    if q.shape[1] ~= k.shape[1] or q.shape[2] % k.shape[2] ~= 0 or q.shape[4] ~= k.shape[4] then
        fail("%s: q %s and k %s do not go together: the same batch and dim are needed, and heads that are a multiple",
            who, options.shape(q), options.shape(k))
    end
    if not DTYPES[computed(q)] or computed(q) ~= computed(k) or computed(k) ~= computed(v) then
        fail("%s: q, k and v must have one floating dtype, not %s, %s, %s", who, q.dtype, k.dtype, v.dtype)
    end
    if sinks and sinks:numel() ~= q.shape[2] then
        fail("%s: %d sinks do not go with the %d heads of q", who, sinks:numel(), q.shape[2])
    end
end

local plain = setmetatable({}, { __mode = "k" }) -- by recipe: its options when, and modules whose, attention it left

-- What goes between processes is not quantized, so a recipe's attention would not be that of one process.
local function check_recipe(self, recipe)
    local known, now = plain[recipe], recipe:options()
    if not known or known.options ~= now then
        known = { options = now, modules = setmetatable({}, { __mode = "k" }) }
        plain[recipe] = known
    end
    if known.modules[self] then return end
    if recipe:resolve(require("te.recipe.forms").role(mode.product(self, self.attention_key), "input")) then
        fail("te.%s: FP8 attention is not divided; the recipe's fp8_dpa and fp8_mha must be false under cp_group",
            self.__name)
    end
    known.modules[self] = true
end

local function check_situation(self)
    local who = "te." .. self.__name
    if KVCache.active then
        fail("%s: the tokens of a te.KVCache are not divided; set_context_parallel_group(nil) makes the module whole",
            who)
    end
    if mode.enabled then check_recipe(self, mode.recipe) end
end

--- Where the rows {…, n, width} of this process's part stand in the sequence.
function context_parallel.positions(self, rows)
    check_length(self, rows:size(-2))
    return te.distributed.sequence_positions(rows:size(-2), self.cp_group, rows.device)
end

--- The result {batch, heads, n, dim} of this process's part, from its q, k and v {batch, heads or kv_heads, n, dim}.
---@param self table       a module with cp_group
---@param sinks te.Tensor|nil
---@param o table          how to attend, as te.scaled_dot_product_attention takes it
function context_parallel.attend(self, q, k, v, sinks, o)
    check_situation(self)
    check_operands(self, q, k, v, o)
    if self.cp_comm_type:find "p2p" then check_ring(self, q, k, v, sinks) end
    if self.cp_comm_type == "a2a+p2p" then check_places("te." .. self.__name, self.cp_group[1], self.cp_group[2]) end
    return WAYS[self.cp_comm_type](self.cp_group, q, k, v, sinks, o)
end

return context_parallel
