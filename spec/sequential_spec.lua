local te = require "te"

local function adder(n)
    local class = te.Module:extend("Add" .. n)
    function class:forward(x) return x + n end
    return class()
end

local function same(a, b) return (a - b):abs():max():item() < 1e-5 end

describe("te.Sequential", function()
    it("runs modules and anything callable in order", function()
        local seq = te.Sequential(adder(1), function(x) return x * 2 end, adder(3))
        assert.equal(13, seq(te.full({ 1 }, 4)):item())
    end)

    it("is a list", function()
        local a, b, c = adder(1), adder(2), adder(3)
        local seq = te.Sequential(a, b)
        assert.equal(2, #seq)
        assert.equal(seq, seq:append(c))
        assert.equal(c, seq:pop())
        assert.equal(a, seq:pop(1))
        seq:insert(1, c):extend { a, adder(4) }
        assert.equal(4, #seq)
        assert.equal(c, table.remove(seq, 1))
        seq[1] = c
        local seen = {}
        for i, m in ipairs(seq) do seen[i] = m end
        assert.same({ "Add3", "Add1", "Add4" }, { seen[1].__name, seen[2].__name, seen[3].__name })
        assert.equal("Add4", seq:pop(-1).__name)
        seq:insert(-1, b)
        assert.equal(b, seq[2])
    end)

    it("refuses what cannot be called", function()
        assert.error_matches(function() te.Sequential(3) end, "Sequential: module 1: expected a module")
        assert.error_matches(function() te.Sequential(te.ReLU) end,
            "Sequential: module 1: ReLU is a class; ReLU%(…%) makes a module")
        assert.error_matches(function() te.Sequential():insert(3, adder(1)) end, "position 3 of 0 modules")
        assert.error_matches(function() te.Sequential():pop() end, "position %-1 of 0 modules")
    end)

    it("drops nothing behind an argument that is nil", function()
        for _, container in ipairs { te.Sequential, te.Residual } do
            assert.error_matches(function() container(te.ReLU(), nil, te.GELU()) end,
                "module 2: expected a module or something callable, got nil")
            assert.error_matches(function() container(te.ReLU(), nil) end, "module 2: expected a module")
        end
        assert.error_matches(function() te.Sequential():extend({ te.ReLU(), nil, te.GELU() }) end, "entry 2 is nil")
        assert.equal(2, #te.Residual(te.ReLU(), te.GELU(), { drop_path = 0.5 }))
        local Tail = te.Sequential:extend("Tail")
        function Tail:init(...)
            self:append(te.ReLU())
            te.Sequential.init(self, ...)
        end
        assert.equal(3, #Tail(te.GELU(), te.SiLU()))
    end)

    it("counts from the end as well", function()
        local a, b, c = te.ReLU(), te.GELU(), te.SiLU()
        local Stack = te.Sequential:extend("Stack")
        for _, class in ipairs { te.Sequential, te.Residual, Stack, Stack:extend("Higher") } do
            local seq = class(a, b)
            assert.equal(b, seq[-1])
            assert.equal(a, seq[-2])
            assert.is_nil(seq[-3])
            seq[-1] = c
            assert.equal(c, seq[2])
            assert.equal(2, #seq)
            assert.error_matches(function() seq[-3] = a end, "position -3 of 2 modules", 1, true)
            assert.error_matches(function() seq[-1] = 5 end, "module 2: expected a module", 1, true)
            assert.same({ 2 }, seq(te.ones { 2 }).shape)
        end
    end)

    it("drops no argument", function()
        local seq = te.Sequential(te.ReLU())
        for method, arguments in pairs { append = { te.GELU(), te.GELU() }, insert = { 1, te.GELU(), te.GELU() },
            extend = { {}, te.GELU() }, pop = { 1, 2 } } do
            assert.error_matches(function() seq[method](seq, unpack(arguments)) end,
                ("Sequential:%s: argument %d"):format(method, #arguments), 1, true)
        end
        for _, list in ipairs { te.ReLU(), 3 } do
            assert.error_matches(function() seq:extend(list) end, "expected a list of modules or a container, got")
        end
        seq:extend(te.Residual(te.GELU(), te.GELU()))
        assert.equal(3, #seq)
        assert.error_matches(function() te.Module():register_parameter("w", te.ones(1), { frozen = true }) end,
            "register_parameter: argument 3")
        assert.error_matches(function() te.Linear(1, 1):zero_grad { set_to_none = true } end, ":zero_grad: argument 1")
        assert.error_matches(function() te.optim.SGD(te.Linear(1, 1)):zero_grad { set_to_none = true } end,
            "te.optim.SGD:zero_grad: argument 1", 1, true)
    end)

    it("has no gaps", function()
        for _, container in ipairs { te.Sequential, te.Residual } do
            local seq = container(te.Identity(), te.ReLU(), te.GELU())
            local x = te.ones { 2, 4 }
            seq(x)
            assert.error_matches(function() seq[5] = te.ReLU() end, "position 5 of 3 modules")
            assert.error_matches(function() seq[0] = te.ReLU() end, "position 0 of 3 modules")
            assert.error_matches(function() seq[1.5] = te.ReLU() end, "position 1.5 of 3 modules")
            assert.error_matches(function() seq[4] = 7 end,
                ": module 4: expected a module or something callable, got 7")
            seq[4] = te.ReLU()
            seq[1] = nil
            assert.error_matches(function() seq(x) end, ": module 2 stands behind a gap: there is no module 1", 1, true)
            seq[1] = te.Identity()
            assert.same({ 2, 4 }, seq(x).shape)
        end
    end)

    it("loses no module behind a gap", function()
        local function with_gap(at)
            local seq = te.Sequential(te.Linear(2, 2), te.ReLU(), te.Linear(2, 2))
            local state = seq:state_dict()
            seq[at] = nil
            return seq, state
        end
        for at, message in pairs {
            "Sequential: module 2 stands behind a gap: there is no module 1",
            "Sequential: module 3 stands behind a gap: there is no module 2",
        } do
            local seq, state = with_gap(at)
            for _, walk in ipairs {
                function(m) m:state_dict() end, function(m) m:load_state_dict(state) end,
                function(m) m:parameters() end, function(m) m:named_parameters() end, function(m) m:named_buffers() end,
                function(m) m:named_modules() end, function(m) m:children() end, function(m) m:num_parameters() end,
                function(m) m:to "bfloat16" end, function(m) m:train() end, function(m) m:eval() end,
                function(m) m:apply(function() end) end, function(m) m:zero_grad() end,
                function(m) m:requires_grad_(false) end, function(m) te.Sequential():extend(m) end,
                function(m) te.Sequential(m):parameters() end, function(m) te.optim.SGD(m) end,
            } do assert.error_matches(function() walk(seq) end, message, 1, true) end
        end
        assert.equal("Sequential(\n  (1): Linear(in_features=2, out_features=2, bias=true)\n  (2): nil\n"
            .. "  (3): Linear(in_features=2, out_features=2, bias=true)\n)", tostring((with_gap(2))))
        assert.truthy(tostring((with_gap(1))):find("\n  (3): Linear", 1, true))
        local seq = with_gap(3)
        assert.equal(2, #seq:parameters())
        seq = te.Sequential(te.Linear(2, 2), te.ReLU(), te.Linear(2, 3))
        table.insert(seq, 1, (table.remove(seq, 1)))
        seq[2], seq[3] = seq[3], nil -- shifted down
        assert.equal(4 + 2 + 6 + 3, seq:num_parameters())
        -- the same in a module of one's own; what counts for nothing may stand anywhere
        local own = te.Module:extend("Own")()
        own[7] = "text"
        assert.same({}, own:parameters())
        own[3] = te.ones({ 2 }, { requires_grad = true })
        assert.error_matches(function() own:parameters() end, "Own: parameter 3 stands behind a gap", 1, true)
    end)

    it("describes tensors that stand where a module should", function()
        local wrong = "Sequential: module 1: expected a module or something callable, got float32 tensor {2}"
        assert.error_matches(function() te.Sequential():append(te.ones { 2 }) end, wrong, 1, true)
        assert.error_matches(function() te.Sequential():insert(1, te.ones { 2 }) end, wrong, 1, true)
    end)

    it("refuses what is no module where it is added, or by the next run", function()
        local x, wrong = te.ones { 2, 4 }, ": module %d: expected a module or something callable, got %s"
        for value, shown in pairs { [5] = "5", relu = '"relu"', [true] = "true" } do
            for _, container in ipairs { te.Sequential, te.Residual } do
                local seq = container(te.Identity(), te.ReLU())
                local function refuses(position, fn)
                    assert.error_matches(fn, wrong:format(position, shown), 1, true)
                end
                refuses(2, function() container(te.Identity(), value) end)
                refuses(3, function() seq:append(value) end)
                refuses(1, function() seq:insert(1, value) end)
                refuses(3, function() seq:extend { value } end)
                assert.equal(2, #seq)
                seq[2] = value
                refuses(2, function() seq(x) end)
                refuses(2, function() seq:explain(x) end)
                seq[2] = te.Linear
                assert.error_matches(function() seq(x) end,
                    "module 2: Linear is a class; Linear(…) makes a module of it", 1, true)
                seq[2] = te.ReLU()
                assert.same({ 2, 4 }, seq(x).shape)
            end
        end
        assert.error_matches(function() te.Sequential(te.ReLU()):append(nil) end,
            "module 2: expected a module", 1, true)
        local parallel = te.Residual(te.Identity(), te.ReLU(), { parallel = true })
        parallel[2] = 5
        assert.error_matches(function() parallel(x) end, wrong:format(2, "5"), 1, true)
    end)

    it("passes extra inputs and outputs in the order of the operations", function()
        local seq = te.Sequential(te.AddExtraInput(), te.MakeExtraOutput(), te.ConstantScale(10), te.MakeExtraOutput(),
            te.AddExtraInput())
        local y, first, second = seq(te.full({ 1 }, 1), te.full({ 1 }, 2), te.full({ 1 }, 5))
        assert.equal(35, y:item())
        assert.equal(3, first:item())
        assert.equal(30, second:item())
        assert.error_matches(function() seq(te.ones({ 1 })) end, "Sequential: takes 2 extra inputs, got 0")
        assert.error_matches(function() seq(te.ones({ 1 }), te.ones({ 1 }), te.ones({ 1 }), te.ones({ 1 })) end,
            "takes 2 extra inputs, got 3")
    end)

    it("counts the extra inputs of nested containers", function()
        local seq = te.Sequential(te.Sequential(te.AddExtraInput()), te.Residual(te.AddExtraInput()))
        local y = seq(te.full({ 1 }, 1), te.full({ 1 }, 2), te.full({ 1 }, 4))
        assert.equal(3 + (3 + 4), y:item())
    end)

    it("hands seq_lens to what attends", function()
        te.manual_seed(3)
        local attention = te.MultiHeadedSelfAttention(8, 2)
        local seq = te.Sequential(te.LayerNorm(8), te.Residual(attention), te.GELU())
        local x = te.randn({ 5, 8 })
        local packed = seq(x, te.tensor({ 2, 3 }, { dtype = "int32" }))
        local first, second = seq(x:narrow(1, 1, 2)), seq(x:narrow(1, 3, 3))
        local apart = te.cat({ first, second }, 1)
        assert.is_true((packed - apart):abs():max():item() < 1e-5)
    end)

    it("hands seq_lens to callables that have a second argument, wherever they stand", function()
        local attention = te.MultiHeadedSelfAttention(8, 2)
        local Own, Vararg = te.Module:extend("Own"), te.Module:extend("Vararg")
        function Own:forward(x, seq_lens) return attention(x, seq_lens) end
        function Vararg:forward(...) return attention(...) end
        local x, lens = te.randn { 5, 8 }, te.tensor({ 2, 3 }, { dtype = "int32" })
        local packed = attention(x, lens)
        local callable = setmetatable({}, { __call = function(_, y, seq_lens) return attention(y, seq_lens) end })
        local Container = te.Sequential:extend("Container")
        function Container:forward(y, seq_lens) return attention(y, seq_lens) end
        for _, op in ipairs { Own(), Vararg(), Container(), callable,
            function(y, seq_lens) return attention(y, seq_lens) end } do
            for _, fused in ipairs { true, false } do
                te.set_fusion(fused)
                local right = same(packed, te.Sequential(op)(x, lens)) and
                    same(x + packed, te.Residual(op)(x, lens)) and
                    same(packed, te.Sequential(te.Identity(), te.Sequential(op, te.Identity()))(x, lens))
                te.set_fusion(true)
                assert.is_true(right)
            end
        end
        Own.takes_seq_lens = false
        assert.is_false(same(packed, te.Sequential(Own(), te.MultiHeadedSelfAttention(8, 2))(x, lens)))
        -- second arguments that are something else
        te.Sequential(attention, te.gelu, te.pointwise(function(y) return y * 2 end))(x, lens)
    end)

    describe("with packed sequences", function()
        local attention, x, lens
        before_each(function()
            te.manual_seed(9)
            attention = te.MultiHeadedSelfAttention(8, 2)
            x, lens = te.randn { 5, 8 }, te.tensor({ 2, 3 }, { dtype = "int32" })
        end)

        local function refuses(container, ...)
            local arguments = { ... }
            for _, fused in ipairs { true, false } do
                local before = te.set_fusion(fused)
                local ok, message = pcall(container, unpack(arguments))
                te.set_fusion(before)
                assert.is_false(ok)
                assert.is_truthy(message:find("te.MultiHeadedSelfAttention: seq_lens did not come here, though "
                    .. container.__name .. " runs packed sequences", 1, true), message)
            end
        end

        it("refuses attention that lengths do not reach", function()
            local Block, Deep = te.Module:extend("Block"), te.Module:extend("Deep")
            function Block:init() self.norm, self.attention = te.LayerNorm(8), attention end
            function Block:forward(y) return y + self.attention(self.norm(y)) end
            function Deep:init() self.inner = te.Sequential(te.LayerNorm(8), te.Residual(attention)) end
            function Deep:forward(y) return self.inner(y) end
            local taking = te.Residual(te.LayerNorm(8), te.MultiHeadedSelfAttention(8, 2))
            for _, member in ipairs { Block(), Deep(), function(y) return Block()(y) end,
                te.Sequential(te.GELU(), Block()), function(y) return te.Sequential(Deep())(y) end } do
                assert.same({ 5, 8 }, te.Sequential(member, taking)(x).shape)
                refuses(te.Sequential(member, taking), x, lens)
                refuses(te.Residual(taking, member, te.GELU()), x, lens)
                assert.same({ 5, 8 }, te.Sequential(member, taking)(x, nil).shape) -- none are in force any more
            end
        end)

        it("lets lengths be handed on, or be of no concern", function()
            local Handing, Apart = te.Module:extend("Handing"), te.Module:extend("Apart")
            function Handing:init() self.inner = te.Sequential(te.LayerNorm(8), attention) end
            function Handing:forward(y, seq_lens) return self.inner(y, seq_lens) end
            function Apart:init() self.inner = te.Sequential(attention, te.GELU()) end
            function Apart:forward(y) return self.inner(attention(y)) end
            Apart.takes_seq_lens = false
            local apart, handing = Apart(), Handing()
            local expected = handing(te.gelu(attention(attention(x))), lens)
            local got = te.Sequential(apart, handing)(x, lens)
            assert.is_true((expected - got):abs():max():item() < 1e-5)
            -- a container that is given lengths of its own
            local other = te.tensor({ 5 }, { dtype = "int32" })
            local Own = te.Module:extend("Own")
            function Own:forward(y) return handing.inner(y, other) end
            got = te.Sequential(Own(), handing)(x, lens)
            assert.is_true((handing(handing(x), lens) - got):abs():max():item() < 1e-5)
        end)

        it("says what lengths have to be", function()
            local seq = te.Sequential(te.LayerNorm(8), attention)
            for shown, given in pairs { ["table"] = { 2, 3 }, ["a float32 tensor {2}"] = te.tensor { 2, 3 },
                ["number"] = 5, ["a int64 tensor {}"] = te.tensor(5, { dtype = "int64" }) } do
                assert.error_matches(function() seq(x, given) end,
                    "seq_lens: expected an int32 or int64 tensor {batch} of lengths, got " .. shown, 1, true)
            end
            assert.error_matches(function() seq(x, x) end, "Sequential: takes 0 extra inputs, got 1; seq_lens: ", 1,
                true)
            assert.error_matches(function() attention(x, { 2, 3 }) end,
                "te.MultiHeadedSelfAttention: seq_lens: expected an int32 or int64 tensor {batch}, got table", 1,
                true)
            for _, opts in ipairs { {}, { rope = true, qk_norm = "RMSNorm" } } do
                local module = te.MultiHeadedSelfAttention(8, 2, opts)
                for _, short in ipairs { { 4 }, { 2, 2 }, { 0, 4, 0 } } do
                    assert.error_matches(function() module(x, te.tensor(short, { dtype = "int32" })):totable() end,
                        "seq_lens add up to 4 of 5 tokens", 1, true)
                end
                assert.error_matches(function() module(x:view { 1, 5, 8 }, lens) end,
                    "te.MultiHeadedSelfAttention: seq_lens go with x {tokens, hidden}, which holds packed sequences, "
                    .. "not with {1,5,8}", 1, true)
            end
        end)
    end)

    it("takes nil behind the extra inputs for absent", function()
        local x = te.randn { 2, 3 }
        local add, linear = te.AddExtraInput(), te.Linear(3, 3)
        assert.is_true(same(linear(x), linear(x, nil)))
        assert.is_true(same(add(x, x), add(x, x, nil)))
        assert.is_true(same(add(x, x), te.Sequential(add)(x, x, nil, nil)))
        assert.is_true(same(linear(x), te.Sequential(linear)(x, nil, nil)))
        assert.equal(#te.Sequential(add):explain(x, x).forward, #te.Sequential(add):explain(x, x, nil).forward)
        local q = te.randn { 1, 2, 3, 4 }
        local attention = te.DotProductAttention {}
        assert.is_true(same(attention(q, q, q), attention(q, q, q, nil)))
        assert.error_matches(function() add(x) end, "AddExtraInput: takes 1 extra inputs, got 0")
        assert.error_matches(function() add(x, nil, x) end, "AddExtraInput: takes 1 extra inputs, got 2")
        assert.error_matches(function() linear(x, nil, x) end, "Linear: takes 0 extra inputs, got 2")
    end)

    it("refuses seq_lens where nothing takes them, and takes nil for none", function()
        local x, lens = te.randn { 5, 8 }, te.tensor({ 2, 3 }, { dtype = "int32" })
        for _, op in ipairs { te.LayerNorm(8), te.relu, function(y) return y * 2 end } do
            assert.error_matches(function() te.Sequential(op)(x, lens) end,
                "Sequential: takes 0 extra inputs, got 1; nothing in it takes seq_lens", 1, true)
        end
        local attention = te.MultiHeadedSelfAttention(8, 2)
        assert.is_true(same(attention(x), te.Sequential(attention)(x, nil)))
        local seq = te.Sequential(attention, te.AddExtraInput())
        assert.is_true(same(seq(x, x), seq(x, nil, x)))
        assert.equal(#seq:explain(x, x).forward, #seq:explain(x, nil, x).forward)
    end)

    it("names extra inputs that are missing or no tensors", function()
        local x = te.ones { 2 }
        local seq = te.Sequential(te.GELU(), te.AddExtraInput(), te.AddExtraInput())
        for _, fused in ipairs { true, false } do
            te.set_fusion(fused)
            local ok, reason = pcall(seq, x, x, nil)
            te.set_fusion(true)
            assert.is_false(ok)
            assert.matches("Sequential: extra input 2 is nil", reason, 1, true)
        end
        assert.error_matches(function() seq(x, x, 3) end, "Sequential: extra input 2: expected a tensor, got 3",
            1, true)
        assert.error_matches(function() seq:explain(x, nil, x) end, "extra input 1 is nil", 1, true)
    end)

    it("takes 2-D and 3-D input", function()
        local seq = te.Sequential(te.LayerNorm(8), te.Linear(8, 4), te.ReLU())
        assert.same({ 3, 4 }, seq(te.randn({ 3, 8 })).shape)
        assert.same({ 2, 3, 4 }, seq(te.randn({ 2, 3, 8 })).shape)
    end)

    it("releases intermediates between built-in modules, never what others hold", function()
        local seq = te.Sequential(te.Linear(4, 4), te.Identity(), te.ReLU(), te.Dropout(0), te.Reshape({ 2, 8 }))
        local x = te.randn({ 4, 4 })
        local y = seq(x)
        assert.same({ 4, 4 }, x.shape)
        assert.same({ 2, 8 }, y.shape)
        assert.is_true(seq.pure)
        local kept
        seq:insert(2, function(h) kept = h; return h end)
        seq(x)
        assert.same({ 4, 4 }, kept.shape)
        assert.same({ 4, 4 }, te.Sequential(te.Identity())(x).shape)
        local _, extra = te.Sequential(te.ReLU(), te.MakeExtraOutput(), te.ReLU(), te.ReLU())(x)
        assert.same({ 4, 4 }, extra.shape)
    end)

    it("gives the same gradients as the functions it stands for", function()
        te.manual_seed(5)
        local fc1, fc2 = te.Linear(4, 6), te.Linear(6, 4)
        local x = te.randn({ 3, 4 })
        te.Residual(fc1, te.GELU(), fc2)(x):sum():backward()
        local got = fc1.weight.grad:clone()
        fc1:zero_grad()
        local h = te.gelu(te.linear(x, fc1.weight, fc1.bias))
        te.add(x, te.linear(h, fc2.weight, fc2.bias)):sum():backward()
        assert.is_true((got - fc1.weight.grad):abs():max():item() < 1e-6)
    end)

    it("makes subclasses like every module", function()
        local Stack = te.Sequential:extend("Stack")
        local s = Stack(adder(1), adder(2))
        assert.equal(3, s(te.zeros({ 1 })):item())
        assert.equal("Stack(\n  (1): Add1()\n  (2): Add2()\n)", tostring(s))
    end)
end)

describe("te.Residual", function()
    it("leaves the branches of whole sequences out while training", function()
        te.manual_seed(11)
        local residual = te.Residual(te.ConstantScale(3), { drop_path = 0.5 })
        local y = residual(te.ones { 64, 2, 4 })
        local sums = y:sum(3):sum(2)
        local dropped, kept = 0, 0
        for i = 1, 64 do
            local sum = sums[i]:item()
            if sum == 8 then dropped = dropped + 1 elseif sum == 8 * (1 + 3 / 0.5) then kept = kept + 1 end
        end
        assert.equal(64, dropped + kept)
        assert.is_true(dropped > 15 and kept > 15)
        assert.equal(64 * 8 * 4, residual:eval()(te.ones { 64, 2, 4 }):sum():item())
        assert.error_matches(function() te.Residual(te.ReLU(), { drop_paht = 1 }) end, "did you mean")
    end)

    it("adds parallel branches of one input", function()
        local x = te.randn { 5, 8 }
        local a, b = te.Sequential(te.LayerNorm(8), te.Linear(8, 8)),
            te.Sequential(te.RMSNorm(8), te.Linear(8, 16), te.SwiGLU())
        local residual = te.Residual(a, b, { parallel = true })
        local expected = x + a(x) + b(x)
        assert.is_true((residual(x) - expected):abs():max():item() < 1e-6)
        residual:append(te.ConstantScale(10))
        assert.is_true((residual(x) - (expected + x * 10)):abs():max():item() < 1e-5)
        local plan = te.no_grad(function() return te.Residual(a, b, { parallel = true }):explain(x) end)
        assert.equal("LayerNorm + RMSNorm", plan.forward[1].name) -- both norms read x once
        assert.equal(4, #plan.forward) -- two products, and one program for the gate and both sums
    end)

    it("keeps a stream of float32 as it enters, also under te.autocast", function()
        local block = te.Sequential(te.Residual(te.LayerNorm(8), te.Linear(8, 8)),
            te.Residual(te.LayerNorm(8), te.Linear(8, 8)))
        local x = te.randn { 4, 8 }
        local function dtype_of(stream)
            return te.autocast({ dtype = "bfloat16" }, function() return block(stream).dtype end)
        end
        assert.same({ "float32", "bfloat16" }, { dtype_of(x), dtype_of(x:to "bfloat16") })
        te.set_fusion(false)
        local unfused = dtype_of(x)
        te.set_fusion(true)
        assert.equal("float32", unfused)
    end)

    it("may have more parameters than Lua's stack takes", function()
        local biases, model = {}, te.Sequential()
        for i = 1, 8500 do biases[i] = te.Bias(1) end
        model:extend(biases)
        model(te.ones { 1, 1 }):sum():backward()
        assert.equal(1, biases[8500].bias.grad:item())
        assert.is_true(#model:explain(te.ones { 1, 1 }).forward > 0)

        local groups, sizes = 4500, te.ones({ 4500 }, { dtype = "int64" })
        local experts = te.Sequential(te.GroupedLinear(groups, 1, 1), te.ConstantScale(2))
        local y = experts(te.ones { groups, 1 }, sizes)
        te.set_fusion(false)
        local unfused = experts(te.ones { groups, 1 }, sizes)
        te.set_fusion(true)
        assert.is_true(te.all(te.eq(y, unfused)):item())
    end)
end)
