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

describe("an optimizer's state", function()
    it("goes through a file", function()
        for _, class in ipairs { "AdamW", "SGD" } do
            local path, a, b = os.tmpname(), parameter({ 1, 2 }, "bfloat16"), parameter({ 1, 2 }, "bfloat16")
            local options = { lr = 0.25, master_weights = true, momentum = class == "SGD" and 0.5 or nil }
            local first, second = te.optim[class]({ a }, options), te.optim[class]({ b }, { lr = 1 })
            for step = 1, 3 do
                a.grad = te.tensor({ step, -1 }, { dtype = "bfloat16" })
                if step == 3 then
                    te.no_grad(function() b:copy_(a) end)
                    te.save(path, first:state_dict())
                    second:load_state_dict((te.load(path)))
                    b.grad = a.grad
                    second:step()
                end
                first:step()
            end
            os.remove(path)
            assert.same(a:totable(), b:totable())
            assert.same(first:state_dict().groups, second:state_dict().groups)
        end
    end)
end)

describe("an optimizer's state_dict", function()
    it("is of the moment at which it was taken", function()
        for _, class in ipairs { "AdamW", "SGD" } do
            local p = parameter({ 1, 2 }, "bfloat16")
            local opt = te.optim[class]({ p }, { lr = 0.5, master_weights = true,
                momentum = class == "SGD" and 0.5 or nil })
            local function step(n)
                p.grad = te.tensor({ n, -1 }, { dtype = "bfloat16" })
                opt:step()
            end
            local function numbers(saved)
                local found = {}
                for name, value in pairs(saved.state[1]) do
                    found[name] = te.is_tensor(value) and value:totable() or value
                end
                return found
            end
            step(1)
            local saved = opt:state_dict()
            local first, weights = numbers(saved), p:totable()
            step(2)
            local second = p:totable()
            assert.same(first, numbers(saved))
            te.no_grad(function() p:copy_(te.tensor(weights)) end)
            opt:load_state_dict(saved)
            step(2)
            assert.same(second, p:totable())
            assert.same(first, numbers(saved))
        end
    end)
end)

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

    it("has groups with options of their own", function()
        local a, b = parameter { 1 }, parameter { 1 }
        local opt = te.optim.AdamW({ { params = { a }, weight_decay = 0.5 }, { params = { b } } },
            { lr = 0.1, weight_decay = 0 })
        a.grad, b.grad = te.zeros({ 1 }), te.zeros({ 1 })
        opt:step()
        assert.is_true(math.abs(a:item() - 0.95) < 1e-6)
        assert.equal(1, b:item())
    end)

    it("multiplies a group's rate by its lr_scale", function()
        local rates = { function(o, t) o:step { lr = 0.3 / t } end, -- as a schedule gives them
            function(o, t) o:set_lr(0.3 / t) o:step() end,
            function(o, t) for g = 1, 3 do o.groups[g].lr = 0.3 / t end o:step() end }
        for _, step in ipairs(rates) do
            local adam, sgd = { parameter { 1 }, parameter { 1 }, parameter { 1 } }, {}
            for i = 1, 3 do sgd[i] = parameter { 1 } end
            local scales, class = { 1, 0.5, 0 }, { te.optim.AdamW, te.optim.SGD }
            for c, params in ipairs { adam, sgd } do
                local groups = {}
                for i = 1, 3 do groups[i] = { params = { params[i] }, lr_scale = i > 1 and scales[i] or nil } end
                local opt = class[c](groups, { lr = 7, weight_decay = 0.1 })
                for t = 1, 4 do -- AdamW's from the second on are prepared ones
                    for i = 1, 3 do params[i].grad = te.tensor { t - 2.5 } end
                    step(opt, t)
                end
            end
            for i = 1, 3 do
                local m, v, p, q = 0, 0, 1, 1
                for t = 1, 4 do
                    local g, lr = t - 2.5, 0.3 / t * scales[i]
                    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                    p = p - lr * (m / (1 - 0.9 ^ t) / (math.sqrt(v / (1 - 0.999 ^ t)) + 1e-8) + 0.1 * p)
                    q = q - lr * (g + 0.1 * q)
                end
                assert.near(p, adam[i]:item(), 1e-6)
                assert.near(q, sgd[i]:item(), 1e-6)
            end
            assert.equal(1, adam[3]:item())
        end
    end)

    it("keeps lr_scale in its state, and takes a change of it", function()
        local function made(scale)
            local p = parameter { 1 }
            return te.optim.SGD({ { params = { p }, lr_scale = scale } }, { lr = 0.5 }), p
        end
        local one, two, p = made(0.25), made(nil)
        two:load_state_dict(one:state_dict())
        assert.equal(0.25, two.groups[1].lr_scale)
        p.grad = te.ones { 1 }
        two:step()
        assert.equal(1 - 0.5 * 0.25, p:item())
        local older = one:state_dict()
        older.groups[1].lr_scale = nil -- as it was saved before there was the option
        local three = made(0.75)
        three:load_state_dict(older)
        assert.equal(0.75, three.groups[1].lr_scale)
        two.groups[1].lr_scale = 2
        two:step()
        assert.equal(1 - 0.5 * 0.25 - 0.5 * 2, p:item())
        for _, wrong in ipairs { -1, math.huge, 0 / 0, "1" } do
            assert.error_matches(function() made(wrong) end, "te%.optim%.SGD: option lr_scale: expected ")
            two.groups[1].lr_scale = wrong
            assert.error_matches(function() two:step() end, "te%.optim%.SGD:step: group 1: option lr_scale")
        end
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

    it("goes on from its saved state", function()
        local function run(p, opt, n)
            for i = 1, n do
                p.grad = te.tensor { math.sin(i) }
                opt:step()
            end
        end
        local a, b = parameter { 1 }, parameter { 1 }
        local first = te.optim.AdamW({ a }, { lr = 0.01 })
        run(a, first, 3)
        te.no_grad(function() b:copy_(a) end)
        local second = te.optim.AdamW({ b }, { lr = 1 })
        second:load_state_dict(first:state_dict())
        run(a, first, 2)
        run(b, second, 2)
        assert.same(a:totable(), b:totable())
        assert.equal(2 * 1, #first:state_dict().groups + #second.groups)
    end)

    it("says what it was given instead of parameters, and of a state", function()
        local m = te.Linear(2, 2)
        for given, params in pairs { ["an empty table"] = {}, ["a function (an iterator"] = m:named_parameters(),
            ["a list whose entry 2 is 3"] = { te.ones { 1 }, 3 }, ["a tensor {2}"] = te.ones { 2 }, ['"x"'] = "x",
            ["a table without entries 1, 2, …"] = m:state_dict() } do
            assert.error_matches(function() te.optim.AdamW(params) end, "te.optim.AdamW: params: expected a list of "
                .. "tensors, a module, or a list of groups { params = … }, got " .. given, 1, true)
        end
        assert.error_matches(function() te.optim.SGD() end, "groups { params = … }, got nil", 1, true)
        local opt = te.optim.SGD(m)
        assert.error_matches(function() opt:load_state_dict(3) end,
            "te.optim.SGD:load_state_dict: expected what state_dict returns, got 3", 1, true)
        assert.error_matches(function() opt:load_state_dict { groups = {} } end,
            "got a table whose state is nil and whose groups are table", 1, true)
    end)

    it("refuses what makes no sense", function()
        assert.error_matches(function() te.optim.AdamW({}) end, "te%.optim%.AdamW: params: expected a list of tensors")
        local p = parameter { 1 }
        assert.error_matches(function() te.optim.AdamW({ p }, { learning_rate = 1 }) end, "unknown option")
        assert.error_matches(function() te.optim.AdamW({ p, p }) end, "came before")
        local opt = te.optim.AdamW({ p })
        assert.error_matches(function() opt:load_state_dict({}) end, "expected what state_dict returns")
        assert.error_matches(function() te.optim.AdamW({ p, nil, parameter { 2 } }) end,
            "params: entry 2 is nil, but there is one at 3")
        assert.error_matches(function() te.optim.AdamW({ p, lr = 1 }) end, 'params: a list has no entry "lr"')
        assert.error_matches(function() te.optim.clip_grad_norm({ p, nil, p }, 1) end, "params: entry 2 is nil")
        for _, lr in ipairs { -1, "a", 0 / 0 } do
            assert.error_matches(function() opt:set_lr(lr) end,
                "te%.optim%.AdamW:set_lr: lr: expected number, at least 0")
        end
        assert.error_matches(function() opt:set_lr() end, "got nil")
    end)

    it("loads all of a state or nothing", function()
        local a, b = parameter { 1 }, parameter { 2 }
        local opt = te.optim.AdamW({ a, b }, { lr = 0.5 })
        a.grad, b.grad = te.ones { 1 }, te.ones { 1 }
        opt:step()
        local good = { step = 7, exp_avg = te.ones { 1 }, exp_avg_sq = te.ones { 1 } }
        local function with(name, value)
            local bad = { step = 7, exp_avg = te.ones { 1 }, exp_avg_sq = te.ones { 1 } }
            bad[name] = value
            return bad
        end
        for message, saved in pairs {
            ["parameter 2: state: expected table, got 3"] = { state = { good, 3 }, groups = { { lr = 1 } } },
            ["parameter 2: step: expected integer"] = { state = { good, with("step", "a") }, groups = { { lr = 1 } } },
            ["parameter 2: step is missing"] = { state = { good, with("step", nil) }, groups = { { lr = 1 } } },
            ["parameter 2: exp_avg: expected a tensor, got number"] = { state = { good, with("exp_avg", 3) },
                groups = { { lr = 1 } } },
            ["parameter 2: exp_avg has shape {1,1}"] = { state = { good, with("exp_avg", te.ones { 1, 1 }) },
                groups = { { lr = 1 } } },
            ["a state of parameter 3, of 2"] = { state = { good, good, good }, groups = { { lr = 1 } } },
            ["option lr: expected number, at least 0"] = { state = { good, good }, groups = { { lr = -1 } } },
            ["group: expected table, got 3"] = { state = { good, good }, groups = { 3 } },
        } do
            local ok, problem = pcall(opt.load_state_dict, opt, saved)
            assert.is_false(ok)
            assert.matches(message, problem, 1, true)
            assert.equal(0.5, opt.groups[1].lr)
            assert.equal(1, opt:state_dict().state[1].step)
        end
        opt:load_state_dict({ state = { good }, groups = { { lr = 1 } } })
        assert.equal(1, opt.groups[1].lr)
        assert.equal(7, opt:state_dict().state[1].step)
        assert.is_nil(opt:state_dict().state[2])
    end)

    it("loads no state of another optimizer, or of other parameters", function()
        local a, b = parameter { 1 }, parameter { 1 }
        local opt = te.optim.AdamW { a, b }
        a.grad, b.grad = te.ones { 1 }, te.ones { 1 }
        opt:step()
        local saved = opt:state_dict()
        assert.error_matches(function() te.optim.SGD({ a, b }):load_state_dict(saved) end,
            "te.optim.SGD:load_state_dict: a state of te.optim.AdamW", 1, true)
        for _, params in ipairs { { a }, { a, b, parameter { 1 } } } do
            assert.error_matches(function() te.optim.AdamW(params):load_state_dict(saved) end,
                ("te.optim.AdamW:load_state_dict: 2 parameters for a group of %d"):format(#params), 1, true)
        end
        saved.groups[1].optimizer, saved.groups[1].parameters = nil, nil -- as they were saved before
        te.optim.AdamW({ a, b }):load_state_dict(saved)
    end)

    it("loads a state that lacks what options have come to ask for", function()
        local function restored(opt, p)
            p.grad = te.ones({ 2 }, { dtype = p.dtype })
            opt:load_state_dict(opt:state_dict())
            opt:step()
            return p:totable()
        end
        local p = parameter { 1, 2 }
        local opt = te.optim.SGD({ p }, { lr = 1 })
        p.grad = te.ones { 2 }
        opt:step()
        opt.groups[1].momentum, opt.groups[1].dampening = 0.5, 0.25
        assert.same({ -1, 0 }, restored(opt, p)) -- a first step of the momentum
        for _, class in ipairs { "AdamW", "SGD" } do
            p = parameter({ 1, 2 }, "bfloat16")
            opt = te.optim[class]({ p }, { lr = 2 ^ -12, weight_decay = 0 })
            p.grad = te.ones({ 2 }, { dtype = "bfloat16" })
            opt:step()
            opt.groups[1].master_weights = true
            assert.same({ 1, 2 }, restored(opt, p))
            assert.near(1 - 2 ^ -12, opt.state[p].master[1]:item(), 1e-6)
        end
        local m = te.Linear(2, 2)
        opt = te.optim.AdamW(m, { master_weights = true })
        m(te.ones { 1, 2 }):sum():backward()
        opt:step()
        m:to "bfloat16"
        opt:load_state_dict(opt:state_dict())
        assert.same(m.weight:to("float32"):totable(), opt.state[m.weight].master:totable())
    end)

    it("has the learning rate of its first group, and takes one for all", function()
        local opt = te.optim.AdamW({ { params = { parameter { 1 } }, lr = 0.5 }, { params = { parameter { 1 } } } })
        assert.equal(0.5, opt.lr)
        opt.lr = 0.25
        assert.same({ 0.25, 0.25, 0.25 }, { opt.lr, opt.groups[1].lr, opt.groups[2].lr })
        assert.error_matches(function() opt.lr = -1 end, "te.optim.AdamW:set_lr: lr: expected number, at least 0", 1,
            true)
        assert.equal(0.25, opt.lr)
        assert.equal("te.optim.AdamW of 2 parameters in 2 groups, lr 0.25", tostring(opt))
        assert.equal("te.optim.SGD of 2 parameters in 1 group, lr 0.001", tostring(te.optim.SGD(te.Linear(2, 2))))
    end)

    it("has other options of its first group, too, and takes one for all", function()
        local w = te.ones({ 1 }, { requires_grad = true })
        local opt = te.optim.SGD({ w }, { lr = 1 })
        w.grad = te.zeros { 1 }
        opt.lr, opt.weight_decay = 0.5, 0.5
        opt:step()
        assert.equal(0.75, w:item())
        assert.equal(0.5, opt:state_dict().groups[1].weight_decay)
        local adam = te.optim.AdamW({ { params = { te.ones({ 1 }, { requires_grad = true }) } },
            { params = { te.ones({ 1 }, { requires_grad = true }) } } })
        adam.betas = { 0.5, 0.75 }
        assert.same({ 0.5, 0.75 }, adam.groups[2].betas)
        assert.is_true(adam.groups[1].betas ~= adam.groups[2].betas)
        assert.error_matches(function() adam.eps = "x" end, "te%.optim%.AdamW: option eps: expected number")
        assert.error_matches(function() adam:set_option("epz", 1) end, 'unknown option "epz"')
        assert.error_matches(function() te.optim.AdamW { { params = { w } }, w } end,
            "te%.optim%.AdamW: params: group 2: expected a table { params = … }, got a tensor {1}")
    end)

    it("has options of its own, not those of the next optimizer", function()
        local betas = { 0.8, 0.9 }
        local first = te.optim.AdamW({ parameter { 1 } })
        local pair = te.optim.AdamW({ { params = { parameter { 1 } } }, { params = { parameter { 1 } } } },
            { betas = betas })
        local saved = first:state_dict()
        first.groups[1].betas[1], pair.groups[1].betas[1] = 0.5, 0.5
        assert.equal(0.9, te.optim.AdamW({ parameter { 1 } }).groups[1].betas[1])
        assert.equal(0.9, saved.groups[1].betas[1])
        assert.same({ 0.8, 0.8 }, { pair.groups[2].betas[1], betas[1] })
    end)

    it("takes a module and clears gradients", function()
        local m = te.Linear(2, 2)
        local opt = te.optim.SGD(m, { lr = 0.1 })
        m(te.ones({ 1, 2 })):sum():backward()
        opt:zero_grad()
        assert.is_nil(m.weight.grad)
    end)
end)

describe("te.optim.SGD", function()
    it("has no nesterov without momentum, or with dampening", function()
        local p = { te.zeros { 2 } }
        for _, options in ipairs { { nesterov = true }, { nesterov = true, momentum = 0.9, dampening = 0.1 } } do
            assert.error_matches(function() te.optim.SGD(p, options) end,
                "te%.optim%.SGD: option nesterov: it needs momentum")
        end
    end)

    it("has momentum and nesterov", function()
        for _, nesterov in ipairs { false, true } do
            local p, expected, buffer = parameter { 1 }, 1, 0
            local opt = te.optim.SGD({ p }, { lr = 0.1, momentum = 0.9, nesterov = nesterov })
            for t, g in ipairs { 1, 2, -1 } do
                p.grad = te.tensor { g }
                opt:step()
                buffer = t == 1 and g or 0.9 * buffer + g
                expected = expected - 0.1 * (nesterov and g + 0.9 * buffer or buffer)
            end
            assert.is_true(math.abs(p:item() - expected) < 1e-6)
        end
    end)
end)

describe("gradient clipping", function()
    it("returns the norm and scales to the limit", function()
        local a, b = parameter { 0 }, parameter { 0 }
        a.grad, b.grad = te.tensor { 3 }, te.tensor { 4 }
        assert.is_true(math.abs(te.optim.clip_grad_norm({ a, b }, 10) - 5) < 1e-6)
        assert.equal(3, a.grad:item())
        assert.is_true(math.abs(te.optim.clip_grad_norm({ a, b }, 1) - 5) < 1e-6)
        assert.is_true(math.abs(a.grad:item() - 0.6) < 1e-6)
        assert.error_matches(function() te.optim.clip_grad_norm({ a }, 0) end, "max: expected a number above 0")
    end)

    it("has the digits of float64 where a gradient has them", function()
        local p = parameter({ 0, 0, 0 }, "float64")
        p.grad = te.tensor({ 1 / 3, 1 / 7, 1 / 9 }, { dtype = "float64" })
        local norm = math.sqrt(1 / 9 + 1 / 49 + 1 / 81)
        assert.near(norm, te.optim.grad_norm { p }, 1e-15)
        if te.get_default_device() == "cpu" then
            local clip = te.optim.grad_clip({ p }, { max = 0.1 }):totable()
            assert.near(norm, clip[1], 1e-15)
            assert.near(0.1 / norm, clip[2], 1e-15)
        end
    end)

    it("is 0 where there are no gradients", function()
        local p = parameter({ 1, 2 }, "float32")
        local optimizer = te.optim.AdamW({ p }, { lr = 1 })
        for _, params in ipairs { { p }, {}, te.Linear(2, 2) } do
            assert.equal(0, te.optim.grad_norm(params))
            assert.same({ 0, 0.5, 1 }, te.optim.grad_clip(params, { max = 1, scale = 0.5 }):totable())
            assert.same({ 0, 1, 0 }, te.optim.grad_clip(params, { loss = te.tensor(0 / 0) }):totable())
        end
        optimizer:step { clip = te.optim.grad_clip({ p }, { max = 1 }) }
        assert.same({ 1, 2 }, p:totable())
    end)

    it("knows the norms of gradients whose squares float32 has not", function()
        local function off(norm, expected) return math.abs(norm / expected - 1) end
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, size in ipairs { 2 ^ 100, 2 ^ 64, 2 ^ -60, 2 ^ -75, 2 ^ -110 } do
                local a, b = parameter({ 0, 0 }, dtype), parameter({ 0 }, dtype)
                a.grad = te.tensor({ 3 * size, 0 }, { dtype = dtype })
                b.grad = te.tensor({ 4 * size }, { dtype = dtype })
                local norm, broken = te.optim.grad_norm { a, b }
                assert.is_true(off(norm, 5 * size) < 1e-6 and broken == nil)
                local clip = te.optim.grad_clip({ a, b }, { max = size }):totable()
                if te.get_default_device() == "cpu" then
                    assert.is_true(off(clip[1], 5 * size) < 1e-6 and off(clip[2], 0.2) < 1e-6)
                    assert.equal(1, clip[3])
                end
                assert.is_true(off(te.optim.clip_grad_norm({ a, b }, size), 5 * size) < 1e-6)
                assert.is_true(off(a.grad[1]:item(), 0.6 * size) < 2 ^ -8)
                b.grad = te.tensor({ 1 / 0 }, { dtype = dtype })
                norm, broken = te.optim.grad_norm { a, b }
                assert.is_true(norm == 1 / 0 and #broken == 1 and rawequal(b, broken[1]))
            end
        end
    end)

    -- Products that leave the caches sum up their squares, which the norm takes as long as nothing else is written.
    it("knows gradients of products, and what became of them", function()
        local function norm_of(gradient) return gradient:to("float64"):square():sum():item() ^ 0.5 end
        local threads = te.get_num_threads()
        for _, dtype in ipairs { "float32", "bfloat16" } do
            local norms = {}
            for n = 1, 2 do
                te.set_num_threads(n)
                te.manual_seed(7)
                local table = te.randn({ 1200, 768 }, { requires_grad = true })
                local ids = te.randint(0, 1199, { 192 }, { dtype = "int64" })
                local dy = te.randn { 192, 1200 }
                local function check(what)
                    local norm = te.optim.grad_norm { table }
                    local exact = norm_of(table.grad)
                    assert.is_true(math.abs(norm / exact - 1) < 1e-6, ("%s: %.9g, not %.9g"):format(what, norm, exact))
                    return norm
                end
                local function backward(x)
                    te.autocast({ enabled = dtype == "bfloat16", dtype = "bfloat16" }, function()
                        te.linear(x, table):backward(dy:to(dtype))
                    end)
                end
                backward(te.randn { 192, 768 })
                norms[n] = { check("a product") }
                assert.equal(norms[n][1], te.optim.grad_norm { table })
                backward(te.randn { 192, 768 })
                norms[n][2] = check("two products")
                table.grad = nil
                backward(te.embedding(table, ids) * 3)
                norms[n][3] = check("a product and rows")
                table.grad:mul_(2)
                check("doubled")
                table.grad[1]:fill_(100)
                check("a row filled")
                te.optim.clip_grad_norm({ table }, 1)
                assert.is_true(math.abs(check("clipped") - 1) < 1e-5)
                table.grad = nil
                backward(te.randn { 192, 768 })
                table.grad:zero_()
                assert.equal(0, te.optim.grad_norm { table })
                table.grad = nil
                backward(te.full({ 192, 768 }, 0 / 0))
                local norm, broken = te.optim.grad_norm { table }
                assert.is_true(norm ~= norm)
                assert.is_true(rawequal(table, broken[1]))
            end
            assert.same(norms[1], norms[2])
        end
        te.set_num_threads(threads)
    end)

    it("names the tensors that broke", function()
        local a, b = parameter { 0 }, parameter { 0 }
        a.grad, b.grad = te.tensor { 3 }, te.tensor { 0 / 0 }
        local norm, broken = te.optim.grad_norm({ a, b })
        assert.is_true(norm ~= norm)
        assert.equal(1, #broken)
        assert.is_true(rawequal(b, broken[1]))
        te.optim.clip_grad_norm({ a, b }, 1)
        assert.equal(3, a.grad:item())
    end)
end)

describe("options of a group", function()
    it("may ask for momentum later", function()
        local p, expected, buffer = parameter { 1 }, 1, nil
        local opt = te.optim.SGD({ p }, { lr = 0.1 })
        for t, momentum in ipairs { 0, 0, 0.9, 0.9, 0, 0.5 } do
            opt.groups[1].momentum, opt.groups[1].dampening = momentum, 0.25
            p.grad = te.tensor { t }
            opt:step()
            if momentum > 0 then buffer = buffer and momentum * buffer + 0.75 * t or t end
            expected = expected - 0.1 * (momentum > 0 and buffer or t)
            assert.near(expected, p:item(), 1e-5)
        end
        assert.is_not_nil(opt:state_dict().state[1].momentum_buffer)
    end)

    it("are checked where they are used", function()
        local function refused(class, change, message)
            local p = parameter { 1 }
            local opt = te.optim[class]({ { params = { parameter { 1 } } }, { params = { p } } })
            for made = 0, 2 do
                p.grad = te.ones { 1 }
                local before, kept = p:item(), {}
                for name, value in pairs(opt.groups[2]) do kept[name] = value end
                change(opt.groups[2])
                assert.error_matches(function() opt:step() end, message, 1, true)
                assert.error_matches(function() opt:step() end, message, 1, true)
                assert.equal(before, p:item())
                assert.equal(made, opt.state[p] and opt.state[p].step or 0)
                for name, value in pairs(kept) do opt.groups[2][name] = value end
                opt:step()
            end
        end
        refused("AdamW", function(group) group.lr = -1 end,
            "te.optim.AdamW:step: group 2: option lr: expected number, at least 0, got -1")
        refused("AdamW", function(group) group.betas = { 1, 1 } end,
            "te.optim.AdamW:step: group 2: option betas[1]: expected a number from 0 to below 1, got 1")
        refused("AdamW", function(group) group.betas = nil end, "group 2: option betas: expected table, got nil")
        refused("AdamW", function(group) group.eps = 0 / 0 end, "group 2: option eps: expected number, at least 0")
        refused("AdamW", function(group) group.lr = 1 / 0 end, "group 2: option lr: expected a finite number, got inf")
        refused("SGD", function(group) group.nesterov = true end, "group 2: option nesterov: it needs momentum above 0")
        refused("SGD", function(group) group.momentum = "much" end, 'option momentum: expected number, at least 0')
    end)

    it("are finite", function()
        local p = parameter { 1 }
        for class, names in pairs { AdamW = { "lr", "eps", "weight_decay" },
            SGD = { "lr", "momentum", "dampening", "weight_decay" } } do
            for _, name in ipairs(names) do
                assert.error_matches(function() te.optim[class]({ p }, { [name] = 1 / 0 }) end,
                    ("te.optim.%s: option %s: expected a finite number, got inf"):format(class, name), 1, true)
            end
            local opt = te.optim[class] { p }
            assert.error_matches(function() opt:set_lr(1 / 0) end, "set_lr: lr: expected a finite number", 1, true)
            assert.error_matches(function() opt:step { lr = 1 / 0 } end, "option lr: expected a finite number", 1, true)
        end
    end)
end)

describe("tensors that are not contiguous", function()
    it("are no parameters", function()
        local p, good = te.randn({ 3, 4 }):transpose(1, 2):detach(), parameter { 1 }
        p.requires_grad = true
        for _, class in ipairs { "AdamW", "SGD" } do
            assert.error_matches(function() te.optim[class] { good, p } end,
                ("te.optim.%s: parameter 2 of a group is {4,3} and not contiguous"):format(class), 1, true)
        end
    end)

    it("are gradients like others", function()
        te.manual_seed(5)
        for _, class in ipairs { "AdamW", "SGD" } do
            local a, b, c = te.randn { 4, 3 }, nil, parameter { 1 }
            b = a:clone()
            a.requires_grad, b.requires_grad = true, true
            local one, two = te.optim[class] { c, a }, te.optim[class] { c, b }
            for _ = 1, 3 do
                local grad = te.randn { 3, 4 }
                a.grad, b.grad = grad:transpose(1, 2), grad:transpose(1, 2):contiguous()
                assert.is_false(a.grad:is_contiguous())
                one:step()
                two:step()
                assert.same(b:totable(), a:totable())
            end
            a.grad, b.grad = te.ones({ 1, 1 }):expand { 4, 3 }, te.ones { 4, 3 }
            one:step()
            two:step()
            assert.same(b:totable(), a:totable())
        end
    end)
end)

describe("a master copy", function()
    local function make(class, values)
        local p = parameter(values or { 1, 2 }, "bfloat16")
        return p, te.optim[class]({ p }, { lr = 2 ^ -12, weight_decay = 0, master_weights = true })
    end
    local function step(p, opt, n)
        for _ = 1, n or 1 do
            p.grad = te.ones({ 2 }, { dtype = "bfloat16" })
            opt:step()
        end
        return opt.state[p].master:totable()
    end
    local function near(expected, found)
        for i = 1, #expected do assert.near(expected[i], found[i], 1e-6) end
    end
    local d = 2 ^ -12

    for _, class in ipairs { "AdamW", "SGD" } do
        it("follows what others write to the parameter: " .. class, function()
            local p, opt = make(class)
            near({ 1 - 3 * d, 2 - 3 * d }, step(p, opt, 3))
            te.no_grad(function() p:fill_(4) end)
            near({ 4 - d, 4 - d }, step(p, opt))
            near({ 4 - 3 * d, 4 - 3 * d }, step(p, opt, 2))
            te.no_grad(function() p[2] = 8 end) -- the other value is the rounding of its master's
            near({ 4 - 4 * d, 8 - d }, step(p, opt))
            te.no_grad(function() p:copy_(p:clone()) end)
            near({ 4 - 5 * d, 8 - 2 * d }, step(p, opt))
        end)

        it("follows a module's load_state_dict: " .. class, function()
            local model = te.Sequential(te.Linear(4, 4)):to "bfloat16"
            local opt, saved = te.optim[class](model, { lr = 2 ^ -12, master_weights = true }), {}
            local function train()
                model(te.ones({ 1, 4 }, { dtype = "bfloat16" })):sum():backward()
                opt:step()
            end
            for name, value in pairs(model:state_dict()) do saved[name] = value:clone() end
            for _ = 1, 50 do train() end
            model:load_state_dict(saved)
            opt:zero_grad()
            opt:set_lr(0)
            train()
            for name, value in pairs(model:state_dict()) do assert.same(saved[name]:totable(), value:totable()) end
        end)

        it("counts where it was loaded, or written to itself: " .. class, function()
            for _, order in ipairs { "model first", "optimizer first", "after steps" } do
                local p, opt = make(class)
                local master = step(p, opt, 3)
                local q, other = make(class, { 5, 6 })
                if order == "after steps" then step(q, other, 2) end
                if order ~= "optimizer first" then te.no_grad(function() q:copy_(p) end) end
                other:load_state_dict(opt:state_dict())
                if order == "optimizer first" then te.no_grad(function() q:copy_(p) end) end
                near({ master[1] - d, master[2] - d }, step(q, other))
            end
            local p, opt = make(class)
            step(p, opt)
            te.no_grad(function()
                p:fill_(3)
                opt.state[p].master:fill_(3.001)
            end)
            near({ 3.001 - d, 3.001 - d }, step(p, opt))
        end)

        it("is saved with what others wrote before: " .. class, function()
            local p, opt = make(class)
            step(p, opt)
            te.no_grad(function() p:fill_(5) end)
            local saved = opt:state_dict()
            assert.same({ 5, 5 }, saved.state[1].master:totable())
            opt:load_state_dict(saved)
            near({ 5 - d, 5 - d }, step(p, opt))
            local q, other = make(class)
            te.no_grad(function() q:copy_(p) end)
            other:load_state_dict(opt:state_dict())
            near({ 5 - 2 * d, 5 - 2 * d }, step(q, other))
        end)

        it("follows what is written around loading it: " .. class, function()
            for _, order in ipairs { "write first", "write last", "write last, after steps" } do
                local p, opt = make(class)
                step(p, opt)
                local q, other = make(class, { 7, 8 })
                if order:find "after steps" then step(q, other, 2) end
                if order == "write first" then te.no_grad(function() q:fill_(6) end) end
                other:load_state_dict(opt:state_dict())
                if order ~= "write first" then te.no_grad(function() q:fill_(6) end) end
                near({ 6 - d, 6 - d }, step(q, other))
            end
        end)

        it("is made when a parameter's dtype asks for it: " .. class, function()
            local model = te.Linear(2, 2, { bias = false })
            local opt = te.optim[class](model, { lr = 2 ^ -12, weight_decay = 0, master_weights = true })
            local p = model.weight
            p.grad = te.ones { 2, 2 }
            opt:step()
            p.grad = te.ones { 2, 2 }
            opt:step()
            assert.is_nil(opt.state[p].master)
            model:to "bfloat16"
            te.no_grad(function() p:fill_(1) end)
            for _ = 1, 4 do
                p.grad = te.ones({ 2, 2 }, { dtype = "bfloat16" })
                opt:step()
            end
            near({ 1 - 4 * d, 1 - 4 * d }, opt.state[p].master[1]:totable())
        end)
    end

    it("in 16 bits is what parameters in other 16 bits are the rounding of", function()
        for _, class in ipairs { "AdamW", "SGD" } do
            te.manual_seed(6)
            local p = te.randn({ 300 }, { dtype = "float16", requires_grad = true })
            local opt = te.optim[class]({ p }, { lr = 0.01, master_weights = true, master_dtype = "bfloat16" })
            for _ = 1, 3 do
                p.grad = te.randn({ 300 }, { dtype = "float16" })
                opt:step()
                assert.same(opt.state[p].master:to("float16"):totable(), p:totable())
            end
        end
    end)

    it("of a parameter in a longer buffer loses nothing to its neighbours' steps", function()
        local buffer = te.ones({ 4 }, { dtype = "bfloat16" })
        local a, b = buffer:narrow(1, 1, 2):detach(), buffer:narrow(1, 3, 2):detach()
        a.requires_grad, b.requires_grad = true, true
        local options = { lr = 2 ^ -12, momentum = 0, master_weights = true }
        local one, two = te.optim.SGD({ a }, options), te.optim.SGD({ b }, options)
        for i = 1, 5 do
            near({ 1 - i * d, 1 - i * d }, step(a, one))
            near({ 1 - i * d, 1 - i * d }, step(b, two))
        end
    end)
end)

describe("a main_grad", function()
    for _, class in ipairs { "AdamW", "SGD" } do
        for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
            it(("is the gradient of a parameter in %s for %s"):format(dtype, class), function()
                local a, b = parameter({ 1, 2 }, dtype), parameter({ 1, 2 }, dtype)
                local buffer = te.zeros { 4 }
                a.main_grad = buffer:narrow(1, 2, 2)
                local one, two = te.optim[class]({ a }, { lr = 0.25 }), te.optim[class]({ b }, { lr = 0.25 })
                for step = 1, 4 do
                    te.sum(a * step):backward()
                    te.sum(b * step):backward()
                    assert.equal(te.optim.grad_norm { b }, te.optim.grad_norm { a })
                    assert.is_true(te.optim.clip_grad_norm({ a }, 1) > 1 and te.optim.clip_grad_norm({ b }, 1) > 1)
                    assert.is_true(math.abs(te.optim.grad_norm { a } - 1) < 1e-6)
                    b.grad = a.main_grad:to(dtype)
                    a.main_grad:copy_(b.grad)
                    one:step()
                    two:step()
                    assert.same(b:totable(), a:totable())
                    one:zero_grad()
                    two:zero_grad()
                    assert.same({ 0, 0, 0, 0 }, buffer:totable())
                    assert.is_nil(a.grad)
                end
                assert.not_same({ 1, 2 }, a:totable())
            end)
        end
    end

    it("is not rounded to a parameter's 16 bits, and comes before a grad", function()
        local a = parameter({ 0 }, "bfloat16")
        local opt = te.optim.SGD({ a }, { lr = 1, master_weights = true })
        a.grad, a.main_grad = te.tensor({ 3 }, { dtype = "bfloat16" }), te.tensor { 1 + 2 ^ -20 }
        opt:step()
        assert.equal(-1 - 2 ^ -20, opt.state[a].master:item())
        opt:zero_grad()
        assert.is_nil(a.grad)
        assert.equal(0, a.main_grad:item())
    end)

    it("is zeros after a module's zero_grad", function()
        local m = te.Linear(2, 2)
        m.weight.main_grad = te.ones { 2, 2 }
        m:zero_grad()
        assert.equal(0, m.weight.main_grad:abs():sum():item())
    end)
end)

describe("te.optim.cosine", function()
    it("warms up, falls and stays", function()
        local lr = te.optim.cosine { max = 1, min = 0.1, warmup = 10, steps = 110 }
        assert.is_true(lr(1) > 0 and lr(1) < lr(10) and lr(10) < 1)
        assert.near(10 / 11, lr(10), 1e-12)
        assert.equal(1, lr(11))
        assert.is_true(lr(10.999) < 1 and lr(12) < 1)
        assert.near(0.55, lr(60.5), 1e-9)
        assert.equal(0.1, lr(110))
        assert.equal(0.1, lr(1000))
        local short = te.optim.cosine { max = 1, warmup = 3, steps = 10 }
        for step, rate in ipairs { 0.25, 0.5, 0.75, 1, 0.933012701892, 0.75, 0.5, 0.25, 0.066987298108, 0, 0 } do
            assert.near(rate, short(step), 1e-9)
        end
        local two = te.optim.cosine { max = 1, min = 0.5, steps = 2 }
        assert.same({ 1, 0.5 }, { two(1), two(2) })
        for _, steps in ipairs { 3, 4 } do
            assert.error_matches(function() te.optim.cosine { max = 1, warmup = 4, steps = steps } end,
                ("te.optim.cosine: option warmup: expected fewer than the %d steps, got 4"):format(steps), 1, true)
        end
        assert.error_matches(function() te.optim.cosine { max = 1 } end, "max and steps are needed")
        for _, step in ipairs { -5, 0, "x" } do
            assert.error_matches(function() lr(step) end, "te.optim.cosine: step: expected number, at least 1, got ")
        end
        assert.error_matches(function() lr() end, "te.optim.cosine: step: expected number, at least 1, got nil")
    end)

    it("change all groups or none", function()
        local core = te._core
        for name, states in pairs { adamw_step = { "exp_avg", "exp_avg_sq" }, sgd_step = { "momentum_buffers" } } do
            local function group(wrong)
                local g = { params = { te.ones { 3 } }, grads = { te.ones { wrong and 2 or 3 } }, lr = 1 }
                for _, key in ipairs(states) do g[key] = { te.zeros { 3 } } end
                if name == "sgd_step" then g.momentum = 0.5 end
                return g
            end
            local first, second = group(false), group(true)
            assert.error_matches(function() core[name] { first, second } end, "parameter 1 is {3}", 1, true)
            assert.same({ 1, 1, 1 }, first.params[1]:totable())
            assert.same({ 0, 0, 0 }, first[states[1]][1]:totable())
            core[name] { first }
            assert.is_true(first.params[1][1]:item() < 1)
        end
    end)

    it("takes groups with momentum and without in one step", function()
        local a, b = te.ones({ 2 }, { requires_grad = true }), te.ones({ 2 }, { requires_grad = true })
        local opt = te.optim.SGD({ { params = { a }, momentum = 0.5 }, { params = { b } } }, { lr = 0.25 })
        for _ = 1, 2 do
            a.grad, b.grad = te.ones { 2 }, te.ones { 2 }
            opt:step()
        end
        assert.same({ 1 - 0.25 - 0.375, 1 - 0.25 - 0.375 }, a:totable())
        assert.same({ 0.5, 0.5 }, b:totable())
    end)
end)
