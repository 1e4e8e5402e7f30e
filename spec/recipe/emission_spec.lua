-- Programs that leave their results quantized for the product that reads them: the bytes are those of quantizing apart.
local te = require "te"
local products = require "spec.support.products"

local recipes, names, f64, distance, same, step =
    products.recipes, products.names, products.f64, products.distance, products.same, products.step

describe("programs that leave results quantized", function()
    if te.get_default_device() ~= "cpu" then
        it("are on the CPU", function() pending "devices quantize in tiles: spec/cuda/emission_spec.lua" end)
        return
    end
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
        -- two threads store, many compute twice
        for _, case in ipairs { { "bfloat16", 2 }, { "bfloat16", 16 }, { "float32", 16 } } do
            local dtype, threads = unpack(case)
            it(("give the same bytes as when they are stored first: %s, %s, %d threads"):format(name, dtype, threads),
                function()
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
        it("take the amax in a run of its own where that costs less than to store, as explain says: " .. name,
            function()
            local threads = te.get_num_threads()
            te.set_num_threads(6) -- enough for a LayerNorm, too few for a GELU
            te.manual_seed(2)
            local model = te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, WIDTH), te.GELU(), te.Linear(WIDTH, 32))
            local x, recipe = te.randn({ ROWS, WIDTH }), recipes[name]()
            local function run() return te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, model, x) end
            local plan = te.autocast({ recipe = recipe, dtype = "bfloat16" },
                function() return tostring(model:explain(x)) end)
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
                if odd == 0 then
                    x = te.zeros({ ROWS, WIDTH })
                else
                    x:narrow(1, ROWS - 3, 1):narrow(2, 7, 1):fill_(odd)
                end
                local recipe, threads = recipes[name](), te.get_num_threads()
                local function run()
                    return te.no_grad(te.autocast, { recipe = recipe, dtype = "bfloat16" }, model, x)
                end
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
            return te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, 512), te.SwiGLU(),
                te.Linear(WIDTH, WIDTH), te.GELU(), te.Linear(WIDTH, 32))
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
