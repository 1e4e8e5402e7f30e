--- te.Quantize: values as the recipe's format holds them, where a product is not next to what makes them.
--
-- Forward: the result has the values that quantizing leaves, and carries the quantized copies: linear operations that
-- read it multiply those, so that several share one quantization. Backward: the same for the gradient. Outside
-- te.autocast with a recipe it does nothing.

local te = require "te"
local options = require "te.options"
local declared = require "te.ops.declared"
local mode = require "te.recipe.mode"
local BasicOperation = require("te.operation").BasicOperation

local Quantize = BasicOperation:extend("Quantize")
Quantize.takes = 1

local OPTIONS = { forward = { "boolean", true, help = "quantize values" },
    backward = { "boolean", false, help = "quantize gradients" }, name = declared.NAME }

--- Quantizes values in the recipe's format, for products that do not directly follow.
function Quantize:init(opts)
    opts = options.check("te.Quantize", opts, OPTIONS)
    self.quantizes_forward, self.quantizes_backward, self.name = opts.forward, opts.backward, opts.name
end
options.declare(Quantize.init, OPTIONS)

--- What its scales belong to.
function Quantize:product_keys() return { "values" } end

function Quantize:op_forward(_, x)
    if not mode.on or not (self.quantizes_forward or self.quantizes_backward) then return x end
    local product = mode.product(self, "values")
    mode.prepare { product }
    return te._core.quantize_values(product.state, x, self.quantizes_forward, self.quantizes_backward)
end

function Quantize:lower()
    return nil, "it hands on quantized copies, which a program cannot"
end

function Quantize:describe()
    return ("forward=%s, backward=%s"):format(tostring(self.quantizes_forward), tostring(self.quantizes_backward))
end

return { Quantize = Quantize }
