--- te.models.gpt: the decoder-only Transformer of GPT-2, as nanoGPT lays it out.
--
--     local model = te.models.gpt { vocab_size = 65, block_size = 64, n_layer = 4, n_head = 4, n_embd = 128 }
--     local logits, loss = model(ids, targets)      -- {batch, seq}, ids count from 0
--     local more = model:generate(ids, 100, { temperature = 0.8, top_k = 50 })
--
-- Pre-norm blocks, learned positions, the head shares the token embedding's table. Weights start as N(0, init_std),
-- those that end in a residual sum as N(0, init_std / sqrt(2 n_layer)).

local te = require "te"
local initializers = require "te.initializers"
local fuser = require "te.fuser"
local Decoder = require "te.decoder"

local Block = te.Module:extend("Block")
Block.forward = fuser.forward

function Block:init(config)
    local width, bias = config.n_embd, config.bias
    local init = initializers.normal(0, config.init_std)
    local residual_init = initializers.normal(0, config.init_std / math.sqrt(2 * config.n_layer))
    self.attention = te.Residual(
        te.LayerNorm(width, { bias = bias }),
        te.MultiHeadedSelfAttention(width, config.n_head, { causal = true, dropout = config.dropout, bias = bias,
            init_method = init, output_layer_init_method = residual_init }),
        te.Dropout(config.dropout))
    self.mlp = te.Residual(
        te.LayerNorm(width, { bias = bias }),
        te.Linear(width, 4 * width, { bias = bias, init_method = init }),
        te.GELU({ approximate = config.gelu }),
        te.Linear(4 * width, width, { bias = bias, init_method = residual_init }),
        te.Dropout(config.dropout))
end

function Block:chain() return { self.attention, self.mlp } end

local GPT = Decoder:extend("GPT")

GPT.KIND = "gpt"
GPT.CONFIG = Decoder.shared {
    block_size = { "size", 1024 },
    bias = { "boolean", false },
    gelu = { "string", "none", choices = { "none", "tanh" } }, -- exact, or GPT-2's approximation
}

function GPT:init(config)
    config = self:configure(config)
    local init = { init_method = initializers.normal(0, config.init_std) }
    self.wte = te.Embedding(config.vocab_size, config.n_embd, init)
    self.wpe = te.Embedding(config.block_size, config.n_embd, init)
    self.dropout = te.Dropout(config.dropout)
    self:make_blocks(Block)
    self.norm = te.LayerNorm(config.n_embd, { bias = config.bias })
end

function GPT:describe()
    local c = self.config
    return ("vocab_size=%d, block_size=%d, n_layer=%d, n_head=%d, n_embd=%d"):format(c.vocab_size, c.block_size,
        c.n_layer, c.n_head, c.n_embd)
end

function GPT:chain() return { self.dropout, self.blocks, self.norm } end

function GPT:embed(ids, before)
    local positions = te.arange(before, before + ids:size(2) - 1, 1, { dtype = "int32", device = ids.device })
    return te.add(self.wte(ids), self.wpe(positions))
end

function GPT:head() return self.wte.weight end

function GPT:num_multiplying() return self:num_parameters() - self.wpe.weight:numel() end

--- The model of a checkpoint that te.train.checkpoint.load read.
function GPT.from_checkpoint(saved) return Decoder.restore(GPT, saved) end

return GPT
