--- The small operations: Identity, Reshape, ConstantScale, Dropout, MakeExtraOutput, AddExtraInput.

local te = require "te"
local options = require "te.options"
local BasicOperation = require("te.operation").BasicOperation

local Identity = BasicOperation:extend("Identity")
Identity.pure = true

function Identity:op_forward(_, x) return x end

function Identity:lower(_, x) return x end

local Reshape = BasicOperation:extend("Reshape")
Reshape.pure = true
Reshape.plan_fields = { "shape" }

--- One size may be -1: whatever is left.
function Reshape:init(shape)
    self.shape = options.argument("te.Reshape", "shape", shape, { "table" })
end

function Reshape:op_forward(_, x) return x:reshape(self.shape) end

function Reshape:lower(g, x) return g:op("reshape", { x }, { shape = self.shape }) end

function Reshape:describe() return "{" .. table.concat(self.shape, ", ") .. "}" end

local ConstantScale = BasicOperation:extend("ConstantScale")
ConstantScale.pure = true
ConstantScale.plan_fields = { "scale" }

function ConstantScale:init(scale)
    self.scale = options.argument("te.ConstantScale", "scale", scale, { "number" })
end

function ConstantScale:op_forward(_, x) return x * self.scale end

function ConstantScale:lower(g, x) return g:op("mul", { x, self.scale }) end

function ConstantScale:describe() return ("%g"):format(self.scale) end

local Dropout = BasicOperation:extend("Dropout")
Dropout.pure = true
Dropout.plan_fields = { "p", "training" }

--- Zeroes elements with probability p while training and scales the others by 1 / (1 - p).
function Dropout:init(p)
    self.p = options.argument("te.Dropout", "p", p, { "number", min = 0, max = 1 })
end

function Dropout:op_forward(_, x)
    if not self.training or self.p == 0 then return x end
    return te.dropout(x, { p = self.p })
end

function Dropout:lower(g, x)
    if not self.training or self.p == 0 then return x end
    return g:op("dropout", { x }, { p = self.p })
end

function Dropout:describe() return ("p=%g"):format(self.p) end

local MakeExtraOutput = BasicOperation:extend("MakeExtraOutput")
MakeExtraOutput.num_extra_outputs = 1

--- Returns its input twice: on to the next operation, and as an extra output.
function MakeExtraOutput:op_forward(_, x) return x, x end

function MakeExtraOutput:lower(_, x) return x, x end

local AddExtraInput = BasicOperation:extend("AddExtraInput")
AddExtraInput.pure = true
AddExtraInput.num_extra_inputs = 1

function AddExtraInput:op_forward(_, x, extra) return te.add(x, extra) end

function AddExtraInput:lower(g, x, extra) return g:op("add", { x, extra }) end

return {
    Identity = Identity, Reshape = Reshape, ConstantScale = ConstantScale, Dropout = Dropout,
    MakeExtraOutput = MakeExtraOutput, AddExtraInput = AddExtraInput,
}
