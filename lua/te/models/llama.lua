--- te.models.llama: the decoder-only Transformer of Llama (Touvron et al. 2023; Llama 3, 2024).
--
--     local model = te.models.llama { vocab_size = 32000, n_layer = 8, n_head = 8, n_kv_head = 2, n_embd = 512 }
--     local logits, loss = model(ids, targets)      -- {batch, seq}, ids count from 0
--     model:load_hugging_face(te.load("model.safetensors"))
--
-- Pre-norm blocks with RMSNorm, rotary positions, grouped queries and SwiGLU, no biases; the head is a weight of its
-- own unless `tie` is set. Options make it a Mistral (window), a Qwen2 (attention_bias), a Qwen3 (qk_norm, head_size),
-- a Mixtral or another mixture of experts (n_expert). Weights start as N(0, init_std), those that end in a residual
-- sum as N(0, init_std / sqrt(2 n_layer)).

local te = require "te"
local fail = require "te.fail"
local initializers = require "te.initializers"
local fuser = require "te.fuser"
local Decoder = require "te.decoder"

local Block = te.Module:extend("Block")
Block.forward = fuser.forward

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

local function rope_of(config)
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
local function scale_of(config)
    if config.rope_scaling ~= "yarn" then return nil end
    local factor = config.rope_attention_factor or 0.1 * math.log(math.max(config.rope_factor, 1)) + 1
    return factor ^ 2 / math.sqrt(config.head_size or config.n_embd / config.n_head)
end

function Block:init(config)
    local width, eps = config.n_embd, { eps = config.norm_eps }
    local init = initializers.normal(0, config.init_std)
    local residual_init = initializers.normal(0, config.init_std / math.sqrt(2 * config.n_layer))
    self.attention = te.Residual(
        te.RMSNorm(width, eps),
        te.GroupedQueryAttention(width, config.n_head, config.n_kv_head, { head_size = config.head_size,
            qkv_bias = config.attention_bias ~= "none", proj_bias = config.attention_bias == "all",
            dropout = config.dropout, rope = rope_of(config), window_left = config.window and config.window - 1,
            scale = scale_of(config),
            qk_norm = config.qk_norm and "RMSNorm" or nil, qk_norm_eps = config.qk_norm and config.norm_eps or nil,
            qk_norm_before_rope = config.qk_norm or nil, init_method = init,
            output_layer_init_method = residual_init }),
        te.Dropout(config.dropout))
    if config.n_expert then
        self.mlp = te.Residual(te.RMSNorm(width, eps),
            te.MoE(width, config.n_inner, config.n_expert, { topk = config.n_expert_active,
                use_pre_softmax = config.expert_pre_softmax, aux_loss_coeff = config.expert_aux_loss,
                init_method = init, output_layer_init_method = residual_init }),
            te.Dropout(config.dropout))
        return
    end
    self.mlp = te.Residual(
        te.RMSNorm(width, eps),
        te.Linear(width, 2 * config.n_inner, { bias = false, init_method = init }),
        te.SwiGLU(),
        te.Linear(config.n_inner, width, { bias = false, init_method = residual_init }),
        te.Dropout(config.dropout))
end

function Block:chain() return { self.attention, self.mlp } end

local Llama = Decoder:extend("Llama")

Llama.KIND = "llama"
Llama.CONFIG = Decoder.shared {
    block_size = { "size", 2048 },
    n_kv_head = { "size" },     -- heads of keys and values; n_head unless given
    head_size = { "size" },     -- features of a head; n_embd / n_head unless given
    attention_bias = { "string", "none", choices = { "none", "qkv", "all" } }, -- which of its projections have one
    qk_norm = { "boolean", false }, -- RMSNorm of queries and keys, head by head, before they are turned
    window = { "size" },        -- how many tokens, itself included, one sees; all before it unless given
    n_inner = { "size" },       -- width of the MLP; 8/3 n_embd, rounded up to a multiple of 64, unless given
    n_expert = { "size" },      -- experts, each an MLP, in the MLP's place; none unless given
    n_expert_active = { "size", 2 }, -- how many of them see a token
    expert_pre_softmax = { "boolean", false }, -- te.MoE's use_pre_softmax
    expert_aux_loss = { "number", 0, min = 0 }, -- coefficient of the loss that balances experts, in training
    norm_eps = { "number", 1e-5, min = 0 },
    rope_base = { "number", 10000, min = 1 },
    rope_scaling = { "string", "none", choices = { "none", "linear", "llama3", "yarn" } }, -- te.rope_frequencies
    rope_factor = { "number", 1 },
    rope_low_freq_factor = { "number", 1 },
    rope_high_freq_factor = { "number", 4 },
    rope_beta_fast = { "number", 32 },
    rope_beta_slow = { "number", 1 },
    rope_truncate = { "boolean", true },
    rope_attention_factor = { "number" }, -- of queries and of keys under yarn; 0.1 ln(rope_factor) + 1 unless given
    rope_original_block_size = { "size", 8192 },
    tie = { "boolean", false }, -- the head shares the token embedding's table
}

function Llama:init(config)
    config = self:configure(config)
    check_rope(config, self.CONFIG)
    for _, name in ipairs { "n_expert_active", "expert_pre_softmax", "expert_aux_loss" } do
        if not config.n_expert and config[name] ~= self.CONFIG[name][2] then
            fail("te.models.llama: %s = %s has no effect without n_expert", name, tostring(config[name]))
        end
    end
    config.n_kv_head = config.n_kv_head or config.n_head
    config.n_inner = config.n_inner or 64 * math.ceil(config.n_embd * 8 / 3 / 64)
    local init = initializers.normal(0, config.init_std)
    self.wte = te.Embedding(config.vocab_size, config.n_embd, { init_method = init })
    self.dropout = te.Dropout(config.dropout)
    self:make_blocks(Block)
    self.norm = te.RMSNorm(config.n_embd, { eps = config.norm_eps })
    if not config.tie then
        self.lm_head = te.Linear(config.n_embd, config.vocab_size, { bias = false, init_method = init })
    end
end

function Llama:describe()
    local c = self.config
    return ("vocab_size=%d, block_size=%d, n_layer=%d, n_head=%d, n_kv_head=%d, n_embd=%d, n_inner=%d"):format(
        c.vocab_size, c.block_size, c.n_layer, c.n_head, c.n_kv_head, c.n_embd, c.n_inner)
end

function Llama:chain() return { self.dropout, self.blocks, self.norm } end

function Llama:embed(ids) return self.wte(ids) end

function Llama:head() return (self.lm_head or self.wte).weight end

-- Experts that see a token multiply for it, the others do not.
function Llama:num_multiplying()
    local c = self.config
    local idle = c.n_expert and 3 * c.n_layer * (c.n_expert - c.n_expert_active) * c.n_embd * c.n_inner or 0
    return self:num_parameters() - idle - (self.lm_head and self.wte.weight:numel() or 0)
end

function Llama:auxiliary_loss()
    local sum
    for _, block in ipairs(self.blocks) do
        local loss = self.config.n_expert and block.mlp[2].aux_loss
        if loss then sum = sum and sum + loss or loss end
    end
    return sum
end

-- Mixtral's names differ from those of its successors.
local function router_name(tensors, from)
    local name = from .. "block_sparse_moe.gate.weight"
    return tensors[name] and name or from .. "mlp.gate.weight"
end

-- The first weight of an expert in a layer here, the halves of it there; the second one here and there.
local function names_of_expert(tensors, to, from, expert)
    local mixtral = tensors[from .. "block_sparse_moe.gate.weight"]
    local there = ("%s%s.experts.%d."):format(from, mixtral and "block_sparse_moe" or "mlp", expert - 1)
    local gate, up, down = "gate_proj", "up_proj", "down_proj"
    if mixtral then gate, up, down = "w1", "w3", "w2" end
    return { ("%s2.experts.1.weight.%d"):format(to, expert), there .. gate .. ".weight", there .. up .. ".weight",
        ("%s2.experts.3.weight.%d"):format(to, expert), there .. down .. ".weight" }
end

--- Takes over the weights of a checkpoint as Hugging Face's Transformers names and lays them out, of any floating
--- dtype: "model.layers.0.self_attn.q_proj.weight" and so on. Nothing is changed unless all of them fit.
---@param tensors table<string, userdata>  of all the checkpoint's files
function Llama:load_hugging_face(tensors)
    local state, used = {}, {}
    local function named(...)
        local found = {}
        for i, name in ipairs { ... } do
            found[i] = tensors[name]
            if not te.is_tensor(found[i]) then fail("Llama:load_hugging_face: there is no tensor %q", name) end
            used[name] = true
        end
        return found[2] and te.no_grad(te.cat, found, 1) or found[1]
    end
    state["wte.weight"], state["norm.weight"] = named "model.embed_tokens.weight", named "model.norm.weight"
    local head = tensors["lm_head.weight"] and named "lm_head.weight" or state["wte.weight"]
    if self.lm_head then
        state["lm_head.weight"] = head
    else
        self:check_tied("Llama:load_hugging_face", head, state["wte.weight"])
    end
    for i = 1, self.config.n_layer do
        local from = ("model.layers.%d."):format(i - 1)
        local attention, mlp = ("blocks.%d.attention."):format(i), ("blocks.%d.mlp."):format(i)
        local heads = from .. "self_attn."
        state[attention .. "1.weight"] = named(from .. "input_layernorm.weight")
        for _, part in ipairs(self.config.attention_bias == "none" and { "weight" } or { "weight", "bias" }) do
            state[attention .. "2.qkv." .. part] =
                named(heads .. "q_proj." .. part, heads .. "k_proj." .. part, heads .. "v_proj." .. part)
        end
        state[attention .. "2.proj.weight"] = named(heads .. "o_proj.weight")
        if self.config.attention_bias == "all" then
            state[attention .. "2.proj.bias"] = named(heads .. "o_proj.bias")
        end
        if self.config.qk_norm then
            state[attention .. "2.q_norm.weight"] = named(heads .. "q_norm.weight")
            state[attention .. "2.k_norm.weight"] = named(heads .. "k_norm.weight")
        end
        state[mlp .. "1.weight"] = named(from .. "post_attention_layernorm.weight")
        local inner = { mlp .. "2.weight", from .. "mlp.gate_proj.weight", from .. "mlp.up_proj.weight",
            mlp .. "4.weight", from .. "mlp.down_proj.weight" }
        for expert = 1, self.config.n_expert or 1 do
            if self.config.n_expert then inner = names_of_expert(tensors, mlp, from, expert) end
            state[inner[1]], state[inner[4]] = named(inner[2], inner[3]), named(inner[5])
        end
        if self.config.n_expert then state[mlp .. "2.router.weight"] = named(router_name(tensors, from)) end
    end
    for name in pairs(tensors) do
        local known = used[name] or name:find "rotary_emb%.inv_freq$"
        if not known then fail("Llama:load_hugging_face: this model has no place for %q", name) end
    end
    self:load_state_dict(state)
    return self
end

--- The model of a checkpoint that te.train.checkpoint.load read.
function Llama.from_checkpoint(saved) return Decoder.restore(Llama, saved) end

return Llama
