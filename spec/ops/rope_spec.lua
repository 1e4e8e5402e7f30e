local te = require "te"
local plans = require "spec.support.plans"

-- Rotary position embedding by its formula, number by number: rows is a list of lists, positions one number each.
local function turned(rows, positions, f, interleaved)
    local result = {}
    for i, row in ipairs(rows) do
        local out = { unpack(row) }
        for k = 1, #f do
            local a, b = k, k + #f
            if interleaved then a, b = 2 * k - 1, 2 * k end
            local angle = positions[i] * f[k]
            out[a] = row[a] * math.cos(angle) - row[b] * math.sin(angle)
            out[b] = row[b] * math.cos(angle) + row[a] * math.sin(angle)
        end
        result[i] = out
    end
    return result
end

local function difference(t, rows)
    local worst = 0
    for i, row in ipairs(t:reshape({ -1, t:size(-1) }):totable()) do
        for j, v in ipairs(row) do worst = math.max(worst, math.abs(v - rows[i][j])) end
    end
    return worst
end

local function rows_of(t) return t:reshape({ -1, t:size(-1) }):totable() end

-- Positions of the rows of {…, seq, dim}.
local function counted(lead, seq, offset)
    local positions = {}
    for i = 1, lead * seq do positions[i] = (i - 1) % seq + offset end
    return positions
end

describe("te.rope", function()
    local tolerance = { float32 = 2e-5, float64 = 1e-12, bfloat16 = 0.02, float16 = 3e-3 }
    before_each(function() te.manual_seed(11) end)

    for dtype, limit in pairs(tolerance) do
        it("turns pairs of features by their position in " .. dtype, function()
            for _, pairs_kept in ipairs { 4, 3, 1, 0 } do
                for _, interleaved in ipairs { false, true } do
                    local f = te.rand({ pairs_kept }, { dtype = dtype == "float64" and dtype or "float32" })
                    local x = te.randn { 2, 3, 7, 8 }:to(dtype)
                    local y = te.rope(x, f, nil, { interleaved = interleaved, offset = 5 })
                    assert.same(x.shape, y.shape)
                    assert.equal(dtype, y.dtype)
                    local expected = turned(rows_of(x), counted(6, 7, 5), f:totable(), interleaved)
                    assert.is_true(difference(y, expected) < limit)
                end
            end
        end)
    end

    it("takes positions of each row, shared or not, and views of any strides", function()
        local f = te.rope_frequencies(8)
        local x = te.randn { 5, 2, 3, 8 }:transpose(1, 3) -- {3, 2, 5, 8}
        local given = te.tensor { { { 4, 0, 9, 2, 2 } }, { { 0, 1, 2, 3, 4 } }, { { 7, 7, 7, 100, 1 } } } -- {3, 1, 5}
        local list = {}
        for b = 1, 3 do
            for _ = 1, 2 do
                for _, p in ipairs(given[b][1]:totable()) do list[#list + 1] = p end
            end
        end
        local expected = turned(rows_of(x), list, f:totable())
        for _, dtype in ipairs { "float32", "int32", "int64" } do
            assert.is_true(difference(te.rope(x, f, given:to(dtype)), expected) < 1e-4)
        end
        assert.is_true(difference(te.rope(x, f, given - 3, { offset = 3 }), expected) < 1e-4)
        local row = te.randn { 8 }
        assert.is_true(difference(te.rope(row, f, te.tensor(3)), turned(rows_of(row), { 3 }, f:totable())) < 1e-5)
    end)

    it("makes products depend on the distance alone, and keeps lengths", function()
        local f = te.rope_frequencies(16):to "float64"
        local q, k = te.randn({ 1, 16 }, { dtype = "float64" }), te.randn({ 1, 16 }, { dtype = "float64" })
        local function product(at_q, at_k)
            return (te.rope(q, f, nil, { offset = at_q }) * te.rope(k, f, nil, { offset = at_k })):sum():item()
        end
        for _, shift in ipairs { 1, 17, 1000 } do
            assert.near(product(3, 8), product(3 + shift, 8 + shift), 1e-10)
        end
        assert.near(q:norm():item(), te.rope(q, f, nil, { offset = 77 }):norm():item(), 1e-12)
    end)

    it("has its gradient", function()
        local f = te.rope_frequencies(4)
        for _, interleaved in ipairs { false, true } do
            local x = te.randn({ 2, 3, 6 }, { dtype = "float64", requires_grad = true })
            assert.is_true(te.gradcheck(function(t)
                return te.rope(t:transpose(1, 2), f, nil, { interleaved = interleaved, offset = 2 })
            end, { x }))
        end
    end)

    it("takes tensors without elements", function()
        local f = te.rope_frequencies(4)
        for _, shape in ipairs { { 0, 4 }, { 2, 0, 4 }, { 0, 3, 6 } } do
            local x = te.zeros(shape, { requires_grad = true })
            local y = te.rope(x, f)
            assert.same(shape, y.shape)
            y:sum():backward()
            assert.same(shape, x.grad.shape)
        end
    end)

    it("says what is wrong", function()
        local x, f = te.randn { 2, 3, 8 }, te.rope_frequencies(8)
        local function refuses(message, ...)
            local ok, err = pcall(te.rope, ...)
            assert.is_false(ok)
            assert.is_truthy(tostring(err):find(message, 1, true), err)
        end
        refuses("te.rope: x {.., seq, dim} of a floating dtype is needed, not {8} float32", te.ones { 8 }, f)
        refuses("is needed, not {3,8} int32", te.ones({ 3, 8 }, { dtype = "int32" }), f)
        refuses("frequencies must be {pairs} of float32 or float64, not {2,2} float32", x, te.ones { 2, 2 })
        refuses("frequencies must be {pairs} of float32 or float64, not {4} int32", x, f:to "int32")
        refuses("5 frequencies turn 10 features, but rows have 8", x, te.ones { 5 })
        refuses("positions {2} float32 do not fit the rows of {2,3,8}", x, f, te.ones { 2 })
        local learned = te.rope_frequencies(8)
        learned.requires_grad = true
        x.requires_grad = true
        refuses("frequencies have no gradient", x, learned)
        assert.error_matches(function()
            te.self_attention(te.zeros { 2, 3, 0 }, { frequencies = te.zeros { 0 }, heads = 1 })
        end, "heads of no features, qkv {2,3,0}, cannot be turned")
    end)
end)

describe("te.rope_frequencies", function()
    local function close(expected, t)
        for k, v in ipairs(t:totable()) do assert.near(expected(k - 1), v, 1e-7 * math.abs(expected(k - 1)) + 1e-12) end
    end

    it("are powers of the base", function()
        close(function(k) return 10000 ^ (-2 * k / 64) end, te.rope_frequencies(64))
        close(function(k) return 500000 ^ (-2 * k / 6) end, te.rope_frequencies(6, { base = 5e5 }))
        assert.equal("float32", te.rope_frequencies(2).dtype)
        assert.error_matches(function() te.rope_frequencies(2 ^ 40) end,
            "te.rope_frequencies: size: expected .* at most 1048576, got 1099511627776")
    end)

    it("are scaled for longer contexts", function()
        close(function(k) return 10000 ^ (-2 * k / 8) / 4 end,
            te.rope_frequencies(8, { scaling = { factor = 4 } }))
        close(function(k) -- the cases of Llama 3.1, one by one
            local f, original = 500000 ^ (-2 * k / 128), 8192
            local wavelength = 2 * math.pi / f
            if wavelength < original / 4 then return f end
            if wavelength > original / 1 then return f / 8 end
            local smooth = (original / wavelength - 1) / (4 - 1)
            return (1 - smooth) * f / 8 + smooth * f
        end, te.rope_frequencies(128, { base = 500000, scaling = { type = "llama3", factor = 8 } }))
    end)

    it("are scaled as YaRN does it", function()
        -- every ninth and all of what Transformers 5.24 gives
        local f = te.rope_frequencies(128, { base = 1e6, scaling = { type = "yarn", factor = 4,
            original_max_position_embeddings = 32768 } })
        for i, expected in ipairs { 1, 0.1433013, 0.02053525, 0.002423422, 0.0001798412, 1.510741e-05, 2.164911e-06,
            3.102344e-07 } do
            assert.near(1, f[9 * i - 8]:item() / expected, 1e-6)
        end
        f = te.rope_frequencies(16, { base = 100, scaling = { type = "yarn", factor = 8, beta_fast = 8, beta_slow = 2,
            truncate = false, original_max_position_embeddings = 64 } })
        for i, expected in ipairs { 1, 0.443763, 0.1346494, 0.02222849, 0.0125, 0.007029266, 0.003952847,
            0.002222849 } do
            assert.near(1, f[i]:item() / expected, 1e-6)
        end
    end)

    it("say what is wrong", function()
        for message, arguments in pairs {
            ["size: expected an even number, got 7"] = { 7 },
            ["size: expected positive integer"] = { 0 },
            ["base: expected a number above 0"] = { 8, { base = 0 } },
            ["scaling: .*factor: expected a number above 0"] = { 8, { scaling = { factor = -1 } } },
            ["type: expected one of linear, llama3, yarn"] = { 8, { scaling = { type = "longrope" } } },
            ["beta_fast 1 must be above beta_slow 1"] = { 8, { scaling = { type = "yarn", beta_fast = 1 } } },
            ["base: expected a number above 1 for yarn"] = { 8, { base = 1, scaling = { type = "yarn" } } },
            ["scaling: .*low_freq_factor"] = { 8, { scaling = { low_freq_factor = 2 } } },
            ["high_freq_factor 1 must be above"] = { 8, { scaling = { type = "llama3", high_freq_factor = 1 } } },
        } do
            assert.error_matches(function() te.rope_frequencies(unpack(arguments)) end, message)
        end
    end)
end)

describe("attention modules with rope", function()
    local made = {
        MultiHeadedSelfAttention = function(opts) return te.MultiHeadedSelfAttention(16, 2, opts) end,
        GroupedQueryAttention = function(opts) return te.GroupedQueryAttention(32, 4, 2, opts) end,
        MultiQuerySelfAttention = function(opts) return te.MultiQuerySelfAttention(16, 4, opts) end,
    }
    before_each(function() te.manual_seed(5) end)

    -- The same from separate queries, keys and values.
    local function reference(m, x, opts)
        local size, heads, kv = m.head_size, m.num_heads, m.num_kv_heads
        local parts = te.linear(x, m.qkv.weight, m.qkv.bias)
            :reshape({ x:size(1), x:size(2), heads + 2 * kv, size }):transpose(2, 3)
        local function turn(t) return te.rope(t, m.rope_frequencies, nil, { interleaved = m.rope_interleaved }) end
        local y = te.scaled_dot_product_attention(turn(parts:narrow(2, 1, heads)),
            turn(parts:narrow(2, heads + 1, kv)), parts:narrow(2, heads + kv + 1, kv), nil, opts)
        return te.linear(y:transpose(2, 3):reshape({ x:size(1), x:size(2), heads * size }), m.proj.weight, m.proj.bias)
    end

    local function near(a, b) return (a:to "float64" - b:to "float64"):abs():max():item() < 1e-5 end

    for name, make in pairs(made) do
        it(name .. " turns queries and keys", function()
            for _, rope in ipairs { true, { size = 2 }, { interleaved = true, base = 100 } } do
                local m = make { rope = rope }
                local x = te.randn { 2, 6, m.qkv.in_features }
                x.requires_grad = true
                local y = m(x)
                assert.is_true(near(y, reference(m, x, { causal = true })))
                te.sum(y * y):backward()
                local dx, dw = x.grad, m.qkv.weight.grad
                x.grad, m.qkv.weight.grad = nil, nil
                local other = reference(m, x, { causal = true })
                te.sum(other * other):backward()
                assert.is_true(near(dx, x.grad))
                assert.is_true(near(dw, m.qkv.weight.grad))
            end
        end)

        it(name .. " begins anew with each packed sequence", function()
            local m = make { rope = true }
            local x = te.randn { 9, m.qkv.in_features }
            x.requires_grad = true
            local packed = m(x, te.tensor({ 4, 0, 2, 3 }, { dtype = "int32" }))
            local apart = te.cat({ m(x:narrow(1, 1, 4)), m(x:narrow(1, 5, 2)), m(x:narrow(1, 7, 3)) }, 1)
            assert.is_true(near(packed, apart))
            te.sum(packed * packed):backward()
            local dx = x.grad
            x.grad = nil
            te.sum(apart * apart):backward()
            assert.is_true(near(dx, x.grad))
        end)

        it(name .. " goes on in a cache", function()
            local m = te.Sequential(te.Residual(te.RMSNorm(make().qkv.in_features), make { rope = true }))
            local x = te.randn { 2, 9, make().qkv.in_features }
            local cache, rows = te.KVCache(), {}
            for _, part in ipairs { { 1, 5 }, { 6, 1 }, { 7, 3 } } do
                rows[#rows + 1] = cache:run(m, x:narrow(2, part[1], part[2]))
            end
            assert.is_true(near(m(x), te.cat(rows, 2)))
        end)
    end

    it("are planned with their neighbours", function()
        local m = te.Sequential(te.Residual(te.RMSNorm(32), made.GroupedQueryAttention { rope = true }),
            te.Residual(te.RMSNorm(32), te.Linear(32, 64), te.SwiGLU(), te.Linear(32, 32)))
        local x = plans.input { 2, 5, 32 }
        plans.assert_unchanged(m, x)
        local kernels = {}
        for i, step in ipairs(m:explain(x).forward) do kernels[i] = step.kernels[1] end
        assert.same({ "rms_norm", "linear", "rope", "self_attention", "linear", "add+rms_norm", "linear", "swiglu",
            "linear", "add" }, kernels)
        plans.assert_unchanged(m, plans.input { 7, 32 }, te.tensor({ 3, 4 }, { dtype = "int32" }))
    end)

    it("quantize what they turned", function()
        local function forward(m, x, recipe)
            return te.autocast({ dtype = "bfloat16", recipe = recipe }, function() return m(x) end)
        end
        for _, name in ipairs { "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling" } do
            local opts = name ~= "MXFP8BlockScaling" and { fp8_dpa = true, fp8_mha = true } or {}
            local m = te.Sequential(te.RMSNorm(32), made.GroupedQueryAttention { rope = true })
            local x = plans.input { 2, 16, 32 }
            local exact = forward(m, x)
            for _ = 1, 2 do
                local y = forward(m, x, te.recipe[name](opts))
                assert.is_true((y - exact):norm():item() < 0.1 * exact:norm():item())
                x.grad = nil
                te.sum(y * y):backward()
                assert.is_true(x.grad:norm():item() > 0)
            end
        end
    end)

    it("keep frequencies beside the weights: moved, never converted, never saved", function()
        local m = made.MultiHeadedSelfAttention { rope = true }
        assert.is_nil(m:state_dict().rope_frequencies)
        local f = m.rope_frequencies:totable()
        m:load_state_dict(made.MultiHeadedSelfAttention { rope = true }:state_dict())
        m:to "bfloat16"
        assert.equal("float32", m.rope_frequencies.dtype)
        assert.same(f, m.rope_frequencies:totable())
        assert.matches("rope", tostring(m))
        local own = te.tensor { 1, 0.5 }
        assert.equal(own:storage_id(),
            made.MultiHeadedSelfAttention { rope = { frequencies = own } }.rope_frequencies:storage_id())
    end)

    it("say what is wrong", function()
        for message, rope in pairs {
            ["option rope: expected true or a table, got 7"] = 7,
            ["rope: .*size: expected an even number up to the head's 8 features, got 10"] = { size = 10 },
            ["rope: .*size: expected an even number up to the head's 8 features, got 3"] = { size = 3 },
            ["frequencies: expected a tensor {pairs} of at most 4, got {5}"] = { frequencies = te.ones { 5 } },
            ["rope: .*bass.*base"] = { bass = 2 },
            ["rope: base has no effect beside frequencies"] = { frequencies = te.ones { 4 }, base = 100 },
        } do
            assert.error_matches(function() made.MultiHeadedSelfAttention { rope = rope } end, message)
        end
    end)
end)
