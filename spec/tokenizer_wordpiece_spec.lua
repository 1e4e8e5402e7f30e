-- WordPiece tokenizers. Expected ids are those of the tokenizers library for the same file.
local te = require "te"
local json = require "te.json"

local WORDS = { "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "run", "##ning", "##s", "a",
    "##a", "cafe", "cafes", "!", ",", ".", "'", "中", "x", "##x", "i", "##i", "don", "t", "[", "]", "ss", "ß" }

local function fields()
    local vocabulary = {}
    for i, word in ipairs(WORDS) do vocabulary[word] = i - 1 end
    local added = {}
    for id = 0, 4 do
        added[id + 1] = { id = id, content = WORDS[id + 1], special = true, normalized = false, lstrip = false,
            rstrip = false, single_word = false }
    end
    local function special(name, kind) return { SpecialToken = { id = name, type_id = kind } } end
    local function text(name, kind) return { Sequence = { id = name, type_id = kind } } end
    return { version = "1.0", added_tokens = added,
        normalizer = { type = "BertNormalizer", clean_text = true, handle_chinese_chars = true, lowercase = true },
        pre_tokenizer = { type = "BertPreTokenizer" },
        post_processor = { type = "TemplateProcessing",
            single = { special("[CLS]", 0), text("A", 0), special("[SEP]", 0) },
            pair = { special("[CLS]", 0), text("A", 0), special("[SEP]", 0), text("B", 1), special("[SEP]", 1) },
            special_tokens = { ["[CLS]"] = { id = "[CLS]", ids = { 2 }, tokens = { "[CLS]" } },
                ["[SEP]"] = { id = "[SEP]", ids = { 3 }, tokens = { "[SEP]" } } } },
        decoder = { type = "WordPiece", prefix = "##", cleanup = true },
        model = { type = "WordPiece", unk_token = "[UNK]", continuing_subword_prefix = "##",
            max_input_chars_per_word = 10, vocab = vocabulary } }
end

describe("te.tokenizer.load of WordPiece", function()
    local folder
    before_each(function()
        folder = os.tmpname() .. ".tokenizer"
        te._core.mkdir(folder)
    end)
    after_each(function() os.execute("rm -rf " .. folder) end)

    local function load(changes)
        local file = fields()
        for _, change in ipairs(changes or {}) do change(file) end
        te._core.write_file(folder .. "/tokenizer.json", json.encode(file))
        return te.tokenizer.load(folder)
    end

    it("gives the longest tokens of each word, or the unknown one", function()
        local tokenizer = load()
        for _, case in ipairs {
            { "unaffable", { 5, 6, 7 } }, { "Running runs", { 8, 9, 8, 10 } }, { "unq", { 1 } },
            { "xxxxxxxxxx", { 20, 21, 21, 21, 21, 21, 21, 21, 21, 21 } }, { "xxxxxxxxxxx", { 1 } },
            { "ééééééééééé", { 1 } }, { "aaaaaaaaaa", { 11, 12, 12, 12, 12, 12, 12, 12, 12, 12 } },
            { "", {} }, { " \t\n", {} }, { "don't", { 24, 18, 25 } },
        } do
            assert.same(case[2], tokenizer:encode(case[1]), case[1])
        end
    end)

    it("says which field has no number, and which file no object", function()
        assert.error_matches(function() load { function(file) file.model.max_input_chars_per_word = "x" end } end,
            'model.max_input_chars_per_word: expected a number, got "x"', 1, true)
        os.remove(folder .. "/tokenizer.json")
        te._core.write_file(folder .. "/vocab.txt", table.concat(WORDS, "\n"))
        te._core.write_file(folder .. "/tokenizer_config.json", "true")
        assert.error_matches(function() te.tokenizer.load(folder) end, "tokenizer_config.json: expected an object", 1,
            true)
    end)

    it("keeps no long words", function()
        local tokenizer = load()
        local function kilobytes()
            collectgarbage()
            collectgarbage()
            return collectgarbage "count"
        end
        local before = kilobytes()
        for i = 1, 20 do assert.same({ 1 }, tokenizer:encode(("x"):rep(100000 + i))) end
        assert.is_true(kilobytes() - before < 1000)
        assert.same({ 8, 10 }, tokenizer:encode "runs")
    end)

    it("takes the time of a text's length where tokens strip", function()
        local tokenizer = load { function(file)
            local mask = file.added_tokens[5]
            mask.lstrip, mask.rstrip = true, true
        end }
        assert.same({ 11, 4, 4, 11, 4 }, tokenizer:encode "a [MASK]  [MASK] a[MASK] ")
        local strip, strippers = require("te.tokenizer.around").strip, tokenizer.strippers
        local function seconds(n)
            local text, begin = ("a [MASK]"):rep(n), os.clock()
            assert.equal(7 * n, #strip(strippers, text))
            return os.clock() - begin
        end
        seconds(10000)
        assert.is_true(seconds(80000) < 24 * seconds(10000) + 0.2)
    end)

    it("normalizes and cuts as BERT does", function()
        local tokenizer = load()
        for _, case in ipairs {
            { "Café,CAFÉS!", { 13, 16, 14, 15 } }, { "cafe\204\129", { 13 } }, { "a中a", { 11, 19, 11 } },
            { "a\226\128\139x", { 11, 21 } }, { "a\194\160x\227\128\128a", { 11, 20, 11 } },
            { "\0a\239\191\189", { 11 } },
            { "İ ı", { 22, 1 } }, { "a\255x", { 11, 21 } }, { "ẞ", { 29 } },
        } do
            assert.same(case[2], tokenizer:encode(case[1]), case[1])
        end
        tokenizer = load { function(file) file.normalizer.strip_accents = false end }
        assert.same({ 1, 16, 1 }, tokenizer:encode "Café,é")
        tokenizer = load { function(file) file.normalizer.lowercase = false end }
        assert.same({ 1, 1, 11 }, tokenizer:encode "Run Café a")
        tokenizer = load { function(file) file.normalizer = json.null end }
        assert.same({ 1, 8 }, tokenizer:encode "Run run")
    end)

    it("finds special tokens where they stand, and puts them around", function()
        local tokenizer = load()
        assert.same({ 11, 4, 20 }, tokenizer:encode "a[MASK]x")
        assert.same({ 26, 1, 27 }, tokenizer:encode "[mask]")
        assert.same({ 26, 2, 26 }, tokenizer:encode "[[CLS][")
        assert.same({ 2, 8, 3 }, tokenizer:encode("run", { special = true }))
        assert.same({ 2, 8 }, tokenizer:encode("run", { prompt = true }))
        assert.same({ { 2, 8, 3, 11, 20, 3 }, { 0, 0, 0, 1, 1, 1 } },
            { tokenizer:encode("run", { special = true, pair = "a x" }) })
        assert.equal(4, tokenizer:id "[MASK]")
        assert.equal("[CLS] running, a![SEP]", (tokenizer:decode { 2, 8, 9, 16, 11, 15, 3 }:gsub(" %[SEP", "[SEP")))
        assert.equal("running, a!", tokenizer:decode({ 2, 8, 9, 16, 11, 15, 3 }, { skip_special_tokens = true }))
    end)

    it("takes whitespace away beside tokens that say so, and normalizes those that do", function()
        local tokenizer = load { function(file)
            file.added_tokens[5].lstrip = true
            file.added_tokens[6] = { id = #WORDS, content = "Héy", special = false, normalized = true }
        end }
        assert.same({ 11, 4, 20 }, tokenizer:encode "a \194\160 [MASK] x")
        assert.same({ 11, #WORDS, 11 }, tokenizer:encode "a HEYa")
    end)

    it("reads a vocab.txt alone, and is written and described", function()
        te._core.write_file(folder .. "/vocab.txt", table.concat(WORDS, "\n"))
        local tokenizer = te.tokenizer.load(folder)
        assert.same({ 2, 13, 15, 3 }, tokenizer:encode("Café!", { special = true }))
        assert.same({ { 2, 8, 3, 11, 3 }, { 0, 0, 0, 1, 1 } },
            { tokenizer:encode("run", { special = true, pair = "a" }) })
        local copy = folder .. "/copy"
        te._core.mkdir(copy)
        tokenizer:save(copy)
        assert.same({ 2, 13, 15, 3 }, te.tokenizer.load(copy):encode("Café!", { special = true }))
        assert.same({ 8, 9 }, te.tokenizer.parse(tokenizer:describe()):encode "running")
        te._core.write_file(folder .. "/tokenizer_config.json", '{ "do_lower_case": false, "strip_accents": true }')
        assert.same({ 13, 1 }, te.tokenizer.load(folder):encode "café Café")
        os.execute("rm " .. folder .. "/*.txt")
        load():save(copy)
        assert.same({ 8, 9 }, te.tokenizer.load(copy):encode "running")
    end)

    it("refuses what acts and is not supported", function()
        for text, change in pairs {
            ['normalizer.type: expected "BertNormalizer" or null, got "NFKC"'] = function(file)
                file.normalizer = { type = "NFKC" }
            end,
            ['pre_tokenizer: expected "BertPreTokenizer", got "Whitespace"'] = function(file)
                file.pre_tokenizer = { type = "Whitespace" }
            end,
            ['model.unk_token: expected a token of model.vocab, got "<unk>"'] = function(file)
                file.model.unk_token = "<unk>"
            end,
            ["model.vocab: 30 tokens, and one has the id 77"] = function(file) file.model.vocab["ß"] = 77 end,
            ['decoder: expected a "WordPiece" of ##, got "Fuse"'] = function(file) file.decoder = { type = "Fuse" } end,
        } do
            assert.error_matches(function() load { change } end, text, 1, true)
        end
        assert.error_matches(function() load():encode("a", { pair = "b" }) end, "option pair: needs special", 1, true)
    end)
end)
