--- The activations as operations: one row each. Gated ones halve the last dimension and activate the first half.

local te = require "te"
local options = require "te.options"
local BasicOperation = require("te.operation").BasicOperation

local ACTIVATIONS = {
    { "ReLU", "relu" },
    { "GELU", "gelu", { approximate = { "string", "tanh", choices = { "tanh", "none" } } } },
    { "QuickGELU", "quick_gelu", also = "QGELU" },
    { "SReLU", "srelu" },
    { "SiLU", "silu" },
    { "GLU", "glu" },
    { "ReGLU", "reglu" },
    { "GEGLU", "geglu", also = "GeGLU" },
    { "QGEGLU", "qgeglu" },
    { "SReGLU", "sreglu" },
    { "SwiGLU", "swiglu" },
    { "ClampedSwiGLU", "clamped_swiglu",
        { limit = { "number", 7, min = 0 }, alpha = { "number", 1.702 }, offset = { "number", 1 } } },
}

local function define(name, function_name, declared)
    local class = BasicOperation:extend(name)
    class.pure = true
    local run = te[function_name]

    function class:init(opts)
        self.options = options.check("te." .. name, opts, declared or {})
    end

    if declared then
        function class:op_forward(_, x) return run(x, self.options) end
    else
        function class:op_forward(_, x) return run(x) end
    end

    function class:describe()
        local parts = options.names(self.options)
        for i, option in ipairs(parts) do parts[i] = option .. "=" .. tostring(self.options[option]) end
        return table.concat(parts, ", ")
    end
    return class
end

local classes = {}
for _, row in ipairs(ACTIVATIONS) do
    classes[row[1]] = define(row[1], row[2], row[3])
    if row.also then classes[row.also] = classes[row[1]] end
end
return classes
