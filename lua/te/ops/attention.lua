--- Attention as modules.
--
-- The self-attention modules project x to Q, K and V in one product, attend, and project back. x is {tokens, hidden}
-- for one sequence, {batch, seq, hidden}, or {tokens, hidden} with seq_lens {batch} for packed sequences. Grouped-query
-- attention shares each key and value head among num_heads / num_kv_heads query heads; with as many as queries it is
-- the ordinary multi-headed one, with a single one multi-query attention (Shazeer 2019; Ainslie et al. 2023). With the
-- option `rope` queries and keys are turned by their positions (te.rope), with `qk_norm` normalized (te.ops.qk_norm).
-- softmax_type "off-by-one" adds 1 to the denominator of every softmax, "learnable" exp(softmax_offset), a parameter of
-- each head, so that a head may attend to nothing (Miller 2023; Xiao et al. 2023).
--
-- With cp_group x is this process's part of a sequence that is cut between the processes of a group
-- (te.ops.context_parallel). With tp_group the heads are split between the processes, num_heads and num_kv_heads those
-- of this process, and x is whole (te.ops.tensor_parallel).

local te = require "te"
local fail = require "te.fail"
local mode = require "te.recipe.mode"
local rotary = require "te.rotary"
local options = require "te.options"
local declared = require "te.ops.declared"
local operation = require "te.operation"
local qk_norm = require "te.ops.qk_norm"
local context_parallel = require "te.ops.context_parallel"
local tensor_parallel = require "te.ops.tensor_parallel"
local whole = require "te.distributed.whole"
local packed = require "te.packed"
local KVCache = require "te.kv_cache"
local BasicOperation = operation.BasicOperation

-- Of both kinds of modules.
local ATTENTION = declared.join(context_parallel.OPTIONS, {
    causal = { "boolean", true, help = "a token does not attend to later ones" },
    dropout = { "number", 0, min = 0, below = 1, help = "dropout of attention probabilities, in training" },
    scale = { "number", help = "factor of scores; default: 1 / sqrt(head size)" },
    window_left = { "integer", -1, min = -1, help = "how many tokens back a token attends; -1: to the start" },
    window_right = { "integer", nil, min = -1,
        help = "how many tokens ahead; -1: to the end; default: -1, or 0 when causal" },
    softmax_type = { "string", "vanilla", choices = { "vanilla", "off-by-one", "learnable" },
        help = "off-by-one adds 1 to the denominator; learnable adds exp(softmax_offset), a parameter per head" },
    name = declared.NAME,
})

local SELF_ATTENTION = declared.join(declared.join(declared.join(qk_norm.OPTIONS, ATTENTION),
    tensor_parallel.ATTENTION), {
    head_size = { "size", help = "features per head; default: hidden_size / num_heads" },
    rope = rotary.OPTION,
    bias = { "boolean", true, help = "bias of both projections, unless qkv_bias or proj_bias is given" },
    qkv_bias = { "boolean", help = "bias of the projection to Q, K and V" },
    proj_bias = { "boolean", help = "bias of the output projection" },
    init_method = declared.INIT,
    output_layer_init_method = { "callable", help = "for the output projection; default: init_method" },
    params_dtype = declared.PLACE.params_dtype,
    device = declared.PLACE.device,
})

-- What tells te.self_attention and te.scaled_dot_product_attention how to attend: fields of the modules.
local FIELDS = { "causal", "scale", "window_left", "window_right" }

-- Takes the fields from checked options.
local function set_fields(self, opts)
    if opts.causal and (opts.window_right or 0) ~= 0 then
        fail("te.%s: option window_right: %d, but a causal token sees none ahead", self.__name, opts.window_right)
    end
    for _, name in ipairs(FIELDS) do self[name] = opts[name] end
    self.dropout, self.name = opts.dropout, opts.name
end

-- What stands in the denominators of each head beside its scores.
local function init_offset(self, opts, heads)
    if opts.softmax_type == "vanilla" then return end
    local dtype = opts.params_dtype == "float64" and "float64" or "float32"
    local zeros = te.zeros({ heads }, { dtype = dtype, device = opts.device })
    if opts.softmax_type == "off-by-one" then
        self:register_buffer("softmax_offset", zeros, { persistent = false })
    else
        zeros.requires_grad = true
        self.softmax_offset = zeros
        if self.tp_group then whole.hold(zeros, self.tp_group, 1, { heads * self.tp_group.size }) end
    end
end

-- fn(...), an attention, under the recipe in force.
local function attend(self, fn, ...)
    if mode.on then return mode.attention(self, fn, ...) end
    return fn(...)
end

-- The same where heads may be split: those of each process drop probabilities of their own.
local function attend_heads(self, fn, ...)
    if self.tp_group and self.training and self.dropout > 0 then
        return tensor_parallel.apart(self.tp_group, attend, self, fn, ...)
    end
    return attend(self, fn, ...)
end

-- The fields as options of the functions; probabilities are dropped while training only.
local function attributes(self, more)
    local values = more or {}
    for i = 1, #FIELDS do values[FIELDS[i]] = self[FIELDS[i]] end
    values.dropout = self.training and self.dropout or 0
    return values
end

local WAITS = "it waits for other processes"

-- The method of that name: cuts sequences between the processes of a group, nil: of none.
local function set_context_parallel_group(self, group, comm_type)
    context_parallel.set(self, ("te.%s:set_context_parallel_group"):format(self.__name), group, comm_type)
    return self
end

local SelfAttention = BasicOperation:extend("SelfAttention")
SelfAttention.set_context_parallel_group = set_context_parallel_group

SelfAttention.takes_seq_lens = true
SelfAttention.attends_to_rows = true -- across rows that seq_lens tell apart
SelfAttention.plan_fields = {
    "qkv", "proj", "causal", "scale", "window_left", "window_right", "dropout", "training", "rope_interleaved",
    "q_norm", "k_norm", "qk_norm_before_rope", "cp_group", "tp_group",
}

-- What delayed scaling remembers of Q, K and V, which lie in one tensor, stands beside the two projections' own.
SelfAttention.attention_key = "attention"
function SelfAttention:product_keys() return { self.attention_key } end

-- How many heads of queries and keys are here.
local function split_heads(self, who, num_heads, num_kv_heads, opts)
    local group, sequence = tensor_parallel.check(who, "tp_group", opts.tp_group, opts.sequence_parallel)
    opts.sequence_parallel = sequence
    if not group then return num_heads, num_kv_heads end
    tensor_parallel.check_divides(who, "num_heads", num_heads, group)
    tensor_parallel.check_divides(who, "num_kv_heads", num_kv_heads, group)
    self.tp_group = group
    return num_heads / group.size, num_kv_heads / group.size
end

local function init_heads(self, hidden_size, num_heads, num_kv_heads, opts)
    local who = "te." .. self.__name
    options.argument(who, "hidden_size", hidden_size, { "size" })
    options.argument(who, "num_heads", num_heads, { "size" })
    options.argument(who, "num_kv_heads", num_kv_heads, { "size" })
    opts = options.check(who, opts, SELF_ATTENTION)
    if not opts.head_size and hidden_size % num_heads ~= 0 or num_heads % num_kv_heads ~= 0 then
        fail("%s: hidden_size %d must be a multiple of num_heads %d, and that of num_kv_heads %d", who, hidden_size,
            num_heads, num_kv_heads)
    end
    self.head_size = opts.head_size or hidden_size / num_heads
    local heads, kv_heads = split_heads(self, who, num_heads, num_kv_heads, opts)
    self.num_heads, self.num_kv_heads = heads, kv_heads
    set_fields(self, opts)
    qk_norm.init(self, opts)
    init_offset(self, opts, heads)
    context_parallel.set(self, who, opts.cp_group, opts.cp_comm_type)
    self.rope_interleaved = false
    if opts.rope then
        local frequencies, interleaved = rotary.of_option(who, opts.rope, self.head_size, opts.device)
        self:register_buffer("rope_frequencies", frequencies, { persistent = false })
        self.rope_interleaved = interleaved
    end

    local function linear(name, mode_of_split, inputs, outputs, bias, init_method, sections)
        if bias == nil then bias = opts.bias end
        return te.Linear(inputs, outputs, tensor_parallel.linear(self.tp_group, opts.sequence_parallel, mode_of_split,
            { bias = bias, init_method = init_method, name = opts.name and opts.name .. name,
                params_dtype = opts.params_dtype, device = opts.device, tensor_parallel_sections = sections }))
    end
    local q, kv = num_heads * self.head_size, num_kv_heads * self.head_size
    self.qkv = linear(".qkv", "column", hidden_size, q + 2 * kv, opts.qkv_bias, opts.init_method,
        self.tp_group and { q, kv, kv })
    self.proj = linear(".proj", "row", q, hidden_size, opts.proj_bias,
        opts.output_layer_init_method or opts.init_method)
end

local function packed_attributes(self)
    return attributes(self, { heads = self.num_heads, kv_heads = self.num_kv_heads,
        interleaved = self.rope_interleaved })
end

-- Q, K and V {batch, heads, seq, head size} of a packed projection, normalized, and turned by these positions, or those
-- from this offset on; and K and V as one, where they still lie side by side.
local function separate(self, qkv, positions, offset)
    local heads, kv_heads = self.num_heads, self.num_kv_heads
    local batch = qkv:dim() == 3 and qkv:size(1) or 1
    local parts = qkv:view({ batch, qkv:size(-2), heads + 2 * kv_heads, self.head_size }):transpose(2, 3)
    local frequencies, before = self.rope_frequencies, self.q_norm and self.qk_norm_before_rope
    local function turned(x)
        if not frequencies then return x end
        return te.rope(x, frequencies, positions, { interleaved = self.rope_interleaved, offset = offset })
    end
    local qk = parts:narrow(2, 1, heads + kv_heads)
    if not before then qk = turned(qk) end
    local q, k = qk:narrow(2, 1, heads), qk:narrow(2, heads + 1, kv_heads)
    if self.q_norm then q, k = qk_norm.apply(self, q, k) end
    if before then q, k = turned(q), turned(k) end
    local both = not (frequencies or self.q_norm) and parts:narrow(2, heads + 1, 2 * kv_heads) or nil
    return q, k, parts:narrow(2, heads + kv_heads + 1, kv_heads), both
end

-- y {batch, heads, seq, head size} as rows like those of qkv.
local function rows_of(self, y, qkv)
    local shape = qkv.shape
    shape[#shape] = self.num_heads * self.head_size
    return y:transpose(2, 3):reshape(shape)
end

-- The rows of qkv attend to what the cache holds, themselves included.
local function attend_cached(self, cache, qkv, seq_lens)
    if seq_lens then
        fail("te.%s: with a te.KVCache every sequence has the same length; seq_lens is not taken", self.__name)
    end
    if not self.causal then
        fail("te.%s: with a te.KVCache tokens can't see later ones; causal must be true", self.__name)
    end
    if cache.attend then -- the cache of a recorded step
        local q, k, v, both = separate(self, qkv, cache.position)
        local keys, values, bias = cache:attend(self, k, v, both)
        return rows_of(self, attend(self, te.scaled_dot_product_attention, q, keys, values, bias, self.softmax_offset,
            { scale = self.scale }), qkv)
    end
    local q, k, v = separate(self, qkv, nil, cache.length)
    k, v = cache:append(self, k, v)
    return rows_of(self, attend_heads(self, te.scaled_dot_product_attention, q, k, v, nil, self.softmax_offset,
        attributes(self, { bottom_right = true })), qkv)
end

-- The rows of qkv are this process's part of a sequence.
local function attend_parallel(self, qkv, seq_lens)
    if seq_lens then
        fail("te.%s: under cp_group every sequence has the same length; seq_lens is not taken", self.__name)
    end
    local positions = self.rope_frequencies and context_parallel.positions(self, qkv)
    local q, k, v = separate(self, qkv, positions)
    return rows_of(self, context_parallel.attend(self, q, k, v, self.softmax_offset, attributes(self)), qkv)
end

-- Raises where lengths of packed sequences are missing, or do not go with x.
local function check_lengths(self, x, seq_lens)
    if seq_lens == nil then return packed.check(self) end
    if not te.is_tensor(seq_lens) then
        fail("te.%s: seq_lens: expected an int32 or int64 tensor {batch}, got %s", self.__name,
            te._core.describe(seq_lens))
    elseif te.is_tensor(x) and x:dim() ~= 2 then
        fail("te.%s: seq_lens go with x {tokens, hidden}, which holds packed sequences, not with %s", self.__name,
            options.shape(x))
    end
end

function SelfAttention:forward(x, seq_lens)
    check_lengths(self, x, seq_lens)
    local qkv, attended = self.qkv(x), nil
    if qkv:dim() < 2 then
        fail("te.%s: x: expected {tokens, hidden} or {batch, seq, hidden}, got %s", self.__name, options.shape(x))
    end
    if self.cp_group then
        attended = attend_parallel(self, qkv, seq_lens)
    elseif KVCache.active then
        attended = attend_cached(self, KVCache.active, qkv, seq_lens)
    else
        local rows, frequencies = qkv, self.rope_frequencies
        if self.q_norm then rows, frequencies = qk_norm.packed(self, qkv, seq_lens) end
        attended = attend_heads(self, te.self_attention, rows, seq_lens, frequencies, self.softmax_offset,
            packed_attributes(self))
    end
    if self.qkv.pure and qkv ~= x then qkv:release() end -- a replacement may keep what it returns or reads
    local y = self.proj(attended)
    if self.proj.pure and y ~= attended then attended:release() end
    return y
end

function SelfAttention:lower(g, x)
    if self.cp_group or self.tp_group then return nil, WAITS end
    if KVCache.active then return nil, "its keys and values go through a te.KVCache" end
    if self.q_norm then return nil, "queries and keys are normalized head by head" end
    local qkv, reason = operation.lower_child(self.qkv, g, x)
    if not qkv then return nil, "qkv: " .. reason end
    local attended, y
    local frequencies = g:param(self, "rope_frequencies")
    attended, reason = g:op("self_attention",
        { qkv, g:seq_lens(), frequencies, g:param(self, "softmax_offset") }, packed_attributes(self),
        g:product(self, self.attention_key))
    if not attended then return nil, reason end
    y, reason = operation.lower_child(self.proj, g, attended)
    if not y then return nil, "proj: " .. reason end
    return y
end

function SelfAttention:describe()
    local split = self.tp_group and (", %s"):format(tostring(self.tp_group)) or context_parallel.describe(self)
    return ("heads=%d, kv_heads=%d, causal=%s%s%s%s"):format(self.num_heads, self.num_kv_heads, tostring(self.causal),
        self.rope_frequencies and ", rope" or "", self.q_norm and ", qk_norm" or "", split)
end

local MultiHeadedSelfAttention = SelfAttention:extend("MultiHeadedSelfAttention")
MultiHeadedSelfAttention.pure, MultiHeadedSelfAttention.takes = true, 3

--- Self-attention: projects to queries, keys and values in one product, attends, and projects back. x is {batch, seq,
--- hidden_size}; or {tokens, hidden_size}: one sequence, or with seq_lens {batch} packed sequences.
function MultiHeadedSelfAttention:init(hidden_size, num_heads, opts)
    init_heads(self, hidden_size, num_heads, num_heads, opts)
end
options.declare(MultiHeadedSelfAttention.init, SELF_ATTENTION)

local GroupedQueryAttention = SelfAttention:extend("GroupedQueryAttention")
GroupedQueryAttention.pure, GroupedQueryAttention.takes = true, 4

--- te.MultiHeadedSelfAttention where num_heads / num_kv_heads query heads share each key and value head.
function GroupedQueryAttention:init(hidden_size, num_heads, num_kv_heads, opts)
    init_heads(self, hidden_size, num_heads, num_kv_heads, opts)
end
options.declare(GroupedQueryAttention.init, SELF_ATTENTION)

local MultiQuerySelfAttention = SelfAttention:extend("MultiQuerySelfAttention")
MultiQuerySelfAttention.pure, MultiQuerySelfAttention.takes = true, 3

--- te.MultiHeadedSelfAttention where all query heads share one key and value head.
function MultiQuerySelfAttention:init(hidden_size, num_heads, opts)
    init_heads(self, hidden_size, num_heads, 1, opts)
end
options.declare(MultiQuerySelfAttention.init, SELF_ATTENTION)

local DotProductAttention = BasicOperation:extend("DotProductAttention")
DotProductAttention.pure, DotProductAttention.takes = true, 1
DotProductAttention.num_extra_inputs = 2
DotProductAttention.plan_fields = {
    "causal", "scale", "window_left", "window_right", "bottom_right", "dropout", "training", "cp_group",
}
DotProductAttention.set_context_parallel_group = set_context_parallel_group

DotProductAttention.attention_key = "attention"
DotProductAttention.product_keys = SelfAttention.product_keys

local DOT_PRODUCT = declared.join(ATTENTION, {
    causal = { "boolean", false, help = ATTENTION.causal.help },
    bottom_right = { "boolean", false, help = "aligns the last query with the last key, whatever their numbers" },
    bias = { "boolean", false, help = "a third extra input, added to the scores, with a gradient" },
    num_heads = { "size", help = "query heads; required where softmax_type is not vanilla" },
})

--- attention(q, k, v) on {batch, heads, seq, head size}; k and v are extra inputs.
function DotProductAttention:init(opts)
    opts = options.check("te.DotProductAttention", opts, DOT_PRODUCT)
    set_fields(self, opts)
    self.bottom_right = opts.bottom_right
    if opts.bias then self.num_extra_inputs = 3 end
    if (opts.softmax_type == "vanilla") ~= (opts.num_heads == nil) then
        fail("te.DotProductAttention: num_heads goes with a softmax_type other than vanilla, got %s and %s",
            tostring(opts.num_heads), opts.softmax_type)
    end
    init_offset(self, opts, opts.num_heads)
    context_parallel.set(self, "te.DotProductAttention", opts.cp_group, opts.cp_comm_type)
end
options.declare(DotProductAttention.init, DOT_PRODUCT)

local function separate_attributes(self) return attributes(self, { bottom_right = self.bottom_right }) end

function DotProductAttention:op_forward(_, q, k, v, bias)
    if KVCache.active and te.is_tensor(q) and te.is_tensor(k) and q:dim() == 4 and k:dim() == 4 then
        KVCache.check_attention("te.DotProductAttention", q:size(3), k:size(3), self)
    end
    if self.cp_group then
        return context_parallel.attend(self, q, k, v, self.softmax_offset, separate_attributes(self))
    end
    return attend(self, te.scaled_dot_product_attention, q, k, v, bias, self.softmax_offset, separate_attributes(self))
end

function DotProductAttention:lower(g, q, k, v, bias)
    if self.cp_group then return nil, WAITS end
    if KVCache.active then return nil, "what it attends to is looked at inside te.KVCache:run" end
    return g:op("scaled_dot_product_attention", { q, k, v, bias or false, g:param(self, "softmax_offset") },
        separate_attributes(self))
end

function DotProductAttention:describe()
    return "causal=" .. tostring(self.causal) .. context_parallel.describe(self)
end

return {
    MultiHeadedSelfAttention = MultiHeadedSelfAttention, GroupedQueryAttention = GroupedQueryAttention,
    MultiQuerySelfAttention = MultiQuerySelfAttention, DotProductAttention = DotProductAttention,
}
