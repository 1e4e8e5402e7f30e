local te = require "te"

local function parameter(values, dtype)
    return te.tensor(values, { dtype = dtype or "float32", requires_grad = true })
end

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

    it("takes a loss of one element", function()
        local p = parameter { 0 }
        p.grad = te.ones { 1 }
        assert.error_matches(function() te.optim.grad_clip({ p }, { loss = te.ones { 2 } }) end,
            "te.optim.grad_clip: loss: expected one element on the gradients' device ", 1, true)
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

    it("leaves steps that are not made out of the counts of their parameters alone", function()
        local a, b, c = parameter { 0 }, parameter { 0 }, parameter { 0 }
        local optimizer = te.optim.AdamW({ a, b }, { lr = 1, weight_decay = 0 })
        local function step(gradients, clipped)
            for p, g in pairs(gradients) do p.grad = te.tensor { g } end
            optimizer:step(clipped and { clip = te.optim.grad_clip { a, b, c } } or nil)
            optimizer:zero_grad()
        end
        for _ = 1, 5 do step({ [a] = 1, [b] = 1 }, true) end
        for _ = 1, 3 do step({ [a] = 0 / 0 }, true) end -- b is idle
        assert.same({ 5, 5 }, optimizer:step_counts())
        step({ [a] = 1, [b] = 1 }, true)
        assert.same({ 6, 6 }, optimizer:step_counts())
        for _ = 1, 3 do step({ [a] = 0 / 0 }, true) end
        step { [b] = 1 }
        assert.same({ 6, 7 }, optimizer:step_counts())
        assert.near(-6, a:item(), 1e-5) -- a gradient of 1 moves by the rate, whatever the step
        assert.near(-7, b:item(), 1e-5)

        for _ = 1, 3 do step({ [a] = 0 / 0, [b] = 0 }, true) end
        optimizer:add_group { params = { c } }
        step({ [a] = 1, [b] = 1, [c] = 1 }, true) -- c for the first time
        assert.same({ 7, 8, 1 }, optimizer:step_counts())
        assert.near(-1, c:item(), 1e-5)
        step({ [a] = 0 / 0 }, true)
        optimizer:take_back()
        step { [a] = 1 }
        assert.same({ 8, 8, 1 }, optimizer:step_counts())
        step({ [a] = 0 / 0 }, true)
        optimizer:load_state_dict(optimizer:state_dict())
        optimizer:take_back() -- what was loaded counts no such step
        assert.same({ 8, 8, 1 }, optimizer:step_counts())
    end)

    it("leaves steps that are not made out of the counts, however many follow each other", function()
        local function new()
            local p = parameter { 0, 0 }
            return p, te.optim.AdamW({ p }, { lr = 1, weight_decay = 0.5 })
        end
        local function step(p, optimizer, gradient, clipped)
            p.grad = te.tensor { gradient, 2 * gradient }
            if clipped then
                optimizer:step { clip = te.optim.grad_clip { p } }
            else
                optimizer:step()
            end
        end
        local gradients = { 1, 0.5, -3 }
        for skipped = 0, 5 do
            local p, optimizer = new()
            local q, other = new()
            for i, gradient in ipairs(gradients) do
                for _ = 1, skipped do step(p, optimizer, i % 2 == 0 and math.huge or 0 / 0, true) end
                assert.same(other:step_counts(), optimizer:step_counts())
                step(p, optimizer, gradient, i < 3) -- the host counts the last one
                step(q, other, gradient)
                for k, value in ipairs(q:totable()) do assert.near(value, p:totable()[k], 1e-6) end
                local saved = optimizer:state_dict()
                assert.equal(i, saved.state[1].step)
                local r, loaded = new()
                te.no_grad(r.copy_, r, p)
                loaded:load_state_dict(saved)
                assert.same({ i }, loaded:step_counts())
            end
        end
    end)
end)

describe("te.optim.clip_grad_value", function()
    it("limits every element, also where gradients gather in main_grad", function()
        local layer, other = te.Linear(2, 1), te.ones({ 3 }, { requires_grad = true })
        layer.weight.grad, layer.bias.main_grad = te.tensor { { -3, 0.5 } }, te.tensor { 7 }
        te.optim.clip_grad_value({ layer.weight, layer.bias, other }, 2)
        assert.same({ { -2, 0.5 } }, layer.weight.grad:totable())
        assert.same({ 2 }, layer.bias.main_grad:totable())
        assert.is_nil(other.grad)
        te.optim.clip_grad_value(layer, 1)
        assert.same({ 1 }, layer.bias.main_grad:totable())
    end)

    it("refuses limits that are none", function()
        for _, limit in ipairs { 0, -1, "1" } do
            assert.error_matches(function() te.optim.clip_grad_value({}, limit) end,
                "te.optim.clip_grad_value: limit: expected a number above 0, got ", 1, true)
        end
    end)
end)
