--- Under te.autocast{ when = "faster" }: whether a product runs under the recipe, or without it since that is faster.

local te = require "te"
local forms = require "te.recipe.forms"
local core = te._core

local choice = {}

local function weight_of(product)
    local name, index = product.name:match "^(.-)%.(%d+)$"
    if index then return product.owner[name][tonumber(index)] end
    return product.owner[product.name]
end

-- What there is to measure: of a linear layer its sizes, of an attention how it attends; nil:
-- nothing that could be chosen.
local function case_of(product, recipe, x, tokens, ...)
    if product.attends then
        if not recipe:resolve(forms.role(product, "input")) then return nil end
        local attention = require("te.recipe.faster_attention").describe(product.owner, x, ...)
        return attention and { attention = attention }
    end
    local weight = weight_of(product)
    if not te.is_tensor(weight) or core.is_quantized(weight) then return nil end
    return { tokens = tokens, width_in = weight.shape[2], width_out = weight.shape[1] }
end

local function decide(product, recipe, x, tokens, dtype, ...)
    local case = case_of(product, recipe, x, tokens, ...)
    if not case then return recipe, nil end
    case.device, case.name, case.dtype, case.product = x.device, core.device_title(x.device), dtype, product
    local faster = require "te.recipe.faster"
    local pays, reason = faster.decide(case, recipe)
    if pays then return recipe, "the recipe: " .. reason end
    return faster.plain(), dtype .. ": " .. reason
end

-- How rows are told apart: a linear layer knows their number, an attention its sequences.
local function rows_of(product, x, ...)
    if not product.attends then return nil end
    local text = table.concat(x.shape, " ")
    local other = ...
    return te.is_tensor(other) and text .. ", " .. table.concat(other.shape, " ") or text
end

--- The recipe that a product of x's rows runs under, decided once per number of rows, and per name where the recipe
--- looks at it.
---@param product table
---@param recipe te.Recipe  of te.autocast
---@param x te.Tensor       {…, width}; of attention q, and what else it attends to follows
---@return te.Recipe
---@return string|nil reason  nil: there was nothing to choose
function choice.of(product, recipe, x, ...)
    local rows, shape, dtype = rows_of(product, x, ...), x.shape, core.compute_dtype() or x.dtype
    local tokens = x:numel() / math.max(shape[#shape] or 1, 1)
    local name, options = forms.name(recipe, product), recipe:options()
    local decided = product.decided or {}
    local last = decided[name]
    if not last or last.tokens ~= tokens or last.rows ~= rows or last.dtype ~= dtype or last.recipe ~= recipe
        or last.options ~= options or last.device ~= x.device then
        last = { tokens = tokens, rows = rows, dtype = dtype, recipe = recipe, options = options, device = x.device }
        last.wanted, last.choice = decide(product, recipe, x, tokens, dtype, ...)
        decided[name], product.decided = last, decided
    end
    return last.wanted, last.choice
end

return choice
