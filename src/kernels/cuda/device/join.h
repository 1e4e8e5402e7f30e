/* join.h - what the kernel that joins the parts of sums is made of; blocks of 1024 threads. */

/* Every thread's x joined in a fixed order; thread 0 gets the result. */
template <bool AMAX> __device__ static inline double te_join_block(double x)
{
    __shared__ double held[1024];
    __syncthreads();
    held[threadIdx.x] = x;
    for (unsigned half = 512; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            double other = held[threadIdx.x + half];
            if (AMAX) held[threadIdx.x] = other > held[threadIdx.x] ? other : held[threadIdx.x];
            else held[threadIdx.x] += other;
        }
    }
    return held[0];
}

/* The parts of a run's blocks; only thread 0's result counts. */
template <bool AMAX> __device__ static inline double te_join_parts(const double *parts, int64_t n)
{
    double x = 0;
    for (int64_t i = threadIdx.x; i < n; i += 1024) x = AMAX ? (parts[i] > x ? parts[i] : x) : x + parts[i];
    return te_join_block<AMAX>(x);
}

/* The sum of column blockIdx.x * 32 + threadIdx.x % 32 over n rows of parts; threads of the first warp get it. */
__device__ static inline te_real te_join_columns(const te_real *parts, int64_t n, int64_t columns)
{
    __shared__ te_real held[32][33];
    unsigned x = threadIdx.x % 32, y = threadIdx.x / 32;
    int64_t  column = (int64_t)blockIdx.x * 32 + x;
    te_real  sum = 0;
    if (column < columns)
#pragma unroll 8
        for (int64_t i = y; i < n; i += 32) sum += parts[i * columns + column];
    __syncthreads();
    held[y][x] = sum;
    __syncthreads();
    if (y == 0)
        for (int i = 1; i < 32; i++) sum += held[i][x];
    return sum;
}
