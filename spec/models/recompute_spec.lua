--- The models' option recompute_blocks: backward computes each block again, and on the CPU no bit of a loss or gradient
--- tells. Other devices add up the gradients of norms and biases in the order of the kernel that they are in.

local bits = require "spec.support.bits"
local te = require "te"

local on_cpu = te.get_default_device() == "cpu"

local MODELS = {
    gpt = { "gpt", { bias = true } },
    llama = { "llama", { n_kv_head = 2, qk_norm = true, post_norm = true } },
    ["llama of experts"] = { "llama", { n_expert = 4, expert_aux_loss = 0.1 } },
}

local function model_of(name, more)
    te.manual_seed(1)
    local config = { vocab_size = 50, block_size = 24, n_layer = 3, n_head = 4, n_embd = 32 }
    for key, value in pairs(MODELS[name][2]) do config[key] = value end
    for key, value in pairs(more or {}) do config[key] = value end
    return te.models[MODELS[name][1]](config)
end

-- Losses, gradients and random numbers of some steps, on a device of one, after which last bits would be seen anywhere.
local function trained(name, more, autocast)
    local model = model_of(name, more)
    local optimizer = te.optim.AdamW(model:parameters(), { lr = 1e-2 })
    te.manual_seed(2)
    local ids, targets, seen = te.randint(0, 49, { 3, 24 }), te.randint(0, 49, { 3, 24 }), {}
    for _ = 1, on_cpu and 3 or 1 do
        local loss = te.autocast(autocast, function()
            local _, loss = model(ids, targets)
            return loss
        end)
        seen[#seen + 1] = loss:detach()
        loss:backward()
        for _, p in ipairs(model:parameters()) do seen[#seen + 1] = p.grad:clone() end
        optimizer:step()
        optimizer:zero_grad()
    end
    seen[#seen + 1] = te.rand { 4 }
    return seen
end

local function compare(expected, got, what)
    if on_cpu then return bits.assert_equal(expected, got, what) end
    local far = te.max(te.abs(got - expected)):item() / te.max(te.abs(expected)):item()
    assert.is_true(far < 1e-5, what .. " " .. far)
end

local DTYPES = on_cpu and { "float32", "bfloat16" } or { "bfloat16" }
local RECIPES = on_cpu and { false, "DelayedScaling", "Float8BlockScaling", "NVFP4BlockScaling" }
    or { "DelayedScaling" }

describe("recompute_blocks", function()
    for _, name in ipairs { "gpt", "llama", "llama of experts" } do
        for _, recipe in ipairs(RECIPES) do
            it(("changes nothing about a %s under %s"):format(name, recipe or "no recipe"), function()
                for _, dtype in ipairs(DTYPES) do
                    local function autocast()
                        return { dtype = dtype, recipe = recipe and te.recipe[recipe] {} or nil }
                    end
                    local plain = trained(name, { dropout = 0.1 }, autocast())
                    local again = trained(name, { dropout = 0.1, recompute_blocks = true }, autocast())
                    assert.equal(#plain, #again)
                    for i, t in ipairs(plain) do compare(t, again[i], dtype .. " " .. i) end
                end
            end)
        end
    end

    it("keeps less, and can be set later", function()
        local model = model_of("gpt", { n_layer = 8, n_embd = 64 })
        local ids = te.randint(0, 49, { 8, 24 })
        local function held()
            collectgarbage()
            collectgarbage()
            local before = te.memory_stats().current
            local _, loss = model(ids, ids)
            collectgarbage()
            collectgarbage()
            local bytes = te.memory_stats().current - before
            loss:backward()
            return bytes
        end
        local plain = held()
        assert.equal(model, model:set_recompute_blocks(true))
        local less = held()
        assert.is_true(less < plain / 3, less .. " of " .. plain)
        model:set_recompute_blocks(false)
        assert.equal(plain, held())
        assert.error_matches(function() model:set_recompute_blocks(1) end,
            "GPT:set_recompute_blocks: on: expected boolean, got 1")
    end)

    it("gives the field aux_loss of experts a gradient", function()
        local model = model_of("llama of experts", { recompute_blocks = true })
        model(te.randint(0, 49, { 2, 24 }), te.randint(0, 49, { 2, 24 }))
        local router = model.blocks[2].mlp[2].router.weight
        model.blocks[2].mlp[2].aux_loss:backward()
        assert.is_true(te.sum(te.abs(router.grad)):item() > 0)
    end)

    it("is this process's, not the model's, and nothing to generation", function()
        local model, plain = model_of("gpt", { recompute_blocks = true }), model_of "gpt"
        assert.is_nil(model.config.recompute_blocks)
        assert.same(plain:texts(), model:texts())
        local prompt = te.tensor({ { 1, 2, 3 } }, { dtype = "int64" })
        assert.same(plain:generate(prompt, 5, { temperature = 0 }):totable(),
            model:generate(prompt, 5, { temperature = 0 }):totable())
    end)
end)
