/* attention_mma.cu - what attention in bfloat16 and float16 on tensor cores is made of: products, tiles in shared
 * memory, what a tile's rows see of it. Heads of up to 128, all masks, bias, dropout.
 *
 * A warp owns 16 rows; the other side comes in tiles through shared memory. All products are of 16 x 8 x 16, whose left
 * operand is held in registers: what one product leaves is, rounded, the left operand of the next (Dao,
 * arXiv:2307.08691), so scores never leave the registers. Right operands are read from one copy of a tile, along its
 * rows or, by the transposing form of ldmatrix, along its columns. While a tile is multiplied the next one is on its
 * way to shared memory.
 *
 * Weights are the device's 2^x, two instructions with the factor of x: what it errs by, 2^-22, and what the
 * multiplication does are far below what rounding weights to 16 bits does. Scores are not kept times that factor: of a
 * row that a bias of -1e9 hides, they would no longer be as large as its lse.
 *
 * TE_DIM and TE_DIM_V are the head sizes, rounded up to a multiple of 16; the rest is 0. Rows of a tile lie 8 elements
 * further apart than that: an odd number of 16-byte units, so that eight of them lie in different banks.
 */

enum { TE_PITCH = TE_DIM + 8, TE_PITCH_V = TE_DIM_V + 8 };

/* e^x; below 2^-126 it is 0. */
__device__ static inline float te_weight(float x)
{
    float power, h = x * 1.44269502f;
#if TE_MMA_DEVICE
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(h));
#else
    power = __builtin_exp2f(h);
    power = power < 0x1p-126f ? 0.0f : power;
#endif
    return power;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Two values as a pair of elements, the first in the low half. */
TE_HD static inline uint32_t te_pair(float x, float y) { return (uint32_t)te_as_a(x) | (uint32_t)te_as_a(y) << 16; }

/* The same of what is multiplied and forgotten: a NaN's bits may be others. */
__device__ static inline uint32_t te_mma_pair(float x, float y)
{
#if TE_MMA_DEVICE
    uint32_t pair;
#if TE_A_IS_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
#endif
    return pair;
#else
    return te_pair(x, y);
#endif
}

/* Right operands of two neighbouring products, b[16][16], from a tile in shared memory: b[k][n] is at[n][k] where the
 * summed dimension lies along the tile's rows, else at[k][n]. A lane addresses a row of one of four matrices of 8 x 8
 * and receives a pair of each. */
template <bool ALONG_ROWS> __device__ static inline void te_mma_right(uint32_t (&b)[4], const te_a *at, int pitch)
{
    int lane = threadIdx.x % 32;
#if TE_MMA_DEVICE
    int      n = lane / 16 * 8, k = lane / 8 % 2 * 8;
    int      row = lane % 8 + (ALONG_ROWS ? n : k), column = ALONG_ROWS ? k : n;
    uint32_t from = (uint32_t)__cvta_generic_to_shared(at + row * pitch + column);
    if (ALONG_ROWS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
#else
    for (int m = 0; m < 4; m++) {
        int k = m % 2 * 8 + 2 * (lane % 4), n = m / 2 * 8 + lane / 4;
        b[m] = ALONG_ROWS ? (uint32_t)at[n * pitch + k] | (uint32_t)at[n * pitch + k + 1] << 16
                          : (uint32_t)at[k * pitch + n] | (uint32_t)at[(k + 1) * pitch + n] << 16;
    }
#endif
}

/* c += a b, b of K x N: the tile's rows are b's columns, or they are its rows. */
template <bool ALONG_ROWS, int N, int K>
__device__ static inline void te_mma_tile(float (&c)[N / 8][4], const uint32_t (&a)[K / 16][4], const te_a *tile,
                                          int pitch)
{
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t b[4];
            te_mma_right<ALONG_ROWS>(b, tile + (ALONG_ROWS ? n * 16 * pitch + k * 16 : k * 16 * pitch + n * 16), pitch);
            te_mma(c[2 * n], a[k], b[0], b[1]);
            te_mma(c[2 * n + 1], a[k], b[2], b[3]);
        }
}

/* What products left, rounded, as a left operand. */
template <int N> __device__ static inline void te_mma_left(uint32_t (&a)[N / 16][4], const float (&c)[N / 8][4])
{
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        a[k][0] = te_mma_pair(c[2 * k][0], c[2 * k][1]);
        a[k][1] = te_mma_pair(c[2 * k][2], c[2 * k][3]);
        a[k][2] = te_mma_pair(c[2 * k + 1][0], c[2 * k + 1][1]);
        a[k][3] = te_mma_pair(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

template <int N> __device__ static inline void te_mma_clear(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Rows of a head, from one of them on. */
struct te_rows {
    te_a   *data;
    int64_t stride;
    int     dim;
};

TE_HD static inline te_rows te_rows_of(const te_cuda_view &v, int64_t batch, int64_t head, int64_t first)
{
    return {te_row_of(v, batch, head, first), v.stride[2], (int)v.shape[3]};
}

/* Elements d and d + 1 of a row. */
TE_HD static inline uint32_t te_pair_at(const te_a *row, int d, int dim)
{
#if TE_VECTOR > 1
    return d < dim ? *(const uint32_t *)(row + d) : 0;
#else
    return (uint32_t)(d < dim ? row[d] : (te_a)0) | (uint32_t)(d + 1 < dim ? row[d + 1] : (te_a)0) << 16;
#endif
}

/* A row as rows g and g + 8 of a left operand; NULL: zeros. */
template <int K>
__device__ static inline void te_mma_load_row(uint32_t (&a)[K / 16][4], int upper, const te_a *row, int dim)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        a[k][upper] = te_pair_at(row, k * 16 + 2 * t, row ? dim : 0);
        a[k][upper + 2] = te_pair_at(row, k * 16 + 2 * t + 8, row ? dim : 0);
    }
}

/* A warp's 16 rows as left operand; rows from `n` on are 0. */
template <int K>
__device__ static inline void te_mma_load_left(uint32_t (&a)[K / 16][4], const te_rows &rows, int n)
{
    int g = threadIdx.x % 32 / 4;
    te_mma_load_row<K>(a, 0, g < n ? rows.data + g * rows.stride : 0, rows.dim);
    te_mma_load_row<K>(a, 1, g + 8 < n ? rows.data + (g + 8) * rows.stride : 0, rows.dim);
}

/* A unit on its way to shared memory, or zeros. Single elements cannot travel by themselves and are waited for. */
__device__ static inline void te_mma_copy(te_a *to, const te_a *from, bool inside)
{
#if TE_MMA_DEVICE && TE_VECTOR > 1
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to), bytes = inside ? 2 * TE_VECTOR : 0;
#if TE_VECTOR == 8
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;"
                 :: "r"(at), "l"(from), "r"(bytes), "n"(2 * TE_VECTOR) : "memory");
#endif
#elif defined(TE_CUDA_SIM) && TE_VECTOR > 1
    te_sim_send((te_unit<te_a, TE_VECTOR> *)to, (const te_unit<te_a, TE_VECTOR> *)from, inside);
#else
    te_unit<te_a, TE_VECTOR> x = {};
    if (inside) x = te_unit_load<te_a, TE_VECTOR>(from);
    te_unit_store<te_a, TE_VECTOR>(to, x);
#endif
}

__device__ static inline void te_mma_copy_float(float *to, const float *from)
{
#if TE_MMA_DEVICE
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(from) : "memory");
#elif defined(TE_CUDA_SIM)
    te_sim_send(to, from, true);
#else
    *to = *from;
#endif
}

/* What was sent since the last call belongs together; all but the `LATER` last groups of this thread have arrived. */
__device__ static inline void te_mma_sent()
{
#if TE_MMA_DEVICE
    asm volatile("cp.async.commit_group;" ::: "memory");
#elif defined(TE_CUDA_SIM)
    te_sim_close_group();
#endif
}

template <int LATER> __device__ static inline void te_mma_arrived()
{
#if TE_MMA_DEVICE
    asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
#elif defined(TE_CUDA_SIM)
    te_sim_await(LATER);
#endif
}

/* THREADS threads, of which this is number `thread`, send N rows of memory to shared memory; rows from `n` > 0 on and
 * columns from the rows' dim to DIM are 0. */
template <int N, int DIM, int THREADS>
__device__ static inline void te_mma_send(te_a *to, const te_rows &rows, int n, int thread)
{
    const int  units = DIM / TE_VECTOR, step = THREADS / units;
    const bool even = THREADS % units == 0; /* a thread keeps its column */
#pragma unroll
    for (int i = 0; i < (N * units + THREADS - 1) / THREADS; i++) {
        int u = thread + i * THREADS;
        int row = even ? thread / units + i * step : u / units, d = (even ? thread : u) % units * TE_VECTOR;
        if (N * units % THREADS != 0 && u >= N * units) continue;
        bool inside = row < n && d < rows.dim;
        te_mma_copy(to + row * (DIM + 8) + d, rows.data + (inside ? row * rows.stride + d : 0), inside);
    }
}

/* 0 of a row that sees nothing, whatever its values are. */
TE_HD static inline float te_or_nothing(float x, float by) { return by == 0 ? 0.0f : x * by; }

/* A row of results, those of a lane, times a factor. */
template <int N>
__device__ static inline void te_mma_store_row(te_a *row, int dim, const float (&c)[N / 8][4], int upper, float by)
{
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        int d = i * 8 + threadIdx.x % 4 * 2;
#if TE_VECTOR > 1
        if (d < dim) *(uint32_t *)(row + d) = te_pair(te_or_nothing(c[i][2 * upper], by),
                                                            te_or_nothing(c[i][2 * upper + 1], by));
#else
        if (d < dim) row[d] = te_as_a(te_or_nothing(c[i][2 * upper], by));
        if (d + 1 < dim) row[d + 1] = te_as_a(te_or_nothing(c[i][2 * upper + 1], by));
#endif
    }
}

/* A warp's 16 rows of results, times a factor per row of the lane. */
template <int N>
__device__ static inline void te_mma_store(const te_rows &rows, int n, const float (&c)[N / 8][4], float factor,
                                           float factor8)
{
    int g = threadIdx.x % 32 / 4;
    if (g < n) te_mma_store_row<N>(rows.data + g * rows.stride, rows.dim, c, 0, factor);
    if (g + 8 < n) te_mma_store_row<N>(rows.data + (g + 8) * rows.stride, rows.dim, c, 1, factor8);
}

/* --- what is seen ------------------------------------------------------------------------------------------------ */

/* Of N columns, spans of a lane's two rows, where the warp's first row sees the columns low … high and each further row
 * the same, one further. Rows from `rows` and columns from `columns` on do not exist. */
template <int N>
__device__ static inline void te_mma_spans(te_span (&span)[2], int64_t low, int64_t high, int rows, int columns)
{
    int from = (int)te_clamp(low, -N - 32, N), end = (int)te_clamp(high, -N - 32, N) + 1;
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        int row = threadIdx.x % 32 / 4 + 8 * upper;
        span[upper] = te_span_between(from + row, end + row, row < rows ? columns : 0);
    }
}

/* Whether any of these rows sees any of the columns. */
template <int N> TE_HD static inline bool te_mma_meets(int64_t low, int64_t high, int rows)
{
    return rows > 0 && low < N && high + rows > 0;
}

/* Whether a warp's rows see the whole tile; `also` of every lane. */
template <int N> __device__ static inline bool te_mma_whole(const te_span (&span)[2], bool also)
{
    return __all_sync(0xffffffffu, also && span[0].n == N && span[1].n == N);
}

#if TE_HAS_BIAS
/* The bias of scores of queries (rows) and keys, where these are seen; `row`: of the lane's two queries at the tile's
 * first key. */
template <int N>
__device__ static inline void te_mma_load_bias(float (&bias)[N / 8][4], const te_c *const (&row)[2], int64_t step,
                                               const te_span (&span)[2])
{
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = n * 8 + threadIdx.x % 4 * 2 + e % 2;
            bias[n][e] = te_in_span(span[e / 2], column) ? te_from_c(row[e / 2][column * step]) : 0.0f;
        }
}

template <int N>
__device__ static inline void te_mma_add_loaded(float (&c)[N / 8][4], const float (&bias)[N / 8][4],
                                                const te_span (&span)[2])
{
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (te_in_span(span[e / 2], n * 8 + threadIdx.x % 4 * 2 + e % 2)) c[n][e] = te_biased(c[n][e], bias[n][e]);
}

template <int N>
__device__ static inline void te_mma_add_bias(float (&c)[N / 8][4], const te_c *const (&row)[2], int64_t step,
                                              const te_span (&span)[2])
{
    float bias[N / 8][4];
    te_mma_load_bias<N>(bias, row, step, span);
    te_mma_add_loaded<N>(c, bias, span);
}

/* The same where rows are keys and columns queries; `first`: of the tile's first query at the warp's first key. */
template <int N>
__device__ static inline void te_mma_add_bias_turned(float (&c)[N / 8][4], const te_c *first, int64_t query_step,
                                                     int64_t key_step, const te_span (&span)[2])
{
    const te_c *row[2];
    for (int upper = 0; upper < 2; upper++) row[upper] = first + (threadIdx.x % 32 / 4 + 8 * upper) * key_step;
    te_mma_add_bias<N>(c, row, query_step, span);
}

/* dS as the gradient of the bias, where something is seen. */
template <int N>
__device__ static inline void te_mma_store_dbias(const float (&ds)[N / 8][4], float *const (&row)[2], int64_t step,
                                                 const te_span (&span)[2])
{
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = n * 8 + threadIdx.x % 4 * 2 + e % 2;
            if (te_in_span(span[e / 2], column)) row[e / 2][column * step] = ds[n][e];
        }
}
#endif

/* --- dropout ----------------------------------------------------------------------------------------------------- */

/* Draws for four keys in each of N products: bits 4 n … 4 n + 3, from the element first + n step on. Counters of all
 * products go through a round together, which has one pair of keys: made for each counter anew, keys are a third of the
 * instructions. */
template <int N>
__device__ static inline uint32_t te_mma_draw(const te_dropout &z, uint64_t first, uint64_t step, bool aligned)
{
    uint32_t drawn = 0;
    if (aligned) {
        te_philox_words c[N];
        uint32_t        k0 = (uint32_t)z.rng.seed, k1 = (uint32_t)(z.rng.seed >> 32);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint64_t at = z.rng.offset + first / 4 + n * (step / 4);
            c[n] = {{(uint32_t)at, (uint32_t)(at >> 32), (uint32_t)z.rng.stream, (uint32_t)(z.rng.stream >> 32)}};
        }
#pragma unroll
        for (int round = 0; round < 10; round++) {
#pragma unroll
            for (int n = 0; n < N; n++) c[n] = te_philox_round(c[n], k0, k1);
            te_philox_next(&k0, &k1);
        }
#pragma unroll
        for (int n = 0; n < N; n++) drawn |= te_kept_of_words(z, c[n]) << 4 * n;
    } else {
#pragma unroll 1
        for (int n = 0; n < N; n++) drawn |= te_kept_four(z, first + n * step) << 4 * n;
    }
    return drawn;
}

/* Bit 4 n + e: whether element e of product n is kept, rows being queries. Of the eight keys that two lanes have, an
 * even one draws for four in row g, and the odd one in row g + 8; `first`: element of the tile's first key in that
 * row. */
template <int N>
__device__ static inline uint32_t te_mma_kept(const te_dropout &z, uint64_t first, bool aligned)
{
    int      odd = threadIdx.x % 2;
    uint32_t mine = te_mma_draw<N>(z, first + threadIdx.x % 4 / 2 * 4, 8, aligned);
    uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 1);
    uint32_t lower = (odd ? other : mine) >> 2 * odd, upper = (odd ? mine : other) >> 2 * odd;
    return (lower & 0x33333333u) | (upper & 0x33333333u) << 2;
}

/* The same where rows are keys and columns queries, `step` elements apart. Of four lanes with neighbouring keys the
 * j-th draws for element j of all; `first`: of its query and the warp's first key. */
template <int N>
__device__ static inline uint32_t te_mma_kept_turned(const te_dropout &z, uint64_t first, uint64_t step, bool aligned)
{
    int      lane = threadIdx.x % 32, j = lane / 4 % 4;
    uint32_t mine = te_mma_draw<N>(z, first + j / 2 * 8 + lane / 16 * 4, 8 * step, aligned), kept = 0;
#pragma unroll
    for (int e = 0; e < 4; e++)
        kept |= (__shfl_sync(0xffffffffu, mine, (lane & ~12) | e << 2) >> j & 0x11111111u) << e;
    return kept;
}

/* What is dropped becomes 0. */
template <int N> __device__ static inline void te_mma_drop(float (&c)[N][4], uint32_t kept)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] = kept >> (4 * n + e) & 1 ? c[n][e] : 0.0f;
}

/* The larger number; a NaN is none. */
TE_HD static inline float te_larger(float x, float y)
{
#if TE_MMA_DEVICE
    return fmaxf(x, y);
#else
    return y > x || x != x ? y : x;
#endif
}

TE_HD static inline float te_quad_max(float x)
{
    for (int by = 1; by < 4; by *= 2) x = te_larger(x, __shfl_xor_sync(0xffffffffu, x, by));
    return x;
}

TE_HD static inline float te_quad_sum(float x)
{
    for (int by = 1; by < 4; by *= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

/* --- softmax ----------------------------------------------------------------------------------------------------- */

/* Scores of N keys into weights, row by row of the lane; sums and results so far are brought to the new maximum. */
template <int N>
__device__ static inline void te_mma_softmax(float (&c)[N / 8][4], float (&out)[TE_DIM_V / 8][4], float (&top)[2],
                                             float (&sum)[2])
{
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
        float most = top[upper];
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) most = te_larger(most, c[n][2 * upper + e]);
        most = te_quad_max(most);
        float from = most == TE_LOWEST ? 0.0f : most, shrink = te_weight(top[upper] - from);
        top[upper] = most;
        sum[upper] *= shrink;
#pragma unroll
        for (int n = 0; n < TE_DIM_V / 8; n++) out[n][2 * upper] *= shrink, out[n][2 * upper + 1] *= shrink;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float weight = te_weight(c[n][2 * upper + e] - from);
                sum[upper] += weight;
                c[n][2 * upper + e] = weight;
            }
    }
}

/* Scores: scaled; -inf where nothing is seen. */
template <int N> __device__ static inline void te_mma_scale(float (&c)[N][4], float scale)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] *= scale;
}

template <int N> __device__ static inline void te_mma_hide(float (&c)[N][4], const te_span (&span)[2])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!te_in_span(span[e / 2], n * 8 + threadIdx.x % 4 * 2 + e % 2)) c[n][e] = TE_LOWEST;
}
