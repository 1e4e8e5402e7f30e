--- Layers that are split between processes, and what goes between them. What the processes look at is in
--- spec/support/parallel_checks.lua.

local te = require "te"
local processes = require "spec.support.processes"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

describe("layers split between processes", function()
    it("are the whole layers of one process", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        for _, n in ipairs { 2, 3 } do
            processes.assert_checks(n, "parallel")
        end
    end)

    it("are whole in a group of one", function()
        local world = te.distributed.world()
        local options = { tensor_parallel_mode = "column", tensor_parallel_group = world, sequence_parallel = true }
        te.manual_seed(1)
        local split = te.Linear(3, 4, options)
        te.manual_seed(1)
        local whole = te.Linear(3, 4)
        assert.same(whole.weight:totable(), split.weight:totable())
        assert.equal(tostring(whole), tostring(split))
        assert.same({ 5, 4 }, te.Sequential(split)(te.ones { 5, 3 }).shape)
        assert.same({ 4 }, te.Bias(4, { tensor_parallel = true }).bias.shape)
    end)

    it("refuse what they cannot be", function()
        local function refused(message, ...) assert.error_matches(message, ...) end
        refused(function() te.Linear(3, 4, { tensor_parallel_mode = "rows" }) end, "tensor_parallel_mode")
        refused(function() te.Linear(3, 4, { tensor_parallel_mode = "row", tensor_parallel_group = 3 }) end,
            "te%.Linear: option tensor_parallel_group: expected a group of te%.distributed, got 3")
        refused(function() te.Linear(3, 4, { sequence_parallel = true }) end, "needs tensor_parallel_mode")
        refused(function() te.Bias(4, { tensor_parallel_group = 3 }) end,
            "te%.Bias: option tensor_parallel_group: needs tensor_parallel$")
        refused(function() te.autocast({ group = {} }, print) end, "expected a group of te%.distributed")
    end)
end)
