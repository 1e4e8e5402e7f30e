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

local rates = {}

--- { bandwidth =, float32 =, bfloat16 = } of a device, per second.
function rates.of(device)
    if not known[device] then
        local options = { device = device }
        local x, y = te.zeros({ 1024, 8192 }, options), te.zeros({ 1024, 8192 }, options)
        local a = te.rand({ 768, 768 }, options)
        local b = a:to("bfloat16")
        known[device] = te.no_grad(function()
            return {
                bandwidth = best("bytes", function() te.add_(y, x) end),
                float32 = best("flops", function() te.matmul(a, a) end),
                bfloat16 = best("flops", function() te.matmul(b, b) end),
            }
        end)
    end
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
