/* program_blocks_fold.h - sums, maxima and minima over rows, blocks and columns. A part of program_blocks_body.h.
 *
 * The order of additions is part of the interface: it is the same for every instruction set, and depends on how a row
 * is cut into blocks only as program_blocks.h states. With 64 lanes four vectors of 16 are under way at a time, which
 * hides the latency of an addition.
 */
#include <string.h>
#if defined(TE_ISA_avx512)
#include <immintrin.h>
#endif

enum { WIDTH = 16 };
typedef te_real te_vec __attribute__((vector_size(WIDTH * sizeof(te_real)), aligned(sizeof(te_real)), may_alias));
#if TE_REAL_IS_F32
typedef int32_t te_vec_bits __attribute__((vector_size(WIDTH * sizeof(te_real)), may_alias));
#define TE_SIZE_BITS 0x7fffffff
#else
typedef int64_t te_vec_bits __attribute__((vector_size(WIDTH * sizeof(te_real)), may_alias));
#define TE_SIZE_BITS 0x7fffffffffffffff
#endif

#define TE_SELECT(mask, yes, no) \
    ((te_vec)(((te_vec_bits)(yes) & (te_vec_bits)(mask)) | ((te_vec_bits)(no) & ~(te_vec_bits)(mask))))

/* How a vector v (JOIN) or a number v (JOIN1) joins what is held. A NaN stays held: no number compares greater. */
#define TE_JOIN_SUM(h, v)   ((h) + (v))
#define TE_JOIN1_SUM(h, v)  ((h) + (v))
#define TE_JOIN_MAX(h, v)   TE_SELECT(((v) > (h)) | ((v) != (v)), v, h)
#define TE_JOIN1_MAX(h, v)  ((((v) > (h)) | ((v) != (v))) ? (v) : (h))
#define TE_JOIN_MIN(h, v)   TE_SELECT(((v) < (h)) | ((v) != (v)), v, h)
#define TE_JOIN1_MIN(h, v)  ((((v) < (h)) | ((v) != (v))) ? (v) : (h))
#define TE_JOIN_AMAX(h, v)  TE_SELECT(TE_SIZE(v) > (h), TE_SIZE(v), h)
#define TE_JOIN1_AMAX(h, v) (TE_REAL_FN(fabs)(v) > (h) ? TE_REAL_FN(fabs)(v) : (h))
#define TE_SIZE(v)          ((te_vec)((te_vec_bits)(v) & TE_SIZE_BITS))

/* The same with the machine's maximum and minimum, which give their second argument where both are equal or one is NaN. */
#if TE_REAL_IS_F32 && defined(TE_ISA_avx512)
#define TE_OR_NAN(joined, v) _mm512_mask_mov_ps(joined, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), v)
static inline te_vec join_max_vector(te_vec h, te_vec v) { return TE_OR_NAN(_mm512_max_ps(v, h), v); }
static inline te_vec join_min_vector(te_vec h, te_vec v) { return TE_OR_NAN(_mm512_min_ps(v, h), v); }
static inline te_vec join_amax_vector(te_vec h, te_vec v) { return _mm512_max_ps(_mm512_abs_ps(v), h); }
#undef TE_JOIN_MAX
#undef TE_JOIN_MIN
#undef TE_JOIN_AMAX
#define TE_JOIN_MAX(h, v)  join_max_vector(h, v)
#define TE_JOIN_MIN(h, v)  join_min_vector(h, v)
#define TE_JOIN_AMAX(h, v) join_amax_vector(h, v)
#endif

/* What is folded: the element, its product with another block's, the square of its distance from a number, or that distance's
 * product with another block's. */
#define TE_PLAIN(x, y, about)    (x)
#define TE_PRODUCT(x, y, about)  ((x) * (y))
#define TE_SQUARE(x, y, about)   (((x) - (about)) * ((x) - (about)))
#define TE_DISTANCE(x, y, about) (((x) - (about)) * (y))

/* Lane i of v beside lane i + half. */
#define TE_UPPER8(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15)
#define TE_UPPER4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7)
#define TE_UPPER2(v) __builtin_shufflevector(v, v, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3)
#define TE_UPPER1(v) __builtin_shufflevector(v, v, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)

/* To the second-level cache: the first one is full of the row at hand. */
static inline __attribute__((always_inline)) void fetch_ahead(te_ahead *ahead)
{
    for (size_t i = 0; i < ahead->each && ahead->lines; i++, ahead->lines--, ahead->at += TE_LINE) {
        if (ahead->write) __builtin_prefetch(ahead->at, 1, 1);
        else __builtin_prefetch(ahead->at, 0, 1);
    }
}

/* add: n elements into the lanes. row: a row by itself. Lanes are joined as a balanced tree, and a row of at most WIDTH
 * elements has the bits it would have with all the lanes, as those beyond its end are neutral. */
#define TE_FOLD(name, JOIN, JOIN1, VALUE)                                                                \
    static inline te_real tree_##name(const te_vec *lanes)                                               \
    {                                                                                                    \
        te_vec h = *lanes;                                                                               \
        h = JOIN(h, TE_UPPER8(h));                                                                       \
        h = JOIN(h, TE_UPPER4(h));                                                                       \
        h = JOIN(h, TE_UPPER2(h));                                                                       \
        h = JOIN(h, TE_UPPER1(h));                                                                       \
        return h[0];                                                                                     \
    }                                                                                                    \
    static inline void add_##name(te_real *lane, const te_real *src, const te_real *by, te_real about,   \
                                  size_t n, te_ahead ahead)                                              \
    {                                                                                                    \
        te_vec *l = (te_vec *)lane;                                                                      \
        te_vec  h0 = l[0], h1 = l[1], h2 = l[2], h3 = l[3];                                              \
        for (; n >= TE_FOLD_LANES; n -= TE_FOLD_LANES, src += TE_FOLD_LANES, by += TE_FOLD_LANES) {      \
            const te_vec *v = (const te_vec *)src, *u = (const te_vec *)by;                              \
            (void)u, (void)about;                                                                        \
            fetch_ahead(&ahead);                                                                         \
            h0 = JOIN(h0, VALUE(v[0], u[0], about));                                                            \
            h1 = JOIN(h1, VALUE(v[1], u[1], about));                                                            \
            h2 = JOIN(h2, VALUE(v[2], u[2], about));                                                            \
            h3 = JOIN(h3, VALUE(v[3], u[3], about));                                                            \
        }                                                                                                \
        l[0] = h0, l[1] = h1, l[2] = h2, l[3] = h3;                                                      \
        TE_EACH lane[i] = JOIN1(lane[i], VALUE(src[i], by[i], about));                                          \
    }                                                                                                    \
    static inline te_real join_##name(const te_real *lane)                                               \
    {                                                                                                    \
        const te_vec *l = (const te_vec *)lane, h = JOIN(JOIN(l[0], l[2]), JOIN(l[1], l[3]));            \
        return tree_##name(&h);                                                                          \
    }                                                                                                    \
    /* A row whose lanes stay in registers: columns > WIDTH. */                                          \
    static inline te_real row_##name(const te_real *s, const te_real *by, te_real about, size_t n,       \
                                     te_real neutral, te_ahead *ahead)                                   \
    {                                                                                                    \
        te_vec h0 = neutral - (te_vec){0}, h1 = h0, h2 = h0, h3 = h0;                                    \
        for (; n >= TE_FOLD_LANES; n -= TE_FOLD_LANES, s += TE_FOLD_LANES, by += TE_FOLD_LANES) {        \
            const te_vec *v = (const te_vec *)s, *u = (const te_vec *)by;                                \
            (void)u, (void)about;                                                                        \
            fetch_ahead(ahead);                                                                          \
            h0 = JOIN(h0, VALUE(v[0], u[0], about));                                                            \
            h1 = JOIN(h1, VALUE(v[1], u[1], about));                                                            \
            h2 = JOIN(h2, VALUE(v[2], u[2], about));                                                            \
            h3 = JOIN(h3, VALUE(v[3], u[3], about));                                                            \
        }                                                                                                \
        if (n > 0) {                                                                                     \
            te_real lane[TE_FOLD_LANES];                                                                 \
            te_vec *l = (te_vec *)lane;                                                                  \
            l[0] = h0, l[1] = h1, l[2] = h2, l[3] = h3;                                                  \
            TE_EACH lane[i] = JOIN1(lane[i], VALUE(s[i], by[i], about));                                        \
            h0 = l[0], h1 = l[1], h2 = l[2], h3 = l[3];                                                  \
        }                                                                                                \
        h0 = JOIN(JOIN(h0, h2), JOIN(h1, h3));                                                           \
        return tree_##name(&h0);                                                                         \
    }                                                                                                    \
    static void rows_##name(te_real *d, const te_fold_rows *fold, te_real neutral, te_ahead ahead)       \
    {                                                                                                    \
        const te_real *s = fold->src, *by = fold->by ? fold->by : s, *centre = fold->about;              \
        int64_t        by_step = fold->by ? fold->by_step : fold->src_step;                              \
        size_t         columns = fold->columns;                                                          \
        for (size_t r = 0; r < fold->rows; r++, s += fold->src_step, by += by_step) {                    \
            te_real about = centre ? *centre : 0;                                                        \
            if (centre) centre += fold->about_step;                                                      \
            if (columns <= WIDTH) {                                                                      \
                te_real lane[WIDTH];                                                                     \
                _Pragma("omp simd") for (size_t i = 0; i < WIDTH; i++)                                   \
                    lane[i] = i < columns ? JOIN1(neutral, VALUE(s[i], by[i], about)) : neutral;                \
                d[r] = tree_##name((const te_vec *)lane);                                                \
            } else {                                                                                     \
                d[r] = row_##name(s, by, about, columns, neutral, &ahead);                                      \
            }                                                                                            \
        }                                                                                                \
    }

TE_FOLD(sum, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PLAIN)
TE_FOLD(dot, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PRODUCT)
TE_FOLD(square, TE_JOIN_SUM, TE_JOIN1_SUM, TE_SQUARE)
TE_FOLD(distance, TE_JOIN_SUM, TE_JOIN1_SUM, TE_DISTANCE)
TE_FOLD(max, TE_JOIN_MAX, TE_JOIN1_MAX, TE_PLAIN)
TE_FOLD(min, TE_JOIN_MIN, TE_JOIN1_MIN, TE_PLAIN)
TE_FOLD(amax, TE_JOIN_AMAX, TE_JOIN1_AMAX, TE_PLAIN)

static te_real neutral_of(te_fold_kind kind)
{
    te_real infinity = (te_real)TE_INFINITY;
    return kind == TE_FOLD_MAX ? -infinity : kind == TE_FOLD_MIN ? infinity : (te_real)0;
}

static void fold_start(te_fold *fold, te_fold_kind kind)
{
    te_real *lane = (te_real *)fold->lane, neutral = neutral_of(kind);
    for (int i = 0; i < TE_FOLD_LANES; i++) lane[i] = neutral;
    fold->total = 0;
    fold->held = 0;
    fold->spilled = false;
}

static te_real join_lanes(te_fold *fold, te_fold_kind kind)
{
    const te_real *lane = (const te_real *)fold->lane;
    switch (kind) {
    case TE_FOLD_SUM: return join_sum(lane);
    case TE_FOLD_MAX: return join_max(lane);
    case TE_FOLD_MIN: return join_min(lane);
    default: return join_amax(lane);
    }
}

static void fold_add(te_fold *fold, te_fold_kind kind, const void *src, const void *by, const void *about, size_t n,
                     te_ahead ahead)
{
    te_real *lane = (te_real *)fold->lane, centre = about ? *(const te_real *)about : 0;
    switch (kind) {
    case TE_FOLD_SUM:
        if (by && about) add_distance(lane, src, by, centre, n, ahead);
        else if (about) add_square(lane, src, src, centre, n, ahead);
        else if (by) add_dot(lane, src, by, 0, n, ahead);
        else add_sum(lane, src, src, 0, n, ahead);
        break;
    case TE_FOLD_MAX: add_max(lane, src, src, 0, n, ahead); return;
    case TE_FOLD_MIN: add_min(lane, src, src, 0, n, ahead); return;
    case TE_FOLD_AMAX: add_amax(lane, src, src, 0, n, ahead); return;
    }
    fold->held += n;
    if (fold->held < TE_FOLD_SPAN) return;
    fold->total += (double)join_lanes(fold, kind);
    fold->held = 0;
    fold->spilled = true;
    memset(lane, 0, TE_FOLD_LANES * sizeof *lane);
}

static void fold_finish(te_fold *fold, te_fold_kind kind, void *dst)
{
    te_real rest = join_lanes(fold, kind);
    *(te_real *)dst = fold->spilled ? (te_real)(fold->total + (double)rest) : rest;
}

static void fold_rows(te_fold_kind kind, void *dst, const te_fold_rows *fold, te_ahead ahead)
{
    te_real neutral = neutral_of(kind);
    switch (kind) {
    case TE_FOLD_SUM:
        if (fold->by && fold->about) rows_distance(dst, fold, neutral, ahead);
        else if (fold->about) rows_square(dst, fold, neutral, ahead);
        else if (fold->by) rows_dot(dst, fold, neutral, ahead);
        else rows_sum(dst, fold, neutral, ahead);
        break;
    case TE_FOLD_MAX: rows_max(dst, fold, neutral, ahead); break;
    case TE_FOLD_MIN: rows_min(dst, fold, neutral, ahead); break;
    case TE_FOLD_AMAX: rows_amax(dst, fold, neutral, ahead); break;
    }
}

static void fold_columns(void *sums, const void *src, const void *by, size_t rows, size_t columns)
{
    te_real       *d = sums;
    const te_real *s = src, *u = by;
    for (size_t r = 0; r < rows; r++, s += columns) {
        if (by) {
            _Pragma("omp simd") for (size_t j = 0; j < columns; j++) d[j] += s[j] * u[j];
            u += columns;
        } else {
            _Pragma("omp simd") for (size_t j = 0; j < columns; j++) d[j] += s[j];
        }
    }
}
