--- Functions that keep their digits where exp and log by themselves would lose them, and remainders.

local te = require "te"
local reference = require "spec.support.reference"

local close = reference.assert_close
local INF, NAN = math.huge, 0 / 0

-- log(1 + x) and exp(x) - 1 as series where x is small.
local function log1p(x)
    if math.abs(x) > 0.1 then return math.log(1 + x) end
    local sum, power = 0, x
    for k = 1, 40 do sum, power = sum + power / k, -power * x end
    return sum
end

local function expm1(x)
    if math.abs(x) > 0.1 then return math.exp(x) - 1 end
    local sum, term = 0, x
    for k = 1, 30 do sum, term = sum + term, term * x / (k + 1) end
    return sum
end

local function softplus(x) return math.max(x, 0) + log1p(math.exp(-math.abs(x))) end

local FUNCTIONS = {
    softplus = { softplus, function(x) return 1 / (1 + math.exp(-x)) end },
    log_sigmoid = { function(x) return -softplus(-x) end, function(x) return 1 / (1 + math.exp(x)) end },
    log1p = { log1p, function(x) return 1 / (1 + x) end },
    expm1 = { expm1, math.exp },
}

local function arguments(name)
    local list = { 0, -0.999, 0.5 }
    for e = -20, 1 do
        for _, m in ipairs { 1, 2.5, 7 } do
            list[#list + 1] = m * 10 ^ e
            if name ~= "log1p" or m * 10 ^ e < 1 then list[#list + 1] = -m * 10 ^ e end
        end
    end
    return list
end

describe("functions near 0", function()
    for name, pair in pairs(FUNCTIONS) do
        for dtype, bound in pairs { float32 = 3 * 2 ^ -23, float64 = 6 * 2 ^ -52 } do
            it(("te.%s has the digits of %s, and so has its gradient"):format(name, dtype), function()
                local x = te.tensor(arguments(name), { dtype = dtype, requires_grad = true })
                local y = te[name](x)
                y:sum():backward()
                local values, gradients = y:totable(), x.grad:totable()
                for i, v in ipairs(x:detach():totable()) do
                    for k, found in ipairs { values[i], gradients[i] } do
                        local wanted = pair[k](v)
                        assert.is_true(math.abs(found - wanted) <= bound * math.abs(wanted) + 1e-44,
                            ("%d of %.17g: %.17g, not %.17g"):format(k, v, found, wanted))
                    end
                end
            end)
        end
    end

    it("go where they go at the ends", function()
        close({ 100, 0, INF, 0, NAN }, te.softplus(te.tensor { 100, -200, INF, -INF, NAN }))
        close({ 0, -100, 0, -INF, NAN }, te.log_sigmoid(te.tensor { 200, -100, INF, -INF, NAN }))
        close({ -INF, INF, NAN, NAN }, te.log1p(te.tensor { -1, INF, -2, NAN }))
        close({ -1, -1, INF, INF, NAN }, te.expm1(te.tensor { -200, -INF, 100, INF, NAN }))
    end)

    it("keep the sign of zero", function()
        for _, dtype in ipairs { "float32", "bfloat16", "float64" } do
            for _, name in ipairs { "log1p", "expm1" } do
                local y = te[name](te.tensor({ -0.0, 0 }, { dtype = dtype })):totable()
                assert.same({ -INF, INF }, { 1 / y[1], 1 / y[2] })
            end
        end
    end)

    it("have these gradients in functions that are traced, at 0 too", function()
        for name, pair in pairs(FUNCTIONS) do
            local x = te.tensor({ 0, 1e-9, -0.3, 0.7 }, { dtype = "float64", requires_grad = true })
            te.pointwise(function(v) return te[name](v) end)(x):sum():backward()
            close(reference.map(pair[2], { 0, 1e-9, -0.3, 0.7 }), x.grad, 1e-13)
        end
    end)

    it("have their gradients at the ends in functions that are traced", function()
        for name in pairs(FUNCTIONS) do
            local values = { -1, 60, 100, -100, 3e38, -3e38, INF, -INF, NAN }
            local x, z = te.tensor(values, { requires_grad = true }), te.tensor(values, { requires_grad = true })
            te[name](x):sum():backward()
            te.pointwise(function(v) return te[name](v) end)(z):sum():backward()
            close(x.grad:totable(), z.grad, 1e-6)
        end
    end)
end)

describe("te.logsumexp", function()
    it("keeps large and infinite values", function()
        local x = te.tensor({ { -INF, -INF }, { INF, 1 }, { 1000, 1000 }, { NAN, 1 }, { -1000, -1001 } },
            { requires_grad = true })
        local y = te.logsumexp(x, 2)
        close({ -INF, INF, 1000 + math.log(2), NAN, -1000 + math.log(1 + math.exp(-1)) }, y)
        y:narrow(1, 3, 1):sum():backward()
        close({ { 0, 0 }, { 0, 0 }, { 0.5, 0.5 }, { 0, 0 }, { 0, 0 } }, te.where(te.isnan(x.grad), 0, x.grad))
    end)

    it("gives rows of minus infinity no gradient", function()
        local x = te.tensor({ { -INF, -INF }, { -INF, 3 } }, { requires_grad = true })
        te.logsumexp(x, -1):sum():backward()
        close({ { 0, 0 }, { 0, 1 } }, x.grad)
    end)

    it("takes dimensions as sums do", function()
        local x = te.rand({ 2, 3, 4 }, { dtype = "float64" })
        local sums = te.exp(x):sum({ 1, 3 }, true):log()
        close(sums:totable(), te.logsumexp(x, { 1, 3 }, true))
        assert.same({ 2, 4 }, te.logsumexp(x, 2).shape)
        assert.equal(-INF, te.logsumexp(te.zeros { 0 }):item())
    end)
end)

describe("te.std", function()
    it("is the root of te.var", function()
        local x = te.rand({ 3, 5 }, { dtype = "float64" })
        for _, correction in ipairs { 0, 1, 2 } do
            close(te.sqrt(te.var(x, 2, { correction = correction })):totable(),
                te.std(x, 2, { correction = correction }))
        end
        assert.same({ 1, 5 }, te.std(x, 1, true).shape)
    end)

    it("has a gradient of 0 where all values are equal", function()
        local x = te.tensor({ { 2, 2, 2 }, { 1, 2, 4 } }, { requires_grad = true })
        te.std(x, 2):sum():backward()
        close({ 0, 0, 0 }, x.grad[1])
        assert.is_true(x.grad[2]:abs():min():item() > 0)
    end)
end)

describe("te.remainder", function()
    it("has the divisor's sign, as % has", function()
        local list = { 5, -5, 7.5, -7.5, 0, 3, -3, 0.1 }
        for _, divisor in ipairs { 3, -3, 2.5, -0.75 } do
            local wanted = reference.map(function(v) return v % divisor end, list)
            close(wanted, te.tensor(list, { dtype = "float64" }) % divisor, 1e-15)
            close(wanted, te.remainder(te.tensor(list), divisor), 1e-6)
        end
        local whole = te.tensor({ 5, -5, 6, -6, 2 ^ 52 + 1 }, { dtype = "int64" })
        assert.same({ 2, 1, 0, 0, (2 ^ 52 + 1) % 3 }, (whole % 3):totable())
        assert.same({ -1, -2, 0, 0, (2 ^ 52 + 1) % 3 - 3 }, (whole % -3):totable())
        assert.equal("int64", (whole % 3).dtype)
        assert.same({ 1, -1 }, (7 % te.tensor { 2, -2 }):totable())
        close({ 5, INF, -5, NAN }, te.tensor { 5, -5, -5, 1 } % te.tensor { INF, INF, -INF, 0 })
    end)

    it("can be traced", function()
        close({ 2, 1 }, te.pointwise(function(x) return x % 3 end)(te.tensor { 5, -5 }))
    end)
end)

describe("te.maximum and te.minimum", function()
    it("give half of the gradient to each of equal values", function()
        for _, fn in ipairs { function(name) return te[name] end,
            function(name) return te.pointwise(function(x, y) return te[name](x, y) end) end } do
            for name, wanted in pairs { maximum = { 0.5, 0, 1 }, minimum = { 0.5, 1, 0 } } do
                local x = te.tensor({ 1, 2, 3 }, { requires_grad = true })
                local y = te.tensor({ 1, 3, 2 }, { requires_grad = true })
                fn(name)(x, y):sum():backward()
                close(wanted, x.grad)
                close(reference.map(function(v) return 1 - v end, wanted), y.grad)
            end
        end
        local x = te.tensor({ 1, 2, 3 }, { requires_grad = true })
        te.maximum(x, te.tensor { 1, 3, 2 }):sum():backward()
        close({ 0.5, 0, 1 }, x.grad)
    end)

    it("leave clamps and rectifiers as they were", function()
        local x = te.tensor({ 0, 1 }, { requires_grad = true })
        te.sum(te.relu(x) + te.maximum(x, 0)):backward()
        close({ 0, 2 }, x.grad)
        x.grad = nil
        te.clamp(x, 0, 1):sum():backward()
        close({ 1, 1 }, x.grad)
    end)
end)

describe("bools", function()
    it("are not subtracted", function()
        local yes, no = te.tensor { true }, te.tensor { false }
        assert.error_matches(function() return yes - no end, "te.sub: bools cannot be subtracted; te.ne", 1, true)
        assert.error_matches(function() yes:sub_(no) end, "te.sub_: bools cannot be subtracted", 1, true)
        assert.error_matches(function() return -yes end, "te.neg: bools cannot be negated; te.eq(x, 0)", 1, true)
        assert.same({ 0 }, (1 - yes):totable())
        assert.same({ -1 }, (-yes:to "int64"):totable())
        assert.same({ 0.5 }, (yes - te.tensor { 0.5 }):totable())
    end)
end)
