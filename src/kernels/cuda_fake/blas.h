/* blas.h - what the files of the made-up cuBLASLt share: blas.c has the entry points and products of plain numbers,
 * blas_narrow.c those of fp8 and fp4. */
#ifndef TE_KERNELS_CUDA_FAKE_BLAS_H
#define TE_KERNELS_CUDA_FAKE_BLAS_H

#include "fake.h"

#include <cublasLt.h>

typedef struct te_fake_desc {
    cublasComputeType_t compute;
    int32_t op_a, op_b;
    uint32_t epilogue;
    const void *bias;
    int32_t pointers;       /* cublasLtPointerMode_t */
    const void *factors[2]; /* of A and B */
    int32_t mode[2];        /* cublasLtMatmulMatrixScale_t */
    int8_t fast;
} te_fake_desc;

typedef struct te_fake_layout {
    cudaDataType_t type;
    int64_t rows, columns, ld, step;
    int32_t batch;
} te_fake_layout;

bool te_fake_is_narrow(cudaDataType_t type);
/* Whether the library takes these descriptors on a device of this compute capability; whether their memory is as it
 * must be. */
cublasStatus_t te_fake_check_narrow(const te_fake_desc *d, const te_fake_layout *a, const te_fake_layout *b,
                                    const te_fake_layout *c, int capability);
bool te_fake_narrow_memory(const te_fake_desc *d, const te_fake_layout *a, const te_fake_layout *b, const void *pa,
                           const void *pb, const void *pc);
/* A's (0) or B's (1) values with their factors, k times `lines`, the lines fastest; to be freed. */
double *te_fake_unpack_narrow(const te_fake_desc *d, const te_fake_layout *l, int operand, const void *base,
                              int64_t lines, int64_t k);
/* Whether tensor cores of this compute capability keep few bits of such sums; sums[0 … m) of column j as they do
 * then. */
bool te_fake_sums_are_short(int capability);
void te_fake_short_sums(const te_fake_desc *d, double *sums, const double *a, const double *b, int64_t m, int64_t n,
                        int64_t k, int64_t j);

#endif
