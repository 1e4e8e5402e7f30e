--- te.ops: the fusible operations, loaded when first used. Each is also te.X.

local te = require "te"
local fail = require "te.fail"
local modules = require "te.modules"

return setmetatable({}, {
    __index = function(ops, name)
        local path = modules[name]
        if path and path:find("^te%.ops%.") then
            ops[name] = te[name]
            return ops[name]
        end
        fail("te.ops: no operation named %s", tostring(name))
    end,
})
