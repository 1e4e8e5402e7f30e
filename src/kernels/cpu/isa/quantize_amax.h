/* quantize_amax.h - the largest magnitudes of blocks of rows and of columns, for quantize_blocks.c.
 *
 * Functions say how many elements they have done; a NaN in a stretch leaves it to the caller.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_AMAX_H
#define TE_KERNELS_CPU_QUANTIZE_AMAX_H

#include "kernels/cpu/quantize_blocks.h"
#include "quantize_folds.h"

#if defined(TE_ISA_avx512)

TE_INLINE int64_t te_amaxes_of_bf16(float *amax, const uint16_t *x, int64_t n, const int64_t block)
{
    const int64_t vectors = block / 32 + (block < 32);
    const uint16_t *half = te_behind_bf16(x, n);
    int64_t i = 0;
    for (; i + 512 * vectors <= n; i += 512 * vectors, amax += 512 * vectors / block) {
        __m512i v[16];
        te_most_bf16(v, x + i, (int)vectors, 16, half + i / 2);
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
        te_most_f32(v, x + i, (int)block / 16, 16, half + i / 2);
        __m512i sizes = te_largest_f32(v);
        if (_mm512_cmpgt_epu32_mask(sizes, _mm512_set1_epi32(0x7f800000))) return i;
        _mm512_storeu_si512(amax, sizes);
    }
    return i;
}

/* One block of n. */
#define TE_DEFINE_AMAX_ROW(dtype, type, MAX, LARGEST)                                                                  \
    TE_INLINE int64_t te_amax_row_##dtype(float *amax, const type *x, int64_t n)                                       \
    {                                                                                                                  \
        enum { VECTOR = 64 / sizeof(type), LINES = 8 };                                                                \
        __m512i v[LINES];                                                                                              \
        int64_t i = 0;                                                                                                 \
        _Pragma("GCC unroll 8") for (int k = 0; k < LINES; k++) v[k] = _mm512_setzero_si512();                         \
        for (; i + LINES * VECTOR <= n; i += LINES * VECTOR)                                                           \
            _Pragma("GCC unroll 8") for (int k = 0; k < LINES; k++)                                                    \
            {                                                                                                          \
                __builtin_prefetch((const char *)(x + i + k * VECTOR) + TE_FAR, 0, 3);                                 \
                v[k] = MAX(v[k], te_size_##dtype(x + i + k * VECTOR));                                                 \
            }                                                                                                          \
        for (; i + VECTOR <= n; i += VECTOR) v[0] = MAX(v[0], te_size_##dtype(x + i));                                 \
        if (i < n) v[1] = MAX(v[1], te_size_##dtype(x + n - VECTOR));                                                  \
        for (int k = 1; k < LINES; k++) v[0] = MAX(v[0], v[k]);                                                        \
        uint32_t top = LARGEST(v[0]);                                                                                  \
        *amax = te_f32_from_bits(top);                                                                                 \
        return top > 0x7f800000u ? 0 : n;                                                                              \
    }

TE_INLINE uint32_t te_top_half(__m512i sizes) { return _mm512_reduce_max_epu32(te_larger_halves(sizes)); }

TE_DEFINE_AMAX_ROW(f32, float, _mm512_max_epu32, _mm512_reduce_max_epu32)
TE_DEFINE_AMAX_ROW(bf16, uint16_t, _mm512_max_epu16, te_top_half)

/* Blocks of 16, 32 or 128, or a long one; a compiler makes loops of its own for each. */
#define TE_DEFINE_AMAXES(dtype, type)                                                                                  \
    TE_INLINE int64_t te_amaxes_##dtype(float *amax, const type *x, int64_t n, int64_t block)                          \
    {                                                                                                                  \
        if (block >= n && n >= 512) return te_amax_row_##dtype(amax, x, n);                                            \
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
                    te_fetch_near(x + 32 * b, 32 * sizeof(type));                                                     \
                    if (sizeof(type) == 4) te_fetch_half(half, 32 * b * (int)sizeof(type), 32 * sizeof(type), true);   \
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
