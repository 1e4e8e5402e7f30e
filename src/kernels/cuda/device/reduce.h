/* reduce.h - joining what the threads of a row or block hold. Every thread of the group gets the result; the order of
 * additions is a tree that depends on the group's size alone. */

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

/* Adds c[n] of the threads that are LANES apart in a block, pairwise, to that of the first of them, which alone gets the
 * sum. `room` is THREADS / 2 * N in shared memory, which the block may use again after its next barrier. */
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
