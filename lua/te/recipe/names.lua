--- What layers are called in the roles that a te.recipe.Custom's function is asked with: what stands in a module's
--- field `name`, else its path in the outermost module that is running, "blocks.1.mlp.2". Below a module with a name
--- paths begin with that. Only while such a recipe is in force is the outermost module noted (te.module_tree), and
--- only where a product asks is it walked.

local te = require "te"
local tree = require "te.module_tree"
local core = te._core

local names = {
    place = nil, -- the outermost module that is running, as something to compare; nil: none, or nobody asks for names
}

local WEAK_KEYS, WEAK_VALUES = { __mode = "k" }, { __mode = "v" }
local places = setmetatable({}, WEAK_KEYS) -- by module; they do not hold it, nor those in it

-- Only called where outermost modules are noted.
local function swap(place)
    local before = names.place
    names.place, tree.entering = place or nil, not place and names.enter or nil
    return before or false
end

--- fn(...), a call of a module inside of no other.
function names.enter(module, fn, ...)
    local place = places[module] or { root = setmetatable({ module }, WEAK_VALUES) }
    places[module], place.paths = place, nil
    return core.pass(core.under(swap, place, fn, ...))
end

--- Sets whether outermost modules are noted, and which one is running.
function names.set(wanted, place)
    names.place, tree.entering = place, wanted and not place and names.enter or nil
end

local function given(module)
    local name = rawget(module, "name")
    return type(name) == "string" and name or nil
end

local DEEPEST = 256 -- below it modules have no names

-- A module that stands in several places is called by the first one. What the tree has no name for has none here,
-- with what is in it.
local function walk(module, name, found, depth, path)
    if found[module] or depth > DEEPEST then return end
    path[depth], name = module, given(module) or name
    found[module] = name
    for _, child in ipairs(tree.children(module, path, depth, tree.SKIP)) do
        walk(child.module, name == "" and child.name or name .. "." .. child.name, found, depth + 1, path)
    end
end

--- The name of a module, "" for the outermost one; nil where it is not in that or none is known.
---@param module table
---@return string|nil
function names.of(module)
    local place = names.place
    if given(module) or not place then return given(module) end
    if not (place.paths and place.paths[module]) then
        place.paths = setmetatable({}, WEAK_KEYS)
        if place.root[1] then walk(place.root[1], "", place.paths, 1, {}) end
    end
    return place.paths[module]
end

return names
