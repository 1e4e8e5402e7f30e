/* hand_product.c - plans for matrix products by own kernels. */
#include "hand_internal.h"

te_status te_cuda_plan_few(te_cuda_plan *plan, const te_few_args *args, const te_dtype dtypes[3])
{
    te_cuda_plan_open(plan);
    if (args->m == 0 || args->n == 0) return TE_OK;
    te_cuda_call *call = te_cuda_plan_add(plan, TE_CUDA_FILE_PRODUCT, "te_product_few",
                                          (args->n + TE_FEW_LINES - 1) / TE_FEW_LINES, TE_FEW_THREADS, args,
                                          sizeof *args);
    call->kernel.dtype[0] = (uint8_t)dtypes[0];
    call->kernel.dtype[1] = (uint8_t)dtypes[1];
    call->kernel.third = (uint8_t)(1 + dtypes[2]);
    return TE_OK;
}
