-- Run by every process of a group: attention and models that are split between them against the same whole. Prints
-- "ok" and how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"
local side_by_side = require "spec.support.side_by_side"
local options = require "te.options"
local whole = require "te.distributed.whole"

local D = te.distributed
local world, check, near, fails = alike.world, alike.check, alike.near, alike.fails
local rank, size = world.rank, world.size
local copy, batch, VOCAB, SEQ = side_by_side.merged, side_by_side.batch, side_by_side.VOCAB, side_by_side.SEQ

-- Sections and states -------------------------------------------------------------------------------------------------

do
    local function layer(split)
        te.manual_seed(2)
        return te.Linear(6, 12 * size, { tensor_parallel_mode = split and "column" or nil,
            tensor_parallel_sections = split and { 8 * size, 4 * size } or nil })
    end
    local whole_one, split = layer(false), layer(true)
    te.no_grad(function() whole_one.bias:copy_(te.arange(1, 12 * size, 1)) end)
    split:load_state_dict(D.split_state(split, whole_one:state_dict()))
    local x = te.randn { 3, 6 }
    local y, part = whole_one(x), split(x)
    near("first section", part:narrow(2, 1, 8), y:narrow(2, 8 * rank + 1, 8), 1e-6)
    near("second section", part:narrow(2, 9, 4), y:narrow(2, 8 * size + 4 * rank + 1, 4), 1e-6)
    local joined = D.join_state(split)
    near("joined weight", joined.weight, whole_one.weight, 0)
    near("joined bias", joined.bias, whole_one.bias, 0)
    near("a copy's", D.join_state(split:clone()).weight, whole_one.weight, 0)
    local uneven = te.Embedding(2 * size + 1, 3, { tensor_parallel_mode = "vocab" })
    check(#D.join_state(uneven).weight.shape == 2 and D.join_state(uneven).weight.shape[1] == 2 * size + 1, "uneven")
    local bias = te.Bias(2 * size + 1, { tensor_parallel = true })
    check(D.join_state(bias).bias.shape[1] == 2 * size + 1, "uneven bias")
    local own = D.split_state(split, { weight = te.ones { 12 * size, 6 }, other = 3 })
    check(own.weight.shape[1] == 12 and own.other == 3, "a part")
    fails(("weight has shape {%d,6} as a whole, the one given has {12,6}"):format(12 * size), D.split_state, split,
        { weight = te.ones { 12, 6 } })
    fails("te.distributed.join_state: module: expected a module, got 1", D.join_state, 1)
    fails("te.distributed.split_state: state: expected table", D.split_state, split)
    fails("is of experts that processes have parts of", D.join_state, te.MoE(4, 4, size, { group = world, topk = 1 }))
    fails("they sum to 5, out_features is 6", te.Linear, 4, 6, { tensor_parallel_mode = "column",
        tensor_parallel_sections = { 2, 3 } })
    fails("tensor_parallel_sections: needs tensor_parallel_mode = column", te.Linear, 4, 6,
        { tensor_parallel_mode = "row", tensor_parallel_sections = { 3, 3 } })
    fails("tensor_parallel_sections[1] = 1 cannot be split", te.Linear, 4, 1 + size, { tensor_parallel_mode = "column",
        tensor_parallel_sections = { 1, size } })
    fails("tensor_parallel_sections: needs tensor_parallel_mode", te.Linear, 4, 6, { tensor_parallel_sections = { 6 } })
    fails("sequence_dim: needs sequence_parallel", te.Linear, 4, 6,
        { tensor_parallel_mode = "column", sequence_dim = 2 })
    fails("te.AllGather: option dim: 3, but the input is {2,2}", te.AllGather { dim = 3 }, te.ones { 2, 2 })
    local column = te.AllGather { dim = 2 }(te.full({ 2, 1, 3 }, rank))
    near("columns", column:select(3, 1):select(1, 1), te.arange(0, size - 1, 1), 0)
end

-- Models --------------------------------------------------------------------------------------------------------------

local MODELS = {
    { "gpt", { bias = true, n_head = 4, n_embd = 32 } },
    { "gpt", { n_head = 4, n_embd = 32, recompute_blocks = true } },
    { "llama", { n_head = 8, n_kv_head = 4, n_embd = 32 } },
    { "llama", { n_head = 4, n_kv_head = 4, n_embd = 32, tie = true, qk_norm = true, attention_bias = "all",
        mlp_bias = true, attention_sinks = true, window = 5, post_norm = true, embedding_scale = 2, head_size = 6,
        zero_centered_gamma = true } },
}
local on_device = te.get_default_device() ~= "cpu" -- a made-up one is slow, as many processes on few processors are
if on_device then MODELS = { MODELS[1], MODELS[4] } elseif size > 2 then table.remove(MODELS, 2) end

local function model_of(kind, more, split)
    local model = side_by_side.model(kind, copy({ n_layer = 2, init_std = 0.2 }, copy(more, split)))
    te.manual_seed(3)
    for name, p in model:named_parameters() do -- biases, norms, sinks
        if p:dim() == 1 then
            local values = te.randn(whole.shape(p)) * 0.2
            te.no_grad(function() p:add_(whole.split(p, values)) end)
        end
    end
    return model
end

local function grads_of(model)
    local grads = {}
    for name, p in model:named_parameters() do
        check(p.grad ~= nil, "%s has no gradient", name)
        grads[name] = whole.join(p, p.grad)
    end
    return grads
end

local function compare(name, one, own, scope, tolerance)
    local pair = side_by_side.pair(one, own)
    te.manual_seed(18)
    for step = 1, 3 do
        local ids, targets = batch()
        local function run(model, more)
            return te.autocast(copy(scope, more), function() return model(ids, targets) end)
        end
        local logits, loss = run(one)
        local own_logits, own_loss = run(own, { group = scope.enabled and scope.recipe and world or nil })
        local before, count = whole.share(VOCAB, world)
        near(name .. ", logits", own_logits, logits:narrow(2, before + 1, count), 10 * tolerance)
        near(("%s, loss %d"):format(name, step), own_loss, loss, tolerance)
        loss:backward()
        own_loss:backward()
        local norm = pair:norm(name, 10 * tolerance)
        local want = grads_of(one)
        for key, grad in pairs(grads_of(own)) do
            near(("%s, gradient %d of %s"):format(name, step, key), grad, want[key], 20 * tolerance, norm / 100)
        end
        pair:step(norm / 2)
    end
    local state = D.join_state(own)
    for key, p in pairs(one:state_dict()) do
        if p:dim() > 0 and not key:find "amax" and not key:find "scale$" then
            near(("%s, %s"):format(name, key), state[key], p, 20 * tolerance)
        end
    end
end

local function named(case, sequence) return ("%s%s"):format(case[1], sequence and " with sequences split" or "") end

for _, case in ipairs(MODELS) do
    for _, sequence in ipairs { false, true } do
        local split = { tensor_parallel = world, sequence_parallel = sequence }
        local one, own = model_of(case[1], case[2]), model_of(case[1], case[2], split)
        local name = named(case, sequence)
        local state = D.join_state(own)
        for key, p in pairs(one:state_dict()) do near(name .. ", first " .. key, state[key], p, 0) end
        check(own:num_parameters() == one:num_parameters() and own:flops_per_token() == one:flops_per_token(), "counts")
        compare(name, one, own, { enabled = false }, 2e-5)
        te.no_grad(function()
            local ids = batch()
            near(name .. ", last logits", own(ids), one(ids), 1e-3)
        end)
    end
end

-- In lower precision: rounding differs where sums are made of parts.
do
    local more = { n_head = 4, n_kv_head = 4, n_embd = 64, n_inner = 128 }
    local scopes = { { "bfloat16", { dtype = "bfloat16" }, 0.02 },
        { "delayed scaling", { dtype = "float32", recipe = te.recipe.DelayedScaling { amax_history_len = 4 } }, 5e-3 },
        { "MXFP8", { dtype = "float32", recipe = te.recipe.MXFP8BlockScaling() }, 5e-3 },
        { "MXFP8 in bfloat16", { dtype = "bfloat16", recipe = te.recipe.MXFP8BlockScaling() }, 0.02 },
        { "weights in MXFP8", { dtype = "float32", recipe = te.recipe.MXFP8BlockScaling() }, 5e-3,
            { n_embd = 128, quantized = "MXFP8BlockScaling" } },
        { "FP8 attention", { dtype = "float32",
            recipe = te.recipe.DelayedScaling { amax_history_len = 4, fp8_dpa = true } }, 5e-3 } }
    if on_device or size > 2 then scopes = { scopes[2], scopes[3] } end
    for _, scope in ipairs(scopes) do
        for _, sequence in ipairs { false, true } do
            local config = copy(more, scope[4])
            local own = model_of("llama", config, { tensor_parallel = world, sequence_parallel = sequence })
            local one = model_of("llama", config)
            local trained = {}
            for i, model in ipairs { one, own } do
                local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.001 })
                te.manual_seed(19)
                trained[i] = {}
                for step = 1, 4 do
                    local ids, targets = batch()
                    local _, loss = te.autocast(copy(scope[2], { group = i == 2 and scope[2].recipe and world or nil }),
                        function() return model(ids, targets) end)
                    loss:backward()
                    te.optim.clip_grad_norm(model, 1)
                    optimizer:step()
                    optimizer:zero_grad()
                    trained[i][step] = loss:detach()
                end
            end
            for step = 1, 4 do
                near(("%s, loss %d"):format(scope[1], step), trained[2][step], trained[1][step], scope[3])
            end
            local state = own:state_dict()
            for _, name in ipairs(options.names(state)) do -- in the same order in all
                local t = state[name]
                if name:find "_scale$" or name:find "_amax_history$" then
                    local all = world:all_gather(t:reshape { 1, -1 })
                    for r = 1, size do near(name .. " of all", all[r], all[1], 0) end
                end
            end
            for name, p in own:named_parameters() do -- of what all have whole, the bits
                if whole.layouts[p] == nil then
                    near(name, p, world:broadcast_(p:detach():clone(), 0), 0)
                end
            end
        end
    end
end

-- Muon makes whole matrices orthogonal.
do
    local more, trained = { n_head = 4, n_kv_head = 4, n_embd = 32 }, {}
    for i, split in ipairs { {}, { tensor_parallel = world }, { tensor_parallel = world, sequence_parallel = true } } do
        local model = model_of("llama", more, split)
        local optimizer = te.optim.Muon(model:parameter_groups(0.1, "muon"), { lr = 0.01, ns_dtype = "float32" })
        te.manual_seed(26)
        for _ = 1, 3 do
            local _, loss = model(batch())
            loss:backward()
            optimizer:step()
            optimizer:zero_grad()
        end
        trained[i] = D.join_state(model)
    end
    for name, t in pairs(trained[1]) do
        near("Muon, " .. name, trained[2][name], t, 1e-3)
        near("Muon with tokens split, " .. name, trained[3][name], t, 1e-3)
    end
end

-- Generation, hidden states, and all logits: whole in all processes.
for _, case in ipairs(MODELS) do
    for _, sequence in ipairs { false, true } do
        local name = named(case, sequence)
        local one = model_of(case[1], case[2])
        local own = model_of(case[1], case[2], { tensor_parallel = world, sequence_parallel = sequence })
        te.manual_seed(20)
        local ids = batch()
        for i, model in ipairs { one, own } do model.seen = model:hidden_states(ids) end
        near(name .. ", hidden states", own.seen, one.seen, 1e-4)
        local weights = te.randn(one.seen.shape)
        for _, model in ipairs { one, own } do te.sum(model.seen * weights):backward() end
        local function same_gradients(what)
            local want = {}
            for key, p in one:named_parameters() do want[key] = p.grad end
            for key, p in own:named_parameters() do
                near(("%s, gradient of %s by %s"):format(name, what, key), whole.join(p, p.grad or te.zeros(p.shape)),
                    want[key] or te.zeros(whole.shape(p)), 1e-3, 1)
            end
            for _, model in ipairs { one, own } do model:zero_grad() end
        end
        same_gradients "hidden states"
        local logits, own_logits = one(ids, nil, { logits = "all" }), own(ids, nil, { logits = "all" })
        near(name .. ", all logits", own_logits, logits, 1e-3)
        for _, t in ipairs { logits, own_logits } do
            te.cross_entropy(t:view { -1, VOCAB }, ids:reshape { -1 }):backward()
        end
        same_gradients "all logits"
        one.seen, own.seen = nil, nil
        for _, opts in ipairs { { temperature = 0 }, { temperature = 0, use_cache = false }, { temperature = 1 } } do
            te.manual_seed(21)
            local want = one:generate(ids:narrow(2, 1, 3), 4, opts)
            te.manual_seed(21)
            near(name .. ", generated", own:generate(ids:narrow(2, 1, 3), 4, opts), want, 0)
        end
        for _, way in ipairs { { lookup = 3 }, { assistant = one }, { assistant = own } } do
            for _, temperature in ipairs { 0, 1 } do
                way.temperature = temperature
                te.manual_seed(21)
                local want = one:generate(ids:narrow(2, 1, 3), 4, way)
                te.manual_seed(21)
                near(name .. ", generated with guesses", own:generate(ids:narrow(2, 1, 3), 4, way), want, 0)
            end
        end
        local copied = own:clone()
        near(name .. ", a copy", select(2, copied(ids, ids)), select(2, own(ids, ids)), 0)
        check(copied:num_parameters() == one:num_parameters(), "a copy's parameters")
        check(own.sequence_parallel == sequence, "generate leaves the model as it was")
        local _, loss = own(batch())
        check(loss:item() == loss:item(), "and it trains on")
        if sequence then
            own:set_sequence_parallel(false)
            compare(name .. ", then whole", one, own, { enabled = false }, 2e-5)
            own:set_sequence_parallel(true)
            compare(name .. ", then split", one, own, { enabled = false }, 5e-5)
            fails(("sequence_parallel: a sequence of %d tokens cannot be split"):format(SEQ - 1), own, batch(SEQ - 1))
        end
    end
end

-- Dropout: the numbers go on at the same place in all processes, what is whole drops the same in all of them, heads and
-- tokens that are split drop others.
for _, sequence in ipairs { false, true } do
    for _, recompute in ipairs { false, true } do
        local own = model_of("gpt", { n_head = 4, n_embd = 32, dropout = 0.5, recompute_blocks = recompute },
            { tensor_parallel = world, sequence_parallel = sequence })
        te.manual_seed(22)
        for _ = 1, 2 do
            local before = te.rng_state()
            local _, loss = own(batch())
            loss:backward()
            local state = te.rng_state()
            check(state:match "^%d+" == before:match "^%d+" and state ~= before, "the seed stays, the place moves on")
            local offset = te.full({ 1 }, tonumber(state:match " (%d+)$"))
            near("the place", world:all_reduce(offset, "max"), offset, 0)
            near("the loss", loss, world:broadcast_(loss:detach():clone(), 0), 0)
        end
        for name, p in own:named_parameters() do
            if whole.layouts[p] == nil then
                near("dropout, gradient of " .. name, p.grad, world:broadcast_(p.grad:clone(), 0), 0)
            end
        end
        local y = require("te.ops.tensor_parallel").apart(world, te.rand, { 1, 8 })
        local all = world:all_gather(y)
        for r = 2, size do check(not te.all(te.eq(all[r], all[1])):item(), "other numbers than rank 0's") end
    end
    -- what backward drops is what forward dropped: the slope of the loss is that of the gradients
    for _, recompute in ipairs { false, true } do
        local own = model_of("llama", { n_head = 4, n_embd = 32, dropout = 0.3, recompute_blocks = recompute },
            { tensor_parallel = world, sequence_parallel = sequence }):to "float64"
        te.manual_seed(24)
        local ids, targets = batch()
        local directions = {}
        for i, p in ipairs(own:parameters()) do
            directions[i] = whole.split(p, te.randn(whole.shape(p), { dtype = "float64" })):clone()
        end
        local function loss_at(distance)
            te.no_grad(function()
                for i, p in ipairs(own:parameters()) do p:add_(directions[i] * distance) end
            end)
            te.manual_seed(25)
            return select(2, own(ids, targets))
        end
        local STEP = 1e-6
        local loss, slope = loss_at(0), 0
        loss:backward()
        for i, p in ipairs(own:parameters()) do
            slope = slope + te.sum(whole.join(p, p.grad) * whole.join(p, directions[i])):item()
        end
        local ahead, behind = te.no_grad(loss_at, STEP):item(), te.no_grad(loss_at, -2 * STEP):item()
        near("the loss's slope", te.full({}, slope), te.full({}, (ahead - behind) / (2 * STEP)), 1e-4, 1e-2)
    end
    local drops = te.MultiHeadedSelfAttention(8, 4, { dropout = 0.5, tp_group = world, bias = false })
    te.manual_seed(23)
    local x = te.randn { 1, 64, 8 }
    local a = drops(x):detach()
    near("attention's result", a, world:broadcast_(a:clone(), 0), 0)
end

-- Checkpoints and files of Transformers: whole models, of which each process takes its part.
do
    for _, case in ipairs(MODELS) do
        local one = model_of(case[1], case[2])
        local saved = { path = "made", step = 1, metadata = one:texts(), tensors = {} }
        for name, t in pairs(one:state_dict()) do saved.tensors["model." .. name] = t end
        for _, sequence in ipairs { false, true } do
            local own = te.models.from_checkpoint(saved, { tensor_parallel = world, sequence_parallel = sequence })
            check(own.sequence_parallel == sequence and own.tensor_parallel == world, "as it was asked for")
            local state = D.join_state(own)
            for name, p in pairs(one:state_dict()) do near("from_checkpoint, " .. name, state[name], p, 0) end
        end
        if case[1] == "gpt" and case[2].bias or case[2].n_kv_head == 4 and not case[2].tie then
            local own = model_of(case[1], case[2], { tensor_parallel = world })
            te.no_grad(function()
                for _, p in ipairs(own:parameters()) do p:fill_(0) end
            end)
            own:load_hugging_face(one:hugging_face_state())
            local state = D.join_state(own)
            for name, p in pairs(one:state_dict()) do near("load_hugging_face, " .. name, state[name], p, 0) end
            fails("the model is split by tensor_parallel", own.hugging_face_state, own)
            local folder = os.tmpname() -- of each process
            os.remove(folder)
            te.models.to_hugging_face(one, folder)
            own = te.models.from_hugging_face(folder, { tensor_parallel = world, sequence_parallel = true })
            check(own.sequence_parallel, "as it was asked for")
            state = D.join_state(own)
            for name, p in pairs(one:state_dict()) do near("from_hugging_face, " .. name, state[name], p, 0) end
            os.execute(("rm -r '%s'"):format(folder))
        end
    end
end

-- What is not finite in one process keeps all from saving.
do
    local ranks = te.train.ranks.new()
    check(ranks:divide_model(size + 1, false) ~= nil, "processes that do not divide")
    ranks:divide_model(size, false)
    check(ranks.row_ranks == 1 and ranks.holds and ranks.split.tensor_parallel.size == size, "one model")
    local own = model_of("gpt", { n_head = 4, n_embd = 32 }, ranks.split)
    local optimizer = te.optim.AdamW(own:parameters())
    local guard = te.train.guard(own, ranks)
    guard:check(optimizer)
    if rank == size - 1 then te.no_grad(function() own.blocks[1].mlp[2].weight:fill_(0 / 0) end) end
    local passes, problem = pcall(guard.check, guard, optimizer)
    check(not passes and problem.code == te.train.exit.not_finite, "%s", tostring(problem))
    check(rank > 0 or problem.message:find("a part in another process is not finite", 1, true), "%s", problem.message)
    local options_of = { folder = "/nowhere", step = 1, model = own, optimizer = optimizer }
    fails("te.train.checkpoint.save: option group: wte.weight is split over Group(rank", te.train.checkpoint.save,
        options_of)
end

-- What is refused -----------------------------------------------------------------------------------------------------

do
    local config = { vocab_size = 8, n_layer = 1, n_head = 4, n_embd = 16, tensor_parallel = world }
    local function refused(text, kind, more) fails(text, te.models[kind], copy(config, more)) end
    refused(("te.models.gpt: n_head = 1 cannot be split between %d processes"):format(size), "gpt", { n_head = 1 })
    refused(("te.models.llama: n_kv_head = 1 cannot be split between %d processes"):format(size), "llama",
        { n_kv_head = 1 })
    refused(("te.models.llama: n_inner = 33 cannot be split between %d processes"):format(size), "llama",
        { n_inner = 33 })
    for _, kind in ipairs { "gpt", "llama" } do
        refused(("te.models.%s: vocab_size = 1 cannot be split between %d processes"):format(kind, size), kind,
            { vocab_size = 1 })
    end
    refused("te.models.llama: tensor_parallel: experts (n_expert = 2) are not split", "llama", { n_expert = 2 })
    refused("te.models.gpt: tensor_parallel: not together with context_parallel", "gpt", { context_parallel = world })
    refused("te.models.gpt: tensor_parallel: not together with context_parallel", "gpt",
        { context_parallel = { world, world:split(rank) }, cp_comm_type = "a2a+p2p" })
    local own = te.models.gpt(config)
    fails("GPT:set_context_parallel_group: group: the model is split by tensor_parallel",
        own.set_context_parallel_group, own, world)
    fails(("te.GroupedQueryAttention: num_kv_heads = 1 cannot be split between %d processes"):format(size),
        te.GroupedQueryAttention, 16, 4, 1, { tp_group = world })
    fails("te.MultiHeadedSelfAttention: cp_group: not together with tp_group", te.MultiHeadedSelfAttention, 16, 4,
        { tp_group = world, cp_group = world })
    local attention = te.MultiHeadedSelfAttention(16, 4, { tp_group = world })
    check(tostring(attention):find(("heads=%d"):format(4 / size), 1, true), "%s", tostring(attention))
    fails("cp_group: not together with tp_group", attention.set_context_parallel_group, attention, world)
    local plan = tostring(own:explain(te.zeros({ 1, 8 }, { dtype = "int64" })))
    check(plan:find("it waits for other processes", 1, true), "%s", plan)
    if rank == 0 then -- a plan takes one process
        local divided = te.models.llama(copy(config, { sequence_parallel = true, dropout = 0.1, qk_norm = true }))
        check(tostring(divided:explain(te.zeros({ 1, 8 }, { dtype = "int64" }))):find "AllGather.*ReduceScatter", "SP")
    end
    fails("te.lora does not split adapters between processes", te.lora.add, own)
    local quantized = te.quantized_model_init({ recipe = te.recipe.MXFP8BlockScaling() }, te.Linear, 64, 64 * size,
        { tensor_parallel_mode = "column" })
    fails("weight is split and stored quantized", D.join_state, quantized)
end

-- What parts are averaged in does not keep them.
if size == 4 then
    local pair, kept = world:split(math.floor(rank / 2)), setmetatable({}, { __mode = "v" })
    local function averaged()
        local layer = te.Linear(6, 10, { tensor_parallel_mode = "column", tensor_parallel_group = pair })
        kept[1], kept[2] = layer.weight, layer.bias
        layer(te.ones { 2, 6 }):sum():backward()
        D.average_gradients(layer)
    end
    averaged()
    collectgarbage() collectgarbage()
    check(next(kept) == nil, "parameters of a layer that is gone are kept")
end

alike.done()
