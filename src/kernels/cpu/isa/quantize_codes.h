/* quantize_codes.h - codes of many elements at once, for quantize_blocks.c.
 *
 * A code takes no branches. The power of two that is added to a magnitude has the format's last place as its own, so the
 * sum is rounded to it, ties to even, and counts the places in its low bits; those of the exponent go in front of them.
 * Below the smallest normal number the place stays where it is. Same codes as those of dtype.h and quant.h.
 *
 * TE_CODES_AT_ONCE elements of a float32 or bfloat16 source are encoded by vector instructions where the instruction set
 * has code for it here, else (0) compilers vectorize the loops over single codes.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_CODES_H
#define TE_KERNELS_CPU_QUANTIZE_CODES_H

#include "kernels/quant.h"

/* mantissa bits, smallest normal and largest number as float32, code of a NaN, sign */
#define TE_E4M3_CODE 3, 0x3c800000u, 0x43e00000u, 0x7f, 0x80
#define TE_E5M2_CODE 2, 0x38800000u, 0x47600000u, 0x7f, 0x80
#define TE_E2M1_CODE 1, 0x3f800000u, 0x40c00000u, 7, 8

#define TE_INLINE static inline __attribute__((always_inline))

TE_INLINE uint8_t te_code(float x, int mantissa, uint32_t smallest, uint32_t largest, int nan, int sign)
{
    uint32_t bits = te_f32_bits(x), size = bits & 0x7fffffffu, dropped = 23 - (uint32_t)mantissa;
    uint32_t most = size < largest ? size : largest, exponent = most & 0x7f800000u;
    exponent = exponent > smallest ? exponent : smallest;
    uint32_t places = te_f32_bits(te_f32_from_bits(most) + te_f32_from_bits(exponent + (dropped << 23)));
    uint32_t code = (places & 0xffu) + ((exponent - smallest) >> dropped);
    return (uint8_t)(size > 0x7f800000u ? (uint32_t)nan : code | (bits >> 31 ? (uint32_t)sign : 0u));
}

/* As te_f8e4m3_to_f32 and te_e2m1_to_f32; where those multiply a subnormal float32, which some machines are slow at, these
 * convert a small integer. */
TE_INLINE float te_value_e4m3(uint8_t code)
{
    uint32_t size = code & 0x7fu, normal = (size << 20) + (120u << 23);
    uint32_t small = te_f32_bits((float)(int32_t)size * 0x1p-9f), bits = size < 8 ? small : normal;
    bits = size == 0x7fu ? 0x7fc00000u : bits;
    return te_f32_from_bits(bits | (code & 0x80u) << 24);
}

TE_INLINE float te_value_e2m1(uint8_t code)
{
    uint32_t size = code & 7u, normal = (size << 22) + (126u << 23);
    uint32_t small = te_f32_bits((float)(int32_t)size * 0.5f), bits = size < 2 ? small : normal;
    return te_f32_from_bits(bits | (code & 8u) << 28);
}

#if defined(TE_ISA_avx512)
#include <immintrin.h>

enum { TE_CODES_AT_ONCE = 32 };

/* Of magnitudes: the code plus smallest >> dropped, in the low 16 bits. */
TE_INLINE __m512i te_places(__m512 size, int mantissa, uint32_t smallest, uint32_t largest)
{
    __m512i most = _mm512_min_epu32(_mm512_castps_si512(size), _mm512_set1_epi32((int)largest));
    __m512i exponent = _mm512_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0x7f800000)),
                                        _mm512_set1_epi32((int)smallest));
    __m512i unit = _mm512_add_epi32(exponent, _mm512_set1_epi32((23 - mantissa) << 23));
    __m512i sum = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(most), _mm512_castsi512_ps(unit)));
    return _mm512_add_epi32(sum, _mm512_srli_epi32(exponent, (unsigned)(23 - mantissa)));
}

/* 32 bfloat16 times positive multipliers, of which `even` and `odd` belong to every other element. */
TE_INLINE void te_codes_bf16(uint8_t *codes, const uint16_t *x, __m512 even, __m512 odd, int mantissa,
                             uint32_t smallest, uint32_t largest, int nan, int sign)
{
    __m512i given = _mm512_loadu_si512(x), size = _mm512_and_si512(given, _mm512_set1_epi16(0x7fff));
    __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(size, 16));
    __m512 high = _mm512_castsi512_ps(_mm512_and_si512(size, _mm512_set1_epi32((int)0xffff0000u)));
    __m512i a = te_places(_mm512_mul_ps(low, even), mantissa, smallest, largest);
    __m512i b = te_places(_mm512_mul_ps(high, odd), mantissa, smallest, largest);
    __m512i code = _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
    code = _mm512_sub_epi16(code, _mm512_set1_epi16((short)(smallest >> (23 - mantissa))));
    __m512i signs = _mm512_srli_epi16(given, sign == 8 ? 12 : 8);
    code = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi16((short)sign), code, 0xea); /* a & b | c */
    __mmask32 nans = _mm512_cmpgt_epu16_mask(size, _mm512_set1_epi16(0x7f80));
    code = _mm512_mask_mov_epi16(code, nans, _mm512_set1_epi16((short)nan));
    _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(code));
}

TE_INLINE void te_codes_f32_half(uint8_t *codes, const float *x, __m512 m, int mantissa, uint32_t smallest,
                                 uint32_t largest, int nan, int sign)
{
    __m512i given = _mm512_loadu_si512(x), size = _mm512_and_si512(given, _mm512_set1_epi32(0x7fffffff));
    __m512i code = te_places(_mm512_mul_ps(_mm512_castsi512_ps(size), m), mantissa, smallest, largest);
    code = _mm512_sub_epi32(code, _mm512_set1_epi32((int)(smallest >> (23 - mantissa))));
    __m512i signs = _mm512_srli_epi32(given, sign == 8 ? 28 : 24);
    code = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi32(sign), code, 0xea);
    __mmask16 nans = _mm512_cmpgt_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
    code = _mm512_mask_mov_epi32(code, nans, _mm512_set1_epi32(nan));
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(code));
}

/* `first` and `last`: multipliers of elements 0 … 15 and 16 … 31. */
TE_INLINE void te_codes_f32(uint8_t *codes, const float *x, __m512 first, __m512 last, int mantissa, uint32_t smallest,
                            uint32_t largest, int nan, int sign)
{
    te_codes_f32_half(codes, x, first, mantissa, smallest, largest, nan, sign);
    te_codes_f32_half(codes + 16, x + 16, last, mantissa, smallest, largest, nan, sign);
}

/* Multipliers of 32 elements in the orders that the functions above want. */
#define TE_CODES_ONE_f32(codes, x, m, ...)   te_codes_f32(codes, x, _mm512_set1_ps(m), _mm512_set1_ps(m), __VA_ARGS__)
#define TE_CODES_ONE_bf16(codes, x, m, ...)  te_codes_bf16(codes, x, _mm512_set1_ps(m), _mm512_set1_ps(m), __VA_ARGS__)
#define TE_CODES_TWO_f32(codes, x, m, n, ...) te_codes_f32(codes, x, _mm512_set1_ps(m), _mm512_set1_ps(n), __VA_ARGS__)
#define TE_CODES_TWO_bf16(codes, x, m, n, ...)                                                                         \
    do {                                                                                                               \
        __m512 both_ = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(m), _mm512_set1_ps(n));                             \
        te_codes_bf16(codes, x, both_, both_, __VA_ARGS__);                                                            \
    } while (0)
#define TE_CODES_EACH_f32(codes, x, m, ...)                                                                            \
    te_codes_f32(codes, x, _mm512_loadu_ps(m), _mm512_loadu_ps((m) + 16), __VA_ARGS__)
#define TE_CODES_EACH_bf16(codes, x, m, ...)                                                                           \
    do {                                                                                                               \
        const __m512i evens_ = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);           \
        __m512 a_ = _mm512_loadu_ps(m), b_ = _mm512_loadu_ps((m) + 16);                                                \
        te_codes_bf16(codes, x, _mm512_permutex2var_ps(a_, evens_, b_),                                                \
                      _mm512_permutex2var_ps(a_, _mm512_add_epi32(evens_, _mm512_set1_epi32(1)), b_), __VA_ARGS__);    \
    } while (0)
#else
enum { TE_CODES_AT_ONCE = 0 };
#define TE_CODES_ONE_f32(codes, x, m, ...)    (void)0
#define TE_CODES_ONE_bf16(codes, x, m, ...)   (void)0
#define TE_CODES_TWO_f32(codes, x, m, n, ...) (void)0
#define TE_CODES_TWO_bf16(codes, x, m, n, ...) (void)0
#define TE_CODES_EACH_f32(codes, x, m, ...)   (void)0
#define TE_CODES_EACH_bf16(codes, x, m, ...)  (void)0
#endif

/* Sources without vector code of their own. */
#define TE_CODES_ONE_f16(codes, x, m, ...)    (void)0
#define TE_CODES_TWO_f16(codes, x, m, n, ...) (void)0
#define TE_CODES_EACH_f16(codes, x, m, ...)   (void)0

#endif
