--- A recipe as the engine runs it with one product: it is asked once for the quantizers of all roles, and again when
--- its options have changed.

local te = require "te"
local fail = require "te.fail"
local names = require "te.recipe.names"
local core = te._core

local forms = {}

local WEAK_KEYS, WEAK_VALUES = { __mode = "k" }, { __mode = "v" }

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
---@param name string|nil  nil: what it is called now
---@return table
function forms.role(product, tensor_type, name)
    product = product.stands_for or product
    return { module_type = product.type, tensor_type = tensor_type, name = name or name_of(product),
        group = tonumber(product.name:match "%.(%d+)$") }
end

-- What is kept of a recipe for products alike, until its options change: names by place, forms by name, and handles by
-- what they were made of, while a form has them. Recipes that look at the kind of tensor alone have one form for all
-- products, and one for all attentions; of others a product keeps its own.
local function kept_of(recipe, product)
    local holder, key = recipe:is_uniform() and recipe or product, product.attends and "_attentions" or "_forms"
    local by_recipe = rawget(holder, key)
    if not by_recipe then
        by_recipe = setmetatable({}, WEAK_KEYS)
        rawset(holder, key, by_recipe)
    end
    local kept = by_recipe[recipe]
    if not kept or kept.options ~= recipe:options() then
        kept = { options = recipe:options(), names = setmetatable({}, WEAK_KEYS), forms = {},
            handles = setmetatable({}, WEAK_VALUES) }
        by_recipe[recipe] = kept
    end
    return kept
end

--- The name under which a recipe is asked for a product: what that was called when it first ran under the recipe in the
--- outermost module that is running; "" for recipes that do not look at it.
---@param recipe te.Recipe
---@param product table
---@return string
function forms.name(recipe, product)
    if recipe:is_uniform() then return "" end
    local asked, place = product.stands_for or product, names.place
    if not place then return name_of(asked) end
    local known = kept_of(recipe, product).names
    known[place] = known[place] or name_of(asked)
    asked.called = known[place]
    return known[place]
end

-- The engine's form of these quantizers. Products keep the copies of their weights as long as they have the same one.
local function handle_of(handles, quantizers, backward, lengths, fast, hands_on)
    local parts = {}
    for i = 1, #ROLES do parts[i] = ("%s %d %s"):format(tostring(quantizers[i]), lengths[i], fast[i]) end
    local key = ("%s; %s; %s"):format(table.concat(parts, "; "), backward, tostring(hands_on))
    local handle = handles[key]
        or core.product_recipe(quantizers[1], quantizers[2], quantizers[3], backward, lengths, fast, hands_on)
    handles[key] = handle
    return handle
end

-- The engine's form of a recipe, and which recipe's rule updates each role.
local function make(recipe, product, name, handles)
    local quantizers, rules, lengths, fast, hands_on = {}, {}, { 1, 1, 1 }, {}, false
    local asked, asks = { {}, {}, {} }, {} -- recipes by role, of all roles and of those that are quantized
    for i, role in ipairs(ROLES) do
        local quantizer, owner
        if i == 1 or not product.attends then -- of an attention, q, k and v are input
            quantizer, owner = recipe:resolve(forms.role(product, role, name), asked[i])
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
    local handle = handle_of(handles, quantizers, backward_override(recipe, asks), lengths, fast, hands_on)
    return { handle = handle, rules = rules, options = recipe:options(), named = named_in(recipe, asked),
        stores = quantizers[2] ~= false }
end

--- What the engine runs a product with under a recipe: { handle =, rules = by role the recipe that updates it, options
--- =, named =, stores = whether weights are quantized }.
---@param recipe te.Recipe
---@param product table
---@return table
function forms.of(recipe, product)
    local kept, name = kept_of(recipe, product), forms.name(recipe, product)
    local found = kept.forms[name]
    if not found or found.named and forms.has_changed(found.named) then
        found = make(recipe, product, name, kept.handles)
        kept.forms[name] = found
    end
    return found
end

return forms
