--- FP8 attention (fp8_dpa): forward against products of what the bytes stand for with probabilities and result rounded
--- to E4M3, backward against float64 attention of the same operands, and what delayed scaling remembers.

local te = require "te"
local operation = require "te.operation"
local book = require "spec.support.attention"

local core, f64 = te._core, book.f64

local function current(opts)
    opts = opts or {}
    opts.fp8_dpa = true
    return te.recipe.Float8CurrentScaling(opts)
end

local function random(shape, dtype)
    local t = te.randn(shape):to(dtype or "float32")
    t.requires_grad = true
    return t
end

local function inputs(case)
    te.manual_seed(case.seed or 2)
    local q = random({ case.batch or 2, case.heads or 2, case.seq or 13, case.dim or 16 }, case.dtype)
    local kv = { case.batch or 2, case.kv_heads or case.heads or 2, case.seq_kv or case.seq or 13, case.dim or 16 }
    local k = random(kv, case.dtype)
    kv[4] = case.dim_v or kv[4]
    return q, k, random(kv, case.dtype)
end

-- One minus what dropout leaves out, scaled up: the attention of values that are a unit matrix, over the probabilities.
local function kept(q, k, opts)
    local sq, skv, heads = q:size(3), k:size(3), q:size(2)
    local unit = te.eye(skv):view({ 1, 1, skv, skv }):expand({ q:size(1), k:size(2), skv, skv }):contiguous()
    te.manual_seed(77)
    local p = te.scaled_dot_product_attention(te.zeros({ q:size(1), heads, sq, q:size(4) }),
        te.zeros({ q:size(1), k:size(2), skv, q:size(4) }), unit, nil, { dropout = opts.dropout })
    return f64(te.gt(p, 0)) / (1 - opts.dropout)
end

local function attend(module, recipe, q, k, v)
    te.manual_seed(77)
    return te.autocast({ recipe = recipe }, module, q, k, v)
end

-- Fails where |a - b| is above `bound`, a tensor or a number.
local function assert_near(a, b, bound)
    local excess = ((f64(a) - f64(b)):abs() - bound):max():item()
    assert.is_true(excess <= 0, ("off by %g more than allowed"):format(excess))
end

local function largest(t) return f64(t):abs():max():item() end

local cases = {
    ["one head"] = { heads = 1 },
    ["sizes that are no multiples"] = { seq = 71, dim = 24, dim_v = 40, batch = 1 },
    ["causal"] = { opts = { causal = true }, seq = 70 },
    ["more keys than queries"] = { seq = 5, seq_kv = 67 },
    ["grouped queries"] = { heads = 6, kv_heads = 2, opts = { causal = true } },
    ["a window"] = { opts = { causal = true, window_left = 3 }, seq = 66 },
    ["a scale of its own"] = { opts = { scale = 0.5 } },
    ["dropout"] = { opts = { dropout = 0.25 }, seq = 21 },
    ["bfloat16"] = { dtype = "bfloat16", opts = { causal = true }, seq = 66 },
    ["float16"] = { dtype = "float16", dim = 8 },
    ["one position"] = { seq = 1 },
}

describe("FP8 attention", function()
    for name, case in pairs(cases) do
        local opts = case.opts or {}
        local precision = case.dtype == "bfloat16" and 2 ^ -8 or case.dtype == "float16" and 2 ^ -11 or 0

        it("multiplies the bytes and rounds probabilities: " .. name, function()
            local module, q, k, v = te.DotProductAttention(opts), inputs(case)
            local keep = opts.dropout and kept(q, k, opts)
            local y = attend(module, current(), q, k, v)
            assert.equal(case.dtype or "float32", y.dtype)
            local expected, slack = book.rounded(q, k, v, opts, keep)
            assert_near(y, expected, slack + precision * expected:abs() + 1e-6)
            local plain = attend(module, nil, q, k, v)
            assert.is_true(largest(plain:to("float32") - y:to("float32")) > 0)
            assert_near(y, plain, 0.15 * largest(v))
        end)

        -- Beside the bound that is theirs: float32 sums, and in 16 bits operands and weights
        -- that are rounded once more.
        it("has the gradients of attention of those operands: " .. name, function()
            local module, q, k, v = te.DotProductAttention(opts), inputs(case)
            local keep = opts.dropout and kept(q, k, opts)
            local y = attend(module, current(), q, k, v)
            local dy = te.randn(y.shape):to(y.dtype)
            y:backward(dy)
            local grads, bounds = book.gradients(q, k, v, f64(dy), opts, keep)
            for which, t in pairs { q = q, k = k, v = v } do
                assert_near(t.grad, grads[which], bounds[which] + (1e-5 + 8 * precision) * largest(grads[which]) + 1e-6)
            end
        end)
    end

    it("keeps its recipe where another product was called meanwhile", function()
        local q, k, v = inputs { seq = 5 }
        local function run(inside)
            local module = te.DotProductAttention()
            return te.autocast({ recipe = current() }, function()
                return require("te.recipe.mode").attention(module, function(...)
                    if inside then inside() end
                    return te.scaled_dot_product_attention(...)
                end, q, k, v)
            end)
        end
        local expected = run()
        assert.is_true(largest(expected - te.scaled_dot_product_attention(q, k, v)) > 0)
        local function nested() core.with_product(core.recipe_state(), te.ones, 1) end
        assert.same(expected:totable(), run(nested):totable())
        local other = te.Sequential(te.MultiHeadedSelfAttention(16, 2))
        assert.same(expected:totable(), run(function() other(te.ones { 1, 4, 16 }) end):totable())
        local linear = te.Linear(16, 16)
        assert.same(expected:totable(), run(function() linear(te.ones { 16, 16 }) end):totable())
    end)

    it("takes packed sequences", function()
        te.manual_seed(3)
        local lens, heads, dim = { 5, 0, 9, 1 }, 2, 8
        local qkv = random({ 15, 3 * heads * dim })
        local module = te.MultiHeadedSelfAttention(heads * dim, heads)
        module.qkv, module.proj = te.Identity(), te.Identity()
        local y = te.autocast({ recipe = current() }, module, qkv, te.tensor(lens, { dtype = "int32" }))
        local parts, values = {}, qkv:detach():view({ 15, 3, heads, dim })
        for i = 1, 3 do parts[i] = values:select(2, i):transpose(1, 2):unsqueeze(1) end
        local expected, slack = book.rounded(parts[1], parts[2], parts[3], { causal = true, lens = lens }, nil, qkv)
        local flat = function(t) return t:squeeze(1):transpose(1, 2):reshape({ 15, heads * dim }) end
        assert_near(y, flat(expected), flat(slack) + 1e-6)
    end)

    local function model(recipe_seed)
        te.manual_seed(recipe_seed or 5)
        return te.Sequential(te.Residual(te.LayerNorm(32), te.GroupedQueryAttention(32, 4, 2)), te.Linear(32, 32))
    end

    local function step(m, recipe, x, dtype)
        for _, p in ipairs(m:parameters()) do p.grad = nil end
        local y = te.autocast({ recipe = recipe, dtype = dtype }, m, x)
        y:sum():backward()
        return te._core.tensor_bytes(y:detach():to("cpu"):contiguous())
    end

    for _, make in ipairs { "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling" } do
        it("is the same fused and unfused, and acts: " .. make, function()
            local results = {}
            for i, fused in ipairs { true, false, true } do
                te.set_fusion(fused)
                finally(function() te.set_fusion(true) end)
                local m, recipe = model(), te.recipe[make] { fp8_dpa = i < 3 }
                te.manual_seed(8)
                local x = te.randn({ 2, 9, 32 })
                results[i] = step(m, recipe, x, "bfloat16") .. step(m, recipe, x, "bfloat16")
            end
            te.set_fusion(true)
            assert.is_true(results[1] == results[2])
            assert.is_false(results[1] == results[3])
        end)
    end

    it("is asked for by fp8_mha, too", function()
        te.manual_seed(8)
        local x = te.randn({ 1, 9, 32 })
        local m = te.MultiHeadedSelfAttention(32, 4)
        m.proj = te.Identity()
        local function run(opts)
            return step(te.Sequential(m), te.recipe.Float8CurrentScaling(opts), x)
        end
        assert.is_true(run { fp8_dpa = true } == run { fp8_mha = true })
        assert.is_false(run {} == run { fp8_mha = true })
    end)

    -- What the plan says of attention's result: the kernels forward, and why it is or is not handed on.
    local function explained(recipe, opts, x)
        te.manual_seed(5)
        local m = te.Sequential(te.LayerNorm(32), te.MultiHeadedSelfAttention(32, 4, opts))
        local plan = te.autocast({ recipe = recipe, dtype = "bfloat16" }, function() return m:explain(x) end)
        return tostring(plan)
    end

    it("hands bytes to the projection under fp8_mha", function()
        te.manual_seed(8)
        local x = te.randn({ 2, 9, 32 })
        local R = te.recipe
        assert.is_truthy(explained(R.DelayedScaling { fp8_mha = true }, {},
            x):find("result as bytes to its product", 1, true))
        for reason, case in pairs {
            ["the recipe hands it on in high precision"] = { R.DelayedScaling { fp8_dpa = true } },
            ["the product multiplies another format"] = { R.MXFP8BlockScaling { fp8_mha = true }, plain = true },
            ["with dropout it may leave"] = { R.DelayedScaling { fp8_mha = true }, { dropout = 0.1 } },
            ["backward reads it in high precision"] = {
                R.Float8CurrentScaling { fp8_mha = true, backward_override = "high_precision" },
            },
        } do
            local text = explained(case[1], case[2] or {}, x)
            assert.is_nil(text:find("result as bytes to its product", 1, true), text)
            assert.is_truthy(text:find("values of the result", 1, true), text)
            if not case.plain then assert.is_truthy(text:find(reason, 1, true), text) end
        end
    end)

    for _, override in ipairs { "none", "high_precision", "dequantized" } do
        it("multiplies the same bytes fused and unfused under fp8_mha, backward " .. override, function()
            local results = {}
            for i, fused in ipairs { true, false } do
                te.set_fusion(fused)
                finally(function() te.set_fusion(true) end)
                local opts = { fp8_mha = true, backward_override = override ~= "none" and override or nil }
                local m, recipe = model(), te.recipe.Float8CurrentScaling(opts)
                te.manual_seed(8)
                local x = te.randn({ 2, 9, 32 })
                results[i] = { y = step(m, recipe, x, "bfloat16"), m = m }
            end
            te.set_fusion(true)
            assert.is_true(results[1].y == results[2].y)
            local fused, unfused = results[1].m:parameters(), results[2].m:parameters()
            for i, p in ipairs(fused) do assert_near(p.grad, unfused[i].grad, 0.02 * largest(unfused[i].grad)) end
        end)
    end

    -- A projection with a program behind it, as for rotations of q and k.
    local Projection = te.BasicOperation:extend "Projection"
    function Projection:init(width, out) self.linear = te.Linear(width, out) end
    function Projection:forward(x) return te.silu(self.linear(x)) end
    function Projection:lower(g, x) return g:op("silu", { operation.lower_child(self.linear, g, x) }) end

    for name, make in pairs { delayed = te.recipe.DelayedScaling, current = te.recipe.Float8CurrentScaling,
        mxfp8 = te.recipe.MXFP8BlockScaling } do
        for _, option in ipairs { "fp8_dpa", "fp8_mha" } do
            it(("takes its operand quantized from the program before it: %s, %s"):format(name, option), function()
                local kept, batch = {}, te.get_default_device() == "cpu" and 192 or 1 -- stripes take a run of some size
                for i, fused in ipairs { true, false } do
                    te.set_fusion(fused)
                    finally(function() te.set_fusion(true) end)
                    te.manual_seed(3)
                    local attention = te.MultiHeadedSelfAttention(64, 2)
                    attention.qkv = Projection(64, 192)
                    local m, recipe = te.Sequential(te.LayerNorm(64), attention), make { [option] = true }
                    local x, all = te.randn { batch, 32, 64 }, {}
                    for _ = 1, 2 do all[#all + 1] = step(m, recipe, x, "bfloat16") end
                    for key, t in pairs(m:state_dict()) do all[key] = core.tensor_bytes(t:to("cpu"):contiguous()) end
                    all.gradient = core.tensor_bytes(attention.qkv.linear.weight.grad:to "cpu")
                    kept[i] = all
                    if fused then
                        local plan = te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" },
                            function() return tostring(m:explain(x)) end)
                        assert.truthy(plan:find "silu, [^\n]*input", plan)
                    end
                end
                te.set_fusion(true)
                for key, bytes in pairs(kept[2]) do assert.is_true(bytes == kept[1][key], key) end
            end)
        end
    end

    it("says that a projection's kernels do not leave it quantized", function()
        local plan = te.autocast({ recipe = te.recipe.DelayedScaling { fp8_dpa = true } },
            function() return tostring(model():explain(te.randn { 2, 9, 32 })) end)
        assert.truthy(plan:find("the product's kernels round to 16 or 32 bits", 1, true))
    end)

    it("hands its bytes on behind a reshape that counts rows anew", function()
        local results, recipe = {}, te.recipe.Float8CurrentScaling { fp8_mha = true }
        for i, fused in ipairs { true, false } do
            te.set_fusion(fused)
            finally(function() te.set_fusion(true) end)
            te.manual_seed(3)
            local m = te.Sequential(te.Linear(48, 64), te.Reshape { 2, -1, 32 }, te.LayerNorm(32),
                te.MultiHeadedSelfAttention(32, 4))
            local x = te.randn({ 9, 48 })
            if fused then
                local plan = te.autocast({ recipe = recipe, dtype = "bfloat16" },
                    function() return tostring(m:explain(x)) end)
                assert.truthy(plan:find("result as bytes to its product", 1, true))
            end
            results[i] = step(m, recipe, x, "bfloat16")
        end
        te.set_fusion(true)
        assert.is_true(results[1] == results[2])
    end)

    it("rounds once under fp8_mha: the projection quantizes nothing", function()
        local m, recipe = model(), te.recipe.DelayedScaling { fp8_mha = true }
        te.manual_seed(8)
        local x = te.randn({ 2, 9, 32 })
        step(m, recipe, x)
        local state = m[1][2]:state_dict()
        assert.equal(1, state["proj.input_scale"]:item())
        assert.not_equal(1, state["qkv.input_scale"]:item())
        assert.not_equal(1, state.input_scale:item())
    end)

    it("keeps scale and history of its operands with the module", function()
        local m, recipe = model(), te.recipe.DelayedScaling { fp8_dpa = true, amax_history_len = 3 }
        local attention = m[1][2]
        te.manual_seed(8)
        local x = te.randn({ 2, 9, 32 })
        step(m, recipe, x)
        te.set_fusion(false)
        local qkv = te.autocast({ recipe = recipe }, function()
            return te.no_grad(function() return attention.qkv(m[1][1](x)) end)
        end)
        te.set_fusion(true)
        local state = attention:state_dict()
        local scale, history = state.input_scale, state.input_amax_history
        assert.same({ 3 }, history.shape)
        assert.is_true(math.abs(448 / scale:item() / history:to("cpu"):max():item() - 1) < 1e-6)
        assert.is_true(math.abs(history:to("cpu"):max():item() / largest(qkv) - 1) < 0.2)
    end)

    it("goes on from a state dict to the bit", function()
        local function run(first, last, m, recipe)
            local bytes = {}
            for i = first, last do
                te.manual_seed(100 + i)
                bytes[#bytes + 1] = step(m, recipe, te.randn({ 2, 9, 32 }), "bfloat16")
            end
            return table.concat(bytes)
        end
        local recipe = te.recipe.DelayedScaling { fp8_dpa = true, fp8_mha = true, amax_history_len = 4 }
        local m = model()
        run(1, 3, m, recipe)
        local state = {}
        for name, t in pairs(m:state_dict()) do state[name] = t:detach():clone() end
        local other = model(99)
        other:load_state_dict(state)
        assert.is_true(run(4, 6, m, recipe) == run(4, 6, other, recipe))
        assert.is_false(run(7, 7, model(), recipe) == run(7, 7, m, recipe))
    end)

    it("runs a checkpointed stretch twice with the same factors", function()
        local grads = {}
        for i, wrap in ipairs { function(m) return m end,
            function(m) return function(x) return te.checkpoint(m, x) end end } do
            local m, recipe = model(), te.recipe.DelayedScaling { fp8_dpa = true }
            te.manual_seed(8)
            local x = te.randn({ 2, 9, 32 })
            for _ = 1, 2 do
                for _, p in ipairs(m:parameters()) do p.grad = nil end
                te.autocast({ recipe = recipe }, wrap(m), x):sum():backward()
            end
            local bytes = {}
            for _, p in ipairs(m:parameters()) do bytes[#bytes + 1] = te._core.tensor_bytes(p.grad:to("cpu")) end
            grads[i] = table.concat(bytes)
        end
        assert.is_true(grads[1] == grads[2])
    end)

    it("is counted by te.numerics", function()
        local m = model()
        local watch = te.numerics.watch(m)
        te.manual_seed(8)
        step(m, te.recipe.DelayedScaling { fp8_dpa = true }, te.randn({ 2, 9, 32 }))
        local found = 0
        for _, v in ipairs(watch:values()) do
            if v.product:find("attention$") then
                found = found + 1
                assert.equal("input", v.role)
                assert.is_true(v.amax > 0)
            end
        end
        watch:stop()
        assert.equal(1, found)
    end)

    it("keeps bytes for backward, and no values of its operands and its result", function()
        local kept = {}
        for _, option in ipairs { "none", "fp8_dpa", "fp8_mha" } do
            te.manual_seed(5)
            local m = te.Sequential(te.MultiHeadedSelfAttention(64, 4))
            local x = te.randn({ 8, 128, 64 }, { dtype = "bfloat16" })
            local recipe = te.recipe.Float8CurrentScaling(option == "none" and {} or { [option] = true })
            local function forward() return te.autocast({ recipe = recipe, dtype = "bfloat16" }, m, x) end
            forward()
            collectgarbage()
            collectgarbage()
            local before = te.memory_stats(x.device).current
            local y = forward()
            kept[option] = te.memory_stats(x.device).current - before
            assert.is_not_nil(y)
        end
        local values = 8 * 128 * 64 -- of the result; its operands are three times as many
        assert.is_true(kept.none - kept.fp8_dpa > 3.9 * values, ("%d and %d"):format(kept.none, kept.fp8_dpa))
        assert.is_true(kept.fp8_mha <= kept.fp8_dpa)
    end)

    it("collects amaxes when it calibrates", function()
        local m = model()
        local recipe = te.recipe.DelayedScaling { fp8_dpa = true }
        te.manual_seed(8)
        local x = te.randn({ 2, 9, 32 })
        te.autocast({ enabled = false, calibrating = true, recipe = recipe }, m, x)
        local changed = 0
        for name, t in pairs(m:state_dict()) do
            if name:find("input_scale") and t:item() ~= 1 then changed = changed + 1 end
        end
        assert.equal(4, changed) -- three products and the attention
    end)

    it("leaves float64 alone", function()
        local q = te.randn({ 1, 1, 4, 8 }):to("float64")
        local module = te.DotProductAttention()
        assert_near(attend(module, current(), q, q, q), attend(module, nil, q, q, q), 0)
    end)
end)
