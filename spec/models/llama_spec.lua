local te = require "te"

local CONFIG = { vocab_size = 11, block_size = 12, n_layer = 2, n_head = 4, n_kv_head = 2, n_embd = 16, n_inner = 24 }

local function ids(rows) return te.tensor(rows, { dtype = "int32" }) end

local function with(more)
    local config = {}
    for k, v in pairs(CONFIG) do config[k] = v end
    for k, v in pairs(more or {}) do config[k] = v end
    return config
end

-- Weights as Hugging Face's Transformers names and lays them out.
local function checkpoint(dtype)
    local tensors = {}
    local function add(name, ...)
        local shape = { ... }
        local t = te.randn(shape) * (#shape == 1 and 0.1 or 0.2)
        tensors[name] = (#shape == 1 and t + 1 or t):to(dtype)
    end
    add("model.embed_tokens.weight", 11, 16)
    add("model.norm.weight", 16)
    add("lm_head.weight", 11, 16)
    for i = 0, 1 do
        local layer = ("model.layers.%d."):format(i)
        add(layer .. "input_layernorm.weight", 16)
        add(layer .. "post_attention_layernorm.weight", 16)
        add(layer .. "self_attn.q_proj.weight", 16, 16)
        add(layer .. "self_attn.k_proj.weight", 8, 16)
        add(layer .. "self_attn.v_proj.weight", 8, 16)
        add(layer .. "self_attn.o_proj.weight", 16, 16)
        add(layer .. "mlp.gate_proj.weight", 24, 16)
        add(layer .. "mlp.up_proj.weight", 24, 16)
        add(layer .. "mlp.down_proj.weight", 16, 24)
    end
    return tensors
end

-- The model in float64 from its definition, with loops for heads and positions. tokens: a list; logits of all.
local function reference(tensors, tokens, base)
    local seq, w = #tokens, {}
    for name, t in pairs(tensors) do w[name] = t:to "float64" end
    local function norm(x, weight) return x / ((x * x):mean(-1, true) + 1e-5):sqrt() * weight end
    local function project(x, name) return te.matmul(x, w[name]:transpose(1, 2)) end
    local function turn(x, heads)
        local rows = x:totable()
        for p = 1, seq do
            for h = 0, heads - 1 do
                for k = 1, 2 do
                    local angle = (p - 1) * base ^ (-(k - 1) / 2)
                    local i, j = 4 * h + k, 4 * h + k + 2
                    local a, b = rows[p][i], rows[p][j]
                    rows[p][i] = a * math.cos(angle) - b * math.sin(angle)
                    rows[p][j] = b * math.cos(angle) + a * math.sin(angle)
                end
            end
        end
        return te.tensor(rows, { dtype = "float64" })
    end
    local x = te.index_select(w["model.embed_tokens.weight"], 1, te.tensor(tokens, { dtype = "int64" }))
    local hidden = te.triu(te.ones { seq, seq }, 1)
    for i = 0, 1 do
        local layer = ("model.layers.%d."):format(i)
        local y = norm(x, w[layer .. "input_layernorm.weight"])
        local q, k = turn(project(y, layer .. "self_attn.q_proj.weight"), 4), turn(project(y, layer ..
            "self_attn.k_proj.weight"), 2)
        local v, heads = project(y, layer .. "self_attn.v_proj.weight"), {}
        for h = 0, 3 do
            local g = math.floor(h / 2)
            local scores = te.matmul(q:narrow(2, 4 * h + 1, 4), k:narrow(2, 4 * g + 1, 4):transpose(1, 2)) / 2
            scores = te.where(te.gt(hidden, 0), -math.huge, scores)
            heads[h + 1] = te.matmul(te.softmax(scores, -1), v:narrow(2, 4 * g + 1, 4))
        end
        x = x + project(te.cat(heads, 2), layer .. "self_attn.o_proj.weight")
        y = norm(x, w[layer .. "post_attention_layernorm.weight"])
        local gate = project(y, layer .. "mlp.gate_proj.weight")
        y = gate * te.sigmoid(gate) * project(y, layer .. "mlp.up_proj.weight")
        x = x + project(y, layer .. "mlp.down_proj.weight")
    end
    return project(norm(x, w["model.norm.weight"]), "lm_head.weight")
end

describe("te.models.llama", function()
    before_each(function() te.manual_seed(3) end)

    it("computes what its definition says, with a checkpoint's weights", function()
        local tokens = { 4, 0, 10, 7, 7, 2, 1, 9 }
        for _, base in ipairs { 10000, 100 } do
            local tensors = checkpoint "float32"
            local model = te.models.llama(with { rope_base = base }):load_hugging_face(tensors)
            local logits = model(ids { tokens }, ids { tokens })
            local expected = reference(tensors, tokens, base)
            assert.is_true((logits:to "float64" - expected):abs():max():item() < 1e-5)
            local last = model(ids { tokens })
            assert.is_true((last:to "float64" - expected:narrow(1, 8, 1)):abs():max():item() < 1e-5)
        end
    end)

    it("takes checkpoints in 16 bits, without a head and with what follows from the options", function()
        local tensors = checkpoint "bfloat16"
        tensors["lm_head.weight"] = nil
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = te.ones { 2 }
        local model = te.models.llama(CONFIG):load_hugging_face(tensors)
        assert.equal("float32", model.wte.weight.dtype)
        assert.same(tensors["model.embed_tokens.weight"]:totable(), model.lm_head.weight:totable())
        local tied = te.models.llama(with { tie = true }):load_hugging_face(tensors)
        local x = ids { { 1, 2, 3 } }
        assert.same(model(x):totable(), tied(x):totable())
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]:clone()
        tied:load_hugging_face(tensors)
        tensors["lm_head.weight"][3]:fill_(1)
        assert.error_matches(function() tied:load_hugging_face(tensors) end, "a head of its own")
    end)

    it("says which tensor is missing, too many or too large, and changes nothing then", function()
        local model = te.models.llama(CONFIG)
        local before = model.wte.weight:clone():totable()
        local function refuses(message, change)
            local tensors = checkpoint "float32"
            change(tensors)
            assert.error_matches(function() model:load_hugging_face(tensors) end, message)
            assert.same(before, model.wte.weight:totable())
        end
        refuses('"model.layers.0.self_attn.k_proj.weight" has shape .*, which does not continue the rows of '
            .. '"model.layers.0.self_attn.q_proj.weight", {', function(t)
            t["model.layers.0.self_attn.k_proj.weight"] = te.ones { 8, 3 }
        end)
        -- together they would have the right number of rows
        refuses('"model.layers.0.self_attn.k_proj.weight" has shape {6,16}, the model 8 rows there', function(t)
            t["model.layers.0.self_attn.k_proj.weight"] = te.ones { 6, 16 }
            t["model.layers.0.self_attn.v_proj.weight"] = te.ones { 10, 16 }
        end)
        refuses('"model.layers.0.mlp.gate_proj.weight" has shape {23,16}, the model 24 rows there', function(t)
            t["model.layers.0.mlp.gate_proj.weight"] = te.ones { 23, 16 }
            t["model.layers.0.mlp.up_proj.weight"] = te.ones { 25, 16 }
        end)
        refuses('"model.layers.1.self_attn.o_proj.weight" is of int64; weights are floating point', function(t)
            t["model.layers.1.self_attn.o_proj.weight"] = te.ones({ 16, 16 }, { dtype = "int64" })
        end)
        refuses('there is no tensor "model.layers.1.mlp.up_proj.weight"', function(t)
            t["model.layers.1.mlp.up_proj.weight"] = nil
        end)
        refuses('no place for "model.layers.2.mlp.up_proj.weight"', function(t)
            t["model.layers.2.mlp.up_proj.weight"] = te.ones { 24, 16 }
        end)
        refuses("blocks.2.attention.2.proj.weight of Linear has shape {16,16}, the one given has {16,20}", function(t)
            t["model.layers.1.self_attn.o_proj.weight"] = te.ones { 16, 20 }
        end)
    end)

    it("generates from a cache what it generates without", function()
        for _, more in ipairs { {}, { rope_scaling = "llama3", rope_factor = 4, rope_original_block_size = 4 } } do
            local model = te.models.llama(with(more))
            local start = ids { { 1, 2, 3 }, { 4, 5, 6 } }
            local cached = model:generate(start, 9, { temperature = 0 })
            assert.same({ 2, 12 }, cached.shape)
            assert.same(model:generate(start, 9, { temperature = 0, use_cache = false }):totable(), cached:totable())
        end
    end)

    it("generates from what can be gone on from, and leaves every part training as it was", function()
        local model = te.models.llama(CONFIG)
        model.blocks[1]:eval()
        model:generate(ids { { 1, 2 } }, 2)
        assert.same(model:generate(ids { { 1, 2 } }, 4, { temperature = 0 }):totable(),
            model:generate(ids { { 1, 2 } }, 4, { temperature = 1e-44 }):totable())
        assert.is_false(model.blocks[1].training)
        assert.is_false(model.blocks[1].mlp[2].training)
        assert.is_true(model.training and model.blocks[2].training)
        for message, arguments in pairs {
            ["Llama:generate: count: expected"] = { ids { { 1 } }, 1.5 },
            ["Llama:generate: count"] = { ids { { 1 } } },
            ["Llama:generate: ids: expected {batch, seq} of at least one token, got {2,0}"] = { te.zeros { 2, 0 }, 1 },
        } do
            assert.error_matches(function() model:generate(unpack(arguments)) end, message, 1, true)
        end
    end)

    it("learns, in bfloat16 and under a recipe", function()
        for _, recipe in ipairs { false, te.recipe.Float8CurrentScaling {} } do
            local model = te.models.llama(with { n_kv_head = 4, dropout = 0.1 })
            local optimizer = te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-2 })
            local x, y = ids { { 1, 2, 3, 4, 5, 6, 7, 8 } }, ids { { 2, 3, 4, 5, 6, 7, 8, 9 } }
            local first, last
            for step = 1, 60 do
                local _, loss = te.autocast({ dtype = "bfloat16", recipe = recipe or nil }, model, x, y)
                loss:backward()
                optimizer:step()
                optimizer:zero_grad()
                first, last = first or loss:item(), loss:item()
            end
            assert.is_true(last < 0.5 * first, ("%g to %g"):format(first, last))
        end
    end)

    local GEMMA = { window = 3, full_every = 2, window_rope_base = 100, post_norm = true, zero_centered_gamma = true,
        embedding_scale = 4, activation = "GEGLU", attention_scale = 0.3, qk_norm = true, tie = true }
    local GPT_OSS = { window = 3, full_every = 2, attention_sinks = true, attention_bias = "all", mlp_bias = true,
        activation = "ClampedSwiGLU", n_expert = 3, rope_scaling = "yarn", rope_factor = 2, rope_truncate = false }
    local QWEN2_MOE = { attention_bias = "qkv", n_expert = 3, n_inner_shared = 20, expert_pre_softmax = true }

    it("learns as a Gemma, a GPT-OSS and a Qwen2-MoE, fused or not, and comes back from its texts", function()
        for name, more in pairs { gemma = GEMMA, gpt_oss = GPT_OSS, qwen2_moe = QWEN2_MOE } do
            local model = te.models.llama(with(more))
            local optimizer = te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-2 })
            local x, y = ids { { 1, 2, 3, 4, 5, 6, 7, 8 } }, ids { { 2, 3, 4, 5, 6, 7, 8, 9 } }
            local first, last
            for _ = 1, 60 do
                local _, loss = model(x, y)
                loss:backward()
                for parameter, p in model:named_parameters() do
                    local one_weight = more.n_expert == nil or not parameter:find "experts" -- some may see no token
                    assert.is_true(not one_weight or p.grad ~= nil, name .. " " .. parameter)
                end
                optimizer:step()
                optimizer:zero_grad()
                first, last = first or loss:item(), loss:item()
            end
            assert.is_true(last < 0.5 * first, ("%s: %g to %g"):format(name, first, last))
            model:eval()
            local logits = model(x)
            te.set_fusion(false)
            local alone = model(x)
            te.set_fusion(true)
            assert.is_true((alone - logits):abs():max():item() < 1e-4)
            local saved = { metadata = model:texts(), tensors = {} }
            for key, tensor in pairs(model:state_dict()) do saved.tensors["model." .. key] = tensor end
            local again = te.models.llama.from_checkpoint(saved)
            assert.same(model.config, again.config)
            assert.same(logits:totable(), again:eval()(x):totable())
        end
    end)

    it("has texts that read back as the same configuration", function()
        local texts = te.models.llama(with { norm_eps = 1 / 300000, dropout = 0.1, rope_base = 1e6 / 3 }):texts()
        assert.equal(1 / 300000, tonumber(texts["model.norm_eps"]))
        assert.equal(1e6 / 3, tonumber(texts["model.rope_base"]))
        assert.equal("0.1", texts["model.dropout"])
    end)

    it("has layers that see all between those with a window", function()
        local model = te.models.llama(with { n_layer = 3, window = 2, full_every = 2, window_rope_base = 50 })
        local seen, base = {}, {}
        for i, block in ipairs(model.blocks) do
            seen[i], base[i] = block.attention[2].window_left, block.attention[2].rope_frequencies[2]:item() ^ -2
        end
        assert.same({ 1, -1, 1 }, seen)
        for i, expected in ipairs { 50, 10000, 50 } do assert.near(expected, base[i], 1e-3 * expected) end
        for message, opts in pairs {
            ["full_every = 2 has no effect without window"] = { full_every = 2 },
            ["window_rope_base = 50 has no effect without window"] = { window_rope_base = 50 },
            ["n_inner_shared = 8 has no effect without n_expert"] = { n_inner_shared = 8 },
            ["activation: expected one of SwiGLU, GEGLU, ClampedSwiGLU"] = { activation = "ReLU" },
        } do
            assert.error_matches(function() te.models.llama(with(opts)) end, message)
        end
    end)

    it("stores the weights of products under a recipe in its format, and the head's as it is", function()
        local recipe = te.recipe.MXFP8BlockScaling {}
        local model = te.quantized_model_init({ recipe = recipe }, te.models.llama,
            { vocab_size = 11, n_layer = 1, n_head = 2, n_embd = 32 })
        for name, p in model:named_parameters() do
            local product = name:find "^blocks" and p:dim() == 2
            assert.equal(product ~= nil and product, te._core.is_quantized(p), name)
        end
    end)

    it("has the width that is usual, and counts what multiplies", function()
        local model = te.models.llama { vocab_size = 11, n_layer = 1, n_head = 2, n_embd = 96 }
        assert.equal(256, model.config.n_inner)
        local block = 96 * 96 * 4 + 3 * 96 * 256 + 2 * 96
        assert.equal(block + 2 * 11 * 96 + 96, model:num_parameters())
        assert.equal(6 * (block + 11 * 96 + 96) + 12 * 96 * 2048, model:flops_per_token())
        assert.error_matches(function() te.models.llama(with { rope_factor = 2 }) end,
            "rope_factor = 2 has no effect without rope_scaling")
        assert.error_matches(function() te.models.llama(with { rope_attention_factor = 2 }) end,
            "rope_attention_factor = 2 has no effect without rope_scaling")
        assert.error_matches(function()
            te.models.llama(with { rope_scaling = "llama3", rope_factor = 2, rope_beta_fast = 16 })
        end, "rope_beta_fast = 16 has no effect with rope_scaling = llama3")
        assert.error_matches(function() te.models.llama {} end, "te.models.llama: vocab_size is needed")
        assert.error_matches(function() model:load_hugging_face() end,
            "Llama:load_hugging_face: tensors: expected table, got nil")
        assert.error_matches(function() te.models.llama { vocab_size = 3, n_heads = 2 } end, "n_head")
    end)
end)
