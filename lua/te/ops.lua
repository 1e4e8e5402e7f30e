--- te.ops: the fusible operations, loaded when first used. Each is also te.X.

local te = require "te"
local modules = require "te.modules"

return setmetatable({}, {
    __index = function(ops, name)
        local path = modules[name]
        if path and path:find("^te%.ops%.") then
            ops[name] = te[name]
            return ops[name]
        end
        error(("te.ops: no operation named %s"):format(tostring(name)), 2)
    end,
})
