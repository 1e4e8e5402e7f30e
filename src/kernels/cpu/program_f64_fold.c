/* program_f64_fold.c - sums, maxima and minima in float64.
 *
 * In the order of program_blocks_fold.h. Lanes stay in memory, since they are more than the registers of most machines:
 * four times as many elements are joined to them between a load and a store.
 */
#include "program_f64_fold.h"

#include <math.h>
#include <string.h>

/* How v joins what is held, as a vector and as a number; a NaN stays held, see program_blocks_fold.h. */
#define TE_SELECT(mask, yes, no) ((vector)(((bits)(yes) & (mask)) | ((bits)(no) & ~(mask))))
#define TE_SIZE(v)          ((vector)((bits)(v) & INT64_MAX))
#define TE_JOIN_SUM(h, v)   ((h) + (v))
#define TE_JOIN1_SUM(h, v)  ((h) + (v))
#define TE_JOIN_MAX(h, v)   TE_SELECT(((v) > (h)) | ((v) != (v)), v, h)
#define TE_JOIN1_MAX(h, v)  ((((v) > (h)) | ((v) != (v))) ? (v) : (h))
#define TE_JOIN_MIN(h, v)   TE_SELECT(((v) < (h)) | ((v) != (v)), v, h)
#define TE_JOIN1_MIN(h, v)  ((((v) < (h)) | ((v) != (v))) ? (v) : (h))
#define TE_JOIN_AMAX(h, v)  TE_SELECT(TE_SIZE(v) > (h), TE_SIZE(v), h)
#define TE_JOIN1_AMAX(h, v) (fabs(v) > (h) ? fabs(v) : (h))

#define TE_PLAIN(x, y)    (x)
#define TE_PRODUCT(x, y)  ((x) * (y))
#define TE_SQUARE(x, y)   (((x) - about) * ((x) - about))
#define TE_DISTANCE(x, y) (((x) - about) * (y))

enum { WIDTH = 2, HELD = 8, STRETCH = 16 * TE_FOLD_LANES, AHEAD = 64 * TE_FOLD_LANES };
typedef double  vector __attribute__((vector_size(WIDTH * sizeof(double)), aligned(sizeof(double)), may_alias));
typedef int64_t bits __attribute__((vector_size(WIDTH * sizeof(double)), may_alias));

typedef void add_function(double *lane, const double *x, const double *y, double about, size_t n);

/* add_: n elements into the lanes, from the first one on. A quarter of the lanes at a time stays in registers. */
#define TE_ADD(name, JOIN, JOIN1, VALUE)                                                                 \
    static void strips_##name(double *lane, const double *x, const double *y, double about, size_t n)    \
    {                                                                                                    \
        vector h[HELD];                                                                                  \
        (void)about;                                                                                     \
        memcpy(h, lane, sizeof h);                                                                       \
        for (size_t i = 0; i < n; i += TE_FOLD_LANES) {                                                  \
            const vector *v = (const vector *)(x + i), *u = (const vector *)(y + i);                     \
            (void)u;                                                                                     \
            __builtin_prefetch(x + i + AHEAD, 0, 1);                                                     \
            __builtin_prefetch(x + i + AHEAD + TE_LINE / sizeof(double), 0, 1);                          \
            _Pragma("GCC unroll 8") for (int k = 0; k < HELD; k++) h[k] = JOIN(h[k], VALUE(v[k], u[k])); \
        }                                                                                                \
        memcpy(lane, h, sizeof h);                                                                       \
    }                                                                                                    \
    static void add_##name(double *lane, const double *x, const double *y, double about, size_t n)       \
    {                                                                                                    \
        while (n >= TE_FOLD_LANES) {                                                                     \
            size_t now = n < STRETCH ? n / TE_FOLD_LANES * TE_FOLD_LANES : STRETCH;                      \
            for (int k = 0; k < TE_FOLD_LANES; k += HELD * WIDTH)                                        \
                strips_##name(lane + k, x + k, y + k, about, now);                                       \
            x += now, y += now, n -= now;                                                                \
        }                                                                                                \
        for (size_t i = 0; i < n; i++) lane[i] = JOIN1(lane[i], VALUE(x[i], y[i]));                      \
    }

TE_ADD(sum, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PLAIN)
TE_ADD(dot, TE_JOIN_SUM, TE_JOIN1_SUM, TE_PRODUCT)
TE_ADD(square, TE_JOIN_SUM, TE_JOIN1_SUM, TE_SQUARE)
TE_ADD(distance, TE_JOIN_SUM, TE_JOIN1_SUM, TE_DISTANCE)
TE_ADD(max, TE_JOIN_MAX, TE_JOIN1_MAX, TE_PLAIN)
TE_ADD(min, TE_JOIN_MIN, TE_JOIN1_MIN, TE_PLAIN)
TE_ADD(amax, TE_JOIN_AMAX, TE_JOIN1_AMAX, TE_PLAIN)

static add_function *function_for(te_fold_kind kind, bool by, bool about)
{
    switch (kind) {
    case TE_FOLD_MAX: return add_max;
    case TE_FOLD_MIN: return add_min;
    case TE_FOLD_AMAX: return add_amax;
    default: break;
    }
    if (about) return by ? add_distance : add_square;
    return by ? add_dot : add_sum;
}

/* --- lanes -------------------------------------------------------------------------------------------------------- */

static void clear_lanes(double *lane, te_fold_kind kind)
{
    double neutral = kind == TE_FOLD_MAX ? -INFINITY : kind == TE_FOLD_MIN ? INFINITY : 0;
    for (int i = 0; i < TE_FOLD_LANES; i++) lane[i] = neutral;
}

/* A balanced tree; the lanes are used up. */
#define TE_TREE(name, JOIN, JOIN1)                                                                      \
    static double tree_##name(double *lane)                                                             \
    {                                                                                                   \
        vector *h = (vector *)lane;                                                                     \
        for (int half = TE_FOLD_LANES / WIDTH / 2; half > 0; half /= 2)                                 \
            for (int i = 0; i < half; i++) h[i] = JOIN(h[i], h[i + half]);                              \
        return JOIN1(lane[0], lane[1]);                                                                 \
    }

TE_TREE(sum, TE_JOIN_SUM, TE_JOIN1_SUM)
TE_TREE(max, TE_JOIN_MAX, TE_JOIN1_MAX)
TE_TREE(min, TE_JOIN_MIN, TE_JOIN1_MIN)
TE_TREE(amax, TE_JOIN_AMAX, TE_JOIN1_AMAX)

static double join_lanes(double *lane, te_fold_kind kind)
{
    switch (kind) {
    case TE_FOLD_SUM: return tree_sum(lane);
    case TE_FOLD_MAX: return tree_max(lane);
    case TE_FOLD_MIN: return tree_min(lane);
    default: return tree_amax(lane);
    }
}

void te_f64_fold_start(te_fold *fold, te_fold_kind kind)
{
    clear_lanes(fold->lane, kind);
    fold->total = 0;
    fold->held = 0;
    fold->spilled = false;
}

void te_f64_fold_add(te_fold *fold, te_fold_kind kind, const void *src, const void *by, const void *about, size_t n,
                     te_ahead ahead)
{
    (void)ahead;
    add_function *add = function_for(kind, by != NULL, about != NULL);
    add(fold->lane, src, by ? by : src, about ? *(const double *)about : 0, n);
    if (kind != TE_FOLD_SUM) return;
    fold->held += n;
    if (fold->held < TE_FOLD_SPAN) return;
    fold->total += join_lanes(fold->lane, kind);
    fold->held = 0;
    fold->spilled = true;
    clear_lanes(fold->lane, kind);
}

void te_f64_fold_finish(te_fold *fold, te_fold_kind kind, void *dst)
{
    double rest = join_lanes(fold->lane, kind);
    *(double *)dst = fold->spilled ? fold->total + rest : rest;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* Both sums of one row, see te_fold_rows. */
static void fold_two(double *of, double *also, const te_fold_rows *fold, const double *s, const double *by,
                     const double *times, double about)
{
    double lane[2][TE_FOLD_LANES];
    clear_lanes(lane[0], TE_FOLD_SUM);
    clear_lanes(lane[1], TE_FOLD_SUM);
    for (size_t i = 0; i < fold->columns; i++) {
        double p = times ? by[i] * times[i] : by[i];
        lane[1][i % TE_FOLD_LANES] += p;
        lane[0][i % TE_FOLD_LANES] += (s[i] - about) * p;
    }
    *of = join_lanes(lane[0], TE_FOLD_SUM);
    if (also) *also = join_lanes(lane[1], TE_FOLD_SUM);
}

static double fold_row(te_fold_kind kind, add_function *add, const double *s, const double *by, double about, size_t n)
{
    double lane[TE_FOLD_LANES];
    clear_lanes(lane, kind);
    add(lane, s, by, about, n);
    return join_lanes(lane, kind);
}

void te_f64_fold_rows(te_fold_kind kind, void *dst, const te_fold_rows *fold, te_ahead ahead)
{
    const double *s = fold->src, *by = fold->by, *times = fold->times, *about = fold->about;
    double       *also = fold->also, *d = dst;
    bool          two = kind == TE_FOLD_SUM && (fold->beside || times || also);
    add_function *add = function_for(kind, by != NULL, about != NULL);
    if (kind == TE_FOLD_SUM && fold->beside) te_f64_fold_columns(fold->beside, ahead);
    for (size_t r = 0; r < fold->rows; r++) {
        double centre = about ? about[(int64_t)r * fold->about_step] : 0;
        if (two) fold_two(&d[r], also ? &also[r] : NULL, fold, s, by, times, centre);
        else d[r] = fold_row(kind, add, s, by ? by : s, centre, fold->columns);
        s += fold->src_step;
        if (by) by += fold->by_step;
        if (times) times += fold->times_step;
    }
}

/* --- columns ------------------------------------------------------------------------------------------------------ */

static void add_four_rows(double *restrict sums, const double *s, int64_t step, size_t n, te_ahead *ahead)
{
    const double *t = s + step, *u = t + step, *v = u + step;
    for (size_t first = 0; first < n; first += TE_FOLD_LANES) {
        size_t end = n - first < TE_FOLD_LANES ? n : first + TE_FOLD_LANES;
        for (int i = 0; i < 4; i++) te_fetch_ahead(ahead);
        _Pragma("omp simd") for (size_t i = first; i < end; i++) sums[i] = (((sums[i] + s[i]) + t[i]) + u[i]) + v[i];
    }
}

static void add_row(double *restrict sums, double *restrict also, const double *s, const double *by, double about,
                    double times, size_t n)
{
    if (by) {
        _Pragma("omp simd") for (size_t i = 0; i < n; i++) sums[i] += by[i] * ((s[i] - about) * times);
    } else {
        _Pragma("omp simd") for (size_t i = 0; i < n; i++) sums[i] += s[i];
    }
    if (also) {
        _Pragma("omp simd") for (size_t i = 0; i < n; i++) also[i] += by[i];
    }
}

void te_f64_fold_columns(const te_fold_columns *fold, te_ahead ahead)
{
    const double *s = fold->src, *by = fold->by, *about = fold->about, *times = fold->times;
    size_t        r = 0;
    for (; !by && r + 4 <= fold->rows; r += 4, s += 4 * fold->src_step)
        add_four_rows(fold->sums, s, fold->src_step, fold->columns, &ahead);
    for (; r < fold->rows; r++, s += fold->src_step) {
        add_row(fold->sums, fold->also, s, by, about ? about[r] : 0, times ? times[r] : 1, fold->columns);
        if (by) by += fold->by_step;
    }
}
