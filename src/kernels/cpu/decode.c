/* decode.c - decoding run by run, through values in the first-level cache. */
#include "decode.h"
#include "workers.h"

#include <string.h>

enum { ROWS_AT_ONCE = 16, PARALLEL_FROM = 16 << 10 };

float te_decode_tensor_factor(const te_view *v)
{
    const te_quant *q = v->quant;
    if (!q) return 1;
    if (q->scale == TE_SCALE_E4M3 && q->amax_stride[0] == 0 && q->amax_stride[1] == 0)
        return te_two_level_decode(*q->amax, q->scale_max);
    return q->scale == TE_SCALE_F32 && q->block[0] == 0 ? *(const float *)q->scale_inv : 1;
}

te_decode te_decode_of(const te_view *v, bool *across)
{
    const te_quant *q = v->quant;
    int d = v->ndim, row = 0, col = 1;
    *across = v->stride[d - 1] != 1 && v->stride[d - 2] == 1;
    if (*across) row = 1, col = 0;
    return (te_decode){.element = q->element,
                       .scale = q->scale,
                       .data = v->data,
                       .rows = v->shape[d - 2 + row],
                       .cols = v->shape[d - 2 + col],
                       .row_stride = v->stride[d - 2 + row],
                       .col_stride = v->stride[d - 2 + col],
                       .factors = q->scale_inv,
                       .block_rows = q->block[row],
                       .block_cols = q->block[col],
                       .factor_row_stride = q->scale_stride[row],
                       .factor_col_stride = q->scale_stride[col],
                       .amax = q->amax_stride[0] || q->amax_stride[1] ? q->amax : NULL,
                       .amax_row_stride = q->amax_stride[row],
                       .amax_col_stride = q->amax_stride[col],
                       .scale_max = q->scale_max,
                       .times = 1};
}

/* Codes, a byte each: as they are stored, or in `room`. */
static const uint8_t *codes_of(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int64_t col, int n,
                               uint8_t *room)
{
    int64_t at = row * d->row_stride + col * d->col_stride;
    if (d->element == TE_E2M1) {
        blocks->unpack_along(room, d->data + at / 2, n + n % 2);
        return room;
    }
    if (d->col_stride == 1) return d->data + at;
    for (int j = 0; j < n; j++) room[j] = d->data[at + j * d->col_stride];
    return room;
}

/* Factors of n blocks from `at` on. */
static void factors_of(const te_quantize_blocks *blocks, const te_decode *d, int64_t at, int n, float *factors)
{
    uint8_t codes[TE_DECODE_RUN];
    int64_t step = d->factor_col_stride;
    if (d->scale == TE_SCALE_F32) {
        for (int i = 0; i < n; i++) factors[i] = ((const float *)d->factors)[at + i * step];
        return;
    }
    const uint8_t *stored = (const uint8_t *)d->factors + at;
    for (int i = 0; i < n && step != 1; i++) codes[i] = stored[i * step];
    blocks->factor_values(factors, step == 1 ? stored : codes, d->scale, n);
}

void te_decode_factors(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int n, float *factors)
{
    factors_of(blocks, d, row / d->block_rows * d->factor_row_stride, n, factors);
}

/* Factors of n elements of a row; the size of a block. */
static int64_t factors_of_row(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int64_t col, int n,
                              float *factors)
{
    int64_t block = d->block_rows ? d->block_cols : n;
    factors[0] = d->times;
    if (d->block_rows) {
        int64_t at = row / d->block_rows * d->factor_row_stride + col / block * d->factor_col_stride;
        factors_of(blocks, d, at, (int)((n + block - 1) / block), factors);
    }
    return block;
}

void te_decode_row(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int64_t col, int n,
                   float *values)
{
    uint8_t room[TE_DECODE_RUN];
    float factors[TE_DECODE_RUN];
    const uint8_t *codes = codes_of(blocks, d, row, col, n, room);
    int64_t block = factors_of_row(blocks, d, row, col, n, factors);
    if (block == 1)
        blocks->decode_down[d->element](values, codes, factors, n);
    else
        blocks->decode_along[d->element](values, codes, factors, n, block);
    if (d->amax && d->amax_col_stride == 0) {
        float factor = te_two_level_decode(d->amax[row * d->amax_row_stride], d->scale_max);
        blocks->multiply(values, factor, n);
    }
    for (int j = 0; j < n && d->amax && d->amax_col_stride; j++)
        values[j] *= te_two_level_decode(d->amax[(col + j) * d->amax_col_stride], d->scale_max);
    if (d->times != 1 && d->block_rows) blocks->multiply(values, d->times, n);
}

bool te_decode_run(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int64_t col, int n,
                   te_dtype dtype, void *to, bool past)
{
    float factors[TE_DECODE_RUN], times = d->block_rows ? d->times : 1;
    if (!blocks->decode_to[d->element] || d->col_stride != 1 || (d->amax && d->amax_col_stride)) return false;
    if (n > TE_DECODE_RUN && d->block_rows && n > TE_DECODE_RUN * d->block_cols) return false;
    int64_t at = row * d->row_stride + col, block = factors_of_row(blocks, d, row, col, n, factors);
    if (d->amax) {
        if (times != 1) return false;
        times = te_two_level_decode(d->amax[row * d->amax_row_stride], d->scale_max);
    }
    const uint8_t *stored = d->data + (d->element == TE_E2M1 ? at / 2 : at);
    return blocks->decode_to[d->element](to, dtype, stored, factors, n, block, times, past);
}

/* n elements to bfloat16, which holds what is written if true comes back. */
static bool decode_narrow(const te_quantize_blocks *blocks, const te_decode *d, int64_t row, int64_t col, int n,
                          uint16_t *to)
{
    float values[TE_DECODE_RUN];
    if (blocks->narrow_along[d->element] && !d->amax && (d->times == 1 || !d->block_rows)) {
        uint8_t room[TE_DECODE_RUN];
        const uint8_t *codes = codes_of(blocks, d, row, col, n, room);
        int64_t block = factors_of_row(blocks, d, row, col, n, values);
        if (blocks->narrow_along[d->element](to, codes, values, n, block)) return true;
    }
    te_decode_row(blocks, d, row, col, n, values);
    return blocks->narrow(to, values, n);
}

static bool decode_to(const te_quantize_blocks *blocks, const te_decode *d, te_dtype dtype, void *to, int64_t row)
{
    bool good = true;
    for (int64_t col = 0; col < d->cols; col += TE_DECODE_RUN) {
        int n = (int)(d->cols - col < TE_DECODE_RUN ? d->cols - col : TE_DECODE_RUN);
        if (dtype == TE_F32)
            te_decode_row(blocks, d, row, col, n, (float *)to + row * d->cols + col);
        else
            good &= decode_narrow(blocks, d, row, col, n, (uint16_t *)to + row * d->cols + col);
    }
    return good;
}

typedef struct decode_job {
    te_exec                  *exec;
    const te_quantize_blocks *blocks;
    const te_decode          *d;
    te_dtype                  dtype;
    void                     *to;
    atomic_int                bad; /* a row has values that dtype does not hold */
} decode_job;

static void decode_lines(void *context, int64_t first, int64_t end, int thread)
{
    decode_job *job = context;
    (void)thread;
    for (int64_t i = first; i < end && (i % ROWS_AT_ONCE != 0 || !te_cpu_stopping(job->exec)); i++)
        if (!decode_to(job->blocks, job->d, job->dtype, job->to, i)) atomic_store(&job->bad, 1);
}

bool te_decode_matrix(te_exec *exec, const te_decode *d, te_dtype dtype, void *to)
{
    decode_job job = {.exec = exec, .blocks = te_quantize_blocks_of(exec), .d = d, .dtype = dtype, .to = to};
    int threads = exec->threads;
    if (threads < 1 || d->rows * d->cols < PARALLEL_FROM) threads = 1;
    te_cpu_loop(exec, threads, d->rows, ROWS_AT_ONCE, decode_lines, &job);
    return !atomic_load(&job.bad);
}
