-- An activation of your own as a Lua function, which becomes one kernel with a derived gradient.
--
--     tetrain scripts/examples/traced_activation.lua
--
-- The function runs once, with symbols in place of tensors, and what it does is written down as a formula. So it cannot
-- look at values: `if x > 0` is an error that says what to write instead (te.where).

local te = require "te"

-- On tensors: te.pointwise makes a function of a function.
local mish = te.pointwise(function(x) return x * te.tanh(te.log(1 + te.exp(x))) end)
print(mish)
print(mish(te.tensor { -1, 0, 1, 2 }))

local leaky = te.pointwise(function(x) return te.where(te.lt(x, 0), 0.1 * x, x) end)
print(leaky)
print(leaky(te.tensor { -1, 0, 1, 2 }))

local ok, problem = pcall(te.pointwise(function(x) if x > 0 then return x end return 0.1 * x end), te.ones({ 4 }))
print(ok, (problem:gsub("^.-: ", "", 1)))

-- In a model: te.Pointwise is an operation. Its params are parameters of the module; here the activation learns how
-- much of x passes below 0, feature by feature (He et al. 2015).
local hidden = 32
local prelu = te.Pointwise({ params = { slope = te.full({ hidden }, 0.25) } }, function(x, p)
    return te.maximum(x, 0) + p.slope * te.minimum(x, 0)
end)

te.manual_seed(1)
local model = te.Sequential(te.Linear(2, hidden), prelu, te.Linear(hidden, 1))
local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.02 })
local x = te.randn({ 256, 2 })
local target = x:select(2, 1):abs():unsqueeze(-1)

for step = 1, 200 do
    optimizer:zero_grad()
    local loss = (model(x) - target):square():mean()
    loss:backward()
    optimizer:step()
    if step % 100 == 0 then print(("step %d: loss %.4f"):format(step, loss:item())) end
end
print(model)
