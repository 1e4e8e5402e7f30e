--- Models whose blocks are divided between processes. What the processes look at is in
--- spec/support/pipeline_checks.lua and pipeline_copies_checks.lua.

local te = require "te"
local processes = require "spec.support.processes"

local CONFIG = { vocab_size = 7, block_size = 4, n_layer = 1, n_head = 1, n_embd = 8 }

describe("a model divided between processes", function()
    for _, n in ipairs { 2, 3, 4 } do
        it("computes what one does, between " .. n, function()
            if not processes.available() then pending "mpirun cannot start anything" end
            processes.assert_checks(n, "pipeline")
        end)
    end

    it("is updated by a sharded optimizer, each stage by the processes that have it", function()
        if not processes.available() then pending "mpirun cannot start anything" end
        processes.assert_checks(4, "pipeline_copies")
    end)

    it("is whole in a group of one, where a step adds up what losses give", function()
        local ids = te.zeros({ 2, 3 }, { dtype = "int64" })
        local models = {}
        for i, group in ipairs { false, te.distributed.world() } do
            te.manual_seed(1)
            local config = { pipeline_parallel = group or nil }
            for name, value in pairs(CONFIG) do config[name] = value end
            models[i] = te.models.gpt(config)
        end
        local one, own = unpack(models)
        assert.equal(tostring(one), tostring(own))
        assert.is_nil(own.stage)
        assert.is_nil(own.config.pipeline_parallel)
        local _, want = one(ids, ids)
        want:backward()
        local mean, losses = te.distributed.pipeline_step(own, { { ids, ids }, { ids, ids } })
        assert.same({ want:item(), want:item(), want:item() }, { mean, unpack(losses) })
        local function is_times(factor) -- up to the rounding of sums
            local grad = one.wte.weight.grad * factor
            assert.is_true(te.max(te.abs(own.wte.weight.grad - grad)):item() < 1e-6 * te.max(te.abs(grad)):item())
        end
        is_times(1)
        te.distributed.pipeline_step(own, { { ids, ids } }, { scale = 3 })
        is_times(4)
        assert.same(te.distributed.join_state(own), own:state_dict())
    end)

    it("refuses what it cannot be, and steps of nothing", function()
        local step, model = te.distributed.pipeline_step, te.models.gpt(CONFIG)
        local ids = te.zeros({ 2, 3 }, { dtype = "int64" })
        local function fails(message, fn, ...)
            local arguments = { ... }
            assert.error_matches(function() fn(unpack(arguments)) end, message)
        end
        fails("te%.models%.gpt: pipeline_parallel: expected a group of te%.distributed, got 2", te.models.gpt,
            { vocab_size = 7, pipeline_parallel = 2 })
        fails("te%.distributed%.pipeline_step: model: expected a model of te%.models, got Linear", step,
            te.Linear(2, 2), {})
        fails("pipeline_step: batches: there is none", step, model, {})
        fails("pipeline_step: batches%[1%]: expected table, got", step, model, { ids })
        fails("pipeline_step: batches%[2%]: expected { ids, targets }, got { 1, 2 }", step, model,
            { { ids, ids }, { 1, 2 } })
        fails("pipeline_step: batches%[2%]: ids are {3,2}, those of the first are {2,3}", step, model,
            { { ids, ids }, { ids:transpose(1, 2), ids } })
        fails("GPT: targets: expected the shape of ids, {2,3}, got {3,2}", step, model,
            { { ids, ids:transpose(1, 2) } })
        fails("pipeline_step: within te%.no_grad there is nothing to train", te.no_grad, step, model, { { ids, ids } })
        fails('pipeline_step: unknown option "scales"', step, model, { { ids, ids } }, { scales = 1 })
    end)
end)
