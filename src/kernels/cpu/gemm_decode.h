/* gemm_decode.h - quantized matrices to plain ones, as the matrix product reads them. */
#ifndef TE_KERNELS_CPU_GEMM_DECODE_H
#define TE_KERNELS_CPU_GEMM_DECODE_H

#include "gemm_cache.h"

/* to[i][j] = element * factor of its block * (amax ? that of the row : 1) * times, dense, in row-major order. Extents and
 * strides are those of the matrix as it is stored, in elements; see te_quant. */
typedef struct te_decode {
    te_element_kind element;
    te_scale_kind  scale;
    te_dtype       dtype; /* TE_BF16 or TE_F32 */
    const uint8_t *data;
    int64_t        rows, cols, row_stride, col_stride;
    const void    *factors;
    int            block_rows, block_cols; /* 0, 0: factors are not read */
    int64_t        factor_row_stride, factor_col_stride;
    const float   *amax; /* NULL: none */
    int64_t        amax_row_stride, amax_col_stride;
    float          scale_max, times;
    void          *to;
} te_decode;

/* What the result depends on. */
te_gemm_packed_id te_decode_id(const te_decode *d, uint64_t key);

/* False: dtype does not hold every value as a normal number or 0, and what was written is of no use. */
bool te_decode_run(te_exec *exec, const te_decode *d);

#endif
