/* attention_pairs.h - products of tiles of bfloat16 with sums in float32, by instructions that multiply and add pairs
 * (a template; see attention_loops.h). attention_products.h has the same words for the arithmetic's own type.
 *
 * A pair of neighbouring numbers along the summed dimension takes the place of one float: rows keep the pairs as they
 * lie in memory, `across` are rows of pairs transposed, right operands are two rows interleaved. So the loops of
 * products are those of float, with another instruction. Weights are rounded to bfloat16; numbers below the normal
 * range count as 0, which is what the instruction does. Numbers outside of a row's range meet weights of zero, also
 * where a range begins or ends within a pair.
 */
static inline int64_t T(rows_width)(int64_t dim) { return te_attention_pad((dim + 1) / 2); }

static inline int64_t T(right_size)(int64_t rows, int64_t dim) { return rows / 2 * dim; }

/* q is taken as it is, so the scale comes afterwards. */
static inline REAL T(load_scale)(const te_attention *a)
{
    (void)a;
    return 1;
}

static inline REAL T(late_scale)(const te_attention *a) { return (REAL)a->scale; }

static inline void T(scale_scores)(REAL *p, int n, REAL scale)
{
    for (int j = 0; j < n; j += VLEN) V_STORE(p + j, V_LOAD(p + j) * V_SET(scale));
}

static void T(load_rows)(REAL *rows, const te_view *v, int64_t batch, int64_t head, int64_t first, int64_t n,
                         REAL scale)
{
    enum { AHEAD = 16, HALVES = 2 * VLEN };
    int64_t dim = v->shape[3], width = T(rows_width)(dim), row_bytes;
    const char *row = T(rows_at)(v, batch, head, first, &row_bytes);
    (void)scale;
    for (int64_t i = 0; i < n; i++, rows += width, row += row_bytes) {
        bool ahead = first + i + AHEAD < v->shape[2];
        for (int64_t d = 0; d < 2 * width; d += HALVES) {
            int64_t left = dim - d;
            uint32_t mask = left >= HALVES ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0;
            if (ahead && left > 0) __builtin_prefetch(row + AHEAD * row_bytes + 2 * d);
            _mm512_storeu_si512(rows + d / 2, _mm512_maskz_loadu_epi16(mask, row + 2 * d));
        }
    }
}

/* The lower and the upper half of pairs, from 16 numbers each. */
static inline __m512i T(join_halves)(__m256i low, __m256i high)
{
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

static inline const REAL *T(right_of)(const REAL *place, const REAL *rows)
{
    (void)rows;
    return place;
}

static void T(pack_right)(REAL *place, const REAL *rows, int64_t dim, int n)
{
    int64_t width = T(rows_width)(dim);
    REAL *out = place;
    for (int i = 0; i < n; i += 2, out += dim)
        for (int64_t d = 0; d < dim; d += 16) {
            const half_in_pair *low = (const half_in_pair *)(rows + i * width) + d, *high = low + 2 * width;
            __m256i second = i + 1 < n ? _mm256_loadu_si256((const __m256i *)high) : _mm256_setzero_si256();
            _mm512_storeu_si512(out + d, T(join_halves)(_mm256_loadu_si256((const __m256i *)low), second));
        }
#ifdef MATRIX_UNIT /* takes whole blocks */
    REAL *end = place + TE_ATTENTION_KEYS / 2 * dim;
    if (out < end) memset(out, 0, (size_t)(end - out) * sizeof *out);
#endif
}

#ifdef MATRIX_UNIT
#include "attention_matrices.h"
#else
enum { T(few) = TE_ATTENTION_TILE /* queries, or keys, of a tile where masks cut through the block */ };

static void T(multiply_scores)(int m, REAL *scores, T(tile_range) range, const REAL *rows, const REAL *across,
                               int64_t dim)
{
    T(gemm)(m, scores + range.column, TE_ATTENTION_KEYS, rows, T(rows_width)(dim), across + range.column,
            TE_ATTENTION_KEYS, range.columns, (dim + 1) / 2, false);
}

static inline __m256i T(round_16)(const REAL *p) { return (__m256i)_mm512_cvtneps_pbh(V_LOAD(p)); }

static void T(round_weights)(int m, const REAL *weights, REAL *halves, T(tile_range) range)
{
    enum { KEYS = TE_ATTENTION_KEYS, WIDTH = KEYS / 2 };
    for (int r = 0; r < m; r++)
        for (int j = range.column; j < range.column + range.columns; j += 16)
            _mm256_storeu_si256((__m256i *)(halves + r * WIDTH + j / 2), T(round_16)(weights + r * KEYS + j));
}

static void T(add_weighted)(int m, REAL *sums, int64_t dim, const REAL *weights, const REAL *halves,
                            T(tile_range) range, const REAL *right)
{
    enum { WIDTH = TE_ATTENTION_KEYS / 2 };
    int low = range.low / 2, high = (range.high + 1) / 2;
    (void)weights;
    T(gemm)(m, sums, dim, halves + low, WIDTH, right + low * dim, dim, dim, high - low, true);
}

static inline void T(clear_pairs)(REAL *pairs) { (void)pairs; } /* what is not written is not read */

/* Pairs of queries at, at + 1, …: row (at + r) / 2 of `pairs` holds rows r and r + 1 of the weights. */
static void T(pair_weights)(REAL *pairs, int at, const REAL *weights, int m, T(tile_range) range)
{
    enum { KEYS = TE_ATTENTION_KEYS };
    pairs += at / 2 * KEYS;
    for (int r = 0; r < m; r += 2, pairs += KEYS, weights += 2 * KEYS)
        for (int j = range.column; j < range.column + range.columns; j += 16) {
            __m256i second = r + 1 < m ? T(round_16)(weights + KEYS + j) : _mm256_setzero_si256();
            _mm512_storeu_si512(pairs + j, T(join_halves)(T(round_16)(weights + j), second));
        }
}

static void T(add_transposed)(int m, REAL *sums, int64_t dim, const REAL *weights, const REAL *pairs, int key,
                              int first, int end, const REAL *right)
{
    (void)weights;
    int low = first / 2, high = (end + 1) / 2;
    T(any_gemm)(m, sums, dim, pairs + low * TE_ATTENTION_KEYS + key, 1, TE_ATTENTION_KEYS, right + low * dim, dim, dim,
                high - low, true);
}
#endif

static void T(add_exactly)(REAL *sums, int64_t dim, const REAL *weights, int64_t step, int first, int end,
                           const REAL *right)
{
    for (int i = first; i < end; i++) {
        const half_in_pair *row = (const half_in_pair *)(right + i / 2 * dim) + i % 2;
        REAL weight = weights[i * step];
        for (int64_t d = 0; d < dim; d++) sums[d] = TE_FMA(weight, te_bf16_to_f32(row[2 * d]), sums[d]);
    }
}

/* sums[32 * blocks] += weights[n] times as many columns of n rows, in float32. Neighbours are added to apart. */
ALWAYS_INLINE void T(add_columns)(const int blocks, REAL *sums, const REAL *weights, const char *rows,
                                  int64_t row_bytes, int n, int64_t ahead)
{
    enum { HALVES = 2 * VLEN };
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i low_half = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u), one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(8);
    VECTOR even[2], odd[2];
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) {
        VECTOR first = V_LOAD(sums + b * HALVES), second = V_LOAD(sums + b * HALVES + VLEN);
        even[b] = _mm512_permutex2var_ps(first, evens, second);
        odd[b] = _mm512_permutex2var_ps(first, _mm512_add_epi32(evens, one), second);
    }
    for (int j = 0; j < n; j++, rows += row_bytes) {
        VECTOR weight = V_SET(weights[j]);
        if (ahead) T(fetch_ahead)(rows, row_bytes, ahead);
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++) {
            __m512i pairs = _mm512_loadu_si512(rows + b * HALVES * (int)sizeof(half_in_pair));
            even[b] = _mm512_fmadd_ps(weight, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), even[b]);
            odd[b] = _mm512_fmadd_ps(weight, _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)), odd[b]);
        }
    }
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) {
        V_STORE(sums + b * HALVES, _mm512_permutex2var_ps(even[b], low_half, odd[b]));
        V_STORE(sums + b * HALVES + VLEN,
                _mm512_permutex2var_ps(even[b], _mm512_add_epi32(low_half, half), odd[b]));
    }
}

/* sums[dim] += weights[n] rows[n, dim]; dim is a multiple of 32. */
static void T(add_rows)(REAL *sums, int64_t dim, const REAL *weights, const char *rows, int64_t row_bytes, int n)
{
    enum { HALVES = 2 * VLEN };
    int64_t d = 0, used = dim * (int64_t)sizeof(half_in_pair);
    for (; d + 2 * HALVES <= dim; d += 2 * HALVES, rows += 4 * HALVES)
        T(add_columns)(2, sums + d, weights, rows, row_bytes, n, d == 0 ? used : 0);
    if (d < dim) T(add_columns)(1, sums + d, weights, rows, row_bytes, n, d == 0 ? used : 0);
}
