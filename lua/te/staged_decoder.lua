--- What te.decoder does where a model's blocks are divided between the processes of a group: option pipeline_parallel.
-- Where nothing is divided it does what one process does.
--
--     rank 0                     rank 1              rank 2
--     ids ─ embed ─ blocks 1, 2 ─── blocks 3, 4 ─── blocks 5, 6 ─ norm ─ head ─ loss
--
-- A stage has te.Identity in the place of what others have, so that blocks are named as in the whole model. Every
-- process draws the initial weights of the whole model, one module at a time, and keeps its own.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local split = require "te.split_decoder"
local stages = require "te.distributed.stages"
local whole = require "te.distributed.whole"
local core = te._core

local staged = {}

staged.OPTIONS = {
    pipeline_parallel = { "any",
        help = "group of te.distributed that the blocks are divided over: te.distributed.pipeline_step trains" },
}

--- Notes in a model how it is divided; raises where it cannot be.
---@param model table
---@param who string
---@param config table
function staged.configure(model, who, config)
    local group = options.group(who, "pipeline_parallel", config.pipeline_parallel)
    if not group or group.size == 1 then return end
    if config.n_expert then fail("%s: pipeline_parallel: not with experts (n_expert = %d)", who, config.n_expert) end
    if config.n_layer < group.size then
        fail("%s: n_layer = %d cannot be divided between %d processes", who, config.n_layer, group.size)
    end
    model.stage = stages.new(group)
end

-- Where modules are: in the first stage, the last one, or both; a block in this one, or another.
local PLACES = {
    first = function(stage) return stage.rank == 0 end,
    last = function(stage) return stage.rank == stage.size - 1 end,
    ends = function(stage) return stage.rank == 0 or stage.rank == stage.size - 1 end,
    here = function() return true end,
    elsewhere = function() return false end,
}

-- Frees a module that other stages have. A recipe may still look at weights that are stored quantized: the collector
-- knows when.
local function let_go(stage, name, module)
    stage.elsewhere[name] = true
    for _, parameter in ipairs(module:parameters()) do
        if not core.is_quantized(parameter) then parameter:release() end
    end
end

--- The module where it is this stage's, else nil.
---@param model table
---@param name string   of it in the model
---@param module table
---@param place string  of PLACES
function staged.keep(model, name, module, place)
    local stage = model.stage
    if not stage then return module end
    stage.count = stage.count + split.count(module:parameters())
    if not PLACES[place](stage) then return let_go(stage, name, module) end
    for _, parameter in ipairs(module:parameters()) do
        stages.held[parameter] = { group = stage.group, copy = place == "ends" and stage.rank > 0 }
    end
    return module
end

--- Appends blocks to a model's, te.Identity in the place of those that other stages have.
---@param model table
---@param Block table
function staged.append_blocks(model, Block)
    local config, stage = model.config, model.stage
    local before, count = 0, config.n_layer
    if stage then before, count = whole.share(count, stage.group) end
    for layer = 1, config.n_layer do
        local own = layer > before and layer <= before + count
        local block = staged.keep(model, "blocks." .. layer, Block(config, layer), own and "here" or "elsewhere")
        model.blocks:append(block or te.Identity())
    end
end

-- Random numbers --------------------------------------------------------------------------------------------------

local STRIDE, SEEDS = 227306419845841, 2 ^ 53 -- any large odd number, not one of the siblings'

local function swap(seed)
    local before, offset = core.rng_state():match "^(%d+) (%d+)$"
    core.rng_state(("%s %s"):format(seed, offset))
    return before
end

--- fn(...), which draws from a seed of the stage's, that of rank 0 from the common one.
function staged.apart(stage, fn, ...)
    local seed = tonumber(core.rng_state():match "^%d+") % SEEDS
    for _ = 1, stage.rank do seed = (seed + STRIDE) % SEEDS end
    return core.pass(core.under(swap, ("%.0f"):format(seed), fn, ...))
end

--- How far this process has drawn, a number; and going on from there.
function staged.drawn() return tonumber(core.rng_state():match " (%d+)$") end

function staged.draw_from(offset)
    core.rng_state(("%s %.0f"):format(core.rng_state():match "^%d+", offset))
end

-- Forward ---------------------------------------------------------------------------------------------------------

--- The dtype of what stages pass on.
local function dtype_of(model)
    local own = model:parameters()[1].dtype
    return own ~= "float64" and core.compute_dtype() or own
end

staged.dtype_of = dtype_of

--- A tensor like the one that stages pass on for ids.
function staged.like(model, ids, dtype)
    return te.empty({ ids:size(1), ids:size(2), model.config.n_embd },
        { dtype = dtype, device = model:parameters()[1].device })
end

-- What the last stage has, in all of them.
local function from_last(model, x, shape, dtype)
    local stage = model.stage
    x = x and x:contiguous() or te.empty(shape, { dtype = dtype, device = model:parameters()[1].device })
    return stage.group:broadcast_(x, stage.size - 1)
end

-- A forward of all stages without gradients. run(model, ids, x, has_loss): this stage's.
local function pass_on(model, run, ids, targets, which)
    local stage, x = model.stage, nil
    if stage.before then x = stage.before:exchange(staged.like(model, ids, dtype_of(model)), -1, 0) end
    x = run(model, ids, x, targets ~= nil)
    local is_last = not stage.behind
    if not is_last then stage.behind:exchange(x, 1, -1) end
    if targets then
        local logits, loss
        if is_last then logits, loss = split.logits_and_loss(model, x, targets) end
        return logits, from_last(model, loss, {}, dtype_of(model) == "float64" and "float64" or "float32")
    end
    local shape = { ids:size(1), model.config.vocab_size }
    if which == "all" then table.insert(shape, 2, ids:size(2)) end
    return from_last(model, is_last and split.logits(model, which == "all" and x or x:select(2, -1)) or nil, shape,
        dtype_of(model))
end

--- What Decoder:forward gives where no gradient is recorded.
---@param model table
---@param run function      of the model, ids, what came from the stage before and whether there are targets: the
---  hidden states of this stage
---@param ids te.Tensor
---@param targets te.Tensor|nil
---@param which string|nil  option logits
function staged.forward(model, run, ids, targets, which)
    if core.grad_enabled() then
        fail("%s: divided by pipeline_parallel it is trained by te.distributed.pipeline_step, and called in te.no_grad",
            model.__name)
    end
    local results = { staged.apart(model.stage, pass_on, model, run, ids, targets, which) }
    if model.training and model.config.dropout > 0 then
        local far = te.tensor({ staged.drawn() }, { dtype = "float64", device = "cpu" })
        staged.draw_from(model.stage.group:all_reduce(far, "max"):item())
    end
    return results[1], results[2]
end

return staged
