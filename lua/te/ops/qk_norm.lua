--- Queries and keys normalized head by head, as part of self-attention: over the features of a head, with weights that
--- all heads share (Henry et al. 2020; Dehghani et al. 2023). Scores then stay bounded however large activations grow.
---
---     te.GroupedQueryAttention(1024, 16, 8, { rope = true, qk_norm = "RMSNorm", qk_norm_before_rope = true })
---
--- The option names and their defaults are those of Transformer Engine; rotary positions come first unless
--- qk_norm_before_rope says otherwise.

local te = require "te"
local fail = require "te.fail"

local qk_norm = {}

local EPS = 1e-6

qk_norm.OPTIONS = {
    qk_norm = { "string", "none", choices = { "none", "L2Normalization", "RMSNorm", "LayerNorm" },
        help = "normalization of queries and keys, head by head" },
    qk_norm_eps = { "number", EPS, min = 0, help = "eps of the norms" },
    qk_norm_before_rope = { "boolean", false, help = "normalize before rotating, not after" },
    qk_norm_zero_centered_gamma = { "boolean", false, help = "the weights are stored minus 1" },
}

--- Gives an attention module its norms, fields q_norm and k_norm.
---@param self table  head_size is set
---@param opts table  checked
function qk_norm.init(self, opts)
    if opts.qk_norm == "none" then
        if opts.qk_norm_eps ~= EPS then
            fail("te.%s: option qk_norm_eps: %g has no effect without qk_norm", self.__name, opts.qk_norm_eps)
        elseif opts.qk_norm_before_rope then
            fail("te.%s: option qk_norm_before_rope has no effect without qk_norm", self.__name)
        end
    end
    local weighted = opts.qk_norm == "RMSNorm" or opts.qk_norm == "LayerNorm"
    if opts.qk_norm_zero_centered_gamma and not weighted then
        fail("te.%s: option qk_norm_zero_centered_gamma has no effect with qk_norm = %q", self.__name, opts.qk_norm)
    end
    if opts.qk_norm == "none" then return end
    local function norm()
        if not weighted then return te.L2Normalization { eps = opts.qk_norm_eps } end
        -- where heads are split each process has those of its own: rows, for the norm
        local made = te[opts.qk_norm](self.head_size, { eps = opts.qk_norm_eps,
            zero_centered_gamma = opts.qk_norm_zero_centered_gamma, params_dtype = opts.params_dtype,
            device = opts.device, sequence_parallel = self.tp_group ~= nil, tensor_parallel_group = self.tp_group })
        made.set_sequence_parallel = false
        return made
    end
    self.q_norm, self.k_norm = norm(), norm()
    self.qk_norm_before_rope = opts.qk_norm_before_rope
end

--- Queries and keys of any shape whose last dimension is a head's features, normalized.
function qk_norm.apply(self, q, k) return self.q_norm(q), self.k_norm(k) end

-- Where each token stands in its sequence, from 0. Tokens behind the last sequence count as its own here: the attention
-- that follows says what lengths do not add up.
local function positions_in(seq_lens, tokens)
    local lengths = seq_lens:to "float32"
    local ends, token = te.cumsum(lengths, 1), te.arange(0, tokens - 1, 1, { device = lengths.device })
    local over = te.le(ends:unsqueeze(2), token:unsqueeze(1)):to("float32"):sum(1) -- sequences that end before
    over = over:clamp(0, math.max(lengths:size(1) - 1, 0))
    return token - te.index_select(ends - lengths, 1, over:to "int64")
end

--- A packed projection {…, seq, (heads + 2 kv_heads) head_size} with queries and keys normalized, and the frequencies
--- by which they are still to be turned.
---@param self table
---@param qkv te.Tensor
---@param seq_lens te.Tensor|nil
---@return te.Tensor qkv
---@return te.Tensor|nil frequencies
function qk_norm.packed(self, qkv, seq_lens)
    local heads, kv_heads, frequencies = self.num_heads, self.num_kv_heads, self.rope_frequencies
    local last, shape, split = qkv:dim(), qkv.shape, qkv.shape
    split[last], split[last + 1] = heads + 2 * kv_heads, self.head_size
    local parts = qkv:reshape(split)
    local qk, v = parts:narrow(last, 1, heads + kv_heads), parts:narrow(last, heads + kv_heads + 1, kv_heads)
    if frequencies and not self.qk_norm_before_rope then
        local positions = seq_lens and te.no_grad(positions_in, seq_lens, qkv:size(1)) or nil
        qk = te.rope(qk:transpose(-3, -2), frequencies, positions, { interleaved = self.rope_interleaved })
        qk, frequencies = qk:transpose(-3, -2), nil
    end
    local q, k = qk_norm.apply(self, qk:narrow(last, 1, heads), qk:narrow(last, heads + 1, kv_heads))
    return te.cat({ q, k, v }, last):view(shape), frequencies
end

return qk_norm
