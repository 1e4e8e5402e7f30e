/* quantize.h - a matrix to a quantized matrix and back: what te_backend.quantize and .dequantize are given.
 *
 * A quantizer is a value: what it can do is what its fields say, and no recipe has a name here. The column-wise copy
 * is the quantization of the transposed matrix, so a block always runs along the row of the matrix that is stored:
 *
 *      side 0   rows x cols of the source                    block_rows x block_cols
 *      side 1   cols x rows, the source transposed           block_rows x block_cols of *that*
 *
 * Blocks are 1 x n or n x n with n dividing 128, or the whole matrix; beyond the edges there are zeros. Both sides are
 * made from a part of the source while it is in cache. The bytes follow from the job alone: they are the same on every
 * backend, whatever the instruction set and the number of threads.
 */
#ifndef TE_KERNELS_QUANTIZE_H
#define TE_KERNELS_QUANTIZE_H

#include "kernels.h"
#include "quant.h"

/* Among two factors for a block, its largest value to 6 or to 4, the one with the smaller error. */
typedef enum te_four_over_six { TE_46_NONE, TE_46_MAE, TE_46_MSE, TE_46_COUNT } te_four_over_six;

typedef struct te_quantizer {
    te_element_kind element;
    te_scale_kind scale;
    int block_rows, block_cols; /* 0, 0: one factor for the whole tensor */
    bool needs_history; /* the factor comes from earlier amaxes: it is given, and the amax of this tensor is reported */
    bool has_columnwise; /* can be stored for the transposed use */
    bool transposed;     /* and is stored transposed then; otherwise in the source's layout */
    bool replicated;     /* one factor per block and row, the same for the rows of a block */
    bool power_of_two;
    float epsilon;   /* amaxes below count as this */
    bool row_scaled; /* TE_SCALE_E4M3: side 0 has an amax per row */
    /* side 1 is transformed along its rows, in groups of 16: sums in float32, the result rounded to the source's
     * dtype */
    bool hadamard;
    bool stochastic; /* E2M1: rounding by random bits */
    te_four_over_six four_over_six;
    float scale_max; /* TE_SCALE_E4M3: largest factor of a block, 448 or 256 */
} te_quantizer;

/* One stored copy. Data are bytes, for E2M1 two elements each with the even one in the low half. */
typedef struct te_quantized_side {
    uint8_t *data;                  /* NULL: not wanted */
    int64_t rows, cols;             /* of the stored matrix; cols a multiple of 16 under the transform */
    int64_t row_stride, col_stride; /* bytes; E2M1: col_stride is 1 and counts elements */
    void *scale_inv;
    int64_t scale_row_stride, scale_col_stride; /* elements, per block */
    float *amax;                                /* NULL: none */
    int64_t amax_stride;                        /* 1: one per row */
    te_rng rng; /* stochastic: element k of group g of 16 takes byte k of counter offset + g */
    int64_t line_groups; /* on devices: groups from row to row, of a part of a side; 0: those of its columns */
} te_quantized_side;

/* Where factors follow from the whole tensor (te_quantizer_measures) it is looked at before any of it is converted. The
 * two steps may be jobs apart, over the same source or over parts of it:
 *
 *      MEASURE   raises amaxes[0] to the amax of the source, amaxes[1] to that of what side 1 sees; on a device an
 *                amax per row as well. Nothing else is written
 *      CONVERT   takes these for the amaxes of the whole
 *
 * Who must not fail half-way asks for a job of the same shape before:
 *
 *      PREPARE   takes what BOTH or CONVERT need beside the job and gives it back, to be found again; reads and writes
 *                nothing
 */
typedef enum te_quantize_step {
    TE_QUANTIZE_BOTH,
    TE_QUANTIZE_MEASURE,
    TE_QUANTIZE_CONVERT,
    TE_QUANTIZE_PREPARE,
} te_quantize_step;

struct te_quantize_job {
    const te_quantizer *quantizer;
    void *source; /* rows x cols of float32, bfloat16 or float16; written by dequantize */
    te_dtype dtype;
    int64_t rows, cols, source_stride; /* elements from row to row; those of a row follow one another */
    float scale;                       /* needs_history: the factor … */
    const float *given;                /* … or where it lies, in device memory; where memory is the host's, NULL */
    float *seen;                       /* likewise: raised to the amax of the source; NULL: not wanted */
    te_quantize_step step;
    float *amaxes; /* of MEASURE and CONVERT, two, in device memory */
    /* On devices, so that nobody waits to learn that nothing has changed: {the factor that the bytes were made with,
     * whether this job makes them, the kernels' own}; the first job has `force` or `stale`, and with neither the source
     * is what it was. A job whose factor is that one leaves its sides as they are, unless `force`, or
     * *stale is not 0. NULL: every job makes them. */
    float *kept;
    const float *stale;
    bool force;
    te_quantized_side side[2];
};

/* Whether a factor follows from the amax of the tensor itself. */
static inline bool te_quantizer_measures(const te_quantizer *q)
{
    return q->scale == TE_SCALE_E4M3 || (!q->block_rows && !q->needs_history);
}

/* te_backend.quantize fills data, factors and amaxes of the wanted sides; amaxes of one per tensor are those of both.
 * te_backend.dequantize fills the source from one side. */

/* A side as the operand of a product, or its transpose: the view and, in *quant, what its bytes stand for. */
te_view te_quantized_view(const te_quantizer *quantizer, const te_quantized_side *side, bool transposed,
                          te_quant *quant);

/* Row-major groups of 16 of a side: how many counters stochastic rounding takes. */
static inline uint64_t te_quantize_groups(const te_quantized_side *s)
{
    return (uint64_t)s->rows * (uint64_t)((s->cols + 15) / 16);
}

#endif
