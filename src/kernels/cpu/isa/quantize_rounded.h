/* quantize_rounded.h - 64 elements rounded to a format's mantissa as they stand, for quantize_both.h and
 * quantize_encode.h.
 *
 * Under a power of two the exponent moves and the mantissa stays: where the element is not 0 and its code a normal
 * number, the code is what comes from here less an offset. Only seven bits of it are a code, so what is subtracted
 * is bytes, and eight bits of an offset are enough. A float32 is taken for a bfloat16 that is odd where anything
 * follows.
 *
 * Where bytes can be permuted elements are taken apart at once: the upper byte has the sign and the exponent, the
 * lower one what is rounded, and six bits of that say whether it goes up.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_ROUNDED_H
#define TE_KERNELS_CPU_QUANTIZE_ROUNDED_H

#include "quantize_vectors.h"

#if defined(TE_ISA_avx512)

/* Elements rounded in the low seven bits of a byte, which are those of the code of a normal number but for an
 * offset; signs; which are not 0; and their sizes, for te_is_easy. */
typedef struct te_rounded_64 {
    __m512i bytes, signs;
    __mmask64 some;
    __m512i least, most;
} te_rounded_64;

#if defined(TE_ISA_avx512vbmi)

/* Constants of a loop. By the low six bits: whether what is dropped after the mantissa is more than a half of its last
 * place, or that and the place odd. */
typedef struct te_rounding {
    int mantissa;
    __m512i even, odd, ups, upper, less, size, sign, top; /* top: the largest code */
} te_rounding;

TE_INLINE te_rounding te_rounding_of(te_wide_form f)
{
    const int mantissa = f.mantissa;
    const uint32_t top = (f.largest - (f.smallest - (1u << 23))) >> (23 - f.mantissa);
    static const uint8_t evens[64] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                      32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62,
                                      64, 66, 68, 70, 72, 74, 76, 78, 80, 82, 84, 86, 88, 90, 92, 94,
                                      96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};
    const int64_t above = 0x0101010101010100, all = 0x0101010101010101;
    const __m512i even = _mm512_loadu_si512(evens);
    return (te_rounding){.mantissa = mantissa,
                         .even = te_kept(even, true),
                         .odd = te_kept(_mm512_add_epi8(even, _mm512_set1_epi8(1)), true),
                         .ups = te_kept(mantissa == 3 ? _mm512_setr_epi64(0, above, 0, all, 0, above, 0, all)
                                                      : _mm512_setr_epi64(0, 0, above, all, 0, 0, all, all), true),
                         .upper = te_kept(_mm512_set1_epi8((char)(0xff << (mantissa + 1))), true),
                         .less = te_kept(_mm512_set1_epi8(-1), true),
                         .size = te_kept(_mm512_set1_epi8(0x7f), true),
                         .sign = te_kept(_mm512_set1_epi8((char)0x80), true),
                         .top = te_kept(_mm512_set1_epi8((char)top), true)};
}

/* Of 64 halves in two vectors. Sizes are the upper seven bits of exponents, doubled, those of the smallest less 1. */
TE_INLINE te_rounded_64 te_round_halves(__m512i a, __m512i b, const te_rounding *c)
{
    const unsigned mantissa = (unsigned)c->mantissa;
    __m512i top = _mm512_permutex2var_epi8(a, c->odd, b), low = _mm512_permutex2var_epi8(a, c->even, b);
    __m512i kept = _mm512_ternarylogic_epi32(_mm512_slli_epi16(top, mantissa + 1), _mm512_srli_epi16(low, 7 - mantissa),
                                             c->upper, 0xe4); /* c ? a : b */
    __m512i sizes = _mm512_add_epi8(top, top);
    return (te_rounded_64){.bytes = _mm512_add_epi8(kept, _mm512_permutexvar_epi8(low, c->ups)),
                           .signs = top,
                           .some = _mm512_test_epi8_mask(top, c->size),
                           .least = _mm512_add_epi8(sizes, c->less),
                           .most = sizes};
}

/* Of sixteen offsets, what te_is_easy is given in each word so that no code is subnormal: exponents are looked at by
 * twos. */
TE_INLINE __m512i te_least_under(__m512i offsets)
{
    const __m512i splat = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    __m512i least = _mm512_max_epi32(offsets, _mm512_setzero_si512());
    return _mm512_or_si512(_mm512_shuffle_epi8(least, splat), _mm512_set1_epi8(1));
}

TE_INLINE __m512i te_larger(__m512i a, __m512i b) { return _mm512_max_epu8(a, b); }

/* No size of a finite number. */
TE_INLINE __m512i te_most(void) { return _mm512_set1_epi8((char)0xfe); }

/* Whether all of them are below `most`, and none but zeros too small. */
TE_INLINE bool te_is_easy(te_rounded_64 r, __m512i least, __m512i most)
{
    return _kortestz_mask64_u8(_mm512_cmplt_epu8_mask(r.least, least), _mm512_cmpge_epu8_mask(r.most, most));
}

/* The exponent of the largest factor under which what counts as 0, all below 2^-125, is 0. */
TE_INLINE uint32_t te_most_power(uint32_t smallest) { return (smallest >> 23) + 121; }
#else

typedef struct te_rounding {
    int mantissa;
    __m512i sign;
} te_rounding;

TE_INLINE te_rounding te_rounding_of(te_wide_form f)
{
    return (te_rounding){f.mantissa, _mm512_set1_epi8((char)0x80)};
}

/* Of 64 halves in two vectors. Sizes are those of 32 bfloat16, the smallest less 1. */
TE_INLINE te_rounded_64 te_round_halves(__m512i a, __m512i b, const te_rounding *c)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), one = _mm512_set1_epi16(1);
    const unsigned dropped = 7 - (unsigned)c->mantissa;
    __m512i given[2] = {a, b}, size[2], r[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        size[k] = _mm512_and_si512(given[k], _mm512_set1_epi16(0x7fff));
        __m512i odd = _mm512_and_si512(_mm512_srli_epi16(size[k], dropped), one);
        __m512i raised = _mm512_add_epi16(size[k], _mm512_set1_epi16((short)((1 << (dropped - 1)) - 1)));
        r[k] = _mm512_srli_epi16(_mm512_add_epi16(raised, odd), dropped);
    }
    __mmask64 some = _mm512_kunpackd(_mm512_test_epi16_mask(size[1], size[1]),
                                     _mm512_test_epi16_mask(size[0], size[0]));
    __m512i low = _mm512_set1_epi16(0x7f),
            all = _mm512_packus_epi16(_mm512_and_si512(r[0], low), _mm512_and_si512(r[1], low));
    return (te_rounded_64){.bytes = _mm512_permutexvar_epi64(order, all),
                           .signs = _mm512_permutexvar_epi64(order, _mm512_packs_epi16(a, b)),
                           .some = some,
                           .least = _mm512_min_epu16(_mm512_sub_epi16(size[0], one), _mm512_sub_epi16(size[1], one)),
                           .most = _mm512_max_epu16(size[0], size[1])};
}

TE_INLINE __m512i te_least_under(__m512i offsets)
{
    __m512i least = _mm512_slli_epi32(_mm512_max_epi32(offsets, _mm512_setzero_si512()), 7);
    return _mm512_or_si512(_mm512_or_si512(least, _mm512_slli_epi32(least, 16)), _mm512_set1_epi16(127));
}

TE_INLINE __m512i te_larger(__m512i a, __m512i b) { return _mm512_max_epu16(a, b); }

TE_INLINE __m512i te_most(void) { return _mm512_set1_epi16(0x7f80); }

TE_INLINE bool te_is_easy(te_rounded_64 r, __m512i least, __m512i most)
{
    return (_mm512_cmplt_epu16_mask(r.least, least) | _mm512_cmpge_epu16_mask(r.most, most)) == 0;
}

TE_INLINE uint32_t te_most_power(uint32_t smallest) { return (void)smallest, 254; }
#endif

TE_INLINE te_rounded_64 te_round_64_bf16(const uint16_t *x, const te_rounding *c)
{
    return te_round_halves(_mm512_loadu_si512(x), _mm512_loadu_si512(x + 32), c);
}

/* The upper halves of 32 float32, odd where anything follows: they are rounded alike, and 0 if these are. */
TE_INLINE __m512i te_odd_halves(__m512i a, __m512i b)
{
    static const uint16_t evens[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                       32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const __m512i even = _mm512_loadu_si512(evens), one = _mm512_set1_epi16(1), odd = _mm512_add_epi16(even, one);
    __m512i lower = _mm512_permutex2var_epi16(a, even, b), upper = _mm512_permutex2var_epi16(a, odd, b);
    return _mm512_or_si512(upper, _mm512_min_epu16(lower, one));
}

TE_INLINE te_rounded_64 te_round_64_f32(const float *x, const te_rounding *c)
{
    __m512i first = te_odd_halves(_mm512_loadu_si512(x), _mm512_loadu_si512(x + 16));
    __m512i second = te_odd_halves(_mm512_loadu_si512(x + 32), _mm512_loadu_si512(x + 48));
    return te_round_halves(first, second, c);
}

TE_INLINE __m512i te_with_signs(__m512i codes, te_rounded_64 r, const te_rounding *c)
{
    return _mm512_ternarylogic_epi32(codes, r.signs, c->sign, 0xd8); /* c ? b : a */
}

/* Bytes less their offsets, but for zeros, with their signs. */
TE_INLINE __m512i te_codes_of(te_rounded_64 r, __m512i offsets, const te_rounding *c)
{
    return te_with_signs(_mm512_maskz_sub_epi8(r.some, r.bytes, offsets), r, c);
}

#endif
#endif
