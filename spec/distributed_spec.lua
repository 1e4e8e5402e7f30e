--- Groups of processes. What several of them look at is in spec/support/distributed_checks.lua.

local te = require "te"
local processes = require "spec.support.processes"
local shell = require "spec.support.shell"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

describe("processes started together", function()
    local function check(n)
        if not processes.available() then pending "mpirun cannot start anything" end
        local text, status = processes.run(n, ("'%s' spec/support/distributed_checks.lua"):format(TETRAIN))
        assert.equal(0, status, text)
        local _, oks = text:gsub("ok %d of %d: %d+\n", "")
        assert.equal(n, oks, text)
    end

    it("are two that move and add tensors", function() check(2) end)
    it("are three", function() check(3) end)

    it("all end when one fails", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local script = "local w = te.distributed.world() if w.rank == 1 then error 'no further' end w:barrier()"
        local text, status = processes.run(2, ("'%s' -e \"%s\""):format(TETRAIN, script))
        assert.not_equal(0, status, text)
        assert.is_truthy(text:find("no further", 1, true), text)
    end)

    it("are told when one has ended well, in every group", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local script = [[
local w = te.distributed.world()
local pair, rest = w:split(math.min(w.rank, 1), -w.rank), w:split(0)
if w.rank == 2 then os.exit(0) end
for i = 1, 2 do print(w.rank, pcall(pair.barrier, pair)) end
for i = 1, 2 do print(w.rank, select(2, pcall(w.barrier, w))) end]]
        local text, status = processes.run(3, ("'%s' -e \"%s\""):format(TETRAIN, script))
        assert.equal(0, status, text)
        for line, count in pairs { ["te%.distributed: barrier: rank 2 has ended\n"] = 4, ["0\ttrue\n"] = 2,
            ["1\tfalse\t[^\n]*te%.distributed: barrier: rank 0 has ended\n"] = 2 } do
            assert.equal(count, select(2, text:gsub(line, "")), text)
        end
    end)

    it("are one where the starter says so, and open nothing", function()
        for _, words in ipairs { "OMPI_COMM_WORLD_SIZE=1", "PMI_SIZE=1", "PMIX_RANK=0 SLURM_STEP_NUM_TASKS=1" } do
            local text, status = shell.capture(("%s TETRAIN_MPI_MODULE=/nowhere/at/all.so "
                .. "'%s' -e 'print(te.distributed.launched(), te.distributed.world())'"):format(words, TETRAIN))
            assert.equal(0, status, text)
            assert.equal("false\tGroup(rank 0 of 1)\n", text)
        end
    end)

    it("are an error where nobody can say how many", function()
        for _, size in ipairs { "abc", "1x", "0", "-2" } do
            local text, status = shell.capture(("OMPI_COMM_WORLD_SIZE=%s TETRAIN_MPI_MODULE=/nowhere/at/all.so "
                .. "'%s' -e 'te.distributed.world()'"):format(size, TETRAIN))
            assert.equal(1, status, text)
            assert.is_truthy(text:find(('"%s" processes were started together, says'):format(size), 1, true), text)
        end
    end)

    it("are an error where they do not find each other", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        local text, status = shell.capture(("PMI_SIZE=2 PMI_RANK=1 ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 "
            .. "timeout 60 '%s' -e 'te.distributed.world()'"):format(TETRAIN))
        assert.equal(1, status, text)
        assert.is_truthy(text:find("2 processes were started together, but only 1 of them find each other", 1, true),
            text)
    end)

    it("say that the module cannot be opened", function()
        local text, status = shell.capture(("OMPI_COMM_WORLD_SIZE=2 TETRAIN_MPI_MODULE=/nowhere/at/all.so "
            .. "'%s' -e 'te.distributed.world()'"):format(TETRAIN))
        assert.equal(1, status, text)
        assert.is_truthy(text:find("the MPI module cannot be opened; tried /nowhere/at/all.so", 1, true), text)
    end)
end)

describe("a process started alone", function()
    local world = te.distributed.world()

    it("is a group of one", function()
        assert.equal("Group(rank 0 of 1)", tostring(world))
        assert.same({ 0, 1, 0, 1 }, { world.rank, world.size, world.local_rank, world.local_size })
        assert.is_false(te.distributed.launched())
        assert.equal(world, te.distributed.world())
        assert.is_true(te.distributed.is_group(world))
        assert.is_false(te.distributed.is_group {})
    end)

    it("gets back what it gives", function()
        local x = te.tensor { { 1, 2 }, { 3, 4 } }
        for _, name in ipairs { "all_reduce", "all_gather", "reduce_scatter", "all_to_all" } do
            local y = world[name](world, x)
            assert.same(x:totable(), y:totable(), name)
            assert.not_equal(x, y)
        end
        for _, name in ipairs { "all_reduce_", "broadcast_" } do assert.equal(x, world[name](world, x)) end
        assert.same({ { 1, 2 }, { 3, 4 } }, world:exchange(x, 0, 0):totable())
        assert.same({ { 0, 0 }, { 0, 0 } }, world:exchange(x, -1, -1):totable())
        assert.equal(1, world:split(3).size)
        assert.is_nil(world:split(-1))
        world:barrier()
    end)

    it("refuses what no group can do", function()
        local x = te.ones({ 2 }, { requires_grad = true })
        assert.error_matches(function() world:all_reduce(x) end, "te%.distributed: all_reduce: x requires a gradient")
        assert.error_matches(function() world:all_gather(te.full({}, 1)) end, "all_gather: x has no first dimension")
        assert.error_matches(function() world:broadcast_(te.ones { 1 }, 1) end, "root is 1 in a group of 1")
        assert.error_matches(function() world:all_reduce(te.ones { 1 }, "product") end,
            'te%.distributed: all_reduce: op: expected sum, average, max or min, got string "product"')
        assert.error_matches(function() world:reduce_scatter(te.ones { 1 }, "mx") end, 'did you mean "max"%?')
        assert.error_matches(function() world:broadcast_(te.ones { 1 }, 2 ^ 32) end, "rank is 4294967296")
        assert.error_matches(function() world:split(2 ^ 32 - 1) end, "color is 4294967295")
        assert.error_matches(function() world:all_reduce "x" end, "te%.distributed: all_reduce: x: expected a tensor")
        assert.error_matches(function() te._core.comm_barrier(x) end, "expected a group of processes")
        assert.error_matches(function() return te.distributed.wordl end, "te%.distributed has no \"wordl\"")
    end)
end)
