-- What a model of fifty million weights takes when they are stored quantized, as the allocator counts it.
local te = require "te"

local LAYERS, WIDTH = 16, 512
local WEIGHTS = LAYERS * 12 * WIDTH * WIDTH -- of linear operations: 50.3 million

local function build(quantized)
    return te.models.gpt { vocab_size = 256, block_size = 64, n_layer = LAYERS, n_head = 8, n_embd = WIDTH, quantized = quantized }
end

-- What is in use when nothing is left to collect: a finalizer may let go of what has one itself.
local function current()
    local before, now = nil, te.memory_stats().current
    repeat
        collectgarbage()
        collectgarbage()
        before, now = now, te.memory_stats().current
    until now == before
    return now
end

local function bytes_of(fn, ...)
    local before = current()
    local model = fn(...)
    local bytes = current() - before
    local weights, rest = 0, 0
    for _, p in ipairs(model:parameters()) do
        if te._core.is_quantized(p) then weights = weights + p:numel() else rest = rest + p:numel() end
    end
    assert.equal(WEIGHTS, weights)
    assert.is_true(rest < 0.02 * weights)
    return bytes - 4 * rest, model -- the rest is float32
end

describe("a model of fifty million quantized weights", function()
    -- bytes of a weight with its share of a block's factor; histories of amaxes take 1.6 % more
    local sizes = {
        DelayedScaling = 1, Float8CurrentScaling = 1, Float8BlockScaling = 1 + 4 / 128 ^ 2, MXFP8BlockScaling = 1 + 1 / 32,
        NVFP4BlockScaling = 0.5 + 1 / 16,
    }

    for name, each in pairs(sizes) do
        it("takes what its bytes and factors do: " .. name, function()
            local bytes = bytes_of(te.no_grad, build, name)
            assert.is_true(bytes >= each * WEIGHTS)
            assert.is_true(bytes <= 1.02 * each * WEIGHTS, ("%.4f bytes a weight"):format(bytes / WEIGHTS))
        end)
    end

    it("takes both directions where it is trained", function()
        local bytes = bytes_of(build, "Float8CurrentScaling")
        assert.is_true(bytes <= 2.02 * WEIGHTS, ("%.4f bytes a weight"):format(bytes / WEIGHTS))
    end)
end)
