/* index.c - gather, scatter and scatter_add along one dimension.
 *
 * A walk over the elements of the index is made as simple as their strides allow (plan_walk): dimensions of extent 1
 * are left out, neighbours merged, and what one index serves side by side is a *run*, moved as a whole. So an index of
 * {n, 1} is one row of n, and rows that are looked up are one row of n runs.
 *
 * A gather checks some indices and then reads by them; a scatter checks all before it writes. scatter_add gives every
 * slice across `dim` to one thread, which adds in the order of the indices; where there are too few slices, threads own
 * ranges of the target instead. Either way the additions to one element happen in index order, whatever the number of
 * threads.
 */
#include "index.h"
#include "workers.h"

enum {
    PARALLEL_FROM = 1 << 14, /* elements */
    PART = 1 << 15,          /* elements */
    PIECE = 512,             /* indices that are checked and used at a time */
    LONGEST_RUN = 1 << 15,   /* elements; longer ones are rows, which threads share */
    NARROW = 32              /* a row too short for a loop of its own */
};

/* The walk over index's elements: outer dimensions, then the row, which is the last one. */
typedef struct walk {
    const te_view *whole, *part, *index; /* `whole` is indexed along dim; part has index's shape */
    int            dim;
    bool           adds;    /* of a scatter: to what is there, else in its place */
    bool           checked; /* of a gather: all indices are inside */
    int            ndim;
    int64_t        shape[TE_MAX_DIMS], to[TE_MAX_DIMS], from[TE_MAX_DIMS], at[TE_MAX_DIMS]; /* steps of part, whole,
                                                                                              index */
    int            along_dim; /* which of these is dim; -1: it is left out */
    int64_t        along;     /* step of whole along dim */
    int64_t        run;       /* elements side by side to which an index applies; or */
    int64_t        columns;   /* elements of a short row, the dimension behind the last one, whose indices go on */
    int64_t        row, rows;
    int64_t        piece;     /* elements or runs of a row that are looked at together */
} walk;

typedef struct cursor {
    int64_t place[TE_MAX_DIMS], whole, part, index;
} cursor;

static cursor cursor_at(const walk *w, int64_t r)
{
    cursor c = {.whole = 0};
    for (int d = w->ndim - 2; d >= 0; d--) {
        c.place[d] = r % w->shape[d];
        r /= w->shape[d];
        c.whole += c.place[d] * w->from[d];
        c.part += c.place[d] * w->to[d];
        c.index += c.place[d] * w->at[d];
    }
    return c;
}

static void to_next_row(const walk *w, cursor *c)
{
    for (int d = w->ndim - 2; d >= 0; d--) {
        bool    around = ++c->place[d] == w->shape[d];
        int64_t steps = around ? 1 - c->place[d] : 1;
        c->whole += steps * w->from[d];
        c->part += steps * w->to[d];
        c->index += steps * w->at[d];
        if (!around) return;
        c->place[d] = 0;
    }
}

/* A dimension more, merged with the one before where all steps allow. `dim` stays by itself: scatters are shared by it.
 */
static void add_dim(walk *w, int64_t n, int64_t to, int64_t from, int64_t at, bool is_dim)
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

static void count_rows(walk *w)
{
    if (w->ndim == 0) w->shape[w->ndim++] = 1, w->to[0] = w->from[0] = w->at[0] = 0;
    w->row = w->shape[w->ndim - 1];
    w->rows = 1;
    w->piece = w->run < PART / PIECE ? PIECE / w->columns : w->run < PART ? PART / w->run : 1;
    for (int d = 0; d + 1 < w->ndim; d++) w->rows *= w->shape[d];
}

static void plan_walk(walk *w, int64_t longest_run)
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

/* --- units of work ----------------------------------------------------------------------------------------------- */

/* Elements first … end of a row: what threads share. */
typedef struct unit {
    cursor  row;
    int64_t first, end;
} unit;

static int64_t part_of_row(const walk *w) { return w->run < PART ? PART / w->run / w->columns : 1; }

static int64_t units_of_row(const walk *w) { return (w->row + part_of_row(w) - 1) / part_of_row(w); }

static unit unit_from(const walk *w, cursor row, int64_t first)
{
    return (unit){row, first, w->row - first < part_of_row(w) ? w->row : first + part_of_row(w)};
}

static unit unit_at(const walk *w, int64_t i)
{
    return unit_from(w, cursor_at(w, i / units_of_row(w)), i % units_of_row(w) * part_of_row(w));
}

static void to_next_unit(const walk *w, unit *u)
{
    if (u->end == w->row) to_next_row(w, &u->row);
    *u = unit_from(w, u->row, u->end == w->row ? 0 : u->end);
}

static int even_threads(const te_exec *exec, int64_t elements) { return elements < PARALLEL_FROM ? 1 : exec->threads; }

typedef struct index_job {
    te_exec    *exec;
    const walk *w;
    int64_t     shares; /* of a scatter */
    bool        by_row, by_column;
    bool        outside; /* there is such an index; atomic */
} index_job;

/* --- indices ------------------------------------------------------------------------------------------------------ */

static int64_t index_at(const te_view *index, int64_t offset)
{
    return index->dtype == TE_I64 ? ((const int64_t *)index->data)[offset] : ((const int32_t *)index->data)[offset];
}

/* n indices from offset on side by side: where they are, or copied to room. */
static const int64_t *indices_at(const te_view *index, int64_t offset, int64_t step, int64_t n, int64_t *room)
{
    if (index->dtype == TE_I64 && step == 1) return (const int64_t *)index->data + offset;
    if (index->dtype == TE_I64)
        for (int64_t i = 0; i < n; i++) room[i] = ((const int64_t *)index->data)[offset + i * step];
    else
        for (int64_t i = 0; i < n; i++) room[i] = ((const int32_t *)index->data)[offset + i * step];
    return room;
}

/* The sign bit of an index, or of its distance to the last one, is set where it is outside. */
static bool all_within(const int64_t *index, int64_t n, int64_t bound)
{
    uint64_t outside = 0, last = (uint64_t)bound - 1;
    _Pragma("omp simd reduction(| : outside)") for (int64_t i = 0; i < n; i++) outside |=
        (uint64_t)index[i] | (last - (uint64_t)index[i]);
    return outside >> 63 == 0;
}

static void note_outside(index_job *job) { __atomic_store_n(&job->outside, true, __ATOMIC_RELAXED); }

static bool is_outside(const index_job *job) { return __atomic_load_n(&job->outside, __ATOMIC_RELAXED); }

static void check_units(void *context, int64_t first, int64_t end, int thread)
{
    index_job  *job = context;
    const walk *w = job->w;
    int64_t     room[PIECE], bound = w->whole->shape[w->dim], step = w->at[w->ndim - 1];
    unit        u = unit_at(w, first);
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec) && !is_outside(job); i++, to_next_unit(w, &u))
        for (int64_t at = u.first, n; at < u.end; at += n) {
            n = u.end - at < PIECE ? u.end - at : PIECE;
            if (!all_within(indices_at(w->index, u.row.index + at * step, step, n, room), n, bound)) note_outside(job);
        }
}

/* Whether all indices are below the bound; those that are the same memory are looked at once. */
static bool all_inside(te_exec *exec, const te_view *index, int64_t bound)
{
    te_view once = *index, whole = {.shape = {bound}};
    for (int d = 0; d < once.ndim; d++)
        if (once.stride[d] == 0 && once.shape[d] > 0) once.shape[d] = 1;
    walk w = {.whole = &whole, .part = &once, .index = &once, .ndim = 0, .along_dim = -1, .run = 1, .columns = 1};
    for (int d = 0; d < once.ndim; d++) add_dim(&w, once.shape[d], 0, 0, once.stride[d], false);
    count_rows(&w);
    int       threads = even_threads(exec, w.rows * w.row);
    index_job job = {.exec = exec, .w = &w};
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

static te_status fail_outside(te_exec *exec, const char *op, const char *what, const te_view *index, int dim,
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
    bool inside = te_view_numel(ids) == 0 || all_inside(exec, ids, bound);
    return te_cpu_finish(exec, inside ? TE_OK : fail_outside(exec, op, "id", ids, -1, bound));
}

/* --- gather ------------------------------------------------------------------------------------------------------- */

/* Runs of one length, one after the other: by vectors, of which the last overlaps the one before. */
static inline void move_run(char *d, const char *s, int64_t bytes)
{
    if (bytes > 256) {
        memcpy(d, s, (size_t)bytes);
    } else if (bytes >= 16) {
        int64_t i = 0;
        do memcpy(d + i, s + i, 16);
        while ((i += 16) + 16 <= bytes);
        memcpy(d + bytes - 16, s + bytes - 16, 16);
    } else if (bytes >= 8) {
        memcpy(d, s, 8);
        memcpy(d + bytes - 8, s + bytes - 8, 8);
    } else if (bytes >= 4) {
        memcpy(d, s, 4);
        memcpy(d + bytes - 4, s + bytes - 4, 4);
    } else {
        for (int64_t i = 0; i < bytes; i++) d[i] = s[i];
    }
}

/* n runs of a row, or n lines of so many columns, which are elements with an index each, from these places on. */
typedef struct piece {
    const int64_t *index;
    int64_t        n, part, whole; /* offsets */
    int64_t        to, from, along;
    int64_t        columns, column_to, column_from;
} piece;

static piece piece_at(const walk *w, const cursor *row, int64_t at, int64_t end, int64_t most, int64_t *room)
{
    int     last = w->ndim - 1, each = w->columns > 1 ? last + 1 : last;
    bool    one_line = w->run == 1 && w->columns == 1;
    int64_t n = end - at < most ? end - at : most;
    return (piece){.index = indices_at(w->index, row->index + at * w->at[last], w->at[each], n * w->columns, room),
                   .n = one_line ? 1 : n,
                   .part = row->part + at * w->to[last],
                   .whole = row->whole + at * w->from[last],
                   .to = w->to[last],
                   .from = w->from[last],
                   .along = w->along,
                   .columns = one_line ? n : w->columns,
                   .column_to = w->to[each],
                   .column_from = w->from[each]};
}

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

static void gather_runs(const piece *p, int64_t bytes, char *y, const char *x, int log2_size)
{
    const int64_t *index = p->index;
    int64_t        n = p->n, to = p->to << log2_size, from = p->from << log2_size, along = p->along << log2_size;
    y += p->part << log2_size;
    x += p->whole << log2_size;
    for (int64_t i = 0; i < n; i++) move_run(y + i * to, x + i * from + index[i] * along, bytes);
}

static void gather_piece(const piece *p, void *out, const void *in, int log2_size)
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

static void turn_round(const piece *p, void *out, const void *in, int log2_size)
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
static void gather_long_run(const walk *w, const unit *u)
{
    te_dtype dtype = w->whole->dtype;
    memcpy(te_element(w->part->data, dtype, u->row.part + u->first),
           te_element(w->whole->data, dtype, u->row.whole + u->first + index_at(w->index, u->row.index) * w->along),
           (size_t)(u->end - u->first) << te_dtype_log2_size(dtype));
}

static bool is_long_run(const walk *w)
{
    int last = w->ndim - 1;
    return w->run == 1 && w->columns == 1 && last != w->along_dim && w->at[last] == 0 && w->from[last] == 1 &&
           w->to[last] == 1;
}

/* The same, once for all rows whose indices are the same memory. */
static bool is_turned(const piece *p, piece *known)
{
    if (known->index == p->index && known->columns == p->columns) return known->from != 0;
    *known = (piece){.index = p->index, .columns = p->columns, .from = counts_down(p->index, p->columns)};
    return known->from != 0;
}

static void gather_units(void *context, int64_t first, int64_t end, int thread)
{
    index_job  *job = context;
    const walk *w = job->w;
    int64_t     room[PIECE], bound = w->whole->shape[w->dim];
    int         last = w->ndim - 1;
    bool        long_run = is_long_run(w), plain = w->to[last] == 1 && w->from[last] == 0 && w->along == 1;
    bool        may_turn = plain && w->columns == 1 && w->checked && w->at[last] == 1 && w->index->dtype == TE_I64;
    int64_t     most = may_turn ? PART : w->piece;
    piece       known = {.index = NULL};
    int         log2_size = te_dtype_log2_size(w->whole->dtype);
    unit        u = unit_at(w, first);
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec) && !is_outside(job); i++, to_next_unit(w, &u)) {
        for (int64_t at = u.first; at < u.end; at += most) {
            piece p = piece_at(w, &u.row, at, long_run ? at + 1 : u.end, most, room);
            if (!w->checked && !all_within(p.index, p.n * p.columns, bound)) {
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

static bool gather_all(te_exec *exec, walk *w)
{
    plan_walk(w, LONGEST_RUN);
    w->checked = w->run < w->row && is_spread(w->index);
    if (w->checked && !all_inside(exec, w->index, w->whole->shape[w->dim])) return false;
    if (te_cpu_stopped(exec)) return true;
    int       threads = even_threads(exec, w->rows * w->row * w->run * w->columns);
    index_job job = {.exec = exec, .w = w};
    int64_t   units = w->rows * units_of_row(w);
    te_cpu_loop(exec, threads, units, te_cpu_even_grain(units, threads), gather_units, &job);
    return !job.outside;
}

te_status te_cpu_gather(te_exec *exec, const te_view *out, const te_view *src, const te_view *index, int dim)
{
    walk      w = {.whole = src, .part = out, .index = index, .dim = dim};
    te_status status = te_check_index(exec, "gather", src, out, index, dim);
    if (status != TE_OK || te_view_numel(index) == 0) return status;
    if (gather_all(exec, &w)) return te_cpu_finish(exec, TE_OK);
    return te_cpu_finish(exec, fail_outside(exec, "gather", "index", index, dim, src->shape[dim]));
}

/* --- rows of a table by id ---------------------------------------------------------------------------------------- */

/* The operands as those of a gather or scatter along the first dimension: ids are spread over columns, and the table
 * has all its rows in that dimension and one in others of ids. */
static void spread_ids(te_view *spread, te_view *whole, const te_view *rows, const te_view *table, const te_view *ids)
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

bool te_cpu_gather_rows(te_exec *exec, const te_view *rows, const te_view *table, const te_view *ids)
{
    te_view spread, whole;
    if (rows->dtype != table->dtype || ids->ndim == 0 || te_view_numel(rows) == 0) return false;
    spread_ids(&spread, &whole, rows, table, ids);
    walk w = {.whole = &whole, .part = rows, .index = &spread, .dim = 0};
    return gather_all(exec, &w);
}

/* --- scatter and scatter_add ------------------------------------------------------------------------------------- */

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

static void add_others(const te_copy_blocks *blocks, const walk *w, const piece *p, const share *s)
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

#define SCATTER_EACH(type, OP)                                                                                       \
    for (int64_t i = 0; i < p->n; i++, index += columns) {                                                           \
        type       *y = (type *)w->whole->data + p->whole + i * p->from;                                             \
        const type *x = (const type *)w->part->data + p->part + i * p->to;                                           \
        if (all && to == 1 && from == 0 && along == 1)                                                               \
            for (int64_t c = 0; c < columns; c++) y[index[c]] OP x[c];                                               \
        else                                                                                                         \
            for (int64_t c = 0; c < columns; c++)                                                                    \
                if ((uint64_t)(index[c] - low) < owned) y[c * from + index[c] * along] OP x[c * to];                 \
    }                                                                                                                \
    return

#define ADD_RUNS(type)                                                                                               \
    for (int64_t i = 0; i < p->n; i++) {                                                                             \
        if ((uint64_t)(index[i] - low) >= owned) continue;                                                           \
        type       *y = (type *)w->whole->data + p->whole + i * p->from + index[i] * along + s->run_first;           \
        const type *x = (const type *)w->part->data + p->part + i * p->to + s->run_first;                            \
        _Pragma("omp simd") for (int64_t c = 0; c < run; c++) y[c] += x[c];                                          \
    }                                                                                                                \
    return

#define ADD(type)                        \
    if (w->run > 1) { ADD_RUNS(type); }  \
    SCATTER_EACH(type, +=)

static void add_piece(const te_copy_blocks *blocks, const walk *w, const piece *p, const share *s)
{
    const int64_t *index = p->index;
    int64_t  columns = p->columns, to = p->column_to, from = p->column_from, along = p->along;
    int64_t  low = s->low, run = s->run_end - s->run_first;
    uint64_t owned = (uint64_t)(s->high - low);
    bool     all = s->high - low == w->whole->shape[w->dim];
    switch (w->whole->dtype) {
    case TE_F32: ADD(float);
    case TE_F64: ADD(double);
    case TE_I64: ADD(uint64_t);
    default: add_others(blocks, w, p, s);
    }
}

static void store_runs(const walk *w, const piece *p, const share *s)
{
    te_dtype dtype = w->whole->dtype;
    int64_t  bytes = (s->run_end - s->run_first) << te_dtype_log2_size(dtype);
    for (int64_t i = 0; i < p->n; i++) {
        int64_t target = p->index[i], to = p->whole + i * p->from + target * p->along, from = p->part + i * p->to;
        if (target >= s->low && target < s->high)
            move_run(te_element(w->whole->data, dtype, to + s->run_first),
                     te_element(w->part->data, dtype, from + s->run_first), bytes);
    }
}

static void store_piece(const walk *w, const piece *p, const share *s)
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
    case 0: SCATTER_EACH(uint8_t, =);
    case 1: SCATTER_EACH(uint16_t, =);
    case 2: SCATTER_EACH(uint32_t, =);
    default: SCATTER_EACH(uint64_t, =);
    }
}

static void scatter_row(te_exec *exec, const walk *w, const cursor *row, const share *s)
{
    const te_copy_blocks *blocks = te_copy_blocks_of(exec);
    int64_t               room[PIECE];
    for (int64_t at = s->first; at < s->end && !te_cpu_stopping(exec); at += w->piece) {
        piece p = piece_at(w, row, at, s->end, w->piece, room);
        if (w->adds) add_piece(blocks, w, &p, s);
        else store_piece(w, &p, s);
    }
}

static void scatter_share(const index_job *job, int64_t i)
{
    const walk *w = job->w;
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
    cursor  row = cursor_at(w, first_row);
    for (int64_t r = first_row; r < end_row; r++, to_next_row(w, &row)) scatter_row(job->exec, w, &row, &s);
}

static void scatter_shares(void *context, int64_t first, int64_t end, int thread)
{
    (void)thread;
    for (int64_t i = first; i < end; i++) scatter_share(context, i);
}

static void scatter_all(te_exec *exec, walk *w)
{
    plan_walk(w, INT64_MAX);
    /* Rows are independent of each other when dim is not among their dimensions, columns when it is. */
    int64_t shares = even_threads(exec, w->rows * w->row * w->run * w->columns), across = w->run > 1 ? w->run : w->row;
    bool    in_row = w->along_dim == w->ndim - 1, by_row = (in_row || w->along_dim < 0 || w->along_dim == w->ndim) &&
                                                         w->rows >= shares;
    bool    by_column = !by_row && (w->run > 1 || !in_row) && across >= 16;
    index_job job = {.exec = exec, .w = w, .shares = shares, .by_row = by_row, .by_column = by_column};
    te_cpu_loop(exec, (int)shares, shares, 1, scatter_shares, &job);
}

static te_status scatter(te_exec *exec, const char *op, walk w)
{
    const te_view *index = w.index;
    te_status      status = te_check_index(exec, op, w.whole, w.part, index, w.dim);
    if (status != TE_OK || te_view_numel(index) == 0) return status;
    int64_t bound = w.whole->shape[w.dim];
    if (w.adds && w.whole->dtype == TE_BOOL)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: bool values cannot be added", op);
    if (!all_inside(exec, index, bound))
        return te_cpu_finish(exec, fail_outside(exec, op, "index", index, w.dim, bound));
    if (!te_cpu_stopped(exec)) scatter_all(exec, &w);
    return te_cpu_finish(exec, TE_OK);
}

te_status te_cpu_scatter_add(te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim)
{
    return scatter(exec, "scatter_add", (walk){.whole = dst, .part = src, .index = index, .dim = dim, .adds = true});
}

te_status te_cpu_scatter(te_exec *exec, const te_view *dst, const te_view *src, const te_view *index, int dim)
{
    return scatter(exec, "scatter", (walk){.whole = dst, .part = src, .index = index, .dim = dim});
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
    spread_ids(&spread, &whole, &flat, table, &list);
    walk w = {.whole = &whole, .part = &flat, .index = &spread, .dim = 0, .adds = true};
    scatter_all(exec, &w);
    return true;
}
