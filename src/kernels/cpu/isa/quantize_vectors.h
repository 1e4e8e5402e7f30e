/* quantize_vectors.h - codes of 64 elements in AVX-512, for quantize_encode.h.
 *
 * As in te_code, a power of two is added to a magnitude so that the sum is rounded to the format's last place. Here the
 * low bits of that power hold the code where the exponent begins, which is even, and so those of the sum are the code
 * itself. Both follow from the exponent, of which a format has at most 32: they are looked up.
 *
 * Sums stand in the low byte of 32 bits, and signs in the top bit. Packing narrows four vectors of either at a time; it
 * keeps to quarters of vectors, and one permutation at the end puts those in order. A NaN is found in the largest
 * magnitude of all 64, and only where there is one are codes made with an eye to it.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_VECTORS_H
#define TE_KERNELS_CPU_QUANTIZE_VECTORS_H

#include "quantize_codes.h"

#if defined(TE_ISA_avx512)
#include <immintrin.h>

/* A constant that compilers would make anew in every turn of a loop. */
TE_INLINE __m512i te_kept(__m512i v, bool kept)
{
    if (kept) __asm__("" : "+v"(v));
    return v;
}

/* Asks for what lies as far behind a line that is read as memory is away; farther where lines are read faster than they
 * come. */
enum { TE_AHEAD = 3072, TE_BEHIND = 9216, TE_FAR = 16384 };

TE_INLINE void te_fetch_ahead(const void *x) { __builtin_prefetch((const char *)x + TE_AHEAD, 0, 3); }

/* From the second cache, of which the first one would wait. */
TE_INLINE void te_fetch_near(const void *x, int bytes)
{
    enum { NEAR = 2048 };
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)x + NEAR + i, 0, 3);
}

/* Rows that are read for factors first and then, out of a cache, for codes: so that memory is busy both times, either
 * asks for half of what comes next. Where that begins behind n elements, since less than TE_BEHIND would come late. */
#define TE_DEFINE_BEHIND(dtype, type)                                                                                  \
    TE_INLINE const type *te_behind_##dtype(const type *x, int64_t n)                                                  \
    {                                                                                                                  \
        const int64_t least = TE_BEHIND / (int64_t)sizeof(type);                                                       \
        return x + (n < least ? least : n);                                                                            \
    }

TE_DEFINE_BEHIND(f32, float)
TE_DEFINE_BEHIND(bf16, uint16_t)

/* Along with bytes at … at + bytes of what is read, a line for two; far: it is not for the first cache. */
TE_INLINE void te_fetch_half(const void *half, int at, int bytes, bool far)
{
    for (int i = (at + 127) / 128; 128 * i < at + bytes; i++)
        if (far)
            __builtin_prefetch((const char *)half + 64 * i, 0, 2);
        else
            __builtin_prefetch((const char *)half + 64 * i, 0, 3);
}

/* A format, with what is added to magnitudes by the low five bits of their exponent. */
typedef struct te_wide_form {
    int      mantissa;
    uint32_t smallest, largest;
    int      nan, sign;
    __m512   low, high;
} te_wide_form;

TE_INLINE __m512 te_unit_table(int from, int mantissa, uint32_t smallest)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i first = _mm512_set1_epi32((int)(smallest >> 23)), which = _mm512_add_epi32(lanes, _mm512_set1_epi32(from));
    __m512i above = _mm512_and_si512(_mm512_sub_epi32(which, first), _mm512_set1_epi32(31));
    __m512i unit = _mm512_add_epi32(_mm512_add_epi32(above, first), _mm512_set1_epi32(23 - mantissa));
    return _mm512_castsi512_ps(
        _mm512_or_si512(_mm512_slli_epi32(unit, 23), _mm512_slli_epi32(above, (unsigned)mantissa)));
}

TE_INLINE te_wide_form te_wide_form_of(int mantissa, uint32_t smallest, uint32_t largest, int nan, int sign)
{
    return (te_wide_form){mantissa, smallest, largest, nan, sign, te_unit_table(0, mantissa, smallest),
                          te_unit_table(16, mantissa, smallest)};
}

/* Of 16 magnitudes: sums whose low byte is the code. */
TE_INLINE __m512i te_sums(__m512 size, te_wide_form f)
{
    __m512i most = _mm512_min_epu32(_mm512_castps_si512(size), _mm512_set1_epi32((int)f.largest));
    __m512i which = _mm512_srli_epi32(_mm512_max_epu32(most, _mm512_set1_epi32((int)f.smallest)), 23);
    __m512 unit = _mm512_permutex2var_ps(f.low, which, f.high);
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(most), unit));
}

TE_INLINE void te_put_codes(uint8_t *to, __m512i codes, bool past)
{
    if (past)
        _mm512_stream_si512((__m512i *)(void *)to, codes);
    else
        _mm512_storeu_si512(to, codes);
}

/* --- float32 ------------------------------------------------------------------------------------------------------ */

/* 16, among which NaNs may be. */
TE_INLINE void te_codes_16_f32(uint8_t *codes, const float *x, __m512 m, te_wide_form f)
{
    __m512i given = _mm512_loadu_si512(x), size = _mm512_and_si512(given, _mm512_set1_epi32(0x7fffffff));
    __m512i code = te_sums(_mm512_mul_ps(_mm512_castsi512_ps(size), m), f);
    __m512i signs = _mm512_srli_epi32(given, f.sign == 8 ? 28 : 24);
    code = _mm512_and_si512(code, _mm512_set1_epi32(f.sign - 1));
    code = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi32(f.sign), code, 0xea); /* a & b | c */
    __mmask16 nans = _mm512_cmpgt_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
    code = _mm512_mask_mov_epi32(code, nans, _mm512_set1_epi32(f.nan));
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(code));
}

/* Codes of 64 that are no NaNs, and *most raised to their magnitudes. */
TE_INLINE __m512i te_numbers_64_f32(const float *x, const __m512 m[4], te_wide_form f, __m512i *most)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i given[4], code[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        te_fetch_ahead(x + 16 * k);
        given[k] = _mm512_loadu_si512(x + 16 * k);
        __m512i size = _mm512_and_si512(given[k], _mm512_set1_epi32(0x7fffffff));
        *most = _mm512_max_epu32(*most, size);
        code[k] = te_sums(_mm512_mul_ps(_mm512_castsi512_ps(size), m[k]), f);
        code[k] = _mm512_and_si512(code[k], _mm512_set1_epi32(f.sign - 1));
    }
    __m512i all = _mm512_packus_epi16(_mm512_packus_epi32(code[0], code[1]), _mm512_packus_epi32(code[2], code[3]));
    __m512i signs = _mm512_packs_epi16(_mm512_packs_epi32(given[0], given[1]), _mm512_packs_epi32(given[2], given[3]));
    if (f.sign == 8) signs = _mm512_srli_epi16(signs, 4);
    all = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi8((char)f.sign), all, 0xea);
    return _mm512_permutexvar_epi32(order, all);
}

TE_INLINE void te_codes_64_f32(uint8_t *codes, const float *x, const __m512 m[4], te_wide_form f, bool past)
{
    __m512i most = _mm512_setzero_si512(), all = te_numbers_64_f32(x, m, f, &most);
    if (__builtin_expect(_mm512_cmpgt_epu32_mask(most, _mm512_set1_epi32(0x7f800000)), 0))
        for (int k = 0; k < 4; k++) te_codes_16_f32(codes + 16 * k, x + 16 * k, m[k], f);
    else
        te_put_codes(codes, all, past);
}

/* --- bfloat16: of two vectors of 32, multipliers of the even elements and of the odd ones ------------------------- */

/* Of 32 magnitudes: the low bytes of 16 bits. */
TE_INLINE __m512i te_halves(__m512i size, __m512 even, __m512 odd, te_wide_form f)
{
    __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(size, 16));
    __m512 high = _mm512_castsi512_ps(_mm512_and_si512(size, _mm512_set1_epi32((int)0xffff0000u)));
    __m512i a = te_sums(_mm512_mul_ps(low, even), f), b = te_sums(_mm512_mul_ps(high, odd), f);
    __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
    return _mm512_and_si512(both, _mm512_set1_epi16((short)(f.sign - 1)));
}

/* 32, among which NaNs may be. */
TE_INLINE void te_codes_32_bf16(uint8_t *codes, const uint16_t *x, __m512 even, __m512 odd, te_wide_form f)
{
    __m512i given = _mm512_loadu_si512(x), size = _mm512_and_si512(given, _mm512_set1_epi16(0x7fff));
    __m512i code = te_halves(size, even, odd, f), signs = _mm512_srli_epi16(given, f.sign == 8 ? 12 : 8);
    code = _mm512_ternarylogic_epi32(signs, _mm512_set1_epi16((short)f.sign), code, 0xea);
    __mmask32 nans = _mm512_cmpgt_epu16_mask(size, _mm512_set1_epi16(0x7f80));
    code = _mm512_mask_mov_epi16(code, nans, _mm512_set1_epi16((short)f.nan));
    _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(code));
}

/* 64 codes in order from the low bytes of 16 bits each, and the signs of what was given. */
TE_INLINE __m512i te_join_halves(__m512i first, __m512i second, __m512i given_first, __m512i given_second, int sign)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i signs = _mm512_packs_epi16(given_first, given_second), all = _mm512_packus_epi16(first, second);
    if (sign == 8) signs = _mm512_srli_epi16(signs, 4);
    return _mm512_permutexvar_epi64(order, _mm512_ternarylogic_epi32(signs, _mm512_set1_epi8((char)sign), all, 0xea));
}

TE_INLINE __m512i te_numbers_64_bf16(const uint16_t *x, const __m512 m[4], te_wide_form f, __m512i *most)
{
    __m512i given[2], code[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        te_fetch_ahead(x + 32 * k);
        given[k] = _mm512_loadu_si512(x + 32 * k);
        __m512i size = _mm512_and_si512(given[k], _mm512_set1_epi16(0x7fff));
        *most = _mm512_max_epu16(*most, size);
        code[k] = te_halves(size, m[2 * k], m[2 * k + 1], f);
    }
    return te_join_halves(code[0], code[1], given[0], given[1], f.sign);
}

TE_INLINE void te_codes_64_bf16(uint8_t *codes, const uint16_t *x, const __m512 m[4], te_wide_form f, bool past)
{
    __m512i most = _mm512_setzero_si512(), all = te_numbers_64_bf16(x, m, f, &most);
    if (__builtin_expect(_mm512_cmpgt_epu16_mask(most, _mm512_set1_epi16(0x7f80)) != 0, 0))
        for (int k = 0; k < 2; k++) te_codes_32_bf16(codes + 32 * k, x + 32 * k, m[2 * k], m[2 * k + 1], f);
    else
        te_put_codes(codes, all, past);
}

/* --- bfloat16 under powers of two --------------------------------------------------------------------------------- */

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

/* Sizes of 32 to codes in 16 bits each. True where one may be small, is infinite or is no number. */
TE_INLINE bool te_shifted(__m512i *code, __m512i size, te_shift shift, te_wide_form f)
{
    __m512i one = _mm512_set1_epi16(1), t = _mm512_subs_epu16(size, shift.offset);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(t, (unsigned)(7 - f.mantissa)), one);
    __m512i half = _mm512_set1_epi16((short)((1 << (6 - f.mantissa)) - 1));
    t = _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(t, half), odd), (unsigned)(7 - f.mantissa));
    uint32_t top = (f.largest - (f.smallest - (1u << 23))) >> (23 - f.mantissa);
    *code = _mm512_min_epu16(t, _mm512_set1_epi16((short)top));
    __mmask32 small = _mm512_cmplt_epu16_mask(_mm512_sub_epi16(size, one), shift.small);
    return (small | _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16(0x7f80))) != 0;
}

/* Codes of 64 bfloat16 under powers of two: whole numbers alone. False, and nothing is written, where those are not
 * enough. */
TE_INLINE bool te_codes_shifted(uint8_t *codes, const uint16_t *x, te_shift first, te_shift second, te_wide_form f,
                               bool past)
{
    __m512i mask = _mm512_set1_epi16(0x7fff), a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + 32), left, right;
    bool not_a = te_shifted(&left, _mm512_and_si512(a, mask), first, f);
    bool not_b = te_shifted(&right, _mm512_and_si512(b, mask), second, f);
    if (not_a | not_b) return false;
    te_put_codes(codes, te_join_halves(left, right, a, b, f.sign), past);
    return true;
}

/* Whether n factors are powers of two, none below the one with these bits. */
TE_INLINE bool te_powers_from(uint32_t lowest, const float *factors, int64_t n)
{
    uint32_t parts = 0, least = 0x7f800000u;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = te_f32_bits(factors[i]);
        parts |= bits & 0x807fffffu;
        least = bits < least ? bits : least;
    }
    return parts == 0 && least >= lowest;
}

#endif
#endif
