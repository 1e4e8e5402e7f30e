/* routes.cu - mixtures of experts: choosing experts, where the slots of tokens stand, rows on their way there and back.
 *
 * What names a row, an expert or a number of slots outside is reported and left out. Rows and tokens are te_a, weights
 * and sums te_real.
 */

enum { TE_ROUTE_THREADS = 256 };

/* Of a value per thread its sum with those of the threads before; `held` keeps them all. */
__device__ static inline int64_t te_route_scan(int64_t x, int64_t *held)
{
    __syncthreads();
    held[threadIdx.x] = x;
    for (unsigned by = 1; by < TE_ROUTE_THREADS; by *= 2) {
        __syncthreads();
        int64_t before = threadIdx.x >= by ? held[threadIdx.x - by] : 0;
        __syncthreads();
        held[threadIdx.x] += before;
    }
    __syncthreads();
    return held[threadIdx.x];
}

/* --- maps of masks ----------------------------------------------------------------------------------------------- */

/* Neighbouring threads go down neighbouring columns of a tile; so many elements are read at a time. */
enum { TE_ROUTE_AHEAD = 16 };

struct te_route_scratch {
    int32_t *places, *tiles, *before; /* see te_route_map_args */
};

TE_HD static inline te_route_scratch te_route_scratch_of(const te_route_map_args &a)
{
    int32_t *places = (int32_t *)a.bound.scratch, *tiles = places + a.tokens * a.columns;
    return te_route_scratch{places, tiles, tiles + a.tiles * a.columns};
}

/* Bit k: whether the token k behind t, if it is below `end`, is one of expert e's. Places are numbered by int32. */
TE_HD static inline uint32_t te_route_marks(const te_route_map_args &a, uint32_t t, uint32_t end, uint32_t e)
{
    uint32_t columns = (uint32_t)a.columns, at = t * columns + e, marks = 0;
#pragma unroll
    for (int k = 0; k < TE_ROUTE_AHEAD; k++, at += columns)
        if (t + k < end && ((const uint8_t *)a.routing)[at] != 0) marks |= 1u << k;
    return marks;
}

TE_HD static inline uint32_t te_route_tile_end(const te_route_map_args &a, uint32_t begin)
{
    return (uint32_t)(begin + a.tile < a.tokens ? begin + a.tile : a.tokens);
}

/* A thread per tile and expert: its tokens. */
extern "C" __global__ void __launch_bounds__(256) te_route_count(const __grid_constant__ te_route_map_args a)
{
    uint32_t columns = (uint32_t)a.columns, n = (uint32_t)a.tiles * columns;
    for (uint32_t u = (uint32_t)TE_FIRST; u < n; u += (uint32_t)TE_STEP) {
        uint32_t begin = u / columns * (uint32_t)a.tile, end = te_route_tile_end(a, begin);
        int32_t  count = 0;
        for (uint32_t t = begin; t < end; t += TE_ROUTE_AHEAD) count += __popc(te_route_marks(a, t, end, u % columns));
        te_route_scratch_of(a).tiles[u] = count;
    }
}

/* One block, a thread per expert: how many of its tokens there are, and how many before each tile. */
extern "C" __global__ void __launch_bounds__(256) te_route_offsets(const __grid_constant__ te_route_map_args a)
{
    __shared__ int64_t held[TE_ROUTE_THREADS];
    te_route_scratch scratch = te_route_scratch_of(a);
    int64_t          before = 0;
    for (int64_t first = 0; first < a.columns; first += TE_ROUTE_THREADS) {
        int64_t e = first + threadIdx.x;
        int32_t sum = 0;
        for (int64_t tile = 0; tile < a.tiles && e < a.columns; tile += TE_ROUTE_AHEAD) {
            int32_t *of_tiles = scratch.tiles + tile * a.columns + e, count[TE_ROUTE_AHEAD];
#pragma unroll
            for (int k = 0; k < TE_ROUTE_AHEAD; k++) count[k] = tile + k < a.tiles ? of_tiles[k * a.columns] : 0;
#pragma unroll
            for (int k = 0; k < TE_ROUTE_AHEAD; k++) {
                if (tile + k < a.tiles) of_tiles[k * a.columns] = sum;
                sum += count[k];
            }
        }
        int64_t up_to = te_route_scan(sum, held);
        if (e < a.columns) {
            a.counts[e] = sum;
            scratch.before[e] = (int32_t)(before + up_to - sum);
        }
        before += held[TE_ROUTE_THREADS - 1];
    }
}

/* A thread per tile and expert: the row of each of its tokens; -1: none, -2: one that stands nowhere. */
extern "C" __global__ void __launch_bounds__(256) te_route_place(const __grid_constant__ te_route_map_args a)
{
    te_route_scratch scratch = te_route_scratch_of(a);
    uint32_t         columns = (uint32_t)a.columns, n = (uint32_t)a.tiles * columns;
    for (uint32_t u = (uint32_t)TE_FIRST; u < n; u += (uint32_t)TE_STEP) {
        uint32_t e = u % columns, begin = u / columns * (uint32_t)a.tile, end = te_route_tile_end(a, begin);
        int32_t  row = scratch.before[e] + scratch.tiles[u];
        for (uint32_t t = begin; t < end; t += TE_ROUTE_AHEAD) {
            uint32_t marks = te_route_marks(a, t, end, e), at = t * columns + e;
#pragma unroll
            for (int k = 0; k < TE_ROUTE_AHEAD; k++, at += columns) {
                bool marked = marks >> k & 1;
                if (t + k < end) scratch.places[at] = !marked ? -1 : row < a.rows ? row : -2;
                row += marked;
            }
        }
    }
}

/* A warp per token. */
extern "C" __global__ void __launch_bounds__(256) te_route_entries(const __grid_constant__ te_route_map_args a)
{
    int      columns = (int)a.columns, lane = threadIdx.x % 32;
    unsigned below = (1u << lane) - 1;
    for (int64_t t = TE_FIRST / 32; t < a.tokens; t += TE_STEP / 32) {
        const int32_t *places = (const int32_t *)a.bound.scratch + t * columns;
        int32_t       *entry = a.map + t * (2 * a.columns + 1);
        int            count = 0;
        for (int first = 0; first < columns; first += 32) {
            int      e = first + lane, place = e < columns ? places[e] : -1;
            unsigned marked = __ballot_sync(0xffffffffu, place != -1);
            int      at = count + __popc(marked & below);
            if (place != -1) {
                entry[at] = place < 0 ? -1 : place;
                entry[columns + at] = e;
            }
            count += __popc(marked);
        }
        if (lane == 0) entry[2 * columns] = count;
        for (int i = count + lane; i < columns; i += 32) entry[i] = entry[columns + i] = -1;
    }
}

/* --- maps of ids ------------------------------------------------------------------------------------------------- */

TE_HD static inline int64_t te_route_id(const te_route_map_args &a, int64_t i)
{
    return a.wide ? ((const int64_t *)a.routing)[i] : ((const int32_t *)a.routing)[i];
}

extern "C" __global__ void __launch_bounds__(256) te_route_keys(const __grid_constant__ te_route_map_args a)
{
    int64_t   n = a.tokens * a.columns;
    uint64_t *keys = (uint64_t *)a.bound.scratch;
    int64_t  *positions = (int64_t *)(keys + 2 * n);
    for (int64_t i = TE_FIRST; i < n; i += TE_STEP) {
        int64_t id = te_route_id(a, i);
        bool    inside = id >= 0 && id < a.experts;
        if (!inside) te_report_id(a.bound, i, id);
        keys[i] = (uint64_t)(inside ? id : a.experts);
        positions[i] = i;
    }
}

extern "C" __global__ void __launch_bounds__(256) te_route_sorted(const __grid_constant__ te_route_map_args a)
{
    int64_t        n = a.tokens * a.columns;
    const int64_t *positions = (const int64_t *)a.bound.scratch + (2 + te_sort_half(a.bound, n, a.sorted)) * n;
    for (int64_t i = TE_FIRST; i < n; i += TE_STEP) {
        uint32_t position = (uint32_t)positions[i], columns = (uint32_t)a.columns; /* int32 numbers all places */
        a.map[position % columns * a.tokens + position / columns] = (int32_t)(i < a.rows ? i : -1);
    }
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

struct te_slot {
    int64_t row, expert; /* row < 0: nowhere */
};

TE_HD static inline int64_t te_slots_of(const te_routes_args &a, int64_t t)
{
    int64_t count = a.count ? a.count[t * a.token_step] : a.slots;
    return count < 0 ? 0 : count > a.slots ? a.slots : count;
}

/* `reports`: this thread says what is outside. */
__device__ static inline te_slot te_slot_at(const te_routes_args &a, int64_t t, int64_t s, bool reports)
{
    int64_t row = a.row[t * a.token_step + s * a.slot_step];
    te_slot slot = {row, a.expert ? a.expert[t * a.token_step + s] : s};
    if (slot.expert < 0 || slot.expert >= a.experts) {
        if (reports) te_report_id(a.bound, t * a.slots + s, slot.expert);
        return te_slot{-1, 0};
    }
    if (row >= 0 && a.shift) slot.row += a.shift[slot.expert];
    if (slot.row >= a.n || (slot.row < 0 && row >= 0)) {
        if (reports) te_report_id(a.bound, t * a.slots + s, slot.row);
        slot.row = -1;
    }
    return slot;
}

TE_HD static inline te_real te_route_weight(const te_routes_args &a, int64_t t, int64_t expert)
{
    if (!a.weights) return (te_real)1;
    te_real weight = ((const te_real *)a.weights)[t * a.experts + expert];
    return !a.gates ? weight : weight != (te_real)0 ? (te_real)1 : (te_real)0;
}

/* Which slot stands in each row, all ones: none. */
extern "C" __global__ void __launch_bounds__(256) te_route_clear(const __grid_constant__ te_routes_args a)
{
    for (int64_t i = TE_FIRST; i < a.n; i += TE_STEP) ((uint64_t *)a.bound.scratch)[i] = ~(uint64_t)0;
}

extern "C" __global__ void __launch_bounds__(256) te_route_invert(const __grid_constant__ te_routes_args a)
{
    for (int64_t i = TE_FIRST; i < a.tokens * a.slots; i += TE_STEP) {
        int64_t t = i / a.slots, s = i % a.slots;
        if (s == 0 && a.count && te_slots_of(a, t) != a.count[t * a.token_step])
            te_report_id(a.bound, i, a.count[t * a.token_step]);
        if (s >= te_slots_of(a, t)) continue;
        te_slot slot = te_slot_at(a, t, s, true);
        if (slot.row >= 0)
            atomicMin((unsigned long long *)a.bound.scratch + slot.row, (unsigned long long)i);
    }
}

/* A block per row. */
extern "C" __global__ void __launch_bounds__(256) te_route_rows(const __grid_constant__ te_routes_args a)
{
    for (int64_t i = blockIdx.x; i < a.n; i += gridDim.x) {
        uint64_t    from = ((const uint64_t *)a.bound.scratch)[i];
        bool        none = from == ~(uint64_t)0;
        int64_t     t = none ? 0 : (int64_t)from / a.slots;
        te_real     weight = (te_real)0;
        const te_a *x = (const te_a *)a.from + t * a.width;
        te_a       *y = (te_a *)a.to + i * a.width;
        if (!none) weight = te_route_weight(a, t, te_slot_at(a, t, (int64_t)from % a.slots, false).expert);
        none = none || (a.gates && weight == (te_real)0);
        for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x)
            y[c] = none ? te_as_a((te_real)0) : weight == (te_real)1 ? x[c] : te_as_a(weight * te_from_a(x[c]));
    }
}

/* A block per token. */
extern "C" __global__ void __launch_bounds__(256) te_route_tokens(const __grid_constant__ te_routes_args a)
{
    for (int64_t t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        int64_t count = te_slots_of(a, t);
        if (threadIdx.x == 0 && a.count && count != a.count[t * a.token_step])
            te_report_id(a.bound, t * a.slots, a.count[t * a.token_step]);
        for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
            te_real sum = (te_real)0;
            for (int64_t s = 0; s < count; s++) {
                te_slot slot = te_slot_at(a, t, s, c == 0);
                if (slot.row < 0) continue;
                te_real weight = te_route_weight(a, t, slot.expert);
                if (a.gates && weight == (te_real)0) continue;
                sum += weight * te_from_a(((const te_a *)a.from)[slot.row * a.width + c]);
            }
            ((te_a *)a.to)[t * a.width + c] = te_as_a(sum);
        }
    }
}

/* A block per token; from: rows, beside: tokens. */
extern "C" __global__ void __launch_bounds__(256) te_route_weights(const __grid_constant__ te_routes_args a)
{
    __shared__ te_real held[TE_ROUTE_THREADS];
    for (int64_t t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        te_real *to = (te_real *)a.to + t * a.experts;
        int64_t  count = te_slots_of(a, t);
        __syncthreads();
        for (int64_t e = threadIdx.x; e < a.experts; e += blockDim.x) to[e] = (te_real)0;
        if (threadIdx.x == 0 && a.count && count != a.count[t * a.token_step])
            te_report_id(a.bound, t * a.slots, a.count[t * a.token_step]);
        for (int64_t s = 0; s < count; s++) {
            te_slot slot = te_slot_at(a, t, s, threadIdx.x == 0);
            te_real sum = (te_real)0;
            if (slot.row < 0) continue; /* the same for all threads */
            for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x)
                sum += te_from_a(((const te_a *)a.from)[slot.row * a.width + c]) *
                    te_from_a(((const te_a *)a.beside)[t * a.width + c]);
            __syncthreads();
            held[threadIdx.x] = sum;
            for (unsigned half = TE_ROUTE_THREADS / 2; half > 0; half /= 2) {
                __syncthreads();
                if (threadIdx.x < half) held[threadIdx.x] += held[threadIdx.x + half];
            }
            if (threadIdx.x == 0) to[slot.expert] = held[0];
        }
    }
}

/* --- choosing ---------------------------------------------------------------------------------------------------- */

/* Score i of a row as a number: a NaN is the largest, both zeros are alike, ties go to the lower index. Above 0 and
 * below all ones. */
TE_HD static inline uint64_t te_score_rank(float x, uint32_t i)
{
    int32_t  bits = (int32_t)te_f32_bits(x + 0.0f), key = bits < 0 ? -(bits & 0x7fffffff) : bits;
    uint32_t upper = x != x ? 0xffffffffu : (uint32_t)key ^ 0x80000000u;
    return (uint64_t)upper << 32 | (0xfffffffeu - i);
}

TE_HD static inline uint32_t te_ranked(uint64_t rank) { return 0xfffffffeu - (uint32_t)rank; }

/* The largest rank below `last` among scores first … end, where they are marked if there are marks; for a warp. */
__device__ static __forceinline__ uint64_t te_next_score(const float *scores, const uint8_t *marks, uint32_t first,
                                                         uint32_t end, uint64_t last)
{
    uint64_t best = 0;
    for (uint32_t i = first + threadIdx.x % 32; i < end; i += 32) {
        uint64_t rank = te_score_rank(scores[i], i);
        if (rank > best && rank < last && (!marks || marks[i])) best = rank;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        uint64_t other = __shfl_xor_sync(0xffffffffu, best, by);
        best = other > best ? other : best;
    }
    return best;
}

/* A warp per token. Sums of groups are in scratch memory. Until the end the map marks what takes part; each lane reads
 * only its own marks. */
extern "C" __global__ void __launch_bounds__(256) te_route_choose(const __grid_constant__ te_choose_args a)
{
    const uint64_t all = ~(uint64_t)0;
    uint32_t experts = (uint32_t)a.experts, groups = (uint32_t)a.groups, size = experts / groups;
    uint32_t lane = threadIdx.x % 32;
    uint32_t k = (uint32_t)a.k, best_groups = (uint32_t)a.best_groups, counted = k / best_groups;
    for (int64_t t = TE_FIRST / 32; t < a.tokens; t += TE_STEP / 32) {
        const float *scores = a.scores + t * experts;
        float       *sums = (float *)a.bound.scratch + t * groups;
        uint8_t     *map = a.map + t * experts;
        uint64_t     last = all;
        for (uint32_t g = 0; g < groups && groups > 1; g++) {
            float sum = 0;
            last = all;
            for (uint32_t i = 0; i < counted; i++) {
                last = te_next_score(scores, 0, g * size, (g + 1) * size, last);
                sum += scores[te_ranked(last)];
            }
            if (lane == 0) sums[g] = sum;
        }
        __syncwarp();
        last = all;
        for (uint32_t i = 0; i < best_groups && groups > 1; i++) last = te_next_score(sums, 0, 0, groups, last);
        for (uint32_t e = lane; e < experts; e += 32)
            map[e] = groups == 1 || te_score_rank(sums[e / size], e / size) >= last;
        last = all;
        for (uint32_t i = 0; i < k; i++) last = te_next_score(scores, groups > 1 ? map : 0, 0, experts, last);
        for (uint32_t e = lane; e < experts; e += 32) map[e] = map[e] && te_score_rank(scores[e], e) >= last;
    }
}
