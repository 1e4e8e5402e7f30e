-- A whole Linear under every recipe, with values and sizes that nobody wishes for: what comes out is finite wherever it
-- does not depend on something that is not.
local te = require "te"
local trials = require "spec.support.trials"

local recipes = {
    delayed = function() return te.recipe.DelayedScaling() end,
    current = function() return te.recipe.Float8CurrentScaling() end,
    block = function() return te.recipe.Float8BlockScaling() end,
    mxfp8 = function() return te.recipe.MXFP8BlockScaling() end,
    nvfp4 = function() return te.recipe.NVFP4BlockScaling() end,
}

-- What the element in the middle of a tensor becomes.
local values = {
    ["one huge value"] = 1e30,
    ["one tiny value"] = 1e-40,
    ["an infinity"] = math.huge,
    ["a negative infinity"] = -math.huge,
    ["a NaN"] = 0 / 0,
}

-- What all elements become.
local fills = { ["zeros"] = 0, ["equal values"] = -3, ["subnormal numbers"] = 1e-40, ["huge values"] = 1e18 }

local function finite(x) return x - x == 0 end

-- Two steps, since delayed scaling only knows the first one's amaxes in the second.
local function steps(module, recipe, dtype, x, dy)
    local dx
    for _ = 1, 2 do
        local leaf = x:clone()
        leaf.requires_grad = true
        module:zero_grad()
        te.autocast({ recipe = recipe, dtype = dtype }, module, leaf):backward(dy:to(dtype))
        dx = leaf.grad
    end
    local y = te.no_grad(te.autocast, { recipe = recipe, dtype = dtype }, module, x)
    return { y = y, dx = dx, dw = module.weight.grad, db = module.bias.grad:view({ 1, -1 }) }
end

-- Raises unless all elements are finite, but for those of a row and a column.
local function check(t, name, row, col)
    local bad = te.where(te.isfinite(t), 0, 1)
    if row then bad:select(1, row):fill_(0) end
    if col then bad:narrow(2, col, 1):fill_(0) end
    local count = bad:sum():item()
    assert.is_true(count == 0, ("%d values of %s are not finite"):format(count, name))
end

local function check_all(results, touched)
    for name, t in pairs(results) do
        local at = touched and touched[name] or {}
        check(t, name, at.row, at.col)
    end
end

-- The rows and columns of results that a value of one tensor has a part in.
local function touched_by(place, row, col)
    if place == "x" then return { y = { row = row }, dw = { col = col } } end
    if place == "weight" then return { y = { col = row }, dx = { col = col } } end
    return { dx = { row = row }, dw = { row = col }, db = { col = col } }
end

local sizes = trials({
    { 1, 16, 8, "float32" }, { 37, 50, 21, "float32" }, { 37, 50, 21, "bfloat16" }, { 33, 1, 1, "bfloat16" },
    { 32, 160, 136, "bfloat16" },
}, { { 37, 50, 21, "float32" }, { 37, 50, 21, "bfloat16" } })

-- A layer with its input and the gradient of its output; `change` gets one of these tensors and its name first.
local function setting(m, k, n, place, change)
    te.manual_seed(3)
    local module = te.Linear(k, n)
    local x, dy = te.randn({ m, k }), te.randn({ m, n })
    if place then te.no_grad(change, ({ x = x, weight = module.weight, dy = dy })[place]) end
    return module, x, dy
end

-- What is computed from each operand.
local READERS = { x = { "y", "dw" }, weight = { "y", "dx" }, dy = { "dx", "dw" } }

-- Under NVFP4 the amax of a tensor is a factor of all of its values: with an infinite one none is finite, so
-- that no step goes by it.
local function check_none(results, place)
    for _, which in ipairs(READERS[place]) do
        assert.is_false(te.isfinite(results[which]):any():item(), which .. " has finite values")
    end
end

-- Calls fn, and says in front of its error what was tried.
local function try(what, place, fn, ...)
    local ok, result = pcall(fn, ...)
    assert.is_true(ok, ("%s in %s: %s"):format(what, place, tostring(result)))
    return result
end

for name, make in pairs(recipes) do
    local function hostile_value(what, value, place, size)
        local m, k, n, dtype = unpack(size)
        local row, col
        local module, x, dy = setting(m, k, n, place, function(t)
            row, col = math.ceil(t:size(1) / 2), math.ceil(t:size(2) / 2)
            t:select(1, row):narrow(1, col, 1):fill_(value)
        end)
        local results = try(what, place, steps, module, make(), dtype, x, dy)
        if name == "nvfp4" and math.abs(value) == math.huge then
            return try(what, place, check_none, results, place)
        end
        try(what, place, check_all, results, not finite(value) and touched_by(place, row, col))
    end

    local function hostile_tensor(what, value, place, size)
        local m, k, n, dtype = unpack(size)
        local module, x, dy = setting(m, k, n, place, function(t) t:fill_(value) end)
        local results = try(what, place, steps, module, make(), dtype, x, dy)
        try(what, place, check_all, results)
        local vanish = ({ x = { "y", "dw" }, weight = { "y", "dx" }, dy = { "dx", "dw", "db" } })[place]
        for _, which in ipairs(value == 0 and vanish or {}) do
            assert.equal(0, results[which]:abs():max():item(), which)
        end
    end

    local function each_place(fn, list, size)
        for what, value in pairs(list) do
            for _, place in ipairs { "x", "weight", "dy" } do fn(what, value, place, size) end
        end
    end

    describe("a Linear under " .. name, function()
        for _, size in ipairs(sizes) do
            local of = (", %dx%dx%d, %s"):format(unpack(size))
            it("has finite results where values are" .. of, function() each_place(hostile_value, values, size) end)
            it("takes tensors of one value" .. of, function() each_place(hostile_tensor, fills, size) end)
        end

        it("takes no rows", function()
            local module, x, dy = setting(0, 16, 8)
            local results = steps(module, make(), "bfloat16", x, dy)
            assert.same({ 0, 8 }, results.y.shape)
            assert.same({ 0, 16 }, results.dx.shape)
            assert.equal(0, results.dw:abs():max():item())
            assert.equal(0, results.db:abs():max():item())
        end)
    end)
end
