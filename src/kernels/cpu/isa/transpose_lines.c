/* transpose_lines.c - transposes by squares with the side of a cache line, see copy.h: turned in registers and stored
 * line by line. Only where a register holds a line.
 *
 * A square of 32-bit elements takes 16 registers and four rounds of exchanges. One of 16-bit elements is done in two
 * halves: interleaved, two rows are one row of pairs, the lower halves of each 128 bits in one register and the upper
 * halves in another, and a line of the result is a column of 16 pairs. One of 64-bit elements takes 8 registers.
 */
#include "kernels/cpu/copy.h"

#if defined(TE_ISA_avx512)
#include "kernels/cpu/transpose.h"

static inline __attribute__((always_inline)) void put_line(void *dst, __m512i line, bool past)
{
    if (past) _mm512_stream_si512(dst, line);
    else _mm512_storeu_si512(dst, line);
}

static inline __attribute__((always_inline)) void square_32(uint32_t *dst, int64_t dst_stride, const uint32_t *src,
                                                            int64_t src_stride, bool past)
{
    __m512i a[16], turned[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(src + i * src_stride);
    te_transpose_16(turned, a);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) put_line(dst + i * dst_stride, turned[i], past);
}

static inline __attribute__((always_inline)) void square_16(uint16_t *dst, int64_t dst_stride, const uint16_t *src,
                                                            int64_t src_stride, bool past)
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m512i a[16], turned[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m512i x = _mm512_loadu_si512(src + 2 * i * src_stride),
                    y = _mm512_loadu_si512(src + (2 * i + 1) * src_stride);
            a[i] = half ? _mm512_unpackhi_epi16(x, y) : _mm512_unpacklo_epi16(x, y);
        }
        te_transpose_16(turned, a);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) put_line(dst + (i / 4 * 8 + i % 4 + 4 * half) * dst_stride, turned[i], past);
    }
}

static inline __attribute__((always_inline)) void square_64(uint64_t *dst, int64_t dst_stride, const uint64_t *src,
                                                            int64_t src_stride, bool past)
{
    __m512i a[8], turned[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm512_loadu_si512(src + i * src_stride);
    te_transpose_8(turned, a);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) put_line(dst + i * dst_stride, turned[i], past);
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
