-- train_gpt.lua with a tokenizer from a file and with a model of Hugging Face's Transformers; export.lua.

local te = require "te"
local shell = require "spec.support.shell"
local processes = require "spec.support.processes"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"
local TRAIN = "--data=ROOT/text.txt --batch=2 --eval-batches=1 --sample-tokens=8 --warmup=1 --min-lr=1e-3 "
local TOKENIZER = "spec/support/tokenizer.json" -- of 639 tokens

describe("train_gpt.lua", function()
    local root

    before_each(function()
        root = os.tmpname()
        os.remove(root)
        te._core.mkdir(root)
        local file = assert(io.open(root .. "/text.txt", "w"))
        file:write(("The fused kernel reads every row once, and writes it once.\n"):rep(60))
        file:close()
    end)
    after_each(function() os.execute("rm -rf " .. root) end)

    local function run(script, options)
        local output, status = shell.capture(("%s scripts/%s %s"):format(TETRAIN, script, options:gsub("ROOT", root)))
        return output, status
    end

    local function train(options)
        return run("train_gpt.lua", TRAIN .. options)
    end

    local function losses(folder)
        local found = {}
        for loss in shell.read(root .. folder .. "/metrics.jsonl"):gmatch '"loss":([^,}]+)' do
            found[#found + 1] = loss
        end
        return found
    end

    local function weights(folder, step)
        return te.load(("%s%s/checkpoint-%08d.safetensors"):format(root, folder, step))
    end

    local function assert_same(a, b)
        for name, tensor in pairs(a) do assert.same(tensor:totable(), b[name]:totable(), name) end
    end

    it("takes a tokenizer from a file, keeps it beside the checkpoints, and goes on exactly there", function()
        local small = "--n-layer=1 --n-head=2 --n-embd=16 --block=16 --eval-interval=2 "
        local output, status = train(small .. "--steps=4 --out=ROOT/a --tokenizer=" .. TOKENIZER)
        assert.equal(0, status, output)
        assert.equal(shell.read(TOKENIZER), shell.read(root .. "/a/tokenizer.json"))
        assert.same({ 639, 16 }, weights("/a", 4)["model.wte.weight"].shape)
        os.execute(("cp %s %s/tok.json"):format(TOKENIZER, root))
        output, status = train(small .. "--steps=2 --out=ROOT/b --tokenizer=ROOT/tok.json")
        assert.equal(0, status, output)
        os.execute(("rm %s/tok.json; mv %s/b %s/c"):format(root, root, root)) -- nothing else is needed
        output, status = run("train_gpt.lua", "--out=ROOT/c --resume --steps=4")
        assert.equal(0, status, output)
        assert.same(losses "/a", losses "/c")
        assert_same(weights("/a", 4), weights("/c", 4))
        output, status = run("generate.lua", "--out=ROOT/c --prompt='The fused' --tokens=3 --temperature=0")
        assert.equal(0, status, output)
        assert.truthy(output:find "^The fused")
    end)

    it("copies the tokenizer of a run that moves away, which the new one may read", function()
        local small = "--n-layer=1 --n-head=2 --n-embd=16 --block=16 --steps=1 --out=ROOT/a "
        local output, status = train(small .. "--tokenizer=" .. TOKENIZER)
        assert.equal(0, status, output)
        output, status = train(small .. "--tokenizer=ROOT/a")
        assert.equal(0, status, output)
        for _, folder in ipairs { "/a", "/a/previous" } do
            assert.equal(shell.read(TOKENIZER), shell.read(root .. folder .. "/tokenizer.json"))
            output, status = run("generate.lua", ("--out=ROOT%s --tokens=2"):format(folder))
            assert.equal(0, status, output)
        end
    end)

    -- A folder with a model of Transformers' and its tokenizer.
    local function make_folder(model)
        te.manual_seed(4)
        te.models.to_hugging_face(model, root .. "/hf", { tokenizer = te.tokenizer.load(TOKENIZER) })
    end

    local function qwen(kv_heads)
        return te.models.llama { vocab_size = 650, block_size = 40, n_layer = 2, n_head = 2, n_kv_head = kv_heads or 1,
            n_embd = 16, head_size = 16, qk_norm = true }
    end

    for _, how in ipairs { "", "--recipe=current --fp8-params ", "--dtype=bfloat16 --dropout=0.1 " } do
        it("starts with a model of Transformers, and goes on exactly where it stopped " .. how, function()
            make_folder(qwen())
            local options = "--hugging-face=ROOT/hf --block=16 --eval-interval=2 " .. how
            local output, status = train(options .. "--steps=4 --out=ROOT/a")
            assert.equal(0, status, output)
            output, status = train(options .. "--steps=2 --out=ROOT/b")
            assert.equal(0, status, output)
            os.execute(("rm -r %s/hf"):format(root))
            output, status = run("train_gpt.lua", "--out=ROOT/b --resume --steps=4")
            assert.equal(0, status, output)
            assert.same(losses "/a", losses "/b")
            assert_same(weights("/a", 4), weights("/b", 4))
        end)
    end

    for _, how in ipairs { "--lora-targets=q_proj,v_proj,down_proj", "--recipe=mxfp8 --fp8-params" } do
        it("trains adapters of it alone, and goes on exactly where it stopped " .. how, function()
            make_folder(qwen())
            local start = te.models.from_hugging_face(root .. "/hf"):state_dict()
            local options = "--hugging-face=ROOT/hf --block=16 --eval-interval=2 --lora-rank=2 --lora-dropout=0.1 "
                .. how
            local output, status = train(options .. " --steps=4 --out=ROOT/a")
            assert.equal(0, status, output)
            assert.truthy(output:find "%d+ parameters, %d+ of them trained,")
            output, status = train(options .. " --steps=2 --out=ROOT/b")
            assert.equal(0, status, output)
            os.execute(("mv %s/hf %s/moved"):format(root, root)) -- checkpoints have the frozen weights as well
            output, status = run("train_gpt.lua", "--out=ROOT/b --resume --steps=4")
            assert.equal(0, status, output)
            assert.same(losses "/a", losses "/b")
            local state = weights("/a", 4)
            assert_same(state, weights("/b", 4))
            for name, tensor in pairs(start) do
                local kept = state["model." .. name]
                if kept then assert.same(tensor:totable(), kept:totable(), name) end
            end
            for name in pairs(state) do
                assert.truthy(not name:find "^optimizer%." or name:find "%.lora%.", name)
            end
            output, status = run("train_gpt.lua", "--out=ROOT/b --resume --steps=5 --lora-alpha=3")
            assert.equal(2, status, output)
            assert.truthy(output:find("--lora-alpha=3, but the model in the checkpoint has 16", 1, true), output)
            output, status = run("train_gpt.lua", "--out=ROOT/b --resume --steps=5 --lora-targets=k_proj")
            assert.equal(2, status, output)
            assert.truthy(output:find("--lora-targets=k_proj, but the model in the checkpoint has ", 1, true), output)

            assert.equal(0, select(2, run("export.lua", "--out=ROOT/b --to=ROOT/whole")))
            output, status = run("export.lua", "--out=ROOT/b --to=ROOT/adapters --adapters")
            assert.equal(0, status, output)
            for options, there in pairs { ["--to=ROOT/adapters"] = "are adapters",
                ["--to=ROOT/whole --adapters"] = "is a model" } do
                output, status = run("export.lua", "--out=ROOT/b " .. options)
                assert.equal(2, status, output)
                assert.truthy(output:find("there " .. there .. " already; Transformers would add the", 1, true), output)
            end
            local model = te.lora.load(te.models.from_hugging_face(root .. "/moved"), root .. "/adapters")
            assert.equal(2, te.lora.config(model).rank)
            local whole = te.models.from_hugging_face(root .. "/whole")
            if not how:find "fp8" then
                te.lora.merge(model)
                assert.same(model.blocks[1].mlp[4].weight:totable(), whole.blocks[1].mlp[4].weight:totable())
            end
            local same = {}
            for _, from in ipairs { "--out=ROOT/b", "--hugging-face=ROOT/whole" } do
                same[#same + 1] = run("generate.lua", from .. " --prompt=once --tokens=5 --temperature=0")
            end
            assert.equal(same[1], same[2])
            local adapted = "--hugging-face=ROOT/moved --adapters=ROOT/adapters --prompt=once --tokens=5 "
                .. "--temperature=0"
            output, status = run("generate.lua", adapted .. " --recipe=mxfp8") -- not merged
            assert.equal(0, status, output)
            output, status = run("generate.lua", adapted)
            assert.equal(0, status, output)
            if not how:find "fp8" then assert.equal(same[2], output) end
            output, status = run("generate.lua", "--hugging-face=ROOT/moved --adapters=ROOT/whole")
            assert.equal(74, status, output)
            assert.truthy(output:find("whole/adapter_config.json", 1, true), output)
        end)
    end

    it("trains adapters in several processes as in one", function()
        if not processes.available() then pending "no mpirun" end
        make_folder(qwen())
        local options = "--hugging-face=ROOT/hf --block=16 --steps=3 --lora-rank=2 "
        local output, status = train(options .. "--out=ROOT/a")
        assert.equal(0, status, output)
        output, status = processes.run(2, ("'%s' scripts/train_gpt.lua %s --batch=1 --out=%s/b"):format(TETRAIN,
            (TRAIN .. options):gsub("ROOT", root), root))
        assert.equal(0, status, output)
        local one, both = losses "/a", losses "/b"
        for i = 1, 3 do assert.near(tonumber(one[i]), tonumber(both[i]), 1e-5) end
    end)

    it("splits a model of Transformers between processes, and exports the whole of it", function()
        if not processes.available() then pending "no mpirun" end
        make_folder(qwen())
        local options = "--hugging-face=ROOT/hf --block=16 --steps=3 "
        local output, status = train(options .. "--tensor-parallel=2 --out=ROOT/c")
        assert.equal(2, status, output)
        assert.truthy(output:find("/hf has 1 key and value heads", 1, true), output)
        make_folder(te.models.llama { vocab_size = 650, block_size = 40, n_layer = 1, n_head = 3, n_embd = 24,
            n_inner = 64 })
        output, status = train(options .. "--tensor-parallel=3 --out=ROOT/c")
        assert.equal(2, status, output)
        assert.truthy(output:find("/hf has 64 features in an MLP", 1, true), output)
        make_folder(qwen(2))
        output, status = train(options .. "--out=ROOT/a")
        assert.equal(0, status, output)
        output, status = processes.run(2, ("'%s' scripts/train_gpt.lua %s --tensor-parallel=2 --out=%s/b"):format(
            TETRAIN, (TRAIN .. options):gsub("ROOT", root), root))
        assert.equal(0, status, output)
        local one, both = losses "/a", losses "/b"
        for i = 1, 3 do assert.near(tonumber(one[i]), tonumber(both[i]), 1e-5) end
        output, status = run("train_gpt.lua", "--resume --tensor-parallel=3 --out=ROOT/b")
        assert.equal(2, status, output)
        assert.truthy(output:find("--tensor-parallel=3: --n-head=2 is no multiple of it", 1, true), output)
        output, status = run("export.lua", "--out=ROOT/b --to=ROOT/new")
        assert.equal(0, status, output)
        for name, tensor in pairs(te.models.from_hugging_face(root .. "/new"):state_dict()) do
            assert.same(weights("/b", 3)["model." .. name]:totable(), tensor:totable(), name)
        end
        output, status = train(options .. "--tensor-parallel=2 --lora-rank=2 --out=ROOT/c")
        assert.equal(2, status, output)
        assert.truthy(output:find("--tensor-parallel=2: not with --lora-rank", 1, true), output)
    end)

    it("divides the blocks of a model of Transformers between processes", function()
        if not processes.available() then pending "no mpirun" end
        make_folder(te.models.llama { vocab_size = 650, block_size = 40, n_layer = 2, n_head = 3, n_embd = 24 })
        local options = "--hugging-face=ROOT/hf --block=16 --steps=3 "
        for more, message in pairs { [3] = "--pipeline-parallel=3: the model in --hugging-face=%s/hf has 2 blocks",
            ["2 --lora-rank=2"] = "--pipeline-parallel=2: not with --lora-rank" } do
            local output, status = train(options .. "--out=ROOT/c --pipeline-parallel=" .. more)
            assert.equal(2, status, output)
            assert.truthy(output:find(message:format(root), 1, true), output)
        end
        local output, status = train(options .. "--out=ROOT/a")
        assert.equal(0, status, output)
        output, status = processes.run(2, ("'%s' scripts/train_gpt.lua %s --pipeline-parallel=2 --out=%s/b"):format(
            TETRAIN, (TRAIN .. options):gsub("ROOT", root), root))
        assert.equal(0, status, output)
        assert.same(losses "/a", losses "/b")
        local one, both = weights("/a", 3), weights("/b", 3)
        for name, tensor in pairs(one) do
            if name:find "^model" then assert.same(tensor:totable(), both[name]:totable(), name) end
        end
    end)

    it("says what does not go together with adapters", function()
        make_folder(qwen())
        for message, options in pairs {
            ["--lora-rank needs --hugging-face"] = "--lora-rank=2",
            ["--lora-alpha needs --lora-rank"] = "--hugging-face=ROOT/hf --block=16 --lora-alpha=3",
            ['--lora-targets=v_proj, q_porj: no linear layer is named "q_porj"; did you mean "q_proj"?'] =
                "--hugging-face=ROOT/hf --block=16 --lora-rank=2 '--lora-targets=v_proj, q_porj'",
            ["--lora-rank: expected integer from 0 to 4096, got -1"] = "--lora-rank=-1",
        } do
            local output, status = train(options .. " --steps=1 --out=ROOT/a")
            assert.equal(2, status, output)
            assert.truthy(output:find(message, 1, true), output)
        end
        local output, status = train "--n-layer=1 --n-head=2 --n-embd=16 --block=16 --steps=1 --out=ROOT/a"
        assert.equal(0, status, output)
        output, status = run("export.lua", "--out=ROOT/a --to=ROOT/new --adapters")
        assert.equal(2, status, output)
        assert.truthy(output:find("export.lua: %-%-adapters: .*checkpoint%-00000001.safetensors has none"), output)
    end)

    it("begins with the loss that the model has", function()
        local model = qwen()
        make_folder(model)
        local output, status = train "--hugging-face=ROOT/hf --block=16 --steps=1 --out=ROOT/a"
        assert.equal(0, status, output)
        local set = te.data.open { path = root .. "/text.txt", tokenizer = te.tokenizer.load(TOKENIZER), batch = 2,
            block = 16, seed = 1 }
        local x, y = set:next_train()
        local device = te.get_default_device()
        local _, loss = model(x:to(device), y:to(device))
        set:close()
        assert.near(loss:item(), tonumber(losses("/a")[1]), 1e-5)
    end)

    it("exports what it trained, which is the same model", function()
        make_folder(qwen())
        local output, status = train "--hugging-face=ROOT/hf --block=16 --steps=2 --out=ROOT/a"
        assert.equal(0, status, output)
        output, status = run("export.lua", "--out=ROOT/a --to=ROOT/new/model")
        assert.equal(0, status, output)
        assert.truthy(output:find("new/model: qwen3 of .*checkpoint%-00000002.safetensors, %d+ parameters\n$"), output)
        local model = te.models.from_hugging_face(root .. "/new/model")
        local state = weights("/a", 2)
        for name, parameter in model:named_parameters() do
            assert.same(state["model." .. name]:totable(), parameter:totable(), name)
        end
        local same = {}
        for _, from in ipairs { "--out=ROOT/a", "--hugging-face=ROOT/new/model" } do
            same[#same + 1] = run("generate.lua", from .. " --prompt=once --tokens=5 --temperature=0")
        end
        assert.equal(same[1], same[2])
    end)

    it("puts before a prompt what the model that was trained further has learned there", function()
        local model = qwen()
        te.no_grad(function()
            for _, parameter in ipairs(model:parameters()) do parameter:mul_(parameter:dim() == 2 and 20 or 1) end
        end)
        te.models.to_hugging_face(model, root .. "/hf",
            { tokenizer = te.tokenizer.load "spec/support/tokenizer_sentences.json" }) -- texts begin with <s>
        local output, status = train "--hugging-face=ROOT/hf --block=16 --steps=1 --out=ROOT/a"
        assert.equal(0, status, output)
        assert.equal(0, select(2, run("export.lua", "--out=ROOT/a --to=ROOT/new")))
        local same = {}
        for _, from in ipairs { "--out=ROOT/a", "--hugging-face=ROOT/new" } do
            same[#same + 1] = run("generate.lua", from .. " --prompt='The fused' --tokens=12 --temperature=0")
        end
        assert.equal(same[1], same[2])
    end)

    it("exports a model of characters with a tokenizer of them", function()
        local output, status = train "--n-layer=1 --n-head=2 --n-embd=16 --block=16 --steps=2 --out=ROOT/a"
        assert.equal(0, status, output)
        output, status = run("export.lua", "--out=ROOT/a --to=ROOT/new --dtype=bfloat16")
        assert.equal(0, status, output)
        assert.equal("char", te.tokenizer.load(root .. "/new").kind)
        for _, how in ipairs { "--hugging-face=ROOT/new ", "--tokenizer=ROOT/new --n-layer=1 --n-embd=16 " } do
            output, status = train(how .. "--block=16 --steps=2 --out=ROOT/b")
            assert.equal(0, status, output)
            output, status = run("train_gpt.lua", "--out=ROOT/b --resume --steps=3")
            assert.equal(0, status, output)
        end
    end)

    it("refuses shards with ids that the tokenizer does not have", function()
        te.data.write_tokens(root .. "/ids.bin", te.full({ 640 }, 639, { dtype = "int32" }))
        local output, status = train("--data=ROOT/ids.bin --n-layer=1 --n-embd=16 --block=16 --steps=1 --out=ROOT/a "
            .. "--tokenizer=" .. TOKENIZER)
        assert.equal(74, status, output)
        assert.truthy(output:find("is 639, of a vocabulary of 639", 1, true), output)
    end)

    it("draws samples from ids that the tokenizer does not have", function()
        local model = qwen()
        te.no_grad(function() model.lm_head.weight:narrow(1, 1, 639):zero_() end)
        make_folder(model)
        local output, status = train "--hugging-face=ROOT/hf --block=16 --steps=1 --sample-tokens=30 --out=ROOT/a"
        assert.equal(0, status, output)
    end)

    it("balances the experts of a model as it is told", function()
        local function coefficient(options)
            local output, status = train("--hugging-face=ROOT/hf --block=16 --steps=1 --out=ROOT/a " .. options)
            assert.equal(0, status, output)
            local _, metadata = te.load(root .. "/a/checkpoint-00000001.safetensors")
            assert.equal(metadata["option.expert_aux_loss"], metadata["model.expert_aux_loss"])
            return tonumber(metadata["model.expert_aux_loss"])
        end
        make_folder(te.models.llama { vocab_size = 650, block_size = 40, n_layer = 1, n_head = 2, n_embd = 16,
            n_expert = 2 })
        assert.equal(0.01, coefficient "")
        assert.equal(0.5, coefficient "--expert-aux-loss=0.5")
        assert.equal(0, te.models.from_hugging_face(root .. "/hf").config.expert_aux_loss)
        make_folder(qwen())
        local output, status = train "--hugging-face=ROOT/hf --block=16 --steps=1 --expert-aux-loss=0.5 --out=ROOT/b"
        assert.equal(2, status, output)
        assert.truthy(output:find("--expert-aux-loss: the model in --hugging-face=" .. root .. "/hf has no experts", 1,
            true), output)
        assert.error_matches(function() te.models.from_hugging_face(root .. "/hf", { expert_aux_loss = 1 }) end,
            "expert_aux_loss: 1, but .*/config.json has no experts")
    end)

    it("trains in the folder of the model, whose tokenizer stays", function()
        make_folder(qwen())
        os.execute(("cp %s %s/other.json; echo >> %s/other.json"):format(TOKENIZER, root, root))
        local options = "--hugging-face=ROOT/hf --block=16 --steps=1 --out=ROOT/hf/ --tokenizer=ROOT/"
        local output, status = train(options .. "other.json")
        assert.equal(2, status, output)
        assert.truthy(output:find("would replace the one in --hugging-face=" .. root .. "/hf, which is --out", 1, true))
        assert.equal(shell.read(TOKENIZER), shell.read(root .. "/hf/tokenizer.json"))
        output, status = train(options .. "hf/../hf/tokenizer.json")
        assert.equal(0, status, output)
    end)

    it("says what does not go together", function()
        make_folder(qwen())
        local function refuses(code, message, options)
            local output, status = train(options .. " --steps=1 --out=ROOT/a")
            assert.equal(code, status, output)
            assert.truthy(output:find(message, 1, true), output)
            assert.is_nil(te._core.stat(root .. "/a/metrics.jsonl"))
        end
        refuses(2, "--n-layer: the model in --hugging-face=" .. root .. "/hf has its own",
            "--hugging-face=ROOT/hf --n-layer=3")
        refuses(2, "--tokenizer=byte: the model in --hugging-face=", "--hugging-face=ROOT/hf --tokenizer=byte")
        refuses(2, "--block=64, but the model in --hugging-face=" .. root .. "/hf sees 40", "--hugging-face=ROOT/hf")
        refuses(2, '--tokenizer: expected byte, char, or a tokenizer.json file or its folder, got "bite"',
            "--tokenizer=bite")
        refuses(74, "config.json: No such file", "--hugging-face=ROOT/none")
        os.execute(("rm %s/hf/tokenizer.json"):format(root))
        refuses(2, "there is no tokenizer.json for text; --tokenizer names one", "--hugging-face=ROOT/hf --block=16")
        refuses(74, "tokenizer.json: No such file", "--tokenizer=ROOT/hf")
        te.models.to_hugging_face(te.models.gpt { vocab_size = 200, block_size = 16, n_layer = 1, n_head = 1,
            n_embd = 8 }, root .. "/hf")
        refuses(2, "the tokenizer has 639 tokens, the model in --hugging-face=" .. root .. "/hf 200",
            "--hugging-face=ROOT/hf --block=16 --tokenizer=" .. TOKENIZER)
        local output, status = run("export.lua", "--out=ROOT/a")
        assert.equal(2, status)
        assert.equal("export.lua: --to is missing: the folder to write into\n", output)
        output, status = run("export.lua", "--out=ROOT/a --to=ROOT/new")
        assert.equal(74, status)
        assert.truthy(output:find("no checkpoint in", 1, true), output)
    end)

    it("trains a model of Transformers on shards of its ids", function()
        make_folder(qwen())
        local ids = te.tokenizer.load(TOKENIZER):encode(shell.read(root .. "/text.txt"))
        te.data.write_tokens(root .. "/ids.bin", ids)
        local output, status = train "--hugging-face=ROOT/hf --block=16 --steps=2 --out=ROOT/a"
        assert.equal(0, status, output)
        output, status = train "--data=ROOT/ids.bin --hugging-face=ROOT/hf --block=16 --steps=2 --out=ROOT/b"
        assert.equal(0, status, output)
        assert.same(losses "/a", losses "/b")
        output, status = run("generate.lua", "--out=ROOT/b --tokens=2")
        assert.equal(0, status, output)
    end)
end)
