-- The model of embed.c: is a point inside the circle?

local te = require "te"

te.manual_seed(1)
local model = te.Sequential(te.Linear(2, 32), te.GELU(), te.Linear(32, 2))
local optimizer = te.optim.AdamW(model:parameters(), { lr = 0.02 })

--- One optimizer step on points {n, 2} and their classes {n}; returns the loss.
function train_step(points, classes)
    local loss = te.cross_entropy(model(points), classes)
    optimizer:zero_grad()
    loss:backward()
    optimizer:step()
    return loss
end
