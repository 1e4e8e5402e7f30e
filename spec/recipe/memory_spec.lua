-- What a model of fifty million weights takes when they are stored quantized, as the allocator counts it: in processes that do
-- nothing else, since here earlier specs leave tensors that are let go of at any time.
local shell = require "spec.support.shell"

local TETRAIN = os.getenv "TETRAIN" or "build/tetrain"
local LAYERS, WIDTH = 16, 512
local WEIGHTS = LAYERS * 12 * WIDTH * WIDTH -- of linear operations: 50.3 million

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

local script

local function bytes_of(recipe, trained)
    local text, status = shell.capture(("'%s' '%s' %s %d %d %s"):format(TETRAIN, script, recipe, LAYERS, WIDTH, trained))
    assert.equal(0, status, text)
    local weights, rest, bytes = text:match "^(%d+)%s+(%d+)%s+(%d+)\n$"
    assert.equal(WEIGHTS, tonumber(weights), text)
    assert.is_true(tonumber(rest) < 0.02 * WEIGHTS)
    return tonumber(bytes) - 4 * tonumber(rest) -- the rest is float32
end

describe("a model of fifty million quantized weights", function()
    -- bytes of a weight with its share of a block's factor; histories of amaxes take 1.6 % more
    local sizes = {
        DelayedScaling = 1, Float8CurrentScaling = 1, Float8BlockScaling = 1 + 4 / 128 ^ 2, MXFP8BlockScaling = 1 + 1 / 32,
        NVFP4BlockScaling = 0.5 + 1 / 16,
    }

    setup(function()
        script = os.tmpname()
        local file = assert(io.open(script, "w"))
        file:write(SCRIPT)
        file:close()
    end)
    teardown(function() os.remove(script) end)

    for name, each in pairs(sizes) do
        it("takes what its bytes and factors do: " .. name, function()
            local bytes = bytes_of(name, false)
            assert.is_true(bytes >= each * WEIGHTS, ("%.4f bytes a weight"):format(bytes / WEIGHTS))
            assert.is_true(bytes <= 1.02 * each * WEIGHTS, ("%.4f bytes a weight"):format(bytes / WEIGHTS))
        end)
    end

    it("takes both directions where it is trained", function()
        local bytes = bytes_of("Float8CurrentScaling", true)
        assert.is_true(bytes >= 2 * WEIGHTS and bytes <= 2.02 * WEIGHTS, ("%.4f bytes a weight"):format(bytes / WEIGHTS))
    end)
end)
