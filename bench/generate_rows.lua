-- What checking several tokens in one pass costs: the time of a pass over GPT-2's weights for 1, 2, 4 and 8 tokens that
-- follow a cached text, and what it is to that of one token, for every way that weights are stored.
--
--     tetrain bench/generate_rows.lua --config=gpt2_256 --threads=2
--
-- Passes of all sizes take turns, and so do the ways; the fastest of each counts. With n tokens a pass, guessing pays
-- where a pass gives more than `ratio` tokens on average: `needed` is the share of guesses that has to stay for that,
-- each as likely to as the others.

local te = require "te"
local folder = arg[0]:match("^(.*/)") or "./"
local measure, models = dofile(folder .. "measure.lua"), dofile(folder .. "models.lua")
local clock = te._core.clock

local command_line = te.train.command_line {
    script = "generate_rows.lua",
    about = "Times a pass over a model's weights for several tokens of a text.",
    { "config", "string", "gpt2_256", choices = models.names, help = "size of the model" },
    { "threads", "integer", 2, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    { "rounds", "integer", 15, min = 1, help = "turns of which the fastest counts" },
    { "ways", "string", "fp32 bf16 block mxfp8 nvfp4", help = "how weights are stored" },
    { "json", "boolean", false, help = "a JSON object a line instead of a table" },
}
local SIZES = { 1, 2, 4, 8 }

-- A model with a cache that holds half of its context, and a function that times a pass of n tokens more.
local function passes(o, way)
    local n_layer, n_head, n_embd, _, sequence, vocabulary = unpack(models.configs[o.config])
    local recipe = way ~= "fp32" and way ~= "bf16" and te.train.recipe(way) or nil
    local scope = { dtype = way == "fp32" and "float32" or "bfloat16", recipe = recipe, enabled = way ~= "fp32" }
    te.manual_seed(1)
    local model = te.no_grad(te.quantized_model_init, { recipe = recipe, enabled = recipe ~= nil }, te.models.gpt, {
        vocab_size = vocabulary, block_size = sequence, n_layer = n_layer, n_head = n_head, n_embd = n_embd }):eval()
    local cache, before = te.KVCache(), sequence / 2
    local ids = te.randint(0, vocabulary - 1, { 1, sequence }, { dtype = "int32" })
    te.autocast(scope, cache.run, cache, model, ids:narrow(2, 1, before))
    return function(n)
        local more, start = ids:narrow(2, before + 1, n):contiguous(), clock()
        te.autocast(scope, cache.run, cache, model, more, nil, { logits = "all" })
        local time = clock() - start
        cache:truncate(before)
        return time
    end
end

-- The share a of accepted guesses at which n tokens a pass keep `ratio` on average: 1 + a + … + a^(n - 1).
local function needed(n, ratio)
    local low, high = 0, 1
    if ratio > n then return math.huge end
    for _ = 1, 40 do
        local a, kept = (low + high) / 2, 0
        for k = 0, n - 1 do kept = kept + a ^ k end
        if kept < ratio then low = a else high = a end
    end
    return high
end

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    local ways, best = {}, {}
    for way in o.ways:gmatch "%S+" do
        local pass = passes(o, way)
        ways[#ways + 1] = { way, pass }
        best[way] = {}
        for _, n in ipairs(SIZES) do
            pass(n)
            best[way][n] = math.huge
        end
    end
    for _ = 1, o.rounds do
        for _, entry in ipairs(ways) do
            local way, pass = unpack(entry)
            for _, n in ipairs(SIZES) do best[way][n] = math.min(best[way][n], pass(n)) end
        end
    end
    if not o.json then print "stored  tokens  ms of a pass  ratio  needed" end
    for _, entry in ipairs(ways) do
        local way = entry[1]
        for _, n in ipairs(SIZES) do
            local time, ratio = best[way][n], best[way][n] / best[way][1]
            if o.json then
                print(measure.json { "system", "tetrain", "config", o.config, "stored", way, "threads", o.threads,
                    "tokens", n, "pass_ms", time * 1e3, "ratio", ratio, "needed", needed(n, ratio) })
            else
                print(("%-7s %5d %13.3f %7.2f %6.0f%%"):format(way, n, time * 1e3, ratio, 100 * needed(n, ratio)))
            end
        end
    end
end)
