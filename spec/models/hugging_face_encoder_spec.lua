-- te.models.from_hugging_face and to_hugging_face of encoders: folders with the names of Transformers.
local te = require "te"
local near = require "spec.support.near"
local reference = require "spec.support.encoder_reference"
local shell = require "spec.support.shell"

local function ids(rows) return te.tensor(rows, { dtype = "int32" }) end

local function bert(opts, kind)
    local config = { vocab_size = 30, block_size = 12, n_layer = 2, n_head = 2, n_embd = 16, n_inner = 24 }
    for name, value in pairs(opts) do config[name] = value end
    te.manual_seed(5)
    local model = te.models[kind == "modernbert" and kind or "bert"](config)
    for _, parameter in ipairs(model:parameters()) do parameter:detach():add_(te.randn(parameter.shape) * 0.2) end
    return model
end

-- Options, and the kind that they are.
local WRITTEN = {
    { "bert", {} },
    { "bert", { head = "none", pooler = "tanh", gelu = "tanh", norm_eps = 1e-5 } },
    { "bert", { head = "none" } },
    { "bert", { head = "sequence", pooler = "tanh", n_label = 3, labels = "bad\ngood\nneither" } },
    { "bert", { head = "token", n_label = 5, n_type = 1 } },
    { "roberta", { position_offset = 2, n_type = 1 } },
    { "roberta", { position_offset = 2, n_type = 1, head = "sequence", pooler = "tanh" } },
    { "distilbert", { n_type = 0 } },
    { "distilbert", { n_type = 0, head = "sequence", pooler = "relu", n_label = 4 } },
    { "modernbert", { n_layer = 4, window = 4, full_every = 3 } },
    { "modernbert", { head = "none", rope_base = 5000, window_rope_base = 600, full_every = 2 } },
    { "modernbert", { head = "sequence", pooling = "mean", n_label = 3 } },
    { "modernbert", { head = "token", norm_eps = 1e-6 } },
}

local function edit(folder, changes)
    local path = folder .. "/config.json"
    local fields = te._core.json(shell.read(path))
    for name, value in pairs(changes) do fields[name] = value end
    te._core.write_file(path, require("te.json").encode(fields))
end

describe("encoders of Transformers", function()
    local folder
    before_each(function() folder = os.tmpname() .. ".model" end)
    after_each(function() os.execute("rm -rf " .. folder) end)

    it("come back as they were written", function()
        for _, row in ipairs(WRITTEN) do
            local kind, opts = unpack(row)
            local model = bert(opts, kind)
            assert.equal(kind, te.models.to_hugging_face(model, folder))
            local other = te.models.from_hugging_face(folder)
            for name, parameter in model:named_parameters() do
                assert.is_true(te.all(te.eq(parameter, other:state_dict()[name])):item(), name)
            end
            for _, name in ipairs { "pooler", "labels", "pooling", "window", "full_every", "rope_base",
                "window_rope_base", "head", "n_label", "gelu", "position_offset", "n_type" } do
                assert.equal(model.config[name], other.config[name], name)
            end
            local text = ids { { 1, 2, 29, 7 } }
            assert.same(model:hidden_states(text):totable(), other:hidden_states(text):totable())
            if model.config.head ~= "none" then assert.same(model(text):totable(), other(text):totable()) end
        end
    end)

    it("have the names of Transformers, those of BERT's first files among them", function()
        local model = bert {}
        te.models.to_hugging_face(model, folder, { dtype = "float64" })
        local path, old = folder .. "/model.safetensors", {}
        for name, tensor in pairs(te.load(path)) do
            old[name:gsub("LayerNorm%.weight", "LayerNorm.gamma"):gsub("LayerNorm%.bias", "LayerNorm.beta")] = tensor
        end
        local query = old["bert.encoder.layer.1.attention.self.query.weight"]
        near(model.blocks[2].attention[1].qkv.weight:narrow(1, 1, 16):to "float64", query, 0)
        assert.is_truthy(old["cls.predictions.transform.LayerNorm.gamma"])
        -- what else a file of BERT's own training has
        old["cls.seq_relationship.weight"] = te.zeros { 2, 16 }
        old["bert.pooler.dense.weight"] = te.zeros { 16, 16 }
        old["bert.embeddings.position_ids"] = te.arange(0, 11, 1):view { 1, 12 }
        old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
        te.save(path, old)
        local read = te.models.from_hugging_face(folder, { dtype = "float64" })
        local expected = reference.bert(read, { 3, 1, 4, 1, 5 })
        near(te.tensor({ expected }, { dtype = "float64" }), read:hidden_states(ids { { 3, 1, 4, 1, 5 } }), 1e-12)
        near(model(ids { { 3, 1, 4 } }):to "float64", read(ids { { 3, 1, 4 } }), 1e-5)

        old["bert.encoder.layer.7.output.dense.bias"] = te.zeros { 16 }
        te.save(path, old)
        assert.error_matches(function() te.models.from_hugging_face(folder) end,
            'this model has no place for "bert.encoder.layer.7.output.dense.bias"', 1, true)
    end)

    it("get new heads, and shorter tables of positions", function()
        local model = bert {}
        te.models.to_hugging_face(model, folder)
        local other = te.models.from_hugging_face(folder, { head = "sequence", n_label = 3, block_size = 8 })
        local c = other.config
        assert.equal("sequence tanh 3", ("%s %s %d"):format(c.head, c.pooler, c.n_label))
        local text = ids { { 5, 6, 7 } }
        assert.same(model:hidden_states(text):totable(), other:hidden_states(text):totable())
        local _, loss = other(text, te.tensor({ 2 }, { dtype = "int64" }))
        assert.is_true(math.abs(loss:item() - math.log(3)) < 0.2)
        local names = {}
        for _, product in ipairs(other:product_names()) do names[#names + 1] = product.names[1] end
        assert.equal("bert.encoder.layer.0.attention.self.query bert.encoder.layer.0.attention.output.dense",
            table.concat(names, " ", 1, 2))
        te.lora.add(other, { rank = 2, targets = { "query", "value" } })
        local all = te.lora.add(bert {}, { rank = 2 }) -- of the blocks, not of the head
        for name, _, owner in all:named_parameters() do
            if owner.is_adapter then assert.is_truthy(name:find "^blocks%.", name) end
        end
        assert.is_true(#other:parameter_groups(0)[1].params > 0)
    end)

    it("say which layers of a ModernBERT see all tokens, in one way or the other", function()
        local function load(changes)
            te.models.to_hugging_face(bert({ n_layer = 4, full_every = 2, head = "none" }, "modernbert"), folder)
            edit(folder, changes)
            return te.models.from_hugging_face(folder).config
        end
        local null = require("te.json").null
        assert.equal(2, load({ global_attn_every_n_layers = null }).full_every)
        assert.equal(2, load({ layer_types = null }).full_every)
        for text, changes in pairs {
            ["config.json: 1000000000 layers, but the weights are"] = { num_hidden_layers = 1e9, layer_types = null },
            ["layer_types: expected that layers see all from the first on, one in 2, got a table true x"] =
                { layer_types = { {}, true, "x" } },
            ['config.json: rope_parameters: full_attention: rope_theta: expected number, at least 1, got "x"'] =
                { rope_parameters = { full_attention = { rope_theta = "x" } } },
            ["config.json: rope_parameters: full_attention: expected table, got 3"] =
                { rope_parameters = { full_attention = 3 } },
        } do
            assert.error_matches(function() load(changes) end, text, 1, true)
        end
    end)

    it("say what is not supported", function()
        te.models.to_hugging_face(bert { head = "token" }, folder)
        for text, changes in pairs {
            ['position_embedding_type: only "absolute" is supported, got "relative_key"'] =
                { position_embedding_type = "relative_key" },
            ['architectures: "BertForQuestionAnswering" is not supported; the option head says'] =
                { architectures = { "BertForQuestionAnswering" } },
            ['hidden_act: only "gelu" or "gelu_new" or "gelu_pytorch_tanh" is supported, got "relu"'] =
                { hidden_act = "relu" },
            ['layer_types: expected that layers see all from the first on, one in 3, got sliding_attention'] =
                { model_type = "modernbert", layer_types = { "sliding_attention" } },
            ["is_decoder: only false is supported, got true"] = { is_decoder = true },
        } do
            te.models.to_hugging_face(bert { head = "token" }, folder)
            edit(folder, changes)
            assert.error_matches(function() te.models.from_hugging_face(folder) end, text, 1, true)
        end
        local function refuses(text, fn) assert.error_matches(fn, text, 1, true) end
        refuses("te.models.to_hugging_face: a distilbert would have pooler = \"relu\", not \"tanh\"", function()
            te.models.to_hugging_face(bert { n_type = 0, head = "sequence", pooler = "tanh" }, folder)
        end)
        refuses('a bert would have pooler = "none", not "tanh"', function()
            te.models.to_hugging_face(bert { pooler = "tanh" }, folder)
        end)
        te.models.to_hugging_face(bert {}, folder)
        refuses("te.models.from_hugging_face: n_label: 3, without head it is what the file says", function()
            te.models.from_hugging_face(folder, { n_label = 3 })
        end)
        refuses("te.models.from_hugging_face: n_label: 3 has no effect with head = masked_lm", function()
            te.models.from_hugging_face(folder, { head = "masked_lm", n_label = 3 })
        end)
        refuses("te.models.bert: labels: 2 names, n_label is 3", function()
            bert { head = "token", n_label = 3, labels = "a\nb" }
        end)
        te.models.to_hugging_face(te.models.gpt { vocab_size = 8, n_layer = 1, n_head = 1, n_embd = 8 }, folder)
        refuses("te.models.from_hugging_face: head: token is for encoders", function()
            te.models.from_hugging_face(folder, { head = "token" })
        end)
    end)
end)
