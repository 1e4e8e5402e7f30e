--- Optimizers that are sharded between processes. What the processes look at is in spec/support/sharded_checks.lua,
--- sharded_parts_checks.lua and sharded_between_checks.lua.

local te = require "te"
local processes = require "spec.support.processes"

describe("an optimizer sharded between processes", function()
    local many = te.get_default_device() == "cpu" and { 2, 3 } or { 2 } -- the simulated device is slow
    for _, n in ipairs(many) do
        it("makes the steps of a whole one, bit for bit, in " .. n, function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "sharded")
        end)
    end

    for _, n in ipairs { 2, 4 } do
        it("takes parts of layers and what comes later, and refuses the rest, in " .. n, function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "sharded_parts")
        end)
    end

    for _, n in ipairs(many) do
        it("goes on after what comes between its calls, in " .. n, function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "sharded_between")
        end)
    end

    it("is whole in a group of one", function()
        local layer = te.Linear(3, 2)
        local optimizer = te.optim.AdamW(layer)
        assert.equal(optimizer, te.distributed.shard_optimizer(optimizer))
        assert.is_nil(optimizer.sharding)
        assert.same(layer:parameters(), optimizer.order)
        for _, wrong in ipairs { 3, layer, te.optim } do
            assert.error_matches(function() te.distributed.shard_optimizer(wrong) end, "expected an optimizer, got ")
        end
        assert.error_matches(function() te.distributed.shard_optimizer(optimizer, {}) end, "expected a group")
        assert.error_matches(function() te.distributed.shard_optimizer(optimizer, nil, 1) end, "shard_optimizer")
    end)
end)
