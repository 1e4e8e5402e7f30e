--- te.train: what a training script needs around its loop.

-- What recipes are called on a command line.
local RECIPES = { delayed = "DelayedScaling", current = "Float8CurrentScaling", block = "Float8BlockScaling",
    mxfp8 = "MXFP8BlockScaling", nvfp4 = "NVFP4BlockScaling" }

return {
    recipes = RECIPES,
    recipe_choices = { "none", "delayed", "current", "block", "mxfp8", "nvfp4" },
    command_line = require "te.train.command_line",
    run = require("te.train.run").run,
    fail = require("te.train.run").fail,
    io = require("te.train.run").io,
    of_file = require("te.train.run").of_file,
    plain = require("te.train.run").plain,
    exit = require("te.train.run").exit,
    Progress = require "te.train.progress",
    Metrics = require "te.train.metrics",
    checkpoint = require "te.train.checkpoint",
    guard = require "te.train.guard",
    ranks = require "te.train.ranks",
    steps = require "te.train.steps",
    peak_flops = require "te.train.peak",
}
