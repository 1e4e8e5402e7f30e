--- te.train.checkpoint: everything that a run needs to go on, in one safetensors file per saved step.
--
-- Tensors: "model.<name>" and "optimizer.<slot>.<name>". Texts, in the metadata: the step, the optimizer's name and its
-- step counts, with a line "<count> <name>" for each parameter, the state of the random numbers, and whatever the
-- script adds. Options, such as rates, are the script's: a run goes on with those of the optimizer that it makes. A
-- file appears whole or not at all (te.save), so the newest one is always good. Tensors are those of the whole model,
-- also where processes have parts of it: any number of processes can go on.

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local options = require "te.options"
local run = require "te.train.run"

local collected = require "te.train.collected"
local shards = require "te.distributed.shards"
local stages = require "te.distributed.stages"
local whole = require "te.distributed.whole"

local checkpoint = {}

local TOKENIZER = require "te.tokenizer.beside"
local NAME = "checkpoint-%08d.safetensors"
local PATTERN = "^checkpoint%-(%d+)%.safetensors$"
local UNFINISHED = "^%.checkpoint%-%d+%.safetensors%.%x+%.tmp$" -- te.save renames it when it is whole

--- Steps that have a checkpoint in the folder, in order.
function checkpoint.steps(folder)
    files.need "te.train.checkpoint.steps"
    local steps = {}
    if not te._core.stat(folder) then return steps end
    for _, name in ipairs(te._core.list_dir(folder)) do
        local step = tonumber(name:match(PATTERN))
        if step and name == NAME:format(step) then steps[#steps + 1] = step end
    end
    table.sort(steps)
    return steps
end

--- The path of a step's checkpoint.
function checkpoint.path(folder, step) return ("%s/" .. NAME):format(folder, step) end

--- The newest checkpoint in a folder; nil when there is none.
function checkpoint.latest(folder)
    local steps = checkpoint.steps(folder)
    return steps[#steps] and checkpoint.path(folder, steps[#steps])
end

local function parameter_names(model)
    local names = {}
    for name, parameter in model:named_parameters() do names[parameter] = name end
    return names
end

local function add_model(put, model)
    local parameters, state = {}, model:state_dict()
    for name, parameter in model:named_parameters() do
        parameters[name] = parameter
        if whole.layouts[parameter] and state[name] == nil then
            fail("te.train.checkpoint.save: %s is split and stored quantized: its parts are not joined", name)
        end
    end
    for _, name in ipairs(options.names(state)) do put("model." .. name, state[name], parameters[name]) end
end

-- Adds the optimizer's tensors under the names of their parameters, and its counts as text.
local function add_optimizer(put, metadata, model, optimizer)
    local names, counts = parameter_names(model), optimizer:step_counts()
    optimizer:catch_up()
    local sharding = optimizer.sharding
    for i, parameter in ipairs(shards.parameters(optimizer)) do
        if not names[parameter] then
            fail("te.train.checkpoint.save: parameter %d of the optimizer, of shape %s, is none of the model's", i,
                options.shape(parameter))
        end
        local slice = optimizer.order[i]
        local state = optimizer.state[slice] or {} -- itself, as state_dict would copy it
        counts[i] = ("%d %s"):format(counts[i], names[parameter])
        local function put_slot(slot, value, make)
            if te.is_tensor(value) then
                put(("optimizer.%s.%s"):format(slot, names[parameter]), value, parameter, make)
            end
        end
        if sharding and sharding.by_slice[slice] then
            sharding.each_share(optimizer, slice, put_slot)
        else
            for _, slot in ipairs(options.names(state)) do put_slot(slot, state[slot]) end
        end
    end
    metadata["optimizer.counts"], metadata["optimizer.name"] = table.concat(counts, "\n"), optimizer.name
end

-- By the name of the parameter, and how many of them are here, where others are in other stages. Files of before have
-- "optimizer.steps", in the order of the optimizer.
local function step_counts(metadata, parameters, names, elsewhere)
    local counts, n, texts = {}, 0, metadata["optimizer.counts"]
    for count, name in (texts or ""):gmatch("(%d+) ([^\n]*)") do
        counts[name] = tonumber(count)
        if not (elsewhere and elsewhere(name)) then n = n + 1 end
    end
    for count in (not texts and metadata["optimizer.steps"] or ""):gmatch("%d+") do
        n = n + 1
        local name = names[parameters[n]]
        if name then counts[name] = tonumber(count) end
    end
    return counts, n
end

local MOST_STEPS = 2 ^ 40

local SAVE = {
    folder = { "string", help = "folder of the run; required" },
    step = { "integer", min = 0, max = MOST_STEPS, help = "last completed step; required" },
    model = { "any", help = "required" },
    optimizer = { "any", help = "required" },
    metadata = { "table", {}, help = "list of tables of strings, saved as well" },
    keep = { "size", 2, help = "how many checkpoints to keep" },
    group = { "any", help = "of te.distributed, of a model that is split or divided over it: all of it call this, "
        .. "rank 0 writes" },
}

-- Raises where parts of a model would be written as if they were the whole. Returns the stage of one that is divided.
local function check_parts(who, model, group)
    options.group(who, "option group", group)
    local stage, split = stages.find(model), 1
    for name, parameter in model:named_parameters() do
        local layout = whole.layouts[parameter]
        if layout and not stage and layout.group ~= group then
            fail("%s: option group: %s is split over %s, got %s", who, name, tostring(layout.group), tostring(group))
        end
        if layout then split = layout.group.size end
    end
    if stage and (not group or group.size ~= stage.size * split) then
        fail("%s: option group: the model is divided between %d processes, got %s", who, stage.size * split,
            tostring(group))
    end
    return stage
end

-- Whether this process writes, of all that call save for one model.
local function is_writer(opts)
    local sharding = opts.optimizer.sharding
    return (not opts.group or opts.group.rank == 0) and (not sharding or sharding.group.rank == 0)
end

--- Writes a checkpoint and removes the others with the lowest steps. If the optimizer is sharded all processes of its
--- group call this, and its rank 0 writes.
---@param opts table
---@return string path
function checkpoint.save(opts)
    opts = options.check("te.train.checkpoint.save", opts, SAVE)
    for _, name in ipairs { "folder", "step", "model", "optimizer" } do
        if opts[name] == nil then fail("te.train.checkpoint.save: option %s is needed", name) end
    end
    if not te.Module.is(opts.model, te.Module) then
        fail("te.train.checkpoint.save: option model: expected a module, got %s", options.shown(opts.model))
    end
    for i = 1, options.list("te.train.checkpoint.save", "option metadata", opts.metadata) do
        options.argument("te.train.checkpoint.save", ("option metadata[%d]"):format(i), opts.metadata[i], { "table" })
    end
    local stage = check_parts("te.train.checkpoint.save", opts.model, opts.group)
    local tensors, metadata = {}, { step = tostring(opts.step), rng = te.rng_state() }
    for _, texts in ipairs(opts.metadata) do
        for name, value in pairs(texts) do
            if name == "step" or name == "rng" or tostring(name):find("^optimizer%.") then
                fail("te.train.checkpoint.save: option metadata: %s is the checkpoint's own name", options.shown(name))
            end
            metadata[name] = value
        end
    end
    local writes, path = is_writer(opts), checkpoint.path(opts.folder, opts.step)
    local put, finish = collected.new(tensors, metadata, writes, opts.model, stage)
    add_model(put, opts.model)
    add_optimizer(put, metadata, opts.model, opts.optimizer)
    finish()
    if not writes then return path end
    te.save(path, tensors, metadata)
    local others = {}
    for _, step in ipairs(checkpoint.steps(opts.folder)) do
        if step ~= opts.step then others[#others + 1] = step end
    end
    for i = 1, #others - opts.keep + 1 do os.remove(checkpoint.path(opts.folder, others[i])) end
    return path
end
options.declare(checkpoint.save, SAVE)

-- Whether te.load's message is about what stands in the file, and not about memory or the disk.
local function is_damage(message) return message:find ": offset %d" or message:find ": header: " end

-- What is said behind the message that a checkpoint is damaged: the one before it in its folder.
local function older(path)
    local folder, name = path:match "^(.*)/([^/]*)$"
    local step, before = tonumber((name or ""):match(PATTERN)), nil
    for _, other in ipairs(step and checkpoint.steps(folder) or {}) do
        if other < step then before = other end
    end
    return before and ("; without this file %s is the newest"):format(checkpoint.path(folder, before)) or ""
end

--- Reads a checkpoint: { step =, metadata =, tensors = }.
function checkpoint.load(path)
    local read, tensors, metadata = pcall(te.load, path)
    if not read then
        local text = tostring(tensors)
        local named = type(path) ~= "string" or text:find(path, 1, true)
        error((named and text or path .. ": " .. run.plain(text)) .. (is_damage(text) and older(path) or ""), 0)
    end
    local step = metadata and tonumber(metadata.step)
    if not step or step < 0 or step > MOST_STEPS or step % 1 ~= 0 then
        error(path .. ": not a training checkpoint (its metadata has no step)", 0)
    end
    return { path = path, step = step, metadata = metadata, tensors = tensors }
end

local function with_prefix(tensors, prefix)
    local found = {}
    for name, tensor in pairs(tensors) do
        if name:sub(1, #prefix) == prefix then found[name:sub(#prefix + 1)] = tensor end
    end
    return found
end

--- Puts the weights of a checkpoint back into the model that it was made of, which it returns.
function checkpoint.restore_model(saved, model)
    return model:load_state_dict(whole.split_state(model, with_prefix(saved.tensors, "model.")))
end

-- Of what an optimizer kept of a parameter, this process's part.
local function own_parts(saved, name, parameter, state)
    if not whole.layouts[parameter] then return state end
    local own, want = {}, options.shape(whole.shape(parameter))
    for slot, tensor in pairs(state) do
        if options.shape(tensor) ~= want then
            error(("%s: optimizer.%s.%s has shape %s, the whole parameter %s"):format(saved.path, slot, name,
                options.shape(tensor), want), 0)
        end
        own[slot] = whole.split(parameter, tensor)
    end
    return own
end

--- Puts back the optimizer and the random numbers; the model comes first.
function checkpoint.restore_training(saved, model, optimizer)
    local names, all = parameter_names(model), { state = {}, groups = {} }
    local states = {}
    for name, tensor in pairs(with_prefix(saved.tensors, "optimizer.")) do
        local slot, parameter = name:match("^([^.]*)%.(.*)$")
        if not slot then error(("%s: optimizer.%s names no parameter"):format(saved.path, name), 0) end
        states[parameter] = states[parameter] or {}
        states[parameter][slot] = tensor
    end
    optimizer:catch_up() -- with what its groups have
    local parameters = shards.parameters(optimizer)
    local counts, n = step_counts(saved.metadata, parameters, names, stages.elsewhere(model))
    if n ~= #parameters then
        error(("%s: %d parameters were optimized, the model has %d"):format(saved.path, n, #parameters), 0)
    end
    for i, parameter in ipairs(parameters) do
        local name = names[parameter]
        local count = name and counts[name]
        if not count then
            error(("%s: parameter %d of the optimizer, %s, was not optimized"):format(saved.path, i,
                name or "which is none of the model's"), 0)
        elseif count > 0 then
            all.state[i] = own_parts(saved, name, parameter, states[name] or {})
            all.state[i].step = count
            -- a step on a quantized parameter is one on its master; made anew of the parameter, that would be another
            if te._core.is_quantized(parameter) and not all.state[i].master then
                error(("%s: optimizer.master.%s is missing"):format(saved.path, name), 0)
            end
        end
    end
    if not saved.metadata.rng then error(saved.path .. ": rng is missing", 0) end
    for g = 1, #optimizer.groups do all.groups[g] = { optimizer = saved.metadata["optimizer.name"] } end
    optimizer:load_state_dict(all)
    te.rng_state(saved.metadata.rng)
end

--- Gives the memory of a checkpoint's tensors back, when all that it is for has copies of them.
function checkpoint.release(saved)
    for _, tensor in pairs(saved.tensors) do tensor:release() end
    saved.tensors = {}
    te.empty_cache()
end

--- Ends with an error when a run would go on with other data than it began with.
function checkpoint.check_data(saved, set)
    for name, text in pairs(set:texts()) do
        local older = name == "data.sample" and not saved.metadata[name] -- than that there are samples
        if saved.metadata[name] ~= text and not older then
            run.fail(run.exit.io, ("%s: the data has changed since: %s is not what the run began with"):format(
                saved.path, set.description))
        end
    end
end

local claimed = {}

--- Keeps the folder for this process until it ends: a second run that claims it gets an error. Of a folder that is not
--- there nothing is kept. What a run that was killed was writing is removed.
---@param make boolean|nil  the folder is made where there is none
function checkpoint.claim(folder, make)
    files.need "te.train.checkpoint.claim"
    if make then te._core.mkdir(folder) end
    if claimed[folder] or not te._core.stat(folder) then return end
    claimed[folder] = te._core.lock_folder(folder)
    if not claimed[folder] then error(folder .. ": another run writes into this folder", 0) end
    for _, name in ipairs(te._core.list_dir(folder)) do
        if name:find(UNFINISHED) then os.remove(folder .. "/" .. name) end
    end
end

-- Whether something of a run stands in a folder: one that stopped before it saved left its metrics.
local function holds_run(folder)
    local metrics = te._core.stat(folder .. "/metrics.jsonl")
    return checkpoint.latest(folder) ~= nil or metrics ~= nil and metrics.type == "file" and metrics.size > 0
end

local function move(name, from, to)
    local ok, problem = os.rename(("%s/%s"):format(from, name), ("%s/%s"):format(to, name))
    if not ok then error(problem, 0) end
end

--- Makes the folder ready for a new run. The checkpoints and metrics of an earlier one move to <folder>/previous, or
--- where that holds something of a run to previous-2 and so on; its tokenizer is copied.
---@return string|nil where  the folder that they moved to
function checkpoint.set_aside(folder)
    files.need "te.train.checkpoint.set_aside"
    te._core.mkdir(folder)
    if not holds_run(folder) then return end
    local previous, n = folder .. "/previous", 1
    while holds_run(previous) do
        n = n + 1
        previous = ("%s/previous-%d"):format(folder, n)
    end
    te._core.mkdir(previous)
    for _, step in ipairs(checkpoint.steps(folder)) do move(NAME:format(step), folder, previous) end
    if te._core.stat(folder .. "/metrics.jsonl") then move("metrics.jsonl", folder, previous) end
    for _, name in ipairs(TOKENIZER) do -- which the new run may be about to read
        if te._core.stat(folder .. "/" .. name) then
            te._core.write_file(previous .. "/" .. name, assert(files.read(folder .. "/" .. name)))
        end
    end
    return previous
end

return checkpoint
