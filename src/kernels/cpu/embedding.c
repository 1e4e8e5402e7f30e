/* embedding.c - rows of a table by id, and their gradient.
 *
 * Backward adds rows in the order of their positions where sums are taken in the table's own numbers
 * (index_scatter.c). Else it orders the positions by id with a stable radix sort; then every (id, column range) has one
 * owner, who adds the rows of that id in the order of their positions. So nothing is written twice at the same time,
 * the order of additions is fixed, and one id that owns all positions is still spread over threads by columns.
 */
#include "index.h"
#include "workers.h"

#include <math.h>

enum {
    COLUMNS = 256,          /* width of a column range */
    PARALLEL_FROM = 1 << 14 /* elements */
};

static int64_t id_at(const te_view *ids, int64_t position)
{
    int64_t offset = te_offset_of(ids, ids->ndim, position);
    return ids->dtype == TE_I64 ? ((const int64_t *)ids->data)[offset] : ((const int32_t *)ids->data)[offset];
}

/* Also that ids are rows of the table. */
static te_status check_operands(te_exec *exec, const char *op, const te_view *rows, const te_view *table,
                                const te_view *ids)
{
    te_status status = te_check_embedding(exec, op, rows, table, ids);
    if (status != TE_OK) return status;
    return te_cpu_check_ids(exec, op, ids, table->shape[0]);
}

typedef struct lookup {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *out, *table, *ids;
} lookup;

static void copy_rows(void *context, int64_t first, int64_t end, int thread)
{
    const lookup  *l = context;
    const te_view *out = l->out, *table = l->table;
    int            last = l->ids->ndim;
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(l->exec); i++)
        te_convert(l->blocks, te_element(out->data, out->dtype, te_offset_of(out, last, i)), out->dtype,
                   out->stride[last], te_element(table->data, table->dtype, id_at(l->ids, i) * table->stride[0]),
                   table->dtype, table->stride[1], table->shape[1]);
}

te_status te_cpu_embedding(te_exec *exec, const te_view *out, const te_view *table, const te_view *ids)
{
    te_status status = te_check_embedding(exec, "embedding", out, table, ids);
    if (status != TE_OK) return status;
    if (te_cpu_gather_rows(exec, out, table, ids)) return te_cpu_finish(exec, TE_OK);
    status = te_cpu_check_ids(exec, "embedding", ids, table->shape[0]);
    if (status != TE_OK) return status;
    int64_t n = te_view_numel(ids), width = table->shape[1];
    if (n == 0 || width == 0) return TE_OK;
    int threads = n * width < PARALLEL_FROM ? 1 : exec->threads;
    lookup l = {exec, te_copy_blocks_of(exec), out, table, ids};
    te_cpu_loop(exec, threads, n, te_cpu_even_grain(n, threads), copy_rows, &l);
    return te_cpu_finish(exec, TE_OK);
}

/* --- backward --------------------------------------------------------------------------------------------------- */

typedef struct id_position {
    int64_t id, position;
} id_position;

/* Stable sort by id, 11 bits a pass. The result is in a or b; returned. */
static id_position *sort_by_id(id_position *a, id_position *b, int64_t n, int64_t bound)
{
    enum { BITS = 11, BUCKETS = 1 << BITS };
    int64_t start[BUCKETS];
    for (int shift = 0; shift < 63 && (bound - 1) >> shift != 0; shift += BITS) {
        memset(start, 0, sizeof start);
        for (int64_t i = 0; i < n; i++) start[a[i].id >> shift & (BUCKETS - 1)]++;
        int64_t sum = 0;
        for (int i = 0; i < BUCKETS; i++) {
            int64_t count = start[i];
            start[i] = sum;
            sum += count;
        }
        for (int64_t i = 0; i < n; i++) b[start[a[i].id >> shift & (BUCKETS - 1)]++] = a[i];
        id_position *swap = a;
        a = b;
        b = swap;
    }
    return a;
}

typedef struct scatter {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *dtable, *dy;
    const id_position    *sorted;
    const int64_t        *groups; /* where each begins in sorted, and its end */
    double               *gains;  /* NULL, or what each unit adds to the sum of squares of a float32 table */
} scatter;

/* How much larger the sum of squares became. */
static double gain_of(const float *before, const float *after, int64_t n)
{
    enum { SIDE_BY_SIDE = 8 };
    double sums[SIDE_BY_SIDE] = {0}, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double was = (double)before[i], is = (double)after[i];
        sums[i % SIDE_BY_SIDE] += (is - was) * (is + was);
    }
    for (int i = 0; i < SIDE_BY_SIDE; i++) sum += sums[i];
    return sum;
}

/* dtable[id, column … column + width) += the rows at sorted[first … end), in that order; float32 sums (float64 when
 * the table is), rounded once to the table's dtype. gain: NULL, or how much larger their sum of squares became. */
static void add_rows(const scatter *s, int64_t first, int64_t end, int64_t column, int64_t width, double *gain)
{
    const te_view *t = s->dtable, *dy = s->dy;
    bool wide = t->dtype == TE_F64;
    te_dtype sum_dtype = wide ? TE_F64 : TE_F32;
    union {
        float  f[COLUMNS];
        double d[COLUMNS];
    } sum, row;
    float before[COLUMNS];
    void *target = te_element(t->data, t->dtype, s->sorted[first].id * t->stride[0] + column * t->stride[1]);
    te_convert(s->blocks, &sum, sum_dtype, 1, target, t->dtype, t->stride[1], width);
    if (gain) memcpy(before, sum.f, (size_t)width * sizeof *before);
    int64_t stride = dy->stride[dy->ndim - 1];
    for (int64_t i = first; i < end; i++) {
        if (i % 1024 == 0 && te_cpu_stopping(s->exec)) return;
        int64_t offset = te_offset_of(dy, dy->ndim - 1, s->sorted[i].position) + column * stride;
        const void *from = te_element(dy->data, dy->dtype, offset);
        if (dy->dtype != sum_dtype || stride != 1) {
            te_convert(s->blocks, &row, sum_dtype, 1, from, dy->dtype, stride, width);
            from = &row;
        }
        if (wide)
            for (int64_t c = 0; c < width; c++) sum.d[c] += ((const double *)from)[c];
        else
            for (int64_t c = 0; c < width; c++) sum.f[c] += ((const float *)from)[c];
    }
    te_convert(s->blocks, target, t->dtype, t->stride[1], &sum, sum_dtype, 1, width);
    if (gain) *gain = gain_of(before, sum.f, width);
}

/* Writes where each group of equal ids starts, and n behind the last; returns the number of groups. */
static int64_t find_groups(const id_position *sorted, int64_t n, int64_t *groups)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || sorted[i].id != sorted[i - 1].id) groups[count++] = i;
    groups[count] = n;
    return count;
}

/* Units are ranges of columns of the groups. */
static void add_groups(void *context, int64_t first, int64_t end, int thread)
{
    const scatter *s = context;
    int64_t        width = s->dtable->shape[1], ranges = (width + COLUMNS - 1) / COLUMNS;
    (void)thread;
    for (int64_t unit = first; unit < end && !te_cpu_stopping(s->exec); unit++) {
        int64_t group = unit / ranges, column = unit % ranges * COLUMNS;
        add_rows(s, s->groups[group], s->groups[group + 1], column,
                 width - column < COLUMNS ? width - column : COLUMNS, s->gains ? s->gains + unit : NULL);
    }
}

/* The sum of squares after n gains. Where little of it is left, so is of its precision: NaN. */
static double squares_after(double squares, const double *gains, int64_t n)
{
    enum { MOST_LOST = 16 };
    double sum = squares;
    for (int64_t i = 0; i < n; i++) sum += gains[i];
    return isfinite(sum) && sum >= squares / MOST_LOST ? sum : (double)NAN;
}

te_status te_cpu_embedding_backward(te_exec *exec, const te_view *dtable, const te_view *dy, const te_view *ids,
                                    double *squares)
{
    te_status status = check_operands(exec, "embedding backward", dy, dtable, ids);
    if (status != TE_OK) return status;
    int64_t n = te_view_numel(ids), width = dtable->shape[1];
    if (n == 0 || width == 0) return TE_OK;
    if (te_value_class_of(dtable->dtype) == TE_CLASS_I64 || te_value_class_of(dy->dtype) == TE_CLASS_I64)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "embedding backward: gradients must be floats");
    if (!squares && te_cpu_add_rows(exec, dtable, dy, ids)) return te_cpu_finish(exec, TE_OK);

    int64_t ranges = (width + COLUMNS - 1) / COLUMNS;
    size_t gains = squares ? (size_t)(n * ranges) * sizeof(double) : 0;
    size_t bytes = (size_t)n * 2 * sizeof(id_position) + (size_t)(n + 1) * sizeof(int64_t) + gains;
    id_position *pairs = exec->scratch(exec, bytes);
    if (!pairs) return TE_ERROR_MEMORY;
    int64_t *groups = (int64_t *)(pairs + 2 * n);
    for (int64_t i = 0; i < n; i++) pairs[i] = (id_position){id_at(ids, i), i};
    const id_position *sorted = sort_by_id(pairs, pairs + n, n, dtable->shape[0]);
    int64_t n_groups = find_groups(sorted, n, groups);

    scatter s = {exec, te_copy_blocks_of(exec), dtable, dy, sorted, groups,
                 squares ? (double *)(groups + n + 1) : NULL};
    int threads = n * width < PARALLEL_FROM ? 1 : exec->threads;
    te_cpu_loop(exec, threads, n_groups * ranges, 8, add_groups, &s);
    if (squares) *squares = squares_after(*squares, s.gains, n_groups * ranges);
    exec->scratch_free(exec, pairs);
    return te_cpu_finish(exec, TE_OK);
}
