local te = require "te"
local checkpoint = te.train.checkpoint

describe("te.train.checkpoint", function()
    local folder
    before_each(function()
        folder = os.tmpname()
        os.remove(folder)
        te._core.mkdir(folder)
    end)
    after_each(function() os.execute(("rm -rf '%s'"):format(folder)) end)

    local function make(seed)
        te.manual_seed(seed)
        local model = te.models.gpt { vocab_size = 7, block_size = 8, n_layer = 1, n_head = 2, n_embd = 8,
            dropout = 0.1 }
        return model, te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-2 })
    end

    local function train(model, optimizer, steps)
        local x = te.tensor({ { 1, 2, 3, 4 } }, { dtype = "int32" })
        local losses = {}
        for i = 1, steps do
            local _, loss = model(x, x)
            loss:backward()
            optimizer:step()
            optimizer:zero_grad()
            losses[i] = loss:item()
        end
        return losses
    end

    local function save(model, optimizer, step, keep)
        return checkpoint.save { folder = folder, step = step, model = model, optimizer = optimizer,
            metadata = { model:texts(), { tokenizer = "byte" } }, keep = keep or 2 }
    end

    it("goes on bit for bit", function()
        local model, optimizer = make(1)
        train(model, optimizer, 3)
        save(model, optimizer, 3)
        local expected = train(model, optimizer, 4)

        make(99)
        local saved = checkpoint.load(checkpoint.latest(folder))
        assert.equal(3, saved.step)
        assert.equal("byte", saved.metadata.tokenizer)
        local again = te.models.gpt.from_checkpoint(saved)
        local optimizer2 = te.optim.AdamW(again:parameter_groups(0.1), { lr = 1e-2 })
        checkpoint.restore_training(saved, again, optimizer2)
        assert.same(expected, train(again, optimizer2, 4))
        for name, tensor in pairs(model:state_dict()) do
            assert.same(tensor:totable(), again:state_dict()[name]:totable())
        end
    end)

    it("counts steps by the names of parameters, and reads the counts of before, which had an order", function()
        local function layer() return te.Linear(2, 2) end
        local model, path = layer(), checkpoint.path(folder, 5)
        local optimizer = te.optim.AdamW({ model.weight, model.bias }, { lr = 0.1 })
        for i = 1, 5 do
            model.weight.grad = te.ones { 2, 2 }
            model.bias.grad = i < 3 and te.ones { 2 } or nil
            optimizer:step()
        end
        assert.same({ 5, 2 }, optimizer:step_counts())
        checkpoint.save { folder = folder, step = 5, model = model, optimizer = optimizer }
        local other = layer()
        local turned = te.optim.AdamW({ { params = { other.bias } }, { params = { other.weight } } }, {})
        checkpoint.restore_training(checkpoint.load(path), other, turned)
        assert.same({ 2, 5 }, turned:step_counts())
        assert.same(optimizer:state_dict().state[1].exp_avg:totable(), turned:state_dict().state[2].exp_avg:totable())

        local tensors, metadata = te.load(path)
        metadata["optimizer.counts"], metadata["optimizer.steps"] = nil, "5 2"
        te.save(path, tensors, metadata)
        local same = te.optim.AdamW({ other.weight, other.bias }, {})
        checkpoint.restore_training(checkpoint.load(path), other, same)
        assert.same({ 5, 2 }, same:step_counts())
        metadata["optimizer.counts"] = "5 weight\n2 beta"
        te.save(path, tensors, metadata)
        assert.error_matches(function() checkpoint.restore_training(checkpoint.load(path), other, same) end,
            "parameter 2 of the optimizer, bias, was not optimized", 1, true)
        assert.error_matches(function()
            checkpoint.save { folder = folder, step = 6, model = model, optimizer = optimizer,
                metadata = { { step = "9" } } }
        end, 'option metadata: "step" is the checkpoint\'s own name', 1, true)
    end)

    it("refuses more layers than there are tensors", function()
        local model, optimizer = make(1)
        local path = save(model, optimizer, 1)
        local tensors, metadata = te.load(path)
        metadata["model.n_layer"] = "1e9"
        te.save(path, tensors, metadata)
        assert.error_matches(function() te.models.gpt.from_checkpoint(checkpoint.load(path)) end,
            "model.n_layer: 1000000000 layers, but there are ", 1, true)
    end)

    it("keeps the newest", function()
        local model, optimizer = make(1)
        for step = 1, 5 do save(model, optimizer, step * 10, 2) end
        assert.same({ 40, 50 }, checkpoint.steps(folder))
        assert.is_truthy(te._core.stat(save(model, optimizer, 20, 2))) -- a lower step, and the one that was written
        assert.same({ 20, 50 }, checkpoint.steps(folder))
    end)

    it("takes no file for a checkpoint whose name is another one's", function()
        local model, optimizer = make(1)
        save(model, optimizer, 3)
        assert(os.rename(checkpoint.path(folder, 3), folder .. "/checkpoint-3.safetensors"))
        assert.same({}, checkpoint.steps(folder))
        assert.is_nil(checkpoint.latest(folder))
    end)

    it("removes nothing for a step or a number of checkpoints that there cannot be", function()
        local model, optimizer = make(1)
        save(model, optimizer, 3)
        local function refuses(message, step, keep)
            assert.error_matches(function() save(model, optimizer, step, keep) end, message, 1, true)
            assert.same({ 3 }, checkpoint.steps(folder))
        end
        refuses("te.train.checkpoint.save: option step: expected integer from 0 to 1099511627776, got 3.5", 3.5, 1)
        refuses("te.train.checkpoint.save: option step: expected integer from 0 to 1099511627776, got -1", -1, 1)
        refuses("te.train.checkpoint.save: option keep: expected positive integer, got 0", 4, 0)
        refuses("te.train.checkpoint.save: option step is needed", nil, 1)
        for message, opts in pairs { ["option model: expected a module, got 1"] = { model = 1 },
            ["option metadata: a list has no entry"] = { metadata = { a = "b" } },
            ["option metadata[1]: expected table, got 1"] = { metadata = { 1 } } } do
            local all = { folder = folder, step = 4, model = model, optimizer = optimizer }
            for name, value in pairs(opts) do all[name] = value end
            assert.error_matches(function() checkpoint.save(all) end, message, 1, true)
        end
    end)

    it("writes the optimizer's own tensors, not copies", function()
        local model, optimizer = make(1)
        train(model, optimizer, 1)
        function optimizer.state_dict() error("a copy") end
        save(model, optimizer, 1)
        local saved, p = checkpoint.load(checkpoint.latest(folder)), optimizer.order[1]
        for name, parameter in model:named_parameters() do
            if parameter == p then
                assert.same(optimizer.state[p].exp_avg:totable(), saved.tensors["optimizer.exp_avg." .. name]:totable())
            end
        end
    end)

    it("refuses parameters that are none of the model's", function()
        local model = te.Linear(2, 2)
        local optimizer = te.optim.AdamW({ model.weight, te.ones({ 3, 4 }, { requires_grad = true }) })
        assert.error_matches(function()
            checkpoint.save { folder = folder, step = 9, model = model, optimizer = optimizer, metadata = {}, keep = 1 }
        end, "te.train.checkpoint.save: parameter 2 of the optimizer, of shape {3,4}, is none of the model's", 1, true)
        assert.same({}, checkpoint.steps(folder))
    end)

    it("is not another optimizer's", function()
        local model, optimizer = make(1)
        train(model, optimizer, 1)
        save(model, optimizer, 1)
        local saved = checkpoint.load(checkpoint.latest(folder))
        local other = te.optim.SGD(model:parameter_groups(0.1), { lr = 1e-2 })
        assert.error_matches(function() checkpoint.restore_training(saved, model, other) end,
            "te.optim.SGD:load_state_dict: a state of te.optim.AdamW", 1, true)
        saved.metadata["optimizer.name"] = nil -- as files of before
        checkpoint.restore_training(saved, model, optimizer)
    end)

    it("holds what was written to a weight after the last step", function()
        local function start()
            te.manual_seed(1)
            local model = te.Linear(2, 2, { params_dtype = "bfloat16" })
            return model, te.optim.SGD(model, { lr = 0, master_weights = true })
        end
        local function step(model, optimizer)
            model(te.ones({ 1, 2 }, { dtype = "bfloat16" })):sum():backward()
            optimizer:step()
        end
        local model, optimizer = start()
        step(model, optimizer)
        te.no_grad(function() model.weight:fill_(5) end)
        checkpoint.save { folder = folder, step = 1, model = model, optimizer = optimizer, metadata = {}, keep = 1 }
        local saved, other, fresh = checkpoint.load(checkpoint.latest(folder)), start()
        checkpoint.restore_model(saved, other)
        checkpoint.restore_training(saved, other, fresh)
        step(other, fresh)
        assert.same({ { 5, 5 }, { 5, 5 } }, other.weight:totable())
        assert.same({ { 5, 5 }, { 5, 5 } }, saved.tensors["optimizer.master.weight"]:totable())
    end)

    it("refuses states of quantized weights without the masters", function()
        local function start()
            return te.quantized_model_init({ recipe = te.recipe.MXFP8BlockScaling {} }, te.Linear, 32, 32)
        end
        local model = start()
        local optimizer = te.optim.AdamW(model)
        model(te.ones { 1, 32 }):sum():backward()
        optimizer:step()
        checkpoint.save { folder = folder, step = 1, model = model, optimizer = optimizer, metadata = {}, keep = 1 }
        local saved = checkpoint.load(checkpoint.latest(folder))
        checkpoint.restore_training(saved, model, optimizer)
        local rng = saved.metadata.rng
        saved.metadata.rng = nil
        assert.error_matches(function() checkpoint.restore_training(saved, model, optimizer) end,
            saved.path .. ": rng is missing", 1, true)
        saved.metadata.rng = rng
        saved.tensors["optimizer.master.weight"] = nil
        assert.error_matches(function() checkpoint.restore_training(saved, model, optimizer) end,
            saved.path .. ": optimizer.master.weight is missing", 1, true)
    end)

    it("sets an earlier run aside", function()
        local model, optimizer = make(1)
        save(model, optimizer, 10)
        assert.equal(folder .. "/previous", checkpoint.set_aside(folder))
        assert.same({}, checkpoint.steps(folder))
        assert.same({ 10 }, checkpoint.steps(folder .. "/previous"))
        assert.is_nil(checkpoint.set_aside(folder))
        for n, step in ipairs { 5, 7 } do -- nothing that is set aside is lost
            save(model, optimizer, step)
            assert.equal(("%s/previous-%d"):format(folder, n + 1), checkpoint.set_aside(folder))
            assert.same({ step }, checkpoint.steps(("%s/previous-%d"):format(folder, n + 1)))
        end
        assert.same({ 10 }, checkpoint.steps(folder .. "/previous"))
        assert.is_nil(checkpoint.latest(folder))
        assert.same({}, checkpoint.steps(folder .. "/nothing"))
    end)

    it("sets the metrics of a run aside that stopped before it saved", function()
        local function write(text)
            local file = assert(io.open(folder .. "/metrics.jsonl", "w"))
            file:write(text)
            file:close()
        end
        local function read(name)
            local file = assert(io.open(("%s/%s/metrics.jsonl"):format(folder, name)))
            local text = file:read "*a"
            file:close()
            return text
        end
        write ""
        assert.is_nil(checkpoint.set_aside(folder))
        for n, name in ipairs { "previous", "previous-2" } do
            write(("{\"step\":%d}\n"):format(n))
            assert.equal(("%s/%s"):format(folder, name), checkpoint.set_aside(folder))
        end
        assert.equal('{"step":1}\n', read "previous")
        assert.equal('{"step":2}\n', read "previous-2")
        assert.is_nil(checkpoint.set_aside(folder))
    end)

    it("removes what a killed run was writing, and nothing else", function()
        local run = folder .. "/claimed"
        te._core.mkdir(run)
        local names = { ".checkpoint-00000003.safetensors.61f187a30d082ffb.tmp", "checkpoint-00000002.safetensors",
            "notes.tmp" }
        for _, name in ipairs(names) do io.open(run .. "/" .. name, "w"):close() end
        checkpoint.claim(run)
        assert.same({ "checkpoint-00000002.safetensors", "notes.tmp" }, te._core.list_dir(run))
    end)

    it("refuses damaged and foreign files", function()
        local model, optimizer = make(1)
        local path = save(model, optimizer, 10)
        local file = io.open(path, "rb")
        local bytes = file:read("*a")
        file:close()
        for _, length in ipairs { 0, 7, 100, #bytes - 1 } do
            file = io.open(path, "wb")
            file:write(bytes:sub(1, length))
            file:close()
            assert.has_error(function() checkpoint.load(path) end)
        end
        local older = save(model, optimizer, 7)
        assert.error_matches(function() checkpoint.load(path) end,
            ("; without this file %s is the newest"):format(older), 1, true)
        local load = te.load
        te.load = function() error("x.lua:1: te.load: out of memory: 8 bytes asked on cpu", 0) end
        local _, problem = pcall(checkpoint.load, path)
        te.load = load
        assert.equal(path .. ": out of memory: 8 bytes asked on cpu", problem)
        os.remove(older)
        te.save(path, { a = te.ones({ 1 }) })
        assert.error_matches(function() checkpoint.load(path) end, "not a training checkpoint")
    end)
end)
