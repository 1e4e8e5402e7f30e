/* program_blocks_two.h - two sums over the same rows, and sums of rows and of columns in one pass over them. A part of
 * program_blocks_fold.h. */

typedef struct te_two_sums {
    te_real of, also;
} te_two_sums;

/* Parts first … first + HALF_PARTS of whole spans of lanes; p: what stands for `by`. */
TE_ALWAYS void row_two_parts(te_vec *of_lanes, te_vec *also_lanes, const int first, const void *s, bool half,
                             const void *by, bool by_half, const void *times, bool times_half, te_real about, size_t n,
                             te_ahead *ahead)
{
    te_vec of[HALF_PARTS], also[HALF_PARTS];
    TE_EACH_PART(HALF_PARTS) of[k] = also[k] = (te_vec){0};
    for (size_t i = 0; i + TE_FOLD_LANES <= n; i += TE_FOLD_LANES) {
        if (first == 0) fetch_ahead(ahead);
        TE_EACH_PART(HALF_PARTS)
        {
            te_vec p = TE_AT(by, by_half, first + k);
            if (times) p = p * TE_AT(times, times_half, first + k);
            also[k] = also[k] + p;
            of[k] = of[k] + (TE_AT(s, half, first + k) - about) * p;
        }
    }
    TE_EACH_PART(HALF_PARTS) of_lanes[first + k] = of[k], also_lanes[first + k] = also[k];
}

TE_ALWAYS te_two_sums row_two(const void *s, bool half, const void *by, bool by_half, const void *times,
                              bool times_half, te_real about, size_t n, te_ahead *ahead)
{
    te_real of[TE_FOLD_LANES], also[TE_FOLD_LANES];
    for (int first = 0; first < PARTS; first += HALF_PARTS)
        row_two_parts((te_vec *)of, (te_vec *)also, first, s, half, by, by_half, times, times_half, about, n, ahead);
    size_t i = n / TE_FOLD_LANES * TE_FOLD_LANES;
    for (size_t j = 0; j < n - i; j++) {
        te_real p = value_at(by, by_half, i + j);
        if (times) p = p * value_at(times, times_half, i + j);
        also[j] += p;
        of[j] += (value_at(s, half, i + j) - about) * p;
    }
    return (te_two_sums){join_sum(of), join_sum(also)};
}

TE_ALWAYS void rows_of_two(te_real *d, const te_fold_rows *fold, bool half, bool by_half, bool has_times,
                           bool times_half, te_ahead ahead)
{
    const char    *s = fold->src, *by = fold->by, *times = fold->times;
    const te_real *centre = fold->about;
    te_real       *also = fold->also;
    for (size_t r = 0; r < fold->rows; r++) {
        te_two_sums sums = row_two(s, half, by, by_half, has_times ? times : NULL, times_half, centre ? *centre : 0,
                                   fold->columns, &ahead);
        d[r] = sums.of;
        if (also) also[r] = sums.also;
        if (centre) centre += fold->about_step;
        if (has_times) times += fold->times_step * bytes_of(times_half);
        s += fold->src_step * bytes_of(half);
        by += fold->by_step * bytes_of(by_half);
    }
}

static void rows_two(te_real *d, const te_fold_rows *fold, te_ahead ahead)
{
    bool half = TE_REAL_IS_F32 && fold->src_half, by_half = TE_REAL_IS_F32 && fold->by_half;
    bool times_half = TE_REAL_IS_F32 && fold->times_half;
    bool times = fold->times != NULL, alike = half == by_half && !times_half;
    if (alike && half && times) rows_of_two(d, fold, true, true, true, false, ahead);
    else if (alike && half) rows_of_two(d, fold, true, true, false, false, ahead);
    else if (alike && times) rows_of_two(d, fold, false, false, true, false, ahead);
    else if (alike) rows_of_two(d, fold, false, false, false, false, ahead);
    else rows_of_two(d, fold, half, by_half, times, times_half, ahead);
}

/* --- sums of rows and columns at once ----------------------------------------------------------------------------- */

static void fold_columns(const te_fold_columns *fold, te_ahead ahead);

#if TE_REAL_IS_F32 && defined(TE_ISA_avx512) /* others have not as many registers */
/* Vector k of row q, see te_fold_rows; z: what stands for `by`. */
#define TE_BOTH_ROW(q, k)                                                                              \
    {                                                                                                  \
        te_vec x = TE_AT(s##q, half, k) - about##q, y = TE_AT(by##q, half, k);                         \
        te_vec z = y * TE_AT(times##q, false, k);                                                      \
        beside##q##k = beside##q##k + z;                                                               \
        of##q##k = of##q##k + x * z;                                                                   \
        sums = sums + y * (x * factor##q);                                                             \
        also = also + y;                                                                               \
    }

/* The sums of columns wait in memory, for two rows at a time. */
#define TE_BOTH_PART(k)                                                                                \
    {                                                                                                  \
        te_vec *to = (te_vec *)(columns + i) + k, sums = *to;                                          \
        te_vec *too = (te_vec *)(also_columns + i) + k, also = *too;                                   \
        TE_BOTH_ROW(0, k)                                                                              \
        TE_BOTH_ROW(1, k)                                                                              \
        *to = sums;                                                                                    \
        if (has_also) *too = also;                                                                     \
    }

#define TE_BOTH_OF(q, r)                                                                               \
    const char *s##q = (const char *)fold->src + (r) * fold->src_step * bytes_of(half);                \
    const char *by##q = (const char *)fold->by + (r) * fold->by_step * bytes_of(half);                 \
    const char *times##q = (const char *)fold->times + (r) * fold->times_step * bytes_of(false);       \
    te_real     about##q = fold->about ? ((const te_real *)fold->about)[(r) * fold->about_step] : 0;   \
    te_real     factor##q = fold->beside->times ? ((const te_real *)fold->beside->times)[r] : 1;       \
    te_vec      of##q##0 = {0}, of##q##1 = of##q##0, of##q##2 = of##q##0, of##q##3 = of##q##0;         \
    te_vec      beside##q##0 = of##q##0, beside##q##1 = of##q##0, beside##q##2 = of##q##0, beside##q##3 = of##q##0;

#define TE_BOTH_DONE(q, r)                                                                             \
    {                                                                                                  \
        te_vec of = (of##q##0 + of##q##2) + (of##q##1 + of##q##3);                                     \
        te_vec beside = (beside##q##0 + beside##q##2) + (beside##q##1 + beside##q##3);                 \
        d[r] = tree_sum(&of, 1);                                                                       \
        if (fold->also) ((te_real *)fold->also)[r] = tree_sum(&beside, 1);                             \
    }

/* Of rows r and r + 1. */
TE_ALWAYS void both_of(te_real *d, const te_fold_rows *fold, int64_t r, bool half, bool has_also, te_ahead *ahead)
{
    te_real     *columns = fold->beside->sums, *also_columns = has_also ? fold->beside->also : columns;
    const size_t n = fold->columns;
    TE_BOTH_OF(0, r)
    TE_BOTH_OF(1, r + 1)
    for (size_t i = 0; i < n; i += TE_FOLD_LANES) {
        fetch_ahead(ahead);
        fetch_ahead(ahead);
        TE_BOTH_PART(0) TE_BOTH_PART(1) TE_BOTH_PART(2) TE_BOTH_PART(3)
    }
    TE_BOTH_DONE(0, r)
    TE_BOTH_DONE(1, r + 1)
}

/* The last row by itself. */
static void last_of_both(te_real *d, const te_fold_rows *fold, int64_t r, te_ahead ahead)
{
    te_fold_rows    row = *fold;
    te_fold_columns columns = *fold->beside;
    int64_t         size = bytes_of(fold->src_half);
    row.rows = columns.rows = 1;
    row.src = columns.src = (const char *)fold->src + r * fold->src_step * size;
    row.by = columns.by = (const char *)fold->by + r * fold->by_step * size;
    row.times = (const te_real *)fold->times + r * fold->times_step;
    if (fold->about) row.about = columns.about = (const te_real *)fold->about + r * fold->about_step;
    if (fold->also) row.also = (te_real *)fold->also + r;
    if (columns.times) columns.times = (const te_real *)columns.times + r;
    fold_columns(&columns, (te_ahead){0});
    rows_two(d + r, &row, ahead);
}

static void rows_both(te_real *d, const te_fold_rows *fold, te_ahead ahead)
{
    bool    half = fold->src_half, also = fold->beside->also != NULL;
    int64_t rows = (int64_t)fold->rows, r = 0;
    for (; r + 2 <= rows; r += 2) {
        if (half && also) both_of(d, fold, r, true, true, &ahead);
        else if (half) both_of(d, fold, r, true, false, &ahead);
        else if (also) both_of(d, fold, r, false, true, &ahead);
        else both_of(d, fold, r, false, false, &ahead);
    }
    if (r < rows) last_of_both(d, fold, r, ahead);
}
#else
static void rows_both(te_real *d, const te_fold_rows *fold, te_ahead ahead)
{
    fold_columns(fold->beside, (te_ahead){0});
    rows_two(d, fold, ahead);
}
#endif
