--- What optimizers keep of parameters: saved and loaded.

local te = require "te"

local function parameter(values, dtype)
    return te.tensor(values, { dtype = dtype or "float32", requires_grad = true })
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
end)
