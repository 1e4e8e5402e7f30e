/* common.h - what the hand-written kernels share. The text before it defines te_real; the text after it, for the two
 * element types at hand, te_a, te_from_a, te_as_a, TE_A_IS_INTEGER and the same with b. */

/* x / by; most numbers fit 32 bits, whose division takes a quarter of the instructions. */
TE_HD static inline int64_t te_quotient(int64_t x, int64_t by)
{
    if (((uint64_t)x | (uint64_t)by) >> 32 == 0) return (int64_t)((uint32_t)x / (uint32_t)by);
    return x / by;
}

/* Coordinates of the row-major `index` in `shape` times strides, without that along `left_out`. The loop stays one: as
 * several copies it is longer than a small kernel takes to run it, for they all come from memory first. */
TE_HD static inline int64_t te_offset_without(const int64_t *shape, const int64_t *stride, int64_t ndim, int64_t index,
                                              int64_t left_out)
{
    int64_t offset = 0;
#pragma unroll 1
    for (int64_t i = ndim - 1; i > 0; i--) {
        int64_t rest = index / shape[i];
        if (i != left_out) offset += (index - rest * shape[i]) * stride[i];
        index = rest;
    }
    return ndim > 0 && left_out != 0 ? offset + index * stride[0] : offset;
}

/* Offset of the row-major `index` over the first `ndim` dimensions. */
TE_HD static inline int64_t te_offset(const te_cuda_view &v, int64_t ndim, int64_t index)
{
    return te_offset_without(v.shape, v.stride, ndim, index, -1);
}

/* Element of a view of int64 or int32. */
TE_HD static inline int64_t te_whole_at(const te_cuda_view &v, int64_t wide, int64_t offset)
{
    return wide ? ((const int64_t *)v.data)[offset] : ((const int32_t *)v.data)[offset];
}

/* Of all ids out of range the one at the lowest position: its place and the id, each as near as 32 bits come to it. */
static __device__ inline void te_report_id(const te_cuda_bound &bound, int64_t position, int64_t id)
{
    uint64_t place = position < 0xfffffffe ? (uint64_t)position : 0xfffffffeu;
    int32_t  seen = id < INT32_MIN ? INT32_MIN : id > INT32_MAX ? INT32_MAX : (int32_t)id;
    atomicMin((unsigned long long *)bound.fault, (unsigned long long)(place << 32 | (uint32_t)seen));
}

/* Which half of the pairs being sorted holds them after `digits` digits (te_sort_args). */
TE_HD static inline int64_t te_sort_half(const te_cuda_bound &bound, int64_t n, int64_t digits)
{
    return digits == 0 ? 0 : (int64_t)((const uint64_t *)bound.scratch)[4 * n + digits];
}

/* The first of a grid-stride loop, and its step. */
#define TE_FIRST ((int64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define TE_STEP  ((int64_t)gridDim.x * blockDim.x)
