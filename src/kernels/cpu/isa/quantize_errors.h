/* quantize_errors.h - what E2M1 under a factor does to the values of lines, for quantize_blocks.c.
 *
 * A code has sixteen values, so what is taken from a value is looked up in a table per factor, which has the one division. Sums
 * go from left to right along each line: sixteen lines are turned, and added as vectors.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_ERRORS_H
#define TE_KERNELS_CPU_QUANTIZE_ERRORS_H

#include "kernels/cpu/quantize_blocks.h"
#include "kernels/cpu/transpose.h"
#include "quantize_vectors.h"

/* The value of the code of x: the same sum as in te_code, and the power of two taken away again. */
TE_INLINE float te_round_to_e2m1(float x)
{
    uint32_t bits = te_f32_bits(x), size = bits & 0x7fffffffu, most = size < 0x40c00000u ? size : 0x40c00000u;
    uint32_t exponent = most & 0x7f800000u;
    float unit = te_f32_from_bits((exponent > 0x3f800000u ? exponent : 0x3f800000u) + (22u << 23));
    float rounded = (te_f32_from_bits(most) + unit) - unit;
    return te_f32_from_bits(te_f32_bits(rounded) | (size > 0x7f800000u ? 0u : bits & 0x80000000u));
}

TE_INLINE float te_line_error(const te_error_rule *r, int line, const float *restrict x, int n)
{
    const float multiplier = r->multipliers[line], factor = r->factors[line], amax = r->amax, most = r->most;
    float e[128], sum = 0;
    for (int j = 0; j < n; j++) e[j] = te_round_to_e2m1(x[j] * multiplier) * factor * amax / most - x[j];
    for (int j = 0; j < n && r->squared; j++) e[j] *= e[j];
    for (int j = 0; j < n && !r->squared; j++) e[j] = te_f32_from_bits(te_f32_bits(e[j]) & 0x7fffffffu);
    for (int j = 0; j < n; j++) sum += e[j];
    return sum;
}

#if defined(TE_ISA_avx512)
/* What the codes of a line stand for; NaN has the code of the largest one. */
TE_INLINE __m512 te_line_table(const te_error_rule *r, int line)
{
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(values, _mm512_set1_ps(r->factors[line])), _mm512_set1_ps(r->amax));
    return _mm512_div_ps(scaled, _mm512_set1_ps(r->most));
}

TE_INLINE __m512 te_errors_16(__m512 x, __m512 multiplier, __m512 table, bool squared)
{
    __m512i bits = _mm512_castps_si512(_mm512_mul_ps(x, multiplier));
    __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i code = te_sums(_mm512_castsi512_ps(size), te_wide_form_of(TE_E2M1_CODE));
    __mmask16 numbers = _mm512_cmple_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
    code = _mm512_and_si512(code, _mm512_set1_epi32(7));
    code = _mm512_mask_or_epi32(code, numbers, code, _mm512_and_si512(_mm512_srli_epi32(bits, 28), _mm512_set1_epi32(8)));
    __m512 error = _mm512_sub_ps(_mm512_permutexvar_ps(code, table), x);
    return squared ? _mm512_mul_ps(error, error) : _mm512_abs_ps(error);
}

/* Sixteen lines of sixteen. */
TE_INLINE void te_square_errors(float *sums, const te_error_rule *r, const float *x, int64_t stride)
{
    _Alignas(64) float errors[16][16], turned[16][16];
    __m512 table = te_line_table(r, 0), sum = _mm512_setzero_ps();
    for (int i = 0; i < 16; i++, x += stride) {
        if (i && r->factors[i] != r->factors[i - 1]) table = te_line_table(r, i);
        __m512 multiplier = _mm512_set1_ps(r->multipliers[i]);
        _mm512_store_ps(errors[i], te_errors_16(_mm512_loadu_ps(x), multiplier, table, r->squared));
    }
    te_transpose_block(turned[0], 16, errors[0], 16);
    for (int j = 0; j < 16; j++) sum = _mm512_add_ps(sum, _mm512_load_ps(turned[j]));
    _mm512_storeu_ps(sums, sum);
}
#endif

static void errors_across(float sums[2][TE_GROUP], const te_error_rule rules[2], const float *x, int64_t stride, int n)
{
#if defined(TE_ISA_avx512)
    __m512 table[2], sum[2], multiplier[2];
    for (int k = 0; k < 2; k++) {
        table[k] = te_line_table(&rules[k], 0);
        multiplier[k] = _mm512_set1_ps(rules[k].multipliers[0]);
        sum[k] = _mm512_setzero_ps();
    }
    for (int j = 0; j < n; j++, x += stride)
        for (int k = 0; k < 2; k++)
            sum[k] = _mm512_add_ps(sum[k], te_errors_16(_mm512_loadu_ps(x), multiplier[k], table[k], rules[k].squared));
    for (int k = 0; k < 2; k++) _mm512_storeu_ps(sums[k], sum[k]);
#else
    float line[128];
    for (int i = 0; i < TE_GROUP; i++) {
        for (int j = 0; j < n; j++) line[j] = x[j * stride + i];
        for (int k = 0; k < 2; k++) sums[k][i] = te_line_error(&rules[k], 0, line, n);
    }
#endif
}

static void errors(float *sums, const te_error_rule *rule, const float *x, int64_t stride, int lines, int n)
{
#if defined(TE_ISA_avx512)
    if (lines == 16 && n == 16) {
        te_square_errors(sums, rule, x, stride);
        return;
    }
#endif
    for (int i = 0; i < lines; i++) sums[i] = te_line_error(rule, i, x + i * stride, n);
}

#endif
