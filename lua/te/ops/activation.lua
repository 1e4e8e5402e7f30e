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

-- The fields named by `names` as the options table of a function; nil when there are none.
local function attributes(self, names)
    if #names == 0 then return nil end
    local values = {}
    for i = 1, #names do values[names[i]] = self[names[i]] end
    return values
end

local function define(name, function_name, declared)
    local class = BasicOperation:extend(name)
    local run, names = te[function_name], options.names(declared or {})
    class.pure, class.plan_fields = true, names

    function class:init(opts)
        local given = options.check("te." .. name, opts, declared or {})
        for _, option in ipairs(names) do self[option] = given[option] end
    end

    if declared then
        function class:op_forward(_, x) return run(x, attributes(self, names)) end
    else
        function class:op_forward(_, x) return run(x) end
    end

    function class:lower(g, x) return g:op(function_name, { x }, attributes(self, names)) end

    function class:describe()
        local parts = {}
        for i, option in ipairs(names) do parts[i] = option .. "=" .. tostring(self[option]) end
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
