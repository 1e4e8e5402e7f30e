-- Run by every process of a group: what sharded optimizers do with parts of layers and experts, with parameters that
-- are moved or come later, and what they refuse; four processes also measure memory. Prints "ok" and how many checks
-- were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"
local side_by_side = require "spec.support.side_by_side"

local D = te.distributed
local world, check, near, same, fails = alike.world, alike.check, alike.near, alike.same, alike.fails
local rank, size = world.rank, world.size

-- Layers of which neighbouring processes have halves, experts of which each process has some, and what all have.
local function new_model(pair, experts)
    te.manual_seed(5)
    local model = te.Module:extend "Model" {}
    model.norm = te.LayerNorm(6)
    model.up = te.Linear(6, 10, { tensor_parallel_mode = "column", tensor_parallel_group = pair })
    model.down = te.Linear(10, 6, { tensor_parallel_mode = "row", tensor_parallel_group = pair })
    if experts then model.experts = te.MoE(6, 8, 2 * experts.size, { group = experts }) end
    return model
end

local function steps(model, optimizer, group, rows_of)
    local norms = {}
    for step = 1, 3 do
        te.manual_seed(10 * step + rows_of)
        local x = te.randn { 8, 6 }
        local y = model.down(te.gelu(model.up(model.norm(x))))
        if model.experts then y = y + model.experts(x) end
        local loss = (y ^ 2):mean()
        loss:backward()
        norms[step] = side_by_side.averaged_step(model, optimizer, group, { lr = 0.02 })
    end
    return norms
end

local function parts(pair, group, experts, name)
    for _, kind in ipairs { "AdamW", "Muon" } do
        local function made(sharded)
            local model, matrices, vectors = new_model(pair, experts), { params = {} }, { params = {} }
            for _, p in ipairs(model:parameters()) do table.insert((p:dim() > 1 and matrices or vectors).params, p) end
            if kind == "Muon" then vectors.use_muon = false end
            local optimizer = te.optim[kind] { matrices, vectors }
            if sharded then D.shard_optimizer(optimizer, group) end
            return model, optimizer, steps(model, optimizer, group, math.floor(rank / pair.size))
        end
        local whole, reference, norms = made(false)
        local model, optimizer, others = made(true)
        local what = ("%s, %s"):format(name, kind)
        side_by_side.same_norms(what, norms, others)
        side_by_side.same_states(what, whole, reference, model, optimizer)
    end
end

if size == 4 then
    local pair, across = world:split(math.floor(rank / 2)), world:split(rank % 2)
    parts(pair, world, nil, "pairs")
    parts(pair, world, world, "pairs, experts of all")
    parts(pair, across, nil, "pairs, each half by itself")
    parts(world:split(rank), world, pair, "experts of pairs")
end

-- Parts that are not of the same size: three rows of five, and two.
local function uneven()
    local pair = size == 2 and world or world:split(math.floor(rank / 2))
    local function made(sharded)
        te.manual_seed(5)
        local model = te.models.gpt { n_layer = 1, n_head = 2, n_embd = 8, vocab_size = 5, block_size = 4,
            tensor_parallel = pair }
        local optimizer = te.optim.AdamW(model)
        if sharded then D.shard_optimizer(optimizer) end
        for step = 1, 2 do
            local ids = te.tensor({ { 0, 4, 3, (step + math.floor(rank / 2)) % 5 } }, { dtype = "int32" })
            local _, loss = model(ids, ids)
            loss:backward()
            D.average_gradients(model)
            optimizer:step { lr = 0.02 }
            optimizer:zero_grad()
        end
        return model, optimizer
    end
    local whole, reference = made(false)
    side_by_side.same_states("uneven parts", whole, reference, made(true))
end
uneven()

-- Converted after sharding, and parameters that come later.
local function later()
    local function made(sharded)
        te.manual_seed(6)
        local model = te.Sequential(te.Linear(5, 7), te.Linear(7, 3))
        local optimizer = te.optim.SGD(model[1]:parameters(), { lr = 0.1, momentum = 0.9 })
        if sharded then D.shard_optimizer(optimizer) end
        for step = 1, 4 do
            te.manual_seed(10 * step + rank)
            if step == 2 then optimizer:add_group { params = model[2]:parameters(), lr_scale = 2 } end
            if step == 3 then model:to "bfloat16" end
            local x = te.randn({ 4, 5 }, { dtype = step > 2 and "bfloat16" or "float32" })
            local loss = (model(x):to("float32") ^ 2):mean()
            loss:backward()
            D.average_gradients(model)
            optimizer:step()
            optimizer:zero_grad()
        end
        return model, optimizer
    end
    local whole, reference = made(false)
    local model, optimizer = made(true)
    for i, p in ipairs(whole:parameters()) do same("parameter " .. i, p, model:parameters()[i]) end
    same("momentum", reference:state_dict().state[3].momentum_buffer, optimizer:state_dict().state[3].momentum_buffer)
    check(optimizer:step_counts()[1] == 4 and optimizer:step_counts()[3] == 3, "counts")
end
later()

-- What is written to parameters between steps counts for their masters.
do
    local layer = te.Linear(4, 4, { params_dtype = "bfloat16", bias = false })
    local optimizer = D.shard_optimizer(te.optim.SGD(layer, { lr = 1, master_weights = true }))
    for step = 1, 2 do
        te.no_grad(layer.weight.fill_, layer.weight, 4 * step)
        layer.weight.grad = te.ones({ 4, 4 }, { dtype = "bfloat16" })
        D.average_gradients(layer)
        optimizer:step()
        optimizer:zero_grad()
        same("what was written", layer.weight, te.full({ 4, 4 }, 4 * step - 1))
    end
end

local function refusals()
    local layer = te.Linear(3, 3)
    local optimizer = D.shard_optimizer(te.optim.AdamW(layer))
    check(optimizer.sharding ~= nil, "sharded")
    local function backward() layer(te.ones { 2, 3 }):sum():backward() end
    backward()
    local unaveraged = "the gradient of a sharded parameter {3,3} was not averaged: te.distributed.average_gradients"
    fails("te.optim.grad_norm: " .. unaveraged, te.optim.grad_norm, layer)
    fails("te.optim.AdamW:step: " .. unaveraged, optimizer.step, optimizer)
    fails("is sharded over " .. tostring(world), D.average_gradients, layer, { group = world:split(0) })
    D.average_gradients(layer)
    check(layer.weight.grad == nil, "the gradient is still there")
    fails("option clip: not of a sharded optimizer", optimizer.step, optimizer, { clip = te.ones { 3 } })
    fails("some are split between processes", te.optim.grad_clip, layer, { max = 1 })
    local before = te.optim.grad_norm(layer)
    D.average_gradients(layer) -- nothing has come since
    check(te.optim.grad_norm(layer) == before, "averaged once more")
    backward()
    fails("was not averaged", optimizer.step, optimizer)
    D.average_gradients(layer)
    check(math.abs(te.optim.grad_norm(layer) / before - 2) < 1e-6, "gradients add up")
    te.optim.clip_grad_norm(layer, 1)
    near("clipped", te.full({}, te.optim.grad_norm(layer)), te.ones {}, 1e-6)
    optimizer:step()
    optimizer:zero_grad()
    fails("add_group: parameter 2 of a group came before", optimizer.add_group, optimizer,
        { params = { te.zeros { 2 }, layer.weight } })
    fails("add_group: parameter 1 of a group came before", optimizer.add_group, optimizer, { params = layer })
    fails("add_group: group: expected a table { params = … }, got 3", optimizer.add_group, optimizer, 3)
    fails("it is sharded already", D.shard_optimizer, optimizer)
    fails("te.distributed.shard_optimizer: optimizer: expected an optimizer, got 3", D.shard_optimizer, 3)
    fails("te.distributed.shard_optimizer: group: expected a group", D.shard_optimizer, te.optim.SGD(layer), 3)
    local state = optimizer:state_dict()
    state.state[1].exp_avg = te.zeros { 2 }
    fails("parameter 1: exp_avg has shape {2}", optimizer.load_state_dict, optimizer, state)
    local params = optimizer.groups[1].params
    params[#params + 1] = te.zeros({ 2 }, { requires_grad = true })
    fails("te.optim.AdamW:step: a parameter {2} was put into a group of a sharded optimizer", optimizer.step, optimizer)
    params[#params] = nil
    local other = D.shard_optimizer(te.optim.AdamW(layer))
    fails("is that of an optimizer that was made later", optimizer.step, optimizer)
    backward()
    D.average_gradients(layer)
    other:step()
    local plain = te.optim.AdamW(layer)
    fails("is that of an optimizer that was made later", other.step, other)
    layer.weight.grad, layer.bias.grad = nil, nil
    backward()
    D.average_gradients(layer)
    check(layer.weight.grad ~= nil and te.optim.grad_norm(layer) > 0, "no gradient")
    plain:step()
    plain, other = nil, setmetatable({ layer.weight, other.order[1] }, { __mode = "v" })
    layer, optimizer = nil, nil
    collectgarbage() collectgarbage()
    check(plain == nil and next(other) == nil, "a parameter or its slice is kept")
    local odd = te.zeros({ rank == 0 and 2 or 3 }, { requires_grad = true })
    fails("parameter 1 is float32 {" .. (rank == 0 and 2 or 3) .. "} here, and another tensor in another process",
        D.shard_optimizer, te.optim.SGD { odd })
    local quantized = te.quantized_model_init({ recipe = te.recipe.MXFP8BlockScaling {} }, te.Linear, 32, 32)
    local sharded = D.shard_optimizer(te.optim.SGD(quantized))
    for time = 1, 2 do
        te.autocast({ recipe = te.recipe.MXFP8BlockScaling {} }, quantized, te.ones { 32, 32 }):sum():backward()
        if time == 1 then D.average_gradients(quantized) end
    end
    fails("stored quantized, {32,32}, was averaged before: zero_grad comes between", D.average_gradients, quantized)
    sharded:zero_grad()
end
refusals()

-- What is not finite in the share of another process is named by all.
local function guarded()
    local layer = te.Linear(2, 4)
    local optimizer = D.shard_optimizer(te.optim.SGD(layer))
    local guard = te.train.guard(layer, te.train.ranks.new())
    layer.weight.grad, layer.bias.grad = te.ones { 4, 2 }, te.ones { 4 }
    layer.weight.grad[4][2] = 0 / 0
    D.average_gradients(layer)
    check(te.optim.grad_norm(layer) ~= te.optim.grad_norm(layer), "a norm that is finite")
    for _ = 1, 2 do check(not guard:allows(1, 0 / 0), "a step is allowed") end
    local done, problem = pcall(guard.allows, guard, 1, 0 / 0)
    local said = rank > 0 and problem.message == nil
        or rank == 0 and problem.message:find("gradient weight of Linear", 1, true) ~= nil
    check(not done and said, "it says %s", tostring(problem.message))
    guard:check(optimizer)
    if rank == size - 1 then te.no_grad(layer.bias.fill_, layer.bias, 1 / 0) end
    done, problem = pcall(guard.check, guard, optimizer)
    check(not done and (rank > 0 or problem.message:find("a part in another process is not finite", 1, true)), "saved")
end
guarded()

-- A quarter of the states, of the gradients, of masters.
local function memory()
    local function current()
        collectgarbage() collectgarbage()
        return te.memory_stats().current
    end
    local layer = te.Linear(512, 512, { params_dtype = "bfloat16", bias = false })
    local bytes = 2 * 512 * 512
    local optimizer = D.shard_optimizer(te.optim.AdamW(layer, { master_weights = true }))
    local start = current()
    layer(te.ones({ 2, 512 }, { dtype = "bfloat16" })):sum():backward()
    D.average_gradients(layer)
    local gradients = current() - start
    check(gradients <= bytes / 4 + 4096, "gradients take %d bytes", gradients)
    optimizer:step()
    optimizer:zero_grad()
    local states = current() - start
    check(math.abs(states - 6 * bytes / 4) <= 16384, "states take %d bytes of %d", states, 6 * bytes)
end
if size == 4 then memory() end

alike.done()
