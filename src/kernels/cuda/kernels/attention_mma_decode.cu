/* attention_mma_decode.cu - attention of few queries to many keys on tensor cores, as in generation from a KV cache.
 *
 * The query heads that share keys are packed: a row of a tile is a query of one of them, so keys are read once for 16
 * rows. Keys are split among blocks of TE_DECODE_WARPS warps, and of the keys of a step each warp takes 16, in places
 * of its own in shared memory: warps do not wait for each other. While scores are weighed the next keys are on their
 * way, and while the next scores are made the next values are. What was found, for each row the maximum, the sum of
 * weights and the result that they give, is merged by the block and then, of several splits, by a second kernel, in the
 * order of warps and of splits. How many warps and splits there are follows from shapes (hand_attention.c), so results
 * repeat to the bit.
 */

enum {
    TE_DECODE_ROWS = 16, /* of a tile */
    TE_DECODE_KEYS = 16, /* of a warp at a time */
    TE_DECODE_THREADS = TE_DECODE_WARPS * 32,
    TE_DECODE_STEP = TE_DECODE_KEYS * TE_DECODE_WARPS
};

/* A row of the tiles of a key's heads. */
struct te_decode_row {
    int64_t head, query;
    bool    inside;
};

__device__ static inline te_decode_row te_decode_row_at(const te_attention_args &a, uint32_t kv_head, uint32_t row)
{
    uint32_t n_q = (uint32_t)a.q.shape[2], group = (uint32_t)a.q.shape[1] / (uint32_t)a.k.shape[1];
    bool     inside = row < n_q * group;
    return {kv_head * group + (inside ? row / n_q : 0), inside ? row % n_q : 0, inside};
}

/* Maximum and sum of what a split found for a row, and its result; all rows and splits lie one after the other. */
__device__ static inline float *te_decode_sums(const te_attention_args &a, int64_t row, int64_t split)
{
    return (float *)a.bound.scratch + 2 * (row * a.splits + split);
}
__device__ static inline float *te_decode_result(const te_attention_args &a, int64_t row, int64_t split)
{
    int64_t rows = a.q.shape[0] * a.q.shape[1] * a.q.shape[2];
    return (float *)a.bound.scratch + 2 * rows * a.splits + (row * a.splits + split) * a.v.shape[3];
}

/* A warp's next keys or values; they may be beyond the last. */
template <int DIM> __device__ static inline void te_decode_send(te_a *to, const te_rows &rows, int key, int end)
{
    if (key < end) {
        te_rows from = {rows.data + key * rows.stride, rows.stride, rows.dim};
        int     n = end - key < TE_DECODE_KEYS ? end - key : TE_DECODE_KEYS;
        te_mma_send<TE_DECODE_KEYS, DIM, 32>(to, from, n, threadIdx.x % 32);
    }
    te_mma_sent();
}

/* Weights of what was found under the maximum `from`, and so far the sum of weights of a row, the sink's included. */
struct te_decode_end {
    float from, total;
};

__device__ static inline te_decode_end te_decode_end_of(float sink, float most)
{
    float from = most == TE_LOWEST ? 0.0f : most;
    return {from, te_sink_weight(sink) * te_weight(sink - from)};
}

__device__ static inline void te_decode_lse(const te_attention_args &a, const te_sequence &s, int64_t head,
                                            int64_t query, const te_decode_end &end)
{
    if (a.lse.data && threadIdx.x % 32 == 0)
        te_store_lse(a, s, head, query, end.total == 0 ? TE_LOWEST : end.from + te_log(end.total));
}

/* What the block's warps found, to scratch memory, or where there is a single split the result. top and sum: of the
 * lane's two rows. */
__device__ static inline void te_decode_merge(const te_attention_args &a, float *found,
                                              const float (&out)[TE_DIM_V / 8][4], const float (&top)[2],
                                              const float (&sum)[2], const te_sequence &s, uint32_t kv_head,
                                              uint32_t first, uint32_t split)
{
    __shared__ float tops[TE_DECODE_WARPS][TE_DECODE_ROWS], sums[TE_DECODE_WARPS][TE_DECODE_ROWS];
    int              warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    __syncthreads(); /* tiles are read no more */
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        float *row = found + (warp * TE_DECODE_ROWS + g + 8 * upper) * TE_PITCH_V;
#pragma unroll
        for (int i = 0; i < TE_DIM_V / 8; i++)
            row[i * 8 + 2 * t] = out[i][2 * upper], row[i * 8 + 2 * t + 1] = out[i][2 * upper + 1];
        float total = te_quad_sum(sum[upper]);
        if (t == 0) tops[warp][g + 8 * upper] = top[upper], sums[warp][g + 8 * upper] = total;
    }
    __syncthreads();
    for (int r = warp; r < TE_DECODE_ROWS; r += TE_DECODE_WARPS) {
        te_decode_row at = te_decode_row_at(a, kv_head, first + r);
        if (!at.inside) continue;
        int64_t row = (s.batch * a.q.shape[1] + at.head) * a.q.shape[2] + at.query;
        float   most = TE_LOWEST, total = 0;
        int     one = threadIdx.x % TE_DECODE_WARPS; /* warp whose weight the lane makes */
        for (int w = 0; w < TE_DECODE_WARPS; w++) most = tops[w][r] > most ? tops[w][r] : most;
        float own = te_weight(tops[one][r] - (most == TE_LOWEST ? 0.0f : most));
        __syncwarp();
        if (threadIdx.x % 32 < TE_DECODE_WARPS) tops[one][r] = own; /* weights now */
        __syncwarp();
        for (int w = 0; w < TE_DECODE_WARPS; w++) total += tops[w][r] * sums[w][r];
        float         sink = te_sink_of(a, at.head);
        te_decode_end end = te_decode_end_of(sink, most > sink ? most : sink);
        float         part = te_weight(most - end.from), factor;
        bool          whole = a.splits == 1;
        te_a         *to = te_row_of(a.out, s.batch, at.head, at.query);
        end.total += part * total;
        factor = end.total == 0 ? 0.0f : 1.0f / end.total;
        if (threadIdx.x % 32 == 0 && !whole) {
            float *sums_of = te_decode_sums(a, row, split);
            sums_of[0] = most, sums_of[1] = total;
        }
        for (int d = threadIdx.x % 32; d < a.v.shape[3]; d += 32) {
            float x = 0;
            for (int w = 0; w < TE_DECODE_WARPS; w++)
                x += tops[w][r] * found[(w * TE_DECODE_ROWS + r) * TE_PITCH_V + d];
            if (whole)
                to[d] = te_as_a(te_or_nothing(part * x, factor));
            else
                te_decode_result(a, row, split)[d] = x;
        }
        if (whole) te_decode_lse(a, s, at.head, at.query, end);
    }
}

extern "C" __global__ void __launch_bounds__(TE_DECODE_THREADS, TE_DECODE_WARPS > 4 ? 1 : 3)
    te_attention_decode(const __grid_constant__ te_attention_args a)
{
    const int N = TE_DECODE_KEYS;
    TE_DYNAMIC_SHARED(char, shared); /* tiles, and then what warps found */
    uint32_t    splits = (uint32_t)a.splits, tiles = (uint32_t)a.tiles, kv_heads = (uint32_t)a.k.shape[1];
    uint32_t    split = blockIdx.x % splits, others = blockIdx.x / splits, first = others % tiles * TE_DECODE_ROWS;
    uint32_t    kv_head = others / tiles % kv_heads;
    te_sequence s = te_sequence_at(a, others / tiles / kv_heads);
    int         warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    te_a       *k = (te_a *)shared + warp * N * (TE_PITCH + TE_PITCH_V), *v = k + N * TE_PITCH;
    uint32_t    q[TE_DIM / 16][4];
    float       out[TE_DIM_V / 8][4], top[2] = {TE_LOWEST, TE_LOWEST}, sum[2] = {0, 0};
    int64_t     begin = te_first_key(s, 0) / TE_DECODE_KEYS * TE_DECODE_KEYS + split * a.split_keys;
    int64_t     last = te_end_key(s, s.n_q - 1);
    int         end = (int)te_clamp(last - begin, 0, a.split_keys), key = warp * N; /* from `begin` on */
    int         low[2], high[2];                                                    /* keys that the lane's rows see */
    te_rows     k_rows = te_rows_of(a.k, s.batch, kv_head, begin), v_rows = te_rows_of(a.v, s.batch, kv_head, begin);
    te_decode_send<TE_DIM>(k, k_rows, key, end); /* first, for all waits for them */
    te_decode_send<TE_DIM_V>(v, v_rows, key, end);
#if TE_HAS_BIAS
    const te_c *bias[2];
#endif
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        te_decode_row at = te_decode_row_at(a, kv_head, first + g + 8 * upper);
        const te_a   *row = te_row_of(a.q, s.batch, at.head, at.query);
        te_mma_load_row<TE_DIM>(q, upper, at.inside ? row : 0, (int)a.q.shape[3]);
        low[upper] = (int)te_clamp(te_first_key(s, at.query) - begin, 0, a.split_keys);
        high[upper] = at.inside ? (int)te_clamp(te_end_key(s, at.query) - begin, 0, a.split_keys) : 0;
#if TE_HAS_BIAS
        bias[upper] = te_bias_row(a, s, at.head, at.query) + begin * a.bias.stride[3];
#endif
    }
    te_mma_clear(out);
    for (; key < end; key += TE_DECODE_STEP) {
        te_span  span[2];
        float    c[N / 8][4];
        uint32_t p[N / 16][4];
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            int from = (int)te_clamp(low[upper] - key, 0, N), behind = (int)te_clamp(high[upper] - key, 0, N);
            span[upper] = te_span_between(from, behind, N);
        }
#if TE_HAS_BIAS
        float             added[N / 8][4]; /* on its way with the keys */
        const te_c *const row[2] = {bias[0] + key * a.bias.stride[3], bias[1] + key * a.bias.stride[3]};
        te_mma_load_bias<N>(added, row, a.bias.stride[3], span);
#endif
        te_mma_arrived<1>();
        __syncwarp();
        te_mma_clear(c);
        te_mma_tile<true, N, TE_DIM>(c, q, k, TE_PITCH);
        __syncwarp();
        te_decode_send<TE_DIM>(k, k_rows, key + TE_DECODE_STEP, end);
        te_mma_scale(c, a.scale_f32);
#if TE_HAS_BIAS
        te_mma_add_loaded<N>(c, added, span);
#endif
        if (!te_mma_whole<N>(span, true)) te_mma_hide(c, span);
        te_mma_softmax<N>(c, out, top, sum);
        te_mma_left<N>(p, c);
        te_mma_arrived<1>();
        __syncwarp();
        te_mma_tile<false, TE_DIM_V, N>(out, p, v, TE_PITCH_V);
        __syncwarp();
        te_decode_send<TE_DIM_V>(v, v_rows, key + TE_DECODE_STEP, end);
    }
    te_decode_merge(a, (float *)shared, out, top, sum, s, kv_head, first, split);
}

/* Results from those of all splits and the sink, a warp for each row. */
extern "C" __global__ void __launch_bounds__(128) te_attention_decoded(const __grid_constant__ te_attention_args a)
{
    int64_t     heads = a.q.shape[1], seq = a.q.shape[2], n = a.q.shape[0] * heads * seq;
    int64_t     row = (int64_t)blockIdx.x * 4 + threadIdx.x / 32, head = row / seq % heads, splits = a.splits;
    te_sequence s = te_sequence_at(a, row / seq / heads);
    int         lane = threadIdx.x % 32, dim = (int)a.v.shape[3];
    if (row >= n) return;
    float sink = te_sink_of(a, head), most = sink, x[(TE_DIM_V + 31) / 32] = {};
    for (int64_t i = 0; i < splits; i++) {
        float top = te_decode_sums(a, row, i)[0];
        most = top > most ? top : most;
    }
    te_decode_end end = te_decode_end_of(sink, most);
#pragma unroll 4
    for (int64_t i = 0; i < splits; i++) {
        const float *sums = te_decode_sums(a, row, i), *found = te_decode_result(a, row, i);
        float        weight = te_weight(sums[0] - end.from);
        end.total += weight * sums[1];
#pragma unroll
        for (int d = 0; d < TE_DIM_V; d += 32)
            if (d + lane < dim) x[d / 32] += weight * found[d + lane];
    }
    float factor = end.total == 0 ? 0.0f : 1.0f / end.total;
    te_a *out = te_row_of(a.out, s.batch, head, row % seq);
#pragma unroll
    for (int d = 0; d < TE_DIM_V; d += 32)
        if (d + lane < dim) out[d + lane] = te_as_a(te_or_nothing(x[d / 32], factor));
    te_decode_lse(a, s, head, row % seq, end);
}
