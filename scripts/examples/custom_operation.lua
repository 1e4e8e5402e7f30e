-- A basic operation of your own: parameters, a forward, and a backward that you write.
--
--     tetrain scripts/examples/custom_operation.lua
--
-- Write a backward where you know more than the engine can derive, or where you want another gradient than the true
-- one. For a formula on elements, te.Pointwise is shorter and needs no gradient (see traced_activation.lua).

local te = require "te"

-- y = round(x / step) * step, as if rounding were the identity in backward (a straight-through estimator); the step is
-- learned (Esser et al. 2020).
local LearnedRounding = te.BasicOperation:extend("LearnedRounding")

function LearnedRounding:init(step)
    self:register_parameter("step", te.full({}, step)) -- in parameters(), state_dict() and optimizers by its name
end

function LearnedRounding:op_forward(ctx, x)
    ctx:save_for_backward(x)
    return te.round(x / self.step) * self.step
end

-- Returns the gradient of x, then a list with those of the parameters in the order they were registered.
function LearnedRounding:op_backward(ctx, dy)
    local x = ctx:saved_tensors()
    local scaled = x / self.step
    return dy, { (dy * (te.round(scaled) - scaled)):sum() }
end

function LearnedRounding:describe() return ("step=%.4f"):format(self.step:item()) end

-- It stands between built-in operations like one of them.
te.manual_seed(1)
local model = te.Sequential(te.Linear(4, 32), te.GELU(), LearnedRounding(0.5), te.Linear(32, 1))
local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.01 })
local x = te.randn({ 256, 4 })
local target = (x * te.tensor { 1, -2, 3, 0.5 }):sum(-1, true)

for step = 1, 200 do
    optimizer:zero_grad()
    local loss = (model(x) - target):square():mean()
    loss:backward()
    optimizer:step()
    if step % 100 == 0 then print(("step %d: loss %.3f"):format(step, loss:item())) end
end
print(model)
