local te = require "te"

local x = te.tensor { { 1, 2, 3, 6 }, { -1, 0, 0, 1 } }

describe("norms", function()
    it("LayerNorm has rows of mean 0 and variance 1", function()
        local y = te.LayerNorm(4)(x)
        for _, row in ipairs(y:totable()) do
            local mean, square = 0, 0
            for _, v in ipairs(row) do mean, square = mean + v / 4, square + v * v / 4 end
            assert.is_true(math.abs(mean) < 1e-6)
            assert.is_true(math.abs(square - 1) < 1e-4)
        end
    end)

    it("RMSNorm divides by the root mean square", function()
        local y = te.RMSNorm(4, { eps = 0 })(te.tensor { { 3, 4, 0, 0 } }):totable()[1]
        assert.is_true(math.abs(y[1] - 1.2) < 1e-6)
        assert.is_true(math.abs(y[2] - 1.6) < 1e-6)
    end)

    it("L2Normalization gives rows of length 1", function()
        local y = te.L2Normalization()(te.tensor { { 3, 4 } }):totable()[1]
        assert.is_true(math.abs(y[1] - 0.6) < 1e-6)
        assert.is_true(math.abs(y[2] - 0.8) < 1e-6)
    end)

    it("zero_centered_gamma stores the distance to 1", function()
        local plain, centered = te.RMSNorm(4), te.RMSNorm(4, { zero_centered_gamma = true })
        assert.equal(0, centered.weight:abs():max():item())
        assert.is_true((plain(x) - centered(x)):abs():max():item() < 1e-6)
        centered(x):sum():backward()
        assert.same({ 4 }, centered.weight.grad.shape)
    end)

    it("adds 1 to gamma in float32, whatever the parameters' dtype", function()
        local centered = te.LayerNorm(4, { zero_centered_gamma = true, params_dtype = "bfloat16", bias = false })
        te.no_grad(function() centered.weight:fill_(2 ^ -12) end)
        local plain = te.layer_norm(x) * (1 + 2 ^ -12)
        assert.is_true((centered(x) - plain):abs():max():item() < 1e-6)
    end)

    it("gives wide rows the bits that each has by itself, and the values of float64", function()
        te.manual_seed(3)
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, width in ipairs { 2560, 3072, 4096, 4160 } do
                local rows = te.randn({ 5, width }):to(dtype)
                for _, name in ipairs { "layer_norm", "rms_norm", "softmax", "log_softmax" } do
                    local together, exact = te[name](rows), te[name](rows:to("float64")):to(dtype)
                    for row = 1, 5 do
                        local alone = te[name](rows:narrow(1, row, 1))
                        assert.is_true(together:narrow(1, row, 1):eq(alone):all():item(), name .. " of " .. width)
                    end
                    local off = (together:to("float64") - exact:to("float64")):abs():max():item()
                    local size = exact:to("float64"):abs():max():item()
                    assert.is_true(off <= size * (dtype == "bfloat16" and 2 ^ -8 or 2 ^ -20), name .. " of " .. width)
                end
            end
        end
    end)

    -- dx = r (g - mean(g) - xhat mean(g xhat)), the first mean for LayerNorm alone, sums in place of means for L2.
    local function gradient(row, g, kind)
        local n, mean, square, sum, product = #row, 0, 0, 0, 0
        for _, v in ipairs(row) do mean = mean + (kind == "layer_norm" and v / n or 0) end
        for _, v in ipairs(row) do square = square + (v - mean) ^ 2 / (kind == "l2_normalize" and 1 or n) end
        local r, dx = 1 / math.sqrt(square), {}
        for i, v in ipairs(row) do
            sum = sum + (kind == "layer_norm" and g[i] / n or 0)
            product = product + g[i] * (v - mean) * r / (kind == "l2_normalize" and 1 or n)
        end
        for i, v in ipairs(row) do dx[i] = r * (g[i] - sum - (v - mean) * r * product) end
        return dx, r
    end

    it("has gradients for rows of all sizes", function()
        local row, dy, ones = { 1, 2, -0.5, 4 }, { 1, 0, 3, -2 }, te.ones { 4 }
        local calls = {
            { "rms_norm", function(t) return te.rms_norm(t, { eps = 0 }) end },
            { "rms_norm", function(t) return te.rms_norm(t, ones, { eps = 0 }) end },
            { "rms_norm", function(t) return te.rms_norm_zero_centered(t, ones - 1, { eps = 0 }) end },
            { "layer_norm", function(t) return te.layer_norm(t, ones, ones, { eps = 0 }) end },
            { "layer_norm", function(t) return te.layer_norm_zero_centered(t, ones - 1, { eps = 0 }) end },
            { "l2_normalize", function(t) return te.l2_normalize(t, { eps = 0 }) end },
            { "rms_norm", te.Sequential(te.Identity(), te.RMSNorm(4, { eps = 0 })) },
            { "layer_norm", te.Sequential(te.ConstantScale(1), te.LayerNorm(4, { eps = 0 }), te.ConstantScale(1)) },
        }
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, exponent in ipairs { -50, -20, 0, 40, 47, 50, 55, 60 } do
                local scaled = {}
                for i, v in ipairs(row) do scaled[i] = v * 2 ^ exponent end
                for i, call in ipairs(calls) do
                    local t = te.tensor({ scaled }, { dtype = dtype, requires_grad = true })
                    call[2](t):backward(te.tensor({ dy }, { dtype = dtype }))
                    local expected, r = gradient(scaled, dy, call[1])
                    for k, got in ipairs(t.grad:totable()[1]) do
                        local off = math.abs(got - expected[k]) / r
                        assert.is_true(off < (dtype == "float32" and 1e-5 or 2e-2),
                            ("%d: %s of %s at 2^%d: %g, not %g"):format(i, call[1], dtype, exponent, got, expected[k]))
                    end
                end
            end
        end
    end)

    it("normalizes over several dimensions", function()
        te.manual_seed(2)
        local deep = te.randn({ 3, 2, 5 })
        for _, class in ipairs { te.LayerNorm, te.RMSNorm } do
            for _, centered in ipairs { false, true } do
                local m, flat = class({ 2, 5 }, { zero_centered_gamma = centered }),
                    class(10, { zero_centered_gamma = centered })
                assert.same({ 2, 5 }, m.weight.shape)
                te.no_grad(function()
                    m.weight:uniform_()
                    flat.weight:copy_(m.weight:flatten())
                end)
                local y = m(deep)
                assert.same({ 3, 2, 5 }, y.shape)
                assert.same(flat(deep:view(3, 10)):view({ 3, 2, 5 }):totable(), y:totable())
                y:sum():backward()
                assert.same({ 2, 5 }, m.weight.grad.shape)
            end
        end
        assert.equal("LayerNorm({2, 5}, eps=1e-05)", tostring(te.LayerNorm({ 2, 5 })))
        assert.error_matches(function() te.LayerNorm({ 2, 5 })(te.ones({ 5, 2 })) end,
            "te%.LayerNorm: the input has shape {5,2}, its last sizes must be {2,5}")
        assert.error_matches(function() te.RMSNorm(4)(te.ones({ 4, 3 })) end, "its last sizes must be {4}")
        assert.error_matches(function() te.LayerNorm({}) end, "at least one size")
        assert.error_matches(function() te.LayerNorm({ 2, -1 }) end, "normalized_shape%[2%]: expected positive integer")
    end)

    it("takes options", function()
        te.LayerNorm(4, { sm_margin = 0 })
        assert.error_matches(function() te.LayerNorm(4, { sm_margin = 2 }) end, "option sm_margin: kernels leave no")
        assert.is_nil(te.LayerNorm(4, { bias = false }).bias)
        assert.error_matches(function() te.LayerNorm(4, { epsilon = 1 }) end, "te%.LayerNorm: unknown option")
        assert.error_matches(function() te.LayerNorm() end, "te%.LayerNorm: size: expected positive integer, got nil")
        assert.equal("LayerNorm(size=4, eps=1e-05)", tostring(te.LayerNorm(4)))
    end)

    it("refuses an eps below 0 also where it was written later, alone and fused", function()
        for _, class in ipairs { te.LayerNorm, te.RMSNorm } do
            for _, eps in ipairs { -1, 0 / 0 } do
                local norm = class(4)
                local fused = te.Sequential(norm, te.GELU())
                fused(te.ones { 2, 4 })
                norm.eps = eps
                assert.error_matches(function() norm(te.ones { 2, 4 }) end, "eps must be at least 0, not ", 1, true)
                assert.error_matches(function() fused(te.ones { 2, 4 }) end, "eps.* at least 0")
            end
        end
        assert.error_matches(function() return te.l2_normalize(te.ones { 4 }, { eps = -2 }) end,
            "te.l2_normalize: eps must be at least 0, not -2", 1, true)
    end)
end)
