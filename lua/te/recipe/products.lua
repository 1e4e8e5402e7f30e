--- Products under recipes: quantizers for their operands, and the updates of delayed scaling.
--
-- A product is one matrix that an operation multiplies with, its weight (te.recipe.mode.product), or an attention,
-- whose q, k and v are its input. It gets its quantizers when it first runs under a recipe, and others when the recipe
-- or one of its options has changed. Scales change at the end of a step: those of inputs and weights where the
-- outermost te.autocast ends, those of gradients where backward has ended; of all products, whether they ran or not: an
-- amax of 0 says that they did not, and changes nothing.

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local core = te._core

local products = {}

local ROLES = { "input", "weight", "grad_output" }
local INPUT, WEIGHT, GRAD_OUTPUT = 1, 2, 3

-- Products with delayed scaling, to be updated.
local known = setmetatable({}, { __mode = "k" })

-- By group of processes that share amaxes: { order = in which groups were first used, n =, numbers = }. Products have
-- numbers from 1 to n in the order of their first use in a step. Those are what the processes agree on; which products
-- the collector has taken away is not, until it has in all of them.
local sharing, groups = setmetatable({}, { __mode = "k" }), 0

local function sharing_of(group)
    if not sharing[group] then
        groups = groups + 1
        sharing[group] = { order = groups, n = 0, numbers = setmetatable({}, { __mode = "k" }) }
    end
    return sharing[group]
end

local function reduces(product)
    for _, rule in pairs(product.rules) do
        if rule.reduce_amax then return true end
    end
    return false
end

-- The step in progress uses a product of a group; it stays in a list until it has a number.
local function note_use(step, product)
    step.shares = step.shares or {}
    local list = step.shares[product.group] or {}
    step.shares[product.group] = list
    if sharing_of(product.group).numbers[product] or list[product] then return end
    list[#list + 1], list[product] = product, true
end

-- Gives numbers to products that a step has used. What one process alone evaluates or explains has none.
local function number(shares)
    for group, list in pairs(shares) do
        local s = sharing_of(group)
        for _, product in ipairs(list) do
            if not s.numbers[product] then
                s.n = s.n + 1
                s.numbers[product] = s.n
            end
        end
        shares[group] = {}
    end
end

local function make_known(product)
    known[product], mode.products = true, products
    product.group = mode.group and mode.group.size > 1 and reduces(product) and mode.group or nil
    if product.group and mode.step and not mode.replaying then note_use(mode.step, product) end
end

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

local function has_changed(named)
    for recipe, options in pairs(named) do
        if recipe:options() ~= options then return true end
    end
    return false
end

-- The engine's form of a recipe, and which recipe's rule updates each role.
local function make(recipe, product)
    local quantizers, rules, lengths, fast, hands_on = {}, {}, { 1, 1, 1 }, {}, false
    local asked, asks = { {}, {}, {} }, {} -- recipes by role, of all roles and of those that are quantized
    for i, role in ipairs(ROLES) do
        local quantizer, owner = recipe:resolve({ module_type = product.attends and "attention" or "linear",
            tensor_type = role, name = product.name }, asked[i])
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
    return { handle = handle, rules = rules, options = recipe:options(), named = named_in(recipe, asked) }
end

-- Recipes that look at the role alone have one form for all products, and one for all attentions.
local function form(recipe, product)
    local kept, name = recipe:is_uniform() and recipe or product, product.attends and "_attentions" or "_forms"
    local forms = rawget(kept, name)
    if not forms then
        forms = setmetatable({}, { __mode = "k" })
        rawset(kept, name, forms)
    end
    local found = forms[recipe]
    if not found or found.options ~= recipe:options() or found.named and has_changed(found.named) then
        found = make(recipe, product)
        forms[recipe] = found
    end
    return found
end

-- Under te.autocast{ when = "faster" } --------------------------------------------------------------------------------

local function weight_of(product)
    local name, index = product.name:match "^(.-)%.(%d+)$"
    if index then return product.owner[name][tonumber(index)] end
    return product.owner[product.name]
end

-- What there is to measure: of a linear layer its sizes, of an attention how it attends; nil:
-- nothing that could be chosen.
local function case_of(product, recipe, x, tokens, ...)
    if product.attends then
        if not recipe:resolve { module_type = "attention", tensor_type = "input" } then return nil end
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
    case.device, case.name, case.dtype = x.device, core.device_title(x.device), dtype
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

-- The recipe that a product of x's rows runs under, decided once per number of rows.
local function choose(product, recipe, x, ...)
    local rows, shape, dtype = rows_of(product, x, ...), x.shape, core.compute_dtype() or x.dtype
    local tokens = x:numel() / math.max(shape[#shape] or 1, 1)
    local last, options = product.decided, recipe:options()
    if not last or last.tokens ~= tokens or last.rows ~= rows or last.dtype ~= dtype or last.recipe ~= recipe
        or last.options ~= options or last.device ~= x.device then
        last = { tokens = tokens, rows = rows, dtype = dtype, recipe = recipe, options = options, device = x.device }
        last.wanted, last.choice = decide(product, recipe, x, tokens, dtype, ...)
        product.decided = last
    end
    return last.wanted, last.choice
end

--- Gives products the quantizers of the recipe; with x, a tensor whose rows they multiply, those
--- alone that it makes faster.
function products.prepare(list, recipe, x, ...)
    for i = 1, #list do
        local product, wanted = list[i], recipe
        product.choice = nil
        if x then wanted, product.choice = choose(product, recipe, x, ...) end
        local options = wanted:options()
        if product.recipe ~= wanted or product.options ~= options or product.named and has_changed(product.named) then
            local made = form(wanted, product)
            core.recipe_state_use(product.state, made.handle)
            product.recipe, product.options, product.rules, product.named = wanted, options, made.rules, made.named
        end
        if next(product.rules) then make_known(product) end
    end
end

-- Own algorithms see the history as tensors, and run in Lua. Returns what went wrong: then the step's amax is
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
    core.recipe_state_set(product.state, role, new_scale:to("cpu"), new_history:to("cpu"))
end

-- Puts the update of a role on the engine's list, or makes it. Returns what went wrong.
local function update(list, product, role)
    local rule = product.rules[role]
    if not rule then return end
    local algorithm = rule.amax_compute_algo
    if type(algorithm) == "string" and not rule.scaling_factor_compute_algo then
        local n = #list
        list[n + 1], list[n + 2], list[n + 3], list[n + 4] = product.state, role, algorithm, rule.margin
    else
        return update_in_lua(product, role, rule)
    end
end

local function reduces_role(product, role)
    local rule = product.rules[role]
    return rule and rule.reduce_amax
end

-- What a process says of the products of its group: the step's amaxes by number, 0 of one that has none, GONE of one
-- that is no more here. Behind them the role, up and down, so that their largest tell whether all say the same. Also
-- the histories by device: { numbers =, amaxes = }.
local GONE = -1

local function own_amaxes(group, s, role)
    local values, devices = {}, {}
    for number = 1, s.n do values[number] = GONE end
    for product, number in pairs(s.numbers) do
        values[number] = 0
        if product.group == group and reduces_role(product, ROLES[role]) then
            local _, history = core.recipe_state_tensors(product.state, ROLES[role])
            local list = devices[history.device] or { numbers = {}, amaxes = {} }
            devices[history.device] = list
            table.insert(list.numbers, number)
            table.insert(list.amaxes, history:narrow(1, 1, 1))
        end
    end
    for _, list in pairs(devices) do
        for k, amax in ipairs(te.cat(list.amaxes):totable()) do values[list.numbers[k]] = amax end
    end
    values[s.n + 1], values[s.n + 2] = role, -role
    return values, devices
end

-- Takes away the numbers of products that are no more in any process, and lets those behind them move up.
local function renumber(s, largest)
    local kept, moved = 0, {}
    for number = 1, s.n do
        if largest[number] ~= GONE then
            kept = kept + 1
            moved[number] = kept
        end
    end
    if kept == s.n then return end
    s.n = kept
    for product, number in pairs(s.numbers) do s.numbers[product] = moved[number] end
end

-- The step's amaxes of a group's products become the largest of all its processes. They travel from the host, since
-- histories of what has not run yet lie there.
local function share(group, role)
    local s = sharing[group]
    local values, devices = own_amaxes(group, s, role)
    local all = group:all_reduce_(te.tensor(values, { dtype = "float32", device = "cpu" }), "max")
    local largest = all:totable()
    local most, least = largest[s.n + 1], -largest[s.n + 2]
    if most ~= least then
        fail("te.recipe: option reduce_amax: the processes differ: rank %d shares the amaxes of %s, another those of "
            .. "%s", group.rank, ROLES[role], ROLES[most ~= role and most or least])
    end
    for device, list in pairs(devices) do
        local parts = {}
        for k, number in ipairs(list.numbers) do parts[k] = all:narrow(1, number, 1) end
        local there = te.cat(parts):to(device)
        for k, amax in ipairs(list.amaxes) do amax:copy_(there:narrow(1, k, 1)) end
    end
    renumber(s, largest)
end

-- The groups whose products the last backward pass has reached.
local function reached()
    local found = {}
    for product in pairs(known) do
        if product.group and reduces_role(product, "grad_output") and core.recipe_state_reached(product.state) then
            found[product.group] = true
        end
    end
    return found
end

-- A step concerns the groups that it has used, so that one process may run another model alone.
local function share_all(used, first_role, last_role)
    local order = {}
    for group in pairs(used) do order[#order + 1] = group end
    table.sort(order, function(a, b) return sharing[a].order < sharing[b].order end)
    for _, group in ipairs(order) do
        for role = first_role, last_role do share(group, role) end
    end
end

local function update_all(...)
    local list, problem = {}, nil
    for product in pairs(known) do
        for i = 1, select("#", ...) do problem = update(list, product, (select(i, ...))) or problem end
    end
    core.recipe_states_update(list)
    if problem ~= nil then error(problem, 0) end
end

--- The end of a step, the outermost te.autocast `scope`: new scales for inputs and weights of all products. On a device
--- one kernel makes all updates.
function products.end_step(scope)
    if scope.shares then
        number(scope.shares)
        te.no_grad(share_all, scope.shares, INPUT, WEIGHT)
    end
    update_all("input", "weight")
end

--- The end of a backward pass, maybe inside of a step: likewise for gradients.
function products.end_backward()
    if mode.step and mode.step.shares then number(mode.step.shares) end
    if next(sharing) then te.no_grad(share_all, reached(), GRAD_OUTPUT, GRAD_OUTPUT) end
    update_all "grad_output"
end

--- The end of a step that failed: of all products, the amaxes of inputs and weights are forgotten, or where it was a
--- backward those of gradients.
function products.forget(gradients)
    for product in pairs(known) do core.recipe_state_forget(product.state, gradients == true) end
end

-- State ------------------------------------------------------------------------------------------------------------

-- Calls visit(key, role, name of the scale, name of the history) for every product of a module and role. Of the second
-- weight of a list the names begin with "2.".
local function each_role(module, visit)
    for _, key in ipairs(module:product_keys()) do
        local index = key:match("%.(%d+)$")
        local prefix = index and index .. "." or ""
        for _, role in ipairs(ROLES) do
            visit(key, role, prefix .. role .. "_scale", prefix .. role .. "_amax_history")
        end
    end
end

--- What delayed scaling keeps with a module, by name: "input_scale", "weight_amax_history" ….
function products.state(module)
    local state, kept = {}, rawget(module, "_products")
    if not (kept and module.product_keys) then return state end
    each_role(module, function(key, role, scale_name, history_name)
        if kept[key] then
            state[scale_name], state[history_name] = core.recipe_state_tensors(kept[key].state, role)
        end
    end)
    return state
end

local function fits(t) return te.is_tensor(t) and t.dtype == "float32" and t:dim() == 1 and t:numel() > 0 end

-- What is wrong with a scale and a history for a product of a module.
local function problem_of(module, key, role, scale, history)
    local state = mode.product(module, key).state
    return core.recipe_state_check(state, role, scale:to("cpu"), history:to("cpu"))
end

--- Looks for the same in `given`, where names begin with `prefix`. Returns the names found, a function that puts the
--- tensors in place, and what is wrong with them.
function products.loader(module, prefix, given)
    local found, steps, problem = {}, {}, nil
    if not module.product_keys then return found end
    each_role(module, function(key, role, scale_name, history_name)
        local scale, history = given[prefix .. scale_name], given[prefix .. history_name]
        if scale == nil and history == nil then return end
        found[#found + 1], found[#found + 2] = prefix .. scale_name, prefix .. history_name
        if not (fits(scale) and fits(history) and scale:numel() == 1) then
            problem = problem or ("%s and %s: expected float32 tensors, of one number and of amaxes"):format(
                prefix .. scale_name, prefix .. history_name)
        else
            local why = problem_of(module, key, role, scale, history)
            problem = problem or why and ("%s and %s: %s"):format(prefix .. scale_name, prefix .. history_name, why)
        end
        steps[#steps + 1] = function()
            core.recipe_state_set(mode.product(module, key).state, role, scale:to("cpu"), history:to("cpu"))
        end
    end)
    return found, function()
        if steps[1] then mode.products = products end
        for _, step in ipairs(steps) do step() end
    end, problem
end

--- Gives module `to`, a copy of `from`, products that remember the same. The states, the old one and its copy, are
--- appended to a list.
function products.copy(from, to, states)
    for name, product in pairs(rawget(from, "_products")) do
        local new = mode.product(to, name)
        states[#states + 1], states[#states + 2] = product.state, new.state
        if product.recipe then products.prepare({ new }, product.recipe) end
        for _, role in ipairs(ROLES) do
            local scale, history = core.recipe_state_tensors(product.state, role)
            if scale and history then core.recipe_state_set(new.state, role, scale:to "cpu", history:to "cpu") end
        end
    end
end

return products
