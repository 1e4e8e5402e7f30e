--- Ids out of range on the CUDA device: nobody waits for the verdict, which comes where the host next does.
--- Pending without a device.

local te = require "te"

local devices, reason = te.devices()

describe("ids out of range on CUDA", function()
    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    local function ids(...) return te.tensor({ ... }, { dtype = "int64", device = "cuda" }) end
    local function rows(n) return te.randn({ n, 3 }, { device = "cuda" }) end

    it("are errors of the next wait, which name operation, id and place", function()
        local table_ = rows(5)
        local out = te.embedding(table_, ids(1, 9, 2, -3)) -- no error yet
        assert.error_matches(function() te.synchronize("cuda") end, "embedding: id 9 at position 2 is outside 0 to 4")
        te.synchronize("cuda") -- said once
        assert.same({ 4, 3 }, out.shape)
    end)

    it("are errors of te.profile, from before it and from inside", function()
        local table_ = rows(5)
        te.embedding(table_, ids(1, 9))
        assert.error_matches(function() te.profile(function() return table_ * 2 end) end,
            "embedding: id 9 at position 2 is outside 0 to 4")
        assert.error_matches(function() te.profile(function() te.embedding(table_, ids(7)) end) end,
            "embedding: id 7 at position 1 is outside 0 to 4")
        te.synchronize("cuda")
        assert.is_true(#te.profile(function() return table_ * 2 end).events > 0)
    end)

    it("come with a value that is read", function()
        local picked = te.gather(rows(4), 1,
            te.tensor({ { 0, 1, 2 }, { 3, -7, 4 } }, { dtype = "int64", device = "cuda" }))
        assert.error_matches(function() picked:totable() end, "gather: index %-7 at position 5 is outside 0 to 3")
    end)

    it("are counted from 1, as are rows of weights that nothing can be drawn from", function()
        for fault, weights in pairs { ["has no positive weight"] = { { 1, 1 }, { 0, 0 } },
            ["has a weight that is negative or NaN"] = { { 1, 1 }, { 0, -1 } } } do
            te.multinomial(te.tensor(weights, { device = "cuda" }), 1)
            assert.error_matches(function() te.synchronize("cuda") end, "multinomial: row 2 " .. fault)
        end
    end)

    it("do not spoil what runs after them", function()
        local table_ = rows(5)
        te.embedding(table_, ids(70))
        local sum = te.sum(table_)
        assert.error_matches(function() sum:item() end, "embedding: id 70 at position 1")
        assert.near(te.sum(table_:to("cpu")):item(), sum:item(), 1e-4)
    end)

    it("are found by the operation they were given to first", function()
        local table_, a, b, c = rows(5), ids(1, 2), ids(0, 0, 0, 5), ids(6)
        te.embedding(table_, a)
        te.embedding(table_, b)
        te.embedding(table_, c)
        assert.error_matches(function() te.synchronize("cuda") end, "embedding: id 5 at position 4")
    end)

    it("are waited for where many operations are under way", function()
        local table_ = rows(5)
        local id = ids(5)
        local ok, problem = pcall(function()
            for _ = 1, 300 do te.embedding(table_, id):release() end
        end)
        assert.is_false(ok)
        assert.truthy(tostring(problem):find("embedding: id 5 at position 1", 1, true))
        pcall(te.synchronize, "cuda")
        te.synchronize("cuda")
    end)

    describe("as targets of cross_entropy", function()
        local function logits() return te.ones({ 4, 3 }, { device = "cuda", requires_grad = true }) end

        it("come after the step, with operation, target and place", function()
            local x = logits()
            local loss = te.cross_entropy(x, ids(0, 2, 3, -1)) -- no error yet
            loss:backward()
            assert.error_matches(function() loss:item() end,
                "cross_entropy: target 3 at position 3 is not a class from 0 to 2")
            assert.near(math.log(3), te.cross_entropy(x, ids(0, 2, 1, 1)):item(), 1e-6) -- said once
        end)

        it("are none where they are ignored", function()
            local loss = te.cross_entropy(logits(), ids(0, -100, 1, 2))
            assert.near(math.log(3), loss:item(), 1e-6)
            loss = te.cross_entropy(logits(), ids(0, 7, 1, 7), { ignore_index = 7, label_smoothing = 0.25 })
            assert.near(math.log(3), loss:item(), 1e-6)
            te.cross_entropy(logits(), ids(0, -100, 1, 7), { ignore_index = 7 })
            assert.error_matches(function() te.synchronize("cuda") end, "target %-100 at position 2")
        end)

        it("are found in a graph, whose loss is then not a number", function()
            local x = logits():detach()
            local graph = te.graph(function(targets) return te.cross_entropy(x, targets) end,
                { te.tensor({ 0, 1, 2, 0 }, { dtype = "int64" }) }, { device = "cuda", warmup = 1 })
            local function loss(...) return graph(te.tensor({ ... }, { dtype = "int64" })) end
            assert.near(math.log(3), loss(2, 2, 2, 2):item(), 1e-6)
            assert.near(math.log(3), loss(1, -100, 2, 2):item(), 1e-6)
            local wrong = loss(0, 1, 1, 9)
            assert.error_matches(function() te.synchronize("cuda") end,
                "cross_entropy: target 9 at position 4 is not a class from 0 to 2")
            assert.is_true(wrong:item() ~= wrong:item())
            assert.near(math.log(3), loss(0, 1, 1, 0):item(), 1e-6)
        end)
    end)

    it("name ids that do not fit 32 bits by the nearest that does", function()
        te.embedding(rows(5), ids(2 ^ 40))
        assert.error_matches(function() te.synchronize("cuda") end, "embedding: id 2147483647 at position 1")
    end)
end)
