--- Gradients as memory: main_grad, and a gradient that is assigned.

local te = require "te"

local function leaf(values) return te.tensor(values, { dtype = "float64", requires_grad = true }) end

describe("main_grad", function()
    before_each(function() te.manual_seed(3) end)

    local ids = te.randint(0, 10, { 2, 20 }, { dtype = "int32" })
    local models = {
        products = { function() return te.Sequential(te.Linear(32, 48), te.GELU(), te.Linear(48, 16)) end },
        norms = { function() return te.Sequential(te.LayerNorm(32), te.Linear(32, 48), te.RMSNorm(48)) end },
        attention = { function()
            return te.Sequential(te.Residual(te.RMSNorm(32), te.MultiHeadedSelfAttention(32, 4)))
        end },
        embedding = { function() return te.Sequential(te.Embedding(11, 32), te.Linear(32, 8)) end, ids },
    }
    for name, model in pairs(models) do
        for dtype, bound in pairs { float32 = 1e-6, bfloat16 = 4e-3, float16 = 1e-3 } do
            it(("takes the gradients of %s in %s, fused or not"):format(name, dtype), function()
                local plain, own = model[1](), model[1]()
                own:load_state_dict(plain:state_dict())
                plain:to(dtype)
                own:to(dtype)
                local x, main = model[2] or te.randn({ 2, 20, 32 }, { dtype = dtype }), {}
                for key, p in own:named_parameters() do
                    main[key] = te.ones(p.shape)
                    p.main_grad = main[key]
                end
                for _, fused in ipairs { true, false } do
                    te.set_fusion(fused)
                    plain(x):sum():backward()
                    own(x):sum():backward()
                end
                te.set_fusion(true)
                local kept = {}
                for key, p in own:named_parameters() do
                    assert.is_nil(p.grad)
                    kept[key] = p.main_grad
                end
                for key, p in plain:named_parameters() do
                    local grad = p.grad:to "float32"
                    local off = (main[key] - 1 - grad):abs():max():item()
                    assert.is_true(off <= bound * grad:abs():max():item(), key .. " " .. off)
                    assert.same(main[key]:totable(), kept[key]:totable())
                end
            end)
        end
    end

    it("adds what 16 bits would lose", function()
        local p = te.zeros({ 1 }, { dtype = "bfloat16", requires_grad = true })
        p.main_grad = te.zeros { 1 }
        for _ = 1, 1000 do (p * 1):sum():backward() end
        assert.equal(1000, p.main_grad:item())
        p:backward(te.ones({ 1 }, { dtype = "bfloat16" })) -- the leaf itself
        assert.equal(1001, p.main_grad:item())
        assert.equal(1, te.grad((p * 1):sum(), p):item()) -- asked for, not added
        assert.equal(1001, p.main_grad:item())
        p.main_grad = nil
        p:sum():backward()
        assert.equal(1, p.grad:item())
    end)

    it("stays with a parameter that becomes another dtype", function()
        local m, buffer = te.Linear(2, 2, { bias = false }), te.zeros { 4 }
        m.weight.main_grad = buffer:view { 2, 2 }
        m:to "bfloat16"
        m(te.ones({ 1, 2 }, { dtype = "bfloat16" })):sum():backward()
        assert.is_nil(m.weight.grad)
        assert.same({ 1, 1, 1, 1 }, buffer:totable())
        m.weight.main_grad = te.ones({ 2, 2 }, { dtype = "bfloat16" })
        m:to "float16"
        assert.equal("float16", m.weight.main_grad.dtype)
        assert.equal(4, m.weight.main_grad:sum():item())
    end)

    it("is memory that others may see, and nothing else", function()
        local buffer = te.zeros { 10 }
        local p = te.ones({ 2, 2 }, { requires_grad = true })
        p.main_grad = buffer:narrow(1, 3, 4):view { 2, 2 }
        te.sum(p * 3):backward()
        assert.same({ 0, 0, 3, 3, 3, 3, 0, 0, 0, 0 }, buffer:totable())
        local function refused(message, grad, of)
            assert.error_matches(function() (of or p).main_grad = grad end, message, 1, true)
        end
        refused(("t.main_grad = value: {4} of float32 on %s for a tensor {2,2} of"):format(p.device), te.zeros { 4 })
        refused("its dtype or float32 is needed", te.zeros({ 2, 2 }, { dtype = "bfloat16" }))
        refused("t.main_grad = value: elements share memory", te.zeros({ 1, 2 }):expand { 2, 2 })
        refused("t.main_grad = value: contiguous memory", te.zeros({ 2, 2 }):transpose(1, 2))
        refused("of a leaf", te.zeros { 2, 2 }, p * 2)
        refused("t.main_grad = value: expected a tensor", 3)
    end)
end)

describe("a gradient that is assigned", function()
    for _, field in ipairs { "grad", "main_grad" } do
        it("is a view of what it was made of: " .. field, function()
            local p, g = te.ones({ 2, 2 }, { requires_grad = true }), te.ones { 2, 2 }
            p[field] = g
            g:mul_(3)
            assert.same({ { 3, 3 }, { 3, 3 } }, p[field]:totable())
            te.sum(p * 2):backward()
            assert.same({ { 5, 5 }, { 5, 5 } }, g:totable())
            te.no_grad(function() p[field]:zero_() end)
            assert.same({ { 0, 0 }, { 0, 0 } }, g:totable())
            p[field] = p[field]
            assert.same({ { 0, 0 }, { 0, 0 } }, p[field]:totable())
            p[field] = nil
            assert.is_nil(p[field])
        end)

        it("holds nobody in a circle: " .. field, function()
            local function count()
                for _ = 1, 3 do collectgarbage() end
                return te.memory_stats(te.zeros({ 0 }).device).current
            end
            local before = count()
            for _ = 1, 100 do
                local a, b, c = te.zeros { 1000 }, te.zeros { 1000 }, te.zeros { 1000 }
                a[field], b[field], c[field] = b, c, a
                a[field][field], b[field][field] = a, a[field]
            end
            assert.equal(before, count())
        end)

        it("may have one in its turn, and so on: " .. field, function()
            local first = te.zeros { 1 }
            local last, g = first, te.zeros { 1 }
            for _ = 1, 300000 do
                last[field] = g
                last = last[field]
            end
            last = nil
            collectgarbage() -- the handles in between
            collectgarbage()
            assert.is_truthy(first[field][field][field])
            first = nil
            collectgarbage()
            collectgarbage()
        end)
    end

    it("stands outside the graph", function()
        local p, g = te.ones({ 2 }, { requires_grad = true }), te.ones({ 2 }, { requires_grad = true })
        p.grad = g
        assert.is_false(p.grad.requires_grad)
        assert.is_true(g.requires_grad)
        p.grad = g * 2
        assert.is_true(p.grad.is_leaf)
    end)
end)
