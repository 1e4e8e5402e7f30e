--- te.graph: a recorded training step has the bits of the one that is run, whatever changes from step to step; what
--- cannot be recorded says so. On a device without graphs the function runs.

local batch = require "spec.support.tokens"
local cards = require "spec.support.device"
local te = require "te"

local devices, reason = te.devices()

local function values(t) return t:detach():to("cpu"):to("float64"):reshape(-1):totable() end

local function model_on(device, opts)
    te.manual_seed(3)
    local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 1, n_head = 2, n_embd = 16,
        dropout = opts.dropout,
        quantized = opts.quantized }
    model:to(device)
    return model
end

-- Losses, norms and weights of a few steps with a changing learning rate.
local function train(device, opts)
    local model = model_on(device, opts)
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
        for _, v in ipairs(values(kept[name])) do seen[#seen + 1] = v end
    end
    return seen, optimizer:state_dict(), te.rng_state()
end

local function equal_bits(expected, seen)
    assert.same(#expected, #seen)
    for i = 1, #expected do
        if expected[i] ~= seen[i] then
            error(("value %d is %.17g, in the graph %.17g"):format(i, expected[i], seen[i]), 2)
        end
    end
end

local function equal_runs(device, opts)
    local expected, expected_state, expected_rng = train(device, opts)
    opts.graph = true
    local seen, state, rng = train(device, opts)
    equal_bits(expected, seen)
    assert.same(expected_rng, rng)
    for i, entry in pairs(expected_state.state) do
        assert.same(entry.step, state.state[i].step)
        assert.same(values(entry.exp_avg), values(state.state[i].exp_avg))
    end
end

describe("te.graph without graphs", function()
    it("runs the function", function()
        local calls = 0
        local double = te.graph(function(x)
            calls = calls + 1
            return x * 2
        end, { te.zeros({ 2 }, { device = "cpu" }) })
        for i = 1, 4 do assert.same({ 2 * i, 4 * i }, double(te.tensor { i, 2 * i }):totable()) end
        assert.same(4, calls)
    end)

    it("says what does not fit the recording", function()
        local double = te.graph(function(x) return x * 2 end, { te.zeros { 2 } })
        assert.has_error(function() double(te.zeros { 3 }) end,
            "te.graph: input 1 is float32 {3}, recorded with float32 {2}")
        assert.has_error(function() double() end, "te.graph: 0 inputs, recorded with 1")
        assert.has_error(function() double(5) end, "te.graph: input 1: expected a tensor, got number 5")
        assert.error_matches(function() te.graph(3, {}) end, "te%.graph: fn: expected callable, got 3")
    end)

    it("makes steps whose clipping stays on the device with the bits of others", function()
        local function weights(clipped)
            te.manual_seed(2)
            local layer = te.Linear(5, 3)
            local optimizer = te.optim.AdamW({ { params = { layer.weight }, lr_scale = 0.5 },
                { params = { layer.bias } } }, { lr = 0.1 })
            for i = 1, 3 do
                ((layer(te.full({ 4, 5 }, i)) - 1) ^ 2):sum():backward()
                if clipped then
                    optimizer:step { clip = te.optim.grad_clip(layer, { max = 1, scale = 0.5 }) }
                else
                    local norm, scale = te.optim.grad_norm(layer) * 0.5, 0.5
                    if norm > 1 then scale = scale * 1 / norm end
                    optimizer:step { grad_scale = scale }
                end
                optimizer:zero_grad()
            end
            return values(layer.weight)
        end
        assert.same(weights(false), weights(true))
    end)

    it("leaves the weights alone when the loss is not finite", function()
        local layer = te.Linear(2, 2)
        local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
        layer(te.ones { 1, 2 }):sum():backward()
        local before = values(layer.weight)
        local clip = te.optim.grad_clip(layer, { loss = te.tensor(0 / 0) })
        optimizer:step { clip = clip }
        assert.same(0, clip:totable()[3])
        assert.same(before, values(layer.weight))
        optimizer:take_back()
        assert.same(0, optimizer:state_dict().state[1].step)
    end)

    it("takes back no step but the last one, also where that had no gradients", function()
        local layer = te.Linear(2, 2, { bias = false })
        local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
        for i, loss in ipairs { 1, 1, 0 / 0 } do
            layer.weight.grad = i < 3 and te.ones { 2, 2 } or nil
            local clip = te.optim.grad_clip(layer, { loss = te.tensor(loss) })
            optimizer:step { clip = clip }
            if clip:totable()[3] == 0 then optimizer:take_back() end
        end
        assert.same(2, optimizer:state_dict().state[1].step)
    end)
end)

describe("te.graph on a CUDA device", function()
    if not devices[2] then
        pending(reason)
        return
    end

    it("trains with the bits of the step that is run", function() equal_runs("cuda", { dropout = 0 }) end)

    it("goes on with random numbers, step counts and the learning rate",
        function() equal_runs("cuda", { dropout = 0.2 }) end)

    it("keeps copies of weights in bfloat16 current", function()
        equal_runs("cuda", { dropout = 0.1, dtype = "bfloat16", between = function(i, model, optimizer)
            if i == 5 then -- somebody changes the weights between two launches
                te.no_grad(function()
                    for _, p in ipairs(model:parameters()) do p:mul_(0.5) end
                end)
                optimizer:set_lr(0.02)
            end
        end })
    end)

    it("keeps copies of weights apart from what it writes after it has read them", function()
        local x
        local function output(layer, dtype) return te.autocast({ dtype = dtype }, layer, x):to "float32" end
        local function run(graphed, stored, dtype, write)
            te.manual_seed(1)
            local layer = te.Linear(8, 8, { params_dtype = stored, bias = false }):to "cuda"
            local optimizer, seen = te.optim.AdamW(layer:parameters(), { lr = 0.01 }), {}
            local function step()
                local y = output(layer, dtype)
                write(layer.weight, optimizer, y)
                return y:detach()
            end
            local call = graphed and te.graph(step, { te.zeros { 1 } }, { device = "cuda", warmup = 1 }) or step
            for i = 1, 6 do
                te.no_grad(output, layer, dtype)
                for _, v in ipairs(values(call(te.zeros { 1 }))) do seen[#seen + 1] = v end
                local other = i > 3 and (dtype == "bfloat16" and "float16" or "bfloat16")
                if other then seen[#seen + 1] = te.no_grad(output, layer, other):sum():item() end
            end
            return seen
        end
        local function scale(weight) te.no_grad(weight.mul_, weight, 0.75) end
        local function update(_, optimizer, y)
            y:square():mean():backward()
            optimizer:step()
            optimizer:zero_grad()
        end
        x = te.randn({ 4, 8 }, { device = "cuda" })
        for _, dtypes in ipairs { { "float32", "bfloat16" }, { "bfloat16", "float16" }, { "bfloat16", "float32" } } do
            for _, write in ipairs { scale, update } do
                equal_bits(run(false, dtypes[1], dtypes[2], write), run(true, dtypes[1], dtypes[2], write))
            end
        end
    end)

    for _, name in ipairs { "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
        "NVFP4BlockScaling" } do
        it("trains weights that are stored quantized by " .. name, function()
            local opts = { dropout = 0, dtype = "bfloat16", quantized = name, recipe = te.recipe[name] }
            function opts.between(i, model)
                if i == 4 then -- between two launches
                    te.no_grad(function()
                        for _, p in ipairs(model:parameters()) do p:mul_(0.75) end
                    end)
                elseif i == 5 then
                    model:load_state_dict(model_on("cuda", opts):state_dict())
                end
            end
            equal_runs("cuda", opts)
        end)
    end

    it("moves delayed scaling's histories and scales along", function()
        local function recipe() return te.recipe.DelayedScaling { amax_history_len = 3 } end
        equal_runs("cuda", { dropout = 0, dtype = "bfloat16", recipe = recipe })
        local function changed(i, model)
            if i == 5 then te.no_grad(function() for _, p in ipairs(model:parameters()) do p:mul_(0.5) end end) end
        end
        equal_runs("cuda", { dropout = 0, recipe = recipe, between = changed })
    end)

    it("reads the factors that a checkpointed stretch wrote down", function()
        local function run(graphed)
            te.manual_seed(4)
            local layer = te.Sequential(te.Linear(16, 32), te.GELU(), te.Linear(32, 16)):to "cuda"
            local recipe, seen = te.recipe.DelayedScaling {}, {}
            local function step(x)
                local y = te.autocast({ recipe = recipe }, function() return te.checkpoint(layer, x) end)
                y:backward(y:detach())
                te.no_grad(function() for _, p in ipairs(layer:parameters()) do p:mul_(0.75) end end)
                return y
            end
            local call = graphed and te.graph(step, { te.zeros { 16, 16 } }, { device = "cuda" }) or step
            for i = 1, 5 do
                te.manual_seed(i)
                local x = te.randn({ 16, 16 }, { device = "cpu" }) * i
                for _, v in ipairs(values(call(x:to "cuda"))) do seen[#seen + 1] = v end
            end
            for _, p in ipairs(layer:parameters()) do
                for _, v in ipairs(values(p.grad)) do seen[#seen + 1] = v end
            end
            return seen
        end
        equal_bits(run(false), run(true))
    end)

    it("computes a checkpointed stretch again with the random numbers of its launch", function()
        local function run(graphed)
            te.manual_seed(4)
            local layer, seen = te.Linear(6, 5):to "cuda", {}
            local function step(x)
                local y = te.checkpoint(function(v) return te.dropout(layer(v), { p = 0.5 }) end, te.dropout(x, 0.5))
                y:backward(y:detach())
                return y, te.rng_state() and te.dropout(y, 0.5)
            end
            local call = graphed and te.graph(step, { te.zeros { 4, 6 } }, { device = "cuda" }) or step
            for i = 1, 5 do
                for _, y in ipairs { call(te.full({ 4, 6 }, i, { device = "cuda" })) } do
                    for _, v in ipairs(values(y)) do seen[#seen + 1] = v end
                end
            end
            for _, p in ipairs(layer:parameters()) do
                for _, v in ipairs(values(p.grad)) do seen[#seen + 1] = v end
            end
            seen[#seen + 1] = te.rng_state()
            return seen
        end
        assert.same(run(false), run(true))
    end)

    it("refuses a history of another length, which it would not see", function()
        local layer, recipe = te.Linear(16, 16):to "cuda", te.recipe.DelayedScaling { amax_history_len = 4 }
        local call = te.graph(function(x) return te.autocast({ recipe = recipe }, layer, x) end, { te.zeros { 4, 16 } },
            { device = "cuda" })
        local x = te.ones({ 4, 16 }, { device = "cuda" })
        for _ = 1, 3 do call(x) end
        local state, weight = {}, values(layer.weight)
        for name, t in pairs(layer:state_dict()) do state[name] = t:detach():clone() end
        state.weight, state.input_amax_history = te.zeros { 16, 16 }, te.zeros { 6 }
        local function load() layer:load_state_dict(state) end
        assert.error_matches(load, "the amax history of the input is read by a graph", 1, true)
        assert.same(weight, values(layer.weight))
        recipe.amax_history_len = 6
        assert.error_matches(function() te.autocast({ recipe = recipe }, layer, x) end, "is read by a graph", 1, true)
        recipe.amax_history_len = 4
        te.autocast({ recipe = recipe }, layer, x)
    end)

    it("names functions of delayed scaling, and watches, which read on the host", function()
        local layer = te.Linear(4, 4):to "cuda"
        local own = te.recipe.DelayedScaling { amax_compute_algo = function(history) return history[1] end }
        local x = te.ones { 2, 4 }
        local function graph(recipe)
            local call = te.graph(function(given) return te.autocast({ recipe = recipe }, layer, given) end, { x },
                { device = "cuda" })
            for _ = 1, 3 do call(x) end
        end
        assert.error_matches(function() graph(own) end, "option amax_compute_algo: a function runs on the host", 1,
            true)
        local watch = te.numerics.watch(layer)
        for _, recipe in ipairs { te.recipe.DelayedScaling {}, te.recipe.MXFP8BlockScaling {} } do
            assert.error_matches(function() graph(recipe) end, "te.numerics.watch: a step that is looked at", 1, true)
        end
        watch:stop()
        graph(te.recipe.MXFP8BlockScaling {})
    end)

    it("goes on from scales that were loaded after it was recorded", function()
        local function run(graphed)
            te.manual_seed(4)
            local layer, recipe, seen = te.Linear(16, 16):to "cuda",
                te.recipe.DelayedScaling { amax_history_len = 2 }, {}
            local function step(x)
                local y = te.autocast({ recipe = recipe }, layer, x)
                te.no_grad(function() layer.weight:mul_(0.75) end)
                return y
            end
            local call = graphed and te.graph(step, { te.zeros { 16, 16 } }, { device = "cuda" }) or step
            local saved
            for i = 1, 6 do
                if i == 5 then layer:load_state_dict(saved) end
                for _, v in ipairs(values(call(te.full({ 16, 16 }, 3 * i, { device = "cuda" })))) do
                    seen[#seen + 1] = v
                end
                if i == 1 then
                    saved = {}
                    for name, t in pairs(layer:state_dict()) do saved[name] = t:detach():clone() end
                end
            end
            return seen
        end
        equal_bits(run(false), run(true))
    end)

    -- Quantized copies of a weight belong to whoever made them: a recording or the work outside.
    describe("and quantized copies of weights", function()
        local function recipe() return te.recipe.Float8CurrentScaling {} end
        local function layer_of(weight)
            local layer = te.Linear(16, 16, { bias = false }):to "cuda"
            te.no_grad(function() layer.weight:copy_(weight) end)
            return layer
        end
        local function output(layer, x, r) return te.no_grad(te.autocast, { recipe = r }, layer, x) end
        local weight, x

        before_each(function()
            te.manual_seed(9)
            weight, x = te.randn({ 16, 16 }, { device = "cuda" }), te.randn({ 16, 16 }, { device = "cuda" })
        end)

        it("makes them anew in every launch", function()
            local layer, r = layer_of(weight), recipe()
            local graph = te.graph(function(v) return output(layer, v, r) end, { x }, { warmup = 1 })
            for i = 1, 4 do
                equal_bits(values(output(layer_of(layer.weight:detach()), x, r)), values(graph(x)))
                if i > 1 then te.no_grad(function() layer.weight:mul_(-1.5) end) end
            end
        end)

        it("lets none of a recording be read before it has run", function()
            local layer, r, sample = layer_of(weight), recipe(), x:clone()
            sample.requires_grad = true
            te.make_graphed_callables(function(v) return te.autocast({ recipe = r }, layer, v) end,
                { sample }, { warmup = 1 })
            equal_bits(values(output(layer_of(weight), x, r)), values(output(layer, x, r)))
        end)

        it("forgets them when a launch has changed the weight", function()
            local layer, r = layer_of(weight), recipe()
            local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
            local graph = te.graph(function(v)
                te.autocast({ recipe = r }, layer, v):sum():backward()
                optimizer:step { clip = te.optim.grad_clip(layer, { max = 1 }) }
                optimizer:zero_grad()
            end, { x }, { warmup = 1 })
            for _ = 1, 4 do
                graph(x)
                equal_bits(values(output(layer_of(layer.weight:detach()), x, r)), values(output(layer, x, r)))
            end
        end)
    end)

    it("records reductions of rows so long that several kernels share them", function()
        local function standardized(x) return (x - te.mean(x)) / te.std(x), te.log_softmax(x) end
        local recorded = te.graph(standardized, { te.zeros({ 1, 70000 }, { device = "cuda" }) })
        for i = 1, 3 do
            local x = te.randn({ 1, 70000 }, { device = "cuda" }) * i
            local y, z = standardized(x)
            local ry, rz = recorded(x)
            equal_bits(values(y), values(ry))
            equal_bits(values(z), values(rz))
        end
    end)

    it("lets go of a recording, and records again", function()
        local scale = 2
        local graph = te.graph(function(v) return v * scale end, { te.ones { 4 }:to "cuda" }, { warmup = 1 })
        for round = 1, 2 do
            for i = 1, 3 do
                local result = graph(te.full({ 4 }, 3, { device = "cuda" }))
                equal_bits({ 3 * scale, 3 * scale }, values(result:narrow(1, 1, 2)))
                assert.equal(i > 1, graph:recorded())
            end
            graph:release()
            assert.is_false(graph:recorded())
            scale = 5
        end
    end)

    it("reads weights in the compute dtype as they are now, whoever changed them", function()
        local function layers() return te.Sequential(te.Linear(32, 32), te.GELU(), te.Linear(32, 32)) end
        te.manual_seed(9)
        local model, plain = layers():to "cuda", layers():to "cuda"
        local x = te.randn({ 4, 32 }, { device = "cuda" })
        local function output(m, v, dtype) return te.no_grad(te.autocast, { dtype = dtype or "bfloat16" }, m, v) end
        local graph = te.graph(function(v) return output(model, v) end, { x }, { warmup = 1 })
        for i = 1, 9 do
            if i % 2 == 1 then
                te.no_grad(function() for _, p in ipairs(model:parameters()) do p:mul_(0.75) end end)
            end
            if i == 5 then output(model, x, "float16") end -- which has other copies of the weights made
            if i == 8 then output(model, x) end
            local state = {}
            for name, t in pairs(model:state_dict()) do state[name] = t:detach():clone() end
            plain:load_state_dict(state)
            equal_bits(values(output(plain, x)), values(graph(x)))
        end
    end)

    -- A launch makes copies of weights only where these were changed: nothing else may have been where they lie.
    it("keeps the copies of weights apart from what a launch writes before them", function()
        for _, recipe in pairs { delayed = te.recipe.DelayedScaling {}, current = te.recipe.Float8CurrentScaling {},
            blocks = te.recipe.Float8BlockScaling {}, mxfp8 = te.recipe.MXFP8BlockScaling {},
            nvfp4 = te.recipe.NVFP4BlockScaling {} } do
            te.manual_seed(9)
            local layer = te.Linear(64, 128, { bias = false }):to "cuda"
            local x = te.randn({ 16, 64 }, { device = "cuda", dtype = "bfloat16" })
            local before = te.randn({ 4, 64, 64 }, { device = "cuda", dtype = "bfloat16" })
            local function run(v)
                for i = 1, 4 do te.exp(before:select(1, i)):release() end      -- 8192 bytes each,
                for _, n in ipairs { 1, 64, 128, 256, 512, 1024 } do te.rand({ n }, { device = "cuda" }):release() end
                return te.no_grad(te.autocast, { recipe = recipe }, layer, v) -- as the codes of the weight
            end
            local expected, graph = values(run(x)), te.graph(run, { x }, { warmup = 1 })
            for _ = 1, 4 do equal_bits(expected, values(graph(x))) end
        end
    end)

    -- Of a size that bytes are padded for: copies with zeros around them are kept between products.
    it("changes weights stored quantized under products that have kept more of them", function()
        local recipe = te.recipe.Float8CurrentScaling {}
        te.manual_seed(9)
        local layer = te.quantized_model_init({ recipe = recipe }, te.Linear, 20, 21, { bias = false }):to "cuda"
        local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
        local x = te.randn({ 5, 20 }, { device = "cuda" })
        local function output() return values(te.no_grad(te.autocast, { recipe = recipe }, layer, x)) end
        local graph = te.graph(function(v)
            te.autocast({ recipe = recipe }, layer, v):sum():backward()
            optimizer:step { clip = te.optim.grad_clip(layer, { max = 1 }) }
            optimizer:zero_grad()
        end, { x }, { warmup = 1 })
        local expected = te.Linear(20, 21, { bias = false }):to "cpu"
        for _ = 1, 5 do
            graph(x)
            te.no_grad(function() expected.weight:copy_(layer.weight:detach():to("cpu"):to "float32") end)
            local wanted = values(te.no_grad(te.autocast, { recipe = recipe }, expected, x:to "cpu"))
            local most = cards.has_short_sums() and 2e-3 or 1e-4
            for _ = 1, 3 do -- seen, kept, taken
                for i, y in ipairs(output()) do assert.near(wanted[i], y, most * (1 + math.abs(y))) end
            end
        end
    end)

    -- As an input of other work, as a weight there, and where a backward pass is still to come.
    it("counts a launch as a write of what it returns", function()
        te.manual_seed(12)
        local tail = te.Linear(16, 16):to "cuda"
        local x = te.randn({ 4, 16 }, { device = "cuda" })
        local graph = te.graph(te.gelu, { te.zeros({ 4, 16 }, { device = "cuda" }) }, { warmup = 1 })
        local weight = te.graph(te.mul, { te.zeros({ 16, 16 }, { device = "cuda" }), 2 }, { warmup = 1 })
        for _, recipe in ipairs { false, te.recipe.MXFP8BlockScaling {}, te.recipe.Float8CurrentScaling {} } do
            local options = { dtype = "bfloat16", recipe = recipe or nil }
            for _ = 1, 4 do
                local h, w = graph(te.randn { 4, 16 }), weight(te.randn { 16, 16 }, 2)
                equal_bits(values(te.autocast(options, tail, h:clone())), values(te.autocast(options, tail, h)))
                equal_bits(values(te.autocast(options, te.linear, x, w:clone())),
                    values(te.autocast(options, te.linear, x, w)))
            end
        end
        local leaf = te.ones({ 4, 16 }, { device = "cuda", requires_grad = true })
        local loss = (graph(te.ones { 4, 16 }) * leaf):sum()
        graph(te.zeros { 4, 16 })
        assert.has_error(function() loss:backward() end,
            "te.mul: backward: a tensor of shape {4,16} that it saved was changed in place since")
    end)

    it("records attention of cuDNN", function() equal_runs("cuda", { dropout = 0, dtype = "bfloat16" }) end)

    it("follows another seed", function()
        equal_runs("cuda", { dropout = 0.3, between = function(i) if i == 4 then te.manual_seed(99) end end })
    end)

    it("makes two steps of an optimizer in a launch", function()
        local function run(graphed)
            te.manual_seed(1)
            local layer = te.Linear(4, 4):to "cuda"
            local optimizer, seen = te.optim.AdamW(layer:parameters(), { lr = 0.1 }), {}
            local function step(x)
                for i = 1, 2 do
                    (layer(x * i) ^ 2):sum():backward()
                    optimizer:step { clip = te.optim.grad_clip(layer, { max = 1 }) }
                    optimizer:zero_grad()
                end
            end
            local x = te.ones({ 2, 4 }, { device = "cuda" })
            local call = graphed and te.graph(step, { x }, { warmup = 1 }) or step
            for _ = 1, 4 do
                call(x)
                for _, v in ipairs(values(layer.weight)) do seen[#seen + 1] = v end
            end
            seen[#seen + 1] = optimizer:state_dict().state[1].step
            return seen
        end
        equal_bits(run(false), run(true))
    end)

    it("takes over a state that the optimizer loads, or the lack of one", function()
        local function run(graphed, of)
            te.manual_seed(1)
            local layer = te.Linear(4, 4, { bias = false }):to "cuda"
            local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1, weight_decay = 0 })
            local function step(x)
                layer(x):sum():backward()
                optimizer:step()
                optimizer:zero_grad()
            end
            local x = te.ones({ 2, 4 }, { device = "cuda" })
            local call = graphed and te.graph(step, { x }, { warmup = 1 }) or step
            local none = optimizer:state_dict()
            for _ = 1, 3 do call(x) end
            local saved = of == "nothing" and none or optimizer:state_dict()
            for _ = 1, 5 do call(-x) end
            optimizer:load_state_dict(saved)
            for _ = 1, 2 do call(x) end
            local seen, state = values(layer.weight), optimizer:state_dict().state[1]
            seen[#seen + 1] = state.step
            for _, name in ipairs { "exp_avg", "exp_avg_sq" } do
                for _, v in ipairs(values(state[name])) do seen[#seen + 1] = v end
            end
            return seen
        end
        for _, of in ipairs { "three steps", "nothing" } do equal_bits(run(false, of), run(true, of)) end
    end)

    -- The recording computes nothing, so that it cannot make up for what was written before it.
    it("sees what is written to weights with a master before it records, or while it does", function()
        local function run(graphed, stored, inside, steps)
            te.manual_seed(1)
            local recipe = stored and te.recipe.Float8BlockScaling {} or nil
            local layer = te.quantized_model_init({ recipe = recipe, enabled = stored }, te.Linear, 16, 16,
                { bias = false, params_dtype = stored and "float32" or "bfloat16" }):to "cuda"
            local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.01, master_weights = true })
            local function step(x)
                for _ = 1, steps do
                    te.autocast({ dtype = "bfloat16", recipe = recipe }, layer, x):sum():backward()
                    if inside then te.no_grad(function() layer.weight:mul_(0.75) end) end
                    optimizer:step()
                    optimizer:zero_grad()
                end
            end
            local x, seen = te.randn({ 8, 16 }, { device = "cuda" }), {}
            local call = graphed and te.graph(step, { x }, { warmup = 1 }) or step
            for i = 1, 5 do
                if i == 2 or i == 4 then te.no_grad(layer.weight.fill_, layer.weight, i) end
                call(x)
                for _, v in ipairs(values(layer.weight)) do seen[#seen + 1] = v end
            end
            return seen
        end
        for _, stored in ipairs { false, true } do
            for _, inside in ipairs { false, true } do
                for steps = 1, 2 do equal_bits(run(false, stored, inside, steps), run(true, stored, inside, steps)) end
            end
        end
    end)

    it("holds its memory while other work goes on", function()
        local kept
        equal_runs("cuda", { dropout = 0.1, between = function()
            kept = te.randn({ 64, 64 }, { device = "cuda" })
            kept = te.matmul(kept, kept)
            te.empty_cache()
        end })
        assert.same({ 64, 64 }, kept.shape)
    end)

    it("refuses a step that was recorded without parameters that were added since", function()
        local layer = te.Linear(3, 2):to "cuda"
        local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
        local step = te.graph(function(x)
            layer(x):sum():backward()
            optimizer:step()
            optimizer:zero_grad()
        end, { te.zeros { 2, 3 } }, { device = "cuda" })
        for _ = 1, 4 do step(te.ones { 2, 3 }) end
        optimizer:add_group { params = { te.ones({ 1 }, { device = "cuda", requires_grad = true }) } }
        assert.error_matches(function() step(te.ones { 2, 3 }) end,
            "te.optim.AdamW:step: parameters were added or taken away after the recording", 1, true)
    end)

    it("refuses a step whose parameters lie elsewhere since it was recorded", function()
        for _, moves in ipairs { { "cpu" }, { "cpu", "cuda" }, { "bfloat16" } } do
            local model = te.Sequential(te.Linear(3, 2), te.GELU()):to "cuda"
            local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.1 })
            local step = te.graph(function(x)
                model(x):sum():backward()
                optimizer:step()
                optimizer:zero_grad()
            end, { te.zeros { 2, 3 } }, { device = "cuda" })
            for _ = 1, 4 do step(te.ones { 2, 3 }) end
            model:to "cuda" -- where it is
            step(te.ones { 2, 3 })
            local count = optimizer:state_dict().state[1].step
            for _, where in ipairs(moves) do model:to(where) end
            local before = values(model[1].weight)
            assert.error_matches(function() step(te.ones { 2, 3 }) end,
                "te.optim.AdamW:step: parameters were moved or converted after the recording", 1, true)
            assert.same(before, values(model[1].weight))
            assert.equal(count, optimizer:state_dict().state[1].step)
        end
    end)

    it("leaves the weights alone when a launch is not finite, and goes on", function()
        local function weights(graphed)
            te.manual_seed(8)
            local layer = te.Linear(3, 2):to "cuda"
            local optimizer = te.optim.AdamW(layer:parameters(), { lr = 0.1 })
            local function step(x)
                local loss = (layer(x) ^ 2):sum()
                loss:backward()
                local clip = te.optim.grad_clip(layer, { max = 1, loss = loss })
                optimizer:step { clip = clip }
                optimizer:zero_grad()
                return clip
            end
            if graphed then step = te.graph(step, { te.zeros { 2, 3 } }, { device = "cuda" }) end
            local seen = {}
            for i, x in ipairs { 1, 2, 1 / 0, 3, 0 / 0, 4 } do
                local allowed = step(te.full({ 2, 3 }, x, { device = graphed and "cpu" or "cuda" })):totable()[3]
                assert.same((i == 3 or i == 5) and 0 or 1, allowed)
                if allowed == 0 then optimizer:take_back() end
                for _, v in ipairs(values(layer.weight)) do seen[#seen + 1] = v end
            end
            seen[#seen + 1] = optimizer:state_dict().state[1].step
            return seen
        end
        equal_bits(weights(false), weights(true))
    end)

    it("gives its memory back", function()
        local function record()
            for _, recipe in ipairs { false, te.recipe.DelayedScaling {} } do
                local layer = te.Linear(32, 32):to "cuda"
                local optimizer = te.optim.AdamW(layer:parameters(), {})
                local graph = te.graph(function(x)
                    te.autocast({ recipe = recipe or nil }, layer, x):sum():backward()
                    local clip = te.optim.grad_clip(layer, { max = 1 })
                    optimizer:step { clip = clip }
                    optimizer:zero_grad()
                    return clip
                end, { te.zeros { 32, 32 } }, { device = "cuda" })
                for _ = 1, 4 do graph(te.ones { 32, 32 }) end
            end
        end
        -- What lies on the stack from before may stay through a collection, and go later.
        local held = {}
        for i = 1, 4 do
            record()
            collectgarbage()
            collectgarbage()
            held[i] = te.memory_stats("cuda").current
        end
        assert.is_true(held[4] <= held[2], table.concat(held, " "))
    end)

    local function refuses(message, fn, warmup)
        local graph = te.graph(fn, { te.ones({ 4 }, { device = "cuda" }) }, { warmup = warmup or 1 })
        graph(te.ones { 4 })
        assert.error_matches(function() graph(te.ones { 4 }) end, message)
        local x = te.ones({ 2 }, { device = "cuda" }) -- and the device works on
        assert.same({ 3, 3 }, (x + x + x):totable())
    end

    it("names what cannot be recorded", function()
        refuses("a copy to the host cannot be part of a graph", function(x) return x * x:sum():item() end)
        refuses("a copy to the host cannot be part of a graph", function(x) return x:to "cpu" end)
        refuses("a copy from the host cannot be part of a graph", function(x)
            return x + te.tensor({ 1, 2, 3, 4 }, { device = "cuda" })
        end)
        local layer = te.Linear(4, 1):to "cuda"
        local sgd = te.optim.SGD(layer:parameters(), { lr = 0.1 })
        refuses("steps in a graph or with `clip` are AdamW's alone", function(x)
            layer(x:view { 1, 4 }):sum():backward()
            sgd:step()
            sgd:zero_grad()
            return x
        end)
        refuses("te.manual_seed: a seed of random numbers cannot be part of a graph", function(x)
            te.manual_seed(3) -- the same that the calls before have set
            return te.dropout(x, { p = 0.5 })
        end)
        refuses("te.graph: a seed of random numbers cannot be part of a graph", function(x)
            pcall(te.manual_seed, 3)
            return te.dropout(x, { p = 0.5 })
        end)
        local state = te.rng_state()
        refuses("te.rng_state: a state of random numbers cannot be part of a graph", function(x)
            te.rng_state(state)
            return te.dropout(x, { p = 0.5 })
        end)
        local attention = te.MultiHeadedSelfAttention(4, 2):to "cuda"
        refuses("the tokens in a cache grow in number and cannot be part of a graph", function(x)
            return te.KVCache():run(attention, x:view { 1, 4 })
        end)
        local calls = 0
        refuses("my own mistake", function(x)
            calls = calls + 1
            if calls == 2 then error("my own mistake") end
            return x
        end)
    end)

    it("wants the optimizer's states beforehand", function()
        local layer = te.Linear(4, 4):to "cuda"
        local optimizer = te.optim.AdamW(layer:parameters(), {})
        local first = true
        refuses("a graph needs the optimizer's states: make a step before", function(x)
            if first then
                first = false
                return x
            end
            layer(x:view { 1, 4 }):sum():backward()
            optimizer:step()
            return x
        end)
    end)

    it("reports ids out of range where the host next waits", function()
        local table_ = te.randn({ 5, 3 }, { device = "cuda" })
        local graph = te.graph(function(ids) return te.embedding(table_, ids) end,
            { te.tensor({ 0, 1 }, { dtype = "int32" }) }, { device = "cuda", warmup = 1 })
        local function look_up(...) return graph(te.tensor({ ... }, { dtype = "int32" })):totable() end
        look_up(1, 2)
        assert.same(te.embedding(table_, te.tensor({ 3, 4 }, { dtype = "int32", device = "cuda" })):totable(),
            look_up(3, 4))
        assert.error_matches(function() look_up(1, 7) end, "embedding: id 7 at position 2 is outside 0 to 4")
        assert.same(te.embedding(table_, te.tensor({ 3, 0 }, { dtype = "int32", device = "cuda" })):totable(),
            look_up(3, 0))
    end)
end)

describe("te.make_graphed_callables", function()
    for _, device in ipairs(devices[2] and { "cpu", "cuda" } or { "cpu" }) do
        it("gives results and gradients as the callable does, on " .. device, function()
            local function run(graphed)
                te.manual_seed(5)
                local layer = te.Sequential(te.Linear(4, 6), te.GELU(), te.Dropout(0.2), te.Linear(6, 3)):to(device)
                local sample = te.zeros({ 2, 4 }, { device = device, requires_grad = true })
                local fn = graphed and te.make_graphed_callables(layer, { sample }) or layer
                te.manual_seed(6)
                local seen = {}
                for i = 1, 3 do
                    local x = te.full({ 2, 4 }, i / 3, { device = device, requires_grad = true })
                    layer:zero_grad()
                    local y = fn(x)
                    y:backward(te.full({ 2, 3 }, 0.5, { device = device }))
                    for _, t in ipairs { y, x.grad, layer[1].weight.grad, layer[4].bias.grad } do
                        for _, v in ipairs(values(t)) do seen[#seen + 1] = v end
                    end
                end
                return seen
            end
            equal_bits(run(false), run(true))
        end)
    end

    if reason then return end

    it("refuses a backward alone that draws again what a forward outside drew", function()
        local x = te.randn({ 4, 6 }, { device = "cuda", requires_grad = true })
        local one = te.ones({ 2 }, { device = "cuda" })
        local y = te.checkpoint(function(v) return te.dropout(v, 0.5) end, x):sum()
        te.rand({ 3 }, { device = "cuda" })
        local g = te.graph(function(v)
            y:backward(nil, { retain_graph = true })
            return v + 1
        end, { one }, { warmup = 1 })
        g(one)
        assert.has_error(function() g(one) end,
            "te.graph: drawing random numbers from before the recording cannot be part of a graph")
    end)

    it("draws again what te.checkpoint drew in forward, whatever others draw in between", function()
        local layer = te.Linear(6, 6):to("cuda")
        local function stretch(v) return te.dropout(layer(te.dropout(v, 0.3)), 0.5) end
        local function block(x) return te.dropout(te.checkpoint(stretch, x), 0.2) end
        local sample = te.randn({ 4, 6 }, { device = "cuda", requires_grad = true })
        local graphed = te.make_graphed_callables(block, { sample })
        for seed = 1, 3 do
            local got = {}
            for i, fn in ipairs { block, graphed } do
                te.manual_seed(seed)
                local x = te.randn({ 4, 6 }, { device = "cuda", requires_grad = true })
                local y = fn(x)
                te.rand({ 3 }, { device = "cuda" })
                y:sum():backward()
                got[i] = { y:totable(), x.grad:totable(), te.rng_state() }
            end
            assert.same(got[1], got[2])
        end
    end)

    it("refuses the backward pass of a call whose activations a later one has overwritten", function()
        local layer = te.Linear(3, 2):to "cuda"
        local fn = te.make_graphed_callables(layer, { te.ones({ 2, 3 }, { device = "cuda" }) })
        local first, second = fn(te.ones { 2, 3 }), fn(te.zeros { 2, 3 })
        assert.has_error(function() first:sum():backward() end, "te.make_graphed_callables: backward of call 1, but " ..
            "call 2 has overwritten what it kept; call backward before the next call")
        second:sum():backward()
        assert.same({ 2, 2 }, values(layer.bias.grad))
    end)

    it("leaves no amaxes of its sample to delayed scaling, whose scales go on as without it", function()
        local function run(graphed)
            te.manual_seed(1)
            local layer = te.Sequential(te.Linear(16, 16)):to "cuda"
            local options, seen = { recipe = te.recipe.DelayedScaling { amax_history_len = 3 } }, {}
            local sample = te.full({ 4, 16 }, 1000, { device = "cuda", requires_grad = true })
            local fn = graphed and te.autocast(options, te.make_graphed_callables, layer, { sample }) or layer
            te.manual_seed(2)
            for i = 1, 5 do
                local x = (te.randn({ 4, 16 }, { device = "cuda" }) * i):detach()
                x.requires_grad = true
                local y = te.autocast(options, fn, x)
                y:square():sum():backward()
                for _, t in ipairs { y, x.grad, layer[1].weight.grad } do
                    for _, v in ipairs(values(t)) do seen[#seen + 1] = v end
                end
                layer:zero_grad()
            end
            local state = layer:state_dict()
            for _, role in ipairs { "input", "weight", "grad_output" } do
                seen[#seen + 1] = state[("1.%s_scale"):format(role)]:item()
            end
            return seen
        end
        equal_bits(run(false), run(true))
    end)

    it("records forward alone where nothing has a gradient", function()
        local fn = te.make_graphed_callables(te.GELU(), { te.ones({ 2, 2 }, { device = "cuda" }) })
        local x = te.tensor { { 1, -1 }, { 2, 0 } }
        assert.same(values(te.gelu(x:to "cuda")), values(fn(x)))
    end)

    it("refuses an input whose gradient its sample did not ask for", function()
        for _, callable in ipairs { te.GELU(), te.Linear(2, 2):to "cuda" } do
            local fn = te.make_graphed_callables(callable, { te.ones({ 2, 2 }, { device = "cuda" }) })
            local x = te.ones({ 2, 2 }, { device = "cuda", requires_grad = true })
            assert.error_matches(function() fn(x) end,
                "te.make_graphed_callables: input 1 requires a gradient, recorded without one", 1, true)
            assert.same({ 2, 2 }, te.no_grad(fn, x).shape)
        end
    end)
end)
