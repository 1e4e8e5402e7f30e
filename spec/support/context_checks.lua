-- Run by every process of a group: attention whose sequence is cut between them against the same attention of one
-- process. Prints "ok" and how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"

local D = te.distributed
local world, check, near, refused = alike.world, alike.check, alike.near, alike.fails
local rank, size = world.rank, world.size

local TOLERANCE = { float64 = 1e-12, float32 = 2e-5 }
local DTYPES = { "float64", "float32" } -- in this order in all processes
local WAYS = { "all_gather", "a2a", "p2p" }
local SEQ = 4 * 2 * size -- four tokens a chunk

local function part(x, dim) return D.split_sequence(x, world, dim):detach() end

-- Parts ---------------------------------------------------------------------------------------------------------------

do
    local ids = te.arange(0, 2 * SEQ - 1, 1, { dtype = "int64" }):view { 2, SEQ }
    local own = part(ids)
    local chunks = {}
    for _, chunk in ipairs { rank, 2 * size - 1 - rank } do
        for i = 0, 3 do chunks[#chunks + 1] = 4 * chunk + i end
    end
    check(table.concat(own[1]:totable(), " ") == table.concat(chunks, " "), "a part: %s", tostring(own))
    near("whole again", D.join_sequence(own, world), ids, 0)
    near("positions", D.sequence_positions(8, world), own[1], 0)
    near("along dimension 1", D.join_sequence(part(ids:transpose(1, 2), 1), world, 1), ids:transpose(1, 2), 0)
    local x = te.randn({ 2, SEQ, 3 }, { requires_grad = true })
    te.mul(D.split_sequence(x), rank + 1):sum():backward()
    near("a part's gradient", part(x.grad), te.full({ 2, 8, 3 }, rank + 1), 0)
    local y = te.randn({ 2, 8, 3 }, { requires_grad = true })
    te.mul(D.join_sequence(y), te.arange(1, SEQ, 1):view { 1, SEQ, 1 }):sum():backward()
    near("the whole's gradient", y.grad:select(1, 1):select(2, 1), (D.sequence_positions(8) + 1) * size, 0)
    refused("cannot be cut in 2 x", D.split_sequence, te.ones { 2, SEQ + 1 }, world)
    refused("a part of 3 is not two chunks", D.join_sequence, te.ones { 2, 3 }, world)
    refused("a part of 3 is not two chunks", D.sequence_positions, 3, world)
end

-- Self-attention ------------------------------------------------------------------------------------------------------

local CASES = {
    { "causal", 8, 8, {} },
    { "not causal", 8, 8, { causal = false } },
    { "a window", 8, 8, { window_left = 3 } },
    { "a window and rope", 8, 8, { window_left = 9, rope = true } },
    { "a window to both sides", 8, 8, { causal = false, window_left = 5, window_right = 2 } },
    { "a window ahead", 8, 8, { causal = false, window_right = 6 } },
    { "a window back alone", 8, 8, { causal = false, window_left = 1, window_right = -1 } },
    { "grouped queries and rope", 8, 4, { rope = true } },
    { "grouped queries, part of a head turned", 8, 4, { rope = { size = 2, interleaved = true }, scale = 0.7 } },
    { "one head of keys", 4, 1, { rope = true } },
    { "L2 norms", 8, 4, { qk_norm = "L2Normalization", rope = true } },
    { "norms before rope", 8, 4, { qk_norm = "RMSNorm", qk_norm_before_rope = true, rope = true } },
    { "norms after rope", 8, 4, { qk_norm = "LayerNorm", rope = true, causal = false } },
    { "sinks", 8, 4, { softmax_type = "learnable", window_left = 6 } },
    { "off by one", 8, 8, { softmax_type = "off-by-one", causal = false } },
    { "wide heads, no bias", 4, 4, { head_size = 6, bias = false, rope = true, softmax_type = "learnable" } },
}

local ONE_SEQUENCE = CASES[8]

if te.get_default_device() ~= "cpu" then -- a made-up device is slow
    DTYPES, CASES = { "float32" }, { CASES[4], CASES[8], CASES[12], CASES[14] }
end

local WIDTH = 32

local function module_of(case, dtype, group, way)
    local opts = { params_dtype = dtype, cp_group = group, cp_comm_type = way }
    for name, value in pairs(case[4]) do opts[name] = value end
    te.manual_seed(3)
    local module = te.GroupedQueryAttention(WIDTH, case[2], case[3], opts)
    te.no_grad(function()
        te.manual_seed(5)
        for name, p in module:named_parameters() do
            if p:dim() == 1 then p:add_(te.randn(p.shape, { dtype = p.dtype })) end -- biases, norms, sinks
        end
    end)
    return module
end

-- Of processes' gradients, each of its own tokens, the sum is wanted.
local function same_gradients(name, own, whole, tolerance)
    local grads = {}
    for key, p in whole:named_parameters() do grads[key] = p.grad end
    for key, p in own:named_parameters() do
        -- a bias of all keys changes no probability: its gradient is 0 but for rounding
        near(("%s, gradient of %s"):format(name, key), world:all_reduce(p.grad), grads[key], tolerance, 1)
    end
end

local function compare_modules(case, dtype, way, shape)
    local name = ("%s by %s in %s"):format(case[1], way, dtype)
    local whole, own = module_of(case, dtype), module_of(case, dtype, world, way)
    local dim, tolerance = #shape - 1, TOLERANCE[dtype]
    te.manual_seed(7)
    local x, dy = te.randn(shape, { dtype = dtype }), te.randn(shape, { dtype = dtype })
    local own_x = part(x, dim)
    x.requires_grad, own_x.requires_grad = true, true
    local y, own_y = whole(x), own(own_x)
    near(name, own_y, part(y, dim), tolerance)
    te.mul(y, dy):sum():backward()
    te.mul(own_y, part(dy, dim)):sum():backward()
    near(name .. ", gradient of x", own_x.grad, part(x.grad, dim), tolerance)
    same_gradients(name, own, whole, tolerance)
end

-- Three steps of a block in a container.
local function compare_steps(case, dtype, way)
    local name = ("steps, %s by %s in %s"):format(case[1], way, dtype)
    local function block_of(group, comm_type)
        local attention = module_of(case, dtype)
        attention:set_context_parallel_group(group, comm_type)
        local block = te.Sequential(te.Residual(te.LayerNorm(WIDTH, { params_dtype = dtype }), attention),
            te.Residual(te.Linear(WIDTH, WIDTH, { params_dtype = dtype }), te.GELU()))
        return block, te.optim.SGD(block:parameters(), { lr = 0.5, momentum = 0.9 })
    end
    local whole, whole_optimizer = block_of()
    local own, own_optimizer = block_of(world, way)
    te.manual_seed(8)
    for step = 1, 3 do
        local x, target = te.randn({ 2, SEQ, WIDTH }, { dtype = dtype }), te.randn({ 2, SEQ, WIDTH }, { dtype = dtype })
        local loss, own_loss = te.mse_loss(whole(x), target), te.mse_loss(own(part(x)), part(target))
        near(("%s, loss %d"):format(name, step), world:all_reduce(own_loss:detach(), "average"), loss, TOLERANCE[dtype])
        loss:backward()
        own_loss:backward()
        D.average_gradients(own)
        for _, optimizer in ipairs { whole_optimizer, own_optimizer } do
            optimizer:step()
            optimizer:zero_grad()
        end
    end
    local state = whole:state_dict()
    for key, p in pairs(own:state_dict()) do near(name .. ", " .. key, p, state[key], 10 * TOLERANCE[dtype]) end
end

for _, case in ipairs(CASES) do
    for _, way in ipairs(WAYS) do
        for _, dtype in ipairs(DTYPES) do
            if way ~= "a2a" or case[3] % size == 0 then
                compare_modules(case, dtype, way, { 2, SEQ, WIDTH })
                compare_steps(case, dtype, way)
            else
                refused("cannot be divided among", module_of, case, dtype, world, way)
            end
        end
    end
end
for _, way in ipairs(WAYS) do compare_modules(ONE_SEQUENCE, "float32", way, { SEQ, WIDTH }) end

-- Operands of their own -----------------------------------------------------------------------------------------------

local function compare_operands(name, opts, heads, kv_heads, seq_kv, value_size, dtype, way)
    name = ("%s by %s in %s"):format(name, way, dtype)
    local function module(group, comm_type)
        opts.cp_group, opts.cp_comm_type = group, comm_type
        return te.DotProductAttention(opts)
    end
    local whole, own = module(), module(world, way)
    te.manual_seed(11)
    local all, parts = {}, {}
    for i, shape in ipairs { { 2, heads, SEQ, 6 }, { 2, kv_heads, seq_kv, 6 }, { 2, kv_heads, seq_kv, value_size } } do
        all[i] = te.randn(shape, { dtype = dtype })
        parts[i] = part(all[i], 3)
        all[i].requires_grad, parts[i].requires_grad = true, true
    end
    local y, own_y = whole(unpack(all)), te.Sequential(own)(unpack(parts))
    local dy = te.randn(y.shape, { dtype = dtype })
    near(name, own_y, part(y, 3), TOLERANCE[dtype])
    te.mul(y, dy):sum():backward()
    te.mul(own_y, part(dy, 3)):sum():backward()
    for i, t in ipairs(all) do
        near(("%s, gradient %d"):format(name, i), parts[i].grad, part(t.grad, 3), TOLERANCE[dtype])
    end
    if whole.softmax_offset and whole.softmax_offset.requires_grad then same_gradients(name, own, whole, 1e-5) end
end

for _, dtype in ipairs(DTYPES) do
    for _, way in ipairs(WAYS) do
        compare_operands("operands", {}, 8, 8, SEQ, 6, dtype, way)
        compare_operands("causal operands", { causal = true }, 8, 4, SEQ, 10, dtype, way)
        compare_operands("operands of other length", {}, 8, 4, 2 * SEQ, 10, dtype, way)
        compare_operands("operands with sinks", { causal = true, softmax_type = "learnable", num_heads = 8,
            window_left = 4 }, 8, 4, SEQ, 10, dtype, way)
    end
    compare_operands("causal operands of other length", { causal = true, bottom_right = true }, 8, 4, 2 * SEQ, 10,
        dtype, "a2a")
end

-- Probabilities that are dropped: others in each process, and the same in backward, since the result is linear in the
-- values. The random numbers go on at the same place in all processes.
for _, way in ipairs(WAYS) do
    te.manual_seed(13 + rank)
    for _, opts in ipairs { { causal = true }, { causal = true, window_left = 5 }, {} } do
        opts.dropout, opts.cp_group, opts.cp_comm_type = 0.5, world, way
        local module, shape = te.DotProductAttention(opts), { 1, 4, 2, 3 } -- one token a chunk
        local q, k, v = te.randn(shape), te.randn(shape), te.ones(shape, { requires_grad = true })
        local y = module(q, k, v)
        check(y:min():item() ~= y:max():item(), "nothing is dropped")
        y:sum():backward()
        near("values times their gradients", world:all_reduce((v.grad * v:detach()):sum()),
            world:all_reduce(y:detach():sum()), 1e-5)
        local offset = tonumber(te.rng_state():match " (%d+)$")
        near("the place", world:all_reduce(te.full({ 1 }, offset), "max"), te.full({ 1 }, offset), 0)
        near("in evaluation", module:eval()(q, k, v), te.ones(shape), 1e-6)
    end
end

-- What is refused, and what is not ------------------------------------------------------------------------------------

do
    local x = te.randn { 2, 8, WIDTH }
    local module = te.MultiHeadedSelfAttention(WIDTH, 8, { cp_group = world })
    check(tostring(module):find(("cp=%d by all_gather"):format(size), 1, true), "%s", tostring(module))
    refused("a sequence of " .. 7 * size, module, te.randn { 2, 7, WIDTH })
    refused("seq_lens is not taken", module, te.randn { 8, WIDTH }, te.tensor({ 4, 4 }, { dtype = "int32" }))
    refused("te.KVCache are not divided", function() te.KVCache():run(module, x) end)
    local recipe = te.recipe.Float8CurrentScaling { fp8_dpa = true }
    refused("FP8 attention is not divided", te.autocast, { recipe = recipe }, module, x)
    recipe.fp8_dpa = false
    local y = te.autocast({ recipe = recipe, dtype = "bfloat16" }, module, x)
    check(y.dtype == "bfloat16", "the projections are quantized")
    refused("3 heads of queries and 3 of keys cannot be divided", te.MultiHeadedSelfAttention, 3, 3,
        { cp_group = world, cp_comm_type = "a2a" })
    refused("a bias of the scores", te.DotProductAttention, { bias = true, cp_group = world })
    local own = te.DotProductAttention { causal = true, cp_group = world }
    local q, k = te.randn { 1, 4, 2, 3 }, te.randn { 1, 4, 4, 3 }
    refused("queries and keys must be of equal number, not 2 and 4", own, q, k, k)
    refused("not of the same tokens", own, q, q, k)
    refused("are needed, not {3}", own, te.ones { 3 }, q, q)
    local odd = te.randn { 1, 3, 2, 3 }
    own:set_context_parallel_group(world, "a2a")
    refused("cannot be divided among", own, odd, odd, odd)

    -- the plan says why the module runs by itself, and follows the option
    local block = te.Sequential(te.Linear(WIDTH, WIDTH), module, te.GELU())
    check(tostring(block:explain(x)):find("it waits for other processes", 1, true), "%s", tostring(block:explain(x)))
    module:set_context_parallel_group(nil)
    check(not tostring(block:explain(x)):find("waits", 1, true), "%s", tostring(block:explain(x)))
    near("whole again", module(x), te.Sequential(module)(x), 1e-6)
end

-- Models --------------------------------------------------------------------------------------------------------------

local MODELS = {
    gpt = { bias = true, n_head = 4 },
    llama = { n_head = 8, n_kv_head = 4, window = 6, full_every = 2, qk_norm = true, attention_sinks = true,
        rope_scaling = "linear", rope_factor = 2 },
}

local function model_of(kind, group, way)
    local config = { vocab_size = 30, block_size = SEQ, n_layer = 2, n_embd = 32, context_parallel = group,
        cp_comm_type = way }
    for name, value in pairs(MODELS[kind]) do config[name] = value end
    te.manual_seed(17)
    return te.models[kind](config)
end

for _, kind in ipairs { "gpt", "llama" } do
    for _, way in ipairs(WAYS) do
        local name = ("%s by %s"):format(kind, way)
        local whole, own = model_of(kind), model_of(kind, world, way)
        local optimizers = {}
        for i, model in ipairs { whole, own } do optimizers[i] = te.optim.SGD(model:parameters(), { lr = 0.1 }) end
        te.manual_seed(18)
        for step = 1, 3 do
            local ids, targets = te.randint(0, 29, { 2, SEQ }), te.randint(0, 29, { 2, SEQ })
            local logits, loss = whole(ids, targets)
            local own_logits, own_loss = own(part(ids), part(targets))
            near(name .. ", logits", own_logits, part(logits:view { 2, SEQ, 30 }):view { -1, 30 }, 1e-4)
            te.no_grad(function()
                near(name .. ", all logits", own(part(ids), nil, { logits = "all" }),
                    part(logits:detach():view { 2, SEQ, 30 }), 1e-4)
                near(name .. ", hidden states", own:hidden_states(part(ids)), part(whole:hidden_states(ids)), 1e-4)
            end)
            near(("%s, loss %d"):format(name, step), world:all_reduce(own_loss:detach(), "average"), loss, 1e-5)
            loss:backward()
            own_loss:backward()
            D.average_gradients(own)
            local grads = {}
            for key, p in whole:named_parameters() do grads[key] = p.grad end
            for key, p in own:named_parameters() do
                near(("%s, gradient %s of step %d"):format(name, key, step), p.grad, grads[key], 1e-4, 1e-3)
            end
            for _, optimizer in ipairs(optimizers) do
                optimizer:step()
                optimizer:zero_grad()
            end
        end
        refused("targets are needed", own, te.zeros({ 1, 2 }, { dtype = "int64" }))
        refused(("a sequence of %d tokens"):format(SEQ + 2 * size), own, te.zeros({ 1, 10 }, { dtype = "int64" }),
            te.zeros({ 1, 10 }, { dtype = "int64" }))
        local texts = own:texts()
        check(texts["model.context_parallel"] == nil and texts["model.cp_comm_type"] == nil, "in a checkpoint")
        if rank == 0 then -- the others wait
            local start = te.zeros({ 1, 1 }, { dtype = "int64" })
            whole:load_state_dict(own:state_dict())
            near(name .. ", a sample", own:generate(start, 20, { temperature = 0 }),
                whole:generate(start, 20, { temperature = 0 }), 0)
        end
        check(own.cp_group == world and own.cp_comm_type == way, "the group is back")
        world:barrier()
    end
end

-- Groups beside each other, each with sequences of its own.
if size == 4 then
    local pair = world:split(math.floor(rank / 2))
    local module = te.MultiHeadedSelfAttention(WIDTH, 2, { cp_group = pair, cp_comm_type = "a2a" })
    D.broadcast_parameters(module)
    te.manual_seed(19 + math.floor(rank / 2))
    local x = te.randn { 1, 8, WIDTH }
    local y = D.join_sequence(module(D.split_sequence(x, pair)), pair)
    near("in a pair", y, module:set_context_parallel_group(nil)(x), 1e-5)
end

alike.done()
