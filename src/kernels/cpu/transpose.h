/* transpose.h - square blocks of 32-bit elements turned in registers: the largest that the instruction set of the
 * including file (in isa/) has. TE_TRANSPOSE is the side of the block. */
#ifndef TE_KERNELS_CPU_TRANSPOSE_H
#define TE_KERNELS_CPU_TRANSPOSE_H

#include <stdint.h>
#include <string.h>

#if defined(TE_ISA_avx512)
#include <immintrin.h>
#define TE_TRANSPOSE 16

/* out[c * out_row + r] = in[r * in_row + c]. */
static inline void te_transpose_block(float *out, int64_t out_row, const float *in, int64_t in_row)
{
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(in + i * in_row);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) { /* pairs of rows: 2 x 2 blocks in each quarter */
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* fours of rows: quarter q of a[i + c] holds column 4 q + c */
        a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2])));
        a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2])));
        a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i + 1]), _mm512_castps_pd(b[i + 3])));
        a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i + 1]), _mm512_castps_pd(b[i + 3])));
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) { /* a 4 x 4 transpose of the quarters */
        __m512 even_low = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88),
               odd_low = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
        __m512 even_high = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88),
               odd_high = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
        _mm512_storeu_ps(out + c * out_row, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
        _mm512_storeu_ps(out + (c + 4) * out_row, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
        _mm512_storeu_ps(out + (c + 8) * out_row, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
        _mm512_storeu_ps(out + (c + 12) * out_row, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
    }
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
