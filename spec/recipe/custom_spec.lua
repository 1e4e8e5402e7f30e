--- te.recipe.Custom: which operands of which layers its function is asked for, and what they are called.

local te = require "te"
local R = te.recipe

local function text(role)
    return ("%s %s %q%s"):format(role.module_type, role.tensor_type, role.name, role.group and " " .. role.group or "")
end

-- A recipe that answers with `answer`, or what answer(role) gives, and the list of roles that it has been asked for.
local function noting(answer, opts)
    local asked, options = {}, opts or {}
    options.qfactory = function(role)
        asked[#asked + 1] = text(role)
        if type(answer) == "function" then return answer(role) end
        return answer
    end
    return R.Custom(options), asked
end

-- The roles that are asked for of layers with these names.
local function linears(...)
    local list = {}
    for _, name in ipairs { ... } do
        for _, kind in ipairs { "input", "weight", "grad_output" } do
            list[#list + 1] = ("linear %s %q"):format(kind, name)
        end
    end
    return list
end

-- The layers among roles, each once, in order.
local function layers(asked)
    local list, known = {}, {}
    for _, role in ipairs(asked) do
        local name = role:match '"(.*)"'
        if not known[name] then list[#list + 1], known[name] = name, true end
    end
    return list
end

local function bytes(t) return te._core.tensor_bytes(t:detach():clone()) end

local function run(recipe, module, ...) return te.autocast({ recipe = recipe, dtype = "float32" }, module, ...) end

local function model()
    te.manual_seed(3)
    return te.Sequential(te.Linear(32, 32), te.GELU(), te.Sequential(te.LayerNorm(32), te.Linear(32, 32)),
        te.Linear(32, 32))
end

local MODEL = linears("1", "3.2", "4")

describe("attention under te.recipe.Custom", function()
    local function attention()
        te.manual_seed(5)
        return te.MultiHeadedSelfAttention(64, 4)
    end
    local function quantizer_of(recipe) return function(role) return recipe:quantizer(role.tensor_type) end end

    it("stays in high precision", function()
        local mx, current, x = R.MXFP8BlockScaling {}, R.Float8CurrentScaling {}, te.randn { 8, 64 }
        for _, case in ipairs { { mx, mx }, { mx, quantizer_of(mx) }, { current, quantizer_of(current) },
            { current, R.Float8CurrentScaling { fp8_dpa = true } } } do
            local recipe, asked = noting(case[2])
            assert.equal(bytes(run(case[1], attention(), x)), bytes(run(recipe, attention(), x)))
            assert.same(linears("qkv", "proj"), asked)
        end
        local recipe, asked = noting(R.Quantizer {})
        local q = te.randn { 1, 2, 8, 16 }
        assert.equal(bytes(te.DotProductAttention()(q, q, q)), bytes(run(recipe, te.DotProductAttention(), q, q, q)))
        assert.is_nil(recipe:quantizer { module_type = "attention", tensor_type = "input" })
        assert.same({}, asked)
    end)

    it("is quantized with fp8_dpa, as the function says of the role", function()
        local x, direct = te.randn { 8, 64 }, R.Float8CurrentScaling { fp8_dpa = true }
        local expected = bytes(run(direct, attention(), x))
        assert.not_equal(bytes(run(R.Float8CurrentScaling {}, attention(), x)), expected)
        for _, answer in ipairs { direct, function(role) return direct:quantizer(role) end } do
            local recipe, asked = noting(answer, { fp8_dpa = true })
            assert.equal(expected, bytes(run(recipe, attention(), x)))
            assert.equal(7, #asked) -- q, k and v are one operand
            assert.equal('attention input ""', asked[4])
        end
        local recipe, asked = noting(function(role)
            return role.module_type == "attention" and R.HighPrecision or direct
        end, { fp8_dpa = true })
        assert.equal(bytes(run(R.Float8CurrentScaling {}, attention(), x)), bytes(run(recipe, attention(), x)))
        assert.equal(7, #asked)
        recipe = noting(quantizer_of(R.MXFP8BlockScaling {}), { fp8_dpa = true })
        assert.error_matches(function() run(recipe, attention(), x) end, "one float32 factor")
        recipe = noting(direct, { fp8_dpa = true }) -- one that is named by another one
        assert.equal(bytes(run(R.Float8CurrentScaling {}, attention(), x)),
            bytes(run(noting(recipe), attention(), x)))
        assert.equal(expected, bytes(run(noting(recipe, { fp8_dpa = true }), attention(), x)))
    end)

    it("is asked for by name where the faster way is chosen", function()
        local recipe, asked = noting(function(role)
            return role.name:match "^x" and R.HighPrecision or R.Float8CurrentScaling {}:quantizer(role.tensor_type)
        end, { fp8_dpa = true })
        local seq = te.Sequential(te.Identity(), te.MultiHeadedSelfAttention(64, 4))
        te.autocast({ recipe = recipe, dtype = "bfloat16", when = "faster" }, seq, te.randn { 8, 64 })
        assert.truthy(table.concat(asked, "\n"):find('attention input "2"', 1, true))
        for _, role in ipairs(asked) do assert.truthy(role:find '"2') end -- a device measures the products as well
    end)
end)

describe("a role of te.recipe.Custom", function()
    it("names the layer by its path in what was called, once", function()
        local x = te.randn { 4, 32 }
        for _, fusion in ipairs { true, false } do
            local before = te.set_fusion(fusion)
            local recipe, asked = noting(R.MXFP8BlockScaling {})
            local m = model()
            run(recipe, m, x):sum():backward()
            te.set_fusion(before)
            assert.same(MODEL, asked)
            run(recipe, m, x)
            te.no_grad(te.autocast, { recipe = recipe }, function() return m(x) end)
            te.autocast({ recipe = recipe }, function() return m:forward(x) end)
            te.autocast({ recipe = recipe, dtype = "float32" }, function() return m:explain(x) end)
            assert.same(MODEL, asked)
        end
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        te.autocast({ recipe = recipe }, function() return model():explain(x) end)
        assert.same(MODEL, asked)
        recipe, asked = noting(R.MXFP8BlockScaling {})
        run(recipe, te.Linear(32, 32), x)
        assert.same(linears "", asked)
    end)

    it("names layers of modules of one's own, of several, and where a recipe begins inside", function()
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        local Own = te.Module:extend("Own")
        function Own:init() self.layers = { { fc = te.Linear(32, 32) }, te.Linear(32, 32) } end
        function Own:forward(x) return self.layers[2](self.layers[1].fc(x)) end
        local a, b = Own(), model()
        te.autocast({ recipe = recipe }, function() return b(a(te.ones { 4, 32 })) end)
        assert.same({ "layers.1.fc", "layers.2", "1", "3.2", "4" }, layers(asked))
        recipe, asked = noting(R.MXFP8BlockScaling {})
        local Inside = te.Module:extend("Inside")
        function Inside:init() self.body = model() end
        function Inside:forward(x) return te.autocast({ recipe = recipe }, self.body, x) end
        Inside()(te.ones { 4, 32 })
        assert.same({ "1", "3.2", "4" }, layers(asked))
        te.autocast({ recipe = recipe, dtype = "float32" }, Inside(), te.ones { 4, 32 })
        assert.same({ "1", "3.2", "4", "body.1", "body.3.2", "body.4" }, layers(asked))
    end)

    it("names every layer of a model apart", function()
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        local gpt = te.models.gpt { vocab_size = 65, block_size = 16, n_layer = 2, n_head = 2, n_embd = 32 }
        local expected = {}
        for path, module in gpt:named_modules() do
            if te.is(module, te.Linear) then expected[#expected + 1] = path end
        end
        te.autocast({ recipe = recipe }, function()
            return gpt:hidden_states(te.zeros({ 2, 8 }, { dtype = "int64" }))
        end)
        assert.equal(8, #expected)
        assert.same(linears(unpack(expected)), asked)
    end)

    it("tells the weights of te.GroupedLinear apart", function()
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        local seq, sizes = te.Sequential(te.Identity(), te.GroupedLinear(2, 32, 32)), { 2, 2 }
        run(recipe, seq, te.ones { 4, 32 }, sizes)
        assert.same({ 'grouped_linear input "2" 1', 'grouped_linear weight "2" 1', 'grouped_linear grad_output "2" 1',
            'grouped_linear input "2" 2', 'grouped_linear weight "2" 2', 'grouped_linear grad_output "2" 2' }, asked)
    end)

    it("has the names that modules are given, and paths below these", function()
        local recipe, asked = noting(R.Float8CurrentScaling { fp8_dpa = true }, { fp8_dpa = true })
        local m = te.Sequential(te.Linear(32, 32, { name = "first" }), te.BasicLinear(32, 32, { name = "second" }),
            te.Sequential(te.Linear(32, 32)), te.MultiHeadedSelfAttention(32, 2, { name = "attends" }),
            te.Quantize { name = "values" }, te.GroupedLinear(1, 32, 32, { name = "experts" }))
        m[3].name = "inner"
        run(recipe, m, te.ones { 4, 32 }, te.tensor({ 4 }, { dtype = "int64" }))
        assert.same({ "first", "second", "inner.1", "attends.qkv", "attends", "attends.proj", "values", "experts" },
            layers(asked))
        assert.error_matches(function() te.Linear(2, 2, { name = 3 }) end, "option name")
        assert.truthy(m:state_dict()["1.weight"])
        assert.truthy(m:state_dict()["4.qkv.weight"])
        recipe, asked = noting(R.MXFP8BlockScaling {})
        local other = te.Sequential(te.Linear(32, 32), te.Linear(32, 32))
        other.name = 7 -- a field of somebody else's
        run(recipe, other, te.ones { 4, 32 })
        assert.same({ "1", "2" }, layers(asked))
    end)

    it("leaves values as they are where te.Quantize gets no quantizer", function()
        local recipe, x = noting(R.HighPrecision), te.randn { 4, 32 }
        local gelu = te.GELU()
        for _, fused in ipairs { true, false } do
            local before = te.set_fusion(fused)
            x.requires_grad, x.grad = true, nil
            local model = te.Sequential(te.Quantize { backward = true }, gelu)
            local y = te.autocast({ recipe = recipe }, model, x)
            y:sum():backward()
            local got = x.grad:totable()
            x.grad = nil
            local plain = gelu(x)
            plain:sum():backward()
            te.set_fusion(before)
            assert.same(plain:totable(), y:totable())
            assert.same(x.grad:totable(), got)
        end
    end)

    it("keeps the first and the last layer in high precision", function()
        local mx, x = R.MXFP8BlockScaling {}, te.randn { 4, 32 }
        local m, recipe = model(), R.Custom { qfactory = function(role)
            return (role.name == "1" or role.name == "4") and R.HighPrecision or mx
        end }
        local inner = run(nil, m[2], run(nil, m[1], x))
        assert.equal(bytes(m[4](run(mx, m[3], inner))), bytes(run(recipe, m, x)))
        assert.not_equal(bytes(run(mx, m, x)), bytes(run(recipe, m, x)))
    end)

    it("follows when a part is called by itself, or within something else", function()
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        local m, x = model(), te.randn { 4, 32 }
        run(recipe, m[3], x)
        assert.same(linears "2", asked)
        run(recipe, m, x)
        assert.same({ "2", "1", "3.2", "4" }, layers(asked))
        local n = #asked
        for _ = 1, 2 do run(recipe, m, x) end
        assert.equal(n, #asked)
    end)

    it("is that of the layer which a measured one stands for", function()
        local faster, mode = require "te.recipe.faster", require "te.recipe.mode"
        local seq = te.Sequential(te.Identity(), te.Linear(32, 32), te.MultiHeadedSelfAttention(32, 2))
        local x, direct = te.randn { 8, 32 }, R.Float8CurrentScaling { fp8_dpa = true }
        run(noting(direct, { fp8_dpa = true }), seq, x)
        local recipe, asked = noting(direct, { fp8_dpa = true })
        assert.is_true(faster.seconds({ device = "cpu", dtype = "bfloat16", tokens = 8, width_in = 32, width_out = 32,
            product = mode.product(seq[2], "weight") }, recipe) > 0)
        local attention = require("te.recipe.faster_attention").describe(seq[3], x)
        assert.is_true(faster.seconds({ device = "cpu", dtype = "bfloat16", attention = attention,
            product = mode.product(seq[3], "attention") }, recipe) > 0)
        local expected = linears "2"
        expected[4] = 'attention input "3"'
        assert.same(expected, asked)
    end)

    it("is the same where backward runs a stretch again, and after a failure", function()
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        local m, x = model(), te.randn({ 4, 32 }, { requires_grad = true })
        local Checked = te.Module:extend("Checked")
        function Checked:init() self.body = m end
        function Checked:forward(v) return te.checkpoint(self.body, v) end
        local checked = Checked()
        run(recipe, checked, x):sum():backward()
        assert.same(linears("body.1", "body.3.2", "body.4"), asked)
        local fails = te.Sequential(m, function() error "stop" end)
        assert.has_error(function() run(recipe, fails, x) end)
        recipe, asked = noting(R.MXFP8BlockScaling {})
        run(recipe, checked, x)
        assert.same({ "body.1", "body.3.2", "body.4" }, layers(asked))
        assert.is_nil(require("te.module_tree").entering)
        assert.is_nil(require("te.recipe.names").place)
    end)

    it("goes along with what delayed scaling remembers in a clone", function()
        local recipe = R.Custom { qfactory = function(role)
            return role.name == "1" and R.HighPrecision or R.DelayedScaling { amax_history_len = 3 }
        end }
        local m, x = model(), te.randn { 4, 32 }
        for _ = 1, 2 do run(recipe, m, x):sum():backward() end
        local copy = m:clone()
        assert.equal(bytes(te.no_grad(run, recipe, m, x)), bytes(te.no_grad(run, recipe, copy, x)))
        local state, expected = copy:state_dict(), m:state_dict()
        assert.is_nil(state["1.input_scale"])
        assert.equal(bytes(expected["4.input_amax_history"]), bytes(state["4.input_amax_history"]))
    end)

    it("is the same where another module has raised, or has yielded", function()
        local x, problem = te.randn { 4, 32 }, { "of one's own" }
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        te.autocast({ recipe = recipe }, function()
            local fails = te.Sequential(te.Linear(32, 32), function() error(problem) end)
            assert.equal(problem, select(2, pcall(fails, x)))
            model()(x)
        end)
        assert.same({ "1", "3.2", "4" }, layers(asked))
        recipe, asked = noting(R.MXFP8BlockScaling {})
        te.autocast({ recipe = recipe }, function()
            local outer = te.Sequential(te.Identity(), te.Sequential(function(v) return coroutine.yield(v) end,
                te.Linear(32, 32)), te.Linear(32, 32))
            local resume = coroutine.wrap(function() return outer(x) end)
            assert.equal(x, resume())
            model()(x)
            te.Sequential(function(v) return resume(v) end, te.Linear(32, 32))(x)
        end)
        assert.same(linears("1", "3.2", "4", "2.2", "3", "2"), asked)
        assert.is_nil(require("te.recipe.names").place)
        assert.is_nil(require("te.module_tree").entering)
    end)

    it("is asked for once in each of several modules that share a layer", function()
        local shared, x = te.Linear(32, 32), te.randn { 4, 32 }
        local first, second = te.Sequential(shared), te.Sequential(te.Identity(), shared)
        local function quantized(recipe)
            local n, profile = 0, te.profile(function()
                for _ = 1, 3 do
                    te.no_grad(run, recipe, first, x)
                    te.no_grad(run, recipe, second, x)
                end
            end)
            for _, event in ipairs(profile.events) do n = n + (event.name:find "^quantize" and 1 or 0) end
            return n
        end
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        assert.equal(6 + 1, quantized(recipe)) -- the weight once
        assert.same(linears("1", "2"), asked)
        local mx = R.MXFP8BlockScaling {}
        recipe, asked = noting(function(role) return role.name == "1" and R.HighPrecision or mx end)
        local expected = { bytes(run(nil, first, x)), bytes(run(mx, second, x)) }
        for _ = 1, 3 do
            assert.equal(expected[1], bytes(run(recipe, first, x)))
            assert.equal(expected[2], bytes(run(recipe, second, x)))
        end
        assert.same(linears("1", "2"), asked)
        shared.name, recipe.qfactory = "1", recipe.qfactory -- another option: names are read again
        assert.equal(expected[1], bytes(run(recipe, second, x)))
    end)

    it("counts where the faster way is chosen", function()
        local faster = require "te.recipe.faster"
        local decide, decided = faster.decide, {}
        faster.decide = function(case, recipe)
            local role = require("te.recipe.forms").role(case.product, "input")
            decided[#decided + 1] = role.name
            return role.name == "2.1", "as told"
        end
        local m, x = te.Sequential(te.Identity(), te.Sequential(te.Linear(32, 32))), te.randn { 4, 32 }
        local recipe = noting(R.MXFP8BlockScaling {})
        local high, low = bytes(run(nil, m, x)), bytes(run(R.MXFP8BlockScaling {}, m, x))
        local found = {}
        for i = 1, 4 do
            found[i] = te.autocast({ recipe = recipe, dtype = "float32", when = "faster" }, i % 2 == 1 and m[2] or m, x)
        end
        faster.decide = decide
        assert.same({ "1", "2.1" }, decided)
        assert.same({ high, low, high, low }, { bytes(found[1]), bytes(found[2]), bytes(found[3]), bytes(found[4]) })
    end)

    it("is empty where a module can have no name, and runs", function()
        local Own = te.Module:extend("Own")
        function Own:init()
            self["a.b"], self.tables = te.Linear(32, 32), { ["c.d"] = te.Linear(32, 32) }
            self[1], self[3] = te.Linear(32, 32), te.Sequential(te.Identity(), te.Linear(32, 32))
            self.last = te.Sequential(te.Linear(32, 32))
            rawset(self.last, "parent", self)
            table.insert(self.last._fields, "parent")
        end
        function Own:forward(x) return self.last(self[3](self[1](self.tables["c.d"](self["a.b"](x))))) end
        local recipe, asked = noting(R.MXFP8BlockScaling {})
        run(recipe, te.Sequential(Own()), te.ones { 4, 32 })
        assert.same(linears("", "", "1.1", "", "1.last.1"), asked)
        assert.has_error(function() Own():parameters() end)
    end)

    it("does not keep models alive", function()
        local recipe, alive = R.Custom { qfactory = function() return R.HighPrecision end },
            setmetatable({}, { __mode = "k" })
        local part
        for _ = 1, 3 do
            local m = model()
            alive[m], part = true, m[1]
            run(recipe, m, te.ones { 4, 32 })
        end
        for _ = 1, 3 do collectgarbage() end
        assert.is_nil(next(alive))
        assert.truthy(part)
        te.autocast({ recipe = recipe }, function()
            for i = 1, 3 do
                local m = te.Sequential(te.Linear(32, 32), function(v)
                    if i < 3 then error "stop" end
                    return coroutine.yield(v)
                end)
                alive[m], part = true, m[1]
                if i < 3 then pcall(m, te.ones { 4, 32 }) else coroutine.wrap(function() m(te.ones { 4, 32 }) end)() end
            end
            for _ = 1, 3 do collectgarbage() end
            assert.is_nil(next(alive))
        end)
    end)
end)
