-- Run by every process of a group: attention by cp_comm_type p2p, and a2a+p2p of four, against one process in float64,
-- bit for bit from run to run, and what it holds of the keys. Prints "ok" and how many checks were made; an error ends
-- all processes.

local te = require "te"
local alike = require "spec.support.alike"

local D = te.distributed
local world, check, near, refused = alike.world, alike.check, alike.near, alike.fails
local rank, size = world.rank, world.size
local on_host = te.get_default_device() == "cpu"

-- Of a float64 result, where operands are rounded beforehand and results once: parts and merges are rounded besides.
local TOLERANCE = { float64 = 1e-13, float32 = 2e-6, bfloat16 = 0.012, float16 = 0.0015 }
local DTYPES = { "float64", "float32", "bfloat16", "float16" }
local CHUNK = 5
local SEQ = CHUNK * 2 * size

-- Group and way: of four processes neighbours exchange heads, too.
local RING, BOTH = { world, "p2p" }, nil
if size == 4 then BOTH = { { world:split(math.floor(rank / 2)), world:split(rank % 2) }, "a2a+p2p" } end

local function part(x) return D.split_sequence(x, world, 3):detach() end

-- Against one process -------------------------------------------------------------------------------------------------

local function leaf(x)
    x.requires_grad = true
    return x
end

-- The result of all, and the gradients of q, k, v and the sinks.
local function run(module, q, k, v, dy)
    local y = module(q, k, v)
    te.mul(y, dy):sum():backward()
    local sinks = module.softmax_offset
    local results = { y = y:detach(), q = q.grad, k = k.grad, v = v.grad, sinks = sinks and sinks.grad }
    if sinks then sinks.grad = nil end
    return results
end

local function module_of(case, way)
    local opts = { cp_group = way and way[1], cp_comm_type = way and way[2] }
    for name, value in pairs(case.options) do opts[name] = value end
    local module = te.DotProductAttention(opts)
    if module.softmax_offset then
        local values = {}
        for head = 1, opts.num_heads do values[head] = ({ 0.5, -math.huge, 7, -3 })[head] end
        te.no_grad(function() module.softmax_offset:copy_(te.tensor(values)) end)
    end
    return module
end

local function compare(case, dtype, way)
    local name, heads, kv_heads = ("%s by %s in %s"):format(case.name, way[2], dtype), 4, case.kv_heads or 4
    local function drawn(count, seq, width, scale)
        return (te.randn({ 2, count, seq, width }, { dtype = "float64" }) * (scale or 1)):to(dtype)
    end
    te.manual_seed(4)
    local seq_kv = case.seq_kv or SEQ
    local all = { drawn(heads, SEQ, 8, case.scores), drawn(kv_heads, seq_kv, 8, case.scores),
        drawn(kv_heads, seq_kv, 6), drawn(heads, SEQ, 6) }
    local exact, parts = {}, {}
    for i, t in ipairs(all) do exact[i], parts[i] = t:to("float64"), part(t) end
    for i = 1, 3 do leaf(exact[i]) end
    local want = run(module_of(case), unpack(exact))
    local module, first = module_of(case, way), nil
    for _ = 1, 2 do
        local is = run(module, leaf(parts[1]:clone()), leaf(parts[2]:clone()), leaf(parts[3]:clone()), parts[4])
        for key, t in pairs(is) do
            local whole = key == "sinks" and world:all_reduce(t) or t
            local expected = key == "sinks" and want[key] or part(want[key])
            check(key == "sinks" or t.dtype == dtype, "%s, %s is in %s", name, key, t.dtype)
            local tolerance = TOLERANCE[dtype] * (case.times or 1)
            if key == "sinks" then tolerance = math.max(2e-6, tolerance) end -- they are float32
            near(("%s, %s"):format(name, key), whole, expected, tolerance, 1)
            if first then near(("%s, %s again"):format(name, key), t, first[key], 0) end
        end
        first = is
    end
end

local CASES = {
    { name = "no mask", options = {} },
    { name = "causal", options = { causal = true } },
    { name = "grouped queries", options = { causal = true }, kv_heads = 2 },
    { name = "large scores", options = { causal = true }, scores = 20, wide = true, times = 100 }, -- around 1000,
    { name = "keys of other number", options = {}, seq_kv = 3 * SEQ, kv_heads = 1 },
    { name = "a window within a chunk", options = { causal = true, window_left = 2 } },
    { name = "a window of this token", options = { causal = true, window_left = 0 } },
    { name = "a window over a chunk", options = { causal = true, window_left = CHUNK + 1 }, kv_heads = 2 },
    { name = "a window to both sides", options = { window_left = 2 * CHUNK, window_right = 3 } },
    { name = "a window ahead", options = { window_right = CHUNK } },
    { name = "sinks", options = { causal = true, softmax_type = "learnable", num_heads = 4 } },
    { name = "sinks and a window", options = { causal = true, window_left = 3, softmax_type = "learnable",
        num_heads = 4 } },
    { name = "sinks and no mask", options = { softmax_type = "learnable", num_heads = 4 }, kv_heads = 2 },
}

if not on_host then DTYPES, CASES = { "float32", "bfloat16" }, { CASES[1], CASES[3], CASES[8], CASES[12] } end
for _, case in ipairs(CASES) do
    for _, dtype in ipairs(DTYPES) do
        if not case.wide or dtype:find "64" or dtype:find "32" then
            compare(case, dtype, RING)
            if BOTH and case.kv_heads ~= 1 then compare(case, dtype, BOTH) end
        end
    end
end

-- What is hidden is not read: NaN among later keys and values stay there.
do
    local q, k, v = te.randn { 1, 1, SEQ, 4 }, te.randn { 1, 1, SEQ, 4 }, te.randn { 1, 1, SEQ, 4 }
    for _, t in ipairs { k, v } do t:narrow(3, SEQ, 1):fill_(0 / 0) end
    local module = te.DotProductAttention { causal = true, cp_group = world, cp_comm_type = "p2p" }
    local y = D.join_sequence(module(part(q), part(k), part(v)), world, 3)
    local seen = y:narrow(3, 1, SEQ - 1):abs():max():item()
    check(seen == seen, "a hidden NaN is seen")
end

-- Dropout: dropped again alike in a checkpoint, and other rows in each run.
do
    te.manual_seed(21 + rank)
    local module = te.DotProductAttention { causal = true, dropout = 0.4, cp_group = world, cp_comm_type = "p2p" }
    local function drawn() return leaf(te.randn { 1, 2, 2 * CHUNK, 4 }) end
    local q, k, v = drawn(), drawn(), drawn()
    local state = te.rng_state()
    module(q, k, v):sum():backward()
    local after, grads = te.rng_state(), { q.grad, k.grad, v.grad }
    for i, t in ipairs { q, k, v } do
        grads[i] = t.grad:clone()
        t.grad = nil
    end
    te.rng_state(state)
    te.checkpoint(module, q, k, v):sum():backward()
    check(te.rng_state() == after, "the place of random numbers is %s, not %s", te.rng_state(), after)
    for i, t in ipairs { q, k, v } do near("a checkpoint's gradient " .. i, t.grad, grads[i], 0) end
end

-- Under autocast -----------------------------------------------------------------------------------------------------

do
    local module = te.DotProductAttention { causal = true, cp_group = world, cp_comm_type = "p2p" }
    local q, k, v = leaf(te.randn { 1, 2, 4, 8 }), leaf(te.randn { 1, 2, 4, 8 }), leaf(te.randn { 1, 2, 4, 8 })
    local y = te.autocast({ dtype = "bfloat16" }, module, q, k, v)
    check(y.dtype == "bfloat16", "under autocast: %s", y.dtype)
    y:sum():backward()
    check(q.grad.dtype == "float32" and v.grad.dtype == "float32", "a gradient in %s", q.grad.dtype)
    for i, x in ipairs { q:to("int32"), te.randn { 1, 2, 4, 6 }, te.randn { 2, 2, 4, 8 }, te.randn { 1, 3, 4, 8 } } do
        refused(i == 1 and "one floating dtype" or "do not go together", module, x, k, v)
    end
    local sinks = te.DotProductAttention { softmax_type = "learnable", num_heads = 3, cp_group = world,
        cp_comm_type = "p2p" }
    refused("3 sinks do not go with the 2 heads", sinks, q, k, v)
end

-- Heads within, keys and values between ------------------------------------------------------------------------------

if BOTH then
    local pair = BOTH[1]
    te.manual_seed(6)
    local x = te.randn({ 2, 16, 3 }, { requires_grad = true })
    near("a part of two groups", D.split_sequence(x, pair), D.split_sequence(x, world), 0)
    near("its positions", D.sequence_positions(4, pair), D.sequence_positions(4, world), 0)
    local own = leaf(D.split_sequence(x, pair):detach())
    local whole = D.join_sequence(own, pair)
    near("whole again", whole, x, 0)
    te.mul(whole, te.arange(1, 16, 1):view { 1, 16, 1 }):sum():backward()
    near("its gradient", own.grad:select(1, 1):select(2, 1), (D.sequence_positions(4) + 1) * size, 0)

    local config = { vocab_size = 30, block_size = 16, n_layer = 2, n_embd = 16, n_head = 4, n_kv_head = 2 }
    for _, kind in ipairs { "gpt", "llama" } do
        config.n_kv_head = kind == "llama" and 2 or nil
        config.context_parallel, config.cp_comm_type = nil, nil
        te.manual_seed(5)
        local one = te.models[kind](config)
        config.context_parallel, config.cp_comm_type = pair, "a2a+p2p"
        te.manual_seed(5)
        local cut = te.models[kind](config)
        local ids, targets = te.randint(0, 29, { 2, 16 }), te.randint(0, 29, { 2, 16 })
        local _, loss = one(ids, targets)
        local _, own_loss = cut(D.split_sequence(ids, pair), D.split_sequence(targets, pair))
        near(kind .. ", loss", world:all_reduce(own_loss:detach(), "average"), loss, 1e-5)
        own_loss:backward()
        loss:backward()
        D.average_gradients(cut)
        local grads = {}
        for key, p in one:named_parameters() do grads[key] = p.grad end
        for key, p in cut:named_parameters() do near(kind .. ", " .. key, p.grad, grads[key], 1e-4, 1e-3) end
        local start = te.zeros({ 1, 1 }, { dtype = "int64" })
        near(kind .. ", a sample", cut:generate(start, 5, { temperature = 0 }),
            one:generate(start, 5, { temperature = 0 }), 0)
        check(cut.cp_group[1] == pair[1] and cut.cp_comm_type == "a2a+p2p", "the groups are back")
    end

    local module = te.DotProductAttention { cp_group = pair, cp_comm_type = "a2a+p2p" }
    check(tostring(module):find("cp=4 by a2a+p2p", 1, true), "%s", tostring(module))
    local odd = te.randn { 1, 3, 4, 8 }
    refused("a2a+p2p: 3 heads of queries and 3 of keys cannot be divided among 2", module, odd, odd, odd)
    refused("got a list of two, which is for cp_comm_type a2a+p2p", te.DotProductAttention,
        { cp_group = pair })
    refused("must have one rank in their groups of heads", te.DotProductAttention { cp_group = { pair[1], world },
        cp_comm_type = "a2a+p2p" }, te.randn { 1, 2, 4, 8 }, te.randn { 1, 2, 4, 8 }, te.randn { 1, 2, 4, 8 })
    local alone = world:split(rank)
    check(tostring(te.DotProductAttention { cp_group = { alone, world }, cp_comm_type = "a2a+p2p" })
        :find("cp=4 by p2p", 1, true), "one that exchanges heads is none")
    check(tostring(te.DotProductAttention { cp_group = { world, alone }, cp_comm_type = "a2a+p2p" })
        :find("cp=4 by a2a", 1, true), "a ring of one is none")
end

-- What a process holds -----------------------------------------------------------------------------------------------

if size >= 4 then
    local keys, width = 1024, 32 -- of a part; few queries, so that keys and values are nearly all there is
    local bytes = 2 * 4 * keys * width -- of the part's keys and values
    local function opened(way) return te.DotProductAttention { cp_group = world, cp_comm_type = way } end
    local function most(way)
        local q, k = leaf(te.randn { 1, 1, 4, width }), leaf(te.randn { 1, 1, keys, width })
        local v, module = leaf(te.randn { 1, 1, keys, width }), opened(way)
        collectgarbage()
        collectgarbage()
        te.reset_peak_memory()
        local held = te.memory_stats().current
        local y = module(q, k, v)
        local forward = te.memory_stats().peak - held
        te.reset_peak_memory()
        local kept = te.memory_stats().current - held
        y:sum():backward()
        return forward / bytes, (te.memory_stats().peak - held) / bytes, kept / bytes
    end
    local forward, backward, kept = most "p2p"
    check(forward < 2.2 and kept < 0.1, "forward: %.2f parts more, %.2f are kept", forward, kept)
    check(backward < size, "backward: %.2f parts more", backward) -- the gradients are parts, too
    check(most "all_gather" > size, "all_gather has fewer")
end

-- Mistakes -----------------------------------------------------------------------------------------------------------

do
    local module = te.DotProductAttention { cp_group = world, cp_comm_type = "p2p" }
    local q, k = te.randn { 1, 1, 2, 4 }, te.randn { 1, 1, rank == 1 and 6 or 4, 4 }
    refused("the processes differ: rank 1 calls exchange of", module, q, k, k)
    refused("{1,1,6,8}, rank 0 exchange of", module, q, k, k)
    if rank == 0 then refused("the processes differ: rank 1 calls barrier, rank 0 exchange of", module, q, q, q)
    else refused("calls barrier, rank 0 exchange of", world.barrier, world) end
end

alike.done()
