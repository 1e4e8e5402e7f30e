/* add.cu - sums of elements and rows by index, each in the order of its terms.
 *
 * Rows that go to one place were sorted by it, stably (index.cu); a warp adds a few, a block many. Single elements are
 * added in shared memory that holds a stretch of the result, by one warp, 32 at a time in order; lanes whose elements
 * go to one place are found by what is left of their numbers there. So nothing is written twice at the same time and
 * sums repeat to the bit; they are the CPU's.
 */

#if TE_B_IS_INTEGER
typedef uint64_t te_sum; /* wraps around */
#define TE_TERM(x)     ((te_sum)(x))
#define TE_SUM_FROM(x) ((te_sum)(x))
#define TE_SUM_AS(x)   ((te_b)(x))
#else
typedef te_real te_sum;
#define TE_TERM(x)     te_from_a(x)
#define TE_SUM_FROM(x) te_from_b(x)
#define TE_SUM_AS(x)   te_as_b(x)
#endif

/* --- rows -------------------------------------------------------------------------------------------------------- */

/* Adds to sums the elements of as many rows, at most AHEAD, whose offsets lanes from `lane` on have in `place`: all
 * loads are under way together, and their elements are added in order. */
template <int AHEAD> static __device__ inline void te_add_few(te_sum *sums, const te_a *rows, int64_t place, int lane,
                                                              int count, bool inside)
{
    te_unit<te_a, TE_VECTOR> x[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        int64_t at = __shfl_sync(0xffffffffu, place, lane + k);
        if (k < count && inside) x[k] = te_unit_load<te_a, TE_VECTOR>(rows + at);
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (k < count && inside)
#pragma unroll
            for (int v = 0; v < TE_VECTOR; v++) sums[v] += TE_TERM(x[k].e[v]);
}

/* A warp per sorted pair and TE_VECTOR columns a lane: it makes the sums of the group that begins there, if one does
 * that te_add_long leaves. Its lanes find the places of 32 rows at a time. Most groups are short. */
extern "C" __global__ void __launch_bounds__(256, 2) te_add_rows(const __grid_constant__ te_embedding_args a)
{
    enum { WARPS = 8, ACROSS = 32 * TE_VECTOR, AHEAD = 8, FEW = 2 };
    int64_t         half = te_sort_half(a.bound, a.n, a.sorted), last = a.ids.ndim;
    const uint64_t *keys = (const uint64_t *)a.bound.scratch + half * a.n;
    const int64_t  *positions = (const int64_t *)a.bound.scratch + (2 + half) * a.n;
    int             lane = threadIdx.x % 32;
    for (int64_t first = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; first < a.n;
         first += (int64_t)gridDim.x * WARPS) {
        uint64_t key = keys[first], before = first > 0 ? keys[first - 1] : UINT64_MAX;
        if (key >= (uint64_t)a.table.shape[0] || before == key) continue;
        if (first + TE_ADD_LONG <= a.n && keys[first + TE_ADD_LONG - 1] == key) continue;
        for (int64_t block = blockIdx.y; block * ACROSS < a.width; block += gridDim.y) {
            int64_t     column = block * ACROSS + lane * TE_VECTOR;
            bool        inside = column < a.width;
            const te_a *rows = (const te_a *)a.rows.data + column * a.rows.stride[last];
            te_b       *target = (te_b *)a.table.data + (int64_t)key * a.table.stride[0] + column * a.table.stride[1];
            te_unit<te_b, TE_VECTOR> sum;
            te_sum                   sums[TE_VECTOR];
            if (inside) sum = te_unit_load<te_b, TE_VECTOR>(target);
#pragma unroll
            for (int v = 0; v < TE_VECTOR; v++) sums[v] = inside ? TE_SUM_FROM(sum.e[v]) : (te_sum)0;
            for (int64_t at = first + lane, count = 32; count == 32; at += 32) {
                bool    here = at < a.n && keys[at] == key; /* equal keys are neighbours */
                int64_t place = here ? te_offset(a.rows, last, positions[at]) : 0;
                count = __popc(__ballot_sync(0xffffffffu, here));
                int j = 0, left = (int)count;
                for (; left - j > FEW; j += AHEAD) te_add_few<AHEAD>(sums, rows, place, j, left - j, inside);
                if (j < left) te_add_few<FEW>(sums, rows, place, j, left - j, inside);
            }
#pragma unroll
            for (int v = 0; v < TE_VECTOR; v++) sum.e[v] = TE_SUM_AS(sums[v]);
            if (inside) te_unit_store<te_b, TE_VECTOR>(target, sum);
        }
    }
}

/* The first of sorted keys from `low` to `high` for which it is larger than key (or, with `or_equal`, not less). */
static __device__ inline int64_t te_key_search(const uint64_t *keys, int64_t low, int64_t high, uint64_t key,
                                               bool or_equal)
{
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (keys[middle] > key || (or_equal && keys[middle] == key)) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Where the long group begins whose pair of the lowest index that is a multiple of TE_ADD_LONG is `at`; -1: none. */
static __device__ inline int64_t te_long_begin(const te_embedding_args &a, const uint64_t *keys, int64_t at)
{
    if (at >= a.n || keys[at] >= (uint64_t)a.table.shape[0]) return -1;
    uint64_t key = keys[at];
    if (at > 0 && keys[at - TE_ADD_LONG] == key) return -1;
    int64_t begin = at > 0 ? te_key_search(keys, at - TE_ADD_LONG + 1, at, key, true) : 0;
    return begin + TE_ADD_LONG <= a.n && keys[begin + TE_ADD_LONG - 1] == key ? begin : -1;
}

enum { TE_ADD_STEP = 16 };
static __device__ inline void te_add_step(te_sum &sum, const te_sum (&x)[TE_ADD_STEP])
{
#pragma unroll
    for (int k = 0; k < TE_ADD_STEP; k++) sum += x[k];
}

/* All rows of a group, whose pairs have these positions, 32 columns a block. Their sums are one addition after the
 * other, so all else has to be faster: while one warp adds the rows that lie in shared memory, the next ones are under
 * way to the registers of all warps, and the positions of those after them. */
static __device__ inline void te_add_group(const te_embedding_args &a, const int64_t *positions, int64_t key,
                                           int64_t begin, int64_t end)
{
    enum { WARPS = 8, EACH = 32 * 4 / sizeof(te_sum), ROWS = WARPS * EACH, STEP = TE_ADD_STEP };
    __shared__ te_sum terms[ROWS][32];
    int64_t last = a.ids.ndim;
    int     lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t block = blockIdx.y; block * 32 < a.width; block += gridDim.y) {
        int64_t     column = block * 32 + lane;
        bool        inside = column < a.width;
        const te_a *rows = (const te_a *)a.rows.data + column * a.rows.stride[last];
        te_b       *target = (te_b *)a.table.data + key * a.table.stride[0] + column * a.table.stride[1];
        te_sum      sum = inside ? TE_SUM_FROM(*target) : (te_sum)0;
        int64_t     next = begin + warp * EACH + lane;
        int64_t     place = lane < EACH && next < end ? te_offset(a.rows, last, positions[next]) : 0;
        for (int64_t tile = begin; tile < end + ROWS; tile += ROWS) { /* the last round only adds */
            te_a    x[EACH];
            int64_t left = end - tile - warp * EACH, later = tile + ROWS + warp * EACH + lane;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                int64_t from = __shfl_sync(0xffffffffu, place, k);
                if (k < left && inside) x[k] = rows[from];
            }
            place = lane < EACH && later < end ? te_offset(a.rows, last, positions[later]) : 0;
            if (warp == 0 && tile > begin) {
                int    count = end - (tile - ROWS) < ROWS ? (int)(end - (tile - ROWS)) : (int)ROWS, r = 0;
                te_sum y[STEP] = {};
                for (; r + STEP <= count; r += STEP) { /* those of the step before; at first there is none */
                    te_sum z[STEP];
#pragma unroll
                    for (int k = 0; k < STEP; k++) z[k] = terms[r + k][lane];
                    if (r > 0) te_add_step(sum, y);
#pragma unroll
                    for (int k = 0; k < STEP; k++) y[k] = z[k];
                }
                if (r > 0) te_add_step(sum, y);
                for (; r < count; r++) sum += terms[r][lane];
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < EACH; k++)
                if (k < left && inside) terms[warp * EACH + k][lane] = TE_TERM(x[k]);
            __syncthreads();
        }
        if (warp == 0 && inside) *target = TE_SUM_AS(sum);
    }
}

/* Groups of TE_ADD_LONG pairs or more. A block looks for them at TE_ADD_SLOTS indices of pairs. */
extern "C" __global__ void __launch_bounds__(256) te_add_long(const __grid_constant__ te_embedding_args a)
{
    __shared__ int64_t begins[TE_ADD_SLOTS], ends[TE_ADD_SLOTS];
    int64_t         half = te_sort_half(a.bound, a.n, a.sorted);
    const uint64_t *keys = (const uint64_t *)a.bound.scratch + half * a.n;
    const int64_t  *positions = (const int64_t *)a.bound.scratch + (2 + half) * a.n;
    for (int64_t slot = (int64_t)blockIdx.x * TE_ADD_SLOTS; slot * TE_ADD_LONG < a.n;
         slot += (int64_t)gridDim.x * TE_ADD_SLOTS) {
        __syncthreads();
        if (threadIdx.x < TE_ADD_SLOTS) { /* each load waits for the one before it: so for all groups together */
            int64_t begin = te_long_begin(a, keys, (slot + threadIdx.x) * TE_ADD_LONG);
            begins[threadIdx.x] = begin;
            if (begin >= 0) ends[threadIdx.x] = te_key_search(keys, begin + TE_ADD_LONG, a.n, keys[begin], false);
        }
        __syncthreads();
        for (int s = 0; s < TE_ADD_SLOTS; s++)
            if (begins[s] >= 0) te_add_group(a, positions, (int64_t)keys[begins[s]], begins[s], ends[s]);
    }
}

/* --- single elements --------------------------------------------------------------------------------------------- */

enum { TE_STRETCH = TE_ADD_STRETCH_BYTES / sizeof(te_a), TE_TAGS = 8192, TE_ADD_AHEAD = 8 };

/* A stretch of the result, and who was last at a place: a place's tag may be another one's too. */
struct te_stretch {
    te_a    sum[TE_STRETCH];
    uint8_t tag[TE_TAGS];
};

/* Adds a warp's elements, in the order of lanes, to their places in the stretch; a negative place: none. */
static __device__ inline void te_add_places(te_stretch &s, int place, te_a x)
{
    int lane = threadIdx.x % 32;
    if (place >= 0) s.tag[place % TE_TAGS] = (uint8_t)lane;
    __syncwarp();
    bool lost = place >= 0 && s.tag[place % TE_TAGS] != lane;
    te_a sum = place >= 0 ? s.sum[place] : (te_a)0;
    if (!__any_sync(0xffffffffu, lost)) {
        sum = te_plus(sum, x);
    } else { /* each lane takes all that comes to its place */
#pragma unroll 8
        for (int k = 0; k < 32; k++) {
            int  other = __shfl_sync(0xffffffffu, place, k);
            te_a y = (te_a)__shfl_sync(0xffffffffu, x, k);
            if (other == place) sum = te_plus(sum, y);
        }
    }
    if (place >= 0) s.sum[place] = sum;
    __syncwarp();
}

/* Lines along the last dimension: blockIdx.x is the line's number and that of a stretch of it. One warp adds, with the
 * indices and elements of the next steps under way; the others help to bring the stretch and to take it back. */
extern "C" __global__ void __launch_bounds__(128) te_add_lines(const __grid_constant__ te_index_args a)
{
    __shared__ te_stretch s;
    int64_t ndim = a.index.ndim - 1, extent = a.index.shape[ndim], bound = a.whole.shape[ndim];
    int64_t stretches = (bound + TE_STRETCH - 1) / TE_STRETCH, line = blockIdx.x / stretches;
    int64_t low = (blockIdx.x - line * stretches) * TE_STRETCH, to = a.whole.stride[ndim];
    int     places = bound - low < TE_STRETCH ? (int)(bound - low) : (int)TE_STRETCH, lane = threadIdx.x;
    te_a   *whole = (te_a *)a.whole.data + low * to +
        te_offset_without(a.index.shape, a.whole.stride, ndim, line, -1);
    int64_t at = te_offset(a.index, ndim, line), from = te_offset(a.part, ndim, line);
#pragma unroll 8
    for (int i = threadIdx.x; i < places; i += 128) s.sum[i] = whole[i * to];
    __syncthreads();
    if (threadIdx.x < 32) {
        int64_t id[TE_ADD_AHEAD], next_id[TE_ADD_AHEAD] = {};
        te_a    x[TE_ADD_AHEAD], next_x[TE_ADD_AHEAD] = {};
        for (int64_t first = -32 * TE_ADD_AHEAD; first < extent; first += 32 * TE_ADD_AHEAD) {
#pragma unroll
            for (int k = 0; k < TE_ADD_AHEAD; k++) {
                int64_t i = first + (TE_ADD_AHEAD + k) * 32 + lane;
                id[k] = next_id[k];
                x[k] = next_x[k];
                next_id[k] = -1;
                next_x[k] = (te_a)0;
                if (i >= extent) continue;
                next_id[k] = te_whole_at(a.index, a.index_wide, at + i * a.index.stride[ndim]);
                next_x[k] = ((const te_a *)a.part.data)[from + i * a.part.stride[ndim]];
            }
            if (first < 0) continue;
#pragma unroll
            for (int k = 0; k < TE_ADD_AHEAD; k++) {
                int64_t i = first + k * 32 + lane;
                if (i < extent && low == 0 && (id[k] < 0 || id[k] >= bound))
                    te_report_id(a.bound, line * extent + i, id[k]);
                bool here = i < extent && id[k] >= low && id[k] < low + places;
                te_add_places(s, here ? (int)(id[k] - low) : -1, x[k]);
            }
        }
    }
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < places; i += 128) whole[i * to] = s.sum[i];
}

/* --- single elements, by buckets --------------------------------------------------------------------------------- */

/* An element and its place in its bucket's stretch, which one access moves. */
struct __align__(sizeof(te_a) < 4 ? 4 : 2 * sizeof(te_a)) te_placed {
    te_a     x;
    uint16_t place;
};

/* The slot that element u goes to, from its index; -1: none. */
static __device__ inline int64_t te_slot(const te_buckets_args &a, int64_t u, int64_t id, bool report)
{
    if (id < 0 || id >= a.extent) {
        if (report) te_report_id(a.bound, u, id);
        return -1;
    }
    int64_t inner = a.inner, rest = te_quotient(u, inner), outer = te_quotient(rest, a.taken);
    return (outer * a.extent + id) * inner + u - rest * inner;
}

/* How many elements of each warp's share go to each bucket. */
extern "C" __global__ void __launch_bounds__(256) te_bucket_count(const __grid_constant__ te_buckets_args a)
{
    enum { AHEAD = 4 };
    __shared__ uint32_t counts[8][TE_BUCKETS];
    int      lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t  w = (int64_t)blockIdx.x * 8 + warp, begin = w * a.share;
    int64_t  end = a.n - begin < a.share ? a.n : begin + a.share;
    for (int i = lane; i < a.buckets; i += 32) counts[warp][i] = 0;
    __syncwarp();
    for (int64_t u = begin + lane; u < end; u += 32 * AHEAD) {
        int64_t id[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (u + k * 32 < end)
                id[k] = te_whole_at(a.index, a.index_wide, te_offset(a.index, a.index.ndim, u + k * 32));
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int64_t slot = u + k * 32 < end ? te_slot(a, u + k * 32, id[k], true) : -1;
            if (slot >= 0) atomicAdd(&counts[warp][slot >> a.stretch_bits], 1u);
        }
    }
    __syncwarp();
    uint32_t *to = (uint32_t *)(a.bound.scratch + a.counts_at);
    for (int i = lane; i < a.buckets && w < a.warps; i += 32) to[i * a.warps + w] = counts[warp][i];
}

/* A bucket a block: counts become where each warp begins within the bucket; and its number of elements. */
extern "C" __global__ void __launch_bounds__(256) te_bucket_scan(const __grid_constant__ te_buckets_args a)
{
    uint32_t *counts = (uint32_t *)(a.bound.scratch + a.counts_at) + blockIdx.x * a.warps, before = 0, all;
    for (int64_t i = 0; i < a.warps; i += 256) {
        int64_t  at = i + threadIdx.x;
        uint32_t count = at < a.warps ? counts[at] : 0, start = te_sum_before<8>(count, &all);
        if (at < a.warps) counts[at] = before + start;
        before += all;
    }
    if (threadIdx.x == 0) ((uint32_t *)a.bound.scratch)[blockIdx.x] = before;
}

/* Where each bucket begins, to shared memory. */
static __device__ inline void te_bucket_starts(const te_buckets_args &a, uint32_t *starts)
{
    uint32_t before = 0, all;
    for (int i = 0; i < a.buckets; i += 256) {
        int      at = i + (int)threadIdx.x;
        uint32_t count = at < a.buckets ? ((const uint32_t *)a.bound.scratch)[at] : 0;
        uint32_t start = te_sum_before<8>(count, &all);
        if (at < a.buckets) starts[at] = before + start;
        before += all;
    }
    __syncthreads();
}

/* Elements and their places to the buckets, in their order: a warp goes over its share by 32. */
extern "C" __global__ void __launch_bounds__(256) te_bucket_move(const __grid_constant__ te_buckets_args a)
{
    enum { AHEAD = 4 };
    __shared__ uint32_t starts[TE_BUCKETS], next[8][TE_BUCKETS];
    int      lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t  w = (int64_t)blockIdx.x * 8 + warp, begin = w * a.share;
    int64_t  end = a.n - begin < a.share ? a.n : begin + a.share;
    unsigned below = (1u << lane) - 1;
    const uint32_t *counts = (const uint32_t *)(a.bound.scratch + a.counts_at);
    te_placed      *placed = (te_placed *)(a.bound.scratch + a.placed_at);
    te_bucket_starts(a, starts);
    for (int i = lane; i < a.buckets && w < a.warps; i += 32) next[warp][i] = starts[i] + counts[i * a.warps + w];
    __syncwarp();
    for (int64_t first = begin; first < end; first += 32 * AHEAD) {
        int64_t id[AHEAD];
        te_a    x[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int64_t u = first + k * 32 + lane;
            if (u >= end) continue;
            id[k] = te_whole_at(a.index, a.index_wide, te_offset(a.index, a.index.ndim, u));
            x[k] = ((const te_a *)a.part.data)[te_offset(a.part, a.part.ndim, u)];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int64_t  u = first + k * 32 + lane, slot = u < end ? te_slot(a, u, id[k], false) : -1;
            unsigned bucket = slot >= 0 ? (unsigned)(slot >> a.stretch_bits) : 0;
            unsigned alike = __ballot_sync(0xffffffffu, slot >= 0);
            for (int bit = 0; bit < a.bits; bit++) {
                unsigned set = __ballot_sync(0xffffffffu, bucket >> bit & 1);
                alike &= bucket >> bit & 1 ? set : ~set;
            }
            uint32_t to = next[warp][bucket] + (uint32_t)__popc(alike & below);
            __syncwarp();
            if (slot >= 0 && (alike & below) == 0) next[warp][bucket] = to + (uint32_t)__popc(alike);
            __syncwarp();
            if (slot < 0) continue;
            placed[to] = te_placed{x[k], (uint16_t)(slot & ((1 << a.stretch_bits) - 1))};
        }
    }
}

/* A bucket a block: as te_add_lines does it. */
extern "C" __global__ void __launch_bounds__(256) te_bucket_add(const __grid_constant__ te_buckets_args a)
{
    __shared__ te_stretch s;
    __shared__ uint32_t   starts[TE_BUCKETS];
    int64_t         low = (int64_t)blockIdx.x << a.stretch_bits, stretch = 1 << a.stretch_bits;
    int             count = (int)(a.slots - low < stretch ? a.slots - low : stretch), lane = threadIdx.x;
    const te_placed *placed = (const te_placed *)(a.bound.scratch + a.placed_at);
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += 256)
        s.sum[i] = ((const te_a *)a.whole.data)[te_offset(a.whole, a.whole.ndim, low + i)];
    te_bucket_starts(a, starts);
    if (threadIdx.x < 32) {
        int64_t begin = starts[blockIdx.x], end = begin + ((const uint32_t *)a.bound.scratch)[blockIdx.x];
        te_placed now[TE_ADD_AHEAD], next[TE_ADD_AHEAD] = {};
        for (int64_t first = begin - 32 * TE_ADD_AHEAD; first < end; first += 32 * TE_ADD_AHEAD) {
#pragma unroll
            for (int k = 0; k < TE_ADD_AHEAD; k++) {
                int64_t i = first + (TE_ADD_AHEAD + k) * 32 + lane;
                now[k] = next[k];
                if (i < end) next[k] = placed[i];
            }
            if (first < begin) continue;
#pragma unroll
            for (int k = 0; k < TE_ADD_AHEAD; k++)
                te_add_places(s, first + k * 32 + lane < end ? (int)now[k].place : -1, now[k].x);
        }
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += 256)
        ((te_a *)a.whole.data)[te_offset(a.whole, a.whole.ndim, low + i)] = s.sum[i];
}
