--- Training in several processes, started by mpirun, against one: on rows of their own, and on parts of the same rows.
--- Each start of mpirun costs a second or two, so few do everything; what they look at within is in
--- spec/support/ranks_train.lua.

local te = require "te"
local processes = require "spec.support.processes"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"
local SMALL = "--n-layer=1 --n-head=2 --n-embd=16 --block=8 --eval-batches=4 --sample-tokens=8 --warmup=2 --lr=1e-2 "
    .. "--grad-accumulation=2 --steps=8 --eval-interval=4 --threads=1 "

local HARD = "--batch=2 --dropout=0.2 --recipe=delayed" -- random numbers, scales with a history

describe("training in several processes", function()
    local folder

    setup(function()
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
        local file = assert(io.open(folder .. "/text.txt", "w"))
        file:write(("the quick brown fox jumps over the lazy dog. "):rep(60))
        file:close()
    end)
    teardown(function() os.execute(("rm -rf '%s'"):format(folder)) end)

    local function options(name, more)
        return ("--data=%s/text.txt --out=%s/%s %s%s"):format(folder, folder, name, SMALL, more)
    end

    -- Exit code and what was printed.
    local function together(words, n)
        local text, code = processes.run(n or 2, ("'%s' spec/support/ranks_train.lua %s"):format(TETRAIN, words))
        return code, text
    end

    local function metrics(name)
        local list = {}
        for line in io.lines(folder .. "/" .. name .. "/metrics.jsonl") do
            local record = {}
            for key, value in line:gmatch '"([%w_]+)":([^,}]+)' do record[key] = tonumber(value) or value end
            list[#list + 1] = record
        end
        return list
    end

    -- Steps like those of one process but for rounding.
    local function same_steps(several, alone)
        local many, one = metrics(several), metrics(alone)
        assert.equal(#one, #many)
        for step, record in ipairs(one) do
            for _, key in ipairs { "loss", "grad_norm", "lr", "val_loss" } do
                if record[key] then assert.near(record[key], many[step][key], 2e-5 * record[key], key .. step) end
            end
            assert.equal(record.val_loss == nil, many[step].val_loss == nil)
        end
    end

    -- The second run, of two parts, is the first one.
    local function same_bits(whole, parts, but_norms)
        local a, b = metrics(whole), metrics(parts)
        for step = 1, 8 do
            assert.equal(a[step].loss, b[step].loss)
            if not but_norms then assert.equal(a[step].grad_norm, b[step].grad_norm) end
            assert.equal(a[step].val_loss, b[step].val_loss)
        end
        local saved = te.load(te.train.checkpoint.path(folder .. "/" .. parts, 8))
        for name, tensor in pairs((te.load(te.train.checkpoint.path(folder .. "/" .. whole, 8)))) do
            assert.same(tensor:totable(), saved[name]:totable(), name)
        end
    end

    it("makes the steps of one process with the rows of all", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local code, text = together(("check %s then %s"):format(options("two", "--batch=2"), options("whole", HARD)))
        assert.equal(0, code, text)
        assert.is_truthy(text:find("2 processes, 64 tokens a step\n", 1, true), text)
        assert.equal(2 * 2, select(2, text:gsub("train loss", ""))) -- in one voice
        text, code = shell.capture(("%s scripts/train_gpt.lua %s"):format(TETRAIN, options("one", "--batch=4")))
        assert.equal(0, code, text)
        assert.equal(8, #metrics "one")
        same_steps("two", "one")
    end)

    it("refuses options and data that are not the same everywhere", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local other = folder .. "/other.txt"
        os.execute(("tr a-z b-za < %s/text.txt > %s"):format(folder, other))
        local function differ(first, second)
            local function words(own)
                return ("'%s' scripts/train_gpt.lua %s %s"):format(TETRAIN, options("differs", "--batch=2"), own)
            end
            local text, code = processes.run(1, words(first) .. " : -n 1 " .. words(second))
            return text, code
        end
        for _, case in ipairs {
            { "", "--lr=0.1", "%-%-lr: rank 1 has 0%.1, rank 0 0%.01\n" },
            { "--seed=123456788", "--seed=123456789", "%-%-seed: rank 1 has 123456789, rank 0 123456788" },
            { "--min-lr=0.001", "", "%-%-min%-lr: rank 1 has none, rank 0 0%.001\n" },
            { "--context-parallel=2", "", "%-%-context%-parallel: rank 1 has 1, rank 0 2\n" },
            { "", "--tensor-parallel=2", "%-%-tensor%-parallel: rank 1 has 2, rank 0 1\n" },
            { "", "--data=" .. other, "%-%-data: the processes have different data\n" },
        } do
            local text, code = differ(case[1], case[2])
            assert.equal(2, code, text)
            assert.is_truthy(text:find("train_gpt.lua: " .. case[3]), text)
        end
        local text, code = differ("--sample-tokens=0 --steps=1", "--keep=1 --steps=1")
        assert.equal(0, code, text)
    end)

    it("stops all where one is asked to, and goes on exactly there", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local code, text = together("stop=5 " .. options("parts", HARD))
        assert.equal(75, code, text)
        assert.is_truthy(text:find("interrupted after step 5; ", 1, true), text)
        assert.same({ 4, 5 }, te.train.checkpoint.steps(folder .. "/parts"))
        assert.equal(5, #metrics "parts")
        code, text = together(("stop=8 --out=%s/parts --resume"):format(folder)) -- before the validation
        assert.equal(75, code, text)
        assert.is_nil(metrics "parts"[8].val_loss)
        code, text = together(("plain --out=%s/parts --resume"):format(folder))
        assert.equal(0, code, text)
        same_bits("whole", "parts")
    end)

    it("saves and ends where one cannot read its data", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        for what, step in pairs { ["train=12"] = 5, ["train=1"] = 0, ["val=3"] = 4 } do
            os.execute(("rm -rf '%s/lost'"):format(folder))
            local code, text = together(what .. " " .. options("lost", "--batch=2"))
            assert.equal(74, code, text)
            local _, reasons = text:gsub("the disk is gone\n", "")
            assert.equal(1, reasons, text)
            assert.is_nil(text:find("traceback", 1, true), text)
            assert.is_nil(text:find("differ", 1, true), text)
            local said = text:match "\nended after step (%d+); "
            assert.equal(step > 0 and tostring(step) or nil, said, text)
            local steps = te.train.checkpoint.steps(folder .. "/lost")
            assert.equal(step > 0 and step or nil, steps[#steps])
        end
    end)

    it("makes the steps of one process with parts of the same rows, stops and goes on exactly there", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local cut = " --context-parallel=2 "
        local code, text = together(("plain %s then %s then %s then %s"):format(options("cut", "--batch=4" .. cut),
            options("llama", "--model=llama --n-kv-head=2 --batch=4 --cp-comm-type=a2a" .. cut),
            options("ring", "--batch=4 --cp-comm-type=p2p" .. cut), options("cut-whole", HARD .. cut)))
        assert.equal(0, code, text)
        assert.is_truthy(text:find("2 processes, each 2 on the same rows, 64 tokens a step\n", 1, true), text)
        for name, more in pairs { ["cut-one"] = "", ["llama-one"] = "--model=llama --n-kv-head=2" } do
            local words = options(name, more .. " --batch=4")
            text, code = shell.capture(("%s scripts/train_gpt.lua %s"):format(TETRAIN, words))
            assert.equal(0, code, text)
        end
        same_steps("cut", "cut-one")
        same_steps("ring", "cut-one")
        code, text = together("plain " .. options("both", "--batch=4 --context-parallel=4 --cp-comm-type=a2a+p2p "
            .. "--cp-heads=2"), 4)
        assert.equal(0, code, text)
        assert.is_truthy(text:find("4 processes, each 4 on the same rows", 1, true), text)
        same_steps("both", "cut-one")
        code, text = together(("plain --out=%s/both --resume --cp-comm-type=p2p --steps=9"):format(folder), 4)
        assert.equal(0, code, text)
        text, code = shell.capture(("%s scripts/train_gpt.lua --out=%s/both --resume --context-parallel=1 --steps=10")
            :format(TETRAIN, folder))
        assert.equal(0, code, text)
        assert.equal(10, #metrics "both")
        same_steps("llama", "llama-one")

        code, text = together("stop=4 " .. options("cut-parts", HARD .. cut))
        assert.equal(75, code, text)
        code, text = together(("plain --out=%s/cut-parts --resume"):format(folder))
        assert.equal(0, code, text)
        same_bits("cut-whole", "cut-parts")
    end)

    it("makes the steps of one process with parts of one model, stops and goes on exactly there", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local split, tokens = " --tensor-parallel=2 ", " --sequence-parallel "
        local code, text = together(("plain %s then %s then %s"):format(options("split", "--batch=4" .. split),
            options("split-llama", "--model=llama --n-kv-head=2 --batch=4" .. split .. tokens),
            options("split-whole", HARD .. split .. tokens)))
        assert.equal(0, code, text)
        assert.is_truthy(text:find("2 processes, each 2 with one model, 64 tokens a step\n", 1, true), text)
        assert.equal(3 * 2, select(2, text:gsub("train loss", ""))) -- in one voice
        local said = text:match "%d+ parameters"
        for name, more in pairs { ["split-one"] = "", ["split-llama-one"] = "--model=llama --n-kv-head=2" } do
            local words = options(name, more .. " --batch=4")
            text, code = shell.capture(("%s scripts/train_gpt.lua %s"):format(TETRAIN, words))
            assert.equal(0, code, text)
            if more == "" then assert.equal(said, (text:match "%d+ parameters")) end
        end
        same_steps("split", "split-one")
        same_steps("split-llama", "split-llama-one")
        text, code = processes.run(4, ("'%s' scripts/train_gpt.lua %s"):format(TETRAIN,
            options("pairs", "--model=llama --n-kv-head=2 --batch=2 --sample-tokens=0" .. split)))
        assert.equal(0, code, text)
        same_steps("pairs", "split-llama-one")

        code, text = together("stop=4 " .. options("split-parts", HARD .. split .. tokens))
        assert.equal(75, code, text)
        code, text = together(("plain --out=%s/split-parts --resume"):format(folder))
        assert.equal(0, code, text)
        same_bits("split-whole", "split-parts")
    end)

    it("shards the optimizer: the same bits, and any number of processes goes on", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        for name, more in pairs { all = HARD, fp8 = HARD .. " --fp8-params --n-embd=32 --optimizer=muon",
            tensor = "--batch=2 --tensor-parallel=2",
            stages = HARD .. " --pipeline-parallel=2 --n-layer=3" } do
            local n = (name == "tensor" or name == "stages") and 4 or 3
            for _, sharded in ipairs { "", " --shard-optimizer" } do
                local words = options(name .. sharded:gsub("%W", ""), more .. " --clip=0" .. sharded)
                local text, code = processes.run(n, ("'%s' scripts/train_gpt.lua %s"):format(TETRAIN, words))
                assert.equal(0, code, text)
                assert.equal(sharded ~= "", text:find(", the optimizer sharded, ", 1, true) ~= nil, text)
            end
            for step, record in ipairs(metrics(name)) do -- squares of shares are added in another order
                assert.near(record.grad_norm, metrics(name .. "shardoptimizer")[step].grad_norm, 1e-6)
            end
            same_bits(name, name .. "shardoptimizer", true)
        end
        local code, text = together("plain " .. options("sharded", HARD .. " --shard-optimizer"))
        assert.equal(0, code, text)
        code, text = together("stop=4 " .. options("sharded-parts", HARD .. " --shard-optimizer"))
        assert.equal(75, code, text)
        os.execute(("cp -r '%s/sharded-parts' '%s/sharded-moved'"):format(folder, folder))
        code, text = together(("plain --out=%s/sharded-parts --resume"):format(folder))
        assert.equal(0, code, text)
        same_bits("sharded", "sharded-parts")
        text, code = shell.capture(("%s scripts/train_gpt.lua --out=%s/sharded-moved --resume --steps=6")
            :format(TETRAIN, folder))
        assert.equal(0, code, text)
        code, text = together(("plain --out=%s/sharded-moved --resume --steps=8"):format(folder), 3)
        assert.equal(0, code, text)
        assert.equal(8, #metrics "sharded-moved")
        text, code = shell.capture(("%s scripts/train_gpt.lua --out=%s/stagesshardoptimizer --resume --steps=9 %s")
            :format(TETRAIN, folder, "--pipeline-parallel=1"))
        assert.equal(0, code, text)
    end)

    it("goes on with a model that was split as one process, and the other way round", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local words = options("moved", "--batch=4 --model=llama")
        local function alone(more)
            return shell.capture(("%s scripts/train_gpt.lua %s"):format(TETRAIN, more))
        end
        local text, code = alone(options("stayed", "--batch=4 --model=llama"))
        assert.equal(0, code, text)
        -- the learning rate follows from --steps, so runs are stopped, not made shorter
        code, text = together("stop=4 " .. words .. " --tensor-parallel=2")
        assert.equal(75, code, text)
        text, code = alone(("--out=%s/moved --resume"):format(folder))
        assert.equal(2, code, text)
        assert.is_truthy(text:find("--tensor-parallel=2: the number of processes, 1, is no multiple of it", 1, true))
        text, code = alone(("--out=%s/moved --resume --tensor-parallel=1"):format(folder))
        assert.equal(0, code, text)
        same_steps("moved", "stayed")

        os.execute(("cp -r '%s/moved' '%s/back'"):format(folder, folder))
        os.remove(te.train.checkpoint.path(folder .. "/back", 8))
        code, text = together(("plain --out=%s/back --resume --tensor-parallel=2 --sequence-parallel"):format(folder))
        assert.equal(0, code, text)
        same_steps("back", "stayed")
        os.remove(te.train.checkpoint.path(folder .. "/back", 8))
        text, code = alone(("--out=%s/back --resume --tensor-parallel=1"):format(folder)) -- nor are tokens split
        assert.equal(0, code, text)
        same_steps("back", "stayed")
        text, code = shell.capture(("%s scripts/generate.lua --out=%s/back --tokens=4"):format(TETRAIN, folder))
        assert.equal(0, code, text)
    end)

    it("makes the steps of one process with stages of one model, stops and goes on exactly there", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local stages, llama = " --pipeline-parallel=2 --n-layer=3 ", "--model=llama --n-kv-head=2 --batch=4"
        local code, text = together(("plain %s then %s then %s"):format(options("stages", "--batch=4" .. stages),
            options("stages-llama", llama .. " --optimizer=muon --recompute-blocks" .. stages),
            options("stages-whole", HARD .. stages)))
        assert.equal(0, code, text)
        assert.is_truthy(text:find("2 processes, each 2 with one model, 64 tokens a step\n", 1, true), text)
        assert.equal(3 * 2, select(2, text:gsub("train loss", ""))) -- in one voice
        local said = text:match "%d+ parameters"
        for name, more in pairs { ["stages-one"] = "--batch=4", ["stages-llama-one"] = llama .. " --optimizer=muon" } do
            text, code = shell.capture(("%s scripts/train_gpt.lua %s --n-layer=3"):format(TETRAIN, options(name, more)))
            assert.equal(0, code, text)
            if more == "--batch=4" then assert.equal(said, (text:match "%d+ parameters")) end
        end
        same_steps("stages", "stages-one")
        same_steps("stages-llama", "stages-llama-one")
        for name, beside in pairs { rows = "--batch=2", parts = "--batch=4 --tensor-parallel=2 --sequence-parallel",
            tokens = "--batch=4 --context-parallel=2" } do
            text, code = processes.run(4, ("'%s' scripts/train_gpt.lua %s"):format(TETRAIN,
                options("stages-" .. name, beside .. stages)))
            assert.equal(0, code, text)
            assert.is_truthy(text:find(name == "rows" and "each 2 with" or name == "parts" and "each 4 with"
                or "each 4 on the same rows", 1, true), text)
            same_steps("stages-" .. name, "stages-one")
        end

        code, text = together("stop=4 " .. options("stages-parts", HARD .. stages))
        assert.equal(75, code, text)
        code, text = together(("plain --out=%s/stages-parts --resume"):format(folder))
        assert.equal(0, code, text)
        same_bits("stages-whole", "stages-parts")
    end)

    it("goes on with a model in other numbers of stages, which must divide the processes", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local function alone(more)
            return shell.capture(("%s scripts/train_gpt.lua %s"):format(TETRAIN, more))
        end
        local words = "--batch=4 --model=llama --n-layer=4"
        local text, code = alone(options("undivided", words))
        assert.equal(0, code, text)
        code, text = together("stop=4 " .. options("divided", words .. " --pipeline-parallel=2"))
        assert.equal(75, code, text)
        text, code = alone(("--out=%s/divided --resume"):format(folder))
        assert.equal(2, code, text)
        assert.is_truthy(text:find("--pipeline-parallel=2: the number of processes, 1, is no multiple of it", 1, true))
        os.execute(("cp -r '%s/divided' '%s/joined'"):format(folder, folder))
        text, code = alone(("--out=%s/joined --resume --pipeline-parallel=1"):format(folder))
        assert.equal(0, code, text)
        same_steps("joined", "undivided")
        code, text = together(("plain --out=%s/divided --resume --pipeline-parallel=4"):format(folder), 4)
        assert.equal(0, code, text)
        same_steps("divided", "undivided")
        text, code = shell.capture(("%s scripts/generate.lua --out=%s/divided --tokens=4"):format(TETRAIN, folder))
        assert.equal(0, code, text)

        for message, more in pairs {
            ["--pipeline-parallel=2: there are --n-layer=1 blocks"] = "--pipeline-parallel=2",
            ["--pipeline-parallel=2: not with --n-expert"] = "--pipeline-parallel=2 --model=llama --n-expert=2",
            ["--pipeline-parallel=2: the number of processes, 1, is no multiple of it"] = "--n-layer=2 "
                .. "--pipeline-parallel=2",
        } do
            text, code = alone(options("refused", more))
            assert.equal(2, code, text)
            assert.is_truthy(text:find(message, 1, true), text)
        end
    end)
end)
