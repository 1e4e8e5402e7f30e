--- config.json of BERT, RoBERTa, XLM-RoBERTa, DistilBERT and ModernBERT, read and written; see te.hugging_face.config.

local te = require "te"
local json = require "te.json"
local options = require "te.options"

-- What stands at the end of a class of Transformers, and the head that it has.
local HEADS = { Model = "none", ForMaskedLM = "masked_lm", ForSequenceClassification = "sequence",
    ForTokenClassification = "token", ForPreTraining = "masked_lm" }
local CLASSES = { none = "Model", masked_lm = "ForMaskedLM", sequence = "ForSequenceClassification",
    token = "ForTokenClassification" }
local GELU = { gelu = "none", gelu_new = "tanh", gelu_pytorch_tanh = "tanh" }

local function head_of(config, wanted)
    if wanted then return wanted end
    local classes = config:get("architectures", { "table", {} })
    local ending = type(classes[1]) == "string" and (classes[1]:match "For%u%a+$" or classes[1]:match "Model$")
    local head = classes[1] == nil and "none" or HEADS[ending]
    if not head then
        config:fail("architectures", "%s is not supported; the option head says which head to make instead",
            options.shown(classes[1]))
    end
    return head
end

-- The names of the classes, and how many they are.
local function set_labels(config, made, wanted)
    if made.head ~= "sequence" and made.head ~= "token" then return end
    if wanted.head and wanted.n_label then
        made.n_label = wanted.n_label
        return
    end
    local names, own, n = config:get("id2label", { "table", {} }), false, 0
    for key in pairs(names) do n = math.max(n, (tonumber(key) or -1) + 1) end
    made.n_label = n > 0 and n or config:get("num_labels", { "size", 2 })
    local list = {}
    for i = 1, n do
        list[i] = names[tostring(i - 1)]
        if type(list[i]) ~= "string" or list[i]:find "\n" then
            config:fail("id2label", "expected the name of class %d, got %s", i - 1, options.shown(list[i]))
        end
        own = own or list[i] ~= "LABEL_" .. i - 1
    end
    if own then made.labels = table.concat(list, "\n") end
    if made.head == "sequence" then
        config:only("problem_type", made.n_label == 1 and "regression" or "single_label_classification")
    end
end

-- The layer in front of a head: of a text's class it is always there.
local function pooler_of(made, names, activation)
    if made.head == "sequence" then return activation end
    if made.head ~= "none" then return "none" end
    for name in pairs(names or {}) do
        if name:find "pooler%.dense%.weight$" then return activation end
    end
    return names and "none" or nil
end

local function activation(config, name)
    config:only(name, "gelu", "gelu_new", "gelu_pytorch_tanh")
    return GELU[config:get(name, { "string", "gelu" })]
end

local function bert(config, kind, wanted, names)
    config:only("position_embedding_type", "absolute")
    config:only("is_decoder", false)
    config:only("add_cross_attention", false)
    config:only("tie_word_embeddings", true)
    local made = { head = head_of(config, wanted.head), gelu = activation(config, "hidden_act") }
    local offset = kind ~= "bert" and config:get("pad_token_id", { "integer", 1, min = 0 }) + 1 or 0
    made.vocab_size = config:need("vocab_size", { "size" })
    made.n_embd = config:get("hidden_size", { "size", 768 })
    made.n_layer = config:get("num_hidden_layers", { "size", 12 })
    made.n_head = config:get("num_attention_heads", { "size", 12 })
    made.n_inner = config:get("intermediate_size", { "size", 3072 })
    made.block_size = config:get("max_position_embeddings", { "size", 512 }) - offset
    made.n_type = config:get("type_vocab_size", { "integer", 2, min = 1 })
    made.norm_eps = config:get("layer_norm_eps", { "number", 1e-12, min = 0 })
    made.position_offset = offset > 0 and offset or nil
    set_labels(config, made, wanted)
    made.pooler = pooler_of(made, names, "tanh")
    return te.models.bert, made
end

local function distilbert(config, _, wanted, names)
    config:only("sinusoidal_pos_embds", false)
    config:only("tie_word_embeddings", true)
    local made = { head = head_of(config, wanted.head), gelu = activation(config, "activation"), n_type = 0 }
    made.vocab_size = config:get("vocab_size", { "size", 30522 })
    made.n_embd = config:get("dim", { "size", 768 })
    made.n_layer = config:get("n_layers", { "size", 6 })
    made.n_head = config:get("n_heads", { "size", 12 })
    made.n_inner = config:get("hidden_dim", { "size", 3072 })
    made.block_size = config:get("max_position_embeddings", { "size", 512 })
    set_labels(config, made, wanted)
    made.pooler = pooler_of(made, names, "relu")
    return te.models.bert, made
end

-- What Transformers calls a layer, counted from 0.
local function layer_type(layer, every) return layer % every == 0 and "full_attention" or "sliding_attention" end

local function layer_types(n, every)
    local types = {}
    for layer = 0, n - 1 do types[layer + 1] = layer_type(layer, every) end
    return types
end

-- The distance of layers that see all; where a file lists layers without saying it, that of the first two.
local function full_every(config, n)
    local types, found = config:get("layer_types", { "table" }), nil
    for i = 2, types and #types or 0 do
        if types[i] == "full_attention" then found = found or i - 1 end
    end
    local every = config:get("global_attn_every_n_layers", { "size", found or types and math.max(n, 3) or 3 })
    if not types then return every end
    local fits, shown = #types == n, {}
    for i, kind in ipairs(types) do
        fits = fits and kind == layer_type(i - 1, every)
        shown[i] = type(kind) == "string" and kind or options.shown(kind)
    end
    if not fits then
        config:fail("layer_types", "expected that layers see all from the first on, one in %d, got %s", every,
            table.concat(shown, " "))
    end
    return every
end

local function rope_base(config, kind, older, default)
    local rope = config:part("rope_parameters"):part(kind)
    rope:only("rope_type", "default")
    return rope:get("rope_theta", { "number", config:get(older, { "number", default, min = 1 }), min = 1 })
end

local function modernbert(config, _, wanted)
    for name, value in pairs { attention_bias = false, mlp_bias = false, norm_bias = false, classifier_bias = false,
        decoder_bias = true, tie_word_embeddings = true, hidden_activation = "gelu", classifier_activation = "gelu",
    } do config:only(name, value) end
    local made = { head = head_of(config, wanted.head), vocab_size = config:get("vocab_size", { "size", 50368 }) }
    made.n_embd = config:get("hidden_size", { "size", 768 })
    made.n_layer = config:get("num_hidden_layers", { "size", 22 })
    made.n_head = config:get("num_attention_heads", { "size", 12 })
    made.n_inner = config:get("intermediate_size", { "size", 1152 })
    made.block_size = config:get("max_position_embeddings", { "size", 8192 })
    made.norm_eps = config:get("norm_eps", { "number", 1e-5, min = 0 })
    made.window = config:get("local_attention", { "size", 128 })
    made.full_every = full_every(config, made.n_layer)
    made.rope_base = rope_base(config, "full_attention", "global_rope_theta", 160000)
    made.window_rope_base = rope_base(config, "sliding_attention", "local_rope_theta", 10000)
    local pooling = config:get("classifier_pooling", { "string", "cls", choices = { "cls", "mean" } })
    made.pooling = pooling == "mean" and "mean" or "first"
    set_labels(config, made, wanted)
    return te.models.modernbert, made
end

local encoders = { KINDS = { bert = bert, roberta = bert, ["xlm-roberta"] = bert, distilbert = distilbert,
    modernbert = modernbert } }

local function with_labels(fields, c)
    if c.head ~= "sequence" and c.head ~= "token" then return end
    local names, ids, n = {}, {}, 0
    for name in ((c.labels or "") .. "\n"):gmatch "([^\n]*)\n" do names[n], n = name, n + 1 end
    fields.id2label, fields.label2id = {}, ids
    for i = 0, c.n_label - 1 do
        local name = c.labels and names[i] or "LABEL_" .. i
        fields.id2label[tostring(i)], ids[name] = name, i
    end
end

local WRITTEN = {
    bert = { "Bert", function(c)
        return { hidden_size = c.n_embd, num_hidden_layers = c.n_layer, num_attention_heads = c.n_head,
            intermediate_size = c.n_inner, max_position_embeddings = c.block_size + (c.position_offset or 0),
            type_vocab_size = c.n_type, layer_norm_eps = c.norm_eps, hidden_dropout_prob = c.dropout,
            attention_probs_dropout_prob = c.dropout, hidden_act = c.gelu == "tanh" and "gelu_new" or "gelu" }
    end },
    distilbert = { "DistilBert", function(c)
        return { dim = c.n_embd, n_layers = c.n_layer, n_heads = c.n_head, hidden_dim = c.n_inner,
            max_position_embeddings = c.block_size, dropout = c.dropout, attention_dropout = c.dropout,
            activation = c.gelu == "tanh" and "gelu_new" or "gelu", sinusoidal_pos_embds = false }
    end },
}
WRITTEN.roberta = { "Roberta", WRITTEN.bert[2] }
WRITTEN.modernbert = { "ModernBert", function(c)
    return { hidden_size = c.n_embd, num_hidden_layers = c.n_layer, num_attention_heads = c.n_head,
        intermediate_size = c.n_inner, max_position_embeddings = c.block_size, norm_eps = c.norm_eps,
        local_attention = c.window, global_attn_every_n_layers = c.full_every, global_rope_theta = c.rope_base,
        local_rope_theta = c.window_rope_base, layer_types = layer_types(c.n_layer, c.full_every),
        classifier_pooling = c.pooling == "mean" and "mean" or "cls", hidden_activation = "gelu",
        classifier_activation = "gelu", attention_bias = false, mlp_bias = false, norm_bias = false,
        classifier_bias = false, decoder_bias = true, embedding_dropout = c.dropout, attention_dropout = c.dropout,
        mlp_dropout = c.dropout, cls_token_id = json.null, sep_token_id = json.null }
end }

--- What a file says of a model: its fields, its class of Transformers, and model_type.
---@param model table
---@return table fields
---@return string class
---@return string kind
function encoders.fields(model)
    local c, kind = model.config, model:family()
    local name, of = unpack(WRITTEN[kind])
    local fields = of(c)
    fields.vocab_size, fields.initializer_range, fields.tie_word_embeddings = c.vocab_size, c.init_std, true
    if kind == "roberta" then fields.pad_token_id = c.position_offset - 1 end
    with_labels(fields, c)
    return fields, name .. CLASSES[c.head], kind
end

return encoders
