--- te.KVCache: tokens given one after the other, or in pieces, have the results that they have all at once.

local te = require "te"
local assert_near = require "spec.support.near"

local WIDTH, BATCH, TOKENS = 48, 2, 11

local function input() return te.randn { BATCH, TOKENS, WIDTH } end

-- fn on pieces of x along dimension 2, each going on from those before.
local function in_pieces(cache, fn, x, sizes)
    local results, first = {}, 1
    for i, size in ipairs(sizes) do
        results[i] = cache:run(fn, x:narrow(2, first, size))
        first = first + size
    end
    return te.cat(results, 2)
end

local PIECES = { { 11 }, { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 }, { 6, 1, 4 }, { 1, 10 }, { 0, 5, 0, 6 } }

local MODULES = {
    ["multi-headed"] = function() return te.MultiHeadedSelfAttention(WIDTH, 4) end,
    ["grouped-query"] = function() return te.GroupedQueryAttention(WIDTH, 6, 2, { bias = false }) end,
    ["multi-query, in a window"] = function() return te.MultiQuerySelfAttention(WIDTH, 4, { window_left = 3 }) end,
    ["scaled"] = function() return te.MultiHeadedSelfAttention(WIDTH, 3, { scale = 0.3 }) end,
    ["in blocks with other operations"] = function()
        local function block()
            return te.Sequential(
                te.Residual(te.LayerNorm(WIDTH), te.MultiHeadedSelfAttention(WIDTH, 4), te.Dropout(0.1)),
                te.Residual(te.RMSNorm(WIDTH), te.Linear(WIDTH, 2 * WIDTH), te.GELU(), te.Linear(2 * WIDTH, WIDTH)))
        end
        local blocks = te.Sequential(block(), block())
        return blocks:eval()
    end,
}

-- Attention of one's own: heads of one projection, attended to with these functions.
local Own = te.Module:extend("Own")
function Own:init(attend)
    self.qkv, self.core, self.attend = te.Linear(WIDTH, 3 * WIDTH), te.DotProductAttention { causal = true }, attend
end
function Own:forward(x)
    local batch, tokens = x:size(1), x:size(2)
    local heads = {}
    for i, part in ipairs(self.qkv(x):chunk(3, -1)) do
        heads[i] = part:reshape({ batch, tokens, 4, WIDTH / 4 }):transpose(2, 3)
    end
    return self:attend(unpack(heads)):transpose(2, 3):reshape { batch, tokens, WIDTH }
end

local function appending(self, q, k, v)
    local cache = te.KVCache.active
    if cache then k, v = cache:append(self, k, v) end
    return te.scaled_dot_product_attention(q, k, v, { causal = true, bottom_right = true })
end

local ALONE = {
    ["te.DotProductAttention"] = function(self, q, k, v) return self.core(q, k, v) end,
    ["te.scaled_dot_product_attention"] = function(_, q, k, v)
        return te.scaled_dot_product_attention(q, k, v, { causal = true })
    end,
    ["te.self_attention"] = function(_, q, k, v)
        local rows = te.cat({ q, k, v }, 2):transpose(2, 3):reshape { q:size(1), q:size(3), 3 * WIDTH }
        return te.self_attention(rows, { heads = 4, causal = true }):view({ q:size(1), q:size(3), 4, WIDTH / 4 })
            :transpose(2, 3)
    end,
}

describe("te.KVCache", function()
    before_each(function() te.manual_seed(7) end)

    for name, make in pairs(MODULES) do
        it("gives the results of the whole sequence: " .. name, function()
            local module, x = make(), input()
            local whole = module(x)
            for _, sizes in ipairs(PIECES) do
                local cache = te.KVCache()
                local pieces = in_pieces(cache, module, x, sizes)
                assert_near(whole, pieces, 1e-5)
                assert.equal(TOKENS, cache.length)
                assert.is_false(pieces.requires_grad)
            end
            assert_near(whole, module(x), 0)
        end)
    end

    it("takes one sequence of rows, every dtype, and runs without fusion", function()
        for dtype, tolerance in pairs { float64 = 1e-12, float32 = 1e-5, bfloat16 = 3e-2, float16 = 4e-3 } do
            local module = te.MultiHeadedSelfAttention(WIDTH, 4):to(dtype)
            local x, cache = te.randn({ 7, WIDTH }, { dtype = dtype }), te.KVCache()
            local function piece(first, n) return cache:run(module, x:narrow(1, first, n)) end
            local whole, pieces = module(x), te.cat({ piece(1, 3), piece(4, 1), piece(5, 3) }, 1)
            assert_near(whole, pieces, tolerance)
        end
        local before = te.set_fusion(false)
        local ok, message = pcall(function()
            local module, x = MODULES["in blocks with other operations"](), input()
            assert_near(module(x), in_pieces(te.KVCache(), module, x, { 4, 7 }), 1e-5)
        end)
        te.set_fusion(before)
        assert(ok, message)
    end)

    it("goes on under recipes that quantize rows by themselves", function()
        local module, x = te.MultiHeadedSelfAttention(64, 4), te.randn { BATCH, 6, 64 }
        for _, recipe in ipairs { te.recipe.MXFP8BlockScaling {}, te.recipe.Float8BlockScaling {} } do
            te.autocast({ recipe = recipe, dtype = "float32" }, function()
                local whole = te.no_grad(module, x)
                assert_near(whole, in_pieces(te.KVCache(), module, x, { 2, 1, 3 }), 1e-5)
            end)
        end
    end)

    it("keeps a module apart that runs twice, and what stands in the plan", function()
        local shared = te.MultiHeadedSelfAttention(WIDTH, 4)
        local twice, x = te.Sequential(shared, te.ReLU(), shared), input()
        assert_near(twice(x), in_pieces(te.KVCache(), twice, x, { 5, 1, 5 }), 1e-5)
        local plan = tostring(te.KVCache():run(function() return twice:explain(x) end))
        assert.is_truthy(plan:find("te.KVCache", 1, true), plan)
        assert.is_falsy(tostring(twice:explain(x)):find("te.KVCache", 1, true))
    end)

    it("forgets tokens, and goes on with chosen sequences", function()
        local module, x = te.MultiHeadedSelfAttention(WIDTH, 4), input()
        local whole, cache = module(x), te.KVCache()
        cache:run(module, x:narrow(2, 1, 8))
        cache:truncate(3)
        assert_near(whole:narrow(2, 4, 8), cache:run(module, x:narrow(2, 4, 8)), 1e-5)
        cache:truncate(5)
        for message, indices in pairs {
            ["te.KVCache:select: indices: expected a tensor of integers, got table"] = { 1, 0 },
            ["te.KVCache:select: indices: expected int64 or int32 in one dimension, got float32 tensor {2}"] =
                te.tensor { 1, 0 },
            ["expected int64 or int32 in one dimension, got int64 tensor {1,2}"] =
                te.zeros({ 1, 2 }, { dtype = "int64" }),
            ["te.KVCache:select: indices: -1 at position 2 is outside 0 to 1"] =
                te.tensor({ 1, -1 }, { dtype = "int32", device = "cpu" }),
            ["te.KVCache:select: indices: 2 at position 1 is outside 0 to 1"] =
                te.tensor({ 2 }, { dtype = "int64", device = "cpu" }),
        } do assert.error_matches(function() cache:select(indices) end, message, 1, true) end
        cache:select(te.tensor({ 1, 0, 1 }, { dtype = "int64" }))
        local order = te.tensor({ 1, 0, 1 }, { dtype = "int64" })
        local rest = te.index_select(x:narrow(2, 6, 6), 1, order)
        assert_near(te.index_select(whole:narrow(2, 6, 6), 1, order), cache:run(module, rest), 1e-5)
        cache:truncate(0)
        assert_near(whole:narrow(2, 1, 2), cache:run(module, x:narrow(2, 1, 2)), 1e-5) -- of another batch again
        assert.equal("KVCache(2 tokens, 1 attention)", tostring(cache))
    end)

    it("holds what it held when a run fails", function()
        local module, x = te.MultiHeadedSelfAttention(WIDTH, 4), input()
        local whole, cache = module(x), te.KVCache { max_sequence_length = TOKENS }
        cache:run(module, x:narrow(2, 1, 4))
        local function fails(message, fn, ...)
            local ok, reason = pcall(cache.run, cache, fn, ...)
            assert.is_false(ok)
            assert.is_truthy(tostring(reason):find(message, 1, true), tostring(reason))
            assert.equal(4, cache.length)
        end
        fails("stop", function()
            module(x:narrow(2, 5, 2))
            error("stop")
        end)
        fails("15 tokens, max_sequence_length is 11", module, x)
        fails("another batch", module, x:narrow(1, 1, 1):narrow(2, 5, 1))
        fails("is another one", te.MultiHeadedSelfAttention(WIDTH, 4), x:narrow(2, 5, 1))
        fails("0 attentions ran, 1 in the runs before", function() return x end)
        fails("is another one", function() return module(module(x:narrow(2, 5, 1))) end)
        fails("running already", function() return cache:run(module, x) end)
        fails("is running", function() cache:truncate(1) end)
        fails("seq_lens", function() return module(x:narrow(1, 1, 1):reshape { TOKENS, WIDTH },
            te.tensor({ 5, 6 }, { dtype = "int32" })) end)
        fails("had 2", function()
            local two = te.MultiHeadedSelfAttention(WIDTH, 4)
            return te.KVCache():run(function()
                module(x:narrow(2, 1, 2))
                return two(x:narrow(2, 1, 3))
            end)
        end)
        assert_near(whole:narrow(2, 5, 7), cache:run(module, x:narrow(2, 5, 7)), 1e-5)
        assert_near(whole, module(x), 0) -- and no cache is in force any more
    end)

    it("says what it does not take", function()
        local x, both = te.randn { 1, 2, WIDTH }, te.MultiHeadedSelfAttention(WIDTH, 4, { causal = false })
        assert.has_error(function() te.KVCache():run(both, x) end,
            "te.MultiHeadedSelfAttention: with a te.KVCache tokens can't see later ones; causal must be true")
        assert.has_error(function() te.KVCache { max_length = 3 } end,
            'te.KVCache: unknown option "max_length"; known are max_sequence_length')
        assert.has_error(function() te.KVCache { max_sequence_length = 0 } end)
        assert.has_error(function() te.KVCache():run(3) end, "te.KVCache:run: fn: expected callable, got 3")
        assert.has_error(function() te.KVCache():truncate(1) end)
        local k = te.zeros { 1, 2, 3, 4 }
        for message, kv in pairs {
            ["got {1,2,3,4} and {1,2,2,4}"] = { k, te.zeros { 1, 2, 2, 4 } },
            ["got {1,2,3,4} and {3,4}"] = { k, te.zeros { 3, 4 } },
            ["got {1,2,3,4} and nil"] = { k },
            ["got 1 and {1,2,3,4}"] = { 1, k },
        } do
            local cache = te.KVCache()
            assert.error_matches(function() cache:run(function() cache:append({}, kv[1], kv[2]) end) end,
                "te.KVCache:append: k and v: expected {batch, heads, seq, size} of the same tokens, " .. message, 1,
                true)
        end
    end)
end)

describe("a GPT with a te.KVCache", function()
    local function model_and_ids()
        te.manual_seed(3)
        local model = te.models.gpt { vocab_size = 31, block_size = 12, n_layer = 2, n_head = 4, n_embd = 32,
            bias = true }
        return model, te.randint(0, 30, { 2, 5 }, { dtype = "int32" })
    end

    it("goes on at the position where its tokens stand", function()
        local model, ids = model_and_ids()
        local cache = te.KVCache()
        cache:run(model, ids:narrow(2, 1, 3):contiguous())
        assert_near(model(ids), cache:run(model, ids:narrow(2, 4, 2):contiguous()), 1e-5)
        assert.has_error(function() cache:run(model, te.zeros({ 2, 8 }, { dtype = "int32" })) end,
            "GPT: a sequence of 13 tokens, block_size is 12")
    end)

    it("generates the same tokens with it and without, also past its context", function()
        local model, ids = model_and_ids()
        for _, opts in ipairs { { temperature = 0 }, { temperature = 0.9, top_k = 7 } } do
            local results = {}
            for i, use_cache in ipairs { true, false } do
                te.manual_seed(11)
                opts.use_cache = use_cache
                results[i] = model:generate(ids, 16, opts):totable()
            end
            assert.same(results[2], results[1])
            assert.equal(21, #results[1][1])
        end
    end)

    describe("with attention of one's own", function()
        it("goes on where that appends, by itself, in a model and in generate", function()
            local own, x = Own(appending), input()
            local whole = own(x)
            for _, sizes in ipairs(PIECES) do assert_near(whole, in_pieces(te.KVCache(), own, x, sizes), 1e-5) end
            for _, positions in ipairs { { 1 }, { 2 }, { 1, 2 } } do
                te.manual_seed(2)
                local gpt = te.models.gpt { vocab_size = 20, block_size = 64, n_layer = 2, n_head = 4, n_embd = WIDTH,
                    init_std = 0.5 }
                for _, i in ipairs(positions) do gpt.blocks[i].attention[2] = Own(appending) end
                local prompt = te.tensor({ { 3, 6, 9, 12 } }, { dtype = "int64" })
                local cached = gpt:generate(prompt, 12, { temperature = 0 })
                local anew = gpt:generate(prompt, 12, { temperature = 0, use_cache = false })
                assert.same(anew:totable(), cached:totable())
            end
        end)

        for who, attend in pairs(ALONE) do
            it("refuses what would see the new tokens alone: " .. who, function()
                local own, other, x = Own(attend), te.MultiHeadedSelfAttention(WIDTH, 4), input()
                assert_near(own(x), te.no_grad(own, x), 0)
                local message = who .. ": inside te.KVCache:run it would attend to the %d new tokens alone; "
                    .. "te.KVCache.active:append(self, k, v) appends keys and values"
                assert.error_matches(function() te.KVCache():run(own, x) end, message:format(TOKENS), 1, true)
                local cache = te.KVCache()
                local function both(y) return own(other(y)) end
                cache:run(both, x:narrow(2, 1, 5)) -- all tokens are new, as those of what appended are
                for _, n in ipairs { 1, 2 } do
                    assert.error_matches(function() cache:run(both, x:narrow(2, 6, n)) end, message:format(n), 1, true)
                end
                assert.equal(5, cache.length)
                local gpt = te.models.gpt { vocab_size = 20, block_size = 64, n_layer = 2, n_head = 4, n_embd = WIDTH }
                for i = 1, 2 do
                    gpt.blocks[i].attention[2], gpt.blocks[3 - i].attention[2] = own, other
                    assert.error_matches(function()
                        gpt:generate(te.tensor({ { 3, 6, 9 } }, { dtype = "int64" }), 4)
                    end, who .. ": inside te.KVCache:run", 1, true)
                end
            end)
        end

        it("refuses positions that go on from tokens which nothing appends", function()
            local gpt = te.models.gpt { vocab_size = 20, block_size = 8, n_layer = 1, n_head = 4, n_embd = WIDTH }
            gpt.blocks[1].attention[2] = te.Linear(WIDTH, WIDTH)
            local ids, cache = te.tensor({ { 3, 6, 9 } }, { dtype = "int64" }), te.KVCache()
            assert.error_matches(function() cache:run(gpt, ids) end,
                "te.KVCache:run: no attention appended to the cache, from whose tokens positions go on; "
                .. "te.KVCache.active:append(self, k, v)", 1, true)
            assert.equal(0, cache.length)
            assert.same({ 1, 20 }, gpt(ids).shape)
            assert.same({ BATCH, TOKENS, WIDTH }, cache:run(te.LayerNorm(WIDTH), input()).shape)
        end)

        it("lets pass what attends to others", function()
            local own, cross, x = Own(appending), te.DotProductAttention {}, input()
            local memory = te.randn { BATCH, 4, 7, WIDTH / 4 }
            local function decoder(y)
                local z = own(y)
                local q = z:reshape({ z:size(1), z:size(2), 4, WIDTH / 4 }):transpose(2, 3)
                local seen = cross(q, memory, memory):transpose(2, 3):reshape(z.shape)
                return z + seen
            end
            for _, sizes in ipairs { { 11 }, { 7, 1, 3 }, { 1, 7, 3 } } do
                assert_near(decoder(x), in_pieces(te.KVCache(), decoder, x, sizes), 1e-5)
            end
        end)

        it("is not in force inside te.KVCache.outside", function()
            local own, encoder, x = Own(appending), te.MultiHeadedSelfAttention(WIDTH, 4, { causal = false }), input()
            local alone = Own(ALONE["te.scaled_dot_product_attention"])
            local memory = encoder(x)
            local function both(y)
                local z, n = own(y), nil
                te.KVCache.outside(function(...)
                    n = select("#", ...)
                    assert.is_nil(te.KVCache.active)
                    assert_near(memory, encoder(x), 0)
                    alone(y)
                end, 1, nil)
                assert.equal(2, n)
                return z
            end
            assert_near(own(x), in_pieces(te.KVCache(), both, x, { 4, 7 }), 1e-5)
            local cache = te.KVCache()
            assert.error_matches(function()
                cache:run(function() te.KVCache.outside(error, "inside") end)
            end, "inside")
            assert.is_nil(te.KVCache.active)
            assert_near(own(x), in_pieces(cache, own, x, { 4, 7 }), 1e-5)
            assert.error_matches(function() te.KVCache.outside(1) end,
                "te.KVCache.outside: fn: expected callable, got 1")
            assert.error_matches(function() cache:append(own, x, x) end, "te.KVCache:append: this cache is not running")
        end)
    end)
end)
