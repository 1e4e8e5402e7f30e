--- Attention of a few queries behind many keys, as where several guessed tokens are checked: each has the bits that it
--- has alone, so that what is chosen does not depend on how many are there.

local te = require "te"

local KEYS = 150

-- What each of n queries gives alone, seeing the keys up to its own.
local function one_by_one(q, k, v, bias, sinks, options)
    local rows, n = {}, q:size(3)
    for i = 1, n do
        local seen = k:size(3) - n + i
        local own = bias and bias:narrow(3, i, 1):narrow(4, 1, seen):contiguous() or nil
        rows[i] = te.scaled_dot_product_attention(q:narrow(3, i, 1), k:narrow(3, 1, seen), v:narrow(3, 1, seen), own,
            sinks, options)
    end
    return te.cat(rows, 3)
end

describe("Attention of few queries", function()
    for _, dtype in ipairs { "float32", "bfloat16" } do
        for name, case in pairs {
            ["as it is"] = {},
            ["in windows"] = { window = 70 },
            ["in a narrow window"] = { window = 3 },
            ["with sinks"] = { sinks = true },
            ["with a bias"] = { bias = true },
            ["of heads that share keys"] = { kv_heads = 2 },
        } do
            it(("has the bits of one query: %s, %s"):format(name, dtype), function()
                te.manual_seed(7)
                local heads = case.kv_heads or 4
                local k = te.randn({ 2, heads, KEYS, 32 }):to(dtype)
                local v = te.randn({ 2, heads, KEYS, 32 }):to(dtype)
                local sinks = case.sinks and te.randn { 4 } or nil
                for n = 2, 8 do
                    local q = te.randn({ 2, 4, n, 32 }):to(dtype)
                    local bias = case.bias and te.randn({ 1, 4, n, KEYS }):to(dtype) or nil
                    local options = { causal = true, bottom_right = true, window_left = case.window }
                    local all = te.no_grad(te.scaled_dot_product_attention, q, k, v, bias, sinks, options)
                    assert.same(te.no_grad(one_by_one, q, k, v, bias, sinks, options):totable(), all:totable())
                end
            end)
        end
    end

    it("gives a model whose weights are large the logits that it has token by token", function()
        te.manual_seed(1)
        local model = te.models.gpt { vocab_size = 2000, block_size = 160, n_layer = 1, n_head = 4,
            n_embd = 512 }
        local ids, cache = te.randint(0, 1999, { 1, 158 }, { dtype = "int32" }), te.KVCache()
        cache:run(model, ids:narrow(2, 1, 150))
        local rows = {}
        for i = 1, 8 do rows[i] = cache:run(model, ids:narrow(2, 150 + i, 1)):totable()[1] end
        for n = 2, 8 do
            cache:truncate(150)
            local all = cache:run(model, ids:narrow(2, 151, n):contiguous(), nil, { logits = "all" }):totable()[1]
            assert.same({ unpack(rows, 1, n) }, all)
        end
    end)
end)
