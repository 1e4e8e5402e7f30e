-- Run by every process of a group: what te.distributed does with tensors. Prints "ok" and how many checks were made;
-- an error ends all processes.

local te = require "te"

local world = te.distributed.world()
local rank, size = world.rank, world.size
local checks = 0

local function same(want, tensor, what)
    checks = checks + 1
    local is = type(tensor) == "table" and tensor or tensor:totable()
    local shown = table.concat(is, " ")
    if shown ~= table.concat(want, " ") then
        error(("rank %d: %s: %s, not %s"):format(rank, what, shown, table.concat(want, " ")), 2)
    end
end

local function fails(message, ...)
    checks = checks + 1
    local done, problem = pcall(...)
    if done or not tostring(problem):find(message, 1, true) then
        error(("rank %d: %q, not %q"):format(rank, tostring(problem), message), 2)
    end
end

same({ tostring(world), tostring(te.distributed.launched()) },
    { ("Group(rank %d of %d)"):format(rank, size), "true" }, "the world")
same({ rank, size }, { world.local_rank, world.local_size }, "on one machine")

local sum = size * (size + 1) / 2
local x = te.full({ 2 }, rank + 1)
same({ sum, sum }, world:all_reduce(x), "sum")
same({ sum / size, sum / size }, world:all_reduce(x, "average"), "average")
same({ size, size }, world:all_reduce(x, "max"), "max")
same({ 1, 1 }, world:all_reduce(x, "min"), "min")
same({ rank + 1, rank + 1 }, x, "all_reduce leaves x alone")
same({ sum, sum }, world:all_reduce_(x), "in place")
same({ sum, sum }, x, "in place changes x")

-- Several pieces of staging and a remainder; all numbers are exact in float32.
local long = te.arange(1, 1500007, 1)
same({ 0 }, (world:all_reduce(long) - long * size):abs():max():view(1), "a long sum")
local rows = te.arange(1, size * 500009, 1)
local own = rows:narrow(1, rank * 500009 + 1, 500009) * size
same({ 0 }, (world:reduce_scatter(rows) - own):abs():max():view(1), "a long sum scattered")

-- Rounded once: 1 + 2^-8 is no bfloat16, but with another 2^-8 it is one. NCCL may round on the way.
local tiny = te.full({ 1 }, rank == 0 and 1 or 2 ^ -8):to "bfloat16"
if x.device == "cpu" then same({ size == 3 and 1 + 2 ^ -7 or 1 }, world:all_reduce(tiny), "bfloat16") end

-- Integers end where their type does, as in operations. NCCL's sums wrap.
for _, case in ipairs { { "uint8", 200 }, { "int32", 2 ^ 31 - 5 }, { "int64", 2 ^ 62 } } do
    local dtype, number = unpack(case)
    for _, sign in ipairs { 1, -1 } do
        local whole = te.full({ size }, sign * number, { dtype = dtype, device = "cpu" })
        local added = whole
        for _ = 2, size do added = added + whole end
        same(added:totable(), world:all_reduce(whole), "a large sum of " .. dtype)
        same({ added:totable()[1] }, world:reduce_scatter(whole), "a large sum scattered, of " .. dtype)
    end
end

local gathered, parts, swapped = {}, {}, {}
for r = 0, size - 1 do
    gathered[r + 1] = r
    parts[r + 1] = rank * 10 + r
    swapped[r + 1] = r * 10 + rank
end
same(gathered, world:all_gather(te.full({ 1 }, rank, { dtype = "int64" })), "all_gather")
same(swapped, world:all_to_all(te.tensor(parts)), "all_to_all")
same({ (rank - 1) % size }, world:exchange(te.full({ 1 }, rank), (rank + 1) % size, (rank - 1) % size), "exchange")
same({ size - 1 }, world:broadcast_(te.full({ 1 }, rank), size - 1), "broadcast")
local weight = te.ones({ 1 }, { requires_grad = true })
same({ 1 }, world:broadcast_(weight, 0):detach(), "a parameter")

local half = world:split(rank % 2, -rank)
same({ half.size }, half:all_reduce(te.ones { 1 }), "a part")
same({ math.floor((size - 1 - rank) / 2) }, { half.rank }, "ranks by key")
local others = world:split(rank == 0 and -1 or 0)
same({ tostring(rank ~= 0) }, { tostring(te.distributed.is_group(others)) }, "in no group")
world:barrier()

-- What is not alike is an error in all processes, and they go on.
local last = rank == size - 1
local kind = x.device == "cpu" and "" or "a device's "
fails(("rank %d calls all_reduce of %sfloat32 {3} (sum), rank 0 all_reduce of %sfloat32 {2} (sum)")
    :format(size - 1, kind, kind), world.all_reduce, world, te.ones { last and 3 or 2 })
fails("the processes differ", function() return last and world:barrier() or world:all_gather(te.ones { 1 }) end)
fails(last and "requires a gradient" or "whose message says why", world.all_reduce, world, last and weight or x)
fails(last and 'op: expected sum, average, max or min, got string "mx"' or "whose message says why",
    world.all_reduce, world, x, last and "mx" or "sum")
fails(last and "te.distributed: all_gather: x: expected a tensor, got number 3" or "whose message says why",
    world.all_gather, world, last and 3 or x)
fails(last and "te.distributed: broadcast_: rank: " or "whose message says why",
    world.broadcast_, world, x, last and "two" or 0)
fails(last and "te.distributed: split: color is 4294967296" or "split: the call failed on rank " .. size - 1,
    world.split, world, last and 2 ^ 32 or 0)
local written = last and te.from_file(arg[0], "uint8"):narrow(1, 1, 2) or te.zeros({ 2 }, { dtype = "uint8" })
if x.device == "cpu" then
    fails(last and "te.distributed: broadcast_: tensor is read-only" or "whose message says why",
        world.broadcast_, world, written)
end
fails("average of int64", world.all_reduce, world, te.full({ 1 }, 1, { dtype = "int64" }), "average")
same({ sum, sum }, x, "what failed changes nothing")

-- Each process on a device of its own after all had the same, as far as the made-up machine allows it.
local devices = te.devices()
if x.device ~= "cpu" and size < #devices then
    for _, name in ipairs { "cuda:" .. rank, "cuda:0", "cuda:" .. rank } do
        same({ sum }, world:all_reduce(te.full({ 1 }, rank + 1, { device = name })), name)
    end
end

world:barrier()
print(("ok %d of %d: %d"):format(rank, size, checks))
