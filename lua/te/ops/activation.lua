--- The activations as operations: one row each. Gated ones halve the last dimension and activate the first half. Scaled
--- ones take an extra input with one number for every row (the weights of experts) and multiply the row by it.

local te = require "te"
local declared = require "te.ops.declared"
local options = require "te.options"
local BasicOperation = require("te.operation").BasicOperation

-- Gated activations that also take features stored as blocks: a's, b's, a's … They are read where they are.
local INTERLEAVED = { glu_interleave_size = { "size",
    help = "features come in blocks of so many, of both halves in turn; as two halves unless given" } }
local CACHED = { cache_quantized_input = { "boolean", false,
    
    help = "what is saved for backward is E4M3, a byte a value; fused with what makes x, nothing need be saved" } }
local CLAMPED = {
    limit = { "number", 7, min = 0, help = "what is activated is at most that, the factor between -limit and limit" },
    alpha = { "number", 1.702, help = "of sigmoid(alpha x)" },
    glu_linear_offset = { "number", 1, help = "is added to the factor" },
}
local SITUGLU = { beta1 = { "number", 4, help = "bound of the activated half" },
    beta2 = { "number", 25, help = "bound of the other half" } }

-- Name, function of the engine, options. Engine attributes have the options' names but for these:
local ATTRIBUTES = { glu_linear_offset = "offset", glu_interleave_size = "interleave" }

local ACTIVATIONS = {
    { "ReLU", "relu" },
    { "GELU", "gelu", { approximate = { "string", "tanh", choices = { "tanh", "none" },
        help = "none: with erf, exact" } } },
    { "QuickGELU", "quick_gelu", also = "QGELU" },
    { "SReLU", "srelu" },
    { "SiLU", "silu" },
    { "GLU", "glu" },
    { "ReGLU", "reglu" },
    { "GEGLU", "geglu", also = "GeGLU" },
    { "QGEGLU", "qgeglu" },
    { "SReGLU", "sreglu" },
    { "SwiGLU", "swiglu", INTERLEAVED },
    { "ClampedSwiGLU", "clamped_swiglu", declared.join(CLAMPED, INTERLEAVED) },
    { "SiTUGLU", "situglu", declared.join(SITUGLU, INTERLEAVED) },
    { "ScaledSReLU", "scaled_srelu", scaled = true },
    { "ScaledSwiGLU", "scaled_swiglu", INTERLEAVED, scaled = true },
    { "ScaledClampedQGeGLU", "scaled_clamped_swiglu", declared.join(CLAMPED, INTERLEAVED), scaled = true },
    { "ScaledSiTUGLU", "scaled_situglu", declared.join(SITUGLU, INTERLEAVED), scaled = true },
}

-- The fields that the engine's operation takes as attributes, put into `values`; nil when there are none.
local function attributes(self, names, values)
    if #names == 0 then return nil end
    for i = 1, #names do values[ATTRIBUTES[names[i]] or names[i]] = self[names[i]] end
    return values
end

-- What cache_quantized_input keeps: E4M3 with one factor for the tensor.
local cache_recipe

-- run(x), whose backward sees x as E4M3 holds it.
local function run_cached(run, x, values)
    cache_recipe = cache_recipe or te.recipe.Float8CurrentScaling { fp8_format = "E4M3" }
    return te._core.custom(function(ctx, input)
        ctx:save_for_backward(te.quantize(input, cache_recipe, "input", { columnwise = false }))
        return run(input, values)
    end, function(ctx, dy)
        local input = ctx:saved_tensors():dequantize()
        input.requires_grad = true
        return te.grad(te.enable_grad(run, input, values), input, { grad_outputs = dy })
    end, x)
end

local function define(name, function_name, declarations, refused)
    local class = BasicOperation:extend(name)
    local run, names = te[function_name], options.names(declarations)
    class.pure, class.takes, class.plan_fields = true, 1, names
    class.engine_operation = function_name -- whose sentence is the class's
    local passed_on = {}
    for _, option in ipairs(names) do
        if option ~= "cache_quantized_input" then passed_on[#passed_on + 1] = option end
    end

    function class:init(opts)
        local given = declared.check("te." .. name, opts, declarations, refused)
        for _, option in ipairs(names) do self[option] = given[option] end
        rawset(self, "_attributes", {}) -- used again by every call
    end
    options.declare(class.init, declarations)

    -- `scale` where the operation takes an extra input.
    function class:op_forward(_, x, scale)
        local values = attributes(self, passed_on, self._attributes)
        if scale then return run(x, scale, values) end
        local cached = self.cache_quantized_input and te.is_tensor(x) and x.dtype ~= "float64"
        if cached then return run_cached(run, x, values) end
        return run(x, values)
    end

    function class:lower(g, x, scale)
        local y, reason = g:op(function_name, { x, scale }, attributes(self, passed_on, {}))
        if y and self.cache_quantized_input then g:cache_quantized() end
        return y, reason
    end

    function class:describe()
        local parts = {}
        for _, option in ipairs(names) do
            if self[option] then parts[#parts + 1] = option .. "=" .. tostring(self[option]) end
        end
        return table.concat(parts, ", ")
    end
    return class
end

local classes = {}
for _, row in ipairs(ACTIVATIONS) do
    local declarations = declared.join(row[3] or {}, row.scaled and {} or CACHED)
    local class = define(row[1], row[2], declarations, row.scaled and { "activation_recompute_in_mlp" } or nil)
    if row.scaled then class.num_extra_inputs = 1 end
    classes[row[1]] = class
    if row.also then classes[row.also] = class end
end
return classes
