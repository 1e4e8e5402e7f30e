/* gemm_finish.c - what happens to a tile of sums on its way out: scale, bias, accumulation, rounding.
 *
 * A row at a time, in a buffer that never leaves the first-level cache. Loops are over whole arrays of a constant
 * number of elements where that lets them vectorize; the elements beyond `cols` are computed and not stored.
 */
#include "../../dtype.h"
#include "../gemm.h"
#include "halves.h"

#include <string.h>

enum { MAX_COLS = 64 };

/* A few lines from each of some rows: no pattern that hardware foresees. They are asked for as lines to write, where
 * the instruction set can say so; as lines to read they would be asked for again when they are written. */
void TE_ISA_NAME(te_gemm_fetch)(const te_gemm_matrix *c, int64_t row, int64_t col, int rows, int cols)
{
    if (c->cs != 1) return;
    for (int i = 0; i < rows; i++) {
        const char *line = te_gemm_element(c, row + i, col), *last = te_gemm_element(c, row + i, col + cols - 1);
        for (; line < last; line += 64) __builtin_prefetch(line, 1);
        __builtin_prefetch(last, 1);
    }
}

/* --- rows of matrices of any type and stride ---------------------------------------------------------------------- */

static void store_row_f32(const te_gemm_matrix *m, int64_t row, int64_t col, const float *x, int cols)
{
    char *p = te_gemm_element(m, row, col);
    if (m->dtype == TE_F32) {
        if (m->cs == 1) memcpy(p, x, cols * sizeof *x);
        else
            for (int j = 0; j < cols; j++) ((float *)p)[j * m->cs] = x[j];
        return;
    }
    uint16_t half[MAX_COLS], *out = (uint16_t *)p;
    if (m->dtype == TE_BF16)
        for (int j = 0; j < MAX_COLS; j++) half[j] = te_f32_to_bf16(x[j]);
    else if (!te_narrow_to_halves(half, x, MAX_COLS)) /* all or none */
        for (int j = 0; j < MAX_COLS; j++) half[j] = te_f32_to_f16(x[j]);
    if (m->cs == 1) memcpy(p, half, cols * sizeof *half);
    else
        for (int j = 0; j < cols; j++) out[j * m->cs] = half[j];
}

static void load_row_f32(const te_gemm_matrix *m, int64_t row, int64_t col, float *x, int cols)
{
    const char *p = te_gemm_element(m, row, col);
    if (m->dtype == TE_F32) {
        if (m->cs == 1) memcpy(x, p, cols * sizeof *x);
        else
            for (int j = 0; j < cols; j++) x[j] = ((const float *)p)[j * m->cs];
        return;
    }
    uint16_t half[MAX_COLS] = {0};
    const uint16_t *in = (const uint16_t *)p;
    if (m->cs == 1) memcpy(half, p, cols * sizeof *half);
    else
        for (int j = 0; j < cols; j++) half[j] = in[j * m->cs];
    if (m->dtype == TE_BF16)
        for (int j = 0; j < MAX_COLS; j++) x[j] = te_bf16_to_f32(half[j]);
    else if (!te_widen_halves(x, half, MAX_COLS))
        for (int j = 0; j < MAX_COLS; j++) x[j] = te_f16_to_f32(half[j]);
}

/* --- float32 sums ------------------------------------------------------------------------------------------------- */

static void finish_row_f32(const te_gemm_finish *f, const float *sums, int64_t row, int64_t col, int cols)
{
    float x[MAX_COLS] = {0}, old[MAX_COLS];
    const float *bias = f->bias;
    memcpy(x, sums, cols * sizeof *x);
    if (f->alpha != 1)
        for (int j = 0; j < MAX_COLS; j++) x[j] *= f->alpha;
    if (bias)
        for (int j = 0; j < cols; j++) x[j] += f->bias_by_row ? bias[row] : bias[col + j];
    if (f->accumulate) {
        load_row_f32(&f->c, row, col, old, cols);
        for (int j = 0; j < cols; j++) x[j] += old[j];
    }
    store_row_f32(&f->c, row, col, x, cols);
}

/* The most frequent finish: the sums as they are, or with a bias per column, stored or added, in contiguous rows. */
static bool is_plain(const te_gemm_finish *f)
{
    return f->alpha == 1 && !(f->bias && f->bias_by_row) && f->c.cs == 1 && f->c.dtype != TE_F16 &&
           !(f->accumulate && f->c.dtype != TE_F32);
}

static inline __attribute__((always_inline)) void finish_plain(const te_gemm_finish *f, const float *restrict sums,
                                                               const float *restrict bias, void *restrict c, int cols)
{
    float *restrict wide = c;
    uint16_t *restrict half = c;
    if (bias && f->c.dtype == TE_BF16)
        for (int j = 0; j < cols; j++) half[j] = te_f32_to_bf16(sums[j] + bias[j]);
    else if (bias && f->accumulate)
        for (int j = 0; j < cols; j++) wide[j] += sums[j] + bias[j];
    else if (bias)
        for (int j = 0; j < cols; j++) wide[j] = sums[j] + bias[j];
    else if (f->c.dtype == TE_BF16)
        for (int j = 0; j < cols; j++) half[j] = te_f32_to_bf16(sums[j]);
    else if (f->accumulate)
        for (int j = 0; j < cols; j++) wide[j] += sums[j];
    else
        for (int j = 0; j < cols; j++) wide[j] = sums[j];
}

static void finish_row_plain(const te_gemm_finish *f, const float *sums, int64_t row, int64_t col, int cols)
{
    enum { RUN = 48 }; /* a panel of AVX-512; loops of a known length that are not unrolled whole become vectors */
    const float *bias = f->bias ? (const float *)f->bias + col : NULL;
    int j = 0;
    for (; j + RUN <= cols; j += RUN)
        finish_plain(f, sums + j, bias ? bias + j : NULL, te_gemm_element(&f->c, row, col + j), RUN);
    finish_plain(f, sums + j, bias ? bias + j : NULL, te_gemm_element(&f->c, row, col + j), cols - j);
}

void TE_ISA_NAME(te_gemm_finish_f32)(const te_gemm_finish *f, const void *sums, int nr, int64_t row, int64_t col,
                                     int rows, int cols)
{
    if (is_plain(f))
        for (int i = 0; i < rows; i++) finish_row_plain(f, (const float *)sums + i * nr, row + i, col, cols);
    else
        for (int i = 0; i < rows; i++) finish_row_f32(f, (const float *)sums + i * nr, row + i, col, cols);
}

/* --- float64 sums: for reference and gradient checks, so plain ---------------------------------------------------- */

void TE_ISA_NAME(te_gemm_finish_f64)(const te_gemm_finish *f, const void *sums, int nr, int64_t row, int64_t col,
                                     int rows, int cols)
{
    const double *bias = f->bias;
    for (int64_t i = row; i < row + rows; i++)
        for (int64_t j = col; j < col + cols; j++) {
            double x = f->alpha * ((const double *)sums)[(i - row) * nr + j - col];
            char *c = te_gemm_element(&f->c, i, j);
            if (bias) x += f->bias_by_row ? bias[i] : bias[j];
            if (f->accumulate) x += te_load_f64(c, f->c.dtype, 0);
            te_store_f64(c, f->c.dtype, 0, x);
        }
}
