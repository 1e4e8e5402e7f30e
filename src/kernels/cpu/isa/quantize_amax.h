/* quantize_amax.h - the largest magnitudes of many short blocks at once, for quantize_blocks.c.
 *
 * A maximum over a vector's own elements takes as many steps as there are halvings of it. Two vectors are folded
 * into one in three instructions, so those of sixteen come for the price of fifteen foldings. The order that results
 * is put right at the end.
 *
 *      quarters   [a0 a1 a2 a3] [b0 b1 b2 b3]      [a01 a23 b01 b23]        of 128 bits
 *      halves     of each quarter                  [a | b]                  of 64
 *      pairs      of each half                     [a a' b b']              of 32
 *
 * Functions say how many elements they have done; a NaN in a stretch leaves it to the caller.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_AMAX_H
#define TE_KERNELS_CPU_QUANTIZE_AMAX_H

#include "kernels/cpu/quantize_blocks.h"
#include "quantize_vectors.h"

#include <string.h>

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

TE_INLINE __m512i te_largest_f32(const __m512i v[16])
{
    static const int order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    __m512i y[4];
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
    return _mm512_permutexvar_epi32(_mm512_loadu_si512(order), sizes);
}

TE_INLINE void te_put_size_f32(float *amax, __m512i sizes) { _mm512_storeu_si512(amax, sizes); }

TE_INLINE void te_put_size_bf16(float *amax, __m512i sizes)
{
    __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(sizes));
    __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(sizes, 1));
    _mm512_storeu_si512(amax, _mm512_slli_epi32(low, 16));
    _mm512_storeu_si512(amax + 16, _mm512_slli_epi32(high, 16));
}

/* Sixteen times so many vectors; what comes behind is asked for. */
#define TE_DEFINE_MOST(dtype, type, MAX)                                                                               \
    TE_INLINE void te_most_##dtype(__m512i v[16], const type *x, const int vectors, const type *half)                  \
    {                                                                                                                  \
        _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++)                                                          \
            for (int u = 0, at = k * vectors; u < vectors; u++, at++) {                                                \
                __m512i size = te_size_##dtype(x + at * (64 / (int)sizeof(type)));                                     \
                te_fetch_half(half, 64 * at, 64, false);                                                               \
                v[k] = u ? MAX(v[k], size) : size;                                                                     \
            }                                                                                                          \
    }

TE_DEFINE_MOST(f32, float, _mm512_max_epu32)
TE_DEFINE_MOST(bf16, uint16_t, _mm512_max_epu16)

TE_INLINE int64_t te_amaxes_of_bf16(float *amax, const uint16_t *x, int64_t n, const int64_t block)
{
    const int64_t vectors = block / 32 + (block < 32);
    const uint16_t *half = te_behind_bf16(x, n);
    int64_t i = 0;
    for (; i + 512 * vectors <= n; i += 512 * vectors, amax += 512 * vectors / block) {
        __m512i v[16];
        te_most_bf16(v, x + i, (int)vectors, half + i / 2);
        __m512i sizes = te_fold_halves(v);
        if (_mm512_cmpgt_epu16_mask(sizes, _mm512_set1_epi16(0x7f80))) return i;
        if (block == 16)
            te_put_size_bf16(amax, sizes);
        else
            _mm512_storeu_si512(amax, te_larger_halves(sizes));
    }
    return i;
}

TE_INLINE int64_t te_amaxes_of_f32(float *amax, const float *x, int64_t n, const int64_t block)
{
    const float *half = te_behind_f32(x, n);
    int64_t i = 0;
    for (; i + 16 * block <= n; i += 16 * block, amax += 16) {
        __m512i v[16];
        te_most_f32(v, x + i, (int)block / 16, half + i / 2);
        __m512i sizes = te_largest_f32(v);
        if (_mm512_cmpgt_epu32_mask(sizes, _mm512_set1_epi32(0x7f800000))) return i;
        _mm512_storeu_si512(amax, sizes);
    }
    return i;
}

/* Blocks of 16, 32 or 128; a compiler makes loops of its own for each. */
#define TE_DEFINE_AMAXES(dtype, type)                                                                                  \
    TE_INLINE int64_t te_amaxes_##dtype(float *amax, const type *x, int64_t n, int64_t block)                          \
    {                                                                                                                  \
        if (block == 16) return te_amaxes_of_##dtype(amax, x, n, 16);                                                  \
        if (block == 32) return te_amaxes_of_##dtype(amax, x, n, 32);                                                  \
        return block == 128 ? te_amaxes_of_##dtype(amax, x, n, 128) : 0;                                               \
    }

TE_DEFINE_AMAXES(f32, float)
TE_DEFINE_AMAXES(bf16, uint16_t)

/* --- of columns, and of rows and columns in one visit ------------------------------------------------------------- */

/* Runs of a kilobyte of all rows before the next: rows may lie in pages of their own, of which a machine remembers
 * few. */
#define TE_DEFINE_AMAXES_DOWN(dtype, type, MAX, CMPGT, INFINITE)                                                       \
    TE_INLINE int te_amaxes_down_##dtype(float *amax, const type *x, int64_t stride, int rows, int n)                  \
    {                                                                                                                  \
        enum { VECTOR = 64 / sizeof(type), WIDE = 16 * VECTOR };                                                       \
        const type *half = te_behind_##dtype(x, rows * stride);                                                        \
        int j = 0;                                                                                                     \
        for (; j + WIDE <= n; j += WIDE) {                                                                             \
            __m512i v[16], top = _mm512_setzero_si512();                                                               \
            _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++) v[k] = top;                                          \
            for (int i = 0; i < rows; i++)                                                                             \
                _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++)                                                  \
                {                                                                                                      \
                    te_fetch_half(half + i * stride + j / 2, 64 * k, 64, true);                                        \
                    v[k] = MAX(v[k], te_size_##dtype(x + i * stride + j + k * VECTOR));                                \
                }                                                                                                      \
            _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++) top = MAX(top, v[k]);                                \
            if (CMPGT(top, INFINITE)) return j;                                                                        \
            _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++) te_put_size_##dtype(amax + j + k * VECTOR, v[k]);    \
        }                                                                                                              \
        return j;                                                                                                      \
    }

TE_DEFINE_AMAXES_DOWN(f32, float, _mm512_max_epu32, _mm512_cmpgt_epu32_mask, _mm512_set1_epi32(0x7f800000))
TE_DEFINE_AMAXES_DOWN(bf16, uint16_t, _mm512_max_epu16, _mm512_cmpgt_epu16_mask, _mm512_set1_epi16(0x7f80))

/* Sixteen blocks at a time: those of 32 in a stretch of a row, or four of 128 of each of four rows. A block of 32 is
 * `wide` vectors. What columns have had is kept as sizes. */
#define TE_DEFINE_AMAX_BOTH(dtype, type, wide, MAX)                                                                    \
    TE_INLINE __m512i te_amax_block_##dtype(const type *x, uint8_t *kept, bool first, int vectors)                     \
    {                                                                                                                  \
        __m512i v = _mm512_setzero_si512();                                                                            \
        _Pragma("GCC unroll 8") for (int u = 0; u < vectors; u++)                                                      \
        {                                                                                                              \
            __m512i size = te_size_##dtype(x + u * (64 / (int)sizeof(type)));                                          \
            __m512i most = first ? size : MAX(_mm512_loadu_si512(kept + 64 * u), size);                                \
            _mm512_storeu_si512(kept + 64 * u, most);                                                                  \
            v = u ? MAX(v, size) : size;                                                                               \
        }                                                                                                              \
        return v;                                                                                                      \
    }                                                                                                                  \
    TE_INLINE __m512i te_amax_short_##dtype(float *along, uint8_t *kept, const te_two_ways *w)                         \
    {                                                                                                                  \
        __m512i top = _mm512_setzero_si512();                                                                          \
        for (int i = 0; i < w->rows; i++, along += w->step)                                                            \
            for (int64_t j = 0; j < w->n; j += 512) {                                                                  \
                const type *x = (const type *)w->x + i * w->stride + j;                                                \
                const type *half = (const type *)(w->next ? w->next : w->x) + i * w->stride + j / 2;                   \
                int64_t there = (w->n - j) / 32;                                                                       \
                __m512i v[16];                                                                                         \
                _Pragma("GCC unroll 16") for (int b = 0; b < 16; b++)                                                  \
                {                                                                                                      \
                    te_fetch_half(half, 32 * b * (int)sizeof(type), 32 * sizeof(type), true);                          \
                    v[b] = b >= there ? _mm512_setzero_si512()                                                         \
                        : te_amax_block_##dtype(x + 32 * b, kept + (j + 32 * b) * (int)sizeof(type), i == 0, wide);    \
                }                                                                                                      \
                __m512i sizes = te_largest_##dtype(v);                                                                 \
                top = _mm512_max_epu32(top, sizes);                                                                    \
                _mm512_mask_storeu_epi32(along + j / 32, (__mmask16)(there < 16 ? (1u << there) - 1 : 0xffff), sizes); \
            }                                                                                                          \
        return top;                                                                                                    \
    }                                                                                                                  \
    TE_INLINE __m512i te_amax_long_##dtype(float *along, uint8_t *kept, const te_two_ways *w)                          \
    {                                                                                                                  \
        __m512i top = _mm512_setzero_si512();                                                                          \
        for (int i = 0; i < w->rows; i += 4, along += 4 * w->step)                                                     \
            for (int64_t j = 0; j < w->n; j += 512) {                                                                  \
                int64_t there = (w->n - j) / 128;                                                                      \
                float found[16];                                                                                       \
                __m512i v[16];                                                                                         \
                for (int r = 0; r < 4; r++) {                                                                          \
                    const type *x = (const type *)w->x + (i + r) * w->stride + j;                                      \
                    for (int k = 0; k < 512; k += 64 / (int)sizeof(type))                                              \
                        __builtin_prefetch(x + 4 * w->stride + k, 0, 2);                                               \
                    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++) v[4 * r + b] =                                 \
                        b >= there ? _mm512_setzero_si512()                                                            \
                                   : te_amax_block_##dtype(x + 128 * b, kept + (j + 128 * b) * (int)sizeof(type),      \
                                                           i + r == 0, 4 * (wide));                                    \
                }                                                                                                      \
                __m512i sizes = te_largest_##dtype(v);                                                                 \
                top = _mm512_max_epu32(top, sizes);                                                                    \
                _mm512_storeu_si512(found, sizes);                                                                     \
                for (int r = 0; r < 4; r++)                                                                            \
                    for (int b = 0; b < 4 && b < there; b++) along[r * w->step + j / 128 + b] = found[4 * r + b];      \
            }                                                                                                          \
        return top;                                                                                                    \
    }                                                                                                                  \
    static bool amax_both_##dtype(float *along, float *down, const te_two_ways *w)                                     \
    {                                                                                                                  \
        uint8_t kept[TE_MOST_COLUMNS * sizeof(type)];                                                                  \
        bool long_blocks = w->block == 128 && w->rows % 4 == 0;                                                        \
        if ((w->block != 32 && !long_blocks) || w->n > TE_MOST_COLUMNS || w->n % w->block != 0) return false;          \
        __m512i top = long_blocks ? te_amax_long_##dtype(along, kept, w) : te_amax_short_##dtype(along, kept, w);      \
        for (int64_t j = 0; j < w->n; j += 64 / sizeof(type))                                                          \
            te_put_size_##dtype(down + j, _mm512_loadu_si512(kept + j * (int)sizeof(type)));                           \
        return !_mm512_cmpgt_epu32_mask(top, _mm512_set1_epi32(0x7f800000));                                           \
    }

TE_DEFINE_AMAX_BOTH(f32, float, 2, _mm512_max_epu32)
TE_DEFINE_AMAX_BOTH(bf16, uint16_t, 1, _mm512_max_epu16)

/* Squares of 128 side by side, row after row as they lie in memory. */
#define TE_DEFINE_AMAX_SQUARES(dtype, type, MAX)                                                                       \
    static int64_t amax_squares_##dtype(float *amax, const void *data, int64_t stride, int rows, int64_t n,            \
                                        int64_t block)                                                                 \
    {                                                                                                                  \
        enum { WIDE = 128, VECTOR = 64 / sizeof(type), MOST = TE_MOST_COLUMNS / WIDE };                                \
        __m512i kept[MOST], top = _mm512_setzero_si512();                                                              \
        const int64_t blocks = n / WIDE;                                                                               \
        if (block != WIDE || blocks > MOST) return 0;                                                                  \
        for (int64_t b = 0; b < blocks || b % 16; b++) kept[b] = top;                                                  \
        for (int i = 0; i < rows; i++) {                                                                               \
            const type *x = (const type *)data + i * stride, *half = te_behind_##dtype(x, n);                          \
            for (int64_t b = 0; b < blocks; b++, x += WIDE, half += WIDE / 2)                                          \
                _Pragma("GCC unroll 8") for (int k = 0; k < WIDE; k += VECTOR)                                         \
                {                                                                                                      \
                    te_fetch_half(half, k * (int)sizeof(type), 64, false);                                             \
                    kept[b] = MAX(kept[b], te_size_##dtype(x + k));                                                    \
                }                                                                                                      \
        }                                                                                                              \
        for (int64_t b = 0; b < blocks; b += 16) {                                                                     \
            __m512i sizes = te_largest_##dtype(kept + b);                                                              \
            top = _mm512_max_epu32(top, sizes);                                                                        \
            __mmask16 there = (__mmask16)(blocks - b < 16 ? (1u << (blocks - b)) - 1 : 0xffff);                        \
            _mm512_mask_storeu_epi32(amax + b, there, sizes);                                                          \
        }                                                                                                              \
        return _mm512_cmpgt_epu32_mask(top, _mm512_set1_epi32(0x7f800000)) ? 0 : blocks * WIDE;                        \
    }

TE_DEFINE_AMAX_SQUARES(f32, float, _mm512_max_epu32)
TE_DEFINE_AMAX_SQUARES(bf16, uint16_t, _mm512_max_epu16)
#else
#define te_amaxes_bf16(amax, x, n, block) 0
#define te_amaxes_f32(amax, x, n, block)  0
#define te_amaxes_down_bf16(amax, x, stride, rows, n) 0
#define te_amaxes_down_f32(amax, x, stride, rows, n)  0
#define amax_both_f32  NULL
#define amax_both_bf16 NULL
#define amax_squares_f32  NULL
#define amax_squares_bf16 NULL
#endif

#define te_amaxes_f16(amax, x, n, block) 0
#define te_amaxes_down_f16(amax, x, stride, rows, n) 0
#define amax_both_f16 NULL
#define amax_squares_f16 NULL

#endif
