--- te.make_graphed_callables: forward and backward as two recordings.

local graphs = require "spec.support.graphs"
local te = require "te"

local devices, reason = te.devices()
local values, equal_bits = graphs.values, graphs.equal_bits

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
