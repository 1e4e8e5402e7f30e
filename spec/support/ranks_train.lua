-- What distributed_spec.lua starts several times together: looks at gradients, states and steps across processes, then
-- runs scripts/train_gpt.lua with the options that follow.
--
--     mpirun -n 2 tetrain spec/support/ranks_train.lua MODE [--option=value …] [then --option=value …]
--
-- MODE is check, plain, stop=STEP, or train=BATCH or val=BATCH. "stop=5" sends SIGTERM to the process of rank 1 while
-- step 5 is under way; "val=5" keeps it from reading the fifth batch for validation. Behind "then" are the options of a
-- second run in the same processes.

local te = require "te"

local D = te.distributed
local world = D.world()
local rank = world.rank

local function equal(expected, value, what)
    local wanted, got = tostring(expected), tostring(value)
    if wanted ~= got then error(("rank %d: %s is %s, not %s"):format(rank, what, got, wanted), 0) end
end

local function values(tensor) return table.concat(tensor:detach():reshape { -1 }:to("float32"):totable(), " ") end

-- Small and large gradients, of two dtypes, some of which not every process has.
local function averages(limit)
    local list = {}
    for i, shape in ipairs { { 3 }, { 2, 2 }, { 600, 500 }, { 5 }, { 4 }, { 6 }, { 7 } } do
        list[i] = te.zeros(shape, { dtype = (i == 4 or i == 7) and "bfloat16" or "float32" })
        list[i].requires_grad = true
    end
    local function fill()
        for i = 1, 5 do
            list[i].grad = i ~= 5 and te.full(list[i].shape, (rank + 1) * i, { dtype = list[i].dtype })
                or rank == 1 and te.full({ 4 }, 8) or nil
        end
        if list[7].main_grad then list[7].main_grad:fill_(rank * 2 ^ -20 + 1) end
    end
    local lone = te.zeros({ 2, 2 }, { dtype = "bfloat16" }) -- rank 0 has a main_grad, the other one a grad or nothing
    lone.requires_grad = true
    for _, grad in ipairs { false, te.full({ 2, 2 }, 3, { dtype = "bfloat16" }) } do
        if rank == 0 then lone.main_grad = te.full({ 2, 2 }, 1 + 2 ^ -20)
        else lone.main_grad, lone.grad = nil, grad or nil end
        D.average_gradients({ lone }, { bucket_bytes = limit })
        local half = (1 + 2 ^ -20 + (grad and 3 or 0)) / 2
        equal(values(te.full({ 4 }, half)), values(lone.main_grad), "a main_grad of one process")
        equal(nil, lone.grad, "what went into main_grad")
    end
    for step = 1, 3 do
        if step == 1 then list[7].grad = te.ones({ 7 }, { dtype = "bfloat16" }) end
        if step == 2 then list[7].main_grad = te.zeros { 7 } end
        fill()
        D.average_gradients(list, { bucket_bytes = limit })
        local name = ("gradient of step %d, buckets of %g, "):format(step, limit)
        equal(values(te.full({ 3 }, 1.5)), values(list[1].grad), name .. 1)
        equal(values(te.full({ 2, 2 }, 3)), values(list[2].grad), name .. 2)
        equal(4.5 * 300000, list[3].grad:sum():item(), name .. 3)
        equal(values(te.full({ 5 }, 6)), values(list[4].grad), name .. 4)
        equal("bfloat16", list[4].grad.dtype, name .. "dtype")
        equal(values(te.full({ 4 }, 4)), values(list[5].grad), name .. 5)
        equal(nil, list[6].grad, name .. 6)
        local main = list[7].main_grad
        equal(main and 7 * (1 + 2 ^ -21) or 7, (main or list[7].grad):to("float64"):sum():item(), name .. 7)
    end
end

-- Lists of the same length in another order, and modules of other names, would be mixed up.
local function differences()
    local function refused(message, ...)
        local done, problem = pcall(...)
        equal(false, done, "whether it is done")
        equal(true, tostring(problem):find(message, 1, true) ~= nil, "what is said: " .. tostring(problem) .. ": right")
    end
    local list = {}
    for i, shape in ipairs { { 2, 3 }, { 3, 2 }, { 6 } } do
        list[i] = te.zeros(shape, { requires_grad = true })
        list[i].grad = te.full(shape, i)
    end
    if rank == 1 then list[1], list[2] = list[2], list[1] end
    refused(("average_gradients: parameter 1 is float32 {%s} here, and another"):format(rank == 0 and "2,3" or "3,2"),
        D.average_gradients, list)
    refused("broadcast_parameters: tensor 1 is ", D.broadcast_parameters, list)
    if rank == 1 then list[1], list[2] = list[2], list[1] end
    D.average_gradients(list)
    equal("2 2 2 2 2 2", values(list[2].grad), "a gradient of the same everywhere")
    list[3] = te.zeros({ 6 }, { dtype = rank == 1 and "bfloat16" or "float32", requires_grad = true })
    refused("parameter 3 is " .. list[3].dtype, D.average_gradients, list)
    local model = te.Module:extend "Two" {}
    model[rank == 0 and "first" or "other"] = te.Linear(2, 2)
    refused("tensor 1 is " .. (rank == 0 and "first.bias" or "other.bias"), D.broadcast_parameters, model)
end

-- The state of rank 1 everywhere, quantized weights and histories too.
local function broadcasts()
    for _, name in ipairs { "DelayedScaling", "MXFP8BlockScaling" } do
        te.manual_seed(10 + rank)
        local recipe = te.recipe[name] {}
        local model = te.quantized_model_init({ recipe = recipe }, function()
            return te.Sequential(te.LayerNorm(32), te.Linear(32, 32), te.Linear(32, 32))
        end)
        te.autocast({ recipe = recipe }, function() return model(te.randn { 32, 32 }) end):sum():backward()
        D.broadcast_parameters(model, { root = 1 })
        local sums = {}
        for _, key in ipairs(require("te.options").names(model:state_dict())) do
            sums[#sums + 1] = model:state_dict()[key]:to("float32"):sum():item()
        end
        for _, p in ipairs(model:parameters()) do sums[#sums + 1] = p:detach():sum():item() end
        local all = world:all_gather(te.tensor({ sums }, { dtype = "float64" })):totable()
        equal(table.concat(all[2], " "), table.concat(all[1], " "), "the state of " .. name)
    end
    local list = { te.full({ 2 }, rank), te.full({ 3 }, rank) }
    D.broadcast_parameters(list)
    equal("0 0 0 0 0", values(list[1]) .. " " .. values(list[2]), "a list")
end

-- Steps of which the second is not finite on rank 1 alone, and in the third of which rank 1 is asked to stop.
local function steps()
    te.manual_seed(4)
    local model = te.Linear(3, 2)
    local optimizer, at = te.optim.AdamW(model:parameters()), 0
    local ranks = te.train.ranks.new()
    local run = te.train.steps { device = "cpu", graph = false, clip = 0.5, grad_accumulation = 2, ranks = ranks,
        next_batch = function()
            at = at + 1
            return te.full({ 2, 3 }, at == 4 and rank == 1 and 0 / 0 or at + rank), te.ones { 2, 2 }
        end,
        loss = function(x, y) return ((model(x) - y) ^ 2):sum() end,
        interrupted = function() return rank == 1 and at == 6 end,
        parameters = model:parameters(), optimizer = optimizer,
        schedule = function() return 0.1 end, guard = te.train.guard(model, ranks) }
    local seen = {}
    for step = 1, 3 do
        local stop = run:start(step)
        for s in run:finished(true) do
            seen[#seen + 1] = ("%s %s %.17g %.17g"):format(tostring(stop), tostring(s.allowed), s.loss, s.grad_norm)
        end
    end
    local text = table.concat(seen, "\n"):gsub("%-?nan", "nan")
    local marks = text:gsub("([truefals]+ [truefals]+)[^\n]*", "%1")
    equal("false true\nfalse false\ntrue true", marks, "steps")
    equal(2, optimizer:state_dict().state[1].step, "steps made")
    return text .. values(model.weight)
end

-- The same in all processes, and what is not.
local function random()
    te.manual_seed(3)
    te.randn { 2 }
    local ranks = te.train.ranks.new()
    ranks:divide_random()
    local all = world:all_gather(te.randn { 1, 4 }):totable()
    equal(false, all[1][1] == all[2][1], "equal numbers")
    if rank == 0 then
        te.manual_seed(3)
        te.randn { 2 }
        equal(values(te.tensor(all[1])), values(te.randn { 4 }), "the numbers of rank 0")
    end
    ranks:share_threads() -- what processes.lua sets in OMP_NUM_THREADS decides
    equal(1, te.get_num_threads(), "threads")
    local getenv = os.getenv
    os.getenv = function() end
    te.set_num_threads(3)
    ranks:share_threads() -- as `tetrain --threads 3` does
    equal(3, te.get_num_threads(), "threads that were asked for")
    os.getenv = getenv
    te.set_num_threads(1)
    equal(1.5, ranks:mean(rank + 1), "a mean")
end

local function same_everywhere(text, what)
    local bytes = { text:byte(1, 200) }
    local own = te.tensor({ bytes }, { dtype = "int32" })
    local first, second = unpack(world:all_gather(own):totable())
    equal(table.concat(first, " "), table.concat(second, " "), what)
end

-- The part "train" or "val" of the data cannot be read any more from that batch on.
local function lose(part, batch)
    local open = te.data.open
    te.data.open = function(opts)
        local set, at = open(opts), 0
        local loader = set[part]
        set[part] = setmetatable({ next = function()
            at = at + 1
            if at >= batch then error("the disk is gone", 0) end
            return loader:next()
        end }, { __index = function(_, name) return function(_, ...) return loader[name](loader, ...) end end })
        return set
    end
end

local word = table.remove(arg, 1)
local stop_at = tonumber(word:match "^stop=(%d+)$")
local part, batch = word:match "^(%l+)=(%d+)$"
if (part == "train" or part == "val") and rank == 1 then lose(part, tonumber(batch)) end
if word == "check" then
    averages(25e6)
    averages(16)
    differences()
    broadcasts()
    same_everywhere(steps(), "what steps came to")
    random()
elseif stop_at then
    local cosine = te.optim.cosine
    te.optim = setmetatable({ cosine = function(opts)
        local schedule = cosine(opts)
        return function(step)
            if step == stop_at and rank == 1 then os.execute "kill -TERM $PPID" end
            return schedule(step)
        end
    end }, { __index = te.optim })
end

local runs = { { [0] = "scripts/train_gpt.lua" } }
for _, option in ipairs(arg) do
    if option == "then" then
        runs[#runs + 1] = { [0] = runs[1][0] }
    else
        table.insert(runs[#runs], option)
    end
end
local exit = os.exit
for i, words in ipairs(runs) do
    arg = words
    os.exit = i == #runs and exit or function(code) equal(0, code, "the exit code") end
    dofile(words[0])
end
