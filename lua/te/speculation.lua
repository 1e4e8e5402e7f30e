--- Generation in which one pass over the weights gives several tokens (Leviathan et al. 2023, Chen et al. 2023): it
-- reads what is sure and a few guesses of how the text goes on (te.guesses), and says of each whether it stays.
--
--     sure                 a row's tokens so far: its prompt and what was chosen     cache: all of them but the last
--     columns   s g g g    of a pass: the last token that all rows are sure of, and guesses
--     logits    1 2 3 4    choose what follows each column: g is kept as long as it agrees
--
-- A token is chosen of the logits behind tokens that were kept alone, as without guesses. A guess that does not depend
-- on chance is kept where the token drawn is this one. A guess drawn by probabilities q is kept with the probability
-- min(1, p / q), and where it is not, the token is drawn by max(p - q, 0) in its place: both ways a token is drawn by
-- p, which the same logits give without guesses.
--
-- The rows of a batch stand at different places, each being sure of other tokens, as their prompts differ and so do the
-- guesses that stay. A pass begins at the last token that all are sure of; to a row that is sure of more they stand in
-- the columns in place of guesses. So keys and values in the cache are of equally many tokens in all rows.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local Module = require "te.module"
local KVCache = require "te.kv_cache"
local guesses = require "te.guesses"
local sampling = require "te.sampling"

local speculation = {}

local ASSISTANT_TOKENS = 5

local FIRST = 8 -- guesses at first, where more are allowed

-- A pass --------------------------------------------------------------------------------------------------------------

local Pass = {}
Pass.__index = Pass

-- Tokens {rows, last - first + 1} that all rows are sure of.
local function sure_tokens(self, first, last)
    local tokens = {}
    for i, row in ipairs(self.rows) do
        tokens[i] = {}
        for k = first, last do tokens[i][k - first + 1] = row.ids[k] end
    end
    return te.tensor(tokens, { dtype = "int32", device = self.device })
end

local function new_pass(self)
    local pass = setmetatable({ rows = self.rows, sure = self.sure, device = self.device, opts = self.opts,
        columns = {}, probabilities = {}, seen = self.seen and {} }, Pass)
    if self.seen then
        self.seen:scatter_add_(2, sure_tokens(self, self.counted + 1, self.sure):to "int64",
            te.ones({ #self.rows, self.sure - self.counted }, { device = self.device }))
        self.counted = self.sure
        pass.seen[1] = self.seen
    end
    pass.columns[1] = sure_tokens(self, self.sure, self.sure)
    return pass
end

--- Tokens from this one on that all rows are sure of.
function Pass:sure_tokens(first) return sure_tokens(self, first, self.sure) end

--- Adds a column {rows, 1}, with the probabilities {rows, vocabulary} that its guesses were drawn by, nil where they do
--- not depend on chance.
function Pass:add(tokens, p)
    local k = #self.columns + 1
    self.columns[k], self.probabilities[k - 1] = tokens, p
    if not self.seen then return end
    local ones = te.ones({ #self.rows, 1 }, { device = self.device })
    self.seen[k] = self.seen[k - 1]:clone():scatter_add_(2, tokens:to "int64", ones)
end

--- The tokens of column k that rows are sure of in place of others.
function Pass:keep_sure(tokens, k)
    local known, ids, some = {}, {}, false
    for i, row in ipairs(self.rows) do
        local id = row.ids[self.sure + k - 1]
        known[i], ids[i], some = { id ~= nil }, { id or 0 }, some or id ~= nil
    end
    if not some then return tokens end
    return te.where(te.tensor(known, { device = self.device }),
        te.tensor(ids, { dtype = "int32", device = self.device }), tokens)
end

-- What process_logits makes of the logits behind column k. It may leave no token where a guess is wrong: then they are
-- equal, and it is an error only if the text comes to that.
function Pass:processed(logits, k)
    local opts, numbers = self.opts, {}
    self.text = self.text or self:sure_tokens(1)
    local ids = { self.text }
    for i = 2, k do ids[i] = self.columns[i] end
    for i, row in ipairs(self.rows) do numbers[i] = row.number end
    logits = sampling.processed(logits, opts, te.cat(ids, 2):to(opts.dtype), numbers)
    local usable = sampling.usable(logits, opts)
    return te.where(usable, logits, 0), usable
end

--- What tokens are chosen by behind column k, of logits {rows, vocabulary}, and with process_logits in which rows one
--- can be.
function Pass:prepared(logits, k)
    local usable
    sampling.check(logits, self.opts)
    if self.opts.process_logits then logits, usable = self:processed(logits, k) end
    return sampling.prepare(logits, self.opts, self.seen and self.seen[k]), usable
end

-- All columns' logits as {rows * n, vocabulary}, prepared, and with process_logits whether they are usable {rows, n}.
function Pass:prepare(logits)
    local n = #self.columns
    if not self.opts.process_logits and not self.seen then
        sampling.check(logits, self.opts)
        return logits:reshape { -1, logits:size(-1) }
    end
    local parts, usable = {}, {}
    for k = 1, n do
        parts[k], usable[k] = self:prepared(logits:select(2, k), k)
        parts[k] = parts[k]:unsqueeze(2)
    end
    return te.cat(parts, 2):reshape { -1, logits:size(-1) }, usable[1] and te.cat(usable, 2):to "int32"
end

--- Chooses a token behind every column, of logits {rows, n, vocabulary}. Returns for each row the columns, the tokens
--- behind them if they do not go on as guessed, whether they do, and behind which no token can be chosen.
function Pass:choose(logits)
    local rows, n, opts = #self.rows, #self.columns, self.opts
    local columns, drawn, stays, usable = te.cat(self.columns, 2), nil, nil, nil
    logits, usable = self:prepare(logits)
    if n > 1 and self.probabilities[1] then
        local none = te.zeros({ rows, logits:size(-1) }, { device = self.device })
        local q = {}
        for k = 1, n do q[k] = (self.probabilities[k] or none):unsqueeze(2) end
        local following = te.cat({ columns:narrow(2, 2, n - 1), columns:narrow(2, 1, 1) }, 2)
        drawn, stays = sampling.accept(logits, te.cat(q, 2):view { rows * n, -1 }, following:reshape { -1, 1 }, opts)
        stays = stays:to("int32"):view { rows, n }
    else
        drawn = sampling.choose(logits, opts)
    end
    drawn = drawn:to("int32"):view { rows, n }
    local all = te.cat({ columns, drawn, usable or drawn, stays }, 2):totable() -- the only wait for a device
    for i, values in ipairs(all) do
        local row = { columns = {}, drawn = {}, stays = {}, dead = {} }
        for k = 1, n do
            row.columns[k], row.drawn[k] = values[k], values[n + k]
            row.dead[k] = usable and values[2 * n + k] == 0
            if stays then row.stays[k] = values[3 * n + k] == 1
            else row.stays[k] = values[k + 1] == values[n + k] end
        end
        all[i] = row
    end
    return all
end

-- The texts -----------------------------------------------------------------------------------------------------------

local Texts = {}
Texts.__index = Texts

-- How many tokens all rows are sure of, and the most that there can be.
function Texts:measure()
    self.sure, self.most = math.huge, 0
    for _, row in ipairs(self.rows) do
        self.sure = math.min(self.sure, #row.ids)
        self.most = math.max(self.most, row.prompt + self.count)
    end
end

-- Takes in what a pass chose for a row. Returns how many guesses there were and stayed.
function Texts:take(row, chosen, reads)
    local guessed, stayed, ids = 0, 0, row.ids
    for k = 1, #chosen.columns do
        if self.sure + k - 1 == #ids then
            if chosen.dead[k] then fail("%s: the logits are not finite", self.opts.who) end
            local stays = k < reads and chosen.stays[k]
            if k < reads then guessed = math.max(guessed, reads - k) end
            local id = stays and chosen.columns[k + 1] or chosen.drawn[k]
            ids[#ids + 1] = id
            stayed = stayed + (stays and 1 or 0)
            row.ended = self.ends and self.ends[id] or #ids == row.prompt + self.count
            if row.ended or not stays then break end
        end
    end
    return guessed, stayed
end

-- Tells of positions up to `last`, where a row has a token of its own. Returns whether to go on.
function Texts:tell(last)
    for at = self.told + 1, self.opts.on_token and last or -1 do
        local tokens, own = {}, false
        for i, row in ipairs(self.all) do
            tokens[i] = { row.ids[at] or self.pad }
            own = own or row.ids[at] and at > row.prompt
        end
        tokens = own and te.tensor(tokens, { dtype = self.opts.dtype, device = self.device })
        if tokens and self.opts.on_token(tokens) == false then
            self.cut = at
            return false
        end
    end
    self.told = last
    return true
end

-- Drops rows that have ended. Returns the places of those that go on where some have.
function Texts:retire()
    local rows, places = {}, {}
    for i, row in ipairs(self.rows) do
        if not row.ended then rows[#rows + 1], places[#places + 1] = row, i - 1 end
    end
    if #rows == #self.rows then return end
    self.rows = rows
    if #rows == 0 then return end
    places = te.tensor(places, { dtype = "int64", device = self.device })
    self.seen = self.seen and te.index_select(self.seen, 1, places)
    return places
end

-- All rows {batch, longest} and their lengths.
function Texts:result()
    local lengths, rows, longest = {}, {}, 0
    for i, row in ipairs(self.all) do
        lengths[i] = math.min(#row.ids, math.max(self.cut or #row.ids, row.prompt))
        longest = math.max(longest, lengths[i])
    end
    for i, row in ipairs(self.all) do
        rows[i] = {}
        for k = 1, longest do rows[i][k] = k <= lengths[i] and row.ids[k] or self.pad end
    end
    return te.tensor(rows, { dtype = self.opts.dtype, device = self.device }),
        te.tensor(lengths, { dtype = "int64", device = self.device })
end

-- Generation ----------------------------------------------------------------------------------------------------------

-- The logits {rows, n, vocabulary} of a pass that begins at the last token that all rows are sure of. What comes before
-- it and is not in the cache is read with it, and then there are no guesses.
local function logits_of(model, self, cache, pass)
    local limit = model.config.block_size
    if self.sure > limit then
        return model:forward(sure_tokens(self, self.sure - limit + 1, self.sure)):unsqueeze(2)
    elseif self.sure - cache.length > 1 then
        return cache:run(model, sure_tokens(self, cache.length + 1, self.sure)):unsqueeze(2)
    end
    return cache:run(model, te.cat(pass.columns, 2), nil, { logits = "all" })
end

-- How many columns the next pass has.
local function columns_of(model, self, cache, source)
    local limit = model.config.block_size
    if self.sure > limit or self.sure - cache.length > 1 then return 1 end
    return math.min(1 + self.pace, self.most - self.sure, limit - self.sure + 1, source:room(self.sure))
end

-- One pass. Returns whether to go on.
local function step(model, self, cache, source)
    local pass, n = new_pass(self), columns_of(model, self, cache, source)
    local reads = source:fill(pass, n)
    local chosen = pass:choose(logits_of(model, self, cache, pass))
    local guessed, stayed, best = 0, 0, 0
    for i, row in ipairs(self.rows) do
        local here, kept = self:take(row, chosen[i], reads[i])
        guessed, stayed, best = guessed + here, stayed + kept, math.max(best, kept)
    end
    -- As many guesses as are likely to stay: twice as many once all have, else one more than have.
    if guessed > 0 then self.pace = best + 1 >= n and math.min(2 * self.pace, self.widest) or math.max(best + 1, 1) end
    if guessed > 0 and self.opts.on_guesses then self.opts.on_guesses(guessed, stayed) end
    local left = self:retire()
    if #self.rows > 0 then self:measure() end
    local longest = 0
    for _, row in ipairs(self.all) do longest = math.max(longest, #row.ids) end
    if not self:tell(#self.rows > 0 and self.sure or longest) or #self.rows == 0 then return false end
    cache:truncate(math.min(self.sure - 1, cache.length))
    source:keep(self.sure - 1)
    if left then
        if cache.length > 0 then cache:select(left) end
        source:select(left)
    end
    return true
end

--- Continues prompts {batch, longest} of these lengths by `count` tokens each, as te.generate does. Returns all rows
--- and their lengths.
---@param model table
---@param given table  prompts, lengths, count, pad, ends and seen
---@param opts table   of te.generate
function speculation.run(model, given, opts)
    local self = setmetatable({ all = {}, rows = {}, count = given.count, pad = given.pad, ends = given.ends,
        seen = given.seen, counted = 0, device = given.prompts.device, told = 0, opts = opts }, Texts)
    opts.dtype = given.prompts.dtype
    self.widest = opts.lookup or opts.assistant_tokens or ASSISTANT_TOKENS
    self.pace = math.min(self.widest, FIRST)
    for i, ids in ipairs(given.prompts:totable()) do
        local n = given.lengths and given.lengths[i] or #ids
        for k = #ids, n + 1, -1 do ids[k] = nil end
        self.all[i] = { number = i, ids = ids, prompt = n }
        self.rows[i] = self.all[i]
    end
    self:measure()
    self.told = self.sure
    local source = opts.assistant and guesses.assistant(opts.assistant, opts) or guesses.lookup()
    local cache = KVCache()
    while self.count > 0 and step(model, self, cache, source) do end
    return self:result()
end

--- Raises where the options of guesses do not fit each other or the model.
---@param who string
---@param model table
---@param opts table
function speculation.check(who, model, opts)
    local assistant = opts.assistant
    if opts.assistant_tokens and not assistant then
        fail("%s: option assistant_tokens: %d, but there is no assistant", who, opts.assistant_tokens)
    end
    if not (opts.lookup or assistant) then return false end
    if opts.lookup and assistant then fail("%s: options lookup and assistant: one of them", who) end
    if not opts.use_cache then
        fail("%s: option %s: guesses need the cache that use_cache = false leaves out", who,
            assistant and "assistant" or "lookup")
    end
    if not assistant then return true end
    if not Module.is(assistant, require "te.decoder") then
        local is_module = Module.is(assistant, Module)
        fail("%s: option assistant: expected a model of te.models, got %s%s", who,
            is_module and assistant.__name or options.shown(assistant),
            is_module and assistant.is_encoder and ", an encoder" or "")
    end
    local here, there = model.config.vocab_size, assistant.config.vocab_size
    if here ~= there then
        fail("%s: option assistant: its vocabulary has %d tokens, the model's %d", who, there, here)
    end
    here, there = model:parameters()[1].device, assistant:parameters()[1].device -- a stage may have no head
    if here ~= there then fail("%s: option assistant: it is on %s, the model on %s", who, there, here) end
    return true
end

require "te.uncompiled"(speculation.run, step, logits_of, Pass.choose, Pass.prepare, Pass.prepared,
    Pass.processed, Pass.add, new_pass)

return speculation
