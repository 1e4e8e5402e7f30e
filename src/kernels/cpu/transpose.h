/* transpose.h - square blocks of 32-bit elements turned in registers: the largest that the instruction set of the
 * including file (in isa/) has. TE_TRANSPOSE is the side of the block. */
#ifndef TE_KERNELS_CPU_TRANSPOSE_H
#define TE_KERNELS_CPU_TRANSPOSE_H

#include <stdint.h>
#include <string.h>

#if defined(TE_ISA_avx512)
#include <immintrin.h>
#define TE_TRANSPOSE 16

#define TE_TURN static inline __attribute__((always_inline))

TE_TURN __m512i te_pair_low(__m512i x, __m512i y)
{
    return _mm512_castpd_si512(_mm512_unpacklo_pd(_mm512_castsi512_pd(x), _mm512_castsi512_pd(y)));
}

TE_TURN __m512i te_pair_high(__m512i x, __m512i y)
{
    return _mm512_castpd_si512(_mm512_unpackhi_pd(_mm512_castsi512_pd(x), _mm512_castsi512_pd(y)));
}

/* A 4 x 4 transpose of the quarters of registers that are `step` apart. */
TE_TURN void te_transpose_quarters(__m512i *to, const __m512i *a, const int step)
{
    __m512i even_low = _mm512_shuffle_i32x4(a[0], a[step], 0x88), odd_low = _mm512_shuffle_i32x4(a[0], a[step], 0xdd);
    __m512i even_high = _mm512_shuffle_i32x4(a[2 * step], a[3 * step], 0x88),
            odd_high = _mm512_shuffle_i32x4(a[2 * step], a[3 * step], 0xdd);
    to[0] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    to[step] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    to[2 * step] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    to[3 * step] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
}

/* 8 x 8 elements of 64 bits: to[c], element r <- a[r], element c. */
TE_TURN void te_transpose_8(__m512i *to, const __m512i *a)
{
    __m512i b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) { /* quarter q of b[i + c] holds column 2 q + c */
        b[i] = te_pair_low(a[i], a[i + 1]);
        b[i + 1] = te_pair_high(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) te_transpose_quarters(to + c, b + c, 2);
}

/* 16 x 16 elements of 32 bits; a is overwritten. */
TE_TURN void te_transpose_16(__m512i *to, __m512i *a)
{
    __m512i b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) { /* pairs of rows: 2 x 2 blocks in each quarter */
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* fours of rows: quarter q of a[i + c] holds column 4 q + c */
        a[i] = te_pair_low(b[i], b[i + 2]);
        a[i + 1] = te_pair_high(b[i], b[i + 2]);
        a[i + 2] = te_pair_low(b[i + 1], b[i + 3]);
        a[i + 3] = te_pair_high(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) te_transpose_quarters(to + c, a + c, 4);
}

/* out[c * out_row + r] = in[r * in_row + c]. */
static inline void te_transpose_block(float *out, int64_t out_row, const float *in, int64_t in_row)
{
    __m512i a[16], turned[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(in + i * in_row);
    te_transpose_16(turned, a);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + i * out_row, turned[i]);
}

#elif defined(TE_ISA_avx2)
#include <immintrin.h>
#define TE_TRANSPOSE 8

static inline void te_transpose_block(float *out, int64_t out_row, const float *in, int64_t in_row)
{
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(in + i * in_row);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) { /* half h of a[i + c] holds column 4 h + c */
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_ps(out + c * out_row, _mm256_permute2f128_ps(a[c], a[c + 4], 0x20));
        _mm256_storeu_ps(out + (c + 4) * out_row, _mm256_permute2f128_ps(a[c], a[c + 4], 0x31));
    }
}

#else
#define TE_TRANSPOSE 4

static inline void te_transpose_block(float *out, int64_t out_row, const float *in, int64_t in_row)
{
    typedef float four __attribute__((vector_size(16)));
    four a[4], b[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) memcpy(&a[i], in + i * in_row, sizeof a[i]);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 4, 1, 5);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 6, 3, 7);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        a[2 * i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 4, 5);
        a[2 * i + 1] = __builtin_shufflevector(b[i], b[i + 2], 2, 3, 6, 7);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) memcpy(out + i * out_row, &a[i], sizeof a[i]);
}
#endif

#endif
