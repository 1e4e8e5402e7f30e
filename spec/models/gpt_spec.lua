local te = require "te"

local CONFIG = { vocab_size = 11, block_size = 8, n_layer = 2, n_head = 2, n_embd = 16 }

local function ids(rows) return te.tensor(rows, { dtype = "int32" }) end

describe("te.models.gpt", function()
    local model
    before_each(function()
        te.manual_seed(1)
        model = te.models.gpt(CONFIG)
    end)

    it("has nanoGPT's parameters and start", function()
        local per_block = 2 * 16 + 16 * 48 + 16 * 16 + 2 * 16 * 64
        assert.equal(11 * 16 + 8 * 16 + 2 * per_block + 16, model:num_parameters())
        local x = ids { { 1, 2, 3, 4, 5, 6, 7, 8 } }
        local logits, loss = model(x, x)
        assert.same({ 8, 11 }, logits.shape)
        assert.is_true(math.abs(loss:item() - math.log(11)) < 0.5)
        assert.same({ 1, 11 }, model(x).shape)
        local biased = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 2, n_head = 2, n_embd = 16,
            bias = true }
        assert.equal(model:num_parameters() + 2 * (16 * 2 + 48 + 16 + 64 + 16) + 16, biased:num_parameters())
    end)

    it("sees only the past", function()
        local targets = ids { { 0, 0, 0, 0 } }
        local a, b = model(ids { { 1, 2, 3, 4 } }, targets), model(ids { { 1, 2, 3, 9 } }, targets)
        assert.is_true((a:narrow(1, 1, 3) - b:narrow(1, 1, 3)):abs():max():item() < 1e-6)
        assert.is_true((a:narrow(1, 4, 1) - b:narrow(1, 4, 1)):abs():max():item() > 1e-4)
    end)

    it("agrees with itself with and without targets", function()
        local x = ids { { 1, 2, 3 }, { 4, 5, 6 } }
        local all, last = model(x, x), model(x)
        assert.is_true((all:view({ 2, 3, 11 }):select(2, 3) - last):abs():max():item() < 1e-5)
    end)

    it("learns a sequence by heart and says it", function()
        local opt = te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-2 })
        local x, y = ids { { 1, 5, 2, 7, 3, 9, 4 } }, ids { { 5, 2, 7, 3, 9, 4, 0 } }
        for _ = 1, 60 do
            local _, loss = model(x, y)
            loss:backward()
            opt:step()
            opt:zero_grad()
        end
        local out = model:generate(ids { { 1 } }, 7, { temperature = 0 })
        assert.same({ { 1, 5, 2, 7, 3, 9, 4, 0 } }, out:totable())
        assert.is_true(model.training)
    end)

    it("generates past its context, from the k likeliest, the same again", function()
        te.manual_seed(3)
        local first = model:generate(ids { { 1 }, { 2 } }, 12, { top_k = 3 })
        assert.same({ 2, 13 }, first.shape)
        te.manual_seed(3)
        assert.same(first:totable(), model:generate(ids { { 1 }, { 2 } }, 12, { top_k = 3 }):totable())
        local n = 0
        model:generate(ids { { 1 } }, 10, { on_token = function() n = n + 1; return n < 4 end })
        assert.equal(4, n)
    end)

    it("computes in bfloat16 under autocast, with float32 gradients", function()
        local x = ids { { 1, 2, 3, 4 } }
        local exact = select(2, model(x, x)):item()
        local loss = te.autocast({ dtype = "bfloat16" }, function() return (select(2, model(x, x))) end)
        assert.is_true(math.abs(loss:item() - exact) < 0.02)
        loss:backward()
        assert.equal("float32", model.wte.weight.grad.dtype)
    end)

    it("is explained in the dtype that it runs in", function()
        local ids = te.tensor({ { 1, 2 } }, { dtype = "int32" })
        local function check(other, under)
            local step, moved = te.autocast(under, other.explain, other, ids).forward[1], nil
            local function run() te.autocast(under, other.hidden_states, other, ids) end
            for _, event in ipairs(te.profile(run)) do
                if event.name == step.kernels[1] and not moved then moved = event.bytes end
            end
            assert.equal(moved, step.bytes)
        end
        for _, dtype in ipairs { "float32", "bfloat16", "float64" } do
            local other = te.models.gpt { vocab_size = 5, block_size = 4, n_layer = 1, n_head = 1, n_embd = 8 }
            other:to(dtype)
            check(other, { enabled = false })
            check(other, { dtype = "float16" })
        end
    end)

    it("refuses what does not fit", function()
        assert.error_matches(function() te.models.gpt { block_size = 8 } end, "te%.models%.gpt: vocab_size is needed")
        assert.error_matches(function() te.models.gpt { vocab_size = 8, layers = 3 } end, "unknown option")
        assert.error_matches(function() model(ids { { 1, 1, 1, 1, 1, 1, 1, 1, 1 } }) end,
            "GPT: a sequence of 9 tokens, block_size is 8")
        for got, given in pairs { table = { { 1, 2 } }, ["{1}"] = ids { 1 }, number = 3 } do
            assert.error_matches(function() model:explain(given) end,
                "GPT:explain: ids: expected {batch, seq}, got " .. got, 1, true)
        end
        assert.error_matches(function() model:load_hugging_face() end,
            "GPT:load_hugging_face: tensors: expected table, got nil")
        for _, saved in ipairs { {}, { metadata = {} }, "path" } do
            assert.error_matches(function() te.models.from_checkpoint(saved) end,
                "te.models.from_checkpoint: saved: expected what te.train.checkpoint.load read, got ", 1, true)
        end
    end)
end)
