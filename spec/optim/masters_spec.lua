--- Copies of parameters in a larger dtype, and gradients in one.

local te = require "te"

local function parameter(values, dtype)
    return te.tensor(values, { dtype = dtype or "float32", requires_grad = true })
end

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
