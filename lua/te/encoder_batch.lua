--- Texts of different lengths, as encoders take them: tokens without padding, one text after the other.
--
--     ids {batch, seq}                     texts of one length
--     ids {batch, seq}, seq_lens {batch}   the first so many tokens of each row are a text, what follows is padding; an
--     or attention_mask {batch, seq}       attention_mask, which is not 0 where tokens are, says the same
--     ids {tokens}, seq_lens {batch}       packed texts
--
-- Padding is taken out before anything is computed, and is zeros in results: it costs nothing and changes nothing.

local te = require "te"
local fail = require "te.fail"
local options = require "te.options"

local Batch = {}
Batch.__index = Batch

local function describe(value) return te.is_tensor(value) and options.shape(value) or options.shown(value) end

-- Lengths as a list, whatever they were given as.
local function list_of(who, name, lengths)
    if te.is_tensor(lengths) then
        if lengths:dim() ~= 1 or not lengths.dtype:find "^int" then
            fail("%s: option %s: expected whole numbers {batch}, got %s %s", who, name, lengths.dtype,
                options.shape(lengths))
        end
        return lengths:totable()
    end
    options.argument(who, "option " .. name, lengths, { "table" })
    for i = 1, options.list(who, "option " .. name, lengths) do
        options.argument(who, ("option %s[%d]"):format(name, i), lengths[i], { "integer" })
    end
    return lengths
end

-- How many tokens each row of a mask has.
local function lengths_of_mask(who, mask, ids)
    if not te.is_tensor(mask) or options.shape(mask) ~= options.shape(ids) or ids:dim() ~= 2 then
        fail("%s: option attention_mask: expected the shape of ids {batch, seq}, %s, got %s", who, options.shape(ids),
            describe(mask))
    end
    local lengths = {}
    for i, row in ipairs(te.ne(mask, 0):to("int32"):totable()) do
        local n = 0
        while row[n + 1] == 1 do n = n + 1 end
        for column = n + 1, #row do
            if row[column] == 1 then
                fail("%s: option attention_mask: in row %d a token, number %d, follows padding; tokens come first", who,
                    i, column)
            end
        end
        lengths[i] = n
    end
    return lengths
end

-- Raises unless the lengths go with ids.
local function check_lengths(self, lengths)
    local ids, total, longest = self.ids, 0, 0
    local most = ids:dim() == 2 and ids:size(2) or ids:size(1)
    for i, n in ipairs(lengths) do
        if n < 1 or n > most then
            fail("%s: text %d has %d tokens, expected 1 to %d", self.who, i, n, most)
        end
        total, longest = total + n, math.max(longest, n)
    end
    if ids:dim() == 2 and #lengths ~= ids:size(1) or ids:dim() == 1 and total ~= ids:size(1) then
        fail("%s: %d lengths, %d tokens together, for ids %s", self.who, #lengths, total, options.shape(ids))
    end
    return longest
end

local function int32(list, device) return te.tensor(list, { dtype = "int32", device = device }) end

-- Of packed texts: where each begins, counted from 0, each token's place in its own, and, of a padded batch, which of
-- all its tokens are there.
local function pack(self, lengths)
    local padded, device = self.ids:dim() == 2, self.ids.device
    local seq = padded and self.ids:size(2)
    local starts, positions, rows, n = {}, {}, {}, 0
    for i, length in ipairs(lengths) do
        starts[i] = n
        for at = 0, length - 1 do
            n = n + 1
            positions[n] = at
            if padded then rows[n] = (i - 1) * seq + at end
        end
    end
    self.starts, self.positions = int32(starts, device), int32(positions, device)
    self.seq_lens, self.lengths = int32(lengths, device), lengths
    if padded then self.rows = int32(rows, device) end
end

--- Where the tokens of a call are: { ids, token_types =, seq_lens =, positions =, n = texts }.
---@param who string
---@param ids te.Tensor
---@param opts table  seq_lens, attention_mask, token_types
---@param block_size integer
function Batch.of(who, ids, opts, block_size)
    if not te.is_tensor(ids) or ids:dim() ~= 2 and not (ids:dim() == 1 and opts.seq_lens) then
        fail("%s: ids: expected {batch, seq}, or {tokens} with seq_lens, got %s", who, describe(ids))
    end
    if opts.seq_lens and opts.attention_mask then fail("%s: seq_lens and attention_mask: one of them", who) end
    local types = opts.token_types
    if types and (not te.is_tensor(types) or options.shape(types) ~= options.shape(ids)) then
        fail("%s: option token_types: expected the shape of ids, %s, got %s", who, options.shape(ids), describe(types))
    end
    local self = setmetatable({ who = who, ids = ids, shape = ids.shape }, Batch)
    local lengths = opts.seq_lens and list_of(who, "seq_lens", opts.seq_lens)
        or opts.attention_mask and lengths_of_mask(who, opts.attention_mask, ids)
    local longest = lengths and check_lengths(self, lengths) or ids:size(2)
    if longest > block_size then fail("%s: a text of %d tokens, block_size is %d", who, longest, block_size) end
    self.n = lengths and #lengths or ids:size(1)
    local whole = ids:dim() == 2
    for _, n in ipairs(lengths or {}) do whole = whole and n == ids:size(2) end
    if whole then
        self.positions = te.arange(0, ids:size(2) - 1, 1, { dtype = "int32", device = ids.device })
    else
        pack(self, lengths)
    end
    self.ids, self.token_types = self:take(ids), types and self:take(types)
    return self
end

--- What there is for each of the tokens {tokens}, out of something in the shape of ids.
---@param t te.Tensor
function Batch:take(t)
    if not self.rows then return t end
    return t:reshape({ -1 }):index_select(1, self.rows)
end

--- Rows {…, width} of tokens in the shape of ids, zeros where there is padding.
---@param x te.Tensor
function Batch:give_back(x)
    if not self.rows then return x end
    local batch, seq, width = self.shape[1], self.shape[2], x:size(-1)
    local zeros = te.zeros({ batch * seq, width }, { dtype = x.dtype, device = x.device })
    return zeros:index_copy(1, self.rows, x):view { batch, seq, width }
end

--- The first token's row of each text {batch, width}.
---@param x te.Tensor
function Batch:first(x)
    if self.starts then return x:index_select(1, self.starts) end
    return x:select(2, 1)
end

--- The mean of each text's rows {batch, width}.
---@param x te.Tensor
function Batch:mean(x)
    if not self.seq_lens then return te.mean(x, 2) end
    if not self.text_of then
        local texts = {}
        for i, length in ipairs(self.lengths) do
            for _ = 1, length do texts[#texts + 1] = i - 1 end
        end
        self.text_of = int32(texts, x.device)
    end
    local sums = te.zeros({ self.n, x:size(-1) }, { dtype = "float32", device = x.device })
    if x.dtype ~= "float64" then x = x:to "float32" else sums = sums:to "float64" end
    return sums:index_add(1, self.text_of, x) / self.seq_lens:to(x.dtype):unsqueeze(-1)
end

return Batch
