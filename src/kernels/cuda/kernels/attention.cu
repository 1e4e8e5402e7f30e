/* attention.cu - attention forward and backward for what cuDNN declines: any type, mask, bias and head size.
 *
 * A block owns a tile of TE_VECTOR queries (or keys) of one head and sequence, and walks over the tiles on the other
 * side that its mask reaches, with online softmax in forward (Dao et al., arXiv:2205.14135). In backward, dk and dv
 * have one owner and dq another, each of which computes the scores anew; so nothing is added from two places, and
 * gradients repeat to the bit. What a query does not see is never multiplied: a value that is not finite does not get
 * through.
 */

enum { TE_TILE = TE_VECTOR };

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* Rows first … first + n of a head into shared memory, `pitch` apart. */
__device__ static inline void te_load_rows(te_real *to, int pitch, const te_cuda_view &v, int64_t batch, int64_t head,
                                           int64_t first, int n, te_real scale)
{
    int dim = (int)v.shape[3];
    for (int e = threadIdx.x; e < n * dim; e += TE_ATTENTION_THREADS)
        to[e / dim * pitch + e % dim] = scale * te_from_a(te_row_of(v, batch, head, first + e / dim)[e % dim]);
}

__device__ static inline void te_clear(te_real *to, int n)
{
    for (int e = threadIdx.x; e < n; e += TE_ATTENTION_THREADS) to[e] = 0;
}

__device__ static inline void te_store_rows(const te_cuda_view &v, int64_t batch, int64_t head, int64_t first, int n,
                                            const te_real *from, te_real scale)
{
    int dim = (int)v.shape[3];
    for (int e = threadIdx.x; e < n * dim; e += TE_ATTENTION_THREADS)
        te_row_of(v, batch, head, first + e / dim)[e % dim] = te_as_a(scale * from[e]);
}

TE_HD static inline te_real te_dot(const te_real *x, const te_real *y, int n)
{
    te_real sum = 0;
    for (int d = 0; d < n; d++) sum = TE_ATTENTION_FMA(x[d], y[d], sum);
    return sum;
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

/* Scores of a row of the tile into weights relative to the new maximum, a warp per row. shrink: what brings the sums so
 * far to that maximum. */
__device__ static inline void te_softmax_row(te_real *p, te_real *top, te_real *sum, te_real *shrink)
{
    int     lane = threadIdx.x % 32;
    te_real score = lane < TE_TILE ? p[lane] : TE_LOWEST, before = *top, most = te_warp_max(score);
    te_real now = most > before ? most : before;
    te_real weight = TE_ATTENTION_EXP(score - (now == TE_LOWEST ? (te_real)0 : now));
    te_real total = te_warp_sum(weight), factor = before == TE_LOWEST ? (te_real)0 : TE_ATTENTION_EXP(before - now);
    if (lane < TE_TILE) p[lane] = weight;
    __syncwarp();
    if (lane == 0) {
        *top = now;
        *shrink = before == now ? (te_real)1 : factor;
        *sum = *sum * *shrink + total;
    }
}

/* Four blocks of a processor, which shared memory allows: without a number the compiler takes 64 registers, and
 * spills. */
extern "C" __global__ void __launch_bounds__(128, 4) te_attention(const __grid_constant__ te_attention_args a)
{
    TE_DYNAMIC_SHARED(te_real, shared);
    const int   dim = (int)a.q.shape[3], dim_v = (int)a.v.shape[3], pitch = (dim > dim_v ? dim : dim_v) + 1;
    te_real    *q = shared, *kv = q + TE_TILE * pitch, *p = kv + TE_TILE * pitch, *out = p + TE_TILE * TE_TILE;
    te_real    *top = out + TE_TILE * dim_v, *sum = top + TE_TILE, *shrink = sum + TE_TILE;
    te_block    block = te_block_of(a, a.q.shape[1]);
    int64_t     head = block.head, kv_head = block.kv_head;
    int64_t     first;
    te_sequence s = te_sequence_of(a, block, a.cu_q, TE_TILE, &first);
    if (first >= s.n_q) return;
    int rows = (int)(s.n_q - first < TE_TILE ? s.n_q - first : TE_TILE);
    te_load_rows(q, pitch, a.q, s.batch, head, s.q_start + first, rows, TE_ATTENTION_SCALE(a));
    te_clear(out, TE_TILE * dim_v);
    te_dropout z = te_dropout_of(a);
    te_real    sink = te_sink_of(a, head);
    for (int i = threadIdx.x; i < TE_TILE; i += TE_ATTENTION_THREADS) top[i] = sink, sum[i] = te_sink_weight(sink);
    int64_t end = te_end_key(s, first + rows - 1);
    for (int64_t key = te_first_key(s, first) / TE_TILE * TE_TILE; key < end; key += TE_TILE) {
        int n = (int)(s.n_kv - key < TE_TILE ? s.n_kv - key : TE_TILE);
        te_load_rows(kv, pitch, a.k, s.batch, kv_head, s.kv_start + key, n, 1);
        __syncthreads();
        for (int e = threadIdx.x; e < rows * TE_TILE; e += TE_ATTENTION_THREADS) {
            int i = e / TE_TILE, j = e % TE_TILE;
            p[e] = j < n && te_sees(s, first + i, key + j)
                       ? te_dot(q + i * pitch, kv + j * pitch, dim) + te_bias_at(a, s, head, first + i, key + j)
                       : TE_LOWEST;
        }
        __syncthreads();
        te_load_rows(kv, pitch, a.v, s.batch, kv_head, s.kv_start + key, n, 1);
        for (int i = threadIdx.x / 32; i < rows; i += TE_ATTENTION_THREADS / 32)
            te_softmax_row(p + i * TE_TILE, top + i, sum + i, shrink + i);
        __syncthreads();
        if (a.dropout) {
            for (int e = threadIdx.x; e < rows * TE_TILE; e += TE_ATTENTION_THREADS) {
                uint64_t element = te_dropout_row(a, s, head, first + e / TE_TILE) + key + e % TE_TILE;
                p[e] = te_drop(a, te_kept_one(z, element), p[e]);
            }
            __syncthreads();
        }
        for (int e = threadIdx.x; e < rows * dim_v; e += TE_ATTENTION_THREADS) {
            int     i = e / dim_v, d = e % dim_v;
            te_real x = out[e] * shrink[i];
            int     low = (int)te_clamp(te_first_key(s, first + i) - key, 0, n);
            int     high = (int)te_clamp(te_end_key(s, first + i) - key, 0, n);
            for (int j = low; j < high; j++) x = TE_ATTENTION_FMA(p[i * TE_TILE + j], kv[j * pitch + d], x);
            out[e] = x;
        }
        __syncthreads();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < rows * dim_v; e += TE_ATTENTION_THREADS) {
        int i = e / dim_v;
        te_row_of(a.out, s.batch, head, s.q_start + first + i)[e % dim_v] =
            te_as_a(sum[i] == 0 ? (te_real)0 : out[e] * ((te_real)1 / sum[i]));
    }
    for (int i = threadIdx.x; a.lse.data && i < rows; i += TE_ATTENTION_THREADS) {
        te_real lse = sum[i] == 0 ? TE_LOWEST : top[i] + TE_ATTENTION_LOG(sum[i]);
        te_store_lse(a, s, head, first + i, lse);
    }
}

/* --- backward -----------------------------------------------------------------------------------------------------
 *
 * With S = scale q k^T + bias, P = exp(S - lse), Z the dropout factors, o = (P Z) v and D = rowsum(do o):
 *
 *      dv = (P Z)^T do        dP = do v^T        dS = P (Z dP - D)        dq = scale dS k        dk = scale dS^T q
 */

/* What both kernels hold in shared memory; p and ds are [query][key]. */
struct te_backward {
    int      dim, dim_v, pitch, pitch_v;
    te_real *q, *k, *v, *dout, *p, *ds, *sum;
};

__device__ static inline te_backward te_backward_at(const te_attention_args &a, te_real *shared)
{
    te_backward b = {(int)a.q.shape[3], (int)a.v.shape[3], (int)a.q.shape[3] + 1, (int)a.v.shape[3] + 1,
                     shared, 0, 0, 0, 0, 0, 0};
    b.k = b.q + TE_TILE * b.pitch;
    b.v = b.k + TE_TILE * b.pitch;
    b.dout = b.v + TE_TILE * b.pitch_v;
    b.p = b.dout + TE_TILE * b.pitch_v;
    b.ds = b.p + TE_TILE * TE_TILE;
    b.sum = b.ds + TE_TILE * TE_TILE;
    return b;
}

__device__ static inline void te_load_queries(const te_attention_args &a, const te_backward &b, const te_sequence &s,
                                              int64_t head, int64_t query, int rows)
{
    te_load_rows(b.q, b.pitch, a.q, s.batch, head, s.q_start + query, rows, TE_ATTENTION_SCALE(a));
    te_load_rows(b.dout, b.pitch_v, a.dout, s.batch, head, s.q_start + query, rows, 1);
}

__device__ static inline void te_load_keys(const te_attention_args &a, const te_backward &b, const te_sequence &s,
                                           int64_t kv_head, int64_t key, int n)
{
    te_load_rows(b.k, b.pitch, a.k, s.batch, kv_head, s.kv_start + key, n, 1);
    te_load_rows(b.v, b.pitch_v, a.v, s.batch, kv_head, s.kv_start + key, n, 1);
}

/* P Z and dS of a tile; p < 0 marks what is not seen. */
__device__ static inline void te_backward_scores(const te_attention_args &a, const te_backward &b, const te_sequence &s,
                                                 const te_dropout &z, int64_t head, int64_t query, int rows,
                                                 int64_t key, int n)
{
    const te_real *d = (const te_real *)a.bound.scratch + (s.batch * a.q.shape[1] + head) * a.q.shape[2] + s.q_start;
    for (int e = threadIdx.x; e < rows * TE_TILE; e += TE_ATTENTION_THREADS) {
        int     i = e / TE_TILE, j = e % TE_TILE;
        te_real lse = te_lse_at(a, s, head, query + i);
        b.p[e] = -1;
        if (j >= n || lse == TE_LOWEST || !te_sees(s, query + i, key + j)) continue;
        te_real score =
            te_dot(b.q + i * b.pitch, b.k + j * b.pitch, b.dim) + te_bias_at(a, s, head, query + i, key + j);
        te_real weight = TE_ATTENTION_EXP(score - lse),
                dp = te_dot(b.dout + i * b.pitch_v, b.v + j * b.pitch_v, b.dim_v);
        if (a.dropout) {
            bool kept = te_kept_one(z, te_dropout_row(a, s, head, query + i) + key + j);
            b.p[e] = te_drop(a, kept, weight);
            dp = te_drop(a, kept, dp);
        } else {
            b.p[e] = weight;
        }
        b.ds[e] = weight * (dp - d[query + i]);
    }
}

extern "C" __global__ void __launch_bounds__(128, 4) te_attention_dq(const __grid_constant__ te_attention_args a)
{
    TE_DYNAMIC_SHARED(te_real, shared);
    te_backward b = te_backward_at(a, shared);
    te_dropout  z = te_dropout_of(a);
    te_block    block = te_block_of(a, a.q.shape[1]);
    int64_t     head = block.head, kv_head = block.kv_head;
    int64_t     first;
    te_sequence s = te_sequence_of(a, block, a.cu_q, TE_TILE, &first);
    if (first >= s.n_q) return;
    int rows = (int)(s.n_q - first < TE_TILE ? s.n_q - first : TE_TILE);
    te_load_queries(a, b, s, head, first, rows);
    te_clear(b.sum, TE_TILE * b.dim);
    int64_t end = te_end_key(s, first + rows - 1);
    for (int64_t key = te_first_key(s, first) / TE_TILE * TE_TILE; key < end; key += TE_TILE) {
        int n = (int)(s.n_kv - key < TE_TILE ? s.n_kv - key : TE_TILE);
        te_load_keys(a, b, s, kv_head, key, n);
        __syncthreads();
        te_backward_scores(a, b, s, z, head, first, rows, key, n);
        __syncthreads();
#if TE_HAS_BIAS
        for (int e = threadIdx.x; a.dbias.data && e < rows * TE_TILE; e += TE_ATTENTION_THREADS)
            if (!(b.p[e] < 0))
                te_dbias_row(a, s, head, first + e / TE_TILE)[(key + e % TE_TILE) * a.dbias.stride[3]] = b.ds[e];
#endif
        for (int e = threadIdx.x; e < rows * b.dim; e += TE_ATTENTION_THREADS) {
            int     i = e / b.dim, d = e % b.dim;
            te_real sum = b.sum[e];
            for (int j = 0; j < n; j++)
                if (!(b.p[i * TE_TILE + j] < 0))
                    sum = TE_ATTENTION_FMA(b.ds[i * TE_TILE + j], b.k[j * b.pitch + d], sum);
            b.sum[e] = sum;
        }
        __syncthreads();
    }
    __syncthreads();
    te_store_rows(a.dq, s.batch, head, s.q_start + first, rows, b.sum, TE_ATTENTION_SCALE(a));
}

extern "C" __global__ void __launch_bounds__(128, 4) te_attention_dkv(const __grid_constant__ te_attention_args a)
{
    TE_DYNAMIC_SHARED(te_real, shared);
    te_backward b = te_backward_at(a, shared);
    te_dropout  z = te_dropout_of(a);
    te_real    *dk = b.sum, *dv = b.sum + TE_TILE * b.dim;
    te_block    block = te_block_of(a, a.k.shape[1]);
    int64_t     kv_head = block.head, group = (uint32_t)a.q.shape[1] / (uint32_t)a.k.shape[1];
    int64_t     key;
    te_sequence s = te_sequence_of(a, block, a.cu_kv, TE_TILE, &key);
    if (key >= s.n_kv) return;
    int     n = (int)(s.n_kv - key < TE_TILE ? s.n_kv - key : TE_TILE);
    int64_t first = te_clamp(key - s.delta - s.right, 0, s.n_q), end = te_clamp(key + n - s.delta + s.left, 0, s.n_q);
    te_load_keys(a, b, s, kv_head, key, n);
    te_clear(b.sum, TE_TILE * (b.dim + b.dim_v));
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t query = first / TE_TILE * TE_TILE; query < end; query += TE_TILE) {
            int rows = (int)(s.n_q - query < TE_TILE ? s.n_q - query : TE_TILE);
            te_load_queries(a, b, s, head, query, rows);
            __syncthreads();
            te_backward_scores(a, b, s, z, head, query, rows, key, n);
            __syncthreads();
            for (int e = threadIdx.x; e < n * b.dim; e += TE_ATTENTION_THREADS) {
                int     j = e / b.dim, d = e % b.dim;
                te_real sum = dk[e];
                for (int i = 0; i < rows; i++)
                    if (!(b.p[i * TE_TILE + j] < 0))
                        sum = TE_ATTENTION_FMA(b.ds[i * TE_TILE + j], b.q[i * b.pitch + d], sum);
                dk[e] = sum;
            }
            for (int e = threadIdx.x; e < n * b.dim_v; e += TE_ATTENTION_THREADS) {
                int     j = e / b.dim_v, d = e % b.dim_v;
                te_real sum = dv[e];
                for (int i = 0; i < rows; i++)
                    if (!(b.p[i * TE_TILE + j] < 0))
                        sum = TE_ATTENTION_FMA(b.p[i * TE_TILE + j], b.dout[i * b.pitch_v + d], sum);
                dv[e] = sum;
            }
            __syncthreads();
        }
    }
    __syncthreads();
    te_store_rows(a.dk, s.batch, kv_head, s.kv_start + key, n, dk, 1);
    te_store_rows(a.dv, s.batch, kv_head, s.kv_start + key, n, dv, 1);
}
