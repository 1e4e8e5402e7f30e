--- te.optim.AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019).

local te = require "te"
local Optimizer = require "te.optim.optimizer"

local AdamW = Optimizer.define("AdamW", {
    lr = { "number", 1e-3, min = 0 },
    betas = { "table", { 0.9, 0.999 } },
    eps = { "number", 1e-8, min = 0 },
    weight_decay = { "number", 0.01, min = 0 },
    master_weights = { "boolean", false },
}, function() return { "exp_avg", "exp_avg_sq" } end)

function AdamW.describe(group, batch)
    return {
        params = batch.params, grads = batch.grads, masters = batch.masters,
        exp_avg = batch.exp_avg, exp_avg_sq = batch.exp_avg_sq,
        lr = batch.lr, grad_scale = batch.grad_scale, step = batch.step,
        beta1 = group.betas[1], beta2 = group.betas[2], eps = group.eps, weight_decay = group.weight_decay,
    }
end

AdamW.update = te._core.adamw_step

return AdamW
