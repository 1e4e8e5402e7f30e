-- Run by every process of a group: optimizers that are sharded over it against the same ones whole, which make the same
-- steps with the same bits. Prints "ok" and how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"

local D = te.distributed
local world, check, same = alike.world, alike.check, alike.same

-- 5 x 7 and others are no multiples; a frozen one, one that is never used, one that rank 0 alone uses; a tied one.
local function new_model(opts)
    te.manual_seed(3)
    local function inner()
        return te.Sequential(te.Linear(32, 32, { params_dtype = opts.dtype }),
            te.Linear(32, 64, { params_dtype = opts.dtype }))
    end
    local model = te.Module:extend "Model" {}
    model.inner = opts.recipe and te.quantized_model_init({ recipe = opts.recipe }, inner) or inner()
    model.odd = te.Linear(7, 5, { params_dtype = opts.dtype })
    model.tied = te.Linear(7, 5, { params_dtype = opts.dtype })
    model.tied.weight = model.odd.weight
    model.frozen = te.Linear(3, 3, { params_dtype = opts.dtype }):requires_grad_(false)
    model.idle = te.Linear(3, 3, { params_dtype = opts.dtype })
    model.lone = te.Linear(1, 1, { params_dtype = opts.dtype })
    model.large = te.Linear(256, 1024, { params_dtype = opts.dtype, bias = false })
    return model
end

local function backward(model, opts, step)
    te.manual_seed(100 * step + world.rank)
    local function rows(n) return te.randn({ 32, n }, { dtype = opts.dtype }) end
    te.autocast({ enabled = opts.recipe ~= nil, recipe = opts.recipe }, function()
        local loss = (model.inner(rows(32)):to("float32") ^ 2):mean()
            + (model.odd(rows(7)):to("float32") * model.tied(rows(7)):to("float32")):mean()
            + (model.large(rows(256)):to("float32") ^ 2):mean()
        if world.rank == 0 and step ~= 2 then loss = loss + model.lone(rows(1)):to("float32"):sum() end
        loss:backward()
    end)
end

local function set_main_grads(model)
    for _, p in ipairs(model:parameters()) do
        if p.requires_grad then p.main_grad = te.zeros(p.shape) end
    end
end

local function steps(model, optimizer, opts, first, last)
    local norms = {}
    for step = first, last do
        backward(model, opts, step)
        if opts.twice then backward(model, opts, step + 50) end
        D.average_gradients(model, { bucket_bytes = opts.bucket_bytes })
        norms[#norms + 1] = opts.clip and te.optim.clip_grad_norm(model, opts.clip) or te.optim.grad_norm(model)
        optimizer:step { grad_scale = opts.grad_scale, lr = 0.02 / step }
        optimizer:zero_grad()
    end
    return norms
end

local function groups_of(model, opts)
    local matrices, others = {}, {}
    for _, p in ipairs(model:parameters()) do table.insert(p:dim() == 2 and matrices or others, p) end
    local vectors = { params = others }
    if opts.optimizer == "Muon" then vectors.use_muon = false end
    return { { params = matrices, weight_decay = 0.1, lr_scale = 2 }, vectors }
end

local function new_optimizer(model, opts)
    local options = { lr = 0.01 }
    for name, value in pairs(opts.options or {}) do options[name] = value end
    return te.optim[opts.optimizer or "AdamW"](groups_of(model, opts), options)
end

local function same_state(what, a, b)
    for i = 1, math.max(#a.state, 20) do
        check((a.state[i] == nil) == (b.state[i] == nil), "%s: state %d is there in one", what, i)
        for name, value in pairs(a.state[i] or {}) do
            local other = b.state[i][name]
            if te.is_tensor(value) then
                check(other ~= nil and other.dtype == value.dtype, "%s: state %d, %s", what, i, name)
                same(("%s: state %d, %s"):format(what, i, name), value, other)
            else
                check(value == other, "%s: state %d, %s: %s, %s", what, i, name, value, other)
            end
        end
    end
end

-- Two steps, the optimizer's state, two more by a new optimizer that goes on from `saved` or that state; and the
-- module's state then.
local function run(opts, shard, saved)
    local model = new_model(opts)
    if opts.main_grad then set_main_grads(model) end
    local optimizer = new_optimizer(model, opts)
    if shard and not opts.late then D.shard_optimizer(optimizer) end
    local norms = steps(model, optimizer, opts, 1, 2)
    if shard and opts.late then D.shard_optimizer(optimizer) end
    local between = optimizer:state_dict()
    optimizer = new_optimizer(model, opts)
    if shard then D.shard_optimizer(optimizer) end
    optimizer:load_state_dict(saved or between)
    steps(model, optimizer, opts, 3, 4)
    local state = model:state_dict() -- before the forward of another model has histories go on
    for name, tensor in pairs(state) do state[name] = tensor:clone() end
    return norms, between, state
end

-- The same with a whole optimizer and with a sharded one, which goes on from the state of the other kind.
local function compare(name, opts)
    local norms, saved, whole = run(opts)
    local others, sharded, state = run(opts, true, saved)
    for i, norm in ipairs(norms) do
        check(math.abs(norm / others[i] - 1) < 1e-6, "%s: norms %g, %g", name, norm, others[i])
    end
    if not opts.clip then same_state(name, saved, sharded) end
    local _, _, again = run(opts, false, sharded)
    for key, tensor in pairs(whole) do
        if opts.clip then
            alike.near(name .. " " .. key, state[key], tensor, 1e-5)
        else
            same(name .. " " .. key, state[key], tensor)
            same(name .. " " .. key, again[key], tensor)
        end
    end
end

compare("AdamW", {})
compare("AdamW, small buckets", { bucket_bytes = 16 })
compare("AdamW, clipped", { clip = 0.01 })
compare("AdamW, scaled", { grad_scale = 0.5, twice = true })
compare("AdamW, sharded late", { late = true })
compare("SGD", { optimizer = "SGD", options = { momentum = 0.9, nesterov = true } })
compare("bfloat16", { dtype = "bfloat16" })
compare("masters", { dtype = "bfloat16", options = { master_weights = true } })
compare("main_grad", { dtype = "bfloat16", options = { master_weights = true }, main_grad = true, twice = true })
compare("Muon", { optimizer = "Muon" })
compare("Muon, masters", { optimizer = "Muon", dtype = "bfloat16", options = { master_weights = true } })
compare("MXFP8", { recipe = te.recipe.MXFP8BlockScaling {} })
compare("MXFP8, bfloat16 masters", { recipe = te.recipe.MXFP8BlockScaling {},
    options = { master_dtype = "bfloat16" } })
compare("delayed", { recipe = te.recipe.DelayedScaling {} })

alike.done()
