--- te.Residual: x + modules(x). A Sequential in every other respect.
--
--     te.Residual(norm, linear)                       x + linear(norm(x))
--     te.Residual(norm, linear, { drop_path = 0.1 })  while training, the branch of a whole sequence is left out with
--                                                     that probability and scaled up otherwise (stochastic depth,
--                                                     Huang et al. 2016)
--     te.Residual(attention, mlp, { parallel = true })   x + attention(x) + mlp(x): every module is a branch of its own

local te = require "te"
local options = require "te.options"
local Sequential = require "te.sequential"

local Residual = Sequential:extend("Residual")
Residual.records = true -- te.decoding

Residual.is_residual = true
Residual.parallel = false

local OPTIONS = {
    drop_path = { "number", 0, min = 0, max = 1,
        help = "probability of skipping a sequence's branch in training (stochastic depth)" },
    parallel = { "boolean", false, help = "every module is a branch of its own; all are added" },
}

--- x plus the result of its modules, applied to x one after the other. Options come last, in a table.
function Residual:init(...)
    local modules, n = { ... }, select("#", ...)
    if type(modules[n]) == "table" and getmetatable(modules[n]) == nil then
        local opts = options.check("te.Residual", modules[n], OPTIONS)
        modules[n], n = nil, n - 1
        self.parallel = opts.parallel
        if opts.drop_path > 0 then self.drop_path = te.StochasticDepth(opts.drop_path) end
    end
    Sequential.init(self, unpack(modules, 1, n))
end
options.declare(Residual.init, OPTIONS)

--- What leaves branches out, nil without: drop_path, where a probability may have been written since.
---@return te.StochasticDepth|nil
function Residual:stochastic_depth()
    local drop = self.drop_path
    if type(drop) == "table" or drop == nil then return drop end
    options.argument("te.Residual", "drop_path", drop, OPTIONS.drop_path)
    self.drop_path = drop > 0 and te.StochasticDepth(drop) or nil
    if self.drop_path then self.drop_path:train(self.training) end
    return self.drop_path
end

function Residual:describe() return self.parallel and "parallel" or "" end

return Residual
