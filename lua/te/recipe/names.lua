--- What layers are called in the roles that a te.recipe.Custom's function is asked with: what stands in a module's
--- field `name`, else its path in the outermost module that is running, "blocks.1.mlp.2". Below a module with a name
--- paths begin with that. Only while such a recipe is in force is the outermost module noted (te.module_tree), and
--- only where a product asks is it walked.

local tree = require "te.module_tree"
local inside = require "te.depth"

local names = {
    place = nil, -- the outermost module that is running, as something to compare; nil: none, or nobody asks for names
}

local WEAK = { __mode = "v" }
local places = setmetatable({}, { __mode = "k" }) -- by module; they do not hold it

local function left(...)
    if names.place then
        names.place.paths, names.place = nil, nil
        tree.entering = names.enter
    end
    return ...
end

--- fn(...), a call of a module inside of no other.
function names.enter(module, fn, ...)
    local place = places[module] or { root = setmetatable({ module }, WEAK) }
    places[module], place.paths = place, nil
    tree.entering, names.place = nil, place
    return left(fn(...))
end

--- Sets whether outermost modules are noted, and which one is running.
function names.set(wanted, place)
    names.place, tree.entering = place, wanted and not place and names.enter or nil
end

local function given(module)
    local name = rawget(module, "name")
    return type(name) == "string" and name or nil
end

-- A module that stands in several places is called by the first one.
local function walk(module, name, found, depth, path)
    depth = inside(module, depth)
    path[depth], name = module, given(module) or name
    found[module] = found[module] or name
    for _, child in ipairs(tree.children(module, path, depth)) do
        walk(child.module, name == "" and child.name or name .. "." .. child.name, found, depth, path)
    end
end

--- The name of a module, "" for the outermost one; nil where it is not in that or none is known.
---@param module table
---@return string|nil
function names.of(module)
    local place = names.place
    if given(module) or not place then return given(module) end
    if not (place.paths and place.paths[module]) then
        place.paths = {}
        if place.root[1] then walk(place.root[1], "", place.paths, nil, {}) end
    end
    return place.paths[module]
end

return names
