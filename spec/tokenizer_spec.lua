local te = require "te"

describe("te.tokenizer", function()
    local mixed = "a\0b héllo €𐍈 \255\128 \237\160\128 \192\175 \244\144\128\128"

    it("byte: every text survives", function()
        local tok = te.tokenizer.byte()
        assert.equal(256, tok.vocab_size)
        assert.same({ 97, 0, 255 }, tok:encode("a\0\255"))
        assert.equal(mixed, tok:decode(tok:encode(mixed)))
    end)

    it("char: every text survives, invalid UTF-8 byte by byte", function()
        local tok = te.tokenizer.char(mixed)
        assert.equal(mixed, tok:decode(tok:encode(mixed)))
        assert.same({ 0, 1, 0 }, te.tokenizer.char("ab"):encode("aba"))
        assert.equal(3, te.tokenizer.char("€é€a").vocab_size)
    end)

    it("agrees with the engine's encoder", function()
        local function encode(points)
            local loader = te._core.tokens_open { tokens = te._core.encode_text(mixed .. " ", points), batch = 1,
                block = #te.tokenizer.char(mixed):encode(mixed), sequential = true }
            local x = loader:next()
            loader:close()
            return x:totable()[1]
        end
        local tok = te.tokenizer.char(mixed)
        assert.same(tok.points, te._core.text_points(mixed))
        assert.same(tok:encode(mixed), encode(tok.points))
        local bytes = te.tokenizer.byte():encode(mixed)
        for i, id in ipairs(encode(nil)) do assert.equal(bytes[i], id) end
    end)

    it("names a byte that it does not know", function()
        local few = te.tokenizer.char "ab"
        assert.error_matches(function() few:encode "a\255" end,
            "te.tokenizer: byte 0xff, which is no UTF-8, is not among the 2 known ones", 1, true)
        assert.error_matches(function() few:encode "\206\177" end, "(code point 945) is not among", 1, true)
        assert.error_matches(function() te._core.encode_text("ab\255", few.points) end,
            "offset 2: the vocabulary has no byte 0xff", 1, true)
    end)

    it("knows where a text may begin", function()
        assert.equal(10, te.tokenizer.byte():start())
        assert.equal(1, te.tokenizer.char("\t\nab"):start())
        assert.equal(0, te.tokenizer.char("ab"):start())
    end)

    it("names an unknown character", function()
        assert.error_matches(function() te.tokenizer.char("ab"):encode("c") end, 'character "c"')
        assert.error_matches(function() te.tokenizer.char("ab"):decode { 2 } end, "token 2 of a vocabulary of 2")
    end)

    it("names what cannot be encoded or decoded", function()
        for _, tok in ipairs { te.tokenizer.byte(), te.tokenizer.char "ab" } do
            local size = tok.vocab_size
            assert.error_matches(function() tok:encode(5) end, "te.tokenizer: text: expected string, got 5")
            assert.error_matches(function() tok:decode(5) end, "te.tokenizer: ids: expected table, got 5")
            for _, id in ipairs { 65.7, 300, -1, "a" } do
                assert.error_matches(function() tok:decode { 0, id } end,
                    ("te.tokenizer: token %s of a vocabulary of %d"):format(id, size), 1, true)
            end
            assert.error_matches(function() tok:decode { 0, nil, 1 } end, "te.tokenizer: ids: entry 2 is nil")
            assert.error_matches(function() tok:decode({ 0 }, { continue = true }) end, 'did you mean "continues"')
            assert.error_matches(function() tok:encode("a", { specials = true }) end, 'did you mean "special"')
            assert.equal(tok:decode { 0 }, tok:decode({ 0 }, { continues = true }))
        end
    end)

    it("decodes tensors: one text, or one for each row", function()
        local text = "hello, world"
        for _, tok in ipairs { te.tokenizer.byte(), te.tokenizer.char(text),
            te.tokenizer.load "spec/support/tokenizer.json" } do
            local ids = tok:encode(text)
            for _, dtype in ipairs { "int64", "int32" } do
                local t = te.tensor(ids, { dtype = dtype })
                assert.equal(text, tok:decode(t))
                assert.same({ text, text }, tok:decode(te.stack { t, t }))
                assert.equal(text, tok:decode(te.stack({ t, t }, 2):select(2, 1)))
                assert.equal(tok:decode { ids[1] }, tok:decode(t:narrow(1, 1, 1)))
                assert.equal("", tok:decode(t:narrow(1, 1, 0)))
            end
            assert.equal(text, tok:decode(te.tensor(ids, { dtype = "int32" }), { continues = true }))
            for message, t in pairs {
                ["float32 {2}"] = te.ones { 2 }, ["bool {1}"] = te.tensor { true },
                ["int64 {}"] = te.tensor(1, { dtype = "int64" }), ["int64 {1,1,2}"] = te.zeros({ 1, 1, 2 },
                    { dtype = "int64" }),
            } do
                assert.error_matches(function() tok:decode(t) end,
                    "te.tokenizer: ids: expected whole numbers {n} or {batch, n}, got " .. message, 1, true)
            end
            assert.error_matches(function() tok:decode(te.tensor({ 0, 5000 }, { dtype = "int64" })) end, "token")
            local two = te.tensor({ 0, 1 }, { dtype = "int64" })
            assert.error_matches(function() tok:decode(two, { continue = true }) end, 'did you mean "continues"')
        end
    end)

    it("knows what ends a text", function()
        assert.same({}, te.tokenizer.byte():ends())
        assert.same({}, te.tokenizer.char("ab"):ends())
        local tok = te.tokenizer.load "spec/support/tokenizer.json"
        assert.same({ tok:id "<|endoftext|>" }, tok:ends())
    end)

    it("comes back from its description", function()
        local tok = te.tokenizer.char("héllo")
        assert.same(tok.points, te.tokenizer.parse(tok:describe()).points)
        assert.equal("byte", te.tokenizer.parse("byte"):describe())
        local none = te.tokenizer.parse(te.tokenizer.char(""):describe())
        assert.same({ 0, "" }, { none.vocab_size, none:decode(none:encode("")) })
        assert.error_matches(function() te.tokenizer.parse("nonsense") end, "nonsense")
        assert.error_matches(function() te.tokenizer.parse("char 97 9999999") end, "points%[2%]: .*, got 9999999")
        assert.same(tok.points, te.tokenizer.from_points(tok.points).points)
        for message, points in pairs { ['points: expected table, got "x"'] = "x",
            ['points[1]: expected integer from 0 to 1114111, got "a"'] = { "a" },
            ["points[2]: expected integer from 0 to 1114111, got 1.5"] = { 1, 1.5 } } do
            assert.error_matches(function() te.tokenizer.from_points(points) end,
                "te.tokenizer.from_points: " .. message, 1, true)
        end
    end)
end)
