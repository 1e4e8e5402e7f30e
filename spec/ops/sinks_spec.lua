local te = require "te"

local F64 = { dtype = "float64" }

-- Attention with one more column of scores, whose probability is dropped: how the sinks are defined.
local function reference(q, k, v, sinks, opts)
    local heads, sq, skv = q:size(2), q:size(3), k:size(3)
    local group = heads / k:size(2)
    local function each_head(t)
        local list = {}
        for h = 1, heads do list[h] = t:select(2, math.ceil(h / group)) end
        return te.stack(list, 2)
    end
    local scores = te.matmul(q, each_head(k):transpose(3, 4)) / math.sqrt(q:size(4))
    if opts.causal then
        local ahead = te.triu(te.ones({ sq, skv }, F64), 1)
        scores = te.where(te.gt(ahead, 0), -math.huge, scores)
    end
    local column = sinks:to("float64"):view { 1, heads, 1, 1 }:expand { q:size(1), heads, sq, 1 }
    local p = te.softmax(te.cat({ scores, column }, -1), -1):narrow(-1, 1, skv)
    return te.matmul(p, each_head(v))
end

local function far(a, b) return (a:to "float64" - b:to "float64"):abs():max():item() end

describe("attention with sinks", function()
    local q, k, v, sinks
    before_each(function()
        te.manual_seed(21)
        q, k, v = te.randn({ 2, 4, 7, 6 }, F64), te.randn({ 2, 2, 7, 6 }, F64), te.randn({ 2, 2, 7, 5 }, F64)
        sinks = te.tensor({ 1.5, -0.5, 0, 4 }, F64)
    end)

    it("is a softmax over one more score", function()
        for _, causal in ipairs { false, true } do
            local y = te.scaled_dot_product_attention(q, k, v, nil, sinks, { causal = causal })
            assert.is_true(far(y, reference(q, k, v, sinks, { causal = causal })) < 1e-12)
        end
        for dtype, tolerance in pairs { float32 = 1e-6, bfloat16 = 0.03, float16 = 4e-3 } do
            local y = te.scaled_dot_product_attention(q:to(dtype), k:to(dtype), v:to(dtype), nil, sinks)
            assert.equal(dtype, y.dtype)
            assert.is_true(far(y, reference(q:to(dtype):to "float64", k:to(dtype):to "float64",
                v:to(dtype):to "float64", sinks, {})) < tolerance, dtype)
        end
        -- none at all, and one beside which nothing counts
        local none = te.scaled_dot_product_attention(q, k, v, nil, te.full({ 4 }, -math.huge, F64))
        assert.is_true(far(none, te.scaled_dot_product_attention(q, k, v)) == 0)
        assert.is_true(te.scaled_dot_product_attention(q, k, v, nil, te.full({ 4 }, 1e4, F64)):abs():max():item() == 0)
    end)

    it("takes one head's sink out of a larger tensor", function()
        local sink = te.tensor({ { 1.5, 2, 3 } }, F64):select(2, 1)
        local one = { q:narrow(2, 1, 1), k:narrow(2, 1, 1), v:narrow(2, 1, 1) }
        assert.is_true(te.eq(te.scaled_dot_product_attention(one[1], one[2], one[3], nil, sink),
            te.scaled_dot_product_attention(one[1], one[2], one[3], nil, te.tensor({ 1.5 }, F64))):all():item())
    end)

    it("has gradients, its sinks too", function()
        local inputs = { q, k, v, sinks }
        for _, t in ipairs(inputs) do t.requires_grad = true end
        assert.is_true(te.gradcheck(function(...)
            return te.scaled_dot_product_attention(...)
        end, { q, k, v, te.randn({ 4, 7, 7 }, F64), sinks }))
        local dy, gradients = te.randn({ 2, 4, 7, 5 }, F64), {}
        for i, y in ipairs { te.scaled_dot_product_attention(q, k, v, nil, sinks, { causal = true }),
            reference(q, k, v, sinks, { causal = true }) } do
            for _, t in ipairs(inputs) do t.grad = nil end
            y:backward(dy)
            gradients[i] = {}
            for n, t in ipairs(inputs) do gradients[i][n] = t.grad end
        end
        for n = 1, 4 do assert.is_true(far(gradients[1][n], gradients[2][n]) < 1e-10, "gradient " .. n) end
    end)

    it("is the same in one projection, of packed sequences, with positions, from a cache", function()
        for _, kind in ipairs { "learnable", "off-by-one" } do
            local m = te.GroupedQueryAttention(16, 4, 2, { softmax_type = kind, rope = true, params_dtype = "float64" })
            if kind == "learnable" then te.no_grad(function() m.softmax_offset:copy_(sinks) end) end
            local x = te.randn({ 2, 5, 16 }, F64)
            local y = m(x)
            local lengths = te.tensor({ 5, 5 }, { dtype = "int32" })
            assert.is_true(far(m(x:view { 10, 16 }, lengths):view { 2, 5, 16 }, y) < 1e-12)
            local cache, parts = te.KVCache(), {}
            for i, n in ipairs { 3, 1, 1 } do
                parts[i] = cache:run(m, x:narrow(2, cache.length + 1, n):contiguous())
            end
            assert.is_true(far(te.cat(parts, 2), y) < 1e-12)
            local plain = te.GroupedQueryAttention(16, 4, 2, { rope = true, params_dtype = "float64" })
            local state = m:state_dict()
            assert.equal(kind == "learnable", state.softmax_offset ~= nil)
            state.softmax_offset = nil
            plain:load_state_dict(state)
            assert.is_true(far(plain(x), y) > 1e-2)
            x.requires_grad = true
            local inputs = m:parameters()
            inputs[#inputs + 1] = x
            assert.is_true(te.gradcheck(function() return m(x) end, inputs))
        end
    end)

    it("stands in plans, in 16 bits and under recipes", function()
        te.manual_seed(7)
        local seq = te.Sequential(te.RMSNorm(16), te.MultiHeadedSelfAttention(16, 2, { softmax_type = "learnable" }))
        te.no_grad(function() seq[2].softmax_offset:fill_(0.7) end)
        local x = te.randn { 2, 6, 16 }
        local y = seq(x)
        te.set_fusion(false)
        assert.is_true(far(seq(x), y) < 1e-5)
        te.set_fusion(true)
        y:sum():backward()
        local exact = seq[2].softmax_offset.grad:clone()
        for _, autocast in ipairs { { dtype = "bfloat16" },
            { dtype = "bfloat16", recipe = te.recipe.Float8CurrentScaling { fp8_dpa = true } } } do
            seq[2].softmax_offset.grad = nil
            local z = te.autocast(autocast, seq, x)
            assert.is_true(far(z, y) < 0.1 * y:abs():max():item() + 0.05)
            z:sum():backward()
            assert.is_true(far(seq[2].softmax_offset.grad, exact) < 0.3 * exact:abs():max():item() + 0.05)
        end
        seq:to "bfloat16"
        assert.is_true(far(seq(x:to "bfloat16"), y) < 0.1 * y:abs():max():item() + 0.05)
    end)

    it("belongs to te.DotProductAttention, too", function()
        local m = te.DotProductAttention { softmax_type = "off-by-one", num_heads = 4 }
        assert.is_true(far(m(q, k, v), reference(q, k, v, te.zeros({ 4 }, F64), {})) < 1e-6)
        assert.error_matches(function() te.DotProductAttention { softmax_type = "learnable" } end,
            "num_heads goes with")
        assert.error_matches(function() te.DotProductAttention { num_heads = 2 } end, "num_heads goes with")
        assert.error_matches(function() te.DotProductAttention { softmax_type = "sink" } end,
            "softmax_type: expected one of vanilla, off%-by%-one, learnable")
        assert.error_matches(function() te.scaled_dot_product_attention(q, k, v, nil, te.ones { 3 }) end,
            "sinks must be {heads} = {4} of a floating dtype, not {3}")
        assert.error_matches(function()
            te.scaled_dot_product_attention(q, k, v, nil, te.ones({ 4 }, { dtype = "int32" }))
        end, "of a floating dtype, not {4} of int32")
    end)
end)
