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

    it("comes back from its description", function()
        local tok = te.tokenizer.char("héllo")
        assert.same(tok.points, te.tokenizer.parse(tok:describe()).points)
        assert.equal("byte", te.tokenizer.parse("byte"):describe())
        assert.error_matches(function() te.tokenizer.parse("nonsense") end, "nonsense")
    end)
end)
