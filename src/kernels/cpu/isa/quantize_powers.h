/* quantize_powers.h - codes of one direction under powers of two from what quantize_rounded.h makes, for
 * quantize_encode.h.
 *
 * A factor becomes three bytes: what a code has less than the rounded element, the size below which that would be
 * subnormal, and the one from which on seven bits do not hold it. A 64 that keeps between these takes a subtraction,
 * whatever saturates a minimum; any other, and one under a factor of another kind, goes the general way. Functions
 * are for the formats of eight bits, on machines that permute bytes.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_POWERS_H
#define TE_KERNELS_CPU_QUANTIZE_POWERS_H

#include "quantize_rounded.h"

#if defined(TE_ISA_avx512vbmi)

typedef struct te_bounds {
    __m512i under, least, most;
} te_bounds;

/* Of sixteen factors, in the low bytes of words; `most` is 0 where a factor is none of these powers of two. */
TE_INLINE te_bounds te_bounds_of(__m512i factors, te_wide_form f)
{
    __m512i exponent = _mm512_srli_epi32(factors, 23), first = _mm512_set1_epi32((int)(f.smallest >> 23) + 126);
    __m512i offset = _mm512_sub_epi32(first, exponent), one = _mm512_set1_epi32(1);
    __m512i most = _mm512_min_epi32(_mm512_add_epi32(offset, _mm512_set1_epi32(28)), _mm512_set1_epi32(0xfe));
    __mmask16 good = _mm512_testn_epi32_mask(factors, _mm512_set1_epi32((int)0x807fffffu));
    good = _mm512_mask_cmple_epu32_mask(good, _mm512_sub_epi32(exponent, one),
                                        _mm512_set1_epi32((int)te_most_power(f.smallest) - 1));
    return (te_bounds){.under = _mm512_slli_epi32(offset, (unsigned)f.mantissa),
                       .least = te_least_under(offset),
                       .most = _mm512_maskz_mov_epi32(good, most)};
}

/* The same for each of 64 columns; *any: that is of use. */
TE_INLINE te_bounds te_bounds_down(bool *any, const float *factors, te_wide_form f)
{
    uint8_t bytes[3][64];
    *any = false;
    if (f.sign == 8) return (te_bounds){_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int k = 0; k < 64; k += 16) {
        te_bounds b = te_bounds_of(_mm512_loadu_si512(factors + k), f);
        _mm_storeu_si128((__m128i *)(bytes[0] + k), _mm512_cvtepi32_epi8(b.under));
        _mm_storeu_si128((__m128i *)(bytes[1] + k), _mm512_cvtepi32_epi8(b.least));
        _mm_storeu_si128((__m128i *)(bytes[2] + k), _mm512_cvtepi32_epi8(b.most));
    }
    te_bounds all = {_mm512_loadu_si512(bytes[0]), _mm512_loadu_si512(bytes[1]), _mm512_loadu_si512(bytes[2])};
    *any = _mm512_testn_epi8_mask(all.most, all.most) == 0;
    return all;
}

/* Those of sixteen blocks of a row, a byte four times over, since words are broadcast from memory for nothing. */
typedef struct te_bounds_along {
    uint32_t under[16], least[16], most[16];
} te_bounds_along;

TE_INLINE void te_bounds_for(te_bounds_along *to, __m512i factors, te_wide_form f)
{
    const __m512i splat = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    te_bounds b = te_bounds_of(factors, f);
    _mm512_storeu_si512(to->under, _mm512_shuffle_epi8(b.under, splat));
    _mm512_storeu_si512(to->least, b.least);
    _mm512_storeu_si512(to->most, _mm512_shuffle_epi8(b.most, splat));
}

TE_INLINE te_bounds te_bounds_at(const te_bounds_along *all, int b)
{
    return (te_bounds){_mm512_set1_epi32((int)all->under[b]), _mm512_set1_epi32((int)all->least[b]),
                       _mm512_set1_epi32((int)all->most[b])};
}

/* Codes of 64; false, and nothing is written, where they go the general way. */
#define TE_DEFINE_POWERS(dtype, type)                                                                                  \
    TE_INLINE bool te_codes_bounded_##dtype(uint8_t *codes, const type *x, te_bounds b, const te_rounding *c,          \
                                            bool past)                                                                 \
    {                                                                                                                  \
        te_rounded_64 r = te_round_64_##dtype(x, c);                                                                   \
        if (__builtin_expect(!te_is_easy(r, b.least, b.most), 0)) return false;                                        \
        __m512i code = _mm512_min_epu8(_mm512_maskz_sub_epi8(r.some, r.bytes, b.under), c->top);                       \
        te_put_codes(codes, te_with_signs(code, r, c), past);                                                          \
        return true;                                                                                                   \
    }                                                                                                                  \
    /* Whole 64s of n, in blocks of multiples of 64, or one of n. */                                                   \
    TE_INLINE void te_powers_along_##dtype(uint8_t *codes, const type *x, const float *multipliers, int64_t n,         \
                                           int64_t block, te_wide_form f, bool past)                                   \
    {                                                                                                                  \
        const te_rounding c = te_rounding_of(f);                                                                       \
        te_bounds_along all;                                                                                           \
        int64_t whole = n - n % 64, blocks = block < n ? (n + block - 1) / block : 1, i = 0;                           \
        const type *half = te_behind_##dtype(x, n) + n / 2;                                                            \
        for (int64_t at = 0; i < whole; at += 16) {                                                                    \
            __mmask16 there = (__mmask16)(blocks - at < 16 ? (1u << (blocks - at)) - 1 : 0xffff);                      \
            te_bounds_for(&all, _mm512_maskz_loadu_epi32(there, multipliers + at), f);                                 \
            for (int b = 0; b < 16 && i < whole; b++) {                                                                \
                te_bounds bounds = te_bounds_at(&all, b);                                                              \
                for (int64_t end = whole - i < block ? whole : i + block; i < end; i += 64) {                          \
                    te_fetch_half(half + i / 2, 0, 64 * sizeof(type), false);                                          \
                    if (te_codes_bounded_##dtype(codes + i, x + i, bounds, &c, past)) continue;                        \
                    const __m512 m = _mm512_set1_ps(multipliers[at + b]), all_of[4] = {m, m, m, m};                    \
                    te_codes_64_##dtype(codes + i, x + i, all_of, f, past);                                            \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

TE_DEFINE_POWERS(f32, float)
TE_DEFINE_POWERS(bf16, uint16_t)

#elif defined(TE_ISA_avx512)
typedef struct te_bounds {
    int none;
} te_bounds;

#define te_bounds_down(any, factors, f)            (*(any) = false, (te_bounds){0})
#define te_codes_bounded_f32(codes, x, bounds, c, past)  ((void)(bounds), (void)(c), false)
#define te_codes_bounded_bf16(codes, x, bounds, c, past) ((void)(bounds), (void)(c), false)
#endif

#endif
