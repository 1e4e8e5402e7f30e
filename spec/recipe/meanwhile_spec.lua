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

    -- A layer whose scales have settled under the format, and gradients that fit in neither format by chance.
    local X, DY = nil, nil
    before_each(function()
        te.manual_seed(3)
        X, DY = te.randn { 32, WIDTH }, te.randn { 32, WIDTH } * 3e-3
    end)

    local function settled(recipe, layer)
        te.manual_seed(4)
        layer = layer or te.Linear(WIDTH, WIDTH)
        for _ = 1, 3 do gradients(layer, recipe, X, DY) end
        return layer
    end

    local function exact(layer)
        local x = X:clone()
        x.requires_grad = true
        layer(x):backward(DY)
        return x.grad
    end

    local function close(layer, got) assert.is_true(products.distance(got, exact(layer)) < 0.08) end

    local E4M3, HYBRID = R.DelayedScaling { fp8_format = "E4M3" }, R.DelayedScaling {}
    for name, pair in pairs { ["HYBRID after E4M3"] = { E4M3, HYBRID }, ["E4M3 after HYBRID"] = { HYBRID, E4M3 } } do
        local first, second = pair[1], pair[2]

        it("fits scales to the format that a gradient is quantized to: " .. name, function()
            local layer = settled(first)
            close(layer, gradients(layer, second, X, DY)[1])
            close(layer, gradients(layer, second, X, DY)[1])
            local scale = layer:state_dict().grad_output_scale:item()
            local other = settled(second):state_dict().grad_output_scale:item()
            assert.equal(other, scale)
        end)

        it("keeps scales where another format is evaluated between forward and backward: " .. name, function()
            local layer = settled(first)
            local expected = gradients(layer, first, X, DY)
            local got = gradients(layer, first, X, DY, evaluate(second))
            for i, gradient in ipairs(expected) do assert.is_true(same(gradient, got[i])) end
        end)

        it("fits the scales of a tied layer to each format: " .. name, function()
            local layer = settled(first)
            local x1, x2 = X:clone(), X:clone()
            x1.requires_grad, x2.requires_grad = true, true
            local y1, y2 = run(layer, first, x1), run(layer, second, x2)
            y1:backward(DY)
            close(layer, x1.grad)
            y2:backward(DY)
            close(layer, x2.grad)
        end)

        it("takes scales as they are loaded, and with a clone what they are for: " .. name, function()
            local layer = settled(first)
            layer:load_state_dict(settled(second):state_dict())
            close(layer, gradients(layer, second, X, DY)[1])
            layer = settled(first)
            te.no_grad(run, layer, MX, X)
            close(layer, gradients(layer:clone(), second, X, DY)[1])
        end)
    end

    it("gives histories another length wherever weights are stored", function()
        local recipes = { R.DelayedScaling { amax_history_len = 4 }, R.DelayedScaling { amax_history_len = 8 } }
        local layer = te.quantized_model_init({ recipe = recipes[1] }, te.Linear, 16, 16)
        local sgd = te.optim.SGD(layer:parameters(), { lr = 0.1 })
        for _, i in ipairs { 1, 2, 2, 1, 2 } do
            te.autocast({ recipe = recipes[i] }, function() return layer(te.ones { 4, 16 }):sum() end):backward()
            sgd:step()
            sgd:zero_grad()
            assert.is_true(layer:state_dict().weight_scale:item() > 1)
        end
        assert.equal(8, layer:state_dict().weight_amax_history:numel())
    end)

    it("asks no algorithm of an earlier recipe for steps under another one", function()
        local asked, layer = 0, te.Linear(WIDTH, WIDTH)
        run(layer, R.DelayedScaling { amax_compute_algo = function(history)
            asked = asked + 1
            return history[1]
        end }, X):sum():backward()
        assert.equal(3, asked)
        run(layer, MX, X):sum():backward()
        assert.equal(3, asked)
    end)

    it("begins with 1 under every format", function()
        local layer, recipe = te.Linear(4, 4), R.DelayedScaling {}
        te.no_grad(run, layer, recipe, te.ones { 2, 4 })
        recipe.fp8_format = "E4M3"
        te.no_grad(run, layer, recipe, te.ones { 2, 4 })
        assert.equal(1, layer:state_dict().grad_output_scale:item())
    end)
end)
