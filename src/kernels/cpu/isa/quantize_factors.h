/* quantize_factors.h - factors of sixteen blocks at a time, for quantize_blocks.c.
 *
 * Exponents and E4M3 factors are a few instructions on vectors, where compilers leave loops that go one by one.
 * Functions say how many factors they have done. No amax is a NaN.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_FACTORS_H
#define TE_KERNELS_CPU_QUANTIZE_FACTORS_H

#include "kernels/cpu/quantize_blocks.h"
#include "quantize_vectors.h"

#if defined(TE_ISA_avx512)

/* Sixteen factors as they are stored, in words, and what elements are multiplied by. */
typedef struct te_factors_16 {
    __m512i stored;
    __m512  multipliers;
} te_factors_16;

/* As te_scale_from_amax, and its inverse. */
TE_INLINE te_factors_16 te_wide_16(__m512 amax, const te_factor_rule *r)
{
    const __m512 one = _mm512_set1_ps(1), most = _mm512_set1_ps(TE_FLT_MAX), epsilon = _mm512_set1_ps(r->epsilon);
    amax = _mm512_mask_mov_ps(amax, _mm512_cmp_ps_mask(amax, epsilon, _CMP_LT_OQ), epsilon);
    __mmask16 good = _mm512_cmp_ps_mask(amax, _mm512_setzero_ps(), _CMP_GT_OQ);
    good = _mm512_mask_cmp_ps_mask(good, amax, most, _CMP_LE_OQ);
    __m512 scale = _mm512_div_ps(_mm512_set1_ps(r->max), amax);
    scale = _mm512_mask_mov_ps(scale, _mm512_cmp_ps_mask(scale, most, _CMP_GT_OQ), _mm512_set1_ps(r->overflow));
    __m512i kept = _mm512_set1_epi32(r->power_of_two ? (int)0xff800000u : -1);
    scale = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(scale), kept));
    scale = _mm512_mask_mov_ps(one, good, scale);
    return (te_factors_16){_mm512_castps_si512(_mm512_div_ps(one, scale)), scale};
}

/* The same where factors are powers of two: of amaxes that are neither very small nor very large, nor 0, by whole
 * numbers alone. */
TE_INLINE te_factors_16 te_wide_powers_16(__m512 amax, const te_factor_rule *r)
{
    enum { ONE = 127 << 23, LOW = 32 << 23, SPAN = 192 << 23 };
    __m512i bits = _mm512_castps_si512(_mm512_max_ps(amax, _mm512_set1_ps(r->epsilon)));
    __m512i above = _mm512_sub_epi32(bits, _mm512_set1_epi32(LOW));
    if (__builtin_expect(_mm512_cmpgt_epu32_mask(above, _mm512_set1_epi32(SPAN)), 0)) return te_wide_16(amax, r);
    __m512i power = _mm512_sub_epi32(_mm512_set1_epi32((int)te_f32_bits(r->max)), bits);
    power = _mm512_and_si512(power, _mm512_set1_epi32((int)0xff800000u)); /* a mantissa that is too large borrows */
    return (te_factors_16){_mm512_sub_epi32(_mm512_set1_epi32(ONE), power),
                           _mm512_castsi512_ps(_mm512_add_epi32(_mm512_set1_epi32(ONE), power))};
}

TE_INLINE int te_wide_factors(float *factors, float *multipliers, const float *amax, int n, const te_factor_rule *r)
{
    for (int i = 0; i < n; i += 16) { /* the last of them as well: blocks of 128 are few to a row */
        __mmask16 there = (__mmask16)(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff);
        te_factors_16 f = te_wide_16(_mm512_maskz_loadu_ps(there, amax + i), r);
        _mm512_mask_storeu_epi32(factors + i, there, f.stored);
        _mm512_mask_storeu_ps(multipliers + i, there, f.multipliers);
    }
    return n;
}

/* As te_f32_to_e8m0 of amax * inverse and te_e8m0_inverse of that. Adding all ones below the exponent rounds it up;
 * of subnormal numbers only those above 2^-127 may go up. */
TE_INLINE te_factors_16 te_exponents_16(__m512 amax, float inverse)
{
    const __m512i fraction = _mm512_set1_epi32(0x7fffff), top = _mm512_set1_epi32(254),
                  half = _mm512_set1_epi32(0x400000);
    __m512i bits = _mm512_castps_si512(_mm512_mul_ps(amax, _mm512_set1_ps(inverse)));
    __m512i code = _mm512_srli_epi32(_mm512_add_epi32(bits, fraction), 23);
    code = _mm512_maskz_min_epu32(_mm512_cmpgt_epu32_mask(bits, half), code, top);
    __m512i power = _mm512_slli_epi32(_mm512_sub_epi32(top, code), 23);
    power = _mm512_mask_mov_epi32(power, _mm512_cmpeq_epi32_mask(code, top), half);
    return (te_factors_16){code, _mm512_castsi512_ps(power)};
}

TE_INLINE int te_exponent_factors(uint8_t *codes, float *multipliers, const float *amax, int n, float inverse)
{
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        te_factors_16 f = te_exponents_16(_mm512_loadu_ps(amax + i), inverse);
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(f.stored));
        _mm512_storeu_ps(multipliers + i, f.multipliers);
    }
    return i;
}

/* E4M3 factors of sixteen blocks, given what they should be: as stored, as numbers, and as te_two_level_multiplier. */
TE_INLINE __m512 te_put_e4m3_factors(uint8_t *codes, float *multipliers, __m512 wanted, float encode)
{
    __m512i code = _mm512_and_si512(te_sums(wanted, te_wide_form_of(TE_E4M3_CODE)), _mm512_set1_epi32(0x7f));
    __m256i half = _mm512_cvtepi32_epi16(_mm512_slli_epi32(code, 7)); /* a float16 that is 2^8 too small */
    __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256));
    __m512 multiplier = _mm512_div_ps(_mm512_set1_ps(1), _mm512_mul_ps(value, _mm512_set1_ps(1.0f / encode)));
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(code));
    _mm512_storeu_ps(multipliers, _mm512_min_ps(multiplier, _mm512_set1_ps(TE_FLT_MAX)));
    return value;
}

/* As te_two_level_block and te_two_level_multiplier. */
TE_INLINE int te_two_level_factors(uint8_t *codes, float *multipliers, const float *amax, int n, float encode)
{
    const __m512 times = _mm512_set1_ps(encode / 6.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16)
        te_put_e4m3_factors(codes + i, multipliers + i, _mm512_mul_ps(_mm512_loadu_ps(amax + i), times), encode);
    return i;
}

/* As te_two_level_candidate and te_two_level_multiplier. */
TE_INLINE int te_two_level_candidates(uint8_t *codes, float *multipliers, float *values, const float *amax,
                                      int n, float encode, float stretch)
{
    const __m512 times = _mm512_set1_ps(encode / 6.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 wanted = _mm512_mul_ps(_mm512_loadu_ps(amax + i), times);
        wanted = _mm512_mul_ps(wanted, _mm512_set1_ps(stretch));
        _mm512_storeu_ps(values + i, te_put_e4m3_factors(codes + i, multipliers + i, wanted, encode));
    }
    return i;
}
#else
#define te_wide_factors(factors, multipliers, amax, n, rule) 0
#define te_exponent_factors(codes, multipliers, amax, n, inverse) 0
#define te_two_level_factors(codes, multipliers, amax, n, encode) 0
#define te_two_level_candidates(codes, multipliers, values, amax, n, encode, stretch) 0
#endif

#endif
