/* quantize_values.h - 64 codes as float32, and what the sizes of 8 bits are as bfloat16.
 *
 * An 8-bit code is put where float16 has its sign, exponent and mantissa, and converted as such: subnormal numbers,
 * too, come out right. E5M2 is the upper half of a float16; E4M3 ends up 2^8 too small, which its factor makes good.
 * A half byte is looked up.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_VALUES_H
#define TE_KERNELS_CPU_QUANTIZE_VALUES_H

#include "quantize_vectors.h"

#if defined(TE_ISA_avx512)

/* What a factor is multiplied by before 64 values of each format are, and the first size of a byte that is no finite
 * number. */
#define TE_LIFT_E4M3 256.0f
#define TE_LIFT_E5M2 1.0f
#define TE_LIFT_E2M1 1.0f
#define TE_ODD_E4M3  0x7f
#define TE_ODD_E5M2  0x7c

TE_INLINE void te_convert_halves(__m512 v[2], __m512i halves)
{
    v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    v[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

TE_INLINE __m512i te_top_bytes(const uint8_t *codes)
{
    return _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes)), 8);
}

TE_INLINE void te_values_64_e4m3(__m512 v[4], const uint8_t *codes)
{
    const __m512i mask = _mm512_set1_epi16((short)0xbf80);
    for (int k = 0; k < 2; k++)
        te_convert_halves(v + 2 * k, _mm512_and_si512(_mm512_srai_epi16(te_top_bytes(codes + 32 * k), 1), mask));
}

TE_INLINE void te_values_64_e5m2(__m512 v[4], const uint8_t *codes)
{
    for (int k = 0; k < 2; k++) te_convert_halves(v + 2 * k, te_top_bytes(codes + 32 * k));
}

/* Of 32 bytes, each lane takes the word of eight codes that has its own and moves it down; four bits of an index
 * count. */
TE_INLINE void te_values_64_e2m1(__m512 v[4], const uint8_t *pairs)
{
    const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512i all = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)pairs));
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i mine = _mm512_permutexvar_epi32(_mm512_add_epi32(words, _mm512_set1_epi32(2 * k)), all);
        v[k] = _mm512_permutexvar_ps(_mm512_srlv_epi32(mine, places), values);
    }
}

/* The upper halves of two vectors. */
TE_INLINE __m512i te_upper_halves(__m512i low, __m512i high)
{
    static const uint16_t upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                       33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(low, _mm512_loadu_si512(upper), high);
}

#if defined(TE_ISA_avx512vbmi)
/* What each of 128 sizes stands for, as bfloat16: lower and upper bytes. */
typedef struct te_size_table {
    __m512i low[2], high[2];
} te_size_table;

#define TE_DEFINE_SIZE_TABLE(format, LIFT)                                                                             \
    TE_INLINE te_size_table te_size_table_##format(void)                                                               \
    {                                                                                                                  \
        te_size_table t;                                                                                               \
        uint8_t sizes[64], bytes[2][64];                                                                               \
        for (int k = 0; k < 64; k++) bytes[0][k] = (uint8_t)(2 * k), bytes[1][k] = (uint8_t)(2 * k + 1);               \
        for (int half = 0; half < 2; half++) {                                                                         \
            __m512i v[2];                                                                                              \
            __m512 value[4], lift = _mm512_set1_ps(LIFT);                                                              \
            for (int k = 0; k < 64; k++) sizes[k] = (uint8_t)(64 * half + k);                                          \
            te_values_64_##format(value, sizes);                                                                       \
            for (int k = 0; k < 4; k++) value[k] = _mm512_mul_ps(value[k], lift);                                      \
            for (int k = 0; k < 2; k++)                                                                                \
                v[k] = te_upper_halves(_mm512_castps_si512(value[2 * k]), _mm512_castps_si512(value[2 * k + 1]));      \
            t.low[half] = _mm512_permutex2var_epi8(v[0], _mm512_loadu_si512(bytes[0]), v[1]);                          \
            t.high[half] = _mm512_permutex2var_epi8(v[0], _mm512_loadu_si512(bytes[1]), v[1]);                         \
        }                                                                                                              \
        return t;                                                                                                      \
    }

TE_DEFINE_SIZE_TABLE(e4m3, TE_LIFT_E4M3)
TE_DEFINE_SIZE_TABLE(e5m2, TE_LIFT_E5M2)
#endif
#endif

#endif
