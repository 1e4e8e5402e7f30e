/* index_scatter.c - elements stored or added by index.
 *
 * All indices are checked before anything is written. scatter_add gives every slice across `dim` to one thread, which
 * adds in the order of the indices; where there are too few slices, threads own ranges of the target instead. Either
 * way the additions to one element happen in index order, whatever the number of threads.
 */
#include "index_walk.h"

#include "kernels/dtype.h"

/* What one owner adds or stores: elements first … end of rows, run_first … run_end of runs, whose target along dim is
 * in low … high. */
typedef struct share {
    int64_t first, end, low, high, run_first, run_end;
} share;

/* dst += src, one element, in the arithmetic of its dtype. Whole numbers wrap around: sums that saturate, as operations
 * promise for narrow ones, are taken in int64 and converted. */
static void add_element(const te_copy_blocks *blocks, te_dtype dtype, void *dst, const void *src)
{
    if (dtype == TE_I32) {
        *(int32_t *)dst = (int32_t)(*(uint32_t *)dst + *(const uint32_t *)src);
    } else if (dtype == TE_U8) {
        *(uint8_t *)dst = (uint8_t)(*(uint8_t *)dst + *(const uint8_t *)src);
    } else {
        float a, b;
        blocks->load[dtype](&a, dst, 1, 1);
        blocks->load[dtype](&b, src, 1, 1);
        a += b;
        blocks->store[TE_CLASS_F32][dtype](dst, 1, &a, 1, 1);
    }
}

static void add_others(const te_copy_blocks *blocks, const te_walk *w, const te_piece *p, const share *s)
{
    te_dtype dtype = w->whole->dtype;
    for (int64_t k = 0; k < p->n * p->columns; k++) {
        int64_t target = p->index[k], i = k / p->columns, column = k % p->columns;
        int64_t to = p->whole + i * p->from + column * p->column_from + target * p->along;
        int64_t from = p->part + i * p->to + column * p->column_to;
        if (target < s->low || target >= s->high) continue;
        for (int64_t c = s->run_first; c < s->run_end; c++)
            add_element(blocks, dtype, te_element(w->whole->data, dtype, to + c),
                        te_element(w->part->data, dtype, from + c));
    }
}

#define SAME(x) (x)
#define SCATTER_EACH(type, OP, from_type, AS)                                                                        \
    for (int64_t i = 0; i < p->n; i++, index += columns) {                                                           \
        type       *y = (type *)w->whole->data + p->whole + i * p->from;                                             \
        const from_type *x = (const from_type *)w->part->data + p->part + i * p->to;                                 \
        if (all && to == 1 && from == 0 && along == 1)                                                               \
            for (int64_t c = 0; c < columns; c++) y[index[c]] OP AS(x[c]);                                           \
        else                                                                                                         \
            for (int64_t c = 0; c < columns; c++)                                                                    \
                if ((uint64_t)(index[c] - low) < owned) y[c * from + index[c] * along] OP AS(x[c * to]);             \
    }                                                                                                                \
    return

#define ADD_RUNS(type, from_type, AS)                                                                                \
    for (int64_t i = 0; i < p->n; i++) {                                                                             \
        if ((uint64_t)(index[i] - low) >= owned) continue;                                                           \
        type       *y = (type *)w->whole->data + p->whole + i * p->from + index[i] * along + s->run_first;           \
        const from_type *x = (const from_type *)w->part->data + p->part + i * p->to + s->run_first;                  \
        _Pragma("omp simd") for (int64_t c = 0; c < run; c++) y[c] += AS(x[c]);                                      \
    }                                                                                                                \
    return

#define ADD(type, from_type, AS)                                                                                     \
    if (w->run > 1) { ADD_RUNS(type, from_type, AS); }                                                               \
    SCATTER_EACH(type, +=, from_type, AS)

static void add_piece(const te_copy_blocks *blocks, const te_walk *w, const te_piece *p, const share *s)
{
    const int64_t *index = p->index;
    int64_t  columns = p->columns, to = p->column_to, from = p->column_from, along = p->along;
    int64_t  low = s->low, run = s->run_end - s->run_first;
    uint64_t owned = (uint64_t)(s->high - low);
    bool     all = s->high - low == w->whole->shape[w->dim];
    switch (w->whole->dtype) {
    case TE_F32:
        if (w->part->dtype == TE_BF16) { ADD(float, uint16_t, te_bf16_to_f32); }
        ADD(float, float, SAME);
    case TE_F64: ADD(double, double, SAME);
    case TE_I64: ADD(uint64_t, uint64_t, SAME);
    default: add_others(blocks, w, p, s);
    }
}

static void store_runs(const te_walk *w, const te_piece *p, const share *s)
{
    te_dtype dtype = w->whole->dtype;
    int64_t  bytes = (s->run_end - s->run_first) << te_dtype_log2_size(dtype);
    for (int64_t i = 0; i < p->n; i++) {
        int64_t target = p->index[i], to = p->whole + i * p->from + target * p->along, from = p->part + i * p->to;
        if (target >= s->low && target < s->high)
            te_move_run(te_element(w->whole->data, dtype, to + s->run_first),
                     te_element(w->part->data, dtype, from + s->run_first), bytes);
    }
}

static void store_piece(const te_walk *w, const te_piece *p, const share *s)
{
    const int64_t *index = p->index;
    int64_t        columns = p->columns, to = p->column_to, from = p->column_from, along = p->along, low = s->low;
    uint64_t       owned = (uint64_t)(s->high - low);
    bool           all = s->high - low == w->whole->shape[w->dim];
    if (w->run > 1) {
        store_runs(w, p, s);
        return;
    }
    switch (te_dtype_log2_size(w->whole->dtype)) {
    case 0: SCATTER_EACH(uint8_t, =, uint8_t, SAME);
    case 1: SCATTER_EACH(uint16_t, =, uint16_t, SAME);
    case 2: SCATTER_EACH(uint32_t, =, uint32_t, SAME);
    default: SCATTER_EACH(uint64_t, =, uint64_t, SAME);
    }
}

static void scatter_row(te_exec *exec, const te_walk *w, const te_cursor *row, const share *s)
{
    const te_copy_blocks *blocks = te_copy_blocks_of(exec);
    int64_t               room[TE_WALK_PIECE];
    for (int64_t at = s->first; at < s->end && !te_cpu_stopping(exec); at += w->piece) {
        te_piece p = piece_at(w, row, at, s->end, w->piece, room);
        if (w->adds) add_piece(blocks, w, &p, s);
        else store_piece(w, &p, s);
    }
}

static void scatter_share(const te_index_job *job, int64_t i)
{
    const te_walk *w = job->w;
    int64_t     shares = job->shares;
    share       s = {0, w->row, 0, w->whole->shape[w->dim], 0, w->run};
    bool        of_run = job->by_column && w->run > 1;
    int64_t    *first = of_run ? &s.run_first : job->by_column ? &s.first : &s.low;
    int64_t    *end = of_run ? &s.run_end : job->by_column ? &s.end : &s.high;
    if (!job->by_row) {
        int64_t n = *end;
        *first = n * i / shares;
        *end = n * (i + 1) / shares;
    }
    int64_t first_row = job->by_row ? w->rows * i / shares : 0;
    int64_t end_row = job->by_row ? w->rows * (i + 1) / shares : w->rows;
    te_cursor  row = cursor_at(w, first_row);
    for (int64_t r = first_row; r < end_row; r++, to_next_row(w, &row)) scatter_row(job->exec, w, &row, &s);
}

static void scatter_shares(void *context, int64_t first, int64_t end, int thread)
{
    (void)thread;
    for (int64_t i = first; i < end; i++) scatter_share(context, i);
}

static void scatter_all(te_exec *exec, te_walk *w)
{
    te_walk_plan(w, INT64_MAX);
    /* Rows are independent of each other when dim is not among their dimensions, columns when it is. */
    int64_t shares = even_threads(exec, w->rows * w->row * w->run * w->columns), across = w->run > 1 ? w->run : w->row;
    bool    in_row = w->along_dim == w->ndim - 1, by_row = (in_row || w->along_dim < 0 || w->along_dim == w->ndim) &&
                                                         w->rows >= shares;
    bool    by_column = !by_row && (w->run > 1 || !in_row) && across >= 16;
    te_index_job job = {.exec = exec, .w = w, .shares = shares, .by_row = by_row, .by_column = by_column};
    te_cpu_loop(exec, (int)shares, shares, 1, scatter_shares, &job);
}

static te_status scatter(te_exec *exec, const char *op, te_walk w)
{
    const te_view *index = w.index;
    te_view        part = *w.part;
    if (w.adds && w.whole->dtype == TE_F32 && part.dtype == TE_BF16) part.dtype = TE_F32;
    te_status status = te_check_index(exec, op, w.whole, &part, index, w.dim);
    if (status != TE_OK || te_view_numel(index) == 0) return status;
    int64_t bound = w.whole->shape[w.dim];
    if (w.adds && w.whole->dtype == TE_BOOL)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: bool values cannot be added", op);
    if (!te_index_all_inside(exec, index, bound))
        return te_cpu_finish(exec, te_index_fail_outside(exec, op, "index", index, w.dim, bound));
    if (!te_cpu_stopped(exec)) scatter_all(exec, &w);
    return te_cpu_finish(exec, TE_OK);
}

te_status te_cpu_scatter_add(te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim)
{
    return scatter(exec, "scatter_add", (te_walk){.whole = dst, .part = src, .index = index, .dim = dim, .adds = true});
}

te_status te_cpu_scatter(te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim)
{
    return scatter(exec, "scatter", (te_walk){.whole = dst, .part = src, .index = index, .dim = dim});
}

/* Whether dimensions before the last two, of so many, are one with the one before the last. */
static bool is_one_row(const te_view *v, int ndim)
{
    bool one = ndim > 0;
    for (int d = 0; d + 1 < ndim; d++) one &= v->stride[d] == v->shape[d + 1] * v->stride[d + 1];
    return one;
}

bool te_cpu_add_rows(te_exec *exec, const te_view *table, const te_view *rows, const te_view *ids)
{
    te_view flat = *rows, list = *ids, spread, whole;
    int     last = ids->ndim - 1;
    bool    exact = table->dtype == rows->dtype && (table->dtype == TE_F32 || table->dtype == TE_F64);
    if (!exact || !is_one_row(ids, ids->ndim) || !is_one_row(rows, ids->ndim)) return false;
    list.ndim = 1;
    list.shape[0] = flat.shape[0] = te_view_numel(ids);
    list.stride[0] = ids->stride[last];
    flat.ndim = 2;
    flat.stride[0] = rows->stride[last];
    flat.shape[1] = table->shape[1];
    flat.stride[1] = rows->stride[last + 1];
    te_index_spread_ids(&spread, &whole, &flat, table, &list);
    te_walk w = {.whole = &whole, .part = &flat, .index = &spread, .dim = 0, .adds = true};
    scatter_all(exec, &w);
    return true;
}
