--- An operation of your own: y = x * scale, with one learned number and a backward written by hand.
--
--     build/tetrain examples/custom_operation.lua

local te = require "te"

local LearnableScale = te.BasicOperation:extend("LearnableScale")

function LearnableScale:init(value)
    self:register_parameter("scale", te.full({}, value))
end

-- ctx carries what forward knows to backward.
function LearnableScale:op_forward(ctx, x)
    ctx:save_for_backward(x)
    return x * self.scale
end

-- The gradient of x, then those of the parameters, in a list.
function LearnableScale:op_backward(ctx, dy)
    local x = ctx:saved_tensors()
    return dy * self.scale, { (dy * x):sum() }
end

-- It stands among the built-in operations, here on a residual branch that starts almost closed.
te.manual_seed(1)
local block = te.Residual(te.LayerNorm(8), te.Linear(8, 32), te.GELU(), te.Linear(32, 8), LearnableScale(0.1))
print(block)

-- te.gradcheck compares backward with differences of forward.
local scale = LearnableScale(3):to("float64")
local x = te.randn({ 2, 4 }, { dtype = "float64", requires_grad = true })
print("gradient agrees with finite differences:", te.gradcheck(scale, { x }))

-- And it learns like any other: the branch is asked to double its input.
local optimizer = te.optim.AdamW(block:parameters(), { lr = 0.02, weight_decay = 0 })
local input = te.randn({ 64, 8 })
for step = 0, 60 do
    local loss = ((block(input) - input * 2) ^ 2):mean()
    if step % 20 == 0 then print(("step %2d  loss %.4f  scale %.4f"):format(step, loss:item(), block[5].scale:item())) end
    optimizer:zero_grad()
    loss:backward()
    optimizer:step()
end
