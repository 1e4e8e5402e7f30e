/* gemm_small.c - products of a few rows and columns, as batches have them by the thousand.
 *
 * Elements are taken where they lie and widened on the way, and masks stand for the columns that a vector has too many:
 * for so few multiplications packing would take longer than they do. Every element of c is one chain of fused
 * multiply-adds in ascending k. Only with AVX-512, whose masks cost nothing.
 */
#include "../gemm.h"

#if defined(TE_ISA_avx512)
#include "gemm_vectors.h"

enum { ROWS = 4, VECTORS = 2, LANES = 16 };

INLINE __m512 load_vector(te_dtype dtype, const char *p, __mmask16 mask)
{
    if (dtype == TE_F32) return _mm512_maskz_loadu_ps(mask, p);
    __m256i half = _mm256_maskz_loadu_epi16(mask, p);
    if (dtype == TE_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __m512 load_splat(te_dtype dtype, const char *p)
{
    uint16_t half;
    float    x;
    if (dtype == TE_F32) {
        memcpy(&x, p, sizeof x);
        return _mm512_set1_ps(x);
    }
    memcpy(&half, p, sizeof half);
    if (dtype == TE_F16) return _mm512_cvtph_ps(_mm256_set1_epi16((short)half));
    return _mm512_castsi512_ps(_mm512_set1_epi32((int)((uint32_t)half << 16)));
}

/* As te_f32_to_bf16. */
INLINE __m256i to_bf16(__m512 x)
{
    __m512i   u = _mm512_castps_si512(x), high = _mm512_srli_epi32(u, 16);
    __m512i   even = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i   half = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i   rounded = _mm512_mask_or_epi32(_mm512_srli_epi32(half, 16), nan, high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(rounded);
}

INLINE void store_vector(const te_gemm_small *s, char *p, __mmask16 mask, __m512 x)
{
    if (s->add) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, p));
    if (s->out == TE_F32) _mm512_mask_storeu_ps(p, mask, x);
    else if (s->out == TE_BF16) _mm256_mask_storeu_epi16(p, mask, to_bf16(x));
    else _mm256_mask_storeu_epi16(p, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Up to ROWS rows; where there are fewer, the last one is computed again. */
INLINE void run_block(te_dtype a_dtype, te_dtype b_dtype, const int vectors, const te_gemm_small *s, int rows,
                      const char *a, const char *b, char *c, const __mmask16 mask[VECTORS])
{
    const int64_t b_vector = LANES * (b_dtype == TE_F32 ? 4 : 2), c_vector = LANES * (s->out == TE_F32 ? 4 : 2);
    __m512 sums[ROWS][VECTORS];
    const char *row[ROWS];
    UNROLL for (int i = 0; i < ROWS; i++) row[i] = a + (i < rows ? i : rows - 1) * s->a_row;
    UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int v = 0; v < vectors; v++) sums[i][v] = _mm512_setzero_ps();
    for (int64_t w = 0, at = 0; w < s->k; w++, at += s->a_step, b += s->b_row) {
        __m512 y[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) y[v] = load_vector(b_dtype, b + v * b_vector, mask[v]);
        UNROLL for (int i = 0; i < ROWS; i++) {
            __m512 x = load_splat(a_dtype, row[i] + at);
            UNROLL for (int v = 0; v < vectors; v++) sums[i][v] = _mm512_fmadd_ps(x, y[v], sums[i][v]);
        }
    }
    UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int v = 0; v < vectors; v++)
            if (i < rows) store_vector(s, c + i * s->c_row + v * c_vector, mask[v], sums[i][v]);
}

INLINE void run_columns(te_dtype a_dtype, te_dtype b_dtype, const int vectors, const te_gemm_small *s, const char *b,
                        char *c, const __mmask16 mask[VECTORS])
{
    for (int i = 0; i < s->m; i += ROWS)
        run_block(a_dtype, b_dtype, vectors, s, s->m - i < ROWS ? s->m - i : ROWS, s->a + i * s->a_row, b,
                  c + i * s->c_row, mask);
}

INLINE void run_all(te_dtype a_dtype, te_dtype b_dtype, const te_gemm_small *s)
{
    const int b_size = b_dtype == TE_F32 ? 4 : 2, c_size = s->out == TE_F32 ? 4 : 2;
    for (int j = 0; j < s->n; j += VECTORS * LANES) {
        int left = s->n - j;
        __mmask16 mask[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            int lanes = left - v * LANES;
            mask[v] = (__mmask16)(lanes >= LANES ? 0xffffu : lanes > 0 ? (1u << lanes) - 1 : 0);
        }
        if (left > LANES) run_columns(a_dtype, b_dtype, 2, s, s->b + j * b_size, s->c + j * c_size, mask);
        else run_columns(a_dtype, b_dtype, 1, s, s->b + j * b_size, s->c + j * c_size, mask);
    }
}

void te_gemm_small_avx512(const te_gemm_small *s)
{
    if (s->in == TE_F32) run_all(TE_F32, TE_F32, s);
    else if (s->in == TE_BF16 && s->panel) run_all(TE_BF16, TE_F32, s);
    else if (s->in == TE_BF16) run_all(TE_BF16, TE_BF16, s);
    else if (s->panel) run_all(TE_F16, TE_F32, s);
    else run_all(TE_F16, TE_F16, s);
}
#else
typedef int te_gemm_small_is_empty; /* a translation unit declares something */
#endif
