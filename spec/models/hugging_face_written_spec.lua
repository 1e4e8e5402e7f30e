-- te.models.to_hugging_face: folders that te.models.from_hugging_face reads as the same model.

local te = require "te"
local shell = require "spec.support.shell"

local GEMMA = { activation = "GEGLU", post_norm = true, zero_centered_gamma = true, qk_norm = true, head_size = 24,
    embedding_scale = math.sqrt(32), attention_scale = 24 ^ -0.5, tie = true, window = 5, full_every = 2,
    window_rope_base = 1000, rope_base = 1e6, norm_eps = 1e-6, n_kv_head = 1, n_layer = 4 }
local GPT_OSS = { n_expert = 4, attention_bias = "all", mlp_bias = true, activation = "ClampedSwiGLU",
    attention_sinks = true, window = 6, full_every = 2, rope_scaling = "yarn", rope_factor = 4,
    rope_original_block_size = 16, head_size = 16, n_layer = 4 }

-- Options of te.models.llama, and the kind that they are.
local LLAMAS = {
    { "llama", {} },
    { "llama", { n_kv_head = 1, attention_bias = "all", mlp_bias = true, tie = true, dropout = 0.1, init_std = 0.1 } },
    { "llama", { rope_scaling = "linear", rope_factor = 2 } },
    { "llama", { rope_scaling = "llama3", rope_factor = 8, rope_original_block_size = 16, rope_base = 5e5 } },
    { "llama", { rope_scaling = "yarn", rope_factor = 4, rope_truncate = false, rope_attention_factor = 1.5 } },
    { "mistral", { window = 4 } },
    { "qwen2", { attention_bias = "qkv" } },
    { "qwen2", { attention_bias = "qkv", window = 5, full_every = 2 } },
    { "qwen3", { qk_norm = true, head_size = 24 } },
    { "qwen3", { qk_norm = true, head_size = 16, window = 4 } },
    { "gemma3_text", GEMMA },
    { "mixtral", { n_expert = 4, n_expert_active = 3, window = 7 } },
    { "qwen3_moe", { n_expert = 4, qk_norm = true, expert_aux_loss = 0.01 } },
    { "qwen3_moe", { n_expert = 4, qk_norm = true, expert_pre_softmax = true, window = 4 } },
    { "qwen2_moe", { n_expert = 4, attention_bias = "qkv", n_inner_shared = 24, expert_pre_softmax = true } },
    { "gpt_oss", GPT_OSS },
}

local function llama(opts)
    local config = { vocab_size = 300, n_layer = 3, n_head = 2, n_embd = 32, block_size = 64 }
    for name, value in pairs(opts) do config[name] = value end
    return te.models.llama(config)
end

local function gpt(opts)
    local config = { vocab_size = 300, n_layer = 2, n_head = 2, n_embd = 16, block_size = 32 }
    for name, value in pairs(opts) do config[name] = value end
    return te.models.gpt(config)
end

describe("te.models.to_hugging_face", function()
    local folder

    before_each(function()
        te.manual_seed(5)
        folder = os.tmpname()
        os.remove(folder)
    end)
    after_each(function() os.execute("rm -rf " .. folder) end)

    local function config() return te._core.json(shell.read(folder .. "/config.json")) end

    -- The model that is read, which is the one that was written.
    local function same(model, kind, opts)
        for _, p in ipairs(model:parameters()) do te.no_grad(p.add_, p, te.randn(p.shape) * 0.1) end
        assert.equal(kind, te.models.to_hugging_face(model, folder, opts))
        assert.equal(kind, config().model_type)
        local read, ends = te.models.from_hugging_face(folder)
        local ids = te.randint(0, 299, { 2, 20 }, { dtype = "int32" })
        assert.same(model:eval()(ids, nil, { logits = "all" }):totable(),
            read:eval()(ids, nil, { logits = "all" }):totable())
        return read, ends
    end

    for i, case in ipairs(LLAMAS) do
        it(("writes a %s, number %d"):format(case[1], i), function()
            local model = llama(case[2])
            local read = same(model, case[1])
            for name, value in pairs(model.config) do
                local trains = name == "dropout" or name == "init_std" or name == "expert_aux_loss"
                if not trains and read.config[name] ~= nil then
                    local equal = type(value) == "number" and math.abs(value - read.config[name]) < 1e-12 * value
                        or value == read.config[name]
                    assert.is_true(equal, name)
                end
            end
        end)
    end

    it("writes a GPT-2, with zeros for biases that a model does not have", function()
        local read = same(gpt { bias = true, gelu = "tanh", dropout = 0.2 }, "gpt2")
        assert.equal("tanh", read.config.gelu)
        read = same(gpt { bias = false }, "gpt2")
        assert.equal("none", read.config.gelu)
        assert.equal(0, read.blocks[1].mlp[2].bias:abs():max():item())
        assert.equal(0, read.norm.bias:abs():max():item())
        assert.same({ "GPT2LMHeadModel" }, config().architectures)
        assert.same({ vocab = 300, positions = 32, width = 16, eps = 1e-5 }, { vocab = config().vocab_size,
            positions = config().n_positions, width = config().n_embd, eps = config().layer_norm_epsilon })
    end)

    it("writes whole numbers as real ones where Transformers takes no others", function()
        te.models.to_hugging_face(llama { n_expert = 4, rope_scaling = "linear", rope_factor = 2 }, folder)
        local text = shell.read(folder .. "/config.json")
        for _, line in ipairs { '"router_aux_loss_coef": 0.0', '"rope_theta": 10000.0', '"factor": 2.0',
            '"num_hidden_layers": 3', '"eos_token_id": null', '"sliding_window": null', '"rms_norm_eps": 1e-05' } do
            assert.truthy(text:find(line, 1, true), line)
        end
    end)

    it("leaves nothing of the ends that another model in the folder had", function()
        te.models.to_hugging_face(llama {}, folder, { eos = { 7, 8 } })
        local _, ends = same(llama {}, "llama")
        assert.is_nil(ends)
        te._core.write_file(folder .. "/generation_config.json", '{"eos_token_id": [1, 2]}')
        _, ends = same(llama {}, "llama", { eos = 5 })
        assert.same({ 5 }, ends)
    end)

    it("takes a dtype, ends, and the tokenizer", function()
        local _, ends = same(llama {}, "llama", { tokenizer = te.tokenizer.byte(), eos = { 3, 5 } })
        assert.same({ 3, 5 }, ends)
        _, ends = same(llama {}, "llama", { eos = 7 })
        assert.same({ 7 }, ends)
        local bytes = {}
        for byte = 0, 255 do bytes[byte + 1] = string.char(byte) end
        local all = table.concat(bytes) .. "naïve\n"
        assert.equal(all, te.tokenizer.load(folder):decode(te.tokenizer.load(folder):encode(all)))
        assert.same(te.tokenizer.byte():encode(all), te.tokenizer.load(folder):encode(all))
        local model = llama {}
        te.models.to_hugging_face(model, folder .. "/", { dtype = "bfloat16" })
        assert.equal("bfloat16", config().torch_dtype)
        local weights = te.load(folder .. "/model.safetensors")
        assert.equal("bfloat16", weights["lm_head.weight"].dtype)
        assert.same(model.lm_head.weight:to("bfloat16"):totable(), weights["lm_head.weight"]:totable())
    end)

    it("writes weights that are stored quantized as the numbers that they stand for", function()
        local model = llama { quantized = "Float8BlockScaling" }
        te.models.to_hugging_face(model, folder)
        local read = te.models.from_hugging_face(folder)
        assert.same(model.blocks[2].mlp[2].weight:dequantize():totable(), read.blocks[2].mlp[2].weight:totable())
        local again = te.models.from_hugging_face(folder, { quantized = "Float8BlockScaling" })
        assert.is_true(te._core.is_quantized(again.blocks[2].mlp[2].weight))
        assert.equal("Float8BlockScaling", again.config.quantized)
    end)

    it("refuses what no model of Transformers is, and writes nothing", function()
        local function refuses(pattern, model, opts)
            assert.error_matches(function() te.models.to_hugging_face(model, folder, opts) end, pattern)
            assert.is_nil(te._core.stat(folder))
        end
        refuses("no model of Transformers that is known here has these options: as llama it would have window = "
            .. "nil, not 3", llama { window = 3, mlp_bias = true, attention_bias = "none" })
        refuses("as llama it would have embedding_scale = 1, not 2; window = nil, not 3",
            llama { embedding_scale = 2, window = 3, mlp_bias = true })
        refuses("as .* it would have embedding_scale = 1, not 2", llama { embedding_scale = 2 })
        refuses("expected one of te.models, got Linear", te.Linear(2, 2))
        refuses("option tokenizer: expected one of te.tokenizer, got \"byte\"", llama {}, { tokenizer = "byte" })
        refuses("option tokenizer: expected one of te.tokenizer, got a table", llama {},
            { tokenizer = { save = print, vocab_size = 2 } })
        refuses("option tokenizer: it has 256 tokens, the model 20", llama { vocab_size = 20 },
            { tokenizer = te.tokenizer.byte() })
        refuses("option tokenizer: byte 0xff, which is no UTF%-8, has no place in a tokenizer.json", llama {},
            { tokenizer = te.tokenizer.char "a\255" })
        refuses("option tokenizer: a zero byte has no place in a tokenizer.json", llama {},
            { tokenizer = te.tokenizer.char "a\0" })
        refuses("option eos%[1%]: expected integer from 0 to 299, got 300", llama {}, { eos = 300 })
        refuses("option dtype: expected one of", llama {}, { dtype = "int32" })
        assert.error_matches(function() te.models.to_hugging_face(llama {}, "") end, "folder: expected a name")
    end)

    it("writes what Transformers needs to see where nothing depends on it", function()
        local function fields(kind, options, left_out)
            local all = {}
            for name, value in pairs(options) do all[name] = not left_out[name] and value or nil end
            assert.equal(kind, te.models.to_hugging_face(llama(all), folder))
            return config()
        end
        local windows = { window = true, full_every = true, window_rope_base = true, attention_scale = true }
        assert.equal(128, fields("gpt_oss", GPT_OSS, windows).sliding_window)
        local gemma = fields("gemma3_text", GEMMA, windows)
        assert.equal(4096, gemma.sliding_window)
        assert.equal(24, gemma.query_pre_attn_scalar)
        local scaled = { attention_scale = 0.3 } -- 1 / 0.3^2 is not whole, as it has to be
        for name, value in pairs(GEMMA) do scaled[name] = scaled[name] or value end
        assert.error_matches(function() te.models.to_hugging_face(llama(scaled), folder) end,
            "as gemma3_text it would have attention_scale = 0.3015.*, not 0.3$")
    end)

    it("keeps a folder that is not whole from being loaded", function()
        te._core.mkdir(folder)
        te.models.to_hugging_face(llama {}, folder)
        local tokenizer = setmetatable({ vocab_size = 4, ends = function() return {} end,
            save = function() error "no room" end }, {})
        assert.error_matches(function() te.models.to_hugging_face(llama {}, folder, { tokenizer = tokenizer }) end,
            "no room")
        assert.error_matches(function() te.models.from_hugging_face(folder) end, "config.json: No such file")
    end)

    it("leaves a folder as it was where there is no room for the new weights", function()
        local function write(width)
            return shell.capture(([[(ulimit -f 64; trap '' XFSZ; '%s' -e 'te.models.to_hugging_face(te.models.gpt {
                vocab_size = 16, n_layer = 1, n_head = 2, n_embd = %d, block_size = 8 }, "%s")')]]):format(
                os.getenv("TETRAIN") or "build/tetrain", width, folder))
        end
        local output, status = write(8)
        assert.equal(0, status, output)
        local before = shell.read(folder .. "/model.safetensors")
        output, status = write(128)
        assert.is_true(status ~= 0)
        assert.truthy(output:find("cannot write: File too large", 1, true), output)
        assert.equal(before, shell.read(folder .. "/model.safetensors"))
        assert.equal(8, te.models.from_hugging_face(folder).config.n_embd)
        assert.equal("config.json generation_config.json model.safetensors",
            (shell.capture(("echo $(ls -A %s)"):format(folder)):gsub("%s+$", "")))
    end)

    it("writes tokenizers of characters, which are read again", function()
        local tokenizer = te.tokenizer.char "hällo wörld\n日"
        te._core.mkdir(folder)
        tokenizer:save(folder)
        local read = te.tokenizer.load(folder)
        assert.equal(tokenizer:describe(), read:describe())
        assert.same(tokenizer:encode "wörld日", read:encode "wörld日")
        assert.error_matches(function() te.tokenizer.char("a\255"):save(folder) end,
            "tokenizer:save: byte 0xff, which is no UTF%-8, has no place in a tokenizer.json")
    end)

    it("leaves nothing of another tokenizer beside one, and says that the file is all there is", function()
        local function there()
            local names = te._core.list_dir(folder)
            table.sort(names)
            return table.concat(names, " ")
        end
        local core, said = te._core, shell.read
        core.mkdir(folder)
        core.mkdir(folder .. "/chat")
        core.write_file(folder .. "/chat/tokenizer.json", said "spec/support/tokenizer.json")
        core.write_file(folder .. "/chat/special_tokens_map.json", "{}")
        core.write_file(folder .. "/chat/tokenizer_config.json", "{}")
        local chat, plain = te.tokenizer.load(folder .. "/chat"), te.tokenizer.load "spec/support/tokenizer.json"
        for _, other in ipairs { plain, te.tokenizer.byte(), te.tokenizer.char "ab" } do
            chat:save(folder)
            assert.equal("chat special_tokens_map.json tokenizer.json tokenizer_config.json", there())
            assert.equal("{}", said(folder .. "/tokenizer_config.json"))
            other:save(folder)
            assert.equal("chat tokenizer.json tokenizer_config.json", there())
            assert.equal("PreTrainedTokenizerFast",
                core.json(said(folder .. "/tokenizer_config.json")).tokenizer_class)
        end
        chat:save(folder .. "/chat") -- onto itself
        assert.equal("{}", said(folder .. "/chat/special_tokens_map.json"))
    end)

    -- A file of the characters b and a, in this order, with what else it says.
    local function characters_file(model, beside)
        te._core.mkdir(folder)
        te._core.write_file(folder .. "/tokenizer.json", ('{"model": {"type": "BPE", "vocab": {"b": 0, "a": 1}, '
            .. '"merges": []%s}%s}'):format(model or "", beside or ""))
        return folder
    end

    it("takes characters in any order, for data as well", function()
        local tokenizer = te.tokenizer.load(characters_file())
        assert.equal("char 98 97", tokenizer:describe())
        te._core.write_file(folder .. "/text.txt", ("ab"):rep(20))
        local set = te.data.open { path = folder .. "/text.txt", tokenizer = tokenizer, block = 4, val_fraction = 0 }
        local x = set:next_train(0)
        assert.truthy(("abababab"):find(tokenizer:decode(x)[1], 1, true))
        set:close()
    end)

    it("says of which text it is that it is no character", function()
        local of = te.tokenizer.of_characters
        assert.equal("char 98 233", of({ "b", "é" }):describe())
        assert.error_matches(function() of { "b", "éa" } end, 'texts%[2%]: expected one character, got "éa"')
        assert.error_matches(function() of { "" } end, 'texts%[1%]: expected one character, got ""')
        assert.error_matches(function() of { "a", 5 } end, "texts%[2%]: expected string, got 5")
        assert.error_matches(function() of(5) end, "te.tokenizer.of_characters: texts: expected")
    end)

    it("refuses what a file of characters says beside them", function()
        local function refuses(message, model, beside)
            local path = characters_file(model, beside)
            assert.error_matches(function() te.tokenizer.load(path) end, message, 1, true)
        end
        refuses("tokenizer.json: model.end_of_word_suffix:", ', "end_of_word_suffix": "</w>"')
        refuses("tokenizer.json: added_tokens:", nil, ', "added_tokens": 5')
        refuses("tokenizer.json: ", nil, ', "decoder": {"type": "ByteLevel"}')
    end)
end)
