-- te.models.embedder and embed.lua, on a folder with an encoder and files of sentence-transformers.

local te = require "te"
local near = require "spec.support.near"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"
local WORDS = { "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "is", "eat", "##ing", "rain", "it", "." }

local function write(path, text) te._core.write_file(path, text) end

describe("embedding of texts", function()
    local folder, model

    before_each(function()
        folder = os.tmpname() .. ".embedder"
        te.manual_seed(4)
        model = te.models.bert { vocab_size = #WORDS, block_size = 16, n_layer = 2, n_head = 2, n_embd = 16,
            init_std = 0.3, head = "none", pooler = "tanh" }
        model:eval()
        te.models.to_hugging_face(model, folder)
        write(folder .. "/vocab.txt", table.concat(WORDS, "\n"))
        write(folder .. "/modules.json", [=[[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]]=])
        te._core.mkdir(folder .. "/1_Pooling")
        write(folder .. "/1_Pooling/config.json", '{"pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true}')
        write(folder .. "/sentence_bert_config.json", '{"max_seq_length": 8, "do_lower_case": false}')
    end)
    after_each(function() os.execute("rm -rf " .. folder) end)

    local TEXTS = { "A man is eating.", "it", "", "rain rain rain rain rain rain rain rain rain" }
    local IDS = { { 2, 5, 6, 7, 8, 9, 12, 3 }, { 2, 11, 3 }, { 2, 3 }, { 2, 10, 10, 10, 10, 10, 10, 3 } }

    -- Of each text by itself.
    local function expected(pool)
        local rows = {}
        for i, ids in ipairs(IDS) do
            rows[i] = pool(model:hidden_states(te.tensor({ ids }, { dtype = "int32" }))[1])
        end
        return te.no_grad(te.stack, rows)
    end

    local function mean(x) return te.mean(x, 1) end

    it("is the mean of all states, of length 1, where the folder says so", function()
        local embedder = te.models.embedder(folder)
        local rows = expected(mean)
        near(rows / te.norm(rows, -1, true), embedder:encode(TEXTS), 1e-6)
        near(rows / te.norm(rows, -1, true), embedder:encode(TEXTS, { batch_tokens = 9 }), 1e-6)
        assert.same({ 0, 16 }, embedder:encode({}).shape)
        assert.is_false(embedder:encode(TEXTS).requires_grad)
        near(expected(mean), te.models.embedder(folder, { normalize = false }):encode(TEXTS), 1e-6)
    end)

    it("is the first state, or a pooler's, where that is said", function()
        local function first(x) return x[1] end
        write(folder .. "/1_Pooling/config.json", '{"pooling_mode_cls_token": true}')
        near(expected(first), te.models.embedder(folder, { normalize = false }):encode(TEXTS), 1e-6)
        write(folder .. "/1_Pooling/config.json", '{"pooling_mode": "mean"}')
        near(expected(mean), te.models.embedder(folder, { normalize = false }):encode(TEXTS), 1e-6)
        local function pooled(x) return te.tanh(te.linear(x[1], model.pooler.weight, model.pooler.bias)) end
        near(expected(pooled), te.models.embedder(folder, { normalize = false, pooling = "model" }):encode(TEXTS), 1e-6)
    end)

    it("puts in front of texts what the folder or the caller says", function()
        write(folder .. "/config_sentence_transformers.json",
            '{"prompts": {"query": "a man: "}, "default_prompt_name": "query"}')
        local with = te.models.embedder(folder)
        assert.equal("a man: ", with.prompt)
        os.remove(folder .. "/config_sentence_transformers.json")
        local without = te.models.embedder(folder)
        assert.same(without:encode({ "a man: it" }):totable(), with:encode({ "it" }):totable())
        assert.same(without:encode({ "it" }):totable(), with:encode({ "it" }, { prompt = "" }):totable())
    end)

    it("cuts texts as the folder's files say, of whatever name", function()
        local limits = folder .. "/sentence_bert_config.json"
        for text, expected in pairs { ['{"max_seq_length": 5}'] = 5, ['{"max_seq_length": 512}'] = 16, ["{}"] = 16 } do
            write(limits, text)
            assert.equal(expected, te.models.embedder(folder).max_tokens)
        end
        for _, wrong in ipairs { '"x"', "0", "-1", "2.5" } do
            write(limits, ('{"max_seq_length": %s}'):format(wrong))
            assert.error_matches(function() te.models.embedder(folder) end,
                "sentence_bert_config.json: max_seq_length: expected positive integer, got " .. wrong, 1, true)
        end
        os.remove(limits)
        for text, expected in pairs { ['{"model_max_length": 7}'] = 7, ['{"model_max_length": 1e30}'] = 16 } do
            write(folder .. "/tokenizer_config.json", text)
            assert.equal(expected, te.models.embedder(folder).max_tokens)
        end
        write(folder .. "/sentence_roberta_config.json", '{"max_seq_length": 6}')
        assert.equal(6, te.models.embedder(folder).max_tokens)
    end)

    it("takes spaces around texts away", function()
        local embedder, seen = te.models.embedder(folder), {}
        local encode = embedder.tokenizer.encode
        function embedder.tokenizer:encode(text, opts)
            seen[#seen + 1] = text
            return encode(self, text, opts)
        end
        embedder:encode { " \n a man\t", "   ", "" }
        embedder:encode({ " it " }, { prompt = " a: " })
        assert.same({ "a man", "", "", "a:  it" }, seen)
    end)

    it("refuses what is not supported", function()
        local function refuses(text) assert.error_matches(function() te.models.embedder(folder) end, text, 1, true) end
        write(folder .. "/1_Pooling/config.json", '{"pooling_mode_mean_tokens": true, "include_prompt": false}')
        refuses "1_Pooling/config.json: include_prompt: only true is supported, got false"
        write(folder .. "/1_Pooling/config.json", '{"pooling_mode_max_tokens": true}')
        refuses "pooling_mode_max_tokens: only the first token's state or the mean of all is supported"
        write(folder .. "/1_Pooling/config.json", "{}")
        refuses "1_Pooling/config.json: says no pooling_mode"
        write(folder .. "/modules.json", '[{"idx": 0, "path": "", "type": "sentence_transformers.models.CLIPModel"}]')
        refuses '[0].type: "sentence_transformers.models.CLIPModel" is not supported there'
        os.remove(folder .. "/modules.json")
        te.models.to_hugging_face(te.models.gpt { vocab_size = 8, n_layer = 1, n_head = 1, n_embd = 8 }, folder)
        refuses "the model is no encoder, it is a gpt"
    end)

    it("is no work for scripts of decoders", function()
        local training = ("train_gpt.lua --data=README.md --out=%s/run"):format(folder)
        for _, script in ipairs { "generate.lua --prompt=it", training } do
            local text, code = shell.capture(("%s scripts/%s --hugging-face=%s"):format(TETRAIN, script, folder))
            assert.equal(2, code, text)
            assert.is_truthy(text:find("the model is an encoder, a bert", 1, true), text)
        end
    end)

    it("is no work for generate.lua as a checkpoint or an assistant", function()
        local function save(run, kind)
            local made = te.models[kind] { vocab_size = 256, block_size = 8, n_layer = 1, n_head = 1, n_embd = 8 }
            te._core.mkdir(run)
            te.train.checkpoint.save { folder = run, step = 1, model = made, metadata = { made:texts(),
                { tokenizer = "byte" } }, optimizer = te.optim.AdamW(made:parameter_groups(0), { lr = 1e-3 }) }
        end
        local encoder, decoder = folder .. "/encoder", folder .. "/decoder"
        save(encoder, "bert")
        save(decoder, "gpt")
        for _, words in ipairs { "--out=" .. encoder, ("--out=%s --assistant=%s"):format(decoder, encoder) } do
            local command = "%s scripts/generate.lua --prompt=it --tokens=2 %s"
            local text, code = shell.capture(command:format(TETRAIN, words))
            assert.equal(2, code, text)
            assert.is_truthy(text:find("the model is an encoder, a bert, which continues no text", 1, true), text)
        end
    end)

    local function embed(words)
        return shell.capture(("%s scripts/embed.lua --hugging-face=%s %s"):format(TETRAIN, folder, words))
    end

    it("prints texts by their likeness to a query, and writes rows", function()
        local text, code = embed '--query=it "a man" it rain --top=2'
        assert.equal(0, code)
        assert.equal("1.0000  it", text:match "^[^\n]*")
        assert.equal(2, select(2, text:gsub("\n", "")))
        write(folder .. "/lines.txt", "a man\r\nit\n")
        text, code = embed("--query=it --file=" .. folder)
        assert.equal(74, code)
        assert.equal(folder .. ": Is a directory\n", text)
        text, code = embed("it --top=2 --to=" .. folder .. "/rows.safetensors")
        assert.equal(2, code)
        assert.is_truthy(text:find("--top: it is of texts like --query, which is missing", 1, true), text)
        text, code = embed("--file=" .. folder .. "/lines.txt --to=" .. folder .. "/rows.safetensors")
        assert.equal(0, code)
        assert.equal(folder .. "/rows.safetensors: 2 rows of 16\n", text)
        near(te.models.embedder(folder):encode { "a man", "it" },
            te.load(folder .. "/rows.safetensors").embeddings, 1e-6)
        assert.equal(2, select(2, embed "it"))
        assert.equal(2, select(2, embed "--query=it"))
        assert.equal(74, select(2, embed("--query=it --file=" .. folder .. "/none.txt")))
    end)
end)
