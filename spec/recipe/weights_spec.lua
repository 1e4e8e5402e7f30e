-- Which quantized copies a product may multiply: the weight's belong to one part of one storage, and those that an
-- input brings along have to be transformed as the gradient is.
local te = require "te"
local products = require "spec.support.products"

local recipes, names, same, linear = products.recipes, products.names, products.same, products.linear

local function under(recipe, module, ...) return te.no_grad(te.autocast, { recipe = recipe }, module, ...) end

describe("the quantized copy of a weight", function()
    local function rows(n) return te.randn({ n, 16 }) end

    -- One layer that is given these weights in turn, and for each a layer that has had no other.
    local function check(recipe, weights)
        local x, layer = rows(4), linear(16, 8, { bias = false })
        for i, weight in ipairs(weights) do
            local fresh = linear(16, 8, { bias = false })
            layer.weight, fresh.weight = weight, weight:clone()
            assert.is_true(same(under(recipe, fresh, x), under(recipe, layer, x)), "weight " .. i)
        end
    end

    for _, name in ipairs(names) do
        it("is of the view that was multiplied: " .. name, function()
            te.manual_seed(1)
            local bank, square = te.randn({ 4, 8, 16 }), te.randn({ 16, 16 })
            check(recipes[name](), { bank[1], bank[2], bank[3], bank[4], bank[1] })
            check(recipes[name](), { square:narrow(1, 1, 8), square:transpose(1, 2):narrow(1, 1, 8),
                square:narrow(1, 1, 8), square:narrow(1, 9, 8) })
        end)

        it("does not go along when layers or experts exchange weights: " .. name, function()
            te.manual_seed(2)
            local bank, x, recipe = te.randn({ 2, 8, 16 }), rows(6), recipes[name]()
            local sizes = te.tensor({ 3, 3 }, { dtype = "int64" })
            local a, b = linear(16, 8, { bias = false }), linear(16, 8, { bias = false })
            local experts = te.GroupedLinear(2, 16, 8, { bias = false })
            a.weight, b.weight = bank[1], bank[2]
            experts.weight[1], experts.weight[2] = bank[1], bank[2]
            local first, second = under(recipe, a, x), under(recipe, b, x)
            local parted = under(recipe, experts, x, sizes)
            a.weight, b.weight = b.weight, a.weight
            experts.weight[1], experts.weight[2] = experts.weight[2], experts.weight[1]
            assert.is_true(same(second, under(recipe, a, x)))
            assert.is_true(same(first, under(recipe, b, x)))
            local exchanged = under(recipe, experts, te.cat({ x:narrow(1, 4, 3), x:narrow(1, 1, 3) }, 1), sizes)
            assert.is_true(same(parted, te.cat({ exchanged:narrow(1, 4, 3), exchanged:narrow(1, 1, 3) }, 1)))
        end)
    end
end)

describe("copies that an input brings along", function()
    local function recipe_of(name)
        return recipes[name](name == "nvfp4" and { disable_stochastic_rounding = true } or nil)
    end

    -- y and dW of a layer that reads what te.Quantize made, and of one that reads the values alone.
    local function run(first, second)
        te.manual_seed(7)
        local x, dy, results = te.randn({ 48, 64 }), te.randn({ 48, 32 }), {}
        local z = te.autocast({ recipe = first }, te.Quantize(), x)
        for i, input in ipairs { z, z:clone() } do
            local layer = linear(64, 32)
            local y = te.autocast({ recipe = second }, layer, input)
            y:backward(dy)
            results[i] = { y = y:detach(), dw = layer.weight.grad, evaluated = under(second, linear(64, 32), input) }
        end
        return results[1], results[2], te.matmul(dy:transpose(1, 2), x)
    end

    for _, first in ipairs(names) do
        for _, second in ipairs(names) do
            it(("are multiplied where gradients are transformed alike: %s, %s"):format(first, second), function()
                local carried, plain, exact = run(recipe_of(first), recipe_of(second))
                local error = ((carried.dw - exact):pow(2):sum() / exact:pow(2):sum()):sqrt():item()
                assert.is_true(error < 0.25, "dW is off by " .. error)
                assert.is_true(same(carried.y, carried.evaluated))
                if (first == "nvfp4") ~= (second == "nvfp4") then
                    assert.is_true(same(plain.dw, carried.dw))
                    assert.is_true(same(plain.y, carried.y))
                end
            end)
        end
    end

    it("are not when one recipe names both formats", function()
        te.manual_seed(1)
        local model = te.Sequential(te.Quantize(), te.Linear(64, 32))
        local recipe = te.recipe.Custom { qfactory = function(role)
            return role.name == "weight" and recipe_of("nvfp4") or recipe_of("mxfp8")
        end }
        local x, dy = te.randn({ 48, 64 }), te.randn({ 48, 32 })
        te.autocast({ recipe = recipe }, model, x):backward(dy)
        local exact = te.matmul(dy:transpose(1, 2), x)
        local error = ((model[2].weight.grad - exact):pow(2):sum() / exact:pow(2):sum()):sqrt():item()
        assert.is_true(error < 0.25, "dW is off by " .. error)
    end)
end)
