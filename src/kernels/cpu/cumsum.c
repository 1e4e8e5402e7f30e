/* cumsum.c - sums that run along rows, from either end, which lie as strips.h says. */
#include "strips.h"
#include "workers.h"

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
static void cumsum_whole(const te_rows_job *job, int64_t row)
{
    int64_t         n = te_row_length(job->src), step = te_row_stride(job->src), to_step = te_row_stride(job->dst);
    int64_t         first = job->flag ? n - 1 : 0, turn = job->flag ? -1 : 1;
    const uint64_t *from = (const uint64_t *)te_row_at(job->src, row) + first * step;
    uint64_t       *to = (uint64_t *)te_row_at(job->dst, row) + first * to_step, sum = 0;
    step *= turn;
    to_step *= turn;
    for (int64_t done = 0; done < n && !te_cpu_stopping(job->exec); done += TE_SELECT_POLL) {
        int64_t m = n - done < TE_SELECT_POLL ? n - done : TE_SELECT_POLL;
        for (int64_t i = done; i < done + m; i++) to[i * to_step] = sum += from[i * step];
    }
}

/* Sums run in float64, or in wrapping int64 for integers, and are rounded to the destination once. */
static void cumsum_rows(const te_rows_job *job, int64_t row, int rows)
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
    const te_rows_job *job = context;
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
    const te_rows_job *job = context;
    te_dtype        from = job->src->dtype, to = job->dst->dtype;
    te_dtype        type = te_value_class_of(from) == TE_CLASS_I64 ? TE_I64 : TE_F64;
    int64_t         n = te_row_length(job->src), most = TE_STRIP_WIDTH / n;
    union {
        double   d[TE_STRIP_WIDTH];
        uint64_t i[TE_STRIP_WIDTH];
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
static int64_t lines_at_once(const te_strips *s, int64_t rows)
{
    bool in_one = rows == s->rows && s->src_step == 1 && s->dst_step == 1 && te_row_stride(&s->src) == rows &&
                  te_row_stride(&s->dst) == rows;
    return in_one ? TE_STRIP_WIDTH / rows : 1;
}

/* The same for rows side by side, whose sums go on together. */
static void sum_strip(const te_rows_job *job, const char *from, char *to, int64_t rows)
{
    const te_strips *s = job->strips;
    bool          integer = te_value_class_of(s->src.dtype) == TE_CLASS_I64;
    te_dtype      type = integer ? TE_I64 : TE_F64;
    union {
        double   d[TE_STRIP_WIDTH];
        uint64_t i[TE_STRIP_WIDTH];
    } sums = {{0}}, values;
    int64_t n = te_row_length(&s->src), most = lines_at_once(s, rows), m;
    for (int64_t k = 0; k < n && !(k % TE_SELECT_POLL < most && te_cpu_stopping(job->exec)); k += m) {
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
    const te_rows_job *job = context;
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(job->exec); unit++) {
        const char *from;
        char       *to;
        int64_t     rows = te_strip_at(job->strips, unit, &from, &to);
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
    te_strips s;
    te_rows_job job = {.exec = exec, .blocks = te_copy_blocks_of(exec), .src = src, .dst = dst, .flag = reverse};
    if (te_is_packed(src) && te_is_packed(dst)) {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), sum_packed, &job);
    } else if (te_find_strips(src, dst, true, &s)) {
        job.strips = &s;
        te_cpu_loop(exec, threads, te_strip_count(&s), 1, sum_strips, &job);
    } else {
        te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), sum_rows, &job);
    }
    return te_cpu_finish(exec, TE_OK);
}
