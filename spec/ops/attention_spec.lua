local te = require "te"

local function close(a, b) return (a - b):abs():max():item() < 1e-5 end

-- Attention from its definition, on {batch, seq, hidden}.
local function reference(m, x)
    local batch, seq, hidden = x:size(1), x:size(2), x:size(3)
    local size, heads, kv = m.head_size, m.num_heads, m.num_kv_heads
    local qkv = te.linear(x, m.qkv.weight, m.qkv.bias)
    local function split(first, n)
        return qkv:narrow(3, first + 1, n * size):reshape({ batch, seq, n, size }):transpose(2, 3)
    end
    local q, k, v = split(0, heads), split(hidden, kv), split(hidden + kv * size, kv)
    local outputs = {}
    for h = 1, heads do
        local g = math.floor((h - 1) * kv / heads) + 1
        local scores = te.matmul(q:select(2, h), k:select(2, g):transpose(2, 3)) / math.sqrt(size)
        local mask = te.tril(te.ones({ seq, seq }))
        scores = te.where(te.gt(mask, 0), scores, -1e9)
        outputs[h] = te.matmul(te.softmax(scores, -1), v:select(2, g))
    end
    return te.linear(te.cat(outputs, 3), m.proj.weight, m.proj.bias)
end

describe("attention modules", function()
    before_each(function() te.manual_seed(7) end)

    it("refuses windows that are none", function()
        local q = te.randn { 1, 1, 2, 4 }
        local lengths = te.zeros({ 1 }, { dtype = "int32" }):expand(2 ^ 31)
        assert.error_matches(function() te.self_attention(te.zeros { 4, 12 }, { seq_lens = lengths }) end,
            "seq_lens {2147483648} beside {4,12}: more than 2^31 - 1 sequences", 1, true)
        assert.error_matches(function() te.scaled_dot_product_attention(q, q, q, { window_left = -2 }) end,
            "window_left and window_right must be at least -1, not -2 and -1", 1, true)
    end)

    it("give sequences of many blocks the gradients that each has alone", function()
        local lengths = { 1090, 500, 70 } -- blocks of queries that stay in a cache, and too many for that
        local total = 1090 + 500 + 70
        for _, dtype in ipairs { "float32", "bfloat16" } do
            local function run(qkv, seq_lens, dout)
                local x = qkv:detach():contiguous()
                x.requires_grad = true
                te.self_attention(x, { heads = 1, causal = true, seq_lens = seq_lens }):backward(dout)
                return x.grad
            end
            local qkv, dout = te.randn({ total, 192 }, { dtype = dtype }), te.randn({ total, 64 }, { dtype = dtype })
            local together = run(qkv, te.tensor(lengths, { dtype = "int32" }), dout)
            local first = 1
            for _, n in ipairs(lengths) do
                local alone = run(qkv:narrow(1, first, n), te.tensor({ n }, { dtype = "int32" }),
                    dout:narrow(1, first, n):contiguous())
                assert.equal(0, (together:narrow(1, first, n) - alone):abs():max():item())
                first = first + n
            end
        end
    end)

    it("say at once what dropout they cannot have", function()
        for _, p in ipairs { 1, 1.5, -1 } do
            assert.error_matches(function() te.MultiHeadedSelfAttention(16, 4, { dropout = p }) end,
                "option dropout: expected")
            assert.error_matches(function() te.DotProductAttention { dropout = p } end, "option dropout: expected")
        end
    end)

    for name, make in pairs {
        MultiHeadedSelfAttention = function() return te.MultiHeadedSelfAttention(16, 4) end,
        GroupedQueryAttention = function() return te.GroupedQueryAttention(16, 4, 2) end,
        MultiQuerySelfAttention = function() return te.MultiQuerySelfAttention(16, 4) end,
    } do
        it(name .. " is causal attention", function()
            local m, x = make(), te.randn({ 2, 5, 16 })
            assert.is_true(close(m(x), reference(m, x)))
            m(x):sum():backward()
            assert.same(m.qkv.weight.shape, m.qkv.weight.grad.shape)
        end)

        it(name .. " takes one sequence, a batch and packed sequences", function()
            local m, x = make(), te.randn({ 6, 16 })
            assert.is_true(close(m(x), m(x:unsqueeze(1)):squeeze(1)))
            local packed = m(x, te.tensor({ 4, 0, 2 }, { dtype = "int32" }))
            local apart = te.cat({ m(x:narrow(1, 1, 4)), m(x:narrow(1, 5, 2)) }, 1)
            assert.is_true(close(packed, apart))
        end)
    end

    it("attends everywhere when not causal", function()
        local m = te.MultiHeadedSelfAttention(8, 2, { causal = false })
        local x = te.randn({ 1, 3, 8 })
        local y = m(x)
        te.no_grad(function() x[1][3]:fill_(9) end)
        assert.is_false(close(y:narrow(2, 1, 1), m(x):narrow(2, 1, 1)))
    end)

    it("drops only while training", function()
        local m = te.MultiHeadedSelfAttention(8, 2, { dropout = 0.5 })
        local x = te.randn({ 1, 6, 8 })
        assert.is_false(close(m(x), m(x)))
        m:eval()
        assert.is_true(close(m(x), m(x)))
    end)

    it("DotProductAttention takes q, k and v", function()
        local q, k, v = te.randn({ 1, 2, 3, 4 }), te.randn({ 1, 2, 3, 4 }), te.randn({ 1, 2, 3, 4 })
        local expected = te.scaled_dot_product_attention(q, k, v, { causal = true })
        assert.same(expected:totable(), te.DotProductAttention({ causal = true })(q, k, v):totable())
    end)

    it("DotProductAttention takes a bias of the scores", function()
        local q, k, v = te.randn({ 1, 2, 3, 4 }), te.randn({ 1, 2, 5, 4 }), te.randn({ 1, 2, 5, 4 })
        local m = te.DotProductAttention({ bias = true })
        for _, bias in ipairs { te.randn({ 3, 5 }), te.randn({ 5, 3 }):transpose(1, 2), te.randn { 3, 1 } } do
            local expected = te.matmul(te.softmax(te.matmul(q, k:transpose(-2, -1)) / 2 + bias), v)
            assert.is_true(close(expected, m(q, k, v, bias):view({ 1, 2, 3, 4 })))
        end
        local bias = te.randn({ 3, 5 }, { requires_grad = true })
        local wanted = te.grad(te.scaled_dot_product_attention(q, k, v, bias):sum(), { bias })[1]
        for _, run in ipairs { m, te.Sequential(m) } do
            assert.is_true(close(wanted, te.grad(run(q, k, v, bias):sum(), { bias })[1]))
        end
        assert.error_matches(function() m(q, k, v) end, "takes 3 extra inputs, got 2")
    end)

    it("takes a mask of bool: what is false takes no part", function()
        local q, k, v = te.randn { 1, 2, 3, 4 }, te.randn { 1, 2, 5, 4 }, te.randn { 1, 2, 5, 4 }
        q.requires_grad = true
        local mask = te.gt(te.rand { 3, 5 }, 0.5)
        mask[1], mask[2] = te.zeros({ 5 }, { dtype = "bool" }), te.ones({ 5 }, { dtype = "bool" })
        local bias = te.where(mask, te.zeros { 3, 5 }, -math.huge)
        for _, run in ipairs { te.scaled_dot_product_attention, te.DotProductAttention { bias = true },
            te.Sequential(te.DotProductAttention { bias = true }) } do
            local y, expected = run(q, k, v, mask), te.scaled_dot_product_attention(q, k, v, bias)
            assert.is_true(close(expected, y))
            assert.equal(0, y:select(3, 1):abs():max():item())
            y:sum():backward()
            local got = q.grad:clone()
            q.grad = nil
            expected:sum():backward()
            assert.is_true(close(q.grad, got))
            q.grad = nil
        end
        for _, dtype in ipairs { "int32", "int64", "uint8" } do
            assert.error_matches(function()
                te.scaled_dot_product_attention(q, k, v, te.ones({ 3, 5 }, { dtype = dtype }))
            end, "scaled_dot_product_attention: bias: expected a floating dtype or bool, got " .. dtype, 1, true)
        end
    end)

    it("gives zeros where a mask hides all, whatever the values are", function()
        local mask = te.tensor { { false, false, false }, { true, true, true } }
        for _, dtype in ipairs { "float32", "bfloat16", "float64" } do
            for _, value in ipairs { 0 / 0, math.huge } do
                local q, k = te.randn({ 1, 1, 2, 8 }, { dtype = dtype }), te.randn({ 1, 1, 3, 8 }, { dtype = dtype })
                local y = te.scaled_dot_product_attention(q, k, te.full({ 1, 1, 3, 8 }, value, { dtype = dtype }), mask)
                assert.equal(0, y[1][1][1]:abs():sum():item())
                assert.not_equal(0, y[1][1][2]:abs():sum():item())
            end
        end
    end)

    it("hides keys whose scores overflow or are NaN", function()
        for _, dtype in ipairs { "float32", "bfloat16", "float64" } do
            for _, bad in ipairs { dtype == "float64" and 1e308 or 1e38, -math.huge, 0 / 0 } do
                for _, rows in ipairs { 1, 3 } do
                    local q, k = te.full({ 1, 2, rows, 16 }, 1e3, { dtype = dtype }), te.ones({ 1, 2, 9, 16 },
                        { dtype = dtype })
                    local v = te.ones({ 1, 2, 9, 16 }, { dtype = dtype })
                    k:narrow(3, 7, 3):fill_(bad)
                    for _, t in ipairs { q, k, v } do t.requires_grad = true end
                    local mask = te.lt(te.arange(1, 9), 6.5):view { 1, 1, 1, 9 }
                    local y = te.scaled_dot_product_attention(q, k, v, mask)
                    assert.equal(0, (y - 1):abs():max():item())
                    y:sum():backward()
                    assert.equal(0, k.grad:abs():max():item())
                    assert.equal(0, v.grad:narrow(3, 7, 3):abs():max():item())
                end
            end
        end
    end)

    -- The gradients of q, k, v and bias by attention, and of the same written out, with the keys of a group of heads
    -- repeated.
    local function bias_gradients(shape, bias_shape, opts, dtype)
        te.manual_seed(11)
        local heads, kv_heads, rows, keys = unpack(shape)
        local function leaf(sizes)
            local t = te.randn(sizes, { dtype = dtype, device = "cpu" })
            t.requires_grad = true
            return t
        end
        local q, k, v = leaf { 2, heads, rows, 8 }, leaf { 2, kv_heads, keys, 8 }, leaf { 2, kv_heads, keys, 8 }
        local bias, dy = leaf(bias_shape), te.randn({ 2, heads, rows, 8 }, { dtype = dtype, device = "cpu" })
        local leaves, there = { q, k, v, bias }, {}
        for i, t in ipairs(leaves) do there[i] = t:to(te.get_default_device()) end
        local attended = te.scaled_dot_product_attention(there[1], there[2], there[3], there[4], opts):to "cpu"
        local found = te.grad(attended, leaves, { grad_outputs = dy })
        local function spread(t) -- a head of k and v for each of q
            return t:view({ 2, kv_heads, 1, keys, 8 }):expand({ 2, kv_heads, heads / kv_heads, keys,
                8 }):reshape({ 2, heads, keys, 8 })
        end
        local scores = te.matmul(q, spread(k):transpose(-2, -1)) / math.sqrt(8) + bias
        if opts.causal then
            scores = scores + te.triu(te.full({ rows, keys }, -1e30, { dtype = dtype, device = "cpu" }),
                { diagonal = 1 })
        end
        return found, te.grad(te.matmul(te.softmax(scores), spread(v)), leaves, { grad_outputs = dy })
    end

    it("gives a bias its gradient, summed where it was broadcast", function()
        for _, case in ipairs {
            { { 2, 2, 3, 5 }, { 3, 5 }, {} }, { { 2, 2, 3, 5 }, { 2, 2, 3, 5 }, {} },
            { { 4, 2, 40, 70 }, { 4, 1, 70 }, {} },
            { { 2, 1, 33, 33 }, { 2, 1, 1, 33 }, { causal = true } }, { { 1, 1, 20, 700 }, { 1 }, {} },
            { { 1, 1, 20, 700 }, { 20, 700 }, {} }, { { 2, 2, 130, 130 }, { 130, 1 }, { causal = true } },
        } do
            for dtype, tolerance in pairs { float64 = 1e-10, float32 = 2e-5 } do
                local found, expected = bias_gradients(case[1], case[2], case[3], dtype)
                for i = 1, 4 do
                    assert.same(expected[i].shape, found[i].shape)
                    local size = expected[i]:abs():max():item() + 1
                    assert.is_true((expected[i] - found[i]):abs():max():item() <= tolerance * size,
                        ("%s {%s} gradient %d"):format(dtype, table.concat(case[2], ", "), i))
                end
            end
        end
    end)

    it("gives a bias that accumulates, and none to keys that nobody sees", function()
        local q, k, v = te.randn { 1, 1, 4, 8 }, te.randn { 1, 1, 4, 8 }, te.randn { 1, 1, 4, 8 }
        local bias = te.zeros({ 4, 4 }, { dtype = "bfloat16", requires_grad = true })
        local function loss()
            return (te.scaled_dot_product_attention(q, k, v, bias, { window_left = 0, window_right = 1 }) * v):sum()
        end
        loss():backward()
        local once = bias.grad:clone()
        loss():backward()
        assert.same((once * 2):totable(), bias.grad:totable())
        for i, row in ipairs(once:totable()) do
            for j, value in ipairs(row) do assert.equal((j == i or j == i + 1) and i < 4, value ~= 0, i .. " " .. j) end
        end
        assert.is_true(te.no_grad(te.scaled_dot_product_attention, q, k, v, bias):numel() == 32)
    end)

    it("computes in te.autocast's dtype, whatever the dtypes of its operands", function()
        local bfloat16 = { dtype = "bfloat16" }
        local q, k, v = te.randn { 1, 4, 3, 8 }, te.randn { 1, 2, 5, 8 }, te.randn { 1, 2, 5, 8 }
        local narrow = {}
        for i, t in ipairs { q, k, v } do
            narrow[i], t.requires_grad = t:to "bfloat16", true
            narrow[i].requires_grad = true
        end
        local want = te.scaled_dot_product_attention(narrow[1], narrow[2], narrow[3])
        want:sum():backward()
        local y = te.autocast(bfloat16, te.scaled_dot_product_attention, q, narrow[2]:detach(), v)
        y:sum():backward()
        assert.same({ "bfloat16", want:totable() }, { y.dtype, y:totable() })
        assert.same({ "float32", narrow[1].grad:totable() }, { q.grad.dtype, q.grad:totable() })
        assert.same(narrow[3].grad:totable(), v.grad:totable())
        assert.equal("bfloat16", te.autocast(bfloat16, te.DotProductAttention(), q, k, v).dtype)
        assert.error_matches(function() te.scaled_dot_product_attention(q, narrow[2], v) end, "one floating dtype")
        local wide = te.ones({ 1, 1, 2, 4 }, { dtype = "float64" })
        assert.equal("float64", te.autocast(bfloat16, te.scaled_dot_product_attention, wide, wide, wide).dtype)
    end)

    it("computes in te.autocast's dtype on packed projections, fused like unfused", function()
        local Packed = te.BasicOperation:extend("Packed")
        function Packed:op_forward(_, x) return te.self_attention(x, { heads = 2 }) end
        function Packed:lower(g, x) return g:op("self_attention", { x }, { heads = 2 }) end
        local x, recipe = te.randn({ 6, 24 }, { requires_grad = true }), te.recipe.DelayedScaling { fp8_dpa = true }
        for _, scope in ipairs { { dtype = "bfloat16" }, { dtype = "bfloat16", recipe = recipe } } do
            local results = {}
            for i, fusion in ipairs { true, false } do
                te.set_fusion(fusion)
                local model = te.Sequential(te.ReLU(), Packed(), te.ConstantScale(2))
                local y = te.autocast(scope, model, x)
                y:sum():backward()
                te.set_fusion(true)
                results[i] = { y.dtype, y:totable(), x.grad.dtype, x.grad:totable() }
                x.grad = nil
            end
            assert.equal("bfloat16", results[1][1])
            assert.same(results[2], results[1])
        end
    end)

    it("sees as far as its window", function()
        local m = te.MultiHeadedSelfAttention(8, 2, { causal = false, window_left = 1, window_right = 2 })
        local x = te.randn({ 1, 8, 8 })
        local before = m(x):totable()[1]
        te.no_grad(function() x[1][5]:fill_(3) end)
        local after = m(x):totable()[1]
        for token = 1, 8 do
            local reached = token >= 3 and token <= 6 -- 5 is at most two ahead and one back
            assert.equal(reached, after[token][1] ~= before[token][1], token)
        end
        assert.error_matches(function() te.MultiHeadedSelfAttention(8, 2, { window_right = 2 }) end,
            "option window_right: 2, but a causal token sees none ahead")
    end)

    it("follows its fields", function()
        local m, x = te.MultiHeadedSelfAttention(8, 2), te.randn({ 1, 3, 8 })
        local causal = m(x)
        m.causal = false
        assert.is_false(close(causal, m(x)))
        m.causal, m.scale = true, 5
        assert.is_false(close(causal, m(x)))
    end)

    it("names sizes that do not fit", function()
        assert.error_matches(function() te.MultiHeadedSelfAttention(10, 4) end,
            "hidden_size 10 must be a multiple of num_heads 4")
        assert.error_matches(function() te.GroupedQueryAttention(16, 4, 3) end, "num_kv_heads 3")
        assert.error_matches(function() te.MultiHeadedSelfAttention(16, 4, { masked = true }) end, "unknown option")
    end)
end)

describe("te.scaled_dot_product_attention", function()
    it("knows options by PyTorch's names too", function()
        local q = te.randn { 1, 2, 5, 8 }
        local expected = te.scaled_dot_product_attention(q, q, q, { causal = true }):totable()
        assert.same(expected, te.scaled_dot_product_attention(q, q, q, { is_causal = true }):totable())
        assert.same(expected, te.scaled_dot_product_attention(q, q, q, { is_causal = true, dropout_p = 0 }):totable())
        assert.error_matches(function()
            te.scaled_dot_product_attention(q, q, q, { is_causal = true, causal = true })
        end, "causal: given twice")
    end)
end)
