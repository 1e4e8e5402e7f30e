/* attention_products.h - products of tiles whose numbers all are of the arithmetic's own type (a template; see
 * attention_loops.h). attention_pairs.h has the same words for products of bfloat16.
 *
 * Rows of an operand are loaded as *rows*, which stand left in scores = rows across; `across` are another operand's
 * rows transposed. Weighted sums of rows are products with those rows on the right, packed as *right*: here they
 * are the rows themselves.
 */

enum { T(few) = TE_ATTENTION_TILE /* queries, or keys, of a tile where masks cut through the block */ };

/* Elements that a loaded row takes, and that packing rows for the right side takes in addition. */
static inline int64_t T(rows_width)(int64_t dim) { return te_attention_pad(dim); }

static inline int64_t T(right_size)(int64_t rows, int64_t dim)
{
    (void)rows, (void)dim;
    return 0;
}

/* The scale of scores is applied to q when it is loaded; what is left for scores and dk. */
static inline REAL T(load_scale)(const te_attention *a) { return (REAL)a->scale; }

static inline REAL T(late_scale)(const te_attention *a)
{
    (void)a;
    return 1;
}

static inline void T(scale_scores)(REAL *p, int n, REAL scale) { (void)p, (void)n, (void)scale; }

static inline void T(load_rows)(REAL *rows, const te_view *v, int64_t batch, int64_t head, int64_t first, int64_t n,
                                REAL scale)
{
    T(load_tile)(rows, te_attention_pad(v->shape[3]), v, batch, head, first, n, scale);
}

/* n rows of `dim` columns for the right side, in `place` where they need one; right_of says where they are. */
static inline void T(pack_right)(REAL *place, const REAL *rows, int64_t dim, int n)
{
    (void)place, (void)rows, (void)dim, (void)n;
}

static inline const REAL *T(right_of)(const REAL *place, const REAL *rows)
{
    (void)place;
    return rows;
}

/* Rows of scores, columns of the range. */
static void T(multiply_scores)(int m, REAL *scores, T(tile_range) range, const REAL *rows, const REAL *across,
                               int64_t dim)
{
    T(gemm)(m, scores + range.column, TE_ATTENTION_KEYS, rows, te_attention_pad(dim), across + range.column,
            TE_ATTENTION_KEYS, range.columns, dim, false);
}

/* The weights of a tile in the form that add_weighted wants. */
static inline void T(round_weights)(int m, const REAL *weights, REAL *halves, T(tile_range) range)
{
    (void)m, (void)weights, (void)halves, (void)range;
}

/* sums[m, dim] += weights[m, range] right[range, dim]. */
static void T(add_weighted)(int m, REAL *sums, int64_t dim, const REAL *weights, const REAL *halves,
                            T(tile_range) range, const REAL *right)
{
    (void)halves;
    T(gemm)(m, sums, dim, weights + range.low, TE_ATTENTION_KEYS, right + range.low * dim, dim, dim,
            range.high - range.low, true);
}

/* The weights of a tile that begins at query `at` of the block, in the form that add_transposed wants; and a block of
 * it without any. */
static inline void T(pair_weights)(REAL *pairs, int at, const REAL *weights, int m, T(tile_range) range)
{
    (void)pairs, (void)at, (void)weights, (void)m, (void)range;
}

static inline void T(clear_pairs)(REAL *pairs) { (void)pairs; }

/* sums[m, dim] += weights[first … end, key … key + m]^T right[first … end, dim]. */
static void T(add_transposed)(int m, REAL *sums, int64_t dim, const REAL *weights, const REAL *pairs, int key,
                              int first, int end, const REAL *right)
{
    (void)pairs;
    T(any_gemm)(m, sums, dim, weights + first * TE_ATTENTION_KEYS + key, 1, TE_ATTENTION_KEYS, right + first * dim, dim,
                dim, end - first, true);
}

/* sums[dim] += weights[i * step] right[i, dim] for i = first … end and no other row, whatever stands there. */
static void T(add_exactly)(REAL *sums, int64_t dim, const REAL *weights, int64_t step, int first, int end,
                           const REAL *right)
{
    T(any_gemm)(1, sums, dim, weights + first * step, 0, step, right + first * dim, dim, dim, end - first, true);
}

#ifdef IN_PLACE
/* sums[dim] += weights[n] rows[n, dim]. */
static void T(add_rows)(REAL *sums, int64_t dim, const REAL *weights, const char *rows, int64_t row_bytes, int n)
{
    enum { VECTORS = 4 };
    int64_t d = 0, used = dim * (int64_t)sizeof(REAL);
    for (; d + VECTORS * VLEN <= dim; d += VECTORS * VLEN) {
        VECTOR sum[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[v] = V_LOAD(sums + d + v * VLEN);
        for (int j = 0; j < n; j++) {
            const char *row = rows + j * row_bytes;
            VECTOR weight = V_SET(weights[j]);
            if (d == 0) T(fetch_ahead)(row, row_bytes, used);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sum[v] = V_DOT(weight, V_LOAD((const REAL *)row + d + v * VLEN), sum[v]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) V_STORE(sums + d + v * VLEN, sum[v]);
    }
    if (d < dim)
        T(any_gemm)(1, sums + d, dim, weights, 0, 1, (const REAL *)rows + d, row_bytes / (int64_t)sizeof(REAL), dim - d,
                    n, true);
}
#endif
