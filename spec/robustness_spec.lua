--- Any call with any arguments ends in a result or an error, never in a crash: random values of every kind thrown at
--- every function and method.

local te = require "te"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or te._core.executable()

math.randomseed(tonumber(os.getenv("TE_FUZZ_SEED")) or 12345)
local random = math.random
local core = te._core
local function nothing() end

local released = te.ones(3)
released:release()

-- None is a size that a machine could just about allocate.
local numbers = { 0, 1, -1, 2, 3, 0.5, 1e300, -1e300, 0 / 0, 1 / 0, -1 / 0, 2 ^ 40, 2 ^ 53, 2 ^ 62, -2 ^ 63 }
local words = { "", "x", "float32", "int64", "bool", "cpu", "cuda:99", "mean", ("y"):rep(5000), "a\0b" }
local dtypes = { "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool",
    "float8_e4m3", "float8_e5m2" }
local shapes = { {}, { 0 }, { 1 }, { 3 }, { 2, 3 }, { 0, 4 }, { 2, 1, 3 }, { 1, 1, 1, 1, 1, 1, 1 }, { 3, 4 }, { 4, 3 } }

local function any_tensor()
    local x = te.rand(shapes[random(#shapes)]):to(dtypes[random(#dtypes)])
    if random(4) == 1 and x:dim() > 1 then x = x:transpose() end
    if random(4) == 1 and x.dtype:find("^float") then pcall(function() x.requires_grad = true end) end
    return x
end

local function new_state()
    local state, quantizer = core.recipe_state(), core.recipe_quantizer("Float8CurrentScaling", {}, "weight", false)
    core.recipe_state_use(state, core.product_recipe(quantizer, quantizer, false))
    return state
end

-- What the inside of the library hands out, dropped as soon as it was used: the next blocks are made of their memory.
local handles = {
    core.group_new,
    function()
        local group = core.group_new()
        local x = core.group_input(group, false)
        core.group_output(group, core.group_op(group, 1, "relu", { x }))
        return group
    end,
    core.recipe_state, new_state,
    function() return core.product_recipe(false, false, false) end,
    function() return core.quantized_parameter(new_state(), te.rand(32, 32), true) end,
    function() return core.operation("softmax") end,
    function() return core.define("twice(x)", "y = 2 * x") end,
    function() return core.fetch(te.ones({ 2 }, { dtype = "float64" })) end,
    function() return core.graph_numbers("cpu", 2, 2) end,
    function()
        local function list() return { te.ones(3) } end
        return core.adamw_prepare({ { params = list(), exp_avg = list(), exp_avg_sq = list() } }, {})
    end,
    function() return core.encode_text("some text, some more") end,
    function() return core.tokens_open { tokens = { 1, 2, 3, 4, 5, 6, 7, 8, 9 }, batch = 2, block = 3 } end,
    function()
        return core.tokenizer { tokens = { "a", "b", "ab", "<x>" }, merges = { 0, 1, 2 }, opaque = { 3 },
            added = { "<x>", 3, false }, steps = { "a+", false, false, false } }
    end,
    function() return core.lock_folder(".") end,
}

-- A table whose fields run a script, which releases a tensor that was given as well.
local given
local function treacherous(t)
    return setmetatable(t, { __index = function()
        local x = given and given[random(6)]
        if core.tensor_methods and te.is_tensor(x) then x:release() end
    end })
end

local function any_value(depth)
    local kind = random(14)
    if kind == 13 then return handles[random(#handles)]() end
    if kind <= 4 then
        local ok, x = pcall(any_tensor)
        return ok and x or 1
    end
    if kind <= 6 then return numbers[random(#numbers)] end
    if kind == 7 then return words[random(#words)] end
    if kind == 8 then return random(2) == 1 end
    if kind == 9 then return nil end
    if kind == 10 then return random(2) == 1 and released or nothing end
    local t = {}
    if depth < 2 then
        for i = 1, random(4) - 1 do t[i] = any_value(depth + 1) end
        if random(3) == 1 then
            t[({ "dim", "dtype", "p", "keepdim", "shape", "reduction", "device" })[random(7)]] = any_value(depth + 1)
        end
    end
    return kind == 14 and treacherous(t) or t
end

-- Functions that change what other specs rely on, or whose effect lies outside.
local spared = { manual_seed = true, rng_state = true, set_num_threads = true, save = true,
    load = true, from_file = true,
    no_grad = true, enable_grad = true, autocast = true, fp8_autocast = true, checkpoint = true, gradcheck = true,
    empty_cache = true, set_fusion = true, set_recompute = true, fp8_model_init = true, quantized_model_init = true,
    register_forward_fusion = true, register_backward_fusion = true }

-- What is said in the name of another function, whose place they take.
local called = { parallel_cross_entropy = "cross_entropy" }

local function names_of(t, accept)
    local names = {}
    for name, value in pairs(t) do
        if type(value) == "function" and accept(name) then names[#names + 1] = name end
    end
    table.sort(names)
    return names
end

-- What is raised is a message, which names what was called: `name`, where it is given. Now and then a handle comes
-- first, as most of what the library keeps inside takes it.
local function call(fn, name)
    local args = {}
    for i = 1, 6 do args[i] = any_value(0) end
    if random(3) == 1 then args[1] = handles[random(#handles)]() end
    given = args
    local ok, problem = pcall(fn, unpack(args, 1, random(0, 6)))
    given = nil
    if not ok then
        assert.is_string(problem)
        assert.is_truthy(problem:find(name or ".", 1, name ~= nil), ("%s: %s"):format(name, problem))
    end
end

-- Whatever was called, the engine computes and records.
local function check_engine(name)
    local x = te.ones({ 3 }, { requires_grad = true })
    if x.device ~= "cpu" then pcall(x.totable, x) end -- which says what kernels found wrong
    local y = (x * 2):sum()
    y:backward()
    assert.same({ name, 6, 2 }, { name, y:item(), x.grad[3]:item() })
end

describe("handles of the engine", function()
    it("have no metatable that a script could reach", function()
        assert.is_false(getmetatable(te._core.group_new()))
        assert.is_string(getmetatable(te.ones { 1 }))
    end)
end)

describe("random arguments", function()
    local ROUNDS = tonumber(os.getenv("TE_FUZZ_ROUNDS")) or 60

    it("for every function", function()
        for name in pairs(require "te.modules") do assert.is_truthy(te[name]) end -- each is loaded when first used
        local names = names_of(te, function(name) return not spared[name] end)
        assert.is_true(#names > 80)
        for _, name in ipairs(names) do
            for _ = 1, ROUNDS do call(te[name], called[name] or name) end
            check_engine(name)
        end
    end)

    it("for every method and operator", function()
        local methods = te._core.tensor_methods
        for _, name in ipairs(names_of(methods, function(name) return name ~= "release" end)) do
            for _ = 1, ROUNDS do
                local x = any_tensor()
                call(function(...) return x[name](x, ...) end, name)
            end
            check_engine(name)
        end
        local meta = debug.getmetatable(te.ones(1))
        for _, name in ipairs(names_of(meta, function(name) return name ~= "__gc" end)) do
            for _ = 1, ROUNDS do call(meta[name]) end
            check_engine(name)
        end
    end)

    it("for the inside of the library", function()
        local quiet = { clock = true, sleep = true, mkdir = true, list_dir = true, stat = true,
            safetensors_write = true, safetensors_read = true,
            set_grad_enabled = true, set_compute_dtype = true, set_recipe_mode = true, record_scales = true,
            replay_scales = true, pause_amaxes = true, ignore_sigpipe = true,
            set_recompute_width = true, interrupt_flag = true,
            pass = true } -- which raises what it is given
        for _, name in ipairs(names_of(te._core, function(name) return not quiet[name] end)) do
            for _ = 1, ROUNDS do call(te._core[name]) end
            check_engine(name)
        end
    end)
end)

describe("the largest number of dimensions", function()
    it("reduces over no dimension at all", function()
        local x = te.ones(1, 1, 1, 1, 1, 1, 1, 1)
        for _, name in ipairs { "sum", "mean" } do assert.equal(1, te[name](x, {}):item()) end
        assert.is_true(te.all(x, {}):item())
        for _, name in ipairs { "max", "var", "norm" } do
            local ok, message = pcall(te[name], x, {})
            assert.is_false(ok)
            assert.truthy(message:find("no dimension", 1, true))
        end
    end)
end)

-- Calls fn(…) some times with the collector at work at each value that is made, so that `finalizer` runs in the middle;
-- what the last call gave.
local times = 5
local function while_collecting(finalizer, fn, ...)
    local pause, step = collectgarbage("setpause", 1), collectgarbage("setstepmul", 1e6)
    local resting = false
    local function rest() -- an earlier call's finalizer may come as late as in a later one
        if resting then return end
        resting = true
        collectgarbage("setpause", pause)
        collectgarbage("setstepmul", step)
    end
    local function arm()
        getmetatable(newproxy(true)).__gc = function()
            rest()
            finalizer()
        end
    end
    collectgarbage()
    arm()
    local ok, problem
    for _ = 1, times do ok, problem = pcall(fn, ...) end
    rest()
    return ok, problem
end

-- The collector takes several steps, where many specs run in one process: one call may be over before.
local function heap_is_large() return collectgarbage "count" > 2e4 end

-- Likewise in one call, at another place for each k.
local function once_while_collecting(k, finalizer, fn, ...)
    local padding = {}
    for i = 1, k % 64 do padding[i] = {} end
    times = 1
    local ok, problem = while_collecting(finalizer, fn, ...)
    times = 5
    return ok, problem
end

describe("hostile scripts", function()
    it("cannot forge tensors", function()
        local meta = debug.getmetatable(te.ones(1))
        local fake = newproxy(true)
        assert.is_false(pcall(te.sum, debug.setmetatable(fake, meta)))
        assert.is_false(pcall(te.sum, debug.setmetatable(io.tmpfile(), meta)))
        assert.equal("te.Tensor", getmetatable(te.ones(1)))
    end)

    it("may call finalizers by hand", function()
        local x = te.ones(3)
        local gc = debug.getmetatable(x).__gc
        gc(x)
        gc(x)
        gc(3)
        gc()
        assert.error_matches(function() return x + 1 end, "released")
    end)

    it("may call finalizers of what the library keeps inside by hand", function()
        for _, make in ipairs(handles) do
            local handle = make()
            local gc = (debug.getmetatable(handle) or {}).__gc
            if gc then
                for _, other in ipairs { "x", 3, io.stdout, newproxy(), te.ones(1), core.group_new() } do gc(other) end
                gc()
                gc(handle)
                gc(handle)
            end
        end
    end)

    it("may leave out what the inside of the library is to call", function()
        for _, name in ipairs { "within", "profile" } do
            assert.is_false(pcall(core[name]))
        end
        assert.is_false(pcall(core.with_product, core.recipe_state()))
        assert.equal(7, core.with_product(core.recipe_state(), function(x) return x end, 7))
    end)

    it("cannot lock what is no folder", function()
        local path = os.tmpname()
        finally(function() os.remove(path) end)
        assert.error_matches(function() core.lock_folder(path) end, path .. ": Not a directory", 1, true)
        assert.error_matches(function() core.lock_folder(path .. ".none") end, "No such file or directory", 1, true)
    end)

    it("may make groups that have no input", function()
        local group = core.group_new()
        assert.is_nil((core.group_explain(group, {})))
        assert.is_nil((core.group_run(group, {})))
    end)

    -- Each call gets x, which is released while the call reads its other arguments.
    describe("may release a tensor that a call has read", function()
        local function list(...) return { (...) or te.ones(3) } end
        local function adamw(x, fields)
            fields.params, fields.grads, fields.exp_avg, fields.exp_avg_sq = list(x), list(), list(), list()
            return fields
        end
        local leaf = te.ones({ 3 }, { requires_grad = true })
        local quantizer = core.recipe_quantizer("Float8CurrentScaling", {}, "weight", false)

        local behind_fields = {
            backward = function(x, fields) (leaf * x):backward(x, fields) end,
            backward_self = function(x, fields) x.requires_grad = true x:backward(x, fields) end,
            grad = function(x, fields) te.grad({ te.sum(leaf * 2) }, { leaf, x }, fields) end,
            tensor = function(x, fields) te.tensor(x, fields) end,
            adamw_step = function(x, fields) core.adamw_step { adamw(x, fields) } end,
            adamw_step_2 = function(x, fields) core.adamw_step { adamw(x, {}), adamw(te.ones(3), fields) } end,
            sgd_step = function(x, fields) core.sgd_step { adamw(x, fields) } end,
            quantize = function(x, fields)
                for k, v in pairs(quantizer) do if k ~= "hadamard" then fields[k] = v end end
                core.quantize(x, fields)
            end,
        }
        for name, call_it in pairs(behind_fields) do
            it("behind a field: " .. name, function()
                local x = te.rand(3)
                pcall(call_it, x, setmetatable({}, { __index = function() x:release() end }))
                collectgarbage()
                te.rand(3)
            end)
        end

        local in_finalizers = {
            neg = function(x) return te.neg(x) end, add = function(x) return x + x end,
            cat = function(x, args) return te.cat(args) end, sum = function(x) return te.sum(x, 1) end,
            row = function(x) return x[1] end, set_row = function(x) x[1] = x[2] end,
            shape = function(x) return x.shape end,
            grad = function(x) return x.grad end, totable = function(x) return x:totable() end,
            tostring = function(x) return tostring(x) and x:sum() end,
            tensor = te.tensor, item = function(x) return x:item() end, tensor_bytes = core.tensor_bytes,
            record = function(x) return core.record(print, 0, 1, x, x, leaf) end,
            fetch = core.fetch, zeros_like = te.zeros_like, randn_like = te.randn_like,
            quantized_as = function(x) return core.quantized_as(x, "float16") end,
            autograd = function(x, args) return core.grad(args, args) end,
            sum_squares = function(x, args) return core.sum_squares(args) end,
            grad_clip = function(x, args) return core.grad_clip(args, x, 1, 1) end,
            quantize = function(x) return core.quantize(x, quantizer) end,
            dequantize = function(x, args) return core.dequantize(quantizer, "float32", args, "rowwise", x, x, x) end,
            quantized_linear = function(x) return core.quantized_linear(new_state(), x, x, x) end,
            quantized_parameter = function(x) return core.quantized_parameter(new_state(), x, true) end,
            quantized_clone = function(x) return core.quantized_clone(x, {}) end,
            group_run = function(_, args, group) return core.group_run(group, args) end,
            group_explain = function(_, args, group) return core.group_explain(group, args) end,
        }
        for name, call_it in pairs(in_finalizers) do
            it("in a finalizer: " .. name, function()
                for round = 1, 2 do
                    local x = te.rand(4, 4)
                    if round == 2 then
                        x = te.rand({ 4, 4 }, { dtype = "float64", requires_grad = true })
                        te.sum(x):backward()
                    end
                    local args, group = { x, x }, handles[2]()
                    local ok, problem = while_collecting(function() x:release() end, call_it, x, args, group)
                    assert.is_false(ok)
                    assert.is_truthy(tostring(problem):find("released") or tostring(problem):find("expected"), problem)
                end
            end)
        end
    end)

    it("cannot hide numbers that do not fit", function()
        local function refused(message, fn, ...)
            local ok, problem = pcall(fn, ...)
            assert.is_false(ok)
            assert.is_truthy(problem:find(message, 1, true), problem)
        end
        refused("points: 4294967361 is not between 0 and 4294967295", core.encode_text, "A", { 2 ^ 32 + 65 })
        refused("points: -1 is not between", core.encode_text, "A", { -1 })
        refused("tokens: 4294967297 is not between 0 and 2147483647", core.tokens_open,
            { tokens = { 1, 2 ^ 32 + 1, 3 }, batch = 1, block = 1 })
        refused("prefetch: 4294967296 is not between 0 and", core.tokens_open,
            { tokens = { 1, 2, 3 }, batch = 1, block = 1, prefetch = 2 ^ 32 })
        local group = core.group_new()
        local x = core.group_input(group, false)
        refused("value: 4294967296 is not between 0 and 2147483647", core.group_op, group, 1, "relu", { x + 2 ^ 32 })
        refused("label: 4294967297 is not between", core.group_op, group, 2 ^ 32 + 1, "relu", { x })
        refused("value: 4294967296 is not between", core.group_output, group, x + 2 ^ 32)
        refused("value: 4294967296 is not between", core.group_op, group, 1, "relu", { x }, nil, nil, nil, nil,
            { x + 2 ^ 32 })
    end)

    it("may take texts away while a tokenizer is made", function()
        local n = 256
        local options = { merges = {}, added = {}, steps = {}, opaque = {}, tokens = {}, fallback = {} }
        for i = 0, 255 do options.fallback[i + 1] = i end
        local expected
        for k = 1, 40 do -- the collector steps at other places each time
            local texts = {}
            for i = 1, n do options.tokens[i] = ("token %d of %d, and some more of it"):format(i, k) end
            expected = options.tokens[1]
            local padding = {}
            for i = 1, k * 20 do padding[i] = {} end
            local ok, made = while_collecting(function()
                for i = 1, n do options.tokens[i] = "other " .. i end
                collectgarbage()
                for i = 1, n do texts[i] = ("X"):rep(30) .. i end
            end, core.tokenizer, options)
            assert.is_true(ok, made)
            local text = made:decode { 0 }
            assert.is_true(text == expected or text == "other 1", text)
        end
    end)

    it("gets the shape that a tensor had, which it releases meanwhile", function()
        local released_after = 0
        for k = 1, 60 do
            local x = te.zeros(3, 5)
            local ok, y = once_while_collecting(k, function() x:release() te.zeros(7, 7, 7) end, te.zeros_like, x)
            assert.equal(ok and "{3, 5}" or nil, ok and tostring(y.shape) or nil)
            if ok and not pcall(te.sum, x) then released_after = released_after + 1 end
        end
        assert.is_true(released_after > 0 or heap_is_large())
    end)

    it("may take names away while files of tokens are opened", function()
        for k = 1, 6 do
            local paths, texts, left = {}, {}, k
            for i = 1, 20 do paths[i] = ("/nowhere/%d/%d/a name of some length"):format(k, i) end
            local function take()
                left = left - 1
                if left > 0 then
                    getmetatable(newproxy(true)).__gc = take
                    return
                end
                for i = 1, 20 do paths[i] = "/nowhere/other" end
                collectgarbage()
                for i = 1, 200 do texts[i] = ("X"):rep(30) .. i end
            end
            local ok, problem = once_while_collecting(0, take, core.tokens_open,
                { paths = paths, batch = 1, block = 1 })
            assert.is_false(ok)
            assert.is_truthy(problem:find "/nowhere/%d" or problem:find("/nowhere/other", 1, true), problem)
        end
    end)

    it("may replay scales from inside of what it replays", function()
        local one = te.ones(1)
        local function scales(n, uses)
            local list = {}
            for i = 1, n do list[i] = one end
            return setmetatable(list, { __index = function(_, key) return key == "uses" and uses() or nil end })
        end
        local function packed(n) return ("\0"):rep(8 * n) end
        for k = 1, 50 do
            core.replay_scales(scales(2, function()
                core.replay_scales(scales(5000 * k, function() return packed(5000 * k) end))
                return packed(2)
            end))
            core.replay_scales(nil)
        end
    end)

    it("may change a group while it gets its tensors", function()
        local x, changed = te.ones(3), false
        for k = 1, 20 do
            local group = core.group_new()
            local value = core.group_op(group, 1, "relu", { core.group_input(group, false) })
            core.group_output(group, value)
            local ok, problem = once_while_collecting(k, function()
                for _ = 1, 4 do core.group_input(group, false) end
                core.group_output(group, core.group_op(group, 2, "relu", { value }))
            end, core.group_run, group, { x })
            changed = changed or not ok and problem:find("changed meanwhile", 1, true) ~= nil
        end
        assert.is_true(changed or heap_is_large())
    end)

    it("may empty the registry before backward", function()
        local x = te.ones({ 2 }, { requires_grad = true })
        local registry, taken = debug.getregistry(), {}
        local y = core.custom(function(_, a) return a * 2 end, function(_, dy) return dy * 2 end, x)
        for key, value in pairs(registry) do
            local held = type(key) == "number" and type(value) == "table" and type(value[1]) == "function"
            if held then taken[key] = value end
        end
        assert.is_truthy(next(taken))
        for key in pairs(taken) do registry[key] = false end
        local ok, problem = pcall(function() y:sum():backward() end)
        for key, value in pairs(taken) do registry[key] = value end
        assert.is_false(ok)
        assert.is_truthy(problem:find("backward: its function is gone from Lua's registry", 1, true), problem)
    end)

    it("may close a token loader while it makes a batch", function()
        local loader = core.tokens_open { tokens = { 1, 2, 3, 4, 5, 6, 7, 8, 9 }, batch = 2, block = 3 }
        local ok, problem = while_collecting(function() loader:close() end, loader.next, loader)
        assert.is_false(ok)
        assert.is_truthy(problem:find("closed", 1, true))
    end)

    it("may release and collect in the middle of an operation", function()
        local x = te.ones(1000)
        local y = te._core.custom(function(_, a)
            a:release()
            collectgarbage()
            return te.ones(2)
        end, function() end, x)
        assert.same({ 1, 1 }, y:totable())
        assert.error_matches(function() x:sum() end, "released")
    end)

    it("may use tensors in finalizers", function()
        local results = 0
        for _ = 1, 50 do
            local proxy = newproxy(true)
            getmetatable(proxy).__gc = function() results = results + te.ones(100):sum():item() end
        end
        collectgarbage()
        collectgarbage()
        assert.is_true(results > 0)
    end)

    it("may throw from backward and go on", function()
        local x = te.ones({ 3 }, { requires_grad = true })
        for i = 1, 20 do
            local y = te._core.custom(function(_, a) return a * 2 end, function() error(i) end, x)
            assert.is_false(pcall(function() te.sum(y * x):backward() end))
        end
        te.sum(x * 2):backward()
        assert.is_not_nil(x.grad)
    end)

    it("may run operations in coroutines that die", function()
        for _ = 1, 20 do
            local co = coroutine.create(function(x) coroutine.yield(te.sum(x)) error("end") end)
            local _, y = coroutine.resume(co, te.ones({ 3 }, { requires_grad = true }))
            coroutine.resume(co)
            co = nil
            collectgarbage()
            y:backward()
        end
    end)

    it("takes the setting of a scope along when it yields", function()
        local recipe = te.recipe.Float8CurrentScaling {}
        local scopes = {
            no_grad = te.no_grad, nested = function(fn) return te.enable_grad(te.no_grad, fn) end,
            autocast = function(fn) return te.autocast({ dtype = "bfloat16", recipe = recipe }, fn) end,
            quantized_model_init = function(fn) return te.quantized_model_init({ recipe = recipe }, fn) end,
        }
        local x = te.ones({ 2, 32 }, { requires_grad = true })
        local function setting()
            local layer = te.Linear(32, 4)
            local y = layer(x)
            return ("%s %s %s"):format(tostring(y.requires_grad), y.dtype,
                tostring(te._core.is_quantized(layer.weight)))
        end
        for name, scope in pairs(scopes) do
            local inside = scope(setting)
            assert.not_equal("true float32 false", inside, name)
            local seen = {}
            local co = coroutine.wrap(function(a)
                return "end", scope(function()
                    for i = 1, 2 do seen[i] = { coroutine.yield(a, i), setting() } end
                    return 3, nil
                end)
            end)
            for i = 1, 2 do
                assert.same({ "a", i }, { co("a") }, name)
                assert.equal("true float32 false", setting(), name)
            end
            assert.same({ "end", 3 }, { co("b") }, name)
            assert.same({ { "a", inside }, { "b", inside } }, seen, name)
            local dead = coroutine.create(function() scope(function() coroutine.yield() error { "mine" } end) end)
            coroutine.resume(dead) -- left alone, it has changed nothing
            assert.equal("true float32 false", setting(), name)
            local ok, problem = coroutine.resume(dead)
            assert.same({ false, { "mine" } }, { ok, problem }, name)
            assert.equal("true float32 false", setting(), name)
        end
        assert.error_matches(function() coroutine.wrap(te.checkpoint)(function() coroutine.yield() end) end,
            "attempt to yield")
    end)
end)

-- What a script of its own process prints, and its exit status; options are the program's.
local function run(options, code)
    local path = os.tmpname()
    finally(function() os.remove(path) end)
    local file = assert(io.open(path, "w"))
    file:write(code)
    file:close()
    return shell.capture(("'%s' %s '%s'"):format(TETRAIN, options, path))
end

-- Lua that runs inside a call, before its engine is at work, calls the engine in a coroutine that is gone then.
describe("a coroutine that called and was collected", function()
    local leave = [[
        local te, junk = require "te", {}
        local function leave(rounds)
            coroutine.wrap(function() te.zeros(1) end)()
            collectgarbage() collectgarbage()
            for i = 1, rounds or 20000 do junk[i] = ("\127"):rep(30 + i % 200) .. i .. os.clock() end
        end
        local options, x = setmetatable({}, { __index = function() leave() end }), te.ones(1000)
    ]]
    local calls = {
        zeros = "te.zeros({ 10000000 }, options)", randn = "te.randn({ 10000000 }, options)",
        full = "te.full({ 10000000 }, 1, options)", arange = "te.arange(1, 10000000, options)",
        tensor = "te.tensor(x:expand(10000, 1000), options)", like = "te.zeros_like(x:expand(10000, 1000), options)",
    }
    for name, call_it in pairs(calls) do
        it("is not what collects for te." .. name, function()
            local text, status = run("--mem-limit 6M", leave .. "print(pcall(function() return "
                .. call_it .. " end))")
            assert.equal(0, status)
            assert.is_truthy(text:find("^false\t.*out of memory"), text)
        end)
    end

    it("is not what collects for te.load", function()
        local path = os.tmpname()
        finally(function() os.remove(path) end)
        te.save(path, { a = te.zeros(1000000), b = te.zeros(1000000) })
        local text, status = run("--mem-limit 6M", leave
            .. ("print(pcall(te.load, %q, { names = function() leave() return true end }))"):format(path))
        assert.equal(0, status)
        assert.is_truthy(text:find("^false\t.*te.load: out of memory"), text)
    end)

    -- Where the wrong state collected, compiled code went on in that once the error was caught.
    it("does not stay the one that runs when an error is caught", function()
        local text, status = run("--mem-limit 6M", leave .. [[
            local function count(n) local sum = 0 for i = 1, n do sum = sum + i % 7 end return sum end
            local keep = coroutine.wrap(function() while true do te.zeros(1) coroutine.yield() end end)
            options = setmetatable({}, { __index = function() keep() end })
            for i = 1, 100 do assert(not pcall(te.zeros, { 10000000 }, options) and count(1000 + i) > 0) end
            print "well" ]])
        assert.same({ "well\n", 0 }, { text, status })
    end)

    it("is not what backward calls", function()
        local text, status = run("", leave .. [[
            local Id = te.BasicOperation:extend("Id")
            function Id:init() end
            function Id:op_forward(ctx, x) return x + 0 end
            function Id:op_backward(ctx, dy) return dy end
            local op, x, left = Id(), te.ones(3), 20
            x.requires_grad = true
            local function arm()
                getmetatable(newproxy(true)).__gc = function()
                    leave(5000)
                    left = left - 1
                    if left > 0 then arm() end
                end
            end
            arm()
            collectgarbage("setpause", 1) collectgarbage("setstepmul", 10000)
            for _ = 1, 200 do te.grad(op(x):sum(), x) end
            print "well" ]])
        assert.same({ "well\n", 0 }, { text, status })
    end)
end)

describe("finalizers at the end of the script", function()
    it("may call everything, also when the runtime is gone", function()
        local text, status = run("", [[
            local te = require "te"
            local core, x, calls, group = te._core, te.ones(3), {}, te._core.group_new()
            for _, functions in ipairs { core, te, core.tensor_methods } do
                for name, fn in pairs(functions) do
                    if type(fn) == "function" then calls[#calls + 1] = fn end
                end
            end
            local loader = core.tokens_open { tokens = { 1, 2, 3, 4, 5 }, batch = 1, block = 2 }
            local function arm()
                getmetatable(newproxy(true)).__gc = function()
                    arm()
                    local _, problem = pcall(core.writing_time)
                    if not tostring(problem):find "the interpreter is closing" then return end
                    for _, call in ipairs(calls) do
                        for _, value in ipairs { 1, "add", x, group } do pcall(call, value) end
                        pcall(call)
                    end
                    pcall(loader.next, loader)
                    pcall(tostring, x)
                    print "well"
                end
            end
            arm() ]])
        assert.is_truthy(text:find("^well\n"), text)
        assert.equal(0, status)
    end)
end)
