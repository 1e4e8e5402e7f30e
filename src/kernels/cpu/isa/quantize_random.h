/* quantize_random.h - stochastic rounding of many elements at once, for quantize_blocks.c. te_f32_to_e2m1_stochastic
 * gives the same codes. */
#ifndef TE_KERNELS_CPU_QUANTIZE_RANDOM_H
#define TE_KERNELS_CPU_QUANTIZE_RANDOM_H

#include "philox_vectors.h"
#include "quantize_vectors.h"

#if defined(TE_ISA_avx512)
/* Codes of 16 products. The unit is a 256th of the step at the size, which is that of 1, of 2 or of 4; sizes plus
 * random units count steps when cut off. What is too large for an integer becomes one that is larger than all. */
TE_INLINE __m512i te_stochastic_16(__m512 x, const uint8_t *random)
{
    __m512i bits = _mm512_castps_si512(x), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i least = _mm512_set1_epi32(0x3f800000);
    __m512i exponent = _mm512_and_si512(size, _mm512_set1_epi32(0x7f800000));
    exponent = _mm512_min_epi32(_mm512_max_epi32(exponent, least), _mm512_set1_epi32(0x40800000));
    __m512 unit = _mm512_castsi512_ps(_mm512_sub_epi32(exponent, _mm512_set1_epi32(9 << 23)));
    __m512 steps = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(0x7f800000), exponent)); /* 2 / power */
    __m512 units = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)random)));
    __m512 raised = _mm512_add_ps(_mm512_castsi512_ps(size), _mm512_mul_ps(units, unit)); /* an exact product */
    __m512i code = _mm512_cvttps_epi32(_mm512_mul_ps(raised, steps));
    code = _mm512_add_epi32(code, _mm512_srli_epi32(_mm512_sub_epi32(exponent, least), 22));
    code = _mm512_min_epu32(code, _mm512_set1_epi32(7));
    __mmask16 numbers = _mm512_cmple_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
    __m512i sign = _mm512_maskz_srli_epi32(numbers, bits, 28);
    return _mm512_ternarylogic_epi32(sign, _mm512_set1_epi32(8), code, 0xea); /* a & b | c */
}

TE_INLINE __m512 te_load_bf16(const uint16_t *x)
{
    __m256i halves = _mm256_loadu_si256((const __m256i *)x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

#define TE_PUT_STOCHASTIC(LOAD, codes, x, multipliers, each, random)                                                   \
    {                                                                                                                  \
        __m512 m = (each) ? _mm512_loadu_ps(multipliers) : _mm512_set1_ps(*(multipliers));                             \
        __m512i code = te_stochastic_16(_mm512_mul_ps(LOAD(x), m), random);                                            \
        _mm_storeu_si128((__m128i *)(codes), _mm512_cvtepi32_epi8(code));                                              \
    }
#define TE_LOAD_F32  _mm512_loadu_ps
#elif defined(TE_ISA_avx2)
/* Codes of 8 products, as above. */
TE_INLINE __m256i te_stochastic_8(__m256 x, const uint8_t *random)
{
    const __m256i least = _mm256_set1_epi32(0x3f800000), infinite = _mm256_set1_epi32(0x7f800000);
    __m256i bits = _mm256_castps_si256(x), size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i exponent = _mm256_and_si256(size, infinite);
    exponent = _mm256_min_epi32(_mm256_max_epi32(exponent, least), _mm256_set1_epi32(0x40800000));
    __m256 unit = _mm256_castsi256_ps(_mm256_sub_epi32(exponent, _mm256_set1_epi32(9 << 23)));
    __m256 steps = _mm256_castsi256_ps(_mm256_sub_epi32(infinite, exponent));
    __m256 units = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)random)));
    __m256 raised = _mm256_add_ps(_mm256_castsi256_ps(size), _mm256_mul_ps(units, unit));
    __m256i code = _mm256_cvttps_epi32(_mm256_mul_ps(raised, steps));
    code = _mm256_add_epi32(code, _mm256_srli_epi32(_mm256_sub_epi32(exponent, least), 22));
    code = _mm256_min_epu32(code, _mm256_set1_epi32(7));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 28), _mm256_set1_epi32(8));
    return _mm256_or_si256(code, _mm256_andnot_si256(_mm256_cmpgt_epi32(size, infinite), sign));
}

TE_INLINE void te_put_16_codes(uint8_t *to, __m256i first, __m256i second)
{
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128((__m128i *)(void *)to, bytes);
}

TE_INLINE __m256 te_load_bf16(const uint16_t *x)
{
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

#define TE_PUT_STOCHASTIC(LOAD, codes, x, multipliers, each, random)                                                   \
    {                                                                                                                  \
        __m256 one = _mm256_set1_ps(*(multipliers)), two = one;                                                        \
        if (each) one = _mm256_loadu_ps(multipliers), two = _mm256_loadu_ps((multipliers) + 8);                        \
        te_put_16_codes(codes, te_stochastic_8(_mm256_mul_ps(LOAD(x), one), random),                                   \
                        te_stochastic_8(_mm256_mul_ps(LOAD((x) + 8), two), (random) + 8));                             \
    }
#define TE_LOAD_F32  _mm256_loadu_ps
#endif

#if defined(TE_PUT_STOCHASTIC)
/* n elements but for the last of fewer than 16. Blocks of one element, of multiples of 16, or one of n. */
#define TE_DEFINE_STOCHASTIC(dtype, type, LOAD)                                                                        \
    TE_INLINE int64_t te_stochastic_##dtype(uint8_t *codes, const type *x, const float *multipliers, int64_t block,    \
                                            const uint8_t *random, int64_t n)                                          \
    {                                                                                                                  \
        if (block % 16 != 0 && block != 1 && block < n) return 0;                                                      \
        for (int64_t i = 0, end = block; i + 16 <= n; i += 16) {                                                       \
            if (block == 1) {                                                                                          \
                TE_PUT_STOCHASTIC(LOAD, codes + i, x + i, multipliers + i, true, random + i)                           \
                continue;                                                                                              \
            }                                                                                                          \
            if (i == end) end += block, multipliers++;                                                                 \
            TE_PUT_STOCHASTIC(LOAD, codes + i, x + i, multipliers, false, random + i)                                  \
        }                                                                                                              \
        return n - n % 16;                                                                                             \
    }

TE_DEFINE_STOCHASTIC(f32, float, TE_LOAD_F32)
TE_DEFINE_STOCHASTIC(bf16, uint16_t, te_load_bf16)
#else
#define te_stochastic_f32(codes, x, m, block, random, n)  0
#define te_stochastic_bf16(codes, x, m, block, random, n) 0
#endif

#define te_stochastic_f16(codes, x, m, block, random, n) 0

#endif
