--- What te.graph holds and gives back, and what it refuses to record.

local graphs = require "spec.support.graphs"
local te = require "te"

local devices, reason = te.devices()
local values, equal_bits = graphs.values, graphs.equal_bits

describe("A recording of te.graph on a CUDA device", function()
    if not devices[2] then
        pending(reason)
        return
    end

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
