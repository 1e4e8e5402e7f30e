--- What decoder-only language models share: logits and losses, generation, parameter groups, configurations as texts.
--
-- A model derives from this class and has
--
--     KIND                     its name among te.models
--     CONFIG                   its declared options, numbers, texts and booleans alone (te.options): Decoder.shared and
--                              its own
--     config                   the checked ones
--     self:embed(ids, before)  hidden states {batch, seq, n_embd} of ids that follow `before` tokens
--     takes_positions          whether embed takes, for one id a row, a tensor {1} as `before`, so that generation can
--                              be recorded
--     self:chain()             what stands between them and the head, self.blocks and modules around it
--     self:head()              the weight {vocab_size, n_embd} that makes logits
--
-- With the option context_parallel, a group of processes, ids and targets are this process's part of sequences that are
-- cut between them (te.distributed.split_sequence), and so are logits; the loss is the mean over this part's tokens.
--
-- With the option tensor_parallel, a group, each process has some heads, a part of every MLP and of the vocabulary
-- (te.ops.tensor_parallel); ids, targets, loss and hidden states are whole, the logits beside a loss are those of its
-- part of the vocabulary. self.tensor_parallel and self.sequence_parallel say so, nil and false where nothing is split.
--
-- With the option pipeline_parallel, a group, each process has some of the blocks, and self.stage says so
-- (te.distributed.stages). A model makes what is around the blocks by self:keep, and may have it in one stage alone.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local fuser = require "te.fuser"
local declared = require "te.ops.declared"
local context_parallel = require "te.ops.context_parallel"
local split = require "te.split_decoder"
local staged = require "te.staged_decoder"
local stages = require "te.distributed.stages"
local tensor_parallel = require "te.ops.tensor_parallel"
local whole = require "te.distributed.whole"
local KVCache = require "te.kv_cache"

local Decoder = te.Module:extend("Decoder")
Decoder.own_products = { "lm_head" } -- fields of layers whose weight is read, which te.lora leaves alone

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

--- The options that all models take, with those of one.
function Decoder.shared(own)
    for name, declared in pairs(SHARED) do own[name] = declared end
    return own
end

-- Options that are this process's and not the model's: a checkpoint has none of them.
local OWN = {
    recompute_blocks = { "boolean", false,
        help = "backward computes each block again from its input: less memory, a third more work" },
    context_parallel = { "any", help = context_parallel.OPTIONS.cp_group.help },
    cp_comm_type = context_parallel.OPTIONS.cp_comm_type,
    tensor_parallel = tensor_parallel.OPTIONS.tensor_parallel,
    sequence_parallel = tensor_parallel.OPTIONS.sequence_parallel,
    pipeline_parallel = staged.OPTIONS.pipeline_parallel,
}

--- Says what options a model's init takes.
function Decoder.declare(class) options.declare(class.init, declared.join(class.CONFIG, OWN)) end

--- Checks the options that make the model.
function Decoder:configure(config)
    local who = "te.models." .. self.KIND
    config = options.check(who, config, declared.join(self.CONFIG, OWN))
    if not config.vocab_size then fail("%s: vocab_size is needed", who) end
    if not config.head_size and config.n_embd % config.n_head ~= 0 then
        fail("%s: n_embd = %d is no multiple of n_head = %d", who, config.n_embd, config.n_head)
    end
    local cut = context_parallel.check(who, config.context_parallel, config.cp_comm_type, "context_parallel")
    split.configure(self, who, config, cut ~= nil)
    staged.configure(self, who, config)
    self.config = config
    return config
end

--- The table of the token embedding, filled by init.
function Decoder:token_embedding(init) return split.embedding(self, init) end

--- A module of the model, nil where the stage of this process does not have it.
---@param name string
---@param module table
---@param place string  the stage that has it: first, last or ends, which are both
function Decoder:keep(name, module, place) return staged.keep(self, name, module, place) end

--- Makes self.blocks, Block(config, 1) to Block(config, n_layer), and cuts their sequences as config says.
function Decoder:make_blocks(Block)
    local config = self.config
    self.blocks = te.Sequential()
    local function append_blocks() staged.append_blocks(self, Block) end
    if config.quantized then
        te.quantized_model_init({ recipe = te.recipe[config.quantized] {} }, append_blocks)
    else
        append_blocks() -- as whoever makes the model says
    end
    local group, comm_type = config.context_parallel, config.cp_comm_type
    self.recompute_blocks = config.recompute_blocks
    for name in pairs(OWN) do config[name] = nil end
    self:set_context_parallel_group(group, comm_type)
end

--- Cuts sequences between the processes of a group, nil: of none, in all that attends.
---@param group table|nil        of a2a+p2p a list of two
---@param comm_type string|nil  all_gather unless given, a2a, p2p or a2a+p2p
function Decoder:set_context_parallel_group(group, comm_type)
    options.method("Decoder:set_context_parallel_group", self, Decoder)
    local who = self.__name .. ":set_context_parallel_group"
    group, comm_type = context_parallel.check(who, group, comm_type)
    if group and self.tensor_parallel then fail("%s: group: the model is split by tensor_parallel", who) end
    for _, module in self:named_modules() do
        local set = module ~= self and module.set_context_parallel_group
        if set then set(module, group, comm_type) end
    end
    self.cp_group, self.cp_comm_type = group, comm_type
    return self
end

--- Whether the tokens of a model with tensor_parallel are split between its layers: the option sequence_parallel.
--- Returns the model.
---@param on boolean
function Decoder:set_sequence_parallel(on)
    options.method("Decoder:set_sequence_parallel", self, Decoder)
    return split.set_sequence_parallel(self, on)
end

--- Whether backward computes each block again from its input, in place of keeping what is inside: the option
--- recompute_blocks. On the CPU losses and gradients have the same bits, elsewhere gradients may differ in last ones.
--- Returns the model.
---@param on boolean
function Decoder:set_recompute_blocks(on)
    options.method("Decoder:set_recompute_blocks", self, Decoder)
    options.argument(self.__name .. ":set_recompute_blocks", "on", on, { "boolean" })
    self.recompute_blocks = on
    return self
end

-- What te.checkpoint runs: a block's loss has to be a result for it to have a gradient.
local function block_with_loss(block, x)
    local y = block(x)
    local loss = block.auxiliary_loss and block:auxiliary_loss()
    if loss then return y, loss end
    return y
end

-- A block on x, of which backward computes what is inside again.
local function run_block(block, x)
    local y, loss = te.checkpoint(block_with_loss, block, x)
    if loss then block:auxiliary_loss(loss) end
    return y
end

-- Runs what stands between embedding and head on what is here.
local function run_chain(self, x)
    if not self.recompute_blocks or not te._core.grad_enabled() then return fuser.run_chain(self, x) end
    for _, part in ipairs(self:chain()) do
        if part ~= self.blocks then
            x = part(x)
        else
            for _, block in ipairs(part) do
                if not te.is(block, te.Identity) then x = run_block(block, x) end -- else it is in another stage
            end
        end
    end
    return x
end

local function check_ids(self, method, ids)
    if not te.is_tensor(ids) or ids:dim() ~= 2 then
        fail("%s:%s: ids: expected {batch, seq}, got %s", self.__name, method,
            te.is_tensor(ids) and options.shape(ids) or type(ids))
    end
end

-- hidden_states; `as_split`: where tokens are split between processes, of this one's; x: what comes from the stage
-- before this one, where there is one.
local function hidden_states(self, ids, as_split, x)
    check_ids(self, "hidden_states", ids)
    local before = KVCache.offset()
    if te.is_tensor(before) then return split.run(self, run_chain, self:embed(ids, before), as_split) end
    local seq = before + ids:size(2) * (self.cp_group and self.cp_group.size or 1)
    if seq > self.config.block_size then
        fail("%s: a sequence of %d tokens, block_size is %d", self.__name, seq, self.config.block_size)
    end
    return split.run(self, run_chain, x or self:embed(ids, before), as_split)
end

--- Hidden states {batch, seq, n_embd} of all positions after the final norm, which the head makes logits of: what a
--- value or reward head reads. With context_parallel they are those of this process's part; in a te.KVCache's run ids
--- go on from the tokens that it holds.
---@param ids te.Tensor  {batch, seq}
---@return te.Tensor hidden
function Decoder:hidden_states(ids)
    if type(self) ~= "table" then options.method("Decoder:hidden_states", self, Decoder) end
    if self.stage then fail("%s:hidden_states: not with pipeline_parallel: one stage alone has them", self.__name) end
    return hidden_states(self, ids, false)
end

-- What this stage makes of ids, and of what comes from the stage before. The last one's is for a loss, if there is one.
local function stage_states(self, ids, x, has_loss)
    local as_split = has_loss and self.sequence_parallel and not (self.stage and self.stage.behind)
    return hidden_states(self, ids, as_split, x)
end

local function check_targets(self, ids, targets)
    if te.is_tensor(targets) and options.shape(targets) == options.shape(ids) then return end
    fail("%s: targets: expected the shape of ids, %s, got %s", self.__name, options.shape(ids),
        te.is_tensor(targets) and options.shape(targets) or type(targets))
end

--- For te.distributed.pipeline_step: what this stage makes of a batch, the hidden states or in the last one the loss.
---@param ids te.Tensor
---@param targets te.Tensor
---@param x te.Tensor|nil  what comes from the stage before
function Decoder:forward_stage(ids, targets, x)
    check_ids(self, "forward", ids)
    check_targets(self, ids, targets)
    x = stage_states(self, ids, x, true)
    if self.stage and self.stage.behind then return x end
    local logits, loss = split.logits_and_loss(self, x, targets)
    logits:release()
    return loss
end

local FORWARD = {
    logits = { "string", nil, choices = { "last", "all" },
        help = "without targets: positions to return logits for; default: last" },
}

--- With targets {batch, seq}: logits {batch * seq, vocab_size} and the mean cross entropy, in training plus the
--- load-balancing loss of experts. Without: logits {batch, vocab_size} after the last token only, or with
--- { logits = "all" } after every token, {batch, seq, vocab_size}, for a custom loss. Within a te.KVCache's run, ids
--- continue the tokens that it holds. With tensor_parallel, logits beside a loss are of this process's part of the
--- vocabulary. With pipeline_parallel all processes call it without gradients (te.no_grad), and those logits are in the
--- last stage, nil in others.
---@param ids te.Tensor           {batch, seq}
---@param targets te.Tensor|nil   {batch, seq}
---@param opts table|nil
function Decoder:forward(ids, targets, opts)
    if type(self) ~= "table" then options.method("Decoder:forward", self, Decoder) end
    local which = opts and options.check(self.__name, opts, FORWARD).logits
    if targets then
        if which then fail("%s: option logits: with targets they are those of all positions", self.__name) end
    elseif self.cp_group and which ~= "all" then
        fail('%s: with context_parallel targets are needed, or { logits = "all" }; set_context_parallel_group(nil) '
            .. "makes the model whole", self.__name)
    end
    if self.stage then
        check_ids(self, "forward", ids)
        if targets then check_targets(self, ids, targets) end
        return staged.forward(self, stage_states, ids, targets, which)
    end
    local x = targets and self.sequence_parallel and hidden_states(self, ids, true) or self:hidden_states(ids)
    if targets then check_targets(self, ids, targets) end
    if not targets then
        return split.logits(self, which == "all" and x or x:select(2, -1))
    end
    local logits, loss = split.logits_and_loss(self, x, targets)
    local more = self:auxiliary_loss()
    return logits, more and loss + more or loss
end
options.declare(Decoder.forward, FORWARD)

--- The table that the first and the last stage of pipeline_parallel share, nil in others and where there is none.
function Decoder:tied_table()
    return self.config.tie ~= false and self.wte and self.wte.weight or nil
end

--- What the last forward adds to the loss, or nil.
function Decoder:auxiliary_loss() return nil end

--- The plan of everything between the embedding and the head, for ids of this shape. With recompute_blocks each block
--- runs as it does there, but by itself, and forward once more in backward.
---@return te.Plan
function Decoder:explain(ids)
    options.method("Decoder:explain", self, Decoder)
    check_ids(self, "explain", ids)
    local weight = self.stage and self:parameters()[1] or self:head() -- embeddings are as it is, but for te.autocast
    local dtype = weight.dtype ~= "float64" and te._core.compute_dtype() or weight.dtype
    local seq = ids:size(2)
    if self.sequence_parallel then seq = math.ceil(seq / self.tensor_parallel.size) end
    local x = te.empty({ ids:size(1), seq, self.config.n_embd }, { dtype = dtype, device = weight.device })
    x.requires_grad = te._core.grad_enabled() and weight.requires_grad
    return fuser.explain_chain(self, x)
end

--- Continues texts by `count` tokens each, without gradients and dropout: ids {batch, seq}, or prompts of different
--- lengths as a list of lists of ids or of tensors {seq}. With context_parallel, too, ids are whole sequences, and each
--- process generates by itself.
---@param ids te.Tensor|table
---@param count integer
---@param opts table|nil
---@return te.Tensor ids  {batch, seq + count}; of a list or with eos {batch, longest}, each row from its first token on
---  and filled up with eos, or 0
---@return te.Tensor|nil lengths  of a list or with eos: {batch} int64, tokens of each row, its prompt and eos included
function Decoder:generate(ids, count, opts)
    options.method("Decoder:generate", self, Decoder)
    return require("te.generate").run(self, ids, count, opts)
end
options.declare(Decoder.generate, function() return require("te.generate").OPTIONS end)

--- Floating point operations of one token's forward and backward: 6 per weight that multiplies, 4 where it is frozen,
--- and attention's share.
function Decoder:flops_per_token()
    options.method("Decoder:flops_per_token", self, Decoder)
    local c = self.config
    local width = c.head_size and c.n_head * c.head_size or c.n_embd
    local multiplying, trained = self:num_multiplying(), {}
    for _, parameter in ipairs(self:parameters()) do
        if parameter.requires_grad then trained[#trained + 1] = parameter end
    end
    local count = self.stage and self.stage.count or split.count(trained)
    return 4 * multiplying + 2 * math.min(multiplying, count) + 12 * c.n_layer * width * c.block_size
end

--- Raises where a checkpoint has a head and it is not the embedding's table, as it is in this model.
function Decoder:check_tied(who, head, table)
    if not head then return end
    if options.shape(head) ~= options.shape(table) or not te.all(te.eq(head, table)):item() then
        fail("%s: the checkpoint has a head of its own; the model's is tied to the embedding", who)
    end
end

--- How many numbers the parameters are; of a split or divided model, those of all processes together.
---@return integer
function Decoder:num_parameters()
    options.method("Decoder:num_parameters", self, Decoder)
    return self.stage and self.stage.count or split.count(self:parameters())
end

--- How many parameters are in matrix products.
function Decoder:num_multiplying() return self:num_parameters() end

-- Of a layer inside of a block, its adapters left out.
local function is_hidden(name) return name:find "^blocks%." ~= nil and not name:find "%.lora%." end

--- Parameters in groups for te.optim.AdamW, or for te.optim.Muon: matrices decay, biases and norms do not. Of Muon's
--- the matrices of blocks are one group, for rates as AdamW has them, and AdamW updates the others. Frozen parameters
--- are in no group, so that with adapters (te.lora) an optimizer has those alone.
---@param weight_decay number
---@param optimizer string|nil  "adamw", the default, or "muon"
---@return table[] groups
function Decoder:parameter_groups(weight_decay, optimizer)
    options.method("Decoder:parameter_groups", self, Decoder)
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
function Decoder:texts()
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
function Decoder:values_by_name()
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
function Decoder:product_names() return {} end

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
function Decoder:load_whole(state, opts)
    if self.tensor_parallel or self.stage then state = whole.split_state(self, state) end
    return self:load_state_dict(state, opts)
end

--- The model, of this class, of a checkpoint that te.train.checkpoint.load read.
---@param class table
---@param saved table
---@param own table|nil  options that are this process's: tensor_parallel, sequence_parallel, pipeline_parallel
function Decoder.restore(class, saved, own)
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

require "te.uncompiled"(Decoder.make_blocks, Decoder.generate)

return Decoder
