local te = require "te"
local bits = require "spec.support.bits"
local plans = require "spec.support.plans"

-- The names of a pass's steps, a product's two halves included.
local function names(steps)
    local list = {}
    for i, step in ipairs(steps) do list[i] = step.name .. ":" .. step.kernels[1] end
    return list
end

local function input(shape, dtype)
    local x = te.randn(shape, { dtype = "float32" }):to(dtype or "float32"):detach()
    x.requires_grad = true
    return x
end

local function reason(plan, from, to)
    for _, r in ipairs(plan.reasons) do
        if r.from == from and r.to == to then return r.reason end
    end
end

describe("plans", function()
    it("join chains of program operations around matrix products", function()
        local plan = te.Sequential(te.Linear(8, 16), te.GELU(), te.Dropout(0.1), te.ConstantScale(2), te.Linear(16, 8))
            :explain(input { 4, 8 })
        assert.same({ "Linear:linear", "GELU + Dropout + ConstantScale:gelu_tanh+dropout_apply+mul", "Linear:linear" },
            names(plan.forward))
        assert.same({ "Linear:dgrad", "Linear:wgrad", "Linear:bias gradient",
            "GELU + Dropout + ConstantScale:gelu_tanh+dropout_apply+mul.backward",
            "Linear:dgrad", "Linear:wgrad" }, names(plan.backward))
    end)

    it("cross the border of a residual: bias, dropout, sum and norm are one step", function()
        local seq = te.Sequential(te.Residual(te.LayerNorm(8), te.Linear(8, 8), te.Dropout(0.1)), te.LayerNorm(8),
            te.Linear(8, 8))
        local plan = seq:explain(input { 2, 3, 8 })
        assert.same({ "LayerNorm:layer_norm", "Linear:linear",
            "Dropout + AddExtraInput + LayerNorm:dropout_apply+add+layer_norm", "Linear:linear" }, names(plan.forward))
        assert.same({ "Linear:dgrad", "Linear:wgrad", "Linear:bias gradient",
            "Dropout + AddExtraInput + LayerNorm:dropout_apply+add+layer_norm.backward", "Linear:dgrad", "Linear:wgrad",
            "LayerNorm:layer_norm.backward" }, names(plan.backward))
    end)

    it("give a pre-norm block one program between two products", function()
        local block = te.Sequential(
            te.Residual(te.RMSNorm(16), te.GroupedQueryAttention(16, 4, 2), te.Dropout(0.1)),
            te.Residual(te.RMSNorm(16), te.Linear(16, 64), te.SwiGLU(), te.Linear(32, 16), te.Dropout(0.1)))
        local plan = block:explain(input({ 2, 5, 16 }, "bfloat16"))
        local kinds = {}
        for i, step in ipairs(plan.forward) do kinds[i] = step.kind end
        assert.same({ "program", "gemm", "attention", "gemm", "program", "gemm", "program", "gemm", "program" }, kinds)
    end)

    it("read gated features stored in blocks where they are, and write their gradient there", function()
        local function build(options)
            te.manual_seed(2)
            return te.Sequential(te.Linear(8, 64), te.SwiGLU(options), te.RMSNorm(32), te.Linear(32, 8))
        end
        local blocks, plain = build { glu_interleave_size = 4 }, build()
        local order = {} -- of the features of `plain`, as rows of the weight of `blocks`
        for first = 1, 32, 4 do
            for half = 0, 32, 32 do
                for i = 0, 3 do order[#order + 1] = half + first - 1 + i end
            end
        end
        order = te.tensor(order, { dtype = "int64" })
        blocks[1].weight:detach():copy_(te.index_select(plain[1].weight:detach(), 1, order))
        local x = input { 3, 8 }
        local plan = blocks:explain(x)
        assert.same({ "Linear:linear", "SwiGLU + RMSNorm:swiglu+rms_norm", "Linear:linear" }, names(plan.forward))
        assert.same(names(plain:explain(x).backward), names(plan.backward))
        assert.same({ plain:explain(x).forward[2].bytes }, { plan.forward[2].bytes })
        local y, z = blocks(x), plain(x)
        assert.same(z:totable(), y:totable())
        te.sum(y * y):backward()
        te.sum(z * z):backward()
        for name, grad in pairs { weight = plain[1].weight.grad, bias = plain[1].bias.grad } do
            assert.same(te.index_select(grad, 1, order):totable(), blocks[1][name].grad:totable())
        end
    end)

    it("refuse to read one value in halves that lie in two ways", function()
        local seq = te.Sequential(te.Linear(8, 16), te.Residual(te.SwiGLU(), te.Linear(8, 16)),
            te.Residual(te.Sequential(te.SwiGLU(), te.Linear(8, 16)),
                te.Sequential(te.SwiGLU { glu_interleave_size = 2 }, te.Linear(8, 16)), { parallel = true }))
        local x = input { 3, 8 }
        assert.matches("halves of its input that lie otherwise", reason(seq:explain(x), "SwiGLU", "SwiGLU"))
        local fused, gradient = seq(x), nil
        fused:backward(te.ones { 3, 16 })
        gradient, x.grad = x.grad, nil
        local before = te.set_fusion(false)
        local y = seq(x)
        y:backward(te.ones { 3, 16 })
        te.set_fusion(before)
        assert.same(y:totable(), fused:totable())
        assert.same(x.grad:totable(), gradient:totable())
    end)

    it("compute in float64 no more than single operations do", function()
        local seq = te.Sequential(te.Residual(te.SiLU(), te.MakeExtraOutput(), te.RMSNorm(64,
            { params_dtype = "float64" }), te.GELU()), te.SReLU())
        local function run(fused, x)
            local before = te.set_fusion(fused)
            local y, extra = seq(x)
            te.set_fusion(before)
            local loss = (y * y):sum() + (extra * extra):sum()
            return y, extra, te.grad(loss, x)
        end
        local x = input { 32, 64 }
        assert.same({ "SiLU:silu", "RMSNorm:rms_norm", "GELU + AddExtraInput + SReLU:gelu_tanh+add+srelu" },
            names(seq:explain(x).forward))
        assert.matches("float64, the other in float32", reason(seq:explain(x), "SiLU", "RMSNorm"))
        local expected, got = { run(false, x) }, { run(true, x) }
        for i = 1, 3 do bits.assert_equal(expected[i], got[i]) end
    end)

    it("are of several groups where more results are wanted than one gives", function()
        local list, sums = {}, {}
        for i = 1, 12 do
            list[2 * i - 1], list[2 * i] = te.GELU(), te.MakeExtraOutput({ channel = i % 2 == 0 and "c" .. i or nil })
        end
        list[25] = function(x) return x * 2 end
        for i = 2, 12, 2 do list[#list + 1] = te.AddExtraInput { channel = "c" .. i } end
        local seq, x = te.Sequential(unpack(list)), input { 3, 8 }
        for k, fused in ipairs { false, true } do
            local before, total = te.set_fusion(fused), 0
            for i, y in ipairs { seq(x) } do total = total + (y * i):sum() end
            te.set_fusion(before)
            sums[k] = { total, te.grad(total, x) }
        end
        bits.assert_equal(sums[1][1], sums[2][1])
        bits.assert_equal(sums[1][2], sums[2][2])
        assert.matches("at most 8 results", reason(seq:explain(x), "GELU", "GELU"))
    end)

    it("take no parameter of one number for one of any length", function()
        for _, make in ipairs { te.Bias, te.LayerNorm, te.RMSNorm } do
            local seq = te.Sequential(make(1), te.GELU())
            assert.error_matches(function() seq(te.ones { 2, 3 }) end, "shape {2,3}, its last sizes? must be {?1")
            plans.assert_unchanged(seq, input { 2, 3, 1 })
        end
        local seq = te.Sequential(te.GELU(), te.Bias(8))
        seq(te.ones { 3, 8 })
        seq[2].bias = te.randn({ 1 }, { requires_grad = true })
        assert.error_matches(function() seq(te.ones { 3, 8 }) end, "shape {3,8}, its last size must be 1")
        seq[2].bias = te.ones({ 8 }, { requires_grad = true })
        assert.same({ 3, 8 }, seq(te.ones { 3, 8 }).shape)
    end)

    it("say what lies between two programs, and why a group ends before rows of several dimensions", function()
        local x = input { 32, 64 }
        local seq = te.Sequential(te.GELU(), te.Residual(te.RMSNorm(64, { params_dtype = "float64" })), te.ReLU())
        assert.matches("one that computes in float64 lies", reason(seq:explain(x), "GELU", "AddExtraInput"))
        seq = te.Sequential(te.GELU(), te.Residual(te.Linear(64, 64)), te.ReLU())
        assert.matches("a matrix product lies", reason(seq:explain(x), "GELU", "AddExtraInput"))
        local list = { te.LayerNorm { 2, 4 } }
        for _ = 1, 10 do list[#list + 1], list[#list + 2] = te.GELU(), te.MakeExtraOutput() end
        seq = te.Sequential(unpack(list))
        assert.matches("at most 8 results", reason(seq:explain(input { 3, 2, 4 }), "GELU", "GELU"))
    end)

    it("count the bytes of every tensor once", function()
        local plan = te.Sequential(te.GELU(), te.ConstantScale(3)):explain(input({ 10, 4 }, "bfloat16"))
        assert.same({ 80, 80 }, { plan.forward[1].reads, plan.forward[1].writes })
        assert.same({ 160, 80 }, { plan.backward[1].reads, plan.backward[1].writes }) -- x and the gradient, dx
        local linear = te.no_grad(function() return te.Sequential(te.Linear(4, 6)):explain(te.zeros { 10, 4 }) end)
        assert.same({ 4 * (40 + 24 + 6), 240, 480 },
            { linear.forward[1].reads, linear.forward[1].writes, linear.forward[1].flops })
        assert.equal(0, #linear.backward)
    end)

    it("say why neighbours are not one step", function()
        local plan = te.Sequential(te.Linear(8, 8), te.Linear(8, 16), te.SwiGLU(), te.MultiHeadedSelfAttention(8, 2),
            te.ReLU()):explain(input { 4, 8 })
        assert.matches("two matrix products", reason(plan, "Linear", "Linear"))
        assert.matches("stored, then read by one program", reason(plan, "Linear", "SwiGLU"))
        assert.matches("reads its operand", reason(plan, "SwiGLU", "MultiHeadedSelfAttention.linear"))
        local gated = te.Sequential(te.ReLU(), te.SwiGLU()):explain(input { 4, 8 })
        assert.same({ "ReLU:relu", "SwiGLU:swiglu" }, names(gated.forward))
        assert.matches("another width", reason(gated, "ReLU", "SwiGLU"))
        local split = te.Sequential(te.ReLU(), function(x) return x end, te.ReLU()):explain(input { 4, 8 })
        assert.same({ "ReLU:relu", "function:call", "ReLU:relu" }, names(split.forward))
        assert.matches("called: not an operation", reason(split, "function", "function"))
    end)

    it("fuse stochastic depth, which draws for samples, with the bits of single operations", function()
        local seq = te.Sequential(te.Residual(te.Linear(8, 8), te.StochasticDepth(0.5)), te.ReLU(),
            te.StochasticDepth(0.25), te.Dropout(0.3))
        local lens = te.tensor({ 2, 0, 3, 1 }, { dtype = "int64" })
        for _, args in ipairs { { input { 6, 3, 8 } }, { input { 5, 8 } }, { input { 6, 8 }, lens },
            { input { 8 } } } do
            local function run(fused)
                local before = te.set_fusion(fused)
                te.manual_seed(11)
                local ok, y = pcall(function() return seq(unpack(args)) end)
                te.set_fusion(before)
                return assert(ok and y, y)
            end
            assert.same(run(false):totable(), run(true):totable())
        end
        local plan = seq:explain(input { 6, 3, 8 })
        local list = names(seq:explain(input { 6, 3, 8 }).forward)
        assert.equal(4, #list) -- a product, two draws, and one program for all else
        assert.matches("AddExtraInput + ReLU + ", list[4], 1, true)
        assert.matches(" + Dropout:stochastic_depth_rows+add+relu+stocha", list[4], 1, true)
    end)

    it("fuse stochastic depth behind dropout and behind attention that drops out", function()
        local seq = te.Sequential(
            te.Residual(te.RMSNorm(8), te.MultiHeadedSelfAttention(8, 2, { dropout = 0.3 }), te.Dropout(0.5),
                { drop_path = 0.5 }),
            te.Residual(te.RMSNorm(8), te.Linear(8, 8), te.Dropout(0.5), { drop_path = 0.25 }))
        for _, args in ipairs { { input { 6, 3, 8 } }, { input { 5, 8 } },
            { input { 6, 8 }, te.tensor({ 2, 0, 4 }, { dtype = "int32" }) } } do
            plans.assert_unchanged(seq, unpack(args))
        end
        for _, step in ipairs(seq:explain(input { 6, 3, 8 }).forward) do assert.is_not.equal("call", step.kind) end
    end)

    it("leave an operation whose class runs something else alone", function()
        local Loud = te.GELU:extend("Loud")
        function Loud:op_forward(_, x) return te.gelu(x) * 2 end
        local seq = te.Sequential(te.ReLU(), Loud(), te.ReLU())
        assert.same({ "ReLU:relu", "Loud:call", "ReLU:relu" }, names(seq:explain(input { 2, 4 }).forward))
        assert.equal(2 * te.gelu(te.ones { 1 }):item(), seq(te.ones { 1 }):item())
    end)

    it("run nothing they do not have to", function()
        local runs = 0
        local seq = te.Sequential(te.ReLU(), te.ReLU())
        seq:explain(input { 2, 4 })
        seq = te.Sequential(te.ReLU(), function(x) runs = runs + 1 return x end)
        seq:explain(input { 2, 4 })
        assert.equal(0, runs)
        seq:append(te.ReLU()):explain(input { 2, 4 }) -- what follows must know its input
        assert.equal(1, runs)
    end)

    it("fall back where inputs cannot be planned, and say so", function()
        local seq = te.Sequential(te.AddExtraInput(), te.ReLU())
        local y = seq(te.ones { 2, 3, 4 }, te.ones { 3, 1 }) -- broadcasts in the middle
        assert.same({ 2, 3, 4 }, y.shape)
        assert.equal(48, y:sum():item())
        local plan = seq:explain(te.ones { 2, 3, 4 }, te.ones { 3, 1 })
        assert.matches("cannot be planned", plan.reasons[1].reason)
    end)

    it("fall back for inputs without rows", function()
        local seq = te.Sequential(te.ReLU(), te.ConstantScale(2))
        assert.equal(3, seq(te.tensor(1.5)):item())
        assert.matches("at least one dimension", seq:explain(te.tensor(1.5)).reasons[1].reason)
        assert.equal(3, seq(te.tensor { 1.5 }):item())
        assert.same({ 1, 8 }, te.Sequential(te.ReLU(), te.Reshape { 1, -1, 1 },
            te.Reshape { 1, 8 })(te.ones { 2, 4 }).shape)
        local ids = te.tensor(3, { dtype = "int64" })
        assert.same({ 8 }, te.Sequential(te.Embedding(4, 8), te.ReLU())(ids).shape)
    end)

    it("follow changes of the container, of options and of parameters", function()
        local seq = te.Sequential(te.Dropout(0.5), te.ConstantScale(2))
        assert.equal("Dropout + ConstantScale", seq:explain(te.ones { 4 }).forward[1].name)
        seq:eval()
        assert.equal("ConstantScale", seq:explain(te.ones { 4 }).forward[1].name)
        seq[2].scale = 5
        assert.equal(20, seq(te.ones { 4 }):sum():item())
        seq[1] = te.ConstantScale(10)
        assert.equal(200, seq(te.ones { 4 }):sum():item())
        table.insert(seq, te.Linear(4, 1, { init_method = te.initializers.constant(1) }))
        assert.equal(200, seq(te.ones { 4 }):item())
        seq[3].bias = nil
        assert.equal(200, seq(te.ones { 4 }):item())
        te.no_grad(function() seq[3].weight:mul_(2) end)
        assert.equal(400, seq(te.ones { 4 }):item())
    end)

    it("survive changing batch sizes", function()
        local seq = te.Sequential(te.LayerNorm(8), te.Linear(8, 4))
        local program = require("te.fuser").program(seq, 0, false)
        for _, tokens in ipairs { 3, 1, 0, 17 } do assert.same({ tokens, 4 }, seq(te.randn { tokens, 8 }).shape) end
        assert.equal(program, require("te.fuser").program(seq, 0, false))
    end)

    it("know the least time of every step when asked", function()
        local plan = te.Sequential(te.LayerNorm(64), te.Linear(64, 64)):explain(input { 32, 64 })
        assert.is_nil(plan.forward[1].floor)
        assert.equal(plan, plan:floors())
        local norm, linear = plan.forward[1], plan.forward[2]
        assert.is_true(norm.floor > 0 and linear.floor > 0)
        assert.is_true(math.abs(plan.backward[2].floor - linear.floor) < 0.5 * linear.floor) -- as many operations
        assert.matches("floor\n", tostring(plan))
        local ids = te.zeros({ 4 }, { dtype = "int64" })
        assert.equal("bfloat16", te.Sequential(te.Embedding(8, 4):to "bfloat16", te.GELU()):explain(ids).dtype)
    end)

    it("leave the next step as it would be without them, whatever runs for them", function()
        local Gate = te.Module:extend("Gate")
        function Gate:init(width) self.linear, self.dropout = te.Linear(width, width), te.Dropout(0.5) end
        function Gate:forward(x)
            if self.fails then error "no more" end
            return self.dropout(te.autocast({ recipe = self.recipe }, te.checkpoint, self.linear, x))
        end
        local recipe = te.recipe.DelayedScaling { amax_history_len = 4 }
        local function training(looks)
            te.manual_seed(3)
            local model = te.Sequential(te.Linear(8, 8), Gate(8), te.Linear(8, 8))
            local watch, found = te.numerics.watch(model), {}
            model[2].recipe = recipe
            for step = 1, 3 do
                local x = te.randn { 4, 8 }
                local large = x * 100
                if looks then te.autocast({ recipe = recipe }, function() model:explain(large) end) end
                local y = te.autocast({ recipe = recipe, dtype = "bfloat16" }, function()
                    if looks then model:explain(large) end
                    local result = model(x)
                    if looks then model:explain(large) end
                    return result
                end)
                if looks then
                    model:explain(large)
                    model[2].fails = true
                    assert.error_matches(function() model:explain(large) end, "no more")
                    model[2].fails = false
                end
                y:sum():backward()
                local now = { y = y:totable(), random = te.rng_state(), numerics = te.numerics.report() }
                for name, t in pairs(model:state_dict()) do now[name] = t:totable() end
                for name, value in pairs(now) do found[step .. " " .. name] = value end
            end
            watch:stop()
            return found
        end
        local with = training(true)
        for name, value in pairs(training(false)) do assert.same(value, with[name], name) end
    end)

    it("print, and turn into graphs and JSON", function()
        local plan = te.Sequential(te.LayerNorm(8), te.Linear(8, 8)):explain(input { 2, 8 })
        local text = tostring(plan)
        assert.matches("forward\n", text)
        assert.matches("1  LayerNorm +layer_norm", text)
        assert.matches("LayerNorm | Linear: a matrix product reads its operand from memory", text, 1, true)
        assert.matches("^digraph plan {", plan:dot())
        assert.matches('forward1 -> forward2', plan:dot(), 1, true)
        assert.matches('^{"backward": %[{"bytes": ', plan:json())
        assert.matches("^<svg ", plan:svg())
        assert.matches("</svg>\n$", plan:svg())
    end)
end)
