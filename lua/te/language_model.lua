--- What language models share, decoders (te.decoder) and encoders (te.encoder): blocks that are stored quantized or
-- computed again in backward, parameter groups, configurations as texts, weights by name.
--
-- A model derives from one of those and has
--
--     KIND            its name among te.models
--     CONFIG          its declared options, numbers, texts and booleans alone (te.options): shared and its own
--     config          the checked ones
--     self:chain()    what stands between embedding and head, self.blocks and modules around it
--     self:head()     the weight {vocab_size, n_embd} that makes logits of tokens

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local fuser = require "te.fuser"
local split = require "te.split_decoder"
local staged = require "te.staged_decoder"
local stages = require "te.distributed.stages"
local whole = require "te.distributed.whole"

local LanguageModel = te.Module:extend("LanguageModel")
LanguageModel.own_products = { "lm_head" } -- fields of layers whose weight is read, which te.lora leaves alone

local recipes = {}
for i, names in ipairs(te._core.recipe_names()) do recipes[i] = names[1] end

local SHARED = {
    vocab_size = { "size", help = "number of different tokens; required" },
    n_layer = { "size", 12, help = "blocks" },
    n_head = { "size", 12, help = "attention heads" },
    n_embd = { "size", 768, help = "width of the hidden states" },
    dropout = { "number", 0, min = 0, below = 1, help = "dropout of embeddings, attention probabilities and branches" },
    init_std = { "number", 0.02, min = 0, help = "standard deviation of initial weights" },
    quantized = { "string", choices = recipes,
        help = "the recipe in whose format the blocks' weights are stored" },
}

LanguageModel.RECOMPUTE = { "boolean", false,
    help = "backward computes each block again from its input: less memory, a third more work" }

--- The options that all models take, with those of one.
function LanguageModel.shared(own)
    for name, declared in pairs(SHARED) do own[name] = declared end
    return own
end

--- Whether backward computes each block again from its input, in place of keeping what is inside: the option
--- recompute_blocks. On the CPU losses and gradients have the same bits, elsewhere gradients may differ in last ones.
--- Returns the model.
---@param on boolean
function LanguageModel:set_recompute_blocks(on)
    options.method("LanguageModel:set_recompute_blocks", self, LanguageModel)
    options.argument(self.__name .. ":set_recompute_blocks", "on", on, { "boolean" })
    self.recompute_blocks = on
    return self
end

-- What te.checkpoint runs: a block's loss has to be a result for it to have a gradient.
local function block_with_loss(block, x, seq_lens)
    local y = block(x, seq_lens)
    local loss = block.auxiliary_loss and block:auxiliary_loss()
    if loss then return y, loss end
    return y
end

-- A block on x, of which backward computes what is inside again.
local function run_block(block, x, seq_lens)
    local y, loss = te.checkpoint(block_with_loss, block, x, seq_lens)
    if loss then block:auxiliary_loss(loss) end
    return y
end

--- Runs what stands between embedding and head.
---@param x te.Tensor
---@param seq_lens te.Tensor|nil  lengths of packed sequences
function LanguageModel:run_chain(x, seq_lens)
    if not self.recompute_blocks or not te._core.grad_enabled() then return fuser.run_chain(self, x, seq_lens) end
    for _, part in ipairs(self:chain()) do
        if part ~= self.blocks then
            x = part(x)
        else
            for _, block in ipairs(part) do -- te.Identity: it is in another stage
                if not te.is(block, te.Identity) then x = run_block(block, x, seq_lens) end
            end
        end
    end
    return x
end

--- Appends Block(config, 1) to Block(config, n_layer) to self.blocks, stored as config says.
function LanguageModel:append_blocks(Block)
    local config = self.config
    self.blocks = te.Sequential()
    local function append() staged.append_blocks(self, Block) end
    if config.quantized then
        te.quantized_model_init({ recipe = te.recipe[config.quantized] {} }, append)
    else
        append() -- as whoever makes the model says
    end
end

--- What the last forward adds to the loss, or nil.
function LanguageModel:auxiliary_loss() return nil end

--- Raises where a checkpoint has a head and it is not the embedding's table, as it is in this model.
function LanguageModel:check_tied(who, head, table)
    if not head then return end
    if options.shape(head) ~= options.shape(table) or not te.all(te.eq(head, table)):item() then
        fail("%s: the checkpoint has a head of its own; the model's is tied to the embedding", who)
    end
end

--- How many numbers the parameters are; of a split or divided model, those of all processes together.
---@return integer
function LanguageModel:num_parameters()
    options.method("LanguageModel:num_parameters", self, LanguageModel)
    return self.stage and self.stage.count or split.count(self:parameters())
end

--- How many parameters are in matrix products.
function LanguageModel:num_multiplying() return self:num_parameters() end

-- Of a layer inside of a block, its adapters left out.
local function is_hidden(name) return name:find "^blocks%." ~= nil and not name:find "%.lora%." end

--- Parameters in groups for te.optim.AdamW, or for te.optim.Muon: matrices decay, biases and norms do not. Of Muon's
--- the matrices of blocks are one group, for rates as AdamW has them, and AdamW updates the others. Frozen parameters
--- are in no group, so that with adapters (te.lora) an optimizer has those alone.
---@param weight_decay number
---@param optimizer string|nil  "adamw", the default, or "muon"
---@return table[] groups
function LanguageModel:parameter_groups(weight_decay, optimizer)
    options.method("LanguageModel:parameter_groups", self, LanguageModel)
    local muon = options.argument(self.__name .. ":parameter_groups", "optimizer", optimizer or "adamw",
        { "string", choices = { "adamw", "muon" } }) == "muon"
    local hidden, matrices, vectors, use_muon = {}, {}, {}, nil
    for name, parameter in self:named_parameters() do
        local list = parameter:dim() < 2 and vectors or muon and is_hidden(name) and hidden or matrices
        if parameter.requires_grad then list[#list + 1] = parameter end
    end
    if muon then use_muon = false end -- an option that AdamW does not know
    local groups = {}
    for _, group in ipairs {
        { params = hidden, weight_decay = weight_decay, adjust_lr_fn = "match_rms_adamw" },
        { params = matrices, weight_decay = weight_decay, use_muon = use_muon },
        { params = vectors, weight_decay = 0, use_muon = use_muon },
    } do
        if group.params[1] then groups[#groups + 1] = group end
    end
    return groups
end

--- The configuration as texts by "model.<key>", for a checkpoint's metadata; with that of adapters (te.lora).
function LanguageModel:texts()
    local texts = { ["model.kind"] = self.KIND }
    for key in pairs(self.CONFIG) do
        if self.config[key] ~= nil then texts["model." .. key] = options.exact(self.config[key]) end
    end
    require("te.lora.texts").add(self, texts)
    return texts
end

--- What gives parameters by name, those that are stored quantized as the numbers that they stand for, and weights with
--- what their adapters add.
---@return function
function LanguageModel:values_by_name()
    local parameters, adapters = {}, {}
    for name, parameter, module in self:named_parameters() do
        parameters[name] = parameter
        local adapter = parameter == module.weight and module.lora
        adapters[name] = adapter and not adapter.merged and adapter or nil
    end
    return function(who, name)
        split.refuse(self, who)
        stages.refuse(self, who)
        local parameter, adapter = parameters[name] or fail("%s: this model has no %s", who, name), adapters[name]
        local value = te._core.is_quantized(parameter) and te.no_grad(parameter.dequantize, parameter)
            or parameter:detach()
        return adapter and adapter:delta():add_(value):to(value.dtype) or value
    end
end

--- The products of the blocks by path, and what Transformers calls their layers: { path =, names =, counts = } each,
--- where there are several names with how many rows each has. What te.lora gives adapters to.
---@return table[]
function LanguageModel:product_names() return {} end

local BOOLEAN = { ["true"] = true, ["false"] = false }

-- What the text of an option means; one that means nothing stays, for the check of options.
local function from_text(kind, text)
    if kind == "string" then return text end
    local value
    if kind == "boolean" then value = BOOLEAN[text] else value = tonumber(text) end
    if value == nil then return text end
    return value
end

--- load_state_dict of a state with whole tensors, also where the model is split.
function LanguageModel:load_whole(state, opts)
    if self.tensor_parallel or self.stage then state = whole.split_state(self, state) end
    return self:load_state_dict(state, opts)
end

--- The model, of this class, of a checkpoint that te.train.checkpoint.load read.
---@param class table
---@param saved table
---@param own table|nil  options that are this process's: tensor_parallel, sequence_parallel, pipeline_parallel
function LanguageModel.restore(class, saved, own)
    local config = {}
    for key, value in pairs(own or {}) do config[key] = value end
    for key, declared in pairs(class.CONFIG) do
        local text = saved.metadata["model." .. key]
        if text then config[key] = from_text(declared[1], text) end
    end
    local n = #options.names(saved.tensors)
    if (tonumber(config.n_layer) or 0) > n then
        error(("%s: model.n_layer: %s layers, but there are %d tensors"):format(saved.path, config.n_layer, n), 0)
    end
    local model = class(config)
    require("te.lora.texts").restore(model, saved.metadata)
    return te.train.checkpoint.restore_model(saved, model)
end

require "te.uncompiled"(LanguageModel.append_blocks)

return LanguageModel
