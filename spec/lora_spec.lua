--- te.lora: adapters against dense products of W + scale B A, what is frozen, merging, and files of PEFT.

local te = require "te"
local shell = require "spec.support.shell"
local processes = require "spec.support.processes"

local core = te._core

local CONFIG = { vocab_size = 31, block_size = 24, n_layer = 2, n_head = 4, n_kv_head = 2, n_embd = 32, n_inner = 48,
    attention_bias = "qkv" }

local function with(more)
    local config = {}
    for name, value in pairs(CONFIG) do config[name] = value end
    for name, value in pairs(more or {}) do config[name] = value end
    return config
end

local function llama(more)
    te.manual_seed(1)
    return te.models.llama(with(more))
end

local function gpt() return te.models.gpt { vocab_size = 31, block_size = 24, n_layer = 2, n_head = 4, n_embd = 32,
    bias = true } end

local function ids() return te.tensor({ { 3, 1, 4, 1, 5, 9, 2, 6 }, { 30, 7, 7, 0, 2, 2, 1, 8 } },
    { dtype = "int32" }) end

local function adapters(model)
    local list = {}
    for _, module in model:named_modules() do
        if module.is_adapter then list[#list + 1] = module end
    end
    return list
end

-- Values other than those at the beginning, which add nothing; rows that no part has stay zero.
local function fill(model, size)
    te.no_grad(function()
        for _, adapter in ipairs(adapters(model)) do
            for _, part in ipairs(adapter.parts) do
                local rows = adapter.B:narrow(1, part.first, part.count)
                rows:copy_(te.randn(rows.shape, { device = rows.device }) * (size or 0.1))
            end
        end
    end)
    return model
end

local function largest(a, b) return (a:to "float64" - b:to "float64"):abs():max():item() end

local function bits(model)
    local state = {}
    for name, tensor in pairs(model:state_dict()) do
        if not name:find "%.lora%." then state[name] = tensor:clone():totable() end
    end
    return state
end

local function gradients(model)
    local found = {}
    for name, parameter in model:named_parameters() do found[name] = parameter.grad and parameter.grad:totable() end
    return found
end

local function folder_of_its_own()
    local path
    before_each(function()
        path = os.tmpname()
        os.remove(path)
        te._core.mkdir(path)
    end)
    after_each(function() os.execute(("rm -rf '%s'"):format(path)) end)
    return function(name) return path .. "/" .. name end
end

describe("te.lora.add", function()
    it("adds alpha / rank B A x, in a group and by itself", function()
        te.manual_seed(2)
        local layer = te.Linear(6, 10, { params_dtype = "float64" })
        local x = te.randn({ 3, 6 }, { dtype = "float64", requires_grad = true })
        local seq = te.Residual(layer, te.GELU(), te.BasicLinear(10, 6, { params_dtype = "float64" }))
        te.lora.add(seq, { rank = 3, alpha = 12 })
        fill(seq)
        local function dense(linear)
            return te.matmul(linear.lora.B, linear.lora.A[1]) * 4 + linear.weight
        end
        local want = x + te.linear(te.gelu(te.linear(x, dense(layer), layer.bias)), dense(seq[3]))
        local inputs = { x, layer.lora.A[1], layer.lora.B, seq[3].lora.A[1], seq[3].lora.B }
        local dy = te.randn({ 3, 6 }, { dtype = "float64" })
        local expected = te.grad({ want }, inputs, { grad_outputs = { dy } })
        for _, fused in ipairs { true, false } do
            te.set_fusion(fused)
            local y = seq(x)
            te.set_fusion(true)
            assert.near(0, largest(y, want), 1e-12)
            for i, got in ipairs(te.grad({ y }, inputs, { grad_outputs = { dy } })) do
                assert.near(0, largest(got, expected[i]), 1e-12)
            end
        end
        assert.is_true(te.gradcheck(function(input) return seq(input) end, inputs))
    end)

    it("has an adapter for each layer that a joined product stands for", function()
        local model = fill(te.lora.add(llama(), { rank = 2, targets = { "q_proj", "v_proj", "up_proj" } }))
        local qkv, up = model.blocks[1].attention[2].qkv, model.blocks[2].mlp[2]
        assert.same({ 2, 1 }, { #qkv.lora.A, #up.lora.A })
        local x = te.randn { 5, 32 }
        local y = qkv(x) - te.linear(x, qkv.weight, qkv.bias)
        local function share(adapter, i, first, count)
            return te.linear(te.linear(x, adapter.A[i]), adapter.B:narrow(1, first, count)) * (16 / 2)
        end
        assert.near(0, largest(y:narrow(2, 1, 32), share(qkv.lora, 1, 1, 32)), 1e-5)
        assert.equal(0, y:narrow(2, 33, 16):abs():max():item())
        assert.near(0, largest(y:narrow(2, 49, 16), share(qkv.lora, 2, 49, 16)), 1e-5)
        y = up(x) - te.linear(x, up.weight)
        assert.equal(0, y:narrow(2, 1, 48):abs():max():item())
        assert.near(0, largest(y:narrow(2, 49, 48), share(up.lora, 1, 49, 48)), 1e-5)
        local _, loss = model(ids(), ids())
        loss:backward()
        assert.equal(0, qkv.lora.B.grad:narrow(1, 33, 16):abs():max():item())
        assert.is_true(qkv.lora.B.grad:narrow(1, 49, 16):abs():max():item() > 0)
    end)

    it("works in layers that return their bias", function()
        local layer = te.Linear(4, 3, { return_bias = true })
        local seq = fill(te.lora.add(te.Sequential(te.GELU(), layer), { rank = 2 }))
        te.no_grad(layer.bias.copy_, layer.bias, te.tensor { 1, 2, 3 })
        local x = te.randn { 2, 4 }
        local y, bias = seq(x)
        assert.same({ 1, 2, 3 }, bias:totable())
        assert.near(0, largest(y, te.linear(te.gelu(x, { approximate = "tanh" }), layer.weight + layer.lora:delta())),
            1e-6)
    end)

    it("lets modules have a field of that name of their own", function()
        local Own = te.Module:extend("Own")
        function Own:init() self.lora, self.layer = 3, te.Linear(4, 4) end
        function Own:forward(x) return self.layer(x) * self.lora end
        local model = fill(te.lora.add(Own(), { rank = 1 }))
        local x = te.ones { 2, 4 }
        assert.same((model.layer(x) * 3):totable(), model(x):totable())
        assert.same({ "layer" }, te.lora.config(model).targets)
    end)

    it("gives every linear layer of the blocks one unless it is told which", function()
        local names = te.lora.config(te.lora.add(llama())).targets
        assert.equal(14, #names)
        assert.same({ "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj" }, { names[1], names[2] })
        names = te.lora.config(te.lora.add(gpt(), { targets = { "attn.c_proj", "^transformer%.h%.1%.mlp" } })).targets
        assert.same({ "transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj", "transformer.h.1.mlp.c_fc",
            "transformer.h.1.mlp.c_proj" }, names)
        names = te.lora.config(te.lora.add(llama(), { targets = "blocks.2.attention.2.qkv" })).targets
        assert.same({ "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj",
            "model.layers.1.self_attn.v_proj" }, names)
        local experts = te.lora.add(llama { n_expert = 2, n_inner_shared = 16, qk_norm = true })
        assert.equal(2 * (4 + 3), #te.lora.config(experts).targets) -- attention and the shared expert
    end)

    it("begins as the model was, A as layers of PyTorch, B zero", function()
        local model, x = llama(), ids()
        local before = model(x)
        te.lora.add(model, { rank = 16, rslora = true, alpha = 8 })
        assert.same(before:totable(), model(x):totable())
        local down, bound = model.blocks[1].mlp[4].lora, 1 / math.sqrt(48)
        assert.equal(2, down.scale)
        local most = down.A[1]:abs():max():item()
        assert.is_true(most <= bound and most > 0.9 * bound)
        assert.near(bound ^ 2 / 3, down.A[1]:var():item(), 0.1 * bound ^ 2 / 3)
        te.lora.add(te.lora.remove(model), { rank = 16, init_std = 3 })
        assert.near(3, model.blocks[1].mlp[4].lora.A[1]:var():item() ^ 0.5, 0.3)
    end)

    it("trains adapters alone, and nothing computes or holds gradients of the rest", function()
        local model = te.lora.add(llama(), { rank = 2 })
        local before, optimizer = bits(model), te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-2 })
        assert.equal(2 * 11, #optimizer.order) -- an A of each of seven layers, a B of each of four products
        local first, last
        for i = 1, 5 do
            local _, loss = model(ids(), ids())
            loss:backward()
            for name, parameter in model:named_parameters() do
                assert.equal(name:find "%.lora%." ~= nil, core.gradient(parameter) ~= nil, name)
            end
            optimizer:step()
            optimizer:zero_grad()
            first, last = first or loss:item(), loss:item()
        end
        assert.is_true(last < first - 0.01)
        assert.same(before, bits(model))
        local wgrads, plan = 0, model:explain(ids())
        for _, step in ipairs(plan.backward) do
            wgrads = wgrads + (step.kernels[1] == "wgrad" and 1 or 0)
        end
        assert.equal(2 * (7 + 7), wgrads) -- of A and of B, one for each layer
        assert.truthy(tostring(plan):find("add_scaled_columns", 1, true))
    end)

    it("takes the memory of the adapters' gradients and states, not that of the weights'", function()
        local output, status = shell.capture(([['%s' -e 'local te = require "te"
            local recipe = te.recipe.MXFP8BlockScaling {}
            local model = te.models.llama { vocab_size = 64, n_layer = 2, n_head = 4, n_embd = 256, block_size = 16,
                quantized = "MXFP8BlockScaling" }
            te.lora.add(model, { rank = 2 })
            local trained = 0
            for _, p in ipairs(model:parameters()) do trained = trained + (p.requires_grad and 4 * p:numel() or 0) end
            collectgarbage() collectgarbage()
            local ids, before = te.zeros({ 1, 16 }, { dtype = "int32" }), te.memory_stats().current
            local optimizer = te.optim.AdamW(model:parameter_groups(0), { lr = 1e-2 })
            for _ = 1, 2 do
                local logits, loss = te.autocast({ recipe = recipe }, model, ids, ids)
                loss:backward()
                logits:release() loss:release() logits, loss = nil, nil
                optimizer:step()
                collectgarbage() collectgarbage()
            end
            print(trained, te.memory_stats().current - before)']]):format(os.getenv("TETRAIN") or "build/tetrain"))
        assert.equal(0, status, output)
        local trained, taken = output:match "(%d+)%s+(%-?%d+)"
        assert.is_true(tonumber(taken) > 2.9 * trained and tonumber(taken) < 4 * trained, output)
    end)

    it("counts the work of frozen weights without that of their gradients", function()
        local model = llama()
        local whole, weights = model:flops_per_token(), model:num_multiplying()
        te.lora.add(model, { rank = 1 })
        local adapted = model:num_multiplying() - weights
        assert.equal(whole - 2 * weights + 6 * adapted, model:flops_per_token())
    end)

    it("has dropout in training alone, of the adapter's share", function()
        local model = fill(te.lora.add(llama(), { rank = 2, dropout = 0.5 }))
        local plain, x = model:clone(), ids()
        for _, adapter in ipairs(adapters(plain)) do adapter.dropout = 0 end
        assert.is_true(largest(model(x), plain(x)) > 1e-4)
        te.manual_seed(5)
        local drawn = model(x)
        te.manual_seed(5)
        te.set_fusion(false)
        local again = model(x)
        te.set_fusion(true)
        assert.same(drawn:totable(), again:totable())
        assert.same(plain(x):totable(), model:eval()(x):totable())
        assert.is_false(te.lora.add(te.lora.remove(model), { rank = 2 }).blocks[1].mlp[4].lora.training)
    end)

    it("gives the same gradients when blocks are computed again, and as recorded callables", function()
        local model = fill(te.lora.add(llama(), { rank = 2 }))
        local _, loss = model(ids(), ids())
        loss:backward()
        local want = gradients(model)
        model:zero_grad()
        model:set_recompute_blocks(true)
        _, loss = model(ids(), ids())
        loss:backward()
        assert.same(want, gradients(model))
        local function run(recorded)
            te.manual_seed(3)
            local seq = fill(te.lora.add(te.Sequential(te.Linear(4, 6), te.GELU(), te.Linear(6, 3)), { rank = 2 }))
            local sample = te.zeros({ 2, 4 }, { requires_grad = true })
            local fn = recorded and te.make_graphed_callables(seq, { sample }) or seq
            local y = fn(te.full({ 2, 4 }, 0.5, { requires_grad = true }))
            y:backward(te.ones { 2, 3 })
            return { y:totable(), gradients(seq) }
        end
        assert.same(run(false), run(true))
    end)

    it("is copied, saved and loaded with its layers", function()
        local model, other = fill(te.lora.add(llama(), { rank = 2 })), te.lora.add(llama(), { rank = 2 })
        local copy = model:clone()
        assert.same(model(ids()):totable(), copy(ids()):totable())
        assert.is_true(model.blocks[1].mlp[4].lora ~= copy.blocks[1].mlp[4].lora)
        assert.is_false(copy.blocks[1].mlp[4].weight.requires_grad)
        other:load_state_dict(model:state_dict())
        assert.same(model(ids()):totable(), other(ids()):totable())
        assert.error_matches(function() other:load_state_dict(llama():state_dict()) end, "missing: .*%.lora%.A%.1")
        local bare = te.lora.add(llama(), { rank = 2 })
        bare:load_state_dict(llama():state_dict(), { strict = false })
    end)

    it("is no part of what a rule fuses", function()
        local seen = 0
        local function rule(ops)
            for _, op in ipairs(ops) do seen = seen + (te.is(op, te.Linear) and 1 or 0) end
            return ops
        end
        local seq = te.Sequential(te.Linear(4, 4), te.GELU(), te.Linear(4, 4))
        te.register_forward_fusion(rule)
        seq(te.ones { 1, 4 })
        local before = seen
        te.lora.add(seq, { rank = 1, targets = "1" })
        seq(te.ones { 1, 4 })
        te.unregister_forward_fusion(rule)
        assert.same({ 2, 1 }, { before, seen - before })
    end)

    it("continues texts as the merged model does", function()
        local model = fill(te.lora.add(llama { rope_base = 100 }, { rank = 4 }), 0.5)
        local made = model:generate(ids(), 8, { temperature = 0 })
        te.lora.merge(model)
        assert.same(model:generate(ids(), 8, { temperature = 0 }):totable(), made:totable())
    end)
end)

describe("adapters beside quantized products", function()
    local recipes = {}
    for _, name in ipairs(te.train.recipe_choices) do
        if name ~= "none" then recipes[#recipes + 1] = name end
    end

    for _, name in ipairs(recipes) do
        for _, stored in ipairs { false, true } do
            it(("train, %s%s"):format(name, stored and ", weights stored in its format" or ""), function()
                local recipe = te.train.recipe(name)
                local model = llama { n_embd = 64, n_inner = 96, quantized = stored and te.train.recipes[name] or nil }
                local function loss_of()
                    return te.autocast({ recipe = recipe, dtype = "bfloat16" }, function()
                        local _, loss = model(ids(), ids())
                        return loss
                    end)
                end
                te.manual_seed(4)
                local plain = te.no_grad(loss_of):item()
                te.lora.add(model, { rank = 2 })
                te.manual_seed(4)
                local before = te.no_grad(loss_of):item()
                if name ~= "delayed" then assert.equal(plain, before) end -- scales have gone on
                local weights = bits(model)
                local optimizer = te.optim.AdamW(model:parameter_groups(0), { lr = 1e-2 })
                for _ = 1, 8 do
                    loss_of():backward()
                    for parameter_name, parameter in model:named_parameters() do
                        assert.equal(parameter_name:find "%.lora%." ~= nil, core.gradient(parameter) ~= nil)
                    end
                    optimizer:step()
                    optimizer:zero_grad()
                end
                assert.is_true(te.no_grad(loss_of):item() < before - 0.05)
                for key, values in pairs(bits(model)) do
                    if not key:find "_amax_history$" and not key:find "_scale$" then
                        assert.same(weights[key], values, key)
                    end
                end
                if not stored then return end
                assert.error_matches(function() te.lora.merge(model) end,
                    "te.lora.merge: blocks.1.attention.2.qkv.weight is stored quantized: the sum would be rounded", 1)
                assert.is_nil(core.gradient(model.blocks[1].mlp[2].weight))
            end)
        end
    end

    it("run no product for gradients of weights, nor the first layer's for that of its input", function()
        local model = te.lora.add(llama { n_embd = 64, n_inner = 96, quantized = "MXFP8BlockScaling" }, { rank = 2 })
        local loss = te.autocast({ recipe = te.recipe.MXFP8BlockScaling {}, dtype = "bfloat16" }, function()
            return select(2, model(ids(), ids()))
        end)
        local products = 0
        for _, kernel in ipairs(te.profile(function() loss:backward() end):kernels()) do
            if kernel.name:find "^gemm .*float8" then products = products + kernel.calls end
        end
        assert.equal(2 * 4 - 1, products)
    end)

    it("are written as sums with weights that are stored quantized", function()
        local model = fill(te.lora.add(llama { quantized = "MXFP8BlockScaling" }, { rank = 2 }))
        local down = model.blocks[1].mlp[4]
        local sum = down.weight:dequantize() + down.lora:delta()
        assert.same(sum:totable(), model:hugging_face_state()["model.layers.0.mlp.down_proj.weight"]:totable())
    end)
end)

describe("te.lora.merge", function()
    it("adds the share to the weights, and unmerge takes it away", function()
        for _, make in ipairs { llama, gpt } do
            local model = make():to "float64"
            te.lora.add(model, { rank = 3 })
            fill(model)
            local before, want = bits(model), model(ids())
            local exported = model:hugging_face_state()
            assert.equal(model, te.lora.merge(model))
            local layer = model.blocks[1].mlp[2]
            assert.same((te.tensor(before["blocks.1.mlp.2.weight"], { dtype = "float64" })
                + layer.lora:delta()):totable(), layer.weight:totable())
            assert.near(0, largest(model(ids()), want), 1e-13)
            assert.is_nil(tostring(model:explain(ids())):find "add_scaled")
            for name, tensor in pairs(model:hugging_face_state()) do
                assert.same(exported[name]:totable(), tensor:totable(), name)
            end
            te.lora.unmerge(model)
            assert.near(0, largest(model(ids()), want), 1e-13)
            te.lora.remove(te.lora.merge(model))
            assert.is_nil(te.lora.config(model))
            assert.near(0, largest(model(ids()), want), 1e-13)
            local plain = make()
            plain:load_state_dict(model:state_dict())
        end
    end)

    it("goes on, or back, where it failed between layers", function()
        local function failed()
            local seq = fill(te.lora.add(te.Sequential(te.Linear(4, 4), te.Linear(4, 4)), { rank = 1 }))
            local before = bits(seq)
            seq[2].lora.delta = function() error "no memory" end
            assert.error_matches(function() te.lora.merge(seq) end, "no memory")
            seq[2].lora.delta = nil
            return seq, before
        end
        local seq = failed()
        local want = seq(te.ones { 1, 4 })
        te.lora.merge(seq)
        assert.is_true(seq[1].lora.merged and seq[2].lora.merged)
        assert.near(0, largest(seq(te.ones { 1, 4 }), want), 1e-6)
        local undone, before = failed()
        te.lora.unmerge(undone)
        assert.is_false(undone[1].lora.merged or undone[2].lora.merged)
        assert.near(0, largest(undone[1].weight, te.tensor(before["1.weight"])), 1e-6)
        assert.same(before["2.weight"], undone[2].weight:totable())
    end)

    it("rounds once where weights are in less precision", function()
        local layer = te.lora.add(te.Linear(8, 4, { params_dtype = "bfloat16" }), { rank = 2 })
        fill(layer)
        assert.equal("float32", layer.lora.B.dtype)
        assert.equal("bfloat16", layer(te.ones({ 2, 8 }, { dtype = "bfloat16" })).dtype)
        local want = (layer.weight:to "float32" + layer.lora:delta()):to "bfloat16"
        assert.same(want:totable(), te.lora.merge(layer).weight:totable())
    end)

    it("says what cannot be merged", function()
        local model = llama()
        local function refuses(message, fn, ...)
            local ok, problem = pcall(fn, ...)
            assert.is_false(ok)
            assert.truthy(tostring(problem):find(message, 1, true), problem)
        end
        refuses("te.lora.merge: model: Llama has no adapters", te.lora.merge, model)
        refuses("te.lora.merge: model: expected a module, got 3", te.lora.merge, 3)
        te.lora.add(model)
        refuses("te.lora.unmerge: model: its adapters are not merged", te.lora.unmerge, model)
        te.lora.merge(model)
        refuses("te.lora.merge: model: its adapters are merged already", te.lora.merge, model)
        local tied = te.Sequential(te.Linear(4, 4), te.Linear(4, 4))
        tied[2].weight = tied[1].weight
        refuses("te.lora.merge: 1.weight stands at other places, too", te.lora.merge, te.lora.add(tied, { rank = 1 }))
    end)
end)

describe("te.lora.add says what is wrong:", function()
    local cases = {
        ['option targets[2]: no linear layer is named "q_porj"; did you mean "q_proj"?'] =
            { targets = { "v_proj", "q_porj" } },
        ['option targets[1]: no linear layer is named "all-linear"; there are down_proj, gate_proj, k_proj, o_proj, '
            .. "q_proj, up_proj, v_proj"] = { targets = "all-linear" },
        ["option targets[1]: lm_head: Llama reads its weight by itself"] = { targets = "lm_head" },
        ["option targets[1]: no pattern: malformed pattern (missing ']')"] = { targets = "[" },
        ["option targets[1]: is empty"] = { targets = { "" } },
        ["option targets[1]: expected string, got 3"] = { targets = { 3 } },
        ["option targets: the list is empty"] = { targets = {} },
        ["option targets: expected table, got 3"] = { targets = 3 },
        ["option rank: expected positive integer, got 0"] = { rank = 0 },
        ["option alpha: expected a finite number, got inf"] = { alpha = 1 / 0 },
        ["option dropout: expected number from 0 to below 1, got 1"] = { dropout = 1 },
        ['unknown option "aplha"; did you mean "alpha"?'] = { aplha = 1 },
    }
    for message, opts in pairs(cases) do
        it(message, function()
            local model = llama()
            assert.error_matches(function() te.lora.add(model, opts) end, "te.lora.add: " .. message, 1, true)
            assert.is_true(model.wte.weight.requires_grad)
        end)
    end

    it("what takes more memory than there is, and leaves the model as it was", function()
        local model = llama()
        assert.error_matches(function() te.lora.add(model, { rank = 2 ^ 40 }) end, "out of memory", 1, true)
        assert.is_true(model.wte.weight.requires_grad and not te.lora.config(model))
    end)

    it("layers that take none", function()
        local function refuses(message, model, opts)
            assert.error_matches(function() te.lora.add(model, opts) end, message, 1, true)
        end
        refuses("model: expected a module, got 3", 3)
        refuses("model: Sequential has no linear layers", te.Sequential(te.GELU()))
        local adapted = te.lora.add(llama())
        refuses("model: blocks.1.attention.2.qkv has adapters already; te.lora.remove takes them off", adapted)
        local experts = { n_expert = 2, n_inner_shared = 16, qk_norm = true }
        refuses("blocks.1.mlp.2.experts.1: te.GroupedLinear, of experts, takes no adapters", llama(experts),
            { targets = "gate_proj" })
        refuses("blocks.1.mlp.2.router: MoE reads its weight by itself", llama(experts), { targets = "router" })
        refuses("model: no linear layer of GroupedLinear takes adapters", te.GroupedLinear(2, 4, 4))
        local Own = te.Linear:extend("Own")
        function Own:op_forward(x) return x end
        refuses("1: its class Own has a forward of its own", te.Sequential(Own(4, 4)), { targets = "1" })
    end)

    it("layers that are split between processes", function()
        if not processes.available() then pending "no mpirun" end
        local path = os.tmpname()
        core.write_file(path, 'local te = require "te" local l = te.Sequential(te.Linear(4, 4, { tensor_parallel_mode '
            .. '= "column", tensor_parallel_group = te.distributed.world() })) '
            .. "print(select(2, pcall(te.lora.add, l)))")
        local text = processes.run(2, ("'%s' '%s'"):format(os.getenv("TETRAIN") or "build/tetrain", path))
        os.remove(path)
        local _, count = text:gsub("te.lora.add: 1: te.lora does not split adapters between processes", "")
        assert.equal(2, count, text)
    end)
end)

describe("te.lora.save and load", function()
    local path = folder_of_its_own()

    it("write and read adapters as PEFT names them", function()
        local model = fill(te.lora.add(llama(), { rank = 2, alpha = 6, rslora = true, dropout = 0.25,
            targets = { "q_proj", "v_proj", "layers.1.mlp.up_proj", "down_proj" } }))
        te.lora.save(model, path "new/adapters", { base = "some/model" })
        local tensors = te.load(path "new/adapters/adapter_model.safetensors")
        local name = "base_model.model.model.layers.1.self_attn.v_proj."
        assert.same({ 2, 32 }, tensors[name .. "lora_A.weight"].shape)
        assert.same({ 16, 2 }, tensors[name .. "lora_B.weight"].shape)
        local names = 0
        for _ in pairs(tensors) do names = names + 1 end
        assert.equal(2 * 7, names)
        local config = core.json(shell.read(path "new/adapters/adapter_config.json"))
        assert.same({ "LORA", 2, 6, 0.25, true, "some/model", "CAUSAL_LM", false }, { config.peft_type, config.r,
            config.lora_alpha, config.lora_dropout, config.use_rslora, config.base_model_name_or_path,
            config.task_type, config.fan_in_fan_out })
        assert.same({ "q_proj", "v_proj", "down_proj", "model.layers.1.mlp.up_proj" }, config.target_modules)
        local other = te.lora.load(llama(), path "new/adapters")
        assert.same(te.lora.config(model), te.lora.config(other))
        assert.same(model:eval()(ids()):totable(), other:eval()(ids()):totable())
        assert.is_true(other.blocks[1].mlp[4].lora.B.requires_grad)
        te.lora.save(te.lora.add(gpt()), path "gpt")
        config = core.json(shell.read(path "gpt/adapter_config.json"))
        assert.same({ true, { "c_attn", "c_proj", "c_fc" } }, { config.fan_in_fan_out, config.target_modules })
        local seq = fill(te.lora.add(te.Sequential(te.Linear(4, 4)), { rank = 1 }))
        te.lora.save(seq, path "own/")
        local same = te.Sequential(te.Linear(4, 4))
        same[1].weight = seq[1].weight
        te.lora.load(same, path "own/")
        assert.same(seq(te.ones { 1, 4 }):totable(), same(te.ones { 1, 4 }):totable())
    end)

    it("know layers by their whole names", function()
        local function nested() return te.Sequential(te.Linear(4, 4), te.Sequential(te.Linear(4, 4))) end
        local model = fill(te.lora.add(nested(), { rank = 1, targets = "^1$" }))
        te.lora.save(model, path "nested")
        local other = te.lora.load(nested(), path "nested")
        assert.same({ "1" }, te.lora.config(other).targets)
        assert.same(model[1].lora:delta():totable(), other[1].lora:delta():totable())
        assert.error_matches(function() te.lora.load(other, path "nested") end,
            "te.lora.load: model: 1 has adapters already", 1, true)
    end)

    it("leave a folder as it was where the new files cannot be written", function()
        local function save(rank)
            return shell.capture(([[(ulimit -f 32; trap '' XFSZ; '%s' -e 'te.manual_seed(1)
                te.lora.save(te.lora.add(te.Sequential(te.Linear(256, 256)), { rank = %d }), "%s")')]]):format(
                os.getenv("TETRAIN") or "build/tetrain", rank, path "full"))
        end
        local output, status = save(2)
        assert.equal(0, status, output)
        local function files()
            return { shell.read(path "full/adapter_config.json"), shell.read(path "full/adapter_model.safetensors") }
        end
        local before = files()
        output, status = save(64)
        assert.is_true(status ~= 0)
        assert.truthy(output:find("cannot write: File too large", 1, true), output)
        assert.same(before, files())
        assert.equal("adapter_config.json adapter_model.safetensors",
            (shell.capture(("echo $(ls -A '%s')"):format(path "full")):gsub("%s+$", "")))
        local model = te.lora.add(te.Sequential(te.Linear(256, 256)), { rank = 1 })
        assert.error_matches(function() te.lora.save(model, path "full", { base = "\255" }) end,
            'te.lora.save: option base: expected text in UTF-8, got "', 1, true)
        te.lora.load(te.Sequential(te.Linear(256, 256)), path "full")
    end)

    it("refuse what other adapters would be", function()
        te.lora.save(te.lora.add(llama(), { rank = 2, targets = "q_proj" }), path "a")
        local text = shell.read(path "a/adapter_config.json")
        local function refuses(message, from, to)
            core.write_file(path "a/adapter_config.json", (text:gsub(from, to)))
            local model = llama()
            assert.error_matches(function() te.lora.load(model, path "a") end, message, 1, true)
            assert.is_true(model.wte.weight.requires_grad and not te.lora.config(model))
        end
        refuses('peft_type: only "LORA" is supported, got "IA3"', '"LORA"', '"IA3"')
        refuses("use_dora is not supported, got true", '"use_dora": false', '"use_dora": true')
        refuses('bias is not supported, got "all"', '"none"', '"all"')
        refuses("rank_pattern is not supported", '"rank_pattern": {}', '"rank_pattern": {"q_proj": 4}')
        refuses("never_heard_of is not supported", '"r": 2', '"r": 2, "never_heard_of": 1')
        refuses('init_lora_weights is not supported, got "pissa"', '"init_lora_weights": true',
            '"init_lora_weights": "pissa"')
        refuses('q_proj.lora_A.weight" has shape {2,32}, the adapter of this model {3,32}', '"r": 2', '"r": 3')
        refuses("adapter_config.json: r: expected positive integer, got nil", '"r": 2', '"revision": "x"')
        core.write_file(path "a/adapter_config.json", text)
        local tensors = te.load(path "a/adapter_model.safetensors")
        local function refuses_tensors(message, name, to)
            local renamed = {}
            for old, tensor in pairs(tensors) do renamed[(old:gsub(name, to))] = tensor end
            te.save(path "a/adapter_model.safetensors", renamed)
            assert.error_matches(function() te.lora.load(llama(), path "a") end, message, 1, true)
        end
        refuses_tensors('no layer "model.layers.0.self_attn.x_proj" (nearest: model.layers.0.self_attn.', "q_proj",
            "x_proj")
        refuses_tensors('there is no place for "other.layers.', "^base_model%.model%.model", "other")
        refuses_tensors('there is no "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"',
            "layers%.0(.*)lora_B", "layers.1%1lora_B")
        assert.error_matches(function() te.lora.load(llama(), path "none") end, "No such file")
        assert.error_matches(function() te.lora.save(llama(), path "b") end, "te.lora.save: model: Llama has no adap")
    end)
end)

describe("a checkpoint of a model with adapters", function()
    local path = folder_of_its_own()

    it("has what they were made with", function()
        for _, merged in ipairs { false, true } do
            local model = fill(te.lora.add(llama(), { rank = 2, alpha = 5, dropout = 0.125, rslora = true,
                targets = { "q_proj", "down_proj" } }))
            if merged then te.lora.merge(model) end
            local optimizer = te.optim.AdamW(model:parameter_groups(0), { lr = 1e-2 })
            local file = te.train.checkpoint.save { folder = path "", step = 1, model = model, optimizer = optimizer,
                metadata = { model:texts() } }
            local again = te.models.from_checkpoint(te.train.checkpoint.load(file))
            assert.same(te.lora.config(model), te.lora.config(again))
            assert.equal(merged, te.lora.config(again).merged)
            assert.same(model:eval()(ids()):totable(), again:eval()(ids()):totable())
            assert.is_false(again.wte.weight.requires_grad)
        end
    end)

    it("is refused where it says nothing of them that has a meaning", function()
        local texts = te.lora.add(llama(), { rank = 2 }):texts()
        for message, change in pairs {
            ['option rank: expected positive integer, got "x"'] = { rank = "x" },
            ['option alpha: expected number, got ""'] = { alpha = false },
            ['option dropout: expected number from 0 to below 1, got "-"'] = { dropout = "-" },
            ['option rslora: expected boolean, got "maybe"'] = { rslora = "maybe" },
            ["option targets: the list is empty"] = { targets = false },
            ['option targets[1]: no linear layer is named "proj"'] = { targets = "proj" },
        } do
            local changed = {}
            for name, text in pairs(texts) do changed[name] = text end
            for name, text in pairs(change) do changed["model.lora." .. name] = text or nil end
            local model = llama()
            assert.error_matches(function() require "te.lora.texts".restore(model, changed) end,
                "te.lora.add: " .. message, 1, true)
            assert.is_nil(te.lora.config(model))
        end
    end)
end)
