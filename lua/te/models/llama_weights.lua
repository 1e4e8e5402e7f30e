--- Where te.models.llama finds its weights in checkpoints of Hugging Face's Transformers, and what it writes to them.
--
-- One walk over the model's parts (take_…) says which of its tensors are which of the checkpoint's. Gathered takes from
-- a checkpoint, Scattered makes one.
--
-- Queries, keys and values are one product here, and so are an MLP's gate and what it gates: their rows one after the
-- other. Experts are apart here; files have them apart (Mixtral, Qwen), or together, inputs first, the gate's columns
-- between the other's (GPT-OSS), then often in MXFP4: pairs of E2M1 codes and an E8M0 factor for 32 of them (Rouhani
-- et al. 2023, "Microscaling Data Formats for Deep Learning", tables 1 and 2).

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local rows = require "te.rows"

local WHO = "Llama:load_hugging_face"

-- The products of an MLP: the gate's, what it gates, and the second one.
local PARTS, MIXTRAL = { "gate_proj", "up_proj", "down_proj" }, { "w1", "w3", "w2" }

-- What is gathered: { config =, tensors = the checkpoint's, used = names that were read, state = the model's so far }.
local Gathered = {}
Gathered.__index = Gathered

function Gathered:find(name)
    if not te.is_tensor(self.tensors[name]) then fail("%s: there is no tensor %q", WHO, name) end
    self.used[name] = true
    return self.tensors[name]
end

-- MXFP4 {…, blocks, 16} under scales {…, blocks} as float32 {…, 32 blocks}: numbers whose products are exact.
local function unpack_mxfp4(name, codes, scales)
    local shape = codes.shape
    local fits = codes.dtype == "uint8" and scales.dtype == "uint8" and #shape > 1 and shape[#shape] == 16
        and scales:numel() * 16 == codes:numel()
    if not fits then fail("%s: %s_blocks: expected uint8 {…, 16} under uint8 %s_scales", WHO, name, name) end
    local sizes, pairs_of_codes, powers = { [0] = 0, 0.5, 1, 1.5, 2, 3, 4, 6 }, {}, {}
    local function value(code) return code < 8 and sizes[code] or -sizes[code - 8] end
    for i = 0, 255 do
        pairs_of_codes[i + 1] = { value(i % 16), value(math.floor(i / 16)) }
        powers[i + 1] = { i < 255 and 2 ^ (i - 127) or 0 / 0 }
    end
    local values = te.embedding(codes:to "int32", te.tensor(pairs_of_codes)):view { -1, 32 }
    values:mul_(te.embedding(scales:reshape({ -1 }):to "int32", te.tensor(powers)))
    shape[#shape], shape[#shape - 1] = nil, 32 * shape[#shape - 1]
    return values:view(shape)
end

-- All experts' weights of one product {experts, outputs, inputs}.
function Gathered:experts_of(name)
    if self.tensors[name .. "_blocks"] then
        return unpack_mxfp4(name, self:find(name .. "_blocks"), self:find(name .. "_scales"))
    end
    local weights = self:find(name)
    return weights:dim() == 3 and weights:transpose(2, 3) or weights
end

-- The rows (gate, other, gate, …) of a product, or of its bias, all of the gate first.
local function gate_first(rows)
    local shape = rows.shape
    local split = rows:reshape { shape[1] / 2, 2, -1 }
    return split:transpose(1, 2):reshape(shape)
end

-- Experts that are in one tensor for each product.
function Gathered:take_joined_experts(to, from)
    local state, count = self.state, self.config.n_expert
    local gate, down = from .. "gate_up_proj", from .. "down_proj"
    local gates, downs = self:experts_of(gate), self:experts_of(down)
    local gate_biases, down_biases = self:find(gate .. "_bias"), self:find(down .. "_bias")
    for name, part in pairs { [gate] = gates, [down] = downs, [gate .. "_bias"] = gate_biases,
        [down .. "_bias"] = down_biases } do
        if part:dim() ~= (name:find "_bias$" and 2 or 3) or part:size(1) ~= count or part:size(2) % 2 ~= 0 then
            fail("%s: %s: expected %d experts of an even number of outputs, got %s", WHO, name, count,
                options.shape(part))
        end
    end
    for e = 1, count do
        state[("%s1.weight.%d"):format(to, e)] = gate_first(gates[e])
        state[("%s1.bias.%d"):format(to, e)] = gate_first(gate_biases[e])
        state[("%s3.weight.%d"):format(to, e)] = downs[e]
        state[("%s3.bias.%d"):format(to, e)] = down_biases[e]
    end
end

-- The tensors of these names, one below the other; how many rows each has where that is known.
function Gathered:named(names, counts)
    local found = {}
    for i, name in ipairs(names) do
        found[i] = self:find(name)
        if not found[i].dtype:find("^b?float") then
            fail("%s: %q is of %s; weights are floating point", WHO, name, found[i].dtype)
        end
        local count = counts and counts[i]
        if count and (found[i]:dim() == 0 or found[i]:size(1) ~= count) then
            fail("%s: %q has shape %s, the model %d rows there", WHO, name, options.shape(found[i]), count)
        end
        local above, shape = found[1].shape, found[i].shape
        local fits = #shape == #above and table.concat(shape, ",", 2) == table.concat(above, ",", 2)
        if not fits or #names > 1 and #shape == 0 then
            fail("%s: %q has shape %s, which does not continue the rows of %q, %s", WHO, name,
                options.shape(found[i]), names[1], options.shape(found[1]))
        end
    end
    return rows.of(found)
end

-- The model's tensor `to` is of those names.
function Gathered:place(to, names, counts) self.state[to] = self:named(names, counts) end

-- The weight of a product, and its bias where there is one: state's `to`, of the rows of `prefix` ..; of several,
-- how many rows each has.
function Gathered:take_product(to, bias, prefix, parts, counts)
    for _, part in ipairs(bias and { ".weight", ".bias" } or { ".weight" }) do
        local names = {}
        for i, name in ipairs(type(parts) == "table" and parts or { parts }) do names[i] = prefix .. name .. part end
        self:place(to .. part, names, counts)
    end
end

function Gathered:take_attention(to, from)
    local config = self.config
    local biases, width = config.attention_bias, config.head_size or config.n_embd / config.n_head
    local kv = config.n_kv_head * width
    self:take_product(to .. "qkv", biases ~= "none", from, { "q_proj", "k_proj", "v_proj" },
        { config.n_head * width, kv, kv })
    self:take_product(to .. "proj", biases == "all", from, "o_proj")
    if self.config.qk_norm then
        self:take_product(to .. "q_norm", false, from, "q_norm")
        self:take_product(to .. "k_norm", false, from, "k_norm")
    end
    if self.config.attention_sinks then self:place(to .. "softmax_offset", { from .. "sinks" }) end
end

function Gathered:take_mlp(first, second, from, inner)
    self:take_product(first, self.config.mlp_bias, from, { PARTS[1], PARTS[2] }, { inner, inner })
    self:take_product(second, self.config.mlp_bias, from, PARTS[3])
end

-- Experts that are in tensors of their own.
function Gathered:take_single_experts(to, from, parts)
    local gate, up, down = unpack(parts)
    local inner = self.config.n_inner
    for e = 1, self.config.n_expert do
        local there = ("%s%d."):format(from, e - 1)
        local both = { there .. gate .. ".weight", there .. up .. ".weight" }
        self:place(("%s1.weight.%d"):format(to, e), both, { inner, inner })
        self:place(("%s3.weight.%d"):format(to, e), { there .. down .. ".weight" })
    end
end

-- Whether experts are named as Mixtral's, and whether they are together in one tensor.
function Gathered:experts_in(layer)
    return self.tensors[layer .. "block_sparse_moe.gate.weight"] ~= nil,
        self.tensors[layer .. "mlp.experts.down_proj_bias"] ~= nil
end

function Gathered:take_experts(to, layer)
    local mixtral, joined = self:experts_in(layer)
    local from = layer .. (mixtral and "block_sparse_moe." or "mlp.")
    self:take_product(to .. "router", self.config.mlp_bias, from, joined and "router" or "gate")
    if joined then
        self:take_joined_experts(to .. "experts.", from .. "experts.")
    else
        self:take_single_experts(to .. "experts.", from .. "experts.", mixtral and MIXTRAL or PARTS)
    end
    if self.config.n_inner_shared then
        self:take_mlp(to .. "shared.1", to .. "shared.3", from .. "shared_expert.", self.config.n_inner_shared)
        self:take_product(to .. "shared_gate", false, from, "shared_expert_gate")
    end
end

-- Block number i, from 1.
function Gathered:take_block(i)
    local config, from = self.config, ("model.layers.%d."):format(i - 1)
    local attention, mlp = ("blocks.%d.attention."):format(i), ("blocks.%d.mlp."):format(i)
    local last = config.n_expert and 3 or 5 -- where a norm of the MLP's result stands
    self:take_product(attention .. "1", false, from, "input_layernorm")
    self:take_attention(attention .. "2.", from .. "self_attn.")
    if config.post_norm then
        self:take_product(attention .. "3", false, from, "post_attention_layernorm")
        self:take_product(mlp .. "1", false, from, "pre_feedforward_layernorm")
        self:take_product(mlp .. last, false, from, "post_feedforward_layernorm")
    else
        self:take_product(mlp .. "1", false, from, "post_attention_layernorm")
    end
    if config.n_expert then
        self:take_experts(mlp .. "2.", from)
    else
        self:take_mlp(mlp .. "2", mlp .. "4", from .. "mlp.", config.n_inner)
    end
end

-- All but blocks and a head of its own.
function Gathered:take_ends()
    self:take_product("wte", false, "model.", "embed_tokens")
    self:take_product("norm", false, "model.", "norm")
end

-- The head of what is gathered.
local function take_head(found, model)
    local head = found.tensors["lm_head.weight"] and found:named { "lm_head.weight" } or found.state["wte.weight"]
    if not model.config.tie then
        found.state["lm_head.weight"] = head
    else
        model:check_tied(WHO, head, found.state["wte.weight"])
    end
end

local function check_used(found, names)
    for name in pairs(names) do
        local known = found.used[name] or name:find "rotary_emb%.inv_freq$"
        if not known then fail("%s: this model has no place for %q", WHO, name) end
    end
end

local function new_gathered(model, tensors)
    return setmetatable({ config = model.config, tensors = tensors, used = {}, state = {} }, Gathered)
end

--- The model's state out of a checkpoint's tensors. Raises where one is missing, or has no place.
---@param model table
---@param tensors table<string, te.Tensor>  of all the checkpoint's files
---@return table<string, te.Tensor> state
local function gather(model, tensors)
    options.argument(WHO, "tensors", tensors, { "table" })
    local found = new_gathered(model, tensors)
    found:take_ends()
    take_head(found, model)
    for i = 1, model.config.n_layer do found:take_block(i) end
    check_used(found, tensors)
    return found.state
end

--- The same into the model, block by block; see Llama:load_hugging_face_parts.
local function gather_parts(model, names, read)
    local found, given = new_gathered(model), {}
    local function load(wanted, take)
        read(wanted, function(tensors)
            found.tensors, found.state = tensors, {}
            take()
            local _, differs = model:load_whole(found.state, { strict = false })
            for _, name in ipairs(differs.unexpected) do fail("%s: this model has no %s", WHO, name) end
            for name in pairs(found.state) do given[name] = true end
            found.tensors, found.state = nil, nil
        end)
    end
    load(function(name) return not name:find "^model%.layers%." end, function()
        found:take_ends()
        take_head(found, model)
    end)
    for i = 1, model.config.n_layer do
        local prefix = ("model.layers.%d."):format(i - 1)
        load(function(name) return name:sub(1, #prefix) == prefix end, function() found:take_block(i) end)
    end
    check_used(found, names)
    for name in model:named_parameters() do
        if not given[name] then fail("%s: nothing was given for %s", WHO, name) end
    end
end

-- The way back: { config =, value_of = what gives the model's by name, used =, tensors = the checkpoint's so far }.
local Scattered = setmetatable({}, { __index = Gathered })
Scattered.__index = Scattered

function Scattered:value(name)
    self.used[name] = true
    return self.value_of("Llama:hugging_face_state", name)
end

function Scattered:place(name, names, counts)
    local value, first = self:value(name), 1
    for i, to in ipairs(names) do
        local count = counts and counts[i] or value:size(1)
        self.tensors[to] = value:narrow(1, first, count):clone()
        first = first + count
    end
end

-- Mixtral's are the ones without anything else of their own; GPT-OSS's alone have biases.
function Scattered:experts_in()
    local config = self.config
    return not (config.qk_norm or config.n_inner_shared or config.mlp_bias), config.mlp_bias
end

-- Rows of which all of the gate come first as (gate, other, gate, …).
local function alternating(rows)
    local shape = rows.shape
    return rows:reshape({ 2, shape[1] / 2, -1 }):transpose(1, 2):reshape(shape)
end

function Scattered:take_joined_experts(to, from)
    local lists = { gate_up_proj = {}, gate_up_proj_bias = {}, down_proj = {}, down_proj_bias = {} }
    for e = 1, self.config.n_expert do
        local function of(layer, part) return self:value(("%s%d.%s.%d"):format(to, layer, part, e)) end
        lists.gate_up_proj[e] = alternating(of(1, "weight")):transpose(1, 2)
        lists.gate_up_proj_bias[e] = alternating(of(1, "bias"))
        lists.down_proj[e] = of(3, "weight"):transpose(1, 2)
        lists.down_proj_bias[e] = of(3, "bias")
    end
    for name, list in pairs(lists) do self.tensors[from .. name] = te.stack(list) end
end

--- A checkpoint's tensors out of a model.
---@param model table
---@return table<string, te.Tensor> tensors
local function scatter(model)
    local config = model.config
    if config.n_expert and config.mlp_bias and (config.n_inner_shared or config.qk_norm) then
        fail "Llama:hugging_face_state: no model of Transformers has experts with biases and a shared one or norms of q"
    end
    local made = setmetatable({ config = config, value_of = model:values_by_name(), used = {}, tensors = {} },
        Scattered)
    te.no_grad(function()
        made:take_ends()
        for i = 1, model.config.n_layer do made:take_block(i) end
        if model.lm_head then made:place("lm_head.weight", { "lm_head.weight" }) end
    end)
    for name, _, module in model:named_parameters() do
        if not made.used[name] and not module.is_adapter then
            fail("Llama:hugging_face_state: Transformers have no place for %q", name)
        end
    end
    return made.tensors
end

-- Names alone: { config =, list = the products so far }.
local Listed = setmetatable({}, { __index = Scattered })
Listed.__index = Listed

function Listed:take_product(to, _, prefix, parts, counts)
    local names = {}
    for i, name in ipairs(type(parts) == "table" and parts or { parts }) do names[i] = prefix .. name end
    self.list[#self.list + 1] = { path = to, names = names, counts = counts }
end

function Listed:place() end

function Listed:take_joined_experts() end

function Listed:take_single_experts(to, from, parts)
    self:take_product(to .. "1", false, from, { parts[1], parts[2] })
    self:take_product(to .. "3", false, from, parts[3])
end

--- What model:product_names() gives; norms are among them.
local function products(model)
    local listed = setmetatable({ config = model.config, list = {} }, Listed)
    for i = 1, model.config.n_layer do listed:take_block(i) end
    return listed.list
end

return { gather = gather, gather_parts = gather_parts, scatter = scatter, products = products }
