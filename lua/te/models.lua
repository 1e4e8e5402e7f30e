--- te.models: ready-made models, loaded when first used.

return setmetatable({}, {
    __index = function(models, name)
        local found, model = pcall(require, "te.models." .. tostring(name))
        if not found then error(("te.models.%s: %s"):format(tostring(name), tostring(model)), 2) end
        models[name] = model
        return model
    end,
})
