-- Run by every process of four: two copies of a model that is divided between pairs of processes, whose optimizer is
-- sharded, each stage over the processes that have it. Prints "ok" and how many checks were made; an error ends all
-- processes.

local te = require "te"
local alike = require "spec.support.alike"
local side_by_side = require "spec.support.side_by_side"

local D = te.distributed
local check, micro_batches = alike.check, side_by_side.micro_batches

local ranks = te.train.ranks.new()
ranks:divide_stages(2)
local stages = ranks.split.pipeline_parallel

-- A model whose first stage has two blocks, the last one the third, after a few steps.
local function made(sharded)
    local own = side_by_side.model("gpt", { n_layer = 3, n_head = 2, n_embd = 16, pipeline_parallel = stages })
    local optimizer, norms = te.optim.AdamW(own:parameter_groups(0.1), { lr = 0.01 }), {}
    if sharded then ranks:shard(optimizer) end
    for step = 1, 3 do
        te.manual_seed(10 * step + ranks.row_rank)
        D.pipeline_step(own, micro_batches(3))
        norms[step] = side_by_side.averaged_step(own, optimizer)
    end
    return own, optimizer, norms
end

local whole, reference, norms = made(false)
local own, optimizer, others = made(true)
check(optimizer.sharding.group.size == 2, "sharded over %s", tostring(optimizer.sharding.group))
side_by_side.same_norms("stages", norms, others)
side_by_side.same_states("stages", whole, reference, own, optimizer)

-- What is not finite in the last stage of one copy is named by the process of the first copy that has the stage
local guard, last = te.train.guard(own, ranks), stages.rank == 1
D.pipeline_step(own, micro_batches(1))
if last and ranks.row_rank == 1 then own.norm.weight.grad:fill_(0 / 0) end
D.average_gradients(own)
local done, problem
for _ = 1, 3 do done, problem = pcall(guard.allows, guard, 1, (te.optim.grad_norm(own))) end
local speaks, message = last and ranks.row_rank == 0, type(problem) == "table" and problem.message or ""
check(not done and (message ~= "") == speaks, "who speaks: %s", tostring(problem))
check(not speaks or message:find("gradient norm.weight of", 1, true), "%s", message)

-- Whoever does not write a checkpoint has no more than a few whole tensors of the optimizer at a time.
do
    local width = 64
    local wide = te.models.llama { vocab_size = side_by_side.VOCAB, block_size = side_by_side.SEQ, n_layer = 4,
        n_head = 2, n_embd = width, n_inner = 4 * width, pipeline_parallel = stages }
    local adam = D.shard_optimizer(te.optim.AdamW(wide))
    D.pipeline_step(wide, micro_batches(1))
    D.average_gradients(wide)
    adam:step()
    adam:zero_grad()
    collectgarbage() collectgarbage()
    te.reset_peak_memory()
    local before, folder = te.memory_stats().current, os.tmpname() -- of each process
    os.remove(folder)
    te._core.mkdir(folder)
    te.train.checkpoint.save { folder = folder, step = 1, model = wide, optimizer = adam, group = ranks.parts }
    local most, largest = te.memory_stats().peak - before, 4 * 4 * width * width
    check(alike.world.rank == 0 or most < 4 * largest, "%d bytes more, the largest tensor has %d", most, largest)
    check((te.train.checkpoint.latest(folder) ~= nil) == (alike.world.rank == 0), "who writes")
    os.execute(("rm -r '%s'"):format(folder))
end

alike.done()
