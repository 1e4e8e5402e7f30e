--- te.train.check_gpt_options: which options of train_gpt.lua go together.

local te = require "te"
local run = require "te.train.run"
local pretrained = require "te.train.pretrained"

local FP8_ATTENTION = { delayed = true, current = true, mxfp8 = true }

-- Of a model that is made new.
local function check_model(o, given, refuse)
    if o.n_embd % o.n_head ~= 0 then refuse("--n-embd=%d is no multiple of --n-head=%d", o.n_embd, o.n_head) end
    if o.model == "llama" then
        if o.bias then refuse "--bias: --model=llama has none" end
        local size = o.n_embd / o.n_head
        if size % 2 ~= 0 then refuse("--model=llama: heads of %d features are odd", size) end
        if o.n_kv_head > 0 and o.n_head % o.n_kv_head ~= 0 then
            refuse("--n-head=%d is no multiple of --n-kv-head=%d", o.n_head, o.n_kv_head)
        end
        if o.n_expert > 0 and o.n_expert_active > o.n_expert then
            refuse("--n-expert-active=%d of --n-expert=%d", o.n_expert_active, o.n_expert)
        end
    elseif o.n_kv_head > 0 or o.n_expert > 0 then
        refuse("--%s needs --model=llama", o.n_kv_head > 0 and "n-kv-head" or "n-expert")
    end
    if o.n_expert == 0 and (given.n_expert_active or given.expert_aux_loss) then
        refuse("--%s needs --n-expert", given.n_expert_active and "n-expert-active" or "expert-aux-loss")
    end
end

-- Of a model that is split between processes.
local function check_split(o, given, refuse)
    local n = o.tensor_parallel
    if n == 1 then
        if given.sequence_parallel then refuse "--sequence-parallel needs --tensor-parallel" end
        o.sequence_parallel = false -- a run goes on in one process that several began
        return
    end
    for _, name in ipairs { "context_parallel", "n_expert", "lora_rank" } do
        local off = name == "context_parallel" and 1 or 0
        if o[name] ~= off then refuse("--tensor-parallel=%d: not with --%s", n, (name:gsub("_", "-"))) end
    end
    if o.fp8_params then refuse("--tensor-parallel=%d: not with --fp8-params", n) end
    local known = o.resume or not o.hugging_face -- a checkpoint's options have them of its model
    for _, name in ipairs(known and { "n_head", "n_kv_head" } or {}) do
        if o[name] % n ~= 0 then
            refuse("--tensor-parallel=%d: --%s=%d is no multiple of it", n, (name:gsub("_", "-")), o[name])
        end
    end
    if o.model == "llama" and not o.hugging_face then -- of a gpt, a multiple of the width and so of its heads
        local inner = te.models.llama.inner_size(o.n_embd)
        if inner % n ~= 0 then
            refuse("--tensor-parallel=%d: --n-embd=%d makes MLPs %d wide, no multiple of it", n, o.n_embd, inner)
        end
    end
    if o.sequence_parallel and o.block % n ~= 0 then
        refuse("--sequence-parallel: --block=%d is no multiple of --tensor-parallel=%d", o.block, n)
    end
end

-- Of a model whose blocks are divided between processes.
local function check_stages(o, refuse)
    local n = o.pipeline_parallel
    if n == 1 then return end
    for _, name in ipairs { "n_expert", "lora_rank" } do
        if o[name] ~= 0 then refuse("--pipeline-parallel=%d: not with --%s", n, (name:gsub("_", "-"))) end
    end
    if (o.resume or not o.hugging_face) and o.n_layer < n then
        refuse("--pipeline-parallel=%d: there are --n-layer=%d blocks", n, o.n_layer)
    end
end

local function check_tokenizer(o, refuse)
    local named = o.tokenizer ~= "byte" and o.tokenizer ~= "char"
    if named and not o.resume and not te._core.stat(o.tokenizer) then -- a run that goes on has its own
        refuse("--tokenizer: expected byte, char, or a tokenizer.json file or its folder, got %q", o.tokenizer)
    end
end

-- Of adapters, which a model of Transformers alone gets.
local function check_adapters(o, given, refuse)
    if o.lora_rank > 0 and not o.hugging_face then
        refuse("--lora-rank needs --hugging-face: adapters are for a model that is there already")
    end
    for _, name in ipairs { "alpha", "dropout", "targets" } do
        if o.lora_rank == 0 and given["lora_" .. name] ~= nil then refuse("--lora-%s needs --lora-rank", name) end
    end
end

-- A run that goes on may have --cp-heads from before, without a use for it.
local function check_context(o, given, refuse)
    local heads = o.cp_comm_type == "a2a+p2p"
    if o.context_parallel == 1 then
        if given.cp_comm_type then refuse "--cp-comm-type needs --context-parallel" end
        if given.cp_heads then refuse "--cp-heads needs --context-parallel" end
    elseif heads and not o.cp_heads or given.cp_heads and not heads then
        refuse "--cp-heads and --cp-comm-type=a2a+p2p go together"
    elseif heads and o.context_parallel % o.cp_heads ~= 0 then
        refuse("--context-parallel=%d is no multiple of --cp-heads=%d", o.context_parallel, o.cp_heads)
    end
end

--- Refuses options of train_gpt.lua that do not go together, which each alone cannot say.
---@param o table  values of options
---@param given table  those that the command line said
---@param device string
---@param refuse function  takes a message as string.format does, and ends the script
return function(o, given, device, refuse)
    if o.recipe == "none" and (o.fp8_params or o.watch_numerics > 0) then
        refuse("--%s needs a --recipe", o.fp8_params and "fp8-params" or "watch-numerics")
    end
    if o.fp8_attention ~= "none" and not FP8_ATTENTION[o.recipe] then
        refuse("--fp8-attention needs --recipe=delayed, current or mxfp8, not %s", o.recipe)
    end
    if o.min_lr and o.min_lr > o.lr then refuse("--min-lr=%g is above --lr=%g", o.min_lr, o.lr) end
    check_tokenizer(o, refuse)
    check_adapters(o, given, refuse)
    check_split(o, given, refuse)
    check_stages(o, refuse)
    if not o.hugging_face then
        check_model(o, given, refuse)
    elseif not o.resume then
        pretrained.check(o, given, refuse)
    end
    check_context(o, given, refuse)
    if o.context_parallel > 1 and o.fp8_attention ~= "none" then
        refuse "--fp8-attention: not with --context-parallel"
    end
    local there, problem = pcall(te.empty, { 1 }, { device = device })
    if not there then refuse("--device=%s: %s", o.device, run.plain(problem)) end
end
