/* gemm_small.c - products of a few rows and columns, as batches have them by the thousand, and of many rows by few
 * columns.
 *
 * Elements are taken where they lie and widened on the way, and masks stand for the columns that a vector has too many:
 * for so few multiplications packing would take longer than they do. Every element of c is one chain of fused
 * multiply-adds in ascending k, or of sums of two products where pairs of bfloat16 are multiplied. Only with AVX-512,
 * whose masks cost nothing.
 */
#include "../gemm.h"

#if defined(TE_ISA_avx512)
#include "gemm_vectors.h"

enum { ROWS = 4, MOST_ROWS = 8, VECTORS = 2, LANES = 16 };

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

typedef __m512 madd_fn(te_dtype dtype, const char *a, __m512 b, __m512 sum);
typedef __m256i round_fn(__m512 x);

/* An element of a times a vector of b. */
INLINE __m512 madd_widened(te_dtype dtype, const char *a, __m512 b, __m512 sum)
{
    return _mm512_fmadd_ps(load_splat(dtype, a), b, sum);
}

/* A pair of them, by an extension that the caller has checked for. */
#define PAIRS_TARGET __attribute__((target("avx512bf16")))
PAIRS_TARGET INLINE __m512 madd_pairs(te_dtype dtype, const char *a, __m512 b, __m512 sum)
{
    int32_t pair = 0;
    memcpy(&pair, a, dtype == TE_BF16 ? 2 : 4); /* the last one of an odd number alone */
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
}

/* Like to_bf16: sums of products of pairs are never subnormal. */
PAIRS_TARGET INLINE __m256i round_pairs(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

INLINE void store_vector(te_dtype out, round_fn *round, char *p, __mmask16 mask, __m512 x)
{
    if (out == TE_F32) _mm512_mask_storeu_ps(p, mask, x);
    else if (out == TE_BF16) _mm256_mask_storeu_epi16(p, mask, round(x));
    else _mm256_mask_storeu_epi16(p, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* How elements are taken, multiplied and left, and how many rows at a time. */
typedef struct small_way {
    te_dtype  a, b, out; /* out: the most frequent one */
    madd_fn  *madd;
    round_fn *round;
    int       rows;
} small_way;

/* Up to way.rows rows; where there are fewer, the last one is computed again. */
INLINE void run_block(const small_way way, const int vectors, const te_gemm_small *s, int rows, const char *a,
                      const char *b, char *c, const float *bias, const __mmask16 mask[VECTORS])
{
    const int64_t b_vector = LANES * (way.b == TE_F32 ? 4 : 2), c_vector = LANES * (s->out == TE_F32 ? 4 : 2);
    __m512 sums[MOST_ROWS][VECTORS];
    const char *row[MOST_ROWS];
    int64_t at = 0, steps = s->pairs ? s->k / 2 : s->k;
    UNROLL for (int i = 0; i < way.rows; i++) row[i] = a + (i < rows ? i : rows - 1) * s->a_row;
    UNROLL for (int i = 0; i < way.rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) sums[i][v] = _mm512_setzero_ps();
    for (int64_t w = 0; w < steps; w++, at += s->a_step, b += s->b_row) {
        __m512 y[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) y[v] = load_vector(way.b, b + v * b_vector, mask[v]);
        UNROLL for (int i = 0; i < way.rows; i++)
            UNROLL for (int v = 0; v < vectors; v++) sums[i][v] = way.madd(way.a, row[i] + at, y[v], sums[i][v]);
    }
    if (s->pairs && s->k % 2)
        UNROLL for (int i = 0; i < way.rows; i++)
            sums[i][0] = way.madd(TE_BF16, row[i] + at, load_vector(way.b, b, mask[0]), sums[i][0]);
    if (bias)
        UNROLL for (int i = 0; i < way.rows; i++)
            UNROLL for (int v = 0; v < vectors; v++)
                sums[i][v] = _mm512_add_ps(sums[i][v], _mm512_maskz_loadu_ps(mask[v], bias + v * LANES));
    if (s->out == way.out && !s->add) {
        UNROLL for (int i = 0; i < way.rows; i++, c += s->c_row)
            UNROLL for (int v = 0; v < vectors; v++)
                if (i < rows) store_vector(way.out, way.round, c + v * c_vector, mask[v], sums[i][v]);
        return;
    }
    __m512 kept[MOST_ROWS][VECTORS];
    UNROLL for (int i = 0; i < way.rows; i++)
        UNROLL for (int v = 0; v < vectors; v++) kept[i][v] = sums[i][v];
    for (int i = 0; i < rows; i++, c += s->c_row)
        UNROLL for (int v = 0; v < vectors; v++) {
            __m512 x = kept[i][v];
            if (s->add) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask[v], c + v * c_vector));
            store_vector(s->out, way.round, c + v * c_vector, mask[v], x);
        }
}

INLINE void run_columns(const small_way way, const int vectors, const te_gemm_small *s, int col,
                        const __mmask16 mask[VECTORS])
{
    const int b_size = way.b == TE_F32 ? 4 : 2, c_size = s->out == TE_F32 ? 4 : 2;
    const int64_t a_rows = way.rows * s->a_row, c_rows = way.rows * s->c_row;
    const float *bias = s->bias ? s->bias + col : NULL;
    const char *a = s->a, *b = s->b + col * b_size;
    char *c = s->c + col * c_size;
    for (int64_t left = s->m; left > 0; left -= way.rows, a += a_rows, c += c_rows)
        run_block(way, vectors, s, left < way.rows ? (int)left : way.rows, a, b, c, bias, mask);
}

static __mmask16 first_lanes(int lanes) { return (__mmask16)(lanes >= LANES ? 0xffffu : (1u << lanes) - 1); }

INLINE void run_all(te_dtype a_dtype, te_dtype b_dtype, const te_gemm_small *s)
{
    const small_way way = {a_dtype, b_dtype, a_dtype, madd_widened, to_bf16, ROWS};
    for (int j = 0; j < s->n; j += VECTORS * LANES) {
        int left = s->n - j;
        __mmask16 mask[VECTORS] = {first_lanes(left), left > LANES ? first_lanes(left - LANES) : 0};
        if (left > LANES) run_columns(way, 2, s, j, mask);
        else run_columns(way, 1, s, j, mask);
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

/* A bias may be subnormal. */
PAIRS_TARGET void te_gemm_small_pairs_avx512(const te_gemm_small *s)
{
    const __mmask16 mask[VECTORS] = {first_lanes(s->n)};
    if (s->bias) run_columns((small_way){TE_F32, TE_F32, TE_BF16, madd_pairs, to_bf16, MOST_ROWS}, 1, s, 0, mask);
    else run_columns((small_way){TE_F32, TE_F32, TE_BF16, madd_pairs, round_pairs, MOST_ROWS}, 1, s, 0, mask);
}
#else
typedef int te_gemm_small_is_empty; /* a translation unit declares something */
#endif
