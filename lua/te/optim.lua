--- te.optim: optimizers, gradient clipping and learning rate schedules.

return require("te.options").library("te.optim", {
    AdamW = require "te.optim.adamw",
    Muon = require "te.optim.muon",
    SGD = require "te.optim.sgd",
    grad_norm = require("te.optim.clip").grad_norm,
    grad_clip = require("te.optim.clip").grad_clip,
    clip_grad_norm = require("te.optim.clip").clip_grad_norm,
    clip_grad_value = require("te.optim.clip").clip_grad_value,
    cosine = require("te.optim.schedule").cosine,
})
