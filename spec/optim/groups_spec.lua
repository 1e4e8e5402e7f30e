--- Groups of parameters and their options.

local te = require "te"

local function parameter(values, dtype)
    return te.tensor(values, { dtype = dtype or "float32", requires_grad = true })
end

describe("te.optim.AdamW", function()
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

describe("an optimizer's parameters", function()
    for _, class in ipairs { te.optim.AdamW, te.optim.SGD } do
        it("may be more from some step on: " .. class.name, function()
            local a, b, c = parameter { 1 }, parameter { 1 }, parameter { 1 }
            local optimizer = class({ a }, { lr = 1, weight_decay = 0.5 })
            local function step()
                for _, p in ipairs { a, b, c } do p.grad = te.ones { 1 } end
                optimizer:step()
            end
            step()
            optimizer.lr = 0.25
            optimizer:add_group { params = { b } }
            optimizer:add_group { params = { c }, lr = 2, weight_decay = 0 }
            assert.same({ 0.25, 0.5 }, { optimizer.groups[2].lr, optimizer.groups[2].weight_decay })
            assert.same({ 2, 0 }, { optimizer.groups[3].lr, optimizer.groups[3].weight_decay })
            step()
            local alone = class({ { params = { parameter { 1 } } }, { params = { parameter { 1 } }, lr = 2,
                weight_decay = 0 } }, { lr = 0.25, weight_decay = 0.5 })
            for _, p in ipairs(alone.order) do p.grad = te.ones { 1 } end
            alone:step()
            assert.same({ alone.order[1]:item(), alone.order[2]:item() }, { b:item(), c:item() })
            assert.same({ 2, 1, 1 }, optimizer:step_counts())
            optimizer:zero_grad()
            assert.is_nil(c.grad)

            local who = ("te.optim.%s:add_group: "):format(class.name)
            for message, group in pairs {
                ["parameter 2 of a group came before"] = { params = { parameter { 1 }, b } },
                ["group: expected a table { params = … }, got a tensor {1}"] = b,
                ['unknown option "wd"'] = { params = { parameter { 1 } }, wd = 1 },
                ["option lr: expected number, at least 0, got -1"] = { params = { parameter { 1 } }, lr = -1 },
            } do
                assert.error_matches(function() optimizer:add_group(group) end, who .. message, 1, true)
            end
            assert.same({ 3, 3 }, { #optimizer.groups, #optimizer.order })

            table.insert(optimizer.groups[1].params, parameter { 1 }) -- as a script may
            assert.same({ 2, 0, 1, 1 }, optimizer:step_counts())
            assert.equal(optimizer.groups[1].params[2], optimizer.order[2])
            optimizer.groups[1].params[2] = parameter { 3 } -- and another in its place
            assert.same({ 2, 0, 1, 1 }, optimizer:step_counts())
            assert.equal(optimizer.groups[1].params[2], optimizer.order[2])
            optimizer.groups[1].params[2] = a
            assert.error_matches(function() optimizer:step() end, "group 1: parameter 2 of a group came before", 1,
                true)
        end)
    end

    it("have no options of other optimizers", function()
        local optimizer = te.optim.AdamW({ parameter { 1 } }, {})
        for _, name in ipairs { "learning_rate", "momentum", "amsgrad" } do
            assert.error_matches(function() optimizer[name] = 1 end, "te.optim.AdamW: no option " .. name, 1, true)
        end
        optimizer.note = "mine"
        assert.equal("mine", optimizer.note)
    end)
end)

describe("the engine's steps", function()
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
end)
