/* quantize_folds.h - the largest magnitudes of many vectors at once, for quantize_amax.h and quantize_along.h.
 *
 * A maximum over a vector's own elements takes as many steps as there are halvings of it. Two vectors are folded
 * into one in three instructions, so those of sixteen come for the price of fifteen foldings. The order that results
 * is put right at the end.
 *
 *      quarters   [a0 a1 a2 a3] [b0 b1 b2 b3]      [a01 a23 b01 b23]        of 128 bits
 *      halves     of each quarter                  [a | b]                  of 64
 *      pairs      of each half                     [a a' b b']              of 32
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_FOLDS_H
#define TE_KERNELS_CPU_QUANTIZE_FOLDS_H

#include "quantize_vectors.h"

#if defined(TE_ISA_avx512)

#define DEFINE_FOLDS(name, MAX)                                                                                        \
    TE_INLINE __m512i fold_quarters_##name(__m512i a, __m512i b)                                                       \
    {                                                                                                                  \
        return MAX(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));                                \
    }                                                                                                                  \
    TE_INLINE __m512i fold_halves_##name(__m512i a, __m512i b)                                                         \
    {                                                                                                                  \
        return MAX(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));                                          \
    }                                                                                                                  \
    TE_INLINE __m512i fold_pairs_##name(__m512i a, __m512i b)                                                          \
    {                                                                                                                  \
        __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);                                                 \
        return MAX(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),                                                 \
                   _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));                                                \
    }

DEFINE_FOLDS(16, _mm512_max_epu16)
DEFINE_FOLDS(32, _mm512_max_epu32)

/* Of 32 blocks of 16 halves, two to a vector, the largest, in their order. */
TE_INLINE __m512i te_fold_halves(const __m512i v[16])
{
    __m512i w[8], z[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) w[i] = fold_quarters_16(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        z[i] = fold_pairs_16(fold_halves_16(w[4 * i], w[4 * i + 1]), fold_halves_16(w[4 * i + 2], w[4 * i + 3]));
    __m512i low = _mm512_max_epu16(z[0], _mm512_srli_epi32(z[0], 16)),
            high = _mm512_max_epu16(z[1], _mm512_slli_epi32(z[1], 16));
    /* quarter q, element 2 d + h: block 4 (d + 4 h) + q */
    static const uint16_t order[32] = {0, 8,  16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30,
                                       1, 9,  17, 25, 3, 11, 19, 27, 5, 13, 21, 29, 7, 15, 23, 31};
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), _mm512_mask_blend_epi16(0xaaaaaaaau, low, high));
}

TE_INLINE __m512i te_size_bf16(const uint16_t *x)
{
    return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
}

TE_INLINE __m512i te_size_f32(const float *x)
{
    return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* The larger one of each two halves, as float32. */
TE_INLINE __m512i te_larger_halves(__m512i sizes)
{
    return _mm512_max_epu32(_mm512_slli_epi32(sizes, 16), _mm512_and_si512(sizes, _mm512_set1_epi32((int)0xffff0000u)));
}

/* The largest of each of sixteen vectors of halves, as float32, or of words. */
TE_INLINE __m512i te_largest_bf16(const __m512i v[16]) { return te_larger_halves(te_fold_halves(v)); }

/* Four vectors of words in one, a quarter each. */
TE_INLINE __m512i te_fold_words(const __m512i v[4])
{
    __m512i halves[2]; /* a vector's first quarter against its third, its second against its fourth; then these */
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++)
        halves[h] = _mm512_max_epu32(_mm512_shuffle_i64x2(v[2 * h], v[2 * h + 1], 0x44),
                                     _mm512_shuffle_i64x2(v[2 * h], v[2 * h + 1], 0xee));
    return fold_quarters_32(halves[0], halves[1]);
}

/* The largest of each quarter of four. */
TE_INLINE __m512i te_fold_quarters(const __m512i y[4])
{
    static const int order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    __m512i sizes = fold_pairs_32(fold_halves_32(y[0], y[1]), fold_halves_32(y[2], y[3]));
    return _mm512_permutexvar_epi32(_mm512_loadu_si512(order), sizes);
}

TE_INLINE __m512i te_largest_f32(const __m512i v[16])
{
    __m512i y[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) y[k] = te_fold_words(v + 4 * k);
    return te_fold_quarters(y);
}

TE_INLINE void te_put_size_f32(float *amax, __m512i sizes) { _mm512_storeu_si512(amax, sizes); }

TE_INLINE void te_put_size_bf16(float *amax, __m512i sizes)
{
    __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(sizes));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(sizes, 1));
    _mm512_storeu_si512(amax, _mm512_slli_epi32(low, 16));
    _mm512_storeu_si512(amax + 16, _mm512_slli_epi32(high, 16));
}

/* Sixteen times one vector, or so many, an even number, of which so many are there; what comes behind is asked for. */
#define TE_DEFINE_MOST(dtype, type, MAX)                                                                               \
    TE_INLINE __m512i te_most_of_##dtype(const type *x, const int vectors, const type *half)                           \
    {                                                                                                                  \
        __m512i most = _mm512_setzero_si512();                                                                         \
        _Pragma("GCC unroll 8") for (int u = 0; u < vectors; u++)                                                      \
        {                                                                                                              \
            __m512i size = te_size_##dtype(x + u * (64 / (int)sizeof(type)));                                          \
            te_fetch_half(half, 64 * u, 64, false);                                                                    \
            most = u ? MAX(most, size) : size;                                                                         \
        }                                                                                                              \
        return most;                                                                                                   \
    }                                                                                                                  \
    TE_INLINE void te_most_##dtype(__m512i v[16], const type *x, const int vectors, const int there, const type *half) \
    {                                                                                                                  \
        enum { LINE = 64 / sizeof(type) };                                                                             \
        if (vectors == 1) {                                                                                            \
            _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++)                                                      \
            {                                                                                                          \
                v[k] = k < there ? te_size_##dtype(x + k * LINE) : _mm512_setzero_si512();                             \
                te_fetch_half(half, 64 * k, 64, false);                                                                \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        for (int k = 0; k < there; k++)                                                                                \
            v[k] = te_most_of_##dtype(x + k * vectors * LINE, vectors, half + k * vectors * LINE / 2);                 \
        for (int k = there; k < 16; k++) v[k] = _mm512_setzero_si512();                                                \
    }

TE_DEFINE_MOST(f32, float, _mm512_max_epu32)
TE_DEFINE_MOST(bf16, uint16_t, _mm512_max_epu16)
#endif

#endif
