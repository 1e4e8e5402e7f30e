--- Modules and parameters in tables of a module's fields, and what stands in the place of a parameter.

local te = require "te"

local function names(m)
    local list = {}
    for name in m:named_parameters() do list[#list + 1] = name end
    return list
end

-- A module with these fields.
local function holding(fields)
    local m = te.Module:extend("Holder")()
    for name, value in pairs(fields) do m[name] = value end
    return m
end

local function leaf(...) return te.ones({ ... }, { requires_grad = true }) end

local function bare(n) return te.Linear(n, 1, { bias = false }) end

describe("tables in the fields of a te.Module", function()
    local Blocks = te.Module:extend("Blocks")
    function Blocks:init(width, n)
        self.layers = {}
        self.heads = { value = te.Linear(width, 1), policy = te.Linear(width, 4) }
        for i = 1, n do
            self.layers[i] = { norm = te.LayerNorm(width), mlp = te.Linear(width, width), drop = te.Dropout(0.5) }
        end
    end
    function Blocks:forward(x)
        for _, layer in ipairs(self.layers) do x = x + layer.drop(layer.mlp(layer.norm(x))) end
        return self.heads.policy(x), self.heads.value(x)
    end

    it("are looked through in depth, numbers in order and then names", function()
        local m, expected = Blocks(8, 11), {}
        for i = 1, 11 do
            for _, name in ipairs { "mlp.weight", "mlp.bias", "norm.weight", "norm.bias" } do
                expected[#expected + 1] = ("layers.%d.%s"):format(i, name)
            end
        end
        for _, name in ipairs { "policy.weight", "policy.bias", "value.weight", "value.bias" } do
            expected[#expected + 1] = "heads." .. name
        end
        assert.same(expected, names(m))
        assert.equal(11 * (64 + 8 + 16) + 4 * 8 + 4 + 8 + 1, m:num_parameters())
        local text = tostring(m)
        assert.is_truthy(text:find("(layers.11.norm): LayerNorm", 1, true), text)
        assert.is_truthy(text:find("(heads.policy): Linear", 1, true), text)
    end)

    it("follow eval, to, zero_grad and apply, and are saved and loaded", function()
        te.manual_seed(3)
        local m, x = Blocks(8, 2), te.randn { 3, 8 }
        m:eval()
        local first, second = m(x), m(x)
        assert.same(first:totable(), second:totable())
        m(x):sum():backward()
        assert.is_not_nil(m.layers[2].mlp.weight.grad)
        m:zero_grad()
        assert.is_nil(m.layers[2].mlp.weight.grad)
        local other = Blocks(8, 2):eval()
        other:load_state_dict(m:state_dict())
        assert.same(first:totable(), other(x):totable())
        m:to "bfloat16"
        for _, p in m:named_parameters() do assert.equal("bfloat16", p.dtype) end
        local seen = {}
        m:apply(function(module) seen[module] = true end)
        assert.is_true(seen[m.layers[1].drop] and seen[m.heads.value])
    end)

    it("may be filled later, and at any depth", function()
        local m = holding { experts = {} }
        assert.same({}, names(m))
        m.experts.text = { { bare(1) }, [5] = bare(2), [-1] = leaf(3) }
        m.experts[2] = bare(4)
        assert.same({ "experts.2.weight", "experts.text.-1", "experts.text.1.1.weight", "experts.text.5.weight" },
            names(m))
        m.experts.text = nil
        assert.same({ "experts.2.weight" }, names(m))
    end)

    it("keep the names of lists", function()
        local m = holding { list = { bare(1), te.Identity(), leaf(2), "text", bare(3) } }
        assert.same({ "list.1.weight", "list.3", "list.5.weight" }, names(m))
    end)

    it("hold parameters that stay what they are when they are frozen", function()
        local m = holding { scales = { a = leaf(2), b = leaf(3), mask = te.ones { 4 } } }
        assert.same({ "scales.a", "scales.b" }, names(m))
        m:requires_grad_(false)
        assert.same({ "scales.a", "scales.b" }, names(m))
        assert.is_nil(m:state_dict()["scales.mask"])
        m:requires_grad_()
        assert.is_true(m.scales.a.requires_grad and m.scales.b.requires_grad)
        assert.is_false(m.scales.mask.requires_grad)
    end)

    it("may refer to one another, and to the module that has them", function()
        local shared = bare(3)
        local m = holding { graph = { first = { shared }, last = { shared } } }
        m.graph.first.next, m.graph.last.next, m.graph.self = m.graph.last, m.graph.first, m.graph
        local inner = te.Module:extend("Inner")()
        inner.context, inner.own = { owner = m }, bare(1)
        m.inner, m.owners = inner, { m }
        assert.equal(2, #m:parameters())
        assert.equal(3, select(2, tostring(m):gsub("Linear", "")))
        assert.equal(4, m:num_parameters())
        m:eval()
        assert.is_false(shared.training)
        assert.same({ "graph.first.1.weight", "inner.own.weight" }, (function()
            local found = {}
            for name in pairs(m:state_dict()) do found[#found + 1] = name end
            table.sort(found)
            return found
        end)())
    end)

    it("may hold whatever else", function()
        local chain = {}
        for _ = 1, 100000 do chain = { next = chain } end
        local m = holding {
            config = { ["a.b"] = 1, [1.5] = { "x" }, [true] = { [print] = {} }, [""] = false,
                nested = { ["c.d"] = {} } },
            cache = setmetatable({ bare(2) }, { __index = function() error "not to be asked" end }),
            chain = chain,
            saved = { hidden = te.ones { 2 }, result = leaf(2) * 2 },
        }
        assert.same({}, names(m))
        assert.equal("Holder()", tostring(m))
    end)

    it("do not hold what is looked up by an object", function()
        local m = te.Module:extend("Keyed")()
        local other = te.Linear(2, 2)
        m.out = te.Linear(2, 1)
        m.seen = { [other] = other, [other.weight] = { other } }
        assert.equal(2, #m:parameters())
        assert.equal(1, #m:children())
    end)

    it("say which key cannot be part of a name", function()
        local wrong = {
            ['field x: a module has no name, because of key "a.b": a text in a name is not empty and has no "."'] =
                { ["a.b"] = bare(1) },
            ['field x: a parameter has no name, because of key 1.5: names are made of whole numbers and texts'] =
                { { [1.5] = { leaf(1) } } },
            ['field x: a module has no name, because of key true'] = { [true] = { bare(1) } },
            ['field x: a module has no name, because of key ""'] = { [""] = bare(1) },
            ['field x: a module has no name, because of key "1": the number has the same name'] =
                { bare(1), ["1"] = bare(2) },
        }
        for message, value in pairs(wrong) do
            local m = holding { x = value }
            for _, method in ipairs { "parameters", "state_dict", "eval", "num_parameters" } do
                assert.error_matches(function() m[method](m) end, "Holder: " .. message, 1, true)
            end
        end
    end)
end)

describe("a tensor assigned over a parameter", function()
    local layer, x
    before_each(function() layer, x = te.Linear(2, 2), te.ones { 1, 2 } end)

    it("may be what the module's forward computes there, with gradients and without", function()
        local Doubled = te.Linear:extend("Doubled")
        function Doubled:init(...)
            te.Linear.init(self, ...)
            self.half = leaf(2, 2)
        end
        function Doubled:forward(y)
            self.weight = self.half * 2
            return te.Linear.forward(self, y)
        end
        for _, first in ipairs { "train", "evaluate" } do
            local m = Doubled(2, 2)
            local function train() m(x):sum():backward() end
            if first == "train" then train() else te.no_grad(m, x) end
            for _ = 1, 2 do
                train()
                te.no_grad(m, x)
                assert.equal(3, #m:parameters())
                assert.is_not_nil(m:state_dict()["weight"])
                assert.is_true(te.all(te.eq(m(x), m:clone()(x))):item())
                train()
            end
            local n = first == "train" and 5 or 4
            assert.same({ { 2 * n, 2 * n }, { 2 * n, 2 * n } }, m.half.grad:totable())
        end
    end)

    it("is found wherever it stands among parameters, by calls that run a forward of one's own", function()
        local Own = te.Module:extend("Own")
        function Own:forward(y) return y end
        for n = 1, 4 do
            for wrong = 1, n do
                local m = Own()
                for i = 1, n do m["p" .. i] = leaf(2) end
                m(x)
                m["p" .. wrong] = nil -- holds none any more
                m["p" .. wrong] = te.ones { 2 }
                m(x)
                m["p" .. wrong] = nil
                m["p" .. wrong] = leaf(2)
                m["p" .. wrong] = te.ones { 2 }
                for _, own in ipairs { m, m:clone() } do
                    assert.error_matches(function() own(x) end, "Own: field p" .. wrong .. ": a tensor", 1, true)
                    te.no_grad(own, x)
                end
                assert.equal(n, #m._parameters)
            end
        end
    end)

    it("has to require a gradient", function()
        layer.weight = te.ones { 2, 2 }
        local message = "Linear: field weight: a tensor that requires no gradient was assigned over a parameter; write "
            .. "its values with te.no_grad(p.copy_, p, values), or assign one with requires_grad = true"
        for _, use in ipairs {
            function() return layer(x) end, function() return te.Sequential(layer, te.GELU())(x) end,
            function() return layer:parameters() end, function() return layer:state_dict() end,
            function() return layer:zero_grad() end, function() return te.Sequential(layer):num_parameters() end,
        } do
            assert.error_matches(use, message, 1, true)
        end
        assert.same({ 1, 2 }, te.no_grad(layer, x).shape)
        layer:eval()
        layer.weight = leaf(2, 2)
        assert.equal(2, #layer:parameters())
        layer(x):sum():backward()
        assert.same({ { 1, 1 }, { 1, 1 } }, layer.weight.grad:totable())
    end)

    it("may be another parameter, also a frozen one, or a result that has a gradient", function()
        local embedding, head = te.Embedding(5, 2), te.Linear(2, 5, { bias = false })
        head.weight = embedding.weight
        local model = te.Sequential(embedding, head)
        assert.equal(1, #model:parameters())
        model:requires_grad_(false)
        head.weight = embedding.weight
        assert.equal(1, #head:parameters())
        assert.same({ 1, 5 }, head(x).shape)
        local gain = leaf(2, 2)
        layer.weight = gain * 3
        layer(x):sum():backward()
        assert.same({ { 3, 3 }, { 3, 3 } }, gain.grad:totable())
    end)

    it("takes its place where the field was set to nil first", function()
        layer.weight = nil
        layer.weight = te.ones { 2, 2 }
        assert.same({ "bias" }, names(layer))
        assert.same({ { 2, 2 } }, te.sub(layer(x), layer.bias):totable())
        layer.weight = nil
        layer.weight = leaf(2, 2)
        assert.equal(2, #layer:parameters())
    end)
end)
