--- What te.decoder does where a model's heads, MLPs and vocabulary are split between the processes of a group: options
--- tensor_parallel and sequence_parallel. Where nothing is split it does what one process does.
--
--     ids ─ embed ─┬─ blocks, norm ─┬─ head: the logits of this process's part of the vocabulary ─ loss
--       whole      └ split by tokens┘ whole again, under sequence_parallel
--
-- What goes between processes: te.ops.tensor_parallel.

local te = require "te"
local fail = require "te.fail"
local hooks = require "te.hooks"
local options = require "te.options"
local tensor_parallel = require "te.ops.tensor_parallel"
local whole = require "te.distributed.whole"

local split = {}

local DIVIDED = { "n_head", "n_kv_head", "n_inner" } -- what each process has a part of

--- Notes in a model and its config how it is split; raises where it cannot be.
---@param model table
---@param who string
---@param config table
---@param cut boolean  whether processes have parts of sequences (context_parallel)
function split.configure(model, who, config, cut)
    local group, sequence = tensor_parallel.check(who, "tensor_parallel", config.tensor_parallel,
        config.sequence_parallel)
    model.tensor_parallel, model.sequence_parallel = group, sequence
    config.tensor_parallel, config.sequence_parallel = group, sequence
    if not group then return end
    if config.n_expert then fail("%s: tensor_parallel: experts (n_expert = %d) are not split", who, config.n_expert) end
    if cut then fail("%s: tensor_parallel: not together with context_parallel", who) end
    if config.vocab_size < group.size then
        fail("%s: vocab_size = %d cannot be split between %d processes", who, config.vocab_size, group.size)
    end
    for _, name in ipairs(DIVIDED) do
        if config[name] then tensor_parallel.check_divides(who, name, config[name], group) end
    end
end

--- Whether the tokens of a split model are split between its layers.
function split.set_sequence_parallel(model, on)
    local who = model.__name .. ":set_sequence_parallel"
    options.argument(who, "on", on, { "boolean" })
    if not model.tensor_parallel then
        if on then fail("%s: on: the model is not split by tensor_parallel", who) end
        return model
    end
    for _, module in model:named_modules() do
        local set = module ~= model and module.set_sequence_parallel
        if set then set(module, on, model.tensor_parallel) end
    end
    model.sequence_parallel = on
    return model
end

--- The table of the token embedding, filled by init.
function split.embedding(model, init)
    local opts, group = { init_method = init }, model.tensor_parallel
    if group then opts.tensor_parallel_mode, opts.tensor_parallel_group = "vocab", group end
    return te.Embedding(model.config.vocab_size, model.config.n_embd, opts)
end

--- run_chain(model, x) of embedded tokens {batch, seq, n_embd}, which all processes have. `as_split`: what comes back
--- is of this process's tokens, where they are split.
function split.run(model, run_chain, x, as_split)
    local group = model.tensor_parallel
    if not model.sequence_parallel then return run_chain(model, x) end
    x = tensor_parallel.split_tokens(model.__name, group, x)
    local drops = model.training and model.config.dropout > 0
    x = drops and tensor_parallel.apart(group, run_chain, model, x) or run_chain(model, x)
    return as_split and x or tensor_parallel.join_tokens(group, x)
end

-- The product with the head, which is a layer's or the embedding's.
local function product(model, x)
    local layer = model.lm_head
    return layer and hooks.product(layer, x) or te.linear(x, model:head())
end

--- Logits of hidden states, with which all processes go on alike.
function split.logits(model, x)
    local group = model.tensor_parallel
    if not group then return product(model, x) end
    x = tensor_parallel.before_columns(group, false, x)
    return tensor_parallel.join_columns(group, product(model, x), model:head())
end

--- Logits, those of this process's part of the vocabulary, and the mean cross entropy. `x`: hidden states, of this
--- process's tokens where they are split.
function split.logits_and_loss(model, x, targets)
    local group, width = model.tensor_parallel, model.config.n_embd
    targets = targets:reshape({ -1 })
    if group then x = tensor_parallel.before_columns(group, model.sequence_parallel, x) end
    local logits = product(model, x:view({ -1, width }))
    if not group then return logits, te.cross_entropy(logits, targets) end
    return logits, te.parallel_cross_entropy(logits, targets, { group = group })
end

--- How many numbers the parameters of all processes together are.
function split.count(parameters)
    local n = 0
    for _, parameter in ipairs(parameters) do
        local count = 1
        for _, size in ipairs(whole.shape(parameter)) do count = count * size end
        n = n + count
    end
    return n
end

--- Raises where a model is split, for what needs whole weights.
function split.refuse(model, who)
    if not model.tensor_parallel then return end
    fail("%s: the model is split by tensor_parallel; te.distributed.join_state(model) has whole tensors", who)
end

return split
