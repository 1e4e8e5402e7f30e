-- Generation with a GPT, timed: milliseconds for a prompt, and for every token after it.
--
--     tetrain bench/generate.lua --config=gpt2_256 --dtype=bf16 --threads=2 --batch=1 --json
--
-- The prompt is half of the model's context, the likeliest token follows, up to the whole of it.
-- bench/peers/generate.py does the same with PyTorch. A token reads every weight once: `floor` is that at the rate at
-- which memory is read. With --recipe the blocks' weights are stored in its format.

local te = require "te"
local folder = arg[0]:match("^(.*/)") or "./"
local measure, models = dofile(folder .. "measure.lua"), dofile(folder .. "models.lua")
local clock = te._core.clock

local command_line = te.train.command_line {
    script = "generate.lua",
    about = "Times the generation of text.",
    { "config", "string", "char", choices = models.names, help = "size of the model" },
    { "dtype", "string", "fp32", choices = { "fp32", "bf16" }, help = "of the computation" },
    { "recipe", "string", "none", choices = te.train.recipe_choices, help = "that weights are stored in" },
    { "threads", "integer", 2, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    { "batch", "size", 1, help = "texts at a time" },
    { "runs", "integer", 3, min = 1, help = "texts timed; the fastest counts" },
    { "start", "string", help = "file for the weights and the prompt, so that the peer can start from the same" },
    { "read", "number", 0, min = 0, help = "GB/s that memory is read at, for the floor (bench_machine's read_gb_s)" },
    { "json", "boolean", false, help = "one JSON object instead of text" },
}

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    te.manual_seed(1)
    local n_layer, n_head, n_embd, _, sequence, vocabulary = unpack(models.configs[o.config])
    local recipe = te.train.recipe(o.recipe)
    local model = te.no_grad(te.quantized_model_init, { recipe = recipe, enabled = recipe ~= nil }, te.models.gpt, {
        vocab_size = vocabulary, block_size = sequence, n_layer = n_layer, n_head = n_head, n_embd = n_embd }):eval()
    local prompt = te.randint(0, vocabulary - 1, { o.batch, sequence / 2 }, { dtype = "int32" })
    if o.start then models.save_start(o.start, model, prompt, prompt) end

    local first, each, ids = math.huge, math.huge, nil
    for _ = 1, o.runs + 1 do -- the first one warms up
        local times, last = {}, clock()
        local options = { dtype = o.dtype == "bf16" and "bfloat16" or "float32", recipe = recipe,
            enabled = o.dtype == "bf16" or recipe ~= nil }
        ids = te.autocast(options, function()
            return model:generate(prompt, sequence / 2, { temperature = 0, on_token = function()
                local now = clock()
                times[#times + 1], last = now - last, now
            end })
        end)
        first = math.min(first, table.remove(times, 1))
        each = math.min(each, measure.median(times))
    end

    local bytes = 0
    for name, p in model:named_parameters() do
        local codes, factors
        if te._core.is_quantized(p) then codes, factors = te._core.quantized_parts(p) end
        if codes then bytes = bytes + codes:numel() + factors:numel() * (factors.dtype == "float32" and 4 or 1)
        elseif name ~= "wpe.weight" then bytes = bytes + p:numel() * (o.dtype == "bf16" and 2 or 4) end
    end
    local floor, check = o.read > 0 and bytes / o.read * 1e-6 or 0, 0
    for _, row in ipairs(ids:totable()) do
        for i, id in ipairs(row) do check = (check * 31 + id * i) % 1000003 end
    end
    if o.json then
        print(measure.json { "system", "tetrain", "config", o.config, "dtype", o.dtype, "recipe", o.recipe,
            "threads", o.threads, "batch", o.batch, "prompt_ms", first * 1e3, "token_ms", each * 1e3,
            "floor_ms", floor, "check", check })
    else
        print(("%s %s, recipe %s, %d texts: %.2f ms for a prompt of %d, then %.3f ms a token%s"):format(o.config,
            o.dtype, o.recipe, o.batch, first * 1e3, sequence / 2, each * 1e3,
            floor > 0 and (", floor %.3f ms"):format(floor) or ""))
    end
end)
