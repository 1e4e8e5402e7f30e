--- What encoders share beside te.language_model: batches of texts, heads with their losses, pooled states.
--
-- A model derives from this class and has what te.language_model says, and
--
--     self:embed(batch)     hidden states of batch.ids, {batch, seq, n_embd} or of packed texts {tokens, n_embd}
--     self:token_head(x)    what the logits of tokens are a product of; head = "masked_lm", and with the field
--                           head_of_tokens also "token"
--     self:pool(x, batch)   a row of each text {batch, n_embd}
--     self:family()         whose names its layers have in Transformers (te.hugging_face.encoder_weights)
--
-- Every token sees all tokens of its text. How texts of different lengths are given: te.encoder_batch.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local declared = require "te.ops.declared"
local fuser = require "te.fuser"
local initializers = require "te.initializers"
local Batch = require "te.encoder_batch"
local LanguageModel = require "te.language_model"

local Encoder = LanguageModel:extend("Encoder")
Encoder.is_encoder = true
Encoder.own_products = { "classifier", "pooler" } -- layers whose weight is read, which te.lora leaves alone

local OWN = { recompute_blocks = LanguageModel.RECOMPUTE }

--- The options that all encoders take, with those of one.
function Encoder.shared(own)
    own.head = { "string", "masked_lm", choices = { "none", "masked_lm", "sequence", "token" },
        help = "masked_lm: logits of tokens; sequence, token: of n_label classes, of texts or of tokens" }
    own.labels = { "string", help = "names of the classes, a line each, for to_hugging_face; default: numbers" }
    own.n_label = { "size", 2, help = "classes of head = sequence or token; sequence with 1: a number" }
    return LanguageModel.shared(own)
end

--- Says what options a model's init takes.
function Encoder.declare(class) options.declare(class.init, declared.join(class.CONFIG, OWN)) end

--- Checks the options that make the model.
function Encoder:configure(config)
    local who = "te.models." .. self.KIND
    config = options.check(who, config, declared.join(self.CONFIG, OWN))
    if not config.vocab_size then fail("%s: vocab_size is needed", who) end
    if config.n_embd % config.n_head ~= 0 then
        fail("%s: n_embd = %d is no multiple of n_head = %d", who, config.n_embd, config.n_head)
    end
    if config.n_label ~= self.CONFIG.n_label[2] and config.head ~= "sequence" and config.head ~= "token" then
        fail("%s: n_label = %d has no effect with head = %s", who, config.n_label, config.head)
    end
    local _, names = (config.labels or ""):gsub("\n", "")
    if config.labels and names + 1 ~= config.n_label then
        fail("%s: labels: %d names, n_label is %d", who, names + 1, config.n_label)
    end
    self.config = config
    return config
end

--- Makes self.blocks.
function Encoder:make_blocks(Block)
    self:append_blocks(Block)
    self.recompute_blocks, self.config.recompute_blocks = self.config.recompute_blocks, nil
end

--- A layer that no recipe quantizes: its weight is read.
function Encoder:plain_linear(outputs, bias)
    return te.quantized_model_init({ enabled = false }, te.Linear, self.config.n_embd, outputs,
        { bias = bias, init_method = initializers.normal(0, self.config.init_std) })
end

--- Makes what the heads have in common: a bias of the logits of tokens, or a classifier.
function Encoder:make_head()
    local config = self.config
    if config.head == "masked_lm" then
        self.lm_bias = initializers.parameter({ config.vocab_size }, initializers.zeros, {})
    elseif config.head ~= "none" then
        self.classifier_dropout = te.Dropout(config.dropout)
        self.classifier = self:plain_linear(config.n_label, true)
    end
end

function Encoder:describe()
    local c = self.config
    return ("vocab_size=%d, block_size=%d, n_layer=%d, n_head=%d, n_embd=%d, head=%s"):format(c.vocab_size,
        c.block_size, c.n_layer, c.n_head, c.n_embd, c.head)
end

function Encoder:head() return self.wte.weight end

local INPUT = {
    seq_lens = { "any", help = "tokens of each text, a list or a tensor {batch}" },
    attention_mask = { "any", help = "{batch, seq}, not 0 where tokens are: they come first in every row" },
    token_types = { "any", help = "in the shape of ids; default: all 0" },
}

local function run(self, method, ids, opts)
    local who = method and self.__name .. ":" .. method or self.__name
    local batch = Batch.of(who, ids, opts, self.config.block_size)
    return self:run_chain(self:embed(batch), batch.seq_lens), batch
end

--- Hidden states of all tokens: {batch, seq, n_embd}, zeros where padding is, or of packed texts {tokens, n_embd}.
---@param ids te.Tensor  {batch, seq}, or with seq_lens {tokens}
---@param opts table|nil  seq_lens, attention_mask, token_types
---@return te.Tensor hidden
function Encoder:hidden_states(ids, opts)
    options.method("Encoder:hidden_states", self, Encoder)
    local x, batch = run(self, "hidden_states", ids, options.check(self.__name .. ":hidden_states", opts, INPUT))
    return batch:give_back(x)
end
options.declare(Encoder.hidden_states, INPUT)

local POOLED = declared.join(INPUT, {
    pooling = { "string", "model", choices = { "model", "first", "mean" },
        help = "model: as the model pools for its own head; first: the first token's state; mean: the mean of all" },
})

--- A row for each text {batch, n_embd}: what a classifier reads, or what stands for the text in a search.
---@param ids te.Tensor  {batch, seq}, or with seq_lens {tokens}
---@param opts table|nil  pooling, seq_lens, attention_mask, token_types
---@return te.Tensor pooled
function Encoder:pooled(ids, opts)
    options.method("Encoder:pooled", self, Encoder)
    opts = options.check(self.__name .. ":pooled", opts, POOLED)
    local x, batch = run(self, "pooled", ids, opts)
    if opts.pooling == "model" then return self:pool(x, batch) end
    return batch[opts.pooling](batch, x)
end
options.declare(Encoder.pooled, POOLED)

local FORWARD = declared.join(INPUT, {
    logits = { "string", nil, choices = { "targets", "all" },
        help = "with targets of tokens: logits of those that have one, the default, or of all" },
    ignore_index = { "integer", -100, help = "what stands in place of a token's target where there is none" },
})

-- Rows of tokens {n, width}, and their targets {n}: of those that have one, unless all are wanted.
local function rows_of(self, x, batch, targets, opts)
    if not te.is_tensor(targets) or options.shape(targets) ~= "{" .. table.concat(batch.shape, ",") .. "}" then
        fail("%s: targets: expected the shape of ids, {%s}, got %s", self.__name, table.concat(batch.shape, ","),
            te.is_tensor(targets) and options.shape(targets) or options.shown(targets))
    end
    x, targets = x:reshape { -1, x:size(-1) }, batch:take(targets):reshape { -1 }
    if opts.logits == "all" then return x, targets end
    local chosen = te.nonzero(te.ne(targets, opts.ignore_index)):reshape { -1 }
    if chosen:numel() == targets:numel() then return x, targets end
    return x:index_select(1, chosen), targets:index_select(1, chosen)
end

-- Logits of rows of tokens.
local function logits_of(self, x)
    if self.config.head == "masked_lm" then return te.linear(self:token_head(x), self:head(), self.lm_bias) end
    if self.head_of_tokens and self.config.head == "token" then x = self:token_head(x) end
    return te.linear(self.classifier_dropout(x), self.classifier.weight, self.classifier.bias)
end

local function of_tokens(self, x, batch, targets, opts)
    if targets == nil then return batch:give_back(logits_of(self, x)) end
    x, targets = rows_of(self, x, batch, targets, opts)
    local logits = logits_of(self, x)
    return logits, te.cross_entropy(logits, targets, { ignore_index = opts.ignore_index })
end

local function of_texts(self, x, batch, targets, opts)
    local logits = logits_of(self, self:pool(x, batch))
    if targets == nil then return logits end
    if not te.is_tensor(targets) or targets:dim() ~= 1 or targets:size(1) ~= batch.n then
        fail("%s: targets: expected {%d}, one for each text, got %s", self.__name, batch.n,
            te.is_tensor(targets) and options.shape(targets) or options.shown(targets))
    end
    if self.config.n_label == 1 then return logits, te.mse_loss(logits:squeeze(-1), targets:to(logits.dtype)) end
    return logits, te.cross_entropy(logits, targets, { ignore_index = opts.ignore_index })
end

local HEADS = { masked_lm = of_tokens, token = of_tokens, sequence = of_texts }

--- Logits as the option head says: of tokens {batch, seq, classes}, or of packed texts {tokens, classes}; of texts
--- {batch, n_label}. With targets, in the shape of ids or {batch}, also the mean cross entropy (n_label = 1: the mean
--- squared error); logits of tokens are then {n, classes}, of the n tokens that have a target unless logits = "all".
---@param ids te.Tensor           {batch, seq}, or with seq_lens {tokens}
---@param targets te.Tensor|nil
---@param opts table|nil          seq_lens, attention_mask, token_types, logits, ignore_index
function Encoder:forward(ids, targets, opts)
    options.method("Encoder:forward", self, Encoder)
    opts = options.check(self.__name, opts, FORWARD)
    local head = HEADS[self.config.head]
    if not head then fail("%s: head = none: there are no logits; model:hidden_states(ids) has states", self.__name) end
    if opts.logits and (targets == nil or head == of_texts) then
        fail("%s: option logits: it is for targets of tokens", self.__name)
    end
    local x, batch = run(self, nil, ids, opts)
    return head(self, x, batch, targets, opts)
end
options.declare(Encoder.forward, FORWARD)

--- The plan of everything between embedding and head, for ids of this shape; with seq_lens of packed texts.
---@param ids te.Tensor
---@param opts table|nil  seq_lens, attention_mask, token_types
---@return te.Plan
function Encoder:explain(ids, opts)
    options.method("Encoder:explain", self, Encoder)
    local who = self.__name .. ":explain"
    local batch = Batch.of(who, ids, options.check(who, opts, INPUT), self.config.block_size)
    return fuser.explain_chain(self, self:embed(batch), batch.seq_lens)
end
options.declare(Encoder.explain, INPUT)

--- Takes over the weights of a checkpoint as Hugging Face's Transformers names and lays them out, of any floating
--- dtype; layers of other heads in it are left out. Nothing is changed unless all of the model's are there.
---@param tensors table<string, te.Tensor>
---@param fresh table<string, boolean>|nil  layers that stay as they are where the checkpoint has none
function Encoder:load_hugging_face(tensors, fresh)
    require("te.hugging_face.encoder_weights").load(self, tensors, fresh)
    return self
end

--- The parameters as load_hugging_face takes them, for te.save(path, …, { format = "pt" }): copies.
---@return table<string, te.Tensor>
function Encoder:hugging_face_state() return require("te.hugging_face.encoder_weights").state(self) end

--- The products of the blocks, and the layers of Transformers that each stands for.
---@return table[]
function Encoder:product_names() return require("te.hugging_face.encoder_weights").products(self) end

--- The model, of this class, of a checkpoint that te.train.checkpoint.load read.
function Encoder.restore(class, saved, own)
    for _, name in ipairs { "tensor_parallel", "sequence_parallel", "pipeline_parallel" } do
        if own and own[name] then
            fail("te.models.from_checkpoint: %s: te.models.%s is not split between processes", name, class.KIND)
        end
    end
    return LanguageModel.restore(class, saved)
end

return Encoder
