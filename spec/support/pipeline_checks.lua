-- Run by every process of a group: models whose blocks are divided between them against the same in one. Prints "ok"
-- and how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"
local side_by_side = require "spec.support.side_by_side"

local D = te.distributed
local world, check, near, fails = alike.world, alike.check, alike.near, alike.fails
local rank, size = world.rank, world.size
local is_last = rank == size - 1
local copy, micro_batches, VOCAB, SEQ = side_by_side.merged, side_by_side.micro_batches, side_by_side.VOCAB,
    side_by_side.SEQ

local function model_of(kind, more, group)
    return side_by_side.model(kind, copy({ n_layer = 5, n_head = 2, n_embd = 16, init_std = 0.2,
        pipeline_parallel = group }, more))
end

-- The losses of one process that accumulates gradients.
local function accumulate(model, batches, autocast)
    local losses = {}
    for i, batch in ipairs(batches) do
        local function run() return select(2, model(batch[1], batch[2])) end
        local loss = autocast and te.autocast(autocast, run) or run()
        loss:backward(te.full({}, 1 / #batches))
        losses[i] = loss:item()
    end
    return losses
end

-- Steps ---------------------------------------------------------------------------------------------------------------

local MODELS = {
    { "gpt", { bias = true } },
    { "llama", { n_kv_head = 1 }, exact = true },
    { "llama", { n_kv_head = 1, recompute_blocks = true }, exact = true },
    { "llama", { tie = true, embedding_scale = 2, post_norm = true } },
}

local function compare_states(name, one, own, tolerance)
    local state, whole = D.join_state(own), one:state_dict()
    for key, value in pairs(whole) do
        check(state[key], "%s: %s is missing", name, key)
        near(("%s, %s"):format(name, key), state[key], value, tolerance)
    end
    for key in pairs(state) do check(whole[key], "%s: %s is none of the model's", name, key) end
end

local function compare(name, case, autocast, counts)
    local one, own = model_of(case[1], case[2]), model_of(case[1], case[2], world)
    local tolerance = case.exact and 0 or 3e-5 -- a shared table's gradients are added in another order
    check(own:num_parameters() == one:num_parameters(), "%s: %d parameters", name, own:num_parameters())
    check(own:flops_per_token() == one:flops_per_token(), "%s: operations", name)
    compare_states(name .. " at first", one, own, 0)
    local theirs, pair = {}, side_by_side.pair(one, own)
    for key, parameter in one:named_parameters() do theirs[key] = parameter end
    te.manual_seed(18)
    for step, count in ipairs(counts) do
        local batches = micro_batches(count)
        for again = 1, step == 1 and 2 or 1 do -- gradients are added to those that are there
            local want = accumulate(one, batches, autocast)
            local mean, losses = D.pipeline_step(own, batches, { autocast = autocast })
            check(#losses == count, "%s: %d losses", name, #losses)
            local sum = 0
            for i, loss in ipairs(losses) do
                sum = sum + loss
                check(math.abs(loss - want[i]) <= tolerance, "%s: loss %d of step %d, %d, is %.9g, not %.9g", name, i,
                    step, again, loss, want[i])
            end
            check(mean == sum / count, "%s: mean", name)
        end
        for key, parameter in own:named_parameters() do
            near(("%s, gradient %d of %s"):format(name, step, key), parameter.grad, theirs[key].grad, tolerance, 0.1)
        end
        pair:step(pair:norm(name, 1e-5) / 2)
    end
    compare_states(name, one, own, case.exact and 1e-6 or 1e-4)
    one:eval() own:eval()
    local ids = te.randint(0, VOCAB - 1, { 2, SEQ })
    te.no_grad(function()
        for _, which in ipairs { "last", "all" } do
            near(name .. ", logits", own(ids, nil, { logits = which }), one(ids, nil, { logits = which }), 1e-4)
        end
        local logits, loss = own(ids, ids)
        local want_logits, want = one(ids, ids)
        near(name .. ", loss", loss, want, 1e-4)
        check((logits ~= nil) == is_last, "%s: logits", name)
        if logits then near(name .. ", logits beside it", logits, want_logits, 1e-4) end
    end)
    local options = { temperature = 0.9, top_k = 8 }
    for _, prompt in ipairs { ids:narrow(2, 1, 3), { { 1, 2, 3 }, { 4 } } } do
        te.manual_seed(5)
        local want = one:generate(prompt, 7, options)
        te.manual_seed(5)
        check(tostring(own:generate(prompt, 7, options)) == tostring(want), "%s: generated", name)
        local guessed = own:generate(prompt, 7, { temperature = 0, assistant = own })
        want = one:generate(prompt, 7, { temperature = 0 })
        check(tostring(guessed) == tostring(want), "%s: generated with guesses", name)
    end
end

local on_device = te.get_default_device() ~= "cpu" -- a made-up one is slow, as many processes on few processors are
if on_device then MODELS = { MODELS[1], MODELS[2] } elseif size > 2 then table.remove(MODELS, 3) end

for i, case in ipairs(MODELS) do
    compare(("%s %d"):format(case[1], i), case, nil, on_device and { 5, 1 } or { 5, 1, 2, 8 })
end
compare("in bfloat16", { "llama", {}, exact = true }, { dtype = "bfloat16" }, { 4, 3 })

-- Recipes: every micro-batch is a step of delayed scaling, as where one process adds up gradients.
for _, name in ipairs(on_device and {} or { "DelayedScaling", "MXFP8BlockScaling" }) do
    local wide, recipe = { n_embd = 32, n_inner = 64 }, te.recipe[name] {}
    compare(name, { "llama", wide, exact = true }, { recipe = recipe, dtype = "bfloat16" }, { 5, 2 })
    local stored = copy(wide, { quantized = name })
    local one, own = model_of("llama", stored), model_of("llama", stored, world)
    local batches = micro_batches(3)
    local want = accumulate(one, batches, { recipe = recipe })
    local _, losses = D.pipeline_step(own, batches, { autocast = { recipe = recipe } })
    for i, loss in ipairs(losses) do check(loss == want[i], "%s, stored: loss %d", name, i) end
    compare_states(name .. ", stored", one, own, 0)
end

-- Dropout -------------------------------------------------------------------------------------------------------------

do
    local own = model_of("llama", { dropout = 0.2 }, world)
    local function state()
        local seed, offset = te.rng_state():match "^(%d+) (%d+)$"
        local pair = te.tensor({ { tonumber(seed), tonumber(offset) } }, { dtype = "float64", device = "cpu" })
        return world:all_gather(pair):totable()
    end
    local seen = {}
    for run = 1, 2 do
        te.manual_seed(19)
        local _, losses = D.pipeline_step(own, micro_batches(3))
        te.no_grad(own, te.zeros({ 1, 4 }, { dtype = "int64" }), te.zeros({ 1, 4 }, { dtype = "int64" }))
        local all = state()
        for r = 2, size do
            check(all[r][1] == all[1][1] and all[r][2] == all[1][2], "rank %d goes on elsewhere", r - 1)
        end
        seen[run] = ("%.17g %.17g %.17g %.17g"):format(losses[1], losses[2], losses[3], all[1][2])
    end
    check(seen[1] == seen[2], "%s and %s", seen[1], seen[2])
    own:eval()
    check(own.training == false, "evaluates")
    -- other layers, other numbers: those that blocks of two stages drop are not the same
    own:train()
    te.manual_seed(20)
    local drawn = require("te.staged_decoder").apart(own.stage, te.rand, { 1, 6 }, { device = "cpu" })
    local all = world:all_gather(drawn):totable()
    check(all[1][1] ~= all[2][1], "the same numbers in two stages")
end

-- Memory --------------------------------------------------------------------------------------------------------------

-- What backward needs of a micro-batch, and the weights, are those of this stage's blocks.
if not on_device then
    local function current() collectgarbage() collectgarbage() return te.memory_stats().current end
    local shape = { n_layer = 2 * size, n_embd = 32, n_inner = 64, vocab_size = 64, block_size = 64, tie = true }
    local function batch()
        local ids = te.randint(0, 63, { 4, 64 })
        return { ids, ids }
    end
    te.set_fusion(true)
    local before = current()
    local one = model_of("llama", shape)
    local weights = current() - before
    local loss = select(2, one(unpack(batch())))
    local activations = current() - before - weights
    loss:release()
    one, loss = nil, nil
    before = current()
    local own = model_of("llama", shape, world)
    local held = current() - before
    check(held < weights / size + 4 * 64 * 32 + 4096, "%d bytes of weights here, %d together", held, weights)
    local peaks = {}
    for i, count in ipairs { 1, size, 4 * size } do
        local batches = {}
        for k = 1, count do batches[k] = batch() end
        D.pipeline_step(own, batches) -- gradients are there
        current()
        te.reset_peak_memory()
        D.pipeline_step(own, batches)
        peaks[i] = te.memory_stats().peak - te.memory_stats().current
    end
    local each = activations / size -- of one micro-batch in one stage
    check(peaks[3] < peaks[2] + 0.2 * each, "%d bytes at the peak of %d micro-batches, %d of %d", peaks[3], 4 * size,
        peaks[2], size)
    local more = (peaks[2] - peaks[1]) / each
    check(more < size - rank - 1 + 0.5, "%.2f micro-batches beside the first", more)
    check(more > size - rank - 1 - 0.5 or is_last, "%.2f micro-batches beside the first", more)
end

-- What fails, fails in all --------------------------------------------------------------------------------------------

if not on_device then -- which would say it later
    local own = model_of("llama", {}, world)
    local good = micro_batches(6)
    for bad = 1, 6, size > 2 and 5 or 1 do
        for who = 0, size - 1, size - 1 do
            local batches = { unpack(good) }
            local wrong = te.full({ 2, SEQ }, VOCAB, { dtype = "int64" })
            batches[bad] = rank == who and (who == 0 and { wrong, good[1][2] } or { good[1][1], wrong }) or good[bad]
            local done, problem = pcall(D.pipeline_step, own, batches)
            check(not done, "batch %d of rank %d: no error", bad, who)
            local said = rank == who and ("%d"):format(VOCAB)
                or ("te.distributed.pipeline_step: rank %d failed, whose message says why"):format(who)
            check(tostring(problem):find(said, 1, true), "batch %d of rank %d: %s", bad, who, tostring(problem))
        end
    end
    own:zero_grad()
    local _, losses = D.pipeline_step(own, good) -- and the group goes on
    local one = model_of("llama", {})
    for i, loss in ipairs(accumulate(one, good)) do near("afterwards", te.full({}, losses[i]), te.full({}, loss), 0) end
end

-- What is refused -----------------------------------------------------------------------------------------------------

do
    local config = { vocab_size = 8, n_layer = size, n_head = 4, n_embd = 16, pipeline_parallel = world }
    fails(("te.models.gpt: n_layer = 1 cannot be divided between %d processes"):format(size), te.models.gpt,
        copy(config, { n_layer = 1 }))
    fails("te.models.llama: pipeline_parallel: not with experts (n_expert = 2)", te.models.llama,
        copy(config, { n_expert = 2 }))
    local own = te.models.gpt(config)
    local ids = te.zeros({ 1, 4 }, { dtype = "int64" })
    fails("GPT: divided by pipeline_parallel it is trained by te.distributed.pipeline_step", own, ids, ids)
    fails("GPT:hidden_states: not with pipeline_parallel", own.hidden_states, own, ids)
    fails("te.lora.add: model: it is divided by pipeline_parallel", te.lora.add, own)
    fails("GPT:hugging_face_state: the model is divided by pipeline_parallel", own.hugging_face_state, own)
    local nowhere = os.tmpname()
    os.remove(nowhere)
    fails("te.models.to_hugging_face: the model is divided by pipeline", te.models.to_hugging_face, own, nowhere)
    check(not te._core.stat(nowhere), "a folder is made")
    fails("te.optim.grad_clip: params: some are split", te.optim.grad_clip, own, { max = 1 })
    fails(("te.train.checkpoint.save: option group: the model is divided between %d processes, got nil"):format(size),
        te.train.checkpoint.save, { folder = "/nowhere", step = 1, model = own, optimizer = te.optim.SGD(own, {}) })
    fails("option autocast: group: Group(rank", D.pipeline_step, own, { { ids, ids } },
        { autocast = { group = world } })
    check(tostring(own):find "Identity", "%s", tostring(own))
    check(tostring(own:explain(ids)):find "Linear", "a plan takes one process")
    local twin = own:clone() -- is divided as well
    local state = D.join_state(own)
    for name, p in pairs(D.join_state(twin)) do near("a copy, " .. name, p, state[name], 0) end
    local _, want = D.pipeline_step(own, { { ids, ids } })
    local _, losses = D.pipeline_step(twin, { { ids, ids } })
    check(losses[1] == want[1], "the loss of a copy")
    check(te.optim.grad_norm(twin) == te.optim.grad_norm(own), "the norm of a copy's gradients")
end

-- Generation ----------------------------------------------------------------------------------------------------------

for _, kind in ipairs { "gpt", "llama" } do -- llama's first stage has no head
    local one, own, small = model_of(kind, {}), model_of(kind, {}, world), model_of(kind, { n_layer = 1 })
    for temperature = 0, 1 do
        for i, way in ipairs { {}, { lookup = 3 }, { assistant = small } } do
            local function generated(model)
                te.manual_seed(5)
                local options = copy(way, { temperature = temperature })
                return (model:generate({ { 1, 2, 3, 1, 2 }, { 4, 5 } }, 10, options)) -- beyond block_size
            end
            near(("%s generates, way %d"):format(kind, i), generated(own), generated(one), 0)
        end
    end
    local options = { temperature = 0, assistant = own }
    near("a divided assistant", small:generate({ { 1, 2 } }, 5, options), small:generate({ { 1, 2 } }, 5,
        { temperature = 0 }), 0)
end

-- Checkpoints and models of Transformers ------------------------------------------------------------------------------

for _, kind in ipairs { "gpt", "llama" } do
    local more = kind == "gpt" and { bias = true } or {}
    local one, own = model_of(kind, more), model_of(kind, more, world)
    te.no_grad(function()
        for _, p in ipairs(own:parameters()) do p:fill_(0) end
    end)
    own:load_hugging_face(one:hugging_face_state())
    compare_states("load_hugging_face", one, own, 0)
    local folder = os.tmpname() -- of each process
    os.remove(folder)
    te.models.to_hugging_face(one, folder)
    own = te.models.from_hugging_face(folder, { pipeline_parallel = world })
    check(own.stage, "as it was asked for")
    compare_states("from_hugging_face", one, own, 0)
    os.execute(("rm -r '%s'"):format(folder))
end

-- What is not finite in one process keeps all from saving, and that one says what it is.
do
    local ranks = te.train.ranks.new()
    check(ranks:divide_stages(size + 1) ~= nil, "processes that do not divide")
    ranks:divide_stages(size)
    check(ranks.row_ranks == 1 and ranks.holds and ranks.split.pipeline_parallel.size == size, "one model")
    local own = model_of("gpt", {}, ranks.split.pipeline_parallel)
    local optimizer = te.optim.AdamW(own:parameters())
    local guard = te.train.guard(own, ranks)
    guard:check(optimizer)
    if is_last then te.no_grad(function() own.blocks[5].mlp[2].weight:fill_(0 / 0) end) end
    local passes, problem = pcall(guard.check, guard, optimizer)
    check(not passes and problem.code == te.train.exit.not_finite, "%s", tostring(problem))
    local message = problem.message or ""
    check((message ~= "") == is_last, "who speaks: %s", message)
    check(not is_last or message:find("parameter blocks.5.mlp.2.weight", 1, true), "%s", message)
    check(guard:allows(0 / 0, 1) == false and guard:allows(0 / 0, 1) == false, "patience")
    passes, problem = pcall(guard.allows, guard, 0 / 0, 1)
    check(not passes and (problem.message ~= nil) == is_last, "who speaks at the third")
end

alike.done()
