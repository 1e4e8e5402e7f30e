--- What specs ask of plans (seq:explain), and the comparison of a container with itself unfused.

local assert = require "luassert"

local te = require "te"

local plans = {}

--- "LayerNorm:layer_norm" for every step of a pass.
function plans.steps(list)
    local names = {}
    for i, step in ipairs(list) do names[i] = step.name .. ":" .. step.kernels[1] end
    return names
end

--- Why two neighbours are not one step, nil when nothing is said about them.
function plans.reason(plan, from, to)
    for _, r in ipairs(plan.reasons) do
        if r.from == from and r.to == to then return r.reason end
    end
end

--- How many plans the groups of a container hold since they were made, for inputs without lengths.
function plans.count(seq, ...)
    local n = 0
    for _, part in ipairs(require("te.fuser").program(seq, select("#", ...) - 1, false, ...).parts) do
        if part.group then n = n + te._core.group_plans(part.group) end
    end
    return n
end

function plans.input(shape, dtype)
    local x = te.randn(shape, { dtype = "float32" }):to(dtype or "float32"):detach()
    x.requires_grad = true
    return x
end

local function run(fused, seq, inputs)
    local before = te.set_fusion(fused)
    te.manual_seed(7)
    seq:zero_grad()
    for _, t in ipairs(inputs) do
        if te.is_tensor(t) and t.requires_grad then t.grad = nil end
    end
    local ok, y = pcall(function()
        local result = seq(unpack(inputs))
        if result.requires_grad then te.sum(result * result):backward() end
        return result
    end)
    te.set_fusion(before)
    if not ok then return { y = tostring(y):gsub("^[^:]+:%d+: ", "") } end
    local found = { y = y:totable(), shape = y.shape }
    for name, p in seq:named_parameters() do found[name] = p.grad and p.grad:totable() end
    for i, t in ipairs(inputs) do found[i] = te.is_tensor(t) and t.grad and t.grad:totable() end
    return found
end

local function assert_near(a, b, what)
    if type(a) ~= "table" then
        assert.is_true(math.abs(a - b) <= 1e-4 * (1 + math.abs(a)), ("%s: %g, fused %g"):format(what, a, b))
        return
    end
    assert.equal(#a, #b, what)
    for i = 1, #a do assert_near(a[i], b[i], what) end
end

--- Runs a container unfused and fused: results, or the error, are the same, gradients nearly.
function plans.assert_unchanged(seq, ...)
    local expected, got = run(false, seq, { ... }), run(true, seq, { ... })
    assert.same(expected.y, got.y)
    assert.same(expected.shape, got.shape)
    for name, value in pairs(expected) do
        assert.equal(type(value), type(got[name]), name)
        if type(value) == "table" then assert_near(value, got[name], name) end
    end
    return got
end

return plans
