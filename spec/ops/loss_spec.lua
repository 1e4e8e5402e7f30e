--- Losses against sums over numbers.

local te = require "te"
local reference = require "spec.support.reference"

local close = reference.assert_close
local INF = math.huge

local function classes(values) return te.tensor(values, { dtype = "int64" }) end

local LOGITS = { { 1, -2, 3.5, 0 }, { 0.25, 4, -6, 1 }, { 2, 2, -1, 0.5 } }
local WEIGHT = { 0.5, 2, 1, 3 }
local P = { { 0.1, 0.2, 0.7, 0 }, { 1, 0, 0, 0 }, { 0.25, 0.25, 0.25, 0.25 } }

local function log_softmax(row) return reference.map(math.log, reference.softmax(row)) end

-- -sum(w_c p_c log q_c) of a row.
local function cross(row, p, w)
    local sum, logs = 0, log_softmax(row)
    for c = 1, #row do if p[c] ~= 0 then sum = sum - (w and w[c] or 1) * p[c] * logs[c] end end
    return sum
end

local function smooth(p, a) return reference.map(function(v) return (1 - a) * v + a / #p end, p) end

local function sum(list)
    local s = 0
    for _, v in ipairs(list) do s = s + v end
    return s
end

local function each_reduction(losses, by, fn, reductions)
    close(losses, fn("none"), 1e-12)
    close(sum(reference.flatten(losses)), fn("sum"), 1e-12)
    close(sum(reference.flatten(losses)) / by, fn("mean"), 1e-12)
end

describe("te.cross_entropy", function()
    local logits = te.tensor(LOGITS, { dtype = "float64" })

    it("weighs classes", function()
        for _, a in ipairs { 0, 0.25 } do
            local targets, losses, by = { 2, -100, 1 }, {}, 0
            for i, t in ipairs(targets) do
                local p = { 0, 0, 0, 0 }
                if t >= 0 then p[t + 1] = 1 end
                losses[i] = t < 0 and 0 or cross(LOGITS[i], smooth(p, a), WEIGHT)
                by = by + (t < 0 and 0 or WEIGHT[t + 1])
            end
            each_reduction(losses, by, function(reduction)
                return te.cross_entropy(logits, classes(targets),
                    { weight = te.tensor(WEIGHT), reduction = reduction, label_smoothing = a })
            end)
            local by_name = { weight = te.tensor(WEIGHT), label_smoothing = a }
            close(sum(losses) / by, te.cross_entropy(logits, classes(targets), by_name), 1e-12)
            assert.is_true(te.gradcheck(function(x)
                return te.cross_entropy(x, classes(targets), by_name)
            end, { logits }))
        end
    end)

    it("takes probabilities", function()
        for _, weight in ipairs { false, WEIGHT } do
            for _, a in ipairs { 0, 0.25 } do
                local losses = {}
                for i, row in ipairs(LOGITS) do losses[i] = cross(row, smooth(P[i], a), weight or nil) end
                local opts = { label_smoothing = a }
                if weight then opts.weight = te.tensor(weight, { dtype = "float64" }) end
                each_reduction(losses, 3, function(reduction)
                    opts.reduction = reduction
                    return te.cross_entropy(logits, te.tensor(P, { dtype = "float64" }), opts)
                end)
                opts.reduction = nil
                assert.is_true(te.gradcheck(function(x, p, w)
                    return te.cross_entropy(x, p, { label_smoothing = a, weight = w })
                end, { logits, te.tensor(P, { dtype = "float64" }), opts.weight }))
            end
        end
        local deep = te.cross_entropy(logits:reshape(1, 3, 4), te.tensor(P):reshape(1, 3, 4), { reduction = "none" })
        assert.same({ 1, 3 }, deep.shape)
    end)

    it("agrees with classes where one has all the probability", function()
        local rows = te.randn { 5, 7 }
        local ids = classes { 0, 6, 3, 3, 1 }
        local one_hot = te.zeros({ 5, 7 }):scatter_add(2, ids:unsqueeze(2), te.ones { 5, 1 })
        close(te.cross_entropy(rows, ids):item(), te.cross_entropy(rows, one_hot), 1e-6)
    end)

    it("takes no notice of impossible classes that have no probability", function()
        local x = te.tensor({ { -INF, 1, 2 } }, { requires_grad = true })
        local loss = te.cross_entropy(x, te.tensor { { 0, 0.5, 0.5 } })
        loss:backward()
        close(cross({ 1, 2 }, { 0.5, 0.5 }), loss, 1e-6)
        assert.equal(0, x.grad:totable()[1][1])
    end)

    it("keeps the digits of large logits", function()
        for dtype, base in pairs { float32 = { 2e4, 1e8, -1e8 }, float64 = { 1e9, 1e15 }, bfloat16 = { 2 ^ 15 } } do
            local step = dtype == "bfloat16" and 256 or dtype == "float64" and 0.5 or 8
            for _, b in ipairs(base) do
                local near, far, p = {}, {}, { { 0.25, 0.5, 0.25 }, { 0, 0, 1 } }
                for i, row in ipairs { { 0, 0, -step }, { 2 * step, 0, step } } do
                    near[i], far[i] = row, reference.map(function(v) return b + v end, row)
                end
                for name, opts in pairs { plain = {}, smooth = { label_smoothing = 0.25 },
                    weights = { weight = te.tensor { 1, 0.5, 2 }, label_smoothing = 0.5 } } do
                    for _, target in ipairs { classes { 0, 2 }, te.tensor(p, { dtype = "float64" }) } do
                        local small = te.tensor(near, { dtype = "float64", requires_grad = true })
                        local large = te.tensor(far, { dtype = dtype, requires_grad = true })
                        local losses = { te.cross_entropy(small, target, opts), te.cross_entropy(large, target, opts) }
                        local what = ("%s, %s at %g"):format(name, dtype, b)
                        assert.near(losses[1]:item(), losses[2]:item(), 1e-5 * (1 + losses[1]:item()), what)
                        for _, loss in ipairs(losses) do loss:backward() end
                        close(small.grad:totable(), large.grad:to "float64", dtype == "bfloat16" and 2 ^ -8 or 1e-6)
                    end
                end
            end
        end
        local equal = te.cross_entropy(te.tensor({ { 1e300, 1e300 } }, { dtype = "float64" }), classes { 1 })
        assert.near(math.log(2), equal:item(), 1e-15)
    end)

    it("takes more classes than float32 can count in float64 alone", function()
        local n = 2 ^ 24 + 2
        local few, many = te.zeros({ 1, 1 }):expand { 1, 2 ^ 24 }, te.zeros({ 1, 1 }):expand { 1, n }
        assert.near(24 * math.log(2), te.cross_entropy(few, classes { 2 ^ 24 - 1 }):item(), 1e-3)
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, opts in ipairs { {}, { label_smoothing = 0.1 }, { weight = te.ones({ 1 }):expand { n } } } do
                assert.error_matches(function() te.cross_entropy(many:to(dtype), classes { n - 2 }, opts) end,
                    "te.cross_entropy: 16777218 classes: float32, in which " .. dtype
                        .. " logits are computed with, tells 16777216 apart; use float64 logits", 1, true)
            end
        end
        local x = te.zeros({ 1, n }, { dtype = "float64" })
        x[1][n] = 5
        x.requires_grad = true
        local loss = te.cross_entropy(x, classes { n - 1 })
        local all = n - 1 + math.exp(5)
        assert.near(math.log(all) - 5, loss:item(), 1e-9)
        close({ 1 / all, 1 / all, math.exp(5) / all - 1 }, te.grad(loss, x)[1]:narrow(1, n - 2, 3), 1e-9)
    end)

    it("says which shapes do not fit", function()
        assert.error_matches(function() te.cross_entropy(logits, te.ones { 3, 2 }) end, "te.cross_entropy: targets of "
            .. "float32 are probabilities in the shape of logits, {3,4}, not {3,2}", 1, true)
        assert.error_matches(function() te.cross_entropy(logits, classes { 1, 2, 3 }, { weight = te.ones { 3 } }) end,
            "te.cross_entropy: weight must have one number for each class of logits {3,4}, not {3}", 1, true)
        local weight = te.ones({ 4 }, { requires_grad = true })
        assert.error_matches(function() te.cross_entropy(logits, classes { 1, 2, 3 }, { weight = weight }) end,
            "weight:detach()", 1, true)
    end)
end)

describe("te.binary_cross_entropy_with_logits", function()
    local X, T = { { 2, -1 }, { 0, 3 }, { -30, 30 } }, { { 1, 0 }, { 0.3, 0.9 }, { 0, 1 } }
    local function softplus(x) return x < -20 and math.exp(x) or math.log(1 + math.exp(x)) end

    it("is the cross entropy of two classes", function()
        for _, weight in ipairs { 1, 0.5 } do
            for _, positive in ipairs { 1, 3 } do
                local losses = reference.map(function(x, t)
                    return weight * (positive * t * softplus(-x) + (1 - t) * softplus(x))
                end, X, T)
                each_reduction(losses, 6, function(reduction)
                    return te.binary_cross_entropy_with_logits(te.tensor(X, { dtype = "float64" }),
                        te.tensor(T, { dtype = "float64" }), {
                            reduction = reduction, weight = te.tensor({ weight, weight }, { dtype = "float64" }),
                            pos_weight = te.tensor({ positive, positive }, { dtype = "float64" }) })
                end)
            end
        end
    end)

    it("keeps the digits of small losses, and the gradient at 0", function()
        local x = te.tensor({ -30, 0, 200 }, { requires_grad = true })
        local loss = te.binary_cross_entropy_with_logits(x, te.tensor { 0, 1, 1 }, { reduction = "none" })
        local found = loss:totable()
        assert.is_true(math.abs(found[1] / math.exp(-30) - 1) < 1e-6)
        assert.is_true(math.abs(found[2] - math.log(2)) < 1e-7 and found[3] == 0)
        loss:sum():backward()
        assert.is_true(math.abs(x.grad:totable()[1] / math.exp(-30) - 1) < 1e-6)
        close({ -0.5, 0 }, x.grad:narrow(1, 2, 2), 1e-7)
    end)

    it("refuses other shapes", function()
        for _, name in ipairs { "binary_cross_entropy_with_logits", "mse_loss", "kl_div", "l1_loss", "smooth_l1_loss",
            "huber_loss" } do
            assert.error_matches(function() te[name](te.ones { 4, 1 }, te.ones { 4 }) end,
                "te." .. name .. ": x is {4,1}, target {4}: both must have one shape", 1, true)
        end
        assert.error_matches(function()
            te.binary_cross_entropy_with_logits(te.ones { 4 }, te.ones { 4 }, { pos_weight = te.ones { 2, 4 } })
        end, "te.binary_cross_entropy_with_logits: pos_weight {2,4} does not fit x {4}", 1, true)
    end)
end)

describe("te.kl_div", function()
    it("is the divergence of probabilities", function()
        local q = {}
        for i, row in ipairs(LOGITS) do q[i] = log_softmax(row) end
        local losses = reference.map(function(x, t) return t == 0 and 0 or t * (math.log(t) - x) end, q, P)
        local x, p = te.tensor(q, { dtype = "float64" }), te.tensor(P, { dtype = "float64" })
        for _, log_target in ipairs { false, true } do
            local function loss(reduction)
                return te.kl_div(x, log_target and te.log(p) or p, { reduction = reduction, log_target = log_target })
            end
            each_reduction(losses, 12, loss)
            close(sum(reference.flatten(losses)) / 3, loss "batchmean", 1e-12)
        end
        assert.is_true(te.gradcheck(function(a, b) return te.kl_div(a, b, { log_target = true }) end,
            { x, te.log(p + 0.1) }))
    end)

    it("has no gradient through what has no probability", function()
        local x = te.tensor({ -INF, -1 }, { requires_grad = true })
        local loss = te.kl_div(x, te.tensor { 0, 1 }, { reduction = "sum" })
        loss:backward()
        assert.equal(1, loss:item())
        assert.same({ 0, -1 }, x.grad:totable())
    end)
end)

describe("te.mse_loss", function()
    it("rounds once", function()
        te.manual_seed(3)
        local x, target = te.randn({ 64, 64 }):to("bfloat16"), te.randn({ 64, 64 }):to("bfloat16")
        for _, reduction in ipairs { "none", "sum", "mean" } do
            local wide = te.mse_loss(x:to("float32"), target:to("float32"), { reduction = reduction })
            local loss = te.mse_loss(x, target, { reduction = reduction })
            if reduction == "none" then
                assert.equal(0, te.ne(loss, wide:to("bfloat16")):sum():item())
            else
                assert.near(1, loss:item() / wide:item(), 2 ^ -8)
            end
        end
    end)

    it("of whole numbers is that of the same numbers as floating point", function()
        for _, dtype in ipairs { "uint8", "int32", "int64" } do
            local x, target = te.tensor({ 1, 5, 200 }, { dtype = dtype }), te.tensor({ 3, 2, 0 }, { dtype = dtype })
            assert.same({ 4, 9, 40000 }, te.mse_loss(x, target, { reduction = "none" }):totable())
            assert.equal(40013 / 3, te.mse_loss(x:to("float64"), target):item())
            assert.near(40013 / 3, te.mse_loss(x, target):item(), 1e-3)
        end
    end)
    it("rounds a loss of 16 bits once, when it is reduced", function()
        te.manual_seed(3)
        for _, dtype in ipairs { "float16", "bfloat16" } do
            local x, target = (te.randn { 1000 } * 3):to(dtype), te.rand({ 1000 }):to(dtype)
            for _, name in ipairs { "mse_loss", "binary_cross_entropy_with_logits", "kl_div", "l1_loss", "huber_loss",
                "smooth_l1_loss" } do
                for _, reduction in ipairs { "mean", "sum" } do
                    local exact = te[name](x:to("float64"), target:to("float64"), { reduction = reduction }):to(dtype)
                    local loss = te[name](x, target, { reduction = reduction })
                    assert.equal(dtype, loss.dtype)
                    assert.equal(exact:item(), loss:item())
                end
                assert.equal(dtype, te[name](x, target, { reduction = "none" }).dtype)
            end
        end
        local large = te.tensor({ 300, 0, 0, 0 }, { dtype = "float16", requires_grad = true })
        local loss = te.mse_loss(large, te.zeros({ 4 }, { dtype = "float16" })) -- 300^2 is beyond float16
        loss:backward()
        assert.equal(te.tensor(22500):to("float16"):item(), loss:item())
        assert.equal(150, large.grad[1]:item())
    end)
end)

describe("te.l1_loss, te.smooth_l1_loss and te.huber_loss", function()
    local x, target = te.tensor { 1, 2, 5, -1 }, te.tensor { 1.5, 0, 0, -1 }

    it("have gradients of the same size however large the difference is", function()
        local far = te.tensor({ math.huge, -math.huge, 1e30 }, { requires_grad = true })
        for name, limit in pairs { l1_loss = 1, smooth_l1_loss = 1, huber_loss = 3 } do
            far.grad = nil
            local opts = { reduction = "sum" }
            if name ~= "l1_loss" then opts[name == "huber_loss" and "delta" or "beta"] = 3 end
            te[name](far, te.zeros { 3 }, opts):backward()
            assert.same({ limit, -limit, limit }, far.grad:totable())
        end
    end)

    it("are what they say, with limits of their own", function()
        assert.same({ 0.5, 2, 5, 0 }, te.l1_loss(x, target, { reduction = "none" }):totable())
        assert.same({ 0.125, 1.5, 4.5, 0 }, te.smooth_l1_loss(x, target, { reduction = "none" }):totable())
        assert.same({ 0.125, 1.5, 4.5, 0 }, te.huber_loss(x, target, { reduction = "none" }):totable())
        assert.same({ 0.03125, 0.5, 3, 0 }, te.smooth_l1_loss(x, target, { reduction = "none", beta = 4 }):totable())
        assert.same({ 0.125, 2, 12, 0 }, te.huber_loss(x, target, { reduction = "none", delta = 4 }):totable())
        assert.equal(7.5, te.l1_loss(x, target, { reduction = "sum" }):item())
        assert.equal(7.5 / 4, te.l1_loss(te.cast(x, "int64"), target):item())
    end)

    it("have gradients, in which large differences count no more than their sign", function()
        local function gradient(name, opts)
            local leaf = te.clone(x)
            leaf.requires_grad, opts.reduction = true, "sum"
            te[name](leaf, target, opts):backward()
            return leaf.grad:totable()
        end
        assert.same({ -1, 1, 1, 0 }, gradient("l1_loss", {}))
        assert.same({ -0.25, 1, 1, 0 }, gradient("smooth_l1_loss", { beta = 2 }))
        assert.same({ -0.5, 2, 3, 0 }, gradient("huber_loss", { delta = 3 }))
    end)

    it("refuse limits that are not above 0", function()
        for _, limit in ipairs { 0, -1, math.huge, 0 / 0 } do
            assert.error_matches(function() te.smooth_l1_loss(x, target, { beta = limit }) end,
                "te.smooth_l1_loss: beta: expected a finite number above 0, got ", 1, true)
            assert.error_matches(function() te.huber_loss(x, target, { delta = limit }) end,
                "te.huber_loss: delta: expected a finite number above 0, got ", 1, true)
        end
    end)
end)

describe("te.isinf and te.logical_not", function()
    it("tell infinities and zeros", function()
        local x = te.tensor { 0, 1, -math.huge, math.huge, 0 / 0 }
        assert.same({ false, false, true, true, false }, x:isinf():totable())
        assert.same({ true, false, false, false, false }, x:logical_not():totable())
        assert.same({ false, true }, te.tensor({ true, false }):logical_not():totable())
    end)
end)
