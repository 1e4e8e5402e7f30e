/* decode.h - quantized matrices to plain values: what dequantizing and the matrix product share. */
#ifndef TE_KERNELS_CPU_DECODE_H
#define TE_KERNELS_CPU_DECODE_H

#include "quantize_blocks.h"

enum {
    TE_DECODE_RUN = 512,   /* elements decoded at a time */
    TE_DECODE_FAR = 4096,  /* by te_decode_run, which prepares for some time */
};

/* A matrix as it is stored: x[i][j] = element * factor of its block * (amax ? that of the row or column : 1) * times.
 * Strides count elements; see te_quant. Elements times factors are exact in float32 unless the factors are arbitrary
 * float32 numbers, and then are rounded once, as each further factor does. */
typedef struct te_decode {
    te_element_kind element;
    te_scale_kind   scale;
    const uint8_t  *data;
    int64_t         rows, cols, row_stride, col_stride;
    const void     *factors;
    int             block_rows, block_cols; /* 0, 0: factors are not read */
    int64_t         factor_row_stride, factor_col_stride;
    const float    *amax; /* NULL: none */
    int64_t         amax_row_stride, amax_col_stride;
    float           scale_max, times;
} te_decode;

/* The factor of the whole tensor that a quantized view's values have beside those of blocks. */
float te_decode_tensor_factor(const te_view *view);

/* The matrix of the last two dimensions of a quantized view; *across: the view is its transpose. times: 1. */
te_decode te_decode_of(const te_view *view, bool *across);

/* The factors of the n first blocks of a row: TE_DECODE_RUN at most, unless they lie side by side. */
void te_decode_factors(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int n, float *factors);

/* n <= TE_DECODE_RUN values from (row, col) on; col is a multiple of TE_DECODE_RUN or of the block. */
void te_decode_row(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int64_t col, int n,
                   float *values);

/* The same of n <= TE_DECODE_FAR to float32 or bfloat16, rounded once more for that; past: `to` is not read soon, and a
 * fence follows. False, and nothing is written, where there is no short way. */
bool te_decode_run(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int64_t col, int n,
                   te_dtype dtype, void *to, bool past);

/* All values to rows of d->cols elements, bfloat16 or float32. False: bfloat16 does not hold every one as a normal
 * number or 0, and what was written is of no use; nor is it after an interrupt (te_cpu_stopped). */
bool te_decode_matrix(te_exec *exec, const te_decode *d, te_dtype dtype, void *to);

#endif
