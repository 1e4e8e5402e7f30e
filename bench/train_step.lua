-- One training step of a GPT or a Llama, timed: forward, loss, backward, clipping to norm 1, AdamW, zero_grad.
--
--     tetrain bench/train_step.lua --config=gpt2_64 --dtype=bf16 --threads=2 --runs 9 --json
--
-- bench/peers/train_step.py measures the same step of the same model in PyTorch by the same rules. Tokens are random;
-- what they are does not change the work. bf16 keeps float32 weights, gradients and optimizer state. loss_5 is the loss
-- of the fifth step, by which both can be compared.

local te = require "te"
local folder = arg[0]:match("^(.*/)") or "./"
local measure, models = dofile(folder .. "measure.lua"), dofile(folder .. "models.lua")
local clock = te._core.clock

local command_line = te.train.command_line {
    script = "train_step.lua",
    about = "Times one training step of a GPT or a Llama on random tokens.",
    { "config", "string", "char", choices = models.steps, help = "size of the model" },
    { "dtype", "string", "fp32", choices = { "fp32", "bf16" }, help = "of the computation; weights stay float32" },
    { "threads", "integer", 2, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    { "runs", "integer", 9, min = 2, help = "fewest steps timed" },
    { "seconds", "number", 2, min = 0, max = 3600, help = "shortest time measured; short steps run more often" },
    { "recompute-blocks", "boolean", false, help = "backward computes each block again" },
    { "start", "string", help = "file for the weights and tokens, so that the peer can start from the same" },
    { "json", "boolean", false, help = "one JSON object instead of text" },
    { "profile", "boolean", false, help = "the parts of the step too" },
}

local function build_step(o)
    local _, _, _, batch, sequence, vocabulary = unpack(models.configs[o.config])
    te.manual_seed(1)
    local model = models.build(o.config)
    model:set_recompute_blocks(o.recompute_blocks)
    local parameters = model:parameters()
    local optimizer = te.optim.AdamW(model:parameter_groups(0.1), { lr = 1e-3, betas = { 0.9, 0.99 }, eps = 1e-8 })
    local ids = te.randint(0, vocabulary - 1, { batch, sequence }, { dtype = "int32" })
    local targets = te.randint(0, vocabulary - 1, { batch, sequence }, { dtype = "int32" })
    local autocast = { dtype = o.dtype == "bf16" and "bfloat16" or "float32", enabled = o.dtype == "bf16" }

    if o.start then models.save_start(o.start, model, ids, targets) end

    local bench = { parameters = model:num_parameters(), tokens = batch * sequence, losses = {}, kept = 0 }
    function bench.step()
        local held, start = te.memory_stats().current, clock()
        local loss = te.autocast(autocast, function()
            local logits, loss = model(ids, targets)
            logits:release()
            return loss
        end)
        table.insert(bench.losses, loss:item())
        local forward = clock()
        bench.kept = math.max(bench.kept, te.memory_stats().current - held) -- less where garbage went meanwhile
        loss:backward()
        local backward = clock()
        local norm = te.optim.grad_norm(parameters)
        optimizer:step { grad_scale = norm > 1 and 1 / norm or 1 }
        optimizer:zero_grad()
        return { forward = forward - start, backward = backward - forward, optimizer = clock() - backward }
    end
    return bench
end

local function report(o, bench, times)
    local parts, memory, mib = times.parts, te.memory_stats(), 1024 * 1024
    return {
        "system", "tetrain", "config", o.config, "dtype", o.dtype, "threads", te.get_num_threads(),
        "parameters", bench.parameters, "steps", times.runs,
        "ms", times.median * 1e3, "ms_min", times.min * 1e3, "ms_max", times.max * 1e3, "cpu_ms", times.cpu * 1e3,
        "forward_ms", parts.forward * 1e3, "backward_ms", parts.backward * 1e3, "optimizer_ms", parts.optimizer * 1e3,
        "tokens_per_s", bench.tokens / times.median, "loss_5", bench.losses[5],
        "peak_rss_mib", te._core.peak_rss() / mib, "peak_tensors_mib", memory.peak / mib,
        "reserved_mib", memory.reserved / mib, "kept_mib", bench.kept / mib,
    }
end

local function print_text(o, bench, times)
    print(("%s %s: %.2f ms a step (%.2f to %.2f, %d steps), %.0f tokens/s, %.0f MiB, of them %.0f kept for backward")
        :format(o.config, o.dtype, times.median * 1e3, times.min * 1e3, times.max * 1e3, times.runs,
            bench.tokens / times.median, te._core.peak_rss() / 1024 / 1024, bench.kept / 1024 / 1024))
    if not o.profile then return end
    for _, name in ipairs { "forward", "backward", "optimizer" } do
        local seconds = times.parts[name]
        print(("  %-10s %8.2f ms  %3.0f%%"):format(name, seconds * 1e3, 100 * seconds / times.median))
    end
end

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    local bench = build_step(o)
    local times = measure.steps(bench.step, o.runs, o.seconds)
    local loss = bench.losses[#bench.losses]
    if loss - loss ~= 0 then error(("the loss is not finite: %g"):format(loss)) end
    if o.json then
        print(measure.json(report(o, bench, times)))
    else
        print_text(o, bench, times)
    end
end)
