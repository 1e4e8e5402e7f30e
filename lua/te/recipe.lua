--- Low-precision recipes: values that say how each operand of a matrix product is quantized.
--
--     local recipe = te.recipe.MXFP8BlockScaling{ fp8_format = "HYBRID" }
--     local q = te.quantize(x, recipe, "input")
--     local own = te.recipe.Custom{ qfactory = function(role)
--         return role.tensor_type == "weight" and te.recipe.Quantizer{ element = "float8_e4m3" } or recipe
--     end }
--
-- A recipe turns a role ("input", "weight" or "grad_output") into a quantizer, a table of capabilities whose fields are
-- those of te_quantizer (src/kernels/quantize.h). Nothing else in the library knows a recipe by name: a new one is an
-- entry of `recipes` below. Options are checked when they are given and when they are assigned later.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local core = te._core

local ROLES = { "input", "weight", "grad_output" }

-- Quantizers ------------------------------------------------------------------------------------------------------

local Quantizer = {}
Quantizer.__index = Quantizer

local function text_of(name, fields)
    local parts = {}
    for _, key in ipairs(options.names(fields)) do parts[#parts + 1] = key .. " = " .. tostring(fields[key]) end
    return ("%s{%s}"):format(name, table.concat(parts, ", "))
end

function Quantizer:__tostring() return text_of("Quantizer", self) end

local function quantizer(fields)
    local q = {}
    for key, value in pairs(fields) do q[key] = value end
    core.check_quantizer(q)
    return setmetatable(q, Quantizer)
end

-- Blocks of `along` elements, or square ones.
local function blocks(along, square) return square and along or 1, along end

-- Formats ---------------------------------------------------------------------------------------------------------

local MAX = { float8_e4m3 = 448, float8_e5m2 = 57344, float4_e2m1 = 6 }

-- HYBRID: gradients need E5M2's range more than E4M3's precision.
local function element_of(recipe, role)
    return recipe.fp8_format == "HYBRID" and role == "grad_output" and "float8_e5m2" or "float8_e4m3"
end

local function format(default) return { "string", default, choices = { "E4M3", "HYBRID" } } end
local backward_override = { "string", choices = { "high_precision", "dequantized" } }
-- fp8_dpa: forward of attention multiplies E4M3, by `attention` below. fp8_mha: and hands its result on quantized for the
-- projection; it asks for the former, too.
local fp8_attention = { "boolean", false }
-- Products whose sums tensor cores may take in fewer bits than float32 has, where that is faster: of forward, whose result is
-- rounded anyway; all; none.
local fast_accumulation = { "string", "forward", choices = { "forward", "all", "none" } }
local dimension = { "integer", 1, min = 1, max = 2 }

-- One factor for all of q, k and v, or of each where they are separate. Scores are sums over a head's columns and values are
-- summed over positions: blocks would have to lie along both, so recipes of blocks scale attention by the tensor's own amax.
local function current_attention(recipe)
    return { element = "float8_e4m3", power_of_two = recipe.use_power_2_scales, epsilon = recipe.amax_epsilon }
end

-- The recipes -----------------------------------------------------------------------------------------------------

-- Per recipe: its options, the quantizer of a role, that of attention's operands where the recipe has the options for it,
-- and `check`, what options must be to each other.
local recipes = {}

recipes.DelayedScaling = {
    options = {
        margin = { "integer", 0 },
        fp8_format = format "HYBRID",
        amax_history_len = { "size", 1024 },
        amax_compute_algo = { "any", "max" },
        scaling_factor_compute_algo = { "callable" },
        reduce_amax = { "boolean", true },
        fast_accumulation = fast_accumulation,
        fp8_dpa = fp8_attention,
        fp8_mha = fp8_attention,
    },
    check = function(recipe, name)
        local algo = recipe.amax_compute_algo
        if algo ~= "max" and algo ~= "most_recent" and options.reason({ "callable" }, algo) then
            fail("te.recipe.%s: option amax_compute_algo: expected max, most_recent or a function, got %s", name,
                tostring(algo))
        end
    end,
    quantizer = function(recipe, role) return { element = element_of(recipe, role), needs_history = true } end,
    attention = function() return { element = "float8_e4m3", needs_history = true } end,
}

recipes.Float8CurrentScaling = {
    options = {
        fp8_format = format "HYBRID",
        use_power_2_scales = { "boolean", false },
        amax_epsilon = { "number", 0, min = 0 },
        fast_accumulation = fast_accumulation,
        fp8_dpa = fp8_attention,
        fp8_mha = fp8_attention,
        backward_override = backward_override,
    },
    quantizer = function(recipe, role)
        return {
            element = element_of(recipe, role), power_of_two = recipe.use_power_2_scales, epsilon = recipe.amax_epsilon,
        }
    end,
    attention = current_attention,
}

recipes.Float8BlockScaling = {
    options = {
        fp8_format = format "E4M3",
        use_f32_scales = { "boolean", false },
        amax_epsilon = { "number", 0, min = 0 },
        x_block_scaling_dim = dimension,
        w_block_scaling_dim = { "integer", 2, min = 1, max = 2 },
        grad_block_scaling_dim = dimension,
        backward_override = backward_override,
    },
    check = function(recipe, name)
        local dims = recipe.x_block_scaling_dim + recipe.w_block_scaling_dim + recipe.grad_block_scaling_dim
        if dims > 4 then
            fail("te.recipe.%s: at most one of x, w and grad_block_scaling_dim may be 2, got %d, %d and %d", name,
                recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim)
        end
    end,
    quantizer = function(recipe, role)
        local dims = { input = "x", weight = "w", grad_output = "grad" }
        local rows, cols = blocks(128, recipe[dims[role] .. "_block_scaling_dim"] == 2)
        return {
            element = element_of(recipe, role), block_rows = rows, block_cols = cols,
            power_of_two = not recipe.use_f32_scales, epsilon = recipe.amax_epsilon,
        }
    end,
}

recipes.MXFP8BlockScaling = {
    options = {
        fp8_format = format "E4M3",
        enable_2d_quantization = { "boolean", false },
        fp8_dpa = fp8_attention,
        fp8_mha = fp8_attention,
        backward_override = backward_override,
    },
    quantizer = function(recipe, role)
        local rows, cols = blocks(32, recipe.enable_2d_quantization and role == "weight")
        return {
            element = element_of(recipe, role), scale = "e8m0", block_rows = rows, block_cols = cols,
            replicated = rows > 1, transposed = false,
        }
    end,
    attention = current_attention,
}

local CHOICE = { "none", "weights", "activations", "all" }

-- Whether a choice of tensors has this role among them; gradients are never chosen.
local function chosen(choice, role)
    return role == "weight" and (choice == "weights" or choice == "all")
        or role == "input" and (choice == "activations" or choice == "all")
end

recipes.NVFP4BlockScaling = {
    options = {
        fp4_format = { "string", "E2M1", choices = { "E2M1" } },
        fp8_format = { "string", "E4M3", choices = { "E4M3" } },
        disable_rht = { "boolean", false },
        disable_stochastic_rounding = { "boolean", false },
        disable_2d_quantization = { "boolean", false },
        row_scaled_activation = { "boolean", false },
        nvfp4_4over6 = { "string", "none", choices = CHOICE },
        nvfp4_4over6_e4m3_use_256 = { "string", "all", choices = CHOICE },
        nvfp4_4over6_err_mode = { "string", "MAE", choices = { "MAE", "MSE" } },
        backward_override = backward_override,
    },
    check = function(recipe, name)
        if chosen(recipe.nvfp4_4over6, "input") and not recipe.disable_rht then
            fail("te.recipe.%s: option nvfp4_4over6: %q needs disable_rht = true: activations are transformed otherwise",
                name, recipe.nvfp4_4over6)
        end
    end,
    quantizer = function(recipe, role)
        local rows, cols = blocks(16, role == "weight" and not recipe.disable_2d_quantization)
        local four = chosen(recipe.nvfp4_4over6, role)
        return {
            element = "float4_e2m1", scale = "float8_e4m3", block_rows = rows, block_cols = cols, replicated = rows > 1,
            hadamard = role ~= "weight" and not recipe.disable_rht,
            stochastic = role == "grad_output" and not recipe.disable_stochastic_rounding,
            row_scaled = role == "input" and recipe.row_scaled_activation,
            four_over_six = four and recipe.nvfp4_4over6_err_mode:lower() or "none",
            scale_max = four and chosen(recipe.nvfp4_4over6_e4m3_use_256, role) and 256 or 448,
        }
    end,
}

recipes.Custom = {
    options = { qfactory = { "callable" }, backward_override = backward_override },
    check = function(recipe, name)
        if not recipe.qfactory then
            fail("te.recipe.%s: option qfactory: expected a function from role to quantizer", name)
        end
    end,
}

-- Recipes as values -----------------------------------------------------------------------------------------------

local Recipe = {}
local methods = {}

function Recipe.__index(self, key)
    local method = methods[key]
    if method ~= nil then return method end
    return rawget(self, "_options")[key]
end

local function set_options(self, given)
    local who, declared = "te.recipe." .. self._name, recipes[self._name]
    local complete = options.check(who, given, declared.options)
    if declared.check then declared.check(complete, self._name) end
    rawset(self, "_options", complete)
end

function Recipe.__newindex(self, key, value)
    local given = {}
    for name, known in pairs(self._options) do given[name] = known end
    given[key] = value
    set_options(self, given)
end

function Recipe.__tostring(self) return text_of(self._name, self._options) end

-- A role as a table: its tensor_type is one of ROLES.
local function check_role(role)
    local asked = type(role) == "table" and role or { tensor_type = role }
    local reason = options.reason({ "string", choices = ROLES }, asked.tensor_type)
    if reason then fail("te.recipe: role: %s", reason) end
    return asked
end

-- What Custom's function may also give: the role stays in high precision.
local HighPrecision = setmetatable({}, { __tostring = function() return "HighPrecision" end })

-- What quantizes q, k and v, which have no other operands beside them.
local function resolve_attention(self, role)
    local declared = recipes[self._name].attention
    if not declared or role ~= "input" or not (self.fp8_dpa or self.fp8_mha) then return nil, nil end
    return quantizer(declared(self._options)), self
end

--- The quantizer of an operand, nil where it stays in high precision, and the recipe of this library that made it, nil when
--- it came from elsewhere. role: see quantizer.
function methods:resolve(role)
    local asked = check_role(role or "input")
    local declared = recipes[self._name]
    if asked.module_type == "attention" then return resolve_attention(self, asked.tensor_type) end
    if declared.quantizer then return quantizer(declared.quantizer(self._options, asked.tensor_type)), self end
    local made = self.qfactory(asked)
    if made == HighPrecision then return nil, nil end
    if getmetatable(made) == Recipe and made ~= self then return made:resolve(asked) end
    if getmetatable(made) ~= Quantizer then
        fail("te.recipe.%s: qfactory(%q) gave %s; expected a te.recipe.Quantizer, a recipe or te.recipe.HighPrecision",
            self._name, asked.tensor_type, tostring(made))
    end
    return made, nil
end

--- The quantizer of an operand: role is "input", "weight", "grad_output", or a table with one of them as tensor_type; nil
--- where the recipe leaves it in high precision.
function methods:quantizer(role) return (self:resolve(role)) end

--- Whether the quantizers depend on nothing but the kind of tensor.
function methods:is_uniform() return recipes[self._name].quantizer ~= nil end

--- Its options as a table, another one after a change.
function methods:options() return rawget(self, "_options") end

--- The largest value of the format of a role.
function methods:max(role) return MAX[self:quantizer(role).element] end

--- See te.recipe.delayed.
function methods:update(role, scale, history)
    return require "te.recipe.delayed"(self, self:max(role), scale, history)
end

local function define(name)
    return function(given, ...)
        options.last("te.recipe." .. name, 1, ...)
        local self = setmetatable({}, Recipe)
        rawset(self, "_name", name)
        set_options(self, given)
        return self
    end
end

local library = {
    --- A checked quantizer from its capabilities.
    Quantizer = function(fields)
        if type(fields) ~= "table" then fail("te.recipe.Quantizer: expected a table, got %s", type(fields)) end
        return quantizer(fields)
    end,
    is_recipe = function(value) return getmetatable(value) == Recipe end,
    HighPrecision = HighPrecision,
    is_quantizer = function(value) return getmetatable(value) == Quantizer end,
}
for name in pairs(recipes) do library[name] = define(name) end

return options.library("te.recipe", library)
