--- te.train.peak_flops: what this machine's matrix product reaches, as the yardstick of a training step.

local te = require "te"

local SIZE, SECONDS = 512, 0.25

--- Floating point operations a second of a square product in `dtype`: the best within a quarter of a second, since a
--- machine that others use too is slower at times.
return function(dtype)
    return te.no_grad(function()
        -- no random numbers: they would shift those of the run
        local a, b = te.ones({ SIZE, SIZE }, { dtype = dtype }), te.ones({ SIZE, SIZE }, { dtype = dtype })
        local best, finish = math.huge, te._core.clock() + SECONDS
        repeat
            local start = te._core.clock()
            te.matmul(a, b):release()
            local now = te._core.clock()
            best = math.min(best, now - start)
        until now > finish
        return 2 * SIZE ^ 3 / best
    end)
end
