-- Products under te.autocast{ recipe = … }: against float64 products of the operands that te.quantize gives, fused and
-- unfused, and what delayed scaling remembers.
local te = require "te"

local recipes = {
    delayed = function(opts) return te.recipe.DelayedScaling(opts) end,
    current = function(opts) return te.recipe.Float8CurrentScaling(opts) end,
    block = function(opts) return te.recipe.Float8BlockScaling(opts) end,
    mxfp8 = function(opts) return te.recipe.MXFP8BlockScaling(opts) end,
    nvfp4 = function(opts) return te.recipe.NVFP4BlockScaling(opts) end,
}
local names = { "delayed", "current", "block", "mxfp8", "nvfp4" }

local function f64(t) return t:to("float64") end

-- The largest difference, relative to the largest value.
local function distance(a, b)
    local scale = f64(b):abs():max():item()
    return (f64(a) - f64(b)):abs():max():item() / (scale > 0 and scale or 1)
end

local function bytes_of(t) return te._core.tensor_bytes(t:detach():to("cpu"):contiguous()) end

local function same(a, b) return bytes_of(a) == bytes_of(b) end

local function linear(inputs, outputs, opts)
    te.manual_seed(3)
    return te.Linear(inputs, outputs, opts)
end

-- One step of a layer by itself under a recipe: y, dx, dW, db.
local function step(module, x, dy, recipe, dtype)
    x = x:clone()
    x.requires_grad = true
    for _, p in ipairs(module:parameters()) do p.grad = nil end
    local y = te.autocast({ recipe = recipe, dtype = dtype }, module, x)
    te.manual_seed(11)
    y:backward(dy)
    return y:detach(), x.grad
end

describe("products under a recipe", function()
    for _, name in ipairs(names) do
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, size in ipairs { { 64, 128, 32 }, { 37, 50, 21 }, { 200, 144, 130 } } do
                it(("are those of the quantized operands: %s, %s, %dx%dx%d"):format(name, dtype, unpack(size)), function()
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

                    local bound = dtype == "float32" and 2e-6 or 6e-3
                    local expected = te.matmul(rows(qx), rows(qw):transpose(1, 2)) + f64(module.bias:detach())
                    assert.is_true(distance(y, expected) < bound)
                    assert.is_true(distance(dx, te.matmul(rows(qdy), columns(qw))) < bound)
                    local dw = te.matmul(columns(qdy):transpose(1, 2), columns(qx))
                    assert.is_true(distance(module.weight.grad, dw) < 4e-6)
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

describe("delayed scaling", function()
    local function scales(module)
        local state = module:state_dict()
        return { input = state.input_scale:item(), weight = state.weight_scale:item(),
            grad_output = state.grad_output_scale:item() }
    end

    it("follows the largest amax so far", function()
        local recipe, module = recipes.delayed { margin = 1, amax_history_len = 4 }, linear(16, 8, { bias = false })
        te.manual_seed(4)
        local most = { input = 0, weight = 0, grad_output = 0 }
        for i = 1, 4 do
            local x, dy = te.randn({ 12, 16 }) * i, te.randn({ 12, 8 }) * (5 - i)
            step(module, x, dy, recipe, "float32")
            most.input = math.max(most.input, x:abs():max():item())
            most.weight = math.max(most.weight, module.weight:detach():abs():max():item())
            most.grad_output = math.max(most.grad_output, dy:abs():max():item())
            local found = scales(module)
            local max = { input = 448, weight = 448, grad_output = 57344 }
            for role, amax in pairs(most) do
                assert.is_true(math.abs(found[role] / (max[role] / amax / 2) - 1) < 1e-6)
            end
            te.no_grad(function() module.weight:mul_(1.5) end)
        end
    end)

    it("quantizes with the scale of earlier steps", function()
        local recipe, module = recipes.delayed(), linear(16, 8, { bias = false })
        te.manual_seed(4)
        local x, dy = te.randn({ 12, 16 }) * 100, te.randn({ 12, 8 })
        step(module, x, dy, recipe, "float32")
        local s = scales(module)
        local y = step(module, x, dy, recipe, "float32")
        local qx = te.quantize(x, recipe, "input", { scale = s.input }):dequantize()
        -- the weight is as it was, but its scale is another
        local qw = te.quantize(module.weight:detach(), recipe, "weight", { scale = s.weight }):dequantize()
        assert.is_true(distance(y, te.matmul(f64(qx), f64(qw):transpose(1, 2))) < 2e-6)
    end)

    it("keeps its scales without gradients and after an infinite amax", function()
        local recipe, module = recipes.delayed(), linear(16, 8, { bias = false })
        te.manual_seed(4)
        local x, dy = te.randn({ 12, 16 }), te.randn({ 12, 8 })
        step(module, x, dy, recipe, "float32")
        local before = scales(module)
        te.no_grad(te.autocast, { recipe = recipe }, module, x * 50)
        assert.same(before, scales(module))
        local skipped = te._core.skipped_amaxes()
        local hostile = x:clone()
        hostile:view({ -1 }):narrow(1, 7, 1):fill_(math.huge)
        te.autocast({ recipe = recipe }, module, hostile)
        assert.same(before, scales(module))
        assert.equal(skipped + 1, te._core.skipped_amaxes())
        assert.equal(0, module:state_dict().input_amax_history:select(1, 1):item())
    end)

    it("trains the same with an evaluation in between", function()
        local function run(evaluate)
            te.manual_seed(2)
            local recipe, module = recipes.delayed(), linear(16, 16, { bias = false })
            local x, dy = te.randn({ 12, 16 }), te.randn({ 12, 16 })
            for i = 1, 3 do
                if evaluate then te.no_grad(te.autocast, { recipe = recipe }, module, x * 7) end
                te.autocast({ recipe = recipe }, module, x):backward(dy) -- the weight is quantized row-wise only
                te.no_grad(function() module.weight:mul_(1 + i) end)
            end
            return module:state_dict()
        end
        local plain, evaluated = run(false), run(true)
        for name, tensor in pairs(plain) do assert.is_true(same(tensor:detach(), evaluated[name]:detach()), name) end
        assert.is_true(plain.weight_amax_history:select(1, 1022):item() > 0)
    end)

    it("takes the larger amax of two runs in one scope", function()
        local recipe, module = recipes.delayed(), linear(16, 16, { bias = false })
        te.manual_seed(4)
        local x = te.randn({ 12, 16 })
        te.autocast({ recipe = recipe }, function()
            module(x * 3)
            module(x)
        end)
        assert.is_true(math.abs(scales(module).input * (x * 3):abs():max():item() / 448 - 1) < 1e-6)
    end)

    it("calibrates without quantizing", function()
        local recipe, module, plain = recipes.delayed(), linear(16, 8), linear(16, 8)
        te.manual_seed(4)
        local x = te.randn({ 12, 16 })
        local y = te.no_grad(te.autocast, { enabled = false, calibrating = true, recipe = recipe }, module, x)
        assert.is_true(same(y, te.no_grad(plain, x)))
        assert.is_true(math.abs(scales(module).input * x:abs():max():item() / 448 - 1) < 1e-6)
        assert.is_true(math.abs(scales(module).weight * module.weight:detach():abs():max():item() / 448 - 1) < 1e-6)
    end)

    it("calibrates in a group as by itself", function()
        local alone, grouped = linear(16, 8), te.Sequential(te.GELU(), linear(16, 8))
        te.manual_seed(4)
        local x, recipe = te.randn({ 12, 16 }), recipes.delayed()
        local scope = { enabled = false, calibrating = true, recipe = recipe }
        te.no_grad(te.autocast, scope, alone, te.no_grad(te.gelu, x))
        te.no_grad(te.autocast, scope, grouped, x)
        local a, b = alone:state_dict(), grouped:state_dict()
        assert.is_true(same(a.input_scale, b["2.input_scale"]))
        assert.is_true(same(a.weight_scale, b["2.weight_scale"]))
        assert.not_equal(1, a.input_scale:item())
    end)

    it("has one rule, in the engine as in recipe:update", function()
        local core, state = te._core, 7
        local function random()
            state = state * 16807 % 2147483647
            return state / 2147483647
        end
        for _, algorithm in ipairs { "max", "most_recent" } do
            for length = 1, 5 do
                local recipe = recipes.delayed { amax_history_len = length, amax_compute_algo = algorithm, margin = length - 2 }
                local handle = core.product_recipe(recipe:quantizer("input"), recipe:quantizer("weight"),
                    recipe:quantizer("grad_output"), "quantized", length)
                local kept = core.recipe_state()
                core.recipe_state_use(kept, handle)
                local scale, history = te.ones({ 1 }, { device = "cpu" }), te.zeros({ length }, { device = "cpu" })
                for _ = 1, 12 do
                    local draw = random()
                    history[1] = draw < 0.2 and 0 or draw < 0.3 and math.huge or random() * 10 ^ (60 * draw - 40)
                    core.recipe_state_set(kept, "grad_output", scale, history)
                    core.recipe_states_update { kept, "grad_output", algorithm, recipe.margin }
                    scale, history = recipe:update("grad_output", scale, history)
                    local engine_scale, engine_history = core.recipe_state_tensors(kept, "grad_output")
                    assert.same(scale:totable(), engine_scale:totable())
                    assert.same(history:totable(), engine_history:totable())
                end
            end
        end
    end)

    it("lets own functions choose", function()
        local seen
        local recipe = recipes.delayed {
            amax_history_len = 3,
            amax_compute_algo = function(history)
                seen = history
                return 2
            end,
            scaling_factor_compute_algo = function(amax, _, max) return max / amax / 4 end,
        }
        local module = linear(16, 8, { bias = false })
        te.manual_seed(4)
        te.autocast({ recipe = recipe }, module, te.randn({ 12, 16 }))
        assert.equal(3, #seen)
        assert.equal(56, scales(module).input)
    end)

    it("gives a checkpointed stretch the same bytes", function()
        local function run(wrap)
            te.manual_seed(2)
            local recipe = recipes.delayed()
            local module = te.Sequential(te.Linear(24, 48), te.GELU(), te.Linear(48, 24))
            local x = te.randn({ 10, 24 }) * 30
            local bytes = {}
            for _ = 1, 3 do
                for _, p in ipairs(module:parameters()) do p.grad = nil end
                local y = te.autocast({ recipe = recipe }, function() return wrap(module, x) end)
                y:backward(te.ones({ 10, 24 }))
                bytes[#bytes + 1] = bytes_of(y)
                for _, p in ipairs(module:parameters()) do bytes[#bytes + 1] = bytes_of(p.grad) end
                for _, name in ipairs { "1.input_scale", "3.grad_output_scale", "1.weight_amax_history" } do
                    bytes[#bytes + 1] = bytes_of(module:state_dict()[name])
                end
                te.no_grad(function() for _, p in ipairs(module:parameters()) do p:mul_(1.25) end end)
            end
            return table.concat(bytes)
        end
        assert.is_true(run(function(m, x) return m(x) end) == run(te.checkpoint))
    end)

    it("goes on from a saved state with the same bytes", function()
        local function build()
            te.manual_seed(2)
            return te.Sequential(te.Linear(16, 32), te.ReLU(), te.Linear(32, 16))
        end
        local recipe, x, dy = recipes.delayed(), te.randn({ 6, 16 }), te.randn({ 6, 16 })
        local module = build()
        for _ = 1, 2 do step(module, x, dy, recipe, "float32") end
        local saved = {}
        for name, t in pairs(module:state_dict()) do saved[name] = t:detach():clone() end
        local names_of = {}
        for name in pairs(saved) do names_of[#names_of + 1] = name end
        table.sort(names_of)
        assert.equal(4 + 12, #names_of)
        local other = build()
        other:load_state_dict(saved)
        te.no_grad(function() for _, p in ipairs(module:parameters()) do p:add_(0) end end) -- both quantize their weights again
        for _ = 1, 2 do
            assert.is_true(same(step(module, x, dy, recipe, "float32"), step(other, x, dy, recipe, "float32")))
        end
        saved["1.input_scale"], saved["1.input_amax_history"] = nil, nil
        other:load_state_dict(saved) -- optional
        saved["1.input_scale"] = te.ones({ 2 })
        assert.error_matches(function() other:load_state_dict(saved) end, "1.input_scale")
    end)

    it("keeps the first entries of a history whose length changes", function()
        local recipe, module = recipes.delayed { amax_history_len = 8 }, linear(16, 8)
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }))
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }) * 2)
        recipe.amax_history_len = 16
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }) * 3)
        assert.equal(16, module:state_dict().input_amax_history:numel())
        recipe.amax_history_len = 2
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }))
        assert.equal(2, module:state_dict().input_amax_history:numel())
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

describe("programs that leave results quantized", function()
    if te.get_default_device() ~= "cpu" then return end -- elsewhere in tiles: spec/cuda/emission_spec.lua
    -- enough rows for several stripes
    local ROWS, WIDTH = 4500, 256

    local function build(wide)
        te.manual_seed(2)
        return te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, wide), te.SwiGLU(), te.Dropout(0.1),
            te.Linear(wide / 2, WIDTH), te.GELU(), te.Linear(WIDTH, 32))
    end

    local function apart(a, b) return ((f64(a) - f64(b)):norm() / f64(b):norm()):item() end

    local function events(fn)
        local quantized, programs = 0, 0
        for _, event in ipairs(te.profile(fn).events) do
            if event.name:find("^quantize") then quantized = quantized + 1 end
            if event.name:find("^layer_norm$") then programs = programs + 1 end
        end
        return quantized, programs
    end

    for _, name in ipairs { "delayed", "block", "mxfp8" } do
        it("give the same bytes as by themselves: " .. name, function()
            te.manual_seed(9)
            local x, dy = te.randn({ 3, ROWS / 3, WIDTH }), te.randn({ 3, ROWS / 3, 32 }, { dtype = "bfloat16" })
            local recipe, bound = recipes[name] {}, name == "delayed" and 0.08 or 0.03 -- E5M2 is coarser
            local fused, plain = build(512), build(512)
            for _ = 1, 2 do
                te.manual_seed(4)
                local y1, dx1 = step(fused, x, dy, recipe, "bfloat16")
                local before = te.set_fusion(false)
                te.manual_seed(4)
                local y2, dx2 = step(plain, x, dy, recipe, "bfloat16")
                te.set_fusion(before)
                assert.is_true(same(y1, y2))
                assert.is_true(apart(dx1, dx2) < bound) -- gradients on their way round less often when fused
                for i, p in ipairs(fused:parameters()) do
                    assert.is_true(apart(p.grad, plain:parameters()[i].grad) < bound)
                end
            end
            if name == "delayed" then
                local a, b = fused:state_dict(), plain:state_dict()
                for key, t in pairs(a) do
                    if key:find("input_scale$") then assert.is_true(same(t, b[key])) end
                    if key:find("grad_output_scale$") then assert.is_true(distance(t, b[key]) < 0.02) end
                end
            end
            local quantized, programs = events(function() step(fused, x, dy, recipe, "bfloat16") end)
            assert.is_true(programs > 1)
            assert.is_true(quantized > 9)
            local y1 = te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, fused:eval(), x)
            local before = te.set_fusion(false)
            local y2 = te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, fused, x)
            te.set_fusion(before)
            assert.is_true(same(y1, y2))
        end)
    end

    -- a model that is watched stores its values and quantizes them by themselves
    for _, name in ipairs(names) do
        for _, case in ipairs { { "bfloat16", 2 }, { "bfloat16", 16 }, { "float32", 16 } } do -- two threads store, many compute twice
            local dtype, threads = unpack(case)
            it(("give the same bytes as when they are stored first: %s, %s, %d threads"):format(name, dtype, threads), function()
                local before = te.get_num_threads()
                te.set_num_threads(threads)
                te.manual_seed(9)
                local x, dy = te.randn({ 3, ROWS / 3, WIDTH }), te.randn({ 3, ROWS / 3, 32 }, { dtype = dtype })
                local recipe, emits, apart = recipes[name](), build(512), build(512)
                local watch = te.numerics.watch(apart)
                for _ = 1, 2 do
                    te.manual_seed(4)
                    local y1, dx1 = step(emits, x, dy, recipe, dtype)
                    te.manual_seed(4)
                    local y2, dx2 = step(apart, x, dy, recipe, dtype)
                    assert.is_true(same(y1, y2))
                    assert.is_true(same(dx1, dx2))
                    for i, p in ipairs(emits:parameters()) do -- column sums are taken in another order
                        assert.is_true(distance(p.grad, apart:parameters()[i].grad) < 1e-5)
                    end
                end
                watch:stop()
                te.set_num_threads(before)
            end)
        end
    end

    for _, name in ipairs { "current", "nvfp4" } do
        it("take the amax in a run of its own where that costs less than to store, as explain says: " .. name, function()
            local threads = te.get_num_threads()
            te.set_num_threads(7) -- enough for a LayerNorm, too few for a GELU
            te.manual_seed(2)
            local model = te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, WIDTH), te.GELU(), te.Linear(WIDTH, 32))
            local x, recipe = te.randn({ ROWS, WIDTH }), recipes[name]()
            local function run() return te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, model, x) end
            local plan = te.autocast({ recipe = recipe, dtype = "bfloat16" }, function() return tostring(model:explain(x)) end)
            assert.truthy(plan:find("layer_norm, twice: amax, quantize input to float", 1, true))
            assert.truthy(plan:find("to run that once more for the amax costs less than to store", 1, true))
            assert.truthy(plan:find("gelu_tanh, amax of input, in stripes", 1, true))
            assert.truthy(plan:find("by that amax", 1, true))
            -- column sums come from the same passes; only the gradient from outside has none
            assert.equal(1, select(2, plan:gsub("bias gradient", "")))
            run() -- copies of weights
            local count = {}
            for _, event in ipairs(te.profile(run).events) do count[event.name] = (count[event.name] or 0) + 1 end
            te.set_num_threads(threads)
            local stripes = math.ceil(ROWS / (2 ^ 20 / (2 * WIDTH)))
            assert.equal(2 * stripes, count.layer_norm)
            assert.equal(stripes, count.gelu_tanh)
            assert.equal(2 * stripes, count["quantize amax"])
            assert.equal(stripes + 1, count.quantize)
        end)

        it("measure what is not finite as a whole tensor is measured: " .. name, function()
            te.manual_seed(2)
            local model = te.Sequential(te.SReLU(), te.Linear(WIDTH, 32))
            for _, odd in ipairs { 0 / 0, math.huge, 0 } do
                local x = te.randn({ ROWS, WIDTH })
                if odd == 0 then x = te.zeros({ ROWS, WIDTH }) else x:narrow(1, ROWS - 3, 1):narrow(2, 7, 1):fill_(odd) end
                local recipe, threads = recipes[name](), te.get_num_threads()
                local function run() return te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, model, x) end
                local y1 = run()
                te.set_num_threads(16)
                local y2 = run()
                te.set_num_threads(threads)
                local before = te.set_fusion(false)
                local y3 = run()
                te.set_fusion(before)
                assert.is_true(same(y1, y3))
                assert.is_true(same(y2, y3))
            end
        end)
    end

    it("give the same rows in stripes as in batches that are none", function()
        local recipe = recipes.mxfp8 {}
        local function gated()
            te.manual_seed(2)
            return te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, 512), te.SwiGLU(), te.Linear(WIDTH, WIDTH), te.GELU(),
                te.Linear(WIDTH, 32))
        end
        te.manual_seed(9)
        local x, dy = te.randn({ 3, ROWS / 3, WIDTH }), te.randn({ 3, ROWS / 3, 32 }, { dtype = "bfloat16" })
        local y, dx = step(gated(), x, dy, recipe, "bfloat16")
        for i = 1, 3 do
            local yi, dxi = step(gated(), x[i]:clone(), dy[i]:clone(), recipe, "bfloat16")
            assert.is_true(same(y[i], yi))
            assert.is_true(same(dx[i], dxi))
        end
    end)

    it("run as a whole where the input's rows are not evenly spaced", function()
        te.manual_seed(9)
        local x = te.randn({ 2, WIDTH, ROWS }):transpose(2, 3)
        local recipe = recipes.mxfp8 {}
        local model = te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, 32))
        local y1 = te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, model, x)
        local y2 = te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, model, x:contiguous())
        assert.is_true(same(y1, y2))
    end)
end)
