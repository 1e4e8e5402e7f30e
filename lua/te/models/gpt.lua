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
local tensor_parallel = require "te.ops.tensor_parallel"
local Decoder = require "te.decoder"

local Block = te.Module:extend("Block")
Block.forward = fuser.forward
Block.records = true -- te.decoding

function Block:init(config)
    local width, bias = config.n_embd, config.bias
    local group, sequence = config.tensor_parallel, config.sequence_parallel
    local function linear(mode, n_in, n_out, method)
        return te.Linear(n_in, n_out,
            tensor_parallel.linear(group, sequence, mode, { bias = bias, init_method = method }))
    end
    local function norm() return te.LayerNorm(width, tensor_parallel.norm(group, sequence, { bias = bias })) end
    local init = initializers.normal(0, config.init_std)
    local residual_init = initializers.normal(0, config.init_std / math.sqrt(2 * config.n_layer))
    self.attention = te.Residual(
        norm(),
        te.MultiHeadedSelfAttention(width, config.n_head, { causal = true, dropout = config.dropout, bias = bias,
            init_method = init, output_layer_init_method = residual_init, tp_group = group,
            sequence_parallel = sequence }),
        te.Dropout(config.dropout))
    self.mlp = te.Residual(
        norm(),
        linear("column", width, 4 * width, init),
        te.GELU({ approximate = config.gelu }),
        linear("row", 4 * width, width, residual_init),
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
    self.wte = self:keep("wte", self:token_embedding(init.init_method), "ends")
    self.wpe = self:keep("wpe", te.Embedding(config.block_size, config.n_embd, init), "first")
    self.dropout = self:keep("dropout", te.Dropout(config.dropout), "first") or te.Identity()
    self:make_blocks(Block)
    self.norm = self:keep("norm", te.LayerNorm(config.n_embd,
        tensor_parallel.norm(self.tensor_parallel, self.sequence_parallel, { bias = config.bias })), "last")
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

function GPT:num_multiplying() return self:num_parameters() - self.config.block_size * self.config.n_embd end

-- fn(name here, name there, whether there inputs come first) for every parameter outside of the blocks.
local function each_of_ends(fn)
    fn("wte.weight", "wte.weight")
    fn("wpe.weight", "wpe.weight")
    for _, part in ipairs { "weight", "bias" } do fn("norm." .. part, "ln_f." .. part) end
end

-- The same for those of block i.
local function each_of_block(i, fn)
    local to, from = ("blocks.%d."):format(i), ("h.%d."):format(i - 1)
    for _, part in ipairs { "weight", "bias" } do
        fn(to .. "attention.1." .. part, from .. "ln_1." .. part)
        fn(to .. "attention.2.qkv." .. part, from .. "attn.c_attn." .. part, true)
        fn(to .. "attention.2.proj." .. part, from .. "attn.c_proj." .. part, true)
        fn(to .. "mlp.1." .. part, from .. "ln_2." .. part)
        fn(to .. "mlp.2." .. part, from .. "mlp.c_fc." .. part, true)
        fn(to .. "mlp.4." .. part, from .. "mlp.c_proj." .. part, true)
    end
end

local WHO, WHO_GIVES = "GPT:load_hugging_face", "GPT:hugging_face_state"

-- The state that `each` goes over, out of a checkpoint's tensors, and the views among it, which hold those that may be
-- let go of; `used`: names that have a place here.
local function gather(self, tensors, prefix, used, each)
    local state, views = {}, {}
    each(function(name, from, turned)
        local t = tensors[prefix .. from]
        if not te.is_tensor(t) then fail("%s: there is no tensor %q", WHO, prefix .. from) end
        used[prefix .. from] = true
        if turned and t:dim() == 2 then
            t = t:transpose(1, 2)
            views[#views + 1] = t
        elseif from == "wpe.weight" and t:dim() == 2 and t:size(1) > self.config.block_size then
            t = t:narrow(1, 1, self.config.block_size)
            views[#views + 1] = t
        end
        state[name] = t
    end)
    if state["wte.weight"] then self:check_tied(WHO, tensors["lm_head.weight"], state["wte.weight"]) end
    return state, views
end

local function release(views)
    for _, view in ipairs(views) do view:release() end
end

local function check_used(names, used)
    for name in pairs(names) do
        local known = used[name] or name == "lm_head.weight" or name:find "%.attn%.bias$"
            or name:find "%.attn%.masked_bias$"
        if not known then fail("%s: this model has no place for %q", WHO, name) end
    end
end

local function prefix_of(names) return names["transformer.wte.weight"] and "transformer." or "" end

--- Takes over the weights of a GPT-2 as Hugging Face's Transformers names and lays them out ("h.0.attn.c_attn.weight"
--- and so on, inputs first), of any floating dtype. The model needs `bias`, and `gelu` as the checkpoint has it;
--- positions beyond block_size are left out. Nothing is changed unless all of them fit.
---@param tensors table<string, te.Tensor>
function GPT:load_hugging_face(tensors)
    options.argument(WHO, "tensors", tensors, { "table" })
    local used = {}
    local state, views = gather(self, tensors, prefix_of(tensors), used, function(fn)
        each_of_ends(fn)
        for i = 1, self.config.n_layer do each_of_block(i, fn) end
    end)
    check_used(tensors, used)
    self:load_whole(state)
    release(views)
    return self
end

--- load_hugging_face, block by block: read(wanted, take) gives the tensors whose names are wanted to take.
---@param names table<string, any>  those of all the checkpoint's tensors are its keys
---@param read function
function GPT:load_hugging_face_parts(names, read)
    local prefix, used = prefix_of(names), {}
    local inside = "^" .. prefix .. "h%.%d+%."
    local function load(wanted, each)
        read(wanted, function(tensors)
            local state, views = gather(self, tensors, prefix, used, each)
            local _, differs = self:load_whole(state, { strict = false })
            if differs.unexpected[1] then fail("%s: this model has no %s", WHO, differs.unexpected[1]) end
            release(views)
        end)
    end
    load(function(name) return not name:find(inside) end, each_of_ends)
    for i = 1, self.config.n_layer do
        local beginning = ("%sh.%d."):format(prefix, i - 1)
        load(function(name) return name:sub(1, #beginning) == beginning end,
            function(fn) each_of_block(i, fn) end)
    end
    check_used(names, used)
end

--- The parameters as load_hugging_face takes them, for te.save(path, …, { format = "pt" }): copies. A GPT-2 has biases:
--- those of a model without are zeros.
---@return table<string, te.Tensor>
function GPT:hugging_face_state()
    local value_of, tensors = self:values_by_name(), {}
    local function put(name, to, turned)
        local is_bias = name:find "%.bias$"
        if is_bias and not self.config.bias then
            local weight = value_of(WHO_GIVES, (name:gsub("bias$", "weight")))
            tensors[to] = te.zeros({ weight:size(1) }, { dtype = weight.dtype, device = weight.device })
            return
        end
        local value = value_of(WHO_GIVES, name)
        tensors[to] = turned and value:dim() == 2 and value:transpose(1, 2):contiguous() or value:clone()
    end
    each_of_ends(put)
    for i = 1, self.config.n_layer do each_of_block(i, put) end
    return tensors
end

--- The products of the blocks, as Transformers' GPT-2 names them; each is one layer there, too.
---@return table[]
function GPT:product_names()
    local list = {}
    for i = 1, self.config.n_layer do
        each_of_block(i, function(name, from, turned)
            local path, layer = name:match "^(.*)%.weight$", from:match "^(.*)%.weight$"
            if turned and path then list[#list + 1] = { path = path, names = { "transformer." .. layer } } end
        end)
    end
    return list
end

--- The model of a checkpoint that te.train.checkpoint.load read.
function GPT.from_checkpoint(saved, own) return Decoder.restore(GPT, saved, own) end

require "te.uncompiled"(GPT.load_hugging_face)

return GPT
