-- Run by every process of a group: models whose blocks are divided between them against the same in one. Prints "ok"
-- and how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"

local D = te.distributed
local world, check, near, fails = alike.world, alike.check, alike.near, alike.fails
local rank, size = world.rank, world.size
local is_last = rank == size - 1

local function copy(t, more)
    local made = {}
    for name, value in pairs(t) do made[name] = value end
    for name, value in pairs(more or {}) do made[name] = value end
    return made
end

local VOCAB, SEQ = 29, 8

local function model_of(kind, more, group)
    te.manual_seed(17)
    return te.models[kind](copy({ vocab_size = VOCAB, block_size = SEQ, n_layer = 5, n_head = 2, n_embd = 16,
        init_std = 0.2, pipeline_parallel = group }, more))
end

local function micro_batches(count)
    local list = {}
    for i = 1, count do
        list[i] = { te.randint(0, VOCAB - 1, { 2, SEQ }), te.randint(0, VOCAB - 1, { 2, SEQ }) }
    end
    return list
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
    local tolerance = case.exact and 0 or 1e-5
    check(own:num_parameters() == one:num_parameters(), "%s: %d parameters", name, own:num_parameters())
    check(own:flops_per_token() == one:flops_per_token(), "%s: operations", name)
    compare_states(name .. " at first", one, own, 0)
    local theirs, optimizers = {}, {}
    for key, parameter in one:named_parameters() do theirs[key] = parameter end
    for i, model in ipairs { one, own } do optimizers[i] = te.optim.SGD(model:parameters(), { lr = 0.1 }) end
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
        local norm = te.optim.grad_norm(one)
        near(name .. ", norm", te.full({}, te.optim.grad_norm(own)), te.full({}, norm), 1e-5)
        te.optim.clip_grad_norm(one, norm / 2)
        te.optim.clip_grad_norm(own, norm / 2)
        for _, optimizer in ipairs(optimizers) do
            optimizer:step()
            optimizer:zero_grad()
        end
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
    end
end

for i, case in ipairs(MODELS) do
    compare(("%s %d"):format(case[1], i), case, nil, { 5, 1, 2, 8 })
end
compare("in bfloat16", { "llama", {}, exact = true }, { dtype = "bfloat16" }, { 4, 3 })

alike.done()
