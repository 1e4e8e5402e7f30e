--- te.ops: the fusible operations, loaded when first used. Each is also te.X.

local te = require "te"
local fail = require "te.fail"
local modules = require "te.modules"

return setmetatable({}, {
    __index = function(_, name)
        local path = modules[name]
        if path and path:find("^te%.ops%.") then return te[name] end
        local known = {}
        for other, from in pairs(modules) do
            if from:find("^te%.ops%.") then known[#known + 1] = other end
        end
        local near = te._core.nearest(tostring(name), known)
        fail("te.ops: no operation named %s%s", tostring(name), near and ("; did you mean %q?"):format(near) or "")
    end,
})
