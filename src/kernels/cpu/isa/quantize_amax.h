/* quantize_amax.h - the largest magnitudes of many short blocks at once, for quantize_blocks.c.
 *
 * A maximum over a vector's own elements takes as many steps as there are halvings of it. Two vectors are folded into one in
 * three instructions, so those of sixteen come for the price of fifteen foldings. The order that results is put right at the end.
 *
 *      quarters   [a0 a1 a2 a3] [b0 b1 b2 b3]      [a01 a23 b01 b23]        of 128 bits
 *      halves     of each quarter                  [a | b]                  of 64
 *      pairs      of each half                     [a a' b b']              of 32
 *
 * Functions say how many elements they have done; a NaN in a stretch leaves it to the caller.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_AMAX_H
#define TE_KERNELS_CPU_QUANTIZE_AMAX_H

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

/* Sizes of 32 blocks of 16 halves, in their order. */
TE_INLINE __m512i te_sizes_of_32(const uint16_t *x)
{
    __m512i w[8], z[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i mask = _mm512_set1_epi16(0x7fff);
        w[i] = fold_quarters_16(_mm512_and_si512(_mm512_loadu_si512(x + 64 * i), mask),
                                _mm512_and_si512(_mm512_loadu_si512(x + 64 * i + 32), mask));
    }
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

/* Blocks of 16 or 32 bfloat16. */
TE_INLINE int64_t te_amaxes_bf16(float *amax, const uint16_t *x, int64_t n, int64_t block)
{
    int64_t i = 0;
    if (block != 16 && block != 32) return 0;
    for (; i + 512 <= n; i += 512) {
        __m512i sizes = te_sizes_of_32(x + i);
        if (_mm512_cmpgt_epu16_mask(sizes, _mm512_set1_epi16(0x7f80))) return i;
        __m512i odd = _mm512_and_si512(sizes, _mm512_set1_epi32((int)0xffff0000u));
        if (block == 32) {
            _mm512_storeu_si512(amax, _mm512_max_epu32(_mm512_slli_epi32(sizes, 16), odd));
            amax += 16;
            continue;
        }
        for (int h = 0; h < 2; h++, amax += 16) {
            __m256i half = h ? _mm512_extracti64x4_epi64(sizes, 1) : _mm512_castsi512_si256(sizes);
            _mm512_storeu_si512(amax, _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        }
    }
    return i;
}

/* Blocks of 16 or 32 float32. */
TE_INLINE int64_t te_amaxes_f32(float *amax, const float *x, int64_t n, int64_t block)
{
    static const int order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    int64_t i = 0;
    if (block != 16 && block != 32) return 0;
    for (; i + 16 * block <= n; i += 16 * block, amax += 16) {
        __m512i v[16], y[4];
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) {
            v[k] = _mm512_and_si512(_mm512_loadu_si512(x + i + k * block), mask);
            if (block == 32)
                v[k] = _mm512_max_epu32(v[k], _mm512_and_si512(_mm512_loadu_si512(x + i + k * block + 16), mask));
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            __m512i halves[2]; /* a vector's first quarter against its third, its second against its fourth; then these */
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m512i a = v[4 * k + 2 * h], b = v[4 * k + 2 * h + 1];
                halves[h] = _mm512_max_epu32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
            }
            y[k] = fold_quarters_32(halves[0], halves[1]);
        }
        __m512i sizes = fold_pairs_32(fold_halves_32(y[0], y[1]), fold_halves_32(y[2], y[3]));
        if (_mm512_cmpgt_epu32_mask(sizes, _mm512_set1_epi32(0x7f800000))) return i;
        _mm512_storeu_si512(amax, _mm512_permutexvar_epi32(_mm512_loadu_si512(order), sizes));
    }
    return i;
}
#else
#define te_amaxes_bf16(amax, x, n, block) 0
#define te_amaxes_f32(amax, x, n, block)  0
#endif

#define te_amaxes_f16(amax, x, n, block) 0

#endif
