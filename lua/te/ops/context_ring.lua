--- Attention whose keys and values go round the processes of a group: cp_comm_type p2p of te.ops.context_parallel (Liu
--- et al. 2023, arXiv 2310.01889).
--
-- In step t of n, rank r has the keys and values of rank r - t and attends to those that its queries may see. What the
-- steps give is merged by the logarithms of the softmax denominators, in float32 (which on the CPU the steps give, too,
-- so that results are rounded once); sinks are in there from the start, as keys without values. In backward keys and
-- values go round once more. The sum of their gradients follows one step behind, and each process adds its share:
--
--     step      0     1     2     3                     rank r sends to r + 1
--     rank 0    kv0   kv3   kv2   kv1  dkv1 -> rank 1
--     rank 1    kv1   kv0   kv3   kv2  dkv2 -> rank 2
--
-- So a process holds its own keys and values, those of one other and those that arrive. Sums have one order, that of
-- the ranks after the owner: bits are the same in every run.
--
-- A part is two chunks (te.distributed.sequence): of causal attention, each step but the first is half of the part's
-- scores in every process, and the kernels never see what a mask hides. A step in which a window hides all from every
-- process is left out: what goes round goes several processes ahead.

local te = require "te"
local core = te._core

local ring = {}

-- Blocks ------------------------------------------------------------------------------------------------------------

local OPEN = -1

local function block(first_query, queries, first_key, keys, left, right)
    return { first_query = first_query, queries = queries, first_key = first_key, keys = keys, window_left = left,
        window_right = right }
end

-- How many tokens farther than `after` a window reaches; where that is -n or less, no token of one chunk sees one of
-- the other.
local function reach_beyond(after, left, right)
    local reach = after > 0 and left or right
    return reach < 0 and math.huge or reach - math.abs(after)
end

-- Of chunks with n tokens each, where the one with the queries begins `after` tokens after the one with the keys, or
-- before it. Some queries and as many keys: a window that cuts a corner of the scores starts on their diagonal.
local function of_chunks(after, n, first_query, first_key, left, right)
    if after == 0 then return block(first_query, n, first_key, n, left, right) end
    local beyond = reach_beyond(after, left, right)
    if beyond == math.huge then return block(first_query, n, first_key, n, OPEN, OPEN) end
    local count = math.min(n, n + beyond)
    if count <= 0 then return nil end
    beyond = math.max(0, beyond)
    if after > 0 then return block(first_query, count, first_key + n - count, count, beyond, OPEN) end
    return block(first_query + n - count, count, first_key, count, OPEN, beyond)
end

local function causal(rank, from, n)
    if from == rank then return block(0, 2 * n, 0, 2 * n, OPEN, 0) end
    if from < rank then return block(0, 2 * n, 0, n, OPEN, OPEN) end
    return block(n, n, 0, 2 * n, OPEN, OPEN)
end

--- What the queries of `rank` see of the keys of rank `from`: a list of blocks, rows and keys counted from 0 in the
--- parts of the two, with windows as te.scaled_dot_product_attention takes them.
---@param rank integer
---@param from integer
---@param size integer     of the group
---@param queries integer  of a part
---@param keys integer     of a part; as many as queries where something is hidden
---@param left integer     window_left
---@param right integer    window_right, 0 where causal
---@return table[] blocks
function ring.blocks(rank, from, size, queries, keys, left, right)
    if left < 0 and right < 0 then return { block(0, queries, 0, keys, OPEN, OPEN) } end
    local n = queries / 2
    if left < 0 and right == 0 then return { causal(rank, from, n) } end
    local blocks = {}
    for i, own in ipairs { rank, 2 * size - 1 - rank } do
        for j, other in ipairs { from, 2 * size - 1 - from } do
            blocks[#blocks + 1] = of_chunks((own - other) * n, n, (i - 1) * n, (j - 1) * n, left, right)
        end
    end
    return blocks
end

local function sees(rank, from, size, n, left, right)
    for _, own in ipairs { rank, 2 * size - 1 - rank } do
        for _, other in ipairs { from, 2 * size - 1 - from } do
            local after = (own - other) * n
            if after == 0 or n + reach_beyond(after, left, right) > 0 then return true end
        end
    end
    return false
end

--- The steps, from 0, in which some process sees keys that are not hidden from it: the same list in all.
---@param size integer     of the group
---@param queries integer  of a part
---@param left integer     window_left
---@param right integer    window_right, 0 where causal
---@return integer[] steps
function ring.steps(size, queries, left, right)
    local steps = {}
    for step = 0, size - 1 do
        for rank = 0, size - 1 do
            if sees(rank, (rank - step) % size, size, queries / 2, left, right) then
                steps[#steps + 1] = step
                break
            end
        end
    end
    return steps
end

-- Steps -------------------------------------------------------------------------------------------------------------

local attend_block, block_gradients = core.operation "attention_block", core.operation "attention_block_gradients"
local merged_with, of_sinks = core.operation "attention_merge", core.operation "attention_sink_gradient"

-- Memory is free again when no view of it is left, so views of what goes round are let go of as well.
local function free(...)
    for i = 1, select("#", ...) do select(i, ...):release() end
end

-- What is sent to the process `ahead` ranks on; returns what the one so far behind has sent.
local function pass(group, x, ahead)
    return group:exchange(x, (group.rank + ahead) % group.size, (group.rank - ahead) % group.size)
end

local function right_of(o) return o.causal and 0 or o.window_right or OPEN end

local function apart(kv, size) return kv:narrow(4, 1, size), kv:narrow(4, size + 1, kv.shape[4] - size) end

-- fn(k, v, rank, steps since the last call) with the keys and values of every process that any needs, this one's first.
-- Returns the steps from the last call to the end of the round.
local function round(group, n, k, v, o, fn)
    local steps, kv = ring.steps(group.size, n, o.window_left, right_of(o)), nil
    for i, step in ipairs(steps) do
        local theirs, their_values = k, v
        if step > 0 then theirs, their_values = apart(kv, k.shape[4]) end
        fn(theirs, their_values, (group.rank - step) % group.size, step - (steps[i - 1] or 0))
        if step > 0 then free(theirs, their_values) end
        if steps[i + 1] then
            local sent = kv or te.cat({ k, v }, 4)
            kv = pass(group, sent, steps[i + 1] - step)
            free(sent)
        end
    end
    if kv then free(kv) end
    return group.size - steps[#steps]
end

-- fn(block, its keys, its values, how to attend) for what the n queries see of the keys of rank `from`.
local function each_block(group, from, k, v, n, o, fn)
    for _, b in ipairs(ring.blocks(group.rank, from, group.size, n, k.shape[3], o.window_left, right_of(o))) do
        local keys, values = k:narrow(3, b.first_key + 1, b.keys), v:narrow(3, b.first_key + 1, b.keys)
        fn(b, keys, values, { scale = o.scale, dropout = o.dropout, window_left = b.window_left,
            window_right = b.window_right })
        free(keys, values)
    end
end

local function rows_of(b, x) return x:narrow(3, b.first_query + 1, b.queries) end

local function wide(x) return x.dtype == "float64" and x.dtype or "float32" end

-- Forward -----------------------------------------------------------------------------------------------------------

-- What was attended to so far, rows {batch, n, heads, …}: y and lse, nil before any.
local function start(q, v, sinks)
    if not sinks then return {} end
    local batch, heads, n = unpack(q.shape)
    local opts = { dtype = wide(q), device = q.device }
    return { y = te.zeros({ batch, n, heads, v.shape[4] }, opts),
        lse = te.zeros({ batch, n, heads }, opts) + sinks:to(opts.dtype) }
end

local function open_rows(sum, q, v)
    if sum.y then return end
    local batch, heads, n = unpack(q.shape)
    local opts = { dtype = wide(q), device = q.device }
    sum.y, sum.lse = te.zeros({ batch, n, heads, v.shape[4] }, opts), te.full({ batch, n, heads }, -math.huge, opts)
end

-- Adds a block's result, {batch, rows, heads, …}, of all rows or some.
local function merge(sum, b, part, lse, n)
    if not sum.y then
        sum.y, sum.lse = part:to(wide(part)), lse:contiguous()
        return
    end
    local whole = b.queries == n
    local y, before = sum.y, sum.lse
    if not whole then
        y, before = y:narrow(2, b.first_query + 1, b.queries), before:narrow(2, b.first_query + 1, b.queries)
    end
    local merged, total = merged_with(y, before, part, lse)
    if whole then
        sum.y, sum.lse = merged, total
    else
        y:copy_(merged)
        before:copy_(total)
        free(merged, total)
    end
    free(y, before)
end

local function forward(group, o, q, k, v, sinks)
    local n, sum = q.shape[3], start(q, v, sinks)
    round(group, n, k, v, o, function(theirs, their_values, from)
        each_block(group, from, theirs, their_values, n, o, function(b, keys, values, opts)
            if b.queries < n then open_rows(sum, q, v) end
            local part, lse = attend_block(rows_of(b, q), keys, values, opts)
            local rows, denominators = part:transpose(2, 3), lse:transpose(2, 3)
            merge(sum, b, rows, denominators, n)
            free(part, lse, rows, denominators)
        end)
    end)
    local y = sum.y:to(q.dtype)
    return y:transpose(2, 3), sum.lse:transpose(2, 3)
end

-- Backward ----------------------------------------------------------------------------------------------------------

local function sink_gradient(sinks, y, dy, lse)
    local batch, heads, n = unpack(lse.shape)
    local of_rows = of_sinks(y, dy, lse,
        sinks:to(wide(y)):view({ 1, heads, 1 }):expand { batch, heads, n })
    return of_rows:sum { 1, 3 }:to(sinks.dtype)
end

-- Adds what this process's queries contribute to the gradients of keys and values, and these to that of the queries.
local function add_gradients(group, o, from, dy, q, k, v, y, lse, dq, dkv)
    local dk, dv = apart(dkv, k.shape[4])
    each_block(group, from, k, v, q.shape[3], o, function(b, keys, values, opts)
        local parts = { block_gradients(rows_of(b, dy), rows_of(b, q), keys, values,
            rows_of(b, y), rows_of(b, lse), opts) }
        local sums = { rows_of(b, dq), dk:narrow(3, b.first_key + 1, b.keys), dv:narrow(3, b.first_key + 1, b.keys) }
        for i = 1, 3 do
            sums[i]:add_(parts[i])
            free(sums[i], parts[i])
        end
    end)
    free(dk, dv)
end

local function backward(group, o, dy, q, k, v, y, lse)
    local opts = { dtype = wide(q), device = q.device }
    local dq, dkv = te.zeros(q.shape, opts), nil
    local batch, heads, n, size = unpack(k.shape)
    local left = round(group, q.shape[3], k, v, o, function(theirs, their_values, from, steps)
        if dkv then
            local sent = dkv
            dkv = pass(group, sent, steps)
            free(sent)
        else
            dkv = te.zeros({ batch, heads, n, size + v.shape[4] }, opts)
        end
        add_gradients(group, o, from, dy, q, theirs, their_values, y, lse, dq, dkv)
    end)
    local dk, dv = apart(pass(group, dkv, left), size)
    free(dkv)
    return dq:to(q.dtype), dk:to(k.dtype), dv:to(v.dtype)
end

--- What this process's queries get from the keys and values of all.
---@param group table      te.Group
---@param q te.Tensor      {batch, heads, n, dim}; k and v likewise, of the same dtype
---@param sinks te.Tensor|nil  {heads}
---@param o table          how to attend, as te.scaled_dot_product_attention takes it
---@return te.Tensor y     {batch, heads, n, dim of v}
function ring.attend(group, q, k, v, sinks, o)
    return core.custom(function(ctx, ...)
        ctx.rng = o.dropout > 0 and core.rng_state() or nil
        local y, lse = forward(group, o, ...)
        local queries, keys, values, offsets = ...
        ctx:save_for_backward(queries, keys, values, y, lse, offsets)
        return y
    end, function(ctx, dy)
        local queries, keys, values, y, lse, offsets = ctx:saved_tensors()
        local function run() return backward(group, o, dy, queries, keys, values, y, lse) end
        if ctx.rng then
            local dropped = run
            run = function() return core.pass(core.under(core.rng_state, ctx.rng, dropped)) end
        end
        local dq, dk, dv = run()
        return dq, dk, dv, offsets and offsets.requires_grad and sink_gradient(offsets, y, dy, lse)
    end, q, k, v, sinks)
end

return ring
