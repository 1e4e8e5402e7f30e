-- What training in several processes costs: a step of a GPT, the averaging of its gradients, and the floor of that.
--
--     mpirun -n 2 tetrain bench/ranks.lua --config=gpt2_64 --batch=2 --threads=1
--     tetrain bench/ranks.lua --config=gpt2_64 --batch=4 --threads=2          the same tokens in one process
--
-- The model is that of train_step.lua, with --batch rows in each process. Before gradients are averaged the processes
-- wait for each other, so that one that is late does not count. Medians of the slowest process.

local te = require "te"
local folder = arg[0]:match("^(.*/)") or "./"
local median, models = dofile(folder .. "measure.lua").median, dofile(folder .. "models.lua")
local clock = te._core.clock

local command_line = te.train.command_line {
    script = "ranks.lua",
    about = "Times a training step of a GPT in processes that average their gradients.",
    { "config", "string", "char", choices = models.names, help = "size of the model" },
    { "batch", "size", 2, help = "rows for each process" },
    { "dtype", "string", "float32", choices = { "float32", "bfloat16" }, help = "of the computation" },
    { "threads", "integer", 1, min = 0, max = 1024, help = "of each process; 0: OMP_NUM_THREADS, or all cores" },
    { "runs", "size", 9, help = "steps timed, after two that are not" },
}

-- Bytes a second that memory moves here: a copy of 256 MB, read and written, the best of five.
local function copy_bandwidth()
    local from, best = te.zeros { 2 ^ 26 }, 0
    local to = te.empty { 2 ^ 26 }
    for _ = 1, 5 do
        local start = clock()
        to:copy_(from)
        best = math.max(best, 2 * 4 * 2 ^ 26 / (clock() - start))
    end
    return best
end

local function build_step(o, ranks)
    local _, _, _, _, sequence, vocabulary = unpack(models.configs[o.config])
    te.manual_seed(1)
    local model = models.build(o.config)
    ranks:divide_random()
    local parameters = model:parameters()
    local optimizer = te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-3, betas = { 0.9, 0.99 }, eps = 1e-8 })
    local function tokens() return te.randint(0, vocabulary - 1, { o.batch, sequence }, { dtype = "int32" }) end
    local ids, targets = tokens(), tokens()
    local autocast = { dtype = o.dtype, enabled = o.dtype ~= "float32" }
    return model:num_parameters(), function()
        local start = clock()
        local loss = te.autocast(autocast, function()
            local logits, value = model(ids, targets)
            logits:release()
            return value
        end)
        loss:backward()
        ranks:barrier()
        local together = clock()
        ranks:average_gradients(parameters)
        local averaged = clock()
        local norm = te.optim.grad_norm(parameters)
        optimizer:step { grad_scale = norm > 1 and 1 / norm or 1 }
        optimizer:zero_grad()
        return clock() - start, averaged - together
    end
end

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    local ranks = te.train.ranks.new()
    local n, step = build_step(o, ranks)
    local steps, averages = {}, {}
    for run = -1, o.runs do
        local whole, average = step()
        if run > 0 then steps[run], averages[run] = whole, average end
    end
    local bandwidth = copy_bandwidth()
    local slowest = te.tensor({ median(steps), median(averages) }, { dtype = "float64" })
    if ranks.size > 1 then ranks.group:all_reduce_(slowest, "max") end
    local whole, average = unpack(slowest:totable())
    if not ranks.leads then return end
    print(("%s %s, %d processes x %d threads x %d rows: %.1f ms a step"):format(o.config, o.dtype, ranks.size,
        te.get_num_threads(), o.batch, whole * 1e3))
    if ranks.size == 1 then return end
    print(("averaging: %.1f ms, %.1f %% of the step; %.0f MB of gradients; a copy of them takes %.1f ms here"):format(
        average * 1e3, 100 * average / whole, 4 * n / 1e6, 2 * 4 * n / bandwidth * 1e3))
end)
