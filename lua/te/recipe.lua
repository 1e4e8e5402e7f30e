--- Low-precision recipes: values that say how each operand of a matrix product is quantized.
--
--     local recipe = te.recipe.MXFP8BlockScaling{ fp8_format = "HYBRID" }
--     local q = te.quantize(x, recipe, "input")
--     local own = te.recipe.Custom{ qfactory = function(role)
--         return role.tensor_type == "weight" and te.recipe.Quantizer{ element = "float8_e4m3" } or recipe
--     end }
--
-- A recipe turns a role ("input", "weight" or "grad_output") into a quantizer, a table of capabilities whose fields are
-- those of te_quantizer (src/kernels/quantize.h). Nothing else in the library knows a recipe by name: a new one
-- is a row of the engine's table (src/core/recipe_kinds.c). Options are checked when they are given and when
-- they are assigned later.
--
-- The function of te.recipe.Custom is asked once per operand and name of a layer, when that first runs under the
-- recipe, with
--
--     role.module_type    "linear", also of te.Quantize, which has no weight; "grouped_linear", or with fp8_dpa
--                         "attention", whose q, k and v are "input"
--     role.tensor_type    "input", "weight", "grad_output"
--     role.name           the layer: its field `name`, or where that is nil its path in the outermost module that is
--                         called, "blocks.1.mlp.2", as named_modules() gives it; "" for that module itself, and where
--                         no path is known, as while te.quantized_model_init makes the layer
--     role.group          of a te.GroupedLinear, which of its weights; else nil

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

-- The recipes -----------------------------------------------------------------------------------------------------

-- Per recipe its options, as te.options declares them. They and the quantizers that follow from them are the engine's
-- (src/core/recipe_kinds.c); functions among them are this library's.
local recipes = core.recipe_kinds()

local delayed = recipes.DelayedScaling
delayed.amax_compute_algo = { "any", "max", help = delayed.amax_compute_algo.help .. "; the function gets a "
    .. "list of amax_history_len numbers: the amax of the step that ends, then those of earlier steps, the oldest "
    .. "first (zeros for steps before the first)", wrong = function(algo)
    if algo ~= "max" and algo ~= "most_recent" and options.reason({ "callable" }, algo) then
        return ("amax_compute_algo: expected max, most_recent or a function, got %s"):format(tostring(algo))
    end
end }
delayed.scaling_factor_compute_algo = { "callable",
    help = "function(amax, old_scale, largest, recipe) that returns a factor" }
recipes.Custom.qfactory = { "callable", help = "function(role) that returns a quantizer, a recipe, or HighPrecision; "
    .. "role.name is the layer's" }

-- Recipes as values -----------------------------------------------------------------------------------------------

local Recipe = {}
local methods = {}

function Recipe.__index(self, key)
    local method = methods[key]
    if method ~= nil then return method end
    return rawget(self, "_options")[key]
end

local function set_options(self, given)
    local name = self._name
    local complete = options.check("te.recipe." .. name, given, recipes[name])
    if name ~= "Custom" then
        core.check_recipe(name, complete)
    elseif not complete.qfactory then
        fail("te.recipe.%s: option qfactory: expected a function from role to quantizer", name)
    end
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

local MOST_ANSWERS = 16 -- recipes that name another recipe

--- The quantizer of an operand, nil where it stays in high precision, and the recipe of this library that made it, nil
--- when it came from elsewhere. role: see quantizer. asks: a list to which the recipes that were asked are added.
function methods:resolve(role, asks)
    local asked = check_role(role or "input")
    asks = asks or {}
    asks[#asks + 1] = self
    if self:is_uniform() then
        local fields = core.recipe_quantizer(self._name, self._options, asked.tensor_type,
            asked.module_type == "attention")
        if fields then return setmetatable(fields, Quantizer), self end
        return nil, nil
    end
    if asked.module_type == "attention" and not (self.fp8_dpa and asked.tensor_type == "input") then return nil, nil end
    local made = self.qfactory(asked)
    if made == HighPrecision then return nil, nil end
    if getmetatable(made) == Recipe and made ~= self then
        if #asks == MOST_ANSWERS then
            fail("te.recipe.Custom: recipes name each other for %s", asked.tensor_type)
        end
        return made:resolve(asked, asks)
    end
    if getmetatable(made) ~= Quantizer then
        fail("te.recipe.%s: qfactory(%q) gave %s; expected a te.recipe.Quantizer, a recipe or te.recipe.HighPrecision",
            self._name, asked.tensor_type, tostring(made))
    end
    return made, nil
end

--- The quantizer of an operand: role is "input", "weight", "grad_output", or a table with one of them as tensor_type;
--- nil where the recipe leaves it in high precision.
function methods:quantizer(role) return (self:resolve(role)) end

--- Whether the quantizers depend on nothing but the kind of tensor.
function methods:is_uniform() return self._name ~= "Custom" end

--- Whether attention's result goes on as it is: in the format that the recipe's products multiply.
function methods:hands_on() return self:is_uniform() and core.recipe_hands_on(self._name, self._options) end

--- How its options are declared, by name: { type, default, choices =, min =, max =, help = }.
function methods:declared() return recipes[self._name] end

--- Its options as a table, another one after a change.
function methods:options() return rawget(self, "_options") end

local MAX = { float8_e4m3 = 448, float8_e5m2 = 57344, float4_e2m1 = 6 }

--- The largest value of the format of a role.
function methods:max(role)
    local quantizer = self:quantizer(role)
    if not quantizer then
        fail("te.recipe.%s: max: role: %s stays in high precision, which has no largest value", self._name,
            options.shown(check_role(role or "input").tensor_type))
    end
    return MAX[quantizer.element]
end

--- See te.recipe.delayed.
function methods:update(role, scale, history)
    return require "te.recipe.delayed"(self, self:max(role), scale, history)
end

local function define(name)
    --- A recipe: how the operands of matrix products are quantized.
    local function new(opts, ...)
        options.last("te.recipe." .. name, 1, ...)
        local self = setmetatable({}, Recipe)
        rawset(self, "_name", name)
        set_options(self, opts)
        return self
    end
    options.declare(new, recipes[name])
    return new
end

local library = {
    --- A checked quantizer from its capabilities.
    Quantizer = function(fields)
        if type(fields) ~= "table" then fail("te.recipe.Quantizer: expected a table, got %s", core.describe(fields)) end
        return quantizer(fields)
    end,
    --- Whether value is a recipe.
    is_recipe = function(value) return getmetatable(value) == Recipe end,
    HighPrecision = HighPrecision,
    --- Whether value is a quantizer.
    is_quantizer = function(value) return getmetatable(value) == Quantizer end,
}
for name in pairs(recipes) do library[name] = define(name) end

return options.library("te.recipe", library)
