--- The table that `require "te"` returns. The engine's functions are in it already when this runs; what is written in
--- Lua loads here when it is small and always needed, otherwise when its name is first used (see te.modules).

local te = ...

require "te.scopes"
require "te.tensor"

local lazy = require "te.modules"

local function load_lazily(name)
    local path, field = lazy[name]:match("^([^:]+):?(.*)$")
    local loaded = require(path)
    if field ~= "" then loaded = loaded[field] end
    te[name] = loaded
    return loaded
end

local FILES = { load = true, save = true, from_file = true } -- not there where scripts reach no files

setmetatable(te, {
    __tostring = function() return ("te %s; ?te lists what is in it"):format(te.version) end,
    __index = function(_, name)
        if lazy[name] then return load_lazily(name) end
        if FILES[name] then require("te.files").need("te." .. name) end
        local names = {}
        for known in pairs(te) do names[#names + 1] = known end
        for known in pairs(lazy) do names[#names + 1] = known end
        local nearest = te._core.nearest(tostring(name), names)
        error(("te has no %q%s"):format(tostring(name), nearest and ("; did you mean %q?"):format(nearest) or ""), 2)
    end,
})
