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

describe("parameters of a container that ran", function()
    local function filled(value, ...) return te.full({ ... }, value, { requires_grad = true }) end

    it("are shared by modules, or no more", function()
        local x, freqs = te.ones { 3, 2 }, te.rope_frequencies(2)
        local function attention()
            te.manual_seed(1)
            return te.MultiHeadedSelfAttention(2, 1, { rope = { frequencies = freqs } })
        end
        local function scale()
            return te.Pointwise({ params = { g = te.ones { 2 } } }, function(v, p) return v * p.g end)
        end
        for _, case in ipairs {
            { te.Linear(2, 2, { bias = false }), te.Linear(2, 2, { bias = false }), "weight", filled(3, 2, 2) },
            { te.RMSNorm(2), te.RMSNorm(2), "weight", filled(3, 2) },
            { scale(), scale(), "g", filled(3, 2) },
            { attention(), attention(), "rope_frequencies", te.full({ 1 }, 2.5) },
        } do
            local first, second, field, own = unpack(case)
            local shared = first[field]
            second[field] = shared
            local net = te.Sequential(first, te.GELU(), second)
            for _, values in ipairs { { shared, shared }, { shared, own }, { own, shared }, { shared, shared } } do
                first[field], second[field] = unpack(values)
                net:zero_grad()
                own.grad = nil
                local y = net(x)
                same(second(te.gelu(first(x))), y)
                if own.requires_grad then
                    y:sum():backward()
                    assert.equal(rawequal(values[1], own) or rawequal(values[2], own), own.grad ~= nil)
                end
            end
        end
    end)

    it("stand in other lists of a GroupedLinear", function()
        local x = te.ones { 3, 2 }
        for _, opts in ipairs { { bias = true }, { bias = true, scale_bias = true } } do
            local grouped = te.GroupedLinear(2, 2, 2, opts)
            local net, extra = te.Sequential(grouped), opts.scale_bias and { te.full({ 3 }, 2) } or {}
            local function check(sizes) same(grouped(x, sizes, unpack(extra)), net(x, sizes, unpack(extra))) end
            check { 1, 2 }
            grouped.weight = { filled(2, 2, 2), filled(3, 2, 2) }
            check { 1, 2 }
            grouped.bias = { filled(4, 2), filled(5, 2) }
            check { 1, 2 }
            if not opts.scale_bias then
                grouped.bias = nil
                check { 1, 2 }
                grouped.bias = { filled(6, 2), filled(7, 2) }
                check { 1, 2 }
            end
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
