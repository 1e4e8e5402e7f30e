local te = require "te"
local options = require "te.options"

describe("te.options", function()
    local declared = { eps = { "number", 1e-5, min = 0 }, bias = { "boolean", true }, mode = { "string", "a",
        choices = { "a", "b" } }, count = { "size" } }

    it("fills in defaults", function()
        assert.same({ eps = 1e-5, bias = true, mode = "a" }, options.check("f", nil, declared))
        assert.same({ eps = 1e-5, bias = false, mode = "a" }, options.check("f", { bias = false }, declared))
    end)

    it("tells what can be called, also where a metatable hides", function()
        local function callable(value) return options.reason({ "callable" }, value) == nil end
        local core = te._core
        assert.is_true(callable(print) and callable(setmetatable({}, { __call = print })))
        assert.is_true(callable(core.define("once(x)", "y = x")))
        assert.is_false(callable(core.group_new()) or callable(nil) or callable {} or callable(te.ones(1)))
        assert.is_false(callable(setmetatable({}, { __call = 5 })))
    end)

    it("names the nearest option", function()
        assert.error_matches(function() options.check("te.f", { epz = 1 }, declared) end,
            'te%.f: unknown option "epz"; did you mean "eps"')
    end)

    it("names option, expectation and value", function()
        assert.error_matches(function() options.check("te.f", { eps = -1 }, declared) end,
            "te%.f: option eps: expected number, at least 0, got %-1")
        assert.error_matches(function() options.check("te.f", { eps = 0 / 0 }, declared) end, "option eps")
        assert.error_matches(function() options.check("te.f", { mode = "c" }, declared) end,
            'expected one of a, b, got "c"')
        assert.error_matches(function() options.check("te.f", { count = 0 }, declared) end, "positive integer")
        assert.error_matches(function() options.check("te.f", { count = 1.5 }, declared) end, "positive integer")
        assert.error_matches(function() options.check("te.f", 7, declared) end, "expected a table")
    end)

    it("shows no places in memory", function()
        assert.equal("a table", options.shown {})
        assert.equal("a function", options.shown(print))
        assert.equal("GELU(approximate=tanh)", options.shown(require("te").GELU()))
        assert.equal('"a"', options.shown "a")
    end)

    it("finds the nearest name", function()
        assert.is_nil(options.nearest("foo", { "io", "to" }))
        assert.equal("io", options.nearest("ioo", { "io" }))
        assert.equal("learning_rate", options.nearest("leanring_rate", { "batch", "learning_rate" }))
        assert.is_nil(options.nearest("zzzzzzzz", { "batch" }))
    end)
end)

-- By name: how it is called, and with how many arguments at most.
describe("what follows the options is refused by", function()
    local x, path = te.ones { 2, 2 }, os.tmpname()
    te.save(path, { x = x })
    teardown(function() os.remove(path) end)
    local calls = {
        Linear = { 4, 4, {} }, BasicLinear = { 4, 4, {} }, Bias = { 4, {} }, GroupedLinear = { 2, 4, 4, {} },
        LayerNorm = { 4, {} }, RMSNorm = { 4, {} }, L2Normalization = { {} }, Embedding = { 4, 4, {} },
        Dropout = { 0.5, {} },
        StochasticDepth = { 0.5, {} }, ConstantScale = { 2, {} }, Identity = { {} }, Reshape = { { 4 }, {} },
        Quantize = { {} },
        MakeExtraOutput = { {} }, AddExtraInput = { {} }, AllReduce = { {} }, AllGather = { {} },
        ReduceScatter = { {} },
        Pointwise = { {}, function(v) return v end }, MultiHeadedSelfAttention = { 8, 2, {} },
        GroupedQueryAttention = { 8, 2, 1, {} }, MultiQuerySelfAttention = { 8, 2, {} }, DotProductAttention = { {} },
        quantize = { x, te.recipe.MXFP8BlockScaling {}, "input", {} }, save = { path, { x = x }, {} },
        load = { path, {} },
        gradcheck = { te.exp, { te.ones({ 2 }, { dtype = "float64" }) }, {} }, zeros = { { 2 }, {} },
        manual_seed = { 1 },
        grad = { te.exp(te.ones({}, { requires_grad = true })), x, { retain_graph = true } }, devices = {},
        memory_stats = { "cpu" }, rng_state = { te.rng_state() }, help = { "gelu" },
        is = { te.Linear(1, 1), te.Linear }, unregister_fusion = { print }, unregister_forward_fusion = { print },
        unregister_backward_fusion = { print },
        ["optim.AdamW"] = { { x }, {} }, ["optim.SGD"] = { { x }, {} }, ["optim.clip_grad_norm"] = { { x }, 1 },
        ["recipe.DelayedScaling"] = { {} }, ["recipe.NVFP4BlockScaling"] = { {} },
    }
    for _, name in ipairs {
        "ReLU", "GELU", "QuickGELU", "SReLU", "SiLU", "GLU", "ReGLU", "GEGLU", "QGEGLU", "SReGLU",
        "SwiGLU", "ClampedSwiGLU",
        "SiTUGLU", "ScaledSReLU", "ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU",
    } do calls[name] = { {} } end
    for name, arguments in pairs(calls) do
        it("te." .. name, function()
            local f, n = te, #arguments
            for key in name:gmatch "[^.]+" do f = f[key] end
            f(unpack(arguments))
            f(unpack(arguments, 1, n + 1)) -- nil is nothing
            arguments[n + 1] = 5
            assert.error_matches(function() f(unpack(arguments)) end,
                "te%." .. name:gsub("%.", "%%.") .. ": argument " .. n + 1 .. ", number 5, is too much")
        end)
    end

    it("rules, optimizers, plans and profiles", function()
        local opt, plan = te.optim.SGD { x }, te.Sequential(te.ReLU()):explain(x)
        local function rule(ops) return ops end
        for who, fn in pairs {
            ["te.register_forward_fusion: argument 3"] = function() te.register_forward_fusion(rule, {}, 3) end,
            ["te.register_backward_fusion: argument 3"] = function() te.register_backward_fusion(rule, {}, 3) end,
            ["te.optim.SGD:step: argument 2"] = function() opt:step({}, 3) end,
            ["te.optim.SGD:state_dict: argument 1"] = function() opt:state_dict(3) end,
            ["te.optim.SGD:set_lr: argument 2"] = function() opt:set_lr(1, 3) end,
            ["te.optim.SGD:set_option: argument 3"] = function() opt:set_option("lr", 1, 3) end,
            ["te.optim.SGD:step_counts: argument 1"] = function() opt:step_counts(3) end,
            ["te.optim.SGD:take_back: argument 1"] = function() opt:take_back(3) end,
            ["te.optim.SGD:catch_up: argument 1"] = function() opt:catch_up(3) end,
            ["Plan:dot: argument 1"] = function() plan:dot(3) end,
            ["Plan:json: argument 1"] = function() plan:json(3) end,
            ["profile:save_trace: argument 2"] = function() te.profile(te.synchronize):save_trace(path, 3) end,
            ["profile:kernels: argument 1"] = function() te.profile(te.synchronize):kernels(3) end,
        } do assert.error_matches(fn, who .. ", number 3, is too much", 1, true) end
        assert.is_false(te.unregister_fusion(rule))
    end)

    it("methods of tensors", function()
        for method, takes in pairs { size = 1, dim = 0, numel = 0, totable = 0, clone = 0 } do
            assert.error_matches(function() x[method](x, 1, takes == 1 and 5 or nil) end, "is too much", nil, method)
        end
        assert.error_matches(function() te.ones({}):item(1) end, "is too much")
    end)
end)
