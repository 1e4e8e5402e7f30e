--- Backward fusions registered from Lua, by themselves and joint with a forward.

local te = require "te"
local fusion = require "spec.support.fusion"
local products = require "spec.support.products"
local with, window, fused_class, input = fusion.with, fusion.window, fusion.fused_class, fusion.input
local outcome, assert_same, axpy, listener = fusion.outcome, fusion.assert_same, fusion.axpy, fusion.listener
local linear_scale_backward, backward_linear_scale = fusion.linear_scale_backward, fusion.backward_linear_scale

describe("a backward fusion", function()
    before_each(function()
        te.manual_seed(9)
        fusion.calls = 0
    end)

    it("finds the inputs of built-in operations in their contexts", function()
        local seq = te.Sequential(te.LayerNorm(4), te.Linear(4, 5), te.ConstantScale(0.5), te.GELU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "backward", backward_linear_scale } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(1, fusion.calls)
    end)

    it("is what the plan shows in backward, and the rule the reason", function()
        local seq = te.Sequential(te.Linear(4, 5), te.ConstantScale(0.5))
        local x = input()
        with({ { "backward", backward_linear_scale } }, function()
            local plan = seq:explain(x)
            assert.same({ "Linear", "ConstantScale" }, plan.forward[1].ops)
            assert.same({ "BackwardLinearScale" }, plan.backward[1].ops)
            assert.matches("it runs as written, its backward by fusion rule ", plan.reasons[1].reason, 1, true)
        end)
        local class = te.FusedOperation:extend("OnlyBackward")
        function class:init(op) self:set_basic_ops(op) end
        function class:fuser_backward(_, dy) return dy end
        for _, run in ipairs { class(te.GELU()), te.Sequential(class(te.GELU())) } do
            assert.error_matches(function() run(x) end, "OnlyBackward: the class has no method fuser_forward", 1, true)
        end
    end)

    it("runs twice on a kept graph", function()
        local seq = te.Sequential(te.Linear(4, 5), te.ConstantScale(0.5))
        local x = input()
        with({ { "backward", backward_linear_scale } }, function()
            local loss = seq(x):sum()
            loss:backward(nil, { retain_graph = true })
            local once = x.grad:clone()
            loss:backward()
            assert.is_true((x.grad - once * 2):abs():max():item() < 1e-6)
        end)
        assert.equal(2, fusion.calls)
    end)

    it("is left out when nothing wants a gradient", function()
        local seen = {}
        local seq = te.Sequential(te.Linear(4, 5), te.ConstantScale(0.5))
        with({ { "backward", listener(seen) } }, function()
            te.no_grad(seq, input())
            assert.equal(0, #seen)
            for _, parameter in ipairs(seq:parameters()) do parameter.requires_grad = false end
            seq(te.randn({ 2, 4 }))
            assert.equal(0, #seen)
            seq[1].bias.requires_grad = true
            seq(te.randn({ 2, 4 }))
            assert.equal(1, #seen)
        end)
    end)

    it("adds up the gradients of several readers", function()
        local Scaled = fused_class("ForwardScaleAdd", {
            fuser_forward = function(self, _, x, extra_inputs)
                return x * self.basic_ops[1].scale + extra_inputs[2][1]
            end,
        })
        local function scaled_gradient(self, _, dy)
            local dx = dy * self.basic_ops[2].scale
            return dx, { {}, {} }, { { dx }, {} }
        end
        local AddScale = fused_class("BackwardAddScale", { fuser_backward = scaled_gradient })
        local make, first, second = te.MakeExtraOutput(), te.AddExtraInput(), te.AddExtraInput()
        make.channel, first.channel, second.channel = "kept", "kept", "kept"
        local seq = te.Sequential(te.ReLU(), make, first, te.ConstantScale(3), second, te.ConstantScale(0.5))
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", window({ te.ConstantScale, te.AddExtraInput }, Scaled) },
            { "backward", window({ te.AddExtraInput, te.ConstantScale }, AddScale) } },
            function() assert_same(unfused, outcome(seq, x)) end)
    end)

    it("may stand for a whole branch: gradients inside are its own affair", function()
        local given
        local Branch = fused_class("BackwardBranch", {
            fuser_backward = function(self, _, dy, extra_gradients)
                given = #extra_gradients[1]
                return dy * (1 + self.basic_ops[2].scale)
            end,
        })
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.ConstantScale(0.5)), te.ReLU())
        local x = input()
        local unfused = outcome(seq, x)
        local rule = window({ te.MakeExtraOutput, te.ConstantScale, te.AddExtraInput }, Branch)
        with({ { "backward", rule } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(0, given)
    end)

    it("reads and feeds what lies outside its window", function()
        local Tail = fused_class("BackwardTail", {
            fuser_backward = function(self, ctxs, dy)
                local _, extra = ctxs[2]:saved_tensors()
                assert(te.is_tensor(extra))
                return dy * self.basic_ops[1].scale, { {}, {} }, { {}, { dy } }
            end,
        })
        local Head = fused_class("BackwardHead", {
            fuser_backward = function(self, _, dy, extra_gradients)
                local sum = te.add(dy, extra_gradients[2][1])
                return sum * self.basic_ops[1].scale, { {}, {} }
            end,
        })
        local seq = te.Sequential(te.ConstantScale(3), te.Residual(te.Linear(4, 4), te.ConstantScale(0.5)),
            te.MakeExtraOutput())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "backward", window({ te.ConstantScale, te.AddExtraInput }, Tail) },
            { "backward", window({ te.ConstantScale, te.MakeExtraOutput }, Head) } },
            function() assert_same(unfused, outcome(seq, x)) end)
    end)

    it("uses the own backward of operations beside it", function()
        local Scale = te.BasicOperation:extend("Scale")
        function Scale:init() self:register_parameter("scale", te.full({}, 3)) end
        local runs = 0
        function Scale:op_forward(ctx, x)
            runs = runs + 1
            ctx:save_for_backward(x)
            return x * self.scale
        end
        function Scale:op_backward(ctx, dy)
            local x = ctx:saved_tensors()
            return dy * self.scale, { (dy * x):sum() }
        end
        local Pair = fused_class("ForwardPair", {
            fuser_forward = function(self, ctxs, x)
                ctxs[1]:save_for_backward(x)
                local y = x * self.basic_ops[1].scale
                ctxs[2]:save_for_backward(y)
                return te.linear(y, self.basic_ops[2].weight, self.basic_ops[2].bias)
            end,
        })
        local seq = te.Sequential(te.ReLU(), Scale(), te.Linear(4, 4), te.ConstantScale(2), te.ReLU())
        local x = input()
        local unfused = outcome(seq, x)
        assert.equal(1, runs)
        with({ { "forward", window({ Scale, te.Linear }, Pair) }, { "backward", backward_linear_scale } },
            function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(1, fusion.calls)
        assert.equal(1, runs)
    end)

    it("may overlap a forward fusion that saves nothing", function()
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.Linear(4, 4), te.ConstantScale(3)), te.GELU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", axpy }, { "backward", backward_linear_scale } },
            function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(2, fusion.calls)
    end)

    it("may leave attention inside a forward fusion to its own gradient", function()
        local Attend = fused_class("Attend", {
            fuser_forward = function(self, ctxs, x)
                return self.basic_ops[1](x, ctxs[1].seq_lens) * self.basic_ops[2].scale
            end,
        })
        local Scales = fused_class("BackwardScales", {
            fuser_backward = function(self, _, dy) return dy * (self.basic_ops[1].scale * self.basic_ops[2].scale) end,
        })
        local seq = te.Sequential(te.MultiHeadedSelfAttention(4, 2), te.ConstantScale(2), te.ConstantScale(3))
        local x, lens = input({ 5, 4 }), te.tensor({ 2, 3 }, { dtype = "int32" })
        local unfused = outcome(seq, x, lens)
        with({ { "forward", window({ te.MultiHeadedSelfAttention, te.ConstantScale }, Attend) },
            { "backward", window({ te.ConstantScale, te.ConstantScale }, Scales) } },
            function() assert_same(unfused, outcome(seq, x, lens)) end)
    end)

    it("cannot repeat random numbers of a forward fusion", function()
        local Drop = fused_class("ForwardDrop", {
            fuser_forward = function(self, _, x)
                return te.dropout(x, { p = self.basic_ops[1].p }) * self.basic_ops[2].scale
            end,
        })
        local Scales = fused_class("BackwardScales", {
            fuser_backward = function(self, _, dy) return dy * (self.basic_ops[1].scale * self.basic_ops[2].scale) end,
        })
        local seq = te.Sequential(te.Dropout(0.5), te.ConstantScale(2), te.ConstantScale(3))
        with({ { "forward", window({ te.Dropout, te.ConstantScale }, Drop) },
            { "backward", window({ te.ConstantScale, te.ConstantScale }, Scales) } }, function()
            local y = seq(input())
            assert.error_matches(function() y:sum():backward() end, "Dropout: a fused forward drew its random numbers")
        end)
    end)

    it("computes in the dtype of the forward", function()
        local seq = te.Sequential(te.Linear(4, 4), te.ConstantScale(3), te.AddExtraInput())
        local x, e = input(), input()
        local dtype
        local Backward = fused_class("Backward", {
            fuser_backward = function(self, ctxs, dy)
                local dx, parameters = linear_scale_backward(self, ctxs, dy)
                return dx, parameters
            end,
        })
        local Cast = te.BasicOperation:extend("Cast")
        function Cast.op_forward(_, _, v)
            dtype = te._core.compute_dtype()
            return v * 1
        end
        seq:append(Cast())
        local Tail = fused_class("ForwardTail", {
            fuser_forward = function(self, _, v, extra) return v * self.basic_ops[1].scale + extra[2][1] end,
        })
        with({ { "forward", window({ te.ConstantScale, te.AddExtraInput, Cast }, Tail) },
            { "backward", window({ te.Linear, te.ConstantScale }, Backward) } }, function()
            local y = te.autocast({ dtype = "bfloat16" }, seq, x, e)
            y:sum():backward()
        end)
        assert.equal("bfloat16", dtype)
        assert.is_nil(te._core.compute_dtype())
    end)

    describe("computes under the recipe and the scales of the forward:", function()
        local Forward = fused_class("ForwardLinearScale", {
            fuser_forward = function(self, _, x) return self.basic_ops[1](x) * self.basic_ops[2].scale end,
        })
        local Backward = fused_class("BackwardScales", {
            fuser_backward = function(self, _, dy) return dy * (self.basic_ops[1].scale * self.basic_ops[2].scale) end,
        })
        local forward = { "forward", window({ te.Linear, te.ConstantScale }, Forward) }
        local backward = { "backward", window({ te.ConstantScale, te.ConstantScale }, Backward) }

        -- Bytes of three steps, whose amaxes grow, and of what recipes remember then.
        local function train(recipe)
            te.manual_seed(7)
            -- on a device the order of a bias gradient's sums depends on the kernel
            local linear = te.Linear(32, 32, { bias = te.get_default_device() == "cpu" })
            local seq, texts = te.Sequential(linear, te.ConstantScale(2), te.ConstantScale(3)), {}
            for step = 1, 3 do
                seq:zero_grad()
                local x, dy = te.randn { 32, 32 } * (5 * step), te.randn { 32, 32 }
                x.requires_grad = true
                local y = te.autocast({ recipe = recipe }, seq, x)
                te.manual_seed(step)
                y:backward(dy)
                for _, t in ipairs { y, x.grad, linear.weight.grad, linear.bias and linear.bias.grad } do
                    texts[#texts + 1] = products.bytes_of(t)
                end
            end
            local state = seq:state_dict()
            for _, name in ipairs { "input", "weight", "grad_output" } do
                local scale, history = state["1." .. name .. "_scale"], state["1." .. name .. "_amax_history"]
                texts[#texts + 1] = scale and name .. products.bytes_of(scale) .. products.bytes_of(history) or name
            end
            return table.concat(texts)
        end

        for _, name in ipairs(products.names) do
            it(name, function()
                local recipe = products.recipes[name]()
                local expected = train(recipe)
                with({ backward }, function() assert.is_true(expected == train(recipe)) end)
                with({ forward, backward }, function() assert.is_true(expected == train(recipe)) end)
            end)
        end
    end)
end)

describe("a joint fusion", function()
    local nodes
    local Joint = fused_class("JointLinearScale", {
        fuser_forward = function(self, ctxs, x)
            nodes = nodes + 1
            ctxs[1]:save_for_backward(x)
            return te.linear(x, self.basic_ops[1].weight, self.basic_ops[1].bias) * self.basic_ops[2].scale, { {}, {} }
        end,
        fuser_backward = linear_scale_backward,
    })
    local joint = window({ te.Linear, te.ConstantScale }, Joint)

    before_each(function()
        te.manual_seed(10)
        fusion.calls, nodes = 0, 0
    end)

    it("runs its own backward", function()
        local seq = te.Sequential(te.ReLU(), te.Linear(4, 5), te.ConstantScale(0.5), te.GELU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", joint } }, function()
            assert_same(unfused, outcome(seq, x))
            assert.same({ 1, 1 }, { nodes, fusion.calls })
            te.no_grad(seq, x)
            assert.same({ 2, 1 }, { nodes, fusion.calls })
        end)
    end)

    it("stands in the list of backward rules, a forward one does not", function()
        local seen = {}
        local seq = te.Sequential(te.Linear(4, 4), te.ConstantScale(2), te.ConstantScale(2), te.AddExtraInput())
        with({ { "forward", joint }, { "forward", axpy }, { "backward", listener(seen) } },
            function() seq(input(), input()) end)
        assert.equal("JointLinearScale ConstantScale AddExtraInput", seen[1].ops)
    end)

    it("may be taken apart by a backward rule", function()
        local Scales = fused_class("BackwardScales", {
            fuser_backward = function(self, _, dy) return dy * (self.basic_ops[1].scale * self.basic_ops[2].scale) end,
        })
        local seq = te.Sequential(te.Linear(4, 4), te.ConstantScale(2), te.ConstantScale(3))
        local x = input()
        local unfused = outcome(seq, x)
        local function apart(ops) return { ops[1].basic_ops[1], Scales(ops[1].basic_ops[2], ops[2]) } end
        with({ { "forward", joint }, { "backward", apart } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.same({ 1, 0 }, { nodes, fusion.calls })
    end)
end)
