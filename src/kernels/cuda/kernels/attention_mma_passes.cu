/* attention_mma_passes.cu - attention forward and backward in bfloat16 and float16 on tensor cores.
 *
 * A warp owns 16 queries (in dkv: keys), a block 64. Gradients have one owner each, as in attention.cu, and repeat to
 * the bit. A tile has two places in shared memory: one is multiplied while the next tile arrives in the other, so each
 * tile takes one barrier.
 *
 *      product            left          right                 owner of a row
 *      S  = q k^T         q             k, along rows         queries          forward, dq
 *      o  = P v           S's place     v, along columns
 *      dq = dS k          S's place     k, along columns
 *      S' = k q^T         k             q, along rows         keys             dkv
 *      dv = P' do         S's place     do, along columns
 *      dk = dS' q         S's place     q, along columns
 *
 * Weights of what is not seen are 0, so a value that is not finite gets through to the queries of its tile. Where a
 * warp's queries see nothing of a tile it leaves it out; in dkv there are no registers for the question.
 */

enum {
    TE_MMA_ROWS = 64,     /* queries (keys) of a block */
    TE_MMA_BACKWARD = 32, /* keys or queries of a tile in backward */
    /* As registers allow: keys of a tile in forward, blocks that a processor then has at once, keys or queries at a
     * time in backward. */
    TE_MMA_FORWARD = TE_DIM + TE_DIM_V > 128 || TE_HAS_BIAS || (TE_DIM + TE_DIM_V == 128 && TE_VECTOR < 8) ? 32 : 64,
    TE_MMA_FORWARD_BLOCKS = TE_DIM + TE_DIM_V > 128 || TE_HAS_BIAS ? 2 : 3,
    TE_MMA_STEP = TE_DIM + TE_DIM_V > 128 ? 16 : 32
};

/* The two tiles of a step to their places; they may be beyond the last. */
template <int N>
__device__ static inline void te_mma_send_keys(te_a *k, te_a *v, const te_rows &k_rows, const te_rows &v_rows,
                                               int64_t key, int64_t end, int64_t n_kv)
{
    if (key < end) {
        int n = te_rows_in_tile(key, n_kv, N);
        te_rows from_k = {k_rows.data + key * k_rows.stride, k_rows.stride, k_rows.dim};
        te_rows from_v = {v_rows.data + key * v_rows.stride, v_rows.stride, v_rows.dim};
        te_mma_send<N, TE_DIM, TE_ATTENTION_THREADS>(k, from_k, n, threadIdx.x);
        te_mma_send<N, TE_DIM_V, TE_ATTENTION_THREADS>(v, from_v, n, threadIdx.x);
    }
    te_mma_sent();
}

/* --- forward ----------------------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(128, TE_MMA_FORWARD_BLOCKS)
    te_attention_mma(const __grid_constant__ te_attention_args a)
{
    const int N = TE_MMA_FORWARD;
    __shared__ __align__(16) te_a k[2][N * TE_PITCH], v[2][N * TE_PITCH_V];
    const auto [s, head, kv_head, first, rows] = te_queries_of_block<TE_MMA_ROWS>(a);
    if (rows <= 0) return;
    int      warp = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int      mine = (int)te_clamp(rows - warp, 0, 16);
    int64_t  query = first + (mine ? warp : 0);
    uint32_t q[TE_DIM / 16][4];
    float    sink = te_sink_of(a, head);
    float    part = t == 0 ? te_sink_weight(sink) : 0.0f; /* of four lanes' sums */
    float    out[TE_DIM_V / 8][4], top[2] = {sink, sink}, sum[2] = {part, part};
    te_mma_load_left<TE_DIM>(q, te_rows_of(a.q, s.batch, head, s.q_start + query), mine);
    te_mma_clear(out);
    te_dropout z = te_dropout_of(a);
    uint64_t   drawn = te_dropout_row(a, s, head, query + g + t % 2 * 8);
    bool       aligned = te_dropout_aligned(a, s);
    te_rows    k_rows = te_rows_of(a.k, s.batch, kv_head, s.kv_start);
    te_rows    v_rows = te_rows_of(a.v, s.batch, kv_head, s.kv_start);
    int64_t    end = te_end_key(s, first + rows - 1), key = te_first_key(s, first) / N * N;
    te_mma_send_keys<N>(k[0], v[0], k_rows, v_rows, key, end, s.n_kv);
    for (int place = 0; key < end; key += N, place ^= 1) {
        te_mma_arrived<0>();
        __syncthreads();
        te_mma_send_keys<N>(k[place ^ 1], v[place ^ 1], k_rows, v_rows, key + N, end, s.n_kv);
        te_span  span[2];
        float    c[N / 8][4];
        uint32_t p[N / 16][4];
        int64_t  low = query + s.delta - s.left - key, high = query + s.delta + s.right - key;
        if (!te_mma_meets<N>(low, high, mine)) continue;
        te_mma_spans<N>(span, low, high, mine, (int)te_clamp(s.n_kv - key, 0, N));
        te_mma_clear(c);
        te_mma_tile<true, N, TE_DIM>(c, q, k[place], TE_PITCH);
        te_mma_scale(c, a.scale_f32);
#if TE_HAS_BIAS
        const te_c *const bias[2] = {te_bias_row(a, s, head, query + g) + key * a.bias.stride[3],
                                     te_bias_row(a, s, head, query + g + 8) + key * a.bias.stride[3]};
        te_mma_add_bias<N>(c, bias, a.bias.stride[3], span);
#endif
        if (!te_mma_whole<N>(span, true)) te_mma_hide(c, span);
        te_mma_softmax<N>(c, out, top, sum);
        if (a.dropout) te_mma_drop(c, te_mma_kept<N / 8>(z, drawn + key, aligned));
        te_mma_left<N>(p, c);
        te_mma_tile<false, TE_DIM_V, N>(out, p, v[place], TE_PITCH_V);
    }
    float factor[2], kept_scale = a.dropout ? a.kept_scale_f32 : 1.0f;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        float total = te_quad_sum(sum[upper]);
        factor[upper] = total == 0 ? 0.0f : kept_scale / total;
        if (!a.lse.data || t != 0 || g + 8 * upper >= mine) continue;
        te_store_lse(a, s, head, query + g + 8 * upper, total == 0 ? TE_LOWEST : top[upper] + te_log(total));
    }
    te_mma_store<TE_DIM_V>(te_rows_of(a.out, s.batch, head, s.q_start + query), mine, out, factor[0], factor[1]);
}

/* --- backward ---------------------------------------------------------------------------------------------------- */

/* From S and dP of a tile P Z and dS, element e of product n having the numbers lse(n, e) and d(n, e) of its query;
 * `whole`: all of them are seen and have an lse. What is kept counts `scale` times, in P Z only when it is stored. */
template <int N, class LSE, class D>
__device__ static inline void te_mma_gradients(float (&c)[N][4], float (&dp)[N][4], const te_span (&span)[2],
                                               bool whole, bool drops, uint32_t kept, float scale, const LSE &lse,
                                               const D &d)
{
    if (drops) te_mma_drop(dp, kept);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            bool  hidden = TE_HAS_BIAS && c[n][e] == TE_LOWEST; /* by the bias: 0 whatever lse, dP and D are */
            float power = hidden ? TE_LOWEST : c[n][e] - lse(n, e);
            float less = hidden ? 0.0f : TE_FMA(dp[n][e], scale, -d(n, e));
            c[n][e] = te_weight(power);
            dp[n][e] = c[n][e] * less;
        }
    if (drops) te_mma_drop(c, kept);
    if (whole) return;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!te_in_span(span[e / 2], n * 8 + threadIdx.x % 4 * 2 + e % 2) || lse(n, e) == TE_LOWEST)
                c[n][e] = dp[n][e] = 0;
}

/* D of every query; lanes side by side have units of a row. */
extern "C" __global__ void __launch_bounds__(128)
    te_attention_mma_rows(const __grid_constant__ te_attention_args a)
{
    const int LANES = TE_DIM_V > 64 ? 16 : 8;
    int64_t   heads = a.q.shape[1], seq = a.q.shape[2], n = a.q.shape[0] * heads * seq;
    int64_t   row = (int64_t)blockIdx.x * (128 / LANES) + threadIdx.x / LANES, at = row < n ? row : n - 1;
    te_a     *dout = te_row_of(a.dout, at / seq / heads, at / seq % heads, at % seq);
    te_a     *out = te_row_of(a.out, at / seq / heads, at / seq % heads, at % seq);
    float     sum = 0;
    for (int d = threadIdx.x % LANES * TE_VECTOR; d < (int)a.v.shape[3]; d += LANES * TE_VECTOR) {
        const te_unit<te_a, TE_VECTOR> x = te_unit_load<te_a, TE_VECTOR>(dout + d);
        const te_unit<te_a, TE_VECTOR> y = te_unit_load<te_a, TE_VECTOR>(out + d);
#pragma unroll
        for (int k = 0; k < TE_VECTOR; k++) sum = TE_FMA(te_from_a(x.e[k]), te_from_a(y.e[k]), sum);
    }
#pragma unroll
    for (int by = LANES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (row < n && threadIdx.x % LANES == 0) ((float *)a.bound.scratch)[row] = sum;
}

/* D of a query. */
TE_HD static inline const float *te_d_of(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i)
{
    return (const float *)a.bound.scratch + (s.batch * a.q.shape[1] + head) * a.q.shape[2] + s.q_start + i;
}

extern "C" __global__ void __launch_bounds__(128, 2)
    te_attention_mma_dq(const __grid_constant__ te_attention_args a)
{
    const int N = TE_MMA_BACKWARD, STEP = TE_MMA_STEP;
    __shared__ __align__(16) te_a k[2][N * TE_PITCH], v[2][N * TE_PITCH_V];
    const auto [s, head, kv_head, first, rows] = te_queries_of_block<TE_MMA_ROWS>(a);
    if (rows <= 0) return;
    int      warp = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, mine = (int)te_clamp(rows - warp, 0, 16);
    int64_t  query = first + (mine ? warp : 0);
    uint32_t q[TE_DIM / 16][4], dout[TE_DIM_V / 16][4];
    float    dq[TE_DIM / 8][4], lse[2], d[2], kept_scale = a.dropout ? a.kept_scale_f32 : 1.0f;
    te_mma_load_left<TE_DIM>(q, te_rows_of(a.q, s.batch, head, s.q_start + query), mine);
    te_mma_load_left<TE_DIM_V>(dout, te_rows_of(a.dout, s.batch, head, s.q_start + query), mine);
    te_mma_clear(dq);
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        bool inside = g + 8 * upper < mine;
        lse[upper] = inside ? te_lse_at(a, s, head, query + g + 8 * upper) : TE_LOWEST;
        d[upper] = inside ? *te_d_of(a, s, head, query + g + 8 * upper) : 0.0f;
    }
    te_dropout z = te_dropout_of(a);
    uint64_t   drawn = te_dropout_row(a, s, head, query + g + threadIdx.x % 2 * 8);
    bool       aligned = te_dropout_aligned(a, s), weighs = lse[0] != TE_LOWEST && lse[1] != TE_LOWEST;
    te_rows    k_rows = te_rows_of(a.k, s.batch, kv_head, s.kv_start);
    te_rows    v_rows = te_rows_of(a.v, s.batch, kv_head, s.kv_start);
    int64_t    end = te_end_key(s, first + rows - 1), key = te_first_key(s, first) / N * N;
    te_mma_send_keys<N>(k[0], v[0], k_rows, v_rows, key, end, s.n_kv);
    for (int place = 0; key < end; key += N, place ^= 1) {
        te_mma_arrived<0>();
        __syncthreads();
        te_mma_send_keys<N>(k[place ^ 1], v[place ^ 1], k_rows, v_rows, key + N, end, s.n_kv);
#pragma unroll 1
        for (int step = 0; step < N; step += STEP) {
            const te_a *k_step = k[place] + step * TE_PITCH, *v_step = v[place] + step * TE_PITCH_V;
            int64_t     at = key + step;
            int64_t     low = query + s.delta - s.left - at, high = query + s.delta + s.right - at;
            te_span     span[2];
            float       c[STEP / 8][4], dp[STEP / 8][4];
            uint32_t    ds[STEP / 16][4], kept = 0;
            if (!te_mma_meets<STEP>(low, high, mine)) continue;
            te_mma_spans<STEP>(span, low, high, mine, (int)te_clamp(s.n_kv - at, 0, STEP));
            te_mma_clear(c);
            te_mma_clear(dp);
            te_mma_tile<true, STEP, TE_DIM>(c, q, k_step, TE_PITCH);
            te_mma_tile<true, STEP, TE_DIM_V>(dp, dout, v_step, TE_PITCH_V);
            te_mma_scale(c, a.scale_f32);
#if TE_HAS_BIAS
            const te_c *const bias[2] = {te_bias_row(a, s, head, query + g) + at * a.bias.stride[3],
                                         te_bias_row(a, s, head, query + g + 8) + at * a.bias.stride[3]};
            te_mma_add_bias<STEP>(c, bias, a.bias.stride[3], span);
#endif
            if (a.dropout) kept = te_mma_kept<STEP / 8>(z, drawn + at, aligned);
            te_mma_gradients(c, dp, span, te_mma_whole<STEP>(span, weighs), a.dropout != 0, kept, kept_scale,
                             [&](int, int e) { return lse[e / 2]; }, [&](int, int e) { return d[e / 2]; });
#if TE_HAS_BIAS
            if (a.dbias.data) {
                float *const dbias[2] = {te_dbias_row(a, s, head, query + g) + at * a.dbias.stride[3],
                                         te_dbias_row(a, s, head, query + g + 8) + at * a.dbias.stride[3]};
                te_mma_store_dbias<STEP>(dp, dbias, a.dbias.stride[3], span);
            }
#endif
            te_mma_left<STEP>(ds, dp);
            te_mma_tile<false, TE_DIM, STEP>(dq, ds, k_step, TE_PITCH);
        }
    }
    te_mma_store<TE_DIM>(te_rows_of(a.dq, s.batch, head, s.q_start + query), mine, dq, a.scale_f32, a.scale_f32);
}

/* Where a tile of queries begins. */
struct te_queries {
    uint32_t head;
    int64_t  query;
};

/* Sends it, with lse and D of its queries as `numbers`. */
__device__ static inline void te_mma_send_queries(const te_attention_args &a, const te_sequence &s, te_a *q, te_a *dout,
                                                  float *numbers, te_queries at)
{
    const int N = TE_MMA_BACKWARD;
    int       n = te_rows_in_tile(at.query, s.n_q, N), i = threadIdx.x;
    te_mma_send<N, TE_DIM, TE_ATTENTION_THREADS>(q, te_rows_of(a.q, s.batch, at.head, s.q_start + at.query), n, i);
    te_mma_send<N, TE_DIM_V, TE_ATTENTION_THREADS>(dout, te_rows_of(a.dout, s.batch, at.head, s.q_start + at.query), n,
                                                   i);
    if (i >= N && i < N + n)
        te_mma_copy_float(numbers + i, te_d_of(a, s, at.head, at.query + i - N));
    else if (i < n && a.lse_wide)
        numbers[i] = te_lse_at(a, s, at.head, at.query + i);
    else if (i < n)
        te_mma_copy_float(numbers + i, (const float *)a.lse.data + te_lse_offset(a, s, at.head, at.query + i));
    else if (i < 2 * N)
        numbers[i] = 0; /* of no query */
}

extern "C" __global__ void __launch_bounds__(128, 2)
    te_attention_mma_dkv(const __grid_constant__ te_attention_args a)
{
    const int N = TE_MMA_BACKWARD, STEP = TE_MMA_STEP;
    __shared__ __align__(16) te_a q[2][N * TE_PITCH], dout[2][N * TE_PITCH_V];
    __shared__ __align__(16) float numbers[2][2 * N]; /* lse and D */
    const auto [s, kv_head, group, first, keys] = te_keys_of_block<TE_MMA_ROWS>(a);
    if (keys <= 0) return;
    int      warp = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int      mine = (int)te_clamp(keys - warp, 0, 16);
    int64_t  key = first + (mine ? warp : 0);
    uint32_t k[TE_DIM / 16][4], v[TE_DIM_V / 16][4];
    float    dk[TE_DIM / 8][4], dv[TE_DIM_V / 8][4], kept_scale = a.dropout ? a.kept_scale_f32 : 1.0f;
    te_mma_load_left<TE_DIM>(k, te_rows_of(a.k, s.batch, kv_head, s.kv_start + key), mine);
    te_mma_load_left<TE_DIM_V>(v, te_rows_of(a.v, s.batch, kv_head, s.kv_start + key), mine);
    te_mma_clear(dk);
    te_mma_clear(dv);
    int64_t    low = key - s.delta - s.right, high = key - s.delta + s.left; /* queries that see the warp's first key */
    int64_t    begin = te_clamp(first - s.delta - s.right, 0, s.n_q) / N * N;
    int64_t    end = te_clamp(first + keys - s.delta + s.left, 0, s.n_q);
    te_queries at = {kv_head * group, begin};
    uint32_t   tiles = end > begin ? (uint32_t)((end - begin + N - 1) / N) * group : 0;
    if (tiles > 0) te_mma_send_queries(a, s, q[0], dout[0], numbers[0], at);
    te_mma_sent();
    for (int place = 0; tiles > 0; tiles--, place ^= 1) {
        te_queries next = {at.head, at.query + N};
        if (next.query >= end) next = {at.head + 1, begin};
        te_mma_arrived<0>();
        __syncthreads();
        if (tiles > 1) te_mma_send_queries(a, s, q[place ^ 1], dout[place ^ 1], numbers[place ^ 1], next);
        te_mma_sent();
#pragma unroll 1
        for (int step = 0; step < N; step += STEP) {
            const te_a  *q_step = q[place] + step * TE_PITCH, *dout_step = dout[place] + step * TE_PITCH_V;
            const float *lse = numbers[place] + step + 2 * t, *d = lse + N;
            int64_t      query = at.query + step;
            te_span      span[2];
            float        c[STEP / 8][4], dp[STEP / 8][4];
            uint32_t     left[STEP / 16][4], kept = 0;
            bool         weighs = true;
            te_mma_clear(c);
            te_mma_clear(dp);
            te_mma_tile<true, STEP, TE_DIM>(c, k, q_step, TE_PITCH);
            te_mma_tile<true, STEP, TE_DIM_V>(dp, v, dout_step, TE_PITCH_V);
            te_mma_scale(c, a.scale_f32);
            te_mma_spans<STEP>(span, low - query, high - query, mine, (int)te_clamp(s.n_q - query, 0, STEP));
#if TE_HAS_BIAS
            te_mma_add_bias_turned<STEP>(c, te_bias_row(a, s, at.head, query) + key * a.bias.stride[3],
                                         a.bias.stride[2], a.bias.stride[3], span);
#endif
            if (a.dropout) {
                uint64_t drawn = te_dropout_row(a, s, at.head, query + 2 * t + threadIdx.x / 4 % 2) + key;
                kept = te_mma_kept_turned<STEP / 8>(te_dropout_of(a), drawn, a.k.shape[2], te_dropout_aligned(a, s));
            }
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) weighs &= lse[n * 8] != TE_LOWEST && lse[n * 8 + 1] != TE_LOWEST;
            te_mma_gradients(c, dp, span, te_mma_whole<STEP>(span, weighs), a.dropout != 0, kept, kept_scale,
                             [&](int n, int e) { return lse[n * 8 + e % 2]; },
                             [&](int n, int e) { return d[n * 8 + e % 2]; });
            te_mma_left<STEP>(left, c);
            te_mma_tile<false, TE_DIM_V, STEP>(dv, left, dout_step, TE_PITCH_V);
            te_mma_left<STEP>(left, dp);
            te_mma_tile<false, TE_DIM, STEP>(dk, left, q_step, TE_PITCH);
        }
        at = next;
    }
    te_mma_store<TE_DIM>(te_rows_of(a.dk, s.batch, kv_head, s.kv_start + key), mine, dk, a.scale_f32, a.scale_f32);
    te_mma_store<TE_DIM_V>(te_rows_of(a.dv, s.batch, kv_head, s.kv_start + key), mine, dv, kept_scale,
                           kept_scale);
}
