--- te.KVCache: keeps the keys and values of tokens that self-attention has seen, so that later tokens can attend to
--- them without recomputing them.
--
--     local cache = te.KVCache()
--     local y = cache:run(model, prompt)      -- all tokens of the prompt
--     local z = cache:run(model, token)       -- the next ones only; they attend to the prompt's, too
--
-- In `run` every te.MultiHeadedSelfAttention, GroupedQueryAttention and MultiQuerySelfAttention appends its keys and
-- values to the cache and attends to all that are there. Nothing else changes, so a function whose other operations
-- see one token at a time gives the rows that it gives for the whole sequence. All sequences of a batch have the same
-- length.
--
-- A module of one's own appends by itself, in each run as often and in the same order, and attends to what comes back:
--
--     local cache = te.KVCache.active                              -- nil outside of a run
--     if cache then k, v = cache:append(self, k, v) end            -- {batch, heads, seq, size}
--     return te.scaled_dot_product_attention(q, k, v, { causal = true, bottom_right = true })
--
-- An attention that did not append would see the new tokens alone. So inside a run causal attention with as many
-- queries as keys is an error, unless something has been appended and the cache was empty before: all tokens are new
-- then. What attends otherwise, to keys from elsewhere, goes on as ever; te.KVCache.outside runs what is not to know of
-- the cache at all, such as an encoder.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"
local graph = require "te.graph"
local settle = require "te.settle"
local core = te._core

local OPTIONS = {
    max_sequence_length = { "size",
        help = "capacity in tokens, allocated at once; default: grows as needed" },
}

local KVCache = { active = nil } -- the cache in force
KVCache.__index = KVCache

settle.when_stopped(function() KVCache.active = nil end)

local function swap(cache)
    local before = KVCache.active
    KVCache.active = cache or nil
    return before or false
end

local function new(_, opts)
    opts = options.check("te.KVCache", opts, OPTIONS)
    return setmetatable({ length = 0, limit = opts.max_sequence_length, entries = {} }, KVCache)
end

local HOW = "te.KVCache.active:append(self, k, v) appends keys and values and returns those of all tokens, to be "
    .. "attended to with bottom_right = true, and use_cache = false has generate go without"

-- Takes in what a run appended, or forgets it.
local function finish(self, ok, ...)
    local calls, appended, asked = self.calls, self.appended, self.asked
    self.calls, self.appended, self.asked = nil, nil, nil
    settle.unfinished[self] = nil
    if not ok then error((...), 0) end
    if asked and calls == 0 then
        fail("te.KVCache:run: no attention appended to the cache, from whose tokens positions go on; %s", HOW)
    end
    if self.length > 0 and calls ~= #self.entries then
        fail("te.KVCache:run: %d attentions ran, %d in the runs before", calls, #self.entries)
    end
    for i = #self.entries, calls + 1, -1 do self.entries[i] = nil end
    self.length = self.length + appended
    return ...
end

--- fn(...) without gradients, its self-attention going on from the tokens in the cache. Returns what fn returns; when
--- that raises, the cache holds what it held.
function KVCache:run(fn, ...)
    options.method("te.KVCache:run", self, KVCache)
    options.argument("te.KVCache:run", "fn", fn, { "callable" })
    if self.calls then fail("te.KVCache:run: this cache is running already") end
    if graph.before_launch() then
        fail("te.KVCache:run: the tokens in a cache grow in number and cannot be part of a graph")
    end
    self.calls, self.appended = 0, 0
    settle.unfinished[self] = function() self.calls, self.appended, self.asked = nil, nil, nil end
    return finish(self, core.under(swap, self, te.no_grad, fn, ...))
end

--- fn(...) with `cache` as the one in force, of whatever kind (te.decoding); false: none. Returns what fn returns.
---@param cache table|boolean
---@param fn function
function KVCache.within(cache, fn, ...) return core.pass(core.under(swap, cache, fn, ...)) end

--- Inside a run, fn(...) as it is without a cache: an encoder, or whatever else attends on its own. Returns what fn
--- returns.
---@param fn function
function KVCache.outside(fn, ...)
    options.argument("te.KVCache.outside", "fn", fn, { "callable" })
    return KVCache.within(false, fn, ...)
end

--- Where the new tokens stand, counted from 0: how many the cache in force holds, 0 without one. A run that asks has to
--- append. In a recorded step (te.decoding) the host does not know it: then the place is an int32 tensor {1}.
---@return integer|te.Tensor
function KVCache.offset()
    local cache = KVCache.active
    if not cache then return 0 end
    cache.asked = true
    return cache.length or cache.position
end

--- Raises where, inside a run, an attention would see the new tokens alone.
---@param who string
---@param queries integer  how many
---@param keys integer
---@param o table|nil      how it attends, as te.scaled_dot_product_attention takes it
function KVCache.check_attention(who, queries, keys, o)
    local cache = KVCache.active
    if not cache or queries ~= keys or keys == 0 or not (o and (o.causal or o.window_right == 0)) then return end
    if cache.length == 0 and cache.calls > 0 then return end
    fail("%s: inside te.KVCache:run it would attend to the %d new tokens alone; %s; te.KVCache.outside(fn, ...) runs "
        .. "what is not to go on from the cache", who, keys, HOW)
end

-- The options among a function's arguments.
local function options_in(...)
    for i = 1, select("#", ...) do
        local value = (select(i, ...))
        if type(value) == "table" then return value end
    end
end

-- Has a function look at its arguments inside a run.
local function guard(name, look)
    local attend = te[name]
    te[name] = function(...)
        if KVCache.active then look(...) end
        return attend(...)
    end
end

guard("scaled_dot_product_attention", function(q, k, ...)
    if not (te.is_tensor(q) and te.is_tensor(k) and q:dim() == 4 and k:dim() == 4) then return end
    KVCache.check_attention("te.scaled_dot_product_attention", q:size(3), k:size(3), options_in(...))
end)

guard("self_attention", function(qkv, ...)
    if not te.is_tensor(qkv) or qkv:dim() < 2 then return end
    KVCache.check_attention("te.self_attention", qkv:size(-2), qkv:size(-2), options_in(...))
end)

-- Room for `capacity` tokens, with those of `old` in it.
local function grown(self, old, like, capacity)
    local batch, heads, size = like:size(1), like:size(2), like:size(4)
    local new_one = te.empty({ batch, heads, capacity, size }, { dtype = like.dtype, device = like.device })
    if old then new_one:narrow(3, 1, self.length):copy_(old:narrow(3, 1, self.length)) end
    return new_one
end

local function check_length(self, needed)
    if self.limit and needed > self.limit then
        fail("te.KVCache: %d tokens, max_sequence_length is %d", needed, self.limit)
    end
end

-- Whether a tensor like `t`, of any number of tokens, can follow those in `kept`.
local function fits(kept, t)
    return kept:size(1) == t:size(1) and kept:size(2) == t:size(2) and kept:size(4) == t:size(4)
        and kept.dtype == t.dtype and kept.device == t.device
end

-- The entry of the attention that runs now, with room for `needed` tokens.
local function entry_for(self, module, k, v, needed)
    local entry = self.entries[self.calls + 1]
    local same = entry and entry.module == module and fits(entry.keys, k) and fits(entry.values, v)
    if self.length > 0 and not same then
        fail("te.KVCache: attention %d of this run is another one, or computes on another batch, dtype or device, than "
            .. "before", self.calls + 1)
    end
    local capacity = same and entry.keys:size(3) or 0
    if not same or capacity < needed then
        capacity = self.limit or math.max(needed, 2 * capacity, 64)
        local old = same and self.length > 0 and entry or {}
        entry = { module = module, keys = grown(self, old.keys, k, capacity),
            values = grown(self, old.values, v, capacity) }
    end
    return entry
end

-- Raises unless k and v are keys and values of the same new tokens.
local function check_new(k, v)
    local function shape(t) return te.is_tensor(t) and options.shape(t) or options.shown(t) end
    local fit = te.is_tensor(k) and te.is_tensor(v) and k:dim() == 4 and v:dim() == 4
    for i = 1, fit and 3 or 0 do fit = fit and k:size(i) == v:size(i) end
    if not fit then
        fail("te.KVCache:append: k and v: expected {batch, heads, seq, size} of the same tokens, got %s and %s",
            shape(k), shape(v))
    end
end

--- For attention modules: appends the keys and values {batch, heads, seq, size} of new tokens; returns those of all.
---@param module table   what attends: each run appends for the same ones in the same order
---@param k te.Tensor
---@param v te.Tensor
---@return te.Tensor k
---@return te.Tensor v
function KVCache:append(module, k, v)
    if not self.calls then fail("te.KVCache:append: this cache is not running") end
    check_new(k, v)
    local seq = k:size(3)
    if self.calls > 0 and seq ~= self.appended then
        fail("te.KVCache: attention %d of this run has %d tokens, the first had %d", self.calls + 1, seq, self.appended)
    end
    local all = self.length + seq
    check_length(self, all)
    local entry = entry_for(self, module, k, v, all)
    entry.keys:narrow(3, self.length + 1, seq):copy_(k)
    entry.values:narrow(3, self.length + 1, seq):copy_(v)
    self.calls, self.appended = self.calls + 1, seq
    self.entries[self.calls] = entry
    return entry.keys:narrow(3, 1, all), entry.values:narrow(3, 1, all)
end

--- Forgets all tokens but the first `length`.
function KVCache:truncate(length)
    options.method("te.KVCache:truncate", self, KVCache)
    options.argument("te.KVCache:truncate", "length", length, { "integer", min = 0, max = self.length })
    if self.calls then fail("te.KVCache:truncate: this cache is running") end
    self.length = length
end

-- Raises unless indices are integers in one dimension, and where it costs no wait those of sequences.
local function check_indices(indices, entry)
    if not te.is_tensor(indices) then
        fail("te.KVCache:select: indices: expected a tensor of integers, got %s", core.describe(indices))
    elseif indices.dtype ~= "int64" and indices.dtype ~= "int32" or indices:dim() ~= 1 then
        fail("te.KVCache:select: indices: expected int64 or int32 in one dimension, got %s", core.describe(indices))
    end
    local last = entry and entry.keys:size(1) - 1
    for at, index in ipairs(last and indices.device == "cpu" and indices:totable() or {}) do
        if index < 0 or index > last then
            fail("te.KVCache:select: indices: %d at position %d is outside 0 to %d", index, at, last)
        end
    end
end

--- Goes on with the sequences at these positions of the batch, in this order; a position may come several times.
---@param indices te.Tensor  integers {new batch}, counting from 0
function KVCache:select(indices)
    options.method("te.KVCache:select", self, KVCache)
    if self.calls then fail("te.KVCache:select: this cache is running") end
    check_indices(indices, self.entries[1])
    local function selected(tensor) return te.index_select(tensor, 1, indices) end
    local entries = {}
    for i, entry in ipairs(self.entries) do
        entries[i] = { module = entry.module, keys = selected(entry.keys), values = selected(entry.values) }
    end
    for _, entry in ipairs(self.entries) do
        entry.keys:release()
        entry.values:release()
    end
    self.entries = entries
end

function KVCache:__tostring()
    local function several(n, what) return ("%s %s%s"):format(n, what, n == 1 and "" or "s") end
    return ("KVCache(%s%s, %s)"):format(self.limit and self.length .. " of " or "",
        several(self.limit or self.length, "token"), several(#self.entries, "attention"))
end

options.declare(KVCache, OPTIONS)

return setmetatable(KVCache, { __call = new })
