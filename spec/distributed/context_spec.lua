--- Attention whose sequence is cut between processes. What the processes look at is in spec/support/context_checks.lua,
--- and for keys and values that go round in ring_checks.lua.

local te = require "te"
local ring = require "te.ops.context_ring"
local processes = require "spec.support.processes"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

describe("a sequence cut between processes", function()
    for _, n in ipairs { 2, 4 } do
        it(("is attended to as by one, between %d"):format(n), function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "context")
        end)
    end

    for n = 2, 4 do
        it(("goes round as keys and values, of %d"):format(n), function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "ring")
        end)
    end

    -- Which keys every query of `rank` sees of those of all ranks, by blocks; and how many scores the blocks hold.
    local function seen_in_blocks(rank, size, n, left, right)
        local seen, scores = {}, {}
        for from = 0, size - 1 do
            scores[from] = 0
            for _, b in ipairs(ring.blocks(rank, from, size, 2 * n, 2 * n, left, right)) do
                scores[from] = scores[from] + b.queries * b.keys
                for i = 0, b.queries - 1 do
                    for j = 0, b.keys - 1 do
                        local visible = (b.window_left < 0 or j >= i - b.window_left)
                            and (b.window_right < 0 or j <= i + b.window_right)
                        local query, key = b.first_query + i, b.first_key + j
                        local place = query * 2 * n * size + from * 2 * n + key
                        assert.is_nil(visible and seen[place] or nil) -- by one block alone
                        if visible then seen[place] = true end
                    end
                end
            end
        end
        return seen, scores
    end

    it("is seen as in one process, whatever the window", function()
        local n = 3
        local function token(rank, size, i) return i < n and rank * n + i or (2 * size - 2 - rank) * n + i end
        for size = 2, 3 do
            for left = -1, 2 * n * size do
                for _, right in ipairs { -1, 0, 1, n - 1, n, n + 1, 2 * n + 1 } do
                    for rank = 0, size - 1 do
                        local seen = seen_in_blocks(rank, size, n, left, right)
                        for i = 0, 2 * n - 1 do
                            for k = 0, 2 * n * size - 1 do
                                local ahead = token(math.floor(k / (2 * n)), size, k % (2 * n)) - token(rank, size, i)
                                local visible = (left < 0 or -ahead <= left) and (right < 0 or ahead <= right)
                                assert.equal(visible or nil, seen[i * 2 * n * size + k])
                            end
                        end
                    end
                end
            end
        end
    end)

    it("is half of the scores in every step of causal attention but the first, in every process", function()
        for size = 2, 5 do
            for rank = 0, size - 1 do
                local _, scores = seen_in_blocks(rank, size, 4, -1, 0)
                for from = 0, size - 1 do assert.equal(from == rank and 64 or 32, scores[from]) end
            end
        end
    end)

    it("is passed over where a window hides it", function()
        assert.same({}, ring.blocks(0, 2, 4, 8, 8, 3, 0)) -- chunks 0 and 7 and, of the other, 2 and 5
        local blocks = ring.blocks(0, 1, 4, 8, 8, 3, 0) -- 7 sees of 6 the last three tokens, with three of its own
        assert.same({ { first_query = 4, queries = 3, first_key = 5, keys = 3, window_left = 0, window_right = -1 } },
            blocks)
    end)

    it("goes round past those from whom a window hides it", function()
        local n = 4
        for size = 2, 7 do
            for left = -1, 2 * n * size, 3 do
                for _, right in ipairs { -1, 0, 2, n + 1 } do
                    local steps = {}
                    for step = 0, size - 1 do
                        local blocks = 0
                        for rank = 0, size - 1 do
                            blocks = blocks + #ring.blocks(rank, (rank - step) % size, size, 2 * n, 2 * n, left, right)
                        end
                        if blocks > 0 then steps[#steps + 1] = step end
                    end
                    assert.same(steps, ring.steps(size, 2 * n, left, right))
                end
            end
        end
        assert.same({ 0, 1, 7 }, ring.steps(8, 8, 3, 0)) -- of eight processes, neighbours alone
        assert.same({ 0, 1, 2, 3 }, ring.steps(4, 8, -1, 0))
    end)

    it("is whole in a group of one", function()
        local world = te.distributed.world()
        local function made(opts)
            te.manual_seed(1)
            return te.MultiHeadedSelfAttention(8, 2, opts)
        end
        local cut, whole = made { cp_group = world, cp_comm_type = "a2a", rope = true }, made { rope = true }
        local x = te.randn { 2, 5, 8 }
        assert.same(whole(x):totable(), cut(x):totable())
        assert.equal(tostring(whole), tostring(cut))
        assert.equal(tostring(te.Sequential(whole):explain(x)), tostring(te.Sequential(cut):explain(x)))
        assert.equal(cut, cut:set_context_parallel_group(world, "all_gather"))
        assert.is_nil(cut.cp_group)
        assert.equal(x, te.distributed.split_sequence(x))
        assert.equal(x, te.distributed.join_sequence(x, world, 3))
        assert.same({ 0, 1, 2 }, te.distributed.sequence_positions(3):totable())
        for _, kind in ipairs { "gpt", "llama" } do
            local config = { vocab_size = 5, block_size = 4, n_layer = 1, n_head = 1, n_embd = 8 }
            config.context_parallel = world
            local model = te.models[kind](config)
            assert.same({ 1, 5 }, model(te.zeros({ 1, 3 }, { dtype = "int64" })).shape)
            assert.is_nil(model.config.context_parallel)
        end
    end)

    it("refuses what it cannot be", function()
        local world, x = te.distributed.world(), te.ones { 2, 4 }
        local function refused(message, fn, ...)
            local args = { n = select("#", ...), ... }
            assert.error_matches(function() fn(unpack(args, 1, args.n)) end, message)
        end
        local Attention, model = te.MultiHeadedSelfAttention, { vocab_size = 5, n_layer = 1, n_head = 1, n_embd = 8 }
        refused("te%.MultiHeadedSelfAttention: cp_group: expected a group of te%.distributed, got 3", Attention, 8, 2,
            { cp_group = 3 })
        refused("cp_group: expected a group", te.DotProductAttention, { cp_group = {} })
        refused("cp_comm_type has no effect without cp_group", te.DotProductAttention, { cp_comm_type = "a2a+p2p" })
        refused("cp_group: cp_comm_type a2a%+p2p needs two groups of te%.distributed, { heads, ring }, got",
            te.DotProductAttention, { cp_group = world, cp_comm_type = "a2a+p2p" })
        refused("cp_group: expected a group", te.DotProductAttention, { cp_group = { world, world } })
        refused('expected one of all_gather, a2a, p2p, a2a%+p2p, got "ring"', Attention, 8, 2,
            { cp_comm_type = "ring" })
        refused("cp_comm_type: expected string", Attention, 8, 2, { cp_comm_type = 1 })
        refused("cp_comm_type has no effect without cp_group", Attention, 8, 2, { cp_comm_type = "a2a" })
        local module, set = Attention(8, 2), Attention.set_context_parallel_group
        refused("set_context_parallel_group: cp_group: expected a group", set, module, "x")
        refused("set_context_parallel_group: cp_comm_type: expected one of", set, module, world, {})
        model.context_parallel = "two"
        refused('te%.models%.gpt: context_parallel: expected a group of te%.distributed, got "two"', te.models.gpt,
            model)
        model.context_parallel, model.cp_comm_type = world, "a2a+p2p"
        refused("llama: context_parallel: cp_comm_type a2a%+p2p needs two groups", te.models.llama, model)
        model.context_parallel, model.cp_comm_type = nil, "a2a"
        refused("cp_comm_type has no effect without context_parallel", te.models.gpt, model)

        local D = te.distributed
        refused("te%.distributed%.split_sequence: x: expected a tensor, got 1", D.split_sequence, 1)
        refused("split_sequence: group: expected a group of te%.distributed, got 2", D.split_sequence, x, 2)
        refused("split_sequence: dim: x {2,4} has no dimension 3", D.split_sequence, x, world, 3)
        refused("join_sequence: dim: expected integer, at least 1, got 0", D.join_sequence, x, world, 0)
        refused("sequence_positions: n: expected positive integer, got 0", D.sequence_positions, 0)
        refused("sequence_positions: group", D.sequence_positions, 2, x)
        refused("sequence_positions: group", D.sequence_positions, 2, { world })
    end)
end)
