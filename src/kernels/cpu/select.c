/* select.c - what looks at whole rows to choose or accumulate: arg_reduce, cumsum, multinomial.
 *
 * Extremes are found by keys (select.h); of numbers that float32 holds these are compared themselves, many at a time.
 *
 * Rows whose elements lie apart while those of neighbouring rows lie side by side are worked on in *strips*, WIDTH rows
 * at a time, element by element of them all: memory is read as it lies.
 */
#include "select.h"
#include "workers.h"

#include "kernels/philox.h"

#include "kernels/elementary.h"

#include <float.h>

enum { POLL = TE_SELECT_POLL };

/* Work on rows of `src` that do not depend on each other. */
typedef struct rows_job {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *src, *dst, *index;
    bool                  flag; /* the largest are wanted; from the end */
    const struct strips  *strips;
} rows_job;

/* --- strips ----------------------------------------------------------------------------------------------------- */

enum { WIDTH = TE_COPY_BLOCK, FEWEST = 16 /* rows side by side for which it is worth it */ };

/* Rows in strips: those along dimension `beside`, which is taken out of the views. */
typedef struct strips {
    te_view src, dst;     /* dst: of results, whose last dimension may be another one, or may be missing */
    int64_t rows, across; /* along `beside`; strips for them */
    int64_t src_step, dst_step;
} strips;

static void take_out(te_view *v, int dim)
{
    for (int i = dim; i + 1 < v->ndim; i++) v->shape[i] = v->shape[i + 1], v->stride[i] = v->stride[i + 1];
    v->ndim--;
}

/* Whether src has such rows, and dst's lie as they do. */
static bool find_strips(const te_view *src, const te_view *dst, bool dst_beside, strips *out)
{
    if (te_row_stride(src) == 1) return false;
    for (int d = 0; d + 1 < src->ndim; d++) {
        if (src->stride[d] != 1 || src->shape[d] < FEWEST || (dst_beside && dst->stride[d] != 1)) continue;
        *out = (strips){.src = *src, .dst = *dst, .rows = src->shape[d], .src_step = 1, .dst_step = dst->stride[d]};
        out->across = (out->rows + WIDTH - 1) / WIDTH;
        take_out(&out->src, d);
        take_out(&out->dst, d);
        return true;
    }
    return false;
}

static int64_t strip_count(const strips *s)
{
    int64_t outer = 1;
    for (int i = 0; i + 1 < s->src.ndim; i++) outer *= s->src.shape[i];
    return outer * s->across;
}

/* Strip `unit`: how many rows are in it, and where their first elements and results are. */
static int64_t strip_at(const strips *s, int64_t unit, const char **from, char **to)
{
    int64_t first = unit % s->across * WIDTH, outer = unit / s->across;
    int     dims = s->src.ndim - 1;
    *from = te_element(s->src.data, s->src.dtype, te_offset_of(&s->src, dims, outer) + first);
    *to = te_element(s->dst.data, s->dst.dtype, te_offset_of(&s->dst, dims, outer) + first * s->dst_step);
    return s->rows - first < WIDTH ? s->rows - first : WIDTH;
}

/* --- arg_reduce ------------------------------------------------------------------------------------------------- */

static int64_t best_of_row(te_exec *exec, const te_copy_blocks *blocks, const te_view *src, int64_t row, bool largest)
{
    uint64_t keys[TE_COPY_BLOCK], best = 0;
    int64_t where = 0, n = te_row_length(src);
    const char *data = te_row_at(src, row);
    for (int64_t at = 0; at < n && !te_cpu_stopping(exec); at += TE_COPY_BLOCK) {
        int64_t count = n - at < TE_COPY_BLOCK ? n - at : TE_COPY_BLOCK;
        te_load_keys(blocks, keys, src, te_element(data, src->dtype, at * te_row_stride(src)), count, largest);
        for (int64_t i = 0; i < count; i++) {
            if (keys[i] <= best && (at || i)) continue;
            best = keys[i];
            where = at + i;
        }
    }
    return where;
}

/* Position of the first of the n values that is equal, or NaN where that is wanted. */
static int64_t first_equal(const float *v, int64_t n, float value)
{
    int64_t i = 0;
    while (i < n && !(v[i] == value) && !(value != value && v[i] != v[i])) i++;
    return i;
}

/* The extreme of values whose sign is turned where the smallest is wanted; NaN when there is one. */
static float largest_of(float *v, int64_t n, float sign)
{
    float most = -TE_INFINITY;
    int   is_nan = 0;
    _Pragma("omp simd reduction(max : most) reduction(| : is_nan)") for (int64_t i = 0; i < n; i++)
    {
        float x = v[i] * sign;
        v[i] = x;
        most = x > most ? x : most;
        is_nan |= x != x;
    }
    return is_nan ? TE_NAN : most;
}

static int64_t best_float_of_row(te_exec *exec, const te_copy_blocks *blocks, const te_view *src, int64_t row,
                                 bool largest)
{
    float values[TE_COPY_BLOCK], best = 0;
    int64_t where = 0, n = te_row_length(src);
    const char *data = te_row_at(src, row);
    for (int64_t at = 0; at < n && !te_cpu_stopping(exec); at += TE_COPY_BLOCK) {
        int64_t count = n - at < TE_COPY_BLOCK ? n - at : TE_COPY_BLOCK;
        const char *from = te_element(data, src->dtype, at * te_row_stride(src));
        blocks->load[src->dtype](values, from, te_row_stride(src), count);
        float most = largest_of(values, count, largest ? 1.0f : -1.0f);
        if (at > 0 && most <= best) continue;
        best = most;
        where = at + first_equal(values, count, most);
        if (most != most) break;
    }
    return where;
}

static void find_best(void *context, int64_t first, int64_t end, int thread)
{
    const rows_job *job = context;
    int64_t        *index = job->index->data;
    bool            floats = te_value_class_of(job->src->dtype) == TE_CLASS_F32;
    (void)thread;
    for (int64_t row = first; row < end; row++)
        index[te_offset_of(job->index, job->index->ndim, row)] =
            floats ? best_float_of_row(job->exec, job->blocks, job->src, row, job->flag)
                   : best_of_row(job->exec, job->blocks, job->src, row, job->flag);
}

/* What element `at` of each row changes: a NaN is larger than all but an earlier one. */
static void keep_larger(float *best, int32_t *where, const float *v, int32_t at, int64_t n, float sign)
{
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++)
    {
        float x = v[i] * sign;
        int   larger = (x > best[i]) | ((x != x) & (best[i] == best[i]));
        best[i] = larger ? x : best[i];
        where[i] = larger ? at : where[i];
    }
}

static void find_best_in_strips(void *context, int64_t first, int64_t end, int thread)
{
    const rows_job *job = context;
    const strips   *s = job->strips;
    te_dtype        dtype = s->src.dtype;
    float           best[WIDTH], values[WIDTH], sign = job->flag ? 1.0f : -1.0f;
    int32_t         where[WIDTH];
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(job->exec); unit++) {
        const char *from;
        char       *to;
        int64_t     rows = strip_at(s, unit, &from, &to), n = te_row_length(&s->src);
        for (int64_t i = 0; i < rows; i++) best[i] = -TE_INFINITY, where[i] = 0;
        for (int64_t at = 0; at < n && !(at % POLL == 0 && te_cpu_stopping(job->exec)); at++) {
            job->blocks->load[dtype](values, te_element(from, dtype, at * te_row_stride(&s->src)), 1, rows);
            keep_larger(best, where, values, (int32_t)at, rows, sign);
        }
        for (int64_t i = 0; i < rows; i++) ((int64_t *)(void *)to)[i * s->dst_step] = where[i];
    }
}

te_status te_cpu_arg_reduce(te_exec *exec, const te_view *index, const te_view *src, bool largest)
{
    te_status status = te_check_arg_reduce(exec, index, src);
    if (status != TE_OK) return status;
    int64_t rows = te_rows_of(src), n = te_row_length(src);
    int threads = te_threads_for_rows(exec, rows, rows * n);
    strips s;
    rows_job job = {.exec = exec, .blocks = te_copy_blocks_of(exec), .src = src, .index = index, .flag = largest};
    if (te_value_class_of(src->dtype) == TE_CLASS_F32 && n <= INT32_MAX && find_strips(src, index, false, &s)) {
        job.strips = &s;
        te_cpu_loop(exec, threads, strip_count(&s), 1, find_best_in_strips, &job);
    } else {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), find_best, &job);
    }
    return te_cpu_finish(exec, TE_OK);
}

/* --- cumsum ----------------------------------------------------------------------------------------------------- */

/* Rows whose sums go on in turns: an addition waits for the one before it. */
enum { TURNS = 4 };

typedef union cumsum_values {
    double   d[TURNS][TE_COPY_BLOCK];
    uint64_t i[TURNS][TE_COPY_BLOCK];
} cumsum_values;

/* Sums that begin with those in sums, of n values of `rows` rows, which is TURNS or 1. */
#define CUMSUM(T, field)                                                                                         \
    static inline void cumsum_##field(T sums[TURNS], cumsum_values *values, int64_t n, bool reverse, int rows)   \
    {                                                                                                            \
        for (int64_t j = 0; j < n; j++)                                                                          \
            for (int r = 0; r < rows; r++) {                                                                     \
                T *v = &values->field[r][reverse ? n - 1 - j : j];                                               \
                *v = sums[r] += *v;                                                                              \
            }                                                                                                    \
    }

CUMSUM(double, d)
CUMSUM(uint64_t, i)

/* Sums run in float64, or in wrapping int64 for integers, and are rounded to the destination once. */
static void cumsum_rows(const rows_job *job, int64_t row, int rows)
{
    const te_view *dst = job->dst, *src = job->src;
    bool           integer = te_value_class_of(src->dtype) == TE_CLASS_I64, reverse = job->flag;
    te_dtype       type = integer ? TE_I64 : TE_F64;
    cumsum_values  values;
    double         sums[TURNS] = {0};
    uint64_t       counts[TURNS] = {0};
    int64_t        n = te_row_length(src), step = te_row_stride(src), dst_step = te_row_stride(dst);
    for (int64_t done = 0; done < n && !te_cpu_stopping(job->exec); done += TE_COPY_BLOCK) {
        int64_t m = n - done < TE_COPY_BLOCK ? n - done : TE_COPY_BLOCK, at = reverse ? n - done - m : done;
        for (int r = 0; r < rows; r++)
            te_convert(job->blocks, values.d[r], type, 1, te_element(te_row_at(src, row + r), src->dtype, at * step),
                       src->dtype, step, m);
        if (integer) cumsum_i(counts, &values, m, reverse, rows);
        else if (rows == TURNS) cumsum_d(sums, &values, m, reverse, TURNS);
        else cumsum_d(sums, &values, m, reverse, 1);
        for (int r = 0; r < rows; r++)
            te_convert(job->blocks, te_element(te_row_at(dst, row + r), dst->dtype, at * dst_step), dst->dtype,
                       dst_step, values.d[r], type, 1, m);
    }
}

static void sum_rows(void *context, int64_t first, int64_t end, int thread)
{
    (void)thread;
    for (int64_t row = first, rows; row < end; row += rows) {
        rows = end - row < TURNS ? 1 : TURNS;
        cumsum_rows(context, row, (int)rows);
    }
}

/* The same for rows side by side, whose sums go on together. */
static void sum_strip(const rows_job *job, const char *from, char *to, int64_t rows)
{
    const strips *s = job->strips;
    double        sums[WIDTH] = {0}, values[WIDTH];
    int64_t       n = te_row_length(&s->src);
    for (int64_t k = 0; k < n && !(k % POLL == 0 && te_cpu_stopping(job->exec)); k++) {
        int64_t at = job->flag ? n - 1 - k : k;
        te_convert(job->blocks, values, TE_F64, 1, te_element(from, s->src.dtype, at * te_row_stride(&s->src)),
                   s->src.dtype, 1, rows);
        for (int64_t i = 0; i < rows; i++) sums[i] += values[i];
        te_convert(job->blocks, te_element(to, s->dst.dtype, at * te_row_stride(&s->dst)), s->dst.dtype, s->dst_step,
                   sums, TE_F64, 1, rows);
    }
}

static void sum_strips(void *context, int64_t first, int64_t end, int thread)
{
    const rows_job *job = context;
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(job->exec); unit++) {
        const char *from;
        char       *to;
        int64_t     rows = strip_at(job->strips, unit, &from, &to);
        sum_strip(job, from, to, rows);
    }
}

te_status te_cpu_cumsum(te_exec *exec, const te_view *dst, const te_view *src, bool reverse)
{
    te_status status = te_check_rows(exec, "cumsum", dst, src);
    if (status != TE_OK) return status;
    int64_t rows = te_rows_of(src), n = te_row_length(src);
    if (te_row_length(dst) != n)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "cumsum: rows of %lld sums for rows of %lld elements",
                            (long long)te_row_length(dst), (long long)n);
    int threads = te_threads_for_rows(exec, rows, rows * n);
    strips s;
    rows_job job = {.exec = exec, .blocks = te_copy_blocks_of(exec), .src = src, .dst = dst, .flag = reverse};
    if (te_value_class_of(src->dtype) != TE_CLASS_I64 && find_strips(src, dst, true, &s)) {
        job.strips = &s;
        te_cpu_loop(exec, threads, strip_count(&s), 1, sum_strips, &job);
    } else {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), sum_rows, &job);
    }
    return te_cpu_finish(exec, TE_OK);
}

/* --- multinomial ------------------------------------------------------------------------------------------------ */

/* The weights of a row are the leaves of a binary tree of sums, tree[1] the root, tree[leaves + i] weight i. Each draw
 * walks down from the root; a drawn weight becomes 0 and the sums above it are made anew, so that nothing remains of
 * it. */
typedef struct weight_tree {
    double *sums;
    int64_t leaves; /* a power of two, at least the row's length */
} weight_tree;

/* NULL when the row's weights are sound, else what is wrong with them. */
static const char *tree_load(const te_copy_blocks *blocks, weight_tree *tree, const te_view *src, int64_t row,
                             int64_t positive_needed)
{
    int64_t n = te_row_length(src), positive = 0;
    double *leaf = tree->sums + tree->leaves;
    te_convert(blocks, leaf, TE_F64, 1, te_row_at(src, row), src->dtype, te_row_stride(src), n);
    for (int64_t i = 0; i < n; i++) {
        if (!(leaf[i] >= 0.0)) return "has a weight that is negative or NaN";
        positive += leaf[i] > 0.0;
    }
    memset(leaf + n, 0, (size_t)(tree->leaves - n) * sizeof *leaf);
    for (int64_t i = tree->leaves - 1; i > 0; i--) tree->sums[i] = tree->sums[2 * i] + tree->sums[2 * i + 1];
    if (!(tree->sums[1] <= DBL_MAX)) return "has weights whose sum is infinite";
    if (positive == 0) return "has no positive weight";
    return positive < positive_needed ? "has fewer positive weights than samples asked for" : NULL;
}

/* The leaf in which the share `u` of the total falls; never one of weight 0. */
static int64_t tree_find(const weight_tree *tree, double u)
{
    double target = u * tree->sums[1];
    int64_t node = 1;
    while (node < tree->leaves) {
        double left = tree->sums[2 * node], right = tree->sums[2 * node + 1];
        bool go_right = target >= left && right > 0.0;
        if (go_right) target -= left;
        node = 2 * node + go_right;
    }
    return node - tree->leaves;
}

static void tree_remove(weight_tree *tree, int64_t leaf)
{
    int64_t node = tree->leaves + leaf;
    tree->sums[node] = 0.0;
    while (node /= 2) tree->sums[node] = tree->sums[2 * node] + tree->sums[2 * node + 1];
}

te_status te_cpu_multinomial(te_exec *exec, const te_view *out, const te_view *src, bool replacement, te_rng rng)
{
    te_status status = te_check_rows(exec, "multinomial", out, src);
    if (status != TE_OK) return status;
    if (out->dtype != TE_I64) return te_exec_fail(exec, TE_ERROR_ARGUMENT, "multinomial: samples must be int64");
    int64_t rows = te_rows_of(src), n = te_row_length(src), draws = te_row_length(out);
    if (rows == 0 || draws == 0) return TE_OK;
    weight_tree tree = {.leaves = 1};
    while (tree.leaves < n) tree.leaves *= 2;
    tree.sums = exec->scratch(exec, (size_t)tree.leaves * 2 * sizeof(double));
    if (!tree.sums) return TE_ERROR_MEMORY;
    for (int64_t row = 0; row < rows && status == TE_OK && !te_cpu_stopping(exec); row++) {
        const char *fault = tree_load(te_copy_blocks_of(exec), &tree, src, row, replacement ? 1 : draws);
        if (fault)
            status = te_exec_fail(exec, TE_ERROR_ARGUMENT, "multinomial: row %lld %s", (long long)row + 1, fault);
        int64_t *sample = te_row_at(out, row);
        for (int64_t d = 0; d < draws && !fault && !(d % POLL == 0 && te_cpu_stopping(exec)); d++) {
            int64_t drawn = tree_find(&tree, te_rng_word(rng, (uint64_t)(row * draws + d)) * 0x1p-32);
            sample[d * te_row_stride(out)] = drawn;
            if (!replacement) tree_remove(&tree, drawn);
        }
    }
    exec->scratch_free(exec, tree.sums);
    return te_cpu_finish(exec, status);
}
