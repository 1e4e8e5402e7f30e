--- te.Residual: x + what its modules make of x. A Sequential in every other respect.

local Sequential = require "te.sequential"

local Residual = Sequential:extend("Residual")

Residual.is_residual = true

return Residual
