/* quantize_narrow.h - FP8 under powers of two to bfloat16, for quantize_blocks.c.
 *
 * Bits that stand for a normal number stay side by side: they are moved, and the exponent is raised by that of the
 * factor. The few subnormal ones are looked up. Where an element is infinite or no number, or where a factor is no
 * power of two or takes a value out of bfloat16's normal range, functions say false, and the caller goes by way of
 * float32.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_NARROW_H
#define TE_KERNELS_CPU_QUANTIZE_NARROW_H

#include "quantize_vectors.h"

#if defined(TE_ISA_avx512)

/* An 8-bit format as bfloat16: mantissa bits, what its exponents are raised by, the first code that is no finite
 * number, and exponents of the smallest and the largest number. */
typedef struct te_narrow_form {
    int mantissa, bias, special, least, most;
} te_narrow_form;

#define TE_E4M3_NARROW ((te_narrow_form){3, 120, 0x7f, -9, 8})
#define TE_E5M2_NARROW ((te_narrow_form){2, 112, 0x7c, -16, 15})

/* Sizes below the smallest normal number, as bfloat16. */
TE_INLINE __m512i te_small_sizes(te_narrow_form f)
{
    uint16_t sizes[32] = {0};
    for (int i = 1; i < 1 << f.mantissa; i++) {
        int top = i >= 4 ? 2 : i >= 2; /* i = 2^top (1 + …) */
        sizes[i] = (uint16_t)(((f.least + top + 127) << 7) | ((i << (7 - top)) & 0x7f));
    }
    return _mm512_loadu_si512(sizes);
}

/* 32 values; `raise` is the exponent of the factor where bfloat16 has it. */
TE_INLINE bool te_narrow_32(__m512i *values, __m256i codes, __m512i raise, __m512i small, te_narrow_form f)
{
    __m512i code = _mm512_cvtepu8_epi16(codes), size = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, (unsigned)(7 - f.mantissa)),
                                     _mm512_set1_epi16((short)(f.bias << 7)));
    __mmask32 below = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16((short)(1 << f.mantissa)));
    value = _mm512_mask_permutexvar_epi16(value, below, size, small);
    value = _mm512_mask_add_epi16(value, _mm512_test_epi16_mask(size, size), value, raise);
    *values = _mm512_ternarylogic_epi32(_mm512_slli_epi16(code, 8), _mm512_set1_epi16((short)0x8000), value, 0xea);
    return _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16((short)f.special)) == 0;
}

/* Whether values under the factor stay normal. */
TE_INLINE bool te_narrows_under(float factor, te_narrow_form f)
{
    int exponent = (int)(te_f32_bits(factor) >> 23) - 127;
    return (te_f32_bits(factor) & 0x7fffffu) == 0 && exponent + f.least >= -126 && exponent + f.most <= 127;
}

TE_INLINE __mmask32 te_first(int64_t n) { return n < 32 ? (1u << n) - 1 : 0xffffffffu; }

/* n elements, blocks of multiples of 32 or one of n. */
TE_INLINE bool te_narrow_along(uint16_t *to, const uint8_t *codes, const float *factors, int64_t n, int64_t block,
                               te_narrow_form f)
{
    __m512i small = te_small_sizes(f), value;
    bool good = block % 32 == 0 || block >= n;
    for (int64_t i = 0; i < n && good; factors++) {
        __m512i raise = _mm512_set1_epi16((short)((te_f32_bits(*factors) >> 16) - (127 << 7)));
        good = te_narrows_under(*factors, f);
        for (int64_t end = n - i < block ? n : i + block; i < end; i += 32) {
            __mmask32 there = te_first(end - i);
            good &= te_narrow_32(&value, _mm256_maskz_loadu_epi8(there, codes + i), raise, small, f);
            _mm512_mask_storeu_epi16(to + i, there, value);
        }
        if (block >= n) break;
    }
    return good;
}

/* n elements, each with a factor of its own. */
TE_INLINE bool te_narrow_down(uint16_t *to, const uint8_t *codes, const float *factors, int64_t n, te_narrow_form f)
{
    __m512i small = te_small_sizes(f), value;
    __m512i least = _mm512_set1_epi32((127 - 126 - f.least) << 23);
    __m512i most = _mm512_set1_epi32((127 + 127 - f.most) << 23);
    bool good = true;
    for (int64_t i = 0; i < n && good; i += 32) {
        __mmask32 there = te_first(n - i);
        __m512i one = _mm512_set1_epi32(0x3f800000);
        __m512i low = _mm512_mask_loadu_epi32(one, (__mmask16)there, factors + i);
        __m512i high = _mm512_mask_loadu_epi32(one, (__mmask16)(there >> 16), factors + i + 16);
        __m512i parts = _mm512_and_si512(_mm512_or_si512(low, high), _mm512_set1_epi32(0x7fffff));
        good = !_mm512_test_epi32_mask(parts, parts) && !_mm512_cmplt_epu32_mask(_mm512_min_epu32(low, high), least) &&
               !_mm512_cmpgt_epu32_mask(_mm512_max_epu32(low, high), most);
        __m512i raise = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16))),
                                           _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)), 1);
        raise = _mm512_sub_epi16(raise, _mm512_set1_epi16(127 << 7));
        good &= te_narrow_32(&value, _mm256_maskz_loadu_epi8(there, codes + i), raise, small, f);
        _mm512_mask_storeu_epi16(to + i, there, value);
    }
    return good;
}

#define TE_DEFINE_NARROW(format, FORM)                                                                                 \
    static bool narrow_along_##format(uint16_t *to, const uint8_t *codes, const float *factors, int64_t n,             \
                                      int64_t block)                                                                   \
    {                                                                                                                  \
        return block == 1 ? te_narrow_down(to, codes, factors, n, FORM)                                                \
                          : te_narrow_along(to, codes, factors, n, block, FORM);                                       \
    }

TE_DEFINE_NARROW(e4m3, TE_E4M3_NARROW)
TE_DEFINE_NARROW(e5m2, TE_E5M2_NARROW)
#else
#define narrow_along_e4m3 NULL
#define narrow_along_e5m2 NULL
#endif

#endif
