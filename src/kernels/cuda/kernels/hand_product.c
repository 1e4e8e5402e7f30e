/* hand_product.c - plans for matrix products by own kernels. */
#include "hand_internal.h"

/* Warps of a block: a round of its loads is 64 bytes of a line for each of four turns of a warp, and rounds wait for
 * memory. So where lines are longer and blocks too few to fill any device, they have more warps. */
static int warps_for(const te_few_args *args, te_dtype dtype, int64_t blocks)
{
    enum { WARPS = 8, ROUND_BYTES = 4 * 64 * WARPS, FEW_BLOCKS = 264 };
    return args->k * (int64_t)te_dtype_size(dtype) > ROUND_BYTES && blocks <= FEW_BLOCKS ? 2 * WARPS : WARPS;
}

te_status te_cuda_plan_few(te_cuda_plan *plan, const te_few_args *args, const te_dtype dtypes[3])
{
    te_cuda_plan_open(plan);
    if (args->m == 0 || args->n == 0) return TE_OK;
    int64_t blocks = (args->n + TE_FEW_LINES - 1) / TE_FEW_LINES;
    int     warps = warps_for(args, dtypes[0], blocks);
    te_cuda_call *call =
        te_cuda_plan_add(plan, TE_CUDA_FILE_PRODUCT, "te_product_few", blocks, 32 * warps, args, sizeof *args);
    call->kernel.vector = (uint16_t)warps;
    call->kernel.dtype[0] = (uint8_t)dtypes[0];
    call->kernel.dtype[1] = (uint8_t)dtypes[1];
    call->kernel.third = (uint8_t)(1 + dtypes[2]);
    return TE_OK;
}
