--- What the host does for a training step on the CUDA device, counted by the made-up driver
--- (src/kernels/cuda_fake): the work of a step waits for nothing, and a recorded one is a launch and its inputs,
--- whatever the model. Pending on other machines.

local batch = require "spec.support.tokens"
local ffi = require "ffi"
local te = require "te"

local devices, reason = te.devices()
local folder = os.getenv "TETRAIN_CUDA_LIBRARIES"

ffi.cdef "uint64_t te_fake_count(const char *function);"

-- The made-up driver, or nil and why not.
local function made_up()
    if not devices[2] then return nil, reason end
    local ok, library = pcall(ffi.load, (folder or "") .. "/libcuda.so.1")
    local there = ok and pcall(function() return library.te_fake_count end)
    if not there then return nil, "the driver counts no calls" end
    return library
end

local WAITS = { "cuStreamSynchronize", "cuCtxSynchronize" }
local MEMORY = { "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost" }
local LAUNCHES = { "cuLaunchKernel", "cublasLtMatmul", "cudnnBackendExecute", "cuMemsetD8Async" }

describe("the host's part of a training step", function()
    local driver, problem = made_up()
    if not driver then
        pending(problem)
        return
    end

    -- A graph that is let go waits for what it runs: those of other tests go before anything is counted.
    before_each(function()
        collectgarbage()
        collectgarbage()
    end)

    local function total(names)
        local sum = 0
        for _, name in ipairs(names) do sum = sum + tonumber(driver.te_fake_count(name)) end
        return sum
    end

    -- Calls that fn makes, by kind.
    local function calls_of(fn)
        local function count()
            return { waits = total(WAITS), memory = total(MEMORY), launches = total(LAUNCHES),
                graphs = total { "cuGraphLaunch" }, copies = total { "cuMemcpyHtoDAsync_v2" },
                reads = total { "cuMemcpyDtoHAsync_v2" }, asks = total { "cuEventQuery" },
                moves = total { "cuMemcpyDtoDAsync_v2" } }
        end
        local before = count()
        fn()
        local after = count()
        for kind, n in pairs(before) do after[kind] = after[kind] - n end
        return after
    end

    -- A step as train_gpt makes it, and the optimizer.
    local function trainer(layers, recipe)
        te.manual_seed(3)
        local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = layers, n_head = 2,
            n_embd = 16, dropout = 0.1 }
        model:to "cuda"
        local optimizer = te.optim.AdamW(model:parameter_groups(0.1), { betas = { 0.9, 0.95 } })
        local function step(x, y)
            local loss = te.autocast({ dtype = "bfloat16", recipe = recipe }, function()
                local _, loss = model(x, y)
                return loss
            end)
            loss:backward()
            local clip = te.optim.grad_clip(model:parameters(), { max = 0.5, loss = loss })
            optimizer:step { clip = clip }
            optimizer:zero_grad()
            return loss:detach(), clip
        end
        return step, optimizer
    end

    local RECIPES = { ["no recipe"] = function() end,
        ["delayed scaling"] = function() return te.recipe.DelayedScaling {} end }
    for name, recipe in pairs(RECIPES) do
        it("waits for nothing until a result is read, with " .. name, function()
            local step, optimizer = trainer(2, recipe())
            local seen
            for i = 1, 3 do
                optimizer:set_lr(0.01 / i)
                local x, y = batch(i, "cuda")
                te.synchronize "cuda"
                seen = calls_of(function() step(x, y) end)
            end
            assert.equal(0, seen.waits + seen.reads)
            assert.is_true(seen.launches > 50)
        end)

        it("is a launch and its inputs once recorded, whatever the size of the model, with " .. name, function()
            local counted = {}
            for _, layers in ipairs { 1, 3 } do
                local step, optimizer = trainer(layers, recipe())
                local graph, seen = te.graph(step, { batch(0, "cpu") }, { device = "cuda" }), nil
                for i = 1, 6 do
                    local x, y = batch(i, "cpu")
                    optimizer:set_lr(0.01 / i)
                    seen = calls_of(function() graph(x, y) end)
                end
                assert.equal(1, seen.graphs)
                assert.equal(0, seen.waits + seen.reads)
                assert.equal(0, seen.memory)
                -- tokens and targets; learning rates; where random numbers begin
                assert.is_true(seen.copies <= 4, seen.copies .. " copies")
                assert.is_true(seen.launches <= 2, seen.launches .. " kernels") -- which take the last two apart
                counted[#counted + 1] = seen
            end
            assert.same(counted[1], counted[2])
        end)
    end

    it("sums no columns in passes of their own but behind attention and for positions", function()
        for _, layers in ipairs { 1, 3 } do
            local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = layers, n_head = 2,
                n_embd = 16, bias = true }
            model:to "cuda"
            local sums, biases, x, y = 0, 0, batch(1, "cuda")
            local function step()
                select(2, te.autocast({ dtype = "bfloat16" }, model, x, y)):backward()
            end
            step()
            model:zero_grad()
            for _, event in ipairs(te.profile(step).events) do
                if event.name == "sum_columns" then sums = sums + 1 end
            end
            for name, p in model:named_parameters() do
                if name:find "%.bias$" and p.grad then biases = biases + 1 end
            end
            assert.equal(layers + 1, sums)
            assert.is_true(biases >= 4 * layers, biases .. " biases")
        end
    end)

    -- Calls of a forward and backward pass once all is measured, compiled and where it stays.
    local function calls_of_layer(model, recipe)
        model:to "cuda"
        local x = te.randn({ 128, 128 }, { device = "cuda", dtype = "bfloat16" })
        local dy = te.randn({ 128, 128 }, { device = "cuda", dtype = "bfloat16" })
        local function step()
            te.autocast({ dtype = "bfloat16", recipe = recipe }, model, x):backward(dy)
            model:zero_grad()
        end
        x.requires_grad = true
        for _ = 1, 3 do step() end
        te.synchronize "cuda"
        return calls_of(step)
    end

    -- Beside three products: a bias gradient in two kernels, of a norm's gradient as well; x and dy quantized by one
    -- each; under delayed scaling the weight by one, which stays as it is, and two updates; with blocks the factors
    -- of so small a weight are arranged, unless a copy could be kept. What is measured, cleared, converted or
    -- brought along would add to these.
    local MOST = {
        Linear = { ["no recipe"] = 5, ["delayed scaling"] = 9, ["blocks"] = 9, rules = { copies = 0, moves = 0 } },
        Norm = { ["no recipe"] = 8, ["delayed scaling"] = 13, ["blocks"] = 13, rules = { copies = 0, moves = 1 } },
    }
    RECIPES.blocks = function() return te.recipe.Float8BlockScaling {} end
    local LAYERS = {
        Linear = function() return te.Linear(128, 128) end,
        Norm = function() return te.Sequential(te.LayerNorm(128), te.Linear(128, 128)) end,
    }
    for name, make in pairs(LAYERS) do
        it("launches no more than a layer needs: " .. name, function()
            for recipe, made in pairs(RECIPES) do
                local seen, most = calls_of_layer(make(), made()), MOST[name]
                assert.is_true(seen.launches <= most[recipe], recipe .. ": " .. seen.launches .. " launches")
                assert.is_true(seen.copies <= most.rules.copies, recipe .. ": " .. seen.copies .. " copies")
                assert.is_true(seen.moves <= most.rules.moves, recipe .. ": " .. seen.moves .. " copies on the device")
                assert.equal(0, seen.waits + seen.reads + seen.asks)
            end
        end)
    end

    it("walks the heap for what the device has left behind only once that is much", function()
        te.empty_cache()
        local live = te.memory_stats("cuda").current
        for _ = 1, 100 do te.zeros({ 2 ^ 18 }, { device = "cuda" }) end
        assert.is_true(te.memory_stats("cuda").current >= live + 100 * 2 ^ 20)
        for _ = 1, 500 do te.zeros({ 2 ^ 18 }, { device = "cuda" }) end
        local most = live + live / 32 + 260 * 2 ^ 20
        assert.is_true(te.memory_stats("cuda").current <= most)
        collectgarbage()
    end)

    it("is never more than so many operations ahead where these check their ids, and waits for no more", function()
        local table_, id = te.randn({ 5, 3 }, { device = "cuda" }),
            te.tensor({ 3 }, { dtype = "int64", device = "cuda" })
        te.embedding(table_, id)
        te.synchronize "cuda"
        local events = tonumber(driver.te_fake_count "cuEventSynchronize")
        local seen = calls_of(function()
            for _ = 1, 640 do te.embedding(table_, id):release() end
        end)
        assert.equal(0, seen.waits)
        assert.is_true(seen.reads <= 10, seen.reads .. " reads")
        events = tonumber(driver.te_fake_count "cuEventSynchronize") - events
        assert.is_true(events <= 10, events .. " waits for events")
        te.synchronize "cuda"
    end)

    -- train_gpt's loop: the figures of a step come in one copy, which is looked at when the
    -- next step has been launched.
    it("waits for nothing in train_gpt's loop", function()
        te.manual_seed(5)
        local model = te.models.gpt { vocab_size = 11, block_size = 8, n_layer = 2, n_head = 2,
            n_embd = 16, dropout = 0.1 }
        model:to "cuda"
        local made, seen, order = 0, nil, {}
        local steps = te.train.steps { device = "cuda", graph = true, clip = 1, grad_accumulation = 2,
            next_batch = function()
                made = made + 1
                return batch(made, "cpu")
            end,
            loss = function(x, y) return select(2, model(x, y)) end,
            parameters = model:parameters(), optimizer = te.optim.AdamW(model:parameter_groups(0.1), {}),
            schedule = function(step) return 0.01 / step end, guard = te.train.guard(model) }
        for step = 1, 8 do
            seen = calls_of(function()
                steps:start(step)
                for s in steps:finished(step == 5) do order[#order + 1] = { s.step, step } end
            end)
        end
        assert.equal(0, seen.waits)
        assert.equal(0, seen.memory)
        assert.equal(1, seen.graphs)
        assert.equal(1, seen.reads)
        assert.equal(1, seen.asks)
        assert.is_true(seen.copies <= 6, seen.copies .. " copies")
        for s in steps:finished(true) do order[#order + 1] = { s.step, 0 } end
        -- { step, during }: the first ones are not recorded yet, and the fifth was asked for
        assert.same({ { 1, 1 }, { 2, 2 }, { 3, 4 }, { 4, 5 }, { 5, 5 }, { 6, 7 }, { 7, 8 }, { 8, 0 } }, order)
    end)
end)
