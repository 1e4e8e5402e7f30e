--- te.models.modernbert: the encoder of ModernBERT (Warner et al. 2024).
--
--     local model = te.models.modernbert { vocab_size = 50368, n_layer = 22, n_head = 12, n_embd = 768 }
--     local logits, loss = model(ids, targets, { seq_lens = lengths })      -- as te.models.bert
--
-- Pre-norm blocks with rotary positions and GeGLU, no biases; all but every full_every-th block, from the first on, see
-- a window of tokens around each. Weights start as N(0, init_std), those that end in a residual sum as
-- N(0, init_std / sqrt(2 n_layer)).

local te = require "te"
local fail = require "te.fail"
local fuser = require "te.fuser"
local initializers = require "te.initializers"
local Encoder = require "te.encoder"

local function norm(config) return te.LayerNorm(config.n_embd, { eps = config.norm_eps, bias = false }) end

local Block = te.Module:extend("Block")
Block.forward = fuser.forward

-- The first block's input is a norm's result.
function Block:init(config, layer)
    local width, init = config.n_embd, initializers.normal(0, config.init_std)
    local residual_init = initializers.normal(0, config.init_std / math.sqrt(2 * config.n_layer))
    local full = (layer - 1) % config.full_every == 0
    local reach = not full and math.floor(config.window / 2) or -1
    self.attention = te.Residual()
    if layer > 1 then self.attention:append(norm(config)) end
    self.attention:append(te.MultiHeadedSelfAttention(width, config.n_head, { causal = false, bias = false,
        dropout = config.dropout, rope = { base = full and config.rope_base or config.window_rope_base },
        window_left = reach, window_right = reach, init_method = init, output_layer_init_method = residual_init }))
    self.attention:append(te.Dropout(config.dropout))
    self.mlp = te.Residual(norm(config),
        te.Linear(width, 2 * config.n_inner, { bias = false, init_method = init }),
        te.ExactGEGLU(),
        te.Linear(config.n_inner, width, { bias = false, init_method = residual_init }),
        te.Dropout(config.dropout))
end

function Block:chain() return { self.attention, self.mlp } end

local ModernBert = Encoder:extend("ModernBert")

ModernBert.KIND = "modernbert"
ModernBert.head_of_tokens = true
ModernBert.CONFIG = Encoder.shared {
    block_size = { "size", 8192, help = "the longest text" },
    n_inner = { "size", help = "width of the MLP; default: 3/2 n_embd" },
    window = { "size", 128, help = "tokens that a token sees: itself, and half as many on either side" },
    full_every = { "size", 3, help = "every n-th block, from the first on, sees all tokens" },
    rope_base = { "number", 160000, min = 1, help = "te.rope_frequencies' base of blocks that see all tokens" },
    window_rope_base = { "number", 10000, min = 1, help = "that of the others" },
    norm_eps = { "number", 1e-5, min = 0, help = "eps of the norms" },
    pooling = { "string", "first", choices = { "first", "mean" },
        help = "what head = sequence reads: the first token's state, or the mean of all" },
}

--- The encoder of ModernBERT: rotary positions, pre-norm blocks with GeGLU, windows in all but every n-th of them.
--- Called like te.models.bert.
function ModernBert:init(config)
    config = self:configure(config)
    config.n_inner = config.n_inner or math.floor(1.5 * config.n_embd)
    local init = { init_method = initializers.normal(0, config.init_std), bias = false }
    self.wte = te.Embedding(config.vocab_size, config.n_embd, { init_method = init.init_method })
    self.norm, self.dropout = norm(config), te.Dropout(config.dropout)
    self:make_blocks(Block)
    self.last_norm = norm(config)
    if config.head ~= "none" then
        self.lm = te.Sequential(te.Linear(config.n_embd, config.n_embd, init), te.GELU({ approximate = "none" }),
            norm(config))
    end
    self:make_head()
end
Encoder.declare(ModernBert)

function ModernBert:chain() return { self.norm, self.dropout, self.blocks, self.last_norm } end

function ModernBert:embed(batch)
    if batch.token_types then fail("%s: option token_types: the model has none", batch.who) end
    return self.wte(batch.ids)
end

function ModernBert:token_head(x) return self.lm(x) end

--- A row of each text, through the layer in front of the classifier where there is one.
function ModernBert:pool(x, batch)
    local row = batch[self.config.pooling](batch, x)
    return self.lm and self.lm(row) or row
end

function ModernBert:family() return "modernbert" end

function ModernBert:num_multiplying()
    return self:num_parameters() - (self.lm_bias and 0 or self.wte.weight:numel())
end

--- The model of a checkpoint that te.train.checkpoint.load read.
function ModernBert.from_checkpoint(saved, own) return Encoder.restore(ModernBert, saved, own) end

return ModernBert
