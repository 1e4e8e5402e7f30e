/* select.cu - what looks at whole rows to choose or accumulate: arg_reduce, topk, cumsum, multinomial; a block per row.
 *
 * Comparisons are made on 64-bit keys that order as the values do: any type, NaN above everything (below everything
 * when the smallest is wanted, so it is always the extreme), -0 equal to +0. Ties go to the lower index.
 */

enum { TE_SELECT_THREADS = 256 };

TE_HD static inline uint64_t te_key(te_a x, bool largest)
{
#if TE_A_IS_INTEGER
    uint64_t key = (uint64_t)(int64_t)x ^ (uint64_t)1 << 63;
#else
    double value = (double)te_from_a(x);
    if (value != value) return ~(uint64_t)0;
    uint64_t bits = te_f64_bits(value + 0.0), key = bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
#endif
    return largest ? key : ~key;
}

struct te_choice {
    uint64_t key;
    int64_t  index; /* -1: none */
};

TE_HD static inline bool te_worse(te_choice a, te_choice b)
{
    if (b.index < 0 || a.index < 0) return a.index < 0 && b.index >= 0;
    return a.key < b.key || (a.key == b.key && a.index > b.index);
}

/* The best of all threads' choices, for every thread. */
__device__ static inline te_choice te_best(te_choice mine)
{
    __shared__ te_choice held[TE_SELECT_THREADS];
    __syncthreads();
    held[threadIdx.x] = mine;
    for (unsigned half = TE_SELECT_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half && te_worse(held[threadIdx.x], held[threadIdx.x + half]))
            held[threadIdx.x] = held[threadIdx.x + half];
    }
    __syncthreads();
    return held[0];
}

/* The best of a row among those worse than `last`. */
__device__ static inline te_choice te_next_best(const te_select_args &a, const te_a *row, te_choice last)
{
    te_choice best = {0, -1};
    int64_t   stride = a.src.stride[a.src.ndim - 1];
    for (int64_t i = threadIdx.x; i < a.n; i += TE_SELECT_THREADS) {
        te_choice c = {te_key(row[i * stride], a.flag != 0), i};
        if ((last.index < 0 || te_worse(c, last)) && te_worse(best, c)) best = c;
    }
    return te_best(best);
}

/* --- arg_reduce and topk ----------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(256) te_arg_reduce(const __grid_constant__ te_select_args a)
{
    for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const te_a *row = (const te_a *)a.src.data + te_offset(a.src, a.src.ndim - 1, r);
        te_choice   best = te_next_best(a, row, te_choice{0, -1});
        if (threadIdx.x == 0) ((int64_t *)a.indices.data)[te_offset(a.indices, a.indices.ndim, r)] = best.index;
    }
}

/* k sweeps over the row. */
extern "C" __global__ void __launch_bounds__(256) te_topk(const __grid_constant__ te_select_args a)
{
    int64_t last = a.src.ndim - 1;
    for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const te_a *row = (const te_a *)a.src.data + te_offset(a.src, last, r);
        te_a       *values = (te_a *)a.out.data + te_offset(a.out, last, r);
        int64_t    *indices = (int64_t *)a.indices.data + te_offset(a.indices, last, r);
        te_choice   best = {0, -1};
        for (int64_t j = 0; j < a.k; j++) {
            best = te_next_best(a, row, best);
            if (threadIdx.x != 0) continue;
            values[j * a.out.stride[last]] = row[best.index * a.src.stride[last]];
            indices[j * a.indices.stride[last]] = best.index;
        }
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

/* Inclusive sums over the block's threads. */
__device__ static inline te_sum te_scan(te_sum x, te_sum *held)
{
    held[threadIdx.x] = x;
    for (unsigned by = 1; by < TE_SELECT_THREADS; by *= 2) {
        __syncthreads();
        te_sum before = threadIdx.x >= by ? held[threadIdx.x - by] : (te_sum)0;
        __syncthreads();
        held[threadIdx.x] += before;
    }
    __syncthreads();
    return held[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(256) te_cumsum(const __grid_constant__ te_select_args a)
{
    __shared__ te_sum held[TE_SELECT_THREADS];
    int64_t last = a.src.ndim - 1;
    for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const te_a *row = (const te_a *)a.src.data + te_offset(a.src, last, r);
        te_b       *out = (te_b *)a.out.data + te_offset(a.out, last, r);
        te_sum      before = 0;
        for (int64_t first = 0; first < a.n; first += TE_SELECT_THREADS) {
            int64_t j = first + threadIdx.x, i = a.flag ? a.n - 1 - j : j;
            te_sum  sum = te_scan(j < a.n ? te_sum_of(row[i * a.src.stride[last]]) : (te_sum)0, held);
            if (j < a.n) out[i * a.out.stride[last]] = te_of_sum(before + sum);
            before += held[TE_SELECT_THREADS - 1];
            __syncthreads();
        }
    }
}

/* --- multinomial ------------------------------------------------------------------------------------------------- */

/* As on the CPU: a tree of sums, tree[1] the total, tree[leaves + i] weight i. */
__device__ static inline void te_tree_load(const te_select_args &a, double *tree, const te_a *row, int64_t r)
{
    __shared__ int64_t positive[TE_SELECT_THREADS];
    __shared__ int     bad;
    __syncthreads();
    if (threadIdx.x == 0) bad = 0;
    positive[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < a.leaves; i += TE_SELECT_THREADS) {
        double weight = i < a.n ? (double)te_from_a(row[i * a.src.stride[a.src.ndim - 1]]) : 0.0;
        if (!(weight >= 0.0)) bad = 1;
        positive[threadIdx.x] += weight > 0.0;
        tree[a.leaves + i] = weight;
    }
    for (int64_t level = a.leaves / 2; level > 0; level /= 2) {
        __syncthreads();
        for (int64_t i = level + threadIdx.x; i < 2 * level; i += TE_SELECT_THREADS)
            tree[i] = tree[2 * i] + tree[2 * i + 1];
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    int64_t count = 0, fault = -1;
    for (int i = 0; i < TE_SELECT_THREADS; i++) count += positive[i];
    if (count < (a.flag ? 1 : a.k)) fault = 3;
    if (count == 0) fault = 2;
    if (!(tree[1] <= 1.7976931348623157e308)) fault = 1;
    if (bad) fault = 0;
    if (fault >= 0) atomicMin((unsigned long long *)a.bound.fault, (unsigned long long)(r * 4 + fault));
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
extern "C" __global__ void __launch_bounds__(256) te_multinomial(const __grid_constant__ te_select_args a)
{
    double *tree = (double *)a.bound.scratch + (int64_t)blockIdx.x * 2 * a.leaves;
    te_rng  rng = {a.rng[0], a.rng[1], a.rng[2], (const uint64_t *)a.rng[3]};
    int64_t last = a.src.ndim - 1, step = a.flag ? TE_SELECT_THREADS : 1;
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
