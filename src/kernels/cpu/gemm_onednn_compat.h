/* gemm_onednn_compat.h - the little of oneDNN that the matrix product needs, the same for its versions 2 and 3.
 *
 * The versions differ in how descriptors are made and owned; nothing outside gemm_onednn_compat.c knows which one it
 * is.
 */
#ifndef TE_KERNELS_CPU_GEMM_ONEDNN_COMPAT_H
#define TE_KERNELS_CPU_GEMM_ONEDNN_COMPAT_H

#include "gemm.h"

#include <dnnl.h>

/* Version 3.7 takes wrong strides where a matrix has one row or one column. */
enum { TE_DNNL_LEAST_LINES = DNNL_VERSION_MAJOR >= 3 ? 2 : 1 };

/* All that decides which code oneDNN generates. Compared bytewise, so it is zeroed before it is filled in. */
typedef struct te_dnnl_spec {
    int64_t m, n, k;
    int64_t a_rs, a_cs, b_rs, b_cs, c_rs; /* elements; the columns of c are contiguous */
    int32_t in, out, bias;                /* te_dtype; bias TE_DTYPE_COUNT: none */
    int32_t accumulate;
    int32_t packed_b; /* b in the layout that oneDNN likes best, made by te_dnnl_pack_b */
    int32_t reserved;
} te_dnnl_spec;

/* A description of memory: a plain struct in version 2, a handle in version 3. */
typedef struct te_dnnl_desc {
    dnnl_memory_desc_t md;
    bool               made;
} te_dnnl_desc;

typedef struct te_dnnl_matmul {
    dnnl_primitive_t primitive, packer; /* packer: from b's strides to the packed layout, or NULL */
    te_dnnl_desc     a, b, c, bias, scratchpad, plain_b;
    size_t           scratchpad_bytes, packed_bytes;
} te_dnnl_matmul;

/* False when oneDNN has no such product or is out of memory; nothing is left to free then. */
bool te_dnnl_matmul_make(te_dnnl_matmul *matmul, dnnl_engine_t engine, const te_dnnl_spec *spec);
void te_dnnl_matmul_free(te_dnnl_matmul *matmul);

typedef struct te_dnnl_args {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    void         *a, *b, *c, *bias, *scratchpad;
} te_dnnl_args;

bool te_dnnl_matmul_run(const te_dnnl_matmul *matmul, const te_dnnl_args *args);
bool te_dnnl_pack_b(const te_dnnl_matmul *matmul, const te_dnnl_args *args,
                    void *packed); /* args->b: b with its strides */

#endif
