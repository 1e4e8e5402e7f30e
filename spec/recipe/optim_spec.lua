-- Optimizers and parameters that are stored quantized: what is written, from which master, and what it takes.
local te = require "te"
local checkpoint = require "te.train.checkpoint"
local core = te._core

local RECIPES = {
    delayed = te.recipe.DelayedScaling {}, current = te.recipe.Float8CurrentScaling {},
    block = te.recipe.Float8BlockScaling {},
    mxfp8 = te.recipe.MXFP8BlockScaling {}, nvfp4 = te.recipe.NVFP4BlockScaling {},
}

local function bytes(t) return core.tensor_bytes(t:clone()) end

-- With one thread more than one stripe of a megabyte, of which the last is short; and a width that no block divides.
local OUT, IN = 1700, 321

local function build(recipe, dtype)
    te.manual_seed(4)
    local model = te.quantized_model_init({ recipe = recipe }, te.Linear, IN, OUT)
    return dtype == "float32" and model or model:to(dtype)
end

local function backward(model, recipe, seed)
    te.manual_seed(seed)
    local x, dy = te.randn({ 8, IN }, { dtype = model.weight.dtype }),
        te.randn({ 8, OUT }, { dtype = model.weight.dtype })
    local y = te.autocast({ recipe = recipe }, model, x)
    y:backward(dy)
    return y:detach()
end

local function parts_of(weight)
    local found = {}
    require("te.recipe.parameters").each_part("w", weight, function(name, part) found[name] = bytes(part) end)
    return found
end

local OPTIMIZERS = {
    AdamW = function(model, opts)
        opts.lr = 0.01
        return te.optim.AdamW(model, opts)
    end,
    SGD = function(model, opts)
        opts.lr, opts.momentum = 0.1, 0.9
        return te.optim.SGD(model, opts)
    end,
}

describe("an optimizer", function()
    local threads = te.get_num_threads()
    setup(function() te.set_num_threads(1) end)
    teardown(function() te.set_num_threads(threads) end)

    for name, recipe in pairs(RECIPES) do
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, master_dtype in ipairs { "float32", "bfloat16" } do
                for kind, make in pairs(OPTIMIZERS) do
                    it(("leaves the quantized master: %s, %s from %s, %s"):format(name, dtype, master_dtype, kind),
                        function()
                        local model = build(recipe, dtype)
                        local optimizer = make(model, { master_dtype = master_dtype })
                        for i = 1, 2 do
                            model:zero_grad()
                            backward(model, recipe, i)
                            local scale = model:state_dict().weight_scale
                            scale = scale and scale:item()
                            optimizer:step()
                            local master = optimizer.state[model.weight].master
                            assert.equal(master_dtype, master.dtype)
                            local source = master:to(dtype)
                            local q = te.quantize(source, recipe, "weight", { columnwise = true, scale = scale })
                            local expected = {}
                            for part, tensor in pairs(q:state_dict()) do expected["w." .. part] = bytes(tensor) end
                            local found = parts_of(model.weight)
                            if not q.columnwise_amax then found["w.columnwise_amax"] = nil end -- both have one
                            assert.is_not_nil(found["w.columnwise_data"])
                            for part, value in pairs(found) do
                                assert.is_true(expected[part] == value, ("step %d: %s"):format(i, part))
                            end
                            local amax = source:to("float32"):abs():max():item()
                            if name == "delayed" then
                                assert.equal(amax, model:state_dict().weight_amax_history:select(1, 1):item())
                            end
                        end
                    end)
                end
            end
        end

        it("writes nothing that somebody else holds: " .. name, function()
            local model = build(recipe, "float32")
            local optimizer = te.optim.SGD(model, { lr = 1 })
            backward(model, recipe, 1)
            local held, before = model:state_dict(), parts_of(model.weight)
            optimizer:step()
            assert.is_false(before["w.rowwise_data"] == parts_of(model.weight)["w.rowwise_data"])
            for part, value in pairs(before) do
                assert.is_true(value == bytes(held[part:gsub("^w", "weight")]), part)
            end
        end)

        it("goes on from a checkpoint with masters in bfloat16: " .. name, function()
            local folder = os.tmpname()
            os.remove(folder)
            core.mkdir(folder)
            finally(function() os.execute(("rm -rf '%s'"):format(folder)) end)
            local function start()
                local model = build(recipe, "float32")
                return model, te.optim.AdamW(model, { lr = 0.01, master_dtype = "bfloat16" })
            end
            local function train(model, optimizer, from, to)
                local found = {}
                for i = from, to do
                    model:zero_grad()
                    found[#found + 1] = core.tensor_bytes(backward(model, recipe, i))
                    optimizer:step()
                end
                found[#found + 1] = bytes(optimizer.state[model.weight].master)
                return table.concat(found)
            end
            local model, optimizer = start()
            train(model, optimizer, 1, 2)
            checkpoint.save { folder = folder, step = 2, model = model, optimizer = optimizer, keep = 1, metadata = {} }
            local expected = train(model, optimizer, 3, 5)
            local other, fresh = start()
            local saved = checkpoint.load(checkpoint.latest(folder))
            assert.equal("bfloat16", saved.tensors["optimizer.master.weight"].dtype)
            checkpoint.restore_model(saved, other)
            checkpoint.restore_training(saved, other, fresh)
            assert.is_true(expected == train(other, fresh, 3, 5))
            assert.same(parts_of(model.weight), parts_of(other.weight))
        end)
    end

    it("takes no memory for other copies where rows are quantized as they are updated", function()
        if te.get_default_device() ~= "cpu" then return end -- there a pass of its own quantizes
        local model = te.quantized_model_init({ recipe = RECIPES.mxfp8 }, te.Linear, 1024, 2048)
        local optimizer = te.optim.AdamW(model)
        local function step()
            te.autocast({ recipe = RECIPES.mxfp8 }, model, te.ones { 4, 1024 }):sum():backward()
            collectgarbage()
            collectgarbage()
            local before = te.memory_stats().current
            te.reset_peak_memory()
            optimizer:step()
            return te.memory_stats().peak - before
        end
        step()
        local bytes = step()
        -- what threads work in; copies would take four times as much
        assert.is_true(bytes < 1024 * 2048 / 2, bytes .. " bytes")
    end)

    for name, recipe in pairs(RECIPES) do
        it("takes a master over from what is written to the parameter: " .. name, function()
            local model = build(recipe, "bfloat16")
            local optimizer = OPTIMIZERS.SGD(model, {})
            for i = 1, 2 do
                backward(model, recipe, i)
                optimizer:step()
                optimizer:zero_grad()
            end
            local master = optimizer.state[model.weight].master
            local before = master:clone()
            backward(model, recipe, 3)
            optimizer:step { lr = 0 }
            assert.equal(0, (before - master):abs():max():item()) -- forward and backward write nothing
            te.no_grad(function() model.weight:copy_(te.randn { OUT, IN }) end)
            local given = model.weight:detach():to("float32"):clone()
            optimizer:step { lr = 0 }
            assert.equal(0, (given - master):abs():max():item())
            assert.is_true((given - before):abs():max():item() > 1)
        end)
    end

    for name, recipe in pairs(RECIPES) do
        for _, dtype in ipairs { "float32", "bfloat16" } do
            it(("keeps a master where nothing else is written: %s, %s"):format(name, dtype), function()
                local model = build(recipe, dtype)
                local optimizer = OPTIMIZERS.SGD(model, {})
                local function step(i, o)
                    backward(model, recipe, i)
                    optimizer:step(o)
                    optimizer:zero_grad()
                end
                step(1)
                step(2)
                local master = optimizer.state[model.weight].master
                local before, same = master:clone(), {}
                local function kept(i)
                    step(i, { lr = 0 })
                    assert.equal(0, (before - master):abs():max():item())
                end
                for key, value in pairs(model:state_dict()) do same[key] = value:clone() end
                model:load_state_dict(same)
                kept(3)
                optimizer:load_state_dict(optimizer:state_dict())
                kept(4)
                te.no_grad(te.autocast, { recipe = recipe }, model, te.randn({ 8, IN }, { dtype = dtype }) * 3)
                optimizer:load_state_dict(optimizer:state_dict())
                kept(5)
            end)
        end
    end

    -- Of a process of its own, whose limit is the test's.
    it("changes nothing where memory is out", function()
        local program = os.getenv "TETRAIN" or core.executable()
        local path = os.tmpname()
        finally(function() os.remove(path) end)
        local file = io.open(path, "w")
        file:write [[
            local te = require "te"
            local failed = 0
            local function text(model, optimizer)
                local all = {}
                for i, state in ipairs(optimizer:state_dict().state) do
                    for _, name in ipairs { "step", "exp_avg", "exp_avg_sq", "master" } do
                        local value = state[name]
                        all[#all + 1] = te.is_tensor(value) and te._core.tensor_bytes(value) or tostring(value)
                    end
                end
                for _, p in ipairs(model:parameters()) do
                    all[#all + 1] = te._core.tensor_bytes(p:detach():to "float32")
                end
                return table.concat(all, " ")
            end
            local function run(recipe, master_dtype, free)
                te.manual_seed(1)
                local model = te.quantized_model_init({ recipe = recipe }, te.Linear, 32, 256)
                local optimizer = te.optim.AdamW(model, { lr = 0.1, master_dtype = master_dtype })
                local function backward()
                    te.autocast({ recipe = recipe }, model, te.randn { 4, 32 }):sum():backward()
                end
                backward()
                optimizer:step()
                optimizer:zero_grad()
                backward()
                local before, ballast = text(model, optimizer), {}
                collectgarbage()
                collectgarbage()
                te.empty_cache()
                for shift = 24, 8, -1 do
                    while 2 ^ 24 - te.memory_stats "cpu".current - free > 2 ^ shift do
                        local made, block = pcall(te.empty, { 2 ^ shift }, { dtype = "uint8" })
                        if not made then break end
                        ballast[#ballast + 1] = block
                    end
                end
                local made = pcall(optimizer.step, optimizer)
                for _, block in ipairs(ballast) do block:release() end
                failed = failed + (made and 0 or 1)
                assert(made == (before ~= text(model, optimizer)), "half a step")
            end
            for _, name in ipairs { "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling",
                "NVFP4BlockScaling" } do
                for _, master_dtype in ipairs { "float32", "bfloat16" } do
                    for shift = 10, 22, 2 do run(te.recipe[name] {}, master_dtype, 2 ^ shift) end
                end
            end
            assert(failed > 8)
        ]]
        file:close()
        local status = os.execute(("TE_DEVICE=cpu %s --mem-limit 16M %s"):format(program, path))
        assert.is_true(status == 0 or status == true)
    end)

    it("keeps masters of plain parameters in bfloat16 only where that is more than they hold", function()
        local p = te.ones({ 8 }, { dtype = "float16", requires_grad = true })
        local q = te.ones({ 8 }, { dtype = "bfloat16", requires_grad = true })
        local optimizer = te.optim.AdamW({ p, q }, { master_weights = true, master_dtype = "bfloat16" })
        p.grad, q.grad = te.ones({ 8 }, { dtype = "float16" }), te.ones({ 8 }, { dtype = "bfloat16" })
        optimizer:step()
        assert.equal("bfloat16", optimizer.state[p].master.dtype)
        assert.is_nil(optimizer.state[q].master)
        assert.equal("bfloat16", optimizer:state_dict().groups[1].master_dtype)
        assert.error_matches(function() te.optim.SGD({ p }, { master_dtype = "float64" }) end,
            "one of float32, bfloat16")
    end)
end)
