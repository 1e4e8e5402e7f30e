--- te.models.gpt: the decoder-only Transformer of GPT-2, as nanoGPT lays it out.
--
--     local model = te.models.gpt { vocab_size = 65, block_size = 64, n_layer = 4, n_head = 4, n_embd = 128 }
--     local logits, loss = model(ids, targets)      -- {batch, seq}, ids count from 0
--     local more = model:generate(ids, 100, { temperature = 0.8, top_k = 50 })
--
-- Pre-norm blocks, learned positions, the head shares the token embedding's table. Weights start as N(0, init_std),
-- those that end in a residual sum as N(0, init_std / sqrt(2 n_layer)).

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local initializers = require "te.initializers"
local fuser = require "te.fuser"
local KVCache = require "te.kv_cache"

local CONFIG = {
    vocab_size = { "size" },
    block_size = { "size", 1024 },
    n_layer = { "size", 12 },
    n_head = { "size", 12 },
    n_embd = { "size", 768 },
    dropout = { "number", 0, min = 0, max = 1 },
    bias = { "boolean", false },
    init_std = { "number", 0.02, min = 0 },
    quantized = { "string", choices = { "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling",
        "MXFP8BlockScaling", "NVFP4BlockScaling" } }, -- the recipe in whose format the blocks' weights are stored
    gelu = { "string", "none", choices = { "none", "tanh" } }, -- exact, or GPT-2's approximation
}

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

local GPT = te.Module:extend("GPT")

function GPT:init(config)
    config = options.check("te.models.gpt", config, CONFIG)
    if not config.vocab_size then fail("te.models.gpt: vocab_size is needed") end
    self.config = config
    local init = { init_method = initializers.normal(0, config.init_std) }
    self.wte = te.Embedding(config.vocab_size, config.n_embd, init)
    self.wpe = te.Embedding(config.block_size, config.n_embd, init)
    self.dropout = te.Dropout(config.dropout)
    self.blocks = te.Sequential()
    local function append_blocks()
        for _ = 1, config.n_layer do self.blocks:append(Block(config)) end
    end
    if config.quantized then
        te.quantized_model_init({ recipe = te.recipe[config.quantized] {} }, append_blocks)
    else
        append_blocks() -- as whoever makes the model says
    end
    self.norm = te.LayerNorm(config.n_embd, { bias = config.bias })
end

function GPT:describe()
    local c = self.config
    return ("vocab_size=%d, block_size=%d, n_layer=%d, n_head=%d, n_embd=%d"):format(c.vocab_size, c.block_size,
        c.n_layer, c.n_head, c.n_embd)
end

function GPT:chain() return { self.dropout, self.blocks, self.norm } end

-- Hidden states {batch, seq, n_embd} after the last norm.
local function hidden_states(self, ids)
    local before = KVCache.active and KVCache.active.length or 0
    local seq = before + ids:size(2)
    if seq > self.config.block_size then
        fail("GPT: a sequence of %d tokens, block_size is %d", seq, self.config.block_size)
    end
    local positions = te.arange(before, seq - 1, 1, { dtype = "int32", device = ids.device })
    local x = te.add(self.wte(ids), self.wpe(positions))
    return fuser.run_chain(self, x)
end

--- With targets {batch, seq}: logits {batch * seq, vocab_size} and the mean cross entropy. Without: the logits
--- {batch, vocab_size} after the last token only. In a te.KVCache's run ids go on from the tokens that it holds.
function GPT:forward(ids, targets)
    local x = hidden_states(self, ids)
    if not targets then
        return te.linear(x:select(2, -1), self.wte.weight)
    end
    local logits = te.linear(x:view({ -1, self.config.n_embd }), self.wte.weight)
    return logits, te.cross_entropy(logits, targets:reshape({ -1 }))
end

local GENERATE = {
    temperature = { "number", 1, min = 0 }, -- 0: always the likeliest token
    top_k = { "size" },                     -- choose among this many likeliest tokens
    use_cache = { "boolean", true },        -- keep keys and values of the tokens before, up to block_size tokens
    on_token = { "callable" },              -- called with every new token {batch, 1}; returning false stops
}

--- The plan of everything between the embedding and the head, for ids of this shape.
function GPT:explain(ids)
    local config = self.config
    local x = te.empty({ ids:size(1), ids:size(2), config.n_embd }, { dtype = te._core.compute_dtype() or "float32" })
    x.requires_grad = te._core.grad_enabled()
    return fuser.explain_chain(self, x)
end

local function choose(logits, opts)
    if opts.temperature == 0 then return te.argmax(logits, -1, true) end
    logits = logits:to("float32") / opts.temperature
    if opts.top_k and opts.top_k < logits:size(-1) then
        local best = te.topk(logits, opts.top_k, -1)
        logits = te.where(te.lt(logits, best:narrow(-1, opts.top_k, 1)), -math.huge, logits)
    end
    return te.multinomial(te.softmax(logits, -1), 1)
end

-- Logits after the last of ids; where they are longer than block_size, its last block alone is read: positions move
-- then, so that nothing in a cache holds any more.
local function next_logits(self, ids, cache)
    local seq, limit = ids:size(2), self.config.block_size
    if seq > limit then return self:forward(ids:narrow(2, seq - limit + 1, limit):contiguous()) end
    if not cache then return self:forward(ids) end
    return cache:run(self, ids:narrow(2, cache.length + 1, seq - cache.length):contiguous())
end

--- Continues ids {batch, seq} by `count` tokens, without gradients and dropout.
---@return userdata ids  {batch, seq + count}
function GPT:generate(ids, count, opts)
    opts = options.check("GPT:generate", opts, GENERATE)
    local training = self.training
    local cache = opts.use_cache and KVCache() or nil
    self:eval()
    local ok, result = pcall(te.no_grad, function()
        for _ = 1, count do
            local token = choose(next_logits(self, ids, cache), opts):to(ids.dtype)
            ids = te.cat({ ids, token }, 2)
            if opts.on_token and opts.on_token(token) == false then break end
        end
        return ids
    end)
    if training then self:train() end
    if not ok then error(result, 0) end
    return result
end

--- Floating point operations of one token's forward and backward: 6 per weight that multiplies, and attention's share.
function GPT:flops_per_token()
    local c = self.config
    local n = self:num_parameters() - self.wpe.weight:numel()
    return 6 * n + 12 * c.n_layer * c.n_embd * c.block_size
end

--- Parameters in groups for te.optim.AdamW: matrices decay, biases and norms do not.
function GPT:parameter_groups(weight_decay)
    local matrices, vectors = {}, {}
    for _, parameter in ipairs(self:parameters()) do
        table.insert(parameter:dim() >= 2 and matrices or vectors, parameter)
    end
    return { { params = matrices, weight_decay = weight_decay }, { params = vectors, weight_decay = 0 } }
end

--- The configuration as texts by "model.<key>", for a checkpoint's metadata.
function GPT:texts()
    local texts = {}
    for key in pairs(CONFIG) do
        if self.config[key] ~= nil then texts["model." .. key] = tostring(self.config[key]) end
    end
    return texts
end

local FROM_TEXT = {
    size = tonumber, number = tonumber,
    string = function(text) return text end,
    boolean = function(text) return text == "true" end,
}

--- The model of a checkpoint that te.train.checkpoint.load read.
function GPT.from_checkpoint(saved)
    local config = {}
    for key, declared in pairs(CONFIG) do
        local text = saved.metadata["model." .. key]
        if text then config[key] = FROM_TEXT[declared[1]](text) end
    end
    return te.train.checkpoint.restore_model(saved, GPT(config))
end

return GPT
