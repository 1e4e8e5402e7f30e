/* attention_tile.h - small matrix products and tile moves for the attention loops (a template; see attention_loops.h).
 *
 * Tiles are row-major with rows padded to a multiple of TE_ATTENTION_LANES. Every product is
 *
 *      c[m, n] (+)= sum over k of a(m, k) b[k, n]
 *
 * with b and c read along their rows by vectors and a(m, k) at a[m * a_row + k * a_k] broadcast, so that a may be used
 * transposed for free. Each element of c is one chain of V_DOT, a fused multiply-add or one of pairs, in order of k,
 * whatever the blocking.
 */

#ifndef MATRIX_UNIT
/* `rows` and `vectors` are constants wherever this is inlined: the sums live in registers. */
UNWATCHED ALWAYS_INLINE void T(micro)(int rows, int vectors, REAL *c, int64_t c_row, const REAL *a, int64_t a_row,
                                      int64_t a_k, const REAL *b, int64_t b_row, int64_t k, bool accumulate)
{
    VECTOR sum[MICRO_ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sum[r][v] = accumulate ? V_LOAD(c + r * c_row + v * VLEN) : V_SET(0);
    for (int64_t i = 0; i < k; i++) {
        VECTOR right[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) right[v] = V_LOAD(b + i * b_row + v * VLEN);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            VECTOR left = V_SET(a[r * a_row + i * a_k]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sum[r][v] = V_DOT(left, right[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) V_STORE(c + r * c_row + v * VLEN, sum[r][v]);
}

/* One panel of `vectors` vectors of columns, all m rows. */
UNWATCHED ALWAYS_INLINE void T(panel_gemm)(int vectors, int m, REAL *c, int64_t c_row, const REAL *a, int64_t a_row,
                                           int64_t a_k, const REAL *b, int64_t b_row, int64_t k, bool accumulate)
{
    for (; m >= MICRO_ROWS; m -= MICRO_ROWS, c += MICRO_ROWS * c_row, a += MICRO_ROWS * a_row)
        T(micro)(MICRO_ROWS, vectors, c, c_row, a, a_row, a_k, b, b_row, k, accumulate);
    if (MICRO_ROWS > 4 && m >= 4) {
        T(micro)(4, vectors, c, c_row, a, a_row, a_k, b, b_row, k, accumulate);
        m -= 4, c += 4 * c_row, a += 4 * a_row;
    }
    for (; m > 0; m--, c += c_row, a += a_row) T(micro)(1, vectors, c, c_row, a, a_row, a_k, b, b_row, k, accumulate);
}

/* n is a multiple of TE_ATTENTION_LANES. A panel of b stays in L1 for all rows. */
UNWATCHED ALWAYS_INLINE void T(any_gemm)(int m, REAL *c, int64_t c_row, const REAL *a, int64_t a_row, int64_t a_k,
                                         const REAL *b, int64_t b_row, int64_t n, int64_t k, bool accumulate)
{
    int64_t j = 0;
    for (; j + 2 * VLEN <= n; j += 2 * VLEN)
        T(panel_gemm)(2, m, c + j, c_row, a, a_row, a_k, b + j, b_row, k, accumulate);
    if (j < n) T(panel_gemm)(1, m, c + j, c_row, a, a_row, a_k, b + j, b_row, k, accumulate);
}

/* c (+)= a b, a row-major. */
UNWATCHED static void T(gemm)(int m, REAL *c, int64_t c_row, const REAL *a, int64_t a_row, const REAL *b,
                              int64_t b_row, int64_t n, int64_t k, bool accumulate)
{
    const int64_t size = sizeof(REAL);
    for (int r = 0; r < m; r++) te_touches(c + r * c_row, n * size), te_touches(a + r * a_row, k * size);
    for (int64_t i = 0; i < k; i++) te_touches(b + i * b_row, n * size);
    T(any_gemm)(m, c, c_row, a, a_row, 1, b, b_row, n, k, accumulate);
}

#endif

/* --- memory ----------------------------------------------------------------------------------------------------- */

/* The next n elements of a block of scratch; without a base only the place is counted. */
static REAL *T(carve)(REAL *base, int64_t *at, int64_t n)
{
    REAL *place = base ? base + *at : NULL;
    *at += n;
    return place;
}

/* --- tiles ------------------------------------------------------------------------------------------------------ */

static inline int64_t T(size_of)(const te_view *v) { return v->dtype == TE_F32 ? 4 : v->dtype == TE_F64 ? 8 : 2; }

/* Where row `first` of an operand [batch, heads, seq, dim] lies, and the bytes from one row to the next. */
static inline char *T(rows_at)(const te_view *v, int64_t batch, int64_t head, int64_t first, int64_t *row_bytes)
{
    int64_t size = T(size_of)(v);
    *row_bytes = v->stride[2] * size;
    return (char *)v->data + (batch * v->stride[0] + head * v->stride[1] + first * v->stride[2]) * size;
}

#ifndef PAIRS
/* tile[i, 0 … width) = scale * rows first + i of the operand; what lies behind dim is zero. Rows of a head may be pages
 * apart, where no hardware prefetcher follows. They mostly are whole vectors, so what is left of
 * one is not worth any. */
static void T(load_tile)(REAL *restrict tile, int64_t width, const te_view *v, int64_t batch, int64_t head,
                         int64_t first, int64_t rows, REAL scale)
{
    enum { AHEAD = 16, LINE = 64 };
    int64_t dim = v->shape[3], whole = dim / 16 * 16, row_bytes;
    int64_t used = dim * T(size_of)(v);
    const char *row = T(rows_at)(v, batch, head, first, &row_bytes);
    for (int64_t i = 0; i < rows; i++, tile += width, row += row_bytes) {
        const uint16_t *half = (const uint16_t *)row;
        if (first + i + AHEAD < v->shape[2])
            for (int64_t b = 0; b < used; b += LINE) __builtin_prefetch(row + AHEAD * row_bytes + b);
        switch (v->dtype) {
        case TE_F32: for (int64_t d = 0; d < whole; d++) tile[d] = scale * (REAL)((const float *)row)[d]; break;
        case TE_BF16: for (int64_t d = 0; d < whole; d++) tile[d] = scale * (REAL)te_bf16_to_f32(half[d]); break;
        case TE_F16: for (int64_t d = 0; d < whole; d++) tile[d] = scale * (REAL)te_f16_to_f32(half[d]); break;
        default: for (int64_t d = 0; d < whole; d++) tile[d] = scale * (REAL)((const double *)row)[d];
        }
        for (int64_t d = whole; d < dim; d++) tile[d] = scale * (REAL)te_load_f64(row, v->dtype, d);
        for (int64_t d = dim; d < width; d++) tile[d] = 0;
    }
}
#endif

/* Rows first + i of the operand = scale[i * step] * tile[i, :], rounded to its dtype. What they replace comes from
 * memory, so it is asked for some rows ahead. */
static void T(store_tile)(const te_view *v, int64_t batch, int64_t head, int64_t first, int64_t rows,
                          const REAL *restrict tile, int64_t width, const REAL *scale, int64_t step)
{
    enum { AHEAD = 16, LINE = 64 };
    int64_t dim = v->shape[3], whole = dim / 16 * 16, used = dim * T(size_of)(v), row_bytes;
    char *row = T(rows_at)(v, batch, head, first, &row_bytes);
    for (int64_t i = 0; i < rows; i++, tile += width, row += row_bytes, scale += step) {
        if (i + AHEAD < rows)
            for (int64_t b = 0; b < used; b += LINE) __builtin_prefetch(row + AHEAD * row_bytes + b, 1);
        uint16_t *restrict half = (uint16_t *)row;
        REAL by = *scale;
        switch (v->dtype) {
        case TE_F32: for (int64_t d = 0; d < whole; d++) ((float *restrict)row)[d] = (float)(by * tile[d]); break;
        case TE_BF16: for (int64_t d = 0; d < whole; d++) half[d] = te_f32_to_bf16((float)(by * tile[d])); break;
        case TE_F16: for (int64_t d = 0; d < whole; d++) half[d] = te_f32_to_f16((float)(by * tile[d])); break;
#ifdef PAIRS
        default: break; /* nothing beside bfloat16 is float64 */
#else
        default: for (int64_t d = 0; d < whole; d++) ((double *restrict)row)[d] = (double)(by * tile[d]);
#endif
        }
        for (int64_t d = whole; d < dim; d++) te_store_f64(row, v->dtype, d, (double)(by * tile[d]));
    }
}

/* out[d, j] = tile[j, d] for the block's keys; columns behind `rows` are zero. */
static void T(transpose_tile)(REAL *restrict out, REAL *restrict tile, int64_t width, int rows)
{
    enum { KEYS = TE_ATTENTION_KEYS };
#ifdef TRANSPOSE_BLOCK
    if (rows < KEYS) memset(tile + rows * width, 0, (size_t)((KEYS - rows) * width) * sizeof *tile);
    for (int64_t d = 0; d < width; d += VLEN)
        for (int j = 0; j < KEYS; j += VLEN) TRANSPOSE_BLOCK(out + d * KEYS + j, KEYS, tile + j * width + d, width);
#else
    for (int64_t d0 = 0; d0 < width; d0 += 16)
        for (int j = 0; j < KEYS; j++)
            for (int64_t d = d0; d < d0 + 16; d++) out[d * KEYS + j] = j < rows ? tile[j * width + d] : 0;
#endif
}

#ifdef PAIRS
/* Whether all halves of a tile are finite. */
static bool T(tile_finite)(const REAL *tile, int64_t n)
{
    const half_in_pair *half = (const half_in_pair *)tile;
    uint16_t bad = 0;
    for (int64_t i = 0; i < 2 * n; i++) bad |= (half[i] & 0x7f80u) == 0x7f80u;
    return !bad;
}
#else
/* Whether all of a tile is finite: x * 0 is 0 for finite x alone. */
static bool T(tile_finite)(const REAL *tile, int64_t n)
{
    REAL lane[16] = {0};
    for (int64_t i = 0; i < n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += tile[i + j] * 0;
    REAL sum = 0;
    for (int j = 0; j < 16; j++) sum += lane[j];
    return sum == 0;
}
#endif

/* --- scores ----------------------------------------------------------------------------------------------------- */

/* Adds the bias of query i, keys key + first … key + end of the sequence. Minus infinity hides a score, whatever
 * that is. */
static void T(add_bias)(REAL *scores, const te_attention *a, const te_attention_seq *seq, int64_t head, int64_t i,
                        int64_t key, int first, int end)
{
    const te_view *b = &a->bias;
    int64_t offset = seq->batch * b->stride[0] + head * b->stride[1] + (seq->q_start + i) * b->stride[2] +
                     (seq->kv_start + key) * b->stride[3];
    REAL x[TE_ATTENTION_KEYS];
    te_convert(te_copy_blocks_of(seq->exec), x + first, sizeof(REAL) == sizeof(float) ? TE_F32 : TE_F64, 1,
               te_element(b->data, b->dtype, offset + first * b->stride[3]), b->dtype, b->stride[3], end - first);
    _Pragma("omp simd") for (int j = first; j < end; j++)
    {
        REAL sum = scores[j] + x[j];
        scores[j] = x[j] == -(REAL)INFINITY ? x[j] : sum;
    }
}

/* Range of a tile of `rows` rows: the keys some of its rows see, and the columns of scores that hold them. Empty when
 * low >= high. */
typedef struct T(tile_range) {
    int low, high, column, columns;
} T(tile_range);

static T(tile_range) T(range_of)(const int *low, const int *high, int rows)
{
    T(tile_range) r = {TE_ATTENTION_KEYS, 0, 0, 0};
    for (int i = 0; i < rows; i++) {
        if (low[i] >= high[i]) continue;
        if (low[i] < r.low) r.low = low[i];
        if (high[i] > r.high) r.high = high[i];
    }
    r.column = r.low & -TE_ATTENTION_LANES;
    r.columns = (int)te_attention_pad(r.high - r.column);
    return r;
}

/* Columns of the tile outside low … high = value. */
static inline void T(fill_outside)(REAL *restrict p, T(tile_range) range, int low, int high, REAL value)
{
    for (int j = range.column; j < range.column + range.columns; j += 16) {
        int from = low - j, to = high - j;
        if (from <= 0 && to >= 16) continue;
        _Pragma("omp simd") for (int l = 0; l < 16; l++) {
            REAL x = p[j + l];
            p[j + l] = ((l >= from) & (l < to)) ? x : value;
        }
    }
}

/* Largest of n elements, n a multiple of 16; NaN does not count. */
static inline REAL T(row_max)(const REAL *p, int n)
{
    VECTOR most = V_LOAD(p);
    for (int j = VLEN; j < n; j += VLEN) most = V_MAX(V_LOAD(p + j), most);
    return V_TOP(most);
}

/* Where rows are loaded without the scale, it meets scores on their way into exponentials. */
ALWAYS_INLINE VECTOR T(scaled)(VECTOR x, REAL scale)
{
#ifdef PAIRS
    return x * V_SET(scale);
#else
    return (void)scale, x;
#endif
}

/* REAL_EXP of each element. */
ALWAYS_INLINE VECTOR T(exp_vector)(VECTOR x)
{
    _Alignas(sizeof(VECTOR)) REAL lane[VLEN];
    V_STORE(lane, x);
    _Pragma("omp simd") for (int l = 0; l < VLEN; l++) lane[l] = REAL_EXP(lane[l]);
    return V_LOAD(lane);
}

/* Rows of scores side by side, since one alone would wait for its exponentials: p[j] = exp(scale p[j] - reference), and
 * 16 partial sums sum[l] += p[j + l] for j = 0, 16, … `rows` is a constant; n a multiple of 16. */
ALWAYS_INLINE void T(exp_rows)(const int rows, REAL *p, int n, REAL scale, const REAL *reference, REAL *sum)
{
    enum { KEYS = TE_ATTENTION_KEYS, LANES = TE_ATTENTION_LANES };
    for (int v = 0; v < 16; v += VLEN) {
        VECTOR lanes[TOGETHER];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) lanes[r] = V_LOAD(sum + r * LANES + v);
        for (int j = v; j < n; j += 16)
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                VECTOR less = T(scaled)(V_LOAD(p + r * KEYS + j), scale) - V_SET(reference[r]);
                VECTOR weight = T(exp_vector)(less);
                V_STORE(p + r * KEYS + j, weight);
                lanes[r] = lanes[r] + weight;
            }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) V_STORE(sum + r * LANES + v, lanes[r]);
    }
}

/* The sum of 16 lanes, aligned for vectors, as a balanced tree: one after the other they would take longer than the
 * products. */
static inline REAL T(join_lanes)(const REAL *lane)
{
    VECTOR sum[16 / VLEN];
    for (int v = 0; v < 16 / VLEN; v++) sum[v] = V_LOAD(lane + v * VLEN);
#pragma GCC unroll 4
    for (int half = 8 / VLEN; half > 0; half /= 2)
        for (int v = 0; v < half; v++) sum[v] = sum[v] + sum[v + half];
    return V_SUM(sum[0]);
}

/* p[j] / (1 - p), or 0 where keep[j] is 0. */
static void T(drop)(REAL *p, const float *keep, int n, double dropout)
{
    REAL scale = dropout < 1.0 ? (REAL)(1.0 / (1.0 - dropout)) : 0;
    for (int j = 0; j < n; j++) p[j] = keep[j] != 0 ? p[j] * scale : 0;
}

/* --- rows as they lie --------------------------------------------------------------------------------------------- */

#ifdef IN_PLACE
enum { T(ahead) = 16 /* rows, since they may be pages apart */ };

/* The row that is T(ahead) behind this one, if there is one; if not, asking for what stands there does no harm. */
static inline void T(fetch_ahead)(const char *row, int64_t row_bytes, int64_t bytes)
{
    uintptr_t next = (uintptr_t)row + (uintptr_t)(T(ahead) * row_bytes);
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)(next + (uintptr_t)b));
}

/* scores[j] = scale times q times row j, for n rows that take `width` REALs: lanes of the products are added up at the
 * end. */
static void T(dot_rows)(REAL *scores, const REAL *q, int64_t width, const char *rows, int64_t row_bytes, int n,
                        REAL scale)
{
    enum { TOGETHER_ROWS = 4 };
    int64_t used = width * (int64_t)sizeof(REAL);
    for (int j = 0; j < n; j += TOGETHER_ROWS) {
        const char *row[TOGETHER_ROWS];
        VECTOR sum[TOGETHER_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < TOGETHER_ROWS; r++) {
            row[r] = rows + (j + r < n ? j + r : n - 1) * row_bytes;
            sum[r] = V_SET(0);
            T(fetch_ahead)(row[r], row_bytes, used);
        }
        for (int64_t d = 0; d < width; d += VLEN) {
            VECTOR left = V_LOAD(q + d);
#pragma GCC unroll 4
            for (int r = 0; r < TOGETHER_ROWS; r++) sum[r] = V_DOT(left, V_LOAD((const REAL *)row[r] + d), sum[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < TOGETHER_ROWS; r++)
            if (j + r < n) scores[j + r] = V_SUM(sum[r]) * scale;
    }
}
#endif
