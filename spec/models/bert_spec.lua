-- te.models.bert against loops over numbers, and what padding, packing and heads do.
local te = require "te"
local near = require "spec.support.near"
local reference = require "spec.support.encoder_reference"

local function ids(rows) return te.tensor(rows, { dtype = "int32" }) end

local function make(more)
    local config = { vocab_size = 40, block_size = 12, n_layer = 2, n_head = 2, n_embd = 16, init_std = 0.3 }
    for name, value in pairs(more or {}) do config[name] = value end
    te.manual_seed(3)
    local model = te.models.bert(config)
    for name, parameter in model:named_parameters() do -- norms and biases that do something
        if parameter:dim() == 1 then parameter:detach():add_(te.randn(parameter.shape) * 0.2) end
        assert(name)
    end
    return model
end

local A, B, C = { 5, 9, 1, 30, 2, 7, 22 }, { 39, 0, 4 }, { 8, 8, 11, 3, 2 }
local PACKED, PADDED = {}, {}
for i, text in ipairs { A, B, C } do
    PADDED[i] = {}
    for at = 1, 7 do PADDED[i][at] = text[at] or 13 end
    for _, id in ipairs(text) do PACKED[#PACKED + 1] = id end
end
local LENGTHS = { 7, 3, 5 }

describe("te.models.bert", function()
    it("computes what the paper says", function()
        for _, more in ipairs { {}, { n_type = 0 }, { n_inner = 24, norm_eps = 1e-5 } } do
            local model, types = make(more), more.n_type ~= 0 and { 0, 0, 1, 1, 0, 1, 1 } or nil
            model:to "float64"
            local opts = types and { token_types = ids { types } }
            near(te.tensor({ reference.bert(model, A, types) }, { dtype = "float64" }),
                model:hidden_states(ids { A }, opts), 1e-12)
            local logits = reference.linear(reference.norm(reference.map(reference.linear(reference.bert(model, A),
                model.lm[1].weight:to("float64"):totable(), model.lm[1].bias:totable()), reference.gelu),
                model.lm[3].weight:totable(), model.lm[3].bias:totable(), model.config.norm_eps),
                model.wte.weight:totable(), model.lm_bias:totable())
            near(te.tensor({ logits }, { dtype = "float64" }), model(ids { A }), 1e-12)
        end
    end)

    it("gives each text the same states, packed, padded or by itself", function()
        local model = make()
        local packed = model:hidden_states(ids(PACKED), { seq_lens = LENGTHS })
        local padded = model:hidden_states(ids(PADDED), { seq_lens = LENGTHS })
        local mask = te.tensor { { 1, 1, 1, 1, 1, 1, 1 }, { 1, 1, 1, 0, 0, 0, 0 }, { 1, 1, 1, 1, 1, 0, 0 } }
        local masked = model:hidden_states(ids(PADDED), { attention_mask = mask })
        assert.same(padded:totable(), masked:totable())
        local first = 1
        for i, text in ipairs { A, B, C } do
            local alone = model:hidden_states(ids { text })[1]
            near(alone, packed:narrow(1, first, #text), 2e-6)
            assert.same(packed:narrow(1, first, #text):totable(), padded[i]:narrow(1, 1, #text):totable())
            if #text < 7 then assert.equal(0, te.max(te.abs(padded[i]:narrow(1, #text + 1, 7 - #text))):item()) end
            first = first + #text
        end
        local lens = te.tensor(LENGTHS, { dtype = "int64" })
        assert.same(packed:totable(), model:hidden_states(ids(PACKED), { seq_lens = lens }):totable())
    end)

    it("is not changed by what stands in the padding, nor are gradients", function()
        local model = make()
        local function run(filler)
            local rows, targets = {}, {}
            for i, row in ipairs(PADDED) do
                rows[i], targets[i] = {}, {}
                for at, id in ipairs(row) do
                    rows[i][at] = at <= LENGTHS[i] and id or filler
                    targets[i][at] = at <= LENGTHS[i] and (at % 2 == 0 and id or -100) or filler
                end
            end
            model:zero_grad()
            local logits, loss = model(ids(rows), ids(targets), { seq_lens = LENGTHS })
            loss:backward()
            return logits:totable(), loss:item(), model.wte.weight.grad:totable()
        end
        assert.same({ run(0) }, { run(39) })
    end)

    it("makes logits of the tokens that have a target, with the same loss and gradients as of all", function()
        local model = make()
        local targets = { -100, 9, -100, -100, 2, -100, 1, 39, -100, -100, 8, -100, -100, 3, -100 }
        local function run(opts)
            opts.seq_lens = LENGTHS
            model:zero_grad()
            local logits, loss = model(ids(PACKED), ids(targets), opts)
            loss:backward()
            return logits, loss:item(), model.blocks[1].mlp[1].weight.grad:clone()
        end
        local some, loss, gradient = run {}
        local all, loss_of_all, gradient_of_all = run { logits = "all" }
        assert.same({ 6, 40 }, some.shape)
        assert.same({ 15, 40 }, all.shape)
        assert.is_true(math.abs(loss - loss_of_all) < 1e-6)
        near(gradient_of_all, gradient, 1e-5)
        near(all[5], some[2], 1e-5)
    end)

    it("classifies texts and tokens", function()
        local model = make { head = "sequence", n_label = 3, pooler = "tanh" }
        local logits, loss = model(ids(PADDED), te.tensor({ 0, 2, 1 }, { dtype = "int64" }),
            { seq_lens = LENGTHS })
        local first = model:hidden_states(ids { B })[1]:narrow(1, 1, 1)
        local pooled = te.tanh(te.linear(first, model.pooler.weight, model.pooler.bias))
        local row = te.linear(pooled, model.classifier.weight, model.classifier.bias)
        near(row[1], logits[2], 1e-5)
        loss:backward()
        assert.is_true(te.max(te.abs(model.pooler.weight.grad)):item() > 0)
        near(model:pooled(ids(PADDED), { seq_lens = LENGTHS }), model:pooled(ids(PACKED), { seq_lens = LENGTHS }), 1e-6)
        near(te.mean(model:hidden_states(ids { C }), 2),
            model:pooled(ids(PADDED), { seq_lens = LENGTHS, pooling = "mean" }):narrow(1, 3, 1), 1e-5)

        model = make { head = "token", n_label = 5 }
        assert.same({ 3, 7, 5 }, model(ids(PADDED), nil, { seq_lens = LENGTHS }).shape)
        model = make { head = "sequence", n_label = 1 }
        local numbers = te.tensor({ 0.5, -1, 2 })
        logits, loss = model(ids(PADDED), numbers, { seq_lens = LENGTHS })
        near(te.mean((logits:squeeze(-1) - numbers) ^ 2), loss, 1e-6)
    end)

    it("computes blocks again in backward, to the same bits", function()
        local function gradients(more)
            local model = make(more)
            local _, loss = te.autocast({ dtype = "bfloat16" }, model, ids(PACKED), ids(PACKED), { seq_lens = LENGTHS })
            loss:backward()
            return { loss:item(), model.blocks[1].attention[1].qkv.weight.grad:totable(),
                model.wte.weight.grad:totable() }
        end
        assert.same(gradients(), gradients { recompute_blocks = true })
    end)

    it("trains under recipes, also packed", function()
        local rows = {}
        for i = 1, 32 do rows[i] = i end
        for _, recipe in ipairs { "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling" } do
            local model = make { n_embd = 32, block_size = 32, n_inner = 64 }
            local exact = select(2, model(ids(rows), ids(rows), { seq_lens = { 20, 12 } })):item()
            te.autocast({ recipe = te.recipe[recipe] {}, dtype = "bfloat16" }, function()
                local _, loss = model(ids(rows), ids(rows), { seq_lens = { 20, 12 } })
                loss:backward()
                assert.is_true(math.abs(loss:item() / exact - 1) < 0.1, recipe)
            end)
        end
    end)

    it("is cloned and restored from a checkpoint's texts", function()
        local model = make { head = "sequence", n_label = 3, pooler = "relu", n_type = 0 }
        local logits = model(ids { A }):totable()
        assert.same(logits, model:clone()(ids { A }):totable())
        local saved = { path = "memory", metadata = model:texts(), tensors = {} }
        for name, tensor in pairs(model:state_dict()) do saved.tensors["model." .. name] = tensor end
        local ok, other = pcall(te.models.from_checkpoint, saved)
        assert.is_true(ok, other)
        assert.same(logits, other(ids { A }):totable())
        assert.equal(2, #model:parameter_groups(0.1))
        for _, name in ipairs { "tensor_parallel", "sequence_parallel", "pipeline_parallel" } do
            assert.error_matches(function() te.models.from_checkpoint(saved, { [name] = true }) end,
                ("te.models.from_checkpoint: %s: te.models.bert is not split between processes"):format(name), 1, true)
        end
    end)

    it("refuses what does not fit", function()
        local model = make()
        local function refuses(text, fn, ...) assert.error_matches(fn, text, 1, true, ...) end
        for text, call in pairs {
            ["te.models.bert: n_label = 3 has no effect with head = masked_lm"] = function() make { n_label = 3 } end,
            ["Bert:hidden_states: ids: expected {batch, seq}, or {tokens} with seq_lens, got {15}"] = function()
                model:hidden_states(ids(PACKED))
            end,
            ["Bert: text 2 has 0 tokens, expected 1 to 7"] = function()
                model(ids(PADDED), nil, { seq_lens = { 7, 0, 5 } })
            end,
            ["Bert: 2 lengths, 12 tokens together, for ids {15}"] = function()
                model(ids(PACKED), nil, { seq_lens = { 7, 5 } })
            end,
            ["option attention_mask: in row 1 a token, number 3, follows padding; tokens come first"] = function()
                model(ids { { 1, 2, 3 } }, nil, { attention_mask = ids { { 1, 0, 1 } } })
            end,
            ["Bert: a text of 13 tokens, block_size is 12"] = function()
                model(ids { { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 } })
            end,
            ["Bert: targets: expected the shape of ids, {1,2}, got {2}"] = function()
                model(ids { { 1, 2 } }, ids { 1, 2 })
            end,
            ["Bert: head = none: there are no logits"] = function() make { head = "none" }(ids { A }) end,
            ["option token_types: the model has none (n_type = 0)"] = function()
                make { n_type = 0 }:hidden_states(ids { A }, { token_types = ids { A } })
            end,
        } do
            refuses(text, call)
        end
    end)
end)
