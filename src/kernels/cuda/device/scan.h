/* scan.h - sums over the threads of a block, in their order. */

/* Of a value per thread the sum over the threads before, in a block of at most WARPS warps; *all, of one that has so
 * many: the sum over all threads. */
template <int WARPS> static __device__ inline uint32_t te_sum_before(uint32_t x, uint32_t *all = nullptr)
{
    __shared__ uint32_t sums[WARPS];
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = x;
#pragma unroll
    for (unsigned by = 1; by < 32; by *= 2) {
        uint32_t before = __shfl_up_sync(0xffffffffu, sum, by);
        if (lane >= by) sum += before;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    for (unsigned w = 0; w < warp; w++) sum += sums[w];
    if (all) {
        *all = 0;
        for (int w = 0; w < WARPS; w++) *all += sums[w];
    }
    return sum - x;
}
