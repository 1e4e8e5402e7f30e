--- te.train.peak_flops: what this machine's matrix product reaches, as the yardstick of a training step.

local te = require "te"

local SECONDS, SMALLEST, LARGEST = 0.25, 512, 8192

local function time_of(a)
    te.synchronize(a.device)
    local start = te._core.clock()
    te.matmul(a, a):release()
    te.synchronize(a.device)
    return te._core.clock() - start
end

--- Floating point operations a second of a square product in `dtype`: the best within a quarter of a second, since a
--- machine that others use too is slower at times. The size is the smallest that keeps a device busy for a millisecond.
return function(dtype, device)
    return te.no_grad(function()
        local size, a = SMALLEST, nil
        repeat
            -- no random numbers: they would shift those of the run
            a = te.ones({ size, size }, { dtype = dtype, device = device })
            time_of(a)
            size = size * 2
        until size > LARGEST or time_of(a) > 1e-3
        local best, finish = math.huge, te._core.clock() + SECONDS
        repeat best = math.min(best, time_of(a)) until te._core.clock() > finish
        return 2 * (size / 2) ^ 3 / best
    end)
end
