--- te.numerics: what quantization does to the operands of a model's products, while it trains.
--
--     te.numerics.watch(model, { every = 100 })
--     …                                     -- steps under te.autocast{ recipe = … }
--     print(te.numerics.report())           -- a table of the last step that was looked at
--     for _, v in ipairs(te.numerics.values()) do … end
--
-- A step is an outermost te.autocast with gradients, and the backward pass that follows. Per product (named by its
-- weight) and role: amax, the largest finite magnitude; scale, what the tensor was multiplied by (nil where blocks have
-- their own); saturated and flushed, the shares of values that were cut off by more than rounding and that became 0
-- without being 0; error, |quantized - source| / |source| in the Euclidean norm; nonfinite, how many values were
-- infinite or NaN. Steps in between cost nothing, and the numbers that a model computes do not change.

local fail = require "te.fail"
local mode = require "te.recipe.mode"
local Module = require "te.module"
local options = require "te.options"
local te = require "te"
local core = te._core

local ROLES = { "input", "weight", "grad_output" }
local COLUMNS = { "amax", "scale", "saturated", "flushed", "error", "nonfinite" }

local watches = {}

-- Steps ---------------------------------------------------------------------------------------------------------------

local function turn(watch, on)
    for _, product in ipairs(watch.products) do core.watch_numerics(product.state, on) end
    watch.on = on
end

local function begin_step()
    for _, watch in ipairs(watches) do
        watch.steps = watch.steps + 1
        local due = watch.steps % watch.every == 0
        if due then watch.step = watch.steps end
        if due or watch.on then turn(watch, due) end
    end
end

-- Watches -------------------------------------------------------------------------------------------------------------

local Watch = {}
Watch.__index = Watch
options.kinds.Watch = Watch

local function numbers_of(product, role)
    local values, nonfinite, saturated, flushed, changed, norm, amax, scale = core.numerics(product.state, role)
    if values == 0 then return nil end
    return {
        amax = amax, scale = scale > 0 and scale or nil, saturated = saturated / values, flushed = flushed / values,
        error = norm > 0 and math.sqrt(changed / norm) or 0, nonfinite = nonfinite,
    }
end

--- A list of { product =, role =, step =, amax =, … }, in the model's order.
---@return table[]
function Watch:values()
    local list = {}
    for _, product in ipairs(self.products) do
        for _, role in ipairs(self.roles) do
            local found = numbers_of(product, role)
            if found then
                found.product, found.role, found.step = product.path, role, self.step
                list[#list + 1] = found
            end
        end
    end
    return list
end

--- Ends it.
function Watch:stop()
    for i = #watches, 1, -1 do if watches[i] == self then table.remove(watches, i) end end
    turn(self, nil)
    self.products = {}
    if #watches == 0 then mode.watching = nil end
end

local function table_of(values)
    local width = 7
    for _, v in ipairs(values) do width = math.max(width, #v.product) end
    local head, row = "%s  %-11s %10s %10s %10s %10s %8s %9s", "%s  %-11s %10.4g %10s %9.4f%% %9.4f%% %7.3f%% %9d"
    local lines = { head:format(options.padded("product", width), "role", unpack(COLUMNS)) }
    for _, v in ipairs(values) do
        lines[#lines + 1] = row:format(options.padded(v.product, width), v.role, v.amax,
            v.scale and ("%.4g"):format(v.scale) or "-", 100 * v.saturated, 100 * v.flushed, 100 * v.error, v.nonfinite)
    end
    return table.concat(lines, "\n")
end

function Watch:__tostring() return table_of(self:values()) end

local function check_roles(given)
    if #given == 0 then fail("te.numerics.watch: option roles: expected some of %s", table.concat(ROLES, ", ")) end
    for i, role in ipairs(given) do
        local reason = options.reason({ "string", choices = ROLES }, role)
        if reason then fail("te.numerics.watch: option roles: entry %d: %s", i, reason) end
    end
    return given
end

local function is_watched(state)
    for _, watch in ipairs(watches) do
        for _, product in ipairs(watch.products) do if product.state == state then return true end end
    end
end

-- Whether the weight named `key` is stored quantized: then nothing quantizes it when it is multiplied.
local function is_resident(part, key)
    local name, index = key:match "^(.-)%.(%d+)$"
    local weight = part[name or key]
    if index and type(weight) == "table" then weight = weight[tonumber(index)] end
    return te.is_tensor(weight) and core.is_quantized(weight)
end

-- Whether there will be a value.
local function is_seen(watch)
    for _, product in ipairs(watch.products) do
        for _, role in ipairs(watch.roles) do
            if role ~= "weight" or not product.no_weight then return true end
        end
    end
end

-- The products of a model with their paths.
local function products_of(model)
    local list = {}
    for path, part in model:named_modules() do
        for _, key in ipairs(part.product_keys and part:product_keys() or {}) do
            local of = mode.product(part, key)
            local product = { path = path == "" and key or path .. "." .. key, state = of.state }
            product.no_weight = of.attends or is_resident(part, key)
            if is_watched(product.state) then fail("te.numerics.watch: %s is watched already", product.path) end
            list[#list + 1] = product
        end
    end
    return list
end

-- The library ---------------------------------------------------------------------------------------------------------

local numerics = {}

local WATCH = {
    every = { "size", 1, help = "look at every n-th step" },
    done = { "integer", 0, min = 0, help = "steps made before, in a resumed run" },
    roles = { "table", ROLES, help = "operands to look at" },
}

--- Watches the products of a model until stop() is called on the result.
---@param model table
---@param opts table|nil
---@return te.Watch watch
function numerics.watch(model, opts)
    if not Module.is(model, Module) then fail("te.numerics.watch: expected a model, got %s", core.describe(model)) end
    opts = options.check("te.numerics.watch", opts, WATCH)
    local watch = setmetatable({ products = products_of(model), roles = check_roles(opts.roles), every = opts.every,
        steps = opts.done, step = nil, on = false }, Watch)
    if #watch.products == 0 then fail("te.numerics.watch: %s multiplies with no weight", model.__name) end
    if not is_seen(watch) then
        fail("te.numerics.watch: option roles: the weights of %s are stored quantized, so no product quantizes them",
            model.__name)
    end
    watches[#watches + 1] = watch
    mode.watching = begin_step
    return watch
end
options.declare(numerics.watch, WATCH)

--- Whether products that compute now are looked at, which is done by the host.
function numerics.looks()
    for _, watch in ipairs(watches) do
        if watch.on then return true end
    end
    return false
end

--- The values of everything that is watched.
---@return table[]
function numerics.values()
    local all = {}
    for _, watch in ipairs(watches) do
        for _, v in ipairs(watch:values()) do all[#all + 1] = v end
    end
    return all
end

--- The same as a table, and how many amaxes delayed scaling has passed over.
---@return string
function numerics.report()
    return ("%s\n%d infinite or NaN amaxes passed over"):format(table_of(numerics.values()), numerics.skipped_amaxes())
end

--- Amaxes that were infinite or NaN and changed no scale, since the start.
function numerics.skipped_amaxes() return core.skipped_amaxes() end

return options.library("te.numerics", numerics)
