--- config.json for a model of ours: which kind of Transformers' computes what this one does, and how it says so.
--
-- Kinds are tried in turn. Each says all that it has words for; what it says is read back as if a folder had it
-- (te.hugging_face.config), and the first kind that gives the model's own options is the one. So there is one place
-- that knows what a configuration means, and a file that is written means this model.

local te = require "te"
local fail = require "te.fail"
local json = require "te.json"
local options = require "te.options"
local configuration = require "te.hugging_face.config"

local WHO = "te.models.to_hugging_face"

local function rope_scaling(c)
    if c.rope_scaling == "none" then return json.null end
    local fields = { rope_type = c.rope_scaling, attention_factor = c.rope_attention_factor }
    for field, option in pairs(te.models.llama.STRETCHED[c.rope_scaling]) do fields[field] = c[option] end
    return fields
end

-- What all of Llama's relatives have.
local function common(c)
    return { vocab_size = c.vocab_size, hidden_size = c.n_embd, intermediate_size = c.n_inner,
        num_hidden_layers = c.n_layer, num_attention_heads = c.n_head, num_key_value_heads = c.n_kv_head,
        head_dim = c.head_size or c.n_embd / c.n_head, max_position_embeddings = c.block_size,
        rms_norm_eps = c.norm_eps, tie_word_embeddings = c.tie, rope_theta = c.rope_base,
        rope_scaling = rope_scaling(c), hidden_act = "silu", attention_bias = c.attention_bias == "all",
        initializer_range = c.init_std, attention_dropout = 0 }
end

local function layer_types(c)
    local types, windowed = {}, te.models.llama.windowed
    for layer = 1, c.n_layer do types[layer] = windowed(c, layer) and "sliding_attention" or "full_attention" end
    return types
end

local function with_windows(fields, c)
    fields.sliding_window = c.window or json.null
end

-- unused: the size that a kind wants to read also where no layer has windows.
local function with_layers(fields, c, unused)
    fields.sliding_window, fields.layer_types = c.window or unused or json.null, layer_types(c)
end

-- Windows that a file has to say are in use, from the first layer on.
local function with_used_windows(fields, c)
    with_layers(fields, c)
    fields.use_sliding_window, fields.max_window_layers = c.window ~= nil, c.window and 0 or c.n_layer
end

local function with_experts(fields, c)
    fields.num_experts, fields.num_experts_per_tok = c.n_expert, c.n_expert_active
    fields.moe_intermediate_size, fields.norm_topk_prob = c.n_inner, not c.expert_pre_softmax
    fields.decoder_sparse_step, fields.mlp_only_layers = 1, json.empty_list
    fields.router_aux_loss_coef = c.expert_aux_loss
end

-- { kind, class of Transformers, what it says beside common } in the order in which they are tried.
local RELATIVES = {
    { "llama", "LlamaForCausalLM", function(fields, c) fields.mlp_bias = c.mlp_bias end },
    { "mistral", "MistralForCausalLM", with_windows },
    { "qwen2", "Qwen2ForCausalLM", with_used_windows },
    { "qwen3", "Qwen3ForCausalLM", with_used_windows },
    { "gemma3_text", "Gemma3ForCausalLM", function(fields, c)
        with_layers(fields, c, 4096)
        fields.hidden_act, fields.hidden_activation = nil, "gelu_pytorch_tanh"
        fields.query_pre_attn_scalar = c.attention_scale and math.floor(c.attention_scale ^ -2 + 0.5) -- a whole one
            or fields.head_dim
        fields.rope_local_base_freq = c.window_rope_base or c.rope_base
        fields.attn_logit_softcapping, fields.final_logit_softcapping = json.null, json.null
    end },
    { "mixtral", "MixtralForCausalLM", function(fields, c)
        with_windows(fields, c)
        fields.num_local_experts, fields.num_experts_per_tok = c.n_expert, c.n_expert_active
        fields.router_aux_loss_coef = c.expert_aux_loss
    end },
    { "qwen3_moe", "Qwen3MoeForCausalLM", function(fields, c)
        with_windows(fields, c)
        fields.use_sliding_window, fields.max_window_layers = c.window ~= nil, 0
        with_experts(fields, c)
    end },
    { "qwen2_moe", "Qwen2MoeForCausalLM", function(fields, c)
        with_used_windows(fields, c)
        with_experts(fields, c)
        fields.qkv_bias, fields.shared_expert_intermediate_size = c.attention_bias == "qkv", c.n_inner_shared
    end },
    { "gpt_oss", "GptOssForCausalLM", function(fields, c)
        with_layers(fields, c, 128)
        fields.num_local_experts, fields.num_experts_per_tok = c.n_expert, c.n_expert_active
        fields.swiglu_limit, fields.router_aux_loss_coef = 7, c.expert_aux_loss
    end },
}

local function gpt2(c)
    return { vocab_size = c.vocab_size, n_positions = c.block_size, n_ctx = c.block_size, n_embd = c.n_embd,
        n_layer = c.n_layer, n_head = c.n_head, activation_function = c.gelu == "tanh" and "gelu_new" or "gelu",
        layer_norm_epsilon = 1e-5, tie_word_embeddings = true, initializer_range = c.init_std, embd_pdrop = c.dropout,
        attn_pdrop = c.dropout, resid_pdrop = c.dropout }
end

-- Of training alone; and biases, which a GPT-2 always has: zeros where the model has none.
local NOT_SAID = { dropout = true, init_std = true, quantized = true, expert_aux_loss = true }
local NOT_SAID_BY_GPT2 = { dropout = true, init_std = true, quantized = true, bias = true }

-- All options that a model is made with, those that say the same as another one by that.
local function complete(class, given)
    local all = {}
    for name, declared in pairs(class.CONFIG) do
        all[name] = given[name]
        if all[name] == nil then all[name] = declared[2] end
    end
    all.n_kv_head, all.head_size = all.n_kv_head or all.n_head, all.head_size or all.n_embd / all.n_head
    if all.window_rope_base == all.rope_base and all.rope_scaling == "none" then all.window_rope_base = nil end
    if all.attention_scale and math.abs(all.attention_scale * all.head_size ^ 0.5 - 1) < 1e-12 then
        all.attention_scale = nil
    end
    return all
end

local function alike(a, b)
    if type(a) == "number" and type(b) == "number" then return math.abs(a - b) <= 1e-12 * math.abs(a) end
    return a == b
end

-- The options that a text gives otherwise than the model has them, as texts, and how many; or why it cannot be read,
-- which is more than any number.
local function differences(model, text, not_said)
    local read, class, made = pcall(configuration.model, configuration.new("config.json", text))
    if not read then return { (tostring(class):gsub("^.*config%.json: ", "")) }, math.huge end
    local own, other, found = complete(class, model.config), complete(class, made), {}
    for _, name in ipairs(options.names(class.CONFIG)) do
        if not not_said[name] and not alike(own[name], other[name]) then
            found[#found + 1] = ("%s = %s, not %s"):format(name, options.shown(other[name]), options.shown(own[name]))
        end
    end
    return found, #found
end

-- Fields that Transformers takes as real numbers alone.
local REAL = { "rope_theta", "rope_local_base_freq", "rms_norm_eps", "initializer_range", "router_aux_loss_coef",
    "attention_dropout", "swiglu_limit", "embd_pdrop", "attn_pdrop", "resid_pdrop", "layer_norm_epsilon", "factor",
    "layer_norm_eps", "norm_eps", "global_rope_theta",
    "local_rope_theta", "embedding_dropout", "mlp_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "dropout", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor" }

local function make_real(fields)
    for _, name in ipairs(REAL) do
        if type(fields[name]) == "number" then fields[name] = json.real(fields[name]) end
    end
end

local function text_of(kind, class, fields, said)
    fields.model_type, fields.architectures = kind, { class }
    for name, value in pairs(said) do fields[name] = value end
    make_real(fields)
    if fields.rope_scaling and fields.rope_scaling ~= json.null then make_real(fields.rope_scaling) end
    return json.encode(fields)
end

-- The configuration of an encoder; only its weights say whether one without a head has a pooler.
local function encoder(model, said)
    local fields, class, kind = require("te.hugging_face.encoder_config").fields(model)
    local padding, not_said = fields.pad_token_id, { dropout = true, init_std = true, quantized = true }
    if padding then said.pad_token_id = padding end
    not_said.pooler = model.config.head == "none" and model.config.pooler ~= "relu" or nil
    local text = text_of(kind, class, fields, said)
    local found = differences(model, text, not_said)
    if found[1] then fail("%s: a %s would have %s", WHO, kind, table.concat(found, "; ")) end
    return text, kind
end

local written = {}

--- The configuration of a model. Raises where no kind has words for it.
---@param model table       of te.models
---@param said table        fields beside the model's: torch_dtype and the like
---@return string text      of config.json
---@return string kind      its model_type
function written.config(model, said)
    local c = model.config
    if model.KIND == "gpt" then
        local text = text_of("gpt2", "GPT2LMHeadModel", gpt2(c), said)
        local found = differences(model, text, NOT_SAID_BY_GPT2)
        if found[1] then fail("%s: a gpt2 would have %s", WHO, found[1]) end
        return text, "gpt2"
    end
    if model.is_encoder then return encoder(model, said) end
    local nearest, least, fewest
    for _, row in ipairs(RELATIVES) do
        local kind, class, add = unpack(row)
        local fields = common(c)
        add(fields, c)
        local text = text_of(kind, class, fields, said)
        local found, count = differences(model, text, NOT_SAID)
        if count == 0 then return text, kind end
        if not least or count < fewest then nearest, least, fewest = kind, found, count end
    end
    fail("%s: no model of Transformers that is known here has these options: as %s it would have %s", WHO, nearest,
        table.concat(least, "; "))
end

return written
