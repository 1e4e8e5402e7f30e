/* gemm.h - matrix products: gemm.c finds the form that cuBLASLt takes, gemm_plan.c runs its algorithms, gemm_choose.c
 * chooses them, gemm_sizes.c says which sizes are worth timing, gemm_end.c decides whether a bias is its epilogue or a
 * pass of its own, which gemm_finish.c does. Quantized operands go as bytes with their factors where the device
 * multiplies them (gemm_narrow.c), else decoded (gemm_quantized.c). Few rows are a kernel of our own (gemm_few.c). */
#ifndef TE_KERNELS_CUDA_GEMM_H
#define TE_KERNELS_CUDA_GEMM_H

#include "cuda_backend.h"

/* D = op(A) op(B), column-major, `batch` times: everything that the choice of an algorithm depends on. Plain bytes
 * without holes, zeroed before it is filled, since it is also the key of a plan. */
typedef struct te_cuda_product {
    int64_t rows, columns, inner, batch;
    int64_t ld_a, ld_b, ld_d;
    int64_t step_a, step_b, step_d;          /* from batch to batch, elements */
    int32_t input_a, input_b, output;        /* te_dtype; TE_U8: two E2M1 elements */
    int32_t transposed_a, transposed_b;
    int32_t accumulate;
    int32_t align_a, align_b, align_d;       /* bytes that the addresses are known to be multiples of, at most 256 … */
    int32_t align_bias;                      /* … and that of the bias; 0: there is none */
    int32_t tf32, device_scales, narrow;     /* narrow: A and B are bytes, and factors belong to them */
    int32_t mode_a, mode_b, fast;            /* cublasLtMatmulMatrixScale_t of the factors */
} te_cuda_product;

_Static_assert(sizeof(te_cuda_product) == 10 * sizeof(int64_t) + 16 * sizeof(int32_t), "a key has no holes");

typedef struct te_cuda_product_data {
    const void *a, *b;
    void       *d;
    const void *bias; /* in the dtype of D, one per row */
    double      alpha;
    const float *device_alpha, *device_beta; /* instead, where the product has device_scales */
    const void *factors_a, *factors_b;       /* where it is narrow */
} te_cuda_product_data;

enum { TE_CUDA_FINISHES = 2 }; /* without a bias and with one */

typedef struct te_cuda_blas {
    te_cuda_blas_library library;
    cublasLtHandle_t     handle;
    te_map               plans; /* te_cuda_gemm_plan, by hash of the product */
    size_t               n_passing; /* those that can be made again at any time */
    uint64_t             plan_clock;
    int                  candidates; /* algorithms that are timed for a product */
    te_program          *finish[TE_CUDA_FINISHES];
    te_map               ends;   /* gemm_end.c */
    te_map               series; /* gemm_sizes.c */
    struct te_cuda_kept *kept; /* gemm_kept.c */
    size_t               n_kept, kept_bytes;
    uint64_t             kept_clock;
} te_cuda_blas;

/* The library and its handle, from the first use on. */
te_status te_cuda_blas_open(te_exec *exec, te_cuda_blas **blas);

/* TE_ERROR_UNSUPPORTED: the library has no algorithm for it. */
te_status te_cuda_product_run(te_exec *exec, const te_cuda_product *product, const te_cuda_product_data *data);
/* Whether it is large enough for its ways to be timed; and what measurements of it are kept under on disk. */
bool       te_cuda_product_large(const te_cuda_product *product);
te_hash128 te_cuda_product_key(te_exec *exec, const te_cuda_product *product);
void      te_cuda_plans_close(te_exec *exec, te_cuda_blas *blas);
/* gemm_sizes.c. Whether they are timed, or have been, which from now on is so. */
bool te_cuda_product_timed(te_exec *exec, const te_cuda_product *product);
void te_cuda_sizes_close(te_exec *exec, te_cuda_blas *blas);

/* gemm_quantized.c: te_cuda_gemm where a or b is quantized. */
te_status te_cuda_gemm_quantized(te_exec *exec, const te_gemm *gemm);
/* What a product of bytes needs to know of them. */
typedef struct te_cuda_narrow {
    const void *factors[2]; /* of a and b, laid out as the mode wants them */
    int32_t mode[2];        /* cublasLtMatmulMatrixScale_t */
} te_cuda_narrow;

/* te_cuda_gemm of plain operands, or with `narrow` of bytes that are multiplied as they are; with {alpha, beta, 0} from
 * device memory, NULL: those of the gemm. */
te_status te_cuda_gemm_scaled(te_exec *exec, const te_gemm *gemm, const float *scales, const te_cuda_narrow *narrow);

/* Its parts. The product as it is, `bias` being what the epilogue reads; and its description
 * where it is a single one. */
te_status te_cuda_gemm_batches(te_exec *exec, const te_gemm *gemm, const void *bias, const float *scales,
                               const te_cuda_narrow *narrow);
bool te_cuda_gemm_single(te_exec *exec, const te_gemm *gemm, const void *bias, bool scales,
                         const te_cuda_narrow *narrow, te_cuda_product *p);
/* A dense view of v's shape on lent memory; dimensions in which v repeats itself are stored once. data NULL: failed. */
te_view te_cuda_gemm_room(te_exec *exec, const te_view *v, te_dtype dtype);

/* gemm_end.c. The product with its end: fused where that is not slower; and with a pass of its own after it. */
te_status te_cuda_gemm_ended(te_exec *exec, const te_gemm *g, const float *scales, const te_cuda_narrow *narrow);
te_status te_cuda_gemm_apart(te_exec *exec, const te_gemm *g, const float *scales, const te_cuda_narrow *narrow);
void      te_cuda_ends_close(te_exec *exec, te_cuda_blas *blas);

/* gemm_narrow.c: the product of operands that te_cuda_decline_narrow lets pass; TE_ERROR_UNSUPPORTED where the
 * library declines after all. */
te_status te_cuda_gemm_narrow(te_exec *exec, const te_gemm *gemm);
/* A dense copy of v in a dtype, on memory that the caller gives back; data NULL: failed. */
te_view te_cuda_gemm_dense(te_exec *exec, const te_view *v, te_dtype dtype);

/* gemm_few.c: products of few rows by a kernel of our own; whether it takes one, and that. Of FP8 those whose operands
 * have a factor each. */
bool      te_cuda_few_takes(te_exec *exec, const te_cuda_product *product);
te_status te_cuda_few_run(te_exec *exec, const te_cuda_product *product, const te_cuda_product_data *data);
bool      te_cuda_few_takes_fp8(te_exec *exec, const te_gemm *gemm);
te_status te_cuda_few_run_fp8(te_exec *exec, const te_gemm *gemm);

/* gemm_kept.c. A copy of an operand, by the key of its contents (te_gemm, 0: there is none), where it
 * lies, and how it is made. */
typedef struct te_cuda_kept_id {
    uint64_t    key;
    const void *of;
    int64_t     form[8];
} te_cuda_kept_id;
/* Memory of so many bytes that stays: with the copy where it is `there`, otherwise the caller makes it now, and has it
 * forgotten where that fails. NULL: nothing is kept. */
void *te_cuda_kept_copy(te_exec *exec, const te_cuda_kept_id *id, size_t bytes, bool *there);
void  te_cuda_kept_close(te_exec *exec, te_cuda_blas *blas);

/* kernel_ops.c: see te_cuda_plan_decode and te_cuda_plan_scales. */
te_status te_cuda_decode(te_exec *exec, const te_view *to, const te_view *from, bool whole);
te_status te_cuda_product_scales(te_exec *exec, const te_gemm *gemm, float *scales);
/* The factors of an operand's blocks in a cuBLASLt layout: see te_arrange_args. */
struct te_arrange_args;
te_status te_cuda_arrange_factors(te_exec *exec, const struct te_arrange_args *args);
/* A product of few rows, with the dtypes of its operands w and x and of its result: see te_few_args. */
struct te_few_args;
te_status te_cuda_product_few(te_exec *exec, const struct te_few_args *args, const te_dtype dtypes[3]);
/* An operand with zeros beyond it: see te_pad_args. */
struct te_pad_args;
te_status te_cuda_pad_lines(te_exec *exec, const struct te_pad_args *args);

/* c = product + bias + beta c, for a dense product of the shape of c. */
te_status te_cuda_gemm_finish(te_exec *exec, const te_gemm *gemm, const te_view *product);
void      te_cuda_finishes_close(te_exec *exec, te_cuda_blas *blas);

#endif
