/* reduce.h - what rows are reduced with, and joining what the threads of a row or block hold. Every thread of the group
 * gets the result; the order of additions is a tree that depends on the group's size alone. */

/* Brings what will be read soon nearer. */
TE_HD static inline void te_prefetch(const void *at)
{
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.L2 [%0];" ::"l"(at));
#else
    (void)at;
#endif
}

/* The larger one, NaN if either is. Of 0 and -0 it may be either. */
TE_HD static inline te_real te_row_max(te_real x, te_real y)
{
#if TE_REAL_IS_F32 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
#else
    return te_op_join_rowmax(x, y);
#endif
}

/* e^x for a value less its row's maximum, so x <= 0: within 3 units of the last place, but 0 where it is below 2^-126.
 * What follows from it depends on the order of the row's sum in any case. It is the device's 2^h for h = x log2 e; what
 * rounding h lost, r = x - h ln 2, comes as the factor 1 + r. */
#if TE_REAL_IS_F32
TE_HD static inline float te_row_exp(float x)
{
    float v = te_row_max(x, -104.0f), h = v * 1.44269502f, power;
    float r = TE_FMA(h, 1.90465432e-9f, TE_FMA(h, -0.693147182f, v));
#ifdef __CUDA_ARCH__
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(h));
#else
    power = __builtin_exp2f(h);
    power = power < 0x1p-126f ? 0.0f : power;
#endif
    return TE_FMA(power, r, power);
}
#define TE_LOWEST -3.40282347e38f
#else
TE_HD static inline double te_row_exp(double x) { return te_wide_exp(x); }
#define TE_LOWEST -1.7976931348623157e308
#endif

/* Such an exponential as a share of their sum, which is at least 1: the quotient but for a few numbers near 2^-126. The
 * reciprocal is the same for the row. */
TE_HD static inline te_real te_row_share(te_real e, te_real sum)
{
#if TE_REAL_IS_F32
    const float r = 1.0f / sum, q = e * r;
    return TE_FMA(TE_FMA(-q, sum, e), r, q);
#else
    return e / sum;
#endif
}

/* Adds V values to a maximum and the sum of e^(value - maximum). Infinities below the first number count nothing, and a
 * row of nothing else makes NaN in the end, when its maximum is subtracted from itself. */
template <int V> TE_HD static inline void te_join_online(te_real &maximum, te_real &sum, const te_real (&x)[V])
{
    te_real top[V], e[V];
#pragma unroll
    for (int k = 0; k < V; k++) top[k] = x[k];
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < half; k++) top[k] = te_row_max(top[k], top[k + half]);
    const te_real next = te_row_max(maximum, top[0]), base = te_row_max(next, (te_real)TE_LOWEST);
#pragma unroll
    for (int k = 0; k < V; k++) e[k] = te_row_exp(x[k] - base);
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < half; k++) e[k] += e[k + half];
    sum = sum * te_row_exp(maximum - base) + e[0];
    maximum = next;
}

/* LANES neighbours in a warp, a power of two up to 32. */
#define TE_JOIN(name)                                                                                             \
    template <int LANES> __device__ static inline te_real te_lanes_##name(te_real x)                              \
    {                                                                                                             \
        _Pragma("unroll") for (int by = LANES / 2; by > 0; by /= 2)                                               \
            x = te_op_join_##name(x, __shfl_xor_sync(0xffffffffu, x, by));                                        \
        return TE_AGREED(x, LANES);                                                                               \
    }                                                                                                             \
    /* A block of THREADS, a multiple of 32. `places` are 32 in shared memory. */                                 \
    template <int THREADS> __device__ static inline te_real te_block_##name(te_real x, te_real *places)           \
    {                                                                                                             \
        x = te_lanes_##name<32>(x);                                                                               \
        __syncthreads();                                                                                          \
        if (threadIdx.x % 32 == 0) places[threadIdx.x / 32] = x;                                                  \
        __syncthreads();                                                                                          \
        x = places[threadIdx.x % (THREADS / 32)];                                                                 \
        return te_lanes_##name<THREADS / 32>(x);                                                                  \
    }                                                                                                             \
    template <int LANES> __device__ static inline te_real te_row_##name(te_real x, te_real *places)               \
    {                                                                                                             \
        if (LANES <= 32) return te_lanes_##name<LANES <= 32 ? LANES : 32>(x);                                     \
        return te_block_##name<LANES <= 32 ? 32 : LANES>(x, places);                                              \
    }

#define TE_AGREED(x, lanes) (x)
TE_JOIN(rowsum)
TE_JOIN(sum)
TE_JOIN(amax)
#undef TE_AGREED
#define TE_AGREED(x, lanes) __shfl_sync(0xffffffffu, x, 0, lanes) /* of 0 and -0, lanes may have kept either */
TE_JOIN(rowmax)
TE_JOIN(rowmin)

/* Adds c[n] of the threads that are LANES apart in a block, pairwise, to that of the first of them, which alone gets
 * the sum. `room` is THREADS / 2 * N in shared memory, which the block may use again after its next barrier. */
template <int LANES, int THREADS, int N> __device__ static inline void te_join_groups(te_real (&c)[N], te_real *room)
{
    const int at = threadIdx.x;
#pragma unroll
    for (int half = THREADS / 2; half >= LANES; half /= 2) {
        __syncthreads();
        if (at >= half && at < 2 * half) {
#pragma unroll
            for (int n = 0; n < N; n++) room[n * half + at - half] = c[n];
        }
        __syncthreads();
        if (at < half) {
#pragma unroll
            for (int n = 0; n < N; n++) c[n] += room[n * half + at];
        }
    }
}
