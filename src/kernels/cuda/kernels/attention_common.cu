/* attention_common.cu - what both families of attention kernels share: sequences and masks, where rows lie, bias,
 * dropout, lse. */

enum { TE_ATTENTION_THREADS = 128 };

#if TE_REAL_IS_F32
#define TE_ATTENTION_EXP(x)       te_exp(x)
#define TE_ATTENTION_LOG(x)       te_log(x)
#define TE_ATTENTION_FMA(a, b, c) TE_FMA(a, b, c)
#define TE_ATTENTION_SCALE(a)     ((a).scale_f32)
#define TE_ATTENTION_KEPT(a)      ((a).kept_scale_f32)
#else
#define TE_ATTENTION_EXP(x)       exp(x)
#define TE_ATTENTION_LOG(x)       log(x)
#define TE_ATTENTION_FMA(a, b, c) TE_FMA64(a, b, c)
#define TE_ATTENTION_SCALE(a)     ((a).scale)
#define TE_ATTENTION_KEPT(a)      ((a).kept_scale)
#endif
#define TE_LOWEST (-(te_real)TE_INFINITY)

/* The score beside those of keys in a row of this head, and the sum of weights that a row begins with. */
__device__ static inline te_real te_sink_of(const te_attention_args &a, int64_t head)
{
    return a.sinks ? ((const te_real *)a.sinks)[head] : TE_LOWEST;
}

__device__ static inline te_real te_sink_weight(te_real sink) { return sink == TE_LOWEST ? (te_real)0 : (te_real)1; }

/* --- sequences --------------------------------------------------------------------------------------------------- */

/* A batch entry, or a part of packed extents; what lies before the first and behind the last part sees nothing. */
struct te_sequence {
    int64_t batch, q_start, n_q, kv_start, n_kv;
    int64_t delta, left, right; /* query i stands at key i + delta and sees that many to its left and right */
};

__device__ static inline te_sequence te_sequence_at(const te_attention_args &a, int64_t index)
{
    te_sequence s = {index, 0, a.q.shape[2], 0, a.k.shape[2], 0, a.left, a.right};
    if (a.cu_q) {
        bool lead = index == 0, tail = index == a.n_seqs + 1;
        s.batch = 0;
        s.q_start = lead ? 0 : a.cu_q[index - 1];
        s.kv_start = lead ? 0 : a.cu_kv[index - 1];
        s.n_q = (tail ? a.q.shape[2] : a.cu_q[index]) - s.q_start;
        s.n_kv = (tail ? a.k.shape[2] : a.cu_kv[index]) - s.kv_start;
        if (lead || tail) s.left = 0, s.right = -1;
    }
    s.delta = a.bottom_right ? s.n_kv - s.n_q : 0;
    return s;
}

/* Which tile of which of n heads this block has, and the head that those share whose keys it reads. A grid has less
 * than 2^31 blocks: no division of 64 bits, which is a call that registers are spilled around. */
struct te_block {
    uint32_t tile, head, kv_head, batch;
};

__device__ static inline te_block te_block_of(const te_attention_args &a, int64_t n)
{
    uint32_t tiles = (uint32_t)a.tiles, heads = (uint32_t)n, others = blockIdx.x / tiles, head = others % heads;
    return {blockIdx.x % tiles, head, head / (heads / (uint32_t)a.k.shape[1]), others / heads};
}

/* That of this block, and where its tile of `rows` rows begins in it. Packed extents have as many tiles as their
 * rows and one more for each part, which rounds to whole tiles: part i begins at tile starts[i - 1] / rows + i, and
 * some tiles are nobody's. */
__device__ static inline te_sequence te_sequence_of(const te_attention_args &a, te_block block,
                                                    const int32_t *starts, int rows, int64_t *first)
{
    int64_t tile = block.tile, part = 0, beyond = a.n_seqs + 2;
    *first = tile * rows;
    if (!starts) return te_sequence_at(a, block.batch);
    while (beyond - part > 1) {
        int64_t middle = (part + beyond) >> 1;
        if (starts[middle - 1] / rows + middle <= tile) part = middle;
        else beyond = middle;
    }
    if (part > 0) *first -= (starts[part - 1] / rows + part) * rows;
    return te_sequence_at(a, part);
}

/* How many of n rows a tile of `rows` has that begins at the row `first`; none, or fewer: it is nobody's. */
TE_HD static inline int te_rows_in_tile(int64_t first, int64_t n, int rows)
{
    return (int)(n - first < rows ? n - first : rows);
}

/* The queries of this block: `rows` of a head and sequence, from `first` on. */
struct te_block_queries {
    te_sequence s;
    int64_t     head, kv_head, first;
    int         rows;
};

template <int ROWS> __device__ static inline te_block_queries te_queries_of_block(const te_attention_args &a)
{
    te_block_queries q;
    te_block         block = te_block_of(a, a.q.shape[1]);
    q.s = te_sequence_of(a, block, a.cu_q, ROWS, &q.first);
    q.head = block.head, q.kv_head = block.kv_head;
    q.rows = te_rows_in_tile(q.first, q.s.n_q, ROWS);
    return q;
}

/* Likewise its keys; the heads kv_head * group to kv_head * group + group - 1 read them. */
struct te_block_keys {
    te_sequence s;
    uint32_t    kv_head, group;
    int64_t     first;
    int         rows;
};

template <int ROWS> __device__ static inline te_block_keys te_keys_of_block(const te_attention_args &a)
{
    te_block_keys k;
    te_block      block = te_block_of(a, a.k.shape[1]);
    k.s = te_sequence_of(a, block, a.cu_kv, ROWS, &k.first);
    k.kv_head = block.head, k.group = (uint32_t)a.q.shape[1] / (uint32_t)a.k.shape[1];
    k.rows = te_rows_in_tile(k.first, k.s.n_kv, ROWS);
    return k;
}

TE_HD static inline int64_t te_clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Keys that query i sees. */
TE_HD static inline int64_t te_first_key(const te_sequence &s, int64_t i)
{
    return te_clamp(i + s.delta - s.left, 0, s.n_kv);
}
TE_HD static inline int64_t te_end_key(const te_sequence &s, int64_t i)
{
    return te_clamp(i + s.delta + s.right + 1, 0, s.n_kv);
}

TE_HD static inline bool te_sees(const te_sequence &s, int64_t i, int64_t key)
{
    return key >= i + s.delta - s.left && key <= i + s.delta + s.right;
}

/* Columns of a tile that a row sees: first … first + n - 1. */
struct te_span {
    int      first;
    unsigned n;
};

TE_HD static inline bool te_in_span(const te_span &span, int column)
{
    return (unsigned)(column - span.first) < span.n;
}

/* Of a tile's first `columns` columns those from `from` to `end` - 1. */
TE_HD static inline te_span te_span_between(int from, int end, int columns)
{
    int first = from > 0 ? from : 0, behind = end < columns ? end : columns;
    return {first, behind > first ? (unsigned)(behind - first) : 0u};
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

TE_HD static inline te_a *te_row_of(const te_cuda_view &v, int64_t batch, int64_t head, int64_t row)
{
    return (te_a *)v.data + batch * v.stride[0] + head * v.stride[1] + row * v.stride[2];
}

/* --- scores ------------------------------------------------------------------------------------------------------ */

#if TE_HAS_BIAS
/* Bias of a query at its sequence's first key; those of the next keys lie bias.stride[3] apart. */
TE_HD static inline const te_c *te_bias_row(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i)
{
    return (const te_c *)a.bias.data + s.batch * a.bias.stride[0] + head * a.bias.stride[1] +
           (s.q_start + i) * a.bias.stride[2] + s.kv_start * a.bias.stride[3];
}

/* Likewise the gradient of the bias, which is dS: stored by the kernels that make dq, which meet each pair once. */
TE_HD static inline te_real *te_dbias_row(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i)
{
    return (te_real *)a.dbias.data + s.batch * a.dbias.stride[0] + head * a.dbias.stride[1] +
           (s.q_start + i) * a.dbias.stride[2] + s.kv_start * a.dbias.stride[3];
}
#endif

TE_HD static inline te_real te_bias_at(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i,
                                       int64_t key)
{
#if TE_HAS_BIAS
    return te_from_c(te_bias_row(a, s, head, i)[key * a.bias.stride[3]]);
#else
    return 0;
#endif
}

/* A score and its bias, of which minus infinity hides the score, whatever that is. */
TE_HD static inline te_real te_biased(te_real score, te_real bias) { return bias == TE_LOWEST ? bias : score + bias; }

/* --- dropout ----------------------------------------------------------------------------------------------------- */

/* What all draws of a kernel have in common, read once. */
struct te_dropout {
    te_rng   rng;
    uint32_t threshold, all; /* all: the bits of four keys, or 0 where nothing is kept */
};

__device__ static inline te_dropout te_dropout_of(const te_attention_args &a)
{
    const uint64_t *base = (const uint64_t *)a.rng[3];
    te_dropout      z = {{a.rng[0], a.rng[1], a.rng[2], 0}, (uint32_t)a.threshold, a.threshold >> 32 ? 0u : 15u};
    if (a.dropout && base) z.rng.seed = base[0], z.rng.offset += base[1];
    return z;
}

/* The element whose word belongs to a query and its sequence's first key; those of the next keys follow. */
__device__ static inline uint64_t te_dropout_row(const te_attention_args &a, const te_sequence &s, int64_t head,
                                                 int64_t i)
{
    uint64_t row = (uint64_t)((s.batch * a.q.shape[1] + head) * a.q.shape[2] + s.q_start + i);
    return row * (uint64_t)a.k.shape[2] + (uint64_t)s.kv_start;
}

/* Whether the first of four keys, when it is a multiple of 4, has the first word of a generator call in every row. */
__device__ static inline bool te_dropout_aligned(const te_attention_args &a, const te_sequence &s)
{
    return ((a.k.shape[2] | s.kv_start) & 3) == 0;
}

/* Whether the element of each of four words is kept. */
__device__ static inline uint32_t te_kept_of_words(const te_dropout &z, const te_philox_words &four)
{
    uint32_t kept = (uint32_t)(four.word[0] >= z.threshold) | (uint32_t)(four.word[1] >= z.threshold) << 1 |
                    (uint32_t)(four.word[2] >= z.threshold) << 2 | (uint32_t)(four.word[3] >= z.threshold) << 3;
    return kept & z.all;
}

/* Bits of the elements 4 group … 4 group + 3. */
__device__ static inline uint32_t te_kept_group(const te_dropout &z, uint64_t group)
{
    return te_kept_of_words(z, te_rng_group(z.rng, group));
}

/* Whether an element is kept. */
__device__ static inline bool te_kept_one(const te_dropout &z, uint64_t element)
{
    return te_kept_group(z, element / 4) >> ((uint32_t)element & 3) & 1;
}

/* The same of any four neighbours. */
__device__ static inline uint32_t te_kept_four(const te_dropout &z, uint64_t first)
{
    uint32_t at = (uint32_t)first & 3, kept = te_kept_group(z, first / 4);
    if (at != 0) kept = (kept | te_kept_group(z, first / 4 + 1) << 4) >> at & 15;
    return kept;
}

/* x with dropout: 0, or scaled up. */
__device__ static inline te_real te_drop(const te_attention_args &a, bool kept, te_real x)
{
    return kept ? x * TE_ATTENTION_KEPT(a) : (te_real)0;
}

TE_HD static inline int64_t te_lse_offset(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i)
{
    return s.batch * a.lse.stride[0] + head * a.lse.stride[1] + (s.q_start + i) * a.lse.stride[2];
}

TE_HD static inline te_real te_lse_at(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i)
{
    int64_t at = te_lse_offset(a, s, head, i);
    return a.lse_wide ? (te_real)((const double *)a.lse.data)[at] : (te_real)((const float *)a.lse.data)[at];
}

TE_HD static inline void te_store_lse(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i,
                                      te_real lse)
{
    int64_t at = te_lse_offset(a, s, head, i);
    if (a.lse_wide) ((double *)a.lse.data)[at] = (double)lse;
    else ((float *)a.lse.data)[at] = (float)lse;
}
