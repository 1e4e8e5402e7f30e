--- Mistakes of fusions registered from Lua, and of operations: what the errors say.

local te = require "te"
local fusion = require "spec.support.fusion"
local with, window, fused_class, axpy, input = fusion.with, fusion.window, fusion.fused_class, fusion.axpy, fusion.input

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
        both(function(ops) return { ops[1], te.ReLU, ops[3] } end,
            "entry 2: ReLU is a class; ReLU%(…%) makes a module of it")
        both(function(ops) return { ops[1], nil, ops[3] } end, "it dropped operation 2 %(ReLU%)")
        both(function(ops) ops[6] = te.GELU() return ops end, "entry 6 stands outside the list")
        both(function(ops) return { ops[1], ops[2], ops[3], nil, te.GELU() } end, "entry 5 stands outside the list")
        both(function(ops) ops[1.5] = te.GELU() return ops end, "entry 1.5 stands outside the list")
        both(function(ops) ops.extra = 1 return ops end, "entry extra stands outside the list")
        both(function() end, "expected the list of operations, got nil")
        both(function(ops) return te.Sequential(unpack(ops)) end, "expected the list of operations, got Sequential")
        both(function() error("no idea") end, "spec/fuser/mistaken_rules_spec.lua:%d+: no idea")
        local Nothing = te.FusedOperation:extend("Nothing")
        both(function(ops) return { Nothing(), unpack(ops) } end,
            "entry 1 %(Nothing%) stands for no operation; set_basic_ops says which")
    end)

    it("in the class of its operation names both", function()
        fails("forward", window({ te.ReLU }, fusion.BackwardLinearScale),
            "entry 2 %(BackwardLinearScale%) has no method fuser_forward")
        fails("backward", window({ te.ConstantScale }, fusion.ForwardAxpy),
            "entry 1 %(ForwardAxpy%) has no method fuser_backward")
    end)

    it("in fuser_forward names rule and operation", function()
        local function wrong(message, fn, container, ...)
            fails("forward", window({ te.ConstantScale, te.ReLU }, fused_class("Wrong", { fuser_forward = fn })),
                message, container, ...)
        end
        wrong("Wrong:fuser_forward: spec/fuser/mistaken_rules_spec.lua:%d+: no forward",
            function() error("no forward") end)
        wrong("Wrong:fuser_forward: expected a tensor, got nil", function() end)
        wrong("Wrong:fuser_forward: extra outputs for 3 basic operations, there are 2",
            function(_, _, x) return x, { {}, {}, {} } end)
        wrong("Wrong:fuser_forward: basic operation 1 %(ConstantScale%): expected 0 extra outputs, got 1$",
            function(_, _, x) return x, { { x }, {} } end)
        local Split = fused_class("Split", { fuser_forward = function(_, _, x) return x end })
        fails("forward", window({ te.MakeExtraOutput, te.ReLU }, Split),
            "Split:fuser_forward: expected a list of lists of extra outputs, got nil",
            te.Sequential(te.MakeExtraOutput(), te.ReLU()))
        local None = fused_class("None", { fuser_forward = function(_, _, x) return x, { { false }, {} } end })
        fails("forward", window({ te.MakeExtraOutput, te.ReLU }, None),
            "None:fuser_forward: extra output 1 of basic operation 1: expected a tensor, got boolean",
            te.Sequential(te.MakeExtraOutput(), te.ReLU()))
    end)

    it("in fuser_backward names rule and operation", function()
        local function wrong(message, fn)
            fails("backward", window({ te.ReLU, te.Linear }, fused_class("Wrong", { fuser_backward = fn })),
                "Wrong:fuser_backward: " .. message)
        end
        local dw, db = te.ones({ 4, 4 }), te.ones({ 4 })
        wrong("spec/fuser/mistaken_rules_spec.lua:%d+: no way back", function() error("no way back") end)
        wrong("expected a list of lists of gradients of parameters, got nil", function(_, _, dy) return dy end)
        wrong("basic operation 2 %(Linear%): expected 2 gradients of parameters, got 1; false stands for one that is "
            .. "missing", function(_, _, dy) return dy, { {}, { dw } } end)
        wrong("basic operation 2 %(Linear%): expected 2 gradients of parameters, got 3",
            function(_, _, dy) return dy, { {}, { dw, db, db } } end)
        wrong("basic operation 1 %(ReLU%): expected 0 gradients of parameters, got 1",
            function(_, _, dy) return dy, { { dw }, { dw, db } } end)
        wrong("gradients of parameters for 3 basic operations, there are 2",
            function(_, _, dy) return dy, { {}, { dw, db }, {} } end)
        wrong("basic operation 2 %(Linear%): expected 0 gradients of extra inputs, got 1",
            function(_, _, dy) return dy, { {}, { dw, db } }, { {}, { dy } } end)
        wrong("expected a tensor as gradient, got number", function() return 5, { {}, { dw, db } } end)
        wrong("the gradient of x has shape {4,4}, not {2,4}", function() return dw, { {}, { dw, db } } end)
        wrong("the gradient of parameter 1 of basic operation 2 has shape {4}, not {4,4}",
            function(_, _, dy) return dy, { {}, { db, db } } end)
    end)

    it("that runs its own container, or new ones without end, is said once", function()
        local x = te.ones({ 2, 4 })
        for _, run in ipairs { seq, function(v) return te.Sequential(te.ReLU(), te.GELU())(v) end } do
            with({ { "forward", function(ops) run(x) return ops end, { name = "my rule" } } }, function()
                local ok, raised = pcall(seq, x)
                assert.is_false(ok)
                assert.equal(1, select(2, raised:gsub("fusion rule my rule: ", "")), raised)
                assert.truthy(raised:find("it runs a container, which applies it again, 8 deep", 1, true), raised)
            end)
        end
    end)

    it("is none where it runs another container once", function()
        local x, busy = te.ones({ 2, 4 }), false
        with({ { "forward", function(ops)
            if not busy then
                busy = true
                te.Sequential(te.ReLU(), te.GELU())(x)
                busy = false
            end
            return ops
        end } }, function()
            for _ = 1, 20 do assert.is_true(pcall(te.Sequential(te.SiLU(), te.GELU()), x)) end
        end)
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
        assert.error_matches(function() te.register_forward_fusion(3) end,
            "te.register_forward_fusion: rule: expected callable")
        assert.error_matches(function() te.register_backward_fusion(axpy, { nam = "x" }) end,
            'te.register_backward_fusion: unknown option "nam"; did you mean "name"')
        with({ { "forward", axpy, { name = "axpy" } } }, function()
            assert.error_matches(function() te.register_forward_fusion(axpy) end, "the rule axpy is registered already")
        end)
    end)
end)

describe("a mistake in lower", function()
    -- What a container raises that holds an operation O with this lower and these fields.
    local function fails(message, lower, fields)
        local O = te.BasicOperation:extend("O")
        function O.op_forward(_, _, x) return te.tanh(x) end
        O.lower = lower
        for name, value in pairs(fields or {}) do O[name] = value end
        local seq = te.Sequential(te.GELU(), O(), te.GELU())
        assert.error_matches(function() seq(te.ones { 3, 4 }) end, message, 1, true)
        assert.error_matches(function() seq:explain(te.ones { 3, 4 }) end, message, 1, true)
    end

    it("is said where it returns other things than values of the group", function()
        local function returns(value) return function() return value end end
        local expected = "O:lower: result %d: expected a value of this group, got %s"
        fails(expected:format(1, "true"), returns(true))
        fails(expected:format(1, "number 3"), returns(3))
        fails(expected:format(1, "float32 tensor {3,4}"), returns(te.ones { 3, 4 }))
        fails(expected:format(1, "table"), returns({}))
        local function tanh(_, g, x) return g:op("tanh", { x }) end
        fails(expected:format(2, "nil"), tanh, { num_extra_outputs = 1 })
        fails("O:lower: expected 1 results, got 2", function(_, g, x) return g:op("tanh", { x }), x end)
    end)

    it("is said where it gives operations what they do not take", function()
        local function op(name, inputs)
            return function(_, g, x) return g:op(name, type(inputs) == "function" and inputs(x) or inputs) end
        end
        local expected = 'O:lower: g:op("add"): input 2: expected a value of this group, got %s'
        fails(expected:format("float32 tensor {4}"), op("add", function(x) return { x, te.ones { 4 } } end))
        fails(expected:format('string "a"'), op("add", function(x) return { x, "a" } end))
        fails('O:lower: g:op("tanh"): inputs: at most 1 are taken, got 3',
            op("tanh", function(x) return { x, x, x } end))
        fails('O:lower: g:op("add"): inputs: entry 1 is nil, but there is one at 2',
            op("add", function(x) return { [2] = x } end))
        fails('O:lower: g:op("tanh"): inputs: a list has no entry "value"', op("tanh", function(x) return x end))
        fails('O:lower: g:op("tanh"): inputs: expected table, got nil', op("tanh"))
        fails("O:lower: g:op(nil): name: expected string, got nil", op(nil, function(x) return { x } end))
    end)

    it("is said where it uses a value of another container, or one that its description gave up", function()
        local kept
        local Keeping = te.BasicOperation:extend("Keeping")
        function Keeping.op_forward(_, _, x) return te.tanh(x) end
        function Keeping.lower(_, g, x)
            kept = g:op("tanh", { x })
            return nil, "not now"
        end
        local x = te.ones { 3, 4 }
        te.Sequential(te.GELU(), te.GELU(), te.GELU(), Keeping())(x)
        local other, shown = kept, "expected a value of this group, got one of another"
        fails('O:lower: g:op("add"): input 2: ' .. shown, function(_, g, v) return g:op("add", { v, other }) end)
        fails("O:lower: result 1: " .. shown, function() return other end)
        local Adding = te.BasicOperation:extend("Adding")
        function Adding.op_forward(_, _, v) return v end
        function Adding.lower(_, g, v) return g:op("add", { v, kept }) end
        assert.error_matches(function() te.Sequential(Keeping(), Adding())(x) end,
            'Adding:lower: g:op("add"): input 2: ' .. shown, 1, true)
    end)

    it("is said where plan_fields is no list", function()
        local function tanh(_, g, x) return g:op("tanh", { x }) end
        fails('O: plan_fields: expected table, got "limit"', tanh, { plan_fields = "limit" })
        fails('O: plan_fields: a list has no entry "limit"', tanh, { plan_fields = { limit = true } })
        with({ { "forward", function(ops) return ops end } }, function()
            fails('O: plan_fields: expected table, got "limit"', tanh, { plan_fields = "limit" })
        end)
    end)

    it("leaves no input of a group missing", function()
        for _, seq in ipairs { te.Sequential(te.GELU()), te.Sequential(te.Linear(4, 4), te.GELU()) } do
            assert.error_matches(function() seq(nil) end, "te.Sequential: x: expected a tensor, got nil", 1, true)
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
