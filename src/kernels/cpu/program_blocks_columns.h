/* program_blocks_columns.h - sums, maxima and minima of columns, and of rows that lie side by side. A part of
 * program_blocks_body.h, behind program_blocks_fold.h. */

/* Sums of as many columns as stay in registers while rows go by: `parts` vectors. */
TE_ALWAYS void column_block(const te_fold_columns *fold, size_t i, const int parts, bool half, bool has_by,
                            bool by_half, bool has_also, te_ahead *ahead)
{
    te_vec        *to = (te_vec *)((te_real *)fold->sums + i);
    te_vec        *too = has_also ? (te_vec *)((te_real *)fold->also + i) : to;
    te_vec         sums[PARTS], also[PARTS] = {{0}};
    const char    *src = fold->src, *by = fold->by;
    const te_real *centre = fold->about, *factor = fold->times;
    int64_t        step = fold->src_step * bytes_of(half), by_step = fold->by_step * bytes_of(by_half);
    TE_EACH_PART(parts) sums[k] = to[k];
    if (has_also) TE_EACH_PART(parts) also[k] = too[k];
    for (size_t r = 0; r < fold->rows; r++, src += step) {
        te_real about = centre ? centre[r] : 0, times = factor ? factor[r] : 1;
        if (i % TE_FOLD_LANES == 0) fetch_ahead(ahead);
        TE_EACH_PART(parts)
        {
            te_vec x = TE_AT(src, half, k);
            if (has_by) {
                te_vec y = TE_AT(by, by_half, k);
                sums[k] = sums[k] + y * ((x - about) * times);
                if (has_also) also[k] = also[k] + y;
            } else {
                sums[k] = sums[k] + x;
            }
        }
        if (has_by) by += by_step;
    }
    TE_EACH_PART(parts) to[k] = sums[k];
    if (has_also) TE_EACH_PART(parts) too[k] = also[k];
}

/* Columns from `first` on that fill no block, of one row. */
TE_ALWAYS void last_of_row(const te_fold_columns *fold, size_t first, const void *src, bool half, const void *by,
                           bool by_half, te_real about, te_real times)
{
    te_real *restrict sums = fold->sums, *restrict also = fold->also;
    if (by) {
        _Pragma("omp simd") for (size_t i = first; i < fold->columns; i++) sums[i] +=
            value_at(by, by_half, i) * ((value_at(src, half, i) - about) * times);
    } else {
        _Pragma("omp simd") for (size_t i = first; i < fold->columns; i++) sums[i] += value_at(src, half, i);
    }
    if (also) {
        _Pragma("omp simd") for (size_t i = first; i < fold->columns; i++) also[i] += value_at(by, by_half, i);
    }
}

static void last_columns(const te_fold_columns *fold, size_t first)
{
    const char    *src = fold->src, *by = fold->by;
    const te_real *centre = fold->about, *factor = fold->times;
    bool           half = TE_REAL_IS_F32 && fold->src_half, by_half = TE_REAL_IS_F32 && fold->by_half;
    for (size_t r = 0; r < fold->rows; r++, src += fold->src_step * bytes_of(half)) {
        te_real about = centre ? centre[r] : 0, times = factor ? factor[r] : 1;
        if (!half && !by_half) last_of_row(fold, first, src, false, by, false, about, times);
        else last_of_row(fold, first, src, half, by, by_half, about, times);
        if (by) by += fold->by_step * bytes_of(by_half);
    }
}

#if TE_REAL_IS_F32 && TE_WIDTH >= 8
/* The last columns but one vector's, by as many vectors as there are, and the rest as a part of the last WIDTH ones. */
static __attribute__((noinline)) void last_vectors(const te_fold_columns *fold, size_t i, bool half)
{
    te_ahead none = {0};
    size_t   rest = fold->columns % WIDTH;
    for (; PARTS - 4 > 0 && fold->columns - i >= 4 * WIDTH; i += 4 * WIDTH)
        column_block(fold, i, 4, half, false, false, false, &none);
    if (fold->columns - i >= 2 * WIDTH) column_block(fold, i, 2, half, false, false, false, &none), i += 2 * WIDTH;
    if (fold->columns - i >= WIDTH) column_block(fold, i, 1, half, false, false, false, &none);
    if (!rest) return;
    te_real        *end = (te_real *)fold->sums + fold->columns, sums[WIDTH];
    te_fold_columns last = *fold;
    last.sums = sums;
    last.src = (const char *)fold->src + (int64_t)(fold->columns - WIDTH) * bytes_of(half);
    memcpy(sums, end - WIDTH, sizeof sums);
    column_block(&last, 0, 1, half, false, false, false, &none);
    memcpy(end - rest, sums + WIDTH - rest, rest * sizeof *sums);
}
#else
#define last_vectors(fold, i, half) last_columns(fold, i)
#endif

#define COLUMN_PARTS(has_by) ((has_by) ? HALF_PARTS : MOST_PARTS)
#define TE_COLUMN_BLOCKS(half, has_by, by_half, has_also) \
    for (; i + TE_FOLD_LANES <= fold->columns; i += TE_FOLD_LANES) \
        for (int part = 0; part < PARTS; part += COLUMN_PARTS(has_by)) \
            column_block(fold, i + (size_t)(part * WIDTH), COLUMN_PARTS(has_by), half, has_by, by_half, has_also, \
                         &ahead)

static void fold_columns(const te_fold_columns *fold, te_ahead ahead)
{
    size_t i = 0;
    bool   half = TE_REAL_IS_F32 && fold->src_half, by_half = TE_REAL_IS_F32 && fold->by_half;
    if (!fold->by && half) TE_COLUMN_BLOCKS(true, false, false, false);
    else if (!fold->by) TE_COLUMN_BLOCKS(false, false, false, false);
    else if (fold->also && !half && !by_half) TE_COLUMN_BLOCKS(false, true, false, true);
    else if (fold->also && half && by_half) TE_COLUMN_BLOCKS(true, true, true, true);
    else if (!fold->also && !half && !by_half) TE_COLUMN_BLOCKS(false, true, false, false);
    else TE_COLUMN_BLOCKS(half, true, by_half, fold->also != NULL);
    if (i == fold->columns) return;
    if (fold->by || fold->columns < WIDTH) last_columns(fold, i);
    else last_vectors(fold, i, half);
}

#if TE_WIDTH >= 8 /* others have it done by operations on blocks */
/* --- rows side by side -------------------------------------------------------------------------------------------- */

TE_ALWAYS void across_lane(te_vec *h, const char *src, int64_t step, bool half, size_t n, size_t lane)
{
    TE_EACH_PART(HALF_PARTS) h[k] = (te_vec){0};
    for (size_t p = lane; p < n; p += TE_FOLD_LANES)
        TE_EACH_PART(HALF_PARTS) h[k] = h[k] + vector_at(src + (int64_t)p * step, half, (size_t)(k * WIDTH));
}

/* As many of them as HALF_PARTS vectors hold. The lanes of a sum are those of a row: here each is some vectors. */
TE_ALWAYS void across_sum(te_real *dst, const char *src, int64_t step, bool half, size_t n)
{
    te_vec lanes[TE_FOLD_LANES / 2][HALF_PARTS], h[HALF_PARTS], other[HALF_PARTS];
    size_t used = n < TE_FOLD_LANES ? n : TE_FOLD_LANES;
    size_t upper = 1;
    while (2 * upper < used) upper *= 2;
    for (size_t l = 0; l < used && l < upper; l++) {
        across_lane(h, src, step, half, n, l);
        if (l + upper < used) {
            across_lane(other, src, step, half, n, l + upper);
            TE_EACH_PART(HALF_PARTS) h[k] = h[k] + other[k];
        }
        TE_EACH_PART(HALF_PARTS) lanes[l][k] = h[k];
    }
    for (used = used < upper ? used : upper, upper /= 2; upper > 0; upper /= 2) {
        for (size_t l = 0; l + upper < used; l++)
            TE_EACH_PART(HALF_PARTS) lanes[l][k] = lanes[l][k] + lanes[l + upper][k];
        if (used > upper) used = upper;
    }
    TE_EACH_PART(HALF_PARTS) *(te_vec *)(dst + k * WIDTH) = lanes[0][k];
}

#define TE_TURNED(v) ((te_vec)((te_vec_bits)(v) ^ sign))

/* The largest, or with the sign bit turned the smallest. */
TE_ALWAYS void across_extreme(te_real *dst, const char *src, int64_t step, bool half, size_t n, te_vec_bits sign)
{
    te_vec h[HALF_PARTS];
    TE_EACH_PART(HALF_PARTS) h[k] = TE_TURNED(vector_at(src, half, (size_t)(k * WIDTH)));
    for (size_t p = 1; p < n; p++) {
        src += step;
        TE_EACH_PART(HALF_PARTS)
        {
            te_vec v = TE_TURNED(vector_at(src, half, (size_t)(k * WIDTH)));
            h[k] = TE_JOIN_MAX(h[k], v);
        }
    }
    TE_EACH_PART(HALF_PARTS) *(te_vec *)(dst + k * WIDTH) = TE_TURNED(h[k]);
}

/* The last columns are the last ones that fill the vectors, some of them once more. */
TE_ALWAYS void across(te_fold_kind kind, te_real *dst, const char *src, int64_t step, bool half, size_t n,
                      size_t columns)
{
    enum { TOGETHER = HALF_PARTS * WIDTH };
    te_vec_bits sign = (te_vec_bits){0} + (kind == TE_FOLD_MIN ? INT32_MIN : 0);
    for (size_t i = 0; i < columns; i += TOGETHER) {
        if (i + TOGETHER > columns) i = columns - TOGETHER;
        const char *at = src + (int64_t)i * bytes_of(half);
        if (kind == TE_FOLD_SUM) across_sum(dst + i, at, step, half, n);
        else across_extreme(dst + i, at, step, half, n, sign);
    }
}

static void fold_across(te_fold_kind kind, void *dst, const void *src, int64_t step, bool half, size_t n,
                        size_t columns)
{
    if (half) across(kind, dst, src, step * bytes_of(true), true, n, columns);
    else across(kind, dst, src, step * bytes_of(false), false, n, columns);
}
#endif
