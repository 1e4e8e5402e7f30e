-- Run by every process of a group: layers that are split between them against the same layers whole. Prints "ok" and
-- how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"

local world, check, near = alike.world, alike.check, alike.near

local function rows(t) return t:narrow(1, world.rank * t.shape[1] / world.size + 1, t.shape[1] / world.size) end
local function columns(t) return t:narrow(2, world.rank * t.shape[2] / world.size + 1, t.shape[2] / world.size) end

local function mlp(opts)
    te.manual_seed(7)
    local function layer(mode, n_in, n_out)
        return te.Linear(n_in, n_out, { params_dtype = opts.dtype, tensor_parallel_mode = opts.split and mode or nil,
            sequence_parallel = opts.split and opts.sequence })
    end
    local model = te.Sequential(te.LayerNorm(12, { params_dtype = opts.dtype }), layer("column", 12, 24), te.GELU(),
        layer("row", 24, 12))
    te.no_grad(function()
        te.manual_seed(8)
        local biases = { te.randn({ 24 }), te.randn({ 12 }) }
        model[2].bias:copy_(opts.split and rows(biases[1]) or biases[1])
        model[4].bias:copy_(biases[2])
    end)
    return model
end

local function run(model, x, target)
    local y = model(x)
    local loss = ((y - target) ^ 2):sum()
    loss:backward()
    return y, loss
end

-- One forward and backward of both forms, and some steps.
local function compare(opts, tolerance)
    local whole, split = mlp { dtype = opts.dtype }, mlp { dtype = opts.dtype, split = true, sequence = opts.sequence }
    te.manual_seed(9)
    local n = 4 * world.size
    local x, target = te.randn({ n, 12 }, { dtype = opts.dtype }), te.randn({ n, 12 }, { dtype = opts.dtype })
    local own = opts.sequence and rows or function(t) return t end
    local whole_x, split_x = x:clone(), own(x):clone()
    whole_x.requires_grad, split_x.requires_grad = true, true
    local y, loss = run(whole, whole_x, target)
    local part, part_loss = run(split, split_x, own(target))
    if opts.sequence then part_loss = world:all_reduce(part_loss:detach()) end
    near("y", part, own(y), tolerance)
    near("loss", part_loss, loss, tolerance)
    near("dx", split_x.grad, own(whole_x.grad), tolerance)
    local norm_grad = split[1].weight.grad
    if opts.sequence then norm_grad = world:all_reduce(norm_grad) end
    near("norm weight", norm_grad, whole[1].weight.grad, tolerance)
    near("column weight", split[2].weight.grad, rows(whole[2].weight.grad), tolerance)
    near("column bias", split[2].bias.grad, rows(whole[2].bias.grad), tolerance)
    near("row weight", split[4].weight.grad, columns(whole[4].weight.grad), tolerance)
    near("row bias", split[4].bias.grad, whole[4].bias.grad, tolerance)
    if opts.sequence then return end -- gradients of norms are parts

    local norm, single = te.optim.grad_norm(whole), math.max(tolerance, 1e-7) -- squares of a tensor are a float32
    near("norm of all gradients", te.full({}, te.optim.grad_norm(split)), te.full({}, norm), single)
    check(not pcall(te.optim.grad_clip, split, { max = 1 }) or world.size == 1, "clipped by what is here")
    for _, model in ipairs { split:parameters(), whole } do te.optim.clip_grad_norm(model, norm / 8) end
    near("clipped norm weight", split[1].weight.grad, whole[1].weight.grad, single)
    near("clipped column weight", split[2].weight.grad, rows(whole[2].weight.grad), single)
    if world.rank == 0 then split[4].weight.grad:fill_(1 / 0) end
    local infinite, broken = te.optim.grad_norm(split)
    check(infinite == 1 / 0 and #broken == (world.rank == 0 and 1 or 0), "norm %s", infinite)
end

compare({ dtype = "float32" }, 1e-5)
compare({ dtype = "float64" }, 1e-13)
compare({ dtype = "bfloat16" }, 0.05)
compare({ dtype = "float32", sequence = true }, 1e-5)
compare({ dtype = "float64", sequence = true }, 1e-13)

-- Collectives as modules, by themselves and between fused groups.
do
    local x = te.full({ 2 * world.size, 3 }, world.rank + 1, { requires_grad = true })
    local total = world.size * (world.size + 1) / 2
    local y = te.Sequential(te.ConstantScale(2), te.AllReduce(), te.ReLU())(x)
    near("AllReduce", y, te.full(x.shape, 2 * total), 0)
    y:sum():backward()
    near("its gradient", x.grad, te.full(x.shape, 2), 0)
    x.grad = nil
    te.AllReduce { reduce_in_backward = true }(x):sum():backward()
    near("its gradient, added", x.grad, te.full(x.shape, world.size), 0)
    x.grad = nil
    local gathered = te.AllGather()(x)
    check(gathered.shape[1] == 2 * world.size ^ 2, "AllGather has %d rows", gathered.shape[1])
    te.mul(gathered, world.rank + 1):sum():backward()
    near("AllGather's gradient", x.grad, te.full(x.shape, total), 0)
    x.grad = nil
    local part = te.ReduceScatter()(x)
    near("ReduceScatter", part, te.full({ 2, 3 }, total), 0)
    te.mul(part, world.rank + 1):sum():backward()
    for r = 0, world.size - 1 do near("its gradient", x.grad:narrow(1, 2 * r + 1, 2), te.full({ 2, 3 }, r + 1), 0) end
end

-- Delayed scaling: factors of all processes' amaxes are those of one process that saw everything.
do
    local recipe = te.recipe.DelayedScaling { amax_history_len = 4 }
    te.manual_seed(3)
    local shared = te.Linear(32, 32)
    te.manual_seed(3)
    local whole = te.Linear(32, 32)
    te.manual_seed(4)
    for _ = 1, 3 do
        local x = te.randn({ 4 * world.size, 32 })
        local function step(layer, input, group)
            te.autocast({ recipe = recipe, group = group }, function() return layer(input) ^ 2 end):sum():backward()
        end
        step(shared, rows(x):clone(), world)
        step(whole, x, nil)
    end
    local a, b = shared:state_dict(), whole:state_dict()
    for _, name in ipairs { "input_scale", "input_amax_history", "weight_scale", "grad_output_scale" } do
        near(name, a[name], b[name], 0)
    end
end

-- Steps with and without quantized products: the losses are those of the whole model. Sums in another order may round
-- a quantized value otherwise.
local function losses(recipe, is_split, sequence)
    te.manual_seed(7)
    local function layer(mode, n_in, n_out)
        return te.Linear(n_in, n_out, { tensor_parallel_mode = is_split and mode or nil,
            sequence_parallel = is_split and sequence })
    end
    local model = te.Sequential(layer("column", 32, 192), te.GELU(), layer("row", 192, 32))
    local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.01 })
    te.manual_seed(5)
    local own = is_split and sequence and rows or function(t) return t end
    local x, target = own(te.randn { 32 * world.size, 32 }), own(te.randn { 32 * world.size, 32 })
    local scope, all = { recipe = recipe, enabled = recipe ~= nil, group = is_split and world or nil }, {}
    for step = 1, 5 do
        local y = te.autocast(scope, function() return model(x) end)
        local loss = ((y - target) ^ 2):sum()
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
        loss = loss:detach()
        all[step] = is_split and sequence and world:all_reduce(loss) or loss
    end
    return all
end

for _, name in ipairs { "none", "DelayedScaling", "MXFP8BlockScaling" } do
    local recipe = name ~= "none" and te.recipe[name]() or nil
    local whole = losses(recipe, false)
    for _, sequence in ipairs { false, true } do
        for step, loss in ipairs(losses(recipe, true, sequence)) do
            near(("%s, loss %d"):format(name, step), loss, whole[step], recipe and 1e-3 or 1e-5)
        end
    end
end

-- Models that one process has let go and others have not yet, and one that a single process runs.
do
    local recipe = te.recipe.DelayedScaling { amax_history_len = 4 }
    local function forward(layer, input, group)
        return te.autocast({ recipe = recipe, group = group }, function() return layer(input) end)
    end
    local gone, kept, own = te.Linear(32, 32), te.Linear(32, 32), te.Linear(32, 32)
    local x = te.full({ 4, 32 }, world.rank + 1)
    forward(gone, x, world)
    if world.rank == 0 then
        gone = nil
        collectgarbage()
        collectgarbage()
    end
    for _ = 1, 2 do forward(kept, x, world):sum():backward() end
    if world.rank == 0 then forward(own, x, nil) end
    near("scale of a model that is left", kept:state_dict().input_scale, te.full({ 1 }, 448 / world.size), 0)
    check(world.rank == 0 or gone, "the others keep it")
end

-- One that is gone in a process where a finalizer still reaches it.
do
    local recipe = te.recipe.DelayedScaling { amax_history_len = 4 }
    local function step(layer)
        te.autocast({ recipe = recipe, group = world }, layer, te.full({ 4, 32 }, world.rank + 1)):sum():backward()
    end
    local gone, kept, reached = te.Linear(32, 32), te.Linear(32, 32), nil
    step(gone)
    if world.rank == 0 then
        local layer, guard = gone, newproxy(true)
        getmetatable(guard).__gc = function() reached = layer end
        gone = nil
    end
    collectgarbage()
    for _ = 1, 2 do step(kept) end
    near("scale beside a finalizer's model", kept:state_dict().input_scale, te.full({ 1 }, 448 / world.size), 0)
    check(world.rank > 0 or reached, "the finalizer has run")
end

-- Backward passes that reach no product of the group are of one process, and so is a step beside evaluations.
do
    local recipe = te.recipe.DelayedScaling { amax_history_len = 4 }
    te.manual_seed(1)
    local shared, alone, own = te.Linear(32, 32), te.Linear(2, 2), te.Linear(32, 32)
    local function forward(layer, group, of)
        return te.autocast({ recipe = of or recipe, group = group }, function() return layer(te.ones { 16, 32 }) end)
    end
    local function step(factor) (forward(shared, world) * factor):sum():backward() end
    step(100)
    local dgrad = shared:state_dict().grad_output_scale:item()
    if world.rank == 0 then
        alone(te.ones { 1, 2 }):sum():backward()
        forward(own):sum():backward()
    end
    step(world.rank == 0 and 100 or 50)
    te.no_grad(forward, shared, world)
    if world.rank == 0 then
        forward(own):sum():backward()
        local others = te.Sequential(te.Linear(32, 32))
        forward(function(x) return others:explain(x) end, world)
        te.no_grad(forward, te.Linear(32, 32), world)
    end
    te.autocast({ recipe = recipe, group = world }, function()
        (te.Linear(32, 32)(te.ones { 16, 32 }) + shared(te.ones { 16, 32 })):sum():backward()
    end)
    local state = shared:state_dict()
    for _, name in ipairs { "input_scale", "weight_scale", "grad_output_scale" } do
        local all = world:all_gather(state[name]):totable()
        for rank, scale in ipairs(all) do check(scale == all[1], "%s of rank %d: %g", name, rank - 1, scale) end
    end
    near("an amax of the process that has the largest", state.grad_output_scale, te.full({ 1 }, dgrad), 0)

    local y = forward(shared, world)
    if world.size > 1 then
        local text = "option reduce_amax: the processes differ: rank " .. world.rank
        local loss = y:sum()
        if world.rank == 0 then alike.fails(text, forward, shared, world) else alike.fails(text, te.backward, loss) end
    end
end

-- What is exchanged does not grow with models that are no more in any process.
do
    local recipe, lengths = te.recipe.DelayedScaling { amax_history_len = 4 }, {}
    local function step()
        local layer, x = te.Linear(32, 32), te.ones { 16, 32 }
        te.autocast({ recipe = recipe, group = world }, layer, x):sum():backward()
    end
    world.all_reduce_ = function(self, x, op)
        lengths[#lengths + 1] = x:numel()
        return getmetatable(self).all_reduce_(self, x, op)
    end
    for _ = 1, 8 do
        step()
        collectgarbage()
        collectgarbage()
    end
    world.all_reduce_ = nil
    check(world.size == 1 or lengths[#lengths] <= lengths[1], "%d numbers, then %d", lengths[1] or 0,
        lengths[#lengths] or 0)
    check(#lengths == (world.size > 1 and 24 or 0), "%d exchanges", #lengths)
end

-- A plan takes one process; the others are not asked.
do
    local options = { tensor_parallel_mode = "column", sequence_parallel = true }
    local first = te.Linear(4, 2 * world.size, options)
    options.tensor_parallel_mode = "row"
    local model = te.Sequential(first, te.GELU(), te.Linear(2 * world.size, 4, options), te.Linear(4, 4, {
        tensor_parallel_mode = world.size == 2 and "column" or nil }), te.AllReduce())
    local plan = world.rank == 0 and model:explain(te.ones { 3, 4 })
    check(not plan or tostring(plan):find "AllGather.*ReduceScatter.*AllReduce", "%s", tostring(plan))
    check(not plan or model:explain(te.ones { 3, 4 }).forward[1].name == plan.forward[1].name, "and again")
    near("what runs", model(te.ones { 3, 4 }), model(te.ones { 3, 4 }), 0) -- with all
    local failed = world.rank == 0 and pcall(model.explain, model, te.ones { 3, 5 })
    check(not failed, "a plan of what cannot run")
    near("what runs then", model(te.ones { 3, 4 }), model(te.ones { 3, 4 }), 0)
end

if world.size == 1 then return end
local wrong, message = pcall(te.Linear, 3 * world.size + 1, 4, { tensor_parallel_mode = "row" })
check(not wrong and message:find("in_features = %d+ cannot be split between"), "%s", tostring(message))

alike.done()
