-- Run by every process of a group: what comes between the calls of a sharded optimizer. Prints "ok" and how many checks
-- were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"

local D = te.distributed
local world, check, same, fails = alike.world, alike.check, alike.same, alike.fails

local function backward(model, step, dtype)
    te.manual_seed(10 * step + world.rank)
    local x = te.randn({ 4, 6 }, { dtype = dtype or "float32" })
    local loss = (model(x):to("float32") ^ 2):mean()
    loss:backward()
end

-- The same done to a model whose optimizer is whole and to one whose is sharded ends with the same bits; `act` returns
-- further tensors.
local function compare(name, opts, act)
    local function made(sharded)
        te.manual_seed(3)
        local model = te.Linear(6, 5, { params_dtype = opts.dtype })
        local optimizer = te.optim.AdamW(model, { lr = 0.1, master_weights = opts.dtype ~= nil })
        if sharded then D.shard_optimizer(optimizer) end
        local results = { act(model, optimizer) }
        for _, parameter in ipairs(model:parameters()) do results[#results + 1] = parameter end
        return results
    end
    local whole, sharded = made(false), made(true)
    check(#whole == #sharded, "%s: %d and %d tensors", name, #whole, #sharded)
    for i, tensor in ipairs(whole) do same(("%s: %d"):format(name, i), sharded[i], tensor) end
end

compare("zero_grad of the model", {}, function(model, optimizer)
    for step = 1, 3 do
        model:zero_grad()
        backward(model, step)
        D.average_gradients(model)
        optimizer:step()
    end
end)

compare("a list that has parameters twice", {}, function(model, optimizer)
    backward(model, 1)
    D.average_gradients { model.weight, model.bias, model.weight, model.bias }
    optimizer:step()
end)

for _, dtype in ipairs { "bfloat16", "float64" } do
    compare("converted to " .. dtype .. " before a step", {}, function(model, optimizer)
        backward(model, 1)
        D.average_gradients(model)
        model:to(dtype)
        optimizer:step()
    end)
end

compare("converted with a main_grad", { dtype = "bfloat16" }, function(model, optimizer)
    for _, p in ipairs(model:parameters()) do p.main_grad = te.zeros(p.shape) end
    backward(model, 1, "bfloat16")
    D.average_gradients(model)
    model:to "float32"
    model:to "bfloat16"
    optimizer:step()
end)

compare("masters of what lies elsewhere and was written to", { dtype = "bfloat16" }, function(model, optimizer)
    backward(model, 1, "bfloat16")
    D.average_gradients(model)
    optimizer:step()
    optimizer:zero_grad()
    model:to "float32"
    model:to "bfloat16"
    te.no_grad(model.weight.fill_, model.weight, 0.5)
    return optimizer:state_dict().state[1].master
end)

-- States have whole tensors, also where a group was switched; others are not taken for shares.
do
    local matrix = te.ones({ 4, 3 }, { requires_grad = true })
    local optimizer = D.shard_optimizer(te.optim.Muon { matrix })
    for step = 1, 2 do
        matrix.grad = te.ones { 4, 3 }
        D.average_gradients { matrix }
        optimizer:step()
        optimizer:zero_grad()
        optimizer.use_muon = step == 2
    end
    for name, value in pairs(optimizer:state_dict().state[1]) do
        check(not te.is_tensor(value) or value:numel() == 12, "%s has shape {%s}", name,
            te.is_tensor(value) and table.concat(value.shape, ","))
    end
    local vector = te.ones({ 2 * world.size, 2 }, { requires_grad = true })
    optimizer = D.shard_optimizer(te.optim.SGD({ vector }, { momentum = 0.9 }))
    vector.grad = te.ones(vector.shape)
    D.average_gradients { vector }
    optimizer:step()
    local state = optimizer:state_dict()
    state.state[1].momentum_buffer = te.ones { 4 }
    fails(("parameter 1: momentum_buffer has shape {4}, the parameter {%d,2}"):format(2 * world.size),
        optimizer.load_state_dict, optimizer, state)
    for _, name in ipairs { "step", "zero_grad", "add_group", "state_dict", "load_state_dict", "catch_up" } do
        fails(("Optimizer:%s: called without the object"):format(name), optimizer[name])
    end
    optimizer.groups[1].params[2] = te.zeros({ 3 }, { requires_grad = true })
    fails("load_state_dict: a parameter {3} was put into a group of a sharded optimizer", optimizer.load_state_dict,
        optimizer, state)
end

-- A group that is another one elsewhere is not added.
do
    local layer = te.Linear(6, 5)
    local optimizer = D.shard_optimizer(te.optim.SGD(layer, { lr = 1 }))
    local odd = te.zeros({ world.rank == 0 and 2 or 3 }, { requires_grad = true })
    fails("SGD:add_group: parameter 1 is float32 {", optimizer.add_group, optimizer, { params = { odd } })
    layer.bias.grad = te.ones { 5 }
    D.average_gradients(layer)
    local before = layer.bias:detach():clone()
    optimizer:step()
    same("a step after a group that was refused", layer.bias, before - 1)
    check(#optimizer.groups == 1 and #optimizer:step_counts() == 2, "the group is there")
    optimizer:add_group { params = { te.zeros({ 3 }, { requires_grad = true }) } }
    check(#optimizer:state_dict().groups == 2, "a group that is alike")
end

-- What calls leave does not wait for the collector.
do
    local model = te.Sequential(te.Linear(64, 96), te.Linear(96, 65), te.Linear(65, 1024 * 8))
    local optimizer = D.shard_optimizer(te.optim.AdamW(model))
    local function step()
        for _, p in ipairs(model:parameters()) do
            local grad = te.ones(p.shape)
            p.grad = grad
            grad:release()
        end
        D.average_gradients(model)
        optimizer:step()
        optimizer:zero_grad()
    end
    step()
    collectgarbage() collectgarbage()
    local before = te.memory_stats().current
    collectgarbage "stop"
    step()
    local left = te.memory_stats().current - before
    collectgarbage "restart"
    check(left <= 4096, "a step leaves %d bytes", left)
end

alike.done()
