--- te.train.peak_flops: what this machine's matrix product reaches, as the yardstick of a training step.

local te = require "te"

local SIZE, TRIES = 1024, 3

--- Floating point operations a second of a square product in `dtype`: the best of a few.
return function(dtype)
    return te.no_grad(function()
        -- no random numbers: they would shift those of the run
        local a, b = te.ones({ SIZE, SIZE }, { dtype = dtype }), te.ones({ SIZE, SIZE }, { dtype = dtype })
        local best = math.huge
        for _ = 0, TRIES do -- the first warms up caches and clocks
            local start = te._core.clock()
            te.matmul(a, b):release()
            best = math.min(best, te._core.clock() - start)
        end
        return 2 * SIZE ^ 3 / best
    end)
end
