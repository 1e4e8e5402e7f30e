-- Parameters that are stored quantized.
local te = require "te"
local core = te._core

local RECIPES = {
    delayed = te.recipe.DelayedScaling {}, current = te.recipe.Float8CurrentScaling {},
    block = te.recipe.Float8BlockScaling {},
    mxfp8 = te.recipe.MXFP8BlockScaling {}, nvfp4 = te.recipe.NVFP4BlockScaling {},
}

local function same(a, b) return core.tensor_bytes(a:clone()) == core.tensor_bytes(b:clone()) end

local function build(opts, seed)
    te.manual_seed(seed or 4)
    return te.quantized_model_init(opts, function()
        return te.Sequential(te.Linear(48, 96), te.GELU(), te.Linear(96, 48))
    end)
end

local function step(model, x, recipe)
    for _, p in ipairs(model:parameters()) do p.grad = nil end
    local y = te.autocast({ recipe = recipe }, model, x)
    te.manual_seed(8)
    te.sum(y * y):backward()
    return y:detach()
end

describe("te.quantized_model_init", function()
    for name, recipe in pairs(RECIPES) do
        it("stores weights in the recipe's format alone: " .. name, function()
            local high = build { enabled = false }
            local model = build { recipe = recipe }
            local weight = model[1].weight
            assert.is_true(core.is_quantized(weight))
            assert.is_false(core.is_quantized(model[1].bias))
            assert.same({ 96, 48 }, weight.shape)
            assert.equal("float32", weight.dtype)
            assert.is_true(weight.requires_grad and weight.is_leaf)
            assert.equal(4, #model:parameters())
            local expected = te.quantize(high[1].weight:detach(), recipe, "weight"):dequantize()
            assert.is_true(same(weight:detach(), expected))
            local text, stored = tostring(weight):gsub(", stored as float[%w_]+ with [^\n]+", "", 1)
            assert.equal(1, stored)
            assert.equal(tostring(expected), text)
            assert.equal(te.quantize(high[1].weight, recipe, "weight").quantizer.element or "float8_e4m3",
                tostring(weight):match "stored as (%S+)")
            assert.is_true(same(te.quantize(expected, recipe, "weight"):dequantize(),
                te.quantize(weight, recipe, "weight"):dequantize()))
            assert.equal(expected:sum():item(), weight:sum():item())
        end)

        it("multiplies what a high-precision weight would be quantized to: " .. name, function()
            local high, model = build { enabled = false }, build { recipe = recipe }
            te.manual_seed(1)
            local x = te.randn({ 20, 48 })
            if name == "delayed" then recipe = te.recipe.DelayedScaling {} end
            for _, module in ipairs { high, model } do module[1].bias.requires_grad = true end
            assert.is_true(same(step(high, x, recipe), step(model, x, recipe)))
            for i, p in ipairs(high:parameters()) do assert.is_true(same(p.grad, model:parameters()[i].grad)) end
            local before = te.set_fusion(false)
            finally(function() te.set_fusion(before) end)
            if name ~= "delayed" then assert.is_true(same(step(high, x, recipe), step(model, x, recipe))) end
        end)

        it("trains with masters, and goes on from a checkpoint with the same bytes: " .. name, function()
            local function start()
                local model = build { recipe = recipe }
                return model, te.optim.AdamW(model, { lr = 0.01 })
            end
            local function train(model, optimizer, from, to)
                local bytes = {}
                for i = from, to do
                    te.manual_seed(i)
                    local y = step(model, te.randn({ 16, 48 }), recipe)
                    optimizer:step()
                    bytes[#bytes + 1] = core.tensor_bytes(y)
                end
                return table.concat(bytes)
            end
            local model, optimizer = start()
            train(model, optimizer, 1, 2)
            local path = os.tmpname()
            finally(function() os.remove(path) end)
            te.save(path, model:state_dict())
            local saved = optimizer:state_dict()
            for _, state in pairs(saved.state) do
                for key, value in pairs(state) do state[key] = te.is_tensor(value) and value:clone() or value end
            end
            local expected = train(model, optimizer, 3, 4)
            local other, fresh = start()
            other:load_state_dict(te.load(path))
            fresh:load_state_dict(saved)
            assert.is_true(expected == train(other, fresh, 3, 4))
            assert.is_true(same(other[1].weight:detach(), model[1].weight:detach()))
            local master = optimizer.state[model[1].weight].master
            assert.is_true((master - model[1].weight:detach()):abs():max():item() < 0.2)
        end)
    end

    it("takes a byte for a value, two in training", function()
        local function bytes(wrap)
            collectgarbage()
            collectgarbage()
            local before = te.memory_stats().current
            local model = wrap(function()
                return te.quantized_model_init({ recipe = RECIPES.current }, te.Linear, 512, 1024, { bias = false })
            end)
            collectgarbage()
            collectgarbage()
            return te.memory_stats().current - before, model
        end
        local n = 512 * 1024
        assert.is_true(bytes(te.no_grad) <= 1.01 * n)
        assert.is_true(bytes(function(fn) return fn() end) <= 2.01 * n)
    end)

    it("gives the values", function()
        local weight = te.quantized_model_init({ recipe = RECIPES.mxfp8 }, te.Linear, 64, 32).weight
        local values = weight:dequantize()
        assert.is_true(same(values:detach(), weight:detach():clone()))
        assert.is_true(same(values:detach(), te.quantize(values:detach(), RECIPES.mxfp8, "weight"):dequantize()))
        assert.error_matches(function() te.ones({ 2 }):dequantize() end, "te.dequantize: x: a tensor that is not")
    end)

    it("keeps the initial values when asked", function()
        local high = build { enabled = false }
        local model = build { recipe = RECIPES.mxfp8, preserve_high_precision_init_val = true }
        local weight = model[1].weight
        assert.is_true(same(weight:get_high_precision_init_val(), high[1].weight:detach()))
        assert.is_not_nil(model[3].weight:get_high_precision_init_val())
        model[3].weight:clear_high_precision_init_val()
        assert.is_nil(model[3].weight:get_high_precision_init_val())
        local optimizer = te.optim.SGD(model, { lr = 0 })
        step(model, te.randn({ 4, 48 }), RECIPES.mxfp8)
        optimizer:step()
        assert.is_true(same(optimizer.state[weight].master, high[1].weight:detach()))
    end)

    it("writes parameters in full by the scales of delayed scaling that come with them", function()
        local recipe = te.recipe.DelayedScaling {}
        local function run(model)
            for _ = 1, 2 do te.autocast({ recipe = recipe }, model, te.ones { 2, 16 }):sum():backward() end
            return model
        end
        local function new() return te.quantized_model_init({ recipe = recipe }, te.Linear, 16, 16) end
        local full = run(te.Linear(16, 16))
        te.no_grad(function() full.weight:mul_(40) end)
        local state = run(full):state_dict()
        local scale = state.weight_scale:item()
        local expected = te.quantize(full.weight:detach(), recipe, "weight", { scale = scale }):dequantize()
        for _, model in ipairs { new(), run(new()) } do
            model:load_state_dict(state)
            assert.equal(scale, model:state_dict().weight_scale:item())
            assert.is_true(same(model:state_dict().weight_amax_history, state.weight_amax_history))
            assert.is_true(same(model.weight:detach(), expected))
        end
    end)

    it("computes the same in te.checkpoint, under no recipe as well", function()
        for name, recipe in pairs(RECIPES) do
            te.manual_seed(2)
            local made = te.quantized_model_init({ recipe = recipe }, function()
                return { te.Linear(64, 32), te.GroupedLinear(2, 64, 32),
                    te.Sequential(te.LayerNorm(64), te.Linear(64, 32), te.GELU()),
                    te.MoE(64, 32, 8, { topk = 2, shared = 16, shared_gate = true }) }
            end)
            assert.is_false(core.is_quantized(made[4].router.weight), name)
            assert.is_false(core.is_quantized(made[4].shared_gate.weight), name)
            local x, sizes = te.randn { 40, 64 }, te.tensor({ 25, 15 }, { dtype = "int64" })
            for i, module in ipairs(made) do
                for _, grad in ipairs { true, false } do
                    x.requires_grad = grad
                    te.autocast({ dtype = "bfloat16" }, function()
                        local plain = module(x, i == 2 and sizes or nil)
                        local again = te.checkpoint(module, x, i == 2 and sizes or nil)
                        assert.is_true(same(plain:detach(), again:detach()), name .. i)
                    end)
                end
            end
        end
    end)

    it("counts no amax of values that were written over", function()
        local recipe, values = te.recipe.DelayedScaling { amax_history_len = 4 }, te.randn { 16, 16 }
        local layer = te.quantized_model_init({ recipe = recipe }, te.Linear, 16, 16)
        te.no_grad(function()
            layer.weight:fill_(1e30)
            layer.weight:copy_(values)
        end)
        local function history() return layer:state_dict().weight_amax_history:max():item() end
        assert.equal(values:abs():max():item(), history())
        te.autocast({ recipe = recipe }, layer, te.ones { 2, 16 }):sum():backward()
        assert.equal(values:abs():max():item(), history())
        assert.near(448 / values:abs():max():item(), layer:state_dict().weight_scale:item(), 1e-3)
        layer:load_state_dict({ weight = values / 8 }, { strict = false }) -- in the next step
        assert.equal(values:abs():max():item(), history())
        assert.equal(values:abs():max():item() / 8, layer:state_dict().weight_amax_history[1]:item())
    end)

    it("starts masters from what was written after the initial values", function()
        local state, high = build({ recipe = RECIPES.mxfp8 }, 5), build({ enabled = false }, 5)
        local writes = {
            function(model) model:load_state_dict(state:state_dict()) end,
            function(model) model:load_state_dict(high:state_dict()) end,
            function(model) te.no_grad(function() model[1].weight:copy_(high[1].weight) end) end,
            function(model) te.no_grad(function() model[1].weight:mul_(2) end) end,
            function(model)
                te.no_grad(function() model[1].weight:fill_(3) end)
                model:to("bfloat16")
            end,
        }
        for i, write in ipairs(writes) do
            local model = build { recipe = RECIPES.mxfp8, preserve_high_precision_init_val = true }
            local weight = model[1].weight
            write(model)
            assert.is_nil(weight:get_high_precision_init_val(), i)
            local before = weight:detach():to("float32"):clone()
            local optimizer = te.optim.AdamW(model, { lr = 0, weight_decay = 0 })
            step(model, te.randn({ 4, 48 }, { dtype = weight.dtype }), RECIPES.mxfp8)
            optimizer:step()
            assert.is_true(same(optimizer.state[weight].master, before))
            assert.is_true(same(weight:detach():to("float32"), before))
        end
    end)

    it("keeps the initial values of one that is converted", function()
        local model = build { recipe = RECIPES.mxfp8, preserve_high_precision_init_val = true }
        local before = model[1].weight:get_high_precision_init_val()
        model:to("bfloat16")
        assert.is_true(rawequal(before, model[1].weight:get_high_precision_init_val()))
        local optimizer = te.optim.SGD(model, { lr = 0 })
        step(model, te.randn({ 4, 48 }, { dtype = "bfloat16" }), RECIPES.mxfp8)
        optimizer:step()
        assert.is_nil(model[1].weight:get_high_precision_init_val())
    end)

    it("quantizes what is written", function()
        local model = build { recipe = RECIPES.mxfp8 }
        local weight, values = model[1].weight, te.randn({ 96, 48 })
        te.no_grad(function() weight:copy_(values) end)
        assert.is_true(core.is_quantized(weight))
        assert.is_true(same(weight:detach(), te.quantize(values, RECIPES.mxfp8, "weight"):dequantize()))
        te.no_grad(function() weight:fill_(3) end)
        assert.equal(3, weight:select(1, 5):select(1, 7):item())
        te.no_grad(function() weight:mul_(2) end)
        assert.equal(6, weight:detach():max():item())
        assert.equal(6, weight:totable()[2][2])
        assert.error_matches(function() weight[1] = 3 end, "copy_")
        assert.error_matches(function() weight:detach():fill_(1) end, "clone")
        weight:detach():clone():fill_(1)
    end)

    it("keeps bytes when the nominal dtype changes", function()
        local model = build { recipe = RECIPES.current }
        local before = model[1].weight
        local values = before:detach()
        model:to("bfloat16")
        assert.equal("bfloat16", model[1].weight.dtype)
        assert.is_true(core.is_quantized(model[1].weight))
        assert.is_true(same((core.quantized_parts(before)), (core.quantized_parts(model[1].weight))))
        assert.is_true(same(values:to("bfloat16"), model[1].weight:detach()))
        assert.error_matches(function() model:to("cuda:77") end, "cuda:77")
    end)

    it("reaches the models of the library", function()
        te.manual_seed(2)
        local config = { vocab_size = 11, block_size = 8, n_layer = 1, n_head = 2, n_embd = 32 }
        local stored = te.quantized_model_init({ recipe = RECIPES.mxfp8 }, te.models.gpt, config)
        local n = 0
        for _, p in ipairs(stored:parameters()) do n = n + (core.is_quantized(p) and 1 or 0) end
        assert.equal(4, n) -- both products of attention, and of the MLP
    end)

    it("gives gradients to parameters that ordinary operations read", function()
        local model, high = build { recipe = RECIPES.mxfp8 }, build { enabled = false }
        te.no_grad(function() for _, i in ipairs { 1, 3 } do high[i].weight:copy_(model[i].weight) end end)
        local x = te.randn({ 5, 48 })
        for _, m in ipairs { model, high } do
            te.sum(te.matmul(x, m[1].weight:transpose(1, 2)) + m[1].weight:sum()):backward()
        end
        assert.is_true(same(model[1].weight.grad, high[1].weight.grad))
        for _, m in ipairs { model, high } do m:zero_grad() end
        for _, m in ipairs { model, high } do m(x):sum():backward() end -- no recipe: high precision
        assert.is_true(same(model[1].weight.grad, high[1].weight.grad))
    end)

    -- A state dict, changed.
    local function changed(model, change)
        local state = {}
        for name, t in pairs(model:state_dict()) do state[name] = t end
        change(state)
        return state
    end

    local function bytes_of(model)
        local list = {}
        for name, t in pairs(model:state_dict()) do list[#list + 1] = name .. core.tensor_bytes(t) end
        table.sort(list)
        return table.concat(list)
    end

    local LOSSES = {
        { { "rowwise_data", "columnwise_data" }, "3.weight.rowwise_data" },
        { { "rowwise_data", "rowwise_scale_inv" }, "3.weight.rowwise_data" },
        { { "columnwise_data", "columnwise_scale_inv" }, "3.weight.columnwise_data" },
        { { "columnwise_data" }, "3.weight.columnwise_data" },
        { { "rowwise_scale_inv" }, "3.weight.rowwise_scale_inv" },
    }

    for name, recipe in pairs(RECIPES) do
        it("loads all parts of a parameter or changes nothing: " .. name, function()
            local model, other = build({ recipe = recipe }, 4), build({ recipe = recipe }, 5)
            local before, losses = bytes_of(model), { unpack(LOSSES) }
            if other:state_dict()["3.weight.amax"] then losses[#losses + 1] = { { "amax" }, "3.weight.amax" } end
            for _, loss in ipairs(losses) do
                local state = changed(other, function(s)
                    for _, part in ipairs(loss[1]) do s["3.weight." .. part] = nil end
                end)
                for _, strict in ipairs { true, false } do
                    assert.error_matches(function() model:load_state_dict(state, { strict = strict }) end,
                        "missing: " .. loss[2], 1, true)
                end
            end
            local function wrong(part, value)
                return changed(other, function(s) if s[part] then s[part] = value end end)
            end
            local cases = { { "3.weight.rowwise_data", te.ones { 3 } }, { "3.weight.columnwise_scale_inv", 7 },
                { "3.weight.amax", te.zeros({ 1 }, { dtype = "uint8" }) },
                { "3.weight.columnwise_amax", te.ones { 2 } }, { "3.weight.rowwise_data", te.ones { 96, 48 } } }
            for _, case in ipairs(cases) do
                if other:state_dict()[case[1]] then
                    assert.error_matches(function() model:load_state_dict(wrong(unpack(case))) end, "3%.weight[:.]")
                end
            end
            assert.equal(before, bytes_of(model))
            model:load_state_dict(other:state_dict())
            assert.equal(bytes_of(other), bytes_of(model))
            model:to "bfloat16"
        end)

        it("keeps its own format whatever recipe runs: " .. name, function()
            local model = te.quantized_model_init({ recipe = recipe }, te.Linear, 64, 32)
            local function formats()
                local list = {}
                for part, t in pairs(model:state_dict()) do
                    if part:find("^weight%.") then list[#list + 1] = part .. t.dtype .. table.concat(t.shape, ",") end
                end
                table.sort(list)
                return table.concat(list, " ")
            end
            local before, values, x = formats(), model.weight:clone(), te.randn({ 4, 64 })
            local optimizer = te.optim.SGD({ model.weight }, { lr = 0 })
            local HIGH = te.recipe.HighPrecision
            local others = { te.recipe.Custom { qfactory = function(role)
                return role.tensor_type == "weight" and HIGH or te.recipe.Float8CurrentScaling {}
            end } }
            for _, other in pairs(RECIPES) do others[#others + 1] = other end
            for _, other in ipairs(others) do
                te.no_grad(te.autocast, { recipe = other }, model, x)
                model.weight.grad = te.zeros { 32, 64 }
                optimizer:step()
                assert.equal(before, formats())
                assert.is_true(same(values, model.weight))
                te.no_grad(function() model.weight:copy_(values) end)
                assert.equal(before, formats())
            end
        end)
    end

    it("is dequantized for backward in the dtype that is computed in", function()
        local dtypes = { { "float32", "bfloat16" }, { "bfloat16", "float32" }, { "bfloat16", "float16" } }
        for _, name in ipairs { "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
            "NVFP4BlockScaling" } do
            for _, of in ipairs(dtypes) do
                local recipe = te.recipe[name] { backward_override = "dequantized" }
                local model = te.quantized_model_init({ recipe = recipe }, te.Linear, 16, 8, { params_dtype = of[1] })
                local x = te.randn({ 4, 16 }, { requires_grad = true })
                te.autocast({ recipe = recipe, dtype = of[2] }, model, x):sum():backward()
                local expected = te.matmul(te.ones { 4, 8 }, model.weight:detach():to "float32")
                assert.is_true((x.grad - expected):abs():max():item() < 0.01 * expected:abs():max():item())
            end
        end
    end)

    it("without the direction of backward takes what was saved with it", function()
        for name, recipe in pairs(RECIPES) do
            local trained, x = build({ recipe = recipe }, 5), te.randn { 3, 48 }
            local model = te.no_grad(build, { recipe = recipe }, 6)
            model:load_state_dict(trained:state_dict())
            assert.is_nil((select(4, core.quantized_parts(model[1].weight))), name)
            assert.is_true(same(trained[1].weight:detach():to "bfloat16", model[1].weight:detach():to "bfloat16"), name)
            local y = te.no_grad(te.autocast, { recipe = recipe }, model, x)
            assert.is_true(same(te.no_grad(te.autocast, { recipe = recipe }, trained, x), y), name)
        end
    end)

    it("multiplies outside of recipes as the values do that it stands for", function()
        for name, recipe in pairs(RECIPES) do
            local model = te.no_grad(te.quantized_model_init, { recipe = recipe }, te.Linear, 320, 2048)
            local values = model.weight:detach():to "float64"
            for _, rows in ipairs { 1, 5, 40 } do
                for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
                    local x = te.randn { rows, 320 }:to(dtype)
                    local expected = te.matmul(x:to "float64", values:transpose(1, 2))
                    local y = te.no_grad(te.autocast, { enabled = dtype ~= "float32", dtype = dtype }, function()
                        return te.linear(x, model.weight) + (model(x) - model.bias)
                    end)
                    local error = (y:to "float64" - expected * 2):abs():max():item() / expected:abs():max():item()
                    assert.is_true(error < (dtype == "float32" and 1e-5 or 0.02), name .. " " .. dtype .. " " .. error)
                end
            end
        end
    end)

    it("multiplies outside of recipes to the same bits fused and by itself, and has the same gradients", function()
        local sizes = te.tensor({ 3, 2 }, { dtype = "int32" })
        local function results(model, dtype, trains, wanted, ...)
            te.manual_seed(9)
            local x = te.randn({ 5, 48 }, { requires_grad = wanted })
            for _, p in ipairs(model:parameters()) do p.grad = nil end
            local run = trains and te.enable_grad or te.no_grad
            local y = run(te.autocast, { enabled = dtype ~= "float32", dtype = dtype }, model, x, ...)
            local found = { y:detach() }
            if trains then y:to("float32"):square():sum():backward() end
            found[2] = x.grad
            for _, p in ipairs(model:parameters()) do found[#found + 1] = p.grad end
            return found
        end
        for name, recipe in pairs(RECIPES) do
            for _, made in ipairs { { te.Linear, 48, 21 }, { te.GroupedLinear, 2, 48, 21 } } do
                local extra = made[1] == te.GroupedLinear and sizes or nil
                local model = te.quantized_model_init({ recipe = recipe }, unpack(made))
                local container = te.Sequential(model)
                for _, dtype in ipairs { "float32", "bfloat16" } do
                    for _, mode in ipairs { { false, false }, { true, false }, { true, true } } do
                        local by_itself = results(model, dtype, mode[1], mode[2], extra)
                        local fused = results(container, dtype, mode[1], mode[2], extra)
                        for i, expected in ipairs(by_itself) do
                            assert.is_true(same(expected, fused[i]), ("%s %s %d"):format(name, dtype, i))
                        end
                    end
                end
            end
        end
    end)

    it("leave no amax to a weight that takes their place", function()
        local recipe, x, weight = te.recipe.DelayedScaling {}, te.randn { 4, 32 }, te.randn { 16, 32 }
        local sizes = te.tensor({ 4 }, { dtype = "int32" })
        weight.requires_grad = true
        local function run(scaled)
            local linear, grouped = te.quantized_model_init({ recipe = recipe }, function()
                return te.Linear(32, 16, { bias = false }), te.GroupedLinear(1, 32, 16, { bias = false })
            end)
            linear.weight, grouped.weight[1] = weight, weight
            if scaled then te.autocast({ recipe = recipe }, function() end) end -- the end of a step gives scales
            return te.autocast({ recipe = recipe }, function() return { linear(x), grouped(x, sizes) } end)
        end
        local expected, got = run(false), run(true)
        for i = 1, 2 do assert.same(expected[i]:totable(), got[i]:totable()) end
    end)

    describe("under te.recipe.Custom", function()
        local mx, HIGH = te.recipe.MXFP8BlockScaling {}, te.recipe.HighPrecision

        it("stores the weights that have a quantizer quantized, and others in full", function()
            local recipe = te.recipe.Custom { qfactory = function(role)
                local high = role.name == "first" or role.group == 2
                return high and role.tensor_type == "weight" and HIGH or mx
            end }
            local function make()
                te.manual_seed(4)
                return te.Sequential(te.Linear(64, 64, { name = "first" }), te.GELU(), te.Linear(64, 64),
                    te.GroupedLinear(2, 64, 64), te.MultiHeadedSelfAttention(64, 4))
            end
            local high = make()
            local model = te.quantized_model_init({ recipe = recipe, preserve_high_precision_init_val = true }, make)
            local stored = {}
            for name, p in model:named_parameters() do
                stored[#stored + 1] = core.is_quantized(p) and name or nil
                assert.is_true(p.requires_grad and p.is_leaf)
            end
            assert.same({ "3.weight", "4.weight.1", "5.qkv.weight", "5.proj.weight" }, stored)
            assert.is_true(same(high[1].weight, model[1].weight))
            assert.is_nil(model[1].weight:get_high_precision_init_val())
            assert.is_true(same(high[3].weight, model[3].weight:get_high_precision_init_val()))
            local x = te.randn { 8, 64 }
            local function step_of(m)
                local y = te.autocast({ recipe = recipe, dtype = "float32" }, m, x, te.tensor({ 3, 5 },
                    { dtype = "int64" }))
                y:sum():backward()
                return y
            end
            assert.is_true(same(step_of(high), step_of(model)))
            for i, p in ipairs(high:parameters()) do assert.is_true(same(p.grad, model:parameters()[i].grad)) end
            te.optim.AdamW(model:parameters(), { lr = 0.01 }):step()
            assert.is_false(core.is_quantized(model[1].weight))
            assert.is_true(core.is_quantized(model[3].weight))
            local other = te.quantized_model_init({ recipe = recipe }, make)
            other:load_state_dict(model:state_dict())
            assert.is_true(same(step_of(model), step_of(other)))
            assert.is_true(same(step_of(model), step_of(model:clone())))
        end)

        it("knows layers by the names that they are given", function()
            local names = {}
            local recipe = te.recipe.Custom { qfactory = function(role)
                if role.tensor_type == "weight" then names[#names + 1] = role.name end
                return role.name == "a.proj" and HIGH or mx
            end }
            local model = te.quantized_model_init({ recipe = recipe }, function()
                return te.Sequential(te.MultiHeadedSelfAttention(32, 2, { name = "a" }), te.Linear(32, 32))
            end)
            assert.same({ "a.qkv", "a.proj", "" }, names)
            assert.is_true(core.is_quantized(model[1].qkv.weight))
            assert.is_false(core.is_quantized(model[1].proj.weight))
            te.autocast({ recipe = recipe }, model, te.ones { 4, 32 })
            assert.same({ "a.qkv", "a.proj", "", "2" }, names) -- of the last one the path is known by now
        end)

        it("makes a usual model where nothing is quantized", function()
            local recipe = te.recipe.Custom { qfactory = function() return HIGH end }
            local model = build { recipe = recipe }
            for _, p in ipairs(model:parameters()) do assert.is_false(core.is_quantized(p)) end
            assert.is_true(same(build({ enabled = false })[3].weight, model[3].weight))
        end)
    end)

    it("says what cannot be", function()
        local model = te.no_grad(build, { recipe = RECIPES.mxfp8 })
        local x = te.randn({ 4, 48 }, { requires_grad = true })
        assert.error_matches(function() te.autocast({ recipe = RECIPES.mxfp8 }, model, x) end, "column%-wise")
        te.no_grad(te.autocast, { recipe = RECIPES.mxfp8 }, model, x)
        assert.error_matches(function() te.quantized_model_init({ recipe = 3 }, print) end, "recipe")
        local state = te.quantized_model_init({ recipe = RECIPES.mxfp8 }, te.Linear, 32, 32):state_dict()
        for _, opts in ipairs { {}, { strict = false } } do
            assert.error_matches(function() te.Linear(32, 32):load_state_dict(state, opts) end,
                "weight of Linear is stored in full, the one given quantized", 1, true)
        end
        assert.error_matches(function() te.cat({ model[1].weight }, 1) end, "stored quantized")
        assert.has_error(function() model:load_state_dict({ ["1.weight.rowwise_data"] = te.ones({ 2 }) }) end)
    end)
end)
