--- te.models.llama: the decoder-only Transformer of Llama (Touvron et al. 2023; Llama 3, 2024).
--
--     local model = te.models.llama { vocab_size = 32000, n_layer = 8, n_head = 8, n_kv_head = 2, n_embd = 512 }
--     local logits, loss = model(ids, targets)      -- {batch, seq}, ids count from 0
--     model:load_hugging_face(te.load("model.safetensors"))
--
-- Pre-norm blocks with RMSNorm, rotary positions, grouped queries and SwiGLU, no biases; the head is a weight of its
-- own unless `tie` is set. Options make it a Mistral (window), a Qwen2 (attention_bias), a Qwen3 (qk_norm, head_size),
-- a Mixtral or another mixture of experts (n_expert), a GPT-OSS (attention_sinks, full_every), a Gemma 3 (post_norm).
-- Weights start as N(0, init_std), those that end in a residual sum as N(0, init_std / sqrt(2 n_layer)).

local te = require "te"
local fail = require "te.fail"
local initializers = require "te.initializers"
local fuser = require "te.fuser"
local tensor_parallel = require "te.ops.tensor_parallel"
local Decoder = require "te.decoder"

local Block = te.Module:extend("Block")
Block.forward = fuser.forward
Block.records = true -- te.decoding

-- What te.rope_frequencies takes for each way to stretch positions, and the options that say so here.
local ORIGINAL = "rope_original_block_size"
local STRETCHED = {
    none = {},
    linear = { factor = "rope_factor" },
    llama3 = { factor = "rope_factor", low_freq_factor = "rope_low_freq_factor",
        high_freq_factor = "rope_high_freq_factor", original_max_position_embeddings = ORIGINAL },
    yarn = { factor = "rope_factor", beta_fast = "rope_beta_fast", beta_slow = "rope_beta_slow",
        truncate = "rope_truncate", original_max_position_embeddings = ORIGINAL },
}

-- Whether a layer, counted from 1, sees a window alone.
local function windowed(config, layer)
    return config.window and not (config.full_every and layer % config.full_every == 0)
end

local function rope_of(config, layer)
    if config.window_rope_base and windowed(config, layer) then return { base = config.window_rope_base } end
    if config.rope_scaling == "none" then return { base = config.rope_base } end
    local scaling = { type = config.rope_scaling }
    for name, option in pairs(STRETCHED[config.rope_scaling]) do scaling[name] = config[option] end
    return { base = config.rope_base, scaling = scaling }
end

-- Raises where an option of another way is set.
local function check_rope(config, declared)
    local kind, acts = config.rope_scaling, { rope_base = true, rope_scaling = true }
    acts.rope_attention_factor = kind == "yarn"
    for _, option in pairs(STRETCHED[kind]) do acts[option] = true end
    for name, declaration in pairs(declared) do
        if name:find "^rope_" and not acts[name] and config[name] ~= declaration[2] then
            fail("te.models.llama: %s = %s has no effect %s", name, tostring(config[name]),
                kind == "none" and "without rope_scaling" or "with rope_scaling = " .. kind)
        end
    end
end

-- Of scores, nil: the usual one. Under YaRN queries and keys both are longer by a factor (Peng et al. 2023, section
-- 3.4).
local function scale_of(config, layer)
    local stretched = config.rope_scaling == "yarn" and rope_of(config, layer).scaling
    if not stretched then return config.attention_scale end
    local factor = config.rope_attention_factor or 0.1 * math.log(math.max(config.rope_factor, 1)) + 1
    return factor ^ 2 * (config.attention_scale or 1 / math.sqrt(config.head_size or config.n_embd / config.n_head))
end

-- `split`: has the fields tensor_parallel and sequence_parallel; a block's config unless given.
local function norm(config, split)
    split = split or config
    return te.RMSNorm(config.n_embd, tensor_parallel.norm(split.tensor_parallel, split.sequence_parallel,
        { eps = config.norm_eps, zero_centered_gamma = config.zero_centered_gamma }))
end

-- Between norm and sum, with the norm of the result where there is one.
local function branch(config, ...)
    local made = te.Residual(norm(config), ...)
    if config.post_norm then made:append(norm(config)) end
    return made:append(te.Dropout(config.dropout))
end

local function attention(config, layer, init, residual_init)
    local normed = config.qk_norm
    return te.GroupedQueryAttention(config.n_embd, config.n_head, config.n_kv_head, { head_size = config.head_size,
        qkv_bias = config.attention_bias ~= "none", proj_bias = config.attention_bias == "all",
        dropout = config.dropout, rope = rope_of(config, layer), scale = scale_of(config, layer),
        window_left = windowed(config, layer) and config.window - 1 or nil,
        softmax_type = config.attention_sinks and "learnable" or nil,
        qk_norm = normed and "RMSNorm" or nil, qk_norm_eps = normed and config.norm_eps or nil,
        qk_norm_before_rope = normed or nil, qk_norm_zero_centered_gamma = normed and config.zero_centered_gamma or nil,
        init_method = init, output_layer_init_method = residual_init, tp_group = config.tensor_parallel,
        sequence_parallel = config.sequence_parallel })
end

local function linear(config, mode, n_in, n_out, opts)
    return te.Linear(n_in, n_out, tensor_parallel.linear(config.tensor_parallel, config.sequence_parallel, mode, opts))
end

local function experts(config, init, residual_init)
    return te.MoE(config.n_embd, config.n_inner, config.n_expert, { topk = config.n_expert_active,
        use_pre_softmax = config.expert_pre_softmax, aux_loss_coeff = config.expert_aux_loss,
        activation = config.activation, bias = config.mlp_bias, router_bias = config.mlp_bias,
        shared = config.n_inner_shared, shared_gate = config.n_inner_shared and true or nil,
        init_method = init, output_layer_init_method = residual_init })
end

function Block:init(config, layer)
    local init = initializers.normal(0, config.init_std)
    local residual_init = initializers.normal(0, config.init_std / math.sqrt(2 * config.n_layer))
    self.attention = branch(config, attention(config, layer, init, residual_init))
    if config.n_expert then
        self.mlp = branch(config, experts(config, init, residual_init))
        return
    end
    self.mlp = branch(config,
        linear(config, "column", config.n_embd, 2 * config.n_inner, { bias = config.mlp_bias, init_method = init,
            tensor_parallel_sections = config.tensor_parallel and { config.n_inner, config.n_inner } }),
        te[config.activation](),
        linear(config, "row", config.n_inner, config.n_embd, { bias = config.mlp_bias, init_method = residual_init }))
end

function Block:chain() return { self.attention, self.mlp } end

--- What the last forward adds to the loss, nil without experts; `loss`, where it is given, takes its place.
function Block:auxiliary_loss(loss)
    local experts = self.mlp[2]
    if loss then rawset(experts, "aux_loss", loss) end
    return rawget(experts, "aux_loss")
end

local Llama = Decoder:extend("Llama")

Llama.records = true
Llama.KIND = "llama"
Llama.STRETCHED = STRETCHED -- fields of a configuration, too
Llama.windowed = windowed
Llama.CONFIG = Decoder.shared {
    block_size = { "size", 2048, help = "the longest sequence" },
    n_kv_head = { "size", help = "key and value heads; default: n_head" },
    head_size = { "size", help = "features per head; default: n_embd / n_head" },
    attention_bias = { "string", "none", choices = { "none", "qkv", "all" },
        help = "which projections of attention have a bias" },
    qk_norm = { "boolean", false, help = "RMSNorm of queries and keys, head by head, before they are rotated" },
    window = { "size", help = "how many tokens, including itself, a token attends to; default: all before it" },
    full_every = { "size", help = "every n-th layer attends to all tokens despite window" },
    window_rope_base = { "number", nil, min = 1,
        help = "rope_base of layers with a window, without rope_scaling" },
    attention_scale = { "number", help = "factor of scores; default: 1 / sqrt(head_size)" },
    attention_sinks = { "boolean", false, help = "each head has a score without a value (softmax_type learnable)" },
    post_norm = { "boolean", false, help = "also normalize what attention and MLP add" },
    zero_centered_gamma = { "boolean", false, help = "weights of norms are stored minus 1" },
    embedding_scale = { "number", 1, help = "factor of the embedding's result" },
    activation = { "string", "SwiGLU", choices = { "SwiGLU", "GEGLU", "ClampedSwiGLU" }, help = "of the MLP" },
    mlp_bias = { "boolean", false, help = "bias of the MLP's products; with experts also of the router" },
    n_inner = { "size", help = "width of the MLP; default: 8/3 n_embd, rounded up to a multiple of 64" },
    n_expert = { "size", help = "number of experts in place of the MLP; default: none" },
    n_expert_active = { "size", 2, help = "experts per token" },
    expert_pre_softmax = { "boolean", false, help = "te.MoE's use_pre_softmax" },
    expert_aux_loss = { "number", 0, min = 0, help = "coefficient of the load-balancing loss, in training" },
    n_inner_shared = { "size",
        help = "width of a gated shared expert, which sees every token; default: none" },
    norm_eps = { "number", 1e-5, min = 0, help = "eps of the norms" },
    rope_base = { "number", 10000, min = 1, help = "te.rope_frequencies' base" },
    rope_scaling = { "string", "none", choices = { "none", "linear", "llama3", "yarn" },
        help = "te.rope_frequencies' scaling; its other fields are the options rope_…" },
    rope_factor = { "number", 1, help = "factor" },
    rope_low_freq_factor = { "number", 1, help = "low_freq_factor of llama3" },
    rope_high_freq_factor = { "number", 4, help = "high_freq_factor of llama3" },
    rope_beta_fast = { "number", 32, help = "beta_fast of yarn" },
    rope_beta_slow = { "number", 1, help = "beta_slow of yarn" },
    rope_truncate = { "boolean", true, help = "truncate of yarn" },
    rope_attention_factor = { "number",
        help = "factor of queries and of keys under yarn; default: 0.1 ln(rope_factor) + 1" },
    rope_original_block_size = { "size", 8192, help = "original_max_position_embeddings of llama3 and yarn" },
    tie = { "boolean", false, help = "the head shares the token embedding's weights" },
}

-- Options that act with another one alone.
local NEEDS = { n_expert_active = "n_expert", expert_pre_softmax = "n_expert", expert_aux_loss = "n_expert",
    n_inner_shared = "n_expert", full_every = "window", window_rope_base = "window" }

--- The width of an MLP where n_inner does not say it: two thirds of four times the model's, a multiple of 64.
---@param n_embd integer
---@return integer
function Llama.inner_size(n_embd) return 64 * math.ceil(n_embd * 8 / 3 / 64) end

--- The decoder-only Transformer of Llama: rotary positions, RMSNorm, grouped queries, SwiGLU; options make it a
--- Mistral, Qwen2, Qwen3, Gemma 3, or with experts a Mixtral or GPT-OSS. Called like te.models.gpt.
function Llama:init(config)
    config = self:configure(config)
    check_rope(config, self.CONFIG)
    for name, other in pairs(NEEDS) do
        if not config[other] and config[name] ~= self.CONFIG[name][2] then
            fail("te.models.llama: %s = %s has no effect without %s", name, tostring(config[name]), other)
        end
    end
    config.n_kv_head = config.n_kv_head or config.n_head
    config.n_inner = config.n_inner or Llama.inner_size(config.n_embd)
    local init = initializers.normal(0, config.init_std)
    self.wte = self:keep("wte", self:token_embedding(init), config.tie and "ends" or "first")
    if config.embedding_scale ~= 1 then
        self.scale = self:keep("scale", te.ConstantScale(config.embedding_scale), "first")
    end
    self.dropout = self:keep("dropout", te.Dropout(config.dropout), "first") or te.Identity()
    self:make_blocks(Block)
    self.norm = self:keep("norm", norm(config, self), "last")
    self.takes_positions = not config.n_expert -- the host counts the rows of experts
    if not config.tie then
        -- no recipe quantizes the head's product
        self.lm_head = self:keep("lm_head", te.quantized_model_init({ enabled = false }, te.Linear, config.n_embd,
            config.vocab_size, tensor_parallel.linear(self.tensor_parallel, false, "column",
                { bias = false, init_method = init })), "last")
    end
end
Decoder.declare(Llama)

function Llama:describe()
    local c = self.config
    return ("vocab_size=%d, block_size=%d, n_layer=%d, n_head=%d, n_kv_head=%d, n_embd=%d, n_inner=%d"):format(
        c.vocab_size, c.block_size, c.n_layer, c.n_head, c.n_kv_head, c.n_embd, c.n_inner)
end

function Llama:chain()
    return self.scale and { self.scale, self.dropout, self.blocks, self.norm }
        or { self.dropout, self.blocks, self.norm }
end

function Llama:embed(ids) return self.wte(ids) end

function Llama:head() return (self.lm_head or self.wte).weight end

-- Experts that see a token multiply for it, the others do not.
function Llama:num_multiplying()
    local c = self.config
    local idle = c.n_expert and 3 * c.n_layer * (c.n_expert - c.n_expert_active) * c.n_embd * c.n_inner or 0
    return self:num_parameters() - idle - (c.tie and 0 or c.vocab_size * c.n_embd)
end

function Llama:auxiliary_loss()
    local sum
    for _, block in ipairs(self.blocks) do
        local loss = block.auxiliary_loss and block:auxiliary_loss()
        if loss then sum = sum and sum + loss or loss end
    end
    return sum
end

--- Takes over the weights of a checkpoint as Hugging Face's Transformers names and lays them out, of any floating
--- dtype: "model.layers.0.self_attn.q_proj.weight" and so on. Nothing is changed unless all of them fit.
---@param tensors table<string, te.Tensor>  of all the checkpoint's files
function Llama:load_hugging_face(tensors)
    local gather = require("te.models.llama_weights").gather
    require "te.uncompiled"(gather)
    self:load_whole(gather(self, tensors))
    return self
end

--- load_hugging_face, block by block: read(wanted, take) gives the tensors whose names are wanted to take.
---@param names table<string, any>  those of all the checkpoint's tensors are its keys
---@param read function
function Llama:load_hugging_face_parts(names, read)
    require("te.models.llama_weights").gather_parts(self, names, read)
end

--- The parameters as load_hugging_face takes them, for te.save(path, …, { format = "pt" }): copies, named and laid out
--- as for a model of Transformers whose configuration says the same.
---@return table<string, te.Tensor>
function Llama:hugging_face_state()
    return require("te.models.llama_weights").scatter(self)
end

--- The products of the blocks, and the layers of Transformers that each stands for: q_proj, k_proj and v_proj of one,
--- gate_proj and up_proj of another.
---@return table[]
function Llama:product_names() return require("te.models.llama_weights").products(self) end

--- The model of a checkpoint that te.train.checkpoint.load read.
function Llama.from_checkpoint(saved, own) return Decoder.restore(Llama, saved, own) end

return Llama
