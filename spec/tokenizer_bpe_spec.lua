local te = require "te"

-- The vocabulary of spec/support/tokenizer.json was trained on this project's README and a few sentences in other
-- languages. Expected ids are those of the Python package `tokenizers` 0.23 with the same files; a kind that is not
-- named expects those of gpt2.
local texts = {
    { "",
        gpt2 = "",
    },
    { "a",
        gpt2 = "64",
        space = "262",
    },
    { " ",
        gpt2 = "220",
    },
    { "The training of a tensor, and the tokenizer's text.",
        gpt2 = "51 71 68 257 269 261 326 299 262 453 11 288 280 352 74 284 486 260 327 304 518 13",
        space = "220 51 71 68 257 269 261 326 299 262 453 11 288 280 352 74 284 486 260 327 304 518 13",
    },
    { "I don't, you'll, we've, they're, it's; I'M, YOU'LL",
        gpt2 = "40 590 531 11 491 534 11 448 533 11 461 532 11 325 327 26 220 40 6 44 11 220 56 46 52 6 43 43",
        space = "220 40 590 531 11 491 534 11 448 533 11 461 532 11 325 327 26 220 40 6 44 11 220 56 46 52 6 43 43",
    },
    { "   runs   of  spaces ",
        gpt2 = "256 459 82 256 299 220 271 79 64 66 264 220",
    },
    { "lines\n\n\nand\r\n\ttabs \n",
        gpt2 = "75 261 264 198 198 198 64 270 201 198 197 83 433 82 220 198",
        space = "504 261 264 198 198 198 64 270 201 198 197 83 433 82 220 198",
    },
    { "0 12 345 6789 12345678",
        gpt2 = "15 293 17 220 18 19 20 220 21 22 23 24 293 17 18 19 20 21 22 23",
        llama3 = "15 220 16 17 220 18 19 20 220 21 22 23 24 220 16 17 18 19 20 21 22 23",
        qwen2 = "15 220 16 17 220 18 19 20 220 21 22 23 24 220 16 17 18 19 20 21 22 23",
        space = "346 293 17 220 18 19 20 220 21 22 23 24 293 17 18 19 20 21 22 23",
    },
    { "Größe, naïve café, où",
        gpt2 = "608 11 347 64 559 623 11 581",
        space = "437 331 553 11 347 64 559 623 11 581",
    },
    { "中文分词测试，日本語のテキスト",
        gpt2 = "629 569 630",
        space = "220 629 569 630",
    },
    { "😀😀👍🏽 👨\226\128\141👩\226\128\141👧 🇩🇪",
        gpt2 = "584 584 287 397 396 338 239 101 158 222 395 239 102 158 222 395 239 100 338 229 102 287 229 103",
        space = "625 287 397 396 338 239 101 158 222 395 239 102 158 222 395 239 100 338 229 102 287 229 103",
    },
    { "<|endoftext|>text<|begin|>>more<|begin|> tetrain_tetrain <|begi",
        gpt2 = "636 268 518 638 76 266 68 637 220 357 62 357 220 27 91 65 68 70 72",
        space = "636 304 518 638 290 266 68 637 220 357 220 62 357 220 27 91 65 68 70 72",
    },
    { "a b\227\128\128c\225\160\142d\194\160e",
        gpt2 = "64 289 565 222 66 157 254 236 67 126 254 68",
        space = "262 289 565 222 66 157 254 236 67 126 254 68",
    },
    { "e\204\129 a\204\129\204\163 \226\132\171",
        gpt2 = "68 136 223 262 136 223 136 96 220 158 226 104",
        qwen2 = "385 220 157 118 94 136 223 394 227",
        space = "324 136 223 262 136 223 136 96 220 158 226 104",
    },
    { "x = {1, 2.5e-3, \"three\"} -- !?...",
        gpt2 = "87 307 423 16 11 343 13 20 68 12 18 11 570 353 277 68 1 92 342 220 0 30 13 13 13",
        llama3 = "87 307 423 16 11 220 17 13 20 68 12 18 11 570 353 277 68 1 92 342 220 0 30 13 13 13",
        qwen2 = "87 307 423 16 11 220 17 13 20 68 12 18 11 570 353 277 68 1 92 342 220 0 30 13 13 13",
        space = "420 307 423 16 11 343 13 20 68 12 18 11 570 353 277 68 1 92 342 220 0 30 13 13 13",
    },
    { "\000\001\127 \194\128\205\184",
        gpt2 = "188 189 221 220 126 222 137 116",
        space = "220 188 189 221 220 126 222 137 116",
    },
    { ("the training "):rep(6),
        gpt2 = "353 68 257 269 261 326 280 257 269 261 326 280 257 269 261 326 280 257 269 261 326 280 257 269 261 "
            .. "326 280 257 269 261 326 220",
        space = "280 257 269 261 326 280 257 269 261 326 280 257 269 261 326 280 257 269 261 326 280 257 269 261 326 "
            .. "280 257 269 261 326 220",
    },
    { "ελληνικά και Ελληνικά",
        gpt2 = "563 617 220 614",
        space = "574 617 220 614",
    },
    { "training",
        gpt2 = "309 326",
        space = "257 269 261 326",
    },
}

local SPLIT = [=[(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*]=]
    .. [=[|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+]=]
local SEQUENCE = [[{"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": "%s"}, "behavior": "Isolated", "invert": false},
    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]}]]
local BYTES = [[{"type": "ByteLevel", "add_prefix_space": %s, "trim_offsets": true, "use_regex": true}]]

-- Value of each field by kind of tokenizer.
local kinds = {
    gpt2 = {},
    space = { pre_tokenizer = BYTES:format("true") },
    llama3 = { pre_tokenizer = SEQUENCE:format(SPLIT:format("{1,3}")), ignore_merges = "true" },
    qwen2 = { pre_tokenizer = SEQUENCE:format(SPLIT:format("")), normalizer = [[{"type": "NFC"}]] },
}

-- Loads what a text says.
local function load_text(text)
    local path = os.tmpname()
    local file = assert(io.open(path, "w"))
    file:write(text)
    file:close()
    local ok, result = pcall(te.tokenizer.load, path)
    os.remove(path)
    if not ok then error((result:gsub(path:gsub("%p", "%%%0"), "FILE")), 0) end
    return result
end

-- The file of spec/support with other values of some fields.
local function load_kind(fields)
    local text = require("spec.support.shell").read "spec/support/tokenizer.json"
    for name, value in pairs(fields) do
        local n
        text, n = text:gsub('("' .. name .. '": )%b{}', function(key) return key .. value end, 1)
        if n == 0 then
            text, n = text:gsub('("' .. name .. '": )%w+', function(key) return key .. value end, 1)
        end
        assert(n == 1, name)
    end
    return load_text(text)
end

-- A small file: fields of the file and, as in `model`, of its model.
local function small(fields, model)
    local m = { type = '"BPE"', vocab = '{"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}', merges = '["a b"]' }
    local f = { pre_tokenizer = BYTES:format("false"), decoder = '{"type": "ByteLevel"}' }
    for name, value in pairs(model or {}) do m[name] = value end
    for name, value in pairs(fields or {}) do f[name] = value end
    local function object(entries)
        local parts = {}
        for name, value in pairs(entries) do parts[#parts + 1] = ('"%s": %s'):format(name, value) end
        return "{" .. table.concat(parts, ", ") .. "}"
    end
    f.model = f.model or object(m)
    return load_text(object(f))
end

local function added(id, content, more)
    return ('[{"id": %s, "content": %s, "normalized": false%s}]'):format(id, content, more or "")
end

describe("te.tokenizer.load", function()
    for kind, fields in pairs(kinds) do
        it(kind .. ": the ids of every text", function()
            local tok = load_kind(fields)
            assert.equal(639, tok.vocab_size)
            for _, case in ipairs(texts) do
                assert.equal(case[kind] or case.gpt2, table.concat(tok:encode(case[1]), " "), case[1])
            end
        end)
    end

    it("decodes to the bytes of the text", function()
        local tok, bytes = load_kind(kinds.gpt2), {}
        for byte = 0, 255 do bytes[#bytes + 1] = string.char(byte) end
        texts[#texts + 1] = { table.concat(bytes) }
        texts[#texts + 1] = { "cut \226\130 short, stray \128, never \192\175 \237\160\128 \255tetrain\255" }
        for _, case in ipairs(texts) do assert.equal(case[1], tok:decode(tok:encode(case[1]))) end
        local ids = tok:encode "日"
        assert.is_true(#ids > 1 or #tok:decode { ids[1] } == 3)
        for _, id in ipairs(tok:encode "\255\254") do assert.equal(1, #tok:decode { id }) end
        assert.equal("", tok:decode {})
    end)

    it("long texts", function()
        local tok = load_kind(kinds.gpt2)
        local once = tok:encode "The training of a tensor.\n"
        local all = tok:encode(("The training of a tensor.\n"):rep(3000))
        assert.equal(3000 * #once, #all)
        for i, id in ipairs(all) do
            if id ~= once[(i - 1) % #once + 1] then error(("token %d"):format(i)) end
        end
        local spaces = (" "):rep(300000) .. "\255" .. ("é"):rep(100000)
        assert.equal(spaces, tok:decode(tok:encode(spaces)))
    end)

    it("finds the token of a text", function()
        local tok = load_kind(kinds.gpt2)
        assert.equal(636, tok:id "<|endoftext|>")
        assert.equal(638, tok:id "<|begin|>>")
        assert.equal(tok:encode(" the")[1], tok:id " the")
        assert.is_nil(tok:id "no such token")
        assert.is_nil(tok:id "")
        assert.equal("<|endoftext|>", tok:decode { 636 })
    end)

    it("ignore_merges: a piece that is a token becomes that", function()
        assert.same({ 3, 2 }, small():encode "abc")
        assert.same({ 4 }, small({}, { ignore_merges = "true" }):encode "abc")
        assert.same({ 3, 2, 2 }, small({}, { ignore_merges = "true" }):encode "abcc")
    end)

    it("merges as pairs", function()
        assert.same({ 3, 2 }, small({}, { merges = '[["a", "b"]]' }):encode "abc")
        assert.same({ 3, 2 }, small({}, { merges = '["#version: 0.2", "a b"]' }):encode "abc")
    end)

    it("decodes added tokens literally, and others that are not of the alphabet", function()
        local tok = small({ added_tokens = added(5, '"é ü"') }, { vocab = '{"a": 0, "日": 1, "é": 2, "ab": 3, "b": 4}' })
        assert.equal("é üa日\233", tok:decode { 5, 0, 1, 2 })
        assert.same({ 0, 5, 3 }, tok:encode "aé üab")
        -- one that spells a byte is that byte as well
        tok = small({ added_tokens = added(2, '"é"') }, { vocab = '{"a": 0, "ab": 1, "é": 2, "b": 3}' })
        assert.same({ 0, 2, 2 }, tok:encode "aé\233")
        assert.equal("a\233", tok:decode { 0, 2 })
    end)

    it("leaves out special tokens where that is asked for", function()
        local tok = small({ added_tokens = ('[{"id": 5, "content": "<s>", "normalized": false, "special": true}, '
            .. '{"id": 6, "content": "<t>", "normalized": false, "special": false}]') })
        local ids = tok:encode "<s>ab<t>c<s>"
        assert.same({ 5, 3, 6, 2, 5 }, ids)
        assert.equal("<s>ab<t>c<s>", tok:decode(ids))
        assert.equal("ab<t>c", tok:decode(ids, { skip_special_tokens = true }))
        assert.same({ "ab", "" }, tok:decode(te.tensor({ { 5, 3 }, { 5, 5 } }, { dtype = "int64" }),
            { skip_special_tokens = true }))
        assert.equal("b", te.tokenizer.byte():decode({ 98 }, { skip_special_tokens = true }))
    end)

    it("cuts and fills up no texts, whatever was last asked of the file", function()
        local tok = small { truncation = '{"max_length": 1, "strategy": "LongestFirst", "stride": 0}',
            padding = '{"strategy": {"Fixed": 5}, "pad_id": 0, "pad_token": "a"}' }
        assert.same({ 3, 2 }, tok:encode "abc")
    end)

    it("special tokens around a text where they are asked for", function()
        local template = [[{"type": "Sequence", "processors": [{"type": "ByteLevel", "trim_offsets": false},
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
             "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [2, 3], "tokens": ["c", "ab"]}}}]}]]
        local tok = small { post_processor = template }
        assert.same({ 0 }, tok:encode "a")
        assert.same({ 4, 0, 2, 3 }, tok:encode("a", { special = true }))
        assert.same({ 4, 2, 3 }, tok:encode("", { special = true }))
        assert.equal(4, tok:start())
        assert.same({ 0 }, small():encode("a", { special = true }))
        assert.error_matches(function() tok:encode("a", { specials = true }) end, 'did you mean "special"')
    end)

    it("knows where a text may begin", function()
        assert.equal(636, load_kind(kinds.gpt2):start())
        assert.equal(0, small():start())
    end)

    it("reads folders, and comes back from its description", function()
        local tok = te.tokenizer.load "spec/support"
        assert.equal("bpe spec/support/tokenizer.json", tok:describe())
        assert.same(tok:encode "The training", te.tokenizer.parse(tok:describe()):encode "The training")
        assert.error_matches(function() te.tokenizer.load "spec/no_such" end, "te.tokenizer.load: spec/no_such: ")
    end)

    it("steps of cutting, one after the other", function()
        local function split(pattern)
            return ('{"type": "Split", "pattern": %s, "behavior": "Isolated", "invert": false}'):format(pattern)
        end
        local function cut(...)
            local steps = { ... }
            steps[#steps + 1] = '{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}'
            steps = table.concat(steps, ",")
            return small { pre_tokenizer = '{"type": "Sequence", "pretokenizers": [' .. steps .. "]}" }
        end
        assert.same({ 3, 2, 3 }, cut():encode "abcab")
        assert.same({ 0, 1, 2, 3 }, cut(split '{"Regex": "^a"}'):encode "abcab")
        assert.same({ 0, 1, 2, 0, 1 }, cut(split '{"String": "c"}', split '{"Regex": "^a"}'):encode "abcab")
        assert.same({ 3, 2, 3 }, cut(split '{"String": "."}'):encode "abcab")
        -- one cut at the token "ab" or none
        for pattern, cuts in pairs { ["(?i)C|B"] = true, ["(?i:c|B)"] = true, ["(?-i:B)"] = false,
            ["((?i)B)|C"] = true, ["(?i)(?-i)B"] = false, ["(?#B)(?i)B"] = true, ["(?i:a(?-i:B))"] = false,
            ["(?:(?i)x)|B"] = false, ["(?=B)|b"] = true, ["(?<=a)b"] = true, ["(?<!a)b"] = false, ["(?<n>b)"] = true,
            ["(?>b+)"] = true, ["b{1,2}?"] = true, ["x{2}|b{1}"] = true, ["(?:ss|ß|ff)|b"] = true,
            ["(?i:[s]s|s[tf]|f|t)|b"] = true, ["(?i:'s|'t)|\\\\p{Lu}|b"] = true, ["[(?s]|b"] = true,
            ["\\\\(?b"] = true, ["(?i:s)x(?i:s)|(?i:f)i|b"] = true } do
            assert.same(cuts and { 0, 1, 2 } or { 3, 2 }, cut(split('{"Regex": "' .. pattern .. '"}')):encode "abc")
        end
    end)

    it("refuses what acts and is not supported", function()
        local function refused(message, fields, model)
            assert.error_matches(function() small(fields, model) end, message, 1, true)
        end
        local prefix = "te.tokenizer.load: FILE: "
        refused(prefix .. 'model.type: expected "BPE" or "WordPiece", got "Unigram"', {}, { type = '"Unigram"' })
        refused('model.unk_token: expected none, which is all that is supported, got "a"', {}, { unk_token = '"a"' })
        refused("model.dropout", {}, { dropout = "0.1" })
        refused('model.end_of_word_suffix: expected none, which is all that is supported, got "</w>"', {},
            { end_of_word_suffix = '"</w>"' })
        refused("model.continuing_subword_prefix", {}, { continuing_subword_prefix = '"##"' })
        refused("model.ignore_merges: expected a boolean, got 1", {}, { ignore_merges = "1" })
        refused('normalizer.type: expected "NFC" or null, got "NFKC"', { normalizer = '{"type": "NFKC"}' })
        refused('decoder.type: expected "ByteLevel", got "Metaspace"', { decoder = '{"type": "Metaspace"}' })
        refused('decoder: expected one "ByteLevel", got nil', { decoder = "null" })
        refused('pre_tokenizer.type: expected a "ByteLevel", which must be the last step, got "Digits"',
            { pre_tokenizer = '{"type": "Digits"}' })
        refused('pre_tokenizer: expected a "ByteLevel", got nil', { pre_tokenizer = "null" })
        refused('pre_tokenizer.pretokenizers[0].type: expected "Split", got "Digits"', { pre_tokenizer =
            '{"type": "Sequence", "pretokenizers": [{"type": "Digits"}, ' .. BYTES:format("false") .. "]}" })
        refused('post_processor.type: expected "ByteLevel" or one "TemplateProcessing", got "OtherProcessing"',
            { post_processor = '{"type": "OtherProcessing"}' })
        refused("added_tokens[0].lstrip: expected none, which is all that is supported, got true",
            { added_tokens = added(5, '"x"', ', "lstrip": true'):gsub("false", "true", 1) })
        refused("added_tokens[0].single_word", { added_tokens = added(5, '"x"', ', "single_word": true') })
        local function split(fields)
            return { pre_tokenizer = '{"type": "Sequence", "pretokenizers": [{"type": "Split", ' .. fields .. "}, "
                .. BYTES:format("false") .. "]}" }
        end
        local field = "pre_tokenizer.pretokenizers[0]."
        refused(field .. 'behavior: expected "Isolated", got "Removed"', split '"behavior": "Removed"')
        refused(field .. "invert: expected false, got true", split '"behavior": "Isolated", "invert": true')
        refused(field .. "pattern: expected a list or an object, got nil", split '"behavior": "Isolated"')
        for pattern, part in pairs { ["a\\\\w"] = "\\w", ["[\\\\S]"] = "\\S in []", ["[a&&b]"] = "&& in []",
            ["[[:alpha:]]"] = "[: in []", ["a{1,3}+"] = "}+", ["\\\\h"] = "\\h", ["[]a]"] = "[]", ["a{,2}"] = "{,",
            ["a{3}?"] = "}?", ["a{1 }"] = "{1", ["b{2"] = "{2", ["(?s)."] = "(?s", ["(?m:.)"] = "(?m",
            ["(?U)a"] = "(?U", ["(?J)a"] = "(?J", ["(?n)a"] = "(?n", ["(?^i)a"] = "(?^", ["(?x) a"] = "(?x",
            ["(?|a|b)"] = "(?|", ["(?P<n>a)"] = "(?P", ["(?'n'a)"] = "(?'", ["(*UTF)a"] = "(*U", ["(?C1)a"] = "(?C",
            ["(?R)"] = "(?R", ["(?(1)a)"] = "(?(", ["(?#a\\\\)"] = "(?#", ["(?i-s:a)"] = "(?i",
            ["a(?i)b|c"] = "an option that does not stand at the start of its group",
            ["(?:a|(?i)b)"] = "an option that does not stand at the start of its group",
            ["(?i)a[\\\\p{Lu}]"] = "\\p{Lu} in [] under (?i)", ["(?i:SS)"] = "SS under (?i)",
            ["(?i)s(?:T)"] = "sT under (?i)", ["(?i)(?:f){1}i"] = "fi under (?i)",
            ["(?i)f(?#x)l"] = "fl under (?i)", ["(?i:ß)"] = "what is not ASCII under (?i)",
            ["(?i:[ß])"] = "what is not ASCII under (?i)" } do
            refused(field .. "pattern.Regex: " .. part .. " in the pattern",
                split('"behavior": "Isolated", "pattern": {"Regex": "' .. pattern .. '"}'))
        end
        refused(prefix .. 'in the regular expression "(a", at offset 2: ',
            split '"behavior": "Isolated", "pattern": {"Regex": "(a"}')
    end)

    it("says what is wrong with a damaged file", function()
        local function wrong(message, fields, model)
            assert.error_matches(function() small(fields, model) end, message, 1, true)
        end
        assert.error_matches(function() load_text "[1, 2" end, "te.tokenizer.load: FILE: line 1, column")
        assert.error_matches(function() load_text "5" end, "the file: expected an object, got 5")
        assert.error_matches(function() load_text "{}" end, "FILE: model: expected a list or an object, got nil")
        wrong("model: expected a list or an object, got 3", { model = "3" })
        wrong("model.vocab: expected a list or an object, got nil", {}, { vocab = "null" })
        wrong("model.vocab: expected an object", {}, { vocab = "[1, 2]" })
        wrong("model.vocab: there are no tokens", {}, { vocab = "{}", merges = "[]" })
        wrong("expected a token's id, got -1", {}, { vocab = '{"a": -1, "b": 1}' })
        wrong("expected a token's id, got 0.5", {}, { vocab = '{"a": 0.5, "b": 1}' })
        wrong("expected a token's id, got 1e+15", {}, { vocab = '{"a": 0, "b": 1000000000000000}' })
        wrong('model.vocab["a"]: expected a token\'s id, got "x"', {}, { vocab = '{"a": "x"}' })
        wrong("id 0 is that of another token as well", {}, { vocab = '{"a": 0, "b": 0}', merges = "[]" })
        wrong("no token has the id 1, and one has 2000000000", {},
            { vocab = '{"a": 0, "b": 2000000000}', merges = "[]" })
        wrong('model.merges[0]: model.vocab has no token "x"', {}, { merges = '["a x"]' })
        wrong('model.merges[1]: model.vocab has no token "ba"', {}, { merges = '["a b", "b a"]' })
        wrong("model.merges[0]: expected two tokens, got", {}, { merges = '["ab"]' })
        wrong("model.merges[0]: expected two tokens, got", {}, { merges = '["a b c"]' })
        wrong("model.merges[0]: expected two tokens, got", {}, { merges = '[["a", 5]]' })
        wrong("model.merges[0]: expected two tokens, got", {}, { merges = "[7]" })
        wrong("model.merges[1]: expected two tokens, got nil", {}, { merges = '["a b", null, "a b"]' })
        wrong("model.merges: expected a list", {}, { merges = '{"a": "b"}' })
        wrong("model.merges: expected a list or an object, got nil", {}, { merges = "null" })
        wrong("added_tokens: expected a list or an object, got 5", { added_tokens = "5" })
        wrong("added_tokens[0]: expected an object, got 5", { added_tokens = "[5]" })
        wrong("added_tokens[0].content: expected a string, got nil", { added_tokens = '[{"id": 5}]' })
        wrong("added_tokens[0].content: expected a text", { added_tokens = added(5, '""') })
        wrong("added_tokens[0].id: expected a number", { added_tokens = added('"5"', '"x"') })
        wrong("added_tokens[0].normalized: expected a boolean", { added_tokens = '[{"id": 5, "content": "x"}]' })
        wrong("added_tokens[0].id: id 3 is that of another token as well", { added_tokens = added(3, '"x"') })
        wrong("added_tokens[0].id: expected 3, as in model.vocab, got 5", { added_tokens = added(5, '"ab"') })
        wrong("no token has the id 5, and one has 6", { added_tokens = added(6, '"x"') })
        wrong("normalizer: expected an object or null, got 5", { normalizer = "5" })
        wrong("pre_tokenizer.add_prefix_space: expected a boolean", { pre_tokenizer = '{"type": "ByteLevel"}' })
        wrong("pre_tokenizer.pretokenizers: expected a list", { pre_tokenizer = '{"type": "Sequence"}' })
        wrong("pre_tokenizer.pretokenizers[0]: expected an object",
            { pre_tokenizer = '{"type": "Sequence", "pretokenizers": [5]}' })
        local function template(single, tokens)
            return { post_processor = ('{"type": "TemplateProcessing", "single": %s, "special_tokens": %s}')
                :format(single, tokens or "{}") }
        end
        wrong("post_processor.single: expected a template with the Sequence A", template "[]")
        wrong("post_processor.single: expected a list", template "null")
        wrong("post_processor.single[0]: expected a SpecialToken, or once the Sequence A", template "[5]")
        wrong("post_processor.single[0]: expected one of special_tokens", template '[{"SpecialToken": {"id": "x"}}]')
        wrong("post_processor.single[0]: expected a token's id, got 5",
            template('[{"SpecialToken": {"id": "x"}}]', '{"x": {"ids": [5]}}'))
    end)

    it("refuses added tokens that cannot be normalized, and two steps that put a space in front", function()
        local function made(more)
            local o = { tokens = { "a", "b" }, merges = {}, opaque = {}, steps = {}, added = {} }
            for name, value in pairs(more) do o[name] = value end
            return te._core.tokenizer(o)
        end
        assert.error_matches(function() made { nfc = true, added = { "a\255", 1, true } } end, "byte 2 is no UTF%-8")
        made { nfc = true, added = { "a\255", 1, false } }
        assert.error_matches(function()
            made { steps = { false, false, false, false, false, false, false, false } }
        end, "two steps put a space in front")
    end)

    it("names what cannot be encoded or decoded", function()
        local tok = small()
        assert.error_matches(function() tok:encode "abx" end,
            "te.tokenizer: the vocabulary has no token for the byte 0x78")
        assert.error_matches(function() tok:encode(5) end, "te.tokenizer: text: expected string, got 5")
        assert.error_matches(function() tok:decode { 0, 5 } end, "te.tokenizer: entry 2: no token is number 5")
        assert.error_matches(function() tok:decode { -1 } end, "te.tokenizer: entry 1: no token is number %-1")
        assert.error_matches(function() tok:decode { 0.5 } end, "entry 1: no token is number 0.5")
        assert.error_matches(function() tok:decode { 2 ^ 40 } end, "entry 1: no token is number 1099511627776")
        assert.error_matches(function() tok:decode { "a" } end, 'entry 1: no token is string "a"')
        assert.error_matches(function() tok:decode(5) end, "te.tokenizer: ids: expected table, got 5")
        assert.error_matches(function() tok:decode { 0 / 0 } end, "entry 1: no token is")
    end)
end)
