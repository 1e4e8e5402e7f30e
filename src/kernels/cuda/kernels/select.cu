/* select.cu - what looks at whole rows to choose or accumulate: arg_reduce, topk, cumsum, multinomial; a block per row.
 * And whole numbers at random.
 *
 * Blocks have as many threads as suit the rows' length (hand_select.c): a warp up to 1024. Comparisons are made on keys
 * (keys.cu). Ties go to the lower index.
 */

struct te_choice {
    uint64_t key;
    int64_t  index; /* -1: none */
};

TE_HD static inline bool te_worse(te_choice a, te_choice b)
{
    if (b.index < 0 || a.index < 0) return a.index < 0 && b.index >= 0;
    return a.key < b.key || (a.key == b.key && a.index > b.index);
}

__device__ static inline te_choice te_best_of_warp(te_choice mine)
{
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        te_choice other = {__shfl_xor_sync(0xffffffffu, mine.key, by), __shfl_xor_sync(0xffffffffu, mine.index, by)};
        if (te_worse(mine, other)) mine = other;
    }
    return mine;
}

/* The best of all threads' choices, for every thread. */
__device__ static inline te_choice te_best(te_choice mine)
{
    __shared__ te_choice held[32];
    unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
    mine = te_best_of_warp(mine);
    if (warps == 1) return mine;
    __syncthreads();
    if (lane == 0) held[threadIdx.x / 32] = mine;
    __syncthreads();
    return te_best_of_warp(lane < warps ? held[lane] : te_choice{0, -1});
}

/* --- arg_reduce and topk ----------------------------------------------------------------------------------------- */

/* The best of a thread's elements, from the best on, every blockDim-th of the row, among those worse than `last`. */
template <int N> __device__ static inline void te_collect(te_choice (&best)[N], const te_select_args &a,
                                                          const te_a *row, te_choice last)
{
    enum { AHEAD = 8 };
    int64_t stride = a.src.stride[a.src.ndim - 1], step = blockDim.x;
#pragma unroll
    for (int d = 0; d < N; d++) best[d] = te_choice{0, -1};
    for (int64_t first = threadIdx.x; first < a.n; first += AHEAD * step) {
        te_a x[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (first + k * step < a.n) x[k] = row[(first + k * step) * stride];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (first + k * step >= a.n) break;
            te_choice c = {te_key(x[k], a.flag != 0), first + k * step};
            if (!te_worse(best[N - 1], c) || (last.index >= 0 && !te_worse(c, last))) continue;
#pragma unroll
            for (int d = 0; d < N; d++) {
                if (!te_worse(best[d], c)) continue;
                te_choice worse = best[d];
                best[d] = c;
                c = worse;
            }
        }
    }
}

/* The best of the elements first, first + step, … below end, of a thread that meets them in order: the first of equals
 * stays. */
__device__ static inline te_choice te_best_along(const te_a *row, int64_t stride, int64_t first, int64_t end,
                                                 int64_t step, bool largest)
{
    enum { AHEAD = 8 };
    te_key_word best = 0;
    int64_t     at = -1;
    for (; first + (AHEAD - 1) * step < end; first += AHEAD * step) {
        te_a x[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) x[k] = row[(first + k * step) * stride];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            te_key_word key = te_key(x[k], largest);
            if (key > best || at < 0) best = key, at = first + k * step;
        }
    }
    te_a x[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
        if (first + k * step < end) x[k] = row[(first + k * step) * stride];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        if (first + k * step >= end) break;
        te_key_word key = te_key(x[k], largest);
        if (key > best || at < 0) best = key, at = first + k * step;
    }
    return te_choice{best, at};
}

#if TE_HAS_SHORT_KEY
/* The same of a thread's units of 16 bytes, every blockDim-th from `begin`, which begins one, and of the elements
 * behind the last unit. */
__device__ static inline te_choice te_best_of_units(const te_a *row, int64_t begin, int64_t end, bool largest)
{
    enum { UNIT = 16 / sizeof(te_a), AHEAD = UNIT > 8 ? 4 : 8 }; /* more elements would take more registers */
    int64_t  units = (end - begin) / UNIT, step = blockDim.x, at = -1;
    uint32_t best = 0;
    for (int64_t first = threadIdx.x; first < units; first += AHEAD * step) {
        te_unit<te_a, UNIT> x[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (first + k * step < units) x[k] = te_unit_load<te_a, UNIT>(row + begin + (first + k * step) * UNIT);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (first + k * step >= units) break;
#pragma unroll
            for (int i = 0; i < UNIT; i++) {
                uint32_t key = te_key(x[k].e[i], largest);
                if (key > best || at < 0) best = key, at = begin + (first + k * step) * UNIT + i;
            }
        }
    }
    te_choice mine = {best, at};
    int64_t   tail = begin + units * UNIT + threadIdx.x;
    if (tail < end) {
        te_choice c = {te_key(row[tail], largest), tail};
        if (te_worse(mine, c)) mine = c;
    }
    return mine;
}
#endif

/* The best of a part of row r: the result where there is no other, else for te_arg_join. */
__device__ static inline void te_arg_put(const te_select_args &a, int64_t r, int64_t part, te_choice best)
{
    if (a.parts > 1)
        ((te_choice *)a.bound.scratch)[r * a.parts + part] = best;
    else
        ((int64_t *)a.indices.data)[te_offset(a.indices, a.indices.ndim, r)] = best.index;
}

/* A block for each part of a row. */
extern "C" __global__ void __launch_bounds__(512) te_arg_reduce(const __grid_constant__ te_select_args a)
{
    for (int64_t b = blockIdx.x; b < a.rows * a.parts; b += gridDim.x) {
        int64_t     r = b / a.parts, part = b - r * a.parts, begin = part * a.part, end = begin + a.part;
        const te_a *row = (const te_a *)a.src.data + te_offset(a.src, a.src.ndim - 1, r);
        te_choice   own;
        if (end > a.n) end = a.n;
#if TE_HAS_SHORT_KEY
        if (a.src.stride[a.src.ndim - 1] == 1 && (uint64_t)row % 16 == 0)
            own = te_best_of_units(row, begin, end, a.flag != 0);
        else
#endif
            own = te_best_along(row, a.src.stride[a.src.ndim - 1], begin + threadIdx.x, end, blockDim.x, a.flag != 0);
        te_choice best = te_best(own);
        if (threadIdx.x == 0) te_arg_put(a, r, part, best);
    }
}

/* 1 << a.leaves threads of a warp for each row. */
extern "C" __global__ void __launch_bounds__(256) te_arg_short(const __grid_constant__ te_select_args a)
{
    int64_t lanes = (int64_t)1 << a.leaves, at_once = blockDim.x >> a.leaves;
    for (int64_t first = blockIdx.x * at_once; first < a.rows; first += gridDim.x * at_once) {
        int64_t   r = first + (threadIdx.x >> a.leaves);
        te_choice mine = {0, -1};
        if (r < a.rows)
            mine = te_best_along((const te_a *)a.src.data + te_offset(a.src, a.src.ndim - 1, r),
                                 a.src.stride[a.src.ndim - 1], threadIdx.x & (lanes - 1), a.n, lanes, a.flag != 0);
        for (int by = (int)lanes / 2; by > 0; by /= 2) {
            te_choice other = {__shfl_xor_sync(0xffffffffu, mine.key, by),
                               __shfl_xor_sync(0xffffffffu, mine.index, by)};
            if (te_worse(mine, other)) mine = other;
        }
        if (r < a.rows && (threadIdx.x & (lanes - 1)) == 0) te_arg_put(a, r, 0, mine);
    }
}

/* Of rows whose elements are apart, beside those of their neighbours: a thread of a warp for each, and the warps of a
 * block share their part of the rows. */
extern "C" __global__ void __launch_bounds__(256) te_arg_columns(const __grid_constant__ te_select_args a)
{
    enum { ACROSS = 32, DOWN = 8 };
    __shared__ te_choice held[DOWN][ACROSS];
    int64_t              groups = (a.rows + ACROSS - 1) / ACROSS;
    int                  lane = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    for (int64_t b = blockIdx.x; b < groups * a.parts; b += gridDim.x) {
        int64_t   part = b / groups, r = (b - part * groups) * ACROSS + lane, begin = part * a.part;
        int64_t   end = begin + a.part < a.n ? begin + a.part : a.n;
        te_choice mine = {0, -1};
        if (r < a.rows)
            mine = te_best_along((const te_a *)a.src.data + te_offset(a.src, a.src.ndim - 1, r),
                                 a.src.stride[a.src.ndim - 1], begin + down, end, DOWN, a.flag != 0);
        __syncthreads();
        held[down][lane] = mine;
        __syncthreads();
        if (down != 0 || r >= a.rows) continue;
        for (int d = 1; d < DOWN; d++)
            if (te_worse(mine, held[d][lane])) mine = held[d][lane];
        te_arg_put(a, r, part, mine);
    }
}

/* A warp for each row that several blocks have shared. */
extern "C" __global__ void __launch_bounds__(256) te_arg_join(const __grid_constant__ te_select_args a)
{
    for (int64_t r = TE_FIRST / 32; r < a.rows; r += TE_STEP / 32) {
        const te_choice *parts = (const te_choice *)a.bound.scratch + r * a.parts;
        te_choice        mine = {0, -1};
        for (int64_t p = threadIdx.x % 32; p < a.parts; p += 32)
            if (te_worse(mine, parts[p])) mine = parts[p];
        mine = te_best_of_warp(mine);
        if (threadIdx.x % 32 == 0)
            ((int64_t *)a.indices.data)[te_offset(a.indices, a.indices.ndim, r)] = mine.index;
    }
}

/* Each thread has the best of its elements at hand; who has given all of them away looks for more. */
extern "C" __global__ void __launch_bounds__(512) te_topk(const __grid_constant__ te_select_args a)
{
    enum { AT_HAND = 4 };
    int64_t last = a.src.ndim - 1;
    for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const te_a *row = (const te_a *)a.src.data + te_offset(a.src, last, r);
        te_a       *values = (te_a *)a.out.data + te_offset(a.out, last, r);
        int64_t    *indices = (int64_t *)a.indices.data + te_offset(a.indices, last, r);
        te_choice   own[AT_HAND];
        te_collect(own, a, row, te_choice{0, -1});
        for (int64_t j = 0; j < a.k; j++) {
            te_choice best = te_best(own[0]);
            if (threadIdx.x == 0) indices[j * a.indices.stride[last]] = best.index;
            if (own[0].index != best.index) continue;
#pragma unroll
            for (int d = 1; d < AT_HAND; d++) own[d - 1] = own[d];
            own[AT_HAND - 1] = te_choice{0, -1};
            if (own[0].index < 0) te_collect(own, a, row, best);
        }
        __syncthreads(); /* indices are there */
        for (int64_t j = threadIdx.x; j < a.k; j += blockDim.x)
            values[j * a.out.stride[last]] = row[indices[j * a.indices.stride[last]] * a.src.stride[last]];
    }
}

/* --- cumsum ------------------------------------------------------------------------------------------------------ */

#if TE_A_IS_INTEGER
typedef uint64_t te_sum;
TE_HD static inline te_sum te_sum_of(te_a x) { return (te_sum)(int64_t)x; }
TE_HD static inline te_b te_of_sum(te_sum x)
{
    return TE_B_IS_INT64 ? (te_b)x : te_as_b((te_real)(int64_t)x);
}
#else
typedef double te_sum;
TE_HD static inline te_sum te_sum_of(te_a x) { return (te_sum)te_from_a(x); }
TE_HD static inline te_b te_of_sum(te_sum x) { return te_as_b((te_real)x); }
#endif

/* Of a value per thread the sum over the threads before; `all`: over all. */
__device__ static inline te_sum te_scan(te_sum x, te_sum *all)
{
    __shared__ te_sum held[32];
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (unsigned by = 1; by < 32; by *= 2) {
        te_sum before = __shfl_up_sync(0xffffffffu, x, by);
        if (lane >= by) x = before + x;
    }
    __syncthreads();
    if (lane == 31) held[warp] = x;
    __syncthreads();
    te_sum before = __shfl_up_sync(0xffffffffu, x, 1), warps = 0;
    if (lane == 0) before = 0;
    *all = 0;
    for (unsigned w = 0; w < blockDim.x / 32; w++) {
        if (w == warp) warps = *all;
        *all += held[w];
    }
    return warps + before;
}

/* A thread adds up EACH neighbours, then the block the threads' sums. */
extern "C" __global__ void __launch_bounds__(256) te_cumsum(const __grid_constant__ te_select_args a)
{
    enum { EACH = 8 };
    int64_t last = a.src.ndim - 1;
    for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const te_a *row = (const te_a *)a.src.data + te_offset(a.src, last, r);
        te_b       *out = (te_b *)a.out.data + te_offset(a.out, last, r);
        te_sum      before = 0, all;
        for (int64_t first = EACH * threadIdx.x; first < a.n + EACH * threadIdx.x; first += EACH * blockDim.x) {
            te_sum x[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                int64_t j = first + k, i = a.flag ? a.n - 1 - j : j;
                x[k] = j < a.n ? te_sum_of(row[i * a.src.stride[last]]) : (te_sum)0;
            }
#pragma unroll
            for (int k = 1; k < EACH; k++) x[k] = x[k - 1] + x[k];
            te_sum here = te_scan(x[EACH - 1], &all);
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                int64_t j = first + k, i = a.flag ? a.n - 1 - j : j;
                if (j < a.n) out[i * a.out.stride[last]] = te_of_sum(before + (here + x[k]));
            }
            before += all;
        }
    }
}

/* --- multinomial ------------------------------------------------------------------------------------------------- */

/* What is wrong with the weights of row r. */
__device__ static inline void te_weights_report(const te_select_args &a, int64_t r, bool bad,
                                                unsigned long long positive, double sum)
{
    int64_t fault = -1;
    if ((int64_t)positive < (a.flag ? 1 : a.k)) fault = 3;
    if (positive == 0) fault = 2;
    if (!(sum <= 1.7976931348623157e308)) fault = 1;
    if (bad) fault = 0;
    if (fault >= 0) atomicMin((unsigned long long *)a.bound.fault, (unsigned long long)(r * 4 + fault));
}

/* As on the CPU: a tree of sums, tree[1] the total, tree[leaves + i] weight i. AHEAD nodes of a thread at a time. */
__device__ static inline void te_tree_load(const te_select_args &a, double *tree, const te_a *row, int64_t r)
{
    enum { AHEAD = 4 };
    __shared__ unsigned long long positive;
    __shared__ int                bad;
    int64_t step = blockDim.x, stride = a.src.stride[a.src.ndim - 1], count = 0;
    __syncthreads();
    if (threadIdx.x == 0) bad = 0, positive = 0;
    __syncthreads();
    for (int64_t first = threadIdx.x; first < a.leaves; first += AHEAD * step) {
        double weight[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            weight[k] = first + k * step < a.n ? (double)te_from_a(row[(first + k * step) * stride]) : 0.0;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (!(weight[k] >= 0.0)) bad = 1;
            count += weight[k] > 0.0;
            if (first + k * step < a.leaves) tree[a.leaves + first + k * step] = weight[k];
        }
    }
    if (count) atomicAdd(&positive, (unsigned long long)count);
    for (int64_t level = a.leaves / 2; level > 0; level /= 2) {
        __syncthreads();
        for (int64_t first = level + threadIdx.x; first < 2 * level; first += AHEAD * step) {
            double sum[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                int64_t i = first + k * step;
                if (i < 2 * level) sum[k] = tree[2 * i] + tree[2 * i + 1];
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (first + k * step < 2 * level) tree[first + k * step] = sum[k];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) te_weights_report(a, r, bad != 0, positive, tree[1]);
}

/* The leaf in which the share u of the total falls; never one of weight 0. */
TE_HD static inline int64_t te_tree_find(const double *tree, int64_t leaves, double u)
{
    double  target = u * tree[1];
    int64_t node = 1;
    while (node < leaves) {
        double left = tree[2 * node], right = tree[2 * node + 1];
        bool   go_right = target >= left && right > 0.0;
        if (go_right) target -= left;
        node = 2 * node + go_right;
    }
    return node - leaves;
}

TE_HD static inline void te_tree_remove(double *tree, int64_t leaves, int64_t leaf)
{
    int64_t node = leaves + leaf;
    tree[node] = 0.0;
    while (node /= 2) tree[node] = tree[2 * node] + tree[2 * node + 1];
}

/* Draws with replacement are independent; without, one thread makes them in order. */
extern "C" __global__ void __launch_bounds__(1024) te_multinomial(const __grid_constant__ te_select_args a)
{
    double *tree = (double *)a.bound.scratch + (int64_t)blockIdx.x * 2 * a.leaves;
    te_rng  rng = {a.rng[0], a.rng[1], a.rng[2], (const uint64_t *)a.rng[3]};
    int64_t last = a.src.ndim - 1, step = a.flag ? blockDim.x : 1;
    for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        int64_t *sample = (int64_t *)a.indices.data + te_offset(a.indices, last, r);
        te_tree_load(a, tree, (const te_a *)a.src.data + te_offset(a.src, last, r), r);
        __syncthreads();
        for (int64_t d = threadIdx.x; d < a.k && (a.flag || threadIdx.x == 0); d += step) {
            int64_t drawn = te_tree_find(tree, a.leaves, te_unit_words<1>(rng, (uint64_t)(r * a.k + d)).e[0] * 0x1p-32);
            sample[d * a.indices.stride[last]] = drawn;
            if (!a.flag) te_tree_remove(tree, a.leaves, drawn);
        }
        __syncthreads();
    }
}

/* Few draws that leave the weights as they are: of the tree only the nodes over TE_LEAVES leaves each stay, in shared
 * memory, and a warp adds up again those below one. As many leaves as there are too many, of weight 0, are behind the
 * others and change no draw. */
enum { TE_EACH_LEAVES = 8 /* of a thread */, TE_LEAVES = 32 * TE_EACH_LEAVES };

/* A thread's leaves of the warp's TE_LEAVES from `first` on. */
__device__ static inline void te_leaves_load(const te_select_args &a, double (&weight)[TE_EACH_LEAVES],
                                             const te_a *row, int64_t first)
{
    enum { WHOLE = sizeof(te_a) * TE_EACH_LEAVES < 16 ? sizeof(te_a) * TE_EACH_LEAVES : 16 };
    int64_t stride = a.src.stride[a.src.ndim - 1], at = first + threadIdx.x % 32 * TE_EACH_LEAVES;
    if (stride == 1 && (uint64_t)row % WHOLE == 0 && at + TE_EACH_LEAVES <= a.n) {
        te_unit<te_a, TE_EACH_LEAVES> x = te_unit_load<te_a, TE_EACH_LEAVES>(row + at);
#pragma unroll
        for (int k = 0; k < TE_EACH_LEAVES; k++) weight[k] = (double)te_from_a(x.e[k]);
    } else {
#pragma unroll
        for (int k = 0; k < TE_EACH_LEAVES; k++)
            weight[k] = at + k < a.n ? (double)te_from_a(row[(at + k) * stride]) : 0.0;
    }
}

__device__ static inline double te_leaves_sum(const double (&weight)[TE_EACH_LEAVES])
{
    return ((weight[0] + weight[1]) + (weight[2] + weight[3])) + ((weight[4] + weight[5]) + (weight[6] + weight[7]));
}

/* The leaf below the warp's node in which the rest of the target falls; in one thread, -1 in the others. */
__device__ static inline int64_t te_leaves_find(const te_select_args &a, const te_a *row, int64_t first, double target)
{
    double weight[TE_EACH_LEAVES], sum[5];
    te_leaves_load(a, weight, row, first);
    sum[0] = te_leaves_sum(weight);
#pragma unroll
    for (int i = 1; i < 5; i++) sum[i] = sum[i - 1] + __shfl_xor_sync(0xffffffffu, sum[i - 1], 1 << (i - 1));
    int lane = 0;
#pragma unroll
    for (int i = 4; i >= 0; i--) {
        double left = __shfl_sync(0xffffffffu, sum[i], lane), right = __shfl_sync(0xffffffffu, sum[i], lane + (1 << i));
        bool   go_right = target >= left && right > 0.0;
        if (go_right) target -= left, lane += 1 << i;
    }
    double left = (weight[0] + weight[1]) + (weight[2] + weight[3]),
           right = (weight[4] + weight[5]) + (weight[6] + weight[7]);
    bool   upper = target >= left && right > 0.0;
    if (upper) target -= left;
    double four[4]; /* no index that is not a constant: they stay in registers */
#pragma unroll
    for (int k = 0; k < 4; k++) four[k] = upper ? weight[k + 4] : weight[k];
    bool second = target >= four[0] + four[1] && four[2] + four[3] > 0.0;
    if (second) target -= four[0] + four[1];
    bool last = target >= (second ? four[2] : four[0]) && (second ? four[3] : four[1]) > 0.0;
    return (int)threadIdx.x % 32 == lane ? first + lane * TE_EACH_LEAVES + upper * 4 + second * 2 + last : -1;
}

extern "C" __global__ void __launch_bounds__(1024) te_multinomial_few(const __grid_constant__ te_select_args a)
{
    TE_DYNAMIC_SHARED(double, tree);
    __shared__ unsigned long long positive;
    __shared__ int                bad;
    te_rng  rng = {a.rng[0], a.rng[1], a.rng[2], (const uint64_t *)a.rng[3]};
    int64_t last = a.src.ndim - 1, nodes = a.leaves / TE_LEAVES, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const te_a        *row = (const te_a *)a.src.data + te_offset(a.src, last, r);
        int64_t           *sample = (int64_t *)a.indices.data + te_offset(a.indices, last, r);
        unsigned long long count = 0;
        __syncthreads();
        if (threadIdx.x == 0) bad = 0, positive = 0;
        __syncthreads();
        for (int64_t node = warp; node < nodes; node += warps) {
            double weight[TE_EACH_LEAVES];
            te_leaves_load(a, weight, row, node * TE_LEAVES);
            bool fits = true;
#pragma unroll
            for (int k = 0; k < TE_EACH_LEAVES; k++) {
                fits &= weight[k] >= 0.0;
                count += weight[k] > 0.0;
            }
            if (!fits) bad = 1;
            double sum = te_leaves_sum(weight);
#pragma unroll
            for (int by = 1; by < 32; by *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
            if (threadIdx.x % 32 == 0) tree[nodes + node] = sum;
        }
        if (count) atomicAdd(&positive, count);
        for (int64_t level = nodes / 2; level > 0; level /= 2) {
            __syncthreads();
            for (int64_t i = level + threadIdx.x; i < 2 * level; i += blockDim.x)
                tree[i] = tree[2 * i] + tree[2 * i + 1];
        }
        __syncthreads();
        if (threadIdx.x == 0) te_weights_report(a, r, bad != 0, positive, tree[1]);
        for (int64_t d = warp; d < a.k; d += warps) {
            double  target = te_unit_words<1>(rng, (uint64_t)(r * a.k + d)).e[0] * 0x1p-32 * tree[1];
            int64_t node = 1;
            while (node < nodes) {
                double left = tree[2 * node], right = tree[2 * node + 1];
                bool   go_right = target >= left && right > 0.0;
                if (go_right) target -= left;
                node = 2 * node + go_right;
            }
            int64_t drawn = te_leaves_find(a, row, (node - nodes) * TE_LEAVES, target);
            if (drawn >= 0) sample[d * a.indices.stride[last]] = drawn;
        }
    }
}

/* --- whole numbers at random ------------------------------------------------------------------------------------- */

/* The upper half of the product. */
TE_HD static inline uint64_t te_product_above(uint64_t x, uint64_t y)
{
    uint64_t x0 = (uint32_t)x, x1 = x >> 32, y0 = (uint32_t)y, y1 = y >> 32, upper = x1 * y0, lower = x0 * y1;
    uint64_t middle = (x0 * y0 >> 32) + (uint32_t)upper + (uint32_t)lower;
    return x1 * y1 + (upper >> 32) + (lower >> 32) + (middle >> 32);
}

/* Of words of 64 bits those of te_integers, two at a time; NARROW: with a range of 32 bits. */
template <class T, bool NARROW> __device__ static inline void te_draw_integers(const te_integers_args &a)
{
    te_rng   rng = te_rng_begin(te_rng{a.rng[0], a.rng[1], a.rng[2], (const uint64_t *)a.rng[3]});
    uint64_t range = NARROW ? (uint32_t)a.range : a.range;
    for (int64_t i = TE_FIRST; 2 * i < a.n; i += TE_STEP) {
        te_philox_words four = te_rng_group(rng, (uint64_t)i);
        te_unit<T, 2>   both;
#pragma unroll
        for (int k = 0; k < 2; k++)
            both.e[k] = (T)((uint64_t)a.low +
                            te_product_above((uint64_t)four.word[2 * k] << 32 | four.word[2 * k + 1], range));
        if (2 * i + 1 < a.n)
            te_unit_store<T, 2>((T *)a.to + 2 * i, both);
        else
            ((T *)a.to)[2 * i] = both.e[0];
    }
}

template <class T> __device__ static inline void te_draw_integers_of(const te_integers_args &a)
{
    if (a.range >> 32)
        te_draw_integers<T, false>(a);
    else
        te_draw_integers<T, true>(a);
}

extern "C" __global__ void __launch_bounds__(256) te_integers(const __grid_constant__ te_integers_args a)
{
    if (a.bytes == 8)
        te_draw_integers_of<int64_t>(a);
    else if (a.bytes == 4)
        te_draw_integers_of<int32_t>(a);
    else
        te_draw_integers_of<uint8_t>(a);
}
