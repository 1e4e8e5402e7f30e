--- te.models.gpt: the decoder-only Transformer of GPT-2, as nanoGPT lays it out.
--
--     local model = te.models.gpt { vocab_size = 65, block_size = 64, n_layer = 4, n_head = 4, n_embd = 128 }
--     local logits, loss = model(ids, targets)      -- {batch, seq}, ids count from 0
--     local all = model(ids, nil, { logits = "all" })   -- {batch, seq, vocab_size}, without a loss
--     local hidden = model:hidden_states(ids)           -- {batch, seq, n_embd}, for heads of one's own
--     local more = model:generate(ids, 100, { temperature = 0.8, top_k = 50 })
--
-- Pre-norm blocks, learned positions, the head shares the token embedding's table. Weights start as N(0, init_std),
-- those that end in a residual sum as N(0, init_std / sqrt(2 n_layer)).

local te = require "te"
local fail = require "te.fail"
local initializers = require "te.initializers"
local options = require "te.options"
local fuser = require "te.fuser"
local Decoder = require "te.decoder"

local Block = te.Module:extend("Block")
Block.forward = fuser.forward
Block.records = true -- te.decoding

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

GPT.records = true
GPT.KIND = "gpt"
GPT.takes_positions = true
GPT.CONFIG = Decoder.shared {
    block_size = { "size", 1024, help = "the longest sequence" },
    bias = { "boolean", false, help = "bias of norms and products" },
    gelu = { "string", "none", choices = { "none", "tanh" }, help = "none: exact; tanh: GPT-2's approximation" },
}

--- The decoder-only Transformer of GPT-2: learned positions, LayerNorm, GELU, a head tied to the embedding. Ids
--- {batch, seq} count from 0; model(ids, targets) gives logits and the loss, model(ids) the logits of the last token.
function GPT:init(config)
    config = self:configure(config)
    local init = { init_method = initializers.normal(0, config.init_std) }
    self.wte = te.Embedding(config.vocab_size, config.n_embd, init)
    self.wpe = te.Embedding(config.block_size, config.n_embd, init)
    self.dropout = te.Dropout(config.dropout)
    self:make_blocks(Block)
    self.norm = te.LayerNorm(config.n_embd, { bias = config.bias })
end
Decoder.declare(GPT)

function GPT:describe()
    local c = self.config
    return ("vocab_size=%d, block_size=%d, n_layer=%d, n_head=%d, n_embd=%d"):format(c.vocab_size, c.block_size,
        c.n_layer, c.n_head, c.n_embd)
end

function GPT:chain() return { self.dropout, self.blocks, self.norm } end

function GPT:embed(ids, before)
    local n, positions = ids:size(2), nil
    if te.is_tensor(before) then
        positions = before
    elseif self.cp_group then
        positions = te.distributed.sequence_positions(n, self.cp_group, ids.device)
    else
        positions = te.arange(before, before + n - 1, 1, { dtype = "int32", device = ids.device })
    end
    return te.add(self.wte(ids), self.wpe(positions))
end

function GPT:head() return self.wte.weight end

function GPT:num_multiplying() return self:num_parameters() - self.wpe.weight:numel() end

-- Calls fn(name here, name there, whether there inputs come first) for every parameter.
local function each_weight(config, fn)
    fn("wte.weight", "wte.weight")
    fn("wpe.weight", "wpe.weight")
    for _, part in ipairs { "weight", "bias" } do
        fn("norm." .. part, "ln_f." .. part)
        for i = 1, config.n_layer do
            local to, from = ("blocks.%d."):format(i), ("h.%d."):format(i - 1)
            fn(to .. "attention.1." .. part, from .. "ln_1." .. part)
            fn(to .. "attention.2.qkv." .. part, from .. "attn.c_attn." .. part, true)
            fn(to .. "attention.2.proj." .. part, from .. "attn.c_proj." .. part, true)
            fn(to .. "mlp.1." .. part, from .. "ln_2." .. part)
            fn(to .. "mlp.2." .. part, from .. "mlp.c_fc." .. part, true)
            fn(to .. "mlp.4." .. part, from .. "mlp.c_proj." .. part, true)
        end
    end
end

--- Takes over the weights of a GPT-2 as Hugging Face's Transformers names and lays them out ("h.0.attn.c_attn.weight"
--- and so on, inputs first), of any floating dtype. The model needs `bias`, and `gelu` as the checkpoint has it;
--- positions beyond block_size are left out. Nothing is changed unless all of them fit.
---@param tensors table<string, te.Tensor>
function GPT:load_hugging_face(tensors)
    options.argument("GPT:load_hugging_face", "tensors", tensors, { "table" })
    local state, used = {}, {}
    local prefix = tensors["transformer.wte.weight"] and "transformer." or ""
    each_weight(self.config, function(name, from, turned)
        local t = tensors[prefix .. from]
        if not te.is_tensor(t) then fail("GPT:load_hugging_face: there is no tensor %q", prefix .. from) end
        used[prefix .. from] = true
        state[name] = turned and t:dim() == 2 and t:transpose(1, 2) or t
    end)
    local positions = state["wpe.weight"]
    if positions:dim() == 2 and positions:size(1) > self.config.block_size then
        state["wpe.weight"] = positions:narrow(1, 1, self.config.block_size)
    end
    self:check_tied("GPT:load_hugging_face", tensors["lm_head.weight"], state["wte.weight"])
    for name in pairs(tensors) do
        local known = used[name] or name == "lm_head.weight" or name:find "%.attn%.bias$"
            or name:find "%.attn%.masked_bias$"
        if not known then fail("GPT:load_hugging_face: this model has no place for %q", name) end
    end
    self:load_state_dict(state)
    return self
end

--- load_hugging_face, of what read(wanted, take) gives to take: all at once.
function GPT:load_hugging_face_parts(_, read)
    read(function() return true end, function(tensors) self:load_hugging_face(tensors) end)
end

--- The parameters as load_hugging_face takes them, for te.save(path, …, { format = "pt" }): copies. Of a model with
--- `bias`, as GPT-2 is.
---@return table<string, te.Tensor>
function GPT:hugging_face_state()
    if not self.config.bias then fail "GPT:hugging_face_state: a GPT-2 has biases, this model has none" end
    local value_of, tensors = self:values_by_name(), {}
    each_weight(self.config, function(name, to, turned)
        local value = value_of("GPT:hugging_face_state", name)
        tensors[to] = turned and value:dim() == 2 and value:transpose(1, 2):contiguous() or value:clone()
    end)
    return tensors
end

--- The model of a checkpoint that te.train.checkpoint.load read.
function GPT.from_checkpoint(saved) return Decoder.restore(GPT, saved) end

require "te.uncompiled"(GPT.load_hugging_face)

return GPT
