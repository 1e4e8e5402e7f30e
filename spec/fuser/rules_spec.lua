--- Fusions registered from Lua: what rules are told, what becomes of what they return, and how mistakes read.

local te = require "te"

-- Rules registered by `with` are taken away again, also when the test fails.
local function with(rules, fn)
    local done = {}
    for _, rule in ipairs(rules) do
        local kind, f, opts = unpack(rule)
        done[#done + 1] = te["register_" .. kind .. "_fusion"](f, opts)
    end
    local ok, message = pcall(fn)
    for _, f in ipairs(done) do te.unregister_fusion(f) end
    if not ok then error(message, 0) end
end

-- A rule that replaces neighbours of the given classes by make(…).
local function window(classes, make)
    return function(ops)
        local new, at = {}, 1
        while ops[at] do
            local fits = true
            for k, class in ipairs(classes) do fits = fits and te.is(ops[at + k - 1], class) end
            new[#new + 1] = fits and make(unpack(ops, at, at + #classes - 1)) or ops[at]
            at = at + (fits and #classes or 1)
        end
        return new
    end
end

local function fused_class(name, methods)
    local class = te.FusedOperation:extend(name)
    function class:init(...) self:set_basic_ops(...) end
    for method, fn in pairs(methods) do class[method] = fn end
    return class
end

-- Output and all gradients of a run, as tables of numbers.
local function outcome(seq, ...)
    local inputs = { ... }
    seq:zero_grad()
    for _, input in ipairs(inputs) do input.grad = nil end
    local results, total = { seq(...) }, nil
    for i, result in ipairs(results) do
        local part = te.sum(result * result * (i + 0.5))
        total = total and total + part or part
    end
    total:backward()
    local numbers = {}
    local function note(name, t) numbers[#numbers + 1] = { name, t and t:detach():clone() } end
    for i, result in ipairs(results) do note("result " .. i, result) end
    for i, input in ipairs(inputs) do note("gradient of input " .. i, input.grad) end
    for name, parameter in seq:named_parameters() do note("gradient of " .. name, parameter.grad) end
    return numbers
end

-- Rounding differs: sums that cancel are added up in another order.
local function assert_same(expected, got, tolerance)
    assert.equal(#expected, #got)
    for i, entry in ipairs(expected) do
        local name, want, value = entry[1], entry[2], got[i][2]
        assert.equal(want == nil, value == nil, name)
        if want then
            local scale = math.max(1, want:abs():max():item())
            local difference = (want - value):abs():max():item()
            assert.is_true(difference <= (tolerance or 2e-5) * scale, ("%s differs by %g"):format(name, difference))
        end
    end
end

local calls = 0

local ForwardAxpy = fused_class("ForwardAxpy", {
    fuser_forward = function(self, _, x, extra_inputs)
        calls = calls + 1
        return x * self.basic_ops[1].scale + extra_inputs[2][1], { {}, {} }
    end,
})
local axpy = window({ te.ConstantScale, te.AddExtraInput }, ForwardAxpy)

-- dx and gradients of a Linear whose result is multiplied by a constant.
local function linear_scale_backward(self, ctxs, dy)
    calls = calls + 1
    local linear, scale = self.basic_ops[1], self.basic_ops[2].scale
    local x, scaled = ctxs[1]:saved_tensors(), dy * scale
    local dw = te.matmul(scaled:transpose(1, 2), x)
    return te.matmul(scaled, linear.weight), { { dw, scaled:sum(1) }, {} }, { {}, {} }
end
local BackwardLinearScale = fused_class("BackwardLinearScale", { fuser_backward = linear_scale_backward })
local backward_linear_scale = window({ te.Linear, te.ConstantScale }, BackwardLinearScale)

local function input(shape) return te.randn(shape or { 3, 4 }, { requires_grad = true }) end

local function names(ops)
    local list = {}
    for i, op in ipairs(ops) do list[i] = op.__name end
    return table.concat(list, " ")
end

-- A rule that changes nothing and writes down what it is given.
local function listener(seen)
    return function(ops, opts)
        seen[#seen + 1] = { ops = names(ops), opts = opts }
        return ops
    end
end

describe("a forward fusion", function()
    before_each(function()
        te.manual_seed(7)
        calls = 0
    end)

    it("replaces neighbours and gives the same values and gradients", function()
        local seq = te.Sequential(te.Linear(4, 4), te.ConstantScale(3), te.AddExtraInput(), te.GELU())
        local x, e = input(), input()
        local unfused = outcome(seq, x, e)
        assert.equal(0, calls)
        with({ { "forward", axpy } }, function()
            assert_same(unfused, outcome(seq, x, e))
            assert.equal(1, calls)
        end)
    end)

    it("is gone after unregistering", function()
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput())
        local x, e = input(), input()
        te.register_forward_fusion(axpy)
        seq(x, e)
        assert.is_true(te.unregister_fusion(axpy))
        seq(x, e)
        assert.equal(1, calls)
        assert.is_false(te.unregister_fusion(axpy))
        te.register_forward_fusion(axpy)
        assert.is_false(te.unregister_backward_fusion(axpy))
        assert.is_true(te.unregister_forward_fusion(axpy))
        seq(x, e)
        assert.equal(1, calls)
    end)

    it("crosses the border of a residual branch", function()
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.LayerNorm(4), te.ConstantScale(0.5)), te.ReLU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", axpy } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(1, calls)
    end)

    it("may stand for a whole branch; what stays inside is not passed in", function()
        local given
        local Branch = fused_class("Branch", {
            fuser_forward = function(self, _, x, extra_inputs)
                given = #extra_inputs[3]
                return x * (1 + self.basic_ops[2].scale), { { x }, {}, {} }
            end,
        })
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.ConstantScale(0.5)), te.ReLU())
        local x = input()
        local unfused = outcome(seq, x)
        local rule = window({ te.MakeExtraOutput, te.ConstantScale, te.AddExtraInput }, Branch)
        with({ { "forward", rule } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(0, given)
    end)

    it("makes extra outputs for the caller", function()
        local Both = fused_class("Both", {
            fuser_forward = function(self, _, x)
                calls = calls + 1
                return x * self.basic_ops[2].scale, { { x }, {} }
            end,
        })
        local seq = te.Sequential(te.ReLU(), te.MakeExtraOutput(), te.ConstantScale(2), te.Linear(4, 4))
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", window({ te.MakeExtraOutput, te.ConstantScale }, Both) } },
            function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(1, calls)
    end)

    it("works with operations that take lengths of packed sequences", function()
        local Attend = fused_class("Attend", {
            fuser_forward = function(self, ctxs, x)
                calls = calls + 1
                return self.basic_ops[1](x, ctxs[1].seq_lens) * self.basic_ops[2].scale
            end,
        })
        local seq = te.Sequential(te.MultiHeadedSelfAttention(4, 2), te.ConstantScale(2))
        local x, lens = te.randn({ 5, 4 }), te.tensor({ 2, 3 }, { dtype = "int32" })
        local unfused = seq(x, lens)
        with({ { "forward", window({ te.MultiHeadedSelfAttention, te.ConstantScale }, Attend) } },
            function() assert.equal(0, (unfused - seq(x, lens)):abs():max():item()) end)
        assert.equal(1, calls)
    end)

    it("reaches into models", function()
        local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 2, n_head = 2, n_embd = 8 }
        local ids = te.randint(0, 10, { 2, 8 }, { dtype = "int32" })
        local function run()
            model:zero_grad()
            local _, loss = model(ids, ids)
            loss:backward()
            return loss:item(), model.blocks[1].mlp[4].weight.grad:clone(), model.wte.weight.grad:clone()
        end
        local loss, dw, embedding = run()
        local Pair = fused_class("GeluLinear", {
            fuser_forward = function(self, _, x)
                calls = calls + 1
                return te.linear(te.gelu(x, { approximate = self.basic_ops[1].approximate }), self.basic_ops[2].weight)
            end,
        })
        with({ { "forward", window({ te.GELU, te.Linear }, Pair) } }, function()
            local fused_loss, fused_dw, fused_embedding = run()
            assert.equal(2, calls)
            assert.is_true(math.abs(loss - fused_loss) < 1e-5)
            assert.is_true((dw - fused_dw):abs():max():item() < 1e-5)
            assert.is_true((embedding - fused_embedding):abs():max():item() < 1e-5)
        end)
    end)

    it("does not happen when fusion is off", function()
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput())
        with({ { "forward", axpy } }, function()
            te.set_fusion(false)
            local ok, message = pcall(seq, input(), input())
            te.set_fusion(true)
            assert.is_true(ok, message)
            assert.equal(0, calls)
            seq(input(), input())
            assert.equal(1, calls)
        end)
    end)
end)

describe("rules", function()
    before_each(function()
        te.manual_seed(8)
        calls = 0
    end)

    it("see runs of basic operations, containers dissolved", function()
        local seen = {}
        local custom = te.Module:extend("Custom")
        function custom:forward(x) return x + 1 end
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.Sequential(te.LayerNorm(4), te.ReLU())), custom(),
            function(x) return x end, te.Bias(4))
        with({ { "forward", listener(seen) } }, function() seq(te.randn({ 2, 4 })) end)
        assert.equal(2, #seen)
        assert.equal("Linear MakeExtraOutput LayerNorm ReLU AddExtraInput", seen[1].ops)
        assert.equal("Bias", seen[2].ops)
    end)

    it("see no operation together with one of several readers of its result", function()
        local seen = {}
        local function item(op, x, y, ...) return { op = op, x = x, extras = { ... }, y = y, outs = {} } end
        local walk = { outputs = {}, y = 5, items = {
            item(te.ReLU(), 1, 2), item(te.GELU(), 2, 3), item(te.Identity(), 2, 4), item(te.AddExtraInput(), 4, 5, 3),
        } }
        with({ { "forward", listener(seen) } },
            function() require("te.fuser.rewrite").walk(walk, { opts = {}, wants_grad = false }) end)
        assert.equal(4, #walk.items)
        assert.same({ "ReLU", "GELU", "Identity AddExtraInput" }, { seen[1].ops, seen[2].ops, seen[3].ops })
    end)

    it("run in order, each on what the one before made", function()
        local seen, Whole = {}, fused_class("Whole", {
            fuser_forward = function(self, _, x, extra_inputs)
                return te.relu(x * self.basic_ops[1].scale + extra_inputs[2][1])
            end,
        })
        local function absorb(ops)
            seen[#seen + 1] = { ops = names(ops) }
            return { Whole(ops[1].basic_ops[1], ops[1].basic_ops[2], ops[2]) }
        end
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput(), te.ReLU())
        local x, e = input(), input()
        local unfused = outcome(seq, x, e)
        with({ { "forward", axpy }, { "forward", absorb }, { "forward", listener(seen) } },
            function() assert_same(unfused, outcome(seq, x, e)) end)
        assert.equal(0, calls)
        assert.equal("ForwardAxpy ReLU", seen[1].ops)
        assert.equal("Whole", seen[2].ops)
    end)

    it("run again when what they may depend on changes, not when sizes do", function()
        local seen = {}
        local scale = te.ConstantScale(2)
        local seq = te.Sequential(te.ReLU(), scale)
        with({ { "forward", listener(seen) } }, function()
            local function runs(expected, what)
                assert.equal(expected, #seen, what)
                seen = {}
            end
            seen = {}
            local listen = te.register_forward_fusion(function(ops, opts)
                seen[#seen + 1] = { ops = names(ops), opts = opts }
                return ops
            end)
            local x = te.randn({ 2, 4 })
            seq(x)
            assert.equal("float32", seen[1].opts.dtype)
            assert.equal("cpu", seen[1].opts.device)
            assert.is_true(seen[1].opts.training)
            runs(1, "first run")
            seq(te.randn({ 3, 4 }))
            runs(0, "another batch size")
            seq:eval()(x)
            assert.is_false(seen[1].opts.training)
            runs(1, "evaluation")
            seq:train()
            seq(x)
            runs(0, "training again")
            seq(x:to("bfloat16"))
            assert.equal("bfloat16", seen[1].opts.dtype)
            runs(1, "dtype")
            te.autocast({ dtype = "float16" }, seq, x)
            assert.equal("float16", seen[1].opts.dtype)
            runs(1, "autocast")
            scale.scale = 3
            seq(x)
            runs(1, "a field of an operation")
            seq:append(te.Identity())
            seq(x)
            assert.equal("ReLU ConstantScale Identity", seen[1].ops)
            runs(1, "another module")
            te.unregister_fusion(te.register_forward_fusion(axpy))
            seq(x)
            runs(1, "another rule")
            seq(input({ 2, 4 }))
            runs(1, "a gradient")
            te.unregister_fusion(listen)
            seq(x)
            runs(0, "unregistered")
        end)
    end)

    it("may keep and change their list; the container stays as it was", function()
        local kept
        local seq = te.Sequential(te.ConstantScale(3), te.AddExtraInput(), te.Linear(4, 4))
        local x, e = input(), input()
        local weight, before, text = seq[3].weight:clone(), x:clone(), tostring(seq)
        local members = { seq[1], seq[2], seq[3] }
        local function keep(ops)
            kept = axpy(ops)
            for i = #ops, 1, -1 do ops[i] = nil end
            return kept
        end
        local function empty(ops)
            for i = #kept, 1, -1 do kept[i] = nil end
            return ops
        end
        with({ { "forward", keep }, { "backward", empty } }, function()
            local first = seq(x, e)
            assert.equal(1, calls)
            assert.equal(0, (first - seq(x, e)):abs():max():item())
        end)
        assert.equal(text, tostring(seq))
        for i, member in ipairs(members) do assert.equal(member, seq[i]) end
        assert.equal(0, (weight - seq[3].weight):abs():max():item())
        assert.equal(0, (before - x):abs():max():item())
    end)
end)

describe("a backward fusion", function()
    before_each(function()
        te.manual_seed(9)
        calls = 0
    end)

    it("finds the inputs of built-in operations in their contexts", function()
        local seq = te.Sequential(te.LayerNorm(4), te.Linear(4, 5), te.ConstantScale(0.5), te.GELU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "backward", backward_linear_scale } }, function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(1, calls)
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
        assert.equal(2, calls)
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
            fuser_forward = function(self, _, x, extra_inputs) return x * self.basic_ops[1].scale + extra_inputs[2][1] end,
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
        local seq = te.Sequential(te.ConstantScale(3), te.Residual(te.Linear(4, 4), te.ConstantScale(0.5)), te.MakeExtraOutput())
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
        assert.equal(1, calls)
        assert.equal(1, runs)
    end)

    it("may overlap a forward fusion that saves nothing", function()
        local seq = te.Sequential(te.Linear(4, 4), te.Residual(te.Linear(4, 4), te.ConstantScale(3)), te.GELU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", axpy }, { "backward", backward_linear_scale } },
            function() assert_same(unfused, outcome(seq, x)) end)
        assert.equal(2, calls)
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
            fuser_forward = function(self, _, x) return te.dropout(x, { p = self.basic_ops[1].p }) * self.basic_ops[2].scale end,
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
        calls, nodes = 0, 0
    end)

    it("runs its own backward", function()
        local seq = te.Sequential(te.ReLU(), te.Linear(4, 5), te.ConstantScale(0.5), te.GELU())
        local x = input()
        local unfused = outcome(seq, x)
        with({ { "forward", joint } }, function()
            assert_same(unfused, outcome(seq, x))
            assert.same({ 1, 1 }, { nodes, calls })
            te.no_grad(seq, x)
            assert.same({ 2, 1 }, { nodes, calls })
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
        assert.same({ 1, 0 }, { nodes, calls })
    end)
end)

describe("a mistake of a rule", function()
    local seq = te.Sequential(te.ConstantScale(2), te.ReLU(), te.Linear(4, 4))

    -- The rule stands between two that are right.
    local function fails(kind, rule, message, container, ...)
        local x = te.ones({ 2, 4 }, { requires_grad = true })
        local function same(ops) return ops end
        local extras = { ... }
        with({ { kind, rule, { name = "my rule" } }, { kind, same } }, function()
            local ok, raised = pcall(function() (container or seq)(x, unpack(extras)):sum():backward() end)
            assert.is_false(ok)
            assert.truthy(raised:find("fusion rule my rule: " .. message), raised)
        end)
    end

    local function both(rule, message)
        fails("forward", rule, message)
        fails("backward", rule, message)
    end

    it("in its list names the rule and the operation", function()
        both(function(ops) return { ops[1], ops[3] } end, "it dropped operation 2 %(ReLU%)")
        both(function(ops) return { ops[1], ops[2] } end, "it dropped operation 3 %(Linear%)")
        both(function() return {} end, "it dropped operation 1 %(ConstantScale%)")
        both(function(ops) return { ops[1], ops[2], te.GELU(), ops[3] } end, "it added an operation %(GELU%)")
        both(function(ops) return { ops[1], ops[2], ops[2], ops[3] } end, "it duplicated an operation %(ReLU%)")
        both(function(ops) return { ops[1], ops[3], ops[2] } end,
            "it reordered the operations: Linear stands in place 2, where ReLU was")
        both(function(ops) return { ops[1], te.GELU(), ops[3] } end, "it dropped operation 2 %(ReLU%)")
        both(function(ops) return { ops[1], 7, ops[3] } end, "entry 2 is no operation: 7")
        both(function(ops) return { ops[1], te.Sequential(ops[2]), ops[3] } end, "entry 2 is no operation: Sequential")
        both(function(ops) return { ops[1], nil, ops[3] } end, "it dropped operation 2 %(ReLU%)")
        both(function(ops) ops.extra = 1 return ops end, "entry extra stands outside the list")
        both(function() end, "expected the list of operations, got nil")
        both(function(ops) return te.Sequential(unpack(ops)) end, "expected the list of operations, got Sequential")
        both(function() error("no idea") end, "spec/fuser/rules_spec.lua:%d+: no idea")
        local Nothing = te.FusedOperation:extend("Nothing")
        both(function(ops) return { Nothing(), unpack(ops) } end,
            "entry 1 %(Nothing%) stands for no operation; set_basic_ops says which")
    end)

    it("in the class of its operation names both", function()
        fails("forward", window({ te.ReLU }, BackwardLinearScale), "entry 2 %(BackwardLinearScale%) has no method fuser_forward")
        fails("backward", window({ te.ConstantScale }, ForwardAxpy), "entry 1 %(ForwardAxpy%) has no method fuser_backward")
    end)

    it("in fuser_forward names rule and operation", function()
        local function wrong(message, fn, container, ...)
            fails("forward", window({ te.ConstantScale, te.ReLU }, fused_class("Wrong", { fuser_forward = fn })), message,
                container, ...)
        end
        wrong("Wrong:fuser_forward: spec/fuser/rules_spec.lua:%d+: no forward", function() error("no forward") end)
        wrong("Wrong:fuser_forward: expected a tensor, got nil", function() end)
        wrong("Wrong:fuser_forward: extra outputs for 3 basic operations, there are 2",
            function(_, _, x) return x, { {}, {}, {} } end)
        wrong("Wrong:fuser_forward: basic operation 1 %(ConstantScale%): expected 0 extra outputs, got 1",
            function(_, _, x) return x, { { x }, {} } end)
        local Split = fused_class("Split", { fuser_forward = function(_, _, x) return x end })
        fails("forward", window({ te.MakeExtraOutput, te.ReLU }, Split),
            "Split:fuser_forward: expected a list of lists of extra outputs, got nil",
            te.Sequential(te.MakeExtraOutput(), te.ReLU()))
    end)

    it("in fuser_backward names rule and operation", function()
        local function wrong(message, fn)
            fails("backward", window({ te.ReLU, te.Linear }, fused_class("Wrong", { fuser_backward = fn })),
                "Wrong:fuser_backward: " .. message)
        end
        local dw, db = te.ones({ 4, 4 }), te.ones({ 4 })
        wrong("spec/fuser/rules_spec.lua:%d+: no way back", function() error("no way back") end)
        wrong("expected a list of lists of gradients of parameters, got nil", function(_, _, dy) return dy end)
        wrong("basic operation 2 %(Linear%): expected 2 gradients of parameters, got 1; false stands for one that is missing",
            function(_, _, dy) return dy, { {}, { dw } } end)
        wrong("basic operation 2 %(Linear%): expected 2 gradients of parameters, got 3",
            function(_, _, dy) return dy, { {}, { dw, db, db } } end)
        wrong("basic operation 1 %(ReLU%): expected 0 gradients of parameters, got 1",
            function(_, _, dy) return dy, { { dw }, { dw, db } } end)
        wrong("gradients of parameters for 3 basic operations, there are 2",
            function(_, _, dy) return dy, { {}, { dw, db }, {} } end)
        wrong("basic operation 2 %(Linear%): expected 0 gradients of extra inputs, got 1",
            function(_, _, dy) return dy, { {}, { dw, db } }, { {}, { dy } } end)
        wrong("expected a tensor as gradient, got number", function() return 5, { {}, { dw, db } } end)
    end)

    it("does not stay: the next run is right", function()
        local x, wrong = te.ones({ 2, 4 }), true
        with({ { "forward", function(ops) return wrong and {} or ops end } }, function()
            assert.is_false(pcall(seq, x))
            wrong = false
            assert.is_true(pcall(seq, x))
        end)
    end)

    it("names the place of a rule without a name", function()
        with({ { "forward", function() return {} end } }, function()
            assert.error_matches(function() seq(te.ones({ 2, 4 })) end, "fusion rule .*rules_spec.lua:%d+: it dropped")
        end)
    end)

    it("in registering is an error", function()
        assert.error_matches(function() te.register_forward_fusion(3) end, "te.register_forward_fusion: rule: expected callable")
        assert.error_matches(function() te.register_backward_fusion(axpy, { nam = "x" }) end,
            'te.register_backward_fusion: unknown option "nam", did you mean "name"')
        with({ { "forward", axpy, { name = "axpy" } } }, function()
            assert.error_matches(function() te.register_forward_fusion(axpy) end, "the rule axpy is registered already")
        end)
    end)
end)

-- Rules that fuse windows at random, with operations that do by themselves what the operations in them do. Residual branches
-- are nested, so a sum in a window belongs to the last split before it there, or to one outside.
describe("random fusions", function()
    local function run_chain(ops, x, outside)
        local open, outs = {}, {}
        for i, op in ipairs(ops) do
            outs[i] = {}
            if te.is(op, te.MakeExtraOutput) then
                open[#open + 1], outs[i] = x, { x }
            elseif te.is(op, te.AddExtraInput) then
                x = te.add(x, table.remove(open) or outside[i])
            else
                x = op:op_forward(nil, x)
            end
        end
        return x, outs
    end

    local function chain_forward(self, _, x, extra_inputs)
        local outside = {}
        for i, list in ipairs(extra_inputs) do outside[i] = list[1] end
        return run_chain(self.basic_ops, x, outside)
    end

    local function leaf(t)
        t = t:detach()
        t.requires_grad = true
        return t
    end

    local function chain_backward(self, ctxs, dy, extra_gradients)
        local x, outside, leaves, depth = leaf((ctxs[1]:saved_tensors())), {}, {}, 0
        leaves[1] = x
        for i, op in ipairs(self.basic_ops) do
            if te.is(op, te.MakeExtraOutput) then depth = depth + 1 end
            if te.is(op, te.AddExtraInput) then
                if depth == 0 then
                    local _, extra = ctxs[i]:saved_tensors()
                    outside[i] = leaf(extra)
                    leaves[#leaves + 1] = outside[i]
                end
                depth = math.max(0, depth - 1)
            end
            for _, parameter in ipairs(op:parameters()) do leaves[#leaves + 1] = parameter end
        end
        local y, outs = te.enable_grad(run_chain, self.basic_ops, x, outside)
        local results, seeds = { y }, { dy }
        for i, list in ipairs(outs) do
            if list[1] and extra_gradients[i][1] then
                results[#results + 1], seeds[#seeds + 1] = list[1], extra_gradients[i][1]
            end
        end
        local grads = te.grad(results, leaves, { grad_outputs = seeds })
        local at, of_parameters, of_extras = 1, {}, {}
        for i, op in ipairs(self.basic_ops) do
            of_parameters[i], of_extras[i] = {}, {}
            if outside[i] then at, of_extras[i] = at + 1, { grads[at + 1] } end
            for k in ipairs(op:parameters()) do at, of_parameters[i][k] = at + 1, grads[at + 1] end
        end
        return grads[1], of_parameters, of_extras
    end

    local Forward = fused_class("ForwardChain", { fuser_forward = chain_forward })
    local Backward = fused_class("BackwardChain", { fuser_backward = chain_backward })
    local Joint = fused_class("JointChain", {
        fuser_forward = function(self, ctxs, x, extra_inputs)
            for i, ctx in ipairs(ctxs) do ctx:save_for_backward(i == 1 and x, extra_inputs[i][1]) end
            return chain_forward(self, ctxs, x, extra_inputs)
        end,
        fuser_backward = chain_backward,
    })

    -- Fuses up to four neighbours by one of the classes, or leaves one alone. What is fused already stays.
    local function random_rule(classes, fired)
        return function(ops)
            local new, at = {}, 1
            while ops[at] do
                local n, wanted = 0, math.random(0, 4)
                while n < wanted and ops[at + n] and not te.is(ops[at + n], te.FusedOperation) do n = n + 1 end
                local class = classes[math.random(#classes)]
                new[#new + 1] = n > 0 and class(unpack(ops, at, at + n - 1)) or ops[at]
                if n > 0 then fired[class.__name] = (fired[class.__name] or 0) + 1 end
                at = at + math.max(n, 1)
            end
            return new
        end
    end

    local Scale = te.BasicOperation:extend("Scale")
    function Scale:init() self:register_parameter("scale", te.full({}, 1.5)) end
    function Scale:op_forward(ctx, x)
        if ctx then ctx:save_for_backward(x) end
        return x * self.scale
    end
    function Scale:op_backward(ctx, dy)
        local x = ctx:saved_tensors()
        return dy * self.scale, { (dy * x):sum() }
    end

    local makers = {
        function() return te.Linear(4, 4) end, function() return te.LayerNorm(4) end, te.GELU, te.SiLU, Scale,
        function() return te.ConstantScale(0.7) end, function() return te.Bias(4) end, te.Identity,
        function() return te.L2Normalization() end,
    }

    local function random_chain(container, depth)
        local list = {}
        for i = 1, math.random(1, 5) do
            local nested = depth > 0 and math.random(4) or 0
            if nested == 1 then
                list[i] = random_chain(te.Residual, depth - 1)
            elseif nested == 2 then
                list[i] = random_chain(te.Sequential, depth - 1)
            else
                list[i] = makers[math.random(#makers)]()
            end
        end
        return container(unpack(list))
    end

    it("give the values and gradients of no fusion", function()
        te.manual_seed(11)
        math.randomseed(11)
        local fired = {}
        for _ = 1, 200 do
            local seq = random_chain(te.Sequential, 2):to("float64")
            local x = te.randn({ 2, 4 }, { dtype = "float64", requires_grad = true })
            local before, unfused = x:clone(), outcome(seq, x)
            with({ { "forward", random_rule({ Forward, Joint }, fired) }, { "backward", random_rule({ Backward }, fired) } },
                function() assert_same(unfused, outcome(seq, x), 1e-9) end)
            assert.equal(0, (before - x):abs():max():item())
        end
        for _, class in ipairs { "ForwardChain", "BackwardChain", "JointChain" } do
            assert.is_true((fired[class] or 0) > 100, class)
        end
    end)
end)

describe("op_backward", function()
    it("gives as many gradients as there are parameters and extra inputs", function()
        local Op = te.BasicOperation:extend("Op")
        Op.num_extra_inputs = 1
        local result
        function Op:init() self:register_parameter("scale", te.ones({})) end
        function Op:op_forward(_, x, e) return x * self.scale + e end
        function Op.op_backward(_, _, dy) return dy, unpack(result, 1, 2) end
        local function fails(message, of_parameters, of_extras)
            result = { of_parameters, of_extras }
            assert.error_matches(function() Op()(input(), input()):sum():backward() end, message)
        end
        fails("Op:op_backward: expected a list of 1 gradients of parameters, got nil")
        fails("Op:op_backward: expected 1 gradients of parameters, got 2", { te.ones({}), te.ones({}) })
        fails("Op:op_backward: expected 1 gradients of extra inputs, got 0", { false }, {})
        result = { { false }, { false } }
        local op = Op()
        op(input(), input()):sum():backward()
        assert.is_nil(op.scale.grad)
    end)
end)

describe("scripts/examples/custom_fusion.lua", function()
    it("shows what it says", function()
        local pipe = assert(io.popen("$(readlink /proc/$PPID/exe) scripts/examples/custom_fusion.lua 2>&1; echo status $?"))
        local output, status = pipe:read("*a"):match("^(.*)status (%d+)\n$")
        pipe:close()
        assert.equal("0", status, output)
        assert.truthy(output:find("difference of results:%s+none"), output)
        assert.truthy(output:find("difference of gradients:%s+none"), output)
        assert.truthy(output:find("custom_fusion.lua:%d+: fusion rule forgetful: it dropped operation 2 %(LayerNorm%)"), output)
    end)
end)
