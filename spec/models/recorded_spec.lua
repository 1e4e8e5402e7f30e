--- Generation in recorded steps (te.decoding): the tokens of plain steps, and one launch for each. Pending without a
--- device.

local ffi = require "ffi"
local te = require "te"

local devices, reason = te.devices()

ffi.cdef "uint64_t te_fake_count(const char *function);"

-- Calls of a function of the driver so far on the made-up machine; nil on others.
local function calls(name)
    local ok, driver = pcall(ffi.load, (os.getenv "TETRAIN_CUDA_LIBRARIES" or "") .. "/libcuda.so.1")
    local counted, n = pcall(function() return tonumber(driver.te_fake_count(name)) end)
    return ok and counted and n or nil
end

local function gpt(more)
    te.manual_seed(1)
    local config = { vocab_size = 50, block_size = 64, n_layer = 2, n_head = 2, n_embd = 32 }
    for name, value in pairs(more or {}) do config[name] = value end
    return te.models.gpt(config):to "cuda"
end

local function llama(more)
    te.manual_seed(1)
    local config = { vocab_size = 50, block_size = 64, n_layer = 2, n_head = 4, n_kv_head = 2, n_embd = 32,
        n_inner = 48 }
    for name, value in pairs(more or {}) do config[name] = value end
    return te.models.llama(config):to "cuda"
end

-- The rows that come, and how many launches of graphs it took where that is known.
local function generated(model, prompts, count, options, graph)
    local given = { graph = graph }
    for name, value in pairs(options or {}) do given[name] = value end
    te.manual_seed(5)
    local before = calls "cuGraphLaunch"
    local ids = model:generate(prompts, count, given)
    return ids:to("cpu"):totable(), before and calls "cuGraphLaunch" - before
end

describe("Generation in recorded steps", function()
    if not devices[2] then
        pending("no CUDA device: " .. tostring(reason))
        return
    end

    local PROMPT = { { 1, 7, 3, 22, 41 }, { 9, 9, 0, 4, 2 }, { 30, 1, 1, 2, 8 } }
    local RAGGED = { { 1, 2, 3 }, { 4, 5, 6, 7, 8, 9, 10 }, { 3 } }
    local LONG = {}
    for i = 1, 36 do LONG[i] = i end
    local function tensor(dtype) return te.tensor(PROMPT, { dtype = dtype, device = "cuda" }) end

    -- launches: two steps run plainly before one is recorded
    for name, case in pairs {
        ["the likeliest tokens"] = { gpt, tensor "int32", 20, { temperature = 0 }, launches = 17 },
        ["drawn ones"] = { gpt, tensor "int32", 20, { top_k = 10 }, launches = 17 },
        ["drawn from a nucleus"] = { gpt, tensor "int64", 20, { top_p = 0.8 }, launches = 17 },
        ["drawn from what is likely enough and not there"] =
            { gpt, RAGGED, 20, { min_p = 0.2, repetition_penalty = 2, eos = { 3, 4 } } },
        ["the likeliest, with a penalty"] =
            { gpt, tensor "int32", 20, { temperature = 0, repetition_penalty = 1.5 }, launches = 17 },
        ["those of a function"] = { gpt, tensor "int32", 20, { process_logits = function(logits)
            return logits * 2
        end }, launches = 0 },
        ["beyond the model's context"] = { gpt, tensor "int32", 80, {}, launches = 57 },
        ["prompts of different lengths"] = { gpt, RAGGED, 20, {} },
        ["rows that end"] = { gpt, RAGGED, 40, { eos = { 1, 2, 3, 4 } } },
        ["rows that end while another still reads"] = { gpt, { { 3 }, LONG }, 24, { eos = { 1, 2, 3, 4, 5 } } },
        ["too few to be worth it"] = { gpt, tensor "int32", 6, {}, launches = 0 },
        ["rotary positions"] = { llama, tensor "int32", 20, {}, launches = 17 },
        ["windows"] =
            { function() return llama { n_layer = 4, window = 6, full_every = 2 } end, tensor "int32", 30, {} },
        ["sinks, normalized queries"] =
            { function() return llama { attention_sinks = true, qk_norm = true } end, tensor "int32", 20, {} },
        ["experts, which the host counts"] = { function() return llama { n_expert = 4 } end, tensor "int32", 20, {},
            launches = 0 },
    } do
        it("gives the tokens of plain ones: " .. name, function()
            local build, prompts, count, options = unpack(case)
            local plain, none = generated(build(), prompts, count, options, false)
            local recorded, launches = generated(build(), prompts, count, options, true)
            assert.same(plain, recorded)
            if launches then
                assert.equal(0, none)
                if case.launches then assert.equal(case.launches, launches) end
            end
        end)
    end

    -- In float32, where attention is tetrain's own in both.
    it("gives them under recipes, also between training steps", function()
        for _, recipe in pairs { te.recipe.DelayedScaling { fp8_dpa = true }, te.recipe.Float8BlockScaling {},
            te.recipe.NVFP4BlockScaling {} } do
            local model, ids = gpt { n_embd = 64 }, tensor "int32"
            local optimizer = te.optim.AdamW(model:parameters(), { lr = 1e-3 })
            local options = { recipe = recipe, dtype = "float32" }
            for _ = 1, 2 do
                local _, loss = te.autocast(options, model, ids, ids)
                loss:backward()
                optimizer:step()
                optimizer:zero_grad()
                local plain = te.autocast(options, generated, model, ids, 12, { temperature = 0 }, false)
                assert.same(plain, (te.autocast(options, generated, model, ids, 12, { temperature = 0 }, true)))
            end
        end
    end)

    it("has on_token get tensors of its own, and stops where that says so", function()
        local kept = {}
        local ids = gpt():generate(tensor "int32", 20, { on_token = function(tokens)
            kept[#kept + 1] = tokens
            return #kept < 12
        end })
        assert.equal(17, ids:size(2))
        for i, tokens in ipairs(kept) do
            assert.same(ids:narrow(2, 5 + i, 1):to("cpu"):totable(), tokens:to("cpu"):totable())
        end
    end)

    -- The launches with a module in place of another one, on the made-up machine; the tokens are those of plain steps.
    local function launches_of(model, change)
        change(model)
        local plain = generated(model, tensor "int32", 20, {}, false)
        local recorded, launches = generated(model, tensor "int32", 20, {}, true)
        assert.same(plain, recorded)
        return launches or 0
    end

    it("leaves models plain in which Lua does more than calling operations", function()
        local Own = te.Module:extend "Own"
        function Own:init(inner) self.inner, self.count = inner, 0 end
        function Own:forward(x)
            self.count = self.count + 1
            return self.inner(x) * (te.sum(x):item() > 1e9 and 2 or 1)
        end
        local Derived = te.models.gpt:extend "Derived"
        for _, change in ipairs {
            function(model) model.blocks[1].mlp[2] = Own(model.blocks[1].mlp[2]) end,
            function(model) model.blocks[2].attention[2].proj = Own(model.blocks[2].attention[2].proj) end,
            function(model) model.norm.forward = function(self, x) return getmetatable(self).forward(self, x) end end,
            function(model)
                model.embed = function(self, ids, before)
                    local o = { dtype = "int32", device = ids.device }
                    return self.wte(ids) + self.wpe(te.arange(before, before + ids:size(2) - 1, 1, o))
                end
            end,
        } do
            assert.equal(0, launches_of(gpt(), change))
        end
        te.manual_seed(1)
        local derived = Derived { vocab_size = 50, block_size = 64, n_layer = 1, n_head = 2, n_embd = 32 }
        assert.equal(0, launches_of(derived:to "cuda", function() end))
    end)

    it("stays plain while a profile or a watch of numerics looks at kernels", function()
        local model, ids = gpt { n_embd = 64 }, tensor "int32"
        assert.truthy(#te.profile(function() model:generate(ids, 20) end) > 100)
        local options = { recipe = te.recipe.Float8CurrentScaling {}, dtype = "float32" }
        local watch = te.numerics.watch(model)
        local _, loss = te.autocast(options, model, ids, ids)
        loss:backward()
        local recorded, launches = te.autocast(options, generated, model, ids, 20, { temperature = 0 }, true)
        watch:stop()
        assert.same((te.autocast(options, generated, model, ids, 20, { temperature = 0 }, false)), recorded)
        assert.equal(0, launches or 0)
    end)

    it("leaves a backward pass that is still to come as it was", function()
        for _, recipe in ipairs { false, te.recipe.DelayedScaling {} } do
            local options = { dtype = "bfloat16", recipe = recipe or nil }
            local function gradient(between)
                local model, ids = gpt { n_embd = 64 }, tensor "int32"
                return te.autocast(options, function()
                    local _, loss = model(ids, ids)
                    if between then model:generate(ids, 20, { temperature = 0 }) end
                    loss:backward()
                    return model.wpe.weight.grad:to("cpu"):totable()
                end)
            end
            assert.same(gradient(false), gradient(true))
        end
    end)

    it("gives memory back at its end, and does not record for a few tokens over and over", function()
        local model, prompts = gpt { block_size = 256 }, {}
        for i = 1, 12 do
            prompts[i] = {}
            for k = 1, 8 * i do prompts[i][k] = k % 50 end
        end
        collectgarbage "stop"
        finally(function() collectgarbage "restart" end)
        local function growth(graph)
            local before = te.memory_stats "cuda".current
            local _, launches = generated(model, tensor "int32", 40, {}, graph)
            return te.memory_stats "cuda".current - before, launches
        end
        generated(model, prompts, 10, {}, false)
        local plain, recorded, launches = growth(false), growth(true)
        assert.is_true(recorded <= plain)
        if not launches then return end
        assert.equal(37, launches)
        _, launches = generated(model, prompts, 10, {}, true) -- every eight tokens a row leaves
        assert.is_true(launches < 10, launches)
    end)

    it("leaves a model plain whose attention appends to the cache by itself", function()
        local model = gpt()
        local Own = te.Module:extend "Own"
        function Own:init(inner) self.inner = inner end
        function Own:forward(x)
            local q = self.inner.qkv(x):view { x:size(1), x:size(2), 6, 16 }:transpose(2, 3)
            local k, v = q:narrow(2, 3, 2), q:narrow(2, 5, 2)
            local cache = te.KVCache.active
            if cache then k, v = cache:append(self, k, v) end
            local y = te.scaled_dot_product_attention(q:narrow(2, 1, 2), k, v, { causal = true, bottom_right = true })
            return self.inner.proj(y:transpose(2, 3):reshape { x:size(1), x:size(2), 32 })
        end
        model.blocks[1].attention[2] = Own(model.blocks[1].attention[2])
        local _, launches = generated(model, tensor "int32", 20, {}, true)
        if launches then assert.equal(0, launches) end
    end)
end)
