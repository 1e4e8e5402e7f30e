/* index.c - how the elements of an index are gone over, and whether indices are inside; see index_walk.h. */
#include "index_walk.h"

enum { NARROW = 32 /* a row too short for a loop of its own */ };

/* A dimension more, merged with the one before where all steps allow. `dim` stays by itself: scatters are shared by it.
 */
static void add_dim(te_walk *w, int64_t n, int64_t to, int64_t from, int64_t at, bool is_dim)
{
    int last = w->ndim - 1;
    if (n == 1) return;
    if (last >= 0 && last != w->along_dim && !is_dim && w->to[last] == n * to && w->from[last] == n * from &&
        w->at[last] == n * at) {
        w->shape[last] *= n;
    } else {
        w->shape[last = w->ndim++] = n;
        if (is_dim) w->along_dim = last;
    }
    w->to[last] = to;
    w->from[last] = from;
    w->at[last] = at;
}

static void count_rows(te_walk *w)
{
    if (w->ndim == 0) w->shape[w->ndim++] = 1, w->to[0] = w->from[0] = w->at[0] = 0;
    w->row = w->shape[w->ndim - 1];
    w->rows = 1;
    if (w->run < TE_WALK_PART / TE_WALK_PIECE) w->piece = TE_WALK_PIECE / w->columns;
    else w->piece = w->run < TE_WALK_PART ? TE_WALK_PART / w->run : 1;
    for (int d = 0; d + 1 < w->ndim; d++) w->rows *= w->shape[d];
}

void te_walk_plan(te_walk *w, int64_t longest_run)
{
    const te_view *index = w->index;
    w->ndim = 0;
    w->along_dim = -1;
    w->run = w->columns = 1;
    w->along = w->whole->stride[w->dim];
    for (int d = 0; d < index->ndim; d++)
        add_dim(w, index->shape[d], w->part->stride[d], d == w->dim ? 0 : w->whole->stride[d], index->stride[d],
                d == w->dim);
    int last = w->ndim - 1;
    if (last > 0 && last != w->along_dim && w->at[last] == 0 && w->to[last] == 1 && w->from[last] == 1 &&
        w->shape[last] <= longest_run) {
        w->run = w->shape[last];
        w->ndim = last--;
    }
    if (last > 0 && w->run == 1 && w->shape[last] <= NARROW && w->at[last - 1] == w->shape[last] * w->at[last]) {
        w->columns = w->shape[last];
        w->ndim = last;
    }
    count_rows(w);
}

/* --- indices ------------------------------------------------------------------------------------------------------ */

/* The sign bit of an index is set where it is negative. */
bool te_index_all_within(const te_copy_blocks *blocks, const int64_t *index, int64_t n, int64_t bound)
{
    int64_t most = -1;
    return n == 0 || (blocks->joined(TE_WHOLE_MAX, &most, index, 0, 0, n, 1) >> 63 == 0 && most < bound);
}

static void check_units(void *context, int64_t first, int64_t end, int thread)
{
    te_index_job *job = context;
    const te_copy_blocks *blocks = te_copy_blocks_of(job->exec);
    const te_walk *w = job->w;
    int64_t     room[TE_WALK_PIECE], bound = w->whole->shape[w->dim], step = w->at[w->ndim - 1];
    te_unit        u = unit_at(w, first);
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec) && !is_outside(job); i++, to_next_unit(w, &u))
        for (int64_t at = u.first, n; at < u.end; at += n) {
            n = u.end - at < TE_WALK_PIECE ? u.end - at : TE_WALK_PIECE;
            const int64_t *indices = indices_at(w->index, u.row.index + at * step, step, n, room);
            if (!te_index_all_within(blocks, indices, n, bound)) note_outside(job);
        }
}

/* Whether all indices are below the bound; those that are the same memory are looked at once. */
bool te_index_all_inside(te_exec *exec, const te_view *index, int64_t bound)
{
    te_view once = *index, whole = {.shape = {bound}};
    for (int d = 0; d < once.ndim; d++)
        if (once.stride[d] == 0 && once.shape[d] > 0) once.shape[d] = 1;
    te_walk w = {.whole = &whole, .part = &once, .index = &once, .ndim = 0, .along_dim = -1, .run = 1, .columns = 1};
    for (int d = 0; d < once.ndim; d++) add_dim(&w, once.shape[d], 0, 0, once.stride[d], false);
    count_rows(&w);
    int       threads = even_threads(exec, w.rows * w.row);
    te_index_job job = {.exec = exec, .w = &w};
    int64_t   units = w.rows * units_of_row(&w);
    te_cpu_loop(exec, threads, units, te_cpu_even_grain(units, threads), check_units, &job);
    return !job.outside;
}

/* Where the index of element i stands, from 1 on: in the vector, where one is spread along dim. */
static int64_t position_of(const te_view *index, int dim, int64_t i)
{
    bool vector = dim >= 0;
    for (int d = 0; d < index->ndim; d++) vector &= d == dim || index->stride[d] == 0 || index->shape[d] == 1;
    if (!vector || dim == index->ndim - 1) return i + 1;
    for (int d = index->ndim - 1; d > dim; d--) i /= index->shape[d];
    return i % index->shape[dim] + 1;
}

te_status te_index_fail_outside(te_exec *exec, const char *op, const char *what, const te_view *index, int dim,
                              int64_t bound)
{
    int64_t i = 0, value;
    do value = index_at(index, te_offset_of(index, index->ndim, i++));
    while (value >= 0 && value < bound);
    return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: %s %lld at position %lld is outside 0 to %lld", op, what,
                        (long long)value, (long long)position_of(index, dim, i - 1), (long long)bound - 1);
}

te_status te_cpu_check_ids(te_exec *exec, const char *op, const te_view *ids, int64_t bound)
{
    bool inside = te_view_numel(ids) == 0 || te_index_all_inside(exec, ids, bound);
    return te_cpu_finish(exec, inside ? TE_OK : te_index_fail_outside(exec, op, "id", ids, -1, bound));
}

void te_index_spread_ids(te_view *spread, te_view *whole, const te_view *rows, const te_view *table, const te_view *ids)
{
    int last = rows->ndim - 1;
    *spread = *ids;
    spread->ndim = rows->ndim;
    spread->shape[last] = rows->shape[last];
    spread->stride[last] = 0;
    *whole = *rows;
    whole->data = table->data;
    whole->shape[0] = table->shape[0];
    for (int d = 0; d < last; d++) whole->stride[d] = d == 0 ? table->stride[0] : 0;
    whole->stride[last] = table->stride[1];
}
