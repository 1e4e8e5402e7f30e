-- Run by every process of a group: a vocabulary that is split between them against the same one whole. Prints "ok" and
-- how many checks were made; an error ends all processes.

local te = require "te"
local alike = require "spec.support.alike"

local world, check, near, fails = alike.world, alike.check, alike.near, alike.fails
local rank, size = world.rank, world.size

local TOLERANCE = { float64 = 1e-14, float32 = 2e-6, bfloat16 = 2e-6 } -- of losses, which bfloat16 does not round
local ROUNDED = { float64 = 1e-14, float32 = 2e-6, bfloat16 = 2 ^ -8 }  -- of gradients

-- Parts of `classes`: as even as can be, a large first one, and, where asked for, none of the last rank.
local function even(classes)
    local sizes = {}
    for r = 1, size do sizes[r] = math.floor(classes / size) + (r <= classes % size and 1 or 0) end
    return sizes
end

local function uneven(classes)
    local sizes = {}
    for r = 1, size do sizes[r] = r == 1 and classes - 2 * (size - 1) or 2 end
    return sizes
end

local function last_empty(classes)
    local sizes = even(classes)
    sizes[size - 1], sizes[size] = sizes[size - 1] + sizes[size], 0
    return sizes
end

local function start_of(sizes, r)
    local at = 0
    for i = 1, r do at = at + sizes[i] end
    return at
end

local function part(x, sizes, dim, r) return x:narrow(dim, start_of(sizes, r or rank) + 1, sizes[(r or rank) + 1]) end

local function copy(opts, more)
    local all = {}
    for _, t in ipairs { opts or {}, more or {} } do
        for key, value in pairs(t) do all[key] = value end
    end
    return all
end

-- Loss and gradient with parts of those sizes, where rank r has part place[r + 1], against the whole.
local function compare(name, logits, targets, opts, sizes, more, own)
    local whole, mine = logits:detach(), part(logits:detach(), sizes, -1, own):clone()
    whole = whole:clone()
    whole.requires_grad, mine.requires_grad = true, true
    local want = te.cross_entropy(whole, targets, opts)
    local loss = te.parallel_cross_entropy(mine, targets, copy(opts, more))
    check(loss.dtype == want.dtype, "%s: dtype %s, not %s", name, loss.dtype, want.dtype)
    near(name .. ": loss", loss, want, TOLERANCE[logits.dtype])
    near(name .. ": the same bits", loss, world:broadcast_(loss:detach():clone(), 0), 0)
    local weights = te.arange(1, want:numel(), 1):to(want.dtype):view(want.shape)
    te.sum(want * weights):backward()
    te.sum(loss * weights):backward()
    check(mine.grad.dtype == logits.dtype, "%s: gradient of %s", name, mine.grad.dtype)
    near(name .. ": gradient", mine.grad, part(whole.grad, sizes, -1, own), ROUNDED[logits.dtype])
end

local function ids(t, dtype) return te.tensor(t, { dtype = dtype or "int64" }) end

-- Every class is a target once, some rows are ignored.
local CLASSES = 11
local function all_classes(ignored)
    local t = {}
    for c = 0, CLASSES - 1 do t[c + 1] = c end
    for _, row in ipairs(ignored or {}) do t[row] = -100 end
    return ids(t)
end

te.manual_seed(1)
local drawn = te.randn({ CLASSES, CLASSES }, { dtype = "float64" }) * 3

for _, dtype in ipairs { "float64", "float32", "bfloat16" } do
    local logits = drawn:to(dtype)
    for _, smoothing in ipairs { 0, 0.1, 1 } do
        for _, reduction in ipairs { "mean", "sum", "none" } do
            local opts = { label_smoothing = smoothing, reduction = reduction }
            local name = ("%s, smoothing %g, %s"):format(dtype, smoothing, reduction)
            compare(name, logits, all_classes(), opts, even(CLASSES))
            compare(name .. ", ignored rows", logits, all_classes { 1, 4, 11 }, opts, uneven(CLASSES))
        end
    end
end

do -- shapes and dtypes of targets, parts
    local logits, opts = drawn:to "float32", { label_smoothing = 0.2, ignore_index = 3 }
    compare("uint8", logits, ids({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }, "uint8"), opts, even(CLASSES))
    compare("int32", logits, ids({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 }, "int32"), opts, uneven(CLASSES))
    compare("{2,3}", logits:narrow(1, 1, 6):view { 2, 3, CLASSES }, ids { { 0, 10, 3 }, { 9, 2, 5 } }, opts,
        even(CLASSES))
    compare("one row", logits[1], te.full({}, 10, { dtype = "int64" }), opts, even(CLASSES))
    compare("no row", logits:narrow(1, 1, 0), ids({ 1 }):narrow(1, 1, 0), { reduction = "sum" }, even(CLASSES))
    compare("columns apart", logits:transpose(), all_classes(), opts, even(CLASSES))
    compare("an empty part", logits, all_classes(), opts, last_empty(CLASSES))
    compare("vocab_start", logits, all_classes(), opts, uneven(CLASSES),
        { vocab_start = start_of(uneven(CLASSES), rank) })
    local other = size - 1 - rank
    compare("parts in another order", logits, all_classes(), opts, uneven(CLASSES),
        { vocab_start = start_of(uneven(CLASSES), other) }, other)
    local long = te.randn { 5, 50257 }
    compare("a large vocabulary", long, ids { 0, 50256, 25128, 25129, -100 }, { label_smoothing = 0.1 }, even(50257))
end

for _, smoothing in ipairs { 0, 0.1 } do
    for _, reduction in ipairs { "mean", "sum", "none" } do
        local opts = { label_smoothing = smoothing, reduction = reduction }
        compare("all rows ignored", drawn:to "float32", te.full({ CLASSES }, -100, { dtype = "int64" }), opts,
            even(CLASSES))
    end
end

-- Numbers that a sum of exponentials would not survive, and some that nothing does: as in the whole.
do
    local inf, nan = math.huge, 0 / 0
    local rows = {
        { 1e30, -1e30, 5, 0, 3e38, 1, 2, 3, 4, 5, 1e30 },
        { -1e30, -2e30, -1e30, -3e30, -1e30, -1e30, -1e30, -1e30, -1e30, -1e30, -2e30 },
        { 800, 0, 0, 0, 0, 0, 0, 0, 0, 0, 799 },
        { -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, 1, 2, 3 },       -- nothing in the first parts
        { 1, 2, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf },    -- nothing in the last ones
        { -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf },
        { 1, inf, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
        { 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, inf },
        { 1, 0, 0, 0, nan, 0, 0, 0, 0, 0, 0 },
        { nan, 0, 0, 0, 0, 0, 0, 0, 0, 0, -inf },
        { 1e8, 1e8 - 8, 1e8, 1e8, 1e8, 1e8 - 16, 1e8, 1e8, 1e8, 1e8 - 8, 1e8 }, -- differences below its digits
    }
    local places = { { 0, 5, 10 }, { 1, 9, -100 } }
    for _, dtype in ipairs { "float32", "float64", "bfloat16" } do
        for r, row in ipairs(rows) do
            local x = te.tensor({ row, row, row, row, row, row }, { dtype = dtype })
            for _, smoothing in ipairs { 0, 0.1 } do
                compare(("hostile row %d of %s, smoothing %g"):format(r, dtype, smoothing), x,
                    ids { places[1][1], places[1][2], places[1][3], places[2][1], places[2][2], places[2][3] },
                    { label_smoothing = smoothing, reduction = "none" }, even(CLASSES))
            end
        end
    end
end

do -- what goes between processes, and what is kept
    local watched = world:split(0)
    local sent = 0
    function watched:all_gather(x)
        sent = sent + x:numel()
        return getmetatable(self).all_gather(self, x)
    end
    for _, name in ipairs { "all_reduce", "all_reduce_", "reduce_scatter", "all_to_all", "broadcast_", "exchange" } do
        watched[name] = function() error(name .. " is not needed") end
    end
    local x = te.randn({ 64, 4096 }, { requires_grad = true })
    local targets = te.full({ 64 }, 4096, { dtype = "int64" })
    for _, smoothing in ipairs { 0, 0.1 } do
        sent = 0
        collectgarbage()
        collectgarbage()
        local before = te.memory_stats().current
        local loss = te.parallel_cross_entropy(x, targets, { group = watched, label_smoothing = smoothing })
        collectgarbage()
        collectgarbage()
        local kept = te.memory_stats().current - before
        check(sent <= 4 * 64 + 8, "%d numbers of %d are sent", sent, x:numel())
        check(kept <= 16 * 64 * 8, "%d bytes are kept of logits of %d", kept, 4 * x:numel())
        loss:backward()
        x.grad = nil
    end
    te.autocast({ dtype = "bfloat16" }, function()
        check(te.parallel_cross_entropy(x, targets).dtype == "float32", "te.autocast leaves losses in float32")
    end)
    te.no_grad(function() check(not te.parallel_cross_entropy(x, targets).requires_grad, "te.no_grad") end)
end

do -- wrong arguments are an error everywhere, and the group goes on
    local pce = te.parallel_cross_entropy
    local function read(...) return pce(...):item() end -- a device reports when it is waited for
    local x, targets = te.randn { 3, 4 }, ids { 0, 1, 2 }
    local last = rank == size - 1
    fails(("target %d at position 2 is not a class from 0 to %d"):format(4 * size, 4 * size - 1), read, x,
        ids { 0, 4 * size, 1 })
    fails("cross_entropy: target -1 at position 3 is not a class", read, x, ids { 0, 1, -1 })
    fails("targets must be int64, int32 or uint8, not float32", pce, x, te.ones { 3 })
    fails("logits {3,4} need targets with one dimension less, not {3,1}", pce, x, ids { { 0 }, { 1 }, { 2 } })
    fails("te.parallel_cross_entropy: logits: expected a tensor, got table", pce, {}, targets)
    fails("te.parallel_cross_entropy: targets: expected a tensor, got false", pce, x)
    fails("logits: expected {..., classes}, got {}", pce, te.full({}, 1), targets)
    fails("label_smoothing: expected number from 0 to 1, got 2", pce, x, targets, { label_smoothing = 2 })
    fails("reduction: expected one of mean, sum, none", pce, x, targets, { reduction = "meen" })
    fails('unknown option "smoothing"', pce, x, targets, { smoothing = 0.1 })
    fails("option group: expected a group of te.distributed, got 3", pce, x, targets, { group = 3 })
    fails("argument 4, number 1, is too much", pce, x, targets, {}, 1)
    fails("vocab_start: given by some processes and not by all", pce, x, targets, { vocab_start = last and 0 or nil })
    fails("classes stand before it", pce, x, targets, { vocab_start = 5 * rank })
    fails("classes stand before it", pce, x, targets, { vocab_start = 3 * rank })
    fails(("option label_smoothing: rank %d has another one than rank 0"):format(size - 1), pce, x, targets,
        { label_smoothing = last and 0.1 or 0 })
    fails("option reduction: rank", pce, x, targets, { reduction = last and "sum" or "mean" })
    fails("all_gather of", pce, last and te.randn { 2, 4 } or x, last and ids { 0, 1 } or targets)
    near("after all of this", pce(x * 0, targets), te.log(te.full({}, 4 * size)), 1e-6)
end

do -- groups inside the group: pairs with vocabularies of their own, and one process alone
    local pair = world:split(math.floor(rank / 2))
    te.manual_seed(20 + math.floor(rank / 2))
    local logits = te.randn({ 4, 6 }, { dtype = "float64" })
    local each = 6 / pair.size
    local mine = logits:narrow(2, pair.rank * each + 1, each):clone()
    local targets = ids { 0, 5, 3, 2 }
    near("a pair's loss", te.parallel_cross_entropy(mine, targets, { group = pair }), te.cross_entropy(logits, targets),
        1e-14)
    local one = world:split(rank)
    near("alone", te.parallel_cross_entropy(logits, targets, { group = one, vocab_start = 0 }),
        te.cross_entropy(logits, targets), 0)
    fails("vocab_start: 3, but no other process has the classes before it", te.parallel_cross_entropy, logits, targets,
        { group = one, vocab_start = 3 })
end

-- The table of an embedding ---------------------------------------------------------------------------------------

local function embedding(split, opts)
    te.manual_seed(5)
    return te.Embedding(CLASSES, 6, copy(opts, split and { tensor_parallel_mode = "vocab" }))
end

local token_ids = ids { { 0, 10, 3, 10 }, { 9, 2, 5, 7 }, { 1, 4, 6, 8 } }

for _, dtype in ipairs { "float64", "float32", "bfloat16" } do
    local whole, split = embedding(false, { params_dtype = dtype }), embedding(true, { params_dtype = dtype })
    near("table", split.weight, part(whole.weight:detach(), even(CLASSES), 1), 0)
    for _, form in ipairs { token_ids, token_ids:to "int32", token_ids[1], token_ids:transpose() } do
        local want, rows = whole(form), split(form)
        near("rows", rows, want, 0)
        local weights = te.arange(1, want:numel(), 1):to(dtype):view(want.shape)
        te.sum(want * weights):backward()
        te.sum(rows * weights):backward()
        near("gradient of the table", split.weight.grad, part(whole.weight.grad, even(CLASSES), 1), ROUNDED[dtype])
        whole:zero_grad()
        split:zero_grad()
    end
    te.autocast({ dtype = "bfloat16" }, function() near("under te.autocast", split(token_ids), whole(token_ids), 0) end)
end

do
    local split = embedding(true)
    -- What is no number in a row of another process reaches no row here.
    local y = split(ids { 0, CLASSES - 1 })
    y:backward(te.tensor { { 0 / 0, 1, 1, 1, 1, 1 }, { 1, 1, 1, 1, 1, math.huge } })
    local finite = te.all(te.isfinite(split.weight.grad)):item()
    check(finite == (rank ~= 0 and rank ~= size - 1), "gradients stay where their rows are")
    local function read(...) return split(...):totable() end
    local where = split.weight.device == "cpu" and " at position 2 is outside 0 to 10" or ""
    fails("11" .. where, read, ids { 1, 11 })
    fails("-1" .. where, read, ids { 0, -1 })
    check(split(ids({ 1 }):narrow(1, 1, 0)).shape[1] == 0, "no id")
    fails("option tensor_parallel_mode", te.Embedding, 4, 4, { tensor_parallel_mode = "row" })
    fails("option tensor_parallel_group: expected a group", te.Embedding, 4, 4,
        { tensor_parallel_mode = "vocab", tensor_parallel_group = 1 })
    fails("num_embeddings = 1 cannot be split between", te.Embedding, 1, 4, { tensor_parallel_mode = "vocab" })
    fails("sequence_parallel: needs tensor_parallel_mode", te.Embedding, 4, 4, { sequence_parallel = true })
    check(tostring(split):find('tensor_parallel_mode="vocab", Group(rank', 1, true), "%s", tostring(split))
    -- The rows of the result split.
    local whole, rows = embedding(false), embedding(true, { sequence_parallel = true })
    local flat = te.arange(0, 4 * size - 1, 1):to "int64" * 5
    flat = flat - te.floor(flat:to "float64" / CLASSES):to "int64" * CLASSES
    local want, got = whole(flat), rows(flat)
    near("rows of the result", got, want:narrow(1, 4 * rank + 1, 4), 0)
    local weights = te.arange(1, want:numel(), 1):view(want.shape)
    te.sum(want * weights):backward()
    te.sum(got * weights:narrow(1, 4 * rank + 1, 4)):backward()
    near("their gradient", rows.weight.grad, part(whole.weight.grad, even(CLASSES), 1), 1e-6)
end

do -- a column-parallel layer whose columns do not divide
    local function layer(split)
        te.manual_seed(6)
        local made = te.Linear(6, CLASSES, { tensor_parallel_mode = split and "column" or nil })
        te.no_grad(function()
            local bias = te.arange(1, CLASSES, 1)
            made.bias:copy_(split and part(bias, even(CLASSES), 1) or bias)
        end)
        return made
    end
    local whole, split, x = layer(false), layer(true), te.randn { 4, 6 }
    near("uneven columns", split(x), part(whole(x), even(CLASSES), 2), 1e-6)
    check(te.Bias(CLASSES, { tensor_parallel = true }).bias.shape[1] == even(CLASSES)[rank + 1], "uneven te.Bias")
    fails("out_features = 1 cannot be split between", te.Linear, 6, 1, { tensor_parallel_mode = "column" })
end

do -- gradients that are rounded at random: layers that all have whole stay the same, whatever the parts' sizes
    local WIDE = 64
    local recipe = te.recipe.NVFP4BlockScaling()
    te.manual_seed(14)
    local net = te.Sequential(te.Linear(WIDE, WIDE), te.Dropout(0.1), te.Linear(WIDE, 10 * size + 1,
        { tensor_parallel_mode = "column", bias = false }))
    local optimizer = te.optim.SGD(net:parameters(), { lr = 0.1 })
    for step = 1, 3 do
        local x, targets = te.randn { 32, WIDE }, te.randint(0, 10 * size, { 32 }, { dtype = "int64" })
        te.autocast({ recipe = recipe, group = world }, function()
            return te.parallel_cross_entropy(net(x), targets)
        end):backward()
        optimizer:step()
        optimizer:zero_grad()
        local own = net[1].weight:detach()
        near(("whole weight after step %d"):format(step), own, world:broadcast_(own:clone(), 0), 0)
    end
end

-- A model -----------------------------------------------------------------------------------------------------------

local VOCAB, WIDTH = 13, 12

local function model(opts)
    te.manual_seed(7)
    local function mode(name) return opts.split and name or nil end
    local function place(name, more)
        return copy({ params_dtype = opts.dtype, tensor_parallel_mode = mode(name) }, more)
    end
    local inner = 4 * size
    local net = te.Sequential(
        te.Embedding(VOCAB, WIDTH, place("vocab", { init_method = te.initializers.normal(0, 1) })),
        te.Residual(te.LayerNorm(WIDTH, { params_dtype = opts.dtype }), te.Linear(WIDTH, inner, place "column"),
            te.GELU(), te.Linear(inner, WIDTH, place "row")),
        te.RMSNorm(WIDTH, { params_dtype = opts.dtype }),
        te.Linear(WIDTH, VOCAB, place("column", { bias = false, init_method = te.initializers.normal(0, 0.3) })))
    if opts.tied then net[4].weight = net[1].weight end
    return net
end

local function train(opts)
    local net = model(opts)
    check(#net:parameters() == (opts.tied and 8 or 9), "%d parameters", #net:parameters())
    local optimizer = te.optim.AdamW(net:parameters(), { lr = 0.02, weight_decay = 0.1 })
    te.manual_seed(9)
    local losses, logits = {}, nil
    local loss_of = opts.split and te.parallel_cross_entropy or te.cross_entropy
    for step = 1, 3 do
        local x = te.randint(0, VOCAB - 1, { 3, 5 }, { dtype = "int64" })
        local targets = te.randint(0, VOCAB - 1, { 3, 5 }, { dtype = "int64" })
        targets[1][2]:fill_(-100)
        te.autocast({ enabled = opts.compute ~= nil, dtype = opts.compute }, function()
            logits = net(x)
            losses[step] = loss_of(logits, targets, { label_smoothing = 0.1 })
        end)
        losses[step]:backward()
        optimizer:step()
        optimizer:zero_grad()
    end
    return losses, net
end

for _, opts in ipairs {
    { dtype = "float64", tied = true, tolerance = 1e-11 }, { dtype = "float64", tolerance = 1e-11 },
    { dtype = "float32", tied = true, tolerance = 2e-4 }, { dtype = "float32", compute = "bfloat16", tolerance = 0.05 },
} do
    local want, whole = train(opts)
    local losses, split = train(copy(opts, { split = true }))
    for step = 1, 3 do near("loss of step " .. step, losses[step], want[step], opts.tolerance) end
    near("table", split[1].weight, part(whole[1].weight:detach(), even(VOCAB), 1), opts.tolerance)
    near("head", split[4].weight, part(whole[4].weight:detach(), even(VOCAB), 1), opts.tolerance)
    near("norm", split[3].weight, whole[3].weight, opts.tolerance)
    check(rawequal(split[4].weight, split[1].weight) == (opts.tied or false), "one table")
end

-- What training does with all parameters leaves each process its rows.
do
    te.manual_seed(1)
    local split = te.Embedding(VOCAB, 3, { tensor_parallel_mode = "vocab" })
    local rows = split.weight:detach():clone()
    te.distributed.broadcast_parameters(split)
    near("rows after a broadcast", split.weight, rows, 0)
    te.sum(split(te.tensor({ 0, 0, 1 }, { dtype = "int64" }))):backward()
    local grad = split.weight.grad:clone()
    te.distributed.average_gradients(split)
    near("their gradient after an average", split.weight.grad, grad, 0)
end

-- Two groups of two: ranks 0 and 2 have the same part, 1 and 3 the other.
if te.distributed.world().size == 4 then
    local world = te.distributed.world()
    local pair, like = world:split(math.floor(world.rank / 2)), world:split(world.rank % 2)
    local layer = te.Linear(3, 4,
        { tensor_parallel_mode = "column", tensor_parallel_group = pair, bias = false })
    for _, case in ipairs { { world, world.rank % 2 + 2 }, { like, world.rank % 2 + 2 }, { pair, world.rank + 1 } } do
        local group, mean = unpack(case) -- in the same order in all processes
        layer.weight.grad = te.full({ 2, 3 }, world.rank + 1)
        te.distributed.average_gradients(layer, { group = group })
        near("average of a part", layer.weight.grad, te.full({ 2, 3 }, mean), 0)
    end
    te.no_grad(function() layer.weight:fill_(world.rank) end)
    te.distributed.broadcast_parameters(layer)
    near("broadcast of a part", layer.weight, te.full({ 2, 3 }, world.rank % 2), 0)
end

alike.done()
