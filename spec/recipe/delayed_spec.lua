-- What delayed scaling remembers: scales and histories over steps, scopes, checkpoints and saved states.
local te = require "te"
local products = require "spec.support.products"
local cards = require "spec.support.device"

local recipes, f64, distance, bytes_of, same, linear, step =
    products.recipes, products.f64, products.distance, products.bytes_of, products.same, products.linear, products.step

describe("delayed scaling", function()
    local function scales(module)
        local state = module:state_dict()
        return { input = state.input_scale:item(), weight = state.weight_scale:item(),
            grad_output = state.grad_output_scale:item() }
    end

    it("follows the largest amax so far", function()
        local recipe, module = recipes.delayed { margin = 1, amax_history_len = 4 }, linear(16, 8, { bias = false })
        te.manual_seed(4)
        local most = { input = 0, weight = 0, grad_output = 0 }
        for i = 1, 4 do
            local x, dy = te.randn({ 12, 16 }) * i, te.randn({ 12, 8 }) * (5 - i)
            step(module, x, dy, recipe, "float32")
            most.input = math.max(most.input, x:abs():max():item())
            most.weight = math.max(most.weight, module.weight:detach():abs():max():item())
            most.grad_output = math.max(most.grad_output, dy:abs():max():item())
            local found = scales(module)
            local max = { input = 448, weight = 448, grad_output = 57344 }
            for role, amax in pairs(most) do
                assert.is_true(math.abs(found[role] / (max[role] / amax / 2) - 1) < 1e-6)
            end
            te.no_grad(function() module.weight:mul_(1.5) end)
        end
    end)

    it("quantizes with the scale of earlier steps", function()
        local recipe, module = recipes.delayed(), linear(16, 8, { bias = false })
        te.manual_seed(4)
        local x, dy = te.randn({ 12, 16 }) * 100, te.randn({ 12, 8 })
        step(module, x, dy, recipe, "float32")
        local s = scales(module)
        local y = step(module, x, dy, recipe, "float32")
        local qx = te.quantize(x, recipe, "input", { scale = s.input }):dequantize()
        -- the weight is as it was, but its scale is another
        local qw = te.quantize(module.weight:detach(), recipe, "weight", { scale = s.weight }):dequantize()
        local bound = cards.sums_shortly() and 2e-3 or 2e-6
        assert.is_true(distance(y, te.matmul(f64(qx), f64(qw):transpose(1, 2))) < bound)
    end)

    it("keeps its scales without gradients and after an infinite amax", function()
        local recipe, module = recipes.delayed(), linear(16, 8, { bias = false })
        te.manual_seed(4)
        local x, dy = te.randn({ 12, 16 }), te.randn({ 12, 8 })
        step(module, x, dy, recipe, "float32")
        local before = scales(module)
        te.no_grad(te.autocast, { recipe = recipe }, module, x * 50)
        assert.same(before, scales(module))
        local skipped = te._core.skipped_amaxes()
        local hostile = x:clone()
        hostile:view({ -1 }):narrow(1, 7, 1):fill_(math.huge)
        te.autocast({ recipe = recipe }, module, hostile)
        assert.same(before, scales(module))
        assert.equal(skipped + 1, te._core.skipped_amaxes())
        assert.equal(0, module:state_dict().input_amax_history:select(1, 1):item())
    end)

    it("trains the same with an evaluation in between", function()
        local function run(evaluate)
            te.manual_seed(2)
            local recipe, module = recipes.delayed(), linear(16, 16, { bias = false })
            local x, dy = te.randn({ 12, 16 }), te.randn({ 12, 16 })
            for i = 1, 3 do
                if evaluate then te.no_grad(te.autocast, { recipe = recipe }, module, x * 7) end
                te.autocast({ recipe = recipe }, module, x):backward(dy) -- the weight is quantized row-wise only
                te.no_grad(function() module.weight:mul_(1 + i) end)
            end
            return module:state_dict()
        end
        local plain, evaluated = run(false), run(true)
        for name, tensor in pairs(plain) do assert.is_true(same(tensor:detach(), evaluated[name]:detach()), name) end
        assert.is_true(plain.weight_amax_history:select(1, 1022):item() > 0)
    end)

    it("trains the same with a step in between that fails", function()
        local function run(fails)
            te.manual_seed(2)
            local recipe, module = recipes.delayed { amax_history_len = 3 }, linear(16, 16, { bias = false })
            local x, dy = te.randn({ 12, 16 }), te.randn({ 12, 16 })
            for i = 1, 4 do
                if fails then
                    assert.error_matches(function() te.autocast({ recipe = recipe }, function()
                        te.autocast({ dtype = "bfloat16" }, module, x * 70)
                        error "no more"
                    end) end, "no more")
                end
                te.autocast({ recipe = recipe }, module, x):backward(dy)
                te.no_grad(function() module.weight:mul_(1 / i) end)
            end
            return module:state_dict()
        end
        local plain, failed = run(false), run(true)
        for name, tensor in pairs(plain) do assert.same(tensor:totable(), failed[name]:totable(), name) end
        assert.is_true(plain.input_scale:item() ~= 1 and plain.weight_scale:item() ~= 1)
    end)

    it("ends a step with the outermost te.autocast, also where one inside switches it off", function()
        local recipe, first, second = recipes.delayed { amax_history_len = 4 }, linear(16, 16), linear(16, 16)
        local x, off = te.ones { 4, 16 }, { enabled = false }
        for _, fails in ipairs { false, true } do
            local factor = first:state_dict().input_scale
            factor = factor and factor:item() or 1
            te.autocast({ recipe = recipe }, function()
                first(x)
                te.autocast(off, function()
                    pcall(te.autocast, { recipe = recipe }, function()
                        second(x)
                        if fails then error "no more" end
                    end)
                end)
                assert.equal(1, first:state_dict().input_amax_history:select(1, 1):item())
                first(x * 8)
                assert.equal(factor, first:state_dict().input_scale:item())
            end)
            assert.equal(448 / 8, first:state_dict().input_scale:item())
        end
        local mode = require "te.recipe.mode"
        te.autocast(off, function() te.autocast({ recipe = recipe }, first, x * 16) end) -- that is a step
        assert.equal(448 / 16, first:state_dict().input_scale:item())
        assert.is_nil(mode.step)
    end)

    it("ends a step that records gradients inside te.no_grad", function()
        local recipe, module, x = recipes.delayed { amax_history_len = 4 }, linear(16, 16), te.ones { 4, 16 }
        te.no_grad(te.autocast, { recipe = recipe }, function() te.enable_grad(module, x * 32) end)
        assert.equal(448 / 32, module:state_dict().input_scale:item())
        assert.equal(0, module:state_dict().input_amax_history:select(1, 1):item())
        te.no_grad(te.autocast, { recipe = recipe }, module, x * 64)
        assert.equal(448 / 32, module:state_dict().input_scale:item())
        assert.has_error(function()
            te.no_grad(te.autocast, { recipe = recipe }, function()
                te.enable_grad(module, x * 64)
                error "no more"
            end)
        end)
        assert.equal(0, module:state_dict().input_amax_history:select(1, 1):item())
    end)

    it("forgets the gradients' amaxes of a backward that fails", function()
        local Wrong = te.BasicOperation:extend("Wrong")
        function Wrong:op_forward(_, x) return x * 1 end
        function Wrong:op_backward() error "no gradient" end
        local recipe, module, x = recipes.delayed { amax_history_len = 4 }, linear(16, 16), te.randn { 4, 16 }
        x.requires_grad = true
        local function forward(inner)
            return te.autocast({ recipe = recipe }, function() return module(inner(x)) end)
        end
        forward(te.Identity()):backward(te.ones { 4, 16 })
        local before = module:state_dict().grad_output_scale:item()
        for _, backward in ipairs { te.backward, function(y, dy) te.grad(y, x, { grad_outputs = dy }) end } do
            assert.error_matches(function() backward(forward(Wrong()), te.full({ 4, 16 }, 1000)) end, "no gradient")
            assert.equal(0, module:state_dict().grad_output_amax_history:select(1, 1):item())
        end
        forward(te.Identity()):backward(te.ones { 4, 16 })
        assert.equal(before, module:state_dict().grad_output_scale:item())
    end)

    it("keeps what an optimizer has written when a step fails", function()
        local recipe = te.recipe.DelayedScaling {}
        local module = te.quantized_model_init({ recipe = recipe }, te.Linear, 16, 16, { bias = false })
        local opt = te.optim.SGD(module:parameters(), { lr = 0.1 })
        te.autocast({ recipe = recipe }, module, te.randn { 12, 16 }):sum():backward()
        opt:step()
        local function pending() return module:state_dict().weight_amax_history:select(1, 1):item() end
        local before = pending()
        pcall(te.autocast, { recipe = recipe }, function()
            module(te.randn { 12, 16 })
            error "no more"
        end)
        assert.is_true(before > 0)
        assert.equal(before, pending())
    end)

    it("takes the larger amax of two runs in one scope", function()
        local recipe, module = recipes.delayed(), linear(16, 16, { bias = false })
        te.manual_seed(4)
        local x = te.randn({ 12, 16 })
        te.autocast({ recipe = recipe }, function()
            module(x * 3)
            module(x)
        end)
        assert.is_true(math.abs(scales(module).input * (x * 3):abs():max():item() / 448 - 1) < 1e-6)
    end)

    it("calibrates without quantizing", function()
        local recipe, module, plain = recipes.delayed(), linear(16, 8), linear(16, 8)
        te.manual_seed(4)
        local x = te.randn({ 12, 16 })
        local y = te.no_grad(te.autocast, { enabled = false, calibrating = true, recipe = recipe }, module, x)
        assert.is_true(same(y, te.no_grad(plain, x)))
        assert.is_true(math.abs(scales(module).input * x:abs():max():item() / 448 - 1) < 1e-6)
        assert.is_true(math.abs(scales(module).weight * module.weight:detach():abs():max():item() / 448 - 1) < 1e-6)
    end)

    it("calibrates te.Quantize, too", function()
        local seq = te.Sequential(te.Quantize { backward = true }, linear(16, 8))
        te.manual_seed(4)
        local x, recipe = te.randn({ 12, 16 }) * 1e-4, recipes.delayed()
        x.requires_grad = true
        local y = te.autocast({ enabled = false, calibrating = true, recipe = recipe }, seq, x)
        assert.is_true(same(y, te.Sequential(seq[2])(x)))
        y:sum():backward()
        for _, name in ipairs { "1.input_scale", "2.input_scale" } do
            assert.is_true(math.abs(seq:state_dict()[name]:item() * x:abs():max():item() / 448 - 1) < 1e-6)
        end
        local exact = te.autocast({ enabled = false, calibrating = true, recipe = recipe }, te.Quantize(),
            x:to "float64")
        assert.is_true(same(exact, x:to "float64"))
        local quantized = te.no_grad(te.autocast, { recipe = recipe }, seq, x)
        assert.is_true(((quantized - y):norm() / y:norm()):item() < 0.1)
    end)

    it("calibrates in a group as by itself", function()
        local alone, grouped = linear(16, 8), te.Sequential(te.GELU(), linear(16, 8))
        te.manual_seed(4)
        local x, recipe = te.randn({ 12, 16 }), recipes.delayed()
        local scope = { enabled = false, calibrating = true, recipe = recipe }
        te.no_grad(te.autocast, scope, alone, te.no_grad(te.gelu, x))
        te.no_grad(te.autocast, scope, grouped, x)
        local a, b = alone:state_dict(), grouped:state_dict()
        assert.is_true(same(a.input_scale, b["2.input_scale"]))
        assert.is_true(same(a.weight_scale, b["2.weight_scale"]))
        assert.not_equal(1, a.input_scale:item())
    end)

    it("has one rule, in the engine as in recipe:update", function()
        local core, state = te._core, 7
        local function random()
            state = state * 16807 % 2147483647
            return state / 2147483647
        end
        for _, algorithm in ipairs { "max", "most_recent" } do
            for length = 1, 5 do
                local recipe = recipes.delayed { amax_history_len = length, amax_compute_algo = algorithm,
                    margin = length - 2 }
                local handle = core.product_recipe(recipe:quantizer("input"), recipe:quantizer("weight"),
                    recipe:quantizer("grad_output"), "quantized", { length, length, length })
                local kept = core.recipe_state()
                core.recipe_state_use(kept, handle)
                local scale, history = te.ones({ 1 }, { device = "cpu" }), te.zeros({ length }, { device = "cpu" })
                for _ = 1, 12 do
                    local draw = random()
                    history[1] = draw < 0.2 and 0 or draw < 0.3 and math.huge or random() * 10 ^ (60 * draw - 40)
                    core.recipe_state_set(kept, "grad_output", scale, history)
                    core.recipe_states_update { kept, "grad_output", algorithm, recipe.margin }
                    scale, history = recipe:update("grad_output", scale, history)
                    local engine_scale, engine_history = core.recipe_state_tensors(kept, "grad_output")
                    assert.same(scale:totable(), engine_scale:totable())
                    assert.same(history:totable(), engine_history:totable())
                end
            end
        end
    end)

    it("lets own functions choose", function()
        local seen
        local recipe = recipes.delayed {
            amax_history_len = 3,
            amax_compute_algo = function(history)
                seen = history
                return 2
            end,
            scaling_factor_compute_algo = function(amax, _, max) return max / amax / 4 end,
        }
        local module = linear(16, 8, { bias = false })
        te.manual_seed(4)
        te.autocast({ recipe = recipe }, module, te.randn({ 12, 16 }))
        assert.equal(3, #seen)
        assert.equal(56, scales(module).input)
    end)

    it("reports an own function that fails once, and forgets that step's amax", function()
        local answers = { { "raises", function() error("no scale today") end, "no scale today" },
            { "gives nothing", function() end, "gave nil, expected a number" },
            { "gives -1", function() return -1 end, "gave -1, expected a positive finite number" } }
        local x = te.ones { 2, 16 }
        for _, answer in ipairs(answers) do
            for _, name in ipairs { "scaling_factor_compute_algo", "amax_compute_algo" } do
                if name == "scaling_factor_compute_algo" or answer[1] ~= "gives -1" then
                    local failing, other = linear(16, 8), linear(16, 8)
                    local recipe = recipes.delayed { [name] = answer[2] }
                    local function run() te.autocast({ recipe = recipe }, failing, x) end
                    assert.error_matches(run, answer[3], 1, true)
                    assert.equal(1, scales(failing).input)
                    te.autocast({ recipe = recipes.delayed() }, other, x)
                    assert.equal(448, scales(other).input)
                    assert.error_matches(run, answer[3], 1, true)
                    te.autocast({ recipe = recipes.delayed() }, failing, x)
                    assert.equal(448, scales(failing).input)
                end
            end
        end
    end)

    local function loaded(module, input)
        local state = {}
        for name, t in pairs(module:state_dict()) do state[name] = t:clone() end
        for name, t in pairs(input) do state["input_" .. name] = t end
        module:load_state_dict(state)
    end

    it("keeps its scale while a loaded history is infinite or NaN", function()
        for _, algo in ipairs { "max", "most_recent", function(history) return math.max(unpack(history)) end } do
            local recipe, module = recipes.delayed { amax_history_len = 4, amax_compute_algo = algo }, linear(8, 8)
            te.autocast({ recipe = recipe }, module, te.ones { 4, 8 })
            loaded(module, { amax_history = te.tensor { 0, 1, math.huge, 0 / 0 } })
            for _ = 1, 6 do
                local y = te.autocast({ recipe = recipe }, module, te.full({ 4, 8 }, 2))
                local scale = scales(module).input
                assert.is_true(scale == 448 or scale == 224, "scale " .. scale)
                assert.is_true(te.all(te.isfinite(y)):item())
            end
            assert.equal(224, scales(module).input)
        end
    end)

    it("does not load scales that are none, and changes nothing then", function()
        local module = linear(8, 8)
        te.autocast({ recipe = recipes.delayed { amax_history_len = 4 } }, module, te.ones { 4, 8 })
        local weight = module.weight:clone()
        for _, scale in ipairs { 0, -1, 0 / 0, math.huge, 1e-40 } do
            local state = {}
            for name, t in pairs(module:state_dict()) do state[name] = t:clone() end
            state.weight, state.input_scale = te.zeros { 8, 8 }, te.tensor { scale }
            assert.error_matches(function() module:load_state_dict(state) end, "input_scale", 1, true)
            assert.equal(448, scales(module).input)
            assert.is_true(same(weight, module.weight))
        end
    end)

    it("keeps its scale where another one would be none", function()
        for _, opts in ipairs { { margin = 160 }, { margin = 1000 },
            { margin = 200, amax_compute_algo = function(history) return history[1] end } } do
            local recipe, module = recipes.delayed(opts), linear(8, 8)
            for _ = 1, 3 do
                local y = te.autocast({ recipe = recipe }, module, te.full({ 2, 8 }, 2))
                y:sum():backward()
                assert.same({ input = 1, weight = 1, grad_output = 1 }, scales(module))
                assert.is_true(te.all(te.isfinite(y)):item())
            end
        end
        for _, scale in ipairs { 1e-300, 1e-40, 1e300, math.huge } do
            local recipe, module = recipes.delayed { scaling_factor_compute_algo = function() return scale end },
                linear(8, 8)
            assert.error_matches(function() te.autocast({ recipe = recipe }, module, te.ones { 2, 8 }) end,
                "expected a positive finite number", 1, true)
            assert.equal(1, scales(module).input)
        end
    end)

    it("gives a checkpointed stretch the same bytes", function()
        local function run(wrap)
            te.manual_seed(2)
            local recipe = recipes.delayed()
            local module = te.Sequential(te.Linear(24, 48), te.GELU(), te.Linear(48, 24))
            local x = te.randn({ 10, 24 }) * 30
            local bytes = {}
            for _ = 1, 3 do
                for _, p in ipairs(module:parameters()) do p.grad = nil end
                local y = te.autocast({ recipe = recipe }, function() return wrap(module, x) end)
                y:backward(te.ones({ 10, 24 }))
                bytes[#bytes + 1] = bytes_of(y)
                for _, p in ipairs(module:parameters()) do bytes[#bytes + 1] = bytes_of(p.grad) end
                for _, name in ipairs { "1.input_scale", "3.grad_output_scale", "1.weight_amax_history" } do
                    bytes[#bytes + 1] = bytes_of(module:state_dict()[name])
                end
                te.no_grad(function() for _, p in ipairs(module:parameters()) do p:mul_(1.25) end end)
            end
            return table.concat(bytes)
        end
        assert.is_true(run(function(m, x) return m(x) end) == run(te.checkpoint))
    end)

    it("goes on from a saved state with the same bytes", function()
        local function build()
            te.manual_seed(2)
            return te.Sequential(te.Linear(16, 32), te.ReLU(), te.Linear(32, 16))
        end
        local recipe, x, dy = recipes.delayed(), te.randn({ 6, 16 }), te.randn({ 6, 16 })
        local module = build()
        for _ = 1, 2 do step(module, x, dy, recipe, "float32") end
        local saved = {}
        for name, t in pairs(module:state_dict()) do saved[name] = t:detach():clone() end
        local names_of = {}
        for name in pairs(saved) do names_of[#names_of + 1] = name end
        table.sort(names_of)
        assert.equal(4 + 12, #names_of)
        local other = build()
        other:load_state_dict(saved)
        -- both quantize their weights again
        te.no_grad(function() for _, p in ipairs(module:parameters()) do p:add_(0) end end)
        for _ = 1, 2 do
            assert.is_true(same(step(module, x, dy, recipe, "float32"), step(other, x, dy, recipe, "float32")))
        end
        saved["1.input_scale"], saved["1.input_amax_history"] = nil, nil
        other:load_state_dict(saved) -- optional
        saved["1.input_scale"] = te.ones({ 2 })
        assert.error_matches(function() other:load_state_dict(saved) end, "1.input_scale")
    end)

    it("keeps the first entries of a history whose length changes", function()
        local recipe, module = recipes.delayed { amax_history_len = 8 }, linear(16, 8)
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }))
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }) * 2)
        recipe.amax_history_len = 16
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }) * 3)
        assert.equal(16, module:state_dict().input_amax_history:numel())
        recipe.amax_history_len = 2
        te.autocast({ recipe = recipe }, module, te.ones({ 2, 16 }))
        assert.equal(2, module:state_dict().input_amax_history:numel())
    end)

    it("leaves out a model that a finalizer still reaches", function()
        local recipe, reached = recipes.delayed { amax_history_len = 2 }, nil
        local gone, kept = linear(16, 8), linear(16, 8)
        local function step(module) te.autocast({ recipe = recipe }, module, te.ones { 2, 16 }):sum():backward() end
        step(gone)
        do
            local module, guard = gone, newproxy(true)
            getmetatable(guard).__gc = function()
                reached = tostring(module)
                step(kept)
                pcall(step, module)
            end
        end
        gone = nil
        collectgarbage()
        step(kept)
        assert.matches("Linear", reached)
    end)
end)
