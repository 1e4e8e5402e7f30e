/* index_gather.c - elements and rows looked up by index. Some indices are checked, and then read by. */
#include "index_walk.h"

enum { LONGEST_RUN = 1 << 15 /* elements; longer ones are rows, which threads share */ };

#define GATHER_EACH(type)                                                                                            \
    for (int64_t i = 0; i < p->n; i++, index += columns) {                                                           \
        type       *y = (type *)out + p->part + i * p->to;                                                           \
        const type *x = (const type *)in + p->whole + i * p->from;                                                   \
        if (to == 1 && from == 0 && along == 1)                                                                      \
            for (int64_t c = 0; c < columns; c++) y[c] = x[index[c]];                                                \
        else                                                                                                         \
            for (int64_t c = 0; c < columns; c++) y[c * to] = x[c * from + index[c] * along];                        \
    }                                                                                                                \
    break

static void gather_runs(const te_piece *p, int64_t bytes, char *y, const char *x, int log2_size)
{
    const int64_t *index = p->index;
    int64_t        n = p->n, to = p->to << log2_size, from = p->from << log2_size, along = p->along << log2_size;
    y += p->part << log2_size;
    x += p->whole << log2_size;
    for (int64_t i = 0; i < n; i++) te_move_run(y + i * to, x + i * from + index[i] * along, bytes);
}

static void gather_piece(const te_piece *p, void *out, const void *in, int log2_size)
{
    const int64_t *index = p->index;
    int64_t        columns = p->columns, to = p->column_to, from = p->column_from, along = p->along;
    switch (log2_size) {
    case 0: GATHER_EACH(uint8_t);
    case 1: GATHER_EACH(uint16_t);
    case 2: GATHER_EACH(uint32_t);
    default: GATHER_EACH(uint64_t);
    }
}

/* Whether indices count down, as of a dimension that is turned round. */
static bool counts_down(const int64_t *index, int64_t n)
{
    uint64_t other = 0, first = (uint64_t)index[0];
    if (index[n - 1] != index[0] - (n - 1)) return false;
    for (int64_t i = 0; i < n; i++) other |= (uint64_t)index[i] + (uint64_t)i - first;
    return n > 1 && other == 0;
}

#define TURN_ROUND(type)                                                                \
    {                                                                                   \
        type       *y = (type *)out + p->part;                                          \
        const type *x = (const type *)in + p->whole + p->index[0];                      \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = x[-i];               \
    }                                                                                   \
    break

static void turn_round(const te_piece *p, void *out, const void *in, int log2_size)
{
    int64_t n = p->columns;
    switch (log2_size) {
    case 0: TURN_ROUND(uint8_t);
    case 1: TURN_ROUND(uint16_t);
    case 2: TURN_ROUND(uint32_t);
    default: TURN_ROUND(uint64_t);
    }
}

/* Of a row that has one index and lies side by side. */
static void gather_long_run(const te_walk *w, const te_unit *u)
{
    te_dtype dtype = w->whole->dtype;
    memcpy(te_element(w->part->data, dtype, u->row.part + u->first),
           te_element(w->whole->data, dtype, u->row.whole + u->first + index_at(w->index, u->row.index) * w->along),
           (size_t)(u->end - u->first) << te_dtype_log2_size(dtype));
}

static bool is_long_run(const te_walk *w)
{
    int last = w->ndim - 1;
    return w->run == 1 && w->columns == 1 && last != w->along_dim && w->at[last] == 0 && w->from[last] == 1 &&
           w->to[last] == 1;
}

/* The same, once for all rows whose indices are the same memory. */
static bool is_turned(const te_piece *p, te_piece *known)
{
    if (known->index == p->index && known->columns == p->columns) return known->from != 0;
    *known = (te_piece){.index = p->index, .columns = p->columns, .from = counts_down(p->index, p->columns)};
    return known->from != 0;
}

static void gather_units(void *context, int64_t first, int64_t end, int thread)
{
    te_index_job *job = context;
    const te_copy_blocks *blocks = te_copy_blocks_of(job->exec);
    const te_walk *w = job->w;
    int64_t  room[TE_WALK_PIECE], bound = w->whole->shape[w->dim];
    int      last = w->ndim - 1;
    bool     long_run = is_long_run(w), plain = w->to[last] == 1 && w->from[last] == 0 && w->along == 1;
    bool     may_turn = plain && w->columns == 1 && w->checked && w->at[last] == 1 && w->index->dtype == TE_I64;
    int64_t  most = may_turn ? TE_WALK_PART : w->piece;
    te_piece known = {.index = NULL};
    int      log2_size = te_dtype_log2_size(w->whole->dtype);
    te_unit  u = unit_at(w, first);
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec) && !is_outside(job); i++, to_next_unit(w, &u)) {
        for (int64_t at = u.first; at < u.end; at += most) {
            te_piece p = piece_at(w, &u.row, at, long_run ? at + 1 : u.end, most, room);
            if (!w->checked && !te_index_all_within(blocks, p.index, p.n * p.columns, bound)) {
                note_outside(job);
                return;
            }
            if (long_run) break;
            if (w->run > 1) gather_runs(&p, w->run << log2_size, w->part->data, w->whole->data, log2_size);
            else if (may_turn && is_turned(&p, &known)) turn_round(&p, w->part->data, w->whole->data, log2_size);
            else gather_piece(&p, w->part->data, w->whole->data, log2_size);
        }
        if (long_run) gather_long_run(w, &u);
    }
}

/* Whether an index serves several elements, which then are looked at again and again. */
static bool is_spread(const te_view *index)
{
    bool spread = false;
    for (int d = 0; d < index->ndim; d++) spread |= index->stride[d] == 0 && index->shape[d] > 1;
    return spread;
}

static bool gather_all(te_exec *exec, te_walk *w)
{
    te_walk_plan(w, LONGEST_RUN);
    w->checked = w->run < w->row && is_spread(w->index);
    if (w->checked && !te_index_all_inside(exec, w->index, w->whole->shape[w->dim])) return false;
    if (te_cpu_stopped(exec)) return true;
    int       threads = even_threads(exec, w->rows * w->row * w->run * w->columns);
    te_index_job job = {.exec = exec, .w = w};
    int64_t   units = w->rows * units_of_row(w);
    te_cpu_loop(exec, threads, units, te_cpu_even_grain(units, threads), gather_units, &job);
    return !job.outside;
}

te_status te_cpu_gather(te_exec *exec, const te_view *out, const te_view *src, const te_view *index, int dim)
{
    te_walk      w = {.whole = src, .part = out, .index = index, .dim = dim};
    te_status status = te_check_index(exec, "gather", src, out, index, dim);
    if (status != TE_OK || te_view_numel(index) == 0) return status;
    if (gather_all(exec, &w)) return te_cpu_finish(exec, TE_OK);
    return te_cpu_finish(exec, te_index_fail_outside(exec, "gather", "index", index, dim, src->shape[dim]));
}

bool te_cpu_gather_rows(te_exec *exec, const te_view *rows, const te_view *table, const te_view *ids)
{
    te_view spread, whole;
    if (rows->dtype != table->dtype || ids->ndim == 0 || te_view_numel(rows) == 0) return false;
    te_index_spread_ids(&spread, &whole, rows, table, ids);
    te_walk w = {.whole = &whole, .part = rows, .index = &spread, .dim = 0};
    return gather_all(exec, &w);
}
