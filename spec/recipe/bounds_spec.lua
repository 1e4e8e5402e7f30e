--- How far products under each recipe are from unquantized ones: both gradients of a Linear and its result.
--
-- Rounding to a format with m mantissa bits errs by at most 2^-(m + 1) of a value, and on average over mantissas and
-- errors by e(m) = 0.42 * 2^-(m + 1). Errors of two operands are independent, and so are those of the terms of a sum,
-- so that a product of long rows is off by about sqrt(e(m1)^2 + e(m2)^2) of its norm: 0.037 for two operands in E4M3,
-- 0.059 for one in E4M3 and one in E5M2. A fifth more is allowed for values next to zero, where the format has fewer
-- bits, and for chance. E2M1 has two binades of normal numbers, and most of what is not at the top of its block is in
-- the lower one or below: its figures are measured ones; stochastic rounding errs sqrt(2) times as much in one operand.
local te = require "te"

local function fp8(m1, m2)
    local function e(m) return 0.42 * 2 ^ -(m + 1) end
    return 1.2 * math.sqrt(e(m1) ^ 2 + e(m2) ^ 2)
end
local E4M3, E5M2 = 3, 2

-- name of the recipe, options, format of gradients; or bounds of y, dx and dW
local CASES = {
    { "DelayedScaling", {}, E5M2 },
    { "DelayedScaling", { fp8_format = "E4M3" }, E4M3 },
    { "Float8CurrentScaling", {}, E5M2 },
    { "Float8CurrentScaling", { fp8_format = "E4M3" }, E4M3 },
    { "Float8BlockScaling", {}, E4M3 },
    { "Float8BlockScaling", { fp8_format = "HYBRID" }, E5M2 },
    { "Float8BlockScaling", { use_f32_scales = true }, E4M3 },
    { "MXFP8BlockScaling", {}, E4M3 },
    { "MXFP8BlockScaling", { fp8_format = "HYBRID" }, E5M2 },
    { "MXFP8BlockScaling", { enable_2d_quantization = true }, E4M3 },
    { "NVFP4BlockScaling", {}, { 0.16, 0.19, 0.19 } },
    { "NVFP4BlockScaling", { disable_stochastic_rounding = true }, { 0.16, 0.16, 0.16 } },
    { "NVFP4BlockScaling", { disable_rht = true, nvfp4_4over6 = "all" }, { 0.155, 0.19, 0.19 } },
}

local function distance(a, b)
    a, b = a:to "float64", b:to "float64"
    return ((a - b):norm() / b:norm()):item()
end

local function step(recipe, x, dy)
    te.manual_seed(3)
    local module = te.Linear(192, 160, { bias = false })
    x = x:clone()
    x.requires_grad = true
    te.manual_seed(11)
    local y = te.autocast({ recipe = recipe, dtype = "float32" }, module, x)
    y:backward(dy)
    return { y:detach(), x.grad, module.weight.grad }
end

describe("a Linear's result and gradients", function()
    for _, case in ipairs(CASES) do
        local name, opts, bounds = unpack(case)
        local text = {}
        for key, value in pairs(opts) do text[#text + 1] = ("%s = %s"):format(key, tostring(value)) end
        table.sort(text)
        it(("are as close to the unquantized ones as the format allows: %s{%s}"):format(name, table.concat(text, ", ")),
            function()
            if type(bounds) == "number" then bounds = { fp8(E4M3, E4M3), fp8(E4M3, bounds), fp8(E4M3, bounds) } end
            te.manual_seed(5)
            local x, dy = te.randn { 256, 192 }, te.randn { 256, 160 }
            local plain, quantized = step(nil, x, dy), step(te.recipe[name](opts), x, dy)
            for i, of in ipairs { "y", "dx", "dW" } do
                local error = distance(quantized[i], plain[i])
                assert.is_true(error < bounds[i] and error > bounds[i] / 2,
                    ("%s: %.4f, bound %.4f"):format(of, error, bounds[i]))
            end
        end)
    end
end)
