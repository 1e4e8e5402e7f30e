-- Runs the scripts as a user does, in processes of their own.

local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"
local folder

-- Runs a script; returns exit code, standard output, standard error.
local function run(script, options)
    local command = ("%s scripts/%s --threads=1 %s >%s/stdout 2>%s/stderr"):format(TETRAIN, script, options,
        folder, folder)
    local status = os.execute(command)
    local texts = {}
    for i, name in ipairs { "stdout", "stderr" } do
        local file = assert(io.open(folder .. "/" .. name))
        texts[i] = file:read("*a")
        file:close()
    end
    return math.floor((tonumber(status) or 0) / 256), texts[1], texts[2]
end

local SMALL = "--n-layer=1 --n-head=2 --n-embd=16 --block=8 --batch=4 --eval-batches=4 --sample-tokens=8 --warmup=2 "

local function train(name, options)
    return run("train_gpt.lua", ("--data=%s/text.txt --out=%s/%s %s"):format(folder, folder, name, options))
end

local function metrics(name)
    local list = {}
    for line in io.lines(folder .. "/" .. name .. "/metrics.jsonl") do
        local record = {}
        for key, value in line:gmatch('"(%w+_?%w*_?%w*)":([^,}]+)') do record[key] = tonumber(value) or value end
        list[#list + 1] = record
    end
    return list
end

local function losses(name)
    local list = {}
    for i, record in ipairs(metrics(name)) do list[i] = ("%.9g %.9g"):format(record.loss, record.grad_norm) end
    return list
end

describe("train_gpt.lua", function()
    setup(function()
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
        local file = assert(io.open(folder .. "/text.txt", "w"))
        file:write(("the quick brown fox jumps over the lazy dog. "):rep(60))
        file:close()
    end)
    teardown(function() os.execute(("rm -rf '%s'"):format(folder)) end)

    it("says what is wrong with options that do not go together", function()
        local function refuses(options, message)
            local code, _, err = train("wrong", SMALL .. options)
            assert.equal(2, code)
            assert.equal("train_gpt.lua: " .. message .. "\n", err)
        end
        refuses("--n-head=3", "--n-embd=16 is no multiple of --n-head=3")
        refuses("--device=gpu",
            '--device=gpu: device "gpu": no such device; known are "cpu", "cuda" and "cuda:1" to "cuda:7"')
        refuses("--warmup=9e15",
            "--warmup: expected integer from 0 to 1099511627776, got 9e+15 (--help lists the options)")
        refuses("--fp8-params", "--fp8-params needs a --recipe")
        refuses("--n-kv-head=1", "--n-kv-head needs --model=llama")
        refuses("--n-expert=4", "--n-expert needs --model=llama")
        refuses("--model=llama --n-expert=2 --n-expert-active=3", "--n-expert-active=3 of --n-expert=2")
        refuses("--watch-numerics=5", "--watch-numerics needs a --recipe")
        refuses("--vocab-size=9", "--vocab-size is for shards: a text has its own")
        refuses("--lr=1e-3 --min-lr=0.01", "--min-lr=0.01 is above --lr=0.001")
        refuses("--n-expert-active=1", "--n-expert-active needs --n-expert")
        refuses("--model=llama --expert-aux-loss=1", "--expert-aux-loss needs --n-expert")
        refuses("--model=llama --bias", "--bias: --model=llama has none")
        refuses("--model=llama --n-kv-head=3", "--n-head=2 is no multiple of --n-kv-head=3")
        refuses("--cp-heads=2", "--cp-heads needs --context-parallel")
        refuses("--context-parallel=2 --cp-heads=2", "--cp-heads and --cp-comm-type=a2a+p2p go together")
        refuses("--context-parallel=2 --cp-comm-type=a2a+p2p", "--cp-heads and --cp-comm-type=a2a+p2p go together")
        refuses("--context-parallel=2 --cp-comm-type=a2a+p2p --cp-heads=3",
            "--context-parallel=2 is no multiple of --cp-heads=3")
        refuses("--context-parallel=2", "--context-parallel=2: the number of processes, 1, is no multiple of it")
        refuses("--tensor-parallel=2", "--tensor-parallel=2: the number of processes, 1, is no multiple of it")
        refuses("--sequence-parallel", "--sequence-parallel needs --tensor-parallel")
        refuses("--tensor-parallel=3", "--tensor-parallel=3: --n-head=2 is no multiple of it")
        refuses("--tensor-parallel=2 --model=llama --n-kv-head=1",
            "--tensor-parallel=2: --n-kv-head=1 is no multiple of it")
        refuses("--tensor-parallel=3 --model=llama --n-head=3 --n-embd=48",
            "--tensor-parallel=3: --n-embd=48 makes MLPs 128 wide, no multiple of it")
        refuses("--tensor-parallel=2 --context-parallel=2", "--tensor-parallel=2: not with --context-parallel")
        refuses("--tensor-parallel=2 --model=llama --n-expert=4", "--tensor-parallel=2: not with --n-expert")
        refuses("--tensor-parallel=2 --recipe=mxfp8 --fp8-params", "--tensor-parallel=2: not with --fp8-params")
        refuses("--tensor-parallel=2 --sequence-parallel --block=5",
            "--sequence-parallel: --block=5 is no multiple of --tensor-parallel=2")
        refuses("--model=llama --n-embd=6", "--model=llama: heads of 3 features are odd")
        assert.equal(0, (train("kept", SMALL .. "--steps=2")))
        local code, _, err = train("kept", "--resume --n-embd=32 --steps=4")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --resume: --n-embd=32, but the model in the checkpoint has 16\n", err)
        code, _, err = train("kept", "--resume --block=16 --steps=4")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --resume: --block=16, but the model in the checkpoint sees 8\n", err)
        code, _, err = train("kept", "--resume --dropout=0.1 --steps=4")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --resume: --dropout=0.1, but the model in the checkpoint has 0\n", err)
        code, _, err = train("kept", "--resume --init-std=0.1 --steps=4")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --resume: --init-std=0.1, but the model in the checkpoint has 0.05\n", err)
        code, _, err = train("kept", "--resume --preset=nanogpt-char --steps=4")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --resume: --n-layer=4, but the model in the checkpoint has 1\n", err)
        code, _, err = train("kept", "--resume --val-fraction=0.25 --steps=4")
        assert.equal(2, code)
        assert.matches("train_gpt.lua: --resume: --val-fraction=0.25, but the run began with 0.", err, 1, true)
        code, _, err = train("large", "--vocab-size=20000000")
        assert.equal(2, code)
        assert.matches("--vocab-size: expected positive integer, at most 16777216, got 20000000", err, 1, true)
        code, _, err = train("large", "--seed=9007199254740993")
        assert.equal(2, code)
        assert.matches("--seed: expected integer, at least 0, below 2^53, got 9.007", err, 1, true)
        code, _, err = train("kept", "--resume --optimizer=muon --steps=4")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --resume: --optimizer=muon, but the run began with adamw\n", err)
        code, _, err = train("kept", "--resume --vocab-size=25 --steps=4")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --vocab-size is for shards: a text has its own\n", err)
        local resumed, out = train("kept", SMALL .. "--resume --steps=1")
        assert.equal(0, resumed)
        assert.matches("nothing is left to do: 2 steps are done", out)
        assert.is_nil(out:find("steps 3 to", 1, true))
        assert.matches(", 1 thread, ", out)
    end)

    it("names a file that is more than memory holds", function()
        local code, _, err = run("train_gpt.lua", ("--data=/dev/zero --out=%s/wrong"):format(folder))
        assert.equal("/dev/zero: not enough memory\n", err)
        assert.equal(1, code) -- nothing is wrong with the disk
    end)

    it("goes on with the same data alone, and without looking where a checkpoint does not say it", function()
        local text, other = folder .. "/text.txt", folder .. "/other.txt"
        local file = assert(io.open(other, "w"))
        file:write((assert(io.open(text)):read("*a"):reverse()))
        file:close()
        assert.equal(0, (train("data", SMALL .. "--steps=2")))
        local code, _, err = train("data", "--resume --steps=3 --data=" .. other)
        assert.equal(74, code)
        local changed = (": the data has changed since: %s is not what the run began with\n"):format(other)
        assert.equal(changed, err:sub(-#changed))
        local path = te.train.checkpoint.latest(folder .. "/data")
        local tensors, metadata = te.load(path)
        metadata["data.sample"] = nil
        te.save(path, tensors, metadata)
        assert.equal(0, (train("data", "--resume --steps=3 --data=" .. other)))
    end)

    it("goes on with a folder that holds the folder of the run", function()
        for name, out in pairs { around = "around/run", ["in"] = "in" } do
            te._core.mkdir(folder .. "/" .. name)
            os.execute(("cp %s/text.txt %s/%s"):format(folder, folder, name))
            local options = ("--data=%s/%s --out=%s/%s "):format(folder, name, folder, out)
            assert.equal(0, (run("train_gpt.lua", options .. SMALL .. "--steps=4 --eval-interval=2")))
            os.remove(te.train.checkpoint.path(folder .. "/" .. out, 4))
            local code, text, err = run("train_gpt.lua", options .. "--resume")
            assert.equal(0, code, err)
            assert.matches(": 2430 tokens for training, 270 for validation\n", text, 1, true)
        end
    end)

    it("says in one line what memory has no room for", function()
        local options = ("--data=%s/text.txt --out=%s/large --n-embd=2048 --n-head=2"):format(folder, folder)
        local out, status = shell.capture(("%s --mem-limit 50M scripts/train_gpt.lua %s"):format(TETRAIN, options))
        assert.matches("^out of memory: %d+ bytes asked on cpu, %d+ in use, limit %d+\n$", out)
        assert.equal(1, status)
        local code, _, err = train("large", SMALL .. "--batch=1000000000000")
        err = err:gsub("==%d+==WARNING: AddressSanitizer[^\n]*\n", "") -- says so as well
        assert.matches("^out of memory[^\n]*\n$", err)
        assert.equal(1, code)
    end)

    it("takes threads from where they are told before it takes them from a checkpoint", function()
        assert.equal(0, (train("threads", SMALL .. "--steps=2")))
        local words = ("scripts/train_gpt.lua --resume --out=%s/threads --steps="):format(folder)
        for i, case in ipairs { { "OMP_NUM_THREADS=3", "", 3 }, { "OMP_NUM_THREADS=", "--threads 2", 2 } } do
            local command = ("%s %s %s %s%d"):format(case[1], TETRAIN, case[2], words, 2 + i)
            local out, status = shell.capture(command)
            assert.equal(0, status, out)
            assert.is_truthy(out:find((" parameters, %d threads, "):format(case[3]), 1, true), out)
        end
    end)

    it("goes on where --device of the executable says, not where the checkpoint does", function()
        assert.equal(0, (train("elsewhere", SMALL .. "--steps=2")))
        local path = te.train.checkpoint.latest(folder .. "/elsewhere")
        local tensors, metadata = te.load(path)
        metadata["option.device"] = "cuda:15"
        te.save(path, tensors, metadata)
        local words = ("scripts/train_gpt.lua --resume --out=%s/elsewhere --steps=3"):format(folder)
        local out, status = shell.capture(("%s %s"):format(TETRAIN, words))
        assert.equal(2, status, out)
        assert.matches("cuda:15", out)
        out, status = shell.capture(("%s --device cpu %s"):format(TETRAIN, words))
        assert.equal(0, status, out)
    end)

    it("names a checkpoint that it cannot go on from", function()
        assert.equal(0, (train("damaged", SMALL .. "--steps=2")))
        local path = te.train.checkpoint.latest(folder .. "/damaged")
        local tensors, metadata = te.load(path)
        local function refuses(name, value, message)
            local changed = setmetatable({ [name] = value }, { __index = metadata })
            local texts = {}
            for key in pairs(metadata) do texts[key] = changed[key] end
            te.save(path, tensors, texts)
            local code, _, err = train("damaged", "--resume --steps=4")
            assert.equal(("%s: %s\n"):format(path, message), err)
            assert.equal(74, code)
        end
        refuses("rng", "x", 'state: expected what te.rng_state() returned, got string "x"')
        refuses("option.lr", "x", 'option.lr: expected number from 0 to 10, got "x"')
        refuses("model.kind", "te", 'model.kind: expected one of bert, gpt, llama, modernbert, got "te"')
        refuses("optimizer.counts", "1 x", "1 parameters were optimized, the model has 9")
    end)

    it("names a token of a shard that the model has no row for", function()
        local path = folder .. "/ids.bin"
        local file = assert(io.open(path, "wb"))
        file:write(("\1\0\2\0\44\1"):rep(200)) -- 1, 2 and 300
        file:close()
        local options = SMALL .. ("--data=%s --out=%s/ids --steps=2 "):format(path, folder)
        local code, _, err = run("train_gpt.lua", options .. "--vocab-size=300")
        assert.equal(74, code)
        assert.equal(("%s: token 2 is 300, of a vocabulary of 300\n"):format(path), err)
        assert.equal(0, (run("train_gpt.lua", options .. "--vocab-size=301")))
        code, _, err = run("train_gpt.lua", options .. "--tokenizer=byte")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --tokenizer is for text: shards hold ids already\n", err)
    end)

    it("saves before it ends where a token of a shard is none of the model's, and goes on when it is", function()
        local path, ids = folder .. "/rare.bin", {}
        for i = 1, 20000 do ids[i] = i % 7 end
        local options = SMALL .. ("--data=%s --vocab-size=300 --batch=64 --eval-batches=99 --eval-interval=3 ")
            :format(path) .. "--dropout=0.1 --grad-accumulation=2 --steps=16 --keep=99 --out=" .. folder
        te.data.write_tokens(path, ids)
        assert.equal(0, (run("train_gpt.lua", options .. "/common")))
        for at, step in pairs { [100] = 13, [19000] = 3 } do -- of training, and of the validation after step 3
            local name = "rare" .. at
            ids[at + 1] = 300
            te.data.write_tokens(path, ids)
            local code, out, err = run("train_gpt.lua", options .. "/" .. name)
            assert.equal(("%s: token %d is 300, of a vocabulary of 300\n"):format(path, at), err)
            assert.equal(74, code)
            assert.is_truthy(out:find(("ended after step %d; "):format(step), 1, true), out)
            assert.equal(step, #metrics(name))
            ids[at + 1] = (at + 1) % 7
            te.data.write_tokens(path, ids)
            code, _, err = run("train_gpt.lua", ("--resume --out=%s/%s"):format(folder, name))
            assert.equal(0, code, err)
            for i, record in ipairs(metrics "common") do
                local other = metrics(name)[i]
                assert.equal(record.loss, other.loss)
                assert.equal(record.val_loss, other.val_loss)
            end
        end
    end)

    it("lets the learning rate fall to a tenth, whatever it is", function()
        assert.equal(0, (train("low", SMALL .. "--steps=4 --lr=1e-5")))
        assert.equal(1e-6, metrics("low")[4].lr)
    end)

    it("names what is wrong with data, and not its own lines", function()
        local shard = assert(io.open(folder .. "/large.bin", "wb"))
        shard:write("\161\217\52\1\7\0\0\0\100\0\0\0", ("\0"):rep(1012), ("\5\0\0\128"):rep(100))
        shard:close()
        local text = assert(io.open(folder .. "/one.txt", "w"))
        text:write "a"
        text:close()
        for name, message in pairs { ["large.bin"] = "token 0 is 2147483653: ids end at 2147483647",
            ["one.txt"] = "1 tokens for training are too few for a block of 8" } do
            local code, _, err = run("train_gpt.lua", ("--data=%s/%s --out=%s/wrong --block=8"):format(folder, name,
                folder))
            assert.equal(74, code)
            assert.equal(("%s/%s: %s\n"):format(folder, name, message), err)
        end
    end)

    it("names an empty file and an empty folder", function()
        te._core.mkdir(folder .. "/none")
        assert(io.open(folder .. "/empty.txt", "w")):close()
        for name, message in pairs { none = "no text in this folder", ["empty.txt"] = "the file is empty" } do
            local code, _, err = run("train_gpt.lua", ("--data=%s/%s --out=%s/wrong"):format(folder, name, folder))
            assert.equal(74, code)
            assert.equal(("%s/%s: %s\n"):format(folder, name, message), err)
        end
    end)

    it("trains, validates, samples, saves and writes metrics", function()
        local code, out, err = train("a", SMALL .. "--steps=30 --eval-interval=10 --lr=1e-2 --keep=2 --log-interval=10")
        assert.equal(0, code, err)
        local records = metrics("a")
        assert.equal(30, #records)
        for _, key in ipairs { "step", "loss", "lr", "grad_norm", "ms", "tokens_per_s" } do
            assert.equal("number", type(records[1][key]), key)
        end
        assert.is_nil(records[1].val_loss)
        assert.equal("number", type(records[10].val_loss))
        assert.is_true(records[30].loss < records[1].loss - 0.5)
        assert.is_truthy(out:find("step 20/30  loss", 1, true))
        assert.same({ 20, 30 }, te.train.checkpoint.steps(folder .. "/a"))
        local generated, text = run("generate.lua", ("--out=%s/a --prompt='the ' --tokens=20"):format(folder))
        assert.equal(0, generated)
        assert.equal("the ", text:sub(1, 4))
        assert.equal(25, #text)
    end)

    for _, optimizer in ipairs { "adamw", "muon" } do
        it("goes on exactly where it stopped, with dropout and accumulation: " .. optimizer, function()
            local options = SMALL .. "--dropout=0.2 --grad-accumulation=2 --eval-interval=4 --optimizer=" .. optimizer
            train("whole", options .. " --steps=11")
            train("parts", options .. " --steps=11 --eval-interval=7")
            os.remove(te.train.checkpoint.path(folder .. "/parts", 11))
            local code, _, err = run("train_gpt.lua", ("--out=%s/parts --resume"):format(folder))
            assert.equal(0, code, err)
            assert.same(losses("whole"), losses("parts"))
            local a = te.load(te.train.checkpoint.path(folder .. "/whole", 11))
            local b = te.load(te.train.checkpoint.path(folder .. "/parts", 11))
            for name, tensor in pairs(a) do assert.same(tensor:totable(), b[name]:totable(), name) end
            local matrix = "blocks.1.mlp.2.weight"
            assert.equal(optimizer == "muon", a["optimizer.momentum_buffer." .. matrix] ~= nil)
            assert.equal(optimizer == "adamw", a["optimizer.exp_avg." .. matrix] ~= nil)
        end)
    end

    for _, recipe in ipairs { "delayed", "current", "block", "mxfp8", "nvfp4" } do
        it("goes on exactly where it stopped, under the recipe " .. recipe, function()
            local options = SMALL .. "--dropout=0.1 --lr=1e-2 --steps=7 --recipe=" .. recipe
            local whole, parts = recipe .. "-whole", recipe .. "-parts"
            assert.equal(0, (train(whole, options .. " --eval-interval=2")))
            train(parts, options .. " --eval-interval=5")
            os.remove(te.train.checkpoint.path(folder .. "/" .. parts, 7))
            local code, out, err = run("train_gpt.lua", ("--out=%s/%s --resume"):format(folder, parts))
            assert.equal(0, code, err)
            assert.is_truthy(out:find(("bfloat16, recipe %s, steps 6 to 7"):format(recipe), 1, true), out)
            assert.same(losses(whole), losses(parts))
            local a, metadata = te.load(te.train.checkpoint.path(folder .. "/" .. whole, 7))
            local b = te.load(te.train.checkpoint.path(folder .. "/" .. parts, 7))
            for name, tensor in pairs(a) do assert.same(tensor:totable(), b[name]:totable(), name) end
            assert.equal(recipe, metadata["option.recipe"])
            assert.equal(recipe == "delayed", a["model.blocks.1.mlp.2.grad_output_amax_history"] ~= nil)
            assert.equal(0, (run("generate.lua", ("--out=%s/%s --tokens=3"):format(folder, parts))))
        end)
    end

    for _, mlp in ipairs { "", "--n-expert=3 --n-expert-active=1 " } do
        it("trains a llama, goes on exactly where it stopped and generates " .. mlp, function()
            local options = SMALL .. "--model=llama --n-kv-head=1 --dropout=0.1 --recipe=current --eval-interval=3 "
                .. mlp
            assert.equal(0, (train("llama", options .. "--steps=6")))
            assert.equal(0, (train("llama_parts", options .. "--steps=6")))
            os.remove(te.train.checkpoint.path(folder .. "/llama_parts", 6))
            assert.equal(0, (train("llama_parts", "--resume")))
            assert.same(losses "llama", losses "llama_parts")
            local code, _, err = train("llama_parts", "--resume --steps=8 --model=gpt")
            assert.equal(2, code)
            assert.equal("train_gpt.lua: --resume: --model=gpt, but the model in the checkpoint has llama\n", err)
            if mlp ~= "" then
                _, _, err = train("llama_parts", "--resume --steps=8 --n-expert-active=2 --expert-aux-loss=0.01")
                assert.equal("train_gpt.lua: --resume: --n-expert-active=2, but the model in the checkpoint has 1\n",
                    err)
                code, _, err = train("llama_parts", "--resume --steps=8 --expert-aux-loss=0.5")
                assert.equal(2, code)
                assert.equal("train_gpt.lua: --resume: --expert-aux-loss=0.5, but the model in the checkpoint has "
                    .. "0.01\n", err)
            end
            local status, text = run("generate.lua", ("--out=%s/llama --tokens=12 --prompt=the"):format(folder))
            assert.equal(0, status)
            assert.matches("^the", text)
        end)
    end

    it("stores weights quantized, and goes on exactly where it stopped", function()
        for _, recipe in ipairs { "delayed", "mxfp8" } do
            local options = SMALL .. "--steps=7 --lr=1e-2 --fp8-params --recipe=" .. recipe
            local whole, parts = recipe .. "-8-whole", recipe .. "-8-parts"
            assert.equal(0, (train(whole, options .. " --eval-interval=2")))
            train(parts, options .. " --eval-interval=5")
            os.remove(te.train.checkpoint.path(folder .. "/" .. parts, 7))
            local code, _, err = run("train_gpt.lua", ("--out=%s/%s --resume"):format(folder, parts))
            assert.equal(0, code, err)
            assert.same(losses(whole), losses(parts))
            local a = te.load(te.train.checkpoint.path(folder .. "/" .. whole, 7))
            local b = te.load(te.train.checkpoint.path(folder .. "/" .. parts, 7))
            assert.is_truthy(a["model.blocks.1.mlp.2.weight.rowwise_data"])
            assert.is_nil(a["model.blocks.1.mlp.2.weight"])
            for name, tensor in pairs(a) do assert.same(tensor:totable(), b[name]:totable(), name) end
            assert.equal(0, (run("generate.lua", ("--out=%s/%s --tokens=3"):format(folder, parts))))
        end
        local code, _, err = train("mxfp8-8-parts", "--resume --recipe=current --steps=9")
        assert.equal(2, code)
        assert.equal("train_gpt.lua: --resume: --recipe=current, but the model in the checkpoint has mxfp8\n", err)
        code, _, err = train("8-none", SMALL .. "--fp8-params")
        assert.equal(2, code)
        assert.is_truthy(err:find("--fp8-params needs a --recipe", 1, true), err)
    end)

    it("attends in FP8, and goes on exactly where it stopped", function()
        local options = SMALL .. "--steps=7 --lr=1e-2 --recipe=delayed --fp8-attention=mha"
        assert.equal(0, (train("attends-whole", options .. " --eval-interval=2")))
        train("attends-parts", options .. " --eval-interval=5")
        os.remove(te.train.checkpoint.path(folder .. "/attends-parts", 7))
        local code, _, err = run("train_gpt.lua", ("--out=%s/attends-parts --resume"):format(folder))
        assert.equal(0, code, err)
        assert.same(losses("attends-whole"), losses("attends-parts"))
        local saved = te.load(te.train.checkpoint.path(folder .. "/attends-parts", 7))
        assert.is_truthy(saved["model.blocks.1.attention.2.input_amax_history"])
        for recipe, told in pairs { none = "not none", block = "not block" } do
            code, _, err = train("attends-" .. recipe, SMALL .. "--fp8-attention=dpa --recipe=" .. recipe)
            assert.equal(2, code)
            assert.is_truthy(err:find("--fp8-attention needs --recipe=delayed, current or mxfp8, " .. told, 1, true),
                err)
        end
    end)

    it("computes blocks again with --recompute-blocks, and no digit tells", function()
        local options = SMALL .. "--steps=5 --dropout=0.1 --recipe=delayed --eval-interval=3 "
        assert.equal(0, (train("kept", options)))
        assert.equal(0, (train("again", options .. "--recompute-blocks")))
        assert.same(losses "kept", losses "again")
        os.remove(te.train.checkpoint.path(folder .. "/again", 5))
        assert.equal(0, (run("train_gpt.lua", ("--out=%s/again --resume"):format(folder)))) -- goes on with it
        assert.same(losses "kept", losses "again")
        local saved = te.train.checkpoint.load(te.train.checkpoint.path(folder .. "/again", 5))
        assert.equal("true", saved.metadata["option.recompute_blocks"])
        te.train.checkpoint.release(saved)
    end)

    it("writes what quantization does to the metrics, the same after a stop", function()
        local options = SMALL .. "--steps=6 --grad-accumulation=2 --recipe=mxfp8 --watch-numerics=3 "
        assert.equal(0, (train("watched", options .. "--eval-interval=4")))
        local function looks()
            local found = {}
            for line in io.lines(folder .. "/watched/metrics.jsonl") do
                if line:find('"product"', 1, true) then found[#found + 1] = line end
            end
            return found
        end
        local whole = looks()
        assert.equal(2 * 4 * 3, #whole)
        assert.is_truthy(whole[1]:find('^{"step":3,"product":"blocks%.1%.attention%.2%.qkv%.weight","role":"input",'
            .. '"amax":[%d.]+,"scale":null,"saturated":0,"flushed":[%d.e-]+,"error":0%.02%d+,"nonfinite":0}$'),
                whole[1])
        os.remove(te.train.checkpoint.path(folder .. "/watched", 6))
        local code, _, err = run("train_gpt.lua", ("--out=%s/watched --resume"):format(folder))
        assert.equal(0, code, err)
        assert.same(whole, looks())
        train("unwatched", options .. "--eval-interval=4 --watch-numerics=0")
        local a = te.load(te.train.checkpoint.path(folder .. "/watched", 6))
        local b = te.load(te.train.checkpoint.path(folder .. "/unwatched", 6))
        for name, tensor in pairs(a) do assert.same(tensor:totable(), b[name]:totable(), name) end
    end)

    -- Steps, checkpoints and what follows a resumption have the bits of steps that are not recorded.
    local devices, reason = te.devices()
    if not devices[2] then
        pending("takes recorded steps on CUDA: " .. reason)
    else
        it("takes recorded steps on CUDA", function()
            local options = SMALL
                .. "--device=cuda --dropout=0.2 --grad-accumulation=2 --eval-interval=5 --sample-tokens=2 "
            for name, more in pairs { graph = "--steps=9", plain = "--steps=9 --graph=false",
                cut = "--steps=9 --eval-interval=7" } do
                local code, _, err = train(name, options .. more)
                assert.equal(0, code, err)
            end
            os.remove(te.train.checkpoint.path(folder .. "/cut", 9))
            local code, _, err = run("train_gpt.lua", ("--out=%s/cut --resume"):format(folder))
            assert.equal(0, code, err)
            assert.same(losses("plain"), losses("graph"))
            assert.same(losses("plain"), losses("cut"))
            local expected = te.load(te.train.checkpoint.path(folder .. "/plain", 9))
            for _, other in ipairs { "graph", "cut" } do
                local saved = te.load(te.train.checkpoint.path(folder .. "/" .. other, 9))
                for name, tensor in pairs(expected) do assert.same(tensor:totable(), saved[name]:totable(), name) end
            end
        end)
    end

    it("saves and exits with 75 when it is interrupted", function()
        for _, case in ipairs { "INT cpu", "TERM cpu", devices[2] and "INT cuda" } do
            local signal, device = case:match("(%u+) (%a+)")
            os.execute(("rm -rf %s/stop"):format(folder))
            -- -k counts from a signal that is passed on as well: a step and a checkpoint must fit into it.
            local command = ("timeout --foreground -k 60 240 %s scripts/train_gpt.lua --threads=1 --data=%s/text.txt "
                .. "--out=%s/stop %s --steps=1000000 --eval-interval=1000000 --device=%s >%s/log 2>&1")
                :format(TETRAIN, folder, folder, SMALL, device, folder)
            local script = ("%s & pid=$!; while [ ! -s %s/stop/metrics.jsonl ] && kill -0 $pid; do sleep 0.1; done; "
                .. "%skill -%s $pid; wait $pid; echo $? >%s/code"):format(command, folder,
                device == "cuda" and "sleep 3; " or "", signal, folder) -- until steps are recorded
            os.execute(script)
            assert.equal("75\n", assert(io.open(folder .. "/code")):read("*a"))
            local steps, records = te.train.checkpoint.steps(folder .. "/stop"), metrics("stop")
            assert.equal(1, #steps)
            assert.equal(steps[1], #records)
            for i, record in ipairs(records) do assert.equal(i, record.step) end
        end
    end)

    it("trains to the end where the reader of what it prints has left", function()
        for _, reader in ipairs { "head -n 3 >/dev/null", "true" } do -- in the middle, and before anything is printed
            os.execute(("rm -rf %s/unread"):format(folder))
            os.execute(("{ %s scripts/train_gpt.lua --threads=1 --data=%s/text.txt --out=%s/unread %s --steps=400 "
                .. "--log-interval=1 2>%s/stderr; echo $? >%s/code; } | %s"):format(TETRAIN, folder, folder, SMALL,
                folder, folder, reader))
            assert.equal("74\n", assert(io.open(folder .. "/code")):read("*a"))
            assert.matches("^tetrain: cannot write standard output: ", assert(io.open(folder .. "/stderr")):read("*a"))
            assert.same({ 250, 400 }, te.train.checkpoint.steps(folder .. "/unread"))
            assert.equal(400, #metrics "unread")
        end
    end)

    -- Sends SIGTERM to itself within a step, its validation or its sample, and fails where that goes on.
    local STOPS = [[
        local te = require "te"
        local where, step = table.remove(arg, 1), tonumber(table.remove(arg, 1))
        local at, cosine, open, multinomial = 0, te.optim.cosine, te.data.open, te.multinomial
        local stopped
        local function reach(place)
            assert(not stopped, "it goes on")
            stopped = at == step and place == where
            if stopped then os.execute "kill -TERM $PPID" end
        end
        te.optim = setmetatable({ cosine = function(opts)
            local schedule = cosine(opts)
            return function(s) at = s reach "step" return schedule(s) end
        end }, { __index = te.optim })
        te.data = setmetatable({ open = function(opts)
            local set, n = open(opts), 0
            local validate = set.validation_loss
            function set:validation_loss(batches, loss)
                return validate(self, batches, function(x, y)
                    n = n + 1
                    local value = loss(x, y)
                    if n % batches == 2 then reach "validation" end
                    return value
                end)
            end
            return set
        end }, { __index = te.data })
        te.multinomial = function(...) reach "sample" return multinomial(...) end
        arg[0] = "scripts/train_gpt.lua"
        dofile(arg[0])]]

    it("validates what a stop has left unvalidated when it goes on", function()
        local script = assert(io.open(folder .. "/stops.lua", "w"))
        script:write(STOPS)
        script:close()
        local options = SMALL .. "--dropout=0.1 --steps=6 --eval-interval=3 "
        assert.equal(0, (train("unstopped", options)))
        for i, where in ipairs { "step 3", "validation 3", "sample 3", "step 6", "validation 6", "sample 6" } do
            local name, step = "stopped" .. i, tonumber(where:match "%d")
            local status = os.execute(("%s %s/stops.lua %s --threads=1 --data=%s/text.txt --out=%s/%s %s >/dev/null")
                :format(TETRAIN, folder, where, folder, folder, name, options))
            assert.equal(75, math.floor(status / 256), where)
            local records = metrics(name)
            assert.equal(step, #records, where)
            assert.equal(where:find "^sample" ~= nil, records[step].val_loss ~= nil, where)
            local code, out, err = train(name, "--resume")
            assert.equal(0, code, err)
            assert.equal(where == "sample 6", out:find("nothing is left to do", 1, true) ~= nil, out)
            for k, record in ipairs(metrics "unstopped") do
                local resumed = metrics(name)[k]
                assert.equal(record.loss, resumed.loss, where)
                assert.equal(record.val_loss, resumed.val_loss, where)
            end
            local a = te.load(te.train.checkpoint.path(folder .. "/unstopped", 6))
            local b, texts = te.load(te.train.checkpoint.path(folder .. "/" .. name, 6))
            for key, tensor in pairs(a) do assert.same(tensor:totable(), b[key]:totable(), key) end
            assert.is_nil(texts.unvalidated)
        end
    end)

    it("says where the run moves to that is in its folder", function()
        local first = SMALL .. "--steps=1"
        local _, out = train("used", first)
        assert.is_nil(out:find("moved", 1, true))
        for _, previous in ipairs { "previous", "previous-2" } do
            _, out = train("used//", first) -- as it is without the slashes
            assert.equal(("%s/used: the run there moved to %s/used/%s"):format(folder, folder, previous),
                out:match "^[^\n]*")
        end
        assert.equal(1, #metrics "used/previous")
        os.execute(("rm -rf '%s/used'"):format(folder))
    end)

    it("refuses a folder that another run writes into", function()
        local shell = ("%s --steps=1000000 --eval-interval=1000000 & pid=$!; "
            .. "while [ ! -s %s/taken/metrics.jsonl ] && kill -0 $pid; do sleep 0.1; done; "
            .. "for more in '' --resume; do %s --steps=1 $more 2>>%s/refused; echo $? >>%s/codes; done; "
            .. "kill -TERM $pid; wait $pid; echo $? >>%s/codes; %s --resume --steps=1; echo $? >>%s/codes")
        local command = ("timeout --foreground -k 60 240 %s scripts/train_gpt.lua --threads=1 --data=%s/text.txt "
            .. "--out=%s/taken %s >%s/log"):format(TETRAIN, folder, folder, SMALL, folder)
        os.execute(shell:format(command, folder, command, folder, folder, folder, command, folder))
        assert.equal("74\n74\n75\n0\n", assert(io.open(folder .. "/codes")):read("*a"))
        local refused = ("%s/taken: another run writes into this folder\n"):format(folder)
        assert.equal(refused:rep(2), assert(io.open(folder .. "/refused")):read("*a"))
        local records = metrics("taken")
        for i, record in ipairs(records) do assert.equal(i, record.step) end
    end)

    it("redraws one line on a terminal that can", function()
        for _, terminal in ipairs { "xterm", "dumb" } do
            os.execute(("TERM=%s script -qec '%s scripts/train_gpt.lua --threads=1 --data=%s/text.txt --out=%s/tty %s "
                .. "--steps=3' /dev/null >%s/typescript 2>&1 </dev/null"):format(terminal, TETRAIN, folder, folder,
                SMALL, folder))
            local text = assert(io.open(folder .. "/typescript")):read("*a")
            assert.is_truthy(text:find(terminal == "dumb" and "\nstep 3/3  loss " or "\r\27[Kstep 3/3  loss ", 1, true),
                text)
            assert.equal(terminal ~= "dumb", text:find("\27", 1, true) ~= nil)
        end
    end)

    it("trains in bfloat16", function()
        local code, _, err = train("bf16", SMALL .. "--steps=5 --dtype=bfloat16")
        assert.equal(0, code, err)
        assert.is_true(metrics("bf16")[5].loss < 4)
    end)

    it("ends with 77 when nothing finite comes out", function()
        assert.equal(0, (train("nan", SMALL .. "--steps=4 --eval-interval=2")))
        local path = te.train.checkpoint.path(folder .. "/nan", 2)
        os.remove(te.train.checkpoint.path(folder .. "/nan", 4))
        local tensors, metadata = te.load(path)
        tensors["model.blocks.1.mlp.2.weight"]:fill_(0 / 0)
        te.save(path, tensors, metadata)
        local code, _, err = run("train_gpt.lua", ("--out=%s/nan --resume --steps=9"):format(folder))
        assert.equal(77, code, err)
        assert.is_truthy(err:find("parameter blocks.1.mlp.2.weight of Linear(", 1, true), err)
        assert.equal(4, #metrics("nan"))
    end)

    it("saves no weights and states that are not finite, and goes without samples of them", function()
        local code, _, err = train("far", SMALL .. "--n-embd=32 --n-layer=2 --batch=2 --steps=99 --keep=1 --lr=10 "
            .. "--warmup=0 --weight-decay=10 --beta1=0 --beta2=0 --clip=0 --eval-interval=1")
        assert.matches("^exp_avg_sq [%w_.]+ of .* is not finite: it is not saved\n$", err)
        assert.equal(77, code)
        local steps = te.train.checkpoint.steps(folder .. "/far")
        assert.same({ #metrics "far" - 1 }, steps)
        assert.equal(0, (run("generate.lua", ("--out=%s/far --tokens=2"):format(folder))))
        local path = te.train.checkpoint.path(folder .. "/far", steps[1])
        local tensors, metadata = te.load(path)
        for value, told in pairs {
            [3e38] = "generate.lua: the logits of GPT are not finite\n",
            [math.huge] = path .. ": parameter norm.weight of LayerNorm",
        } do
            tensors["model.norm.weight"]:fill_(value)
            te.save(path, tensors, metadata)
            code, _, err = run("generate.lua", ("--out=%s/far --tokens=2"):format(folder))
            assert.equal(told, err:sub(1, #told))
            assert.equal(value == math.huge and 74 or 1, code)
        end
        tensors["model.norm.weight"]:fill_(math.huge)
        metadata.unvalidated = "1"
        te.save(path, tensors, metadata)
        local out
        code, out, err = train("far", "--resume")
        assert.is_truthy(out:find("\nno sample: the logits of GPT are not finite\n", 1, true), out)
        assert.matches("^parameter norm.weight of .* is not finite: it is not saved\n$", err)
        assert.equal(77, code)
    end)

    it("says what is wrong with the command line or the files", function()
        local function fails(expected, message, script, options)
            local code, _, err = run(script, options)
            assert.equal(expected, code, err)
            assert.is_truthy(err:find(message, 1, true), err)
            assert.is_falsy(err:find("traceback", 1, true), err)
        end
        fails(2, "unknown option --stesp, did you mean --steps?", "train_gpt.lua", "--stesp=3")
        fails(2, "--lr: expected number from 0 to 10, got -1", "train_gpt.lua", "--lr=-1")
        fails(74, "none.txt: no such file or folder", "train_gpt.lua", ("--data=none.txt --out=%s/x"):format(folder))
        fails(74, "no checkpoint in", "train_gpt.lua", ("--resume --out=%s/none"):format(folder))
        fails(74, "no checkpoint in", "generate.lua", ("--out=%s/none"):format(folder))
        fails(74, "text.txt: cannot", "generate.lua", ("--out=%s/text.txt"):format(folder))
        for _, script in ipairs { "train_gpt.lua", "generate.lua" } do
            fails(2, "--threads: expected integer from 0 to 1024, got 2000", script, "--threads=2000")
        end
        local code, out = run("train_gpt.lua", "--help")
        assert.equal(0, code)
        assert.is_truthy(out:find("--grad-accumulation", 1, true))
    end)
end)
