--- te.train.steps: the same steps whether they are launched as a graph, whose figures the host sees a step later, or
--- made one operation at a time; those that are not finite change nothing.

local te = require "te"

local devices, reason = te.devices()

-- Values of x for the steps: what a linear layer is given.
local function run(device, graph, inputs, look)
    te.manual_seed(4)
    local model = te.Sequential(te.Linear(3, 4), te.GELU(), te.Linear(4, 2))
    model:to(device)
    local optimizer, at = te.optim.AdamW(model:parameters(), { betas = { 0.8, 0.9 } }), 0
    local steps = te.train.steps { device = device, graph = graph, clip = 0.5, grad_accumulation = 1,
        next_batch = function()
            at = at + 1
            return te.full({ 2, 3 }, inputs[at]), te.ones { 2, 2 }
        end,
        loss = function(x, y) return ((model(x:to(device)) - y:to(device)) ^ 2):sum() end,
        parameters = model:parameters(), optimizer = optimizer,
        schedule = function(step) return 0.1 / step end, guard = te.train.guard(model) }
    local seen = {}
    for step = 1, #inputs do
        steps:start(step)
        for s in steps:finished(look(step, #inputs)) do
            seen[#seen + 1] = ("%d %s %.17g %.17g %g"):format(s.step, tostring(s.allowed), s.loss, s.grad_norm, s.lr)
        end
    end
    for _, p in ipairs(model:parameters()) do
        seen[#seen + 1] = table.concat(p:detach():reshape { -1 }:totable(), " ")
    end
    seen[#seen + 1] = optimizer:state_dict().state[1].step
    return (table.concat(seen, "\n"):gsub("%-?nan", "nan"))
end

local function at_the_end(step, n) return step == n end
local function always() return true end

describe("te.train.steps", function()
    it("counts no step that was not made", function()
        local text = run("cpu", true, { 1, 1 / 0, 2, 0 / 0, 3 }, always)
        assert.matches("\n2 false nan", text)
        assert.matches("\n3$", text)
    end)

    it("adds nothing of a step that raised to the next one", function()
        local layer, batches, calls, breaks = te.Linear(2, 1), 0, 0, true
        local steps = te.train.steps { device = "cpu", graph = false, clip = 0, grad_accumulation = 2,
            next_batch = function()
                batches = batches + 1
                return te.full({ 1, 2 }, batches), te.ones { 1, 1 }
            end,
            loss = function(x, y)
                calls = calls + 1
                if breaks and calls == 2 then error "it breaks" end
                return (layer(x) * y):sum()
            end,
            parameters = layer:parameters(), optimizer = te.optim.SGD(layer, { lr = 0 }),
            schedule = function() return 0 end, guard = te.train.guard(layer) }
        assert.error_matches(function() steps:start(1) end, "it breaks")
        breaks = false
        steps:start(2)
        for s in steps:finished(true) do
            assert.near(math.sqrt(2 * 3.5 ^ 2 + 1), s.grad_norm, 1e-6) -- of batches 3 and 4 alone
        end
    end)

    if not devices[2] then
        pending("on CUDA: " .. reason)
        return
    end

    it("gives the bits of steps that are looked at one by one", function()
        local inputs = { 1, 2, 0.5, 1 / 0, 3, 1, 0 / 0, 1 / 0, 2, 1, 4, 1 / 0 }
        local expected = run("cuda", true, inputs, always)
        assert.equal(expected, run("cuda", true, inputs, at_the_end))
        assert.equal(expected, run("cuda", true, inputs, function(step, n) return step % 4 == 0 or step == n end))
        assert.matches("\n8$", expected)
    end)

    it("ends a step after the third that is not finite, naming the tensor, and leaves the weights alone", function()
        local n_finished = 0
        local ok, problem = pcall(run, "cuda", true, { 1, 2, 0.5, 1, 1 / 0, 1 / 0, 1 / 0, 1 / 0, 1 },
            function(step) n_finished = step return false end)
        assert.is_false(ok)
        assert.equal(77, problem.code)
        assert.equal(8, n_finished)
        assert.matches("3 steps in a row were not finite %(loss %-?[naif]+, gradient norm %-?nan%): "
            .. "gradient 1.weight of Linear%(in", problem.message)
    end)
end)
