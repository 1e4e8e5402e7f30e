--- Generation with guesses: the tokens of generation without them, or tokens drawn by the same probabilities, which are
--- found here by running the model on every text.

local te = require "te"
local guesses = require "te.guesses"
local settle = require "te.settle"

local VOCAB = 23
local SLOW = te.get_default_device() ~= "cpu" -- a made-up device takes its time
local PROMPTS = { { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 }, { 3, 1 }, { 4, 4, 4, 4 }, { 9 }, { 7, 20 } }

local function model_of(kind, more)
    te.manual_seed(2)
    local config = { vocab_size = VOCAB, block_size = 48, n_layer = 2, n_head = 2, n_embd = 16, init_std = 0.5 }
    for key, value in pairs(more or {}) do config[key] = value end
    return te.models[kind](config)
end

local KINDS = {
    gpt = function() return model_of("gpt", { bias = true }) end,
    ["alternating windows"] = function()
        return model_of("llama", { n_layer = 4, n_kv_head = 1, window = 5, full_every = 2, attention_sinks = true,
            qk_norm = true })
    end,
    experts = function() return model_of("llama", { n_expert = 3, n_inner = 24 }) end,
    ["stored weights"] = function() return model_of("gpt", { n_embd = 32, quantized = "MXFP8BlockScaling" }) end,
}

local function copy(options, more)
    local all = {}
    for key, value in pairs(options) do all[key] = value end
    for key, value in pairs(more) do all[key] = value end
    return all
end

-- The same with what is told of tokens, and how many guesses there were and stayed.
local function generated(model, prompts, count, options)
    local told, guessed, stayed = {}, 0, 0
    local ids, lengths = model:generate(prompts, count, copy(options, {
        on_token = function(token) told[#told + 1] = token:totable() end,
        on_guesses = function(n, kept) guessed, stayed = guessed + n, stayed + kept end,
    }))
    return { ids:totable(), lengths and lengths:totable() or false, told, ids.dtype }, guessed, stayed
end

describe("What is looked up", function()
    local function found(text, n) return guesses.looked_up(text, n) end

    it("followed the longest end of the text before, of several places the last", function()
        assert.same({ 9, 1, 2 }, found({ 1, 2, 9, 1, 2 }, 3))
        assert.same({ 8, 1 }, found({ 1, 2, 9, 1, 2, 8, 1, 2 }, 2))
        assert.same({ 9 }, found({ 5, 1, 2, 9, 7, 1, 2, 8, 5, 1, 2 }, 1))
    end)

    it("goes on repeating what repeats", function()
        assert.same({ 1, 2, 1, 2, 1 }, found({ 1, 2, 1, 2 }, 5))
        assert.same({ 4, 4, 4 }, found({ 4, 4, 4 }, 3))
    end)

    it("is nothing where no two tokens agree", function()
        for _, text in ipairs { { 1 }, { 1, 1 }, { 1, 2, 3, 2 }, { 1, 2, 3 } } do
            assert.same({}, found(text, 4))
        end
        assert.same({}, found({ 1, 2, 1, 2 }, 0))
    end)
end)

describe("Generation with guesses", function()
    for name, build in pairs(KINDS) do
        it("gives the likeliest tokens that it gives without: " .. name, function()
            local model, small = build(), model_of("gpt", { n_layer = 1, block_size = 30 })
            local kept, dropped = 0, 0
            for _, options in ipairs { {}, { repetition_penalty = 0.7 }, { eos = { 5, 12, 3 } } } do
                options.temperature = 0
                for _, count in ipairs(SLOW and { 60 } or { 1, 30, 60 }) do -- 60: past both models' contexts
                    local plain = generated(model, PROMPTS, count, options)
                    for _, way in ipairs { { lookup = 1 }, { lookup = 6 }, { assistant = model },
                        { assistant = small, assistant_tokens = 3 } } do
                        local ours, guessed, stayed = generated(model, PROMPTS, count, copy(options, way))
                        assert.same(plain, ours)
                        kept, dropped = kept + stayed, dropped + guessed - stayed
                    end
                end
            end
            assert.is_true(kept > 50 and dropped > 50)
        end)
    end

    it("keeps all guesses of the model itself, in a fraction of the passes", function()
        local model, passes = model_of "gpt", 0
        local forward = model.hidden_states
        model.hidden_states = function(...)
            passes = passes + 1
            return forward(...)
        end
        local prompt = te.tensor({ { 1, 2, 3 } }, { dtype = "int64" })
        local plain = generated(model, prompt, 31, { temperature = 0 })
        assert.equal(31, passes)
        local assistant = model_of "gpt"
        passes = 0
        local ours, guessed, stayed = generated(model, prompt, 31,
            { temperature = 0, assistant = assistant, assistant_tokens = 5 })
        assert.same(plain, ours)
        assert.equal("int64", ours[4])
        assert.equal(25, guessed)
        assert.equal(25, stayed)
        assert.equal(6, passes) -- the prompt and its first token, then six at a time
    end)

    it("guesses less where little stays", function()
        local model, most = model_of "gpt", {}
        model:generate({ { 1, 2, 3 } }, 20, { temperature = 0, assistant = model_of("gpt", { n_layer = 1 }),
            assistant_tokens = 8, on_guesses = function(n) most[#most + 1] = n end })
        assert.equal(8, most[1])
        assert.is_true(most[3] <= 2)
    end)

    it("guesses more where all stays, up to what is allowed", function()
        local model, most = model_of("gpt", { block_size = 128 }), {}
        model:generate({ { 1 } }, 100, { temperature = 0, assistant = model, assistant_tokens = 20,
            on_guesses = function(n) most[#most + 1] = n end })
        assert.same({ 8, 16, 20, 20, 20 }, { unpack(most, 1, 5) })
    end)

    it("has a function change the logits, given the tokens before them", function()
        local model, calls = model_of "gpt", 0
        local function process(logits, ids, rows)
            calls = calls + 1
            assert.equal(#rows, ids:size(1))
            local wanted = te.remainder(te.sum(ids:to "float32", 2, true) * 3 + 1, VOCAB) -- of all tokens so far
            local likely = te.eq(te.arange(0, VOCAB - 1, 1, { dtype = "float32" }):unsqueeze(1), wanted)
            ids:zero_() -- a copy
            return te.where(likely, 9, logits * 0.1)
        end
        for _, options in ipairs { {}, { eos = 7, repetition_penalty = 1.2 } } do
            options.temperature, options.process_logits = 0, process
            local plain = generated(model, PROMPTS, 20, options)
            calls = 0
            local ours, guessed, stayed = generated(model, PROMPTS, 20, copy(options, { assistant = model }))
            assert.same(plain, ours)
            assert.is_true(stayed > 0.7 * guessed)
            assert.is_true(calls > 20)
            assert.same(plain, (generated(model, PROMPTS, 20, copy(options, { lookup = 4 }))))
        end
    end)

    it("goes on where process_logits leaves no token behind a wrong guess", function()
        local model, dead = model_of "gpt", -math.huge -- what leaves none
        local seen
        local function process(logits, ids)
            local text, wanted = ids:totable()[1], te.arange(0, VOCAB - 1, 1, { dtype = "float32" }):unsqueeze(1)
            local last = text[#text]
            seen = seen or last == 0 and #text > 4
            if last == 0 then return te.full({ 1, VOCAB }, dead) end
            return te.where(te.eq(wanted, last == 3 and 4 or 1), 30, te.where(te.eq(wanted, 0), -math.huge, logits))
        end
        for temperature = 0, 1 do
            for _, nothing in ipairs { -math.huge, 0 / 0 } do
                dead, seen = nothing, false
                local ids = model:generate({ { 3, 4, 0, 3 } }, 3,
                    { temperature = temperature, lookup = 3, process_logits = process })
                assert.same({ { 3, 4, 0, 3, 4, 1, 1 } }, ids:totable())
                assert.is_true(seen)
                assert.has_no_error(function()
                    model:generate({ { 3, 4, 0, 3 } }, 9,
                        { temperature = temperature, assistant = model, process_logits = process })
                end)
            end
        end
        for _, way in ipairs { { lookup = 3 }, { assistant = model } } do -- and where the text comes to it
            assert.error_matches(function()
                model:generate({ { 1, 2, 1 } }, 5, copy(way, { process_logits = function(logits, ids)
                    return ids:size(2) > 4 and logits * (0 / 0) or logits
                end }))
            end, "GPT:generate: the logits are not finite", 1, true)
        end
    end)

    it("refuses what are no tokens, as without guesses", function()
        local model = model_of "gpt"
        for _, way in ipairs { { lookup = 2 }, { assistant = model } } do
            for message, ids in pairs {
                ["GPT:generate: ids: expected int32 or int64, got float32"] = te.tensor { { 1.5, 2 } },
                ["GPT:generate: ids: expected int32 or int64, got bool"] = te.tensor { { true, false } },
                ["GPT:generate: ids: expected a token from 0 to 22, got 1099511627776"] =
                    te.tensor({ { 2 ^ 40, 2 } }, { dtype = "int64" }),
                ["GPT:generate: ids: expected a token from 0 to 22, got -1"] =
                    te.tensor({ { 3, -1 } }, { dtype = "int32" }),
            } do
                assert.error_matches(function() model:generate(ids, 3, way) end, message, 1, true)
            end
        end
    end)

    it("stops where on_token says so, as without guesses", function()
        local model = model_of "gpt"
        for last = 1, 13 do
            local function stopping(options)
                local n = 0
                local ids, lengths = model:generate(PROMPTS, 9, copy(options, { temperature = 0, on_token = function()
                    n = n + 1
                    return n < last
                end }))
                return { ids:totable(), lengths:totable() }
            end
            local plain = stopping {}
            assert.same(plain, stopping { lookup = 3 })
            assert.same(plain, stopping { assistant = model })
        end
    end)

    it("leaves both models as they were, also after an error", function()
        local model, small = model_of "gpt", model_of "gpt"
        model:train()
        small:train()
        assert.has_error(function()
            model:generate(PROMPTS, 9, { assistant = small, on_token = function()
                assert.is_false(small.training)
                error "no more"
            end })
        end)
        assert.is_true(model.training and small.training and small.blocks[1].training)
        assert.is_nil(te.KVCache.active)
        assert.is_nil(next(settle.unfinished))
    end)

    it("gives nothing for no count", function()
        local model = model_of "gpt"
        assert.same((generated(model, PROMPTS, 0, {})), (generated(model, PROMPTS, 0, { lookup = 3 })))
        local prompt = te.tensor({ { 1, 2 } }, { dtype = "int32" })
        assert.same((generated(model, prompt, 0, {})), (generated(model, prompt, 0, { assistant = model })))
    end)

    it("gives no token of logits that are NaN", function()
        if te.get_default_device() ~= "cpu" then return end -- greedy steps of a device are not waited for
        local model, good = model_of "gpt", model_of "gpt"
        te.no_grad(function() model.blocks[1].mlp[2].weight:fill_(0 / 0) end)
        for _, temperature in ipairs { 0, 1 } do
            for _, way in ipairs { { lookup = 2 }, { assistant = good }, { assistant = model } } do
                assert.error_matches(function()
                    model:generate({ { 1, 2 } }, 3, copy(way, { temperature = temperature }))
                end, "GPT:generate: the logits are not finite", 1, true)
            end
            assert.error_matches(function()
                good:generate({ { 1, 2 } }, 3, { assistant = model, temperature = temperature })
            end, "GPT:generate: the logits are not finite", 1, true)
        end
    end)

    it("says what is wrong", function()
        local model = model_of "gpt"
        for message, options in pairs {
            ["GPT:generate: options lookup and assistant: one of them"] = { lookup = 2, assistant = model },
            ["GPT:generate: option lookup: expected positive integer, got 0"] = { lookup = 0 },
            ["GPT:generate: option assistant: expected a model of te.models, got 3"] = { assistant = 3 },
            ["GPT:generate: option assistant: expected a model of te.models, got Linear"] =
                { assistant = te.Linear(2, 2) },
            ["GPT:generate: option assistant: expected a model of te.models, got Bert, an encoder"] =
                { assistant = te.models.bert { vocab_size = VOCAB, n_layer = 1, n_head = 1, n_embd = 4 } },
            ["GPT:generate: option assistant: its vocabulary has 7 tokens, the model's 23"] =
                { assistant = model_of("gpt", { vocab_size = 7 }) },
            ["GPT:generate: option assistant_tokens: 3, but there is no assistant"] =
                { lookup = 2, assistant_tokens = 3 },
            ["GPT:generate: option lookup: guesses need the cache that use_cache = false leaves out"] =
                { lookup = 2, use_cache = false },
        } do
            assert.error_matches(function() model:generate({ { 1 } }, 2, options) end, message, 1, true)
        end
    end)
end)

describe("Sampling with guesses", function()
    local SMALL, COUNT, ROWS = 4, 4, SLOW and 500 or 3000

    local function model_with(seed, layers)
        te.manual_seed(seed)
        return te.models.gpt { vocab_size = SMALL, block_size = 24, n_layer = layers, n_head = 1, n_embd = 8,
            init_std = 0.6 }
    end

    -- What the options leave of logits after a text, as probabilities by token id + 1, made by loops over numbers.
    local function kept_by(options, logits, text)
        local has, order, p, sum = {}, {}, {}, 0
        for _, id in ipairs(text) do has[id] = true end
        for i, x in ipairs(logits) do
            local penalty = has[i - 1] and options.repetition_penalty or 1
            x = options.process_logits and i == 2 and x + 1 or x
            p[i] = math.exp((x > 0 and x / penalty or x * penalty) / (options.temperature or 1))
            order[i], sum = i, sum + p[i]
        end
        table.sort(order, function(a, b) return p[a] > p[b] end)
        local top, before, all = p[order[1]], 0, 0
        for place, i in ipairs(order) do
            local out = place > (options.top_k or SMALL) or before >= (options.top_p or 1) * sum
                or p[i] < (options.min_p or 0) * top
            before = before + p[i]
            if out then p[i] = 0 end
            all = all + p[i]
        end
        for i = 1, SMALL do p[i] = p[i] / all end
        return p
    end

    -- The probabilities of all texts of COUNT tokens after the prompt.
    local function probabilities(model, prompt, options)
        local texts = { { p = 1, ids = prompt } }
        for _ = 1, COUNT do
            local rows, longer = {}, {}
            for i, text in ipairs(texts) do rows[i] = text.ids end
            local logits = te.no_grad(model, te.tensor(rows, { dtype = "int32" })):totable()
            for i, text in ipairs(texts) do
                for id, share in ipairs(kept_by(options, logits[i], text.ids)) do
                    local ids = { unpack(text.ids) }
                    ids[#ids + 1] = id - 1
                    longer[#longer + 1] = { p = text.p * share, ids = ids }
                end
            end
            texts = longer
        end
        local by_text = {}
        for _, text in ipairs(texts) do by_text[table.concat(text.ids, " ")] = text.p end
        return by_text
    end

    -- How many standard deviations chi squared lies above its mean, texts of which few are expected taken together.
    local function deviation(counts, expected)
        local chi, cells, rare, rare_count = 0, 0, 0, 0
        for text, p in pairs(expected) do
            local mean, n = p * ROWS, counts[text] or 0
            if p == 0 then assert.equal(0, n, text) end
            if mean >= 5 then
                chi, cells = chi + (n - mean) ^ 2 / mean, cells + 1
            else
                rare, rare_count = rare + mean, rare_count + n
            end
        end
        if rare > 5 then chi, cells = chi + (rare_count - rare) ^ 2 / rare, cells + 1 end
        return (chi - (cells - 1)) / math.sqrt(2 * (cells - 1))
    end

    local PROMPT = { 0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0 } -- whatever two tokens come, they are there
    local function counted(model, options)
        local rows, counts = {}, {}
        for i = 1, ROWS do rows[i] = PROMPT end
        te.manual_seed(11)
        for _, row in ipairs(model:generate(te.tensor(rows, { dtype = "int32" }), COUNT, options):totable()) do
            local text = table.concat(row, " ")
            counts[text] = (counts[text] or 0) + 1
        end
        return counts
    end

    for name, options in pairs {
        ["as they are"] = {},
        ["at a temperature"] = { temperature = 1.7 },
        ["of the likeliest few"] = { top_k = 2, temperature = 0.8 },
        ["of a nucleus"] = { top_p = 0.8, temperature = 1.3 },
        ["of what is likely enough"] = { min_p = 0.15 },
        ["with a penalty"] = { repetition_penalty = 1.8 },
        ["of changed logits"] = { process_logits = function(logits)
            return logits + te.tensor { 0, 1, 0, 0 }
        end, top_k = 3 },
    } do
        it("draws by the probabilities of sampling without: " .. name, function()
            local model = model_with(3, 2)
            local expected = probabilities(model, PROMPT, options)
            assert.is_true(deviation(counted(model, options), expected) < 4) -- what is expected is what is meant
            for _, way in ipairs { { lookup = 2 }, { assistant = model_with(4, 1), assistant_tokens = 3 },
                { assistant = model, assistant_tokens = 2 } } do
                local guessed, stayed = 0, 0
                local counts = counted(model, copy(copy(options, way), { on_guesses = function(n, kept)
                    guessed, stayed = guessed + n, stayed + kept
                end }))
                assert.is_true(guessed >= ROWS)
                assert.is_true(stayed > 0.01 * guessed)
                if way.assistant == model then assert.is_true(stayed > 0.99 * guessed) -- as q is p
                else assert.is_true(stayed < 0.9 * guessed) end
                assert.is_true(deviation(counts, expected) < 4)
            end
        end)
    end
end)
