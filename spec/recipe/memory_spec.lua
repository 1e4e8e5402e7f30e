-- What a model of fifty million weights takes when they are stored quantized, as the allocator counts it: in processes
-- that do nothing else, since here earlier specs leave tensors that are let go of at any time.
local shell = require "spec.support.shell"

local TETRAIN = os.getenv "TETRAIN" or "build/tetrain"
local LAYERS, WIDTH = 16, 512
local WEIGHTS = LAYERS * 12 * WIDTH * WIDTH -- of linear operations: 50.3 million

-- Writes a script for the specs around it, and runs it with arguments: what it prints.
local function script_of(text)
    local path
    setup(function()
        path = os.tmpname()
        local file = assert(io.open(path, "w"))
        file:write(text)
        file:close()
    end)
    teardown(function() os.remove(path) end)
    return function(...)
        local arguments = {}
        for i = 1, select("#", ...) do arguments[i] = tostring((select(i, ...))) end
        local output, status = shell.capture(("'%s' '%s' %s"):format(TETRAIN, path, table.concat(arguments, " ")))
        assert.equal(0, status, output)
        return output
    end
end

-- Prints how many elements are stored quantized, how many are not, and the bytes in use.
local SCRIPT = [[
local te = require "te"
local recipe, layers, width, trained = arg[1], tonumber(arg[2]), tonumber(arg[3]), arg[4] == "true"
local config = { vocab_size = 256, block_size = 64, n_layer = layers, n_head = 8, n_embd = width, quantized = recipe }
local function run(fn, ...) return fn(...) end
local model = (trained and run or te.no_grad)(te.models.gpt, config)
local weights, rest = 0, 0
for _, p in ipairs(model:parameters()) do
  if te._core.is_quantized(p) then weights = weights + p:numel() else rest = rest + p:numel() end
end
collectgarbage()
collectgarbage()
print(weights, rest, te.memory_stats().current)
]]

describe("a model of fifty million quantized weights", function()
    -- bytes of a weight with its share of a block's factor; histories of amaxes take 1.6 % more
    local sizes = {
        DelayedScaling = 1, Float8CurrentScaling = 1, Float8BlockScaling = 1 + 4 / 128 ^ 2,
        MXFP8BlockScaling = 1 + 1 / 32,
        NVFP4BlockScaling = 0.5 + 1 / 16,
    }

    local run = script_of(SCRIPT)

    local function bytes_of(recipe, trained)
        local text = run(recipe, LAYERS, WIDTH, trained)
        local weights, rest, bytes = text:match "^(%d+)%s+(%d+)%s+(%d+)\n$"
        assert.equal(WEIGHTS, tonumber(weights), text)
        assert.is_true(tonumber(rest) < 0.02 * WEIGHTS)
        return tonumber(bytes) - 4 * tonumber(rest) -- the rest is float32
    end

    for name, each in pairs(sizes) do
        it("takes what its bytes and factors do: " .. name, function()
            local bytes = bytes_of(name, false)
            assert.is_true(bytes >= each * WEIGHTS, ("%.4f bytes a weight"):format(bytes / WEIGHTS))
            assert.is_true(bytes <= 1.02 * each * WEIGHTS, ("%.4f bytes a weight"):format(bytes / WEIGHTS))
        end)
    end

    it("takes both directions where it is trained", function()
        local bytes = bytes_of("Float8CurrentScaling", true)
        assert.is_true(bytes >= 2 * WEIGHTS and bytes <= 2.02 * WEIGHTS,
            ("%.4f bytes a weight"):format(bytes / WEIGHTS))
    end)
end)

-- What forward keeps of LayerNorm(d), Linear(d, 4 d), GELU, Linear(4 d, d), in bytes per element of its bfloat16 input,
-- which belongs to the caller:
--
--                          bfloat16          FP8           MXFP8           NVFP4
--     norm's result        2                 1             1 + 1/32        1/2 + 1/16
--     GELU's input         4 * 2             4 * 2         4 * 2           4 * 2
--     GELU's result        4 * 2             4             4 + 4/32        4/2 + 4/16
--                          18                13            13.16           10.81
--
-- Backward computes both results again (te.set_recompute), which leaves GELU's input. That is read by GELU's gradient
-- and by no product, so a recipe has no part in it; GELU{ cache_quantized_input = true } keeps it in E4M3, 4 bytes
-- instead of 8, and then GELU's result must stay: from the rounded input another one would follow.
local MLP = [[
local te = require "te"
local recipe, recompute, cached = arg[1], arg[2] == "true", arg[3] == "true"
local d, rows = 256, 1024
te.set_recompute(recompute)
local model = te.Sequential(te.LayerNorm(d, { bias = false }), te.Linear(d, 4 * d, { bias = false }),
  te.GELU { cache_quantized_input = cached }, te.Linear(4 * d, d, { bias = false }))
local x = te.randn({ rows, d }, { dtype = "bfloat16" })
local function run()
  return te.autocast({ recipe = recipe ~= "none" and te.recipe[recipe] {} or nil, dtype = "bfloat16" }, model, x)
end
run() -- copies of weights
collectgarbage()
collectgarbage()
local before = te.memory_stats().current
local y = run()
collectgarbage()
collectgarbage()
print((te.memory_stats().current - before) / x:numel() - 2) -- less the result's
]]

describe("an MLP's tensors for backward", function()
    local run = script_of(MLP)

    local function kept(...)
        local text = run(...)
        return assert(tonumber(text), text)
    end

    -- bytes kept; statistics of rows, factors that are written once per row of a block and whole blocks of the
    -- allocator take up to 0.05 more
    for _, case in ipairs {
        { "none", true, false, 8 }, { "none", false, false, 18 }, { "DelayedScaling", true, false, 8 },
        { "DelayedScaling", false, false, 13 }, { "DelayedScaling", true, true, 8 },
        { "DelayedScaling", false, true, 9 },
        { "Float8CurrentScaling", true, false, 8 }, { "Float8CurrentScaling", false, true, 9 },
        { "Float8BlockScaling", true, false, 8 }, { "Float8BlockScaling", false, true, 9 + 5 / 32 },
        { "MXFP8BlockScaling", true, false, 8 }, { "MXFP8BlockScaling", false, true, 9 + 5 / 32 },
        { "NVFP4BlockScaling", true, false, 8 }, { "NVFP4BlockScaling", true, true, 4 + 4 * (1 / 2 + 1 / 16) },
    } do
        local recipe, recompute, cached, bytes = unpack(case)
        it(("are what products and gradients read: %s, recomputing %s, quantized input of GELU %s"):format(recipe,
            recompute, cached), function()
            local found = kept(recipe, recompute, cached)
            assert.is_true(found >= bytes and found <= bytes + 0.05,
                ("%.3f bytes an element, not %.3f"):format(found, bytes))
        end)
    end

    it("are at most 60 % of bfloat16's where that keeps all operands, and never more than bfloat16's own", function()
        for _, recipe in ipairs { "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling" } do
            assert.is_true(kept(recipe, true, false) <= 0.45 * kept("none", false, false))
            assert.is_true(kept(recipe, true, false) <= 1.01 * kept("none", true, false))
        end
        assert.is_true(kept("DelayedScaling", false, true) <= 0.6 * kept("none", false, false))
    end)
end)
