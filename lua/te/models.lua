--- te.models: ready-made models, loaded when first used.

local fail = require "te.fail"

return setmetatable({}, {
    __index = function(models, name)
        local found, model = pcall(require, "te.models." .. tostring(name))
        if not found then fail("te.models.%s: %s", tostring(name), tostring(model)) end
        models[name] = model
        return model
    end,
})
