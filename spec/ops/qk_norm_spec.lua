local te = require "te"

local OPTIONS = { dtype = "float64" }

-- A module of 4 heads and 2 of keys and values, of 6 features each, with random float64 parameters.
local function make(opts)
    opts.head_size, opts.params_dtype = 6, "float64"
    local m = te.GroupedQueryAttention(10, 4, 2, opts)
    for _, p in ipairs(m:parameters()) do te.no_grad(function() p:copy_(te.randn(p.shape, OPTIONS)) end) end
    return m
end

-- What it computes for one sequence {seq, 10}, number by number.
local function reference(m, kind, before, eps, x)
    local rows = te.linear(x, m.qkv.weight, m.qkv.bias):totable()
    local function normalize(v, norm)
        local n, mean, square = #v, 0, 0
        if kind == "LayerNorm" then
            for _, e in ipairs(v) do mean = mean + e / n end
        end
        for i, e in ipairs(v) do
            v[i] = e - mean
            square = square + v[i] ^ 2
        end
        local r = 1 / math.sqrt((kind == "L2Normalization" and square or square / n) + eps)
        for i, e in ipairs(v) do
            v[i] = e * r
            if norm.weight then v[i] = v[i] * norm.weight[i]:item() end
            if norm.bias then v[i] = v[i] + norm.bias[i]:item() end
        end
    end
    local function turn(v, position)
        for k = 1, 3 do
            local angle = position * m.rope_frequencies[k]:item()
            local a, b = v[k], v[k + 3]
            v[k] = a * math.cos(angle) - b * math.sin(angle)
            v[k + 3] = b * math.cos(angle) + a * math.sin(angle)
        end
    end
    local function head(t, h)
        local v = {}
        for k = 1, 6 do v[k] = rows[t][6 * (h - 1) + k] end
        return v
    end
    local out = {}
    for t = 1, #rows do
        out[t] = {}
        for h = 1, 4 do
            local function prepared(position, which, norm)
                local v = head(position, which)
                if before then normalize(v, norm) end
                turn(v, position - 1)
                if not before then normalize(v, norm) end
                return v
            end
            local q, weights, sum = prepared(t, h, m.q_norm), {}, 0
            for s = 1, t do
                local k, score = prepared(s, 4 + math.ceil(h / 2), m.k_norm), 0
                for i = 1, 6 do score = score + q[i] * k[i] end
                weights[s] = math.exp(score / math.sqrt(6))
                sum = sum + weights[s]
            end
            for i = 1, 6 do
                local y = 0
                for s = 1, t do y = y + weights[s] / sum * head(s, 6 + math.ceil(h / 2))[i] end
                out[t][6 * (h - 1) + i] = y
            end
        end
    end
    return te.linear(te.tensor(out, OPTIONS), m.proj.weight, m.proj.bias)
end

local function far(a, b) return (a - b):abs():max():item() end

describe("attention with normalized queries and keys", function()
    before_each(function() te.manual_seed(11) end)

    for _, kind in ipairs { "RMSNorm", "LayerNorm", "L2Normalization" } do
        for _, before in ipairs { true, false } do
            it(("is %s of each head, %s it is turned"):format(kind, before and "before" or "after"), function()
                local m = make { rope = true, qk_norm = kind, qk_norm_eps = 1e-3, qk_norm_before_rope = before }
                local x = te.randn({ 2, 5, 10 }, OPTIONS)
                local y = m(x)
                for b = 1, 2 do assert.is_true(far(reference(m, kind, before, 1e-3, x[b]), y[b]) < 1e-10) end
                -- sequences of other lengths in one, and token by token
                local lengths = te.tensor({ 3, 0, 5 }, { dtype = "int32" })
                local packed = m(te.cat({ x[1]:narrow(1, 1, 3), x[2] }, 1), lengths)
                assert.is_true(far(packed:narrow(1, 1, 3), y[1]:narrow(1, 1, 3)) < 1e-10)
                assert.is_true(far(packed:narrow(1, 4, 5), y[2]) < 1e-10)
                local cache, parts = te.KVCache(), {}
                for i, n in ipairs { 2, 1, 2 } do
                    parts[i] = cache:run(m, x:narrow(2, cache.length + 1, n):contiguous())
                end
                assert.is_true(far(te.cat(parts, 2), y) < 1e-10)
                x.requires_grad = true
                local inputs = m:parameters()
                inputs[#inputs + 1] = x
                assert.is_true(te.gradcheck(function() return m(x) end, inputs))
            end)
        end
    end

    it("stands between others, fused or not, and is kept in a state", function()
        local function chain() return te.Sequential(te.RMSNorm(10), make { qk_norm = "RMSNorm" }, te.GELU()) end
        te.manual_seed(2)
        local seq = chain()
        seq:to "float32"
        local x = te.randn { 2, 4, 10 }
        local fused = seq(x)
        te.set_fusion(false)
        local alone = seq(x)
        te.set_fusion(true)
        assert.is_true(far(fused, alone) < 1e-5)
        assert.matches("normalized head by head", tostring(seq:explain(x)))
        local other = chain()
        other:to "float32"
        other:load_state_dict(seq:state_dict())
        assert.same(seq:state_dict()["2.k_norm.weight"]:totable(), other[2].k_norm.weight:totable())
        assert.is_true(far(other(x), fused) == 0)
        te.autocast({ dtype = "bfloat16", recipe = te.recipe.Float8CurrentScaling {} }, function()
            local y = seq(x)
            assert.is_true(far(y:to "float32", fused) < 0.3 * fused:abs():max():item() + 0.3)
            y:sum():backward()
        end)
        assert.is_not_nil(seq[2].q_norm.weight.grad)
    end)

    it("takes weights that are stored less 1", function()
        local m = make { rope = true, qk_norm = "LayerNorm", qk_norm_zero_centered_gamma = true }
        local plain = make { rope = true, qk_norm = "LayerNorm" }
        local state = m:state_dict()
        for _, name in ipairs { "q_norm.weight", "k_norm.weight" } do state[name] = state[name] + 1 end
        plain:load_state_dict(state)
        local x = te.randn({ 2, 5, 10 }, OPTIONS)
        assert.is_true(far(m(x), plain(x)) < 1e-12)
        assert.equal(0, te.GroupedQueryAttention(12, 4, 2,
            { qk_norm = "RMSNorm", qk_norm_zero_centered_gamma = true }).k_norm.weight:abs():max():item())
    end)

    it("has heads of any size, and biases one by one", function()
        local m = te.MultiHeadedSelfAttention(10, 4, { head_size = 8, qkv_bias = true, bias = false })
        assert.same({ 96, 10 }, m.qkv.weight.shape)
        assert.same({ 10, 32 }, m.proj.weight.shape)
        assert.is_not_nil(m.qkv.bias)
        assert.is_nil(m.proj.bias)
        assert.same({ 3, 10 }, m(te.randn { 3, 10 }).shape)
        m = te.MultiQuerySelfAttention(12, 4, { proj_bias = false })
        assert.is_not_nil(m.qkv.bias)
        assert.is_nil(m.proj.bias)
    end)

    it("says what is wrong", function()
        for message, opts in pairs {
            ["qk_norm: expected one of none, L2Normalization, RMSNorm, LayerNorm, got \"rms\""] = { qk_norm = "rms" },
            ["qk_norm_eps: 0.1 has no effect without qk_norm"] = { qk_norm_eps = 0.1 },
            ["qk_norm_before_rope has no effect without qk_norm"] = { qk_norm_before_rope = true },
            ["_gamma has no effect with qk_norm = \"none\""] = { qk_norm_zero_centered_gamma = true },
            ["has no effect with qk_norm = \"L2Normalization\""] =
                { qk_norm = "L2Normalization", qk_norm_zero_centered_gamma = true },
            ["head_size: expected positive integer, got 0"] = { head_size = 0 },
            ["qkv_bias: expected boolean"] = { qkv_bias = 1 },
        } do
            assert.error_matches(function() te.GroupedQueryAttention(12, 4, 2, opts) end, message)
        end
        assert.error_matches(function() te.GroupedQueryAttention(10, 4, 2) end, "hidden_size 10 must be a multiple")
        assert.error_matches(function() te.GroupedQueryAttention(10, 4, 3, { head_size = 4 }) end, "of num_kv_heads 3")
    end)
end)
