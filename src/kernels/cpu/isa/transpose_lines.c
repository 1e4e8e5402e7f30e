/* transpose_lines.c - transposes by squares with the side of a cache line, see copy.h: turned in registers and stored
 * line by line. Only where a register holds a line.
 *
 * A square of 32-bit elements takes 16 registers and four rounds of exchanges. One of 16-bit elements is done in two
 * halves: interleaved, two rows are one row of pairs, the lower halves of each 128 bits in one register and the upper
 * halves in another, and a line of the result is a column of 16 pairs. One of 64-bit elements takes 8 registers.
 */
#include "kernels/cpu/copy.h"

#if defined(TE_ISA_avx512)
#include <immintrin.h>

static inline __attribute__((always_inline)) __m512i pair_low(__m512i x, __m512i y)
{
    return _mm512_castpd_si512(_mm512_unpacklo_pd(_mm512_castsi512_pd(x), _mm512_castsi512_pd(y)));
}

static inline __attribute__((always_inline)) __m512i pair_high(__m512i x, __m512i y)
{
    return _mm512_castpd_si512(_mm512_unpackhi_pd(_mm512_castsi512_pd(x), _mm512_castsi512_pd(y)));
}

/* a[c], element r <- a[r], element c. */
static inline __attribute__((always_inline)) void turn_registers(__m512i *a)
{
    __m512i b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) { /* pairs of rows: 2 x 2 blocks in each quarter */
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* fours of rows: quarter q of a[i + c] holds column 4 q + c */
        a[i] = pair_low(b[i], b[i + 2]);
        a[i + 1] = pair_high(b[i], b[i + 2]);
        a[i + 2] = pair_low(b[i + 1], b[i + 3]);
        a[i + 3] = pair_high(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) { /* a 4 x 4 transpose of the quarters */
        __m512i even_low = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88),
                odd_low = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
        __m512i even_high = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88),
                odd_high = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
        b[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        b[c + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        b[c + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        b[c + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = b[i];
}

static inline __attribute__((always_inline)) void put_line(void *dst, __m512i line, bool past)
{
    if (past) _mm512_stream_si512(dst, line);
    else _mm512_storeu_si512(dst, line);
}

static inline __attribute__((always_inline)) void square_32(uint32_t *dst, int64_t dst_stride, const uint32_t *src,
                                                            int64_t src_stride, bool past)
{
    __m512i a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(src + i * src_stride);
    turn_registers(a);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) put_line(dst + i * dst_stride, a[i], past);
}

static inline __attribute__((always_inline)) void square_16(uint16_t *dst, int64_t dst_stride, const uint16_t *src,
                                                            int64_t src_stride, bool past)
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i a[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m512i x = _mm512_loadu_si512(src + 2 * i * src_stride),
                    y = _mm512_loadu_si512(src + (2 * i + 1) * src_stride);
            a[i] = half ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y);
        }
        turn_registers(a);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) put_line(dst + (i / 4 * 8 + i % 4 + 4 * half) * dst_stride, a[i], past);
    }
}

static inline __attribute__((always_inline)) void square_64(uint64_t *dst, int64_t dst_stride, const uint64_t *src,
                                                            int64_t src_stride, bool past)
{
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm512_loadu_si512(src + i * src_stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) { /* quarter q of b[i + c] holds column 2 q + c */
        b[i] = pair_low(a[i], a[i + 1]);
        b[i + 1] = pair_high(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) { /* a 4 x 4 transpose of the quarters */
        __m512i even_low = _mm512_shuffle_i64x2(b[c], b[c + 2], 0x88),
                odd_low = _mm512_shuffle_i64x2(b[c], b[c + 2], 0xdd);
        __m512i even_high = _mm512_shuffle_i64x2(b[c + 4], b[c + 6], 0x88),
                odd_high = _mm512_shuffle_i64x2(b[c + 4], b[c + 6], 0xdd);
        put_line(dst + c * dst_stride, _mm512_shuffle_i64x2(even_low, even_high, 0x88), past);
        put_line(dst + (c + 2) * dst_stride, _mm512_shuffle_i64x2(odd_low, odd_high, 0x88), past);
        put_line(dst + (c + 4) * dst_stride, _mm512_shuffle_i64x2(even_low, even_high, 0xdd), past);
        put_line(dst + (c + 6) * dst_stride, _mm512_shuffle_i64x2(odd_low, odd_high, 0xdd), past);
    }
}

/* Rows of the source are far apart, so the machine does not foresee the lines of the next tiles, which lie beside those
 * at hand. Of these the second ones from here are fetched to the second-level cache. */
static inline __attribute__((always_inline)) void fetch_beside(const void *src, int64_t row_bytes, int rows)
{
    enum { BESIDE = 128 };
    for (int i = 0; i < rows; i++) _mm_prefetch((const char *)src + i * row_bytes + BESIDE, _MM_HINT_T1);
}

#define DEFINE_LINES(name, bits, past)                                                                               \
    static void name(void *dst, int64_t dst_stride, const void *src, int64_t src_stride, int64_t rows,               \
                     int64_t cols)                                                                                   \
    {                                                                                                                \
        enum { SIDE = 512 / bits };                                                                                  \
        uint##bits##_t       *d = dst;                                                                               \
        const uint##bits##_t *s = src;                                                                               \
        for (int64_t r = 0; r < rows; r += SIDE)                                                                     \
            for (int64_t c = 0; c < cols; c += SIDE) {                                                               \
                const uint##bits##_t *from = s + c * src_stride + r;                                                 \
                if (past) fetch_beside(from, src_stride * (int64_t)sizeof *from, SIDE);                              \
                square_##bits(d + r * dst_stride + c, dst_stride, from, src_stride, past);                           \
            }                                                                                                        \
    }

DEFINE_LINES(past_16, 16, true)
DEFINE_LINES(past_32, 32, true)
DEFINE_LINES(past_64, 64, true)
DEFINE_LINES(near_16, 16, false)
DEFINE_LINES(near_32, 32, false)
DEFINE_LINES(near_64, 64, false)

const te_transpose_lines TE_ISA_NAME(te_transpose_lines) = {
    .past = {NULL, past_16, past_32, past_64}, .near = {NULL, near_16, near_32, near_64}};
#else
const te_transpose_lines TE_ISA_NAME(te_transpose_lines) = {.past = {NULL}, .near = {NULL}};
#endif
