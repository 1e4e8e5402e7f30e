--- Products under recipes: quantizers for their operands, and the updates of delayed scaling.
--
-- A product is one matrix that an operation multiplies with, its weight (te.recipe.mode.product), or an attention,
-- whose q, k and v are its input. It gets its quantizers when it first runs under a recipe, and others when the recipe
-- or one of its options has changed. Scales change at the end of a step: those of inputs and weights where the
-- outermost te.autocast ends, those of gradients where backward has ended; of all products, whether they ran or not: an
-- amax of 0 says that they did not, and changes nothing.

local te = require "te"
local mode = require "te.recipe.mode"
local names = require "te.recipe.names"
local choice = require "te.recipe.choice"
local forms = require "te.recipe.forms"
local shared = require "te.recipe.shared_amaxes"
local core = te._core

local products = {}

-- States of products with delayed scaling, to be updated. A finalizer that reaches a product keeps the key for a while,
-- but not the entry: a state that is finalized goes as a weak value at once.
local known = setmetatable({}, { __mode = "kv" })

local function reduces(product)
    for role in pairs(product.rules) do
        if shared.reduces(product, role) then return true end
    end
    return false
end

local function note_use(product)
    product.group = known[product] and mode.group and mode.group.size > 1 and reduces(product) and mode.group or nil
    if product.group and mode.step and not mode.replaying then shared.note_use(mode.step, product) end
end

-- Of a weight that was stored quantized, and in whose place another stands, no amax may reach the scale of that one.
local function forget_replaced(product)
    local name, i = product.name:match "^([^.]+)%.?(%d*)$"
    local weight = rawget(product.owner, name)
    if i ~= "" and type(weight) == "table" then weight = weight[tonumber(i)] end
    if not te.is_tensor(weight) or core.is_quantized(weight) then return end
    product.stored = nil
    local _, history = core.recipe_state_tensors(product.state, "weight")
    if history then te.no_grad(history.zero_, history:narrow(1, 1, 1)) end
end

local function use(product, made, recipe)
    core.recipe_state_use(product.state, made.handle)
    product.made, product.recipe, product.options, product.named = made, recipe, made.options, made.named
    product.place = names.place or product.place
    if product.rules ~= made.rules then
        for role, rule in pairs(product.rules) do product.earlier[role] = rule end
        for role in pairs(made.rules) do product.earlier[role] = nil end
        product.rules = made.rules
    end
    if next(made.rules) then known[product], mode.products = product.state, products end
end

--- Gives a product the quantizers that another one has, if any.
function products.prepare_like(product, other)
    if other.recipe then use(product, other.made, other.recipe) end
end

--- Gives products the quantizers of the recipe; with x, a tensor whose rows they multiply, those
--- alone that it makes faster.
function products.prepare(list, recipe, x, ...)
    for i = 1, #list do
        local product, wanted = list[i], recipe
        product.choice = nil
        if product.stored then forget_replaced(product) end
        if x then wanted, product.choice = choice.of(product, recipe, x, ...) end
        local options = wanted:options()
        if product.recipe ~= wanted or product.options ~= options or names.place and product.place ~= names.place
            or product.named and forms.has_changed(product.named) then
            use(product, forms.of(wanted, product), wanted)
        end
        if next(product.rules) then note_use(product) end
    end
end

-- Own algorithms run in Lua, on numbers (te.recipe.delayed). Returns what went wrong: then the step's amax is
-- forgotten.
local function update_in_lua(product, role, rule)
    if require("te.graph").before_launch() then
        return ("te.recipe.DelayedScaling: option %s: a function runs on the host and cannot be part of a graph")
            :format(type(rule.amax_compute_algo) == "string" and "scaling_factor_compute_algo" or "amax_compute_algo")
    end
    local scale, history = core.recipe_state_tensors(product.state, role)
    if history:select(1, 1):item() == 0 then return end
    local ok, new_scale, new_history = core.within(rule.update, rule, role, scale, history)
    if not ok then
        te.no_grad(history.zero_, history:narrow(1, 1, 1))
        return new_scale
    end
    core.recipe_state_set(product.state, role, new_scale:to("cpu"), new_history:to("cpu"), product.state)
end

-- Puts the update of a role on the engine's list, or makes it. Returns what went wrong.
local function update(list, product, role)
    local rule = product.rules[role]
    if not rule then -- amaxes may still come: of a backward whose forward ran before
        rule = product.earlier[role]
        if not rule or not (product.group or core.recipe_state_counted(product.state, role)) then return end
    end
    local algorithm = rule.amax_compute_algo
    if type(algorithm) == "string" and not rule.scaling_factor_compute_algo then
        local n = #list
        list[n + 1], list[n + 2], list[n + 3], list[n + 4] = product.state, role, algorithm, rule.margin
    else
        return update_in_lua(product, role, rule)
    end
end

-- The groups whose products the last backward pass has reached.
local function reached()
    local found = {}
    for product in pairs(known) do
        if product.group and shared.reduces(product, "grad_output") and core.recipe_state_reached(product.state) then
            found[product.group] = true
        end
    end
    return found
end

local function update_all(...)
    local list, problem = {}, nil
    for product in pairs(known) do
        if product.stored then forget_replaced(product) end
        for i = 1, select("#", ...) do problem = update(list, product, (select(i, ...))) or problem end
    end
    core.recipe_states_update(list)
    if problem ~= nil then error(problem, 0) end
end

--- The end of a step, the outermost te.autocast `scope`: new scales for inputs and weights of all products. On a device
--- one kernel makes all updates.
function products.end_step(scope)
    if scope.shares then
        shared.number(scope.shares)
        te.no_grad(shared.share, scope.shares, "input", "weight")
    end
    update_all("input", "weight")
end

--- The end of a backward pass, maybe inside of a step: likewise for gradients.
function products.end_backward()
    if mode.step and mode.step.shares then shared.number(mode.step.shares) end
    if shared.any() then te.no_grad(shared.share, reached(), "grad_output") end
    update_all "grad_output"
end

--- The end of a step that failed: of all products, the amaxes of inputs and weights are forgotten, or where it was a
--- backward those of gradients.
function products.forget(gradients)
    for product in pairs(known) do core.recipe_state_forget(product.state, gradients == true) end
end

return products
