--- Models whose heads, MLPs and vocabulary are split between processes. What the processes look at is in
--- spec/support/tensor_checks.lua.

local te = require "te"
local processes = require "spec.support.processes"

local TETRAIN = os.getenv("TETRAIN") or "build/tetrain"

describe("a model split between processes", function()
    for _, n in ipairs { 2, 4 } do
        it("computes what one does, between " .. n, function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "tensor")
        end)
    end

    it("is whole in a group of one", function()
        local world = te.distributed.world()
        for _, kind in ipairs { "gpt", "llama" } do
            local config = { vocab_size = 7, block_size = 4, n_layer = 1, n_head = 1, n_embd = 8 }
            te.manual_seed(1)
            local whole = te.models[kind](config)
            config.tensor_parallel, config.sequence_parallel = world, true
            te.manual_seed(1)
            local split = te.models[kind](config)
            local ids = te.zeros({ 1, 3 }, { dtype = "int64" }) -- no multiple of anything
            assert.same(whole(ids):totable(), split(ids):totable())
            assert.equal(tostring(whole), tostring(split))
            assert.is_nil(split.tensor_parallel)
            assert.is_nil(split.config.tensor_parallel)
            assert.equal(split, split:set_sequence_parallel(false))
            assert.same(te.distributed.join_state(split), split:state_dict())
            assert.same(te.distributed.split_state(split, split:state_dict()), split:state_dict())
        end
        local norm = te.LayerNorm(4, { sequence_parallel = true, tensor_parallel_group = world })
        assert.is_nil(norm.sequence_group)
        assert.equal(tostring(te.MultiHeadedSelfAttention(4, 2)),
            tostring(te.MultiHeadedSelfAttention(4, 2, { tp_group = world, sequence_parallel = true })))
    end)

    it("refuses what it cannot be", function()
        local world = te.distributed.world()
        local config = { vocab_size = 7, n_layer = 1, n_head = 1, n_embd = 8 }
        local function refused(message, more)
            local own = {}
            for _, from in ipairs { config, more } do
                for name, value in pairs(from) do own[name] = value end
            end
            assert.error_matches(function() te.models.gpt(own) end, message)
        end
        refused("te%.models%.gpt: tensor_parallel: expected a group of te%.distributed, got 2", { tensor_parallel = 2 })
        refused("te%.models%.gpt: sequence_parallel has no effect without tensor_parallel",
            { sequence_parallel = true })
        refused("sequence_parallel: expected boolean, got 1", { tensor_parallel = world, sequence_parallel = 1 })
        local Attention, model = te.MultiHeadedSelfAttention, te.models.gpt(config)
        local function fails(message, fn, ...)
            local arguments = { ... }
            assert.error_matches(function() fn(unpack(arguments)) end, message)
        end
        fails("te%.MultiHeadedSelfAttention: tp_group: expected a group of te%.distributed, got 3", Attention, 8, 2,
            { tp_group = 3 })
        fails("te%.MultiHeadedSelfAttention: sequence_parallel has no effect without tp_group", Attention, 8, 2,
            { sequence_parallel = true })
        fails("te%.LayerNorm: option tensor_parallel_group: needs sequence_parallel", te.LayerNorm, 4,
            { tensor_parallel_group = world })
        fails("GPT:set_sequence_parallel: on: the model is not split by tensor_parallel", model.set_sequence_parallel,
            model, true)
        fails("GPT:set_sequence_parallel: on: expected boolean, got 1", model.set_sequence_parallel, model, 1)
        fails('te%.models%.from_checkpoint: unknown option "tensor"', te.models.from_checkpoint, {}, { tensor = world })
        fails("te%.Linear: option sequence_dim: needs tensor_parallel_mode", te.Linear, 4, 4, { sequence_dim = 2 })
    end)
end)
