/* quantize_codes.h - codes of many elements at once, for quantize_blocks.c.
 *
 * A code takes no branches. The power of two that is added to a magnitude has the format's last place as its own, so
 * the sum is rounded to it, ties to even, and counts the places in its low bits; those of the exponent go in front of
 * them. Below the smallest normal number the place stays where it is. Same codes as those of dtype.h and quant.h.
 *
 * Float32 and bfloat16 are encoded by vector instructions where the instruction set has code for that here; functions
 * say how many elements they have done, and compilers vectorize the loops over the others.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_CODES_H
#define TE_KERNELS_CPU_QUANTIZE_CODES_H

#include "kernels/quant.h"

#include <stdbool.h>

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

/* As te_f8e4m3_to_f32 and te_e2m1_to_f32; where those multiply a subnormal float32, which some machines are slow at,
 * these convert a small integer. */
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

/* 16 float32. */
TE_INLINE void te_codes_f32(uint8_t *codes, const float *x, __m512 m, int mantissa, uint32_t smallest,
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

/* What moves the exponents of 32 bfloat16 to where t = code << (7 - mantissa), and the largest size below which an
 * element that is not 0, or its code, may be subnormal. */
typedef struct te_shift {
    __m512i offset, small;
} te_shift;

/* From normal powers of two as bfloat16: 2^k has (k + 127) << 7. Where t would be the larger one, all is small. */
TE_INLINE te_shift te_shift_of(__m512i powers, uint32_t smallest)
{
    __m512i offset = _mm512_sub_epi16(_mm512_set1_epi16((short)(((smallest >> 23) + 126) << 7)), powers);
    __m512i small = _mm512_add_epi16(offset, _mm512_set1_epi16(127));
    return (te_shift){_mm512_max_epi16(offset, _mm512_setzero_si512()),
                      _mm512_mask_mov_epi16(small, _mm512_movepi16_mask(offset), _mm512_set1_epi16(0x7fff))};
}

/* Codes of 32 bfloat16 under powers of two: whole numbers alone. False, and nothing is written, where one may be small,
 * is infinite or is no number. */
TE_INLINE bool te_codes_shifted(uint8_t *codes, const uint16_t *x, te_shift shift, int mantissa, uint32_t smallest,
                                uint32_t largest, int sign)
{
    __m512i given = _mm512_loadu_si512(x), size = _mm512_and_si512(given, _mm512_set1_epi16(0x7fff));
    __m512i one = _mm512_set1_epi16(1);
    __mmask32 small = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(size, one), shift.small);
    if (small | _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16(0x7f80))) return false;
    __m512i t = _mm512_subs_epu16(size, shift.offset);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(t, (unsigned)(7 - mantissa)), one);
    __m512i half = _mm512_set1_epi16((short)((1 << (6 - mantissa)) - 1));
    __m512i code = _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(t, half), odd), (unsigned)(7 - mantissa));
    uint32_t top = (largest - (smallest - (1u << 23))) >> (23 - mantissa);
    code = _mm512_min_epu16(code, _mm512_set1_epi16((short)top));
    __m512i signs = _mm512_srli_epi16(given, sign == 8 ? 12 : 8);
    code = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi16((short)sign), code, 0xea);
    _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(code));
    return true;
}

/* Of sixteen factors: whether all are normal powers of two, and then their shifts. */
TE_INLINE bool te_shifts_of(const float *factors, uint16_t offsets[16], uint16_t smalls[16], uint32_t smallest)
{
    __m512i bits = _mm512_loadu_si512(factors);
    if (_mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7fffff))) return false;
    if (_mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(0x800000))) return false;
    te_shift shift = te_shift_of(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16))), smallest);
    _mm256_storeu_si256((__m256i *)offsets, _mm512_castsi512_si256(shift.offset));
    _mm256_storeu_si256((__m256i *)smalls, _mm512_castsi512_si256(shift.small));
    return true;
}

/* Sixteen blocks of 32 at a time, as far as they are whole, whose factors are powers of two; the elements done. */
TE_INLINE int64_t te_codes_along_powers(uint8_t *codes, const uint16_t *x, const float *multipliers, int64_t n,
                                        int mantissa, uint32_t smallest, uint32_t largest, int nan, int sign)
{
    uint16_t offsets[16], smalls[16];
    int64_t j = 0;
    for (; j + 512 <= n && te_shifts_of(multipliers + j / 32, offsets, smalls, smallest); j += 512)
        for (int b = 0; b < 16; b++) {
            te_shift shift = {_mm512_set1_epi16((short)offsets[b]), _mm512_set1_epi16((short)smalls[b])};
            uint8_t *to = codes + j + 32 * b;
            const uint16_t *from = x + j + 32 * b;
            if (te_codes_shifted(to, from, shift, mantissa, smallest, largest, sign)) continue;
            __m512 m = _mm512_set1_ps(multipliers[j / 32 + b]);
            te_codes_bf16(to, from, m, m, mantissa, smallest, largest, nan, sign);
        }
    return j;
}

TE_INLINE bool te_is_power(float x) { return (te_f32_bits(x) & 0x7fffffu) == 0 && te_f32_bits(x) >= 0x800000u; }

/* Codes of a multiple of 32 elements of n, which is returned; blocks of 16 or of multiples of 32, or one of n. */
TE_INLINE int64_t te_codes_along_bf16(uint8_t *codes, const uint16_t *x, const float *multipliers, int64_t n,
                                      int64_t block, int mantissa, uint32_t smallest, uint32_t largest, int nan,
                                      int sign)
{
    int64_t whole = n - n % 32;
    if (block == 16) {
        for (int64_t j = 0; j < whole; j += 32, multipliers += 2) {
            __m512 m = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(multipliers[0]), _mm512_set1_ps(multipliers[1]));
            te_codes_bf16(codes + j, x + j, m, m, mantissa, smallest, largest, nan, sign);
        }
        return whole;
    }
    if (block % 32 != 0 && block < n) return 0;
    int64_t start = block == 32 ? te_codes_along_powers(codes, x, multipliers, n, mantissa, smallest, largest, nan, sign) : 0;
    multipliers += start / 32;
    for (int64_t first = start; first < whole; first += block, multipliers++) {
        __m512 m = _mm512_set1_ps(*multipliers);
        te_shift shift = te_shift_of(_mm512_set1_epi16((short)(te_f32_bits(*multipliers) >> 16)), smallest);
        int64_t j = first, end = whole - first < block ? whole : first + block;
        bool power = te_is_power(*multipliers);
        while (power && j < end && te_codes_shifted(codes + j, x + j, shift, mantissa, smallest, largest, sign))
            j += 32;
        for (; j < end; j += 32) te_codes_bf16(codes + j, x + j, m, m, mantissa, smallest, largest, nan, sign);
    }
    return whole;
}

TE_INLINE int64_t te_codes_along_f32(uint8_t *codes, const float *x, const float *multipliers, int64_t n, int64_t block,
                                     int mantissa, uint32_t smallest, uint32_t largest, int nan, int sign)
{
    int64_t whole = n - n % 16;
    if (block % 16 != 0 && block < n) return 0;
    for (int64_t first = 0; first < whole; first += block, multipliers++)
        for (int64_t j = first; j < whole && j < first + block; j += 16)
            te_codes_f32(codes + j, x + j, _mm512_set1_ps(*multipliers), mantissa, smallest, largest, nan, sign);
    return whole;
}

/* Codes of a multiple of 32 columns of n, which is returned: all rows of 32 columns before the next. */
TE_INLINE int64_t te_codes_down_bf16(uint8_t *codes, int64_t codes_stride, const uint16_t *x, int64_t stride, int rows,
                                     const float *multipliers, int64_t n, int mantissa, uint32_t smallest,
                                     uint32_t largest, int nan, int sign)
{
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    for (int64_t j = 0; j + 32 <= n; j += 32) {
        __m512 low = _mm512_loadu_ps(multipliers + j), high = _mm512_loadu_ps(multipliers + j + 16);
        __m512 even = _mm512_permutex2var_ps(low, evens, high), odd = _mm512_permutex2var_ps(low, odds, high);
        __m512i e = _mm512_castps_si512(even), o = _mm512_castps_si512(odd);
        te_shift shift = te_shift_of(_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(e, 16), o), smallest);
        bool power = !_mm512_test_epi32_mask(_mm512_or_si512(e, o), _mm512_set1_epi32(0x7fffff));
        uint8_t *to = codes + j;
        const uint16_t *from = x + j;
        int left = rows;
        for (; left && power && te_codes_shifted(to, from, shift, mantissa, smallest, largest, sign); left--)
            to += codes_stride, from += stride;
        for (; left; left--, to += codes_stride, from += stride)
            te_codes_bf16(to, from, even, odd, mantissa, smallest, largest, nan, sign);
    }
    return n - n % 32;
}

TE_INLINE int64_t te_codes_down_f32(uint8_t *codes, int64_t codes_stride, const float *x, int64_t stride, int rows,
                                    const float *multipliers, int64_t n, int mantissa, uint32_t smallest,
                                    uint32_t largest, int nan, int sign)
{
    for (int64_t j = 0; j + 16 <= n; j += 16) {
        __m512 m = _mm512_loadu_ps(multipliers + j);
        for (int64_t i = 0; i < rows; i++)
            te_codes_f32(codes + i * codes_stride + j, x + i * stride + j, m, mantissa, smallest, largest, nan, sign);
    }
    return n - n % 16;
}
#else
#define te_codes_along_bf16(codes, x, multipliers, n, block, ...) 0
#define te_codes_along_f32(codes, x, multipliers, n, block, ...)  0
#define te_codes_down_bf16(codes, codes_stride, x, stride, rows, multipliers, n, ...) 0
#define te_codes_down_f32(codes, codes_stride, x, stride, rows, multipliers, n, ...)  0
#endif

/* A source without vector code of its own. */
#define te_codes_along_f16(codes, x, multipliers, n, block, ...) 0
#define te_codes_down_f16(codes, codes_stride, x, stride, rows, multipliers, n, ...) 0

#endif
