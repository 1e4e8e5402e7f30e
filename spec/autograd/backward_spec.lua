--- Backward: what gets a gradient, what is refused, and what writes in place do to it.

local close = require("spec.support.reference").assert_close
local te = require "te"

local function leaf(values) return te.tensor(values, { dtype = "float64", requires_grad = true }) end

describe("backward", function()
    it("fills .grad and adds to what is there", function()
        local x = leaf { 1, 2, 3 }
        te.sum(x * x):backward()
        close({ 2, 4, 6 }, x.grad)
        te.sum(x):backward()
        close({ 3, 5, 7 }, x.grad)
        x.grad = nil
        assert.is_nil(x.grad)
    end)

    it("takes the gradient of a result that is no number", function()
        local x = leaf { 1, 2 }
        local y = x * 3
        assert.error_matches(function() y:backward() end, "te%.backward")
        y:backward(te.tensor({ 1, 10 }, { dtype = "float64" }))
        close({ 3, 30 }, x.grad)
        assert.error_matches(function() (x * 1):backward(te.ones(3)) end, "gradient")
    end)

    it("goes through branches and shared inputs", function()
        local x = leaf { 2 }
        local y = x * x
        te.sum(y * x + y):backward()
        close({ 3 * 4 + 2 * 2 }, x.grad)
    end)

    it("sums a sum's own gradient for what was broadcast over leading dimensions", function()
        for _, dtype in ipairs { "bfloat16", "float32", "float64" } do
            for _, shape in ipairs { { 7, 3, 5 }, { 2, 3, 1, 5 }, { 1, 4, 3, 5 } } do
                local x = te.zeros(shape, { dtype = dtype, requires_grad = true })
                local p = te.zeros(shape[3] == 1 and { 3, 1, 5 } or { 3, 5 }, { dtype = dtype, requires_grad = true })
                local dy = te.randint(-8, 8, shape, { dtype = "int32" }):to(dtype)
                local ran = {}
                for _, event in ipairs(te.profile(function() te.add(x, p):backward(dy) end).events) do
                    ran[event.name] = true
                end
                assert.is_nil(ran["add.backward"])
                local want = {}
                for i, v in ipairs(dy:reshape(-1):totable()) do
                    want[(i - 1) % 15 + 1] = (want[(i - 1) % 15 + 1] or 0) + v
                end
                close(want, p.grad:reshape(-1))
                close(dy:reshape(-1):totable(), x.grad:reshape(-1))
            end
        end
    end)

    it("refuses a second pass unless the graph is kept", function()
        local x = leaf { 2 }
        local y = te.sum(te.exp(x) * x)
        y:backward(nil, { retain_graph = true })
        y:backward()
        assert.error_matches(function() y:backward() end, "used before")
        assert.error_matches(function() y:backward({ retain = true }) end,
            'unknown option "retain"; did you mean "retain_graph"')
    end)

    it("has the digits of float64 where a step without them adds to it", function()
        local ones = te.ones { 3 }
        for _, step in ipairs { te.floor, te.ceil, te.round, te.trunc, te.sign,
            function(x) return te.sum(x * ones * 0) end } do
            local x = te.tensor(0.1, { dtype = "float64", requires_grad = true })
            te.sum(step(x) + x * x):backward()
            assert.equal(0.2, x.grad:item())
        end
    end)

    it("of a p-norm is 0 at zeros", function()
        local function of(values, p)
            local x = te.tensor(values, { dtype = "float64", requires_grad = true })
            return te.grad(te.norm(x, { p = p }), x)
        end
        for _, p in ipairs { 0.5, 1.5, 3 } do
            close({ 0, 0 }, of({ 0, 0 }, p))
            close({ 0, 1, 0 }, of({ 0, 2, 0 }, p))
            close({ -1 }, of({ -3 }, p))
        end
        close({ -9 / 35 ^ (2 / 3), 4 / 35 ^ (2 / 3) }, of({ -3, 2 }, 3))
    end)

    it("refuses what has no gradient", function()
        assert.error_matches(function() te.ones(1):backward() end, "does not depend")
    end)

    it("sees writes into what was saved", function()
        local x = leaf { 1, 2 }
        local w = te.tensor({ 3, 4 }, { dtype = "float64" })
        local y = te.sum(x * w)
        w:mul_(2)
        assert.error_matches(function() y:backward() end, "changed in place")
        assert.error_matches(function() x:mul_(2) end, "te%.no_grad")
    end)

    it("refuses writes in place that would lose a gradient", function()
        local x, t = leaf { 1, 2 }, te.zeros({ 2, 2 }, { dtype = "float64" })
        local y = x * 2
        local refused = {
            ["te%.copy_: source takes part in gradients.*source:detach"] = function() t:copy_(x) end,
            ["te%.copy: source takes part in gradients.*source:detach"] = function() te.copy(t, x) end,
            ["te%.add_: other takes part in gradients.*other:detach"] = function() t:add_(y) end,
            ["te%.copy_: x takes part in gradients.*te%.no_grad"] = function() y:copy_(t[1]) end,
            ["te%.fill_: x takes part in gradients.*te%.no_grad"] = function() y:fill_(1) end,
            ["te%.zero_: x takes part in gradients"] = function() x:narrow(1, 1, 1):zero_() end,
            ["te%.normal_: x takes part in gradients"] = function() te.normal_(y) end,
            ["t%[i%] = value: value takes part in gradients.*value:detach"] = function() t[1] = x end,
            ["t%[i%] = value: t takes part in gradients"] = function() y[1] = 3 end,
        }
        for message, write in pairs(refused) do
            assert.error_matches(write, message)
            te.no_grad(write)
        end
        t:copy_(x:detach())
        t[2] = y:detach()
        x:fill_(3) -- a leaf: what it was is in no graph
        assert.is_true(te.zeros({ 9 }, { dtype = "bfloat16", requires_grad = true }):uniform_().requires_grad)
        close({ 3, 3 }, x)
    end)

    it("survives long graphs", function()
        local x = leaf { 1 }
        local y = x
        for _ = 1, 20000 do y = y + 1 end
        te.sum(y):backward()
        close({ 1 }, x.grad)
    end)
end)

describe("a result that nothing came back for", function()
    local function two(v) return te.sigmoid(v), te.sqrt(v) end

    it("has no part in the gradient, not even where its own would be infinite", function()
        for _, dtype in ipairs { "float32", "float64" } do
            local x = te.tensor({ 0, 4 }, { dtype = dtype, requires_grad = true })
            local first = te.pointwise(two)(x)
            first:sum():backward()
            assert.equal(0.25, x.grad[1]:item())
            local expected = te.grad(te.sigmoid(x):sum(), { x })[1]
            assert.same(expected:totable(), x.grad:totable())
            local _, second = te.pointwise(two)(x)
            x.grad = nil
            second:sum():backward()
            assert.same({ math.huge, 0.25 }, x.grad:totable())
        end
    end)

    it("gives none to what it alone was made of, fused or not", function()
        for _, fused in ipairs { true, false } do
            local x = te.tensor({ { 0, 4 } }, { requires_grad = true })
            local before = te.set_fusion(fused)
            local root = te.Sequential(te.Pointwise(te.sigmoid), te.MakeExtraOutput(),
                te.Pointwise(function(v) return te.sqrt(v - 0.5) end), te.Linear(2, 2))
            local _, extra = root(x)
            te.set_fusion(before)
            extra:sum():backward()
            assert.equal(0.25, x.grad[1][1]:item())
            assert.is_nil(root[4].weight.grad)
        end
        local x = te.ones({ 3 }, { requires_grad = true })
        local w = te.ones({ 3 }, { requires_grad = true })
        local first = te.pointwise(function(a, b) return a * 2, b * 3 end)(x, w)
        first:sum():backward()
        assert.same({ 2, 2, 2 }, x.grad:totable())
        assert.is_nil(w.grad)
    end)
end)

describe("te.cast", function()
    it("says at which dtypes gradients end", function()
        local x = te.ones({ 2 }, { requires_grad = true })
        for _, dtype in ipairs { "bfloat16", "float16", "float64" } do assert.is_true(x:to(dtype).requires_grad) end
        for _, dtype in ipairs { "int64", "int32", "uint8", "bool", "float8_e4m3", "float8_e5m2" } do
            assert.is_false(x:to(dtype):to("float32").requires_grad)
        end
        assert.is_truthy(te.help("cast"):find("Gradients end at integers, bool and float8", 1, true))
    end)
end)

describe("positions and truth values among results", function()
    it("have no gradient, so they are targets and inputs like any other", function()
        local x = te.tensor({ { 3, 1, 2 }, { 0, 5, 4 } }, { requires_grad = true })
        local values, positions = te.topk(x, 2)
        assert.is_true(values.requires_grad)
        assert.is_false(positions.requires_grad)
        local labels = positions:narrow(2, 1, 1):reshape { 2 }
        te.cross_entropy(x, labels):backward()
        assert.is_true(x.grad:sum():abs():item() < 1e-6)
        x.grad = nil
        values:sum():backward()
        assert.same({ { 1, 0, 1 }, { 0, 1, 1 } }, x.grad:totable())
        positions:add_(1)
        positions[1] = 0
        assert.same({ { 0, 0 }, { 2, 3 } }, positions:totable())
    end)

    it("of te.checkpoint and of operations of one's own have none", function()
        local x = te.tensor({ 3, 1, 2 }, { requires_grad = true })
        local y, place = te.checkpoint(function(v) return v * 2, te.argmax(v) end, x)
        assert.is_false(place.requires_grad)
        y:sum():backward()
        assert.same({ 2, 2, 2 }, x.grad:totable())
        local only = te.checkpoint(function(v) return te.argmax(v) end, x)
        assert.is_false(only.requires_grad)
        assert.equal(0, only:item())
    end)

    it("keep no graph", function()
        local kept = {}
        collectgarbage()
        local before = te.memory_stats().current
        for i = 1, 8 do
            local x = te.randn({ 100, 100 }, { requires_grad = true })
            kept[i] = select(2, te.topk(x:exp(), 1))
        end
        collectgarbage()
        collectgarbage()
        assert.is_true(te.memory_stats().current - before < 8 * 100 * 8 + 40000)
    end)
end)
