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

/* A block per expert: its tokens. */
extern "C" __global__ void __launch_bounds__(256) te_route_count(const __grid_constant__ te_route_map_args a)
{
    __shared__ int64_t held[TE_ROUTE_THREADS];
    for (int64_t e = blockIdx.x; e < a.columns; e += gridDim.x) {
        int64_t count = 0;
        for (int64_t t = threadIdx.x; t < a.tokens; t += TE_ROUTE_THREADS)
            count += ((const uint8_t *)a.routing)[t * a.columns + e] != 0;
        count = te_route_scan(count, held);
        if (threadIdx.x == TE_ROUTE_THREADS - 1) a.counts[e] = (int32_t)count;
    }
}

/* A block per expert: the row of each of its tokens to scratch memory, -1 for others. */
extern "C" __global__ void __launch_bounds__(256) te_route_place(const __grid_constant__ te_route_map_args a)
{
    __shared__ int64_t held[TE_ROUTE_THREADS];
    int32_t *places = (int32_t *)a.bound.scratch;
    for (int64_t e = blockIdx.x; e < a.columns; e += gridDim.x) {
        int64_t before = 0;
        for (int64_t other = threadIdx.x; other < e; other += TE_ROUTE_THREADS) before += a.counts[other];
        te_route_scan(before, held);
        before = held[TE_ROUTE_THREADS - 1];
        for (int64_t first = 0; first < a.tokens; first += TE_ROUTE_THREADS) {
            int64_t t = first + threadIdx.x;
            bool    marked = t < a.tokens && ((const uint8_t *)a.routing)[t * a.columns + e] != 0;
            int64_t at = before + te_route_scan(marked, held) - 1;
            if (t < a.tokens) places[t * a.columns + e] = marked ? (int32_t)(at < a.rows ? at : -2) : -1;
            before += held[TE_ROUTE_THREADS - 1];
        }
    }
}

/* A thread per token; -2 is a slot that stands nowhere. */
extern "C" __global__ void __launch_bounds__(256) te_route_entries(const __grid_constant__ te_route_map_args a)
{
    for (int64_t t = TE_FIRST; t < a.tokens; t += TE_STEP) {
        const int32_t *places = (const int32_t *)a.bound.scratch + t * a.columns;
        int32_t       *entry = a.map + t * (2 * a.columns + 1), count = 0;
        for (int64_t e = 0; e < a.columns; e++) {
            if (places[e] == -1) continue;
            entry[count] = places[e] < 0 ? -1 : places[e];
            entry[a.columns + count++] = (int32_t)e;
        }
        entry[2 * a.columns] = count;
        for (int64_t i = count; i < a.columns; i++) entry[i] = entry[a.columns + i] = -1;
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
    for (int64_t i = TE_FIRST; i < n; i += TE_STEP)
        a.map[positions[i] % a.columns * a.tokens + positions[i] / a.columns] = (int32_t)(i < a.rows ? i : -1);
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

/* Orders as the number does; NaN above all, both zeros alike. */
TE_HD static inline int64_t te_score_key(float x)
{
    if (x != x) return INT32_MAX;
    int32_t bits = (int32_t)te_f32_bits(x + 0.0f);
    return bits < 0 ? -(int64_t)(bits & 0x7fffffff) : bits;
}

/* The best of n scores behind `last` (-1: of all), in steps whose heads are marked; ties go to the lower index. */
TE_HD static inline int64_t te_next_score(const float *scores, int64_t n, int64_t last, const uint8_t *marks,
                                          int64_t size)
{
    int64_t best = -1, most = 0, limit = last < 0 ? 0 : te_score_key(scores[last]);
    for (int64_t i = 0; i < n; i++) {
        if (marks && !(marks[i / size * size] & 2)) continue;
        int64_t key = te_score_key(scores[i]);
        bool    behind = last < 0 || key < limit || (key == limit && i > last);
        if (!behind || (best >= 0 && key <= most)) continue;
        best = i;
        most = key;
    }
    return best;
}

/* A thread per token. Sums of groups are in scratch memory; the first expert of a group that takes part is marked by 2
 * meanwhile. */
extern "C" __global__ void __launch_bounds__(256) te_route_choose(const __grid_constant__ te_choose_args a)
{
    int64_t size = a.experts / a.groups, counted = a.k / a.best_groups;
    for (int64_t t = TE_FIRST; t < a.tokens; t += TE_STEP) {
        const float *scores = a.scores + t * a.experts;
        float       *sums = (float *)a.bound.scratch + t * a.groups;
        uint8_t     *map = a.map + t * a.experts;
        for (int64_t e = 0; e < a.experts; e++) map[e] = (uint8_t)(a.groups == 1 && e == 0 ? 2 : 0);
        for (int64_t g = 0; g < a.groups && a.groups > 1; g++) {
            sums[g] = 0;
            for (int64_t i = 0, at = -1; i < counted; i++) {
                at = te_next_score(scores + g * size, size, at, 0, 1);
                sums[g] += scores[g * size + at];
            }
        }
        for (int64_t i = 0, g = -1; i < a.best_groups && a.groups > 1; i++) {
            g = te_next_score(sums, a.groups, g, 0, 1);
            map[g * size] = 2;
        }
        for (int64_t i = 0, at = -1; i < a.k; i++) {
            at = te_next_score(scores, a.experts, at, map, size);
            map[at] |= 1;
        }
        for (int64_t g = 0; g < a.groups; g++) map[g * size] &= 1;
    }
}
