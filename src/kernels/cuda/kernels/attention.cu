/* attention.cu - attention forward and backward for what cuDNN declines: any type, mask, bias and head size.
 *
 * A block owns a tile of TE_VECTOR queries (or keys) of one head and sequence, and walks over the tiles on the other
 * side that its mask reaches, with online softmax in forward (Dao et al., arXiv:2205.14135). In backward, dk and dv
 * have one owner and dq another, each of which computes the scores anew; so nothing is added from two places, and
 * gradients repeat to the bit. What a query does not see is never multiplied: a value that is not finite does not get
 * through. Threads hold parts of results in registers and read operands by 16 bytes, which serve several sums.
 */

enum {
    TE_TILE = TE_VECTOR,
    TE_UNIT = 16 / sizeof(te_real),                       /* numbers that shared memory gives at a time */
    TE_ROWS = TE_TILE >= 32 ? 4 : TE_TILE >= 16 ? 2 : 1,  /* what a thread holds of a tile: that many rows ... */
    TE_COLUMNS = TE_TILE >= 32 ? 2 : 1,                   /* ... and columns of scores, or units of results */
    TE_WEIGHTS = TE_TILE >= TE_UNIT ? TE_UNIT : 1         /* that are loaded at a time */
};
typedef te_unit<te_real, TE_UNIT> te_numbers;

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

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Units of a row in shared memory, the last one filled up with zeros; and how far apart rows lie that lanes read side
 * by side: an odd number of units, so that they lie in different banks. */
TE_HD static inline int te_units(int64_t dim) { return ((int)dim + TE_UNIT - 1) / TE_UNIT; }
TE_HD static inline int te_pitch(int64_t dim) { return (te_units(dim) | 1) * TE_UNIT; }

/* Rows first … first + n of a head into shared memory, `pitch` apart. */
__device__ static inline void te_load_rows(te_real *to, int pitch, const te_cuda_view &v, int64_t batch, int64_t head,
                                           int64_t first, int n, te_real scale)
{
    const int   warps = TE_ATTENTION_THREADS / 32, most = (TE_TILE + warps - 1) / warps; /* rows of a warp */
    int         dim = (int)v.shape[3], end = te_units(dim) * TE_UNIT, warp = threadIdx.x / 32;
    const te_a *from = te_row_of(v, batch, head, first);
#pragma unroll 1
    for (int d = threadIdx.x % 32; d < end; d += 32) {
        te_a x[most]; /* all on their way before the first is waited for */
#pragma unroll
        for (int k = 0; k < most; k++)
            x[k] = d < dim && warp + k * warps < n ? from[(warp + k * warps) * v.stride[2] + d] : (te_a)0;
#pragma unroll
        for (int k = 0; k < most; k++)
            if (warp + k * warps < n) to[(warp + k * warps) * pitch + d] = scale * te_from_a(x[k]);
    }
}

__device__ static inline void te_clear(te_real *to, int n)
{
    for (int e = threadIdx.x; e < n; e += TE_ATTENTION_THREADS) to[e] = 0;
}

__device__ static inline void te_store_rows(const te_cuda_view &v, int64_t batch, int64_t head, int64_t first, int n,
                                            const te_real *from, te_real scale)
{
    int dim = (int)v.shape[3], pitch = te_units(dim) * TE_UNIT;
    for (int row = threadIdx.x / 32; row < n; row += TE_ATTENTION_THREADS / 32)
#pragma unroll 1
        for (int d = threadIdx.x % 32; d < dim; d += 32)
            te_row_of(v, batch, head, first + row)[d] = te_as_a(scale * from[row * pitch + d]);
}

/* Which of a tile's scores are kept: a byte for four keys of a row. */
enum { TE_FOURS = (TE_TILE + 3) / 4 };
__device__ static inline void te_draw_tile(uint8_t *kept, const te_attention_args &a, const te_sequence &s,
                                           const te_dropout &z, int64_t head, int64_t query, int64_t key)
{
    for (int e = threadIdx.x; a.dropout && e < TE_TILE * TE_FOURS; e += TE_ATTENTION_THREADS)
        kept[e] = (uint8_t)te_kept_four(z, te_dropout_row(a, s, head, query + e / TE_FOURS) + key + e % TE_FOURS * 4);
}

TE_HD static inline bool te_kept_of(const uint8_t *kept, int row, int column)
{
    return kept[row * TE_FOURS + column / 4] >> column % 4 & 1;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* This thread's part of the scores of a tile: rows first_row + TE_TILE / TE_ROWS r, and columns likewise. */
enum { TE_ROW_STEP = TE_TILE / TE_ROWS, TE_COLUMN_STEP = TE_TILE / TE_COLUMNS };
struct te_part {
    int row, column;
};

/* False: it has none. */
__device__ static inline bool te_part_of(te_part *part)
{
    *part = {(int)threadIdx.x / TE_COLUMN_STEP, (int)threadIdx.x % TE_COLUMN_STEP};
    return part->row < TE_ROW_STEP;
}

/* The products of its rows of x with its rows of y. */
__device__ static inline void te_dots(te_real (&dot)[TE_ROWS][TE_COLUMNS], const te_real *x, const te_real *y,
                                      int pitch, int units, const te_part &part)
{
#pragma unroll
    for (int r = 0; r < TE_ROWS; r++)
#pragma unroll
        for (int c = 0; c < TE_COLUMNS; c++) dot[r][c] = 0;
    x += part.row * pitch, y += part.column * pitch;
#pragma unroll 2
    for (int u = 0; u < units; u++) {
        te_numbers p[TE_ROWS], q[TE_COLUMNS];
#pragma unroll
        for (int r = 0; r < TE_ROWS; r++)
            p[r] = te_unit_load<te_real, TE_UNIT>(x + r * TE_ROW_STEP * pitch + u * TE_UNIT);
#pragma unroll
        for (int c = 0; c < TE_COLUMNS; c++)
            q[c] = te_unit_load<te_real, TE_UNIT>(y + c * TE_COLUMN_STEP * pitch + u * TE_UNIT);
#pragma unroll
        for (int k = 0; k < TE_UNIT; k++)
#pragma unroll
            for (int r = 0; r < TE_ROWS; r++)
#pragma unroll
                for (int c = 0; c < TE_COLUMNS; c++)
                    dot[r][c] = TE_ATTENTION_FMA(p[r].e[k], q[c].e[k], dot[r][c]);
    }
}

/* Of a result in shared memory, TE_TILE rows of `units` units, what thread by thread is done: a unit of TE_ROWS
 * rows. */
#define TE_EACH_RESULT(row, unit, units)                                                                  \
    for (int te_at = threadIdx.x, row, unit;                                                              \
         te_at < TE_ROW_STEP * (units) && (row = te_at / (units) * TE_ROWS, unit = te_at % (units), true); \
         te_at += TE_ATTENTION_THREADS)

__device__ static inline void te_add_weighted(te_numbers &x, te_real weight, const te_numbers &y)
{
#pragma unroll
    for (int k = 0; k < TE_UNIT; k++) x.e[k] = TE_ATTENTION_FMA(weight, y.e[k], x.e[k]);
}

/* Adds n rows of y to each row of x, with weights that lie along a row of the tile; only those within its span, unless
 * all are. */
template <bool ALL>
__device__ static inline void te_weigh_along(te_numbers (&x)[TE_ROWS], const te_real *weights, const te_real *y,
                                             int pitch, int n, const te_span (&span)[TE_ROWS])
{
    for (int j = 0; j < n; j += TE_WEIGHTS) {
        te_unit<te_real, TE_WEIGHTS> w[TE_ROWS];
#pragma unroll
        for (int r = 0; r < TE_ROWS; r++) w[r] = te_unit_load<te_real, TE_WEIGHTS>(weights + r * TE_TILE + j);
#pragma unroll
        for (int k = 0; k < TE_WEIGHTS; k++) {
            te_numbers from = te_unit_load<te_real, TE_UNIT>(y + (j + k) * pitch);
#pragma unroll
            for (int r = 0; r < TE_ROWS; r++)
                if (ALL || te_in_span(span[r], j + k)) te_add_weighted(x[r], w[r].e[k], from);
        }
    }
}

/* The same with weights that lie across the rows of the tile, of which those without an lse are left out. */
template <bool ALL>
__device__ static inline void te_weigh_across(te_numbers (&x)[TE_ROWS], const te_real *weights, const te_real *y,
                                              int pitch, int n, const te_span (&span)[TE_ROWS], const te_real *lse)
{
#pragma unroll 2
    for (int i = 0; i < n; i++) {
        te_unit<te_real, TE_ROWS> w = te_unit_load<te_real, TE_ROWS>(weights + i * TE_TILE);
        te_numbers                from = te_unit_load<te_real, TE_UNIT>(y + i * pitch);
#pragma unroll
        for (int r = 0; r < TE_ROWS; r++)
            if (ALL || (te_in_span(span[r], i) && lse[i] != TE_LOWEST)) te_add_weighted(x[r], w.e[r], from);
    }
}

/* Keys of a tile of n that queries see from `query` on; rows beyond the last see none. Whether all see the whole
 * tile. */
__device__ static inline bool te_key_spans(te_span (&span)[TE_ROWS], const te_sequence &s, int64_t query, int rows,
                                           int64_t key, int n)
{
    bool all = n == TE_TILE;
#pragma unroll
    for (int r = 0; r < TE_ROWS; r++) {
        int from = (int)te_clamp(te_first_key(s, query + r) - key, 0, n);
        int end = (int)te_clamp(te_end_key(s, query + r) - key, 0, n);
        span[r] = te_span_between(from, end, r < rows ? n : 0);
        all &= span[r].n == TE_TILE;
    }
    return all;
}

/* Likewise queries that see keys from `key` on. */
__device__ static inline bool te_query_spans(te_span (&span)[TE_ROWS], const te_sequence &s, int64_t key, int keys,
                                             int64_t query, int n)
{
    bool all = n == TE_TILE;
#pragma unroll
    for (int r = 0; r < TE_ROWS; r++) {
        int from = (int)te_clamp(key + r - s.delta - s.right - query, 0, n);
        int end = (int)te_clamp(key + r - s.delta + s.left + 1 - query, 0, n);
        span[r] = te_span_between(from, end, r < keys ? n : 0);
        all &= span[r].n == TE_TILE;
    }
    return all;
}

/* Adds the values of a tile to results of queries, which are brought to a new maximum before. */
__device__ static inline void te_weigh_values(te_real *out, const te_real *p, const te_real *shrink, const te_real *v,
                                              int pitch, int units, const te_sequence &s, int64_t query, int rows,
                                              int64_t key, int n)
{
    TE_EACH_RESULT (i, unit, units) {
        te_span    span[TE_ROWS];
        te_numbers x[TE_ROWS];
        te_real   *at = out + (i * units + unit) * TE_UNIT;
        if (i >= rows) break;
#pragma unroll
        for (int r = 0; r < TE_ROWS; r++) {
            x[r] = te_unit_load<te_real, TE_UNIT>(at + r * units * TE_UNIT);
            te_real by = !shrink || i + r >= rows ? (te_real)1 : shrink[i + r];
#pragma unroll
            for (int k = 0; k < TE_UNIT; k++) x[r].e[k] *= by;
        }
        if (te_key_spans(span, s, query + i, rows - i, key, n))
            te_weigh_along<true>(x, p + i * TE_TILE, v + unit * TE_UNIT, pitch, n, span);
        else
            te_weigh_along<false>(x, p + i * TE_TILE, v + unit * TE_UNIT, pitch, n, span);
#pragma unroll
        for (int r = 0; r < TE_ROWS; r++) te_unit_store<te_real, TE_UNIT>(at + r * units * TE_UNIT, x[r]);
    }
}

/* --- forward ----------------------------------------------------------------------------------------------------- */

__device__ static inline te_real te_warp_max(te_real x)
{
    for (int by = 16; by > 0; by /= 2) {
        te_real other = __shfl_xor_sync(0xffffffffu, x, by);
        x = other > x ? other : x;
    }
    return x;
}

/* Scores of a row of the tile into weights relative to the new maximum, a warp per row; where `kept` is given, weights
 * of which the sum is made, and dropout after that. shrink: what brings the sums so far to that maximum. */
__device__ static inline void te_softmax_row(const te_attention_args &a, te_real *p, te_real *top, te_real *sum,
                                             te_real *shrink, const uint8_t *kept)
{
    int     lane = threadIdx.x % 32;
    te_real score = lane < TE_TILE ? p[lane] : TE_LOWEST, before = *top, most = te_warp_max(score);
    te_real now = most > before ? most : before;
    te_real weight = TE_ATTENTION_EXP(score - (now == TE_LOWEST ? (te_real)0 : now));
    te_real total = te_warp_sum(weight), factor = before == TE_LOWEST ? (te_real)0 : TE_ATTENTION_EXP(before - now);
    if (lane < TE_TILE) p[lane] = kept ? te_drop(a, te_kept_of(kept, 0, lane), weight) : weight;
    __syncwarp();
    if (lane == 0) {
        *top = now;
        *shrink = before == now ? (te_real)1 : factor;
        *sum = *sum * *shrink + total;
    }
}

/* What the forward kernels hold in shared memory; p is [query][key]. */
struct te_forward {
    int      units, units_v, pitch;
    te_real *q, *kv, *out, *p, *top, *sum, *shrink;
    uint8_t *kept;
};

__device__ static inline te_forward te_forward_at(const te_attention_args &a, te_real *shared)
{
    te_forward f = {te_units(a.q.shape[3]), te_units(a.v.shape[3]), 0, shared, 0, 0, 0, 0, 0, 0, 0};
    f.pitch = te_pitch(a.q.shape[3] > a.v.shape[3] ? a.q.shape[3] : a.v.shape[3]);
    f.kv = f.q + TE_TILE * f.pitch;
    f.out = f.kv + TE_TILE * f.pitch;
    f.p = f.out + TE_TILE * f.units_v * TE_UNIT;
    f.top = f.p + TE_TILE * TE_TILE;
    f.sum = f.top + TE_TILE;
    f.shrink = f.sum + TE_TILE;
    f.kept = (uint8_t *)(f.shrink + TE_TILE);
    return f;
}

/* Scores of the tile's rows against n keys in shared memory. */
__device__ static inline void te_tile_scores(const te_attention_args &a, const te_forward &f, const te_sequence &s,
                                             int64_t head, int64_t query, int rows, int64_t key, int n, te_real scale)
{
    te_part part;
    te_real dot[TE_ROWS][TE_COLUMNS];
    if (!te_part_of(&part)) return;
    te_dots(dot, f.q, f.kv, f.pitch, f.units, part);
#pragma unroll
    for (int r = 0; r < TE_ROWS; r++)
#pragma unroll
        for (int c = 0; c < TE_COLUMNS; c++) {
            int  i = part.row + r * TE_ROW_STEP, j = part.column + c * TE_COLUMN_STEP;
            bool seen = i < rows && j < n && te_sees(s, query + i, key + j);
            f.p[i * TE_TILE + j] =
                seen ? te_biased(scale * dot[r][c], te_bias_at(a, s, head, query + i, key + j)) : TE_LOWEST;
        }
}

/* Four blocks of a processor, as far as shared memory allows: without a number the compiler takes 64 registers, and
 * spills. */
extern "C" __global__ void __launch_bounds__(128, 4) te_attention(const __grid_constant__ te_attention_args a)
{
    TE_DYNAMIC_SHARED(te_real, shared);
    te_forward  f = te_forward_at(a, shared);
    const auto [s, head, kv_head, first, rows] = te_queries_of_block<TE_TILE>(a);
    if (rows <= 0) return;
    te_load_rows(f.q, f.pitch, a.q, s.batch, head, s.q_start + first, rows, TE_ATTENTION_SCALE(a));
    te_clear(f.out, TE_TILE * f.units_v * TE_UNIT);
    te_dropout z = te_dropout_of(a);
    te_real    sink = te_sink_of(a, head);
    for (int i = threadIdx.x; i < TE_TILE; i += TE_ATTENTION_THREADS) f.top[i] = sink, f.sum[i] = te_sink_weight(sink);
    int64_t end = te_end_key(s, first + rows - 1);
    for (int64_t key = te_first_key(s, first) / TE_TILE * TE_TILE; key < end; key += TE_TILE) {
        int n = te_rows_in_tile(key, s.n_kv, TE_TILE);
        te_load_rows(f.kv, f.pitch, a.k, s.batch, kv_head, s.kv_start + key, n, 1);
        te_draw_tile(f.kept, a, s, z, head, first, key);
        __syncthreads();
        te_tile_scores(a, f, s, head, first, rows, key, n, 1);
        __syncthreads();
        te_load_rows(f.kv, f.pitch, a.v, s.batch, kv_head, s.kv_start + key, n, 1);
        for (int i = threadIdx.x / 32; i < rows; i += TE_ATTENTION_THREADS / 32)
            te_softmax_row(a, f.p + i * TE_TILE, f.top + i, f.sum + i, f.shrink + i,
                           a.dropout ? f.kept + i * TE_FOURS : 0);
        __syncthreads();
        te_weigh_values(f.out, f.p, f.shrink, f.kv, f.pitch, f.units_v, s, first, rows, key, n);
        __syncthreads();
    }
    __syncthreads();
    for (int i = threadIdx.x / 32; i < rows; i += TE_ATTENTION_THREADS / 32) {
        te_real factor = f.sum[i] == 0 ? (te_real)0 : (te_real)1 / f.sum[i];
        te_a   *out = te_row_of(a.out, s.batch, head, s.q_start + first + i);
        for (int d = threadIdx.x % 32; d < a.v.shape[3]; d += 32)
            out[d] = te_as_a(f.sum[i] == 0 ? (te_real)0 : f.out[i * f.units_v * TE_UNIT + d] * factor);
    }
    for (int i = threadIdx.x; a.lse.data && i < rows; i += TE_ATTENTION_THREADS)
        te_store_lse(a, s, head, first + i, f.sum[i] == 0 ? TE_LOWEST : f.top[i] + TE_ATTENTION_LOG(f.sum[i]));
}

/* --- backward -----------------------------------------------------------------------------------------------------
 *
 * With S = scale q k^T + bias, P = exp(S - lse), Z the dropout factors, o = (P Z) v and D = rowsum(do o):
 *
 *      dv = (P Z)^T do        dP = do v^T        dS = P (Z dP - D)        dq = scale dS k        dk = scale dS^T q
 */

/* What both kernels hold in shared memory; p and ds are [query][key]. */
struct te_backward {
    int      units, units_v, pitch, pitch_v;
    te_real *q, *k, *v, *dout, *sum, *p, *ds, *lse, *d, *blind; /* blind: whether a query has no lse */
    uint8_t *kept;
};

__device__ static inline te_backward te_backward_at(const te_attention_args &a, te_real *shared)
{
    te_backward b = {te_units(a.q.shape[3]), te_units(a.v.shape[3]), te_pitch(a.q.shape[3]), te_pitch(a.v.shape[3]),
                     shared, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    b.k = b.q + TE_TILE * b.pitch;
    b.v = b.k + TE_TILE * b.pitch;
    b.dout = b.v + TE_TILE * b.pitch_v;
    b.sum = b.dout + TE_TILE * b.pitch_v;
    b.p = b.sum + TE_TILE * (b.units + b.units_v) * TE_UNIT;
    b.ds = b.p + TE_TILE * TE_TILE;
    b.lse = b.ds + TE_TILE * TE_TILE;
    b.d = b.lse + TE_TILE;
    b.kept = (uint8_t *)(b.d + TE_TILE);
    b.blind = b.d + 3 * TE_TILE;
    return b;
}

__device__ static inline void te_load_queries(const te_attention_args &a, const te_backward &b, const te_sequence &s,
                                              int64_t head, int64_t query, int rows)
{
    te_load_rows(b.q, b.pitch, a.q, s.batch, head, s.q_start + query, rows, TE_ATTENTION_SCALE(a));
    te_load_rows(b.dout, b.pitch_v, a.dout, s.batch, head, s.q_start + query, rows, 1);
    if (threadIdx.x >= 32) return;
    const te_real *d = (const te_real *)a.bound.scratch + (s.batch * a.q.shape[1] + head) * a.q.shape[2] + s.q_start;
    int            i = threadIdx.x;
    te_real        lse = i < rows ? te_lse_at(a, s, head, query + i) : (te_real)0;
    bool           blind = __any_sync(0xffffffffu, lse == TE_LOWEST);
    if (i < rows) b.lse[i] = lse, b.d[i] = d[query + i];
    if (i == 0) *b.blind = blind ? (te_real)1 : (te_real)0;
}

__device__ static inline void te_load_keys(const te_attention_args &a, const te_backward &b, const te_sequence &s,
                                           int64_t kv_head, int64_t key, int n)
{
    te_load_rows(b.k, b.pitch, a.k, s.batch, kv_head, s.kv_start + key, n, 1);
    te_load_rows(b.v, b.pitch_v, a.v, s.batch, kv_head, s.kv_start + key, n, 1);
}

/* P Z and dS of a tile, and the gradient of its bias where `dbias` wants that; 0 where nothing is seen. */
__device__ static inline void te_backward_scores(const te_attention_args &a, const te_backward &b, const te_sequence &s,
                                                 int64_t head, int64_t query, int rows, int64_t key, int n, bool dbias)
{
    te_part part;
    te_real dot[TE_ROWS][TE_COLUMNS], dp[TE_ROWS][TE_COLUMNS];
    if (!te_part_of(&part)) return;
    te_dots(dot, b.q, b.k, b.pitch, b.units, part);
    te_dots(dp, b.dout, b.v, b.pitch_v, b.units_v, part);
#pragma unroll
    for (int r = 0; r < TE_ROWS; r++)
#pragma unroll
        for (int c = 0; c < TE_COLUMNS; c++) {
            int     i = part.row + r * TE_ROW_STEP, j = part.column + c * TE_COLUMN_STEP;
            bool    seen = i < rows && j < n && te_sees(s, query + i, key + j);
            te_real lse = i < rows ? b.lse[i] : TE_LOWEST, p = 0, ds = 0;
            te_real bias = seen ? te_bias_at(a, s, head, query + i, key + j) : 0;
            if (seen && lse != TE_LOWEST && bias != TE_LOWEST) {
                bool    kept = !a.dropout || te_kept_of(b.kept, i, j);
                te_real x = dp[r][c];
                p = TE_ATTENTION_EXP(dot[r][c] + bias - lse);
                ds = p * ((a.dropout ? te_drop(a, kept, x) : x) - b.d[i]);
                if (a.dropout) p = te_drop(a, kept, p);
            }
            b.p[i * TE_TILE + j] = p;
            b.ds[i * TE_TILE + j] = ds;
#if TE_HAS_BIAS
            if (dbias && seen) te_dbias_row(a, s, head, query + i)[(key + j) * a.dbias.stride[3]] = ds;
#endif
        }
}

extern "C" __global__ void __launch_bounds__(128, 3) te_attention_dq(const __grid_constant__ te_attention_args a)
{
    TE_DYNAMIC_SHARED(te_real, shared);
    te_backward b = te_backward_at(a, shared);
    te_dropout  z = te_dropout_of(a);
    const auto [s, head, kv_head, first, rows] = te_queries_of_block<TE_TILE>(a);
    if (rows <= 0) return;
    te_load_queries(a, b, s, head, first, rows);
    te_clear(b.sum, TE_TILE * b.units * TE_UNIT);
    int64_t end = te_end_key(s, first + rows - 1);
    for (int64_t key = te_first_key(s, first) / TE_TILE * TE_TILE; key < end; key += TE_TILE) {
        int n = te_rows_in_tile(key, s.n_kv, TE_TILE);
        te_load_keys(a, b, s, kv_head, key, n);
        te_draw_tile(b.kept, a, s, z, head, first, key);
        __syncthreads();
        te_backward_scores(a, b, s, head, first, rows, key, n, a.dbias.data != 0);
        __syncthreads();
        TE_EACH_RESULT (i, unit, b.units) {
            te_span    span[TE_ROWS];
            te_numbers x[TE_ROWS];
            te_real   *at = b.sum + (i * b.units + unit) * TE_UNIT;
            if (i >= rows) break;
            bool all = te_key_spans(span, s, first + i, rows - i, key, n);
#pragma unroll
            for (int r = 0; r < TE_ROWS; r++) {
                if (i + r < rows && b.lse[i + r] == TE_LOWEST) span[r].n = 0, all = false;
                x[r] = te_unit_load<te_real, TE_UNIT>(at + r * b.units * TE_UNIT);
            }
            if (all) te_weigh_along<true>(x, b.ds + i * TE_TILE, b.k + unit * TE_UNIT, b.pitch, n, span);
            else te_weigh_along<false>(x, b.ds + i * TE_TILE, b.k + unit * TE_UNIT, b.pitch, n, span);
#pragma unroll
            for (int r = 0; r < TE_ROWS; r++) te_unit_store<te_real, TE_UNIT>(at + r * b.units * TE_UNIT, x[r]);
        }
        __syncthreads();
    }
    __syncthreads();
    te_store_rows(a.dq, s.batch, head, s.q_start + first, rows, b.sum, TE_ATTENTION_SCALE(a));
}

/* Adds rows of queries, weighted, to the gradient of keys or values. */
__device__ static inline void te_weigh_queries(const te_backward &b, te_real *sum, const te_real *weights,
                                               const te_real *y, int pitch, int units, const te_sequence &s,
                                               int64_t key, int keys, int64_t query, int rows)
{
    TE_EACH_RESULT (j, unit, units) {
        te_span    span[TE_ROWS];
        te_numbers x[TE_ROWS];
        te_real   *at = sum + (j * units + unit) * TE_UNIT;
        if (j >= keys) break;
#pragma unroll
        for (int r = 0; r < TE_ROWS; r++) x[r] = te_unit_load<te_real, TE_UNIT>(at + r * units * TE_UNIT);
        if (te_query_spans(span, s, key + j, keys - j, query, rows) && *b.blind == 0)
            te_weigh_across<true>(x, weights + j, y + unit * TE_UNIT, pitch, rows, span, b.lse);
        else
            te_weigh_across<false>(x, weights + j, y + unit * TE_UNIT, pitch, rows, span, b.lse);
#pragma unroll
        for (int r = 0; r < TE_ROWS; r++) te_unit_store<te_real, TE_UNIT>(at + r * units * TE_UNIT, x[r]);
    }
}

extern "C" __global__ void __launch_bounds__(128, 3) te_attention_dkv(const __grid_constant__ te_attention_args a)
{
    TE_DYNAMIC_SHARED(te_real, shared);
    te_backward b = te_backward_at(a, shared);
    te_dropout  z = te_dropout_of(a);
    te_real    *dk = b.sum, *dv = b.sum + TE_TILE * b.units * TE_UNIT;
    const auto [s, kv_head, group, key, n] = te_keys_of_block<TE_TILE>(a);
    if (n <= 0) return;
    int64_t first = te_clamp(key - s.delta - s.right, 0, s.n_q), end = te_clamp(key + n - s.delta + s.left, 0, s.n_q);
    te_load_keys(a, b, s, kv_head, key, n);
    te_clear(b.sum, TE_TILE * (b.units + b.units_v) * TE_UNIT);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t query = first / TE_TILE * TE_TILE; query < end; query += TE_TILE) {
            int rows = te_rows_in_tile(query, s.n_q, TE_TILE);
            te_load_queries(a, b, s, head, query, rows);
            te_draw_tile(b.kept, a, s, z, head, query, key);
            __syncthreads();
            te_backward_scores(a, b, s, head, query, rows, key, n, false);
            __syncthreads();
            te_weigh_queries(b, dk, b.ds, b.q, b.pitch, b.units, s, key, n, query, rows);
            te_weigh_queries(b, dv, b.p, b.dout, b.pitch_v, b.units_v, s, key, n, query, rows);
            __syncthreads();
        }
    }
    __syncthreads();
    te_store_rows(a.dk, s.batch, kv_head, s.kv_start + key, n, dk, 1);
    te_store_rows(a.dv, s.batch, kv_head, s.kv_start + key, n, dv, 1);
}
