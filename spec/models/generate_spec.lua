--- What a model continues texts by: prompts of different lengths against each alone, sampling against probabilities
--- made by loops over numbers, and ends.

local te = require "te"
local options = require "te.options"

local VOCAB = 23
local PROMPTS = { { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }, { 3, 1 }, { 4, 4, 4, 4 }, { 9 }, { 7, 20 } }

local KINDS = {
    gpt = { kind = "gpt", bias = true },
    llama = { kind = "llama", n_kv_head = 1, window = 5, attention_sinks = true, qk_norm = true },
    ["llama with experts"] = { kind = "llama", n_expert = 3, n_inner = 24 },
}

local function model_of(name, block_size)
    local config = { vocab_size = VOCAB, block_size = block_size or 40, n_layer = 2, n_head = 2, n_embd = 16,
        init_std = 0.5 }
    for key, value in pairs(KINDS[name]) do config[key] = value end
    local kind = config.kind
    config.kind = nil
    te.manual_seed(2)
    return te.models[kind](config)
end

local function ids(rows) return te.tensor(rows, { dtype = "int32" }) end

-- Rows without what fills them up.
local function texts(all, lengths)
    local rows, sizes = all:totable(), lengths:totable()
    for i, row in ipairs(rows) do
        for k = sizes[i] + 1, #row do row[k] = nil end
    end
    return rows
end

describe("generate", function()
    for name in pairs(KINDS) do
        it("continues prompts of different lengths as each alone: " .. name, function()
            for _, block_size in ipairs { 40, 14 } do -- 14: also past its context
                local model, alone = model_of(name, block_size), {}
                for i, prompt in ipairs(PROMPTS) do
                    alone[i] = model:generate(ids { prompt }, 9, { temperature = 0, use_cache = false }):totable()[1]
                end
                for _, use_cache in ipairs { true, false } do
                    local all, lengths = model:generate(PROMPTS, 9, { temperature = 0, use_cache = use_cache })
                    assert.same({ 5, 20 }, all.shape)
                    assert.same({ 20, 11, 13, 10, 11 }, lengths:totable())
                    assert.same(alone, texts(all, lengths))
                    for i, row in ipairs(all:totable()) do
                        for k = #alone[i] + 1, 20 do assert.equal(0, row[k]) end
                    end
                end
            end
        end)

        it("ends each row at its end: " .. name, function()
            local model = model_of(name)
            local whole = texts(model:generate(PROMPTS, 12, { temperature = 0 }))
            local ends = { whole[1][14], whole[2][4], whole[5][9] }
            local is_end, expected = {}, {}
            for _, id in ipairs(ends) do is_end[id] = true end
            for i, row in ipairs(whole) do
                expected[i] = {}
                for k, id in ipairs(row) do
                    expected[i][k] = id
                    if k > #PROMPTS[i] and is_end[id] then break end
                end
            end
            for _, use_cache in ipairs { true, false } do
                local all, lengths = model:generate(PROMPTS, 12, { temperature = 0, eos = ends, use_cache = use_cache })
                assert.same(expected, texts(all, lengths))
                local longest = 0
                for i, row in ipairs(expected) do longest = math.max(longest, #row) end
                assert.equal(longest, all:size(2))
                for i, row in ipairs(all:totable()) do
                    for k = #expected[i] + 1, longest do assert.equal(ends[1], row[k]) end
                end
            end
            local one = { whole[4][1], whole[4][2] }
            assert.same({ one }, model:generate({ PROMPTS[4] }, 12, { temperature = 0, eos = one[2] }):totable())
        end)
    end

    it("draws for a row what it draws without ends, also when others have ended", function()
        local model = model_of "gpt"
        local start, opts = ids { { 1, 2 }, { 3, 4 }, { 5, 6 }, { 7, 8 } }, { top_k = 9, temperature = 1.5 }
        te.manual_seed(8)
        local whole = model:generate(start, 14, opts):totable()
        te.manual_seed(8)
        opts.eos = { whole[1][5], whole[3][8] }
        local all, lengths = model:generate(start, 14, opts)
        local rows, shorter = texts(all, lengths), 0
        for i, row in ipairs(rows) do
            local n = #row
            for k = 1, n do assert.equal(whole[i][k], row[k]) end
            for k = 3, n - 1 do assert.is_true(row[k] ~= opts.eos[1] and row[k] ~= opts.eos[2]) end
            if n < 16 then
                assert.is_true(row[n] == opts.eos[1] or row[n] == opts.eos[2])
                shorter = shorter + 1
            end
        end
        assert.is_true(shorter >= 2)
    end)

    it("draws for a row what it draws without ends, also when it reads on at once where others have ended", function()
        local model, ended = model_of "gpt", 0
        local long, longest = {}, 9
        for i = 1, longest do long[i] = i end
        for _, opts in ipairs { {}, { graph = false }, { use_cache = false, top_p = 0.9 } } do
            local function generate(eos)
                opts.eos = eos
                te.manual_seed(3)
                return texts(model:generate({ { 1 }, long, { 2, 3 } }, 5, opts))
            end
            local whole = generate()
            for eos = 0, VOCAB - 1 do
                for i, row in ipairs(generate(eos)) do
                    for k = 1, #row do assert.equal(whole[i][k], row[k]) end
                    if i ~= 2 and #row < longest then ended = ended + 1 end
                end
            end
        end
        assert.is_true(ended > 5)
    end)

    -- The nucleus of one row of logits, as probabilities by token id + 1.
    local function nucleus(logits, top_p, top_k, temperature)
        local order, sum, largest = {}, 0, -math.huge
        for i, x in ipairs(logits) do largest = math.max(largest, x / temperature) end
        for i, x in ipairs(logits) do order[i] = { i, math.exp(x / temperature - largest) } end
        table.sort(order, function(a, b) return a[2] > b[2] end)
        for i = #order, (top_k or #order) + 1, -1 do order[i] = nil end
        for _, entry in ipairs(order) do sum = sum + entry[2] end
        local kept, before, n = {}, 0, 0
        for i = 1, #logits do kept[i] = 0 end
        for _, entry in ipairs(order) do
            if before >= top_p then break end
            kept[entry[1]], before, n = entry[2] / sum, before + entry[2] / sum, n + 1
        end
        return kept, n
    end

    local function check_nucleus(model, count, cases)
        local start = {}
        for i = 1, count do start[i] = { i % 7, 3 * i % VOCAB } end
        local logits = te.no_grad(model, ids(start)):totable()
        for _, case in ipairs(cases) do
            local top_p, top_k, temperature = unpack(case, 1, 3)
            temperature = temperature or 1
            local weights, sizes = {}, {}
            for i, row in ipairs(logits) do
                local n
                weights[i], n = nucleus(row, top_p, top_k, temperature)
                sizes[n] = true
            end
            te.manual_seed(4)
            local expected = te.multinomial(te.tensor(weights), 1):totable()
            te.manual_seed(4)
            local opts = { top_p = top_p, top_k = top_k, temperature = temperature }
            local got, differ = model:generate(ids(start), 1, opts):totable(), 0
            for i = 1, count do
                assert.is_true(weights[i][got[i][3] + 1] > 0)
                if got[i][3] ~= expected[i][1] then differ = differ + 1 end
            end
            assert.is_true(differ <= 1) -- the same draws, but for a rounding
            if top_p == 1e-6 then assert.same({ [1] = true }, sizes) end
            if top_p == 0.5 then assert.is_nil(sizes[1]) end
            if top_p == 0.5 then assert.is_true(#options.names(sizes) > 1) end
        end
    end

    it("draws from the nucleus alone, by its probabilities", function()
        check_nucleus(model_of "gpt", 200, { { 0.5, nil, 2 }, { 0.9, nil, 2 }, { 0.7, 6 }, { 1, 5 }, { 1e-6 }, { 1 } })
    end)

    it("draws from tokens of a share of the likeliest one's probability, beside other bounds", function()
        local model, start = model_of "gpt", {}
        for i = 1, 150 do start[i] = { i % 7, 3 * i % VOCAB } end
        local logits = te.no_grad(model, ids(start)):totable()
        for _, case in ipairs { { 0.2 }, { 0.5, 1, 4 }, { 0.4, 0.9 }, { 1 } } do
            local min_p, top_p, top_k, kept, dropped = case[1], case[2] or 1, case[3], {}, 0
            for i, row in ipairs(logits) do
                kept[i] = nucleus(row, top_p, top_k, 2)
                local most = math.max(unpack(kept[i]))
                for k, p in ipairs(kept[i]) do
                    if p > 0 and p < min_p * most then kept[i][k], dropped = 0, dropped + 1 end
                end
            end
            assert.is_true(dropped > 20)
            te.manual_seed(4)
            local expected = te.multinomial(te.tensor(kept), 1):totable()
            te.manual_seed(4)
            local got = model:generate(ids(start), 1,
                { min_p = min_p, top_p = top_p, top_k = top_k, temperature = 2 }):totable()
            local differ = 0
            for i, row in ipairs(got) do
                assert.is_true(kept[i][row[3] + 1] > 0)
                if row[3] ~= expected[i][1] then differ = differ + 1 end
            end
            assert.is_true(differ <= 1)
        end
    end)

    -- The likeliest token after a row, of those that it has with logits divided or multiplied by the penalty.
    local function penalized(model, row, penalty)
        local logits, best = te.no_grad(model, ids { row }):totable()[1], 1
        for _, id in ipairs(row) do row[("has %d"):format(id)] = true end
        for i, x in ipairs(logits) do
            if row[("has %d"):format(i - 1)] then logits[i] = x > 0 and x / penalty or x * penalty end
        end
        for i, x in ipairs(logits) do best = x > logits[best] and i or best end
        return best - 1
    end

    it("makes tokens that a row has less likely, or more, also of longer prompts and where others end", function()
        for _, penalty in ipairs { 1.7, 40, 0.6 } do
            local model, expected = model_of("llama", 40), {}
            for i, prompt in ipairs(PROMPTS) do
                expected[i] = { unpack(prompt) }
                for _ = 1, 9 do table.insert(expected[i], penalized(model, { unpack(expected[i]) }, penalty)) end
            end
            for _, use_cache in ipairs { true, false } do
                local opts = { temperature = 0, repetition_penalty = penalty, use_cache = use_cache }
                assert.same(expected, texts(model:generate(PROMPTS, 9, opts)))
                opts.eos = { expected[1][13], expected[2][5] }
                local all, lengths = model:generate(PROMPTS, 9, opts)
                local ended = 0
                for i, row in ipairs(texts(all, lengths)) do
                    for k, id in ipairs(row) do assert.equal(expected[i][k], id) end
                    if #row < #expected[i] then ended = ended + 1 end
                end
                assert.is_true(ended > 0)
            end
        end
    end)

    it("lets a function change the logits, given the rows that have not ended and what they have", function()
        local model, seen = model_of "gpt", {}
        local all, lengths = model:generate(PROMPTS, 5, { temperature = 0, eos = 22, process_logits =
            function(logits, before, rows)
                assert.same({ #rows, VOCAB }, logits.shape)
                assert.equal(#rows, before:size(1))
                local wanted = {}
                for i, row in ipairs(rows) do
                    local new = before:size(2) - #PROMPTS[row]
                    seen[row] = new
                    wanted[i] = new == row % 3 + 1 and 22 or row
                end
                rows[1] = nil
                before:zero_() -- their copies
                return te.where(te.eq(te.arange(0, VOCAB - 1):unsqueeze(1), te.tensor(wanted):unsqueeze(2)), 0, -1e9)
            end })
        for i, row in ipairs(texts(all, lengths)) do
            local expected = { unpack(PROMPTS[i]) }
            for _ = 1, i % 3 + 1 do expected[#expected + 1] = i end
            expected[#expected + 1] = 22
            assert.same(expected, row)
            assert.equal(i % 3 + 1, seen[i])
        end
    end)

    it("draws from the nucleus of many tokens, which are not put in order", function()
        te.manual_seed(3)
        local model = te.models.llama { vocab_size = 3000, block_size = 8, n_layer = 1, n_head = 1, n_embd = 16,
            init_std = 0.5 }
        check_nucleus(model, 40, { { 0.5 }, { 0.95, nil, 0.5 }, { 0.8, 2000 }, { 0.8, 500 }, { 1e-6 }, { 1 } })
    end)

    it("takes tensors as prompts, and none at all for no count", function()
        local model = model_of "llama"
        local list = {}
        for i, prompt in ipairs(PROMPTS) do list[i] = te.tensor(prompt, { dtype = "int64" }) end
        assert.same(model:generate(PROMPTS, 3, { temperature = 0 }):totable(),
            model:generate(list, 3, { temperature = 0 }):totable())
        assert.same(PROMPTS, texts(model:generate(list, 0)))
        local same, lengths = model:generate(ids { { 1, 2 } }, 2)
        assert.same({ 1, 4 }, same.shape)
        assert.is_nil(lengths)
    end)

    it("gives a copy, and no token of logits that are NaN", function()
        local model = te.models.gpt { vocab_size = 7, block_size = 8, n_layer = 1, n_head = 2, n_embd = 8 }
        local prompt = te.tensor({ { 1, 2 } }, { dtype = "int32" })
        model:generate(prompt, 0):fill_(5)
        assert.same({ { 1, 2 } }, prompt:totable())
        if te.get_default_device() ~= "cpu" then return end -- greedy steps of a device are not waited for
        assert.error_matches(function()
            model:generate(prompt, 3, { temperature = 0, process_logits = function(t) return t * (0 / 0) end })
        end, "GPT:generate: the logits are not finite", 1, true)
        te.no_grad(function() model.blocks[1].mlp[2].weight:fill_(0 / 0) end)
        for _, temperature in ipairs { 0, 1 } do
            assert.error_matches(function() model:generate(prompt, 3, { temperature = temperature }) end,
                "GPT:generate: the logits are not finite", 1, true)
        end
    end)

    it("has nothing to continue in a batch without rows", function()
        local model, none = model_of "gpt", te.zeros({ 0, 3 }, { dtype = "int32" })
        local all, lengths = model:generate(none, 2)
        assert.same({ 0, 5 }, all.shape)
        assert.equal("int32", all.dtype)
        assert.is_nil(lengths)
        all, lengths = model:generate(none, 2, { eos = 1 })
        assert.same({ 0, 5 }, all.shape)
        assert.same({ 0 }, lengths.shape)
    end)

    it("takes the likeliest token however low the temperature is", function()
        local model = model_of "llama"
        local likeliest = model:generate(PROMPTS, 3, { temperature = 0 })
        for _, opts in ipairs { {}, { top_p = 0.5 }, { top_k = 3 } } do
            for _, temperature in ipairs { 1e-30, 1e-40, 1e-300 } do
                opts.temperature = temperature
                assert.same(likeliest:totable(), model:generate(PROMPTS, 3, opts):totable())
            end
        end
    end)

    it("puts modes back when it is stopped, also after on_token has had the same model generate", function()
        local model, settle = model_of "gpt", require "te.settle"
        local undo
        model:train()
        model:generate({ { 1 } }, 2, { on_token = function()
            model:generate({ { 2 } }, 1)
            undo = next(settle.unfinished) and select(2, next(settle.unfinished))
            assert.is_false(model.training)
            undo() -- what the host does then
            assert.is_true(model.training)
            model:eval()
        end })
        assert.is_function(undo)
        assert.is_nil(next(settle.unfinished))
    end)

    it("tells of every position, and stops where it is asked to", function()
        local model, seen = model_of "gpt", {}
        local all = model:generate({ { 5, 6 }, { 1, 2, 3, 4, 5, 6 } }, 3, { temperature = 0, on_token = function(token)
            seen[#seen + 1] = { token[1]:item(), token[2]:item() }
        end })
        local rows = all:totable()
        -- after 3 of its own the first row has ended, and the second reads the last of its prompt at once
        assert.same({ { rows[1][3], 3 }, { rows[1][4], 4 }, { rows[1][5], 5 }, { 0, rows[2][7] }, { 0, rows[2][8] },
            { 0, rows[2][9] } }, seen)
        local n = 0
        local part, lengths = model:generate({ { 5, 6 }, { 1, 2, 3, 4, 5, 6 } }, 3, { temperature = 0,
            on_token = function()
                n = n + 1
                return n < 2
            end })
        assert.same({ { rows[1][1], rows[1][2], rows[1][3], rows[1][4], 0, 0 }, { 1, 2, 3, 4, 5, 6 } }, part:totable())
        assert.same({ 4, 6 }, lengths:totable())
    end)

    it("says what is wrong", function()
        local model = model_of "gpt"
        for message, arguments in pairs {
            ["GPT:generate: ids: prompt 1: expected a list of ids or a tensor {seq}, got 1"] = { { 1, 2 }, 1 },
            ["GPT:generate: ids: prompt 2: expected a list of ids or a tensor {seq}, got {1,2}"] =
                { { { 1 }, ids { { 1, 2 } } }, 1 },
            ["GPT:generate: ids: prompt 2: there is no token"] = { { { 1 }, {} }, 1 },
            ["GPT:generate: ids: prompt 1: expected a token from 0 to 22, got 23"] = { { { 23 } }, 1 },
            ["GPT:generate: ids: prompt 1: expected a token from 0 to 22, got 0.5"] = { { te.tensor { 0.5 } }, 1 },
            ["GPT:generate: ids: there is no prompt"] = { {}, 1 },
            ["GPT:generate: option eos: expected a token from 0 to 22, got 23"] = { { { 1 } }, 1, { eos = 23 } },
            ['GPT:generate: option eos: expected a token from 0 to 22, got "a"'] = { { { 1 } }, 1, { eos = { "a" } } },
            ["GPT:generate: option eos: the list is empty"] = { { { 1 } }, 1, { eos = {} } },
            ["GPT:generate: option top_p: expected a number above 0, got 0"] = { { { 1 } }, 1, { top_p = 0 } },
            ["GPT:generate: option top_p: expected number from 0 to 1, got 2"] = { { { 1 } }, 1, { top_p = 2 } },
            ["GPT:generate: option repetition_penalty: expected a number above 0, got 0"] =
                { { { 1 } }, 1, { repetition_penalty = 0 } },
            ["GPT:generate: option repetition_penalty: expected a finite number, got inf"] =
                { { { 1 } }, 1, { repetition_penalty = math.huge } },
            ["GPT:generate: ids: expected a token from 0 to 22, got 23"] = -- before it is counted
                { ids { { 1, 23 } }, 1, { repetition_penalty = 2 } },
            ["GPT:generate: ids: expected a token from 0 to 22, got -1"] =
                { ids { { 1, -1 } }, 1, { repetition_penalty = 2 } },
            ["GPT:generate: option min_p: expected number from 0 to 1, got -1"] = { { { 1 } }, 1, { min_p = -1 } },
            ["GPT:generate: option process_logits: expected logits {1,23} from it, got nil"] =
                { { { 1 } }, 1, { process_logits = function() end } },
            ["GPT:generate: option process_logits: expected logits {1,23} from it, got {23}"] =
                { { { 1 } }, 1, { process_logits = function(logits) return logits:view { 23 } end } },
            ['GPT:generate: unknown option "topp"; did you mean "top_p"?'] = { { { 1 } }, 1, { topp = 1 } },
        } do
            assert.error_matches(function() model:generate(unpack(arguments)) end, message, 1, true)
        end
        assert.is_true(model.training)
    end)
end)
