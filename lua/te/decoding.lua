--- Tokens after a prompt, one at a time, as a recorded step (te.graph): one launch a token instead of a hundred.
--
-- A recording has the same shapes every time. So attention reads keys and values of as many tokens as there is room
-- for, behind a mask, and where the new token stands is a number on the device, which the step counts on:
--
--     position {1}        keys {batch, heads, capacity, size}, zeros from `position` on
--     1. write the token's keys and values to row `position`   2. attend to rows 0 to `position`
--     3. choose the next token                                 4. position = position + 1
--
-- A cache is taken over from a te.KVCache and given back to it, where several tokens come at once or rows leave. Only
-- models that are te's own in all their modules are recorded.

local te = require "te"
local fail = require "te.fail"
local KVCache = require "te.kv_cache"

local decoding = {}

local Rows = {} -- the cache in force while a step runs
Rows.__index = Rows

-- Memory for the keys and values of an entry, side by side, so that those of a token which come so are written at once:
-- so many tokens, and zeros behind them up to the capacity.
local function widened(entry, tokens, capacity)
    local k, heads = entry.keys, entry.keys:size(2)
    local both = te.zeros({ k:size(1), 2 * heads, capacity, k:size(4) }, { dtype = k.dtype, device = k.device })
    local wide = { module = entry.module, both = both, keys = both:narrow(2, 1, heads),
        values = both:narrow(2, heads + 1, heads) }
    wide.keys:narrow(3, 1, tokens):copy_(k:narrow(3, 1, tokens))
    wide.values:narrow(3, 1, tokens):copy_(entry.values:narrow(3, 1, tokens))
    return wide
end

-- 0 where a query at `position` sees the place, at most so many before its own, -inf elsewhere. Places are float32, in
-- which they are exact up to 2^24: of whole numbers every operation would be a kernel.
local seen_from = te.pointwise(function(position, place, most)
    local back = position - place
    return te.where(te.ge(back, 0), te.where(te.le(back, most), 0, -math.huge), -math.huge)
end)

-- What a query at `position` adds to its scores; `window` places before its own, below 0: all.
local function new_bias(self, window, dtype)
    local bias = seen_from(self.position:to "float32", self.places, window >= 0 and window or self.capacity)
    return bias:to(dtype):view { 1, 1, 1, self.capacity }
end

--- For te's self-attention: takes in the keys and values {batch, heads, 1, size} of the new token, which are the halves
--- of `both` where that is given. Returns those of all places, and the bias of scores that leaves the places of later
--- tokens out.
function Rows:attend(module, k, v, both)
    local entry = self.entries[self.calls + 1]
    if not entry or entry.module ~= module then
        fail("te.%s: attention %d of a recorded step is another one than before", module.__name, self.calls + 1)
    end
    self.calls = self.calls + 1
    if both then
        entry.both:index_copy_(3, self.position, both)
    else
        entry.keys:index_copy_(3, self.position, k)
        entry.values:index_copy_(3, self.position, v)
    end
    local window = module.window_left or -1
    local key = ("%s %d"):format(k.dtype, window)
    self.biases[key] = self.biases[key] or new_bias(self, window, k.dtype)
    return entry.keys, entry.values, self.biases[key]
end

local function run(self, model, tokens)
    self.calls, self.biases = 0, {}
    local logits = KVCache.within(self, te.no_grad, model, tokens)
    self.position:add_(1)
    self.biases = {}
    return logits
end

local METHODS = { "forward", "embed", "hidden_states", "chain", "head" }

-- Whether a module is of a class of te's own that computes by operations alone, and as that class says. What others do
-- in Lua, such as counting, would be done while a step is recorded and not again.
local function is_own(module)
    local class = getmetatable(module)
    for i = 1, #METHODS do
        if rawget(module, METHODS[i]) ~= nil then return false end
    end
    if module.split or rawget(class, "way") then return false end -- it waits for other processes
    if rawget(module, "_hooks") then return false end
    return rawget(class, "pure") == true or rawget(class, "records") == true
end

--- Whether steps of the model can be recorded.
---@param model table
function decoding.takes(model)
    if not model.takes_positions or model.stage then return false end -- stages wait for each other
    if not te._core.device_traits(model:head().device).graphs then return false end
    if te._core.profiling() or te.numerics.looks() then return false end -- they look at every kernel
    for _, module in model:named_modules() do
        if not is_own(module) then return false end
    end
    return true
end

local Steps = {}
Steps.__index = Steps

--- Steps that go on from the tokens in a te.KVCache, until there are `capacity`. Each takes tokens {batch, 1} and gives
--- choose(logits). The cache is empty until it is given back.
---@param model table
---@param cache table
---@param capacity integer
---@param choose function
function decoding.steps(model, cache, capacity, choose)
    local batch, device = cache.entries[1].keys:size(1), cache.entries[1].keys.device
    local rows = setmetatable({ capacity = capacity, entries = {},
        position = te.full({ 1 }, cache.length, { dtype = "int32", device = device }),
        places = te.arange(0, capacity - 1, 1, { dtype = "float32", device = device }) }, Rows)
    for i, entry in ipairs(cache.entries) do
        rows.entries[i] = widened(entry, cache.length, capacity)
        entry.keys:release()
        entry.values:release()
    end
    local self = setmetatable({ cache = cache, rows = rows, first = cache.length, length = cache.length }, Steps)
    cache.entries, cache.length = {}, 0
    local sample = te.zeros({ batch, 1 }, { dtype = "int32", device = device })
    self.graph = te.graph(function(tokens) return choose(run(rows, model, tokens)) end, { sample })
    return self
end

function Steps:__call(tokens)
    self.length = self.length + 1
    return self.graph(tokens:to("int32"))
end

--- How many tokens it has given.
function Steps:served() return self.length - self.first end

--- Whether there is room for another token.
function Steps:has_room() return self.length < self.rows.capacity end

--- Gives the tokens back to the cache.
function Steps:give_back()
    for _, entry in ipairs(self.rows.entries) do entry.both = nil end
    self.cache.entries, self.cache.length = self.rows.entries, self.length
    self.graph:release()
end

--- Lets go of all memory: what the last step gave, too, is of no use any more.
function Steps:close()
    self.graph:release()
    for _, entry in ipairs(self.rows.entries) do
        for _, t in ipairs { entry.keys, entry.values, entry.both } do t:release() end
    end
    self.rows.entries = {}
end

require "te.uncompiled"(Rows.attend, run, decoding.takes, decoding.steps, Steps.__call)

return decoding
