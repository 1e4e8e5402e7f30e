--- How generation chooses a token of its logits: the likeliest, or one drawn of those that the options leave.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local sampling = {}

local function above_zero(name)
    return function(value)
        if value == 0 then return name .. ": expected a number above 0, got 0" end
        if value == math.huge then return name .. ": expected a finite number, got inf" end
    end
end

sampling.OPTIONS = {
    temperature = { "number", 1, min = 0, help = "0: always the most likely token" },
    top_k = { "size", help = "sample from this many most likely tokens; default: all" },
    top_p = { "number", nil, min = 0, max = 1, wrong = above_zero "top_p",
        help = "sample from the most likely tokens that together have this probability, above 0; default: all" },
    min_p = { "number", 0, min = 0, max = 1, help = "sample from tokens of at least this share of the most likely "
        .. "token's probability (Nguyen et al. 2024)" },
    repetition_penalty = { "number", 1, min = 0, wrong = above_zero "repetition_penalty",
        help = "divides the logits above 0 of tokens that the row has, and multiplies those below (Keskar et al. "
        .. "2019), before the temperature; 1: none" },
}

local SORTED, HALVINGS = 1024, 30 -- so many candidates are put in order; among more, a bound is sought

-- On a device the ends of 2^BITS parts of the stretch where the bound lies are tried at a time: their sums are made
-- beside each other, which takes hardly longer than one.
local BITS = 5
local mass = te._core.define("mass(p, high, done, part; scale: number = 1)",
    "sums = rowsum(where(p > high * (done + part * scale), p, 0))", { outputs = "sums" })
local parts_with = te._core.define("parts_with(sums, done; top_p: number = 1, scale: number = 1)",
    "more = rowmax(done) + scale * rowsum(where(sums >= top_p, 1, 0))", { outputs = "more" })

local function bound_by_parts(p, high, top_p)
    local rows, parts = p:size(1), 2 ^ BITS
    local part = te.arange(1, parts - 1, { device = p.device }):view { 1, parts - 1, 1 }
    local wide, most = p:view { rows, 1, -1 }, high:view { rows, 1, 1 }
    local done, scale = high * 0, 1
    for _ = 1, HALVINGS / BITS do
        scale = scale / parts
        local sums = mass(wide, most, done:view { rows, 1, 1 }, part, { scale = scale })
        done = parts_with(sums, done, { top_p = top_p, scale = scale }):view { rows, 1 }
    end
    return te.minimum(high * done, high * (1 - 2 ^ -24)) -- a part may be rounded to all of it
end

local function bound_by_halves(p, high, top_p)
    local low = high * 0
    for _ = 1, HALVINGS do
        local middle = (low + high) / 2
        local enough = te.ge(te.sum(te.where(te.gt(p, middle), p, 0), -1, true), top_p)
        low, high = te.where(enough, middle, low), te.where(enough, high, middle)
    end
    return low
end

-- The probabilities, 0 where likelier tokens together have top_p: what is above a bound that lies within 2^-30 of the
-- largest below the right one.
local function nucleus(p, top_p)
    local bound_of = p.device == "cpu" and bound_by_halves or bound_by_parts
    return te.where(te.gt(p, bound_of(p, te.max(p, -1, true), top_p)), p, 0)
end

-- Weights to draw by, 0 where a token is not among those to choose from. Of equal ones all stay.
local function weights(logits, opts)
    local n, top_p = logits:size(-1), opts.top_p ~= 1 and opts.top_p
    local k = math.min(opts.top_k or n, n)
    local sorts = top_p and k <= SORTED
    if k < n or sorts then
        local best = te.topk(logits, k, -1)
        local least = best:narrow(-1, k, 1)
        if sorts then
            local p = te.softmax(best, -1)
            least = te.min(te.where(te.lt(te.cumsum(p, -1) - p, top_p), best, math.huge), -1, true)
        end
        logits = te.where(te.lt(logits, least), -math.huge, logits)
    end
    local p = te.softmax(logits, -1)
    if top_p and not sorts then p = nucleus(p, top_p) end
    if opts.min_p > 0 then p = te.where(te.lt(p, te.max(p, -1, true) * opts.min_p), 0, p) end
    return p
end

local penalize = te._core.define("penalize(logits, seen; penalty: number = 1)",
    "y = where(seen > 0, where(logits > 0, logits / penalty, logits * penalty), logits)")

--- What tokens are chosen by: logits {rows, vocabulary}, given how often each row has each token, nil where that does
--- not matter.
---@param logits te.Tensor
---@param opts table
---@param seen te.Tensor|nil
---@return te.Tensor logits
function sampling.prepare(logits, opts, seen)
    if not seen then return logits end
    return penalize(logits:to "float32", seen, { penalty = opts.repetition_penalty })
end

-- fn(...) of weights to draw by, which raises where the logits were not finite.
local function drawn(opts, fn, ...)
    local ok, tokens = pcall(fn, ...)
    if not ok and tostring(tokens):find("te.multinomial: row", 1, true) then
        fail("%s: the logits are not finite", opts.who)
    end
    if not ok then error(tokens, 0) end
    return tokens
end

local function tempered_weights(logits, opts)
    logits = logits:to("float32")
    -- However low, the likeliest stays finite; of those below a float32 the quotient would be none.
    return weights((logits - te.max(logits, -1, true)) / math.max(opts.temperature, 1e-30), opts)
end

--- A token for each row of logits.
---@param logits te.Tensor  {rows, vocabulary}
---@param opts table
---@return te.Tensor tokens  {rows, 1}
function sampling.choose(logits, opts)
    if opts.temperature == 0 then return te.argmax(logits, -1, true) end
    return drawn(opts, te.multinomial, tempered_weights(logits, opts), 1)
end

--- The probabilities by which a token is drawn for each row of logits, at a temperature above 0.
---@param logits te.Tensor  {rows, vocabulary}
---@param opts table
---@return te.Tensor p  {rows, vocabulary}
function sampling.distribution(logits, opts)
    local p = tempered_weights(logits, opts)
    return p / te.sum(p, -1, true)
end

--- A token for each row of probabilities.
function sampling.draw(p, opts) return drawn(opts, te.multinomial, p, 1) end

--- Whether guesses stay that were drawn by probabilities q, and what is drawn in place of those that do not (Leviathan
--- et al. 2023, section 2.3), so that both together are drawn as sampling.choose draws. Where q is 0 throughout, the
--- token is one drawn by p alone.
---@param logits te.Tensor   {rows, vocabulary}
---@param q te.Tensor        {rows, vocabulary}
---@param guessed te.Tensor  {rows, 1}
---@param opts table
---@return te.Tensor tokens  {rows, 1}
---@return te.Tensor stays   {rows, 1}
function sampling.accept(logits, q, guessed, opts)
    local p, index = sampling.distribution(logits, opts), guessed:to "int64"
    local chance = te.rand({ p:size(1), 1 }, { device = p.device })
    local stays = te.lt(chance * te.gather(q, -1, index), te.gather(p, -1, index))
    local rest = te.maximum(p - q, 0)
    -- q may be p but for roundings: then no guess is dropped
    rest = te.where(te.gt(te.sum(rest, -1, true), 0), rest, p)
    return sampling.draw(rest, opts), stays
end

--- What a script's process_logits makes of logits, of ids {rows, seq} of rows with these numbers.
function sampling.processed(logits, opts, ids, rows)
    local made = opts.process_logits(logits, ids, rows)
    if not options.tensor(opts.who, "option process_logits: its result", made) or
        options.shape(made) ~= options.shape(logits) then
        fail("%s: option process_logits: expected logits %s from it, got %s", opts.who, options.shape(logits),
            te.is_tensor(made) and options.shape(made) or options.shown(made))
    end
    return made
end

--- For each row of logits {rows, vocabulary} whether a token can be chosen of it.
---@return te.Tensor usable  {rows, 1}
function sampling.usable(logits, opts)
    local most = te.max(logits, -1, true)
    return opts.temperature > 0 and te.isfinite(most) or te.eq(most, most) -- of -inf alone the first is the likeliest
end

--- The likeliest of logits that are NaN would be some token. Devices are not waited for.
function sampling.check(logits, opts)
    if opts.temperature > 0 or logits.device ~= "cpu" then return end
    if te.isnan(te.max(logits)):item() then fail("%s: the logits are not finite", opts.who) end
end

return sampling
