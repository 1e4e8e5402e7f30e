--- The activations as operations: one for each function of the engine that names a module (src/core/ops/activation.c),
--- whose attributes are its options. Gated ones halve the last dimension and activate the first half. Scaled ones take
--- an extra input with one number for every row (the weights of experts) and multiply the row by it.

local te = require "te"
local declared = require "te.ops.declared"
local options = require "te.options"
local BasicOperation = require("te.operation").BasicOperation

-- What is said of options beyond the attributes' declarations, by attribute; `option` where the name is another one.
local SAID = {
    approximate = { help = "none: exact, with erf" },
    limit = { min = 0, help = "upper limit of the activated half; the factor is limited to [-limit, limit]" },
    alpha = { help = "alpha of sigmoid(alpha x)" },
    offset = { option = "glu_linear_offset", help = "added to the factor" },
    beta1 = { help = "bound of the activated half" },
    beta2 = { help = "bound of the other half" },
    -- Features stored as blocks, a's, b's, a's …, are read where they are.
    interleave = { option = "glu_interleave_size", "size",
        help = "the halves alternate in blocks of this many features; default: two whole halves" },
}
local TYPES = { number = "number", int = "integer", bool = "boolean", choice = "string" }

local CACHED = { cache_quantized_input = { "boolean", false,
    help = "save the input for backward in E4M3, one byte per value; nothing is saved if fused with what makes x" } }

-- How te.options declares an attribute of an operation (te.ops_list).
local function declaration(attribute, said)
    local type, default, choices = said[1] or TYPES[attribute.type], attribute.default, nil
    if said[1] then default = nil end -- the operation's 0 is none
    if attribute.type == "bool" then default = default == 1 end
    if attribute.choices then
        choices = {}
        for choice in attribute.choices:gmatch "[^|]+" do choices[#choices + 1] = choice end
        default = choices[default + 1]
    end
    return { type, default, choices = choices, min = said.min, help = said.help }
end

-- Options of a module by name, the attributes that they are, and how many tensors the operation takes beside x.
local function declare(op)
    local declarations, attributes, extra = {}, {}, -1
    for _, p in ipairs(op.params) do
        if p.type == "tensor" then
            extra = extra + 1
        else
            local said = SAID[p.name] or {}
            local option = said.option or p.name
            declarations[option], attributes[option] = declaration(p, said), p.name
        end
    end
    return declarations, attributes, extra
end

-- The values of `passed` options by the names of their attributes, put into `values`; nil when there are none.
local function values_of(self, passed, attributes, values)
    if #passed == 0 then return nil end
    for i = 1, #passed do values[attributes[passed[i]]] = self[passed[i]] end
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

-- The module of that name for an operation that te.ops_list describes.
local function define(name, op)
    local class = BasicOperation:extend(name)
    local declarations, attributes, extra = declare(op)
    local run, passed = te[op.name], options.names(declarations)
    if extra > 0 then class.num_extra_inputs = extra end
    declarations = extra > 0 and declarations or declared.join(declarations, CACHED)
    local refused = extra > 0 and { "activation_recompute_in_mlp" } or nil
    local names = options.names(declarations)
    class.pure, class.takes, class.plan_fields = true, 1, names
    class.engine_operation = op.name -- whose sentence is the class's

    function class:init(opts)
        local given = declared.check("te." .. name, opts, declarations, refused)
        for _, option in ipairs(names) do self[option] = given[option] end
        rawset(self, "_attributes", {}) -- used again by every call
    end
    options.declare(class.init, declarations)

    -- `scale` where the operation takes an extra input.
    function class:op_forward(_, x, scale)
        local values = values_of(self, passed, attributes, self._attributes)
        if scale then return run(x, scale, values) end
        local cached = self.cache_quantized_input and te.is_tensor(x) and x.dtype ~= "float64"
        if cached then return run_cached(run, x, values) end
        return run(x, values)
    end

    function class:lower(g, x, scale)
        local y, reason = g:op(op.name, { x, scale }, values_of(self, passed, attributes, {}))
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
for _, op in ipairs(te.ops_list()) do
    local class
    for name in (op.module or ""):gmatch "%S+" do -- the first is its own, others are spellings
        class = class or define(name, op)
        classes[name] = class
    end
end
return classes
