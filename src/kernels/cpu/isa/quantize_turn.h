/* quantize_turn.h - transposing codes and factors, for quantize_blocks.c.
 *
 * Two squares of 64 x 64 are copied to where their rows follow one another, since rows that are a large power of two
 * apart throw each other out of the cache. Then 64 rows of sixteen columns become sixteen whole cache lines: a vector
 * takes sixteen bytes of rows r, r + 16, r + 32 and r + 48 in its quarters, four rounds of interleaving vector k with
 * vector k + 8 turn all quarters, and each vector is one column. Lines that leave the caches before anybody reads them
 * are written past these, two neighbours at a time, without being read first.
 */
#ifndef TE_KERNELS_CPU_QUANTIZE_TURN_H
#define TE_KERNELS_CPU_QUANTIZE_TURN_H

#include "interleave.h"
#include "kernels/cpu/quantize_blocks.h"
#include "quantize_vectors.h"

#include <string.h>

#if defined(TE_ISA_avx512)
enum { TE_SQUARE = 64, TE_SQUARES = 2 };

TE_DEFINE_INTERLEAVE(te_interleave_bytes, __m512i, 16, _mm512_unpacklo_epi8, _mm512_unpackhi_epi8)

TE_INLINE void te_turn_16(uint8_t *to, int64_t to_stride, const uint8_t *codes, bool past)
{
    __m512i a[16];
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) {
        const uint8_t *row = codes + k * TE_SQUARE;
        a[k] = _mm512_castsi128_si512(_mm_load_si128((const __m128i *)row));
#pragma GCC unroll 3
        for (int quarter = 1; quarter < 4; quarter++)
            a[k] = _mm512_mask_broadcast_i32x4(a[k], (__mmask16)(0xf << 4 * quarter),
                                               _mm_load_si128((const __m128i *)(row + 16 * quarter * TE_SQUARE)));
    }
    te_interleave_bytes(a);
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++)
        if (past)
            _mm512_stream_si512((__m512i *)(void *)(to + k * to_stride), a[k]);
        else
            _mm512_storeu_si512(to + k * to_stride, a[k]);
}

TE_INLINE void te_turn(uint8_t *to, int64_t dst_stride, const uint8_t *codes, int64_t src_stride, int64_t rows,
                       int64_t cols, bool past)
{
    int64_t full_rows = rows - rows % TE_SQUARE, full_cols = cols - cols % TE_SQUARE;
    for (int64_t j = 0; j < full_rows; j += TE_SQUARE)
        for (int64_t i = 0; i < full_cols; i += TE_SQUARES * TE_SQUARE) {
            _Alignas(64) uint8_t square[TE_SQUARES][TE_SQUARE * TE_SQUARE];
            int n = full_cols - i < TE_SQUARES * TE_SQUARE ? 1 : TE_SQUARES;
            for (int k = 0; k < n * TE_SQUARE; k++)
                _mm512_store_si512(square[0] + k * TE_SQUARE, _mm512_loadu_si512(codes + (i + k) * src_stride + j));
            for (int k = 0; k < TE_SQUARE; k += 16)
                for (int q = 0; q < n; q++)
                    te_turn_16(to + (j + k) * dst_stride + i + q * TE_SQUARE, dst_stride, square[q] + k, past);
        }
    for (int64_t j = 0; j < rows; j++)
        for (int64_t i = j < full_rows ? full_cols : 0; i < cols; i++)
            to[j * dst_stride + i] = codes[i * src_stride + j];
}

/* As te_transpose_fn, of bytes. */
static void turn_codes(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t rows, int64_t cols)
{
    te_turn(dst, dst_stride, src, src_stride, rows, cols, false);
}

static void turn_past(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t rows, int64_t cols)
{
    if (((uintptr_t)dst | (uintptr_t)dst_stride) % 64 != 0) {
        turn_codes(dst, dst_stride, src, src_stride, rows, cols);
        return;
    }
    te_turn(dst, dst_stride, src, src_stride, rows, cols, true);
    _mm_sfence();
}

TE_DEFINE_INTERLEAVE(te_interleave_eight, __m512i, 8, _mm512_unpacklo_epi8, _mm512_unpackhi_epi8)

/* Eight rows of whole 64s, of n; the columns done. Vector k ends with columns 2 k and 2 k + 1 of each sixteen. */
TE_INLINE int te_turn_eight(uint8_t *to, int64_t stride, const uint8_t *factors, int n)
{
    int j = 0;
    for (; j + 64 <= n; j += 64) {
        uint64_t columns[8][4][2];
        __m512i a[8];
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) a[k] = _mm512_loadu_si512(factors + k * TE_DOWN_COLUMNS + j);
        te_interleave_eight(a);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) _mm512_storeu_si512(columns[k], a[k]);
        for (int c = 0; c < 64; c++) memcpy(to + (j + c) * stride, &columns[c % 16 / 2][c / 16][c % 2], 8);
    }
    return j;
}
#else
#define turn_codes NULL
#define turn_past  NULL
#define te_turn_eight(to, stride, factors, n) 0
#endif

static void turn_factors(uint8_t *to, int64_t stride, const uint8_t *factors, int rows, int n)
{
    for (int j = rows == 8 ? te_turn_eight(to, stride, factors, n) : 0; j < n; j++)
        for (int i = 0; i < rows; i++) to[j * stride + i] = factors[i * TE_DOWN_COLUMNS + j];
}

#endif
