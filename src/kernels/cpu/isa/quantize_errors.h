/* quantize_errors.h - what E2M1 under a factor does to the values of lines, for quantize_blocks.c.
 *
 * A code has sixteen values, so what is taken from a value is looked up in a table per factor, which has the one
 * division. Sums go from left to right along each line: sixteen lines are turned, and added as vectors.
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
    code = _mm512_mask_or_epi32(code, numbers, code,
                                _mm512_and_si512(_mm512_srli_epi32(bits, 28), _mm512_set1_epi32(8)));
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
#elif defined(TE_ISA_avx2)
#include <immintrin.h>

/* What the codes of a line without their signs stand for. */
TE_INLINE __m256 te_line_table(const te_error_rule *r, int line)
{
    const __m256 values = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(values, _mm256_set1_ps(r->factors[line])), _mm256_set1_ps(r->amax));
    return _mm256_div_ps(scaled, _mm256_set1_ps(r->most));
}

/* Codes as in te_code; a permutation looks at their low three bits alone. */
TE_INLINE __m256 te_errors_8(__m256 x, __m256 multiplier, __m256 table, bool squared)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), infinite = _mm256_set1_epi32(0x7f800000);
    const __m256i smallest = _mm256_set1_epi32(0x3f800000);
    __m256i bits = _mm256_castps_si256(_mm256_mul_ps(x, multiplier)), size = _mm256_and_si256(bits, magnitude);
    __m256i most = _mm256_min_epi32(size, _mm256_set1_epi32(0x40c00000));
    __m256i exponent = _mm256_max_epi32(_mm256_and_si256(most, infinite), smallest);
    __m256i unit = _mm256_add_epi32(exponent, _mm256_set1_epi32(22 << 23));
    __m256i places = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(most), _mm256_castsi256_ps(unit)));
    __m256i code = _mm256_add_epi32(places, _mm256_srli_epi32(_mm256_sub_epi32(exponent, smallest), 22));
    __m256i sign = _mm256_andnot_si256(_mm256_cmpgt_epi32(size, infinite), _mm256_andnot_si256(magnitude, bits));
    __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(table, code), _mm256_castsi256_ps(sign));
    __m256 error = _mm256_sub_ps(value, x);
    return squared ? _mm256_mul_ps(error, error) : _mm256_and_ps(error, _mm256_castsi256_ps(magnitude));
}

/* Eight lines of sixteen. */
TE_INLINE void te_square_errors(float *sums, const te_error_rule *r, int first, const float *x, int64_t stride)
{
    float errors[8][16], turned[16][8];
    __m256 table = te_line_table(r, first), sum = _mm256_setzero_ps();
    for (int i = 0; i < 8; i++, x += stride) {
        int line = first + i;
        if (i && r->factors[line] != r->factors[line - 1]) table = te_line_table(r, line);
        __m256 multiplier = _mm256_set1_ps(r->multipliers[line]);
        for (int j = 0; j < 16; j += 8)
            _mm256_storeu_ps(errors[i] + j, te_errors_8(_mm256_loadu_ps(x + j), multiplier, table, r->squared));
    }
    for (int j = 0; j < 16; j += 8) te_transpose_block(turned[j], 8, errors[0] + j, 16);
    for (int j = 0; j < 16; j++) sum = _mm256_add_ps(sum, _mm256_loadu_ps(turned[j]));
    _mm256_storeu_ps(sums + first, sum);
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
#elif defined(TE_ISA_avx2)
    for (int k = 0; k < 2; k++) {
        const __m256 table = te_line_table(&rules[k], 0), multiplier = _mm256_set1_ps(rules[k].multipliers[0]);
        __m256 low = _mm256_setzero_ps(), high = low;
        for (int j = 0; j < n; j++) {
            const float *of = x + j * stride;
            low = _mm256_add_ps(low, te_errors_8(_mm256_loadu_ps(of), multiplier, table, rules[k].squared));
            high = _mm256_add_ps(high, te_errors_8(_mm256_loadu_ps(of + 8), multiplier, table, rules[k].squared));
        }
        _mm256_storeu_ps(sums[k], low);
        _mm256_storeu_ps(sums[k] + 8, high);
    }
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
#elif defined(TE_ISA_avx2)
    if (lines == 16 && n == 16) {
        for (int first = 0; first < 16; first += 8) te_square_errors(sums, rule, first, x + first * stride, stride);
        return;
    }
#endif
    for (int i = 0; i < lines; i++) sums[i] = te_line_error(rule, i, x + i * stride, n);
}

/* --- about the errors of many blocks ------------------------------------------------------------------------------ */

#if defined(TE_ISA_avx512)
/* Magnitudes of a line of two blocks side by side: those of the first in the lower halves of both vectors. */
TE_INLINE void te_pair_sizes_bf16(__m512 v[2], const uint16_t *x)
{
    __m512i size = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
    v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(size, 16));
    v[1] = _mm512_castsi512_ps(_mm512_and_si512(size, _mm512_set1_epi32((int)0xffff0000u)));
}

TE_INLINE void te_pair_sizes_f32(__m512 v[2], const float *x)
{
    __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    v[0] = _mm512_abs_ps(_mm512_shuffle_f32x4(a, b, 0x44));
    v[1] = _mm512_abs_ps(_mm512_shuffle_f32x4(a, b, 0xee));
}

/* The distance of sixteen products, four times over, from the nearest number: the sum with 2^23, rounded down, ends in
 * their quarters, and these know the number. */
TE_INLINE __m512 te_distances(__m512 x, __m512 multipliers)
{
    const __m512 low = _mm512_setr_ps(0, 2, 2, 4, 4, 6, 6, 8, 8, 8, 12, 12, 12, 12, 16, 16);
    const __m512 high = _mm512_setr_ps(16, 16, 16, 16, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24, 24);
    __m512 quarters = _mm512_fmadd_round_ps(x, multipliers, _mm512_set1_ps(0x1p23f),
                                            _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return _mm512_fmsub_ps(x, multipliers, _mm512_permutex2var_ps(low, _mm512_castps_si512(quarters), high));
}

/* Sums of the lower half and of the upper one of either vector, to blocks b and b + 1. */
TE_INLINE void te_put_halves(float *const sums[2], int b, __m512 first, __m512 second)
{
    __m512 by_two = _mm512_add_ps(_mm512_unpacklo_ps(first, second), _mm512_unpackhi_ps(first, second));
    __m512 quarters = _mm512_add_ps(by_two, _mm512_permute_ps(by_two, 0x4e));
    __m512 halves = _mm512_add_ps(quarters, _mm512_shuffle_f32x4(quarters, quarters, 0xb1));
    __m128 low = _mm512_castps512_ps128(halves), high = _mm512_extractf32x4_ps(halves, 2);
    _mm_store_ss(&sums[0][b], low);
    _mm_store_ss(&sums[0][b + 1], high);
    _mm_store_ss(&sums[1][b], _mm_movehdup_ps(low));
    _mm_store_ss(&sums[1][b + 1], _mm_movehdup_ps(high));
}

/* What were distances of products, four times over, or their squares, as errors. */
TE_INLINE void te_distances_to_errors(float *restrict sums, const te_error_rule *r, int blocks)
{
    const float *factors = r->factors, amax = r->amax, most = r->most;
    const bool squared = r->squared;
    for (int b = 0; b < blocks; b++) {
        float unit = factors[b] * amax / most * 0.25f;
        sums[b] = sums[b] * unit * (squared ? unit : 1);
    }
}

#define TE_DEFINE_ERRORS_ABOUT(dtype, type)                                                                            \
    TE_INLINE void te_errors_of_pair_##dtype(__m512 sum[4], const __m512 m[2], const type *x, int64_t stride,          \
                                             bool squared)                                                             \
    {                                                                                                                  \
        _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) sum[k] = _mm512_setzero_ps();                              \
        for (int i = 0; i < TE_GROUP; i++, x += stride) {                                                              \
            __m512 v[2];                                                                                               \
            te_pair_sizes_##dtype(v, x);                                                                               \
            _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) /* a sum for each, which wait for nothing else */      \
            {                                                                                                          \
                __m512 d = te_distances(v[k / 2], m[k % 2]);                                                           \
                sum[k] = squared ? _mm512_fmadd_ps(d, d, sum[k]) : _mm512_add_ps(sum[k], _mm512_abs_ps(d));            \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void errors_about_##dtype(float *const sums[2], const te_error_rule rules[2], const void *data,             \
                                     int64_t stride, int blocks)                                                       \
    {                                                                                                                  \
        const type *x = data;                                                                                          \
        for (int b = 0; b < blocks; b += 2, x += 2 * TE_GROUP) {                                                       \
            __m512 m[2], sum[4];                                                                                       \
            for (int k = 0; k < 2; k++) {                                                                              \
                const float *of = rules[k].multipliers + b;                                                            \
                m[k] = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(4 * of[0]), _mm512_set1_ps(4 * of[1]));             \
            }                                                                                                          \
            if (rules[0].squared)                                                                                      \
                te_errors_of_pair_##dtype(sum, m, x, stride, true);                                                    \
            else                                                                                                       \
                te_errors_of_pair_##dtype(sum, m, x, stride, false);                                                   \
            te_put_halves(sums, b, _mm512_add_ps(sum[0], sum[2]), _mm512_add_ps(sum[1], sum[3]));                      \
        }                                                                                                              \
        for (int k = 0; k < 2; k++) te_distances_to_errors(sums[k], &rules[k], blocks);                                \
    }

TE_DEFINE_ERRORS_ABOUT(f32, float)
TE_DEFINE_ERRORS_ABOUT(bf16, uint16_t)
#else
#define errors_about_f32  NULL
#define errors_about_bf16 NULL
#endif

#define errors_about_f16 NULL

#endif
