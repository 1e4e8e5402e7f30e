--- config.json of Hugging Face's Transformers, read: which of te.models a configuration asks for, and its options.
--
-- What a configuration says acts or is refused: a model that computes something else than the one that was trained is
-- worse than none.

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local options = require "te.options"

local WHO = "te.models.from_hugging_face"

-- A configuration with checked fields.
local Config = {}
Config.__index = Config

function Config:fail(name, format, ...) fail("%s: %s: %s: %s", WHO, self.path, name, format:format(...)) end

--- A field, checked like an option ({ type, default, … }).
function Config:get(name, declared)
    local value = self.fields[name]
    if value == nil then value = declared[2] end
    if value == nil then return nil end
    return options.argument(WHO .. ": " .. self.path, name, value, declared)
end

function Config:need(name, declared)
    if self.fields[name] == nil then self:fail(name, "is missing") end
    return self:get(name, declared)
end

--- Whether the file names a field, be it with null, which is no value.
function Config:names(name)
    return self.text:find('"' .. name .. '"%s*:') ~= nil
end

--- Raises unless the field is absent or one of the values.
function Config:only(name, ...)
    local value, allowed = self.fields[name], {}
    if value == nil then return end
    for i, other in ipairs { ... } do
        if value == other then return end
        allowed[i] = options.shown(other)
    end
    if not allowed[1] then self:fail(name, "is not supported, got %s", options.shown(value)) end
    self:fail(name, "only %s is supported, got %s", table.concat(allowed, " or "), options.shown(value))
end

local function part_of(config, fields) return setmetatable({ path = config.path, fields = fields }, Config) end

--- What stands in a field, of which nothing has to be there.
function Config:part(name)
    return part_of({ path = self.path .. ": " .. name }, self:get(name, { "table", {} }))
end

-- The length that positions are stretched from.
local function original_length(config, rope)
    local fields = rope.fields
    fields.original_max_position_embeddings = fields.original_max_position_embeddings
        or config.fields.max_position_embeddings
    return rope:need("original_max_position_embeddings", { "size" })
end

-- rope_base of what stands in `rope`, or else `base`, and, where positions are stretched, the options of that.
local function rope_options(config, rope, base)
    local found = { rope_base = rope:get("rope_theta", { "number", base, min = 1 }) }
    rope:only("partial_rotary_factor", 1)
    local kind = rope:get("rope_type", { "string", rope:get("type", { "string", "default" }) })
    if kind == "default" then return found end
    rope.fields.rope_type = kind
    rope:only("rope_type", "default", "linear", "llama3", "yarn")
    found.rope_scaling, found.rope_factor = kind, rope:need("factor", { "number" })
    if kind == "llama3" then
        found.rope_low_freq_factor = rope:need("low_freq_factor", { "number" })
        found.rope_high_freq_factor = rope:need("high_freq_factor", { "number" })
        found.rope_original_block_size = original_length(config, rope)
    elseif kind == "yarn" then
        rope:only("mscale")
        rope:only("mscale_all_dim")
        found.rope_beta_fast = rope:get("beta_fast", { "number", 32 })
        found.rope_beta_slow = rope:get("beta_slow", { "number", 1 })
        found.rope_truncate = rope:get("truncate", { "boolean", true })
        found.rope_attention_factor = rope:get("attention_factor", { "number" })
        found.rope_original_block_size = original_length(config, rope)
    end
    return found
end

-- Of a kind whose layers with a window are turned apart: rope_scaling is that of the others.
local function rope_by_layer(config, given, scaling, base, window_base)
    window_base = config:get("rope_local_base_freq", { "number", window_base, min = 1 })
    for _, name in ipairs(options.names(given)) do
        if name ~= "full_attention" and name ~= "sliding_attention" then
            config:fail("rope_parameters", "expected full_attention and sliding_attention, got %s", options.shown(name))
        end
    end
    given = part_of(config, given)
    local full, windows = {}, part_of(config, given:get("sliding_attention", { "table", {} }))
    for _, fields in ipairs { given:get("full_attention", { "table", {} }), scaling } do
        for name, value in pairs(fields) do full[name] = value end
    end
    windows:only("rope_type", "default")
    local found = rope_options(config, part_of(config, full), base)
    found.window_rope_base = windows:get("rope_theta", { "number", window_base, min = 1 })
    return found
end

-- The options of rotary positions. Newer files have all of them in rope_parameters; rope_scaling, where a file has that
-- as well, stands in its place.
local function read_rope(config, own)
    local given = config:get("rope_parameters", { "table", {} })
    local scaling = config:get("rope_scaling", { "table", {} })
    if own.needs_rope and not next(given) and not next(scaling) then config:fail("rope_parameters", "is missing") end
    local base = config:get("rope_theta", { "number", own.base or 10000, min = 1 })
    if own.window_base then return rope_by_layer(config, given, scaling, base, own.window_base) end
    local rope = part_of(config, next(scaling) and scaling or given)
    rope:only "full_attention" -- by layer
    rope:only "sliding_attention"
    -- one beside them comes before theirs
    rope.fields.original_max_position_embeddings = config:get("original_max_position_embeddings",
        { "size", rope.fields.original_max_position_embeddings })
    return rope_options(config, rope, base)
end

-- How many tokens each sees, and which of the layers see all nevertheless, from what each says of itself.
local function windows_by_layer(config, layers, window, n_layer)
    local full_every
    for i, layer in ipairs(layers) do
        if layer ~= "sliding_attention" and layer ~= "full_attention" then
            config:fail("layer_types", "%s is not supported", options.shown(layer))
        elseif layer == "full_attention" then
            full_every = full_every or i
        end
    end
    local alike = #layers == n_layer
    for i, layer in ipairs(layers) do
        local full = full_every ~= nil and i % full_every == 0
        alike = alike and full == (layer == "full_attention")
    end
    if not alike then
        config:fail("layer_types", "expected %d of which every so many-th is full_attention, got %d: %s", n_layer,
            #layers, table.concat(layers, " "))
    end
    if full_every == 1 then return nil end
    if not window then
        config:fail("sliding_window", "is %s, and there are layers of sliding_attention",
            config.fields.sliding_window and "not in use" or "missing")
    end
    return window, full_every
end

-- How many tokens each sees, and which of the layers see all nevertheless, where layers don't say it of themselves.
local function windows_of_kind(config, own, window, n_layer)
    if own.full_every then
        return window, window and config:get("sliding_window_pattern", { "size", own.full_every })
    end
    if own.always_windows or not window then return window end
    if own.alternates then config:fail("layer_types", "is missing, though use_sliding_window is set") end
    local first = own.first_windows or config:get("max_window_layers", { "integer", 28, min = 0 })
    if first > 0 and first < n_layer then
        config:fail("max_window_layers", "the first %d of %d layers see all, not every so many-th", first, n_layer)
    end
    return first == 0 and window or nil
end

-- The size of windows, nil where there are none.
local function read_window(config, own)
    if own.no_windows then
        config:only("use_sliding_window", false)
        return nil
    end
    local window = config:get("sliding_window", { "integer", min = 0 })
    if window == nil and not config:names("sliding_window") then window = own.window end
    local used = own.always_windows or config:get("use_sliding_window", { "boolean", false })
    return used and window ~= 0 and window or nil
end

local function set_windows(config, made, own)
    local window, layers = read_window(config, own), config:get("layer_types", { "table" })
    if layers and own.by_layer then
        made.window, made.full_every = windows_by_layer(config, layers, window, made.n_layer)
        return
    end
    made.window, made.full_every = windows_of_kind(config, own, window, made.n_layer)
    local all = made.window and "sliding_attention" or "full_attention"
    for i = 1, layers and math.max(#layers, made.n_layer) or 0 do
        if layers[i] ~= all then
            config:fail("layer_types", "of this %s, all %d layers are %q, but layer %d is %s", config.fields.model_type,
                made.n_layer, all, i, options.shown(layers[i]))
        end
    end
end

-- Experts in the MLP's place, all layers alike. Probabilities over the chosen ones are those over all, divided by
-- their sum.
local function set_experts(config, made, own)
    local experts = config:get("num_local_experts", { "size" })
    made.n_expert = experts or config:need("num_experts", { "size" })
    made.n_expert_active = config:get("num_experts_per_tok", { "size", own.active })
    if own.plain_experts then return end
    config:only("decoder_sparse_step", 1)
    if next(config:get("mlp_only_layers", { "table", {} })) then
        config:fail("mlp_only_layers", "layers without experts beside others are not supported")
    end
    made.n_inner = config:need("moe_intermediate_size", { "size" })
    made.expert_pre_softmax = not config:get("norm_topk_prob", { "boolean", false })
    if own.shared then made.n_inner_shared = config:need("shared_expert_intermediate_size", { "size" }) end
end

-- What is a Gemma's own.
local function set_gemma(config, made)
    config:only("hidden_activation", "gelu_pytorch_tanh")
    config:only("attn_logit_softcapping")
    config:only("final_logit_softcapping")
    config:only("use_bidirectional_attention", false)
    made.activation, made.post_norm, made.zero_centered_gamma = "GEGLU", true, true
    made.embedding_scale = math.sqrt(made.n_embd)
    made.attention_scale = config:get("query_pre_attn_scalar", { "number", 256, min = 0 }) ^ -0.5
end

local function set_gpt_oss(config, made)
    config:only("swiglu_limit", 7)
    config:only("swiglu_alpha", 1.702)
    made.activation, made.mlp_bias, made.attention_sinks = "ClampedSwiGLU", true, true
end

local function biases_of_all(config, own)
    return config:get("attention_bias", { "boolean", own.biased or false }) and "all" or "none"
end

local function biases_of_qwen2_moe(config) return config:get("qkv_bias", { "boolean", true }) and "qkv" or "none" end

-- What is a kind's own among Llama's relatives. Defaults are those that Transformers fills in where a file says none:
--
--     head_size            of a head that is not hidden_size / num_attention_heads
--     tie, eps, base, window_base, window, active (experts that see a token), biased (attention)
--     full_every           which layers see all although there is a window
--     multi_headed         as many heads of keys and values as of queries; of others a file has to say it
--     no_windows           there are none, whatever a file says
--     always_windows       there are windows wherever a file has their size; elsewhere where use_sliding_window is set,
--                          from layer max_window_layers on, or first_windows; alternates: in a way that has to be said
--     by_layer             layer_types, where a file has it, says which layers those are; the others don't read it
--     needs_rope           positions are always stretched, in a way that has to be said
--     plain_experts        as wide as the MLP, probabilities over the chosen ones; shared: one sees all tokens
local RELATIVES = {
    llama = { biases = biases_of_all, multi_headed = true, no_windows = true },
    mistral = { always_windows = true, window = 4096 },
    mixtral = { always_windows = true, base = 1e6, eps = 1e-5, active = 2, plain_experts = true },
    qwen2 = { biases = function() return "qkv" end, multi_headed = true, by_layer = true, window = 4096 },
    qwen2_moe = { biases = biases_of_qwen2_moe, by_layer = true, window = 4096, alternates = true, active = 4,
        shared = true },
    qwen3 = { biases = biases_of_all, multi_headed = true, head_size = 128, qk_norm = true, by_layer = true,
        window = 4096 },
    qwen3_moe = { biases = biases_of_all, qk_norm = true, window = 4096, first_windows = 0, active = 8 },
    gemma3_text = { biases = biases_of_all, head_size = 256, tie = true, qk_norm = true, base = 1e6,
        window_base = 10000, window = 4096, always_windows = true, by_layer = true, full_every = 6, set = set_gemma },
    gpt_oss = { biases = biases_of_all, biased = true, head_size = 64, base = 150000, eps = 1e-5, window = 128,
        always_windows = true, by_layer = true, full_every = 2, needs_rope = true, active = 4, plain_experts = true,
        set = set_gpt_oss },
}

-- Llama and its relatives.
local function llama(config, kind)
    config:only("hidden_act", "silu")
    config:only("partial_rotary_factor", 1)
    local own = RELATIVES[kind]
    local made = read_rope(config, own)
    made.vocab_size = config:need("vocab_size", { "size" })
    made.block_size = config:get("max_position_embeddings", { "size", 2048 })
    made.n_layer = config:need("num_hidden_layers", { "size" })
    made.n_head = config:need("num_attention_heads", { "size" })
    local kv_heads = own.multi_headed and config.get or config.need
    made.n_kv_head = kv_heads(config, "num_key_value_heads", { "size", made.n_head })
    made.n_embd = config:need("hidden_size", { "size" })
    if not own.active or own.plain_experts then made.n_inner = config:need("intermediate_size", { "size" }) end
    made.head_size = config:get("head_dim", { "size", own.head_size })
    made.norm_eps = config:get("rms_norm_eps", { "number", own.eps or 1e-6, min = 0 })
    made.tie = config:get("tie_word_embeddings", { "boolean", own.tie or false })
    made.attention_bias = own.biases and own.biases(config, own) or "none"
    made.mlp_bias = config:get("mlp_bias", { "boolean", false })
    made.qk_norm = own.qk_norm
    set_windows(config, made, own)
    if not made.window then made.window_rope_base = nil end
    if own.active then set_experts(config, made, own) end
    if own.set then own.set(config, made) end
    return te.models.llama, made
end

local GELU = { gelu_new = "tanh", gelu_pytorch_tanh = "tanh", gelu = "none" }

local function gpt2(config)
    local width = config:need("n_embd", { "size" })
    config:only("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu")
    config:only("n_inner", 4 * width)
    config:only("layer_norm_epsilon", 1e-5)
    config:only("scale_attn_weights", true)
    config:only("scale_attn_by_inverse_layer_idx", false)
    config:only("add_cross_attention", false)
    config:only("tie_word_embeddings", true)
    return te.models.gpt, {
        vocab_size = config:need("vocab_size", { "size" }), n_embd = width, bias = true,
        block_size = config:get("n_positions", { "size", 1024 }),
        n_layer = config:need("n_layer", { "size" }), n_head = config:need("n_head", { "size" }),
        gelu = GELU[config:get("activation_function", { "string", "gelu_new" })],
    }
end

local KINDS = { gpt2 = gpt2 }
for kind in pairs(RELATIVES) do KINDS[kind] = llama end
for kind, read in pairs(require("te.hugging_face.encoder_config").KINDS) do KINDS[kind] = read end

local reader = {}

--- A configuration with checked fields: get, need, only, fail.
---@param path string  of its file
---@param text string  what stands there
function reader.new(path, text)
    local ok, fields = pcall(te._core.json, text)
    if not ok then fail("%s: %s: %s", WHO, path, fields) end
    if type(fields) ~= "table" then fail("%s: %s: expected an object", WHO, path) end
    return setmetatable({ path = path, text = text, fields = fields }, Config)
end

--- The configuration in a file.
---@param path string
function reader.open(path)
    local text, message = files.read(path)
    if not text then te._core.fail_io(("%s: %s"):format(WHO, message)) end
    return reader.new(path, text)
end

--- The class among te.models that a configuration asks for, and the options that it says.
---@param config table      one of open or new
---@param wanted table|nil  of an encoder: head and n_label in place of the file's
---@param names table|nil   its keys are the names of the weights, which tell some of an encoder's layers
---@return table class
---@return table made
function reader.model(config, wanted, names)
    local kind = config:need("model_type", { "string" })
    if not KINDS[kind] then config:only("model_type", unpack(options.names(KINDS))) end
    local quantized = config:get("quantization_config", { "table" })
    if quantized and not (kind == "gpt_oss" and quantized.quant_method == "mxfp4") then
        config:fail("quantization_config", "weights of other quantizers are not read")
    end
    return KINDS[kind](config, kind, wanted or {}, names)
end

return reader
