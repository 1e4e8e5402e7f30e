--- te.optim.AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019). Its state is float32.

local te = require "te"
local Optimizer = require "te.optim.optimizer"

-- What is wrong with a pair of decay rates.
local function wrong_betas(betas)
    for i = 1, 2 do
        local beta = betas[i]
        if type(beta) ~= "number" or not (beta >= 0 and beta < 1) then
            return ("betas[%d]: expected a number from 0 to below 1, got %s"):format(i, tostring(beta))
        end
    end
    if #betas > 2 then return ("betas: expected two numbers, got %d"):format(#betas) end
end

local AdamW = Optimizer.define("AdamW", {
    betas = { "table", { 0.9, 0.999 }, wrong = wrong_betas,
        help = "decay rates of the means of gradients and of their squares" },
    eps = { "number", 1e-8, min = 0, wrong = Optimizer.finite "eps",
        help = "added to the root of the mean of squares" },
    weight_decay = { "number", 0.01, min = 0, wrong = Optimizer.finite "weight_decay",
        help = "a step subtracts lr * weight_decay * weight" },
}, function() return { "exp_avg", "exp_avg_sq" } end)

function AdamW.describe(group, batch)
    return {
        params = batch.params, grads = batch.grads, masters = batch.masters,
        exp_avg = batch.exp_avg, exp_avg_sq = batch.exp_avg_sq, states = batch.states,
        lr = batch.lr, grad_scale = batch.grad_scale, step = batch.step,
        beta1 = group.betas[1], beta2 = group.betas[2], eps = group.eps, weight_decay = group.weight_decay,
    }
end

AdamW.update_on, AdamW.send = te._core.adamw_step_on, te._core.adamw_send
AdamW.update, AdamW.prepare, AdamW.again = te._core.adamw_step, te._core.adamw_prepare, te._core.adamw_again

-- The numbers of batch b in a prepared step, in adamw_again's order.
function AdamW.numbers(list, b, group, lr, step, grad_scale)
    local at = (b - 1) * 7
    list[at + 1], list[at + 2], list[at + 3], list[at + 4] = lr, group.betas[1], group.betas[2], group.eps
    list[at + 5], list[at + 6], list[at + 7] = group.weight_decay, step, grad_scale
end

return AdamW
