--- te.train: what a training script needs around its loop.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

-- Recipes by what they are called on a command line.
local recipes, choices = {}, { "none" }
for i, names in ipairs(te._core.recipe_names()) do choices[i + 1], recipes[names[2]] = names[2], names[1] end

--- The recipe of a name on a command line, nil for none.
---@param name string     one of te.train.recipe_choices
---@param opts table|nil  the recipe's
local function recipe(name, opts)
    if name == "none" then return nil end
    if not recipes[name] then
        local near = options.nearest(tostring(name), choices)
        fail("te.train.recipe: name: %s%s", options.reason({ "string", choices = choices }, name),
            near and ("; did you mean %q?"):format(near) or "")
    end
    return te.recipe[recipes[name]](opts or {})
end

return options.library("te.train", {
    recipe = recipe,
    recipes = recipes,
    recipe_choices = choices,
    command_line = require "te.train.command_line",
    run = require("te.train.run").run,
    hold_signals = require("te.train.run").hold_signals,
    fail = require("te.train.run").fail,
    io = require("te.train.run").io,
    of_file = require("te.train.run").of_file,
    plain = require("te.train.run").plain,
    exit = require("te.train.run").exit,
    Progress = require "te.train.progress",
    Metrics = require "te.train.metrics",
    checkpoint = require "te.train.checkpoint",
    check_gpt_options = require "te.train.gpt_options",
    announce = require "te.train.announce",
    guard = require "te.train.guard",
    loop = require "te.train.loop",
    new_model = require "te.train.new_model",
    pretrained = require "te.train.pretrained",
    ranks = require "te.train.ranks",
    resume = require "te.train.resume",
    sample = require "te.train.sample",
    saved = require "te.train.saved",
    steps = require "te.train.steps",
    text = require "te.train.text",
    peak_flops = require "te.train.peak",
})
