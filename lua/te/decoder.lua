--- What decoder-only language models share beside te.language_model: logits and losses, generation, splitting between
-- processes.
--
-- A model derives from this class and has what te.language_model says, and
--
--     self:embed(ids, before)  hidden states {batch, seq, n_embd} of ids that follow `before` tokens
--     takes_positions          whether embed takes, for one id a row, a tensor {1} as `before`, so that generation can
--                              be recorded
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
local LanguageModel = require "te.language_model"
local declared = require "te.ops.declared"
local context_parallel = require "te.ops.context_parallel"
local split = require "te.split_decoder"
local staged = require "te.staged_decoder"
local stages = require "te.distributed.stages"
local tensor_parallel = require "te.ops.tensor_parallel"
local KVCache = require "te.kv_cache"

local Decoder = LanguageModel:extend("Decoder")

-- Options that are this process's and not the model's: a checkpoint has none of them.
local OWN = {
    recompute_blocks = LanguageModel.RECOMPUTE,
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
    self:append_blocks(Block)
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
    if te.is_tensor(before) then return split.run(self, self.run_chain, self:embed(ids, before), as_split) end
    local seq = before + ids:size(2) * (self.cp_group and self.cp_group.size or 1)
    if seq > self.config.block_size then
        fail("%s: a sequence of %d tokens, block_size is %d", self.__name, seq, self.config.block_size)
    end
    return split.run(self, self.run_chain, x or self:embed(ids, before), as_split)
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
--- process generates by itself. With pipeline_parallel all processes call it alike, and each gets the whole result.
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

require "te.uncompiled"(Decoder.generate)

return Decoder
