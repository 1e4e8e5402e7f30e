--- te.graph and delayed scaling, whose scales and histories move along; te.checkpoint in a recording.

local graphs = require "spec.support.graphs"
local te = require "te"

local devices, reason = te.devices()
local values, equal_bits, equal_runs = graphs.values, graphs.equal_bits, graphs.equal_runs

describe("Delayed scaling and te.checkpoint in te.graph on a CUDA device", function()
    if not devices[2] then
        pending(reason)
        return
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
end)
