/* select.c - where the extreme of a row is: arg_reduce, and the keys that also order topk.
 *
 * Extremes are found by keys (select.h); of numbers that float32 holds these are compared themselves, many at a time.
 * Rows lie as strips.h says.
 */
#include "strips.h"
#include "workers.h"

#include "kernels/elementary.h"

void te_load_keys(const te_copy_blocks *blocks, uint64_t *keys, const te_view *v, const void *src, int64_t n,
                  bool largest)
{
    union {
        float   f[TE_COPY_BLOCK];
        double  d[TE_COPY_BLOCK];
        int64_t i[TE_COPY_BLOCK];
    } values;
    blocks->load[v->dtype](&values, src, te_row_stride(v), n);
    switch (te_value_class_of(v->dtype)) {
    case TE_CLASS_F32:
        for (int64_t i = 0; i < n; i++) keys[i] = te_key_of_double(values.f[i], largest);
        break;
    case TE_CLASS_F64:
        for (int64_t i = 0; i < n; i++) keys[i] = te_key_of_double(values.d[i], largest);
        break;
    default:
        for (int64_t i = 0; i < n; i++) keys[i] = te_key_of_int(values.i[i], largest);
    }
}

static int64_t best_of_row(te_exec *exec, const te_copy_blocks *blocks, const te_view *src, int64_t row, bool largest)
{
    uint64_t keys[TE_COPY_BLOCK], best = 0;
    int64_t where = 0, n = te_row_length(src);
    const char *data = te_row_at(src, row);
    for (int64_t at = 0; at < n && !te_cpu_stopping(exec); at += TE_COPY_BLOCK) {
        int64_t count = n - at < TE_COPY_BLOCK ? n - at : TE_COPY_BLOCK;
        te_load_keys(blocks, keys, src, te_element(data, src->dtype, at * te_row_stride(src)), count, largest);
        uint64_t most = keys[0];
        for (int64_t i = 1; i < count; i++) most = keys[i] > most ? keys[i] : most;
        if (at > 0 && most <= best) continue;
        best = most;
        for (where = at; keys[where - at] != most;) where++;
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

#define LARGEST_FINITE 0x1.fffffep127f

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
    /* OpenMP lets a reduction begin with the least finite number, as Clang does; then infinities need another look */
    if (most <= -LARGEST_FINITE)
        for (int64_t i = 0; i < n; i++) most = i == 0 || v[i] > most ? v[i] : most;
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
    const te_rows_job *job = context;
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

static void keep_larger_key(uint64_t *best, int32_t *where, const uint64_t *keys, int32_t at, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        bool larger = keys[i] > best[i];
        best[i] = larger ? keys[i] : best[i];
        where[i] = larger ? at : where[i];
    }
}

/* The same of one strip, from where its elements begin. */
static void find_best_in_strip(const te_rows_job *job, const char *from, int64_t rows, int32_t *where)
{
    const te_strips *s = job->strips;
    te_view       beside = {.ndim = 1, .dtype = s->src.dtype, .shape = {rows}, .stride = {s->src_step}};
    bool          floats = te_value_class_of(beside.dtype) == TE_CLASS_F32;
    union {
        float    f[TE_STRIP_WIDTH];
        uint64_t keys[TE_STRIP_WIDTH];
    } best, values;
    int64_t n = te_row_length(&s->src), step = te_row_stride(&s->src);
    for (int64_t i = 0; i < rows; i++) where[i] = 0;
    for (int64_t i = 0; i < rows && floats; i++) best.f[i] = -TE_INFINITY;
    for (int64_t at = 0; at < n && !(at % TE_SELECT_POLL == 0 && te_cpu_stopping(job->exec)); at++) {
        const char *element = te_element(from, beside.dtype, at * step);
        if (floats) {
            job->blocks->load[beside.dtype](values.f, element, s->src_step, rows);
            keep_larger(best.f, where, values.f, (int32_t)at, rows, job->flag ? 1.0f : -1.0f);
        } else {
            te_load_keys(job->blocks, at ? values.keys : best.keys, &beside, element, rows, job->flag);
            if (at) keep_larger_key(best.keys, where, values.keys, (int32_t)at, rows);
        }
    }
}

static void find_best_in_strips(void *context, int64_t first, int64_t end, int thread)
{
    const te_rows_job *job = context;
    int32_t         where[TE_STRIP_WIDTH];
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(job->exec); unit++) {
        const char *from;
        char       *to;
        int64_t     rows = te_strip_at(job->strips, unit, &from, &to);
        find_best_in_strip(job, from, rows, where);
        for (int64_t i = 0; i < rows; i++) ((int64_t *)(void *)to)[i * job->strips->dst_step] = where[i];
    }
}

/* Of packed rows, some at a time. */
static void find_best_packed(void *context, int64_t first, int64_t end, int thread)
{
    const te_rows_job *job = context;
    uint64_t        keys[TE_STRIP_WIDTH];
    int64_t         n = te_row_length(job->src);
    te_view         packed = {.dtype = job->src->dtype, .ndim = 1, .stride = {1}}; /* a row of one element has any */
    (void)thread;
    for (int64_t row = first, rows; row < end && !te_cpu_stopping(job->exec); row += rows) {
        rows = end - row < TE_STRIP_WIDTH / n ? end - row : TE_STRIP_WIDTH / n;
        te_load_keys(job->blocks, keys, &packed, te_element(job->src->data, packed.dtype, row * n), rows * n,
                     job->flag);
        for (int64_t r = 0; r < rows; r++) {
            const uint64_t *key = keys + r * n;
            uint64_t        best = key[0];
            int64_t         where = 0;
            for (int64_t i = 1; i < n; i++) {
                where = key[i] > best ? i : where;
                best = key[i] > best ? key[i] : best;
            }
            ((int64_t *)job->index->data)[te_offset_of(job->index, job->index->ndim, row + r)] = where;
        }
    }
}

te_status te_cpu_arg_reduce(te_exec *exec, const te_view *index, const te_view *src, bool largest)
{
    te_status status = te_check_arg_reduce(exec, index, src);
    if (status != TE_OK) return status;
    int64_t rows = te_rows_of(src), n = te_row_length(src);
    int threads = te_threads_for_rows(exec, rows, rows * n);
    te_strips s;
    te_rows_job job = {.exec = exec, .blocks = te_copy_blocks_of(exec), .src = src, .index = index, .flag = largest};
    if (te_value_class_of(src->dtype) != TE_CLASS_F32 && te_is_packed(src)) {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), find_best_packed, &job);
    } else if (n <= INT32_MAX && te_find_strips(src, index, false, &s)) {
        job.strips = &s;
        te_cpu_loop(exec, threads, te_strip_count(&s), 1, find_best_in_strips, &job);
    } else {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), find_best, &job);
    }
    return te_cpu_finish(exec, TE_OK);
}
