-- Generation with guesses against generation without, timed in turns: milliseconds a token after the prompt, how many
-- guesses stay, and whether the likeliest tokens are the same.
--
--     tetrain bench/generate_guesses.lua --out=out/target --assistant=out/draft --tokens=200
--
-- Both are runs of train_gpt.lua: how much stays depends on what a model writes, so one is needed that has learnt. The
-- prompt is the beginning of --prompt-file, in the run's own tokens. bench/peers/guesses.py does the same with
-- Transformers.

local te = require "te"
local folder = arg[0]:match("^(.*/)") or "./"
local measure = dofile(folder .. "measure.lua")
local clock = te._core.clock

local command_line = te.train.command_line {
    script = "generate_guesses.lua",
    about = "Times generation with guesses against generation without.",
    { "out", "string", "out/gpt", help = "the run whose model generates" },
    { "assistant", "string", help = "a run whose model guesses" },
    { "lookup", "string", "3 7", help = "how many tokens are looked up at most, several numbers take turns" },
    { "assistant-tokens", "string", "3 7", help = "how many the assistant guesses at most" },
    { "prompt-file", "string", "../shared/data/tinyshakespeare.txt", help = "text whose beginning is the prompt" },
    { "prompt", "size", 64, help = "tokens of it" },
    { "tokens", "size", 180, help = "tokens that follow" },
    { "temperature", "number", 0, min = 0, help = "0: the likeliest tokens" },
    { "dtype", "string", "float32", choices = { "float32", "bfloat16" }, help = "of the computation" },
    { "threads", "integer", 2, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    { "rounds", "integer", 7, min = 1, help = "turns, of which the fastest counts" },
    { "ids", "string", help = "file for the prompt's ids, for the peer" },
    { "json", "boolean", false, help = "a JSON object a line instead of a table" },
}

local function ways_of(o, assistant)
    local ways = { { "plain", {} } }
    for n in o.lookup:gmatch "%d+" do ways[#ways + 1] = { "lookup " .. n, { lookup = tonumber(n) } } end
    for n in assistant and o.assistant_tokens:gmatch "%d+" or function() end do
        ways[#ways + 1] = { "assistant " .. n, { assistant = assistant, assistant_tokens = tonumber(n) } }
    end
    return ways
end

-- One text. Returns its ids, seconds of a token after the first one, and how many guesses there were and stayed.
local function run(o, model, prompt, options)
    local first, guessed, stayed = nil, 0, 0
    options.temperature = o.temperature
    options.on_token = function() first = first or clock() end
    options.on_guesses = function(n, kept) guessed, stayed = guessed + n, stayed + kept end
    te.manual_seed(1)
    local scope = { dtype = o.dtype, enabled = o.dtype ~= "float32" }
    local ids = te.autocast(scope, model.generate, model, prompt, o.tokens, options)
    return ids:totable()[1], (clock() - first) / (o.tokens - 1), guessed, stayed
end

te.train.run(function()
    local o = command_line:parse(arg)
    te.set_num_threads(o.threads)
    local model, tokenizer = te.train.saved.load(o.out)
    local assistant = o.assistant and te.train.saved.load(o.assistant)
    local file = assert(io.open(o.prompt_file))
    local ids = tokenizer:encode(file:read(16 * o.prompt))
    file:close()
    local prompt = te.tensor({ { unpack(ids, 1, o.prompt) } }, { dtype = "int32" })
    if o.ids then te.save(o.ids, { ids = prompt }) end
    local ways = ways_of(o, assistant)
    for _ = 1, o.rounds do
        for _, way in ipairs(ways) do
            local made, time, guessed, stayed = run(o, model, prompt, way[2])
            way.ids, way.guessed, way.stayed = made, guessed, stayed
            way.time = math.min(way.time or math.huge, time)
        end
    end
    if not o.json then print "guesses         ms/token   ratio  guessed  stay  tokens" end
    for _, way in ipairs(ways) do
        local same = te.all(te.eq(te.tensor(way.ids), te.tensor(ways[1].ids))):item()
        if o.json then
            print(measure.json { "system", "tetrain", "guesses", way[1], "dtype", o.dtype, "temperature", o.temperature,
                "threads", o.threads, "token_ms", way.time * 1e3, "ratio", way.time / ways[1].time,
                "guessed", way.guessed, "stayed", way.stayed, "same", same })
        else
            print(("%-14s %9.3f %7.2f %8d %5d  %s"):format(way[1], way.time * 1e3, way.time / ways[1].time, way.guessed,
                way.stayed, o.temperature > 0 and "drawn" or same and "the same" or "others"))
        end
    end
end)
