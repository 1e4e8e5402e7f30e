--- What a device can do at best, measured when first asked for: bytes per second of an update in place, operations per
--- second of float32 and bfloat16 matrix products.

local te = require "te"
local core = te._core

local known = {}

-- The best of a few runs of one kernel: bytes or operations per second.
local function best(field, fn)
    local rate = 0
    for _ = 1, 3 do
        for _, event in ipairs(core.profile(fn)) do
            if event.seconds > 0 then rate = math.max(rate, event[field] / event.seconds) end
        end
    end
    return rate
end

-- Operations per second of square products of a dtype: of growing ones, until one takes long enough to reach a rate
-- that larger ones do not pass by much.
local function product_peak(device, dtype)
    local LONG, LARGEST = 2e-3, 8192
    local n, rate, last = 128, 0, 0
    repeat
        n = 2 * n
        local a = te.rand({ n, n }, { device = device }):to(dtype)
        last = best("flops", function() te.matmul(a, a):release() end)
        rate = math.max(rate, last)
        a:release()
    until 2 * n ^ 3 > LONG * last or n == LARGEST
    return rate
end

-- Bytes per second of an update in place, of operands that no cache holds.
local function bandwidth_of(device)
    local options = { device = device }
    local x, y = te.ones({ 2048, 8192 }, options), te.ones({ 2048, 8192 }, options)
    local rate = best("bytes", function() te.add_(y, x) end)
    x:release()
    y:release()
    return rate
end

local rates = {}

local function measure(device)
    return {
        bandwidth = bandwidth_of(device),
        float32 = product_peak(device, "float32"),
        bfloat16 = product_peak(device, "bfloat16"),
    }
end

-- Whoever asks may be training, under te.autocast: random numbers go on as before, and products are in their own dtype.
local function measured(device)
    local rng = core.rng_state()
    local ok, found = core.under(core.set_compute_dtype, nil, te.no_grad, measure, device)
    core.rng_state(rng)
    return core.pass(ok, found)
end

--- { bandwidth =, float32 =, bfloat16 = } of a device, per second.
function rates.of(device)
    known[device] = known[device] or measured(device)
    return known[device]
end

--- Seconds that a kernel takes at least: its bytes at full bandwidth, or, for products and attention, its operations
--- at the peak of the dtype.
function rates.floor(device, kind, dtype, bytes, flops)
    local rate = rates.of(device)
    local seconds = bytes / rate.bandwidth
    if kind ~= "gemm" and kind ~= "attention" then return seconds end
    return math.max(seconds, flops / (dtype == "bfloat16" and rate.bfloat16 or rate.float32))
end

return rates
