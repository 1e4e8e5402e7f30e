--- te.Residual: x + what its modules make of x. A Sequential in every other respect.

local te = require "te"
local Sequential = require "te.sequential"

local Residual = Sequential:extend("Residual")

function Residual:forward(x, ...)
    local branch, owned, extras = self:run_chain(x, ...)
    local y = te.add(x, branch)
    if owned then branch:release() end
    return y, unpack(extras, 1, extras.n)
end

return Residual
