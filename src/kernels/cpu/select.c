/* select.c - what looks at whole rows to choose or accumulate: arg_reduce, cumsum.
 *
 * Extremes are found by keys (select.h); of numbers that float32 holds these are compared themselves, many at a time.
 *
 * Rows whose elements lie apart while those of neighbouring rows lie side by side are worked on in *strips*, WIDTH rows
 * at a time, element by element of them all: memory is read as it lies. So are short rows, wherever they lie: what a
 * row costs by itself is shared.
 */
#include "select.h"
#include "workers.h"

#include "kernels/elementary.h"

#include <float.h>

enum { POLL = TE_SELECT_POLL };

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

/* Work on rows of `src` that do not depend on each other. */
typedef struct rows_job {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *src, *dst, *index;
    bool                  flag; /* the largest are wanted; from the end */
    const struct strips  *strips;
} rows_job;

/* --- strips ----------------------------------------------------------------------------------------------------- */

enum {
    WIDTH = TE_COPY_BLOCK,
    FEWEST = 16,  /* rows side by side for which it is worth it */
    NARROW = 2,   /* the same where such rows are one piece of memory */
    SHORT = 32,   /* elements of a short row */
    PACKED = 64   /* and of one in a piece of memory with its neighbours */
};

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

/* The dimension that a strip runs along, -1: none. Sums are as many as elements and count more. */
static int strip_dim(const te_view *src, const te_view *dst, bool sums)
{
    const te_view *lies = sums ? dst : src;
    int            found = -1;
    bool           is_short = te_row_length(src) <= SHORT;
    for (int d = 0; d + 1 < src->ndim; d++) {
        int64_t n = src->shape[d];
        bool    whole = sums && src->stride[d] == 1 && te_row_stride(src) == n && te_row_stride(dst) == n;
        if (n < (whole ? NARROW : FEWEST)) continue;
        if (lies->stride[d] == 1 && (is_short || te_row_stride(lies) != 1)) return d;
        if (is_short && (found < 0 || n > src->shape[found])) found = d;
    }
    return found;
}

/* Whether rows are best worked on in strips. */
static bool find_strips(const te_view *src, const te_view *dst, bool sums, strips *out)
{
    int d = strip_dim(src, dst, sums);
    if (d < 0) return false;
    *out = (strips){.src = *src, .dst = *dst, .rows = src->shape[d], .src_step = src->stride[d],
                    .dst_step = dst->stride[d]};
    out->across = (out->rows + WIDTH - 1) / WIDTH;
    take_out(&out->src, d);
    take_out(&out->dst, d);
    return true;
}

/* Whether rows are not long and follow each other in memory. */
static bool is_packed(const te_view *v)
{
    int64_t n = te_row_length(v), step = 1;
    for (int d = v->ndim - 1; d >= 0; d--) {
        if (v->shape[d] > 1 && v->stride[d] != step) return false;
        step *= v->shape[d];
    }
    return n > 0 && n <= PACKED && v->ndim > 1;
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
    *from = te_element(s->src.data, s->src.dtype, te_offset_of(&s->src, dims, outer) + first * s->src_step);
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

static void keep_larger_key(uint64_t *best, int32_t *where, const uint64_t *keys, int32_t at, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        bool larger = keys[i] > best[i];
        best[i] = larger ? keys[i] : best[i];
        where[i] = larger ? at : where[i];
    }
}

/* The same of one strip, from where its elements begin. */
static void find_best_in_strip(const rows_job *job, const char *from, int64_t rows, int32_t *where)
{
    const strips *s = job->strips;
    te_view       beside = {.ndim = 1, .dtype = s->src.dtype, .shape = {rows}, .stride = {s->src_step}};
    bool          floats = te_value_class_of(beside.dtype) == TE_CLASS_F32;
    union {
        float    f[WIDTH];
        uint64_t keys[WIDTH];
    } best, values;
    int64_t n = te_row_length(&s->src), step = te_row_stride(&s->src);
    for (int64_t i = 0; i < rows; i++) where[i] = 0;
    for (int64_t i = 0; i < rows && floats; i++) best.f[i] = -TE_INFINITY;
    for (int64_t at = 0; at < n && !(at % POLL == 0 && te_cpu_stopping(job->exec)); at++) {
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
    const rows_job *job = context;
    int32_t         where[WIDTH];
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(job->exec); unit++) {
        const char *from;
        char       *to;
        int64_t     rows = strip_at(job->strips, unit, &from, &to);
        find_best_in_strip(job, from, rows, where);
        for (int64_t i = 0; i < rows; i++) ((int64_t *)(void *)to)[i * job->strips->dst_step] = where[i];
    }
}

/* Of packed rows, some at a time. */
static void find_best_packed(void *context, int64_t first, int64_t end, int thread)
{
    const rows_job *job = context;
    uint64_t        keys[WIDTH];
    int64_t         n = te_row_length(job->src);
    te_view         packed = {.dtype = job->src->dtype, .ndim = 1, .stride = {1}}; /* a row of one element has any */
    (void)thread;
    for (int64_t row = first, rows; row < end && !te_cpu_stopping(job->exec); row += rows) {
        rows = end - row < WIDTH / n ? end - row : WIDTH / n;
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
    strips s;
    rows_job job = {.exec = exec, .blocks = te_copy_blocks_of(exec), .src = src, .index = index, .flag = largest};
    if (te_value_class_of(src->dtype) != TE_CLASS_F32 && is_packed(src)) {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), find_best_packed, &job);
    } else if (n <= INT32_MAX && find_strips(src, index, false, &s)) {
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

/* One row of whole numbers, which have nothing to convert. */
static void cumsum_whole(const rows_job *job, int64_t row)
{
    int64_t         n = te_row_length(job->src), step = te_row_stride(job->src), to_step = te_row_stride(job->dst);
    int64_t         first = job->flag ? n - 1 : 0, turn = job->flag ? -1 : 1;
    const uint64_t *from = (const uint64_t *)te_row_at(job->src, row) + first * step;
    uint64_t       *to = (uint64_t *)te_row_at(job->dst, row) + first * to_step, sum = 0;
    step *= turn;
    to_step *= turn;
    for (int64_t done = 0; done < n && !te_cpu_stopping(job->exec); done += POLL) {
        int64_t m = n - done < POLL ? n - done : POLL;
        for (int64_t i = done; i < done + m; i++) to[i * to_step] = sum += from[i * step];
    }
}

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
    const rows_job *job = context;
    bool            whole = job->src->dtype == TE_I64 && job->dst->dtype == TE_I64;
    (void)thread;
    for (int64_t row = first, rows; row < end; row += rows) {
        rows = whole || end - row < TURNS ? 1 : TURNS;
        if (whole) cumsum_whole(job, row);
        else cumsum_rows(job, row, (int)rows);
    }
}

#define SUM_PACKED(T)                                                                                      \
    static void sum_packed_##T(T *to, const T *from, int64_t rows, int64_t n, bool reverse)                \
    {                                                                                                      \
        int64_t step = reverse ? -1 : 1;                                                                   \
        for (int64_t at = reverse ? n - 1 : 0, end = at + rows * n; at < end; at += n) {                   \
            T sum = 0;                                                                                     \
            for (int64_t i = 0; i < n; i++) to[at + i * step] = sum += from[at + i * step];                \
        }                                                                                                  \
    }

SUM_PACKED(double)
SUM_PACKED(uint64_t)

/* The same for packed rows, some at a time. Those do not wait for each other, and each is short. */
static void sum_packed(void *context, int64_t first, int64_t end, int thread)
{
    const rows_job *job = context;
    te_dtype        from = job->src->dtype, to = job->dst->dtype;
    te_dtype        type = te_value_class_of(from) == TE_CLASS_I64 ? TE_I64 : TE_F64;
    int64_t         n = te_row_length(job->src), most = WIDTH / n;
    union {
        double   d[WIDTH];
        uint64_t i[WIDTH];
    } values;
    (void)thread;
    for (int64_t row = first, rows; row < end && !te_cpu_stopping(job->exec); row += rows) {
        rows = end - row < most ? end - row : most;
        const void *in = te_element(job->src->data, from, row * n);
        void       *out = te_element(job->dst->data, to, row * n), *sums = to == type ? out : &values;
        if (from != type) te_convert(job->blocks, &values, type, 1, in, from, 1, rows * n);
        if (type == TE_I64) sum_packed_uint64_t(sums, from == type ? in : &values, rows, n, job->flag);
        else sum_packed_double(sums, from == type ? in : &values, rows, n, job->flag);
        if (to != type) te_convert(job->blocks, out, to, 1, &values, type, 1, rows * n);
    }
}

/* How many elements of all rows of a strip are one piece of memory, in source and sums, as many as fit. */
static int64_t lines_at_once(const strips *s, int64_t rows)
{
    bool in_one = rows == s->rows && s->src_step == 1 && s->dst_step == 1 && te_row_stride(&s->src) == rows &&
                  te_row_stride(&s->dst) == rows;
    return in_one ? WIDTH / rows : 1;
}

/* The same for rows side by side, whose sums go on together. */
static void sum_strip(const rows_job *job, const char *from, char *to, int64_t rows)
{
    const strips *s = job->strips;
    bool          integer = te_value_class_of(s->src.dtype) == TE_CLASS_I64;
    te_dtype      type = integer ? TE_I64 : TE_F64;
    union {
        double   d[WIDTH];
        uint64_t i[WIDTH];
    } sums = {{0}}, values;
    int64_t n = te_row_length(&s->src), most = lines_at_once(s, rows), m;
    for (int64_t k = 0; k < n && !(k % POLL < most && te_cpu_stopping(job->exec)); k += m) {
        m = n - k < most ? n - k : most;
        int64_t at = job->flag ? n - k - m : k;
        te_convert(job->blocks, &values, type, 1, te_element(from, s->src.dtype, at * te_row_stride(&s->src)),
                   s->src.dtype, s->src_step, m * rows);
        for (int64_t j = 0; j < m; j++) {
            int64_t line = (job->flag ? m - 1 - j : j) * rows;
            if (integer)
                for (int64_t i = 0; i < rows; i++) values.i[line + i] = sums.i[i] += values.i[line + i];
            else
                for (int64_t i = 0; i < rows; i++) values.d[line + i] = sums.d[i] += values.d[line + i];
        }
        te_convert(job->blocks, te_element(to, s->dst.dtype, at * te_row_stride(&s->dst)), s->dst.dtype, s->dst_step,
                   &values, type, 1, m * rows);
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
    if (is_packed(src) && is_packed(dst)) {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), sum_packed, &job);
    } else if (find_strips(src, dst, true, &s)) {
        job.strips = &s;
        te_cpu_loop(exec, threads, strip_count(&s), 1, sum_strips, &job);
    } else {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), sum_rows, &job);
    }
    return te_cpu_finish(exec, TE_OK);
}
