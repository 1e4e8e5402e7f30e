-- Rows of numbers that stand for texts, by an encoder of Transformers: which texts are like a query, or a file of all
-- rows.
--
--     tetrain embed.lua --hugging-face=all-MiniLM-L6-v2 --query="a meal" "A man eats." "It rains."
--     tetrain embed.lua --hugging-face=all-MiniLM-L6-v2 --query="a meal" --file=lines.txt --top=3
--     tetrain embed.lua --hugging-face=all-MiniLM-L6-v2 --file=lines.txt --to=rows.safetensors

local te = require "te"
local train = te.train

local command_line = train.command_line {
    script = "embed.lua",
    about = "Rows of numbers that stand for texts: which are like a query, or a file of all rows.",
    { "hugging-face", "string", help = "folder of the model; required" },
    { "file", "string", help = "file with a text in each line, in place of the arguments" },
    { "query", "string", help = "prints the texts by their likeness to this one, 1 at most" },
    { "top", "integer", 0, min = 0, help = "print so many texts; 0: all" },
    { "to", "string", help = "safetensors file to write the rows into, as embeddings" },
    { "prompt", "string", help = "what is put in front of every text; default: as the folder says" },
    { "pooling", "string", choices = { "first", "mean", "model" }, help = "in place of the folder's" },
    { "dtype", "string", "float32", choices = { "float32", "bfloat16" }, help = "of the computation" },
    { "threads", "integer", 0, min = 0, max = 1024, help = "0: OMP_NUM_THREADS, or all cores" },
    arguments = { "TEXT", help = "texts, each an argument" },
}

local function read_lines(path)
    local text, message = require("te.files").read(path)
    if not text then train.fail(train.exit.io, message) end
    local texts = {}
    for line in text:gsub("([^\n])$", "%1\n"):gmatch "([^\n]*)\n" do texts[#texts + 1] = line:gsub("\r$", "") end
    return texts
end

-- The texts by their likeness to the query, the most alike first.
local function print_alike(o, embedder, texts, rows)
    local query = embedder:encode({ o.query }, { prompt = o.prompt })
    local function unit(x) return x / te.clamp(te.norm(x, -1, true), 1e-12) end
    local alike = te.matmul(unit(rows), unit(query):transpose()):view { -1 }
    local order, values = te.argsort(alike, -1, { descending = true }):totable(), alike:totable()
    for place = 1, o.top > 0 and math.min(o.top, #texts) or #texts do
        local i = order[place] + 1
        io.stdout:write(("%.4f  %s\n"):format(values[i], texts[i]))
    end
end

local function main(words)
    local o = command_line:parse(words)
    if not o.hugging_face then command_line:refuse "--hugging-face is missing: the folder of the model" end
    if o.file and o.arguments[1] then command_line:refuse "--file and texts: one of them" end
    if not (o.query or o.to) then command_line:refuse "--query or --to is missing: what to do with the rows" end
    if o.top > 0 and not o.query then command_line:refuse "--top: it is of texts like --query, which is missing" end
    if o.threads > 0 then te.set_num_threads(o.threads) end
    local texts = o.file and read_lines(o.file) or o.arguments
    if not texts[1] then command_line:refuse "there are no texts: arguments, or --file" end
    local embedder = train.io(te.models.embedder, o.hugging_face, { dtype = o.dtype, pooling = o.pooling })
    local rows = embedder:encode(texts, { prompt = o.prompt })
    if o.to then
        train.io(te.save, o.to, { embeddings = rows })
        io.stdout:write(("%s: %d rows of %d\n"):format(o.to, rows:size(1), rows:size(2)))
    end
    if o.query then print_alike(o, embedder, texts, rows) end
end

train.run(main, arg)
