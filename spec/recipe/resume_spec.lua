-- Training under delayed scaling goes on from a checkpoint with the same bytes, also after steps that changed no
-- weight: those that were not finite, and those of layers that stay as they are.
local te = require "te"
local checkpoint = require "te.train.checkpoint"
local make_guard = require "te.train.guard"
local core = te._core

local BAD = 3 -- the step whose gradients are not finite

local function build(algorithm)
    te.manual_seed(5)
    local model = te.Sequential(te.Linear(32, 48), te.GELU(), te.Linear(48, 32))
    model[1].weight.requires_grad = false
    local trained = { model[1].bias, model[3].weight, model[3].bias }
    return {
        model = model, optimizer = te.optim.AdamW(trained, { lr = 0.01 }), guard = make_guard(model), trained = trained,
        recipe = te.recipe.DelayedScaling { amax_history_len = 4, amax_compute_algo = algorithm },
    }
end

local function own_algorithm(history) return math.max(unpack(history)) end

-- What the steps computed, and the model's whole state after them.
local function train(t, from, to, micro_steps)
    local bytes = {}
    for i = from, to do
        t.model:zero_grad()
        local loss = 0
        for m = 1, micro_steps do
            te.manual_seed(10 * i + m)
            local x = te.randn({ 16, 32 })
            local y = te.autocast({ recipe = t.recipe }, t.model, x)
            te.sum(y * y):backward()
            bytes[#bytes + 1], loss = core.tensor_bytes(y:detach():to("cpu")), loss + te.sum(y):item()
        end
        if i == BAD then te.no_grad(function() t.model[3].bias.grad:fill_(math.huge) end) end
        if t.guard:allows(loss, te.optim.grad_norm(t.trained)) then t.optimizer:step() end
    end
    local names, state = {}, t.model:state_dict()
    for name in pairs(state) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do bytes[#bytes + 1] = name .. core.tensor_bytes(state[name]:to("cpu"):clone()) end
    return table.concat(bytes)
end

describe("delayed scaling", function()
    it("is saved as it was loaded where nothing ran since", function()
        local whole, folder = build "max", os.tmpname()
        train(whole, 1, 1, 1)
        finally(function() os.remove(folder) end)
        te.save(folder, whole.model:state_dict())
        local script = ([[
            local te = require "te"
            local model = te.Sequential(te.Linear(32, 48), te.GELU(), te.Linear(48, 32))
            model:load_state_dict((te.load(%q)))
            te.save(%q, model:state_dict())
        ]]):format(folder, folder)
        local tetrain = os.getenv "TETRAIN" or te._core.executable()
        assert.equal(0, os.execute(("'%s' -e '%s'"):format(tetrain, script:gsub("\n", " "))))
        local expected, saved = whole.model:state_dict(), te.load(folder)
        for name, tensor in pairs(expected) do
            assert.equal(core.tensor_bytes(tensor:detach():clone()), core.tensor_bytes(saved[name]))
        end
    end)

    for _, case in ipairs { { "max", 1 }, { "most_recent", 1 }, { "max", 3 }, { own_algorithm, 1 } } do
        local algorithm, micro_steps = unpack(case)
        for saved_after = BAD - 1, BAD + 1 do
            local name = type(algorithm) == "string" and algorithm or "own"
            it(("goes on after step %d as if it had not stopped, step %d being skipped: %s, %d batches a step")
                :format(saved_after, BAD, name, micro_steps), function()
                local folder = os.tmpname()
                os.remove(folder)
                core.mkdir(folder)
                finally(function() os.execute(("rm -rf '%s'"):format(folder)) end)
                local whole = build(algorithm)
                train(whole, 1, saved_after, micro_steps)
                checkpoint.save { folder = folder, step = saved_after, model = whole.model,
                    optimizer = whole.optimizer, keep = 1,
                    metadata = {} }
                local expected = train(whole, saved_after + 1, 6, micro_steps)
                local fresh, saved = build(algorithm), checkpoint.load(checkpoint.latest(folder))
                checkpoint.restore_model(saved, fresh.model)
                checkpoint.restore_training(saved, fresh.model, fresh.optimizer)
                assert.is_true(expected == train(fresh, saved_after + 1, 6, micro_steps))
                assert.equal(saved_after < BAD and 1 or 0, fresh.guard.skipped)
            end)
        end
    end
end)
