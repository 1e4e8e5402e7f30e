--- Logits of all positions and hidden states of te.models, against those of prefixes and against loops over numbers.

local te = require "te"
local assert_near = require "spec.support.near"

local VOCAB, BATCH, SEQ, WIDTH = 19, 2, 6, 16

local KINDS = {
    gpt = { kind = "gpt", bias = true },
    llama = { kind = "llama", n_kv_head = 1 },
    ["llama with a tied head, experts and a window"] = { kind = "llama", tie = true, n_expert = 4, n_inner = 16,
        window = 3, embedding_scale = 2, expert_aux_loss = 0.1 },
}

local function model_of(name)
    local config = { vocab_size = VOCAB, block_size = 8, n_layer = 2, n_head = 2, n_embd = WIDTH, init_std = 0.2 }
    for key, value in pairs(KINDS[name]) do config[key] = value end
    local kind = config.kind
    config.kind = nil
    te.manual_seed(5)
    return te.models[kind](config), te.randint(0, VOCAB - 1, { BATCH, SEQ }, { dtype = "int32" })
end

-- Sums of products of rows of hidden states and of the head's weight, as numbers.
local function by_loops(hidden, weight)
    local h, w, logits = hidden:totable(), weight:totable(), {}
    for b = 1, BATCH do
        logits[b] = {}
        for i = 1, SEQ do
            logits[b][i] = {}
            for token = 1, VOCAB do
                local sum = 0
                for k = 1, WIDTH do sum = sum + h[b][i][k] * w[token][k] end
                logits[b][i][token] = sum
            end
        end
    end
    return te.tensor(logits, { dtype = "float64" })
end

describe("a model's logits and hidden states:", function()
    for name in pairs(KINDS) do
        it(name, function()
            local model, ids = model_of(name)
            model:eval()
            local all, hidden = model(ids, nil, { logits = "all" }), model:hidden_states(ids)
            assert.same({ BATCH, SEQ, VOCAB }, all.shape)
            assert.same({ BATCH, SEQ, WIDTH }, hidden.shape)
            for i = 1, SEQ do
                local prefix = ids:narrow(2, 1, i):contiguous()
                assert_near(model(prefix), all:select(2, i), 1e-5)
                assert_near(model(prefix, nil, { logits = "last" }), all:select(2, i), 1e-5)
            end
            assert_near(by_loops(hidden, model:head()), all, 1e-5)
            assert_near((model(ids, ids)), all:reshape { BATCH * SEQ, VOCAB }, 1e-6)
        end)

        it(name .. ", gradients of a loss of one's own", function()
            local model, ids = model_of(name)
            local targets = te.randint(0, VOCAB - 1, { BATCH, SEQ }, { dtype = "int64" })
            local _, loss = model(ids, targets)
            loss:backward()
            local expected = {}
            for key, p in model:named_parameters() do expected[key] = p.grad end
            model:zero_grad()
            local logits = model(ids, nil, { logits = "all" })
            local picked = te.gather(te.log_softmax(logits, -1), -1, targets:unsqueeze(-1))
            local own, more = -picked:mean(), model:auxiliary_loss()
            own = more and own + more or own
            assert_near(loss, own, 1e-5)
            own:backward()
            for key, p in model:named_parameters() do assert_near(expected[key], p.grad, 1e-5) end
        end)

        it(name .. ", recomputed in backward", function()
            local model, ids = model_of(name)
            local head = te.Linear(WIDTH, 1)
            local function run(states)
                local reward = head(states(ids))
                assert.same({ BATCH, SEQ, 1 }, reward.shape)
                reward:square():mean():backward()
                local grads = {}
                for key, p in model:named_parameters() do grads[key] = p.grad or false end
                model:zero_grad()
                return grads
            end
            local plain = run(function(x) return model:hidden_states(x) end)
            local again = run(function(x) return te.checkpoint(model.hidden_states, model, x) end)
            local some = 0
            for key, grad in pairs(plain) do
                assert.equal(not grad, not again[key], key)
                if grad then
                    assert_near(grad, again[key], 1e-6)
                    some = some + 1
                end
            end
            assert.is_true(some > 10)
        end)
    end

    it("in bfloat16, and under a recipe as with targets", function()
        for name in pairs(KINDS) do
            local model, ids = model_of(name)
            model:eval()
            for _, recipe in ipairs { false, te.recipe.Float8CurrentScaling {} } do
                te.autocast({ dtype = "bfloat16", recipe = recipe or nil }, te.no_grad, function()
                    local all = model(ids, nil, { logits = "all" })
                    assert.equal("bfloat16", all.dtype)
                    assert_near((model(ids, ids)):view { BATCH, SEQ, VOCAB }, all, 0)
                    assert.same({ BATCH, SEQ, WIDTH }, model:hidden_states(ids).shape)
                end)
            end
        end
    end)

    it("going on from a cache", function()
        local model, ids = model_of "llama"
        local whole, cache = model(ids, nil, { logits = "all" }), te.KVCache()
        local function piece(first, n)
            return cache:run(model, ids:narrow(2, first, n):contiguous(), nil, { logits = "all" })
        end
        assert_near(whole, te.cat({ piece(1, 4), piece(5, 1), piece(6, 1) }, 2), 1e-5)
    end)

    it("what is refused", function()
        local model, ids = model_of "gpt"
        for message, arguments in pairs {
            ["GPT: option logits: with targets they are those of all positions"] = { ids, ids, { logits = "all" } },
            ['GPT: option logits: expected one of last, all, got "first"'] = { ids, nil, { logits = "first" } },
            ['GPT: unknown option "logit"; did you mean "logits"?'] = { ids, nil, { logit = "all" } },
            ["GPT: a sequence of 9 tokens, block_size is 8"] = { te.zeros({ 1, 9 }, { dtype = "int32" }) },
        } do
            assert.error_matches(function() model(unpack(arguments, 1, 3)) end, message, 1, true)
        end
        assert.error_matches(function() model:hidden_states(ids[1]) end,
            "GPT:hidden_states: ids: expected {batch, seq}, got {6}", 1, true)
        assert.error_matches(function() model:hidden_states { 1 } end,
            "GPT:hidden_states: ids: expected {batch, seq}, got table", 1, true)
    end)
end)
