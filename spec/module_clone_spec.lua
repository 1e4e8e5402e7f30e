--- clone, requires_grad_, named_buffers, and what load_state_dict returns.

local te = require "te"
local products = require "spec.support.products"

local function same(a, b) return te.all(te.eq(a, b)):item() end

local function names(iterator, state)
    local list = {}
    for name in iterator, state do list[#list + 1] = name end
    return list
end

local function copies_of(m)
    local values = {}
    for name, p in m:named_parameters() do values[name] = p:detach():clone() end
    return values
end

local function unchanged(m, values)
    for name, p in m:named_parameters() do
        if not same(p, values[name]) then return false, name end
    end
    return true
end

local Model = te.Module:extend("Model")
function Model:init()
    self.embedding = te.Embedding(7, 8)
    self.blocks = te.Sequential(te.Residual(te.LayerNorm(8), te.MultiHeadedSelfAttention(8, 2, { rope = true })),
        te.Residual(te.RMSNorm(8), te.Linear(8, 16, { bias = false }), te.GELU(), te.Linear(16, 8)))
    self.heads = { token = te.Linear(8, 7, { bias = false }) }
    self.heads.token.weight = self.embedding.weight
    self:register_buffer("steps", te.zeros { 1 })
    self.config = { width = 8, names = { "a", "b" } }
    self.mask = te.ones { 3 }
end
function Model:forward(ids) return self.heads.token(self.blocks(self.embedding(ids))) end

describe("te.Module:clone", function()
    local m, ids
    before_each(function()
        te.manual_seed(5)
        m, ids = Model(), te.tensor({ { 1, 5, 2, 6 } }, { dtype = "int64" })
    end)

    it("computes the same with tensors of its own", function()
        local y = m(ids) -- which plans, too
        y:sum():backward()
        local c = m:clone()
        assert.is_true(same(y, c(ids)))
        assert.same(names(m:named_parameters()), names(c:named_parameters()))
        assert.same(names(m:named_buffers()), names(c:named_buffers()))
        local known = {}
        for _, p in ipairs(m:parameters()) do known[p] = true end
        for _, p in ipairs(c:parameters()) do
            assert.is_nil(known[p])
            assert.is_nil(p.grad)
            assert.is_true(p.requires_grad and p.is_leaf)
        end
        assert.is_not_nil(m.embedding.weight.grad)
        local before = copies_of(m)
        for name, p in c:named_parameters() do assert.is_true(same(p, before[name]), name) end
        local optimizer = te.optim.SGD(c:parameters(), { lr = 1 })
        c(ids):sum():backward()
        optimizer:step()
        te.no_grad(c.mask.zero_, c.mask)
        te.no_grad(c.steps.fill_, c.steps, 4)
        c.config.names[1] = "other"
        assert.is_true(unchanged(m, before))
        assert.is_false(same(y, c(ids)))
        assert.is_true(same(y, m(ids)))
        assert.equal(3, m.mask:sum():item())
        assert.equal(0, m.steps:item())
        assert.equal("a", m.config.names[1])
    end)

    it("shares within the copy what is shared within the module", function()
        local c = m:clone()
        assert.equal(c.embedding.weight, c.heads.token.weight)
        assert.equal(#m:parameters(), #c:parameters())
        local twice = te.Linear(2, 2)
        local list = te.Sequential(twice, te.ReLU(), twice):clone()
        assert.equal(list[1], list[3])
        assert.equal(2, #list:parameters())
        m.back = { owner = m }
        c = m:clone()
        assert.equal(c, c.back.owner)
    end)

    it("has its own parts as keys of tables", function()
        local Keyed = te.Module:extend "Keyed"
        local recipe = te.recipe.MXFP8BlockScaling {}
        function Keyed:init()
            self.layer = te.quantized_model_init({ recipe = recipe }, te.Linear, 32, 32)
            self.other = te.Linear(2, 2)
            self.scale = { [self.layer] = 1, [self.layer.weight] = self.other.weight, [self.other] = self.layer.weight }
            self.scale[te] = "te"
        end
        local module = Keyed()
        local copy, n = module:clone(), 0
        for _ in pairs(copy.scale) do n = n + 1 end
        assert.equal(4, n)
        assert.equal(1, copy.scale[copy.layer])
        assert.is_true(rawequal(copy.other.weight, copy.scale[copy.layer.weight]))
        assert.is_true(rawequal(copy.layer.weight, copy.scale[copy.other]))
        assert.equal("te", copy.scale[te])
        assert.is_nil(copy.scale[module.layer])
        assert.is_false(rawequal(module.layer.weight, copy.layer.weight))
    end)

    it("keeps modes and frozen parameters, and may stand anywhere", function()
        m:eval()
        m.blocks[1]:train()
        m.blocks[2]:requires_grad_(false)
        local c = m:clone()
        assert.is_false(c.training)
        assert.is_true(c.blocks[1][2].training)
        assert.is_false(c.blocks[2][2].weight.requires_grad)
        assert.is_true(c.embedding.weight.requires_grad)
        assert.equal(#m:parameters(), #c:parameters())
        c.blocks:append(c.blocks[2]:clone())
        assert.equal(3, #c.blocks)
        assert.equal(2, #m.blocks)
        assert.is_true(same(m:clone()(ids), m(ids)))
        assert.error_matches(function() m:clone(1) end, "Model:clone: argument 1, number 1, is too much")
    end)

    it("copies layers that processes split, and mixtures", function()
        for _, mode in ipairs { "column", "row" } do
            local layer, x = te.Linear(4, 6, { tensor_parallel_mode = mode }), te.randn { 3, 4 }
            local c = layer:clone()
            assert.is_true(same(layer(x), c(x)))
            te.no_grad(layer.weight.zero_, layer.weight)
            assert.is_true(same(te.linear(x, c.weight, c.bias), c(x)))
            assert.is_true(c(x):abs():sum():item() > 0)
        end
        local moe, x = te.MoE(8, 4, 4), te.randn { 5, 8 }
        local c = moe:clone()
        assert.is_true(same(moe(x), c(x)))
        assert.equal(moe:num_parameters(), c:num_parameters())
    end)

    it("knows of modules that are held apart that their copies are, too", function()
        local world, gradients = te.distributed.world(), require "te.distributed.gradients"
        local held = te.Sequential(te.Linear(2, 2), te.Linear(2, 2))
        te.distributed.hold_apart(held[1], world)
        local c = held:clone()
        assert.equal(world, gradients.apart[c[1]])
        assert.equal(world, gradients.apart[c[1].weight])
        assert.equal(world, require("te.distributed.parts")[c[1].weight])
        assert.is_nil(gradients.apart[c[2]])
        assert.is_nil(gradients.apart[c[2].weight])
    end)

    for _, name in ipairs(products.names) do
        it("copies weights that are stored quantized, and what recipes remember: " .. name, function()
            local recipe, x = products.recipes[name](), te.randn { 16, 32 }
            local model = te.quantized_model_init({ recipe = recipe, preserve_high_precision_init_val = true },
                function() return te.Sequential(te.Linear(32, 64), te.GELU(), te.Linear(64, 32)) end)
            local function run(module) return te.autocast({ recipe = recipe }, module, x) end
            for _ = 1, 2 do run(model):sum():backward() end
            local c, state = model:clone(), {}
            assert.is_true(te._core.is_quantized(c[1].weight))
            assert.is_true(same(model[1].weight:get_high_precision_init_val(),
                c[1].weight:get_high_precision_init_val()))
            for key, tensor in pairs(model:state_dict()) do state[key] = te._core.tensor_bytes(tensor) end
            for key, tensor in pairs(c:state_dict()) do
                assert.equal(state[key], te._core.tensor_bytes(tensor), key)
                state[key] = nil
            end
            assert.is_nil(next(state))
            local y = te.no_grad(run, model)
            assert.is_true(same(y, te.no_grad(run, c)))
            te.no_grad(c[1].weight.copy_, c[1].weight, te.ones { 64, 32 })
            te.no_grad(c[3].bias.fill_, c[3].bias, 2)
            assert.is_true(model[1].weight:sum():item() ~= c[1].weight:sum():item())
            if name ~= "delayed" then assert.is_true(same(y, te.no_grad(run, model))) end
        end)
    end
end)

describe("te.Module:requires_grad_", function()
    it("freezes and releases, also what is stored quantized", function()
        local recipe = te.recipe.MXFP8BlockScaling {}
        local model = te.quantized_model_init({ recipe = recipe }, te.Sequential, te.Linear(32, 32), te.GELU())
        local quantized = te.quantized_model_init({ recipe = recipe }, te.Linear, 32, 32)
        model:append(quantized)
        assert.equal(model, model:requires_grad_(false))
        local x = te.randn({ 4, 32 }, { requires_grad = true })
        te.autocast({ recipe = recipe }, model, x):sum():backward()
        assert.is_not_nil(x.grad)
        for _, p in ipairs(model:parameters()) do assert.is_nil(p.grad) end
        assert.equal(4, #model:parameters())
        model:requires_grad_()
        te.autocast({ recipe = recipe }, model, x):sum():backward()
        for _, p in ipairs(model:parameters()) do assert.is_not_nil(p.grad) end
        assert.error_matches(function() model:requires_grad_(1) end,
            "Sequential:requires_grad_: on: expected boolean, got 1")
    end)
end)

describe("te.Module:named_buffers", function()
    it("has all buffers once", function()
        local m = Model()
        m.other = te.Module:extend("Other")()
        m.other:register_buffer("kept", m.steps)
        m.other:register_buffer("made", te.ones { 2 }, { persistent = false })
        local found = {}
        for name, buffer, module in m:named_buffers() do
            found[#found + 1] = name
            assert.is_true(te.is_tensor(buffer) and te.is(module, te.Module))
        end
        assert.same({ "blocks.1.2.rope_frequencies", "steps", "other.made" }, found)
    end)
end)

describe("te.Module:load_state_dict", function()
    it("returns what was missing and unexpected where names need not match", function()
        local m = te.Sequential(te.Linear(2, 2), te.LayerNorm(2))
        local state = m:state_dict()
        assert.equal(1, select("#", m:load_state_dict(state)))
        local self, found = m:load_state_dict(state, { strict = false })
        assert.equal(m, self)
        assert.same({ missing = {}, unexpected = {} }, found)
        state = { ["1.wieght"] = te.ones { 2, 2 }, ["2.bias"] = te.full({ 2 }, 3), ["1.bais"] = te.ones { 2 } }
        self, found = m:load_state_dict(state, { strict = false })
        assert.equal(m, self)
        assert.same({ missing = { "1.bias", "1.weight", "2.weight" }, unexpected = { "1.bais", "1.wieght" } }, found)
        assert.same({ 3, 3 }, m[2].bias:totable())
    end)

    it("takes the values of weights that are stored quantized, and says how to get them", function()
        local recipe = te.recipe.Float8BlockScaling {}
        local quantized = te.quantized_model_init({ recipe = recipe }, te.Linear, 32, 16)
        local plain, values = te.Linear(32, 16), {}
        assert.error_matches(function() plain:load_state_dict(quantized:state_dict()) end,
            "weight of Linear is stored in full, the one given quantized. A module made under te.quantized_model_init "
            .. "with that recipe takes it; p:clone() of each of its named_parameters() is what is taken here", 1, true)
        for name, p in quantized:named_parameters() do values[name] = p:clone() end
        plain:load_state_dict(values)
        assert.is_true(same(quantized.weight, plain.weight))
    end)
end)
