--- Hooks of tensors (te.hooks, src/core/autograd_hook.c).

local te = require "te"

local function close(a, b) assert.is_true(((a - b) / b):abs():max():item() < 1e-6) end

describe("tensor:register_hook", function()
    local p, seen

    before_each(function()
        p, seen = te.tensor({ 1, 2, 3 }, { requires_grad = true }), {}
    end)

    local function note(grad) seen[#seen + 1] = grad:totable() end

    it("shows the gradient of a result once all of it has arrived", function()
        local y = p * 2
        y:register_hook(note)
        te.backward(y:sum() + (y * y):sum())
        assert.same({ { 5, 9, 13 } }, seen)
    end)

    it("shows what a pass adds to a leaf, not what was there", function()
        p:register_hook(note)
        for _ = 1, 2 do ((p * 3):sum() + p:sum()):backward() end
        assert.same({ { 4, 4, 4 }, { 4, 4, 4 } }, seen)
        assert.same({ 8, 8, 8 }, p.grad:totable())
    end)

    it("puts what fn returns in the gradient's place, one hook after the other", function()
        local y = p:exp()
        y:register_hook(function(grad) return grad * 2 end)
        y:register_hook(note)
        p:register_hook(function(grad) return grad:clamp(0, 10) end)
        y:sum():backward()
        assert.same({ { 2, 2, 2 } }, seen)
        close(p.grad, te.tensor { 2 * math.exp(1), 10, 10 })
    end)

    it("adds to main_grad and takes part in te.grad", function()
        p:register_hook(function(grad) return grad * 2 end)
        p.main_grad = te.ones { 3 }
        p:sum():backward()
        assert.same({ 3, 3, 3 }, p.main_grad:totable())
        assert.same({ 2, 2, 2 }, te.grad(p:sum(), p):totable())
        local y = p * 1
        y:register_hook(function(grad) return grad * 5 end)
        assert.same({ 5, 5, 5 }, te.grad(y:sum(), y):totable())
    end)

    it("works through te.checkpoint, for tensors in it and parameters that it reads", function()
        p:register_hook(note)
        local y = te.checkpoint(function(x)
            local inner = x * p
            if inner.requires_grad then inner:register_hook(function(grad) return grad * 10 end) end
            return inner
        end, te.ones({ 3 }, { requires_grad = true }))
        te.backward(y:sum() + p:sum())
        assert.same({ { 11, 11, 11 } }, seen)
    end)

    it("keeps the gradients of 16 bits in their dtype, and hooks where a parameter is moved", function()
        local layer = te.Linear(4, 4)
        layer.weight:register_hook(function(grad) seen[1] = grad.dtype end)
        layer:to "bfloat16"
        layer(te.ones({ 2, 4 }, { dtype = "bfloat16" })):sum():backward()
        assert.equal("bfloat16", seen[1])
        assert.equal("bfloat16", layer.weight.grad.dtype)
    end)

    it("sees what is added to main_grad in its dtype, and changes none of it by looking", function()
        local w = te.ones({ 1 }, { dtype = "bfloat16", requires_grad = true })
        local small = te.full({ 1 }, 2 ^ -9, { dtype = "bfloat16" })
        for i = 1, 2 do
            w.main_grad = te.zeros { 1 }
            te.backward(te.sum(w * 1) + te.sum(w * small))
            assert.equal(1 + 2 ^ -9, w.main_grad:item())
            if i == 1 then w:register_hook(function(grad) seen[1] = { grad.dtype, grad:item() } end) end
        end
        assert.same({ { "float32", 1 + 2 ^ -9 } }, seen)
    end)

    it("ends with remove, also inside of fn", function()
        local hook
        hook = p:register_hook(function(grad)
            note(grad)
            hook:remove()
        end)
        for _ = 1, 2 do p:sum():backward() end
        assert.equal(1, #seen)
        assert.same({ 2, 2, 2 }, p.grad:totable())
        hook:remove()
    end)

    it("may run passes of its own, over the same leaf, and add hooks", function()
        p:register_hook(function()
            te.enable_grad(function() seen[#seen + 1] = te.grad((p * 7):sum(), p):totable() end)
            if #seen == 1 then p:register_hook(note) end
        end)
        p:sum():backward()
        p:sum():backward()
        assert.same({ { 7, 7, 7 }, { 7, 7, 7 }, { 1, 1, 1 } }, seen)
        local q = te.ones({ 2 }, { requires_grad = true })
        q:register_hook(function() te.enable_grad(function() te.sum(q * 2):backward() end) end)
        q:sum():backward()
        assert.same({ 3, 3 }, q.grad:totable())
    end)

    it("keeps passes of its own apart from the one around it, where both come to the same nodes", function()
        local a = p * 2
        local b = a * 3
        local z = b:sum()
        local c = a * 5
        c:register_hook(function() seen[1] = te.grad(z, p, { retain_graph = true }):totable() end)
        te.backward(c:sum() + z)
        assert.same({ { 6, 6, 6 } }, seen)
        assert.same({ 16, 16, 16 }, p.grad:totable())
        local y = p:exp()
        local square = (y * y):sum()
        y:register_hook(function() close(te.grad(square, p, { retain_graph = true }), te.exp(p * 2) * 2) end)
        p.grad = nil
        y:sum():backward()
        close(p.grad, p:exp())
    end)

    it("says that passes of its own have used up what the one around it needs", function()
        local y = p:exp()
        local z = y:sum()
        y:register_hook(function() if #seen == 0 then seen[1] = te.grad(z, p):totable() end end)
        assert.error_matches(function() z:backward { retain_graph = true } end,
            "te.exp: backward: this part of the graph was used before")
        close(te.tensor(seen[1]), p:exp())
        assert.is_nil(p.grad)
    end)

    it("stays on a leaf when fn, called by te.grad, runs backward over the leaf", function()
        p:register_hook(function()
            note(p)
            te.enable_grad(function() te.sum(p * 2):backward() end)
        end)
        for i = 1, 3 do
            assert.same({ 3, 3, 3 }, te.grad((p * 3):sum(), p):totable())
            assert.equal(i, #seen)
            assert.same({ 2 * i, 2 * i, 2 * i }, p.grad:totable())
        end
    end)

    it("lets fn release what it got, but not what it returns", function()
        local function doubled(grad)
            local new = grad * 2
            grad:release()
            return new
        end
        p:register_hook(doubled)
        p:sum():backward()
        assert.same({ 2, 2, 2 }, p.grad:totable())
        local y = p * 2
        y:register_hook(function(grad)
            grad:release()
            return grad
        end)
        assert.error_matches(function() y:sum():backward() end,
            "te.register_hook: fn returned a tensor that was released")
    end)

    it("takes many, one after the other, and those that hooks add come last", function()
        local start = os.clock()
        for _ = 1, 100000 do p:register_hook(note):remove() end
        assert.is_true(os.clock() - start < 3)
        for i = 1, 3 do
            p:register_hook(function()
                seen[#seen + 1] = i
                if #seen <= 3 then p:register_hook(function() seen[#seen + 1] = i * 10 end) end
            end)
        end
        for _ = 1, 2 do p:sum():backward() end
        assert.same({ 1, 2, 3, 1, 2, 3, 10, 20, 30 }, seen)
    end)

    it("leaves no gradient behind after an error, and works the next time", function()
        local bad = p:register_hook(function() error("mine", 0) end)
        local ok, message = pcall(function() p:sum():backward() end)
        assert.is_false(ok)
        assert.equal("mine", message)
        assert.is_nil(p.grad)
        bad:remove()
        p:sum():backward()
        assert.same({ 1, 1, 1 }, p.grad:totable())
    end)

    it("keeps nothing alive once backward has gone through", function()
        collectgarbage()
        collectgarbage()
        local before = te.memory_stats().current
        for _ = 1, 50 do
            local y = te.ones({ 1000 }, { requires_grad = true }) * 2
            y:register_hook(function() return y:detach() end)
            y:sum():backward()
        end
        collectgarbage()
        collectgarbage()
        -- of 50 rounds, and not more than what the stack may still hold of one
        assert.is_true(te.memory_stats().current <= before + 20000)
    end)

    it("says what is wrong", function()
        assert.error_matches(function() te.ones(2):register_hook(note) end,
            "te.register_hook: the tensor requires no gradient$")
        assert.error_matches(function() p:register_hook(3) end, "te.register_hook: fn: expected callable, got 3")
        local y = p * 2
        y:register_hook(function() return te.ones(2) end)
        assert.error_matches(function() y:sum():backward() end,
            "fn returned a float32 tensor {2} on %S+ for a gradient of float32 {3} on")
        local z = p * 2
        z:sum():backward()
        assert.error_matches(function() z:register_hook(note) end, "backward has gone through this tensor already")
        local w = p * 2
        w:register_hook(function() return 1 end)
        assert.error_matches(function() w:sum():backward() end, "fn returned number")
    end)
end)
