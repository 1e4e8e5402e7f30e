--- Where te.speculation has its guesses from: what the text had before, or a smaller model.
--
-- A source fills a pass (te.speculation) up to n columns by pass:add; `reads` says for each row how many columns are of
-- use to it, tokens that are sure included.

local te = require "te"
local KVCache = require "te.kv_cache"
local sampling = require "te.sampling"

local guesses = {}

-- Looked up --------------------------------------------------------------------------------------------------------

-- What has to agree with the end of a text before what followed it is guessed, and how much is compared at most.
local SHORTEST, LONGEST = 2, 16

--- What followed where the text had the longest end of itself before, at most n tokens; of several places the last. A
--- text that repeats itself goes on to.
---@param text integer[]
---@param n integer
---@return integer[]
function guesses.looked_up(text, n)
    local last, place, most, found = #text, 0, SHORTEST - 1, {}
    for at = last - 1, 1, -1 do
        local same = 0
        while same < LONGEST and same < at and text[at - same] == text[last - same] do same = same + 1 end
        if same > most then place, most = at, same end
        if most == LONGEST then break end
    end
    for i = 1, place > 0 and n or 0 do found[i] = text[place + i] or found[place + i - last] end
    return found
end

local Lookup = {}
Lookup.__index = Lookup

--- Guesses of what the text had before.
function guesses.lookup() return setmetatable({}, Lookup) end

function Lookup.room() return math.huge end

function Lookup.keep() end

function Lookup.select() end

function Lookup.fill(_, pass, n)
    local columns, reads, most = {}, {}, 1
    for i, row in ipairs(pass.rows) do
        local ids, known = row.ids, #row.ids - pass.sure + 1 -- columns that are sure
        local found = known < n and guesses.looked_up(ids, n - known) or {}
        reads[i] = math.min(known + #found, n)
        most = math.max(most, reads[i])
        for k = 2, n do
            columns[k] = columns[k] or {}
            columns[k][i] = { ids[pass.sure + k - 1] or found[k - known] or 0 }
        end
    end
    for k = 2, most do pass:add(te.tensor(columns[k], { dtype = "int32", device = pass.device })) end
    return reads
end

-- Of a smaller model --------------------------------------------------------------------------------------------------

local Assistant = {}
Assistant.__index = Assistant

--- Guesses that a model draws as opts say.
function guesses.assistant(model, opts)
    return setmetatable({ model = model, opts = opts, cache = KVCache() }, Assistant)
end

--- How many columns it can fill behind so many tokens that are sure: the last is guessed and not read.
function Assistant:room(sure) return math.max(self.model.config.block_size - sure + 2, 1) end

--- Forgets tokens behind the first `length`.
function Assistant:keep(length) self.cache:truncate(math.min(length, self.cache.length)) end

--- Goes on with the rows at these places.
function Assistant:select(places)
    if self.cache.length > 0 then self.cache:select(places) end
end

function Assistant:fill(pass, n)
    local tokens, reads = n > 1 and pass:sure_tokens(self.cache.length + 1), {}
    for k = 2, n do
        local logits = pass:prepared(self.cache:run(self.model, tokens), k - 1)
        local p = self.opts.temperature > 0 and sampling.distribution(logits, self.opts) or nil
        local drawn = p and sampling.draw(p, self.opts) or te.argmax(logits, -1, true)
        tokens = pass:keep_sure(drawn:to "int32", k)
        pass:add(tokens, p)
    end
    for i = 1, #pass.rows do reads[i] = n end
    return reads
end

require "te.uncompiled"(Lookup.fill, Assistant.fill) -- looked_up holds no model, and reads whole texts

return guesses
