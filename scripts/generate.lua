-- Continues a text with a model that train_gpt.lua trained.
--
--     tetrain generate.lua --out=out/gpt --prompt="local function " --tokens=500
--     tetrain generate.lua --checkpoint=out/gpt/checkpoint-00002000.safetensors --temperature=0
--     tetrain generate.lua --hugging-face=Qwen3-0.6B --prompt="Once upon a time" --recipe=block
--     tetrain generate.lua --out=out/gpt --prompt="local function " --lookup=8
--
-- With --lookup or --assistant, which save passes over the weights, stderr is told how many guesses stayed.

local te = require "te"
local train = te.train

local command_line = train.command_line {
    script = "generate.lua",
    about = "Continues a text with a model that train_gpt.lua trained.",
    { "out", "string", "out/gpt", help = "folder of the training run; its newest checkpoint is used" },
    { "checkpoint", "string", help = "a specific checkpoint instead" },
    { "hugging-face", "string", help = "folder of a Hugging Face Transformers model instead" },
    { "adapters", "string", help = "folder of adapters of the model, from PEFT or export.lua --adapters" },
    { "prompt", "string", "", help = "text to continue; without one, the start of a line" },
    { "tokens", "size", 300, help = "number of tokens to add" },
    { "samples", "size", 1, help = "number of continuations" },
    { "temperature", "number", 0.8, min = 0, max = 100, help = "0: always the most likely token" },
    { "top-k", "integer", 40, min = 0, help = "sample from this many most likely tokens; 0: all" },
    { "top-p", "number", 1, min = 0, max = 1, help = "sample from the most likely tokens with this total probability" },
    { "min-p", "number", 0, min = 0, max = 1,
        help = "sample from tokens of at least this share of the most likely token's probability" },
    { "repetition-penalty", "number", 1, min = 0, max = 100,
        help = "above 1: makes tokens that the text has less likely" },
    { "lookup", "integer", 0, min = 0,
        help = "guess up to this many tokens as the text had them before, and check them at once; 0: none" },
    { "assistant", "string", help = "folder of a smaller model with the same tokens that guesses, as --hugging-face or "
        .. "--out names one" },
    { "assistant-tokens", "size", help = "the most tokens that it guesses at a time; default: 5" },
    { "ignore-eos", "boolean", false, help = "do not stop at a token that ends a text" },
    { "recipe", "string", "none", choices = train.recipe_choices,
        help = "store weights in its format, in less memory, and quantize products as it says" },
    { "dtype", "string", choices = { "float32", "bfloat16" },
        help = "of the computation; default: float32, or bfloat16 with a recipe" },
    { "seed", "integer", 1, min = 0, help = "of the sampling; tetrain's own --seed has no effect" },
    { "threads", "integer", 0, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
}

-- A model with the adapters that it is to have.
local function adapt(o, model)
    if o.adapters then train.io(te.lora.load, model, o.adapters) end
    train.saved.merge(model)
end

-- Refuses a model that sees the tokens behind one as well.
local function refuse_encoder(from, model)
    if model.is_encoder then
        command_line:refuse("%s: the model is an encoder, a %s, which continues no text", from, model.KIND)
    end
end

-- The model, its tokenizer, whether it is, or was made of, one of Transformers, and the tokens that end a text where a
-- folder says it.
local function load(o)
    if o.hugging_face then
        if o.checkpoint then command_line:refuse "--checkpoint and --hugging-face: one of them" end
        local model, ends = train.io(te.models.from_hugging_face, o.hugging_face, { dtype = o.dtype })
        train.saved.check(o.hugging_face, model)
        refuse_encoder("--hugging-face=" .. o.hugging_face, model)
        adapt(o, model)
        return model, train.io(te.tokenizer.load, o.hugging_face), true, ends
    end
    local model, tokenizer, path, base = train.saved.load(o.out, o.checkpoint)
    refuse_encoder(path, model)
    adapt(o, model)
    if not tokenizer then
        train.fail(train.exit.usage, path .. ": the model was trained on ids; there is no tokenizer for a prompt")
    end
    return model, tokenizer, base ~= nil
end

-- The model whose guesses are checked; nil for none.
local function load_assistant(o, model)
    if o.assistant_tokens and not o.assistant then command_line:refuse "--assistant-tokens: there is no --assistant" end
    if not o.assistant then return nil end
    if o.lookup > 0 then command_line:refuse "--lookup and --assistant: one of them" end
    local file, assistant = io.open(o.assistant .. "/config.json"), nil
    if file then
        file:close()
        assistant = train.io(te.models.from_hugging_face, o.assistant, { dtype = o.dtype })
    else
        assistant = train.saved.load(o.assistant)
        train.saved.merge(assistant)
    end
    refuse_encoder("--assistant=" .. o.assistant, assistant)
    local here, there = model.config.vocab_size, assistant.config.vocab_size
    if here ~= there then
        train.fail(train.exit.io, ("%s: the assistant has %d tokens, the model %d"):format(o.assistant, there, here))
    end
    return assistant
end

-- The ids to continue: what a text begins with, and the prompt.
local function prompt_of(o, model, tokenizer, pretrained)
    local ok, prompt = pcall(tokenizer.encode, tokenizer, o.prompt, { prompt = pretrained })
    if not ok then command_line:refuse("--prompt: %s", train.plain(prompt)) end
    if #prompt == 0 then prompt = { tokenizer:start() } end
    for _, id in ipairs(prompt) do
        if id >= model.config.vocab_size then
            train.fail(train.exit.io, ("the tokenizer's token %d, of the prompt, is none of the model's %d"):format(id,
                model.config.vocab_size))
        end
    end
    return prompt
end

-- A list of the ids that end a text, and a set: what the folder says, else those that have a name in use for that.
local function ends_of(o, model, tokenizer, said)
    local ends, is_end = {}, {}
    for _, id in ipairs(o.ignore_eos and {} or said or tokenizer:ends()) do
        if id < model.config.vocab_size then ends[#ends + 1], is_end[id] = id, true end -- tokenizers may know more
    end
    return ends, is_end
end

local function main(words)
    local o = command_line:parse(words)
    local recipe = train.recipe(o.recipe)
    o.dtype = o.dtype or (recipe and "bfloat16" or "float32")
    if o.threads > 0 then te.set_num_threads(o.threads) end
    te.manual_seed(o.seed)
    local model, tokenizer, pretrained, said = te.no_grad(te.quantized_model_init,
        { recipe = recipe, enabled = recipe ~= nil }, load, o)
    local assistant = te.no_grad(te.quantized_model_init, { recipe = recipe, enabled = recipe ~= nil },
        load_assistant, o, model)
    local prompt, passes, guessed, stayed = prompt_of(o, model, tokenizer, pretrained), 0, 0, 0
    for _, name in ipairs { "top-p", "repetition-penalty" } do
        if o[name:gsub("-", "_")] == 0 then command_line:refuse("--%s: expected a number above 0, got 0", name) end
    end
    local ends, is_end = ends_of(o, model, tokenizer, said)

    for i = 1, o.samples do
        if i > 1 then io.stdout:write("\n----\n") end
        io.stdout:write(o.prompt)
        te.autocast({ dtype = o.dtype, recipe = recipe, enabled = o.dtype ~= "float32" or recipe ~= nil }, function()
            local made, problem = train.sample(model, te.tensor({ prompt }, { dtype = "int32" }), o.tokens, {
                temperature = o.temperature, top_k = o.top_k > 0 and o.top_k or nil, top_p = o.top_p,
                min_p = o.min_p, repetition_penalty = o.repetition_penalty,
                eos = ends[1] and ends, lookup = o.lookup > 0 and o.lookup or nil,
                assistant = assistant, assistant_tokens = o.assistant_tokens,
                on_guesses = function(n, kept) passes, guessed, stayed = passes + 1, guessed + n, stayed + kept end,
                on_token = function(token)
                    local id = token:item()
                    local text = not is_end[id] and id < tokenizer.vocab_size -- models may have more
                    if text then io.stdout:write(tokenizer:decode({ id }, { continues = true })) end
                    io.stdout:flush()
                    return not te._core.interrupt_flag()
                end,
            })
            if not made then train.fail(train.exit.script, ("%s: %s"):format(command_line.script, problem)) end
        end)
        if te._core.interrupt_flag() then return train.exit.interrupted end
    end
    io.stdout:write("\n")
    if assistant or o.lookup > 0 then
        io.stdout:flush()
        io.stderr:write(("%d of %d guesses stayed, in %d passes\n"):format(stayed, guessed, passes))
    end
end

train.run(main, arg)
