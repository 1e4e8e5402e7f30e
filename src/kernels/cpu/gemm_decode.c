/* gemm_decode.c - decoding row by row. */
#include "gemm_decode.h"

#include <string.h>

enum { ROWS_AT_ONCE = 16, PARALLEL_FROM = 16 << 10 };

te_gemm_packed_id te_decode_id(const te_decode *d, uint64_t key)
{
    te_gemm_packed_id id = {.key = key};
    int64_t form[15] = {(int64_t)(intptr_t)d->data,
                        (int64_t)(intptr_t)d->factors,
                        (int64_t)(intptr_t)d->amax,
                        d->element,
                        d->scale,
                        d->dtype,
                        d->rows,
                        d->cols,
                        d->row_stride,
                        d->col_stride,
                        d->block_rows,
                        d->block_cols,
                        d->factor_row_stride,
                        d->factor_col_stride,
                        te_f32_bits(d->times)};
    memcpy(id.form, form, sizeof form);
    return id;
}

static float element_at(const te_decode *d, int64_t at)
{
    if (d->element == TE_E2M1) return te_e2m1_to_f32((uint8_t)(d->data[at / 2] >> at % 2 * 4 & 15));
    return d->element == TE_E4M3 ? te_f8e4m3_to_f32(d->data[at]) : te_f8e5m2_to_f32(d->data[at]);
}

static float factor_at(const te_decode *d, int64_t row, int64_t col)
{
    if (!d->block_rows) return 1;
    int64_t at = row / d->block_rows * d->factor_row_stride + col / d->block_cols * d->factor_col_stride;
    if (d->scale == TE_SCALE_F32) return ((const float *)d->factors)[at];
    uint8_t code = ((const uint8_t *)d->factors)[at];
    return d->scale == TE_SCALE_E8M0 ? te_e8m0_to_f32(code) : te_f8e4m3_to_f32(code);
}

/* Elements times factors are exact in float32 unless the factors are arbitrary; then this rounds once, as the factor of
 * a row or of the tensor does where it stands beside factors that are not. */
static float value_at(const te_decode *d, int64_t row, int64_t col)
{
    float x = element_at(d, row * d->row_stride + col * d->col_stride) * factor_at(d, row, col);
    if (d->amax)
        x *= te_two_level_decode(d->amax[row * d->amax_row_stride + col * d->amax_col_stride], d->scale_max);
    return d->times == 1 ? x : x * d->times;
}

/* Whether bfloat16 holds x as a normal number, 0, infinity or NaN. */
static bool is_narrow(float x)
{
    uint32_t u = te_f32_bits(x), size = u & 0x7fffffffu;
    return (u & 0xffffu) == 0 && (size == 0 || size >= 0x800000u);
}

static bool decode_row(const te_decode *d, int64_t row)
{
    bool good = true;
    if (d->dtype == TE_F32) {
        float *to = (float *)d->to + row * d->cols;
        for (int64_t j = 0; j < d->cols; j++) to[j] = value_at(d, row, j);
        return true;
    }
    uint16_t *to = (uint16_t *)d->to + row * d->cols;
    for (int64_t j = 0; j < d->cols; j++) {
        float x = value_at(d, row, j);
        good &= is_narrow(x);
        to[j] = (uint16_t)(te_f32_bits(x) >> 16);
    }
    return good;
}

bool te_decode_run(te_exec *exec, const te_decode *d)
{
    int bad = 0, threads = exec->threads;
    if (threads < 1 || d->rows * d->cols < PARALLEL_FROM) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, ROWS_AT_ONCE) reduction(| : bad) if (threads > 1)
    for (int64_t i = 0; i < d->rows; i++) bad |= !decode_row(d, i);
    return !bad;
}
