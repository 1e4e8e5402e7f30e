/* attention_mma.cu - attention in bfloat16 and float16 on tensor cores: heads of up to 128, all masks, bias, dropout.
 *
 * A warp owns 16 queries (in dkv: keys), a block 64; the other side comes in tiles through shared memory. All products
 * are of 16 x 8 x 16, whose left operand is held in registers: what one product leaves is, rounded, the left operand of
 * the next (Dao, arXiv:2307.08691), so scores never leave the registers. Right operands whose neighbours lie along the
 * summed dimension are stored turned. Gradients have one owner each, as in attention.cu, and repeat to the bit.
 *
 *      product            left          right             owner of a row
 *      S  = q k^T         q             k                 queries          forward, dq
 *      o  = P v           S's place     v turned
 *      dq = dS k          S's place     k turned
 *      S' = k q^T         k             q                 keys             dkv
 *      dv = P' do         S's place     do turned
 *      dk = dS' q         S's place     q turned
 *
 * Weights of what is not seen are 0, so a value that is not finite gets through to the queries of its tile. TE_DIM and
 * TE_DIM_V are the head sizes, rounded up to a multiple of 16; the rest is 0.
 */

enum {
    TE_MMA_ROWS = 64,     /* queries (keys) of a block */
    TE_MMA_FORWARD = TE_DIM + TE_DIM_V >= 128 ? 32 : 64, /* keys of a tile in forward, as registers allow */
    TE_MMA_BACKWARD = 32, /* keys or queries of a tile in backward */
    TE_PITCH = TE_DIM + 8, TE_PITCH_V = TE_DIM_V + 8,
    TE_PITCH_FORWARD = TE_MMA_FORWARD + 8, TE_PITCH_BACKWARD = TE_MMA_BACKWARD + 8
};

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Two values as a pair of elements, the first in the low half. */
TE_HD static inline uint32_t te_pair(float x, float y) { return (uint32_t)te_as_a(x) | (uint32_t)te_as_a(y) << 16; }

TE_HD static inline float te_half_of(uint32_t pair, int upper)
{
    return te_from_a((te_a)(upper ? pair >> 16 : pair & 0xffffu));
}

/* c += a b. Lane 4 g + t holds of a[16][16] the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), of b[16][8]
 * the pairs of rows 2t and 2t + 8 in column g, and of c[16][8] the pairs (g, 2t) and (g + 8, 2t). */
__device__ static inline void te_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#if TE_A_IS_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    int      row = threadIdx.x % 32 & ~3, column = threadIdx.x % 4 * 8;
    uint64_t low = a[0] | (uint64_t)a[1] << 32, high = a[2] | (uint64_t)a[3] << 32, b = b0 | (uint64_t)b1 << 32;
    for (int k = 0; k < 4; k++) {
        uint64_t left[2] = {__shfl_sync(0xffffffffu, low, row + k), __shfl_sync(0xffffffffu, high, row + k)};
        uint64_t right[2] = {__shfl_sync(0xffffffffu, b, column + k), __shfl_sync(0xffffffffu, b, column + 4 + k)};
        for (int e = 0; e < 4; e++)
            for (int part = 0; part < 2; part++) {
                uint32_t x = (uint32_t)(left[part] >> e / 2 * 32), y = (uint32_t)(right[e % 2] >> part * 32);
                c[e] += te_half_of(x, 0) * te_half_of(y, 0) + te_half_of(x, 1) * te_half_of(y, 1);
            }
    }
#endif
}

/* c[n / 8] += a rows^T: right operand `rows`, n of them, K elements each. */
template <int N, int K>
__device__ static inline void te_mma_rows(float (&c)[N / 8][4], const uint32_t (&a)[K / 16][4], const te_a *rows,
                                          int pitch)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const te_a *row = rows + (n * 8 + g) * pitch + 2 * t;
#pragma unroll
        for (int k = 0; k < K / 16; k++)
            te_mma(c[n], a[k], *(const uint32_t *)(row + k * 16), *(const uint32_t *)(row + k * 16 + 8));
    }
}

/* What products left, rounded, as a left operand. */
template <int N> __device__ static inline void te_mma_left(uint32_t (&a)[N / 16][4], const float (&c)[N / 8][4])
{
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        a[k][0] = te_pair(c[2 * k][0], c[2 * k][1]);
        a[k][1] = te_pair(c[2 * k][2], c[2 * k][3]);
        a[k][2] = te_pair(c[2 * k + 1][0], c[2 * k + 1][1]);
        a[k][3] = te_pair(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

template <int N> __device__ static inline void te_mma_clear(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

TE_HD static inline uint32_t te_pair_at(const te_a *row, int d, int dim)
{
    return (uint32_t)(d < dim ? row[d] : (te_a)0) | (uint32_t)(d + 1 < dim ? row[d + 1] : (te_a)0) << 16;
}

/* A warp's 16 rows as left operand, from memory; rows from `n` on are 0. */
template <int K>
__device__ static inline void te_mma_load_left(uint32_t (&a)[K / 16][4], const te_cuda_view &v, int64_t batch,
                                               int64_t head, int64_t first, int n)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, dim = (int)v.shape[3];
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        bool        inside = g + 8 * upper < n;
        const te_a *row = te_row_of(v, batch, head, first + (inside ? g + 8 * upper : 0));
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            a[k][upper] = te_pair_at(row, k * 16 + 2 * t, inside ? dim : 0);
            a[k][upper + 2] = te_pair_at(row, k * 16 + 2 * t + 8, inside ? dim : 0);
        }
    }
}

/* N rows of memory into shared memory, as they are and turned where places are given; rows from `n` on and columns from
 * the view's dim to DIM are 0. */
template <int N, int DIM>
__device__ static inline void te_mma_load(te_a *straight, te_a *turned, const te_cuda_view &v, int64_t batch,
                                          int64_t head, int64_t first, int n)
{
    const int dim = (int)v.shape[3], units = DIM / TE_VECTOR;
    for (int u = threadIdx.x; u < N * units; u += TE_ATTENTION_THREADS) {
        int                    row = u / units, d = u % units * TE_VECTOR;
        te_unit<te_a, TE_VECTOR> x = {};
        if (row < n && d < dim) x = te_unit_load<te_a, TE_VECTOR>(te_row_of(v, batch, head, first + row) + d);
        if (straight) te_unit_store<te_a, TE_VECTOR>(straight + row * (DIM + 8) + d, x);
#pragma unroll
        for (int k = 0; k < TE_VECTOR; k++)
            if (turned) turned[(d + k) * (N + 8) + row] = x.e[k];
    }
}

/* A warp's 16 rows of results, times a factor per row of the lane. */
template <int N>
__device__ static inline void te_mma_store(const te_cuda_view &v, int64_t batch, int64_t head, int64_t first, int n,
                                           const float (&c)[N / 8][4], float factor, float factor8)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, dim = (int)v.shape[3];
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        if (g + 8 * upper >= n) continue;
        te_a *row = te_row_of(v, batch, head, first + g + 8 * upper);
        float by = upper ? factor8 : factor;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (i * 8 + 2 * t + e < dim) row[i * 8 + 2 * t + e] = te_as_a(c[i][2 * upper + e] * by);
    }
}

TE_HD static inline float te_quad_max(float x)
{
    for (int by = 1; by < 4; by *= 2) {
        float other = __shfl_xor_sync(0xffffffffu, x, by);
        x = other > x ? other : x;
    }
    return x;
}

TE_HD static inline float te_quad_sum(float x)
{
    for (int by = 1; by < 4; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

/* --- forward ----------------------------------------------------------------------------------------------------- */

/* Scores of 16 queries from `query` on and a tile of keys: scaled, biased; -inf where nothing is seen. */
__device__ static inline void te_mma_mask(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t query,
                                          int64_t key, float (&c)[TE_MMA_FORWARD / 8][4])
{
    int  g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    bool whole = key >= query + 15 + s.delta - s.left && key + TE_MMA_FORWARD - 1 <= query + s.delta + s.right &&
                 key + TE_MMA_FORWARD <= s.n_kv && query + 16 <= s.n_q && !a.bias.data;
#pragma unroll
    for (int n = 0; n < TE_MMA_FORWARD / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int64_t i = query + g + e / 2 * 8, j = key + n * 8 + 2 * t + e % 2;
            c[n][e] *= (float)a.scale;
            if (whole) continue;
            if (i < s.n_q && j < s.n_kv && te_sees(s, i, j)) c[n][e] += te_bias_at(a, s, head, i, j);
            else c[n][e] = TE_LOWEST;
        }
}

/* Scores into weights, row by row of the lane; sums and results so far are brought to the new maximum. */
__device__ static inline void te_mma_softmax(float (&c)[TE_MMA_FORWARD / 8][4], float (&out)[TE_DIM_V / 8][4],
                                             float (&top)[2], float (&sum)[2])
{
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        float most = top[upper];
#pragma unroll
        for (int n = 0; n < TE_MMA_FORWARD / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) most = c[n][2 * upper + e] > most ? c[n][2 * upper + e] : most;
        most = te_quad_max(most);
        float from = most == TE_LOWEST ? 0.0f : most, shrink = te_exp(top[upper] - from);
        top[upper] = most;
        sum[upper] *= shrink;
#pragma unroll
        for (int n = 0; n < TE_DIM_V / 8; n++) out[n][2 * upper] *= shrink, out[n][2 * upper + 1] *= shrink;
#pragma unroll
        for (int n = 0; n < TE_MMA_FORWARD / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float weight = te_exp(c[n][2 * upper + e] - from);
                sum[upper] += weight;
                c[n][2 * upper + e] = weight;
            }
    }
}

extern "C" __global__ void __launch_bounds__(128) te_attention_mma(const __grid_constant__ te_attention_args a)
{
    __shared__ __align__(16) te_a k[TE_MMA_FORWARD * TE_PITCH], turned[TE_DIM_V * TE_PITCH_FORWARD];
    te_block    block = te_block_of(a, a.q.shape[1]);
    int64_t     head = block.head, kv_head = block.kv_head;
    int64_t     first;
    te_sequence s = te_sequence_of(a, block, a.cu_q, TE_MMA_ROWS, &first);
    if (first >= s.n_q) return;
    int      rows = (int)(s.n_q - first < TE_MMA_ROWS ? s.n_q - first : TE_MMA_ROWS), warp = threadIdx.x / 32 * 16;
    int      g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, mine = (int)te_clamp(rows - warp, 0, 16);
    uint32_t q[TE_DIM / 16][4];
    float    sink = te_sink_of(a, head), part = t == 0 ? te_sink_weight(sink) : 0.0f; /* of four lanes' sums */
    float    out[TE_DIM_V / 8][4], top[2] = {sink, sink}, sum[2] = {part, part};
    te_mma_load_left<TE_DIM>(q, a.q, s.batch, head, s.q_start + first + (mine ? warp : 0), mine);
    te_mma_clear(out);
    int64_t end = te_end_key(s, first + rows - 1);
    for (int64_t key = te_first_key(s, first) / TE_MMA_FORWARD * TE_MMA_FORWARD; key < end; key += TE_MMA_FORWARD) {
        int n = (int)(s.n_kv - key < TE_MMA_FORWARD ? s.n_kv - key : TE_MMA_FORWARD);
        te_mma_load<TE_MMA_FORWARD, TE_DIM>(k, 0, a.k, s.batch, kv_head, s.kv_start + key, n);
        te_mma_load<TE_MMA_FORWARD, TE_DIM_V>(0, turned, a.v, s.batch, kv_head, s.kv_start + key, n);
        __syncthreads();
        float    c[TE_MMA_FORWARD / 8][4];
        uint32_t p[TE_MMA_FORWARD / 16][4];
        te_mma_clear(c);
        te_mma_rows<TE_MMA_FORWARD, TE_DIM>(c, q, k, TE_PITCH);
        te_mma_mask(a, s, head, first + warp, key, c);
        te_mma_softmax(c, out, top, sum);
        if (a.dropout)
#pragma unroll
            for (int m = 0; m < TE_MMA_FORWARD / 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    c[m][e] = te_drop(a, s, head, first + warp + g + e / 2 * 8, key + m * 8 + 2 * t + e % 2, c[m][e]);
        te_mma_left<TE_MMA_FORWARD>(p, c);
        te_mma_rows<TE_DIM_V, TE_MMA_FORWARD>(out, p, turned, TE_PITCH_FORWARD);
        __syncthreads();
    }
    float factor[2];
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        float   total = te_quad_sum(sum[upper]);
        int64_t i = first + warp + g + 8 * upper;
        factor[upper] = total == 0 ? 0.0f : 1.0f / total;
        if (!a.lse.data || t != 0 || i >= s.n_q) continue;
        float   lse = total == 0 ? TE_LOWEST : top[upper] + te_log(total);
        int64_t at = te_lse_offset(a, s, head, i);
        if (a.lse_wide) ((double *)a.lse.data)[at] = (double)lse;
        else ((float *)a.lse.data)[at] = lse;
    }
    te_mma_store<TE_DIM_V>(a.out, s.batch, head, s.q_start + first + warp, mine, out, factor[0], factor[1]);
}

/* --- backward ---------------------------------------------------------------------------------------------------- */

/* From S and dP of one pair: P Z and dS. */
__device__ static inline void te_mma_gradient(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i,
                                              int64_t key, float lse, float d, float &score, float &dp)
{
    if (i >= s.n_q || key >= s.n_kv || lse == TE_LOWEST || !te_sees(s, i, key)) {
        score = dp = 0;
        return;
    }
    float weight = te_exp(score * (float)a.scale + te_bias_at(a, s, head, i, key) - lse);
    dp = weight * (te_drop(a, s, head, i, key, dp) - d);
    score = te_drop(a, s, head, i, key, weight);
}

TE_HD static inline float te_d_at(const te_attention_args &a, const te_sequence &s, int64_t head, int64_t i)
{
    return ((const float *)a.bound.scratch)[(s.batch * a.q.shape[1] + head) * a.q.shape[2] + s.q_start + i];
}

extern "C" __global__ void __launch_bounds__(128, 2) te_attention_mma_dq(const __grid_constant__ te_attention_args a)
{
    __shared__ __align__(16) te_a k[TE_MMA_BACKWARD * TE_PITCH], v[TE_MMA_BACKWARD * TE_PITCH_V],
        turned[TE_DIM * TE_PITCH_BACKWARD];
    te_block    block = te_block_of(a, a.q.shape[1]);
    int64_t     head = block.head, kv_head = block.kv_head;
    int64_t     first;
    te_sequence s = te_sequence_of(a, block, a.cu_q, TE_MMA_ROWS, &first);
    if (first >= s.n_q) return;
    int      rows = (int)(s.n_q - first < TE_MMA_ROWS ? s.n_q - first : TE_MMA_ROWS), warp = threadIdx.x / 32 * 16;
    int      g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, mine = (int)te_clamp(rows - warp, 0, 16);
    uint32_t q[TE_DIM / 16][4], dout[TE_DIM_V / 16][4];
    float    dq[TE_DIM / 8][4], lse[2], d[2];
    te_mma_load_left<TE_DIM>(q, a.q, s.batch, head, s.q_start + first + (mine ? warp : 0), mine);
    te_mma_load_left<TE_DIM_V>(dout, a.dout, s.batch, head, s.q_start + first + (mine ? warp : 0), mine);
    te_mma_clear(dq);
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        bool inside = g + 8 * upper < mine;
        lse[upper] = inside ? te_lse_at(a, s, head, first + warp + g + 8 * upper) : TE_LOWEST;
        d[upper] = inside ? te_d_at(a, s, head, first + warp + g + 8 * upper) : 0.0f;
    }
    int64_t end = te_end_key(s, first + rows - 1);
    for (int64_t key = te_first_key(s, first) / TE_MMA_BACKWARD * TE_MMA_BACKWARD; key < end; key += TE_MMA_BACKWARD) {
        int n = (int)(s.n_kv - key < TE_MMA_BACKWARD ? s.n_kv - key : TE_MMA_BACKWARD);
        te_mma_load<TE_MMA_BACKWARD, TE_DIM>(k, turned, a.k, s.batch, kv_head, s.kv_start + key, n);
        te_mma_load<TE_MMA_BACKWARD, TE_DIM_V>(v, 0, a.v, s.batch, kv_head, s.kv_start + key, n);
        __syncthreads();
        float    c[TE_MMA_BACKWARD / 8][4], dp[TE_MMA_BACKWARD / 8][4];
        uint32_t ds[TE_MMA_BACKWARD / 16][4];
        te_mma_clear(c);
        te_mma_clear(dp);
        te_mma_rows<TE_MMA_BACKWARD, TE_DIM>(c, q, k, TE_PITCH);
        te_mma_rows<TE_MMA_BACKWARD, TE_DIM_V>(dp, dout, v, TE_PITCH_V);
#pragma unroll
        for (int m = 0; m < TE_MMA_BACKWARD / 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                te_mma_gradient(a, s, head, first + warp + g + e / 2 * 8, key + m * 8 + 2 * t + e % 2, lse[e / 2],
                                d[e / 2], c[m][e], dp[m][e]);
        if (a.dbias.data)
#pragma unroll
            for (int m = 0; m < TE_MMA_BACKWARD / 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    te_store_dbias(a, s, head, first + warp + g + e / 2 * 8, key + m * 8 + 2 * t + e % 2, dp[m][e]);
        te_mma_left<TE_MMA_BACKWARD>(ds, dp);
        te_mma_rows<TE_DIM, TE_MMA_BACKWARD>(dq, ds, turned, TE_PITCH_BACKWARD);
        __syncthreads();
    }
    te_mma_store<TE_DIM>(a.dq, s.batch, head, s.q_start + first + warp, mine, dq, (float)a.scale, (float)a.scale);
}

extern "C" __global__ void __launch_bounds__(128, 2) te_attention_mma_dkv(const __grid_constant__ te_attention_args a)
{
    __shared__ __align__(16) te_a q[TE_MMA_BACKWARD * TE_PITCH], q_turned[TE_DIM * TE_PITCH_BACKWARD];
    __shared__ __align__(16) te_a dout[TE_MMA_BACKWARD * TE_PITCH_V], dout_turned[TE_DIM_V * TE_PITCH_BACKWARD];
    __shared__ float lse[TE_MMA_BACKWARD], d[TE_MMA_BACKWARD];
    te_block    block = te_block_of(a, a.k.shape[1]);
    int64_t     kv_head = block.head, group = (uint32_t)a.q.shape[1] / (uint32_t)a.k.shape[1];
    int64_t     key;
    te_sequence s = te_sequence_of(a, block, a.cu_kv, TE_MMA_ROWS, &key);
    if (key >= s.n_kv) return;
    int      n = (int)(s.n_kv - key < TE_MMA_ROWS ? s.n_kv - key : TE_MMA_ROWS), warp = threadIdx.x / 32 * 16;
    int      g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, mine = (int)te_clamp(n - warp, 0, 16);
    uint32_t k[TE_DIM / 16][4], v[TE_DIM_V / 16][4];
    float    dk[TE_DIM / 8][4], dv[TE_DIM_V / 8][4];
    te_mma_load_left<TE_DIM>(k, a.k, s.batch, kv_head, s.kv_start + key + (mine ? warp : 0), mine);
    te_mma_load_left<TE_DIM_V>(v, a.v, s.batch, kv_head, s.kv_start + key + (mine ? warp : 0), mine);
    te_mma_clear(dk);
    te_mma_clear(dv);
    int64_t first = te_clamp(key - s.delta - s.right, 0, s.n_q), end = te_clamp(key + n - s.delta + s.left, 0, s.n_q);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t query = first / TE_MMA_BACKWARD * TE_MMA_BACKWARD; query < end; query += TE_MMA_BACKWARD) {
            int rows = (int)(s.n_q - query < TE_MMA_BACKWARD ? s.n_q - query : TE_MMA_BACKWARD);
            te_mma_load<TE_MMA_BACKWARD, TE_DIM>(q, q_turned, a.q, s.batch, head, s.q_start + query, rows);
            te_mma_load<TE_MMA_BACKWARD, TE_DIM_V>(dout, dout_turned, a.dout, s.batch, head, s.q_start + query, rows);
            for (int i = threadIdx.x; i < TE_MMA_BACKWARD; i += TE_ATTENTION_THREADS) {
                lse[i] = i < rows ? te_lse_at(a, s, head, query + i) : TE_LOWEST;
                d[i] = i < rows ? te_d_at(a, s, head, query + i) : 0.0f;
            }
            __syncthreads();
            float    c[TE_MMA_BACKWARD / 8][4], dp[TE_MMA_BACKWARD / 8][4];
            uint32_t left[TE_MMA_BACKWARD / 16][4];
            te_mma_clear(c);
            te_mma_clear(dp);
            te_mma_rows<TE_MMA_BACKWARD, TE_DIM>(c, k, q, TE_PITCH);
            te_mma_rows<TE_MMA_BACKWARD, TE_DIM_V>(dp, v, dout, TE_PITCH_V);
#pragma unroll
            for (int m = 0; m < TE_MMA_BACKWARD / 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int i = m * 8 + 2 * t + e % 2;
                    te_mma_gradient(a, s, head, query + i, key + warp + g + e / 2 * 8, lse[i], d[i], c[m][e], dp[m][e]);
                }
            te_mma_left<TE_MMA_BACKWARD>(left, c);
            te_mma_rows<TE_DIM_V, TE_MMA_BACKWARD>(dv, left, dout_turned, TE_PITCH_BACKWARD);
            te_mma_left<TE_MMA_BACKWARD>(left, dp);
            te_mma_rows<TE_DIM, TE_MMA_BACKWARD>(dk, left, q_turned, TE_PITCH_BACKWARD);
            __syncthreads();
        }
    te_mma_store<TE_DIM>(a.dk, s.batch, kv_head, s.kv_start + key + warp, mine, dk, (float)a.scale, (float)a.scale);
    te_mma_store<TE_DIM_V>(a.dv, s.batch, kv_head, s.kv_start + key + warp, mine, dv, 1.0f, 1.0f);
}
