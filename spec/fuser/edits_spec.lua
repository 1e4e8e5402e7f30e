-- What was changed after a container ran is seen by its next run.

local te = require "te"

local function same(expected, y) assert.equal(0, (expected - y):abs():max():item()) end

describe("a container that ran", function()
    local x = te.tensor { { -1, 2 }, { 0.5, -3 } }

    it("runs branches in parallel, or no more", function()
        local r = te.Residual(te.GELU(), te.ReLU())
        r(x)
        r.parallel = true
        same(x + te.gelu(x) + te.relu(x), r(x))
        r.parallel = false
        same(x + te.relu(te.gelu(x)), r(x))
    end)

    it("takes a probability for drop_path", function()
        local r = te.Residual(te.GELU(), { drop_path = 0.25 })
        r(x)
        r.drop_path = 0
        for _ = 1, 8 do same(x + te.gelu(x), r(x)) end
        r.drop_path = 1
        same(x, r(x))
        r:eval()
        same(x + te.gelu(x), r(x))
        r.drop_path = 0.5
        same(x + te.gelu(x), r(x)) -- it evaluates as the container does
        r.drop_path = 3
        assert.error_matches(function() r(x) end, "te%.Residual: drop_path: expected number from 0 to 1, got 3")
    end)

    it("runs a forward that one of its modules was given", function()
        for _, inner in ipairs { te.GELU(), te.Linear(2, 2), te.Sequential(te.GELU()) } do
            local net = te.Sequential(te.Identity(), inner)
            net(x)
            function inner:forward(v) return v * 3 end
            same(x * 3, net(x))
            inner.forward = nil
            same(inner(x), net(x))
        end
    end)
end)

describe("a class derived from a container", function()
    local x = te.ones { 1, 4 }

    for name, base in pairs { Sequential = te.Sequential, Residual = te.Residual } do
        it("calls the forward of te." .. name, function()
            local class = base:extend("Scaled")
            function class:forward(...) return base.forward(self, ...) * 10 end
            local plain = base(te.GELU(), te.ReLU())
            local scaled = class(te.GELU(), te.ReLU())
            same(plain(x) * 10, scaled(x))
            same(plain(x) * 10 + 1, te.Sequential(scaled, te.pointwise(function(v) return v + 1 end))(x))
            assert.is_true(#tostring(scaled:explain(x)) > 0)
            same(plain(x * 2) * 10, te.Sequential(te.ConstantScale(2), scaled)(x))
        end)
    end

    it("hands extra inputs on", function()
        local class = te.Sequential:extend("Twice")
        function class:forward(...) return te.Sequential.forward(self, ...) * 2 end
        same(te.full({ 1, 4 }, 8), class(te.AddExtraInput())(x, te.full({ 1, 4 }, 3)))
        assert.error_matches(function() class(te.AddExtraInput())(x) end, "Twice: takes 1 extra inputs, got 0")
    end)
end)
