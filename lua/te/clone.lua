--- te.Module's clone: a copy with tensors of its own.
--
-- Whatever the module refers to in its fields and plain tables is copied once, so that what is shared within it is
-- shared within the copy; where such a thing is a key of a table, its copy is. Weights that are stored quantized belong
-- to the product that multiplies with them, whose scales and histories are copied as well; such tensors are copied
-- last, when all products are known. A class that keeps more than its fields has a method cloned(), which is called on
-- the copy.

local te = require "te"
local tree = require "te.module_tree"
local mode = require "te.recipe.mode"
local core = te._core

-- What a module makes anew by itself.
local MADE = { _programs = true, _script = true, _products = true, _hooks = true }

-- What is said elsewhere of parameters, and of modules, by them.
local function said_elsewhere()
    local gradients = require "te.distributed.gradients"
    return { require "te.distributed.parts", require("te.distributed.whole").layouts, mode.initial, tree.parameters,
        gradients.apart, require("te.distributed.stages").held }
end

local function said_of_copy(state, old, new)
    for _, registry in ipairs(state.registries) do registry[new] = registry[old] end
    return new
end

local function tensor_like(state, t)
    local new = core.is_quantized(t) and core.quantized_clone(t, state.products) or te.no_grad(te.clone, t)
    new.requires_grad = t.requires_grad and t.is_leaf
    return said_of_copy(state, t, new)
end

local copy

-- Puts the copy of a value at a key of a table. Which copy a key has is known when all else is copied.
local function put(state, holder, key, value)
    local kind = type(key)
    if kind ~= "table" and kind ~= "userdata" then
        rawset(holder, key, copy(state, value, holder, key))
    else
        local entry = { holder = holder, key = key }
        entry.value = copy(state, value, entry, "value")
        state.keyed[#state.keyed + 1] = entry
    end
end

local function copy_module(state, module)
    local new = said_of_copy(state, module, setmetatable({}, getmetatable(module)))
    state.known[module] = new
    for key, value in next, module do
        if not MADE[key] then put(state, new, key, value) end
    end
    local hooks = rawget(module, "_hooks")
    if hooks then new.pure = hooks.pure end
    if rawget(module, "_products") then require("te.recipe.product_state").copy(module, new, state.products) end
    state.modules[#state.modules + 1] = new
    return new
end

-- The copy of a value that is to stand at a key of a table.
function copy(state, value, holder, key)
    local kind = type(value)
    if kind ~= "table" and kind ~= "userdata" then return value end
    local known = state.known[value]
    if known then return known end
    if kind == "userdata" then
        if not te.is_tensor(value) then return value end
        if core.is_quantized(value) then
            table.insert(state.quantized, { holder, key, value })
            return nil
        end
        known = tensor_like(state, value)
        state.known[value] = known
        return known
    end
    if tree.is_module(value) then return copy_module(state, value) end
    if getmetatable(value) ~= nil then return value end
    known = {}
    state.known[value] = known
    for k, v in next, value do put(state, known, k, v) end
    return known
end

return function(module)
    local state = { known = {}, quantized = {}, keyed = {}, products = {}, modules = {},
        registries = said_elsewhere() }
    local new = copy_module(state, module)
    for _, place in ipairs(state.quantized) do
        local holder, key, value = unpack(place)
        state.known[value] = state.known[value] or tensor_like(state, value)
        rawset(holder, key, state.known[value])
    end
    for _, entry in ipairs(state.keyed) do rawset(entry.holder, state.known[entry.key] or entry.key, entry.value) end
    for _, part in ipairs(state.modules) do
        if part.cloned then part:cloned() end
    end
    return new
end
