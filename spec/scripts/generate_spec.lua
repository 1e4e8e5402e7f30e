-- generate.lua with a model of Hugging Face's Transformers and the tokenizer beside it.

local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

local function generate(options)
    return shell.capture(("%s scripts/generate.lua %s"):format(TETRAIN, options))
end

local CONFIG = [[{"model_type": "gpt2", "vocab_size": 639, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2,
    "activation_function": "gelu_new"}]]

describe("generate.lua --hugging-face", function()
    local folder

    before_each(function()
        te.manual_seed(2)
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
        for name, text in pairs {
            ["config.json"] = CONFIG, ["tokenizer.json"] = shell.read "spec/support/tokenizer.json",
        } do
            local file = assert(io.open(folder .. "/" .. name, "w"))
            file:write(text)
            file:close()
        end
        local weights = {}
        for name, shape in pairs {
            ["wte.weight"] = { 639, 8 }, ["wpe.weight"] = { 16, 8 }, ["ln_f.weight"] = { 8 }, ["ln_f.bias"] = { 8 },
            ["h.0.ln_1.weight"] = { 8 }, ["h.0.ln_1.bias"] = { 8 }, ["h.0.ln_2.weight"] = { 8 },
            ["h.0.ln_2.bias"] = { 8 }, ["h.0.attn.c_attn.weight"] = { 8, 24 }, ["h.0.attn.c_attn.bias"] = { 24 },
            ["h.0.attn.c_proj.weight"] = { 8, 8 }, ["h.0.attn.c_proj.bias"] = { 8 },
            ["h.0.mlp.c_fc.weight"] = { 8, 32 }, ["h.0.mlp.c_fc.bias"] = { 32 },
            ["h.0.mlp.c_proj.weight"] = { 32, 8 }, ["h.0.mlp.c_proj.bias"] = { 8 },
        } do
            weights[name] = te.randn(shape)
        end
        te.save(folder .. "/model.safetensors", weights)
    end)
    after_each(function()
        for _, name in ipairs(te._core.list_dir(folder)) do os.remove(folder .. "/" .. name) end
        os.remove(folder)
    end)

    it("continues a prompt as the model does", function()
        local output, status = generate(("--hugging-face=%s --prompt=Fusion --tokens=6 --temperature=0"):format(folder))
        assert.equal(0, status, output)
        local model, tokenizer = te.models.from_hugging_face(folder), te.tokenizer.load(folder)
        local start = te.tensor({ tokenizer:encode "Fusion" }, { dtype = "int32" })
        local ids = model:generate(start, 6, { temperature = 0 }):view({ -1 }):to("cpu"):totable()
        assert.equal(tokenizer:decode(ids) .. "\n", output)
    end)

    it("begins with the token that the tokenizer puts before a text, and stops at the configuration's ends", function()
        local text = shell.read "spec/support/tokenizer.json"
        local template = [["post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "B", "type_id": 0}}],
            "pair": [], "special_tokens": {"A": {"id": "A", "ids": [5], "tokens": ["A"]},
                "B": {"id": "B", "ids": [6], "tokens": ["B"]}}}]]
        text = text:gsub('"post_processor":%s*%b{}', function() return template end)
        assert.truthy(text:find("TemplateProcessing", 1, true))
        local function write(name, content)
            local file = assert(io.open(folder .. "/" .. name, "w"))
            file:write(content)
            file:close()
        end
        write("tokenizer.json", text)
        local model, ends = te.models.from_hugging_face(folder)
        local tokenizer = te.tokenizer.load(folder)
        assert.is_nil(ends)
        local prompt = tokenizer:encode("Fusion", { prompt = true })
        assert.equal(5, prompt[1])
        assert.same(prompt, tokenizer:encode(tokenizer:decode { 5 } .. "Fusion", { prompt = true }))
        assert.equal(#tokenizer:encode "Fusion" + 1, #prompt)
        local ids = model:generate(te.tensor({ prompt }, { dtype = "int32" }), 6, { temperature = 0 })
            :view({ -1 }):to("cpu"):totable()
        local made = { unpack(ids, #prompt + 1) }
        local options = ("--hugging-face=%s --prompt=Fusion --tokens=6 --temperature=0"):format(folder)
        local output, status = generate(options)
        assert.equal(0, status, output)
        assert.equal("Fusion" .. tokenizer:decode(made, { continues = true }) .. "\n", output)

        write("generation_config.json", ('{"eos_token_id": [%d, 100000]}'):format(made[3]))
        assert.same({ made[3] }, (select(2, te.models.from_hugging_face(folder))))
        local first = 1
        while made[first] ~= made[3] do first = first + 1 end
        output = generate(options)
        assert.equal("Fusion" .. tokenizer:decode({ unpack(made, 1, first - 1) }, { continues = true }) .. "\n", output)
        assert.equal(generate(options .. " --ignore-eos"),
            "Fusion" .. tokenizer:decode(made, { continues = true }) .. "\n")
        write("generation_config.json", '{"eos_token_id": "x"}')
        output, status = generate(options)
        assert.equal(74, status)
        assert.matches('generation_config.json: eos_token_id: expected ids, got "x"', output, 1, true)
    end)

    it("stores weights in a recipe's format, and computes as it says", function()
        local recipe = te.recipe.MXFP8BlockScaling {}
        local options = ("--hugging-face=%s --prompt=Fusion --tokens=6 --temperature=0 --recipe="):format(folder)
        local tokenizer = te.tokenizer.load(folder)
        local start = te.tensor({ tokenizer:encode "Fusion" }, { dtype = "int32" })
        for words, dtype in pairs { mxfp8 = "bfloat16", ["mxfp8 --dtype=float32"] = "float32" } do
            local output, status = generate(options .. words)
            assert.equal(0, status, output)
            local model = te.no_grad(te.quantized_model_init, { recipe = recipe }, te.models.from_hugging_face, folder,
                { dtype = dtype })
            assert.is_truthy(te._core.quantized_parts(model.blocks[1]:parameters()[3]))
            local ids = te.autocast({ dtype = dtype, recipe = recipe }, function()
                return model:generate(start, 6, { temperature = 0 }):view({ -1 }):totable()
            end)
            assert.equal(tokenizer:decode(ids) .. "\n", output)
        end
        local output, status = generate(("--hugging-face=%s --recipe=fp8"):format(folder))
        assert.equal(2, status)
        assert.is_truthy(output:find("--recipe: expected one of none, delayed", 1, true), output)
    end)

    it("goes without ends that the tokenizer knows and the model does not", function()
        local options = ("--hugging-face=%s --prompt=Fusion --tokens=6 --temperature=0"):format(folder)
        local before = generate(options)
        local file, token = assert(io.open(folder .. "/tokenizer.json", "w")), [["added_tokens": [
            {"id": 639, "content": "<|im_end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}, ]]
        local text, n = shell.read("spec/support/tokenizer.json"):gsub([["added_tokens":%s*%[]], token, 1)
        file:write(text)
        file:close()
        assert.equal(1, n)
        assert.same({ 639 }, { te.tokenizer.load(folder):id "<|im_end|>" })
        local output, status = generate(options)
        assert.equal(0, status, output)
        assert.equal(before, output)
    end)

    it("writes nothing for tokens that the model has and the tokenizer does not", function()
        local weights = te.load(folder .. "/model.safetensors")
        local table_of = weights["wte.weight"]
        local model, tokenizer = te.models.from_hugging_face(folder), te.tokenizer.load(folder)
        local start = tokenizer:encode "Fusion"
        local likeliest = model:generate({ start }, 1, { temperature = 0 }):totable()[1]
        -- the row of the token chosen first, twice as long, behind those of the tokenizer
        weights["wte.weight"] = te.cat({ table_of, table_of:narrow(1, likeliest[#likeliest] + 1, 1) * 2 }, 1)
        te.save(folder .. "/model.safetensors", weights)
        local file = assert(io.open(folder .. "/config.json", "w"))
        file:write((CONFIG:gsub("639", "640")))
        file:close()
        local ids = te.models.from_hugging_face(folder):generate({ start }, 4, { temperature = 0 }):totable()[1]
        assert.equal(639, ids[#start + 1])
        local known = {}
        for _, id in ipairs(ids) do known[#known + 1] = id < 639 and id or nil end
        local output, status = generate(("--hugging-face=%s --prompt=Fusion --tokens=4 --temperature=0"):format(folder))
        assert.equal(0, status, output)
        assert.equal(tokenizer:decode(known) .. "\n", output)
    end)

    it("stops at the end of a text, unless it is not to", function()
        local model, tokenizer = te.models.from_hugging_face(folder), te.tokenizer.load(folder)
        local start, stop = tokenizer:encode "Fusion", tokenizer:id "<|endoftext|>"
        -- a head whose row of the end is twice that of the token chosen third
        local tokens = model:generate({ start }, 3, { temperature = 0 }):totable()[1]
        local weights = te.load(folder .. "/model.safetensors")
        weights["wte.weight"][stop + 1]:copy_(weights["wte.weight"][tokens[#tokens] + 1] * 2)
        te.save(folder .. "/model.safetensors", weights)
        model = te.models.from_hugging_face(folder)
        local whole = model:generate({ start }, 12, { temperature = 0 }):totable()[1]
        local upto = {}
        for i, id in ipairs(whole) do
            if i > #start and id == stop then break end
            upto[i] = id
        end
        assert.is_true(#upto < #whole)
        local options = ("--hugging-face=%s --prompt=Fusion --tokens=12 --temperature=0"):format(folder)
        assert.equal(tokenizer:decode(upto) .. "\n", (generate(options)))
        assert.equal(tokenizer:decode(whole) .. "\n", (generate(options .. " --ignore-eos")))
    end)

    it("gives the same likeliest tokens with guesses, and says how many stayed", function()
        local options = ("--hugging-face=%s --prompt='Fusion Fusion' --tokens=9 --temperature=0"):format(folder)
        local plain = generate(options)
        for _, more in ipairs { "--lookup=4", "--assistant=" .. folder .. " --assistant-tokens=3" } do
            local output, status = generate(options .. " " .. more)
            assert.equal(0, status)
            local said = output:sub(#plain + 1)
            assert.equal(plain, output:sub(1, #plain))
            local stayed, guessed = said:match "^(%d+) of (%d+) guesses stayed, in %d+ passes\n$"
            assert.is_true(tonumber(stayed) <= tonumber(guessed), said)
            if more:find "assistant" then assert.is_true(tonumber(stayed) >= 6) end
        end
        local output, status = generate(("%s --lookup=2 --assistant=%s"):format(options, folder))
        assert.equal(2, status)
        assert.matches("--lookup and --assistant: one of them", output, 1, true)
        output, status = generate(options .. " --assistant-tokens=2")
        assert.equal(2, status)
        assert.matches("--assistant-tokens: there is no --assistant", output, 1, true)
        output, status = generate(options .. " --assistant=/no/such")
        assert.equal(74, status)
        assert.matches("/no/such", output, 1, true)
    end)

    it("takes a training run as the assistant, of as many tokens", function()
        local path = folder .. "/checkpoint-00000001.safetensors"
        for _, size in ipairs { 639, 256 } do
            local model = te.models.gpt { vocab_size = size, block_size = 8, n_layer = 1, n_head = 2, n_embd = 8 }
            local tensors, metadata = {}, model:texts()
            for name, tensor in pairs(model:state_dict()) do tensors["model." .. name] = tensor end
            metadata.step, metadata.tokenizer = "1", "byte"
            te.save(path, tensors, metadata)
            local run = os.tmpname()
            os.remove(run)
            te._core.mkdir(run)
            os.rename(path, run .. "/checkpoint-00000001.safetensors")
            local options = ("--hugging-face=%s --prompt=Fusion --tokens=6 --temperature=0"):format(folder)
            local output, status = generate(("%s --assistant=%s"):format(options, run))
            if size == 639 then
                assert.equal(0, status, output)
                assert.equal(generate(options), (output:gsub("%d+ of %d+ guesses stayed, in %d+ passes\n", "")))
            else
                assert.equal(74, status)
                assert.matches(run .. ": the assistant has 256 tokens, the model 639", output, 1, true)
            end
            os.remove(run .. "/checkpoint-00000001.safetensors")
            os.remove(run)
        end
    end)

    it("takes no encoder as the assistant", function()
        local encoder = os.tmpname()
        os.remove(encoder)
        te.models.to_hugging_face(te.models.bert { vocab_size = 639, n_layer = 1, n_head = 1, n_embd = 4 }, encoder)
        local output, status = generate(("--hugging-face=%s --prompt=Fusion --assistant=%s"):format(folder, encoder))
        os.execute(("rm -r '%s'"):format(encoder))
        assert.equal(2, status)
        assert.matches("the model is an encoder, a bert, which continues no text", output, 1, true)
    end)

    it("draws from the likeliest of so much probability", function()
        local options = ("--hugging-face=%s --prompt=Fusion --tokens=8 --ignore-eos"):format(folder)
        local likeliest = generate(options .. " --temperature=0")
        assert.equal(likeliest, (generate(options .. " --temperature=5 --top-p=0.000001")))
        assert.not_equal(likeliest, (generate(options .. " --temperature=5 --top-p=1")))
        assert.equal(likeliest, (generate(options .. " --temperature=5 --min-p=1")))
        assert.not_equal(likeliest, (generate(options .. " --temperature=0 --repetition-penalty=20")))
        local output, status = generate(options .. " --top-p=0")
        assert.matches("--top-p: expected a number above 0, got 0", output, 1, true)
        assert.equal(2, status)
    end)

    it("says what is missing", function()
        os.remove(folder .. "/tokenizer.json")
        local output, status = generate("--hugging-face=" .. folder)
        assert.equal(folder .. "/tokenizer.json: No such file or directory\n", output)
        assert.equal(74, status)
        output, status = generate("--hugging-face=/no/such")
        assert.equal("/no/such/config.json: No such file or directory\n", output)
        assert.equal(74, status)
        output, status = generate(("--hugging-face=%s --checkpoint=x"):format(folder))
        assert.matches("--checkpoint and --hugging-face: one of them", output, 1, true)
        assert.equal(2, status)
    end)
end)

describe("generate.lua --checkpoint", function()
    it("names a checkpoint that says what cannot be", function()
        local path = os.tmpname()
        local model = te.models.gpt { vocab_size = 256, block_size = 8, n_layer = 1, n_head = 2, n_embd = 8 }
        local tensors = {}
        for name, tensor in pairs(model:state_dict()) do tensors["model." .. name] = tensor end
        local function damaged(name, value, message)
            local metadata = model:texts()
            metadata.step, metadata.tokenizer = "1", "byte"
            metadata[name] = value
            te.save(path, tensors, metadata)
            local output, status = generate("--tokens=1 --checkpoint=" .. path)
            assert.equal(("%s: %s\n"):format(path, message), output)
            assert.equal(74, status)
        end
        damaged("model.kind", "foo", 'model.kind: expected one of bert, gpt, llama, modernbert, got "foo"')
        damaged("model.kind", "from_checkpoint",
            'model.kind: expected one of bert, gpt, llama, modernbert, got "from_checkpoint"')
        damaged("model.n_layer", "-1", "option n_layer: expected positive integer, got -1")
        damaged("model.n_layer", "two", 'option n_layer: expected positive integer, got "two"')
        damaged("model.n_head", "7", "n_embd = 8 is no multiple of n_head = 7")
        damaged("model.n_embd", "16", "wte.weight of Embedding has shape {256,16}, the one given has {256,8}")
        damaged("tokenizer", "x", '"x" is no description of a tokenizer')
        damaged("step", "1e30", "not a training checkpoint (its metadata has no step)")
        damaged("step", "-1", "not a training checkpoint (its metadata has no step)")
        os.remove(path)
    end)
end)
