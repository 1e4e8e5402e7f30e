local te = require "te"

local function parameter(values, dtype)
    return te.tensor(values, { dtype = dtype or "float32", requires_grad = true })
end

-- AdamW on plain numbers.
local function adamw(p, grads, o)
    local m, v = 0, 0
    for t, g in ipairs(grads) do
        m, v = o.beta1 * m + (1 - o.beta1) * g, o.beta2 * v + (1 - o.beta2) * g * g
        local mean, square = m / (1 - o.beta1 ^ t), v / (1 - o.beta2 ^ t)
        p = p - o.lr * (mean / (math.sqrt(square) + o.eps) + o.weight_decay * p)
    end
    return p
end

describe("te.optim.AdamW", function()
    it("follows its formula", function()
        local p = parameter { 0.5, -2 }
        local opt = te.optim.AdamW({ p }, { lr = 0.1, betas = { 0.8, 0.9 }, eps = 1e-6, weight_decay = 0.2 })
        local grads = { { 1, -3 }, { 0.5, 2 }, { -1, 0 } }
        for _, g in ipairs(grads) do
            p.grad = te.tensor(g)
            opt:step()
        end
        local o = { lr = 0.1, beta1 = 0.8, beta2 = 0.9, eps = 1e-6, weight_decay = 0.2 }
        local got = p:totable()
        assert.is_true(math.abs(got[1] - adamw(0.5, { 1, 0.5, -1 }, o)) < 1e-6)
        assert.is_true(math.abs(got[2] - adamw(-2, { -3, 2, 0 }, o)) < 1e-6)
    end)

    it("refreshes the copy that autocast keeps of a weight", function()
        te.manual_seed(3)
        local w, x = te.randn { 70, 90 }, te.randn { 5, 90 }
        w.requires_grad = true
        local function product()
            return te.autocast({ dtype = "bfloat16" }, function() return te.linear(x, w) end):detach()
        end
        local before = product():totable()
        local opt = te.optim.AdamW({ w }, { lr = 0.1 })
        w.grad = te.randn { 70, 90 }
        opt:step()
        local after = product():totable()
        assert.not_same(before, after)
        assert.same(te.linear(x:to("bfloat16"), w:detach():to("bfloat16")):totable(), after)
    end)

    it("leaves the copy of a weight in 16 bits to what makes it of the rounded weight", function()
        for _, dtypes in ipairs { { "bfloat16", "float16" }, { "float16", "bfloat16" }, { "bfloat16", "float32" } } do
            te.manual_seed(3)
            local w, x = te.randn({ 7, 9 }, { dtype = dtypes[1], requires_grad = true }), te.randn { 5, 9 }
            local opt = te.optim.AdamW({ w }, { lr = 0.1 })
            local function product()
                return te.autocast({ dtype = dtypes[2] }, function() return te.linear(x, w) end):detach():totable()
            end
            for _ = 1, 2 do
                assert.same(te.linear(x:to(dtypes[2]), w:detach():to(dtypes[2])):totable(), product())
                w.grad = te.randn({ 7, 9 }, { dtype = dtypes[1] })
                opt:step()
            end
            assert.same(te.linear(x:to(dtypes[2]), w:detach():to(dtypes[2])):totable(), product())
        end
    end)

    it("scales gradients as clipping them would, but for rounding", function()
        te.manual_seed(4)
        local start, grad = te.randn { 300 }, te.randn { 300 } * 5
        local clipped, scaled = start:clone(), start:clone()
        clipped.requires_grad, scaled.requires_grad = true, true
        clipped.grad, scaled.grad = grad:clone(), grad:clone()
        local norm = te.optim.clip_grad_norm({ clipped }, 1)
        te.optim.AdamW({ clipped }, { lr = 0.1, eps = 0.01 }):step()
        te.optim.AdamW({ scaled }, { lr = 0.1, eps = 0.01 }):step { grad_scale = 1 / norm }
        assert.is_true((clipped - scaled):abs():max():item() < 1e-6)
        assert.is_true((clipped - start):abs():max():item() > 1e-3)
        assert.same(grad:totable(), scaled.grad:totable())
    end)

    it("scales gradients far from 1 to what they are then, by any number", function()
        for _, dtype in ipairs { "float32", "float64" } do
            for _, exponent in ipairs { -30, -22, -12, 0, 12, 21, 30 } do
                local scale = 10 ^ exponent
                local function parameters()
                    return { te.ones({ 4 }, { dtype = dtype, requires_grad = true }),
                        te.ones({ 2, 3 }, { dtype = dtype, requires_grad = true }) }
                end
                local ps, clipped = parameters(), parameters()
                local opts = { lr = 0.01, weight_decay = 0, betas = { 0.9, 0.99 } }
                local opt, clipping = te.optim.AdamW(ps, opts), te.optim.AdamW(clipped, opts)
                local m, v, want = 0, 0, 1
                for step, gradient in ipairs { 0.5, -0.25, 2 } do
                    for i, p in ipairs(ps) do
                        p.grad = te.full(p.shape, gradient / scale, { dtype = dtype })
                        clipped[i].grad = p.grad
                    end
                    opt:step { grad_scale = scale }
                    -- a device sums squares in float32, beyond which a step is not made
                    local clips = te.get_default_device() == "cpu" or math.abs(exponent) <= 12
                    if clips then clipping:step { clip = te.optim.grad_clip(clipped, { scale = scale }) } end
                    m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient ^ 2
                    want = want - 0.01 * m / (1 - 0.9 ^ step) / (math.sqrt(v / (1 - 0.99 ^ step)) + 1e-8)
                    for i, p in ipairs(ps) do
                        for _, got in ipairs(p:reshape(-1):totable()) do assert.near(want, got, 1e-6) end
                        if clips then assert.same(p:totable(), clipped[i]:totable()) end
                    end
                end
            end
        end
    end)

    it("scales gradients in its own pass, and takes a learning rate for a step", function()
        local a, b = parameter { 1 }, parameter { 1 }
        local one, two = te.optim.SGD({ a }, { lr = 1 }), te.optim.SGD({ b }, { lr = 7 })
        a.grad, b.grad = te.tensor { 0.5 }, te.tensor { 2 }
        one:step()
        two:step { grad_scale = 0.25, lr = 1 }
        assert.same(a:totable(), b:totable())
    end)

    it("counts steps per parameter", function()
        local a, b = parameter { 1 }, parameter { 1 }
        local opt = te.optim.AdamW({ a, b }, { lr = 0.1, weight_decay = 0 })
        a.grad = te.ones({ 1 })
        opt:step()
        assert.equal(1, b:item())
        a.grad, b.grad = te.ones({ 1 }), te.ones({ 1 })
        opt:step()
        assert.is_true(math.abs(b:item() - 0.9) < 1e-5) -- a first step of its own, with its bias correction
    end)

    it("refuses surplus arguments, also behind nil", function()
        local opt = te.optim.AdamW({ te.zeros({ 2 }, { requires_grad = true }) })
        opt:step({}, nil)
        assert.error_matches(function() opt:step({}, nil, 3) end,
            "te.optim.AdamW:step: argument 3, number 3, is too much", 1, true)
        assert.error_matches(function() opt:zero_grad(nil, true) end, "argument 2, boolean, is too much", 1, true)
    end)

    it("counts no step that failed", function()
        local p = parameter { 1, 2, 3 }
        local opt = te.optim.AdamW({ p }, { lr = 0.1 })
        p.grad = te.ones { 3 }
        opt:step()
        for _ = 1, 3 do
            assert.error_matches(function() opt:step { clip = te.ones { 3 } } end, "clip {3}", 1, true)
            assert.equal(1, opt:state_dict().state[1].step)
        end
        opt:step { clip = te.optim.grad_clip({ p }, { max = 1 }) }
        assert.equal(2, opt:state_dict().state[1].step)
    end)

    it("counts every step that was made, wherever a script is stopped", function()
        finally(function()
            debug.sethook()
            jit.on()
        end)
        jit.off() -- compiled code runs no hooks
        local function stopped_after(opt, n, o)
            return not pcall(function()
                debug.sethook(function()
                    debug.sethook()
                    error "stopped"
                end, "", n)
                opt:step(o)
                debug.sethook()
            end)
        end
        for _, class in ipairs { "AdamW", "SGD", "clip" } do
            local stops, n, go_on = 0, 1, true
            while go_on do
                local a, b = parameter { 1 }, parameter({ 1 }, "bfloat16")
                local opt = te.optim[class == "clip" and "AdamW" or class]({ { params = { a } }, { params = { b } } },
                    { lr = 0.25, master_weights = true })
                go_on = false
                for step = 1, 3 do
                    a.grad, b.grad = te.ones { 1 }, te.ones({ 1 }, { dtype = "bfloat16" })
                    local before, o = a:item(), class == "clip" and { clip = te.optim.grad_clip { a, b } } or nil
                    local counted = opt.state[a] and opt.state[a].step or 0
                    local stopped = stopped_after(opt, step == 3 and 1e9 or n, o)
                    go_on = go_on or stopped
                    stops = stops + (stopped and 1 or 0)
                    local made = a:item() ~= before
                    assert.equal(counted + (made and 1 or 0), opt.state[a] and opt.state[a].step or 0)
                    assert.equal(opt.state[a] and opt.state[a].step or 0, opt.state[b] and opt.state[b].step or 0)
                end
                n = n + 7
            end
            assert.is_true(stops > 20)
        end
    end)

    it("keeps float32 masters of bfloat16 parameters", function()
        local p = parameter({ 1 }, "bfloat16")
        local opt = te.optim.AdamW({ p }, { lr = 1e-4, weight_decay = 0, master_weights = true })
        for _ = 1, 100 do
            p.grad = te.ones({ 1 }, { dtype = "bfloat16" })
            opt:step()
        end
        -- a step of 1e-4 is below bfloat16's resolution at 1: without masters nothing would have moved
        assert.is_true(math.abs(p:item() - 0.99) < 0.004)
        assert.is_true(math.abs(opt.state[p].master:item() - 0.99) < 1e-4)
    end)

    it("takes a module and clears gradients", function()
        local m = te.Linear(2, 2)
        local opt = te.optim.SGD(m, { lr = 0.1 })
        m(te.ones({ 1, 2 })):sum():backward()
        opt:zero_grad()
        assert.is_nil(m.weight.grad)
    end)
end)
