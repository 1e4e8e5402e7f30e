--- te.train.pretrained: runs of train_gpt.lua that start with the model in a folder of Hugging Face's Transformers.

local te = require "te"
local script = require "te.train.run"
local beside = require "te.tokenizer.beside"
local configuration = require "te.hugging_face.config"

local pretrained = {}

-- What the folder's model has for good, by the options' names.
local MODEL = { "vocab_size", "model", "n_layer", "n_head", "n_kv_head", "n_expert", "n_expert_active",
    "n_embd", "bias", "init_std" }

local function config_of(o)
    return (select(2, configuration.model(configuration.open(o.hugging_face .. "/config.json"))))
end

local function has_experts(o) return config_of(o).n_expert ~= nil end

-- What processes cannot have stages of.
local function check_stages(o, refuse)
    if o.pipeline_parallel == 1 then return end
    local made, n = script.io(config_of, o), o.pipeline_parallel
    if made.n_expert then
        refuse("--pipeline-parallel=%d: the model in --hugging-face=%s has experts", n, o.hugging_face)
    elseif made.n_layer < n then
        refuse("--pipeline-parallel=%d: the model in --hugging-face=%s has %d blocks", n, o.hugging_face, made.n_layer)
    end
end

-- What processes cannot have parts of.
local function check_split(o, refuse)
    if o.tensor_parallel == 1 then return end
    local made, n = script.io(config_of, o), o.tensor_parallel
    if made.n_expert then
        refuse("--tensor-parallel=%d: the model in --hugging-face=%s has experts", n, o.hugging_face)
    end
    for _, of in ipairs { { "n_head", "attention heads" }, { "n_kv_head", "key and value heads" },
        { "n_inner", "features in an MLP" } } do
        local name, what = of[1], of[2]
        if made[name] and made[name] % n ~= 0 then
            refuse("--tensor-parallel=%d: the model in --hugging-face=%s has %d %s", n, o.hugging_face, made[name],
                what)
        end
    end
end

local function id_of(path) return (te._core.stat(path) or {}).id end

-- A run writes its tokenizer into its folder, where that of a model that is there as well would be lost.
local function keep_own_tokenizer(o, refuse)
    local own, id = id_of(o.out .. "/" .. beside[1]), id_of(o.tokenizer)
    if id_of(o.out) ~= id_of(o.hugging_face) or not own then return end
    if id ~= own and id ~= id_of(o.out) then
        refuse("--tokenizer=%s would replace the one in --hugging-face=%s, which is --out as well", o.tokenizer,
            o.hugging_face)
    end
end

--- Ends the script where the command line says something else of the model, or how text becomes ids.
---@param o table         all options of train_gpt.lua
---@param given table     those of the command line
---@param refuse function
function pretrained.check(o, given, refuse)
    for _, name in ipairs(MODEL) do
        if given[name] ~= nil then
            refuse("--%s: the model in --hugging-face=%s has its own", name:gsub("_", "-"), o.hugging_face)
        end
    end
    if given.tokenizer == "byte" or given.tokenizer == "char" then
        refuse("--tokenizer=%s: the model in --hugging-face=%s knows other ids", given.tokenizer, o.hugging_face)
    end
    if given.expert_aux_loss and not script.io(has_experts, o) then
        refuse("--expert-aux-loss: the model in --hugging-face=%s has no experts", o.hugging_face)
    end
    check_split(o, refuse)
    check_stages(o, refuse)
    if given.tokenizer then keep_own_tokenizer(o, refuse) end
end

-- Freezes the model and gives it the adapters that the options ask for.
local function add_adapters(model, o, refuse)
    local targets = o.lora_targets and {} or nil
    for name in (o.lora_targets or ""):gmatch "[^,%s]+" do targets[#targets + 1] = name end
    local added, why = pcall(te.lora.add, model, { rank = o.lora_rank, alpha = o.lora_alpha, dropout = o.lora_dropout,
        targets = targets })
    if added then return end
    local problem, of_targets = script.plain(why):gsub("^option targets[^:]*: ", "")
    if of_targets > 0 then refuse("--lora-targets=%s: %s", o.lora_targets, problem) end
    refuse("--lora-rank=%d: %s", o.lora_rank, problem)
end

--- The model in the folder o.hugging_face, with adapters where the options ask for them; the options say then what it
--- is. What is wrong ends the script.
---@param o table
---@param quantized string|nil  the recipe in whose format weights are stored
---@param ranks table            of te.train.ranks, which say how it is split
---@param refuse function
---@return table model
function pretrained.load(o, quantized, ranks, refuse)
    local model = script.io(te.models.from_hugging_face, o.hugging_face, { dropout = o.dropout, quantized = quantized,
        tensor_parallel = ranks.split.tensor_parallel, sequence_parallel = ranks.split.sequence_parallel,
        pipeline_parallel = ranks.split.pipeline_parallel,
        expert_aux_loss = script.io(has_experts, o) and o.expert_aux_loss or nil })
    local config = model.config
    if model.is_encoder then
        refuse("--hugging-face=%s: the model is an encoder, a %s, which sees the next token", o.hugging_face,
            model.KIND)
    end
    if o.block > config.block_size then
        refuse("--block=%d, but the model in --hugging-face=%s sees %d", o.block, o.hugging_face, config.block_size)
    end
    for _, name in ipairs(MODEL) do
        if config[name] ~= nil then o[name] = config[name] end
    end
    o.model = model.KIND
    if o.lora_rank > 0 then add_adapters(model, o, refuse) end
    return model
end

return pretrained
