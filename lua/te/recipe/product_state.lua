--- What delayed scaling keeps with a module, for its state_dict and its copies: a scale and a history of amaxes for
--- each role of its products.

local te = require "te"
local mode = require "te.recipe.mode"
local products = require "te.recipe.products"
local core = te._core

local product_state = {}

local ROLES = { "input", "weight", "grad_output" }

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
---@param module te.Module
---@return table<string, te.Tensor>
function product_state.of(module)
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
---@param module te.Module
---@param prefix string
---@param given table<string, any>
---@return string[] found
---@return function|nil load
---@return string|nil problem
function product_state.loader(module, prefix, given)
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
---@param from te.Module
---@param to te.Module
---@param states table
function product_state.copy(from, to, states)
    for name, product in pairs(rawget(from, "_products")) do
        local new = mode.product(to, name)
        states[#states + 1], states[#states + 2] = product.state, new.state
        products.prepare_like(new, product)
        for _, role in ipairs(ROLES) do
            local scale, history = core.recipe_state_tensors(product.state, role)
            if scale and history then
                core.recipe_state_set(new.state, role, scale:to "cpu", history:to "cpu", product.state)
            end
        end
    end
end

return product_state
