--- A recipe as the engine runs it with one product: it is asked once for the quantizers of all roles, and again when
--- its options have changed.

local te = require "te"
local fail = require "te.fail"
local names = require "te.recipe.names"
local core = te._core

local forms = {}

local ROLES = { "input", "weight", "grad_output" }

-- What the first of some recipes that says something says of backward, false where that is to quantize; nil: none does.
local function backward_of(asks)
    local said
    for _, recipe in ipairs(asks) do
        if recipe.backward_override then return recipe.backward_override end
        if recipe:is_uniform() and recipe:declared().backward_override then said = false end
    end
    return said
end

-- What backward computes with: as the recipe itself says, else as those say that it names.
local function backward_override(recipe, asks)
    local said, first = recipe.backward_override, nil
    if said or recipe:is_uniform() then return said or "quantized" end
    for i, role in ipairs(ROLES) do
        local here -- nil also where a role is not quantized
        if asks[i] then here = backward_of(asks[i]) end
        if here ~= nil and first and here ~= said then
            fail("te.recipe.Custom: option backward_override: the recipes for %s and %s differ in it; give it to "
                .. "te.recipe.Custom", first, role)
        elseif here ~= nil then
            said, first = here, role
        end
    end
    return said or "quantized"
end

-- The recipes that others named and their options then; nil: none were.
local function named_in(recipe, asks)
    local named
    for i = 1, #ROLES do
        for _, asked in ipairs(asks[i]) do
            if asked ~= recipe then
                named = named or {}
                named[asked] = asked:options()
            end
        end
    end
    return named
end

--- Whether a recipe that another one named has got other options since.
---@param named table<te.Recipe, table>
---@return boolean
function forms.has_changed(named)
    for recipe, options in pairs(named) do
        if recipe:options() ~= options then return true end
    end
    return false
end

-- The name of a product's module, which stays as it is where no other one is known.
local function name_of(product)
    if names.place or not product.called then product.called = names.of(product.owner) or product.called or "" end
    return product.called
end

--- What a recipe is asked with for an operand of a product: name, that of the module; group, the number of a weight
--- among several.
---@param product table
---@param tensor_type string
---@return table
function forms.role(product, tensor_type)
    product = product.stands_for or product
    return { module_type = product.type, tensor_type = tensor_type, name = name_of(product),
        group = tonumber(product.name:match "%.(%d+)$") }
end

-- The engine's form of a recipe, and which recipe's rule updates each role.
local function make(recipe, product, name)
    local quantizers, rules, lengths, fast, hands_on = {}, {}, { 1, 1, 1 }, {}, false
    local asked, asks = { {}, {}, {} }, {} -- recipes by role, of all roles and of those that are quantized
    for i, role in ipairs(ROLES) do
        local quantizer, owner
        if i == 1 or not product.attends then -- of an attention, q, k and v are input
            quantizer, owner = recipe:resolve(forms.role(product, role), asked[i])
        end
        quantizers[i] = quantizer or false
        asks[i] = quantizer and asked[i] or false
        fast[i] = owner and owner:options().fast_accumulation or "none"
        if i == 1 and owner then hands_on = product.attends and owner:hands_on() end
        if quantizer and quantizer.needs_history then
            if not owner then
                fail("te.recipe: %s: a quantizer that needs a history comes from te.recipe.DelayedScaling", role)
            end
            rules[role], lengths[i] = owner, owner.amax_history_len
        end
    end
    local handle = core.product_recipe(quantizers[1], quantizers[2], quantizers[3], backward_override(recipe, asks),
        lengths, fast, hands_on)
    return { handle = handle, rules = rules, options = recipe:options(), named = named_in(recipe, asked), name = name,
        stores = quantizers[2] ~= false }
end

--- What the engine runs a product with under a recipe: { handle =, rules = by role the recipe that updates it, options
--- =, named =, name = of the module that it was asked for, stores = whether weights are quantized }. Recipes that look
--- at the kind of tensor alone have one form for all products, and one for all attentions.
---@param recipe te.Recipe
---@param product table
---@return table
function forms.of(recipe, product)
    local uniform = recipe:is_uniform()
    local kept, key = uniform and recipe or product, product.attends and "_attentions" or "_forms"
    local name = not uniform and name_of(product.stands_for or product) or nil
    local by_recipe = rawget(kept, key)
    if not by_recipe then
        by_recipe = setmetatable({}, { __mode = "k" })
        rawset(kept, key, by_recipe)
    end
    local found = by_recipe[recipe]
    if not found or found.options ~= recipe:options() or found.name ~= name
        or found.named and forms.has_changed(found.named) then
        found = make(recipe, product, name)
        by_recipe[recipe] = found
    end
    return found
end

return forms
