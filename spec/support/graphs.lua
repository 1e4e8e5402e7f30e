--- What the specs of te.graph share: values, and runs of a training step that is recorded or not.

local assert = require "luassert"
local batch = require "spec.support.tokens"
local te = require "te"

local graphs = {}

function graphs.values(t) return t:detach():to("cpu"):to("float64"):reshape(-1):totable() end

function graphs.model_on(device, opts)
    te.manual_seed(3)
    local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 1, n_head = 2, n_embd = 16,
        dropout = opts.dropout,
        quantized = opts.quantized }
    model:to(device)
    return model
end

-- Losses, norms and weights of a few steps with a changing learning rate.
local function train(device, opts)
    local model = graphs.model_on(device, opts)
    local parameters = model:parameters()
    local groups = model:parameter_groups(0.1)
    groups[2].lr_scale = 0.5
    local optimizer = te.optim.AdamW(groups, { betas = { 0.9, 0.95 } })
    local recipe = opts.recipe and opts.recipe()
    local function step(x, y)
        local loss = te.autocast({ dtype = opts.dtype or "float32", recipe = recipe }, function()
            local _, loss = model(x, y)
            return loss
        end)
        loss:backward()
        local clip = te.optim.grad_clip(parameters, { max = 0.5, loss = loss })
        optimizer:step { clip = clip }
        optimizer:zero_grad()
        return loss:detach(), clip
    end
    if opts.graph then step = te.graph(step, { batch(0, "cpu") }, { device = device, warmup = opts.warmup }) end
    te.manual_seed(17)
    local seen = {}
    for i = 1, opts.steps or 6 do
        optimizer:set_lr(0.01 / i)
        if opts.between then opts.between(i, model, optimizer) end
        local loss, clip = step(batch(i, opts.graph and "cpu" or device))
        seen[#seen + 1] = loss:item()
        for _, v in ipairs(clip:totable()) do seen[#seen + 1] = v end
    end
    local kept, names = model:state_dict(), {}
    for name in pairs(kept) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do
        for _, v in ipairs(graphs.values(kept[name])) do seen[#seen + 1] = v end
    end
    return seen, optimizer:state_dict(), te.rng_state()
end

function graphs.equal_bits(expected, seen)
    assert.same(#expected, #seen)
    for i = 1, #expected do
        if expected[i] ~= seen[i] then
            error(("value %d is %.17g, in the graph %.17g"):format(i, expected[i], seen[i]), 2)
        end
    end
end

function graphs.equal_runs(device, opts)
    local expected, expected_state, expected_rng = train(device, opts)
    opts.graph = true
    local seen, state, rng = train(device, opts)
    graphs.equal_bits(expected, seen)
    assert.same(expected_rng, rng)
    for i, entry in pairs(expected_state.state) do
        assert.same(entry.step, state.state[i].step)
        assert.same(graphs.values(entry.exp_avg), graphs.values(state.state[i].exp_avg))
    end
end

return graphs
