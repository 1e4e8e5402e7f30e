--- te.models.from_hugging_face and te.models.to_hugging_face: models in folders as Hugging Face's Transformers writes
--- them: config.json, and the weights as model.safetensors or as the files that model.safetensors.index.json lists.
--
--     local model = te.models.from_hugging_face("Qwen3-0.6B", { block_size = 4096, dtype = "bfloat16" })
--     te.models.to_hugging_face(model, "tuned", { dtype = "bfloat16", tokenizer = te.tokenizer.load "Qwen3-0.6B" })

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local json = require "te.json"
local options = require "te.options"
local initializers = require "te.initializers"
local configuration = require "te.hugging_face.config"
local characters = require "te.tokenizer.characters"

local WHO = "te.models.from_hugging_face"

-- The checkpoint's tensors: the path of the file of each, by name.
local function find_weights(folder)
    local stat, paths = te._core.stat, {}
    local single, index = folder .. "/model.safetensors", folder .. "/model.safetensors.index.json"
    if stat(single) then
        te.load(single, { names = function(name)
            paths[name] = single
            return false
        end })
        return paths
    end
    if not stat(index) then
        fail("%s: %s has neither model.safetensors nor model.safetensors.index.json", WHO, folder)
    end
    local map = files.json(WHO, index)
    map = type(map) == "table" and map.weight_map
    if type(map) ~= "table" then fail("%s: %s: weight_map is missing", WHO, index) end
    for name, part in pairs(map) do
        if type(part) ~= "string" or part:find("/", 1, true) then
            fail("%s: %s: %q: expected the name of a file beside it, got %s", WHO, index, tostring(name),
                options.shown(part))
        end
        paths[name] = folder .. "/" .. part
    end
    return paths
end

-- The tensors whose names are wanted.
local function read_weights(paths, wanted)
    local open, tensors = {}, {}
    for name, path in pairs(paths) do open[path] = open[path] or wanted(name) end
    for _, path in ipairs(options.names(open)) do
        for name, tensor in pairs(open[path] and te.load(path, { names = wanted }) or {}) do tensors[name] = tensor end
    end
    return tensors
end

-- Fills the model, a part of the checkpoint at a time, so that little of it is in memory beside the model.
local function fill(model, paths, fresh)
    if not model.load_hugging_face_parts then
        local tensors = read_weights(paths, function() return true end)
        model:load_hugging_face(tensors, fresh)
        for _, tensor in pairs(tensors) do tensor:release() end
        return te.empty_cache()
    end
    model:load_hugging_face_parts(paths, function(wanted, take)
        local tensors = read_weights(paths, wanted)
        take(tensors)
        for _, tensor in pairs(tensors) do tensor:release() end
    end)
    te.empty_cache()
end

local OPTIONS = {
    head = { "string", choices = te.models.bert.CONFIG.head.choices,
        help = "of an encoder, in place of the file's: new where its weights are not there" },
    n_label = { "size", help = "of a new head" },
    block_size = { "size", help = "in place of the longest sequence that the file allows" },
    dropout = { "number", 0, min = 0, below = 1, help = "as in te.models.llama" },
    expert_aux_loss = { "number", 0, min = 0, help = "as in te.models.llama, of a model with experts" },
    quantized = { "string", choices = te.models.llama.CONFIG.quantized.choices, help = "as in te.models.llama" },
    dtype = { "string", "float32", choices = { "float32", "bfloat16", "float16", "float64" },
        help = "dtype of the parameters" },
    tensor_parallel = { "any", help = "as in te.models.llama: this process's part of the model" },
    sequence_parallel = { "boolean", false, help = "as in te.models.llama" },
    pipeline_parallel = { "any", help = "as in te.models.llama: this process's stage of the model" },
}

-- The ids after which a text ends, of the configuration and of the one for generating, where a folder has that.
local function read_ends(config, folder, vocab_size)
    local ends, seen, more = {}, {}, folder .. "/generation_config.json"
    local said = { config }
    if te._core.stat(more) then said[2] = configuration.open(more) end
    for _, from in ipairs(said) do
        local ids = from.fields.eos_token_id
        for _, id in ipairs(type(ids) == "table" and ids or { ids or nil }) do
            if type(id) ~= "number" or id % 1 ~= 0 or id < 0 then
                from:fail("eos_token_id", "expected ids, got %s", options.shown(id))
            end
            if id < vocab_size and not seen[id] then ends[#ends + 1], seen[id] = id, true end
        end
    end
    return ends[1] and ends
end

-- Layers of an encoder that may be new.
local FRESH = { lm = true, lm_bias = true, pooler = true, classifier = true }

-- What decoders take alone, and encoders.
local function split_options(class, config, opts)
    if not class.is_encoder then
        for _, name in ipairs { "head", "n_label" } do
            if opts[name] then fail("%s: %s: %s is for encoders", WHO, name, tostring(opts[name])) end
        end
        config.tensor_parallel, config.sequence_parallel = opts.tensor_parallel, opts.sequence_parallel
        config.pipeline_parallel = opts.pipeline_parallel
        return
    end
    if opts.n_label and not opts.head then
        fail("%s: n_label: %d, without head it is what the file says", WHO, opts.n_label)
    elseif opts.n_label and opts.head ~= "sequence" and opts.head ~= "token" then
        fail("%s: n_label: %d has no effect with head = %s", WHO, opts.n_label, opts.head)
    end
    if opts.tensor_parallel or opts.sequence_parallel then
        fail("%s: tensor_parallel: te.models.%s is not split between processes", WHO, class.KIND)
    elseif opts.pipeline_parallel then
        fail("%s: pipeline_parallel: te.models.%s is not divided between processes", WHO, class.KIND)
    end
end

local hugging_face = {}

--- The model in a folder: te.models.bert for bert, roberta, xlm-roberta and distilbert, te.models.modernbert for
--- modernbert, te.models.gpt for gpt2, te.models.llama for gemma3_text, gpt_oss, llama, mistral, mixtral, qwen2,
--- qwen2_moe, qwen3 and qwen3_moe. Raises on what a configuration asks for and these models don't have.
---@param folder string
---@param opts table|nil   block_size, dropout, expert_aux_loss, quantized, dtype (of the parameters), head, n_label
---@return table model
---@return integer[]|nil ends  tokens that end a text (eos_token_id), for model:generate's eos; nil where none are said
function hugging_face.load(folder, opts)
    files.need(WHO)
    options.argument(WHO, "folder", folder, { "string" })
    opts = options.check(WHO, opts, OPTIONS)
    if folder == "" then fail("%s: folder: expected a name, got an empty one", WHO) end
    folder = #folder > 1 and folder:gsub("/+$", "") or folder
    local said = configuration.open(folder .. "/config.json")
    local paths = find_weights(folder)
    local class, config = configuration.model(said, opts, paths)
    config.dropout, config.quantized = opts.dropout, opts.quantized
    split_options(class, config, opts)
    if (class == te.models.gpt or class == te.models.bert) and (opts.block_size or 0) > config.block_size then
        fail("%s: block_size: %d, but %s/config.json has %d positions", WHO, opts.block_size, folder, config.block_size)
    end
    if opts.expert_aux_loss > 0 and not config.n_expert then
        fail("%s: expert_aux_loss: %g, but %s/config.json has no experts", WHO, opts.expert_aux_loss, folder)
    end
    config.expert_aux_loss = config.n_expert and opts.expert_aux_loss or nil
    config.block_size = opts.block_size or config.block_size
    local ends = read_ends(said, folder, config.vocab_size)
    if said.fields.tie_word_embeddings == false and not paths["lm_head.weight"] then
        said:fail("tie_word_embeddings", "is false, but the weights have no lm_head.weight")
    end
    local count = #options.names(paths)
    if config.n_layer > count then
        fail("%s: %s/config.json: %d layers, but the weights are %d tensors", WHO, folder, config.n_layer, count)
    end
    local model
    if opts.head then
        model = class(config)
        model:to(opts.dtype)
    else
        model = initializers.bare(opts.dtype, class, config)
    end
    fill(model, paths, opts.head and FRESH)
    return model, ends
end

hugging_face.OPTIONS = OPTIONS

local TO = "te.models.to_hugging_face"

local SAVE = {
    dtype = { "string", choices = OPTIONS.dtype.choices,
        help = "of the weights in the file; default: the model's own" },
    tokenizer = { "any", help = "one of te.tokenizer, written beside the model" },
    eos = { "any", help = "id or list of ids that end a text; default: the tokenizer's ends()" },
}

-- The weights as the file has them: those of another dtype in that one.
local function weights_of(model, dtype)
    local tensors = model:hugging_face_state()
    for name, tensor in pairs(tensors) do
        if dtype and tensor.dtype ~= dtype then
            tensors[name] = tensor:to(dtype)
            tensor:release()
        end
    end
    return tensors
end

local function is_tokenizer(value)
    return type(value) == "table" and type(value.save) == "function" and type(value.ends) == "function"
        and type(value.vocab_size) == "number"
end

local function check_saved(model, folder, opts)
    if not (type(model) == "table" and model.KIND and type(model.hugging_face_state) == "function") then
        fail("%s: model: expected one of te.models, got %s", TO, options.shown(model))
    end
    require("te.split_decoder").refuse(model, TO)
    require("te.distributed.stages").refuse(model, TO)
    options.argument(TO, "folder", folder, { "string" })
    if folder == "" then fail("%s: folder: expected a name, got an empty one", TO) end
    opts = options.check(TO, opts, SAVE)
    local tokenizer, size = opts.tokenizer, model.config.vocab_size
    if tokenizer ~= nil and not is_tokenizer(tokenizer) then
        fail("%s: option tokenizer: expected one of te.tokenizer, got %s", TO, options.shown(tokenizer))
    end
    if tokenizer and tokenizer.vocab_size > size then
        fail("%s: option tokenizer: it has %d tokens, the model %d", TO, tokenizer.vocab_size, size)
    end
    if tokenizer then characters.check(TO .. ": option tokenizer", tokenizer) end
    local ends = opts.eos or tokenizer and tokenizer:ends() or {}
    opts.eos = type(ends) == "table" and ends or { ends }
    for i = 1, options.list(TO, "option eos", opts.eos) do
        options.argument(TO, ("option eos[%d]"):format(i), opts.eos[i], { "integer", min = 0, max = size - 1 })
    end
    return opts
end

-- The ids around a text. Where a configuration is silent about them, Transformers has some of its own.
local function ids_around(opts)
    local ends, first = opts.eos, opts.tokenizer and opts.tokenizer.before
    return { eos_token_id = ends[2] and ends or ends[1] or json.null, bos_token_id = first and first[1] or json.null,
        pad_token_id = json.null }
end

-- What a configuration says beside the model.
local function fields_beside(model, opts)
    local fields = ids_around(opts)
    fields.torch_dtype = opts.dtype or model:head().dtype
    return fields
end

--- Writes a model into a folder, which is made where there is none: config.json, model.safetensors,
--- generation_config.json and, with a tokenizer, its files. Transformers and te.models.from_hugging_face load it.
--- Raises, and writes nothing, where no model of Transformers computes what this one does; dropout and initial weights
--- are the trainer's. A gpt without biases gets zeros. config.json comes last: a folder that has it is whole.
---@param model table
---@param folder string
---@param opts table|nil   dtype (of the weights in the file), tokenizer, eos
---@return string kind     its model_type: "gpt2", "llama", "qwen3" and so on
function hugging_face.save(model, folder, opts)
    files.need(TO)
    opts = check_saved(model, folder, opts)
    folder = #folder > 1 and folder:gsub("/+$", "") or folder
    local config, kind = require("te.hugging_face.written").config(model, fields_beside(model, opts))
    te._core.mkdir(folder)
    local tensors, weights = weights_of(model, opts.dtype), folder .. "/model.safetensors"
    te.save(weights .. ".new", tensors, { format = "pt" }) -- where that fails, what was there stays whole
    for _, tensor in pairs(tensors) do tensor:release() end
    os.remove(folder .. "/config.json")
    local renamed, why = os.rename(weights .. ".new", weights)
    if not renamed then te._core.fail_io(("%s: %s"):format(TO, why)) end
    if opts.tokenizer then opts.tokenizer:save(folder) end
    te._core.write_file(folder .. "/generation_config.json", json.encode(ids_around(opts)))
    te._core.write_file(folder .. "/config.json", config)
    return kind
end

hugging_face.SAVE = SAVE

return hugging_face
