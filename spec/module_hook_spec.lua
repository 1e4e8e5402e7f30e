--- Hooks of modules (te.hooks).

local te = require "te"

describe("module:register_forward_hook", function()
    local model, x, seen

    before_each(function()
        te.manual_seed(3)
        model = te.Sequential(te.LayerNorm(8), te.Sequential(te.Linear(8, 8), te.GELU()), te.Linear(8, 4))
        x, seen = te.randn { 3, 8 }, {}
    end)

    it("calls fn with arguments and results, in the order of registration", function()
        model[3]:register_forward_hook(function(module, args, y) seen[1] = { module, args[1]:size(2), y:size(2) } end)
        model[3]:register_forward_hook(function() seen[2] = true end)
        model(x)
        assert.same({ { model[3], 8, 4 }, true }, seen)
    end)

    it("changes neither results nor gradients, wherever it stands", function()
        local before = model(x):totable()
        model(x):square():sum():backward()
        local gradient = model[1].weight.grad:totable()
        for _, module in model:named_modules() do
            model:zero_grad()
            local kept
            local hook = module:register_forward_hook(function(_, _, y) kept = y end)
            local y = model(x)
            assert.same(before, y:totable())
            y:square():sum():backward()
            assert.same(gradient, model[1].weight.grad:totable())
            assert.is_true(te.all(te.isfinite(kept)):item()) -- and was not released
            hook:remove()
        end
    end)

    it("replaces results, and before the call arguments", function()
        local y = model[3](model[2](model[1](x)) * 2) + 1
        model[3]:register_forward_pre_hook(function(_, args) return args[1] * 2 end)
        model[3]:register_forward_hook(function(_, _, result) return result + 1 end)
        assert.is_true((model(x) - y):abs():max():item() < 1e-6)
    end)

    it("sees inside attention, and the lengths of packed sequences reach containers with hooks", function()
        local attention = te.MultiHeadedSelfAttention(8, 2)
        local block = te.Sequential(te.Residual(te.LayerNorm(8), attention))
        local lengths = te.tensor({ 1, 2 }, { dtype = "int32" })
        local y = block(x, lengths)
        local hooks = {
            block[1]:register_forward_hook(function(_, args) seen[1] = #args end),
            attention.qkv:register_forward_hook(function(_, _, qkv) seen[2] = qkv end),
        }
        assert.is_true((block(x, lengths) - y):abs():max():item() < 1e-6)
        assert.equal(2, seen[1])
        assert.equal(24, seen[2]:size(2))
        assert.is_true(te.isfinite(seen[2]:sum()):item())
        for _, hook in ipairs(hooks) do hook:remove() end
    end)

    it("passes on extra inputs and outputs of containers", function()
        local inner = te.Sequential(te.MakeExtraOutput(), te.AddExtraInput())
        local outer = te.Sequential(inner, te.ConstantScale(2))
        inner:register_forward_hook(function(_, args, y, extra) seen = { #args, y, extra } end)
        local y, extra = outer(x, x)
        assert.same({ (x * 4):totable(), x:totable() }, { y:totable(), extra:totable() })
        assert.equal(2, seen[1])
    end)

    it("splits what is fused only there, which a plan shows without calling fn", function()
        local chain = te.Sequential(te.GELU(), te.ConstantScale(2), te.SiLU(), te.ConstantScale(3))
        assert.equal(1, #chain:explain(x).forward)
        local hook = chain[1]:register_forward_hook(function() seen[#seen + 1] = true end)
        local plan = chain:explain(x)
        assert.equal(2, #plan.forward)
        assert.equal("called: this GELU has hooks", plan.reasons[1].reason)
        assert.equal(0, #seen)
        hook:remove()
        assert.equal(1, #chain:explain(x).forward)
        chain(x)
        assert.equal(0, #seen)
    end)

    it("is no part of the state, of clones, nor of what rules fuse", function()
        local names = {}
        for name in pairs(model:state_dict()) do names[name] = true end
        model[1]:register_forward_hook(function() seen[#seen + 1] = true end)
        for name in pairs(model:state_dict()) do assert.is_true(names[name]) end
        model:clone()(x)
        assert.equal(0, #seen)
        local rule = te.register_forward_fusion(function(ops) return ops end)
        model(x)
        te.unregister_forward_fusion(rule)
        assert.equal(1, #seen)
    end)

    it("lets generate run step by step", function()
        local gpt = te.models.gpt { vocab_size = 9, block_size = 8, n_layer = 1, n_head = 1, n_embd = 8 }
        local ids = te.tensor({ { 1, 2 } }, { dtype = "int32" })
        local first = gpt:generate(ids, 4, { temperature = 0 }):totable()
        gpt.blocks[1]:register_forward_hook(function(_, args) seen[#seen + 1] = args[1]:size(2) end)
        assert.same(first, gpt:generate(ids, 4, { temperature = 0 }):totable())
        assert.same({ 2, 1, 1, 1 }, seen)
    end)

    it("is called for every module of a model, also those whose weight is read", function()
        local llama = te.models.llama { vocab_size = 9, block_size = 8, n_layer = 1, n_head = 1, n_embd = 8,
            n_inner = 8, n_expert = 2, qk_norm = true }
        for name, module in llama:named_modules() do
            module:register_forward_hook(function() seen[name] = true end)
        end
        local ids = te.tensor({ { 1, 2 } }, { dtype = "int32" })
        llama(ids, ids)
        for name in llama:named_modules() do assert.is_true(seen[name], name) end
        seen = {}
        llama(ids)
        assert.is_true(seen.lm_head)
    end)

    it("gives the gradient of a result inside of a model", function()
        model[2]:register_forward_hook(function(_, _, y)
            y:register_hook(function(grad) seen[1] = grad end)
        end)
        model(x):sum():backward()
        assert.is_true((seen[1] - model[3].weight:sum(1)):abs():max():item() < 1e-6)
    end)

    it("may remove itself, and says what is wrong", function()
        local hook
        hook = model[1]:register_forward_hook(function()
            seen[#seen + 1] = true
            hook:remove()
        end)
        model(x)
        model(x)
        assert.equal(1, #seen)
        assert.equal("Hook(removed)", tostring(hook))
        assert.error_matches(function() model:register_forward_hook() end,
            "Sequential:register_forward_hook: fn: expected callable, got nil")
        assert.error_matches(function() model.register_forward_pre_hook(3, print) end,
            "Module:register_forward_pre_hook")
    end)
end)
