--- Experts of te.MoE that are split between processes. What the processes look at is in
--- spec/support/experts_checks.lua.

local te = require "te"
local processes = require "spec.support.processes"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

describe("experts split between processes", function()
    for _, n in ipairs { 2, 3, 4 } do
        it("are those of one process, in " .. n, function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "experts")
        end)
    end

    it("are all in a group of one", function()
        local world = te.distributed.world()
        te.manual_seed(1)
        local split = te.MoE(4, 6, 3, { group = world })
        te.manual_seed(1)
        local whole = te.MoE(4, 6, 3)
        local x = te.randn { 5, 4 }
        assert.same(whole(x):totable(), split(x):totable())
        assert.equal(tostring(whole), tostring(split))
        assert.error_matches(function() te.MoE(4, 6, 3, { group = {} }) end, "expected a group of te%.distributed")
    end)
end)
