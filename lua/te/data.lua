--- te.data: where training text comes from, and batches of it.
--
-- A source is a text file, a folder of text files, token shards (.bin: raw uint16, or with a header that says uint16
-- or uint32, as write_tokens makes them), or ids that a script has. Without any, the project's own text: the tree that
-- the script stands in, else the sources of the Lua library, which every executable carries.
--
-- Batches are cut by the engine in a thread of its own. Batch number s of the training part depends on the seed and s
-- alone, so a run that resumes there sees what it would have seen. Several processes cut the same batches, of the rows
-- of all, and each takes its own.

local te = require "te"
local fail = require "te.fail"
local files = require "te.data_files"
local options = require "te.options"
local tokenizer = require "te.tokenizer"

local data = {}

-- The project's own text ------------------------------------------------------------------------------------------

local OWN = { md = true, lua = true, c = true, h = true, sh = true, cmake = true }

-- The tree around a script at `script`, recognised by its library.
local function source_tree(script)
    local folder = io and script and (script:match("^(.*)/[^/]*$") or ".")
    for _, root in ipairs(folder and { folder .. "/..", folder } or {}) do
        if te._core.stat(root .. "/lua/te/modules.lua") and te._core.stat(root .. "/src/core") then return root end
    end
end

--- Text that is always at hand.
---@param script string|nil  path of the running script
---@return string text
---@return string description
function data.own_text(script)
    local root = source_tree(script)
    if root then
        local paths = files.below(root, function(name, is_folder)
            if is_folder then return not name:find("^build") and name ~= "out" end
            return OWN[name:match("%.(%w+)$")]
        end)
        local text, n = files.join(paths)
        return text, ("the project's own text, %d files"):format(n)
    end
    local texts = {}
    local sources = te._core.library_sources()
    for _, name in ipairs(options.names(sources)) do texts[#texts + 1] = sources[name] end
    return table.concat(texts, "\n"), ("the project's own text, %d files"):format(#texts)
end

-- Streams ---------------------------------------------------------------------------------------------------------

local function is_shard(name) return name:find("%.bin$") ~= nil end

-- Whether shards stand in a folder itself: those below others may belong to something else.
local function has_shards(folder)
    for _, name in ipairs(te._core.list_dir(folder)) do
        local stat = is_shard(name) and te._core.stat(folder .. "/" .. name)
        if stat and stat.type == "file" then return true end
    end
    return false
end

local VALIDATION = { val = true, valid = true, validation = true }

-- Whether a shard is one for validation: "val_0.bin" and "text-val-0.bin", but not "interval_0.bin".
local function is_validation(path)
    for word in path:match("[^/]*$"):gmatch "%a+" do
        if VALIDATION[word] then return true end
    end
    return false
end

-- The shards of a path, split where their names say so: { train = {…}, val = {…} }; nil for a folder without any.
local function shards_of(path, stat, entered)
    if stat.type ~= "directory" then return { train = { path } } end
    local found = { train = {}, val = {} }
    local function accept(name, is_folder) return is_folder or is_shard(name) end
    for _, file in ipairs(files.below(path, accept, entered)) do
        table.insert(is_validation(file) and found.val or found.train, file)
    end
    if #found.train == 0 or #found.val == 0 then
        local all = #found.train > 0 and found.train or found.val
        return all[1] and { train = all }
    end
    return found
end

local function length_of(source)
    if source.tokens then return #source.tokens end
    local loader = te._core.tokens_open { paths = source.paths, batch = 1, block = 1, prefetch = 0 }
    local n = loader.n_tokens
    loader:close()
    return n
end

local WINDOWS, WIDTH, PRIME = 64, 64, 2 ^ 44 - 17

-- A number that other data of the same length hardly has: a hash of tokens all over it, which are in the vocabulary.
local function sample_of(source, n, vocab_size)
    local width = math.min(WIDTH, n - 1)
    local loader = te._core.tokens_open { paths = source.paths, tokens = source.tokens, batch = 1, block = width,
        sequential = true, prefetch = 0, vocab_size = vocab_size }
    local there, hash = math.floor((n - 1) / width), 0
    local count = math.min(WINDOWS, there)
    for i = 0, count - 1 do
        loader:seek(math.floor(i * there / count))
        for _, id in ipairs(loader:next():totable()[1]) do hash = (hash * 257 + id + 1) % PRIME end
    end
    loader:close()
    return ("%.0f"):format(hash)
end

local INTEGERS = { int64 = true, int32 = true, uint8 = true }

-- A stream of the ids in a list or a tensor {n}.
local function stream_of(who, name, ids)
    if te.is_tensor(ids) then
        if ids:dim() ~= 1 or not INTEGERS[ids.dtype] or ids:numel() == 0 then
            fail("te.%s: %s: expected whole numbers {n}, got %s %s", who, name, ids.dtype, options.shape(ids))
        end
        local largest = ids.dtype == "int64" and te.max(ids):item() or 0 -- the engine sees negative ones itself
        if largest >= 2 ^ 31 or ids.dtype == "int64" and te.min(ids):item() < 0 then
            fail("te.%s: %s: expected ids from 0 to 2147483647, got %.0f", who, name,
                largest >= 2 ^ 31 and largest or te.min(ids):item())
        end
    elseif type(ids) ~= "table" or getmetatable(ids) then
        fail("te.%s: %s: expected a list or a tensor of ids, got %s", who, name, options.shown(ids))
    end
    return te._core.token_stream(ids, who, name)
end

local function text_source(text, tok)
    if tok == "char" then tok = tokenizer.from_points(te._core.text_points(text)) end
    if tok == "byte" then tok = tokenizer.byte() end
    if tok.kind == "byte" or tok.kind == "char" and tok.ascends then -- in the engine's own table
        return { tokens = te._core.encode_text(text, tok.points) }, tok
    end
    return { tokens = stream_of("data.open", "what the tokenizer made", tok:encode(text)) }, tok
end

-- { train = source, val = source or nil, tokenizer =, description = }
local function find_source(opts)
    require("te.files").need("te.data.open") -- nor are there loaders of ids in memory where scripts reach no files
    local own = type(opts.tokenizer) == "table" and opts.tokenizer or nil -- the one of shards and ids
    if opts.tokens ~= nil then
        if opts.path then fail("te.data.open: path and tokens: one of them") end
        return { train = { tokens = stream_of("data.open", "tokens", opts.tokens) }, tokenizer = own,
            description = "tokens" }
    end
    if not opts.path then
        local text, description = data.own_text(opts.script)
        local source, tok = text_source(text, opts.tokenizer)
        return { train = source, tokenizer = tok, description = description }
    end
    local stat = te._core.stat(opts.path)
    if not stat then te._core.fail_io(("te.data.open: %s: no such file or folder"):format(opts.path)) end
    local is_folder, text, shards = stat.type == "directory", "", nil
    local output = opts.except and te._core.stat(opts.except)
    -- folders not to enter; the data's own may be the run's as well
    local function except() return output and output.id ~= stat.id and { [output.id] = true } or {} end
    if is_shard(opts.path) or is_folder and has_shards(opts.path) then
        shards = shards_of(opts.path, stat, except())
    else
        local function no_shard(name, inner) return inner or not is_shard(name) end
        text = is_folder and files.join(files.below(opts.path, no_shard, except())) or files.read(opts.path)
        shards = is_folder and text == "" and shards_of(opts.path, stat, except())
    end
    if shards then
        return { train = { paths = shards.train }, val = shards.val and { paths = shards.val }, tokenizer = own,
            description = opts.path }
    end
    if text == "" then
        fail("te.data.open: %s: %s", opts.path, is_folder and "no text in this folder" or "the file is empty")
    end
    local source, tok = text_source(text, opts.tokenizer)
    return { train = source, tokenizer = tok, description = opts.path }
end

-- Sets ------------------------------------------------------------------------------------------------------------

local Set = {}
Set.__index = Set

local function wrong_tokenizer(value)
    local known = value == "byte" or value == "char"
    if known or type(value) == "table" and not options.reason({ "callable" }, value.encode) then return end
    return "tokenizer: expected one of byte, char or a tokenizer of te.tokenizer, got " .. options.shown(value)
end

local OPEN = {
    path = { "string", help = "file, folder or shards; default: the project's own text" },
    tokens = { "any", help = "ids in place of path: a list or a tensor {n} of integers" },
    except = { "string", help = "a folder in path to skip: the one that a run writes into" },
    script = { "string", help = "path of the running script, to find that text" },
    tokenizer = { "any", "char", wrong = wrong_tokenizer, help = "tokenizer of text: byte, char, or a tokenizer" },
    vocab_size = { "size", help = "for shards and ids: an id out of range is an error that says where" },
    batch = { "size", 1, help = "rows for each process" },
    rank = { "integer", 0, min = 0, help = "rank of this process" },
    ranks = { "size", 1, help = "number of processes that share batches" },
    block = { "size", 64, help = "tokens per row" },
    seed = { "integer", 1, min = 0, help = "seed of the order of batches" },
    val_fraction = { "number", 0.1, min = 0, max = 0.9,
        help = "fraction at the end of the stream for validation, unless shards are named val" },
}

local function loader(set, source, first, last, sequential)
    return te._core.tokens_open { paths = source.paths, tokens = source.tokens, begin = first, ["end"] = last,
        batch = set.batch * set.ranks, block = set.block, seed = set.seed, sequential = sequential,
        prefetch = sequential and 0 or 3, vocab_size = set.vocab_size }
end

--- Opens data as a training and a validation part.
---@param opts table|nil  path, of a text file, a folder or shards, or tokens, a list or tensor {n} of ids; tokenizer:
---  "char" (of the text's characters), "byte", or one of te.tokenizer.char, byte or load, or with its methods; batch,
---  block, seed, val_fraction; vocab_size, which ids of shards are below; except, a folder to leave out; rank and ranks
---  of several processes
---@return te.DataSet set  n_tokens, n_train, n_val, tokenizer (of shards and ids the one given), description, train and
---  val loaders
function data.open(opts)
    opts = options.check("te.data.open", opts, OPEN)
    if opts.rank >= opts.ranks then
        fail("te.data.open: option rank: expected one below ranks, which is %d, got %d", opts.ranks, opts.rank)
    end
    local found = find_source(opts)
    local n = length_of(found.train)
    local set = setmetatable({ tokenizer = found.tokenizer, description = found.description, batch = opts.batch,
        block = opts.block, rank = opts.rank, ranks = opts.ranks, seed = opts.seed, n_tokens = n }, Set)
    local n_val_source = found.val and length_of(found.val)
    set.n_train = found.val and n or n - math.floor(n * opts.val_fraction)
    set.n_val = n_val_source or n - set.n_train
    if set.n_train <= opts.block then
        fail("te.data.open: %s: %d tokens for training are too few for a block of %d", set.description, set.n_train,
            opts.block)
    end
    -- ids that a tokenizer has just made of a text are its own
    set.vocab_size = (found.train.paths or opts.tokens ~= nil) and opts.vocab_size or nil
    set.sample = sample_of(found.train, n, set.vocab_size)
    set.train = loader(set, found.train, 0, set.n_train, false)
    if set.n_val > opts.block * opts.batch * opts.ranks then
        set.val = loader(set, found.val or found.train, found.val and 0 or set.n_train, found.val and set.n_val or n,
            true)
    end
    return set
end
options.declare(data.open, OPEN)

local function check_open(self, who)
    if self.closed then fail("%s: the set is closed", who) end
end

-- The rows of this process.
local function own_rows(self, x, y)
    if self.ranks == 1 then return x, y end
    local first = self.rank * self.batch + 1
    return x:narrow(1, first, self.batch), y:narrow(1, first, self.batch)
end

--- x, y {batch, block} of training batch number `s` (from 0) when given, else of the next one.
---@param s integer|nil
---@return te.Tensor x
---@return te.Tensor y
function Set:next_train(s)
    options.method("Set:next_train", self, Set)
    check_open(self, "Set:next_train")
    if s then
        options.argument("Set:next_train", "batch number", s, { "integer", min = 0 })
        self.train:seek(s)
    end
    return own_rows(self, self.train:next())
end

--- Mean of loss(x, y) over `batches` batches spread evenly over the validation part (all of them when there are fewer),
--- always the same ones. Of several processes, the mean over the rows of this one.
---@param batches integer
---@param loss fun(x: te.Tensor, y: te.Tensor): number|nil
---@return number|nil  nil when the part is too small for a batch, or a loss is nil or false, which ends it
---@return string|nil problem  why a batch cannot be read; there is no mean, then
function Set:validation_loss(batches, loss)
    options.method("Set:validation_loss", self, Set)
    options.argument("Set:validation_loss", "batches", batches, { "size" })
    options.argument("Set:validation_loss", "loss", loss, { "callable" })
    check_open(self, "Set:validation_loss")
    if not self.val then return nil end
    local available = math.floor((self.n_val - 1) / (self.block * self.batch * self.ranks))
    local n, sum = math.min(batches, available), 0
    for i = 0, n - 1 do
        self.val:seek(math.floor(i * available / n))
        local read, x, y = pcall(self.val.next, self.val)
        if not read then return nil, x end
        local value = loss(own_rows(self, x, y))
        if not value then return nil end
        sum = sum + value
    end
    return sum / n
end

local WRITE = { dtype = { "string", "uint16", choices = { "uint16", "uint32" }, help = "dtype of the stored ids" } }

--- Writes ids as a shard that te.data.open reads: a header of 256 int32, which begins with a magic number, a version
--- and the number of ids, then the ids. The file is written atomically.
---@param path string  one that ends in .bin
---@param ids table|te.Tensor  a list or a tensor {n} of whole numbers
---@param opts table|nil
function data.write_tokens(path, ids, opts)
    local who = "te.data.write_tokens"
    options.argument(who, "path", path, { "string" })
    opts = options.check(who, opts, WRITE)
    require("te.files").need(who)
    if not is_shard(path) then fail("%s: path: a shard's name ends in .bin, got %s", who, options.shown(path)) end
    te._core.token_stream_write(path, stream_of("data.write_tokens", "ids", ids), opts.dtype)
end
options.declare(data.write_tokens, WRITE)

--- What must be the same for a run to go on, as texts.
---@return table<string, string>
function Set:texts()
    options.method("Set:texts", self, Set)
    local tok = self.tokenizer
    return { tokenizer = tok and tok.describe and tok:describe(), ["data.tokens"] = ("%.0f"):format(self.n_tokens),
        ["data.train_tokens"] = ("%.0f"):format(self.n_train), ["data.sample"] = self.sample }
end

--- Ends reading ahead and closes the files.
function Set:close()
    options.method("Set:close", self, Set)
    self.closed = true
    self.train:close()
    if self.val then self.val:close() end
end

function Set:__tostring()
    return ("data set of %s: %.0f tokens for training, %.0f for validation, batches {%d, %d}%s"):format(
        self.description, self.n_train, self.n_val, self.batch, self.block, self.closed and ", closed" or "")
end

return options.library("te.data", data)
