--- Recipes as values, quantized tensors as objects, and the update rule of delayed scaling.

local te = require "te"
local book = require "spec.support.quantization"

local function raises(pattern, fn, ...)
    local ok, message = pcall(fn, ...)
    assert.is_false(ok)
    assert.truthy(tostring(message):find(pattern, 1, true), ("%q does not say %q"):format(tostring(message), pattern))
end

describe("te.recipe", function()
    it("checks every option when it is given and when it is assigned", function()
        local r = te.recipe
        raises("fp8_format: expected one of E4M3, HYBRID", r.DelayedScaling, { fp8_format = "E5M2" })
        raises("did you mean \"amax_history_len\"", r.DelayedScaling, { amax_history_length = 3 })
        raises("amax_history_len: expected positive integer", r.DelayedScaling, { amax_history_len = 0 })
        raises("amax_compute_algo: expected max, most_recent or", r.DelayedScaling, { amax_compute_algo = "mean" })
        raises("margin: expected integer", r.DelayedScaling, { margin = 0.5 })
        raises("at most one of x, w and grad_block_scaling_dim", r.Float8BlockScaling, { x_block_scaling_dim = 2 })
        raises("needs disable_rht = true", r.NVFP4BlockScaling, { nvfp4_4over6 = "all" })
        raises("fp4_format", r.NVFP4BlockScaling, { fp4_format = "E4M3" })
        raises("backward_override", r.MXFP8BlockScaling, { backward_override = "none" })
        raises("qfactory: expected a function", r.Custom, {})
        raises("amax_epsilon: expected number", r.Float8CurrentScaling, { amax_epsilon = 1 / 0 })
        raises("amax_epsilon: expected number", r.Float8BlockScaling, { amax_epsilon = 1e39 })
        r.Float8CurrentScaling { amax_epsilon = 3.4e38 }
        local recipe = r.DelayedScaling {}
        raises("margin: expected integer", function() recipe.margin = "1" end)
        assert.equal(0, recipe.margin)
        recipe.margin = 2
        assert.equal(2, recipe.margin)
    end)

    it("prints its options", function()
        local text = "MXFP8BlockScaling{enable_2d_quantization = true, fp8_dpa = false, fp8_format = E4M3, "
            .. "fp8_mha = false}"
        assert.equal(text, tostring(te.recipe.MXFP8BlockScaling { enable_2d_quantization = true }))
    end)

    -- What each option changes in a quantizer: { recipe, options, role, field, value }.
    it("has options that act", function()
        for _, case in ipairs {
            { "DelayedScaling", {}, "grad_output", "element", "float8_e5m2" },
            { "DelayedScaling", { fp8_format = "E4M3" }, "grad_output", "element", "float8_e4m3" },
            { "DelayedScaling", {}, "input", "needs_history", true },
            { "Float8CurrentScaling", { use_power_2_scales = true }, "weight", "power_of_two", true },
            { "Float8CurrentScaling", { amax_epsilon = 0.5 }, "weight", "epsilon", 0.5 },
            { "Float8BlockScaling", {}, "weight", "block_rows", 128 },
            {
                "Float8BlockScaling", { w_block_scaling_dim = 1, grad_block_scaling_dim = 2 },
                "grad_output", "block_rows", 128,
            },
            { "Float8BlockScaling", {}, "input", "power_of_two", true },
            { "Float8BlockScaling", { use_f32_scales = true }, "input", "power_of_two", false },
            { "MXFP8BlockScaling", { enable_2d_quantization = true }, "weight", "block_rows", 32 },
            { "MXFP8BlockScaling", { enable_2d_quantization = true }, "input", "block_rows", 1 },
            { "NVFP4BlockScaling", {}, "input", "hadamard", true },
            { "NVFP4BlockScaling", {}, "weight", "hadamard", false },
            { "NVFP4BlockScaling", {}, "grad_output", "stochastic", true },
            { "NVFP4BlockScaling", { disable_stochastic_rounding = true }, "grad_output", "stochastic", false },
            { "NVFP4BlockScaling", { disable_rht = true }, "input", "hadamard", false },
            { "NVFP4BlockScaling", { disable_2d_quantization = true }, "weight", "block_rows", 1 },
            { "NVFP4BlockScaling", { row_scaled_activation = true }, "input", "row_scaled", true },
            { "NVFP4BlockScaling", { nvfp4_4over6 = "weights" }, "weight", "scale_max", 256 },
            { "NVFP4BlockScaling", { nvfp4_4over6 = "weights" }, "grad_output", "four_over_six", "none" },
            {
                "NVFP4BlockScaling", { nvfp4_4over6 = "weights", nvfp4_4over6_err_mode = "MSE" },
                "weight", "four_over_six", "mse",
            },
            {
                "NVFP4BlockScaling", { nvfp4_4over6 = "weights", nvfp4_4over6_e4m3_use_256 = "none" },
                "weight", "scale_max", 448,
            },
        } do
            local name, opts, role, field, value = unpack(case)
            assert.equal(value, te.recipe[name](opts):quantizer(role)[field], name .. " " .. role .. " " .. field)
        end
    end)

    it("asks the function of a custom recipe with the role", function()
        local seen
        local inner = te.recipe.MXFP8BlockScaling {}
        local recipe = te.recipe.Custom { qfactory = function(role)
            seen = role
            if role.tensor_type == "weight" then return te.recipe.Quantizer { element = "float8_e5m2" } end
            if role.tensor_type == "input" then return inner end
        end }
        assert.equal("float8_e5m2", recipe:quantizer({ tensor_type = "weight", name = "fc1" }).element)
        assert.equal("fc1", seen.name)
        assert.equal("e8m0", te.quantize(te.ones({ 2, 2 }), recipe, "input").quantizer.scale)
        raises("qfactory(\"grad_output\") gave nil", recipe.quantizer, recipe, "grad_output")
        raises("role: expected one of input, weight, grad_output", recipe.quantizer, recipe, "bias")
    end)

    it("takes the options of recipes that a custom one names", function()
        local r = te.recipe
        local function run(recipe, layer)
            layer = layer or te.Linear(16, 8)
            local x = te.randn({ 8, 16 })
            te.manual_seed(3)
            te.autocast({ recipe = recipe }, layer, x):pow(2):sum():backward()
            return layer
        end
        local function gradient(recipe)
            te.manual_seed(5)
            return run(recipe).weight.grad:totable()
        end
        local function naming(named) return r.Custom { qfactory = function() return named end } end
        for _, override in ipairs { "high_precision", "dequantized" } do
            local named = r.Float8CurrentScaling { backward_override = override }
            assert.same(gradient(named), gradient(naming(named)))
            assert.same(gradient(named), gradient(naming(naming(named))))
            assert.same(gradient(named),
                gradient(r.Custom { qfactory = function() return r.Float8CurrentScaling {} end,
                    backward_override = override }))
        end
        local plain = r.Float8CurrentScaling {}
        assert.is_not.same(gradient(plain), gradient(r.Float8CurrentScaling { backward_override = "dequantized" }))
        raises("the recipes for input and weight differ in it", run, r.Custom { qfactory = function(role)
            return role.tensor_type == "input" and r.Float8CurrentScaling { backward_override = "dequantized" } or plain
        end })

        local exact = r.Float8CurrentScaling { backward_override = "high_precision" }
        for _, kept in ipairs { "input", "weight", "grad_output" } do -- a role that is not quantized has no say
            local recipe = r.Custom { qfactory = function(role)
                return role.tensor_type == kept and r.HighPrecision or exact
            end }
            assert.equal(16, #gradient(recipe)[1], kept)
        end

        local short, long = r.DelayedScaling { amax_history_len = 2 }, r.DelayedScaling { amax_history_len = 50 }
        local state = run(r.Custom { qfactory = function(role)
            return role.tensor_type == "input" and short or long
        end }):state_dict()
        assert.same({ 2 }, state.input_amax_history.shape)
        assert.same({ 50 }, state.weight_amax_history.shape)
        assert.same({ 50 }, state.grad_output_amax_history.shape)

        local custom, layer = naming(plain), te.Linear(16, 8)
        run(custom, layer)
        plain.use_power_2_scales = true
        local x = te.randn({ 8, 16 })
        local function result(recipe) return te.autocast({ recipe = recipe }, layer, x):totable() end
        local changed = result(custom)
        assert.same(result(plain), changed)
        plain.use_power_2_scales = false
        assert.is_not.same(changed, result(custom))
    end)

    it("does not follow recipes that name each other", function()
        local a, b
        a = te.recipe.Custom { qfactory = function() return b end }
        b = te.recipe.Custom { qfactory = function() return a end }
        raises("recipes name each other", te.quantize, te.ones { 2, 2 }, a)
        raises("recipes name each other", te.autocast, { recipe = a }, te.Linear(4, 4), te.ones { 2, 4 })
    end)

    it("refuses quantizers that contradict themselves", function()
        for message, fields in pairs {
            ["blocks are 1 x n or n x n"] = { block_rows = 2, block_cols = 32 },
            ["3 x 3; blocks"] = { block_rows = 3, block_cols = 3 },
            ["e8m0 factors need blocks"] = { scale = "e8m0" },
            ["two float4 elements share a byte"] = {
                element = "float4_e2m1", scale = "e8m0", block_rows = 1, block_cols = 1,
            },
            ["needs_history"] = { needs_history = true, block_rows = 1, block_cols = 32 },
            ["are for float4_e2m1 elements"] = { scale = "float8_e4m3", block_rows = 1, block_cols = 16 },
            ["scale_max: 300"] = {
                element = "float4_e2m1", scale = "float8_e4m3", block_rows = 1, block_cols = 16, scale_max = 300,
            },
            ["epsilon: -1"] = { epsilon = -1 },
            ["scale_max: 100; float32 factors have no such limit"] = { scale_max = 100 },
            ["replicated: a factor per block and row needs blocks"] = { replicated = true },
            ["act on float32 factors, not on e8m0"] = {
                scale = "e8m0", block_rows = 1, block_cols = 32, power_of_two = true,
            },
            ["row_scaled"] = { row_scaled = true },
            ["stochastic"] = { stochastic = true },
            ["hadamard"] = { hadamard = true, has_columnwise = false },
            ["hadamard: needs blocks"] = { hadamard = true },
            ["four_over_six"] = { four_over_six = "mae" },
            ["transposed"] = { transposed = false },
            ["element: no choice"] = { element = "float8_e4m4" },
            ["unknown option"] = { elements = "float8_e4m3" },
            ["expected true or false"] = { stochastic = 1 },
            ["at most 128"] = { block_rows = 256, block_cols = 256 },
        } do raises(message, te.recipe.Quantizer, fields) end
    end)
end)

describe("te.quantize", function()
    local x = te.randn({ 6, 40 })

    it("says what it cannot do", function()
        local recipe = te.recipe.MXFP8BlockScaling {}
        raises("expected a tensor, got number", te.quantize, 1, recipe)
        raises("expected a recipe or a quantizer", te.quantize, x, {})
        raises("float64; convert to float32", te.quantize, x:to("float64"), recipe)
        raises("neither rowwise nor columnwise", te.quantize, x, recipe, "input",
            { rowwise = false, columnwise = false })
        local row_only = te.recipe.Quantizer { has_columnwise = false }
        raises("no column-wise form", te.quantize, x, row_only, nil, { columnwise = true })
        raises("scale: 0; a factor must be", te.quantize, x, te.recipe.DelayedScaling {}, "input", { scale = 0 })
        raises("positive and finite, and its inverse", te.quantize, x, te.recipe.DelayedScaling {}, "input",
            { scale = 1e-40 })
        raises("scale: the factors of this quantizer follow", te.quantize, x, recipe, "input", { scale = 100 })
        local high = te.recipe.Custom { qfactory = function() return te.recipe.HighPrecision end }
        raises("leaves this weight in high precision", te.quantize, x, high, "weight")
        raises("te.recipe: input: float64", te.autocast, { recipe = recipe }, te.Linear(40, 8):to "float64",
            x:to "float64")
        local wide = te.Linear(40, 8):to "float64"
        raises("te.recipe: input: float64", te.autocast, { recipe = recipe }, te.Sequential(wide, te.GELU()), x)
        local experts = te.GroupedLinear(2, 40, 8):to "float64"
        local sizes = te.tensor({ x:size(1), 0 }, { dtype = "int32" })
        raises("te.recipe: input: float64", te.autocast, { recipe = recipe }, te.Sequential(experts), x, sizes)
        raises("columnwis", te.quantize, x, recipe, "input", { columnwis = true })
        local row = te.quantize(x, recipe, "input", { columnwise = false })
        raises("no columnwise data", row.dequantize, row, "columnwise")
        assert.is_nil(te.quantize(x, row_only).columnwise_data)
    end)

    it("prints what it is", function()
        assert.equal("quantized tensor {6, 40} of float32: float8_e4m3, e8m0 factors of 1 x 32, rowwise and columnwise",
            tostring(te.quantize(x, te.recipe.MXFP8BlockScaling {}, "input")))
        assert.equal("quantized tensor {6, 40} of float32: float8_e5m2, one factor, rowwise",
            tostring(te.quantize(x, te.recipe.Float8CurrentScaling {}, "grad_output", { columnwise = false })))
    end)

    it("gives factors their logical shapes", function()
        local function shapes(name, role)
            local q = te.quantize(x, te.recipe[name] {}, role, { columnwise = true })
            local row, column = { q.rowwise_data, q.rowwise_scale_inv }, { q.columnwise_data, q.columnwise_scale_inv }
            return { row[1].shape, row[2].shape, column[1].shape, column[2].shape }
        end
        assert.same({ { 6, 40 }, { 1 }, { 40, 6 }, { 1 } }, shapes("Float8CurrentScaling", "input"))
        assert.same({ { 6, 40 }, { 6, 1 }, { 40, 6 }, { 40, 1 } }, shapes("Float8BlockScaling", "input"))
        assert.same({ { 6, 40 }, { 1, 1 }, { 40, 6 }, { 1, 1 } }, shapes("Float8BlockScaling", "weight"))
        assert.same({ { 6, 40 }, { 6, 2 }, { 6, 40 }, { 1, 40 } }, shapes("MXFP8BlockScaling", "input"))
        assert.same({ { 6, 20 }, { 6, 3 }, { 40, 3 }, { 40, 1 } }, shapes("NVFP4BlockScaling", "weight"))
        assert.same({ { 6, 20 }, { 6, 3 }, { 40, 8 }, { 40, 1 } }, shapes("NVFP4BlockScaling", "input"))
    end)

    it("is saved as plain tensors and comes back", function()
        local path = os.tmpname()
        for _, name in ipairs { "Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling" } do
            local q = te.quantize(x, te.recipe[name] {}, "input", { columnwise = true })
            te.save(path, q:state_dict())
            local back = te.QuantizedTensor.from_parts(q.quantizer, te.load(path), { shape = q.shape, dtype = q.dtype })
            assert.same(q:dequantize():totable(), back:dequantize():totable())
            assert.same(q:dequantize("columnwise"):totable(), back:dequantize("columnwise"):totable())
            local from_parts, parts = te.QuantizedTensor.from_parts, q:state_dict()
            raises("rowwise_data: expected", from_parts, q.quantizer, parts, { shape = { 41, 6 } })
            raises("is no shape", from_parts, q.quantizer, parts, { shape = { 2 ^ 52, 2 ^ 52 } })
            parts.rowwise_scale_inv = te.zeros({ 7 })
            raises("rowwise_scale_inv: expected", from_parts, q.quantizer, parts, { shape = q.shape })
            raises("no part foo", from_parts, q.quantizer, { foo = 1 }, { shape = q.shape })
            raises("neither rowwise_data nor columnwise_data", from_parts, q.quantizer, {}, { shape = q.shape })
            parts.rowwise_scale_inv, parts.rowwise_data = q.rowwise_scale_inv, nil
            raises("there is no rowwise_data", from_parts, q.quantizer, parts, { shape = q.shape })
            parts.rowwise_data, parts.amax = q.rowwise_data, nil
            local ok, without = pcall(from_parts, q.quantizer, parts, { shape = q.shape })
            assert.equal(name ~= "NVFP4BlockScaling", ok)
            assert.truthy(ok or without:find("rowwise amax: expected float32 {1}", 1, true))
        end
        os.remove(path)
    end)

    it("lets go of a direction", function()
        local q = te.quantize(x, te.recipe.NVFP4BlockScaling {}, "weight", { columnwise = true })
        local across = q:dequantize("columnwise"):totable()
        q:update_usage { rowwise = false }
        assert.is_nil(q.rowwise_data)
        assert.same(across, q:dequantize():totable())
        raises("was not made", q.update_usage, q, { rowwise = true })
        raises("nothing would be left", q.update_usage, q, { columnwise = false })
    end)
end)

describe("update_usage", function()
    it("makes the column-wise copy where one factor serves all", function()
        local function bytes(t) return te._core.tensor_bytes(t) end
        te.manual_seed(3)
        for _, recipe in ipairs { te.recipe.Float8CurrentScaling {}, te.recipe.DelayedScaling {} } do
            for _, role in ipairs { "input", "grad_output" } do
                for _, shape in ipairs { { 32, 48 }, { 2, 16, 32 }, { 16 } } do
                    local t = te.randn(shape)
                    local both = te.quantize(t, recipe, role)
                    local q = te.quantize(t, recipe, role, { columnwise = false })
                    assert.is_nil(q.columnwise_data)
                    q:update_usage { rowwise = false, columnwise = true }
                    assert.is_nil(q.rowwise_data)
                    assert.same(both.columnwise_data.shape, q.columnwise_data.shape)
                    for _, name in ipairs { "columnwise_data", "columnwise_scale_inv", "amax" } do
                        assert.equal(bytes(both[name]), bytes(q[name]), name)
                    end
                    assert.same(both:dequantize("columnwise"):totable(), q:dequantize():totable())
                end
            end
        end
        local q = te.quantize(te.ones { 32, 32 }, te.recipe.Float8CurrentScaling {}, "input", { columnwise = false })
        q.rowwise_data = q.rowwise_data:narrow(1, 1, 2)
        assert.error_matches(function() q:update_usage { columnwise = true } end,
            "te.QuantizedTensor.update_usage: rowwise_data: expected float8_e4m3 {32,32}", 1, true)
        q = te.quantize(te.ones { 32, 32 }, te.recipe.MXFP8BlockScaling {}, "input", { columnwise = false })
        assert.error_matches(function() q:update_usage { columnwise = true } end,
            "update_usage: columnwise: it was not made; quantize again", 1, true)
    end)
end)

describe("delayed scaling", function()
    local function tensor(list) return te.tensor(list) end

    -- n steps with these amaxes, from scale 1 and an empty history; the scale and the history after each.
    local function steps(recipe, role, amaxes)
        local scale, history, scales, skips = te.ones({ 1 }), te.zeros({ recipe.amax_history_len }), {}, 0
        for i, amax in ipairs(amaxes) do
            history[1]:fill_(amax)
            local skipped
            scale, history, skipped = recipe:update(role, scale, history)
            scales[i], skips = scale:item(), skips + (skipped and 1 or 0)
        end
        return scales, history:totable(), skips
    end

    it("takes the largest amax of the history", function()
        local recipe = te.recipe.DelayedScaling { amax_history_len = 3, margin = 1 }
        local scales, history = steps(recipe, "input", { 2, 7, 3, 1, 0.5 })
        -- the window is the step's amax and the two before it
        local expected = {}
        for i, most in ipairs { 2, 7, 7, 7, 3 } do expected[i] = book.f32(448 / 2 / most) end
        assert.same(expected, scales)
        assert.same({ 0, 1, 0.5 }, history)
        assert.equal(book.f32(57344 / 2 / 3), steps(recipe, "grad_output", { 3 })[1])
    end)

    it("takes the most recent one, or what a function says", function()
        local recipe = te.recipe.DelayedScaling { amax_history_len = 4, amax_compute_algo = "most_recent" }
        assert.same({ 448, 224, 448 }, (steps(recipe, "weight", { 1, 2, 1 })))
        local seen
        recipe.amax_compute_algo = function(history)
            seen = history
            return 4
        end
        assert.same({ 112, 112 }, (steps(recipe, "weight", { 1, 2 })))
        assert.same({ 2, 0, 0, 1 }, seen)
        steps(recipe, "weight", { 1, 2, 3, 4, 5 })
        assert.same({ 5, 2, 3, 4 }, seen)
        assert.truthy(te.help("recipe.DelayedScaling"):find("the function gets a list of amax_history_len numbers: the "
            .. "amax of the step that ends, then those of earlier steps, the oldest first", 1, true))
        recipe.scaling_factor_compute_algo = function(amax, old, max, of) return old + amax + max + of.margin end
        assert.same({ 453, 905 }, (steps(recipe, "weight", { 1, 2 })))
        recipe.scaling_factor_compute_algo = function() return 0 / 0 end
        raises("expected a positive finite number", steps, recipe, "weight", { 1 })
        recipe.scaling_factor_compute_algo = function() return "x" end
        raises("gave string, expected a number", steps, recipe, "weight", { 1 })
    end)

    it("does nothing for a tensor that was not used, with either kind of algorithm", function()
        for _, algo in ipairs { "max", function(history) return math.max(unpack(history)) end } do
            local recipe = te.recipe.DelayedScaling { amax_history_len = 3, amax_compute_algo = algo }
            local scales, history = steps(recipe, "input", { 8, 0, 0, 0 })
            assert.same({ 56, 56, 56, 56 }, scales)
            assert.same({ 0, 0, 8 }, history)
        end
    end)

    it("forgets an amax that is infinite or NaN, and counts it", function()
        local recipe = te.recipe.DelayedScaling { amax_history_len = 3 }
        local scales, history, skipped = steps(recipe, "input", { 8, 1 / 0, 0 / 0, 4 })
        assert.same({ 56, 56, 56, 56 }, scales)
        assert.same({ 0, 8, 4 }, history)
        assert.equal(2, skipped)
    end)

    it("keeps the scale finite, cuts and fills histories, and leaves its arguments alone", function()
        local recipe = te.recipe.DelayedScaling { amax_history_len = 2 }
        assert.equal(book.f32(3.4028234663852886e38), steps(recipe, "input", { 1e-40 })[1])
        local scale, history = tensor { 3 }, tensor { 5, 6, 7, 8 }
        local _, rolled = recipe:update("input", scale, history)
        assert.same({ 0, 5 }, rolled:totable())
        recipe.amax_history_len = 6
        _, rolled = recipe:update("input", scale, history)
        assert.same({ 0, 7, 8, 0, 0, 5 }, rolled:totable())
        assert.same({ 5, 6, 7, 8 }, history:totable())
        assert.equal(3, scale:item())
        recipe.amax_history_len = 1
        assert.same({ 0 }, select(2, recipe:update("input", scale, history)):totable())
        raises("history: expected a float32 tensor", recipe.update, recipe, "input", scale, tensor { { 1 } })
        local other = te.recipe.MXFP8BlockScaling {}
        raises("keeps no history", other.update, other, "input", scale, history)
        local custom = te.recipe.Custom { qfactory = function() return te.recipe.HighPrecision end }
        raises('te.recipe.Custom: max: role: "weight" stays in high precision', custom.max, custom, "weight")
        raises('te.recipe.Custom: max: role: "input" stays in high', custom.update, custom, "input", scale, history)
    end)

    it("has a name on command lines", function()
        assert.is_nil(te.train.recipe "none")
        for _, name in ipairs(te.train.recipe_choices) do
            assert.equal(name ~= "none", te.recipe.is_recipe(te.train.recipe(name)))
        end
        assert.equal(3, te.train.recipe("delayed", { margin = 3 }).margin)
        raises("te.train.recipe: name: expected one of none, delayed, current, ", te.train.recipe, "mxpf8")
        raises('nvfp4, got "mxpf8"; did you mean "mxfp8"', te.train.recipe, "mxpf8")
        raises("nvfp4, got nil", te.train.recipe)
    end)
end)
