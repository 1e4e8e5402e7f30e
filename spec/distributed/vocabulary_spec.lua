--- A vocabulary that is split between processes: table, head and loss. What the processes look at is in
--- spec/support/vocabulary_checks.lua.

local te = require "te"
local processes = require "spec.support.processes"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

describe("a vocabulary split between processes", function()
    for _, n in ipairs { 2, 3, 4 } do
        it("is the whole one of one process, in " .. n, function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "vocabulary")
        end)
    end

    it("is whole in a group of one", function()
        local world = te.distributed.world()
        te.manual_seed(1)
        local split = te.Embedding(5, 3, { tensor_parallel_mode = "vocab", tensor_parallel_group = world })
        te.manual_seed(1)
        local whole = te.Embedding(5, 3)
        assert.same(whole.weight:totable(), split.weight:totable())
        assert.equal(tostring(whole), tostring(split))
    end)
end)

describe("te.parallel_cross_entropy in a group of one", function()
    local logits = te.tensor { { 1, 2, 3 }, { 0, -1, 2 } }
    local targets = te.tensor({ 2, -100 }, { dtype = "int64" })

    it("is te.cross_entropy", function()
        for _, opts in ipairs { {}, { reduction = "sum" }, { reduction = "none", label_smoothing = 0.1 },
            { ignore_index = 2 } } do
            local ids = opts.ignore_index and te.tensor({ 2, 0 }, { dtype = "int64" }) or targets
            assert.same(te.cross_entropy(logits, ids, opts):totable(),
                te.parallel_cross_entropy(logits, ids, opts):totable())
        end
        local world = te.distributed.world()
        assert.equal(te.cross_entropy(logits, targets):item(),
            te.parallel_cross_entropy(logits, targets, { group = world, vocab_start = 0 }):item())
    end)

    it("refuses what it cannot be", function()
        local function refused(message, ...)
            local arguments = { ... }
            assert.error_matches(function() te.parallel_cross_entropy(unpack(arguments)) end, message)
        end
        refused("option vocab_start: 3, but no other process has the classes before it", logits, targets,
            { vocab_start = 3 })
        refused("option vocab_start: expected integer, at least 0, got %-1", logits, targets, { vocab_start = -1 })
        refused("option group: expected a group of te%.distributed, got 3", logits, targets, { group = 3 })
        refused("logits: expected a tensor, got table", { 1 }, targets)
        if logits.device ~= "cpu" then return end -- a device says it later
        refused("target 3 at position 1 is not a class from 0 to 2", logits, te.tensor({ 3, 0 }, { dtype = "int64" }))
    end)
end)
