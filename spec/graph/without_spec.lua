--- te.graph on a device without graphs runs the function, and wants of it what recording would.

local graphs = require "spec.support.graphs"
local te = require "te"
local values = graphs.values

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
