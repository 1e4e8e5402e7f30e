--- Delayed scaling: the factor of a tensor from the amaxes of earlier steps. A pure function, called as
---
---     local scale, history, skipped = recipe:update(role, scale, history)
---
--- scale: float32 {1}. history: float32 {amax_history_len}; its first entry collects the amax of the step that ends
--- here, the others are those of earlier steps, the oldest second. One rule for built-in and own algorithms:
---
---     the step's amax is 0           nothing changes: the tensor was not used
---     it is infinite or NaN          the scale stays, the amax is forgotten, skipped is true
---     otherwise                      the history rolls, and scale = max 2^-margin / amax of the algorithm, unless this
---                                    or its inverse is not positive and finite in float32: then the scale stays
---
--- A history of another length is cut at its end or filled up with zeros first.

local te = require "te"
local fail = require "te.fail"

local FLT_MAX = 3.4028234663852886e38

local function is_positive(x) return x > 0 and x < math.huge end

-- x in float32, where values can be multiplied by it and come back; nil elsewhere.
local function factor(x)
    local single = te.tensor { x }:item()
    if single > 2 ^ -128 and single <= FLT_MAX then return single end
end

local function check_tensor(name, t)
    if not te.is_tensor(t) or t.dtype ~= "float32" or t:dim() ~= 1 then
        fail("te.recipe: update: %s: expected a float32 tensor of one dimension, got %s", name, tostring(t))
    end
    return t:totable()
end

local algorithms = {
    max = function(history)
        local most = 0
        for _, amax in ipairs(history) do if amax > most then most = amax end end
        return most
    end,
    most_recent = function(history) return history[1] end,
}

local function number_from(value, what)
    if te.is_tensor(value) then value = value:item() end
    if type(value) ~= "number" then
        fail("te.recipe.DelayedScaling: %s gave %s, expected a number", what, type(value))
    end
    return value
end

local function next_scale(recipe, max, old, amax)
    local algo = recipe.scaling_factor_compute_algo
    if algo then
        local new = number_from(algo(amax, old, max, recipe), "scaling_factor_compute_algo")
        return factor(new) or fail("te.recipe.DelayedScaling: scaling_factor_compute_algo gave %g, expected a positive "
            .. "finite number, in float32 and as its inverse", new)
    end
    if not is_positive(amax) then return old end
    return factor(math.min(max * 2 ^ -recipe.margin / amax, FLT_MAX)) or old
end

local function resize(history, n)
    local resized = {}
    for i = 1, n do resized[i] = history[i] or 0 end
    return resized
end

-- The step's amax becomes the youngest entry, the oldest goes.
local function roll(history)
    local n, rolled = #history, { 0 }
    for i = 2, n - 1 do rolled[i] = history[i + 1] end
    if n > 1 then rolled[n] = history[1] end
    return rolled
end

return function(recipe, max, scale, history)
    if not recipe.amax_history_len then fail("te.recipe: update: %s keeps no history", tostring(recipe)) end
    local old = check_tensor("scale", scale)[1]
    local amaxes = resize(check_tensor("history", history), recipe.amax_history_len)
    local last = amaxes[1]
    if last == 0 then return scale, te.tensor(amaxes, { device = scale.device }), false end
    if not is_positive(last) then
        amaxes[1] = 0
        return scale, te.tensor(amaxes, { device = scale.device }), true
    end
    local algo = algorithms[recipe.amax_compute_algo] or recipe.amax_compute_algo
    local amax = number_from(algo(resize(amaxes, #amaxes)), "amax_compute_algo")
    local new = next_scale(recipe, max, old, amax)
    return te.tensor({ new }, { device = scale.device }), te.tensor(roll(amaxes), { device = scale.device }), false
end
