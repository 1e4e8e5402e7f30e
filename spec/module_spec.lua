local te = require "te"

local function two_layers()
    local M = te.Module:extend("TwoLayers")
    function M:init(width)
        self.up = te.Linear(width, 2 * width)
        self.down = te.Linear(2 * width, width, { bias = false })
        self:register_parameter("scale", te.ones({ width }))
        self:register_buffer("count", te.zeros({ 1 }))
        self.list = { te.Linear(1, 1, { bias = false }), te.Identity() }
        self.note = "not a parameter"
    end
    function M:forward(x) return self.down(te.relu(self.up(x))) * self.scale end
    return M
end

local function names(m)
    local list = {}
    for name in m:named_parameters() do list[#list + 1] = name end
    return list
end

-- Calls with a dot where a colon belongs, and what the messages call the method.
local function dotted()
    local te_data = te.data.open { tokens = te.arange(0, 500), block = 4 }
    local seq, linear, x = te.Sequential(te.Linear(4, 4)), te.Linear(4, 4), te.ones { 2, 4 }
    local gpt = te.models.gpt { vocab_size = 8, n_layer = 1, n_head = 1, n_embd = 4, block_size = 8 }
    local plan, q = seq:explain(x), te.quantize(x, te.recipe.Float8CurrentScaling {})
    local calls = {
        { "Module:to", function() linear.to "cpu" end }, { "Module:load_state_dict", function()
            linear.load_state_dict {}
        end },
        { "Module:apply", function() linear.apply(print) end }, { "Sequential:append", function()
            seq.append(te.GELU())
        end },
        { "Sequential:extend", function() seq.extend {} end }, { "Sequential:forward", function() seq.forward(x) end },
        { "Sequential:explain", function() seq.explain(x) end }, { "Operation:forward", function()
            linear.forward(x)
        end },
        { "Decoder:forward", function() gpt.forward(te.zeros({ 1, 2 }, { dtype = "int64" })) end },
        { "Decoder:generate", function() gpt.generate(te.zeros({ 1, 2 }, { dtype = "int64" }), 3) end },
        { "Group:all_reduce", function() te.distributed.world().all_reduce(x) end },
        { "Plan:dot", function() plan.dot() end }, { "QuantizedTensor:dequantize", function() q.dequantize() end },
        { "Set:next_train", function() te_data.next_train() end },
        { "tokenizer:encode", function() te.tokenizer.char("abc").encode "a" end },
        { "tokenizer:encode", function() te.tokenizer.byte().encode "a" end },
        { "tokenizer:decode", function() te.tokenizer.byte().decode { 1 } end },
        { "te.KVCache:truncate", function() te.KVCache().truncate(0) end },
    }
    for _, name in ipairs { "parameters", "named_parameters", "named_buffers", "named_modules", "children",
        "state_dict", "train", "eval", "zero_grad", "num_parameters", "clone", "requires_grad_" } do
        calls[#calls + 1] = { "Module:" .. name, function() linear[name]() end }
    end
    local optimizer = te.optim.SGD(linear, { lr = 1 })
    for _, name in ipairs { "step", "zero_grad", "set_lr", "state_dict", "load_state_dict", "take_back", "catch_up",
        "step_counts", "add_group" } do
        calls[#calls + 1] = { "Optimizer:" .. name, function() optimizer[name](1) end }
    end
    return calls
end

describe("methods", function()
    it("say so where they are called with a dot", function()
        for _, case in ipairs(dotted()) do
            assert.error_matches(case[2], ("%s: called without the object; write object:%s() with a colon"):format(
                case[1], case[1]:match "[%w_]+$"), 1, true)
        end
    end)

    it("of modules refuse what they do not take", function()
        local m = te.Sequential(te.Linear(2, 2))
        for message, fn in pairs {
            ["Sequential:eval: argument 1, boolean, is too much"] = function() m:eval(false) end,
            ['Sequential:state_dict: argument 1, string "x", is too much'] = function() m:state_dict "x" end,
            ["Sequential:parameters: argument 1, boolean, is too much"] = function() m:parameters(true) end,
            ["Sequential:num_parameters: argument 1, table, is too much"] = function() m:num_parameters {} end,
            ['Sequential:named_parameters: argument 1, string "x"'] = function() m:named_parameters "x" end,
            ["Sequential:train: argument 2, number 1, is too much"] = function() m:train(false, 1) end,
            ["Sequential:apply: argument 2, number 1, is too much"] = function() m:apply(function() end, 1) end,
            ["te.is: argument 3, number 3, is too much"] = function() te.is(m, te.Sequential, 3) end,
            ["Module:extend: argument 2, number 3, is too much"] = function() te.Module:extend("X", 3) end,
            ["te.is: class: expected a class, got nil"] = function() te.is(m, nil) end,
            ['te.is: class: expected a class, got "Sequential"'] = function() te.is(m, "Sequential") end,
        } do assert.error_matches(fn, message, 1, true) end
        local shared, calls = te.Linear(1, 1), 0
        te.Sequential(shared, te.GELU(), shared):apply(function() calls = calls + 1 end)
        assert.equal(3, calls)
        assert.error_matches(function() m:to("float64", "bfloat16") end, '"float64" and "bfloat16" are both dtypes')
        assert.error_matches(function() m:register_parameter("n", te.ones({ 2 }, { dtype = "int64" })) end,
            "Sequential: parameter n: a tensor of int64 has no gradient")
        assert.is_true(te.is(m, te.Sequential) and te.is(m, te.Module) and not te.is(m, te.Linear))
        assert.is_false(te.is(3, te.Module))
    end)
end)

describe("te.Module", function()
    local M, m
    before_each(function()
        te.manual_seed(1)
        M = two_layers()
        m = M(3)
    end)

    it("says that a module contains itself", function()
        local loop = te.Sequential(te.ReLU())
        loop:append(loop)
        m.parent = m
        for _, module in ipairs { loop, m } do
            for _, method in ipairs { "parameters", "state_dict", "train", "num_parameters", "__tostring" } do
                assert.error_matches(function() return module[method](module) end, "one of them contains itself")
            end
        end
        assert.error_matches(function() return loop(te.ones { 2 }) end, "one of them contains itself")
    end)

    it("converts floating parameters and buffers, leaves whole numbers and takes dtype and device together", function()
        m:register_buffer("ids", te.zeros({ 2 }, { dtype = "int64" }))
        m:to { dtype = "bfloat16", device = "cpu" }
        assert.equal("bfloat16", m.up.weight.dtype)
        assert.equal("bfloat16", m.count.dtype)
        assert.equal("int64", m.ids.dtype)
        assert.error_matches(function() m:to { dtyp = "float32" } end, 'unknown option "dtyp"; did you mean "dtype"')
        for message, where in pairs {
            ['device "bfloat16": no such device'] = { device = "bfloat16" },
            ["dtype: expected float32, bfloat16, float16 or float64, got \"cpu\""] = { dtype = "cpu" },
            ["dtype: expected float32, bfloat16, float16 or float64, got \"int64\""] = { device = "cpu",
                dtype = "int64" },
        } do
            assert.error_matches(function() m:to(where) end, "TwoLayers:to: option " .. message, 1, true)
            assert.equal("bfloat16", m.up.weight.dtype)
        end
        assert.error_matches(function() m:to("int64") end,
            "TwoLayers:to: where: expected float32, bfloat16, float16, float64 or a device, got \"int64\"$")
        assert.equal("bfloat16", m.scale.dtype)
    end)

    it("loses no gradient by a conversion", function()
        local layer, x = te.Linear(2, 2), te.ones({ 1, 2 }, { requires_grad = true })
        local y = layer(x):sum()
        layer:to "bfloat16"
        assert.error_matches(function() y:backward() end,
            "te%.linear: backward: a parameter of shape {2,2} was converted or moved since")
        assert.equal(2, #te.grad(te.Linear(2, 2)(x):sum(), { x })[1].shape)
        local first = te.Linear(2, 2)
        local sum = first(x):sum()
        first:to "float64"
        assert.equal(2, te.grad(sum, x):dim()) -- asks for no gradient of a parameter
    end)

    it("has no two things under one name", function()
        local M = te.Module:extend("M")
        function M:init() self["a.b"], self.a = te.Linear(1, 1), { b = te.Linear(1, 1) } end
        assert.error_matches(function() return M():state_dict() end,
            'M: a module has no name, because of key "a.b": a text in a name is not empty and has no "."')
        local net = te.Sequential(te.GELU())
        net["1"] = te.ones({ 1 }, { requires_grad = true })
        assert.error_matches(function() return net:parameters() end, "the number has the same name")
    end)

    it("iterates over modules by path, a shared one once", function()
        local shared = te.Linear(2, 2)
        local model = te.Sequential(shared, te.Sequential(te.GELU(), shared))
        local found = {}
        for path, module in model:named_modules() do found[#found + 1] = path .. ":" .. module.__name end
        assert.same({ ":Sequential", "1:Linear", "2:Sequential", "2.1:GELU" }, found)
    end)

    it("registers fields in the order of their first assignment", function()
        assert.same({ "up.weight", "up.bias", "down.weight", "scale", "list.1.weight" }, names(m))
        assert.equal(5, #m:parameters())
        assert.equal(18 + 6 + 18 + 3 + 1, m:num_parameters())
    end)

    it("sees what stands in a field now", function()
        m.down = te.Identity()
        assert.same({ "up.weight", "up.bias", "scale", "list.1.weight" }, names(m))
        m.up = nil
        m.extra = te.Linear(2, 2)
        assert.same({ "scale", "list.1.weight", "extra.weight", "extra.bias" }, names(m))
    end)

    it("lists a shared parameter once", function()
        m.list[1] = m.up
        assert.equal(4, #m:parameters())
        assert.is_nil(m:state_dict()["list.1.weight"])
    end)

    it("keeps a parameter that is frozen", function()
        m.up.weight.requires_grad = false
        assert.equal(5, #m:parameters())
    end)

    it("does not take a result for a parameter", function()
        m.last = m(te.ones({ 1, 3 }))
        assert.equal(5, #m:parameters())
    end)

    it("runs and has gradients", function()
        local y = m(te.ones({ 2, 3 }))
        assert.same({ 2, 3 }, y.shape)
        y:sum():backward()
        assert.same({ 3 }, m.scale.grad.shape)
        m:zero_grad()
        assert.is_nil(m.scale.grad)
    end)

    it("saves and loads", function()
        local other = M(3)
        local state = m:state_dict()
        assert.is_not_nil(state.count)
        other:load_state_dict(state)
        assert.same(m.up.weight:totable(), other.up.weight:totable())
        assert.is_true(other.up.weight.requires_grad)
    end)

    it("takes its own tensors under each other's names", function()
        local net = te.Sequential(te.Linear(2, 2), te.Linear(2, 2))
        local state = net:state_dict()
        local first, second = state["1.weight"]:totable(), state["2.weight"]:totable()
        state["1.weight"], state["2.weight"] = state["2.weight"], state["1.weight"]:view { 2, 2 }
        net:load_state_dict(state)
        assert.same({ second, first }, { net[1].weight:totable(), net[2].weight:totable() })
        local recipe, x = te.recipe.DelayedScaling {}, te.randn { 16, 16 }
        net = te.Sequential(te.Linear(16, 16), te.ReLU(), te.Linear(16, 16))
        te.autocast({ dtype = "bfloat16", recipe = recipe }, net, x)
        state = net:state_dict()
        local a, b = state["1.input_scale"]:item(), state["3.input_scale"]:item()
        assert.not_equal(a, b)
        state["1.input_scale"], state["3.input_scale"] = state["3.input_scale"], state["1.input_scale"]
        net:load_state_dict(state)
        state = net:state_dict()
        assert.same({ b, a }, { state["1.input_scale"]:item(), state["3.input_scale"]:item() })
    end)

    it("says what does not fit, and changes nothing then", function()
        local state = {}
        for name, tensor in pairs(m:state_dict()) do state[name] = tensor end
        state["up.wieght"], state["up.weight"] = state["up.weight"], nil
        assert.error_matches(function() m:load_state_dict(state) end, "TwoLayers:load_state_dict: missing: up%.weight")
        m:load_state_dict(state, { strict = false })
        state["up.weight"] = m.up.weight
        assert.error_matches(function() m:load_state_dict(state) end, "unexpected: up%.wieght.*up%.weight")
        state["up.wieght"] = nil
        state["up.bias"] = te.zeros({ 5 })
        assert.error_matches(function() m:load_state_dict(state) end,
            "up%.bias of Linear has shape {6}, the one given has {5}")
        state["up.bias"] = 3
        assert.error_matches(function() m:load_state_dict(state) end, "up%.bias: expected a tensor")
    end)

    it("switches training in the whole tree", function()
        m:eval()
        assert.is_false(m.training)
        assert.is_false(m.list[2].training)
        m:train()
        assert.is_true(m.up.training)
        m:train(false)
        assert.is_false(m.up.training)
        assert.error_matches(function() m:train(0) end, ":train: on: expected boolean, got 0")
        m:train(true)
        assert.is_true(m.up.training)
    end)

    it("takes a device and a dtype in either order", function()
        for _, words in ipairs { { "cpu", "float64" }, { "float64", "cpu" } } do
            assert.equal("float64", te.Linear(2, 2):to(unpack(words)).weight.dtype)
        end
        assert.error_matches(function() te.Linear(2, 2):to("cpu", "flaot64") end, 'did you mean "float64"')
        assert.error_matches(function() te.Linear(2, 2):to("cpu", "float64", 1) end,
            "argument 3, number 1, is too much")
    end)

    it("converts its parameters", function()
        m.list[1] = m.up
        m:to("bfloat16")
        assert.equal("bfloat16", m.up.weight.dtype)
        assert.equal("bfloat16", m.count.dtype)
        assert.is_true(m.up.weight.requires_grad)
        assert.equal(4, #m:parameters())
    end)

    it("keeps its parameters what they are for an optimizer", function()
        for _, class in ipairs { "AdamW", "SGD" } do
            local layer = te.Linear(4, 4, { device = "cpu" })
            local weight, opt = layer.weight, te.optim[class](layer, { lr = 0.5 })
            for _, where in ipairs { "cpu", "float32", "bfloat16", "float64", "cpu" } do
                layer(te.ones({ 2, 4 }, { dtype = weight.dtype, device = "cpu" })):sum():backward()
                local grad = weight.grad:to("float64")
                layer:to(where)
                assert.is_true(rawequal(weight, layer.weight))
                assert.equal(where == "cpu" and weight.dtype or where, weight.dtype)
                assert.is_true(weight.requires_grad and weight.is_leaf)
                assert.equal(0, (weight.grad:to("float64") - grad):abs():max():item())
                local before = weight:detach():clone()
                opt:step()
                assert.is_true((weight - before):abs():max():item() > 0.1)
                opt:zero_grad()
            end
        end
    end)

    it("applies children first", function()
        local seen = {}
        m:apply(function(module) seen[#seen + 1] = module.__name end)
        assert.same({ "Linear", "Linear", "Linear", "Identity", "TwoLayers" }, seen)
    end)

    it("prints as a tree", function()
        assert.equal([[
TwoLayers(
  (up): Linear(in_features=3, out_features=6, bias=true)
  (down): Linear(in_features=6, out_features=3, bias=false)
  (list.1): Linear(in_features=1, out_features=1, bias=false)
  (list.2): Identity()
)]], tostring(m))
    end)

    it("gives its tensors names that a tree can have", function()
        for _, name in ipairs { "a.b", "" } do
            for _, register in ipairs { "register_parameter", "register_buffer" } do
                assert.error_matches(function() m[register](m, name, te.ones { 2 }) end, ("TwoLayers:%s: name: a text "
                    .. 'in a name is not empty and has no ".", got "%s"'):format(register, name), 1, true)
            end
        end
        assert.equal(5, #m:parameters())
    end)

    it("has no tensor of the name of what delayed scaling remembers", function()
        local layer = te.Linear(4, 4)
        layer:register_parameter("input_scale", te.full({ 1 }, 7))
        assert.equal(7, layer:state_dict().input_scale:item())
        te.autocast({ recipe = te.recipe.DelayedScaling {} }, layer, te.ones { 4, 4 })
        assert.error_matches(function() te.Sequential(layer):state_dict() end, "Sequential:state_dict: 1.input_scale "
            .. "is the name of a tensor of Linear, and of what delayed scaling remembers", 1, true)
    end)

    it("takes no state with a tensor that was released", function()
        local net, state = te.Sequential(te.Linear(2, 2), te.Linear(2, 2)), {}
        for name, tensor in pairs(net:state_dict()) do state[name] = te.full(tensor.shape, 7) end
        state["2.bias"]:release()
        assert.error_matches(function() net:load_state_dict(state) end,
            "Sequential:load_state_dict: 2.bias: tensor was released", 1, true)
        assert.is_true(net[1].weight:max():item() < 1)
    end)

    it("knows its class", function()
        local Derived = M:extend("Derived")
        local d = Derived(3)
        assert.is_true(te.is(d, Derived))
        assert.is_true(te.is(d, M))
        assert.is_true(te.is(d, te.Module))
        assert.is_false(te.is(m, Derived))
        assert.is_false(te.is(3, M))
        assert.error_matches(function() te.Module:extend("Empty")()(1) end, "Empty: the class has no forward")
    end)
end)
