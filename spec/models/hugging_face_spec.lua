local te = require "te"

-- Configurations as Transformers 5.24 writes them (what does not matter left out), weights by a formula, and the first
-- logits after the last of IDS that its models give in float64.
local IDS = { 1, 12, 5, 5, 0, 7, 3, 9, 2 }

local COMMON = [["vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "hidden_act": "silu", ]]

local MODELS = {
    llama = {
        config = COMMON .. [["model_type": "llama", "attention_bias": true, "mlp_bias": false, "head_dim": 4,
            "rms_norm_eps": 1e-06, "tie_word_embeddings": false, "rope_parameters": {"factor": 4.0,
            "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8,
            "rope_theta": 500.0, "rope_type": "llama3"}]],
        biases = { "q", "k", "v", "o" },
        logits = { 0.467114, 0.261205, -0.361062, -0.4078, 0.195491, 0.487171, 0.002305, -0.486235 },
    },
    ["a llama with stretched positions, as older files have it"] = {
        config = COMMON .. [["model_type": "llama", "rms_norm_eps": 1e-06, "tie_word_embeddings": true,
            "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}]],
        tied = true,
        logits = { -0.393346, 0.926304, 0.769434, -0.613906, -1.018686, 0.20031, 1.100014, 0.246306 },
    },
    mistral = {
        config = COMMON .. [["model_type": "mistral", "sliding_window": 3, "head_dim": 6, "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}]],
        head_size = 6,
        logits = { -0.49652, -0.120445, 0.447618, 0.302182, -0.324929, -0.434107, 0.148678, 0.494471 },
    },
    qwen2 = {
        config = COMMON .. [["model_type": "qwen2", "rms_norm_eps": 1e-06, "use_sliding_window": false,
            "sliding_window": null, "layer_types": ["full_attention", "full_attention"], "rope_parameters":
            {"factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0, "rope_type": "yarn"}]],
        biases = { "q", "k", "v" },
        logits = { -0.724427, 0.042325, 0.741612, 0.258777, -0.636546, -0.51722, 0.426549, 0.690404 },
    },
    qwen3 = {
        config = COMMON .. [["model_type": "qwen3", "rms_norm_eps": 1e-06, "head_dim": 8, "attention_bias": false,
            "tie_word_embeddings": true, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}]],
        head_size = 8, qk_norm = true, tied = true,
        logits = { -0.740714, 0.236905, 0.8369, 0.102885, -0.795128, -0.425715, 0.622284, 0.678368 },
    },
    mixtral = {
        config = COMMON .. [["model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-05, "head_dim": null, "sliding_window": null, "tie_word_embeddings": false,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}]],
        experts = 4, inner = 24, parts = { "block_sparse_moe", "w1", "w3", "w2" },
        logits = { -1.984013, -0.155325, 1.920949, 0.93525, -1.541229, -1.561003, 0.907446, 1.929436 },
    },
    ["qwen3_moe, probabilities over the chosen"] = {
        config = COMMON .. [["model_type": "qwen3_moe", "num_local_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 20, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "rms_norm_eps": 1e-06, "head_dim": 8, "tie_word_embeddings": true, "use_sliding_window": false,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}]],
        head_size = 8, qk_norm = true, tied = true,
        experts = 6, inner = 20, parts = { "mlp", "gate_proj", "up_proj", "down_proj" },
        logits = { -0.780983, 0.268644, 0.890055, 0.092727, -0.852407, -0.438812, 0.674245, 0.712562 },
    },
    ["qwen3_moe, probabilities over all, as older files name it"] = {
        config = COMMON .. [["model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 20, "rms_norm_eps": 1e-06, "head_dim": 8, "tie_word_embeddings": true,
            "rope_theta": 10000.0]],
        head_size = 8, qk_norm = true, tied = true,
        experts = 6, inner = 20, parts = { "mlp", "gate_proj", "up_proj", "down_proj" },
        logits = { -0.784866, 0.260911, 0.890799, 0.100762, -0.849889, -0.445825, 0.668879, 0.717396 },
    },
    ["a llama whose MLP has biases"] = {
        config = COMMON .. [["model_type": "llama", "mlp_bias": true, "rms_norm_eps": 1e-06,
            "tie_word_embeddings": true, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}]],
        mlp_bias = true, tied = true,
        logits = { -0.435075, 0.281221, 0.549254, -0.058219, -0.572891, -0.174381, 0.502091, 0.378235 },
    },
    qwen2_moe = {
        config = COMMON .. [["model_type": "qwen2_moe", "qkv_bias": true, "num_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "norm_topk_prob": false,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-06, "tie_word_embeddings": false,
            "layer_types": ["full_attention", "full_attention"], "max_window_layers": 28, "sliding_window": 0,
            "use_sliding_window": false, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}]],
        biases = { "q", "k", "v" }, shared = 28,
        experts = 6, inner = 20, parts = { "mlp", "gate_proj", "up_proj", "down_proj" },
        logits = { -1.040082, 0.408648, 1.205997, 0.080999, -1.173111, -0.557293, 0.946844, 0.941721 },
    },
    gemma3_text = {
        config = COMMON:gsub('"hidden_act": "silu", ', ""):gsub("layers\": 2", "layers\": 3") .. [["model_type":
            "gemma3_text", "_sliding_window_pattern": 6, "attention_bias": false, "attn_logit_softcapping": null,
            "final_logit_softcapping": null, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 12,
            "rms_norm_eps": 1e-06, "rope_parameters": {"full_attention": {"factor": 8.0, "rope_theta": 1000000.0,
            "rope_type": "linear"}, "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"}},
            "sliding_window": 3, "tie_word_embeddings": true, "use_bidirectional_attention": false]],
        head_size = 8, layers = 3, qk_norm = true, tied = true, post_norm = true,
        logits = { -4.210189, 0.692495, 4.491349, 1.131037, -4.032137, -2.768123, 2.908252, 3.948902 },
    },
    gpt_oss = {
        config = COMMON .. [["model_type": "gpt_oss", "attention_bias": true, "head_dim": 8, "num_local_experts": 4,
            "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3,
            "rms_norm_eps": 1e-05, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": false,
            "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "rope_theta": 150.0,
            "original_max_position_embeddings": 8, "rope_type": "yarn", "truncate": false}]],
        biases = { "q", "k", "v", "o" }, head_size = 8, sinks = true, joined = true, experts = 4,
        logits = { 2.402886, -0.447143, -2.584431, -0.602161, 2.339947, 1.552203, -1.709738, -2.246373 },
    },
    gpt2 = {
        config = [["model_type": "gpt2", "vocab_size": 13, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4,
            "n_inner": null, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05]],
        logits = { 3.254844, 1.351257, -2.706221, -2.450009, 1.711493, 3.144892, -0.434637, -3.321358 },
    },
}

-- 0.4 sin(0.7 i + phase), the phase from the name; norms have 1 + 0.3 of that.
local function weight(name, ...)
    local shape, phase, values, n = { ... }, 0, {}, 1
    for _, byte in ipairs { name:byte(1, -1) } do phase = phase + byte end
    for _, extent in ipairs(shape) do n = n * extent end
    local norm = #shape == 1 and name:find "weight$"
    for i = 0, n - 1 do
        local w = math.sin(0.7 * i + phase)
        values[i + 1] = norm and 1 + 0.3 * w or 0.4 * w
    end
    return te.tensor(values, { dtype = "float32" }):view(shape)
end

local function llama_weights(model)
    local w, size = {}, model.head_size or 4
    local function add(name, ...) w[name] = weight(name, ...) end
    add("model.embed_tokens.weight", 13, 16)
    add("model.norm.weight", 16)
    if not model.tied then add("lm_head.weight", 13, 16) end
    local function add_mlp(from, inner, gate, up, down)
        for part, shape in pairs { [gate] = { inner, 16 }, [up] = { inner, 16 }, [down] = { 16, inner } } do
            add(from .. part .. ".weight", unpack(shape))
            if model.mlp_bias then add(from .. part .. ".bias", shape[1]) end
        end
    end
    for i = 0, (model.layers or 2) - 1 do
        local layer = ("model.layers.%d."):format(i)
        local outputs = { q = 4 * size, k = 2 * size, v = 2 * size, o = 16 }
        for part, n in pairs(outputs) do
            add(layer .. "self_attn." .. part .. "_proj.weight", n, part == "o" and 4 * size or 16)
        end
        for _, part in ipairs(model.biases or {}) do
            add(layer .. "self_attn." .. part .. "_proj.bias", outputs[part])
        end
        for _, part in ipairs(model.qk_norm and { "q", "k" } or {}) do
            add(layer .. "self_attn." .. part .. "_norm.weight", size)
        end
        if model.sinks then add(layer .. "self_attn.sinks", 4) end
        if model.joined then
            add(layer .. "mlp.router.weight", model.experts, 16)
            add(layer .. "mlp.router.bias", model.experts)
            add(layer .. "mlp.experts.gate_up_proj", model.experts, 16, 48)
            add(layer .. "mlp.experts.gate_up_proj_bias", model.experts, 48)
            add(layer .. "mlp.experts.down_proj", model.experts, 24, 16)
            add(layer .. "mlp.experts.down_proj_bias", model.experts, 16)
        elseif model.experts then
            local block, gate, up, down = unpack(model.parts)
            add(layer .. block .. ".gate.weight", model.experts, 16)
            for e = 0, model.experts - 1 do
                add_mlp(("%s%s.experts.%d."):format(layer, block, e), model.inner, gate, up, down)
            end
        else
            add_mlp(layer .. "mlp.", 24, "gate_proj", "up_proj", "down_proj")
        end
        if model.shared then
            add_mlp(layer .. "mlp.shared_expert.", model.shared, "gate_proj", "up_proj", "down_proj")
            add(layer .. "mlp.shared_expert_gate.weight", 1, 16)
        end
        add(layer .. "input_layernorm.weight", 16)
        add(layer .. "post_attention_layernorm.weight", 16)
        if model.post_norm then
            add(layer .. "pre_feedforward_layernorm.weight", 16)
            add(layer .. "post_feedforward_layernorm.weight", 16)
        end
    end
    return w
end

local function gpt2_weights()
    local w = {}
    local function add(name, ...) w["transformer." .. name] = weight("transformer." .. name, ...) end
    add("wte.weight", 13, 16)
    add("wpe.weight", 32, 16)
    local function norm(name)
        add(name .. ".weight", 16)
        add(name .. ".bias", 16)
    end
    norm "ln_f"
    for i = 0, 1 do
        local layer = ("h.%d."):format(i)
        norm(layer .. "ln_1")
        norm(layer .. "ln_2")
        for name, n in pairs { ["attn.c_attn"] = 48, ["attn.c_proj"] = 16, ["mlp.c_fc"] = 64, ["mlp.c_proj"] = 16 } do
            add(layer .. name .. ".weight", name == "mlp.c_proj" and 64 or 16, n)
            add(layer .. name .. ".bias", n)
        end
    end
    return w
end

local function ids(rows) return te.tensor(rows, { dtype = "int32" }) end

describe("te.models.from_hugging_face", function()
    local folder

    before_each(function()
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
    end)
    after_each(function()
        for _, name in ipairs(te._core.list_dir(folder)) do os.remove(folder .. "/" .. name) end
        os.remove(folder)
    end)

    local function write(name, text)
        local file = assert(io.open(folder .. "/" .. name, "w"))
        file:write(text)
        file:close()
    end

    -- The folder of a model; change: { from = to } in its configuration.
    local function make(name, change)
        local config = MODELS[name].config
        for from, to in pairs(change or {}) do
            local first, last = config:find(from, 1, true)
            config = config:sub(1, first - 1) .. to .. config:sub(last + 1)
        end
        write("config.json", "{" .. config .. "}")
        local weights = name == "gpt2" and gpt2_weights() or llama_weights(MODELS[name])
        te.save(folder .. "/model.safetensors", weights)
        return weights
    end

    for name, model in pairs(MODELS) do
        it("gives the logits of the original: " .. name, function()
            make(name)
            local loaded = te.models.from_hugging_face(folder)
            local logits = loaded(ids { IDS }):view { -1 }
            for i, expected in ipairs(model.logits) do
                assert.near(expected, logits[i]:item(), 2e-5)
            end
            local start = ids { { IDS[1], IDS[2], IDS[3] } }
            assert.same(loaded:generate(start, 8, { temperature = 0, use_cache = false }):totable(),
                loaded:generate(start, 8, { temperature = 0 }):totable())
        end)

        it("stores the weights of " .. name .. " quantized, and keeps them where asked", function()
            make(name)
            local high = te.models.from_hugging_face(folder):state_dict()
            local junk = {}
            for i = 1, 40 do junk[i] = te.full({ 13 + i % 20, 16 + i }, 1e30) end -- what memory may hold
            for _, t in ipairs(junk) do t:release() end
            local loaded = te.quantized_model_init({ recipe = te.recipe.DelayedScaling {},
                preserve_high_precision_init_val = true }, te.models.from_hugging_face, folder)
            local state, n = loaded:state_dict(), 0
            for path, parameter in loaded:named_parameters() do
                if te._core.is_quantized(parameter) then
                    n = n + 1
                    local values = parameter:get_high_precision_init_val()
                    assert.same(high[path]:totable(), values:totable(), path)
                    local history = state[path .. "_amax_history"]
                    if history then assert.equal(values:abs():max():item(), history:max():item(), path) end
                end
            end
            assert.is_true(n > 0)
        end)

        it("gives back the tensors of the original: " .. name, function()
            local weights = make(name)
            local loaded = te.models.from_hugging_face(folder)
            local state = loaded:hugging_face_state()
            for there, tensor in pairs(weights) do
                there = there:gsub("^transformer%.", "")
                assert.same(tensor.shape, state[there] and state[there].shape, there)
                assert.same(tensor:totable(), state[there]:totable(), there)
                state[there]:fill_(9) -- a copy
                state[there] = nil
            end
            assert.is_nil(next(state))
            te.save(folder .. "/model.safetensors", loaded:hugging_face_state())
            local again = te.models.from_hugging_face(folder)
            assert.same(loaded(ids { IDS }):totable(), again(ids { IDS }):totable())
        end)
    end

    it("has a block of the checkpoint in memory at a time", function()
        local load, most, all = te.load, 0, 0
        for _ in pairs(make "gemma3_text") do all = all + 1 end
        te.load = function(...)
            local tensors, n = load(...), 0
            for _ in pairs(tensors) do n = n + 1 end
            most = math.max(most, n)
            return tensors
        end
        local ok, problem = pcall(te.models.from_hugging_face, folder)
        te.load = load
        assert.is_true(ok, problem)
        assert.equal(13, most) -- of one layer, of three
        assert.equal(3 * 13 + 2, all)
    end)

    it("gives back weights that are stored quantized as the numbers that they stand for", function()
        make "llama"
        local model = te.quantized_model_init({ recipe = te.recipe.Float8CurrentScaling {} },
            function() return (te.models.from_hugging_face(folder)) end)
        local state, qkv = model:hugging_face_state(), model.blocks[1].attention[2].qkv.weight
        assert.is_true(te._core.is_quantized(qkv))
        local k = state["model.layers.0.self_attn.k_proj.weight"]
        assert.same(qkv:dequantize():narrow(1, 17, 8):totable(), k:totable())
    end)

    it("reads weights in several files, takes a dtype, and fewer positions", function()
        local weights, first, second, map = make "gpt2", {}, {}, {}
        os.remove(folder .. "/model.safetensors")
        for name, tensor in pairs(weights) do
            (name:find "%.h%." and first or second)[name] = tensor
            map[#map + 1] = ("%q: %q"):format(name, name:find "%.h%." and "a.safetensors" or "b.safetensors")
        end
        te.save(folder .. "/a.safetensors", first)
        te.save(folder .. "/b.safetensors", second)
        write("model.safetensors.index.json", ('{"weight_map": {%s}}'):format(table.concat(map, ", ")))
        local model = te.models.from_hugging_face(folder .. "/", { dtype = "bfloat16", block_size = 9 })
        assert.equal("bfloat16", model.wte.weight.dtype)
        assert.same({ 9, 16 }, model.wpe.weight.shape)
        local logits = model(ids { IDS }):view { -1 }
        for i, expected in ipairs(MODELS.gpt2.logits) do assert.near(expected, logits[i]:item(), 0.15) end
        assert.equal("float32", te.Linear(2, 2).weight.dtype) -- what is made later is as ever
        assert.error_matches(function() te.models.from_hugging_face(folder, { block_size = 33 }) end,
            "block_size: 33, but .* has 32 positions")
        te.save(folder .. "/b.safetensors", first)
        assert.error_matches(function() te.models.from_hugging_face(folder) end, "no tensor")
        os.remove(folder .. "/b.safetensors")
        assert.error_matches(function() te.models.from_hugging_face(folder) end, "b.safetensors")
        write("model.safetensors.index.json", '{"weight_map": {"x": "../x"}}')
        assert.error_matches(function() te.models.from_hugging_face(folder) end,
            "expected the name of a file beside it")
    end)

    it("stores weights in a recipe's format, also those that a file has in pieces", function()
        local recipe = te.recipe.Float8BlockScaling {}
        local weights = make "llama"
        local function load() return te.models.from_hugging_face(folder) end
        local model, full = te.no_grad(te.quantized_model_init, { recipe = recipe }, load), load()
        local qkv, whole = model.blocks[1].attention[2].qkv.weight, full.blocks[1].attention[2].qkv.weight
        local names = { "q", "k", "v" }
        for i, name in ipairs(names) do names[i] = weights[("model.layers.0.self_attn.%s_proj.weight"):format(name)] end
        assert.is_true(te._core.is_quantized(qkv))
        assert.is_true(te.cat(names, 1):eq(whole):all():item())
        local single = te.no_grad(te.quantized_model_init, { recipe = recipe }, te.Linear, 16, whole:size(1))
        te.no_grad(single.weight.copy_, single.weight, whole)
        assert.is_true(single.weight:detach():clone():eq(qkv:detach():clone()):all():item())
        weights["model.layers.0.self_attn.k_proj.weight"] = te.zeros { 8, 15 }
        te.save(folder .. "/model.safetensors", weights)
        assert.error_matches(load, 'k_proj.weight" has shape {8,15}, which does not continue the rows of ".*q_proj')
    end)

    it("has windows where the original has them, said or not", function()
        local function window(name, change)
            make(name, change)
            local config = te.models.from_hugging_face(folder).config
            return config.window, config.full_every
        end
        assert.equal(4096, window("mistral", { ['"sliding_window": 3,'] = "" }))
        assert.is_nil((window("mistral", { ['"sliding_window": 3'] = '"sliding_window": null' })))
        assert.is_nil((window("mixtral", { ['"sliding_window": null,'] = "" })))
        assert.equal(4096, (window("gemma3_text", { ['"sliding_window": 3,'] = "" })))
        assert.same({ 128, 2 }, { window("gpt_oss", { ['"sliding_window": 3,'] = "" }) })
        assert.equal(4, (window("qwen3_moe, probabilities over the chosen", { ['"use_sliding_window": false'] =
            '"use_sliding_window": true, "sliding_window": 4' })))
        local use = { ['"use_sliding_window": false'] = '"use_sliding_window": true' }
        assert.equal(4096, (window("qwen3_moe, probabilities over the chosen", use)))
        assert.is_nil((window("llama", { ['"vocab_size"'] = '"sliding_window": 3, "vocab_size"' })))
        assert.is_nil((window("qwen2", { ['"use_sliding_window": false'] = '"use_sliding_window": true',
            ['"sliding_window": null'] = '"sliding_window": 3',
            ['"layer_types": ["full_attention", "full_attention"], '] = "" })))
    end)

    it("takes what layers say of themselves where the original does, and else refuses what it would not do", function()
        local chosen = "qwen3_moe, probabilities over the chosen"
        local cases = { -- what the kind does with 3 as sliding_window
            { "llama", "full" }, { "mistral", "sliding" }, { "mixtral", "sliding" }, { chosen, "full" },
            { chosen, "sliding", ['"use_sliding_window": false'] = '"use_sliding_window": true' },
        }
        local function load(case, first, second)
            local change = { ['"vocab_size"'] = ('"layer_types": ["%s_attention"%s], "sliding_window": 3, "vocab_size"')
                :format(first, second and (', "%s_attention"'):format(second) or ""), ['"sliding_window": null, '] = "",
                ['"sliding_window": 3, '] = "" }
            for from, to in pairs(case) do
                if type(from) == "string" then change[from] = to end
            end
            for from in pairs(change) do
                if not MODELS[case[1]].config:find(from, 1, true) then change[from] = nil end
            end
            make(case[1], change)
            return te.models.from_hugging_face(folder).config.window
        end
        for _, case in ipairs(cases) do
            local does, other = case[2], case[2] == "full" and "sliding" or "full"
            assert.equal(does == "sliding" and 3 or nil, load(case, does, does))
            for _, layers in ipairs { { other, other }, { does, other }, { does } } do
                assert.error_matches(function() load(case, unpack(layers)) end,
                    ('layer_types: of this [%%w_]+, all 2 layers are "%s_attention", but layer %d is %s'):format(does,
                        layers[1] == does and 2 or 1, layers[2] and ('"%s_attention"'):format(other) or "nil"))
            end
        end
        local qwen = { "qwen3", ['"head_dim"'] = '"use_sliding_window": true, "head_dim"' }
        assert.equal(3, load(qwen, "sliding", "sliding"))
        assert.is_nil(load(qwen, "full", "full"))
        assert.error_matches(function() load({ "qwen3" }, "sliding", "sliding") end,
            "sliding_window: is not in use, and there are layers of sliding_attention")
        make("llama", { ['"vocab_size"'] = '"use_sliding_window": true, "vocab_size"' })
        assert.error_matches(function() te.models.from_hugging_face(folder) end,
            "use_sliding_window: only false is supported, got true")
    end)

    -- The configuration that is read out of a file with these changes.
    local function read(name, change)
        make(name, change)
        return te.models.from_hugging_face(folder).config
    end

    it("reads rope_scaling in place of rope_parameters where a file has both", function()
        local both = '"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}'
        local default = '"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}'
        local linear, theta = '"rope_scaling": {"rope_type": "linear", "factor": 2.0}', '"rope_theta": 99.0'
        local function same(expected, got)
            assert.same(read("qwen3", { [default] = expected }), read("qwen3", { [default] = got }))
        end
        same(linear, both .. ", " .. linear) -- also the base that the other one has
        same(linear .. ", " .. theta, both .. ", " .. linear .. ", " .. theta)
        same(both, both .. ', "rope_scaling": {}')
        same(both, both .. ', "rope_scaling": null')
        assert.equal("linear", read("qwen3", { [default] = both .. ", " .. linear }).rope_scaling)
        -- those layers' that see all alone, the others' fields kept
        assert.same(read("gemma3_text", { ["8.0"] = "4.0" }), read("gemma3_text", { ['"rope_parameters"'] =
            '"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters"' }))
        local windows = '{"rope_theta": 100.0, "rope_type": "default"}'
        assert.equal(44, read("gemma3_text", { ['"rope_parameters"'] = '"rope_local_base_freq": 44, "rope_parameters"',
            [windows] = '{"rope_type": "default"}' }).window_rope_base)
        assert.equal(10000, read("gemma3_text", { [windows] = "null" }).window_rope_base)
    end)

    it("knows the length that positions are stretched from", function()
        local function original(name, change) return read(name, change).rope_original_block_size end
        for name, said in pairs { llama = '"original_max_position_embeddings": 8,',
            qwen2 = '"original_max_position_embeddings": 8,' } do
            assert.equal(8, original(name))
            assert.equal(32, original(name, { [said] = "" })) -- as many as there are
            local top = { ['"vocab_size"'] = '"original_max_position_embeddings": 16, "vocab_size"' }
            assert.equal(16, original(name, top))
            top[said] = ""
            assert.equal(16, original(name, top))
            assert.error_matches(function() read(name, { [said] = "", ['"max_position_embeddings": 32,'] = "" }) end,
                "original_max_position_embeddings: is missing")
            assert.error_matches(function() read(name, { ['"vocab_size"'] =
                '"original_max_position_embeddings": "x", "vocab_size"' }) end, "original_max_position_embeddings: ")
        end
        local function yarn(more)
            return read("gemma3_text", { ['"factor": 8.0'] = '"factor": 8.0' .. more, linear = "yarn", ['"vocab_size"']
                = '"original_max_position_embeddings": 16, "vocab_size"' }).rope_original_block_size
        end
        assert.equal(32, yarn "") -- layers' own are theirs alone
        assert.equal(8, yarn ', "original_max_position_embeddings": 8')
    end)

    it("knows whether attention has biases where a file does not say it", function()
        assert.equal("all", read("gpt_oss", { ['"attention_bias": true, '] = "" }).attention_bias)
        assert.equal("none", read("qwen3", { ['"attention_bias": false,'] = "" }).attention_bias)
    end)

    it("reads experts in MXFP4 as the numbers that it stands for", function()
        local names = { gate_up_proj = { 2, 64, 1 }, down_proj = { 2, 32, 1 } } -- experts, outputs, blocks of 32 inputs
        local sizes = { [0] = 0, 0.5, 1, 1.5, 2, 3, 4, 6 }
        local common, packed, plain = {}, {}, {}
        common["model.embed_tokens.weight"] = weight("model.embed_tokens.weight", 13, 32)
        common["lm_head.weight"], common["model.norm.weight"] = weight("lm_head", 13, 32), weight("norm", 32)
        for _, name in ipairs { "input_layernorm.weight", "post_attention_layernorm.weight" } do
            common["model.layers.0." .. name] = weight(name, 32)
        end
        for part, outputs in pairs { q = 32, k = 16, v = 16, o = 32 } do
            local name = ("model.layers.0.self_attn.%s_proj."):format(part)
            common[name .. "weight"], common[name .. "bias"] = weight(name, outputs, 32), weight(name, outputs)
        end
        common["model.layers.0.self_attn.sinks"] = weight("sinks", 4)
        local mlp = "model.layers.0.mlp."
        common[mlp .. "router.weight"], common[mlp .. "router.bias"] = weight("router", 2, 32), weight("router", 2)
        for name, shape in pairs(names) do
            local experts, outputs, n = shape[1], shape[2], 32 * shape[3]
            local codes, scales, values, count = {}, {}, {}, 0
            for e = 0, experts - 1 do
                for o = 0, outputs - 1 do
                    local scale = (e + o) % 3 == 0 and 1 or 118 + (7 * o + e) % 16
                    scales[#scales + 1] = scale
                    for i = 0, n - 1, 2 do
                        local both = 0
                        for k = 0, 1 do
                            local code = (count * 11 + o + k * 5) % 16
                            both = both + code * 16 ^ k
                            local value = (code < 8 and 1 or -1) * sizes[code % 8] * 2 ^ (scale - 127)
                            values[(e * n + i + k) * outputs + o + 1] = value
                        end
                        count = count + 1
                        codes[count] = both
                    end
                end
            end
            local from = mlp .. "experts." .. name
            packed[from .. "_blocks"] = te.tensor(codes):to("uint8"):view { experts, outputs, shape[3], 16 }
            packed[from .. "_scales"] = te.tensor(scales):to("uint8"):view { experts, outputs, shape[3] }
            plain[from] = te.tensor(values):view { experts, n, outputs }
            common[from .. "_bias"] = weight(name, experts, outputs)
        end
        for name, tensor in pairs(common) do packed[name], plain[name] = tensor, tensor end
        local function load(tensors)
            return te.models.llama({ vocab_size = 13, n_layer = 1, n_head = 4, n_kv_head = 2, n_embd = 32, n_inner = 32,
                n_expert = 2, activation = "ClampedSwiGLU", mlp_bias = true, attention_bias = "all",
                attention_sinks = true }):load_hugging_face(tensors)
        end
        local got, expected = load(packed):state_dict(), load(plain):state_dict()
        for name, tensor in pairs(expected) do
            assert.is_true(te.all(te.eq(tensor, got[name])):item(), name)
        end
        packed[mlp .. "experts.down_proj_scales"] = te.zeros { 2, 32, 1 }
        assert.error_matches(function() load(packed) end, "down_proj_blocks: expected uint8 {…, 16} under uint8", 1,
            true)
        packed[mlp .. "experts.down_proj_scales"] = nil
        assert.error_matches(function() load(packed) end, 'no tensor "' .. mlp .. 'experts.down_proj_scales"', 1, true)
    end)

    it("refuses what the models don't have, and damage, by name", function()
        local function refuses(message, name, change)
            make(name, change)
            assert.error_matches(function() te.models.from_hugging_face(folder) end, message)
        end
        refuses("config.json: model_type: only .*\"qwen3_moe\" or .*\"xlm%-roberta\" is supported, got \"t5\"", "llama",
            { ['"model_type": "llama"'] = '"model_type": "t5"' })
        refuses("hidden_act: only \"silu\" is supported, got \"relu\"", "llama", { silu = "relu" })
        refuses("no tensor \"model.layers.0.mlp.gate_proj.bias\"", "llama",
            { ['"mlp_bias": false'] = '"mlp_bias": true' })
        refuses("no place for \"model.layers.%d.mlp.%w+_proj.bias\"", "a llama whose MLP has biases",
            { ['"mlp_bias": true'] = '"mlp_bias": false' })
        refuses("config.json: 20000000 layers, but the weights are", "llama",
            { ['"num_hidden_layers": 2'] = '"num_hidden_layers": 20000000' })
        refuses("num_key_value_heads: is missing", "mistral", { ['"num_key_value_heads": 2,'] = "" })
        refuses("swiglu_limit: only 7 is supported, got 8", "gpt_oss", { ['7.0'] = '8.0' })
        refuses("_proj.*: expected 5 experts of an even number of outputs, got {4,", "gpt_oss",
            { ['"num_local_experts": 4'] = '"num_local_experts": 5' })
        refuses("attn_logit_softcapping: is not supported, got 50", "gemma3_text", { null = "50" })
        refuses("rope_type: only \"default\" is supported, got \"linear\"", "gemma3_text",
            { ['"default"'] = '"linear"' })
        refuses("rope_parameters: expected full_attention and sliding_attention, got \"rope_theta\"", "gemma3_text",
            { ['"rope_parameters": {'] = '"rope_parameters": {"rope_type": "default", "rope_theta": 777,' })
        refuses("full_attention: is not supported, got a table", "qwen3", { ['{"rope_theta": 10000.0, '
            .. '"rope_type": "default"}'] = '{"full_attention": {"rope_theta": 777, "rope_type": "default"}}' })
        refuses("decoder_sparse_step: only 1 is supported, got 2", "qwen3_moe, probabilities over the chosen",
            { ['"decoder_sparse_step": 1'] = '"decoder_sparse_step": 2' })
        refuses("mlp_only_layers: layers without experts", "qwen3_moe, probabilities over the chosen",
            { ["[]"] = "[1]" })
        refuses("rope_type: only .* got \"longrope\"", "qwen2", { yarn = "longrope" })
        refuses("mscale: is not supported, got 1", "qwen2",
            { ['"factor": 4.0,'] = '"factor": 4.0, "mscale": 1,' })
        refuses("rope_parameters: is missing", "gpt_oss", { ["rope_parameters"] = "rope_parameters_not" })
        refuses("sliding_window: is missing, and there are layers", "gpt_oss",
            { ['"sliding_window": 3'] = '"sliding_window": null' })
        refuses("layer_types: is missing, though", "qwen2_moe", { ['"use_sliding_window": false'] =
            '"use_sliding_window": true', ['"sliding_window": 0'] = '"sliding_window": 3',
            ['"layer_types": ["full_attention", "full_attention"], '] = "" })
        refuses("max_window_layers: the first 1 of 2 layers see all", "qwen2", { ['"use_sliding_window": false'] =
            '"use_sliding_window": true, "max_window_layers": 1', ['"sliding_window": null'] = '"sliding_window": 3',
            ['"layer_types": ["full_attention", "full_attention"], '] = "" })
        refuses("factor: is missing", "qwen2", { ['"factor": 4.0,'] = "" })
        refuses("hidden_size: expected positive integer, got 1.5", "llama",
            { ['"hidden_size": 16'] = '"hidden_size": 1.5' })
        refuses("vocab_size: is missing", "llama", { ['"vocab_size": 13,'] = "" })
        local every = "expected 2 of which every so many%-th is full_attention, got "
        refuses(every .. "2: full_attention sliding", "qwen2", { [', "full_attention"'] = ', "sliding_attention"' })
        refuses(every .. "1: full_attention", "qwen2", { [', "full_attention"'] = "" })
        refuses("layer_types: \"chunked\" is not supported", "qwen2", { [', "full_attention"'] = ', "chunked"' })
        refuses("num_heads 3", "llama", { ['"num_attention_heads": 4'] = '"num_attention_heads": 3' })
        assert.is_true(te.Linear(64, 64).weight:abs():max():item() > 0)
        refuses("quantization_config", "llama", { ['"model_type"'] = '"quantization_config": {}, "model_type"' })
        refuses("line 1", "llama", { ['"vocab_size"'] = "vocab_size" })
        refuses("has shape", "llama", { ['"hidden_size": 16'] = '"hidden_size": 32' })
        refuses("activation_function: only", "gpt2", { gelu_new = "relu" })
        local weights = make "llama"
        weights["lm_head.weight"] = nil
        te.save(folder .. "/model.safetensors", weights)
        assert.error_matches(function() te.models.from_hugging_face(folder) end,
            "config.json: tie_word_embeddings: is false, but the weights have no lm_head.weight")
        os.remove(folder .. "/model.safetensors")
        assert.error_matches(function() te.models.from_hugging_face(folder) end, "has neither model.safetensors nor")
        assert.error_matches(function() te.models.from_hugging_face(folder .. "/nothing") end, "config.json")
        assert.error_matches(function() te.models.from_hugging_face(3) end, "folder: expected string, got 3")
        assert.error_matches(function() te.models.from_hugging_face(folder, { dtyp = 1 }) end, "dtype")
    end)
end)
