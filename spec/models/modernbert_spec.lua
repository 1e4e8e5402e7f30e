-- te.models.modernbert against loops over numbers.
local te = require "te"
local near = require "spec.support.near"
local reference = require "spec.support.encoder_reference"

local function ids(rows) return te.tensor(rows, { dtype = "int32" }) end

local function make(more)
    local config = { vocab_size = 40, block_size = 12, n_layer = 4, n_head = 2, n_embd = 16, init_std = 0.3,
        window = 4 }
    for name, value in pairs(more or {}) do config[name] = value end
    te.manual_seed(3)
    local model = te.models.modernbert(config)
    for _, parameter in ipairs(model:parameters()) do
        if parameter:dim() == 1 then parameter:detach():add_(te.randn(parameter.shape) * 0.2) end
    end
    return model
end

local A, B = { 5, 9, 1, 30, 2, 7, 22, 11 }, { 39, 0, 4 }

describe("te.models.modernbert", function()
    it("computes what the paper says, windows in all but every so many-th block", function()
        for _, more in ipairs { {}, { full_every = 2, rope_base = 500, window_rope_base = 50, window = 3 } } do
            local model = make(more):to "float64"
            near(te.tensor({ reference.modernbert(model, A) }, { dtype = "float64" }), model:hidden_states(ids { A }),
                1e-6) -- angles' frequencies are float32
        end
    end)

    it("gives each text the same states, packed or padded, and trains", function()
        local model, packed, padded = make(), {}, { A, {} }
        for _, text in ipairs { A, B } do
            for _, id in ipairs(text) do packed[#packed + 1] = id end
        end
        for at = 1, #A do padded[2][at] = B[at] or 13 end
        local opts = { seq_lens = { #A, #B } }
        local states = model:hidden_states(ids(packed), opts)
        near(model:hidden_states(ids { B })[1], states:narrow(1, #A + 1, #B), 2e-6)
        near(states:narrow(1, 1, #A), model:hidden_states(ids(padded), opts)[1], 0)
        local _, loss = model(ids(padded), ids(padded), opts)
        loss:backward()
        local gradient = model.blocks[2].attention[2].qkv.weight.grad:clone()
        model:zero_grad()
        select(2, model(ids(packed), ids(packed), opts)):backward()
        near(gradient, model.blocks[2].attention[2].qkv.weight.grad, 1e-6)
    end)

    it("classifies texts by the first token or the mean of all", function()
        for _, pooling in ipairs { "first", "mean" } do
            local model = make { head = "sequence", n_label = 3, pooling = pooling }
            local rows = te.no_grad(model.hidden_states, model, ids { B })[1]
            local row = pooling == "mean" and te.mean(rows, 1, true) or rows:narrow(1, 1, 1)
            local expected = te.linear(model.lm(row), model.classifier.weight, model.classifier.bias)
            near(expected, model(ids { B }), 1e-5)
        end
        assert.same({ 2, 3, 5 }, make { head = "token", n_label = 5 }(ids { B, B }).shape)
    end)

    it("has no token types", function()
        assert.error_matches(function() make():hidden_states(ids { B }, { token_types = ids { B } }) end,
            "ModernBert:hidden_states: option token_types: the model has none", 1, true)
    end)
end)
