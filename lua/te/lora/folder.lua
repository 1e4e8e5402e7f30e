--- Adapters in a folder as PEFT (Hugging Face's library of adapters) writes and reads them: adapter_config.json, and
--- adapter_model.safetensors with A and B of each layer, "base_model.model.<layer>.lora_A.weight" {rank, inputs} and
--- "….lora_B.weight" {outputs, rank}. Layers of te.models are named as Transformers names them, others by their paths.

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local json = require "te.json"
local options = require "te.options"
local attach = require "te.lora.attach"
local targets = require "te.lora.targets"

local folder = {}

local CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
local PREFIX, SUFFIX = "base_model.model.", { A = ".lora_A.weight", B = ".lora_B.weight" }

local function check_folder(who, name)
    files.need(who)
    options.argument(who, "folder", name, { "string" })
    if name == "" then fail("%s: folder: expected a name, got an empty one", who) end
    return #name > 1 and name:gsub("/+$", "") or name
end

-- Writing -----------------------------------------------------------------------------------------------------------

local SAVE = {
    base = { "string", help = "the folder or name of the model that they are for, which PEFT looks for" },
}
folder.SAVE = SAVE

-- fn(name, adapter, i, part) for every part that has an adapter, its i-th.
local function each_part(model, fn)
    for _, layer in ipairs(targets.layers(model)) do
        local adapter = layer.module.lora
        for i, part in ipairs(adapter and adapter.parts or {}) do fn(part.name, adapter, i, part) end
    end
end

-- Names by which PEFT finds the layers: their last words where all layers of such a name have adapters.
local function target_modules(model)
    local all, has, names, seen = {}, {}, {}, {}
    for _, layer in ipairs(targets.layers(model)) do
        for _, part in ipairs(layer.parts) do
            local word = part.name:match "[^.]*$"
            all[word] = (all[word] or 0) + 1
        end
    end
    each_part(model, function(name)
        local word = name:match "[^.]*$"
        has[word] = (has[word] or 0) + 1
    end)
    each_part(model, function(name)
        local word = name:match "[^.]*$"
        local target = has[word] == all[word] and word or name
        if not seen[target] then names[#names + 1], seen[target] = target, true end
    end)
    return names
end

local function is_decoder(model) return te.is(model, require "te.decoder") end

local function config_of(model, base)
    local c = require("te.lora").config(model)
    return { peft_type = "LORA", task_type = is_decoder(model) and "CAUSAL_LM" or json.null,
        base_model_name_or_path = base or json.null, r = c.rank, lora_alpha = c.alpha,
        lora_dropout = json.real(c.dropout), use_rslora = c.rslora, use_dora = false, bias = "none",
        target_modules = target_modules(model), modules_to_save = json.null, rank_pattern = {}, alpha_pattern = {},
        fan_in_fan_out = is_decoder(model) and model.KIND == "gpt", -- a GPT-2's weights have inputs first there
        init_lora_weights = true, inference_mode = true }
end

-- Configuration and weights belong together: both are written beside what an earlier save left, and take its place when
-- they are whole.
local function write(name, tensors, config)
    local text, weights, new = name .. "/" .. CONFIG, name .. "/" .. WEIGHTS, ".new"
    local ok, problem = pcall(function()
        te.save(weights .. new, tensors, { format = "pt" })
        te._core.write_file(text .. new, config)
        os.remove(text) -- a folder that has it is whole
        for _, path in ipairs { weights, text } do
            local renamed, why = os.rename(path .. new, path)
            if not renamed then te._core.fail_io(("te.lora.save: %s"):format(why)) end
        end
    end)
    if ok then return end
    os.remove(weights .. new)
    os.remove(text .. new)
    error(problem, 0)
end

--- What te.lora.save does.
function folder.save(model, name, opts)
    local who, tensors = "te.lora.save", {}
    name = check_folder(who, name)
    opts = options.check(who, opts, SAVE)
    local config = json.encode(config_of(model, opts.base))
    if not pcall(te._core.json, config) then
        fail("%s: option base: expected text in UTF-8, got %s", who, options.shown(opts.base))
    end
    each_part(model, function(layer, adapter, i, part)
        tensors[PREFIX .. layer .. SUFFIX.A] = adapter.A[i]:detach()
        tensors[PREFIX .. layer .. SUFFIX.B] = adapter.B:detach():narrow(1, part.first, part.count):clone()
    end)
    te._core.mkdir(name)
    write(name, tensors, config)
end

-- Reading -----------------------------------------------------------------------------------------------------------

local WHO = "te.lora.load"

-- Fields that are read, and those that say nothing about what adapters compute: which layers there are, the names of
-- the tensors say. Any other one has to be empty.
local TAKEN = {}
for name in ("peft_type r lora_alpha lora_dropout use_rslora bias init_lora_weights target_modules exclude_modules "
    .. "layers_to_transform layers_pattern fan_in_fan_out task_type inference_mode base_model_name_or_path revision "
    .. "peft_version auto_mapping megatron_core megatron_config qalora_group_size ensure_weight_tying loftq_config "
    .. "eva_config runtime_config"):gmatch "%S+" do TAKEN[name] = true end

-- Ways to begin that leave the model's own weights as they are. With others the adapters are for other weights.
local BEGINNINGS = { gaussian = true, orthogonal = true, eva = true }

local function is_empty(value) return not value or type(value) == "table" and next(value) == nil end

local function check_config(path, config)
    if config.peft_type ~= "LORA" then
        fail('%s: %s: peft_type: only "LORA" is supported, got %s', WHO, path, options.shown(config.peft_type))
    end
    for _, name in ipairs(options.names(config)) do
        local value, fits = config[name], TAKEN[name] or is_empty(config[name])
        if name == "bias" then fits = value == "none" end
        if name == "init_lora_weights" then fits = type(value) == "boolean" or BEGINNINGS[value] end
        if not fits then fail("%s: %s: %s is not supported, got %s", WHO, path, name, options.shown(value)) end
    end
end

local function read_config(path)
    local config = files.json(WHO, path)
    if type(config) ~= "table" then fail("%s: %s: expected an object", WHO, path) end
    check_config(path, config)
    local function get(name, declared) return options.argument(WHO .. ": " .. path, name, config[name], declared) end
    return { rank = get("r", { "size" }), alpha = get("lora_alpha", { "number" }),
        dropout = config.lora_dropout ~= nil and get("lora_dropout", { "number", min = 0, below = 1 }) or 0,
        rslora = config.use_rslora ~= nil and get("use_rslora", { "boolean" }) or false, targets = {} }
end

-- { name of the layer = { A =, B = } } of a file's tensors.
local function by_layer(path)
    local layers = {}
    for name, tensor in pairs((te.load(path))) do
        local layer, which = name:match "^base_model%.model%.(.+)%.lora_([AB])%.weight$"
        if not layer then fail("%s: %s: there is no place for %q", WHO, path, name) end
        layers[layer] = layers[layer] or {}
        layers[layer][which] = tensor
    end
    if not next(layers) then fail("%s: %s: there are no adapters", WHO, path) end
    return layers
end

-- Raises where a tensor of the file is missing or has another shape.
local function check_shape(path, layer, given, which, rows, columns)
    local t, name = given[which], PREFIX .. layer .. SUFFIX[which]
    if not t then fail("%s: %s: there is no %q", WHO, path, name) end
    if t:dim() ~= 2 or t:size(1) ~= rows or t:size(2) ~= columns then
        fail("%s: %s: %q has shape %s, the adapter of this model {%d,%d}", WHO, path, name, options.shape(t), rows,
            columns)
    end
end

--- What te.lora.load does.
function folder.load(model, name)
    name = check_folder(WHO, name)
    local opts, path = read_config(name .. "/" .. CONFIG), name .. "/" .. WEIGHTS
    local given, known = by_layer(path), {}
    for _, layer in ipairs(targets.layers(model)) do
        for _, part in ipairs(layer.parts) do known[part.name] = { layer = layer, part = part } end
    end
    for _, layer in ipairs(options.names(given)) do
        local place = known[layer]
        if not place then
            local near = options.nearest(layer, options.names(known))
            fail("%s: %s: this model has no layer %q%s", WHO, path, layer,
                near and (" (nearest: %s)"):format(near) or "")
        end
        if place.layer.refused then fail("%s: %s: %s: %s", WHO, path, place.layer.path, place.layer.refused) end
        check_shape(path, layer, given[layer], "A", opts.rank, place.layer.module.weight.shape[2])
        check_shape(path, layer, given[layer], "B", place.part.count, opts.rank)
        table.insert(opts.targets, layer)
    end
    attach.add(WHO, model, attach.check(WHO, opts), true)
    te.no_grad(each_part, model, function(layer, adapter, i, part)
        adapter.A[i]:copy_(given[layer].A)
        adapter.B:narrow(1, part.first, part.count):copy_(given[layer].B)
        given[layer].A:release()
        given[layer].B:release()
    end)
    return model
end

return folder
