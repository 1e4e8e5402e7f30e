--- te.models.bert: the encoder of BERT (Devlin et al. 2019), and of RoBERTa and DistilBERT.
--
--     local model = te.models.bert { vocab_size = 30522, block_size = 512, n_layer = 6, n_head = 12, n_embd = 384 }
--     local logits, loss = model(ids, targets)              -- ids {batch, seq}; targets, -100 where there is none
--     local states = model:hidden_states(ids, { seq_lens = { 7, 3 } })     -- what follows 7 and 3 tokens is padding
--     local packed = model:hidden_states(tokens, { seq_lens = { 7, 3 } })  -- tokens {10}
--     local rows = model:pooled(ids, { pooling = "mean" })                 -- {batch, n_embd}
--
-- Learned positions, token types, and blocks whose sums are normalized (post-LN); every token sees all tokens of its
-- text. The head shares the token embedding's table. Weights start as N(0, init_std).

local te = require "te"
local fail = require "te.fail"
local fuser = require "te.fuser"
local initializers = require "te.initializers"
local Encoder = require "te.encoder"

local function norm(config) return te.LayerNorm(config.n_embd, { eps = config.norm_eps }) end

local function gelu(config) return te.GELU({ approximate = config.gelu }) end

local Block = te.Module:extend("Block")
Block.forward = fuser.forward

function Block:init(config)
    local width, init = config.n_embd, initializers.normal(0, config.init_std)
    self.attention = te.Residual(
        te.MultiHeadedSelfAttention(width, config.n_head,
            { causal = false, dropout = config.dropout, init_method = init }),
        te.Dropout(config.dropout))
    self.attention_norm = norm(config)
    self.mlp = te.Residual(
        te.Linear(width, config.n_inner, { init_method = init }),
        gelu(config),
        te.Linear(config.n_inner, width, { init_method = init }),
        te.Dropout(config.dropout))
    self.mlp_norm = norm(config)
end

function Block:chain() return { self.attention, self.attention_norm, self.mlp, self.mlp_norm } end

local Bert = Encoder:extend("Bert")

Bert.KIND = "bert"
Bert.CONFIG = Encoder.shared {
    block_size = { "size", 512, help = "the longest text" },
    n_inner = { "size", help = "width of the MLP; default: 4 n_embd" },
    n_type = { "integer", 2, min = 0, help = "token types; 0: there are none" },
    position_offset = { "integer", 0, min = 0,
        help = "rows of the position table in front of the first token's: a RoBERTa has its padding's there" },
    norm_eps = { "number", 1e-12, min = 0, help = "eps of the norms" },
    gelu = { "string", "none", choices = { "none", "tanh" }, help = "none: exact; tanh: its approximation" },
    pooler = { "string", "none", choices = { "none", "tanh", "relu" },
        help = "a layer, and its activation, on the first token's state: what head = sequence reads" },
}

--- The encoder of BERT: learned positions, token types, post-LN blocks, a head tied to the embedding or a classifier.
--- model(ids, targets) gives logits and the loss; texts of different lengths come with seq_lens or attention_mask.
function Bert:init(config)
    config = self:configure(config)
    config.n_inner = config.n_inner or 4 * config.n_embd
    local init = { init_method = initializers.normal(0, config.init_std) }
    self.wte = te.Embedding(config.vocab_size, config.n_embd, init)
    self.wpe = te.Embedding(config.block_size + config.position_offset, config.n_embd, init)
    if config.n_type > 0 then self.wtt = te.Embedding(config.n_type, config.n_embd, init) end
    self.norm, self.dropout = norm(config), te.Dropout(config.dropout)
    self:make_blocks(Block)
    if config.pooler ~= "none" then self.pooler = self:plain_linear(config.n_embd, true) end
    if config.head == "masked_lm" then
        self.lm = te.Sequential(te.Linear(config.n_embd, config.n_embd, init), gelu(config), norm(config))
    end
    self:make_head()
end
Encoder.declare(Bert)

function Bert:chain() return { self.norm, self.dropout, self.blocks } end

function Bert:embed(batch)
    local offset, types = self.config.position_offset, batch.token_types
    local beside = self.wpe(offset > 0 and batch.positions + offset or batch.positions)
    if not self.wtt and types then
        fail("%s: option token_types: the model has none (n_type = 0)", batch.who)
    elseif self.wtt and types then
        return te.add(te.add(self.wte(batch.ids), self.wtt(types)), beside)
    elseif self.wtt then
        beside = te.add(self.wtt(te.zeros({ 1 }, { dtype = "int32", device = batch.ids.device })), beside)
    end
    return te.add(self.wte(batch.ids), beside)
end

function Bert:token_head(x) return self.lm(x) end

--- A row of each text: its first token's state, through the pooler where there is one.
function Bert:pool(x, batch)
    local first, activation = batch:first(x), self.config.pooler
    if activation == "none" then return first end
    return te[activation](te.linear(first, self.pooler.weight, self.pooler.bias))
end

function Bert:family()
    return self.config.position_offset > 0 and "roberta" or self.wtt and "bert" or "distilbert"
end

function Bert:num_multiplying()
    local tables = self.wpe.weight:numel() + (self.wtt and self.wtt.weight:numel() or 0)
    return self:num_parameters() - tables - (self.lm_bias and 0 or self.wte.weight:numel())
end

--- The model of a checkpoint that te.train.checkpoint.load read.
function Bert.from_checkpoint(saved, own) return Encoder.restore(Bert, saved, own) end

return Bert
