--- te.gradcheck: gradients against differences.

local te = require "te"
local options = require "te.options"
local core = te._core

local function fail(message, ...) error("te.gradcheck: " .. message:format(...), 3) end

local function flat(x) return x:reshape(-1):totable() end

local function with_element(x, values, i, value)
    local before = values[i]
    values[i] = value
    local changed = te.tensor(values, { dtype = x.dtype }):reshape(x.shape)
    values[i] = before
    return changed
end

-- The check itself: the sum of fn's results weighted by fixed random numbers stands for fn.
local function make_objective(fn, rng)
    local weights = {}
    return function(inputs)
        core.rng_state(rng)
        local results = { fn(unpack(inputs, 1, inputs.n)) }
        local total
        for i, result in ipairs(results) do
            if type(result) == "table" then
                core.fail(("te.gradcheck: result %d of fn: expected a tensor, got %s"):format(i, core.describe(result)))
            end
            if te.is_tensor(result) and (result.dtype:find("^float") or result.dtype == "bfloat16") then
                if not weights[i] then
                    weights[i] = te.no_grad(te.rand, result.shape, { dtype = "float64" }) + 0.5
                end
                local part = te.sum(result:to("float64") * weights[i])
                total = total and total + part or part
            end
        end
        return total
    end
end

local function compare(position, element, analytic, numeric, opts)
    local error_size = math.abs(analytic - numeric)
    if error_size <= opts.atol + opts.rtol * math.abs(numeric) then return end
    core.fail(("te.gradcheck: input %d, element %d: backward gives %.10g, differences give %.10g"):format(position,
        element, analytic, numeric))
end

local GRADCHECK = { eps = { "number", min = 0 }, atol = { "number", min = 0 }, rtol = { "number", min = 0 } }

-- What differences can tell: float32 rounds a result by 6e-8, which a step of 1e-2 makes 6e-6 of a gradient.
local GRADCHECK_DEFAULTS = {
    float64 = { eps = 1e-6, atol = 1e-5, rtol = 1e-4 }, float32 = { eps = 1e-2, atol = 1e-3, rtol = 1e-2 },
}

-- The options for a check of inputs: what float32 needs where one is of it.
local function gradcheck_options(given, inputs, checked)
    local dtype = "float64"
    for _, i in ipairs(checked) do
        if inputs[i].dtype == "float32" then dtype = "float32" end
    end
    for name, value in pairs(GRADCHECK_DEFAULTS[dtype]) do given[name] = given[name] or value end
    return given
end

local function check_gradients(objective, leaves, checked, opts)
    local total = objective(leaves)
    if not total or not total.requires_grad then core.fail "te.gradcheck: the result does not depend on the inputs" end
    total:backward()
    for _, i in ipairs(checked) do
        local x = leaves[i]
        local values, grad = flat(x:detach()), x.grad and flat(x.grad)
        local others, n = { n = leaves.n }, leaves.n
        for k = 1, n do others[k] = te.is_tensor(leaves[k]) and leaves[k]:detach() or leaves[k] end
        for k = 1, #values do
            local function at(value)
                others[i] = with_element(x, values, k, value)
                return te.no_grad(objective, others):item()
            end
            local step = opts.eps * math.max(1, math.abs(values[k]))
            local numeric = (at(values[k] + step) - at(values[k] - step)) / (2 * step)
            compare(i, k, grad and grad[k] or 0, numeric, opts)
        end
    end
end

--- Compares the gradients of fn(inputs…) with central differences; raises naming input, element and both values where
--- they differ. Inputs that require a gradient are checked, or all floating ones when none does; best in float64.
---@param inputs te.Tensor[]
---@param opts table|nil  eps (1e-6; where an input is float32 1e-2), atol (1e-5; 1e-3), rtol (1e-4; 1e-2)
---@return boolean true
return function(fn, inputs, opts, ...)
    options.last("te.gradcheck", 3, ...)
    options.argument("te.gradcheck", "fn", fn, { "callable" })
    if not core.grad_enabled() then fail("inside te.no_grad, where gradients are not recorded") end
    opts = options.check("te.gradcheck", opts, GRADCHECK)
    if te.is_tensor(inputs) then inputs = { inputs } end
    if type(inputs) ~= "table" then
        fail("inputs: expected a list of tensors, got %s", core.describe(inputs))
    end
    local rng, n, some = core.rng_state(), 0, false
    for i, x in pairs(inputs) do
        options.argument("te.gradcheck", "position of an input", i, { "size" })
        n = math.max(n, i)
        some = some or te.is_tensor(x) and x.requires_grad
    end
    local leaves, checked = { n = n }, {}
    for i = 1, n do
        local x = inputs[i]
        leaves[i] = x
        if te.is_tensor(x) and (x.requires_grad or not some and x.dtype:find("float")) then
            if not GRADCHECK_DEFAULTS[x.dtype] then
                fail("input %d: differences say little in %s; use float64", i, x.dtype)
            end
            leaves[i] = te.tensor(x)
            leaves[i].requires_grad = true
            checked[#checked + 1] = i
        end
    end
    opts = gradcheck_options(opts, leaves, checked)
    local ok, message = core.within(check_gradients, make_objective(fn, rng), leaves, checked, opts)
    core.rng_state(rng)
    if not ok then error(message, 0) end
    return true
end
