local te = require "te"

local function learnable_scale()
    local LearnableScale = te.BasicOperation:extend("LearnableScale")
    function LearnableScale:init(value) self:register_parameter("scale", te.full({}, value or 1)) end
    function LearnableScale:op_forward(ctx, x)
        ctx:save_for_backward(x)
        return x * self.scale
    end
    function LearnableScale:op_backward(ctx, dy)
        local x = ctx:saved_tensors()
        return dy * self.scale, { (dy * x):sum() }
    end
    return LearnableScale
end

describe("te.BasicOperation", function()
    it("records forward and backward as written", function()
        local op = learnable_scale()(3)
        local x = te.tensor({ 1, 2 }, { requires_grad = true })
        local y = op(x)
        assert.same({ 3, 6 }, y:totable())
        y:sum():backward()
        assert.same({ 3, 3 }, x.grad:totable())
        assert.equal(3, op.scale.grad:item())
    end)

    it("raises when what its backward reads was changed in place since", function()
        local op, plain = learnable_scale()(3), te.BasicOperation:extend("Plain")
        function plain:init() self:register_parameter("scale", te.ones({ 2 })) end
        function plain:op_forward(_, x) return x * self.scale end
        for _, module in ipairs { op, te.Sequential(op), plain(), te.Sequential(te.Identity(), op, plain()) } do
            for _, name in ipairs { "x", "scale" } do
                local x = te.tensor({ 1, 2 }, { requires_grad = true })
                local y, read = module(x), name == "x" and x or module:parameters()[1]
                te.no_grad(function() read:mul_(2) end)
                assert.error_matches(function() y:sum():backward() end, "changed in place since")
            end
        end
        assert.error_matches(function()
            local y = op(te.tensor({ 1, 2 }, { requires_grad = true }))
            op.scale:fill_(1)
            y:sum():backward()
        end, "LearnableScale: backward: a tensor of shape {} that it saved")
    end)

    it("has a context also without a backward of its own", function()
        local Square = te.BasicOperation:extend("Square")
        function Square:op_forward(ctx, x)
            ctx:save_for_backward(x)
            self.seen = { ctx:saved_tensors() }
            ctx.note = 1
            return x * x
        end
        for _, wrap in ipairs { function(op) return op end, te.Sequential } do
            local op, x = Square(), te.tensor({ 1, 3 }, { requires_grad = true })
            wrap(op)(x):sum():backward()
            assert.same({ 2, 6 }, x.grad:totable())
            assert.same({ 1, 3 }, op.seen[1]:totable())
        end
    end)

    it("works between built-in operations", function()
        local op = learnable_scale()(2)
        local fc = te.Linear(2, 2)
        te.Sequential(fc, op, te.ReLU())(te.randn({ 3, 2 })):sum():backward()
        assert.same({ 2, 2 }, fc.weight.grad.shape)
        assert.same({}, op.scale.grad.shape)
    end)

    it("keeps what it saves also where that branches off", function()
        local op = learnable_scale()(2)
        local seq = te.Sequential(te.ReLU(), te.Residual(op), te.ReLU())
        seq(te.tensor({ 1, 2 })):sum():backward()
        assert.equal(3, op.scale.grad:item())
    end)

    it("takes extra inputs with gradients and makes extra outputs", function()
        local Op = te.BasicOperation:extend("Op")
        Op.num_extra_inputs, Op.num_extra_outputs = 1, 1
        function Op.op_forward(_, _, x, extra) return x + 2 * extra, x * 5 end
        function Op.op_backward(_, _, dy, dextra) return dy + 5 * dextra, {}, { 2 * dy } end
        local x, extra = te.tensor({ 1 }, { requires_grad = true }), te.tensor({ 10 }, { requires_grad = true })
        local y, second = Op()(x, extra)
        assert.equal(21, y:item())
        assert.equal(5, second:item())
        te.add(y, second):sum():backward()
        assert.equal(6, x.grad:item())
        assert.equal(2, extra.grad:item())
        assert.error_matches(function() Op()(x) end, "Op: takes 1 extra inputs, got 0")
    end)

    it("names a class without op_forward", function()
        local Empty = te.BasicOperation:extend("Empty")
        for _, run in ipairs { Empty(), te.Sequential(te.ReLU(), Empty()) } do
            assert.error_matches(function() run(te.ones { 2 }) end, "Empty: the class has no method op_forward")
        end
    end)

    it("names the class whose outputs or gradients are not what they must be", function()
        local Op, outs, grads = te.BasicOperation:extend("Op"), nil, nil
        Op.num_extra_inputs, Op.num_extra_outputs = 1, 1
        function Op:init() self:register_parameter("scale", te.ones({ 3 })) end
        function Op:op_forward(_, x, extra) return x * self.scale + extra, outs and outs[1] end
        function Op.op_backward(_, _, dy) return grads[1] or dy, { grads[2] or false }, { grads[3] or false } end
        local function input() return te.ones({ 2, 3 }, { requires_grad = true }) end
        local function fails(message, wrong_outs, ...)
            outs, grads = wrong_outs, { ... }
            for _, op in ipairs { Op(), te.Sequential(te.ReLU(), Op(), te.ReLU()) } do
                assert.error_matches(function() (op(input(), input())):sum():backward() end, message)
            end
        end
        local right, wrong = te.ones({ 2, 3 }), te.ones({})
        fails("Op:op_forward: extra output 1: expected a tensor, got nil")
        fails("Op:op_forward: extra output 1: expected a tensor, got number", { 5 })
        fails("Op:op_backward: the gradient of x has shape {}, not {2,3}", { right }, wrong)
        fails("Op:op_backward: the gradient of x has dtype int64, not one of floats", { right }, right:to("int64"))
        fails("Op:op_backward: the gradient of extra input 1 has dtype bool, not one of floats", { right }, nil, nil,
            right:to("bool"))
        fails("Op:op_backward: the gradient of parameter 1 has shape {2,3}, not {3}", { right }, nil, right)
        fails("Op:op_backward: expected a tensor as gradient, got number", { right }, nil, 5)
        fails("Op:op_backward: the gradient of extra input 1 has shape {}, not {2,3}", { right }, nil, nil, wrong)
        outs, grads = { right }, { nil, nil, wrong } -- of what wants none
        assert.is_true(pcall(function() (Op()(input(), te.ones({ 2, 3 }))):sum():backward() end))
    end)

    it("makes the extra outputs that it says, also without an op_backward", function()
        local outs
        for _, channel in ipairs { "c", false } do
            local Op = te.BasicOperation:extend("Op")
            Op.num_extra_outputs, Op.channel = 1, channel or nil
            function Op.op_forward(_, _, x) return x * 2, unpack(outs, 1, 2) end
            local add = te.AddExtraInput { channel = channel or nil }
            local times = te.Pointwise({ extra_inputs = 1 }, function(x, e) return x * e end)
            times.channel = channel or nil
            for _, fused in ipairs { true, false } do
                te.set_fusion(fused)
                finally(function() te.set_fusion(true) end)
                local function fails(message, ...)
                    outs = { ... }
                    local extras = channel and {} or { te.ones { 2 } }
                    assert.error_matches(function() Op()(te.ones { 2 }) end, message, 1, true)
                    for _, last in ipairs { add, times } do
                        local seq = te.Sequential(Op(), last)
                        assert.error_matches(function() seq(te.ones { 2 }, unpack(extras)) end, message, 1, true)
                    end
                end
                fails("Op:op_forward: extra output 1: expected a tensor, got nil")
                fails("Op:op_forward: extra output 1: expected a tensor, got number 5", 5)
                fails("Op:op_forward: expected 1 extra outputs, got 2", te.ones { 2 }, te.ones { 2 })
            end
        end
        local Module = te.Module:extend("Module")
        Module.num_extra_outputs = 1
        function Module.forward(_, x) return x end
        assert.error_matches(function() te.Sequential(Module(), te.GELU())(te.ones { 2 }) end,
            "te.Sequential: Module returned nothing as extra output 1", 1, true)
    end)

    it("takes and makes whole numbers of extra values", function()
        for _, field in ipairs { "num_extra_inputs", "num_extra_outputs" } do
            for wrong, shown in pairs { ["x"] = '"x"', [-1] = "-1", [1.5] = "1.5" } do
                local Op = te.BasicOperation:extend("Op")
                Op[field] = wrong
                function Op.op_forward(_, _, x) return x * 2 end
                for _, run in ipairs { Op(), te.Sequential(Op()), te.Sequential(te.GELU(), Op()) } do
                    assert.error_matches(function() run(te.ones { 2 }) end,
                        ("Op: %s: expected integer, at least 0, got %s"):format(field, shown), 1, true)
                end
            end
        end
    end)

    it("raises where a backward forgets the gradient of x, for which false stands where there is none", function()
        local Op, dx = te.BasicOperation:extend("Op"), nil
        function Op.op_forward(_, _, x) return x * 1 end
        function Op.op_backward() return dx end
        local Fused = te.FusedOperation:extend("Fused")
        function Fused:init(...) self:set_basic_ops(...) end
        function Fused.fuser_forward(_, _, x) return x * 1, { {} } end
        function Fused.fuser_backward() return dx, { {} }, { {} } end
        local function run(op, x) op(x):sum():backward() end
        local x = te.ones({ 2, 3 }, { requires_grad = true })
        for name, op in pairs { ["Op:op_backward"] = Op(), ["Fused:fuser_backward"] = Fused(Op()) } do
            assert.error_matches(function() run(op, x) end,
                name .. ": expected a tensor as gradient of x, got nil; false stands for none", 1, true)
        end
        assert.error_matches(function() run(te.Sequential(te.Linear(3, 3), Op()), te.ones { 2, 3 }) end,
            "Op:op_backward: expected a tensor as gradient of x, got nil", 1, true)
        dx = false
        run(Op(), x)
        assert.is_nil(x.grad)
    end)

    it("needs no gradient of x where nobody asks for one", function()
        local Table = te.BasicOperation:extend("Table")
        function Table:init() self:register_parameter("rows", te.ones { 4, 2 }) end
        function Table:op_forward(_, ids) return te.index_select(self.rows, 1, ids) end
        function Table.op_backward() return nil, { te.ones { 4, 2 } } end
        local op = Table()
        op(te.arange(0, 2, 1, { dtype = "int64" })):sum():backward()
        assert.same({ 4, 2 }, op.rows.grad.shape)
    end)

    it("raises what backward raises", function()
        local Op = te.BasicOperation:extend("Op")
        function Op.op_forward(_, _, x) return x * 1 end
        function Op.op_backward() error("no way back") end
        local x = te.tensor({ 1 }, { requires_grad = true })
        local y = Op()(x)
        assert.error_matches(function() y:sum():backward() end, "no way back")
    end)
end)

describe("te.FusedOperation", function()
    local LearnableScale = learnable_scale()

    local function axpy()
        local ForwardAxpy = te.FusedOperation:extend("ForwardAxpy")
        function ForwardAxpy:init(scale, add) self:set_basic_ops(scale, add) end
        function ForwardAxpy:fuser_forward(_, x, extra_inputs)
            return x * self.basic_ops[1].scale + extra_inputs[2][1], { {}, {} }
        end
        return ForwardAxpy
    end

    it("stands for its basic operations", function()
        local scale, add = LearnableScale(3), te.AddExtraInput()
        local fused = axpy()(scale, add)
        local x, e = te.tensor({ 2 }, { requires_grad = true }), te.tensor({ 10 })
        local y = fused(x, e)
        assert.equal(16, y:item())
        y:sum():backward()
        assert.equal(3, x.grad:item())
        assert.equal(2, scale.scale.grad:item())
        assert.equal(1, #fused:parameters())
        assert.error_matches(function() fused(x) end, "ForwardAxpy: takes 1 extra inputs, got 0")
        assert.error_matches(function() axpy()(3) end, "argument 1 is no basic operation")
    end)

    it("uses its own backward when it has one", function()
        local Fused = axpy()
        function Fused:fuser_forward(ctxs, x, extra_inputs)
            ctxs[1]:save_for_backward(x)
            return x * self.basic_ops[1].scale + extra_inputs[2][1], { {}, {} }
        end
        function Fused:fuser_backward(ctxs, dy)
            local x = ctxs[1]:saved_tensors()
            return dy * self.basic_ops[1].scale, { { (dy * x):sum() }, {} }, { {}, { dy } }
        end
        local scale = LearnableScale(4)
        local x, e = te.tensor({ 2 }, { requires_grad = true }), te.tensor({ 1 }, { requires_grad = true })
        Fused(scale, te.AddExtraInput())(x, e):sum():backward()
        assert.equal(4, x.grad:item())
        assert.equal(1, e.grad:item())
        assert.equal(2, scale.scale.grad:item())
    end)
end)
