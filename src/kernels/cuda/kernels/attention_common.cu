/* attention_common.cu - what both families of attention kernels share: sequences and masks, where rows lie, bias,
 * dropout, lse, and the row sums that backward begins with.
 */

enum { TE_ATTENTION_THREADS = 128 };

#if TE_REAL_IS_F32
#define TE_ATTENTION_EXP(x)       te_exp(x)
#define TE_ATTENTION_LOG(x)       te_log(x)
#define TE_ATTENTION_FMA(a, b, c) TE_FMA(a, b, c)
#else
#define TE_ATTENTION_EXP(x)       exp(x)
#define TE_ATTENTION_LOG(x)       log(x)
#define TE_ATTENTION_FMA(a, b, c) TE_FMA64(a, b, c)
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
typedef struct te_block {
    uint32_t tile, head, kv_head, batch;
} te_block;

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

/* --- memory ------------------------------------------------------------------------------------------------------ */

TE_HD static inline te_a *te_row_of(const te_cuda_view &v, int64_t batch, int64_t head, int64_t row)
{
    return (te_a *)v.data + batch * v.stride[0] + head * v.stride[1] + row * v.stride[2];
}

/* --- scores ------------------------------------------------------------------------------------------------------ */

TE_HD static inline te_real te_bias_at(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i,
                                       int64_t key)
{
    if (!a.bias.data) return 0;
    int64_t at = s.batch * a.bias.stride[0] + head * a.bias.stride[1] + (s.q_start + i) * a.bias.stride[2] +
                 (s.kv_start + key) * a.bias.stride[3];
    return (te_real)te_load_f64(a.bias.data, (te_dtype)a.bias_dtype, at);
}

/* dS of a pair as the gradient of its bias, where that is wanted; by the kernels that make dq, which meet each pair
 * once. */
TE_HD static inline void te_store_dbias(const te_attention_args &a, const te_sequence &s, int64_t head,
                                        int64_t i, int64_t key, te_real ds)
{
    if (!a.dbias.data || i >= s.n_q || key >= s.n_kv || !te_sees(s, i, key)) return;
    ((te_real *)a.dbias.data)[s.batch * a.dbias.stride[0] + head * a.dbias.stride[1] +
                              (s.q_start + i) * a.dbias.stride[2] +
                              (s.kv_start + key) * a.dbias.stride[3]] = ds;
}

/* x with dropout: 0, or scaled up. */
__device__ static inline te_real te_drop(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i,
                                         int64_t key, te_real x)
{
    if (!a.dropout) return x;
    te_rng   rng = {a.rng[0], a.rng[1], a.rng[2], (const uint64_t *)a.rng[3]};
    uint64_t row = (uint64_t)((s.batch * a.q.shape[1] + head) * a.q.shape[2] + s.q_start + i);
    uint32_t word = te_unit_words<1>(rng, row * (uint64_t)a.k.shape[2] + (uint64_t)(s.kv_start + key)).e[0];
    return word >= a.threshold ? x * (te_real)a.kept_scale : (te_real)0;
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

/* --- row sums ---------------------------------------------------------------------------------------------------- */

__device__ static inline te_real te_warp_sum(te_real x)
{
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

/* D of every query, a warp each. */
extern "C" __global__ void __launch_bounds__(128) te_attention_rows(const __grid_constant__ te_attention_args a)
{
    int64_t  heads = a.q.shape[1], seq = a.q.shape[2], n = a.q.shape[0] * heads * seq;
    int64_t  row = (int64_t)blockIdx.x * 4 + threadIdx.x / 32, at = row < n ? row : n - 1;
    te_a    *dout = te_row_of(a.dout, at / seq / heads, at / seq % heads, at % seq);
    te_a    *out = te_row_of(a.out, at / seq / heads, at / seq % heads, at % seq);
    te_real  sum = 0;
    for (int64_t d = threadIdx.x % 32; d < a.v.shape[3]; d += 32)
        sum = TE_ATTENTION_FMA(te_from_a(dout[d]), te_from_a(out[d]), sum);
    sum = te_warp_sum(sum);
    if (row < n && threadIdx.x % 32 == 0) ((te_real *)a.bound.scratch)[row] = sum;
}
