--- The state of a module: its tensors by name, and taking them over from a table. Module:state_dict and load_state_dict
--- say what there is; parameters that are stored quantized, and what delayed scaling remembers, are asked for theirs.

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local options = require "te.options"
local rows = require "te.rows"
local tree = require "te.module_tree"
local core = te._core
local walk, walk_modules = tree.walk, tree.walk_modules

local module_state = {}

--- Parameters and buffers of a module by name (Module:state_dict).
---@param self te.Module
---@return table<string, te.Tensor>
function module_state.of(self)
    local state, seen = {}, {}
    walk(self, "", function(name, tensor, kind)
        if not seen[tensor] and kind ~= "constant" then
            seen[tensor] = true
            if core.is_quantized(tensor) then
                require("te.recipe.parameters").each_part(name, tensor, function(part, t) state[part] = t end)
            else
                state[name] = tensor
            end
        end
    end)
    if not mode.products then return state end
    walk_modules(self, "", function(prefix, module)
        if seen[module] then return end
        seen[module] = true
        for name, tensor in pairs(require("te.recipe.product_state").of(module)) do
            if state[prefix .. name] then
                fail("%s:state_dict: %s is the name of a tensor of %s, and of what delayed scaling remembers",
                    self.__name, prefix .. name, module.__name)
            end
            state[prefix .. name] = tensor
        end
    end)
    return state
end

-- Those of sorted names that stand in a message, at most a few.
local function few(names)
    local shown = table.concat(names, ", ", 1, math.min(#names, 5))
    return #names > 5 and ("%s and %d more"):format(shown, #names - 5) or shown
end

local function is_released(t) return te.is_tensor(t) and not pcall(t.dim, t) end

-- Raises where one of the tensors of a state is no more.
local function check_unreleased(who, state)
    for name, given in pairs(state) do
        local released = is_released(given)
        for _, part in ipairs(rows.are(given) and given.parts or {}) do released = released or is_released(part) end
        if released then fail("%s: %s: tensor was released", who, tostring(name)) end
    end
end

-- Finds scales and histories of delayed scaling among a plan's state. Returns what is wrong.
local function find_recipe_state(self, plan)
    local any, problem = false, nil
    for name in pairs(plan.state) do any = any or type(name) == "string" and name:find("_amax_history$") ~= nil end
    if not any then return end
    walk_modules(self, "", function(prefix, module)
        local found, load, wrong = require("te.recipe.product_state").loader(module, prefix, plan.state)
        for _, name in ipairs(found) do plan.known[name] = true end
        plan.scales[#plan.scales + 1], problem = load, problem or wrong
    end)
    return problem
end

-- Finds what a tensor named `name` takes over, of a plan's state. Returns what is wrong.
local function find_source(plan, name, tensor, module)
    local state, given = plan.state, plan.state[name]
    if given == nil and core.is_quantized(tensor) then
        local parts, wrong = require("te.recipe.parameters").loader(name, tensor, state, plan.known)
        if parts then
            plan.parts[#plan.parts + 1], plan.source[tensor] = parts, tensor
            return wrong
        end
    end
    if given == nil and (state[name .. ".rowwise_data"] or state[name .. ".columnwise_data"]) then
        return ("%s of %s is stored in full, the one given quantized. A module made under te.quantized_model_init with "
            .. "that recipe takes it; p:clone() of each of its named_parameters() is what is taken here"):format(name,
            module.__name)
    elseif given == nil then
        plan.absent[tensor] = plan.absent[tensor] or name
    elseif not te.is_tensor(given) and not rows.are(given) then
        return ("%s: expected a tensor, got %s"):format(name, core.describe(given))
    elseif options.shape(given) ~= options.shape(tensor) then
        return ("%s of %s has shape %s, the one given has %s"):format(name, module.__name, options.shape(tensor),
            options.shape(given))
    else
        plan.source[tensor] = given
    end
end

-- The state, with copies of the module's own tensors that it has under other names: loading writes those.
local function apart(self, state)
    local own, written, copies = module_state.of(self), {}, nil
    walk(self, "", function(name, tensor) own[name] = tensor end) -- those stored quantized as a whole, too
    for _, tensor in pairs(own) do written[tensor:storage_id()] = true end
    for name, given in pairs(state) do
        if te.is_tensor(given) and not rawequal(given, own[name]) and written[given:storage_id()] then
            copies = copies or {}
            copies[name] = given:clone()
        end
    end
    if not copies then return state end
    for name, given in pairs(state) do
        if copies[name] == nil then copies[name] = given end
    end
    return copies
end

-- What taking over `state` comes to: names that are known, what each tensor gets (source), what gets nothing (absent),
-- and what else is to do: scales of delayed scaling first, by which parameters are then quantized, and parts of such as
-- are quantized already. Raises where something does not fit.
local function make_plan(self, who, state)
    local plan = { state = state, known = {}, names = {}, source = {}, absent = {}, scales = {}, parts = {} }
    local problem
    walk(self, "", function(name, tensor, kind, _, _, module)
        if kind == "constant" then return end
        plan.known[name] = true
        plan.names[#plan.names + 1] = name
        local wrong = find_source(plan, name, tensor, module)
        problem = problem or wrong
    end)
    problem = problem or find_recipe_state(self, plan)
    if problem then fail("%s: %s", who, problem) end
    return plan
end

-- The sorted names that a state lacks, and those that it has beyond.
local function differences(plan)
    local missing, unexpected = {}, {}
    for tensor, name in pairs(plan.absent) do -- a shared tensor may come under any of its names
        if not plan.source[tensor] then missing[#missing + 1] = name end
    end
    for name in pairs(plan.state) do
        if not plan.known[name] then unexpected[#unexpected + 1] = tostring(name) end
    end
    table.sort(missing)
    table.sort(unexpected)
    return missing, unexpected
end

local function copy_all(source)
    for tensor, given in pairs(source) do
        if rows.are(given) then
            given:copy_to(tensor)
        elseif not rawequal(tensor, given) then
            tensor:copy_(given)
        end
        if mode.initial and mode.initial[tensor] then mode.note_initial(tensor, given) end
    end
end

-- Why a strict load fails: both sides, for what has another name is on each; nil where names agree.
local function disagreement(missing, unexpected, names)
    local parts = {}
    if #missing > 0 then parts[1] = "missing: " .. few(missing) end
    if #unexpected > 0 then
        local near = options.nearest(unexpected[1], names)
        near = near and (" (nearest known: %s)"):format(near) or ""
        parts[#parts + 1] = "unexpected: " .. few(unexpected) .. near
    end
    return parts[1] and table.concat(parts, "; ")
end

--- Copies the tensors of a state into those of a module (Module:load_state_dict).
---@param self te.Module
---@param who string  the method, for messages
---@param state table<string, any>
---@param strict boolean  raises where names differ
---@return string[] missing     sorted names that the state lacks
---@return string[] unexpected  sorted names that only the state has
function module_state.load(self, who, state, strict)
    check_unreleased(who, state)
    state = te.no_grad(apart, self, state)
    local plan = make_plan(self, who, state)
    local missing, unexpected = differences(plan)
    local problem = strict and disagreement(missing, unexpected, plan.names)
    if problem then fail("%s: %s", who, problem) end
    for _, load in ipairs(plan.scales) do load() end
    te.no_grad(copy_all, plan.source)
    for _, load in ipairs(plan.parts) do load() end
    for _, load in ipairs(plan.scales) do load() end -- again: quantizing adds to histories
    return missing, unexpected
end

require "te.uncompiled"(module_state.of, module_state.load, make_plan, find_recipe_state)

return module_state
