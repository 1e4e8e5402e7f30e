--- The weights of encoders in checkpoints of Hugging Face's Transformers: BERT's, RoBERTa's, DistilBERT's and
-- ModernBERT's.
--
-- A family says how its layers are called, here and there; a layer's parameters are those that the model has. Queries,
-- keys and values are one product here and three there. Transformers names what is not a head behind the family's name
-- ("bert.encoder.…"), unless a file has no head.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local rows = require "te.rows"

local WHO = "load_hugging_face"

local function attention(prefix, q, k, v) return { prefix .. q, prefix .. k, prefix .. v } end

-- Rows { here, there }; of blocks beside their names. `tied`: copies of the table that a file may have.
local BERT = {
    ends = { { "wte", "embeddings.word_embeddings" }, { "wpe", "embeddings.position_embeddings" },
        { "wtt", "embeddings.token_type_embeddings" }, { "norm", "embeddings.LayerNorm" } },
    block = "encoder.layer.%d.",
    blocks = { { "attention.1.qkv", attention("attention.self.", "query", "key", "value") },
        { "attention.1.proj", "attention.output.dense" }, { "attention_norm", "attention.output.LayerNorm" },
        { "mlp.1", "intermediate.dense" }, { "mlp.3", "output.dense" }, { "mlp_norm", "output.LayerNorm" } },
    prefix = "bert.",
    pooler = "pooler.dense",
    heads = {
        masked_lm = { { "lm.1", "cls.predictions.transform.dense" }, { "lm.3", "cls.predictions.transform.LayerNorm" },
            { "lm_bias", "cls.predictions.bias" } },
        sequence = { { "classifier", "classifier" } },
        token = { { "classifier", "classifier" } },
    },
    tied = "cls.predictions.decoder.",
}

local function like(family, own) return setmetatable(own, { __index = family }) end

local FAMILIES = {
    bert = BERT,
    roberta = like(BERT, {
        prefix = "roberta.",
        sequence_pooler = "classifier.dense",
        heads = {
            masked_lm = { { "lm.1", "lm_head.dense" }, { "lm.3", "lm_head.layer_norm" },
                { "lm_bias", "lm_head.bias" } },
            sequence = { { "classifier", "classifier.out_proj" } },
            token = { { "classifier", "classifier" } },
        },
        tied = "lm_head.decoder.",
    }),
    distilbert = like(BERT, {
        block = "transformer.layer.%d.",
        blocks = { { "attention.1.qkv", attention("attention.", "q_lin", "k_lin", "v_lin") },
            { "attention.1.proj", "attention.out_lin" }, { "attention_norm", "sa_layer_norm" },
            { "mlp.1", "ffn.lin1" }, { "mlp.3", "ffn.lin2" }, { "mlp_norm", "output_layer_norm" } },
        prefix = "distilbert.",
        sequence_pooler = "pre_classifier",
        heads = {
            masked_lm = { { "lm.1", "vocab_transform" }, { "lm.3", "vocab_layer_norm" },
                { "lm_bias", "vocab_projector.bias" } },
            sequence = { { "classifier", "classifier" } },
            token = { { "classifier", "classifier" } },
        },
        tied = "vocab_projector.",
    }),
}

local MODERN_HEAD = { { "lm.1", "head.dense" }, { "lm.3", "head.norm" } }

-- The first block has no norm in front of attention.
FAMILIES.modernbert = {
    ends = { { "wte", "embeddings.tok_embeddings" }, { "norm", "embeddings.norm" }, { "last_norm", "final_norm" } },
    block = "layers.%d.",
    blocks = { { "attention.1", "attn_norm" }, { "attention.1.qkv", "attn.Wqkv" }, { "attention.1.proj", "attn.Wo" },
        { "attention.2.qkv", "attn.Wqkv" }, { "attention.2.proj", "attn.Wo" }, { "mlp.1", "mlp_norm" },
        { "mlp.2", "mlp.Wi" }, { "mlp.4", "mlp.Wo" } },
    prefix = "model.",
    heads = {
        masked_lm = { MODERN_HEAD[1], MODERN_HEAD[2], { "lm_bias", "decoder.bias" } },
        sequence = { MODERN_HEAD[1], MODERN_HEAD[2], { "classifier", "classifier" } },
        token = { MODERN_HEAD[1], MODERN_HEAD[2], { "classifier", "classifier" } },
    },
    tied = "decoder.",
}

local weights = {}

-- fn(name here, { names there }, whether it is in a block) for every parameter of the model, one after the other.
local function each(model, prefix, fn)
    local family, there, config = FAMILIES[model:family()], {}, model.config
    local function put(row, to, from, in_block)
        local names = type(row[2]) == "table" and row[2] or { row[2] }
        for _, part in ipairs { "", ".weight", ".bias" } do
            local full = {}
            for i, name in ipairs(names) do full[i] = from .. name .. part end
            there[to .. row[1] .. part] = { full, in_block }
        end
    end
    for _, row in ipairs(family.ends) do put(row, "", prefix) end
    for layer = 1, config.n_layer do
        for _, row in ipairs(family.blocks) do
            put(row, ("blocks.%d."):format(layer), prefix .. family.block:format(layer - 1), true)
        end
    end
    local own = config.head == "sequence" and family.sequence_pooler
    if family.pooler then put({ "pooler", own or family.pooler }, "", own and "" or prefix) end
    for _, row in ipairs(family.heads[config.head] or {}) do
        local row_there = row[1] == "lm_bias" and { row[1], row[2] } or row
        put(row_there, "", "")
    end
    for name in model:named_parameters() do
        local found = there[name]
        if found then fn(name, found[1], found[2]) elseif not name:find "%.lora%." then fn(name) end
    end
end

-- A tensor under its name, or under the one that norms had in BERT's first files.
local function find(tensors, name)
    return tensors[name] or tensors[name:gsub("LayerNorm%.weight$", "LayerNorm.gamma")
        :gsub("LayerNorm%.bias$", "LayerNorm.beta")]
end

local function prefix_of(model, names)
    local prefix = FAMILIES[model:family()].prefix
    for name in pairs(names) do
        if type(name) == "string" and name:sub(1, #prefix) == prefix then return prefix end
    end
    return ""
end

-- Whether a file may have this beside the model's: numbers that follow from others, and layers of other heads, where
-- it is the prefix that tells heads apart, or the name.
local function may_be_left_out(model, prefix, name)
    local family = FAMILIES[model:family()]
    local inner = name:sub(1, #prefix) == prefix and name:sub(#prefix + 1)
    if inner and (inner:find "^embeddings%.position_ids$" or inner:find "^pooler%.") then return true end
    return prefix ~= "" and not inner or name:find("cls.", 1, true) == 1 or name:find(family.tied, 1, true) == 1
end

-- Positions beyond block_size are left out.
local function first_rows(table, model)
    local count = model.wpe.num_embeddings
    return table:dim() == 2 and table:size(1) > count and table:narrow(1, 1, count) or table
end

--- Takes over the weights of a checkpoint. Layers of heads that the model has not are left out, as Transformers does;
--- those in `fresh`, names of layers here, may be missing there and stay as they are.
---@param model table
---@param tensors table<string, te.Tensor>
---@param fresh table<string, boolean>|nil
function weights.load(model, tensors, fresh)
    local who = model.__name .. ":" .. WHO
    options.argument(who, "tensors", tensors, { "table" })
    local prefix, used, state = prefix_of(model, tensors), {}, {}
    each(model, prefix, function(name, names)
        local parts = {}
        for i, from in ipairs(names or {}) do
            parts[i] = find(tensors, from)
            if parts[i] then used[parts[i]] = true end
        end
        if names and #parts == #names and #parts > 0 then
            state[name] = name == "wpe.weight" and first_rows(parts[1], model) or rows.of(parts)
        elseif not (fresh and fresh[name:match "^[^.]+"]) then
            fail("%s: there is no tensor %q", who, names and names[#parts + 1] or name)
        end
    end)
    for name, tensor in pairs(tensors) do
        if not used[tensor] and not may_be_left_out(model, prefix, name) then
            fail("%s: this model has no place for %q", who, name)
        end
    end
    if model.config.head == "masked_lm" then
        local tied = FAMILIES[model:family()].tied
        model:check_tied(who, tensors[tied .. "weight"], state["wte.weight"])
    end
    model:load_state_dict(state, { strict = not fresh })
end

--- The model's parameters as load takes them: copies.
---@param model table
---@return table<string, te.Tensor>
function weights.state(model)
    local family, who, made = FAMILIES[model:family()], model.__name .. ":hugging_face_state", {}
    local value_of = model:values_by_name()
    each(model, model.config.head ~= "none" and family.prefix or "", function(name, names)
        if not names then fail("%s: Transformers have no place for %q", who, name) end
        local value = value_of(who, name)
        local count = value:size(1) / #names
        for i, to in ipairs(names) do made[to] = value:narrow(1, (i - 1) * count + 1, count):clone() end
    end)
    return made
end

--- What model:product_names() gives.
---@param model table
---@return table[]
function weights.products(model)
    local list, prefix = {}, FAMILIES[model:family()].prefix
    local parameters = {}
    for name, parameter in model:named_parameters() do parameters[name] = parameter end
    each(model, model.config.head ~= "none" and prefix or "", function(name, names, in_block)
        local path = in_block and parameters[name]:dim() == 2 and name:match "^(.*)%.weight$"
        if not path then return end
        local layers, counts = {}, {}
        for i, full in ipairs(names) do
            layers[i], counts[i] = full:match "^(.*)%.weight$", parameters[name]:size(1) / #names
        end
        list[#list + 1] = { path = path, names = layers, counts = #layers > 1 and counts or nil }
    end)
    return list
end

return weights
