--- The small operations: Identity, Reshape, ConstantScale, Dropout, StochasticDepth, MakeExtraOutput, AddExtraInput.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local BasicOperation = require("te.operation").BasicOperation

local NONE = {} -- options of operations that have none

local Identity = BasicOperation:extend("Identity")
Identity.pure, Identity.takes = true, 1

--- Returns its input.
function Identity:init(opts) options.check("te.Identity", opts, NONE) end

function Identity:op_forward(_, x) return x end

function Identity:lower(_, x) return x end

local Reshape = BasicOperation:extend("Reshape")
Reshape.pure, Reshape.takes = true, 2
Reshape.is_view = true -- moves nothing, as tensors usually lie
Reshape.plan_fields = { "shape" }

--- te.Reshape { sizes }: one may be -1, whatever is left.
function Reshape:init(shape, opts)
    options.check("te.Reshape", opts, NONE)
    options.argument("te.Reshape", "shape", shape, { "table" })
    local unknown, sizes = 0, {}
    for i, size in ipairs(shape) do
        sizes[i] = options.argument("te.Reshape", ("shape[%d]"):format(i), size, { "integer", min = -1 })
        if size == -1 then unknown = unknown + 1 end
    end
    if unknown > 1 then fail("te.Reshape: shape: %d sizes are -1, at most one can be found", unknown) end
    self.shape = sizes
end

function Reshape:op_forward(_, x) return te.reshape(x, self.shape) end

function Reshape:lower(g, x)
    local width = self.shape[#self.shape] or -1
    if width < 1 then return nil, "its rows have no length that is known before it runs" end
    return g:op("reshape", { x }, { shape = self.shape })
end

function Reshape:describe() return "{" .. table.concat(self.shape, ", ") .. "}" end

local ConstantScale = BasicOperation:extend("ConstantScale")
ConstantScale.pure, ConstantScale.takes = true, 2
ConstantScale.plan_fields = { "scale" }

--- Multiplies by a number.
function ConstantScale:init(scale, opts)
    options.check("te.ConstantScale", opts, NONE)
    self.scale = options.argument("te.ConstantScale", "scale", scale, { "number" })
end

function ConstantScale:op_forward(_, x) return te.mul(x, self.scale) end

function ConstantScale:lower(g, x) return g:op("mul", { x, self.scale }) end

function ConstantScale:describe() return ("%g"):format(self.scale) end

local Dropout = BasicOperation:extend("Dropout")
Dropout.pure, Dropout.takes = true, 2
Dropout.plan_fields = { "p", "training" }

--- Zeroes elements with probability p while training and scales the others by 1 / (1 - p).
function Dropout:init(p, opts)
    options.check("te.Dropout", opts, NONE)
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

local StochasticDepth = BasicOperation:extend("StochasticDepth")
StochasticDepth.pure, StochasticDepth.takes = true, 2
StochasticDepth.takes_seq_lens = true
StochasticDepth.plan_fields = { "p", "training" }

--- Zeroes whole samples with probability p while training and scales the others by 1 / (1 - p): the sequences of
--- {batch, …}, those of packed {tokens, hidden} with seq_lens, or all of {tokens, hidden}, one sequence. At the end of
--- a residual branch it leaves the branch out (Huang et al. 2016).
function StochasticDepth:init(p, opts)
    options.check("te.StochasticDepth", opts, NONE)
    self.p = options.argument("te.StochasticDepth", "p", p, { "number", min = 0, max = 1 })
end

function StochasticDepth:forward(x, seq_lens)
    if not self.training or self.p == 0 then return x end
    return te.stochastic_depth(x, seq_lens, { p = self.p })
end

-- For every row of {…, width} whether it is kept, as the engine's operation draws it.
local function draw_rows(p)
    return function(x, seq_lens)
        local shape = x.shape
        shape[#shape] = nil
        local kept = te._core.operation("stochastic_depth_mask")(x, seq_lens, { p = p }):to("float32")
        return kept:select(-1, 1):expand(shape)
    end
end

function StochasticDepth:lower(g, x)
    if not self.training or self.p == 0 then return x end
    local kept = g:rows_kept(draw_rows(self.p), x, self.p)
    local apply = te._core.operation("stochastic_depth_rows")
    return g:op(apply, { x, kept }, { scale = self.p < 1 and 1 / (1 - self.p) or 0 })
end

function StochasticDepth:describe() return ("p=%g"):format(self.p) end

-- Residuals ---------------------------------------------------------------------------------------------------------

-- in_place permits writing into the other operand. Transformer Engine adds to the extra input where it lies, past its
-- automatic differentiation, so that what another operation has saved of it is overwritten and nobody notices. Here a
-- saved tensor that was written is an error, and the extra input may be one that needs a gradient, or the stream of a
-- residual that a norm has saved. So nothing that a caller can see is written, and where nobody can see it that happens
-- without being asked: the option changes nothing. channel is a name: inside one container an
-- AddExtraInput takes what the MakeExtraOutput of that name before it gave, and the caller sees neither.
local EXTRA = {
    in_place = { "boolean", false, help = "no effect: unobservable results are written in place anyway" },
    channel = { "string", help = "an AddExtraInput takes the extra output of the preceding MakeExtraOutput of the "
        .. "same channel in the container; the caller sees neither" },
}

local function set_extra(self, opts)
    opts = options.check("te." .. self.__name, opts, EXTRA)
    self.in_place, self.channel = opts.in_place, opts.channel
end

local function describe(self) return self.channel and ("channel=%q"):format(self.channel) or "" end

local MakeExtraOutput = BasicOperation:extend("MakeExtraOutput")
MakeExtraOutput.num_extra_outputs, MakeExtraOutput.takes = 1, 1
MakeExtraOutput.plan_fields = { "channel" }
MakeExtraOutput.describe = describe

--- Returns its input twice: on to the next operation, and as an extra output.
function MakeExtraOutput:init(opts) set_extra(self, opts) end
options.declare(MakeExtraOutput.init, EXTRA)

function MakeExtraOutput:op_forward(_, x) return x, x end

function MakeExtraOutput:lower(_, x) return x, x end

local AddExtraInput = BasicOperation:extend("AddExtraInput")
AddExtraInput.pure, AddExtraInput.takes = true, 1
AddExtraInput.num_extra_inputs = 1
AddExtraInput.plan_fields = { "channel" }
AddExtraInput.describe = describe

--- Adds an extra input to its input.
function AddExtraInput:init(opts) set_extra(self, opts) end
options.declare(AddExtraInput.init, EXTRA)

function AddExtraInput:op_forward(_, x, extra) return te.add(x, extra) end

function AddExtraInput:lower(g, x, extra) return g:op("add", { x, extra }) end

return {
    Identity = Identity, Reshape = Reshape, ConstantScale = ConstantScale, Dropout = Dropout,
    StochasticDepth = StochasticDepth, MakeExtraOutput = MakeExtraOutput, AddExtraInput = AddExtraInput,
}
