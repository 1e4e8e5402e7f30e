--- What specs of products under a recipe share: the recipes by name, comparing tensors, a layer and one step of it.

local te = require "te"

local products = {}

products.recipes = {
    delayed = function(opts) return te.recipe.DelayedScaling(opts) end,
    current = function(opts) return te.recipe.Float8CurrentScaling(opts) end,
    block = function(opts) return te.recipe.Float8BlockScaling(opts) end,
    mxfp8 = function(opts) return te.recipe.MXFP8BlockScaling(opts) end,
    nvfp4 = function(opts) return te.recipe.NVFP4BlockScaling(opts) end,
}
products.names = { "delayed", "current", "block", "mxfp8", "nvfp4" }

function products.f64(t) return t:to("float64") end

-- The largest difference, relative to the largest value.
function products.distance(a, b)
    local scale = products.f64(b):abs():max():item()
    return (products.f64(a) - products.f64(b)):abs():max():item() / (scale > 0 and scale or 1)
end

function products.bytes_of(t) return te._core.tensor_bytes(t:detach():to("cpu"):contiguous()) end

function products.same(a, b) return products.bytes_of(a) == products.bytes_of(b) end

function products.linear(inputs, outputs, opts)
    te.manual_seed(3)
    return te.Linear(inputs, outputs, opts)
end

-- One step of a layer by itself under a recipe: y, dx, dW, db.
function products.step(module, x, dy, recipe, dtype)
    x = x:clone()
    x.requires_grad = true
    for _, p in ipairs(module:parameters()) do p.grad = nil end
    local y = te.autocast({ recipe = recipe, dtype = dtype }, module, x)
    te.manual_seed(11)
    y:backward(dy)
    return y:detach(), x.grad
end

return products
