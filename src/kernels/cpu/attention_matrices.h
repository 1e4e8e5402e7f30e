/* attention_matrices.h - the products of attention_pairs.h in a matrix unit (a template; see attention_loops.h).
 *
 * A register has 16 rows of 16 words, and `across` and right operands are laid out as it takes them. So rows and
 * columns come in sixteens, and sums run over 32 keys, queries or elements at a time, beyond the ends of a range: what
 * stands there is 0 on both sides. Weights that are used transposed are turned when they are rounded.
 */
enum {
    T(few) = TE_TILE_SIDE,             /* queries, or keys, of a tile where masks cut through the block */
    T(pair_width) = TE_ATTENTION_KEYS / 2
};

/* c[16 down, 16 across] (+)= a b. `down` and `across` are constants wherever this is inlined. */
ALWAYS_INLINE void T(tiles)(const int down, const int across, REAL *c, int64_t c_row, const REAL *a, int64_t a_row,
                            const REAL *b, int64_t b_row, int64_t words, bool accumulate)
{
    enum { SIDE = TE_TILE_SIDE };
    int64_t pitch = c_row * 4, a_pitch = a_row * 4, b_pitch = b_row * 4;
    MEMORY_IS_WRITTEN();
    if (accumulate) {
        TILE_LOAD(0, c, pitch);
        if (across > 1) TILE_LOAD(1, c + SIDE, pitch);
        if (down > 1) TILE_LOAD(2, c + SIDE * c_row, pitch);
        if (down > 1 && across > 1) TILE_LOAD(3, c + SIDE * c_row + SIDE, pitch);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int64_t w = 0; w < words; w += SIDE, a += SIDE, b += SIDE * b_row) {
        TILE_LOAD(4, a, a_pitch);
        TILE_LOAD(6, b, b_pitch);
        TILE_MADD(0, 4, 6);
        if (across > 1) TILE_LOAD(7, b + SIDE, b_pitch);
        if (across > 1) TILE_MADD(1, 4, 7);
        if (down == 1) continue;
        TILE_LOAD(5, a + SIDE * a_row, a_pitch);
        TILE_MADD(2, 5, 6);
        if (across > 1) TILE_MADD(3, 5, 7);
    }
    TILE_STORE(0, c, pitch);
    if (across > 1) TILE_STORE(1, c + SIDE, pitch);
    if (down > 1) TILE_STORE(2, c + SIDE * c_row, pitch);
    if (down > 1 && across > 1) TILE_STORE(3, c + SIDE * c_row + SIDE, pitch);
    MEMORY_IS_WRITTEN();
}

ALWAYS_INLINE void T(tiles_down)(const int down, REAL *c, int64_t c_row, const REAL *a, int64_t a_row, const REAL *b,
                                 int64_t b_row, int64_t n, int64_t words, bool accumulate)
{
    int64_t j = 0;
    for (; j + 2 * TE_TILE_SIDE <= n; j += 2 * TE_TILE_SIDE)
        T(tiles)(down, 2, c + j, c_row, a, a_row, b + j, b_row, words, accumulate);
    if (j < n) T(tiles)(down, 1, c + j, c_row, a, a_row, b + j, b_row, words, accumulate);
}

/* c (+)= a b: m rows, n columns, sums of so many words, n and words multiples of 16. The rows of a up to a multiple of
 * 16 may be read, and what they give is dropped. */
static void T(multiply)(int m, REAL *c, int64_t c_row, const REAL *a, int64_t a_row, const REAL *b, int64_t b_row,
                        int64_t n, int64_t words, bool accumulate)
{
    enum { SIDE = TE_TILE_SIDE };
    for (; m >= 2 * SIDE; m -= 2 * SIDE, c += 2 * SIDE * c_row, a += 2 * SIDE * a_row)
        T(tiles_down)(2, c, c_row, a, a_row, b, b_row, n, words, accumulate);
    if (m >= SIDE) {
        T(tiles_down)(1, c, c_row, a, a_row, b, b_row, n, words, accumulate);
        m -= SIDE, c += SIDE * c_row, a += SIDE * a_row;
    }
    for (int64_t j = 0; m > 0 && j < n; j += SIDE) {
        _Alignas(64) REAL rows[SIDE * SIDE] = {0};
        for (int r = 0; r < m && accumulate; r++) V_STORE(rows + r * SIDE, V_LOAD(c + r * c_row + j));
        T(tiles)(1, 1, rows, SIDE, a, a_row, b + j, b_row, words, accumulate);
        for (int r = 0; r < m; r++) V_STORE(c + r * c_row + j, V_LOAD(rows + r * SIDE));
    }
}

static void T(multiply_scores)(int m, REAL *scores, T(tile_range) range, const REAL *rows, const REAL *across,
                               int64_t dim)
{
    int64_t width = T(rows_width)(dim);
    T(multiply)(m, scores + range.column, TE_ATTENTION_KEYS, rows, width, across + range.column, TE_ATTENTION_KEYS,
                range.columns, width, false);
}

/* 16 numbers each of two rows, rounded: pairs of the first, then pairs of the second. */
static inline __m512i T(round_two)(__m512 first, __m512 second)
{
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

/* Whole pairs of registers of keys: what is beyond the range is 0. */
static void T(round_weights)(int m, const REAL *weights, REAL *halves, T(tile_range) range)
{
    enum { KEYS = TE_ATTENTION_KEYS, STEP = 2 * TE_TILE_SIDE };
    int low = range.column & -STEP, end = range.column + range.columns, high = (end + STEP - 1) & -STEP;
    for (int r = 0; r < m; r++)
        for (int j = low; j < high; j += STEP) {
            const REAL *p = weights + r * KEYS + j;
            __m512 first = j < range.column ? V_SET(0) : V_LOAD(p);
            __m512 second = j + VLEN < end ? V_LOAD(p + VLEN) : V_SET(0);
            _mm512_storeu_si512(halves + r * T(pair_width) + j / 2, T(round_two)(first, second));
        }
}

static void T(add_weighted)(int m, REAL *sums, int64_t dim, const REAL *weights, const REAL *halves,
                            T(tile_range) range, const REAL *right)
{
    enum { STEP = 2 * TE_TILE_SIDE };
    int low = range.column & -STEP, high = (range.column + range.columns + STEP - 1) & -STEP;
    (void)weights;
    T(multiply)(m, sums, dim, halves + low / 2, T(pair_width), right + low / 2 * dim, dim, dim, (high - low) / 2,
                true);
}

/* A block of pairs in which nothing weighs. */
static inline void T(clear_pairs)(REAL *pairs)
{
    memset(pairs, 0, TE_ATTENTION_KEYS * T(pair_width) * sizeof *pairs);
}

/* Pairs of queries at, at + 1, …: word (at + r) / 2 of row j of `pairs` holds rows r and r + 1 of column j. */
static void T(pair_weights)(REAL *pairs, int at, const REAL *weights, int m, T(tile_range) range)
{
    enum { KEYS = TE_ATTENTION_KEYS, SIDE = TE_TILE_SIDE };
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i pair = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_or_si512(lane, _mm512_set1_epi32(16)), 16));
    for (int r = 0; r < m; r += 2 * SIDE) {
        int words = (m - r + 1) / 2;
        __mmask16 there = (__mmask16)(words >= SIDE ? 0xffff : (1 << words) - 1);
        for (int j = range.column; j < range.column + range.columns; j += SIDE) {
            __m512i v[SIDE];
            for (int w = 0; w < SIDE; w++) {
                const REAL *p = weights + (r + 2 * w) * KEYS + j;
                v[w] = _mm512_setzero_si512();
                if (w >= words) continue;
                __m512 second = r + 2 * w + 1 < m ? V_LOAD(p + KEYS) : V_SET(0);
                v[w] = _mm512_permutexvar_epi16(pair, T(round_two)(V_LOAD(p), second));
            }
            te_tile_turn(v);
            REAL *to = pairs + j * T(pair_width) + (at + r) / 2;
            for (int i = 0; i < SIDE; i++, to += T(pair_width)) _mm512_mask_storeu_epi32(to, there, v[i]);
        }
    }
}

static void T(add_transposed)(int m, REAL *sums, int64_t dim, const REAL *weights, const REAL *pairs, int key,
                              int first, int end, const REAL *right)
{
    (void)weights;
    int low = first / 2 & -TE_TILE_SIDE, high = ((end + 1) / 2 + TE_TILE_SIDE - 1) & -TE_TILE_SIDE;
    T(multiply)(m, sums, dim, pairs + key * T(pair_width) + low, T(pair_width), right + low * dim, dim, dim,
                high - low, true);
}
