local te = require "te"

local folder

local function write(name, bytes)
    local path = folder .. "/" .. name
    local file = assert(io.open(path, "wb"))
    file:write(bytes)
    file:close()
    return path
end

local function uint16(values)
    local bytes = {}
    for i, v in ipairs(values) do bytes[i] = string.char(v % 256, math.floor(v / 256)) end
    return table.concat(bytes)
end

local function int32(v)
    return string.char(v % 256, math.floor(v / 2 ^ 8) % 256, math.floor(v / 2 ^ 16) % 256, math.floor(v / 2 ^ 24) % 256)
end

local function counting(first, n)
    local values = {}
    for i = 1, n do values[i] = first + i - 1 end
    return values
end

describe("te.data", function()
    before_each(function()
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
    end)
    after_each(function() os.execute(("rm -rf '%s'"):format(folder)) end)

    it("reads a text file: targets are inputs one later", function()
        local set = te.data.open { path = write("a.txt", ("hello world "):rep(50)), batch = 2, block = 5 }
        assert.equal(8, set.tokenizer.vocab_size)
        assert.equal(600, set.n_train + set.n_val)
        local x, y = set:next_train()
        assert.same({ 2, 5 }, x.shape)
        local rows, targets = x:totable(), y:totable()
        for b = 1, 2 do
            for i = 1, 4 do assert.equal(rows[b][i + 1], targets[b][i]) end
            assert.is_truthy((("hello world "):rep(50)):find(set.tokenizer:decode(rows[b]), 1, true))
        end
        set:close()
    end)

    it("gives batch s again, whatever came before", function()
        local path = write("a.txt", ("the quick brown fox "):rep(40))
        local a = te.data.open { path = path, batch = 3, block = 7, seed = 5 }
        local b = te.data.open { path = path, batch = 3, block = 7, seed = 5 }
        for _ = 0, 3 do a:next_train() end
        assert.same((a:next_train()):totable(), (b:next_train(4)):totable())
        local c = te.data.open { path = path, batch = 3, block = 7, seed = 6 }
        assert.not_same((b:next_train(0)):totable(), (c:next_train(0)):totable())
        a:close() b:close() c:close()
    end)

    it("reads a folder, skipping what is no text", function()
        write("b.txt", "bbb")
        write("a.txt", ("a"):rep(100))
        write("c.dat", "c\0c")
        local set = te.data.open { path = folder, block = 4, tokenizer = "byte" }
        assert.equal(104, set.n_tokens)
        assert.equal(256, set.tokenizer.vocab_size)
        set:close()
    end)

    it("reads all folders of a folder but hidden ones", function()
        for _, name in ipairs { "out", "build-logs", ".hidden" } do
            te._core.mkdir(folder .. "/" .. name)
            write(name .. "/a.txt", ("a"):rep(20))
        end
        local set = te.data.open { path = folder, block = 4, tokenizer = "byte" }
        assert.equal(41, set.n_tokens)
        set:close()
    end)

    it("leaves out what runs write", function()
        write("a.txt", ("a"):rep(40))
        local function tokens(except)
            local set = te.data.open { path = folder, block = 4, tokenizer = "byte", except = except }
            set:close()
            return set.n_tokens
        end
        te._core.mkdir(folder .. "/run")
        write("run/log.txt", ("l"):rep(20))
        write("run/metrics.jsonl", ("m"):rep(20))
        assert.equal(82, tokens())
        assert.equal(40, tokens(folder .. "/./run"))
        assert.equal(82, tokens(folder .. "/none"))
        write("run/checkpoint-00000005.safetensors", "\0")
        assert.equal(61, tokens())
        write("checkpoint-00000005.safetensors", "\0") -- a run that writes to where its data is
        write("metrics.jsonl", ("m"):rep(20))
        assert.equal(61, tokens(folder))
        write("run/plot.svg", ("p"):rep(20))
        assert.equal(61, tokens(folder))
        os.remove(folder .. "/run/checkpoint-00000005.safetensors")
        assert.equal(103, tokens(folder))
        write("run/metrics.jsonl", '{"step":1}') -- of a run that has not saved yet
        assert.equal(61, tokens(folder))
        te._core.mkdir(folder .. "/pipe")
        assert(os.execute(("mkfifo '%s/pipe/metrics.jsonl'"):format(folder)) == 0)
        assert.equal(61, tokens(folder))
    end)

    it("names an id that is none of a vocabulary, and where it stands", function()
        local ids = {}
        for i = 1, 20000 do ids[i] = i % 7 end
        local function check(at, read)
            ids[at + 1] = 9
            local path = write("a.bin", uint16(ids))
            for _, source in ipairs { { path = path }, { tokens = ids } } do
                local opts = { path = source.path, tokens = source.tokens, block = 8, batch = 4, vocab_size = 9 }
                local ok, value, problem = pcall(read, opts)
                local told = ("%stoken %d is 9, of a vocabulary of 9"):format(source.path and path .. ": " or "", at)
                assert.is_truthy(tostring(ok and problem or value):find(told, 1, true))
                opts.vocab_size = 10
                assert.equal(1, read(opts))
            end
            ids[at + 1] = 0
        end
        check(5, function(opts) te.data.open(opts):close() return 1 end) -- among those that are looked at first
        check(100, function(opts)
            local set = te.data.open(opts)
            for _ = 1, 2000 do set:next_train() end
            return 1
        end)
        check(19000, function(opts) return te.data.open(opts):validation_loss(99, function() return 1 end) end)
    end)

    it("says how long a text may be", function()
        local path = write("a.txt", "a")
        assert.equal(0, os.execute(("truncate -s 3000000000 '%s'"):format(path))) -- takes no room
        assert.error_matches(function() te.data.open { path = path } end,
            path .. ": 3000000000 bytes of text: they end at 2 GiB; te.data.write_tokens makes shards", 1, true)
    end)

    it("finds shards below a folder without text", function()
        te._core.mkdir(folder .. "/shards")
        write("shards/a.bin", uint16(counting(0, 100)))
        local set = te.data.open { path = folder, block = 9 }
        assert.equal(100, set.n_tokens)
        assert.is_nil(set.tokenizer)
        set:close()
        write("a.txt", ("text "):rep(8)) -- what is below may belong to something else
        set = te.data.open { path = folder, block = 9 }
        assert.equal(40, set.n_tokens)
        set:close()
    end)

    it("reads raw and headered shards", function()
        write("train_0.bin", uint16(counting(0, 100)))
        local header = { int32(20240520), int32(1), int32(50) }
        for i = 4, 256 do header[i] = int32(0) end
        write("train_1.bin", table.concat(header) .. uint16(counting(100, 50)))
        local set = te.data.open { path = folder, block = 9, val_fraction = 0.1 }
        assert.equal(150, set.n_tokens)
        assert.is_nil(set.tokenizer)
        local losses = {}
        set:validation_loss(1, function(x) losses[1] = x:totable()[1][1]; return 1 end)
        assert.equal(135, losses[1])
        assert.error_matches(function() set:validation_loss(3) end,
            "Set:validation_loss: loss: expected callable, got nil")
        set:close()
        write("interval_1.bin", uint16(counting(300, 20)))
        assert.equal(nil, te.data.open({ path = folder, block = 9, val_fraction = 0 }).val)
        os.remove(folder .. "/interval_1.bin")
        write("my_val.bin", uint16(counting(500, 40)))
        set = te.data.open { path = folder, block = 9 }
        assert.equal(150, set.n_train)
        assert.equal(40, set.n_val)
        assert.equal(2, set:validation_loss(99, function(x) return x:totable()[1][1] >= 500 and 2 or 0 end))
        set:close()
    end)

    it("tells data of one length apart", function()
        local function sample(text)
            return te.data.open({ path = write("other.txt", text), block = 8 }):texts()["data.sample"]
        end
        local text = ("abcdefgh"):rep(500)
        assert.equal(sample(text), sample(text))
        assert.not_equal(sample(text), sample(text:reverse()))
        assert.not_equal(sample "0123456789", sample "0123456798")
    end)

    it("spreads a validation evenly over its part", function()
        local path = write("a.bin", uint16(counting(0, 1000)))
        local set = te.data.open { path = path, block = 9, val_fraction = 0.1 }
        local starts = {}
        set:validation_loss(3, function(x) starts[#starts + 1] = x:totable()[1][1]; return 0 end)
        assert.same({ 900, 900 + 3 * 9, 900 + 7 * 9 }, starts)
        local n = 0
        assert.equal(2, set:validation_loss(99, function() n = n + 1; return 2 end))
        assert.equal(11, n)
        set:close()
    end)

    it("has text of its own", function()
        local text, description = te.data.own_text("scripts/train_gpt.lua")
        assert.is_true(#text > 100000)
        assert.is_truthy(description:find "own text")
        text = te.data.own_text("/nowhere/train_gpt.lua")
        assert.is_truthy(text:find "te.Module")
    end)

    it("ends a validation where a loss is false", function()
        local set, n = te.data.open { path = write("a.txt", ("hello world "):rep(50)), block = 5 }, 0
        assert.is_nil(set:validation_loss(9, function()
            n = n + 1
            return n < 3 and 1
        end))
        assert.equal(3, n)
        set:close()
    end)

    it("says what is wrong with a call", function()
        local path = write("a.txt", ("hello world "):rep(50))
        for rank = 2, 5, 3 do
            assert.error_matches(function() te.data.open { path = path, rank = rank, ranks = 2 } end,
                "te.data.open: option rank: expected one below ranks, which is 2, got " .. rank)
        end
        local set = te.data.open { path = path, block = 5 }
        assert.error_matches(function() set:validation_loss(0, print) end, "Set:validation_loss: batches: expected")
        assert.error_matches(function() set:next_train(-1) end, "Set:next_train: batch number: expected integer")
        assert.matches("^data set of .*: %d+ tokens for training, %d+ for validation, batches {%d+, %d+}$",
            tostring(set))
        set:close()
        assert.matches("}, closed$", tostring(set))
        assert.error_matches(function() set:next_train() end, "Set:next_train: the set is closed")
        assert.error_matches(function() set:validation_loss(1, print) end, "Set:validation_loss: the set is closed")
    end)

    it("says what is wrong", function()
        assert.error_matches(function() te.data.open { path = write("one.txt", "a"), block = 8 } end,
            "one%.txt: 1 tokens for training are too few for a block of 8")
        assert.error_matches(function() te.data.open { path = folder .. "/none.txt" } end, "none%.txt: no such file")
        assert.error_matches(function() te.data.open { path = write("odd.bin", "abc") } end,
            "te%.data%.open: .*odd%.bin: 3 bytes are not a whole number of uint16 tokens")
        local path = write("a.txt", "short")
        assert.error_matches(function() te.data.open { path = path, block = 8 } end, "too few for a block of 8")
        assert(io.open(path, "w")):close()
        assert.error_matches(function() te.data.open { path = path } end,
            ("te.data.open: %s: the file is empty"):format(path), 1, true)
        local header = { int32(20240520), int32(1), int32(77) }
        for i = 4, 256 do header[i] = int32(0) end
        path = write("bad.bin", table.concat(header) .. uint16(counting(0, 50)))
        assert.error_matches(function() te.data.open { path = path, block = 4 } end, "bad%.bin")
    end)

    it("takes tokenizers that a script has, of texts, shards and ids", function()
        local text = ("hello world "):rep(50)
        local path = write("a.txt", text)
        local function check(set, tok, ids)
            assert.equal(tok, set.tokenizer)
            assert.equal(#ids, set.n_tokens)
            local joined = table.concat(ids, " ")
            for _, row in ipairs((set:next_train()):totable()) do
                assert.is_truthy((" " .. joined .. " "):find(" " .. table.concat(row, " ") .. " ", 1, true))
            end
            set:close()
        end
        local bpe = te.tokenizer.load "spec/support/tokenizer.json"
        local own = { encode = function(_, given) -- every character's place in the alphabet, and nothing else
            local ids = {}
            for letter in given:gmatch "%l" do ids[#ids + 1] = letter:byte() - 97 end
            return ids
        end }
        for _, tok in ipairs { te.tokenizer.char("dehlorw xyz"), te.tokenizer.byte(), bpe, own } do
            check(te.data.open { path = path, tokenizer = tok, block = 5 }, tok, tok:encode(text))
        end
        assert.is_nil(te.data.open({ path = path, tokenizer = own, block = 5 }):texts().tokenizer)
        assert.equal(bpe:describe(), te.data.open({ path = path, tokenizer = bpe, block = 5 }):texts().tokenizer)
        local shard = write("a.bin", uint16(bpe:encode(text)))
        check(te.data.open { path = shard, tokenizer = bpe, block = 5 }, bpe, bpe:encode(text))
        check(te.data.open { tokens = bpe:encode(text), tokenizer = bpe, block = 5 }, bpe, bpe:encode(text))
        local few = te.tokenizer.char "held"
        assert.error_matches(function() te.data.open { path = path, tokenizer = few, block = 5 } end,
            "the vocabulary has no character U+006F", 1, true)
        assert.error_matches(function()
            te.data.open { path = path, tokenizer = { encode = function() return { 1, "a" } end }, block = 5 }
        end, "te.data.open: what the tokenizer made: expected", 1, true)
        for shown, wrong in pairs { ['"chars"'] = "chars", ["5"] = 5, ["a table"] = {} } do
            assert.error_matches(function() te.data.open { path = path, tokenizer = wrong } end,
                "option tokenizer: expected one of byte, char or a tokenizer of te.tokenizer, got " .. shown,
                1, true)
        end
    end)

    it("cuts ids that a script has like a file's", function()
        local ids = {}
        for i = 1, 300 do ids[i] = (i * 37) % 251 end
        local expected = te.data.open { path = write("a.bin", uint16(ids)), batch = 3, block = 7, seed = 5 }
        local columns = te.tensor({ ids, ids }, { dtype = "int32" }):transpose(1, 2):contiguous()
        for _, tokens in ipairs { ids, te.tensor(ids, { dtype = "int64" }), te.tensor(ids, { dtype = "int32" }),
            te.tensor(ids, { dtype = "uint8" }), columns:select(2, 2) } do
            local set = te.data.open { tokens = tokens, batch = 3, block = 7, seed = 5 }
            for s = 0, 3 do
                local x, y = set:next_train(s)
                local ex, ey = expected:next_train(s)
                assert.same(ex:totable(), x:totable())
                assert.same(ey:totable(), y:totable())
            end
            assert.same(expected:texts(), set:texts())
            assert.is_nil(set.tokenizer)
            set:close()
        end
        expected:close()
        for message, tokens in pairs {
            ["expected whole numbers {n}, got float32 {2}"] = te.ones { 2 },
            ["expected whole numbers {n}, got int32 {1,2}"] = te.tensor({ { 1, 2 } }, { dtype = "int32" }),
            ["expected whole numbers {n}, got int32 {0}"] = te.zeros({ 0 }, { dtype = "int32" }),
            ["expected ids from 0 to 2147483647, got 4294967296"] = te.tensor({ 1, 2 ^ 32 }, { dtype = "int64" }),
            ["expected ids from 0 to 2147483647, got -4294967296"] = te.tensor({ 1, -2 ^ 32 }, { dtype = "int64" }),
            ["token 1 is -1: ids go from 0 to 2147483647"] = te.tensor({ 1, -1 }, { dtype = "int32" }),
            ["tokens: entry 2 is nil"] = { 1, nil, 3 },
            ["tokens: a list has no entry"] = { 1, 2, x = 3 },
            ["expected a list or a tensor of ids, got 5"] = 5,
        } do
            assert.error_matches(function() te.data.open { tokens = tokens, block = 1 } end, message, 1, true)
        end
        assert.error_matches(function() te.data.open { tokens = ids, path = folder } end,
            "te.data.open: path and tokens: one of them")
        assert.error_matches(function() te.data.open { tokens = ids, block = 400 } end,
            "tokens: 270 tokens for training are too few for a block of 400")
    end)

    it("writes shards that it reads", function()
        local ids = {}
        for i = 1, 5000 do ids[i] = (i * 7919) % 65536 end
        for dtype, size in pairs { uint16 = 2, uint32 = 4 } do
            local path = folder .. "/" .. dtype .. ".bin"
            local given = dtype == "uint16" and ids or te.tensor(ids, { dtype = "int64" })
            te.data.write_tokens(path, given, { dtype = dtype })
            local file = assert(io.open(path, "rb"))
            local bytes = file:read "*a"
            file:close()
            assert.equal(1024 + 5000 * size, #bytes)
            local magic, version = unpack(dtype == "uint16" and { 20240520, 1 } or { 20240801, 7 })
            assert.equal(int32(magic) .. int32(version) .. int32(5000) .. ("\0"):rep(1012), bytes:sub(1, 1024))
            for _, i in ipairs { 1, 2, 4096, 4097, 5000 } do
                assert.equal(int32(ids[i]):sub(1, size), bytes:sub(1025 + (i - 1) * size, 1024 + i * size))
            end
            local set = te.data.open { path = path, block = 4999, val_fraction = 0 }
            assert.same({ unpack(ids, 1, 4999) }, (set:next_train(0)):totable()[1])
            set:close()
        end
        te.data.write_tokens(folder .. "/a.bin", { 1, 2, 3 })
        local large = te.tensor({ 65535, 65536 }, { dtype = "int32" })
        for message, arguments in pairs {
            ["a.bin: token 1 is 65536: uint16 ends at 65535, use uint32"] = { folder .. "/a.bin", large },
            ["te.data.write_tokens: path: a shard's name ends in .bin, got"] = { folder .. "/a", { 1 } },
            ["te.data.write_tokens: ids: -1 is not between 0 and 2147483647"] = { folder .. "/a.bin", { 1, -1 } },
            ["te.data.write_tokens: path: expected string, got nil"] = { nil, { 1 } },
            ["te.data.write_tokens: option dtype: expected one of uint16, uint32"] =
                { folder .. "/a.bin", { 1 }, { dtype = "int32" } },
            ["no tokens"] = { folder .. "/a.bin", {} },
            ["No such file"] = { folder .. "/none/a.bin", { 1 } },
        } do
            assert.error_matches(function() te.data.write_tokens(unpack(arguments, 1, 3)) end, message, 1, true)
        end
        assert.same({ "a.bin", "uint16.bin", "uint32.bin" }, te._core.list_dir(folder)) -- nothing unfinished
        assert.equal(3, te.data.open({ path = folder .. "/a.bin", block = 1, val_fraction = 0 }).n_tokens)
    end)

    it("enters each folder once, wherever links lead", function()
        write("a.txt", ("a"):rep(40))
        te._core.mkdir(folder .. "/within")
        write("within/b.txt", ("b"):rep(40))
        local link = "cd '%s' && ln -s . loop && ln -s . other && ln -s .. within/up && ln -s within twin"
        assert.equal(0, os.execute(link:format(folder)))
        local set = te.data.open { path = folder, block = 4, tokenizer = "byte" }
        assert.equal(81, set.n_tokens)
        set:close()
    end)

    it("finds shards of a linked folder once", function()
        te._core.mkdir(folder .. "/shards")
        write("a.bin", uint16(counting(0, 100)))
        write("shards/b.bin", uint16(counting(100, 50)))
        assert.equal(0, os.execute(("cd '%s' && ln -s .. shards/up && ln -s shards again"):format(folder)))
        local set = te.data.open { path = folder, block = 9 }
        assert.equal(150, set.n_tokens)
        set:close()
    end)

    it("reads regular files only", function()
        write("a.txt", ("a"):rep(40))
        local there = os.execute(("mkfifo '%s/pipe.txt' '%s/pipe.bin'"):format(folder, folder))
        assert.equal(0, there)
        local set = te.data.open { path = folder, block = 4, tokenizer = "byte" }
        assert.equal(40, set.n_tokens)
        set:close()
    end)
end)
