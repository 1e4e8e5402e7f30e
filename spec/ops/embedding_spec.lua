local te = require "te"

describe("te.Embedding", function()
    it("looks rows up by ids from 0", function()
        local m = te.Embedding(3, 2)
        local rows = m.weight:totable()
        local ids = te.tensor({ { 2, 0 }, { 0, 1 } }, { dtype = "int32" })
        assert.same({ { rows[3], rows[1] }, { rows[1], rows[2] } }, m(ids):totable())
    end)

    it("adds the gradients of repeated ids", function()
        local m = te.Embedding(3, 1)
        m(te.tensor({ 2, 2, 0 }, { dtype = "int64" })):sum():backward()
        assert.same({ { 1 }, { 0 }, { 2 } }, m.weight.grad:totable())
    end)

    it("refuses ids outside the table", function()
        for _, id in ipairs { 3, -1 } do -- a device says so when the values are read
            assert.has_error(function() te.Embedding(3, 1)(te.tensor({ id }, { dtype = "int32" })):totable() end)
        end
    end)

    it("takes ids before the table as well", function()
        local w, ids = te.randn { 5, 3 }, te.tensor({ 1, 3, 1 }, { dtype = "int64" })
        w.requires_grad = true
        local grads, values = {}, {}
        for i, y in ipairs { te.embedding(w, ids), te.embedding(ids, w) } do
            y:sum():backward()
            grads[i], values[i] = w.grad:totable(), y:totable()
            w.grad = nil
        end
        assert.same(grads[1], grads[2])
        assert.same(values[1], values[2])
        assert.error_matches(function() te.embedding(ids, ids) end, "a table of {entries, width} is needed")
        assert.error_matches(function() te.embedding(w, w) end, "ids must be int64 or int32, not float32")
    end)
end)
