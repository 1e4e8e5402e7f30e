/* gemm_plan.h - a product with the algorithm that computes it, for gemm_plan.c and gemm_choose.c. */
#ifndef TE_KERNELS_CUDA_GEMM_PLAN_H
#define TE_KERNELS_CUDA_GEMM_PLAN_H

#include "gemm.h"

typedef struct te_cuda_gemm_plan {
    te_cuda_product product;
    te_hash128 hash;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
    uint64_t used;
    bool unsupported; /* the library has no algorithm for it */
    bool passing;     /* chosen by a rule, so that it would be the same again */
} te_cuda_gemm_plan;

static inline te_hash128 te_cuda_product_hash(const te_cuda_product *p)
{
    return te_hash128_add(TE_HASH128_START, p, sizeof *p);
}

/* gemm_plan.c. The product by an algorithm, added to its result or not. */
cublasStatus_t te_cuda_gemm_multiply(te_exec *exec, const te_cuda_blas *blas, const te_cuda_gemm_plan *plan,
                                     const cublasLtMatmulAlgo_t *algorithm, const te_cuda_product_data *data,
                                     bool accumulate, void *workspace, size_t workspace_bytes);
/* gemm_choose.c. Gives the plan, which is described, its algorithm, that many bytes of workspace, and `passing`. */
cublasStatus_t te_cuda_gemm_choose(te_exec *exec, const te_cuda_blas *blas, te_cuda_gemm_plan *plan,
                                   const te_cuda_product_data *data);

#endif
