/* index.cu - embedding, gather, scatter_add, and the sort that gives their sums an order; rows are added in add.cu.
 *
 * Where several sources add to one target, the sources' positions are sorted by target, stably; then the first of each
 * group adds all of them, in the order of their positions. So nothing is written twice at the same time and sums repeat
 * to the bit; they are the CPU's.
 */

/* --- embedding --------------------------------------------------------------------------------------------------- */

/* Rows of the table (te_b) to rows (te_a), TE_VECTOR columns at a time; 1 << a.lanes_bits threads, neighbours, take a
 * row. */
extern "C" __global__ void __launch_bounds__(256) te_embedding(const __grid_constant__ te_embedding_args a)
{
    enum { AHEAD = 4 };
    int     bits = (int)a.lanes_bits, lanes = 1 << bits, across = (int)threadIdx.x & (lanes - 1);
    int64_t last = a.ids.ndim, rows = blockDim.x >> bits, trips = (a.width / TE_VECTOR - across + lanes - 1) >> bits;
    int64_t next = (int64_t)lanes * TE_VECTOR, down = next * a.table.stride[1], on = next * a.rows.stride[last];
    for (int64_t i = blockIdx.x * rows + (threadIdx.x >> bits); i < a.n; i += gridDim.x * rows) {
        int64_t id = te_whole_at(a.ids, a.ids_wide, te_offset(a.ids, last, i));
        if (id < 0 || id >= a.table.shape[0]) {
            if (across == 0) te_report_id(a.bound, i, id);
            continue;
        }
        const te_b *from =
            (const te_b *)a.table.data + id * a.table.stride[0] + across * TE_VECTOR * a.table.stride[1];
        te_a *to = (te_a *)a.rows.data + te_offset(a.rows, last, i) + across * TE_VECTOR * a.rows.stride[last];
        for (int64_t left = trips; left > 0; left -= AHEAD, from += AHEAD * down, to += AHEAD * on) {
            te_unit<te_b, TE_VECTOR> x[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (k < left) x[k] = te_unit_load<te_b, TE_VECTOR>(from + k * down);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (k >= left) break;
#if TE_SAME_TYPE
                te_unit_store<te_a, TE_VECTOR>(to + k * on, x[k]);
#else
                te_unit<te_a, TE_VECTOR> y;
#pragma unroll
                for (int v = 0; v < TE_VECTOR; v++) y.e[v] = te_as_a(te_from_b(x[k].e[v]));
                te_unit_store<te_a, TE_VECTOR>(to + k * on, y);
#endif
            }
        }
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

/* The sequence in a slot of what cuDNN reads. */
__device__ static inline void te_ragged_put(const te_packed_args &a, int64_t slot, int64_t start, int64_t length)
{
    if (slot < a.batch) a.ragged[slot] = (int32_t)length;
    for (int64_t k = 0; k < a.n_steps; k++)
        a.ragged[a.batch + k * (a.batch + 1) + slot] = (int32_t)(start * a.step[k]);
}

/* One block. Sequences keep their order, empty ones are left out, and the shortest one is there as often as it takes
 * to make `batch` of them. */
extern "C" __global__ void __launch_bounds__(256) te_ragged(const __grid_constant__ te_packed_args a)
{
    __shared__ int64_t counts[256], least[256], rank;
    int64_t share = (a.n + 255) / 256, begin = share * threadIdx.x, end = begin + share;
    int64_t count = 0, shortest = INT64_MAX; /* by length, then by place */
    int     t = threadIdx.x;
    if (begin > a.n) begin = a.n;
    if (end > a.n) end = a.n;
    for (int64_t i = begin; i < end; i++) {
        int64_t length = a.offsets[i + 1] - a.offsets[i], key = length << 32 | i;
        if (length > 0 && key < shortest) shortest = key;
        count += length > 0;
    }
    counts[t] = count;
    least[t] = shortest;
    if (t == 0) rank = 0;
    for (int by = 1; by < 256; by *= 2) {
        __syncthreads();
        int64_t before = t >= by ? counts[t - by] : 0, other = least[t ^ by];
        __syncthreads();
        counts[t] += before;
        if (other < least[t]) least[t] = other;
    }
    int64_t at = counts[t] - count;
    for (int64_t i = begin, r = at; i < end; i++) {
        if (shortest == least[t] && i == (int64_t)(uint32_t)shortest && count > 0) rank = r;
        r += a.offsets[i + 1] > a.offsets[i];
    }
    __syncthreads();
    int64_t extra = a.batch - counts[255], again = (int64_t)(uint32_t)least[t];
    for (int64_t i = begin; i < end; i++) {
        int64_t start = a.offsets[i], length = a.offsets[i + 1] - start;
        if (length > 0) te_ragged_put(a, at > rank ? at + extra : at, start, length);
        at += length > 0;
    }
    bool some = counts[255] > 0;
    for (int64_t i = t; i < extra; i += 256) {
        int64_t start = some ? a.offsets[again] : 0, length = some ? a.offsets[again + 1] - start : 0;
        te_ragged_put(a, some ? rank + 1 + i : i, start, length);
    }
    if (t == 0) te_ragged_put(a, a.batch, a.offsets[a.n], 0);
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

/* --- sorting ----------------------------------------------------------------------------------------------------- */

/* A tile of pairs goes by at a time. Each warp has neighbouring pairs and goes over them by 32; it counts its pairs of
 * each digit, so that a pair's number among those of its digit follows the order of the pairs. */
enum { TE_SORT_THREADS = 512, TE_SORT_WARPS = TE_SORT_THREADS / 32, TE_SORT_EACH = TE_SORT_TILE / TE_SORT_THREADS };

struct te_sort_pairs {
    uint64_t key[TE_SORT_EACH];
    int64_t  position[TE_SORT_EACH];
    uint32_t number[TE_SORT_EACH]; /* within the warp's of its digit */
};

TE_HD static inline unsigned te_sort_digit(uint64_t key, int64_t digit)
{
    return (unsigned)(key >> digit * TE_SORT_BITS) & (TE_SORT_DIGITS - 1);
}

/* Index of a thread's k-th pair of a tile. */
__device__ static inline int64_t te_sort_index(int64_t tile, int k)
{
    return tile + threadIdx.x / 32 * (32 * TE_SORT_EACH) + k * 32 + threadIdx.x % 32;
}

/* Takes the pairs of a tile, of which those below `end` are there, and leaves each warp's counts of digits in `counts`.
 * `bits`: how many of the digit are not 0 everywhere. */
__device__ static inline void te_sort_take(te_sort_pairs *pairs, uint32_t (*counts)[TE_SORT_DIGITS],
                                           const uint64_t *keys, const int64_t *positions, int64_t tile, int64_t end,
                                           int64_t digit, int bits)
{
    unsigned  lane = threadIdx.x % 32, below = (1u << lane) - 1;
    uint32_t *own = counts[threadIdx.x / 32];
#pragma unroll
    for (int k = 0; k < TE_SORT_EACH; k++) {
        int64_t i = te_sort_index(tile, k);
        pairs->key[k] = i < end ? keys[i] : 0;
        pairs->position[k] = i < end ? positions[i] : 0;
    }
    for (unsigned d = lane; d < TE_SORT_DIGITS; d += 32) own[d] = 0;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < TE_SORT_EACH; k++) {
        bool     there = te_sort_index(tile, k) < end;
        unsigned d = te_sort_digit(pairs->key[k], digit), alike = __ballot_sync(0xffffffffu, there);
        for (int bit = 0; bit < bits; bit++) {
            unsigned set = __ballot_sync(0xffffffffu, d >> bit & 1);
            alike &= d >> bit & 1 ? set : ~set;
        }
        uint32_t before = own[d];
        pairs->number[k] = before + (uint32_t)__popc(alike & below);
        __syncwarp();
        if (there && (alike & below) == 0) own[d] = before + (uint32_t)__popc(alike);
        __syncwarp();
    }
}

/* Moves the pairs that were taken: those of digit d, the thread's own, to `base` and behind it. Returns the end. */
__device__ static inline uint32_t te_sort_move(const te_sort_pairs &pairs, uint32_t (*counts)[TE_SORT_DIGITS],
                                               uint64_t *keys, int64_t *positions, int64_t tile, int64_t end,
                                               int64_t digit, uint32_t base)
{
    for (int w = 0; w < TE_SORT_WARPS; w++) {
        uint32_t count = counts[w][threadIdx.x];
        counts[w][threadIdx.x] = base;
        base += count;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TE_SORT_EACH; k++) {
        if (te_sort_index(tile, k) >= end) continue;
        uint32_t to = counts[threadIdx.x / 32][te_sort_digit(pairs.key[k], digit)] + pairs.number[k];
        keys[to] = pairs.key[k];
        positions[to] = pairs.position[k];
    }
    __syncthreads();
    return base;
}

TE_HD static inline int te_sort_bits(const te_sort_args &a, int64_t digit)
{
    int64_t left = a.bits - digit * TE_SORT_BITS;
    return (int)(left < TE_SORT_BITS ? left : TE_SORT_BITS);
}

/* One block sorts a single tile, by all digits. */
extern "C" __global__ void __launch_bounds__(512) te_sort(const __grid_constant__ te_sort_args a)
{
    __shared__ uint32_t counts[TE_SORT_WARPS][TE_SORT_DIGITS];
    uint64_t *keys = (uint64_t *)a.bound.scratch;
    int64_t  *positions = (int64_t *)(keys + 2 * a.n), digit = 0;
    for (; digit * TE_SORT_BITS < a.bits; digit++) {
        te_sort_pairs pairs;
        int64_t       from = digit % 2 * a.n, to = a.n - from;
        te_sort_take(&pairs, counts, keys + from, positions + from, 0, a.n, digit, te_sort_bits(a, digit));
        __syncthreads();
        uint32_t total = 0;
        for (int w = 0; w < TE_SORT_WARPS; w++) total += counts[w][threadIdx.x];
        te_sort_move(pairs, counts, keys + to, positions + to, 0, a.n, digit, te_sum_before<TE_SORT_WARPS>(total));
    }
    if (threadIdx.x == 0) keys[4 * a.n + digit] = (uint64_t)(digit % 2);
}

/* How many pairs of each block's stretch have each value of a digit. */
extern "C" __global__ void __launch_bounds__(512) te_sort_count(const __grid_constant__ te_sort_args a)
{
    __shared__ uint32_t counts[TE_SORT_DIGITS];
    const uint64_t *keys = (const uint64_t *)a.bound.scratch + te_sort_half(a.bound, a.n, a.digit) * a.n;
    int64_t         begin = blockIdx.x * a.stretch, end = begin + a.stretch;
    if (end > a.n) end = a.n;
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t tile = begin + threadIdx.x; tile < end; tile += TE_SORT_TILE) {
        uint64_t key[TE_SORT_EACH];
#pragma unroll
        for (int k = 0; k < TE_SORT_EACH; k++)
            key[k] = tile + k * TE_SORT_THREADS < end ? keys[tile + k * TE_SORT_THREADS] : 0;
#pragma unroll
        for (int k = 0; k < TE_SORT_EACH; k++)
            if (tile + k * TE_SORT_THREADS < end) atomicAdd(&counts[te_sort_digit(key[k], a.digit)], 1u);
    }
    __syncthreads();
    ((uint32_t *)((uint64_t *)a.bound.scratch + 4 * a.n + TE_SORT_HALVES))[blockIdx.x * TE_SORT_DIGITS + threadIdx.x] =
        counts[threadIdx.x];
}

/* Moves the pairs by a digit, where they do not all have the same: the upper digits of a few experts' ids are 0. */
extern "C" __global__ void __launch_bounds__(512) te_sort_pass(const __grid_constant__ te_sort_args a)
{
    __shared__ uint32_t counts[TE_SORT_WARPS][TE_SORT_DIGITS];
    __shared__ int      alike;
    uint64_t       *keys = (uint64_t *)a.bound.scratch;
    int64_t        *positions = (int64_t *)(keys + 2 * a.n), half = te_sort_half(a.bound, a.n, a.digit);
    const uint32_t *of_blocks = (const uint32_t *)(keys + 4 * a.n + TE_SORT_HALVES) + threadIdx.x;
    int64_t         begin = blockIdx.x * a.stretch, end = begin + a.stretch, from = half * a.n, to = a.n - from;
    uint32_t        total = 0, before = 0;
    if (end > a.n) end = a.n;
#pragma unroll 8
    for (unsigned b = 0; b < gridDim.x; b++) {
        uint32_t count = of_blocks[b * TE_SORT_DIGITS];
        total += count;
        before += b < blockIdx.x ? count : 0;
    }
    if (threadIdx.x == 0) alike = 0;
    __syncthreads();
    if (total == a.n) alike = 1;
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) keys[4 * a.n + a.digit + 1] = (uint64_t)(alike ? half : 1 - half);
    if (alike) return;
    uint32_t base = before + te_sum_before<TE_SORT_WARPS>(total);
    for (int64_t tile = begin; tile < end; tile += TE_SORT_TILE) {
        te_sort_pairs pairs;
        te_sort_take(&pairs, counts, keys + from, positions + from, tile, end, a.digit, te_sort_bits(a, a.digit));
        __syncthreads();
        base = te_sort_move(pairs, counts, keys + to, positions + to, tile, end, a.digit, base);
    }
}

/* --- gather, scatter and scatter_add ----------------------------------------------------------------------------- */

/* Offset into `whole` of the element of index's shape, without its coordinate along dim. */
TE_HD static inline int64_t te_line_offset(const te_index_args &a, int64_t element)
{
    return te_offset_without(a.index.shape, a.whole.stride, a.index.ndim, element, a.dim);
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

/* A thread per line along dim: lines are independent. ADDS: to what is there, else in its place. */
template <bool ADDS> static __device__ void te_scatter_along(const te_index_args &a)
{
    int64_t extent = a.index.shape[a.dim], inner = 1;
#pragma unroll 1
    for (int64_t i = a.dim + 1; i < a.index.ndim; i++) inner *= a.index.shape[i];
    for (int64_t line = TE_FIRST; line < a.n / extent; line += TE_STEP) {
        int64_t first = line / inner * inner * extent + line % inner;
        te_a   *to = (te_a *)a.whole.data + te_line_offset(a, first);
        int64_t at = te_offset(a.index, a.index.ndim, first), from = te_offset(a.part, a.part.ndim, first);
#pragma unroll 1
        for (int64_t i = 0; i < extent; i++) {
            int64_t target = te_whole_at(a.index, a.index_wide, at + i * a.index.stride[a.dim]);
            te_a    x = ((const te_a *)a.part.data)[from + i * a.part.stride[a.dim]];
            if (target < 0 || target >= a.whole.shape[a.dim]) {
                te_report_id(a.bound, first + i * inner, target);
                continue;
            }
            te_a *place = to + target * a.whole.stride[a.dim];
            *place = ADDS ? te_plus(*place, x) : x;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) te_scatter_lines(const __grid_constant__ te_index_args a)
{
    te_scatter_along<true>(a);
}

extern "C" __global__ void __launch_bounds__(256) te_scatter(const __grid_constant__ te_index_args a)
{
    te_scatter_along<false>(a);
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

/* A thread per group: the loads of AHEAD elements are under way together. */
extern "C" __global__ void __launch_bounds__(256) te_scatter_add(const __grid_constant__ te_index_args a)
{
    enum { AHEAD = 4 };
    int64_t         half = te_sort_half(a.bound, a.n, a.sorted);
    const uint64_t *keys = (const uint64_t *)a.bound.scratch + half * a.n;
    const int64_t  *positions = (const int64_t *)a.bound.scratch + (2 + half) * a.n;
    int64_t         bound = a.whole.shape[a.dim], lines = a.n / a.index.shape[a.dim];
    for (int64_t first = TE_FIRST; first < a.n; first += TE_STEP) {
        uint64_t key = keys[first];
        if (key >= (uint64_t)(lines * bound) || (first > 0 && keys[first - 1] == key)) continue;
        te_a *to =
            (te_a *)a.whole.data + te_line_offset(a, positions[first]) + (int64_t)(key % bound) * a.whole.stride[a.dim];
        te_a  sum = *to;
        for (int64_t i = first, count = AHEAD; count == AHEAD; i += AHEAD) {
            te_a x[AHEAD];
            count = 0;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (i + k >= a.n || keys[i + k] != key) continue;
                x[k] = ((const te_a *)a.part.data)[te_offset(a.part, a.part.ndim, positions[i + k])];
                count++; /* equal keys are neighbours */
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (k < count) sum = te_plus(sum, x[k]);
        }
        *to = sum;
    }
}
