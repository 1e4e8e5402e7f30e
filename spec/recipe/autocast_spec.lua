-- Products under te.autocast{ recipe = … }: against float64 products of the operands that te.quantize gives, fused and
-- unfused.
local te = require "te"
local products = require "spec.support.products"
local cards = require "spec.support.device"

local recipes, names, f64, distance, same, linear, step =
    products.recipes, products.names, products.f64, products.distance, products.same, products.linear, products.step

describe("products under a recipe", function()
    for _, name in ipairs(names) do
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, size in ipairs { { 64, 128, 32 }, { 37, 50, 21 }, { 200, 144, 130 } } do
                it(("are those of the quantized operands: %s, %s, %dx%dx%d"):format(name, dtype, unpack(size)),
                    function()
                    local m, k, n = unpack(size)
                    local recipe, module = recipes[name](), linear(k, n)
                    local transformed = name == "nvfp4"
                    if transformed and m % 16 > 0 then recipe.disable_stochastic_rounding = true end
                    te.manual_seed(5)
                    local x, dy = te.randn({ m, k }), te.randn({ m, n }, { dtype = dtype })
                    module.bias:copy_(te.randn({ n }))
                    local y, dx = step(module, x, dy, recipe, dtype)
                    assert.equal(dtype, y.dtype)

                    local both = { columnwise = true }
                    -- groups of 16 rows that are transformed are filled up with zeros, and multiplied as a whole
                    local qw
                    local function filled(t)
                        local rest = -m % 16
                        if not transformed or rest == 0 then return t end
                        return te.cat({ t, te.zeros({ rest, t:size(2) }, { dtype = t.dtype }) }, 1)
                    end
                    local qx = te.quantize(filled(x:to(dtype)), recipe, "input", both)
                    qw = te.quantize(module.weight:detach():to(dtype), recipe, "weight", both)
                    te.manual_seed(11)
                    local qdy = te.quantize(filled(dy), recipe, "grad_output", both)
                    local function read(q, direction)
                        q.dtype = "float32"
                        return f64(q:dequantize(direction))
                    end
                    local function rows(q)
                        local t = read(q, "rowwise")
                        return q ~= qw and t:narrow(1, 1, m) or t
                    end
                    local function columns(q) return read(q, "columnwise") end

                    local short = cards.sums_shortly() and 2e-3 or 0
                    local bound = (dtype == "float32" and 2e-6 or 6e-3) + short
                    local expected = te.matmul(rows(qx), rows(qw):transpose(1, 2)) + f64(module.bias:detach())
                    assert.is_true(distance(y, expected) < bound)
                    assert.is_true(distance(dx, te.matmul(rows(qdy), columns(qw))) < bound)
                    local dw = te.matmul(columns(qdy):transpose(1, 2), columns(qx))
                    assert.is_true(distance(module.weight.grad, dw) < 4e-6 + short)
                    assert.is_true(distance(module.bias.grad, f64(dy):sum(1)) < 1e-5)
                end)
            end
        end

        it("are the same fused and by themselves: " .. name, function()
            local function build()
                te.manual_seed(2)
                return te.Sequential(te.LayerNorm(48), te.Linear(48, 96), te.GELU(), te.Linear(96, 48), te.Dropout(0))
            end
            te.manual_seed(9)
            local x, dy = te.randn({ 40, 48 }), te.randn({ 40, 48 }, { dtype = "bfloat16" })
            local recipe = recipes[name]({})
            if name == "nvfp4" then recipe.disable_stochastic_rounding = true end
            local fused, plain = build(), build()
            for _ = 1, 3 do
                local y1 = step(fused, x, dy, recipe, "bfloat16")
                local before = te.set_fusion(false)
                local y2 = step(plain, x, dy, recipe, "bfloat16")
                te.set_fusion(before)
                assert.is_true(same(y1, y2))
            end
            for i, p in ipairs(fused:parameters()) do
                assert.is_true(distance(p.grad, plain:parameters()[i].grad) < 0.02)
            end
        end)
    end

    it("compute backward from what backward_override says", function()
        te.manual_seed(5)
        local x, dy = te.randn({ 64, 32 }), te.randn({ 64, 48 })
        local high, exact = linear(32, 48), linear(32, 48)
        local y, dx = step(high, x, dy, recipes.mxfp8 { backward_override = "high_precision" }, "float32")
        local y0, dx0 = step(exact, x, dy, nil, "float32")
        assert.is_true(distance(y, y0) > 1e-3)
        assert.is_true(same(dx, dx0))
        assert.is_true(same(high.weight.grad, exact.weight.grad))

        local recipe, module = recipes.current { backward_override = "dequantized" }, linear(32, 48)
        local _, dxd = step(module, x, dy, recipe, "float32")
        local qw = te.quantize(module.weight:detach(), recipe, "weight"):dequantize()
        local qx = te.quantize(x, recipe, "input"):dequantize()
        assert.is_true(distance(dxd, te.matmul(f64(dy), f64(qw))) < 2e-6)
        assert.is_true(distance(module.weight.grad, te.matmul(f64(dy):transpose(1, 2), f64(qx))) < 2e-6)
    end)

    it("notice that what high_precision kept was changed", function()
        local recipe = recipes.mxfp8 { backward_override = "high_precision" }
        for _, wrap in ipairs { function(m) return m end, function(m) return te.Sequential(m) end } do
            local x = te.randn({ 8, 32 })
            local y = te.autocast({ recipe = recipe }, wrap(linear(32, 16)), x)
            x:fill_(1)
            assert.error_matches(function() y:sum():backward() end, "changed in place since")
        end
    end)

    it("leave roles in high precision that Custom says so of", function()
        local mx = recipes.mxfp8()
        local seen = {}
        local recipe = te.recipe.Custom { qfactory = function(role)
            seen[#seen + 1] = role.tensor_type
            return role.tensor_type == "weight" and mx or te.recipe.HighPrecision
        end }
        te.manual_seed(5)
        local x, dy, module = te.randn({ 20, 64 }), te.randn({ 20, 24 }), linear(64, 24)
        local y, dx = step(module, x, dy, recipe, "float32")
        assert.same({ "input", "weight", "grad_output" }, seen)
        local q = te.quantize(module.weight:detach(), mx, "weight", { columnwise = true })
        assert.is_true(distance(y, te.matmul(f64(x), f64(q:dequantize("rowwise")):transpose(1, 2))) < 2e-6)
        assert.is_true(distance(dx, te.matmul(f64(dy), f64(q:dequantize("columnwise")))) < 2e-6)
        assert.is_true(distance(module.weight.grad, te.matmul(f64(dy):transpose(1, 2), f64(x))) < 2e-6)
    end)

    it("quantize a weight once per version", function()
        local module, x, recipe = linear(32, 32), te.randn({ 4, 32 }), recipes.current()
        local function count()
            local n = 0
            local profile = te.profile(function() te.no_grad(te.autocast, { recipe = recipe }, module, x) end)
            for _, event in ipairs(profile.events) do n = n + (event.name:find("^quantize") and 1 or 0) end
            return n
        end
        assert.equal(2, count())
        assert.equal(1, count())
        te.no_grad(function() module.weight:mul_(2) end)
        assert.equal(2, count())
    end)

    it("share what te.Quantize quantized", function()
        te.manual_seed(5)
        local x, dy = te.randn({ 20, 32 }), te.randn({ 20, 16 })
        local recipe = recipes.current()
        local quantize, first, second = te.Quantize {}, linear(32, 16), linear(32, 16)
        local n = 0
        local profile = te.profile(function()
            te.autocast({ recipe = recipe }, function()
                local q = quantize(x)
                assert.is_true(same(q, te.quantize(x, recipe, "input"):dequantize()))
                assert.is_true(same(first(q), second(x)))
            end)
        end)
        for _, event in ipairs(profile.events) do n = n + (event.name:find("^quantize") and 1 or 0) end
        assert.equal(5, n) -- x once for `first`, once for `second`, once above; two weights
        assert.equal(x, quantize(x))

        local both = te.Sequential(te.Quantize { forward = false, backward = true }, linear(32, 16))
        local xg = x:clone()
        xg.requires_grad = true
        local y = te.autocast({ recipe = recipe }, both, xg)
        y:backward(dy)
        local _, dx = step(linear(32, 16), x, dy, recipe, "float32")
        assert.is_true(same(xg.grad, te.quantize(dx, recipe, "grad_output"):dequantize()))
    end)

    it("work for groups of rows, some empty", function()
        te.manual_seed(1)
        local module, x = te.GroupedLinear(3, 32, 16, { bias = false }), te.randn({ 20, 32 })
        x.requires_grad = true
        local y = te.autocast({ recipe = recipes.mxfp8() }, module, x, te.tensor({ 12, 0, 8 }, { dtype = "int32" }))
        y:sum():backward()
        local q = te.quantize(module.weight[3]:detach(), recipes.mxfp8(), "weight"):dequantize()
        local qx = te.quantize(x:detach():narrow(1, 13, 8):contiguous(), recipes.mxfp8(), "input"):dequantize()
        local expected = te.matmul(f64(qx), f64(q):transpose(1, 2))
        assert.is_true(distance(y:detach():narrow(1, 13, 8), expected) < 2e-6)
    end)
end)

describe("te.autocast", function()
    it("nests, and restores what it found when a function raises", function()
        local mode = require "te.recipe.mode"
        local outer, inside = recipes.current(), recipes.mxfp8()
        te.autocast({ recipe = outer, dtype = "bfloat16" }, function()
            assert.equal(outer, mode.recipe)
            assert.has_error(function()
                te.autocast({ recipe = inside }, function()
                    assert.equal(inside, mode.recipe)
                    error("stop", 0)
                end)
            end, "stop")
            assert.equal(outer, mode.recipe)
            te.autocast({ dtype = "float32" }, function() assert.is_true(mode.enabled) end)
            te.autocast({ enabled = false }, function()
                assert.is_false(mode.enabled)
                assert.is_nil(te._core.compute_dtype())
            end)
            assert.equal("bfloat16", te._core.compute_dtype())
        end)
        assert.is_false(mode.on)
        assert.is_nil(te._core.compute_dtype())
    end)

    it("takes delayed scaling with neither recipe nor dtype", function()
        local mode = require "te.recipe.mode"
        local x = te.randn { 4, 16 }
        local function run(autocast, opts)
            local module = linear(16, 16)
            for _ = 1, 2 do autocast(opts, module, x) end
            return autocast(opts, module, x):detach()
        end
        local expected = run(te.autocast, { recipe = recipes.delayed() })
        assert.is_true(distance(expected, run(te.autocast, { enabled = false })) > 0)
        for _, opts in ipairs { {}, { enabled = true } } do assert.is_true(same(expected, run(te.autocast, opts))) end
        assert.is_true(same(expected, run(te.fp8_autocast, {})))
        te.autocast({ dtype = "bfloat16" }, function()
            assert.is_false(mode.on)
            te.autocast({}, function() assert.is_true(mode.enabled) end)
        end)
        te.autocast({ recipe = recipes.current() }, function()
            local outer = mode.recipe
            te.autocast({}, function() assert.equal(outer, mode.recipe) end)
        end)
    end)

    it("refuses what it cannot do", function()
        assert.has_error(function() te.autocast({ recipe = 7 }, print) end)
        assert.error_matches(function() te.autocast({ group = {} }, print) end, "group")
        assert.error_matches(function() te.autocast({ recipes = 1 }, print) end, "recipe")
    end)

    it("has its older name", function()
        local module, x = linear(16, 16), te.randn({ 4, 16 })
        local y = te.fp8_autocast({ enabled = true, fp8_recipe = recipes.current() }, module, x)
        local z = te.autocast({ recipe = recipes.current() }, module, x)
        assert.is_true(same(y:detach(), z:detach()))
        local newer = te.fp8_autocast({ recipe = recipes.current(), dtype = "bfloat16" }, module, x)
        assert.equal("bfloat16", newer.dtype)
        assert.is_true(same(te.fp8_autocast({ enabled = false }, module, x):detach(), module(x):detach()))
    end)
end)

describe("cache_quantized_input", function()
    it("gives backward the input as E4M3 holds it, fused or not", function()
        for _, name in ipairs { "GELU", "SwiGLU", "SReLU" } do
            te.manual_seed(5)
            local width = name == "SwiGLU" and 32 or 64
            local x, dy = te.randn({ 12, 48 }), te.randn({ 12, width })
            local function build(cached)
                te.manual_seed(6)
                return te.Sequential(te.Linear(48, 64), te[name] { cache_quantized_input = cached })
            end
            local model = build(true)
            local recipe = te.recipe.Float8CurrentScaling { fp8_format = "E4M3" }
            local h = te.no_grad(model[1], x)
            local q = te.quantize(h, recipe):dequantize()
            q.requires_grad = true
            local y = te[name] {} (q)
            y:backward(dy)
            local expected = te.matmul(q.grad:transpose(1, 2), x)
            for _, fuse in ipairs { true, false } do
                local before = te.set_fusion(fuse)
                model = build(true)
                local out = model(x)
                assert.is_true(same(out:detach(), te.no_grad(te[name] {}, h)))
                out:backward(dy, { retain_graph = true })
                te.set_fusion(before)
                assert.is_true(distance(model[1].weight.grad, expected) < 1e-6)
                assert.is_true(distance(model[1].weight.grad, build(false)[1].weight) > 0)
                model[1].weight.grad = nil
                out:backward(dy)
                assert.is_true(distance(model[1].weight.grad, expected) < 1e-6)
            end
        end
    end)
end)
