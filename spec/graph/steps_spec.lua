--- te.graph: a recorded training step has the bits of the one that is run, whatever changes from step to step.

local graphs = require "spec.support.graphs"
local te = require "te"

local devices, reason = te.devices()
local values, equal_bits, equal_runs = graphs.values, graphs.equal_bits, graphs.equal_runs

describe("A training step that te.graph records on a CUDA device", function()
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
end)
