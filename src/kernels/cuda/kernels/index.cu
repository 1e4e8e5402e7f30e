/* index.cu - embedding, gather, scatter_add, and the sort that gives their sums an order.
 *
 * Where several sources add to one target, the sources' positions are sorted by target, stably; then the first of each
 * group adds all of them, in the order of their positions. So nothing is written twice at the same time and sums repeat
 * to the bit; they are the CPU's.
 */

/* --- embedding --------------------------------------------------------------------------------------------------- */

/* Rows of the table (te_b) to rows (te_a), TE_VECTOR columns a thread. */
extern "C" __global__ void __launch_bounds__(256) te_embedding(const __grid_constant__ te_embedding_args a)
{
    int64_t units = a.width / TE_VECTOR, last = a.ids.ndim;
    for (int64_t u = TE_FIRST; u < a.n * units; u += TE_STEP) {
        int64_t i = u / units, column = u % units * TE_VECTOR;
        int64_t id = te_whole_at(a.ids, a.ids_wide, te_offset(a.ids, a.ids.ndim, i));
        if (id < 0 || id >= a.table.shape[0]) {
            if (column == 0) te_report_id(a.bound, i, id);
            continue;
        }
        const te_b *from = (const te_b *)a.table.data + id * a.table.stride[0] + column * a.table.stride[1];
        te_a       *to = (te_a *)a.rows.data + te_offset(a.rows, last, i) + column * a.rows.stride[last];
#if TE_SAME_TYPE
        te_unit_store<te_a, TE_VECTOR>(to, te_unit_load<te_a, TE_VECTOR>(from));
#else
        te_unit<te_b, TE_VECTOR> x = te_unit_load<te_b, TE_VECTOR>(from);
        te_unit<te_a, TE_VECTOR> y;
#pragma unroll
        for (int k = 0; k < TE_VECTOR; k++) y.e[k] = te_as_a(te_from_b(x.e[k]));
        te_unit_store<te_a, TE_VECTOR>(to, y);
#endif
    }
}

/* Targets that are no class. The file's types are of no account. */
extern "C" __global__ void __launch_bounds__(256) te_check_classes(const __grid_constant__ te_classes_args a)
{
    for (int64_t i = TE_FIRST; i < a.n; i += TE_STEP) {
        int64_t at = te_offset(a.targets, a.targets.ndim, i);
        int64_t target = a.bytes == 1 ? ((const uint8_t *)a.targets.data)[at]
            : te_whole_at(a.targets, a.bytes == 8, at);
        if ((target < 0 || target >= a.classes) && (double)target != a.ignored) te_report_id(a.bound, i, target);
    }
}

/* --- packed sequences -------------------------------------------------------------------------------------------- */

__device__ static inline int64_t te_length_at(const te_packed_args &a, int64_t i, int64_t *given)
{
    *given = te_whole_at(a.lens, a.wide, i * a.lens.stride[0]);
    return *given < 0 ? 0 : *given > a.tokens ? a.tokens : *given;
}

/* One block: where each sequence starts. Offsets ascend within the tokens whatever the lengths are. */
extern "C" __global__ void __launch_bounds__(256) te_pack(const __grid_constant__ te_packed_args a)
{
    __shared__ int64_t sums[256];
    int64_t share = (a.n + 255) / 256, begin = share * threadIdx.x, end = begin + share, sum = 0, given;
    int     t = threadIdx.x;
    if (begin > a.n) begin = a.n;
    if (end > a.n) end = a.n;
    for (int64_t i = begin; i < end; i++) sum += te_length_at(a, i, &given);
    sums[t] = sum;
    for (int by = 1; by < 256; by *= 2) {
        __syncthreads();
        int64_t before = t >= by ? sums[t - by] : 0;
        __syncthreads();
        sums[t] += before;
    }
    int64_t at = sums[t] - sum;
    for (int64_t i = begin; i < end; i++) {
        a.offsets[i] = (int32_t)(at < a.tokens ? at : a.tokens);
        at += te_length_at(a, i, &given);
        if (given < 0 || at > a.tokens || given > a.tokens) te_report_id(a.bound, i, given);
    }
    if (t < 255) return;
    a.offsets[a.n] = (int32_t)(at < a.tokens ? at : a.tokens);
    if (at != a.tokens) te_report_id(a.bound, a.n, at);
}

extern "C" __global__ void __launch_bounds__(256) te_ragged(const __grid_constant__ te_packed_args a)
{
    for (int64_t i = TE_FIRST; i < a.batch + a.n_steps * (a.batch + 1); i += TE_STEP) {
        int64_t k = i < a.batch ? 0 : (i - a.batch) / (a.batch + 1),
                s = i < a.batch ? i : (i - a.batch) % (a.batch + 1);
        int64_t start = a.offsets[s < a.n ? s : a.n], end = a.offsets[s + 1 < a.n ? s + 1 : a.n];
        a.ragged[i] = (int32_t)(i < a.batch ? end - start : start * a.step[k]);
    }
}

/* --- the gradient of embedding ----------------------------------------------------------------------------------- */

/* Keys to sort by: ids, those out of range behind all others. */
extern "C" __global__ void __launch_bounds__(256) te_embedding_keys(const __grid_constant__ te_embedding_args a)
{
    uint64_t *keys = (uint64_t *)a.bound.scratch;
    int64_t  *positions = (int64_t *)(keys + 2 * a.n);
    for (int64_t i = TE_FIRST; i < a.n; i += TE_STEP) {
        int64_t id = te_whole_at(a.ids, a.ids_wide, te_offset(a.ids, a.ids.ndim, i));
        bool    inside = id >= 0 && id < a.table.shape[0];
        if (!inside) te_report_id(a.bound, i, id);
        keys[i] = (uint64_t)(inside ? id : a.table.shape[0]);
        positions[i] = i;
    }
}

/* A block per sorted pair and 256 columns; those that do not begin a group leave. */
extern "C" __global__ void __launch_bounds__(256) te_embedding_add(const __grid_constant__ te_embedding_args a)
{
    const uint64_t *keys = (const uint64_t *)a.bound.scratch + a.sorted * a.n;
    const int64_t  *positions = (const int64_t *)a.bound.scratch + (2 + a.sorted) * a.n;
    int64_t         first = blockIdx.x, column = (int64_t)blockIdx.y * 256 + threadIdx.x, last = a.ids.ndim;
    uint64_t        key = keys[first];
    if (column >= a.width || key >= (uint64_t)a.table.shape[0] || (first > 0 && keys[first - 1] == key)) return;
    te_b   *target = (te_b *)a.table.data + (int64_t)key * a.table.stride[0] + column * a.table.stride[1];
    te_real sum = te_from_b(*target);
    for (int64_t i = first; i < a.n && keys[i] == key; i++)
        sum += te_from_a(
            ((const te_a *)a.rows.data)[te_offset(a.rows, last, positions[i]) + column * a.rows.stride[last]]);
    *target = te_as_b(sum);
}

/* --- sorting ----------------------------------------------------------------------------------------------------- */

/* One block: each thread owns a stretch of the pairs, counts its digits, and after a scan over digits and threads moves
 * its pairs to their places. */
extern "C" __global__ void __launch_bounds__(512) te_sort(const __grid_constant__ te_sort_args a)
{
    enum { THREADS = 512, DIGITS = 16 };
    __shared__ uint32_t counts[DIGITS * THREADS], sums[THREADS];
    int64_t   share = (a.n + THREADS - 1) / THREADS, begin = share * threadIdx.x, end = begin + share;
    uint64_t *keys = (uint64_t *)a.bound.scratch;
    int64_t  *positions = (int64_t *)(keys + 2 * a.n);
    int       t = threadIdx.x, half = 0;
    if (begin > a.n) begin = a.n;
    if (end > a.n) end = a.n;
    for (int64_t shift = 0; shift < a.bits; shift += 4, half ^= 1) {
        const uint64_t *from = keys + half * a.n;
        for (int d = 0; d < DIGITS; d++) counts[d * THREADS + t] = 0;
        for (int64_t i = begin; i < end; i++) counts[(from[i] >> shift & 15) * THREADS + t]++;
        __syncthreads();
        uint32_t sum = 0;
        for (int i = 0; i < DIGITS; i++) {
            uint32_t count = counts[t * DIGITS + i];
            counts[t * DIGITS + i] = sum;
            sum += count;
        }
        sums[t] = sum;
        for (int by = 1; by < THREADS; by *= 2) {
            __syncthreads();
            uint32_t before = t >= by ? sums[t - by] : 0;
            __syncthreads();
            sums[t] += before;
        }
        for (int i = 0; i < DIGITS; i++) counts[t * DIGITS + i] += sums[t] - sum;
        __syncthreads();
        for (int64_t i = begin; i < end; i++) {
            int64_t to = (half ^ 1) * a.n + counts[(from[i] >> shift & 15) * THREADS + t]++;
            keys[to] = from[i];
            positions[to] = positions[half * a.n + i];
        }
        __syncthreads();
    }
}

/* --- gather and scatter_add -------------------------------------------------------------------------------------- */

/* Offset into `whole` of the element of index's shape, without its coordinate along dim. */
TE_HD static inline int64_t te_line_offset(const te_index_args &a, int64_t element)
{
    int64_t offset = 0;
    for (int64_t i = a.index.ndim - 1; i >= 0; i--) {
        if (i != a.dim) offset += element % a.index.shape[i] * a.whole.stride[i];
        element /= a.index.shape[i];
    }
    return offset;
}

extern "C" __global__ void __launch_bounds__(256) te_gather(const __grid_constant__ te_index_args a)
{
    for (int64_t u = TE_FIRST; u < a.n; u += TE_STEP) {
        int64_t at = te_whole_at(a.index, a.index_wide, te_offset(a.index, a.index.ndim, u));
        if (at < 0 || at >= a.whole.shape[a.dim]) {
            te_report_id(a.bound, u, at);
            continue;
        }
        ((te_a *)a.part.data)[te_offset(a.part, a.part.ndim, u)] =
            ((const te_a *)a.whole.data)[te_line_offset(a, u) + at * a.whole.stride[a.dim]];
    }
}

TE_HD static inline te_a te_added(te_a x, te_a y)
{
#if TE_A_IS_INTEGER
    return (te_a)((uint64_t)x + (uint64_t)y);
#else
    return te_as_a(te_from_a(x) + te_from_a(y));
#endif
}

/* A thread per line along dim: lines are independent. */
extern "C" __global__ void __launch_bounds__(256) te_scatter_lines(const __grid_constant__ te_index_args a)
{
    int64_t extent = a.index.shape[a.dim], inner = 1;
    for (int64_t i = a.dim + 1; i < a.index.ndim; i++) inner *= a.index.shape[i];
    for (int64_t line = TE_FIRST; line < a.n / extent; line += TE_STEP) {
        int64_t first = line / inner * inner * extent + line % inner;
        te_a   *to = (te_a *)a.whole.data + te_line_offset(a, first);
        int64_t at = te_offset(a.index, a.index.ndim, first), from = te_offset(a.part, a.part.ndim, first);
        for (int64_t i = 0; i < extent; i++) {
            int64_t target = te_whole_at(a.index, a.index_wide, at + i * a.index.stride[a.dim]);
            if (target < 0 || target >= a.whole.shape[a.dim]) {
                te_report_id(a.bound, first + i * inner, target);
                continue;
            }
            te_a *sum = to + target * a.whole.stride[a.dim];
            *sum = te_added(*sum, ((const te_a *)a.part.data)[from + i * a.part.stride[a.dim]]);
        }
    }
}

/* Few long lines: keys are (line, target), those out of range behind all others. */
extern "C" __global__ void __launch_bounds__(256) te_scatter_keys(const __grid_constant__ te_index_args a)
{
    uint64_t *keys = (uint64_t *)a.bound.scratch;
    int64_t  *positions = (int64_t *)(keys + 2 * a.n);
    int64_t   extent = a.index.shape[a.dim], inner = 1, bound = a.whole.shape[a.dim];
    for (int64_t i = a.dim + 1; i < a.index.ndim; i++) inner *= a.index.shape[i];
    for (int64_t u = TE_FIRST; u < a.n; u += TE_STEP) {
        int64_t at = te_whole_at(a.index, a.index_wide, te_offset(a.index, a.index.ndim, u));
        int64_t line = u / inner / extent * inner + u % inner;
        bool    inside = at >= 0 && at < bound;
        if (!inside) te_report_id(a.bound, u, at);
        keys[u] = (uint64_t)(inside ? line * bound + at : a.n / extent * bound);
        positions[u] = u;
    }
}

extern "C" __global__ void __launch_bounds__(256) te_scatter_add(const __grid_constant__ te_index_args a)
{
    const uint64_t *keys = (const uint64_t *)a.bound.scratch + a.sorted * a.n;
    const int64_t  *positions = (const int64_t *)a.bound.scratch + (2 + a.sorted) * a.n;
    int64_t         bound = a.whole.shape[a.dim], lines = a.n / a.index.shape[a.dim];
    for (int64_t first = TE_FIRST; first < a.n; first += TE_STEP) {
        uint64_t key = keys[first];
        if (key >= (uint64_t)(lines * bound) || (first > 0 && keys[first - 1] == key)) continue;
        te_a *to =
            (te_a *)a.whole.data + te_line_offset(a, positions[first]) + (int64_t)(key % bound) * a.whole.stride[a.dim];
        te_a  sum = *to;
        for (int64_t i = first; i < a.n && keys[i] == key; i++)
            sum = te_added(sum, ((const te_a *)a.part.data)[te_offset(a.part, a.part.ndim, positions[i])]);
        *to = sum;
    }
}
