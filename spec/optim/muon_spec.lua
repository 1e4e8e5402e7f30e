--- te.optim.Muon against loops over numbers, and against te.optim.AdamW for what it does not update itself.

local bits = require "spec.support.bits"
local product = require("spec.support.reference").matmul
local te = require "te"

local COEFFICIENTS = { 3.4445, -4.775, 2.0315 }

local function turned(a)
    local t = {}
    for j = 1, #a[1] do
        t[j] = {}
        for i = 1, #a do t[j][i] = a[i][j] end
    end
    return t
end

local function each(a, b, fn)
    local c = {}
    for i = 1, #a do
        c[i] = {}
        for j = 1, #a[i] do c[i][j] = fn(a[i][j], b[i][j]) end
    end
    return c
end

local function orthogonal(u, steps, coefficients)
    if #u > #u[1] then return turned(orthogonal(turned(u), steps, coefficients)) end
    local a, b, c = unpack(coefficients or COEFFICIENTS)
    local squares = 0
    for _, row in ipairs(u) do
        for _, x in ipairs(row) do squares = squares + x * x end
    end
    local norm = math.max(math.sqrt(squares), 1e-7)
    local x = each(u, u, function(value) return value / norm end)
    for _ = 1, steps do
        local square = product(x, turned(x))
        local polynomial = each(square, product(square, square), function(s, ss) return b * s + c * ss end)
        x = each(x, product(polynomial, x), function(value, more) return a * value + more end)
    end
    return x
end

-- The parameter after steps with these gradients, all tables of rows.
local function expected(w, gradients, o)
    local m = each(w, w, function() return 0 end)
    local factor = o.adjust_lr_fn == "match_rms_adamw" and 0.2 * math.sqrt(math.max(#w, #w[1]))
        or math.sqrt(math.max(1, #w / #w[1]))
    for _, g in ipairs(gradients) do
        m = each(m, g, function(before, x) return o.momentum * before + (1 - o.momentum) * x end)
        local u = o.nesterov and each(m, g, function(mean, x) return o.momentum * mean + (1 - o.momentum) * x end) or m
        w = each(w, orthogonal(u, o.ns_steps or 5, o.ns_coefficients), function(weight, update)
            return weight - o.lr * (factor * update + o.weight_decay * weight)
        end)
    end
    return w
end

local function parameter(shape, dtype)
    local p = te.randn(shape):to(dtype or "float32")
    p.requires_grad = true
    return p
end

local function largest_difference(a, b)
    local largest = 0
    each(a, b, function(x, y) largest = math.max(largest, math.abs(x - y)) end)
    return largest
end

local function steps(optimizer, params, gradients, opts)
    for _, list in ipairs(gradients) do
        for i, p in ipairs(params) do p.grad = list[i]:clone() end
        optimizer:step(opts)
    end
end

local function random_gradients(params, count)
    local gradients = {}
    for t = 1, count do
        gradients[t] = {}
        for i, p in ipairs(params) do gradients[t][i] = te.randn(p.shape):mul_(10 ^ (t - 2)) end
    end
    return gradients
end

describe("te.optim.Muon", function()
    before_each(function() te.manual_seed(31) end)

    it("follows the formula, for matrices of any shape together", function()
        for _, o in ipairs {
            { lr = 0.02, momentum = 0.95, nesterov = true, weight_decay = 0.1 },
            { lr = 0.1, momentum = 0.5, nesterov = false, weight_decay = 0, adjust_lr_fn = "match_rms_adamw" },
            { lr = 0.05, momentum = 0, nesterov = true, weight_decay = 2, ns_steps = 2,
                ns_coefficients = { 2, -1.5, 0.5 } },
        } do
            local params = {}
            for i, shape in ipairs { { 8, 5 }, { 5, 8 }, { 8, 5 }, { 6, 6 }, { 1, 7 }, { 3, 1 }, { 1, 1 } } do
                params[i] = parameter(shape)
            end
            local before, gradients = {}, random_gradients(params, 3)
            for i, p in ipairs(params) do before[i] = p:totable() end
            for _, case in ipairs { { "float32", 2e-6 }, { "bfloat16", 0.005 } } do
                o.ns_dtype = case[1]
                for i, p in ipairs(params) do te.no_grad(p.copy_, p, te.tensor(before[i])) end
                steps(te.optim.Muon(params, o), params, gradients, { grad_scale = 0.5 })
                for i, p in ipairs(params) do
                    local halves = {}
                    for t = 1, 3 do halves[t] = (gradients[t][i] * 0.5):totable() end
                    local wanted = expected(before[i], halves, o)
                    assert.is_true(largest_difference(p:totable(), wanted) < case[2])
                end
            end
        end
    end)

    it("makes updates whose singular values are about 1, however far apart those of the gradient are", function()
        local n, m = 24, 40
        local p = parameter { n, m }
        local before, g = p:detach():clone(), te.zeros { n, m }
        for i = 1, n do g = g + te.matmul(te.randn { n, 1 }, te.randn { 1, m }) * 10 ^ (-i / 16) end
        p.grad = g
        te.optim.Muon({ p }, { lr = 1, weight_decay = 0 }):step()
        local u = before - p:detach()
        local x, square = te.randn { n, 1 }, te.matmul(u, u:transpose(1, 2))
        for _ = 1, 200 do x = te.matmul(square, x); x = x / te.norm(x) end
        local most = te.norm(te.matmul(square, x)):item() -- the square of the largest
        assert.is_true(most > 0.5 and most < 1.6, most)
        local rest = te.sum(te.square(u)):item() / n      -- the mean of the squares
        assert.is_true(rest > 0.5 and rest < 1.5, rest)
    end)

    it("takes each matrix of a tensor of more dimensions by itself", function()
        local whole, parts = parameter { 2, 3, 6, 4 }, {}
        for i = 1, 6 do
            parts[i] = whole:detach():view({ 6, 6, 4 })[i]:clone()
            parts[i].requires_grad = true
        end
        local g = te.randn(whole.shape)
        whole.grad = g
        te.optim.Muon({ whole }, { ns_dtype = "float32" }):step()
        for i, p in ipairs(parts) do p.grad = g:view({ 6, 6, 4 })[i]:clone() end
        te.optim.Muon(parts, { ns_dtype = "float32" }):step()
        for i, p in ipairs(parts) do bits.assert_equal(p:detach(), whole:detach():view({ 6, 6, 4 })[i]:clone()) end
    end)

    it("has AdamW update groups without it, with the same bits", function()
        local a, b, w = parameter { 7 }, parameter { 9, 4 }, parameter { 4, 4 }
        local a2, b2 = a:detach():clone(), b:detach():clone()
        a2.requires_grad, b2.requires_grad = true, true
        local muon = te.optim.Muon({ { params = { w } }, { params = { a, b }, use_muon = false, weight_decay = 0.2 } },
            { lr = 0.01, betas = { 0.8, 0.9 }, eps = 1e-6 })
        local adamw = te.optim.AdamW({ a2, b2 }, { lr = 0.01, betas = { 0.8, 0.9 }, eps = 1e-6, weight_decay = 0.2 })
        local gradients, others = random_gradients({ a, b, w }, 4), {}
        for t, list in ipairs(gradients) do others[t] = { list[1], list[2] } end
        steps(muon, { a, b, w }, gradients)
        steps(adamw, { a2, b2 }, others)
        bits.assert_equal(a2:detach(), a:detach())
        bits.assert_equal(b2:detach(), b:detach())
        assert.same({ 4, 4, 4 }, muon:step_counts())
    end)

    it("keeps copies of parameters in 16 bits", function()
        local wide = parameter { 16, 8 }
        local narrow = wide:detach():to "bfloat16"
        te.no_grad(wide.copy_, wide, narrow:to "float32")
        narrow.requires_grad = true
        local gradients = random_gradients({ wide }, 3)
        steps(te.optim.Muon({ wide }), { wide }, gradients)
        for _, list in ipairs(gradients) do list[1] = list[1]:to "float32" end
        local optimizer = te.optim.Muon({ narrow }, { master_weights = true })
        for _, list in ipairs(gradients) do
            narrow.grad = list[1]:to "bfloat16"
            optimizer:step()
        end
        local difference = te.max(te.abs(wide:detach() - narrow:detach():to "float32")):item()
        assert.is_true(difference > 0 and difference < 0.02)
        assert.equal("float32", optimizer.state[narrow].master.dtype)
    end)

    it("goes on from a state with the same bits", function()
        local function made()
            te.manual_seed(8)
            local params = { parameter { 12, 5 }, parameter { 5 }, parameter { 3, 5 } }
            return params, te.optim.Muon({ { params = { params[1], params[3] } },
                { params = { params[2] }, use_muon = false } }, { lr = 0.03 })
        end
        local params, optimizer = made()
        local gradients = random_gradients(params, 5)
        steps(optimizer, params, gradients)
        local others, again = made()
        steps(again, others, { gradients[1], gradients[2] })
        local saved, before, third = again:state_dict(), others, nil
        others, third = made()
        for i, p in ipairs(others) do te.no_grad(p.copy_, p, before[i]:detach()) end
        third:load_state_dict(saved)
        steps(third, others, { gradients[3], gradients[4], gradients[5] })
        for i, p in ipairs(params) do bits.assert_equal(p:detach(), others[i]:detach()) end
        saved.state[1].momentum_buffer = nil
        assert.error_matches(function() third:load_state_dict(saved) end, "parameter 1: momentum_buffer is missing")
    end)

    it("leaves parameters without gradient alone, and takes gradients of zeros", function()
        local a, b = parameter { 4, 4 }, parameter { 4, 4 }
        local before = b:detach():clone()
        a.grad = te.zeros { 4, 4 }
        local optimizer = te.optim.Muon({ a, b }, { lr = 0.5, weight_decay = 0.5 })
        local kept = a:detach() * 0.75
        optimizer:step()
        bits.assert_equal(before, b:detach())
        bits.assert_equal(kept, a:detach())
        assert.same({ 1, 0 }, optimizer:step_counts())
    end)

    it("counts a group's steps anew where AdamW takes it over, with the bits of an optimizer that is new", function()
        local a, b = parameter { 3, 4 }, parameter { 3, 4 }
        local muon = te.optim.Muon({ a }, { lr = 0.01 })
        for _ = 1, 10 do steps(muon, { a }, random_gradients({ a }, 4)) end
        te.no_grad(b.copy_, b, a:detach())
        muon.use_muon = false
        local gradients = random_gradients({ a }, 3)
        steps(muon, { a }, gradients)
        steps(te.optim.Muon({ b }, { lr = 0.01, use_muon = false }), { b }, gradients)
        bits.assert_equal(b:detach(), a:detach())
        assert.same({ 3 }, muon:step_counts())
    end)

    it("takes matrices without numbers, beside others", function()
        for _, adjust in ipairs { "original", "match_rms_adamw" } do
            local empty = { parameter { 0, 4 }, parameter { 4, 0 }, parameter { 0, 0 }, parameter { 2, 0, 4 } }
            local a, b = parameter { 4, 4 }, parameter { 4, 4 }
            te.no_grad(b.copy_, b, a:detach())
            local params, gradients = { a, unpack(empty) }, {}
            for i, p in ipairs(params) do gradients[i] = te.ones(p.shape) end
            steps(te.optim.Muon(params, { adjust_lr_fn = adjust }), params, { gradients })
            steps(te.optim.Muon({ b }, { adjust_lr_fn = adjust }), { b }, { gradients })
            bits.assert_equal(b:detach(), a:detach())
        end
    end)

    it("trains a model of te.models, whose blocks' matrices are its own", function()
        local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 2, n_head = 2, n_embd = 16,
            bias = true }
        local groups = model:parameter_groups(0.1, "muon")
        assert.equal(8, #groups[1].params) -- qkv, projection, and two of the MLP
        assert.same({ nil, false, false }, { groups[1].use_muon, groups[2].use_muon, groups[3].use_muon })
        local optimizer, first, last = te.optim.Muon(groups, { lr = 0.01 }), nil, nil
        local ids = te.randint(0, 10, { 4, 9 }):to "int32"
        for _ = 1, 30 do
            local _, loss = model(ids:narrow(2, 1, 8), ids:narrow(2, 2, 8))
            loss:backward()
            optimizer:step()
            optimizer:zero_grad()
            last = loss:item()
            first = first or last
        end
        assert.is_true(last < 0.5 * first, last)
        assert.equal(2, #model:parameter_groups(0.1))
        assert.error_matches(function() model:parameter_groups(0.1, "sgd") end,
            'GPT:parameter_groups: optimizer: expected one of adamw, muon, got "sgd"')
    end)

    it("says what is wrong", function()
        local matrix = parameter { 2, 2 }
        for message, case in pairs {
            ["te.optim.Muon: parameter 2 of a group has shape {3}, which is no matrix; with use_muon = false AdamW"] =
                { { matrix, parameter { 3 } } },
            ['te.optim.Muon: option adjust_lr_fn: expected one of original, match_rms_adamw, got "rms"'] =
                { { matrix }, { adjust_lr_fn = "rms" } },
            ["te.optim.Muon: option ns_steps: expected integer from 1 to 100, got 0"] =
                { { matrix }, { ns_steps = 0 } },
            ["ns_coefficients[3]: expected a finite number, got nil"] = { { matrix }, { ns_coefficients = { 1, 2 } } },
            ["te.optim.Muon: option momentum: expected number from 0 to below 1, got 1"] =
                { { matrix }, { momentum = 1 } },
        } do
            local ok, problem = pcall(te.optim.Muon, unpack(case))
            assert.is_false(ok)
            assert.is_truthy(tostring(problem):find(message, 1, true), problem)
        end
        local optimizer = te.optim.Muon { matrix }
        table.insert(optimizer.groups[1].params, parameter { 5 })
        assert.error_matches(function() optimizer:step() end, "Muon: group 1: parameter 2 of a group has shape {5}")
        local vector = te.optim.Muon({ parameter { 5 } }, { use_muon = false })
        local saved = vector:state_dict()
        saved.groups[1].use_muon = true
        assert.error_matches(function() vector:load_state_dict(saved) end,
            "te.optim.Muon:load_state_dict: group 1: parameter 1 of a group has shape {5}, which is no matrix")
        assert.is_false(vector.use_muon)
        vector.use_muon = true
        assert.error_matches(function() vector:step() end,
            "te.optim.Muon:step: group 1: parameter 1 of a group has shape {5}, which is no matrix")
    end)
end)
