/* index_walk.h - the walk over the elements of an index, which gather, scatter and scatter_add share.
 *
 * A walk is made as simple as the strides allow (te_walk_plan): dimensions of extent 1 are left out, neighbours merged,
 * and what one index serves side by side is a *run*, moved as a whole. So an index of {n, 1} is one row of n, and rows
 * that are looked up are one row of n runs.
 */
#ifndef TE_KERNELS_CPU_INDEX_WALK_H
#define TE_KERNELS_CPU_INDEX_WALK_H

#include "index.h"
#include "workers.h"

enum {
    TE_WALK_PARALLEL_FROM = 1 << 14, /* elements */
    TE_WALK_PART = 1 << 15,          /* elements */
    TE_WALK_PIECE = 512              /* indices that are checked and used at a time */
};

/* The walk over index's elements: outer dimensions, then the row, which is the last one. */
typedef struct te_walk {
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
} te_walk;

typedef struct te_cursor {
    int64_t place[TE_MAX_DIMS], whole, part, index;
} te_cursor;

/* index.c: where whole, part, index and dim are known; runs are not longer than that. */
void te_walk_plan(te_walk *w, int64_t longest_run);

/* Whether n indices are below the bound; all of a view, those that are the same memory looked at once; and the error
 * that names the first one which is not. */
bool      te_index_all_within(const te_copy_blocks *blocks, const int64_t *index, int64_t n, int64_t bound);
bool      te_index_all_inside(te_exec *exec, const te_view *index, int64_t bound);
te_status te_index_fail_outside(te_exec *exec, const char *op, const char *what, const te_view *index, int dim,
                                int64_t bound);

/* The operands as those of a gather or scatter along the first dimension: ids are spread over columns, and the table
 * has all its rows in that dimension and one in others of ids. */
void te_index_spread_ids(te_view *spread, te_view *whole, const te_view *rows, const te_view *table,
                         const te_view *ids);

/* --- rows --------------------------------------------------------------------------------------------------------- */

static inline te_cursor cursor_at(const te_walk *w, int64_t r)
{
    te_cursor c = {.whole = 0};
    for (int d = w->ndim - 2; d >= 0; d--) {
        c.place[d] = r % w->shape[d];
        r /= w->shape[d];
        c.whole += c.place[d] * w->from[d];
        c.part += c.place[d] * w->to[d];
        c.index += c.place[d] * w->at[d];
    }
    return c;
}

static inline void to_next_row(const te_walk *w, te_cursor *c)
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

/* --- units of work ------------------------------------------------------------------------------------------------ */

/* Elements first … end of a row: what threads share. */
typedef struct te_unit {
    te_cursor  row;
    int64_t first, end;
} te_unit;

static inline int64_t part_of_row(const te_walk *w)
{
    return w->run < TE_WALK_PART ? TE_WALK_PART / w->run / w->columns : 1;
}

static inline int64_t units_of_row(const te_walk *w) { return (w->row + part_of_row(w) - 1) / part_of_row(w); }

static inline te_unit unit_from(const te_walk *w, te_cursor row, int64_t first)
{
    return (te_unit){row, first, w->row - first < part_of_row(w) ? w->row : first + part_of_row(w)};
}

static inline te_unit unit_at(const te_walk *w, int64_t i)
{
    return unit_from(w, cursor_at(w, i / units_of_row(w)), i % units_of_row(w) * part_of_row(w));
}

static inline void to_next_unit(const te_walk *w, te_unit *u)
{
    if (u->end == w->row) to_next_row(w, &u->row);
    *u = unit_from(w, u->row, u->end == w->row ? 0 : u->end);
}

static inline int even_threads(const te_exec *exec, int64_t elements)
{
    return elements < TE_WALK_PARALLEL_FROM ? 1 : exec->threads;
}

typedef struct te_index_job {
    te_exec    *exec;
    const te_walk *w;
    int64_t     shares; /* of a scatter */
    bool        by_row, by_column;
    bool        outside; /* there is such an index; atomic */
} te_index_job;

static inline void note_outside(te_index_job *job) { __atomic_store_n(&job->outside, true, __ATOMIC_RELAXED); }

static inline bool is_outside(const te_index_job *job) { return __atomic_load_n(&job->outside, __ATOMIC_RELAXED); }

/* --- pieces ------------------------------------------------------------------------------------------------------- */

static inline int64_t index_at(const te_view *index, int64_t offset)
{
    return index->dtype == TE_I64 ? ((const int64_t *)index->data)[offset] : ((const int32_t *)index->data)[offset];
}

/* n indices from offset on side by side: where they are, or copied to room. */
static inline const int64_t *indices_at(const te_view *index, int64_t offset, int64_t step, int64_t n, int64_t *room)
{
    if (index->dtype == TE_I64 && step == 1) return (const int64_t *)index->data + offset;
    if (index->dtype == TE_I64)
        for (int64_t i = 0; i < n; i++) room[i] = ((const int64_t *)index->data)[offset + i * step];
    else
        for (int64_t i = 0; i < n; i++) room[i] = ((const int32_t *)index->data)[offset + i * step];
    return room;
}

/* n runs of a row, or n lines of so many columns, which are elements with an index each, from these places on. */
typedef struct te_piece {
    const int64_t *index;
    int64_t        n, part, whole; /* offsets */
    int64_t        to, from, along;
    int64_t        columns, column_to, column_from;
} te_piece;

static inline te_piece piece_at(const te_walk *w, const te_cursor *row, int64_t at, int64_t end, int64_t most,
                                int64_t *room)
{
    int     last = w->ndim - 1, each = w->columns > 1 ? last + 1 : last;
    bool    one_line = w->run == 1 && w->columns == 1;
    int64_t n = end - at < most ? end - at : most;
    return (te_piece){.index = indices_at(w->index, row->index + at * w->at[last], w->at[each], n * w->columns, room),
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

/* Runs of one length, one after the other: by vectors, of which the last overlaps the one before. */
static inline void te_move_run(char *d, const char *s, int64_t bytes)
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

#endif
