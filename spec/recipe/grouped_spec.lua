-- A grouped linear operation under recipes: planned together with its neighbours it leaves what it
-- leaves by itself, to the bit.
local te = require "te"
local plans = require "spec.support.plans"
local core = te._core

local RECIPES = {
    delayed = te.recipe.DelayedScaling, current = te.recipe.Float8CurrentScaling, block = te.recipe.Float8BlockScaling,
    mxfp8 = te.recipe.MXFP8BlockScaling, nvfp4 = te.recipe.NVFP4BlockScaling,
}

-- A GPU takes sums over rows in an order that depends on where they lie.
local ON_CPU = te.get_default_device() == "cpu"

local function sizes(list) return te.tensor(list, { dtype = "int32" }) end

local function bytes_of(t) return core.tensor_bytes(t:detach():to("cpu"):contiguous()) end

local function build(opts)
    te.manual_seed(1)
    local seq = te.Sequential(te.GroupedLinear(3, 64, 96, opts), te.GELU(), te.GroupedLinear(3, 96, 64))
    te.no_grad(function() for _, p in ipairs(seq:parameters()) do p:uniform_({ low = -0.5, high = 0.5 }) end end)
    return seq
end

local function leaf(t)
    t.requires_grad = true
    return t
end

-- Results, gradients, scales and histories of three steps, as bytes by name.
local function train(seq, opts, split, scope)
    local kept = {}
    te.manual_seed(2)
    local x, scales = leaf(te.randn { 64, 64 }), leaf(te.randn { 64 })
    local inputs = opts.scale_bias and { x, sizes(split), scales, split } or { x, sizes(split), split }
    for step = 1, 3 do
        seq:zero_grad()
        x.grad, scales.grad = nil, nil
        local y = te.autocast(scope, seq, unpack(inputs))
        te.manual_seed(3)
        y:backward(te.randn(y.shape, { dtype = y.dtype }))
        kept[step .. " y"], kept[step .. " dx"] = bytes_of(y), bytes_of(x.grad)
        if opts.scale_bias then kept[step .. " dscales"] = bytes_of(scales.grad) end
        for name, p in seq:named_parameters() do kept[step .. name] = p.grad and bytes_of(p.grad) or false end
        for name, t in pairs(seq:state_dict()) do kept[step .. " state " .. name] = bytes_of(t) end
    end
    return kept
end

local function with_fusion(fused, fn, ...)
    local before = te.set_fusion(fused)
    finally(function() te.set_fusion(before) end)
    local results = { fn(...) }
    te.set_fusion(before)
    return unpack(results)
end

local function assert_same_bytes(opts, split, scope)
    local planned, alone = with_fusion(true, train, build(opts), opts, split, scope()),
        with_fusion(false, train, build(opts), opts, split, scope())
    for name, bytes in pairs(alone) do
        if ON_CPU or not name:find "bias" then assert.is_true(bytes == planned[name], name) end
    end
    for name in pairs(planned) do assert.is_true(alone[name] ~= nil, name) end
end

describe("GroupedLinear under a recipe", function()
    for name, recipe in pairs(RECIPES) do
        for _, dtype in ipairs { "float32", "bfloat16" } do
            for _, split in ipairs { { 16, 0, 48 }, { 0, 0, 64 }, { 5, 29, 30 } } do
                it(("gives the same bytes planned and by itself: %s, %s, {%s}"):format(name, dtype,
                    table.concat(split, ", ")), function()
                    for _, scaled in ipairs { false, true } do
                        assert_same_bytes({ scale_bias = scaled }, split,
                            function() return { recipe = recipe {}, dtype = dtype } end)
                    end
                end)
            end
        end
    end

    it("does so where backward computes from something else, and where some groups stay in high precision", function()
        local split = { 20, 12, 32 }
        for _, override in ipairs { "high_precision", "dequantized" } do
            assert_same_bytes({}, split, function()
                return { recipe = RECIPES.mxfp8 { backward_override = override } }
            end)
        end
        local function factory(role)
            if role.group == 2 then return te.recipe.HighPrecision end
            return RECIPES.current {}:quantizer(role.tensor_type)
        end
        assert_same_bytes({}, split, function()
            return { recipe = te.recipe.Custom { qfactory = factory }, dtype = "bfloat16" }
        end)
        assert_same_bytes({}, split, function()
            return { recipe = RECIPES.delayed {}, enabled = false, calibrating = true }
        end)
    end)

    it("multiplies weights that are stored quantized", function()
        local recipe = RECIPES.mxfp8 {}
        local function stored() return te.quantized_model_init({ recipe = recipe }, function() return build {} end) end
        local function run(seq)
            return bytes_of(te.autocast({ recipe = recipe }, seq, te.ones { 6, 64 }, { 1, 2, 3 }, { 1, 2, 3 }))
        end
        local seq = stored()
        assert.is_true(core.is_quantized(seq[1].weight[2]))
        assert.equal(with_fusion(false, run, seq), with_fusion(true, run, seq))
    end)

    it("quantizes a weight once per version, and every range of rows by itself", function()
        local seq, x = build {}, te.randn { 64, 64 }
        local function quantized()
            local n, run = 0, function()
                te.no_grad(te.autocast, { recipe = RECIPES.mxfp8 {} }, seq, x, { 20, 12, 32 }, { 20, 12, 32 })
            end
            for _, event in ipairs(te.profile(run).events) do n = n + (event.name:find "^quantize" and 1 or 0) end
            return n
        end
        local recipe = RECIPES.mxfp8 {}
        te.no_grad(te.autocast, { recipe = recipe }, seq, x, { 20, 12, 32 }, { 20, 12, 32 })
        local n = 0
        local again = te.profile(function()
            te.no_grad(te.autocast, { recipe = recipe }, seq, x, { 20, 12, 32 }, { 20, 12, 32 })
        end)
        for _, event in ipairs(again.events) do n = n + (event.name:find "^quantize" and 1 or 0) end
        assert.equal(6, n) -- two operations of three ranges; their weights are there
        assert.equal(12, quantized()) -- under another recipe they are not
    end)

    it("is a step of the plan, which says what is quantized and why nothing before it does that", function()
        local seq, x = te.Sequential(te.LayerNorm(64), te.GroupedLinear(2, 64, 64), te.GELU(), te.Linear(64, 64)),
            plans.input { 64, 64 }
        local plan = te.autocast({ recipe = RECIPES.mxfp8 {}, dtype = "bfloat16" },
            function() return seq:explain(x, { 30, 34 }) end)
        assert.same({ "LayerNorm:layer_norm",
            "GroupedLinear:quantize input to float8_e4m3 in blocks of 1 x 32, row-wise and column-wise" },
            { unpack(plans.steps(plan.forward), 1, 2) })
        assert.matches("^GroupedLinear:grouped_linear, ", plans.steps(plan.forward)[3])
        assert.matches("each quantizes its own, and which they are is known when it runs",
            plans.reason(plan, "LayerNorm", "GroupedLinear"))
        assert.matches("read and write memory", plans.reason(plan, "GroupedLinear", "GELU"))
        local backward = table.concat(plans.steps(plan.backward), "\n")
        assert.matches("GroupedLinear:quantize grad_output to float8_e4m3 in blocks of 1 x 32, "
            .. "row%-wise and column%-wise\n", backward)
        assert.matches("GroupedLinear:grouped dgrad, ", backward)
        assert.matches("GroupedLinear:grouped wgrad, ", backward)
        local function factory(role)
            return role.group == 2 and te.recipe.HighPrecision or RECIPES.current {}:quantizer(role.tensor_type)
        end
        plan = te.autocast({ recipe = te.recipe.Custom { qfactory = factory } },
            function() return seq:explain(x, { 30, 34 }) end)
        assert.matches("grouped_linear, 1 of 2 groups quantized, ", table.concat(plans.steps(plan.forward), "\n"))
    end)

    it("is called by itself where its rows decide whether it is quantized", function()
        local seq = te.Sequential(te.ReLU(), te.GroupedLinear(2, 32, 32), te.ReLU())
        local plan = te.autocast({ recipe = RECIPES.current {}, when = "faster" },
            function() return seq:explain(te.ones { 8, 32 }, { 3, 5 }) end)
        assert.matches("chooses by the rows of each group", plans.reason(plan, "GroupedLinear", "GroupedLinear"))
        assert.is_nil(plans.reason(seq:explain(te.ones { 8, 32 }, { 3, 5 }), "GroupedLinear", "GroupedLinear"))
    end)

    it("runs twice under te.checkpoint with the bytes of the first time", function()
        local seq, x, got = build {}, leaf(te.randn { 64, 64 }), {}
        for _, checkpointed in ipairs { false, true } do
            local recipe = RECIPES.delayed {}
            x.grad = nil
            seq:zero_grad()
            local function forward() return seq(x, { 20, 12, 32 }, { 20, 12, 32 }) end
            local y = te.autocast({ recipe = recipe },
                checkpointed and function() return te.checkpoint(forward) end or forward)
            y:sum():backward()
            got[#got + 1] = bytes_of(y) .. bytes_of(x.grad) .. bytes_of(seq[1].weight[1].grad)
            seq = build {}
        end
        assert.equal(got[1], got[2])
    end)
end)
