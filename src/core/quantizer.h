/* quantizer.h - what makes a quantizer valid, and the shapes it gives.
 *
 * The fields of te_quantizer (kernels/quantize.h) are capabilities: code that uses a quantizer asks them and knows no
 * recipe.
 */
#ifndef TE_CORE_QUANTIZER_H
#define TE_CORE_QUANTIZER_H

#include "context.h"
#include "kernels/quantize.h"

extern const char *const te_element_names[];       /* "float8_e4m3" …, ends with NULL, as the others */
extern const char *const te_scale_names[];         /* "float32", "e8m0", "float8_e4m3" */
extern const char *const te_four_over_six_names[]; /* "none", "mae", "mse" */

/* TE_OK, or an error that names the field that does not fit the others. */
te_status te_quantizer_check(te_context *ctx, const te_quantizer *q);
bool te_quantizer_same(const te_quantizer *a, const te_quantizer *b);

/* What side 0 or 1 of a matrix of rows x cols is stored as. */
typedef struct te_quantized_layout {
    int64_t rows, cols;            /* of the quantized matrix; see te_quantized_side */
    int64_t data_rows, data_bytes; /* as stored: bytes per row of it */
    int64_t row_stride, col_stride;
    te_dtype data_dtype, scale_dtype;
    int scale_ndim;
    int64_t scale_shape[2], scale_row_stride, scale_col_stride;
    int64_t amaxes; /* -1: none */
} te_quantized_layout;

te_quantized_layout te_quantizer_layout(const te_quantizer *q, int side, int64_t rows, int64_t cols);

#endif
