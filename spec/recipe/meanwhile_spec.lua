--- Backward quantizes as its forward did, whatever recipe the module has met in between; and delayed scaling goes on
--- where it was.

local te = require "te"
local products = require "spec.support.products"

local R, same = te.recipe, products.same

local function run(module, recipe, x, ...)
    return te.autocast({ recipe = recipe, dtype = "float32" }, module, x, ...)
end

-- Gradients of x and of all parameters, after `meanwhile` was called between forward and backward.
local function gradients(module, recipe, x, dy, meanwhile, ...)
    x = x:clone()
    x.requires_grad = true
    for _, p in ipairs(module:parameters()) do p.grad = nil end
    te.manual_seed(7)
    local y = run(module, recipe, x, ...)
    if meanwhile then meanwhile(module, x, ...) end
    te.manual_seed(8)
    y:backward(dy)
    local list = { x.grad }
    for _, p in ipairs(module:parameters()) do list[#list + 1] = p.grad end
    return list
end

local ROWS, WIDTH = 64, 64

local modules = {
    ["a Linear"] = function() return te.Linear(WIDTH, WIDTH) end,
    ["a group"] = function()
        return te.Sequential(te.LayerNorm(WIDTH), te.Linear(WIDTH, 2 * WIDTH), te.GELU(), te.Linear(2 * WIDTH, WIDTH))
    end,
    ["a Quantize"] = function() return te.Quantize { backward = true } end,
    ["a GroupedLinear"] = function() return te.GroupedLinear(2, WIDTH, WIDTH) end,
}

local function evaluate(recipe)
    return function(module, x, ...)
        te.no_grad(te.autocast, { recipe = recipe, dtype = "float32" }, module, x, ...)
    end
end

local meanwhile = {
    ["an evaluation under MXFP8"] = evaluate(R.MXFP8BlockScaling {}),
    ["an evaluation under delayed scaling"] = evaluate(R.DelayedScaling {}),
    ["an evaluation that does not quantize gradients"] = evaluate(R.Custom {
        qfactory = function(role)
            if role.tensor_type == "grad_output" then return R.HighPrecision end
            return R.Float8CurrentScaling {}
        end }),
    ["calibration"] = function(module, x, ...)
        te.autocast({ enabled = false, calibrating = true, recipe = R.DelayedScaling {}, dtype = "float32" }, module,
            x, ...)
    end,
    ["explain"] = function(module, x, ...)
        if not module.explain then return end
        te.autocast({ recipe = R.MXFP8BlockScaling {}, dtype = "float32" }, module.explain, module, x, ...)
    end,
}

describe("backward after", function()
    for what, between in pairs(meanwhile) do
        for of, make in pairs(modules) do
            it(("%s quantizes as its forward did: %s"):format(what, of), function()
                te.manual_seed(3)
                local x, dy = te.randn { ROWS, WIDTH }, te.randn { ROWS, WIDTH }
                local splits = of == "a GroupedLinear" and te.tensor({ 16, 48 }, { dtype = "int64" }) or nil
                for _, name in ipairs { "NVFP4BlockScaling", "Float8BlockScaling", "DelayedScaling" } do
                    te.manual_seed(4)
                    local alone = make()
                    te.manual_seed(4)
                    local module = make()
                    local expected = gradients(alone, R[name] {}, x, dy, nil, splits)
                    local got = gradients(module, R[name] {}, x, dy, between, splits)
                    for i, gradient in ipairs(expected) do
                        assert.is_true(same(gradient, got[i]), name .. ": gradient " .. i)
                    end
                end
            end)
        end
    end

    it("its recipe has got other options quantizes as its forward did", function()
        te.manual_seed(3)
        local x, dy, module, recipe = te.randn { ROWS, WIDTH }, te.randn { ROWS, WIDTH }, te.Linear(WIDTH, WIDTH),
            R.NVFP4BlockScaling {}
        local expected = gradients(module, recipe, x, dy)
        local got = gradients(module, recipe, x, dy, function()
            recipe.disable_rht = true
            te.no_grad(run, module, recipe, x)
        end)
        for i, gradient in ipairs(expected) do assert.is_true(same(gradient, got[i])) end
    end)

    it("another run of the same layer under another recipe takes each as its forward was", function()
        te.manual_seed(3)
        local layer, x, dy = te.Linear(WIDTH, WIDTH, { bias = false }), te.randn { ROWS, WIDTH },
            te.randn { ROWS, WIDTH }
        local one = gradients(layer, R.NVFP4BlockScaling {}, x, dy)
        local two = gradients(layer, R.MXFP8BlockScaling {}, x, dy)
        layer.weight.grad = nil
        te.manual_seed(7)
        local y1 = run(layer, R.NVFP4BlockScaling {}, x)
        local y2 = run(layer, R.MXFP8BlockScaling {}, x)
        te.manual_seed(8)
        y1:backward(dy)
        y2:backward(dy)
        assert.is_true(products.distance(layer.weight.grad, one[2] + two[2]) < 1e-6)
    end)
end)

describe("delayed scaling", function()
    local MX = R.MXFP8BlockScaling {}

    it("gets the amaxes of a backward that follows an evaluation under another recipe", function()
        local recipe, layer = R.DelayedScaling { amax_history_len = 4 }, te.Linear(WIDTH, WIDTH, { bias = false })
        for i = 1, 3 do
            local y = run(layer, recipe, te.ones { 32, WIDTH })
            te.no_grad(run, layer, MX, te.ones { 32, WIDTH })
            y:backward(te.full({ 32, WIDTH }, 2 ^ (3 - i)))
        end
        local state = layer:state_dict()
        assert.same({ 0, 4, 2, 1 }, state.grad_output_amax_history:totable())
        assert.same({ 57344 / 4 }, state.grad_output_scale:totable())
    end)

    it("ends the step of a module that runs under another recipe last", function()
        local recipe, layer = R.DelayedScaling { amax_history_len = 4 }, te.Linear(WIDTH, WIDTH)
        te.autocast({ recipe = recipe, dtype = "float32" }, function()
            layer(te.full({ 32, WIDTH }, 2))
            te.autocast({ recipe = MX }, layer, te.ones { 32, WIDTH })
        end)
        local state = layer:state_dict()
        assert.same({ 0, 0, 0, 2 }, state.input_amax_history:totable())
        assert.same({ 224 }, state.input_scale:totable())
    end)

    it("brings scales to another format's range", function()
        local layer, recipe = te.Linear(4, 4, { bias = false }), R.DelayedScaling {}
        layer.weight:fill_(1)
        local function gradient()
            local x = te.ones({ 2, 4 }, { requires_grad = true })
            run(layer, recipe, x):backward(te.ones { 2, 4 })
            return x.grad:totable()[1][1]
        end
        gradient()
        assert.is_true(math.abs(gradient() - 4) < 1e-6)
        for _, format in ipairs { "E4M3", "HYBRID", "E4M3" } do
            recipe.fp8_format = format
            assert.is_true(math.abs(gradient() - 4) < 1e-6, format)
            local scale = layer:state_dict().grad_output_scale:item()
            assert.equal(format == "E4M3" and 448 or 57344, scale)
        end
    end)

    it("begins with 1 under every format", function()
        local layer, recipe = te.Linear(4, 4), R.DelayedScaling {}
        te.no_grad(run, layer, recipe, te.ones { 2, 4 })
        recipe.fp8_format = "E4M3"
        te.no_grad(run, layer, recipe, te.ones { 2, 4 })
        assert.equal(1, layer:state_dict().grad_output_scale:item())
    end)
end)
