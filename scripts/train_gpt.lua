-- Trains a GPT on text.
--
--     tetrain train_gpt.lua                              the project's own text, characters, a minute or two
--     tetrain train_gpt.lua --data=book.txt --steps=5000
--     tetrain train_gpt.lua --preset=nanogpt-char --data=input.txt --dtype=bfloat16
--     tetrain train_gpt.lua --preset=nanogpt-char --data=input.txt --recipe=mxfp8
--     tetrain train_gpt.lua --out=out/book --resume      goes on exactly where the run stopped
--     tetrain train_gpt.lua --hugging-face=gpt2 --data=book.txt --block=256 --lr=3e-5    goes on with that model
--     tetrain train_gpt.lua --hugging-face=gpt2 --data=book.txt --block=256 --lora-rank=8    trains adapters of it
--     mpirun -n 4 tetrain train_gpt.lua --batch=8        four processes, 32 rows a batch
--     mpirun -n 4 tetrain train_gpt.lua --shard-optimizer        each keeps a quarter of the optimizer's state
--     mpirun -n 4 tetrain train_gpt.lua --context-parallel=2     two pairs, which halve each row
--     mpirun -n 4 tetrain train_gpt.lua --tensor-parallel=2      two pairs, each with halves of one model
--     mpirun -n 4 tetrain train_gpt.lua --pipeline-parallel=2 --grad-accumulation=8      halves of the blocks each
--
-- Several processes train one model, each on --batch rows of its own: n processes of b rows make the steps of one with
-- n * b. With --context-parallel=c every c of them have the same rows, each a part of their tokens: n / c * b rows a
-- batch; with --tensor-parallel=c or --pipeline-parallel=c each has a part of the model, of which checkpoints have
-- the whole. Rank 0 alone prints and writes; a signal to any of them, or a step that is not finite, concerns all.
--
-- OUT/metrics.jsonl holds one JSON object a step, and with --watch-numerics one for each operand that was looked at;
-- OUT/checkpoint-*.safetensors everything needed to resume. Ctrl-C, SIGTERM and SIGHUP finish the step and save;
-- a validation that they end is made up for by the run that resumes. Exit codes: 0, 1 script error or out of memory,
-- 2 usage, 74 files, 75 interrupted, 77 not finite, 130 interrupted before the first step or before saving.

local te = require "te"
local train = te.train

local command_line = train.command_line {
    script = "train_gpt.lua",
    about = "Trains a GPT or a Llama model on a text file, a folder of text files, or token shards.",
    { "data", "string", section = "Data",
        help = "text file, folder, or .bin shards; default: the project's own text" },
    { "tokenizer", "string", "char", help = "for text: byte, char, or a tokenizer.json file or its folder" },
    { "vocab-size", "size", 50304, max = 2 ^ 24, help = "for shards, which hold ids already" },
    { "val-fraction", "number", 0.1, min = 0, max = 0.9, help = "fraction of the data kept for validation" },

    { "model", "string", "gpt", section = "Model", choices = { "gpt", "llama" },
        help = "llama: rotary positions, RMSNorm, SwiGLU, an untied head" },
    { "hugging-face", "string", help = "folder of a Hugging Face Transformers model and its tokenizer to start from" },
    { "n-layer", "size", 4, help = "blocks" },
    { "n-head", "size", 4, help = "attention heads" },
    { "n-kv-head", "integer", 0, min = 0, help = "llama: key and value heads; 0: as many as --n-head" },
    { "n-expert", "integer", 0, min = 0, help = "llama: experts in place of each MLP; 0: an MLP" },
    { "n-expert-active", "size", 2, help = "experts per token" },
    { "expert-aux-loss", "number", 0.01, min = 0, help = "weight of the load-balancing loss" },
    { "n-embd", "size", 128, help = "width" },
    { "block", "size", 64, help = "tokens of context" },
    { "dropout", "number", 0, min = 0, max = 0.99, help = "probability" },
    { "bias", "boolean", false, help = "gpt: biases in linear layers and norms" },
    { "init-std", "number", 0.05, min = 0, max = 1, help = "of initial weights; narrower models need more" },

    { "lora-rank", "integer", 0, min = 0, section = "Adapters", max = 4096,
        help = "with --hugging-face: freeze the model and train low-rank adapters; 0: train its weights" },
    { "lora-alpha", "number", 16, help = "what adapters add is multiplied by alpha / rank" },
    { "lora-dropout", "number", 0, min = 0, max = 0.99, help = "of what adapters read" },
    { "lora-targets", "string", help = "names of layers, with commas between them; default: all of the blocks" },

    { "steps", "size", 2000, section = "Training", max = 2 ^ 40, help = "optimizer steps" },
    { "batch", "size", 12, help = "rows per batch, for each process if mpirun starts several" },
    { "grad-accumulation", "size", 1, help = "batches per step" },
    { "lr", "number", 1e-3, min = 0, max = 10, help = "highest learning rate" },
    { "min-lr", "number", min = 0, max = 10, help = "at the end of the cosine; default: a tenth of --lr" },
    { "warmup", "integer", 100, min = 0, max = 2 ^ 40, help = "steps of linear warm-up" },
    { "optimizer", "string", "adamw", choices = { "adamw", "muon" },
        help = "muon: orthogonal updates of the blocks' matrices; AdamW has the others" },
    { "beta1", "number", 0.9, min = 0, max = 0.9999, help = "AdamW" },
    { "beta2", "number", 0.99, min = 0, max = 0.99999, help = "AdamW" },
    { "weight-decay", "number", 0.1, min = 0, max = 10, help = "of matrices" },
    { "clip", "number", 1, min = 0, help = "largest gradient norm; 0: no limit" },
    { "recipe", "string", "none", choices = train.recipe_choices,
        help = "how the operands of matrix products are quantized" },
    { "fp8-attention", "string", "none", choices = { "none", "dpa", "mha" },
        help = "dpa: attention multiplies in FP8; mha: and its projection takes FP8. With delayed, current or mxfp8" },
    { "fp8-params", "boolean", false, help = "store the blocks' weights only in the recipe's format" },
    { "recompute-blocks", "boolean", false,
        help = "backward computes each block again from its input: less memory, a third more work" },
    { "dtype", "string", choices = { "float32", "bfloat16" },
        help = "of the computation; default: bfloat16 with a recipe, else float32; a resumed run keeps its own. "
            .. "Weights and optimizer stay float32" },
    { "seed", "integer", 1, min = 0, help = "of weights, batches and dropout; tetrain's own --seed has no effect" },
    { "threads", "integer", 0, min = 0, max = 1024, told = train.ranks.threads_told,
        help = "0: OMP_NUM_THREADS, or all cores, divided among processes that share them" },
    { "context-parallel", "size", 1, help = "number of processes that each row of tokens is split over" },
    { "cp-comm-type", "string", "all_gather", choices = { "all_gather", "a2a", "p2p", "a2a+p2p" },
        help = "how they attend: keys and values go to all, each gets some of the heads, keys and values go round, or "
            .. "go round between processes that exchange heads" },
    { "cp-heads", "size", help = "of a2a+p2p: number of neighbouring processes that exchange heads" },
    { "tensor-parallel", "size", 1,
        help = "number of processes that heads, MLPs and the vocabulary are split over" },
    { "sequence-parallel", "boolean", false,
        help = "with --tensor-parallel: tokens, too, are split between layers" },
    { "shard-optimizer", "boolean", false,
        help = "with several processes: each keeps and updates a share of the optimizer's state" },
    { "pipeline-parallel", "size", 1,
        help = "number of processes that blocks are divided over; batches of --grad-accumulation follow each other" },
    { "device", "string", te.get_default_device(), told = train.ranks.device_told,
        help = "cpu, cuda, cuda:1; with several processes, cuda gives each its own" },
    { "graph", "boolean", true, help = "record and launch each step as a whole, where the device can" },

    { "out", "string", "out/gpt", section = "Output",
        help = "folder; an earlier run in it moves to its previous, previous-2 and so on" },
    { "resume", "boolean", false, help = "continue from the newest checkpoint; options default to its own, "
        .. "threads and device to TE_DEVICE, OMP_NUM_THREADS or tetrain's options where given" },
    { "eval-interval", "size", 250, help = "steps between validations, samples and checkpoints" },
    { "eval-batches", "size", 50, help = "batches per validation, spread over its data" },
    { "sample-tokens", "integer", 200, min = 0, help = "length of samples; 0: none" },
    { "keep", "size", 2, help = "how many of the newest checkpoints to keep" },
    { "watch-numerics", "integer", 0, min = 0, help = "steps between quantization statistics; 0: none" },
    { "log-interval", "size", 100, help = "steps between progress lines when not on a terminal" },

    presets = {
        -- nanoGPT's setting for a laptop in all but one thing: weights start at 0.05, not at its 0.02, which is for six
        -- times the width. On tinyshakespeare (seed 1) the validation loss ends at 1.77 instead of 1.92.
        ["nanogpt-char"] = { n_layer = 4, n_head = 4, n_embd = 128, block = 64, batch = 12, dropout = 0, steps = 2000,
            lr = 1e-3, warmup = 100, beta2 = 0.99, weight_decay = 0.1, clip = 1, val_fraction = 0.1, init_std = 0.05,
            eval_batches = 200 },
        ["gpt2"] = { n_layer = 12, n_head = 12, n_embd = 768, block = 1024, batch = 4, grad_accumulation = 8,
            lr = 6e-4, warmup = 2000, beta2 = 0.95, steps = 600000, bias = true, init_std = 0.02 },
    },
}

local function refuse(...) command_line:refuse(...) end

-- Options that processes may have otherwise: of each its own, and of rank 0 alone. Data is compared by what it holds.
local OWN = { "data", "threads", "device", "out", "preset", "sample-tokens", "keep", "log-interval" }

-- Refuses what several processes cannot train with together.
local function agree(ranks, texts)
    local name, rank, text, first = ranks:difference(texts)
    if name then refuse("%s: rank %d has %s, rank 0 %s", name, rank, text, first) end
end

local function loss_of(run, x, y)
    x, y = run.ranks:part(x):to(run.device), run.ranks:part(y):to(run.device)
    return te.autocast(run.autocast, function()
        local logits, loss = run.model(x, y)
        if logits then logits:release() end
        return loss
    end)
end

-- A sample from the model, up to a request to stop, or what there is to say instead; training sees the same random
-- numbers with and without it.
local function sample(run)
    if run.options.sample_tokens == 0 or not run.tokenizer then return end
    local rng = te.rng_state()
    local start = te.tensor({ { run.tokenizer:start() } }, { dtype = "int32", device = run.device })
    local ids, problem = train.sample(run.model, start, run.options.sample_tokens, { temperature = 0.8, top_k = 40,
        on_token = function() return not run.ranks:any_part(te._core.interrupt_flag()) end })
    te.rng_state(rng)
    return ids and train.text.decode(run.tokenizer, ids:totable()[1]) or "no sample: " .. problem
end

local function new_steps(run, o)
    local schedule = te.optim.cosine { max = o.lr, min = o.min_lr or o.lr / 10, warmup = o.warmup,
        steps = math.max(o.steps, o.warmup + 1) } -- a short run may end while it warms up
    return train.steps { next_batch = function() return train.io(run.set.next_train, run.set) end, loss = run.loss,
        model = run.model, autocast = run.autocast, parameters = run.model:parameters(), optimizer = run.optimizer,
        schedule = schedule, guard = run.guard, ranks = run.ranks, interrupted = te._core.interrupt_flag,
        device = run.device, graph = o.graph, clip = o.clip, grad_accumulation = o.grad_accumulation }
end

-- Everything that lives as long as the run, fresh or from a checkpoint: what te.train.loop takes.
local function open_run(o, given, script)
    local ranks = train.ranks.new()
    if ranks.leads then train.io(train.checkpoint.claim, o.out, not o.resume) end
    local saved = o.resume and train.resume.open(command_line, o, given) or nil
    local words = command_line:words(o, OWN)
    words["checkpoint's step"] = saved and tostring(saved.step)
    agree(ranks, words)
    local device = ranks:device(o.device)
    train.check_gpt_options(o, given, device, refuse)
    local name, problem = ranks:divide(o)
    if problem then refuse("--%s=%d: %s", name, o[(name:gsub("-", "_"))], problem) end
    o.dtype = o.dtype or (o.recipe == "none" and "float32" or "bfloat16")
    if o.threads > 0 then te.set_num_threads(o.threads) else ranks:share_threads() end
    te.manual_seed(o.seed)
    local run = { options = o, ranks = ranks, device = device, first_step = saved and saved.step + 1 or 1,
        saved_by = saved and tonumber(saved.metadata.processes or 1),
        unvalidated = saved and tonumber(saved.metadata.unvalidated),
        step_tokens = o.batch * o.block * o.grad_accumulation * ranks.row_ranks }
    function run.loss(x, y) return loss_of(run, x, y) end
    function run.sample() return sample(run) end
    function run.texts() return command_line:texts(o) end
    local quantized = o.fp8_params and train.recipes[o.recipe] or nil
    if o.hugging_face and not saved then run.model = train.pretrained.load(o, quantized, ranks, refuse) end
    run.set = train.text.open(o, saved, ranks, script, refuse)
    run.tokenizer = run.set.tokenizer
    if ranks:difference(run.set:texts()) then refuse "--data: the processes have different data" end
    train.text.check_options(given, run.tokenizer, refuse)
    if saved then train.checkpoint.check_data(saved, run.set) end
    run.model = run.model or saved and train.resume.model(o, saved, ranks, refuse)
        or train.new_model(o, run.tokenizer, quantized, ranks.split)
    run.model:set_recompute_blocks(o.recompute_blocks)
    if ranks.context then
        local fits, why = pcall(run.model.set_context_parallel_group, run.model, ranks.context, o.cp_comm_type)
        if not fits then refuse("--context-parallel=%d: %s", o.context_parallel, train.plain(why)) end
    end
    run.autocast = { dtype = o.dtype, enabled = o.dtype ~= "float32" or o.recipe ~= "none", group = ranks.alike,
        recipe = train.recipe(o.recipe,
            o.fp8_attention ~= "none" and { fp8_dpa = true, fp8_mha = o.fp8_attention == "mha" } or nil) }
    run.model:to(device)
    run.optimizer = te.optim[o.optimizer == "muon" and "Muon" or "AdamW"](
        run.model:parameter_groups(o.weight_decay, o.optimizer), { betas = { o.beta1, o.beta2 } })
    if o.shard_optimizer then ranks:shard(run.optimizer) end
    run.guard = train.guard(run.model, ranks)
    run.steps = new_steps(run, o)
    run.set.train:seek((run.first_step - 1) * o.grad_accumulation)
    if saved then
        train.of_file(saved.path, train.checkpoint.restore_training, saved, run.model, run.optimizer)
        train.checkpoint.release(saved)
    elseif ranks.leads then
        run.set_aside = train.io(train.checkpoint.set_aside, o.out)
        train.io(train.text.keep, run.tokenizer, o.out)
    end
    ranks:broadcast(run.model)
    ranks:divide_random()
    if o.watch_numerics > 0 then
        te.numerics.watch(run.model, { every = o.watch_numerics * o.grad_accumulation,
            done = (run.first_step - 1) * o.grad_accumulation })
    end
    if ranks.leads then
        run.metrics = train.io(train.Metrics.open, o.out .. "/metrics.jsonl", run.first_step - 1)
    end
    return run
end

local function main(words)
    local o, given = command_line:parse(words)
    o.out = o.out:gsub("(.)/+$", "%1")
    train.hold_signals() -- from here on Ctrl-C waits for the end of a step
    local run = open_run(o, given, words[0])
    local ranks = run.ranks
    run.progress = train.Progress.new { steps = o.steps, log_interval = o.log_interval, silent = not ranks.leads,
        plain = ranks.size > 1, -- mpirun gives rank 0 a terminal also where there is none
        flops_per_token = run.model:flops_per_token(), peak_flops = ranks.size * train.peak_flops(o.dtype, run.device) }
    train.announce(run)
    local code = train.loop(run)
    run.progress:finish()
    if run.metrics then run.metrics:close() end
    run.set:close()
    return code
end

train.run(main, arg)
