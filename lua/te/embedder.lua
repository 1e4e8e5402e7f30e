--- te.models.embedder: rows of numbers that stand for texts, from a folder with an encoder of Hugging Face's
--- Transformers and, where it comes with them, the files of sentence-transformers.
--
--     local embedder = te.models.embedder "all-MiniLM-L6-v2"
--     local rows = embedder:encode { "A man is eating.", "Someone has a meal." }     -- {2, width}, float32
--     print(te.matmul(rows, rows:transpose()))                                       -- cosines, of normalized rows
--
-- Texts go through the model packed, one behind the other, so that those of different lengths need no padding.
--
--     modules.json                     what follows the model; without it the mean of all tokens' states is taken
--     1_Pooling/config.json            the first token's state, or the mean of all
--     sentence_bert_config.json        max_seq_length: longer texts are cut; or model_max_length of
--                                      tokenizer_config.json
--     config_sentence_transformers.json  what is put in front of a text

local te = require "te"
local fail = require "te.fail"
local files = require "te.files"
local options = require "te.options"

local WHO = "te.models.embedder"

local Embedder = {}
Embedder.__index = Embedder

-- What a file of the folder says, an empty table where there is none.
local function read(folder, name)
    local path = folder .. "/" .. name
    if not te._core.stat(path) then return {}, path end
    local said = files.json(WHO, path)
    if type(said) ~= "table" then fail("%s: %s: expected an object", WHO, path) end
    return said, path
end

local MODES = { pooling_mode_cls_token = "first", pooling_mode_mean_tokens = "mean" }
local NAMES = { cls = "first", mean = "mean" }

-- "first" or "mean".
local function read_pooling(folder)
    local said, path = read(folder, "config.json")
    if said.include_prompt == false then
        fail("%s: %s: include_prompt: only true is supported, got false", WHO, path)
    end
    if said.pooling_mode ~= nil then
        return NAMES[said.pooling_mode] or fail('%s: %s: pooling_mode: only "cls" or "mean" is supported, got %s', WHO,
            path, options.shown(said.pooling_mode))
    end
    local found
    for _, name in ipairs(options.names(said)) do
        if name:find "^pooling_mode_" and said[name] == true then
            if found or not MODES[name] then
                fail("%s: %s: %s: only the first token's state or the mean of all is supported", WHO, path, name)
            end
            found = MODES[name]
        end
    end
    return found or fail("%s: %s: says no pooling_mode", WHO, path)
end

-- Where the model is, how its states are pooled, and whether rows are normalized.
local function read_modules(folder)
    local list, path = read(folder, "modules.json")
    local place, pooling, normalize = folder, "mean", false
    for i, module in ipairs(list) do
        local kind = type(module) == "table" and type(module.type) == "string" and module.type:match "[%w_]+$"
        local inner = type(module) == "table" and module.path
        if type(inner) ~= "string" then fail("%s: %s: [%d].path: expected a text", WHO, path, i - 1) end
        inner = inner == "" and folder or folder .. "/" .. inner
        if kind == "Transformer" and i == 1 then
            place = inner
        elseif kind == "Pooling" and i == 2 then
            pooling = read_pooling(inner)
        elseif kind == "Normalize" and i == 3 then
            normalize = true
        else
            fail("%s: %s: [%d].type: %s is not supported there; known are Transformer, Pooling and Normalize, in that "
                .. "order", WHO, path, i - 1, options.shown(type(module) == "table" and module.type or module))
        end
    end
    return place, pooling, normalize
end

-- What a folder puts in front of a text, where nothing else is asked for.
local function read_prompt(folder)
    local said, path = read(folder, "config_sentence_transformers.json")
    local name = said.default_prompt_name
    if name == nil then return "" end
    local prompt = type(said.prompts) == "table" and said.prompts[name]
    if type(prompt) ~= "string" then fail("%s: %s: prompts: there is no %s", WHO, path, options.shown(name)) end
    return prompt
end

local LIMITS = { "bert", "roberta", "distilbert", "xlm-roberta" } -- whose models older files are named after

-- How many tokens of a text are left, where a folder says it.
local function read_limit(folder)
    local said, path
    for _, name in ipairs(LIMITS) do
        said, path = read(folder, ("sentence_%s_config.json"):format(name))
        if next(said) then break end
    end
    if said.do_lower_case then fail("%s: %s: do_lower_case: only false is supported", WHO, path) end
    local limit, name = said.max_seq_length, "max_seq_length"
    if limit == nil then
        said, path = read(folder, "tokenizer_config.json")
        limit, name = said.model_max_length, "model_max_length" -- 1e30: there is none
    end
    if limit == nil then return nil end
    return options.argument(WHO .. ": " .. path, name, type(limit) == "number" and math.min(limit, 2 ^ 31) or limit,
        { "size" })
end

local LOAD = {
    dtype = { "string", "float32",
        choices = { "float32", "bfloat16", "float16", "float64" }, help = "dtype of the parameters" },
    pooling = { "string", choices = { "first", "mean", "model" },
        help = "in place of the folder's: first token, mean of all, or as the model pools for its own head" },
    normalize = { "boolean", help = "whether rows have length 1; default: as the folder says" },
    max_tokens = { "size", help = "longer texts are cut to so many tokens; default: as the folder says" },
    quantized = { "string", choices = te.models.llama.CONFIG.quantized.choices, help = "as in te.models.bert" },
}

local embedder = { OPTIONS = LOAD }

--- Makes one of a folder.
---@param folder string
---@param opts table|nil  dtype, pooling, normalize, max_tokens, quantized
---@return table embedder
function embedder.load(folder, opts)
    files.need(WHO)
    options.argument(WHO, "folder", folder, { "string" })
    opts = options.check(WHO, opts, LOAD)
    local place, pooling, normalize = read_modules(folder)
    local limit = read_limit(place)
    local model = te.models.from_hugging_face(place, { dtype = opts.dtype, quantized = opts.quantized })
    if not model.is_encoder then fail("%s: %s: the model is no encoder, it is a %s", WHO, place, model.KIND) end
    local most = opts.max_tokens or limit or model.config.block_size
    if opts.normalize ~= nil then normalize = opts.normalize end
    model:eval()
    return setmetatable({ model = model, tokenizer = te.tokenizer.load(place), pooling = opts.pooling or pooling,
        normalize = normalize, max_tokens = math.min(most, model.config.block_size), prompt = read_prompt(folder),
        width = model.config.n_embd }, Embedder)
end

-- The ids of a text with what stands around it, at most so many.
local function ids_of(self, text)
    local ids = self.tokenizer:encode(text, { special = true })
    local most, after = self.max_tokens, self.tokenizer.after or {}
    if #ids <= most then return ids end
    for i = #ids, most + 1, -1 do ids[i] = nil end
    for i = 1, math.min(#after, most) do ids[most - #after + i] = after[i] end
    return ids
end

local ENCODE = {
    batch_tokens = { "size", 8192, help = "texts go through the model together up to so many tokens" },
    prompt = { "string", help = "what is put in front of every text; default: as the folder says" },
}

-- Rows of the texts whose tokens are packed.
local function run(self, tokens, lengths)
    local ids = te.tensor(tokens, { dtype = "int32", device = self.model:head().device })
    local rows = self.model:pooled(ids, { seq_lens = lengths, pooling = self.pooling })
    if rows.dtype ~= "float64" then rows = rows:to "float32" end
    if not self.normalize then return rows end
    return rows / te.clamp(te.norm(rows, -1, true), 1e-12)
end

-- Without spaces around, as sentence-transformers has texts: BPE sees those.
local function stripped(text)
    local first = text:find "%S"
    return first and text:match("^.*%S", first) or ""
end

local function encode(self, texts, opts)
    local parts, tokens, lengths = {}, {}, {}
    local prompt = opts.prompt or self.prompt
    local function flush()
        if #lengths > 0 then parts[#parts + 1] = run(self, tokens, lengths) end
        tokens, lengths = {}, {}
    end
    for _, text in ipairs(texts) do
        local ids = ids_of(self, stripped(prompt .. text))
        if #ids == 0 then ids = { self.tokenizer:start() } end
        if #tokens > 0 and #tokens + #ids > opts.batch_tokens then flush() end
        for i = 1, #ids do tokens[#tokens + 1] = ids[i] end
        lengths[#lengths + 1] = #ids
    end
    flush()
    return #parts == 1 and parts[1] or te.cat(parts, 1)
end

--- Rows {n, width} for a list of texts, float32 (float64 of such a model), without gradients. Under te.autocast the
--- model computes as that says.
---@param texts string[]
---@param opts table|nil  batch_tokens, prompt
---@return te.Tensor
function Embedder:encode(texts, opts)
    options.method("embedder:encode", self, Embedder)
    local who = "embedder:encode"
    options.argument(who, "texts", texts, { "table" })
    opts = options.check(who, opts, ENCODE)
    local n = options.list(who, "texts", texts)
    for i = 1, n do options.argument(who, ("texts[%d]"):format(i), texts[i], { "string" }) end
    if n == 0 then return te.zeros({ 0, self.width }, { device = self.model:head().device }) end
    return te.no_grad(encode, self, texts, opts)
end
options.declare(Embedder.encode, ENCODE)

embedder.Embedder = Embedder

return embedder
