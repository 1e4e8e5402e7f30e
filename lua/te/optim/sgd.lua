--- te.optim.SGD: stochastic gradient descent with momentum.

local te = require "te"
local fail = require "te.fail"
local Optimizer = require "te.optim.optimizer"

local SGD = Optimizer.define("SGD", {
    momentum = { "number", 0, min = 0, wrong = Optimizer.finite "momentum",
        help = "fraction of the last update that goes into the next" },
    dampening = { "number", 0, wrong = Optimizer.finite "dampening",
        help = "the momentum adds 1 - dampening times the gradient" },
    weight_decay = { "number", 0, min = 0, wrong = Optimizer.finite "weight_decay",
        help = "factor of the weight that is added to the gradient" },
    nesterov = { "boolean", false, help = "looks one update ahead" },
}, function(group) return group.momentum > 0 and { "momentum_buffer" } or {} end)

function SGD.check(who, group)
    if group.nesterov and (group.momentum == 0 or group.dampening ~= 0) then
        fail("%s: option nesterov: it needs momentum above 0 and no dampening, got %g and %g", who, group.momentum,
            group.dampening)
    end
end

function SGD.describe(group, batch)
    return {
        params = batch.params, grads = batch.grads, masters = batch.masters, momentum_buffers = batch.momentum_buffer,
        states = batch.states, step = batch.step,
        lr = batch.lr, grad_scale = batch.grad_scale, first = batch.fresh,
        momentum = group.momentum, dampening = group.dampening, weight_decay = group.weight_decay,
        nesterov = group.nesterov,
    }
end

SGD.update = te._core.sgd_step

return SGD
