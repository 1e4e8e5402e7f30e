--- Programs that leave results quantized on the CUDA device: the same bits as when a kernel of its own quantizes them,
--- and no such kernel. Pending without a device.

local te = require "te"

local devices, reason = te.devices()
local WIDTH = 160 -- neither a multiple of a tile nor less than one

local recipes = {
    delayed = function() return te.recipe.DelayedScaling {} end,
    mxfp8 = function() return te.recipe.MXFP8BlockScaling {} end,
    blocks = function() return te.recipe.Float8BlockScaling {} end,
    current = function() return te.recipe.Float8CurrentScaling {} end,
    nvfp4 = function() return te.recipe.NVFP4BlockScaling {} end,
}

-- By kernels of their own: the gradient that comes from outside; under delayed scaling the weights, whose factors were
-- written, by kernels that find them unchanged; and where the amax of a whole tensor is needed the LayerNorm, whose
-- input a second run would read twice more, in forward and again in backward.
local kernels = { delayed = 4, mxfp8 = 1, blocks = 1, current = 3, nvfp4 = 3 }

local function same(a, b)
    return te._core.tensor_bytes(a:detach():to("cpu")) == te._core.tensor_bytes(b:detach():to("cpu"))
end

-- Sums over rows go by tiles in one kernel and by rows in the other.
local function near(a, b)
    a, b = a:detach():to("cpu"):to("float64"), b:detach():to("cpu"):to("float64")
    return ((a - b):norm() / (b:norm() + 1e-12)):item() < 1e-5
end

local function build(wide, last)
    te.manual_seed(2)
    return te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, wide), te.SwiGLU(), te.Dropout(0.1),
        te.Linear(wide / 2, WIDTH), te.GELU(), te.Linear(WIDTH, last)):to("cuda")
end

-- Output and gradients of a step.
local function step(model, x, dy, recipe)
    for _, p in ipairs(model:parameters()) do p.grad = nil end
    x = x:detach()
    x.requires_grad = true
    te.manual_seed(4)
    local y = te.autocast({ recipe = recipe, dtype = "bfloat16" }, model, x)
    y:backward(dy)
    return y, x.grad
end

local function quantizing(fn)
    local n = 0
    for _, event in ipairs(te.profile(fn).events) do
        if event.name == "quantize" then n = n + 1 end
    end
    return n
end

describe("programs on CUDA that leave results quantized", function()
    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    for name, make in pairs(recipes) do
        local function scene()
            te.manual_seed(9)
            return make(), te.randn({ 2, 72, WIDTH }):to("cuda"),
                te.randn({ 2, 72, 32 }, { dtype = "bfloat16" }):to("cuda")
        end

        it("give the results of a graph that is not fused: " .. name, function()
            local recipe, x, dy = scene()
            local fused, plain = build(256, 32), build(256, 32)
            for _ = 1, 2 do
                local y1 = step(fused, x, dy, recipe)
                local before = te.set_fusion(false)
                local y2 = step(plain, x, dy, recipe)
                te.set_fusion(before)
                assert.is_true(same(y1, y2))
            end
        end)

        -- a model that is watched quantizes in kernels of its own
        it("give the gradients of kernels of their own, and take none: " .. name, function()
            local recipe, x, dy = scene()
            local emits, apart = build(256, 32), build(256, 32)
            local watch = te.numerics.watch(apart)
            for _ = 1, 2 do
                local y1, dx1 = step(emits, x, dy, recipe)
                local y2, dx2 = step(apart, x, dy, recipe)
                assert.is_true(same(y1, y2))
                assert.is_true(same(dx1, dx2))
                for i, p in ipairs(emits:parameters()) do assert.is_true(near(p.grad, apart:parameters()[i].grad)) end
            end
            watch:stop()
            assert.equal(kernels[name], quantizing(function() step(emits, x, dy, recipe) end))
        end)
    end

    for _, name in ipairs { "current", "nvfp4" } do
        it("measure what is not finite as a kernel of its own does: " .. name, function()
            te.manual_seed(2)
            local model = te.Sequential(te.SReLU(), te.Linear(WIDTH, 48), te.LayerNorm(48),
                te.Linear(48, 32)):to("cuda")
            for _, odd in ipairs { 0 / 0, math.huge, 0 } do
                local x = te.zeros({ 40, WIDTH })
                if odd ~= 0 then x:copy_(te.randn({ 40, WIDTH })):narrow(1, 17, 1):narrow(2, 7, 1):fill_(odd) end
                x = x:to("cuda")
                local function run()
                    return te.no_grad(te.autocast, { recipe = recipes[name](), dtype = "bfloat16" }, model, x)
                end
                local y1 = run()
                local before = te.set_fusion(false)
                local y2 = run()
                te.set_fusion(before)
                assert.is_true(same(y1, y2))
            end
        end)
    end

    it("count their rows behind a reshape as it does, and give the same bits", function()
        te.manual_seed(2)
        local model = te.Sequential(te.Linear(WIDTH, 320), te.Reshape { 2, -1, 64 }, te.GELU(), te.Linear(64, 96),
            te.SwiGLU(), te.Linear(48, 32)):to("cuda")
        local recipe, x, dy = recipes.mxfp8(), te.randn({ 30, WIDTH }):to("cuda"),
            te.randn({ 2, 75, 32 }, { dtype = "bfloat16" }):to("cuda")
        local y1, dx1 = step(model, x, dy, recipe)
        -- x, the gradient from outside and those that a reshape or a border of halves lies across
        assert.equal(4, quantizing(function() step(model, x, dy, recipe) end))
        local before = te.set_fusion(false)
        local y2, dx2 = step(model, x, dy, recipe)
        te.set_fusion(before)
        assert.is_true(same(y1, y2))
        assert.is_true(near(dx1, dx2))
    end)

    it("is what explain says", function()
        local plan
        te.autocast({ recipe = recipes.mxfp8(), dtype = "bfloat16" }, function()
            plan = tostring(build(256, 32):explain(te.randn({ 8, WIDTH }):to("cuda")))
        end)
        assert.truthy(plan:find("layer_norm, quantize input to float8_e4m3 in blocks of 1 x 32, in tiles", 1, true))
        assert.truthy(plan:find("gelu_tanh, quantize input to float8_e4m3 in blocks of 1 x 32, in tiles", 1, true))
        te.autocast({ recipe = recipes.current(), dtype = "bfloat16" }, function()
            plan = tostring(build(256, 32):explain(te.randn({ 8, WIDTH }):to("cuda")))
        end)
        assert.truthy(plan:find("gelu_tanh, twice: amax, quantize input to float8_e4m3, in tiles", 1, true))
        assert.truthy(plan:find("layer_norm, amax of input ", 1, true))
        assert.truthy(plan:find("quantize input to float8_e4m3, row-wise, by that amax", 1, true))
        assert.truthy(plan:find("quantize input to float8_e4m3, column-wise", 1, true))
        assert.truthy(plan:find("by a kernel of its own: to run the program once more for the amax costs more than to "
        .. "store", 1, true))
    end)

    it("leave it to a kernel of its own where a block would lie across the halves of a gated gradient", function()
        local recipe = recipes.blocks()
        te.manual_seed(9)
        local x, dy = te.randn({ 40, WIDTH }):to("cuda"), te.randn({ 40, 32 }, { dtype = "bfloat16" }):to("cuda")
        local model = build(192, 32)
        step(model, x, dy, recipe)
        assert.equal(2, quantizing(function() step(model, x, dy, recipe) end))
    end)
end)
