--- Continuing texts with a model of te.decoder, in batches of prompts that differ in length. te.sampling chooses the
-- tokens.
--
-- All rows of a batch stand at the same position. They begin together after the shortest prompt; where the prompt of a
-- row goes on, the row takes its prompt's token instead of the chosen one. So every row is computed at positions of its
-- own, with no padding that attention would have to leave out, whatever a model does with positions and windows. Rows
-- that have ended leave the batch, and when all that are left still read their prompts, they do so at once. What a row
-- draws depends on its number and on how far it stands behind the shortest prompt, and not on what others draw.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local settle = require "te.settle"
local KVCache = require "te.kv_cache"
local decoding = require "te.decoding"
local sampling = require "te.sampling"
local speculation = require "te.speculation"

-- A step is recorded where so many tokens are to come, with room for so many at least; so many tokens after rows have
-- left, and twice as many each time that it served fewer than WORTH_ENDING.
local WORTH_RECORDING, LEAST_ROOM, APART, WORTH_ENDING = 8, 64, 4, 16

local generate = {}

generate.OPTIONS = {
    eos = { "any", help = "the id, or a list of ids, after which a row has ended; generation stops when all have" },
    use_cache = { "boolean", true, help = "keep keys and values of previous tokens, up to block_size tokens" },
    graph = { "boolean", true, help = "record the step of a token as a graph, on devices that have graphs" },
    process_logits = { "callable", help = "called with the logits {rows, vocabulary}, the ids {rows, seq} so far and "
        .. "the numbers of the rows, which are those that have not ended; returns the logits to choose from" },
    on_token = { "callable", help = "called with the tokens {batch, 1} at every new position, including those of "
        .. "longer prompts and the padding of ended rows; returning false stops" },
    lookup = { "size", help = "guess at most this many tokens a pass, as they followed the end of the text where it "
        .. "stood before (Saxena 2023); those that generation chooses as well stay (Leviathan et al. 2023)" },
    assistant = { "any", help = "a smaller model with the same vocabulary, which guesses tokens" },
    assistant_tokens = { "size", help = "guess at most this many tokens a pass with the assistant; default: 5" },
    on_guesses = { "callable", help = "called after every pass with guesses: how many there were, and how many stay" },
}
for name, option in pairs(sampling.OPTIONS) do generate.OPTIONS[name] = option end

-- Logits after the last of ids; where they are longer than block_size, its last block alone is read: positions move
-- then, so that nothing in a cache holds any more.
local function next_logits(model, ids, cache)
    local seq, limit = ids:size(2), model.config.block_size
    if seq > limit then return model:forward(ids:narrow(2, seq - limit + 1, limit):contiguous()) end
    if not cache then return model:forward(ids) end
    return cache:run(model, ids:narrow(2, cache.length + 1, seq - cache.length):contiguous())
end

-- Arguments -------------------------------------------------------------------------------------------------------

local function check_id(who, name, id, vocab_size)
    if type(id) == "number" and id % 1 == 0 and id >= 0 and id < vocab_size then return id end
    fail("%s: %s: expected a token from 0 to %d, got %s", who, name, vocab_size - 1, options.shown(id))
end

-- The ids that end a row, as a set, and the first one; nil for none.
local function ends_of(who, eos, vocab_size)
    if eos == nil then return nil end
    local list, set = type(eos) == "table" and eos or { eos }, {}
    if options.list(who, "option eos", list) == 0 then fail("%s: option eos: the list is empty", who) end
    for _, id in ipairs(list) do set[check_id(who, "option eos", id, vocab_size)] = true end
    return set, list[1]
end

local function prompt_of(who, i, prompt, vocab_size)
    local name = ("ids: prompt %d"):format(i)
    if options.tensor(who, name, prompt) and prompt:dim() == 1 then prompt = prompt:totable() end
    if type(prompt) ~= "table" or getmetatable(prompt) then
        fail("%s: %s: expected a list of ids or a tensor {seq}, got %s", who, name,
            te.is_tensor(prompt) and options.shape(prompt) or options.shown(prompt))
    end
    local n = options.list(who, name, prompt)
    if n == 0 then fail("%s: %s: there is no token", who, name) end
    for k = 1, n do check_id(who, name, prompt[k], vocab_size) end
    return prompt, n
end

-- Prompts {batch, longest}, filled up with `pad`, and their lengths, nil for those of a tensor, which are all alike.
local function read_prompts(who, ids, pad, model)
    if options.tensor(who, "ids", ids) or type(ids) ~= "table" or getmetatable(ids) then
        if not te.is_tensor(ids) or ids:dim() ~= 2 or ids:size(2) == 0 then
            fail("%s: ids: expected {batch, seq} of at least one token, got %s", who,
                te.is_tensor(ids) and options.shape(ids) or type(ids))
        end
        return ids
    end
    local rows, lengths, longest = {}, {}, 0
    for i = 1, options.list(who, "ids", ids) do
        local prompt, n = prompt_of(who, i, ids[i], model.config.vocab_size)
        rows[i], lengths[i], longest = prompt, n, math.max(longest, n)
    end
    if #rows == 0 then fail("%s: ids: there is no prompt", who) end
    for i, prompt in ipairs(rows) do
        rows[i] = {}
        for k = 1, longest do rows[i][k] = prompt[k] or pad end
    end
    return te.tensor(rows, { dtype = "int32", device = model:parameters()[1].device }), lengths
end

-- Raises unless prompts are tokens: where the host reads or counts them, the embedding does not see them as they were.
local function check_prompts(who, prompts, vocab_size)
    if prompts.dtype ~= "int32" and prompts.dtype ~= "int64" then
        fail("%s: ids: expected int32 or int64, got %s", who, prompts.dtype)
    end
    prompts = prompts:to "int64"
    check_id(who, "ids", te.min(prompts):item(), vocab_size)
    check_id(who, "ids", te.max(prompts):item(), vocab_size)
end

-- The batch -------------------------------------------------------------------------------------------------------

-- Rows are those that have not ended: their numbers, prompts and ids so far, and where it matters how often each has
-- `seen` a token, {rows, vocabulary}. `done` has the ids of the others.
local Batch = {}
Batch.__index = Batch

local function new_batch(prompts, lengths, count, pad, ends, seen)
    local self = setmetatable({ size = prompts:size(1), given = prompts, prompts = prompts, lengths = lengths or {},
        rows = {}, done = {}, count = count, pad = pad, ends = ends, seen = seen }, Batch)
    for i = 1, self.size do
        self.rows[i], self.lengths[i] = i, self.lengths[i] or prompts:size(2)
    end
    return self
end

-- Counts tokens {rows, seq}. Recorded steps read the counts, so they stay where they are.
function Batch:see(tokens)
    if not self.seen then return end
    self.seen:scatter_add_(2, tokens:to "int64", te.ones(tokens.shape, { device = tokens.device }))
end

-- Takes in what all rows have of their prompts. Returns how many tokens that is.
function Batch:read()
    local position, shortest = self.ids and self.ids:size(2) or 0, self.rows[1] and math.huge or 0
    for _, row in ipairs(self.rows) do shortest = math.min(shortest, self.lengths[row]) end
    if shortest > position then
        local more = self.prompts:narrow(2, position + 1, shortest - position)
        self:see(more)
        if shortest == self.prompts:size(2) and position == 0 then self.ids = self.prompts
        else self.ids = self.ids and te.cat({ self.ids, more }, 2) or more:contiguous() end
    end
    return math.max(shortest - position, 0)
end

-- Draws as so many steps would: what a row gets does not depend on whether others have read on at once.
function Batch:skip(steps, opts)
    if opts.temperature == 0 or steps == 0 then return end
    local weights = te.ones({ self.size, 1 }, { device = "cpu" })
    for _ = 1, steps do te.multinomial(weights, 1) end
end

-- One token {rows, 1} for every row, of the logits after its last. As many are drawn as there were rows at first: what
-- a row gets does not depend on when others end.
function Batch:choose(logits, opts)
    logits = sampling.prepare(logits, opts, self.seen)
    if not self.places then return sampling.choose(logits, opts):to(self.ids.dtype) end
    local tokens = sampling.choose(te.index_select(logits, 1, self.places), opts)
    return te.index_select(tokens, 1, self.active):to(self.ids.dtype)
end

-- The tokens of prompts that go on in place of chosen ones.
function Batch:keep_prompts(tokens)
    local position, reads, some = self.ids:size(2) + 1, {}, false
    if position > self.prompts:size(2) then return tokens end
    for i, row in ipairs(self.rows) do
        reads[i] = { self.lengths[row] >= position }
        some = some or reads[i][1]
    end
    if not some then return tokens end
    return te.where(te.tensor(reads, { device = tokens.device }), self.prompts:narrow(2, position, 1), tokens)
end

-- Tokens of all rows of the beginning {batch, 1}.
function Batch:whole(tokens)
    if not self.places then return tokens end
    return te.where(self.is_active, te.index_select(tokens, 1, self.places), self.pad):to(tokens.dtype)
end

-- Drops rows that have ended with these tokens. Returns the places of those that go on where some have, for the cache.
function Batch:retire(tokens)
    local values, position, rows, kept = self.ends and tokens:totable(), self.ids:size(2), {}, {}
    for i, row in ipairs(self.rows) do
        local new = position - self.lengths[row]
        if new == self.count or self.ends and new > 0 and self.ends[values[i][1]] then
            self.done[row] = self.ids:narrow(1, i, 1)
        else
            rows[#rows + 1], kept[#kept + 1] = row, i - 1
        end
    end
    if #rows == #self.rows then return end
    self.rows = rows
    if #rows == 0 then return end
    local places, active, is_active, integers = {}, {}, {}, { dtype = "int64", device = tokens.device }
    for row = 1, self.size do places[row], is_active[row] = 0, { false } end
    for i, row in ipairs(rows) do places[row], active[i], is_active[row] = i - 1, row - 1, { true } end
    self.places, self.active = te.tensor(places, integers), te.tensor(active, integers)
    self.is_active = te.tensor(is_active, { device = tokens.device })
    kept = te.tensor(kept, integers)
    self.ids, self.prompts = te.index_select(self.ids, 1, kept), te.index_select(self.prompts, 1, kept)
    self.seen = self.seen and te.index_select(self.seen, 1, kept)
    return kept
end

-- All rows {batch, longest}, filled up with `pad`, and their lengths {batch}; a prompt that was not read to its end
-- stands there as a whole.
function Batch:result()
    local position, lengths, longest = self.ids:size(2), {}, 0
    for i, row in ipairs(self.rows) do
        local reads = self.lengths[row] > position
        self.done[row] = reads and self.given:narrow(1, row, 1):narrow(2, 1, self.lengths[row])
            or self.ids:narrow(1, i, 1)
    end
    for row = 1, self.size do
        lengths[row] = self.done[row]:size(2)
        longest = math.max(longest, lengths[row])
    end
    local all = te.full({ self.size, longest }, self.pad, { dtype = self.ids.dtype, device = self.ids.device })
    for row, n in ipairs(lengths) do all:narrow(1, row, 1):narrow(2, 1, n):copy_(self.done[row]) end
    return all, te.tensor(lengths, { dtype = "int64", device = self.ids.device })
end

-- How many tokens there may be with those to come.
function Batch:longest()
    local most = 0
    for _, row in ipairs(self.rows) do most = math.max(most, self.lengths[row]) end
    return most + self.count
end

-- Recorded steps that go on from the cache, nil where they are not worth their recording, and whether the model can be
-- recorded at all, as far as is known.
local function record_steps(model, batch, cache, opts)
    local position, limit, capacity = batch.ids:size(2), model.config.block_size, LEAST_ROOM
    local longest = math.min(batch:longest(), limit)
    local one_new = cache.length > 0 and cache.length + 1 == position
    if not one_new or longest - position < WORTH_RECORDING then return nil, true end
    if not decoding.takes(model) then return nil, false end
    while capacity < longest do capacity = 2 * capacity end
    local function chosen(logits) return batch:choose(logits, opts) end
    return decoding.steps(model, cache, math.min(capacity, limit), chosen), true
end

function Batch:end_steps()
    self.steps:give_back()
    self.steps = nil
end

local function go_on(model, batch, opts)
    local cache, tokens = opts.use_cache and KVCache() or nil, nil
    local plain, apart = 0, APART -- steps that are to run plainly; after rows have left
    local records = cache and opts.graph and not opts.process_logits
    batch:read()
    while batch.count > 0 and #batch.rows > 0 do
        local position, steps = batch.ids:size(2), batch.steps
        if steps and (steps.length + 1 ~= position or not steps:has_room()) then steps = batch:end_steps() end
        if not steps and records and plain <= 0 then steps, records = record_steps(model, batch, cache, opts) end
        batch.steps, plain = steps, plain - 1
        if steps then
            tokens = steps(batch.ids:narrow(2, position, 1))
        else
            local logits = next_logits(model, batch.ids, cache)
            sampling.check(logits, opts)
            if opts.process_logits then
                logits = sampling.processed(logits, opts, batch.ids:clone(), { unpack(batch.rows) })
                sampling.check(logits, opts)
            end
            tokens = batch:choose(logits, opts)
        end
        tokens = batch:keep_prompts(tokens)
        batch.ids = te.cat({ batch.ids, tokens }, 2)
        batch:see(tokens)
        if opts.on_token and opts.on_token(batch:whole(tokens):clone()) == false then break end
        local left = batch:retire(tokens)
        if left and steps then
            apart = steps:served() < WORTH_ENDING and 2 * apart or APART
            batch:end_steps()
        end
        if left then plain = apart end
        if left and cache then cache:select(left) end
        batch:skip(batch:read(), opts)
    end
end

-- What comes of a batch in which there is no row.
local function without_rows(prompts, count, ends)
    local device = prompts.device
    return te.zeros({ 0, prompts:size(2) + count }, { dtype = prompts.dtype, device = device }),
        ends and te.zeros({ 0 }, { dtype = "int64", device = device }) or nil
end

-- Has models compute without dropout and sequences be in one piece. Returns what undoes it, which is called where a
-- script is stopped, too.
local function whole_and_still(models)
    local trains, groups, splits = {}, {}, {}
    for _, model in ipairs(models) do
        for _, module in model:named_modules() do
            if module.training then trains[#trains + 1] = module end
        end
        if model.cp_group then groups[#groups + 1] = { model, model.cp_group, model.cp_comm_type } end
        if model.sequence_parallel then splits[#splits + 1] = model end
    end
    local function undo()
        for _, module in ipairs(trains) do module.training = true end
        for _, group in ipairs(groups) do group[1]:set_context_parallel_group(group[2], group[3]) end
        for _, model in ipairs(splits) do model:set_sequence_parallel(true) end
    end
    settle.unfinished[undo] = undo -- on_token may have the same model generate
    for _, model in ipairs(models) do model:eval() end
    for _, group in ipairs(groups) do group[1]:set_context_parallel_group(nil) end
    for _, model in ipairs(splits) do model:set_sequence_parallel(false) end -- one token is not split
    return undo
end

--- What a model's method generate does.
function generate.run(model, ids, count, opts)
    local who = model.__name .. ":generate"
    options.argument(who, "count", count, { "integer", min = 0 })
    opts = options.check(who, opts, generate.OPTIONS)
    opts.who = who
    local ends, pad = ends_of(who, opts.eos, model.config.vocab_size)
    local prompts, lengths = read_prompts(who, ids, pad or 0, model)
    if prompts:size(1) == 0 then return without_rows(prompts, count, ends) end
    local guesses, counts = speculation.check(who, model, opts), opts.repetition_penalty ~= 1
    if guesses or counts then check_prompts(who, prompts, model.config.vocab_size) end
    -- How often each row has each token, none so far; nil where that does not matter.
    local seen = counts and te.zeros({ prompts:size(1), model.config.vocab_size }, { device = prompts.device }) or nil
    local batch
    local function run()
        if guesses then
            local all, sizes = speculation.run(model, { prompts = prompts, lengths = lengths, count = count,
                ends = ends, pad = pad or 0, seen = seen }, opts)
            return all, (lengths or ends) and sizes or nil
        end
        batch = new_batch(prompts, lengths, count, pad or 0, ends, seen)
        go_on(model, batch, opts)
        if lengths or ends then return batch:result() end
        return batch.count > 0 and batch.ids or batch.ids:clone()
    end
    local undo = whole_and_still { model, guesses and opts.assistant or nil }
    local ok, result, sizes = pcall(te.no_grad, run)
    undo()
    settle.unfinished[undo] = nil
    if batch and batch.steps then batch.steps:close() end
    if not ok then error(result, 0) end
    return result, sizes
end

require "te.uncompiled"(generate.run, go_on, next_logits, Batch.retire, Batch.choose, Batch.see)

return generate
