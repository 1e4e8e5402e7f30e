-- te.numerics: against numbers computed here from what te.quantize gives.
local te = require "te"
local bit = require "bit"

local recipes = {
    delayed = function() return te.recipe.DelayedScaling() end,
    current = function() return te.recipe.Float8CurrentScaling() end,
    block = function() return te.recipe.Float8BlockScaling() end,
    mxfp8 = function() return te.recipe.MXFP8BlockScaling() end,
    nvfp4 = function() return te.recipe.NVFP4BlockScaling() end,
}

-- Code of the largest value, and by how much a source exceeds it where rounding alone would not come back to it.
local LARGEST = {
    float8_e4m3 = { 126, 464 / 448 }, float8_e5m2 = { 123, 61440 / 57344 }, float4_e2m1 = { 7, 7 / 6 },
}

local function finite(x) return x - x == 0 end

-- Magnitudes of the codes of a row-wise copy with `cols` columns, in a list.
local function codes_of(q, cols)
    local codes, bytes = {}, te._core.tensor_bytes(q.rowwise_data)
    local packed = q.quantizer.element == "float4_e2m1"
    local per_row = packed and math.ceil(cols / 2) or cols
    for row = 0, #bytes / per_row - 1 do
        for col = 0, cols - 1 do
            local byte = bytes:byte(1 + row * per_row + (packed and math.floor(col / 2) or col))
            if packed then codes[#codes + 1] = bit.band(bit.rshift(byte, col % 2 * 4), 7)
            else codes[#codes + 1] = bit.band(byte, 127) end
        end
    end
    return codes
end

local function expected(source, recipe, role, opts)
    local q = te.quantize(source, recipe, role, opts)
    local codes, largest = codes_of(q, source:size(-1)), LARGEST[q.quantizer.element]
    q.dtype = "float32"
    local values = source:to("float64"):reshape({ -1 }):totable()
    local results = q:dequantize("rowwise"):to("float64"):reshape({ -1 }):totable()
    local e = { amax = 0, saturated = 0, flushed = 0, nonfinite = 0 }
    local changed, norm = 0, 0
    for i, x in ipairs(values) do
        local y = results[i]
        if not finite(x) then
            e.nonfinite = e.nonfinite + 1
        else
            e.amax = math.max(e.amax, math.abs(x))
            if codes[i] == largest[1] and math.abs(x) > math.abs(y) * largest[2] then e.saturated = e.saturated + 1 end
            if x ~= 0 and y == 0 then e.flushed = e.flushed + 1 end
            changed, norm = changed + (x - y) ^ 2, norm + x ^ 2
        end
    end
    e.saturated, e.flushed = e.saturated / #values, e.flushed / #values
    e.error = norm > 0 and math.sqrt(changed / norm) or 0
    if not q.quantizer.block_rows or q.quantizer.block_rows == 0 then e.scale = 1 / q.rowwise_scale_inv:item() end
    return e
end

local function close(a, b)
    if a == nil or b == nil then return a == b end
    return a == b or a ~= a and b ~= b or math.abs(a - b) <= 1e-9 * math.abs(b)
end

local function compare(found, e, what)
    for _, key in ipairs { "amax", "scale", "saturated", "flushed", "error", "nonfinite" } do
        assert.is_true(close(found[key], e[key]), ("%s %s: %s, expected %s"):format(what, key, found[key], e[key]))
    end
end

local function by_role(values)
    local found = {}
    for _, v in ipairs(values) do found[v.role] = v end
    return found
end

local function linear(inputs, outputs)
    te.manual_seed(3)
    return te.Linear(inputs, outputs)
end

local function run(module, recipe, x, dy)
    return te.autocast({ recipe = recipe, dtype = "bfloat16" }, module, x):backward(dy)
end

describe("te.numerics", function()
    for name, make in pairs(recipes) do
        it("counts what te.quantize does: " .. name, function()
            local recipe, module = make(), linear(50, 34)
            local watch = te.numerics.watch(module)
            te.manual_seed(5)
            local x = te.randn({ 48, 50 })
            x:narrow(2, 3, 4):mul_(1e4)
            x:narrow(2, 9, 9):mul_(1e-6)
            x:narrow(1, 20, 1):fill_(0)
            x:select(1, 30):narrow(1, 7, 1):fill_(0 / 0)
            -- under NVFP4 an infinite amax would take all values of the tensor with it
            x:select(1, 31):narrow(1, 7, 2):fill_(name == "nvfp4" and 0 / 0 or math.huge)
            x.requires_grad = true
            local dy = te.randn({ 48, 34 }, { dtype = "bfloat16" })
            run(module, recipe, x, dy)
            local found = by_role(watch:values())
            local sources = { input = x:detach():to("bfloat16"), weight = module.weight:detach():to("bfloat16"),
                grad_output = dy }
            for role, source in pairs(sources) do
                compare(found[role], expected(source, recipe, role, { seed = 0 }), role)
                assert.equal("weight", found[role].product)
                assert.equal(1, found[role].step)
            end
            assert.equal(3, found.input.nonfinite)
            assert.is_true(found.input.flushed > 0)
            watch:stop()
        end)
    end

    it("sees values that a factor of delayed scaling cuts off", function()
        local recipe, module = recipes.delayed(), linear(16, 16)
        local watch = te.numerics.watch(module, { roles = { "input" } })
        local x = te.ones({ 4, 16 })
        x:select(1, 1):fill_(463)  -- is rounded to 448
        x:select(1, 2):fill_(465)
        te.autocast({ recipe = recipe }, module, x)
        assert.equal(1, #watch:values())
        assert.equal(0.25, watch:values()[1].saturated)
        te.autocast({ recipe = recipe }, module, x)
        assert.equal(0, watch:values()[1].saturated)
        assert.is_true(close(watch:values()[1].scale, 1 / te.quantize(x, recipe, "input",
            { scale = module:state_dict().input_scale:item() }).rowwise_scale_inv:item()))
        watch:stop()
    end)

    it("looks at one step of many and sums over what a step does twice", function()
        local recipe, module = recipes.current(), linear(16, 16)
        local watch = te.numerics.watch(module, { every = 2, done = 3, roles = { "input", "weight" } })
        local function step(factor)
            te.autocast({ recipe = recipe }, function()
                module(te.ones({ 4, 16 }) * factor)
                module(te.ones({ 4, 16 }))
            end)
        end
        step(5)
        assert.equal(5, by_role(watch:values()).input.amax)
        assert.equal(4, watch:values()[1].step)
        step(9)
        assert.equal(5, by_role(watch:values()).input.amax)
        te.no_grad(step, 9)
        step(3)
        assert.equal(3, by_role(watch:values()).input.amax)
        assert.equal(6, watch:values()[1].step)
        te.no_grad(step, 9)
        assert.equal(3, by_role(watch:values()).input.amax)
        watch:stop()
        assert.same({}, watch:values())
    end)

    it("counts a checkpointed stretch once", function()
        local recipe, module = recipes.delayed(), te.Sequential(te.Linear(16, 16), te.GELU(), te.Linear(16, 8))
        local watch = te.numerics.watch(module, { every = 2 })
        local x = te.randn({ 4, 16 })
        for _ = 1, 3 do
            te.checkpoint(function(t) return te.autocast({ recipe = recipe }, module, t) end, x):sum():backward()
        end
        assert.equal(2, watch:values()[1].step)
        watch:stop()
    end)

    it("changes nothing of what is computed", function()
        local function train(watched)
            te.manual_seed(2)
            local recipe = recipes.nvfp4()
            local module = te.Sequential(te.LayerNorm(32), te.Linear(32, 64), te.GELU(), te.Linear(64, 32))
            local watch = watched and te.numerics.watch(module)
            local x, bytes, sums = te.randn({ 32, 32 }), {}, {}
            for _ = 1, 3 do
                run(module, recipe, x, te.randn({ 32, 32 }, { dtype = "bfloat16" }))
                for name, p in module:named_parameters() do
                    -- watched operands are stored, and on a GPU the kernel that stores them adds
                    -- columns in another order
                    if te.get_default_device() == "cpu" or name ~= "2.bias" then
                        bytes[#bytes + 1] = te._core.tensor_bytes(p.grad)
                        te.no_grad(function() p:sub_(p.grad * 0.1) end)
                    else
                        sums[#sums + 1] = p.grad:to("float64")
                    end
                    p.grad = nil
                end
            end
            if watch then watch:stop() end
            return table.concat(bytes), sums
        end
        local bytes, sums = train(false)
        local watched_bytes, watched_sums = train(true)
        assert.is_true(bytes == watched_bytes)
        for i, sum in ipairs(sums) do
            assert.is_true((sum - watched_sums[i]):abs():max():item() <= 2 ^ -20 * sum:abs():max():item())
        end
    end)

    it("names products by their paths and prints a table", function()
        local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 1, n_head = 2, n_embd = 16 }
        local watch = te.numerics.watch(model, { roles = { "weight" } })
        local ids = te.zeros({ 2, 8 }, { dtype = "int32" })
        local _, loss = te.autocast({ recipe = recipes.mxfp8() }, model, ids, ids)
        loss:backward()
        local names = {}
        for _, v in ipairs(te.numerics.values()) do names[#names + 1] = v.product end
        assert.equal(4, #names)
        assert.equal("blocks.1.mlp.4.weight", names[4])
        local text = te.numerics.report()
        assert.is_truthy(text:find("\nblocks.1.mlp.4.weight +weight +[%d.]+ +%- +0.0000%% "), text)
        assert.is_truthy(text:find("\n%d+ infinite or NaN amaxes passed over$"))
        assert.equal(text:match("^(.*)\n"), tostring(watch))
        assert.error_matches(function() te.numerics.watch(model.blocks) end, "1%..* is watched already")
        watch:stop()
        assert.equal(0, #te.numerics.values())
    end)

    it("prints paths of any length", function()
        local model, long = te.Sequential(), ("n"):rep(120)
        model[long] = te.Linear(32, 32)
        local watch = te.numerics.watch(model)
        te.autocast({ recipe = recipes.mxfp8() }, function() return model[long](te.ones { 32, 32 }) end)
        local text = tostring(watch)
        watch:stop()
        assert.matches("^product" .. (" "):rep(120) .. "  role", text)
        assert.matches("\n" .. long .. "%.weight  input ", text)
    end)

    it("says what is wrong", function()
        assert.error_matches(function() te.numerics.watch(7) end, "expected a model, got number")
        assert.error_matches(function() te.numerics.watch(te.GELU()) end, "GELU multiplies with no weight")
        assert.error_matches(function() te.numerics.watch(linear(2, 2), { evry = 2 }) end, "did you mean .?every")
        assert.error_matches(function() te.numerics.watch(linear(2, 2), { every = 0 }) end, "every")
        assert.error_matches(function() te.numerics.watch(linear(2, 2), { roles = { "wait" } }) end, "roles: entry 1")
        assert.error_matches(function() te.numerics.watch(linear(2, 2), { roles = {} }) end, "roles: expected some of")
        local stored = te.quantized_model_init({ recipe = recipes.mxfp8() }, te.Linear, 32, 32)
        assert.error_matches(function() te.numerics.watch(stored, { roles = { "weight" } }) end, "are stored quantized")
        te.numerics.watch(stored):stop()
    end)
end)
