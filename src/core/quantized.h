/* quantized.h - quantized tensors: data, factors and amaxes of one or both directions.
 *
 * Leading dimensions of the source count as rows. Side 0 is the row-wise copy, in the source's shape (E2M1: half the
 * last dimension, rounded up). Side 1 is the column-wise copy, what the product that sums over rows reads: {cols,
 * rows}, or the source's shape where the quantizer does not store it transposed. Factors have their logical shapes,
 * without padding.
 */
#ifndef TE_CORE_QUANTIZED_H
#define TE_CORE_QUANTIZED_H

#include "quantizer.h"
#include "tensor.h"

typedef struct te_quantized_part {
    te_tensor *data, *scale_inv, *amax; /* NULL: not there */
} te_quantized_part;

typedef struct te_quantized {
    te_quantizer quantizer;
    te_dtype dtype; /* of the source, and of what dequantizing gives */
    int ndim;
    int64_t shape[TE_MAX_DIMS];
    te_quantized_part side[2];
    /* what a source was multiplied by that will be quantized once more (te_role_keep_factor); else NULL */
    te_tensor *factor;
} te_quantized;

typedef struct te_quantize_options {
    bool want[2];         /* row-wise, column-wise */
    float scale;          /* needs_history: the factor, unless `factor` gives it */
    const uint64_t *seed; /* stochastic rounding: NULL draws from the context */
    te_tensor *factor;    /* float32 {1} on the source's device */
    te_tensor *seen;      /* likewise, any length: its first element is raised to the source's amax. NULL: none */
    te_tensor *kept;      /* float32 {3} of a device, for te_quantize_job; not with an amax per row. NULL: none */
    const float *stale;   /* likewise; NULL: the copies are there for the first time */
    bool again;           /* the result holds copies of the same source already, with what was kept of them */
    bool passing;         /* nobody but products will read the result: see te_quantized_open */
} te_quantize_options;

static inline bool te_quantized_is_there(const te_quantized *z) { return z->side[0].data || z->side[1].data; }

/* Room for the wanted directions of a matrix that te_quantize_rows fills; on failure it holds nothing. `passing`: on a
 * device there is none for an amax that only a history is to know of, and factors of blocks lie as products read them:
 * one line's after the other's, block by block. */
te_status te_quantized_open(te_device *device, const te_quantizer *q, te_dtype dtype, int ndim, const int64_t *shape,
                            const bool want[2], bool passing, te_quantized *result);
/* Quantizes n rows from `row` on, a multiple of 128, from dense memory in the dtype of the matrix; all at once where
 * rounding is stochastic. With a history *amax becomes the largest so far. Where factors follow from the whole tensor,
 * amax[0] and [1] are those that te_measure_rows took of all rows, beginning at 0. Both on host memory. */
te_status te_quantize_rows(te_quantized *z, int64_t row, int64_t n, void *source, float scale, float *amax);
te_status te_measure_rows(const te_quantized *z, int64_t row, int64_t n, void *source, float *amax);

/* Before te_quantize over z, or n rows of it, is to succeed: takes what that needs beside, and gives it back. */
te_status te_quantize_prepare(const te_quantized *z, int64_t n);

/* The same all at once, for a backend that makes the source itself (te_operand.quantized). factor and seen: as in
 * te_quantize_options. */
te_quantize_job te_quantized_job(const te_quantized *z, te_tensor *factor, te_tensor *seen);

/* Fills `result`, to be closed by the caller; on failure it holds nothing. Both directions are made in one pass.
 * Of a parameter that is stored quantized the values are quantized. */
te_status te_quantize(te_tensor *source, const te_quantizer *q, const te_quantize_options *options,
                      te_quantized *result);
/* Raises the first element of `seen`, which is where z is, to the amax that quantizing with a history reported. */
te_status te_quantized_count(const te_quantized *z, te_tensor *seen);
/* Whether a side has all its parts, in the quantizer's shapes and dtypes; `who` begins the message. */
te_status te_quantized_check(te_context *ctx, const char *who, const te_quantized *z, int side);
/* A new tensor from one side; NULL with the reason recorded. */
te_tensor *te_dequantize(te_context *ctx, const te_quantized *quantized, int side);
/* One side, or its transpose, as the operand of a product; what it points to belongs to `quantized` and `quant`. Side 0
 * is the source (rows x cols), side 1 its transpose (cols x rows; under the Hadamard transform with whole groups of 16
 * columns):
 *
 *      y = x w^T        x side 0                  w side 0, transposed
 *      dx = dy w        dy side 0                 w side 1, transposed
 *      dw = dy^T x      dy side 1                 x side 1, transposed                                              */
te_view te_quantized_operand(const te_quantized *quantized, int side, bool transposed, te_quant *quant);
/* The column-wise copy from the row-wise one: the same bytes where one factor serves all, stored transposed. Nothing
 * happens where it is there; copies of other kinds cannot be completed. */
bool te_quantized_may_complete(const te_quantized *quantized);
te_status te_quantized_complete(te_quantized *quantized);
void te_quantized_close(te_quantized *quantized);
/* Another holder of the wanted directions of `from`. */
void te_quantized_share(const te_quantized *from, bool rowwise, bool columnwise, te_quantized *to);

#endif
