local te = require "te"
local random_sequential = require "spec.support.random_sequential"
local trials = require "spec.support.trials"

-- Fused and unfused, forward results have the same bits on the CPU: a fused program rounds where the unfused one
-- stores. A GPU divides the sum of a row among threads as the kernel's operands allow. So do gradients
-- (gradient_bits_spec.lua), but for those that products, or several groups, add up in another order.
local SAME_BITS = te.get_default_device() == "cpu"
local GRADIENT = { float32 = 2e-4, float64 = 1e-8, bfloat16 = 0.1 }
local RESULT = { float32 = 1e-5, float64 = 1e-13, bfloat16 = 0.02 }
local EPSILON = { float32 = 2 ^ -24, float64 = 2 ^ -53, bfloat16 = 2 ^ -9 }
local SEQUENTIALS = tonumber(os.getenv("TETRAIN_RANDOM_SEQUENTIALS")) or trials(2000, 40)

local function run(case, fused)
    local before = te.set_fusion(fused)
    te.manual_seed(5)
    case.module:zero_grad()
    for _, t in ipairs(case.inputs) do if t.requires_grad then t.grad = nil end end
    local function forward() return { case.module(unpack(case.inputs)) } end
    local results = case.autocast and te.autocast({ dtype = case.autocast }, forward) or forward()
    local loss
    te.manual_seed(6)
    for _, y in ipairs(results) do
        local weights = te.randn(y.shape, { dtype = "float64" })
        if case.shake then weights = weights * (te.rand(y.shape, { dtype = "float64" }) * case.shake + 1) end
        local part = (y:to("float64") * weights):sum()
        loss = loss and loss + part or part
    end
    if loss.requires_grad then loss:backward() end
    te.set_fusion(before)
    local gradients = {}
    for name, p in case.module:named_parameters() do gradients[name] = p.grad or false end
    for i, t in ipairs(case.inputs) do gradients["input " .. i] = t.grad or false end
    return results, gradients
end

-- Every tensor that the caller sees, by name: inputs, parameters, results, and the gradients of a run.
local function visible(case, results, gradients)
    local all = {}
    for name, p in case.module:named_parameters() do all[name] = p:detach() end
    for i, t in ipairs(case.inputs) do all["input " .. i] = t:detach() end
    for i, t in ipairs(results or {}) do all["result " .. i] = t:detach() end
    for name, t in pairs(gradients or {}) do all["gradient of " .. name] = t or nil end
    return all
end

local function snapshot(all)
    local copies = {}
    for name, t in pairs(all) do copies[name] = t:clone() end
    return copies
end

local function largest(t) return t:numel() == 0 and 0 or t:to("float64"):abs():max():item() end

local function same_bits(a, b)
    if a.dtype ~= b.dtype or a:numel() ~= b:numel() then return false end
    a, b = a:to("float64"), b:to("float64")
    local both_nan = te.ne(a, a):to("float32") * te.ne(b, b):to("float32")
    return a:numel() == 0 or te.all(te.eq(a, b):to("float32") + both_nan):item()
end

local function is_near(a, b, tolerance)
    return a.dtype == b.dtype and largest(a:to("float64") - b:to("float64")) <= tolerance * (largest(a) + 1e-6)
end

-- How far unfused gradients move, relative to their size, when inputs and the loss's weights change in their last bits:
-- the condition of the container. The fused gradients cannot be expected to be closer than that.
local function noise_of(case, gradients, distance)
    local inputs, noise, epsilon = {}, 0, EPSILON[case.autocast or case.dtype]
    for trial = 1, 4 do
        for i, t in ipairs(case.inputs) do
            local shaken = t:to("float64") * (te.rand(t.shape, { dtype = "float64" }) * (4 * epsilon) + 1)
            inputs[i] = t.dtype == "int32" and t or shaken:to(t.dtype):detach()
            inputs[i].requires_grad = t.requires_grad
        end
        local shaken = { module = case.module, inputs = inputs, autocast = case.autocast, shake = epsilon * trial }
        local _, moved = run(shaken, false)
        for name, a in pairs(gradients) do
            if a and largest(a) < math.huge then noise = math.max(noise, distance(gradients, moved, name)) end
        end
    end
    return noise
end

-- Operands of weight gradients that are computed again change no bit with as few rows as here.
local function check_recomputing(case, gradients, what)
    local before = te.set_recompute(true)
    local _, again = run(case, true)
    te.set_recompute(before)
    for name, a in pairs(gradients) do
        assert.is_true(a == again[name] or same_bits(a, again[name]),
            ("gradient of %s, recomputing: %s"):format(name, what))
    end
end

-- The gradient that the caller gives may be a part of something, and is not written to.
local function check_given(case, what)
    case.module:zero_grad()
    for _, t in ipairs(case.inputs) do if t.requires_grad then t.grad = nil end end
    local y = case.module(unpack(case.inputs))
    if not y.requires_grad then return end
    local whole = te.randn({ 2, y:numel() }, { dtype = "float32" }):to(y.dtype):detach()
    local given, before = whole:select(1, 1):view(y.shape), whole:clone()
    y:backward(given)
    assert.is_true(same_bits(before, whole), "the gradient that was given was changed: " .. what)
end

local function check(seed)
    local case = random_sequential(seed)
    local what = ("seed %d, %s%s:\n%s"):format(seed, case.dtype, case.autocast and " under autocast" or "",
        tostring(case.module))
    local tensors = visible(case)
    local before = snapshot(tensors)
    local expected, expected_gradients = run(case, false)
    local got, got_gradients = run(case, true)
    local given = visible({ module = case.module, inputs = {} }, got, got_gradients)
    local given_before = snapshot(given)
    assert.equal(#expected, #got, what)
    local near = RESULT[case.autocast or case.dtype]
    for i = 1, #expected do
        local same = same_bits(expected[i], got[i]) or not SAME_BITS and is_near(expected[i], got[i], near)
        assert.is_true(same, ("result %d differs: %s"):format(i, what))
    end
    if seed % 2 == 0 then check_recomputing(case, got_gradients, what) end
    if seed % 4 == 1 then check_given(case, what) end
    for name, t in pairs(tensors) do
        assert.is_true(same_bits(before[name], t), ("%s was changed: %s"):format(name, what))
    end
    for name, t in pairs(given) do
        assert.is_true(same_bits(given_before[name], t), ("%s was changed: %s"):format(name, what))
    end
    local tolerance = case.autocast and GRADIENT.bfloat16 or GRADIENT[case.dtype]
    local all = 0 -- a gradient that cancels to nothing has the noise of what cancels
    for _, a in pairs(expected_gradients) do
        local size = a and largest(a) or 0
        if size > all and size < math.huge then all = size end
    end
    local function size(name) return largest(expected_gradients[name]) + 0.05 * all + 1e-6 end
    local function distance(a, b, name) return largest(a[name]:to("float64") - b[name]:to("float64")) / size(name) end
    local noise
    for name, a in pairs(expected_gradients) do
        local b = got_gradients[name]
        assert.equal(a == false, b == false, name .. " has a gradient in one of both: " .. what)
        if a and largest(a) < math.huge then
            assert.equal(a.dtype, b.dtype, name)
            local error = distance(expected_gradients, got_gradients, name)
            if error > tolerance then
                noise = noise or noise_of(case, expected_gradients, distance)
                error = error / (1 + 4 * noise / tolerance)
            end
            assert.is_true(error <= tolerance,
                ("gradient of %s differs by %g of its size: %s"):format(name, error, what))
        end
    end
end

describe("fused and unfused", function()
    it(("agree over %d random containers"):format(SEQUENTIALS), function()
        for seed = 1, SEQUENTIALS do check(seed) end
    end)
end)
