/* index.c - gather, scatter and scatter_add along one dimension.
 *
 * All indices are checked before anything is written. scatter_add gives every slice across `dim` to one thread, which
 * adds in the order of the indices; where there are too few slices, threads own ranges of the target instead. Either
 * way the additions to one element happen in index order, whatever the number of threads.
 */
#include "copy.h"
#include "workers.h"

enum { PARALLEL_FROM = 1 << 14, PART = 1 << 15, POLL = 1 << 12 }; /* elements */

static int64_t index_at(const te_view *index, int64_t offset)
{
    return index->dtype == TE_I64 ? ((const int64_t *)index->data)[offset] : ((const int32_t *)index->data)[offset];
}

/* The walk over index's elements: outer dimensions, then the inner row, which is the last dimension. */
typedef struct walk {
    const te_view *whole, *part, *index; /* `whole` is indexed along dim; part has index's shape */
    int            dim;
    int64_t        row; /* extent of the last dimension */
    bool           adds; /* of a scatter: to what is there, else in its place */
} walk;

/* A row: its coordinates, and where it begins. In `whole`, that is without a coordinate along dim. */
typedef struct cursor {
    int64_t at[TE_MAX_DIMS], whole, part, index;
} cursor;

static cursor cursor_at(const walk *w, int64_t r)
{
    cursor c = {.whole = 0};
    for (int d = w->index->ndim - 2; d >= 0; d--) {
        c.at[d] = r % w->index->shape[d];
        r /= w->index->shape[d];
        c.whole += d == w->dim ? 0 : c.at[d] * w->whole->stride[d];
        c.part += c.at[d] * w->part->stride[d];
        c.index += c.at[d] * w->index->stride[d];
    }
    return c;
}

static void to_next_row(const walk *w, cursor *c)
{
    for (int d = w->index->ndim - 2; d >= 0; d--) {
        bool    around = ++c->at[d] == w->index->shape[d];
        int64_t steps = around ? 1 - c->at[d] : 1;
        c->whole += d == w->dim ? 0 : steps * w->whole->stride[d];
        c->part += steps * w->part->stride[d];
        c->index += steps * w->index->stride[d];
        if (!around) return;
        c->at[d] = 0;
    }
}

/* Whether one index serves a row, as where a vector of them is spread over the other dimensions. */
static bool one_for_row(const walk *w)
{
    return w->index->stride[w->index->ndim - 1] == 0 && w->dim < w->index->ndim - 1;
}

/* The sign bit of an index, or of its distance to the last one, is set where it is outside. */
#define ALL_WITHIN(type, step)                                                      \
    {                                                                               \
        const type *at = (const type *)index->data + offset;                        \
        for (int64_t i = 0; i < n; i++) {                                           \
            uint64_t wide = (uint64_t)(int64_t)at[i * (step)];                      \
            outside |= wide | (last - wide);                                        \
        }                                                                           \
    }

static bool all_within(const te_view *index, int64_t offset, int64_t n, int64_t step, int64_t bound)
{
    uint64_t outside = 0, last = (uint64_t)bound - 1;
    if (index->dtype == TE_I64 && step == 1) ALL_WITHIN(int64_t, 1)
    else if (index->dtype == TE_I64) ALL_WITHIN(int64_t, step)
    else if (step == 1) ALL_WITHIN(int32_t, 1)
    else ALL_WITHIN(int32_t, step)
    return outside >> 63 == 0;
}

/* Where the index of element i of row r stands, from 1 on: in the vector, where one is spread along dim. */
static int64_t position_of(const walk *w, int64_t r, int64_t i)
{
    const te_view *index = w->index;
    int64_t        at = r;
    bool           vector = w->dim < index->ndim - 1;
    for (int d = 0; d < index->ndim; d++) vector &= d == w->dim || index->stride[d] == 0;
    if (!vector) return r * w->row + i + 1;
    for (int d = index->ndim - 2; d > w->dim; d--) at /= index->shape[d];
    return at % index->shape[w->dim] + 1;
}

typedef struct index_job {
    te_exec    *exec;
    const walk *w;
    int64_t     shares; /* of a scatter */
    bool        by_row, by_column;
    int64_t     outside; /* the first part, in order, with an index that is outside; atomic */
} index_job;

/* Elements first … end of a row: what threads share. */
typedef struct unit {
    cursor  row;
    int64_t first, end;
} unit;

static int64_t units_of_row(const walk *w) { return (w->row + PART - 1) / PART; }

static unit unit_from(const walk *w, cursor row, int64_t first)
{
    return (unit){row, first, w->row - first < PART ? w->row : first + PART};
}

static unit unit_at(const walk *w, int64_t i)
{
    return unit_from(w, cursor_at(w, i / units_of_row(w)), i % units_of_row(w) * PART);
}

static void to_next_unit(const walk *w, unit *u)
{
    if (u->end == w->row) to_next_row(w, &u->row);
    *u = unit_from(w, u->row, u->end == w->row ? 0 : u->end);
}

static int even_threads(const te_exec *exec, int64_t elements) { return elements < PARALLEL_FROM ? 1 : exec->threads; }

static void check_units(void *context, int64_t first, int64_t end, int thread)
{
    index_job     *job = context;
    const walk    *w = job->w;
    const te_view *index = w->index;
    int64_t        step = index->stride[index->ndim - 1], bound = w->whole->shape[w->dim];
    unit           u = unit_at(w, first);
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec); i++, to_next_unit(w, &u)) {
        int64_t known = __atomic_load_n(&job->outside, __ATOMIC_RELAXED);
        if (known <= i) return;
        if (all_within(index, u.row.index + u.first * step, step == 0 ? 1 : u.end - u.first, step, bound)) continue;
        while (i < known &&
               !__atomic_compare_exchange_n(&job->outside, &known, i, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            continue;
        return;
    }
}

/* Rows that are the same memory over and over are looked at once. */
static te_status check_indices(te_exec *exec, const char *op, const walk *w)
{
    const te_view *index = w->index;
    int     last = index->ndim - 1;
    bool    same = true;
    for (int i = 0; i < last; i++) same &= index->stride[i] == 0;
    int64_t rows = same ? 1 : te_view_numel(index) / w->row, units = rows * units_of_row(w);
    int     threads = even_threads(exec, rows * w->row);
    index_job job = {.exec = exec, .w = w, .outside = units};
    te_cpu_loop(exec, threads, units, te_cpu_even_grain(units, threads), check_units, &job);
    if (job.outside == units || te_cpu_stopping(exec)) return te_cpu_finish(exec, TE_OK);
    unit    u = unit_at(w, job.outside);
    int64_t i = u.first, at = u.row.index, step = index->stride[last], bound = w->whole->shape[w->dim];
    while (index_at(index, at + i * step) >= 0 && index_at(index, at + i * step) < bound) i++;
    return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: index %lld at position %lld is outside 0 to %lld", op,
                        (long long)index_at(index, at + i * step),
                        (long long)position_of(w, job.outside / units_of_row(w), i), (long long)bound - 1);
}

#define GATHER_ROW(type, index_type)                                                                         \
    {                                                                                                        \
        type             *y = (type *)w->part->data + to;                                                    \
        const type       *x = (const type *)w->whole->data + from;                                           \
        const index_type *index = (const index_type *)w->index->data + at;                                   \
        for (int64_t i = first; i < end; i++) y[i * out] = x[i * step + (int64_t)index[i * next] * along];    \
    }                                                                                                        \
    break

static void gather_unit(const walk *w, const unit *u)
{
    int     last = w->index->ndim - 1;
    int64_t from = u->row.whole, to = u->row.part, at = u->row.index, first = u->first, end = u->end;
    int64_t along = w->whole->stride[w->dim], step = w->dim == last ? 0 : w->whole->stride[last];
    int64_t out = w->part->stride[last], next = w->index->stride[last];
    if (one_for_row(w) && out == 1 && step == 1) {
        te_dtype dtype = w->whole->dtype;
        memcpy(te_element(w->part->data, dtype, to + first),
               te_element(w->whole->data, dtype, from + first + index_at(w->index, at) * along),
               (size_t)(end - first) << te_dtype_log2_size(dtype));
        return;
    }
    switch (te_dtype_log2_size(w->whole->dtype) + (w->index->dtype == TE_I64 ? 4 : 0)) {
    case 0: GATHER_ROW(uint8_t, int32_t);
    case 1: GATHER_ROW(uint16_t, int32_t);
    case 2: GATHER_ROW(uint32_t, int32_t);
    case 3: GATHER_ROW(uint64_t, int32_t);
    case 4: GATHER_ROW(uint8_t, int64_t);
    case 5: GATHER_ROW(uint16_t, int64_t);
    case 6: GATHER_ROW(uint32_t, int64_t);
    default: GATHER_ROW(uint64_t, int64_t);
    }
}

static void gather_units(void *context, int64_t first, int64_t end, int thread)
{
    const index_job *job = context;
    unit             u = unit_at(job->w, first);
    (void)thread;
    for (int64_t i = first; i < end && !te_cpu_stopping(job->exec); i++, to_next_unit(job->w, &u))
        gather_unit(job->w, &u);
}

te_status te_cpu_gather(te_exec *exec, const te_view *out, const te_view *src, const te_view *index, int dim)
{
    walk w = {.whole = src, .part = out, .index = index, .dim = dim};
    te_status status = te_check_index(exec, "gather", w.whole, w.part, w.index, w.dim);
    int64_t numel = te_view_numel(index);
    if (status != TE_OK || numel == 0) return status;
    w.row = index->shape[index->ndim - 1];
    status = check_indices(exec, "gather", &w);
    if (status != TE_OK) return status;
    int threads = even_threads(exec, numel);
    index_job job = {.exec = exec, .w = &w};
    int64_t units = numel / w.row * units_of_row(&w);
    te_cpu_loop(exec, threads, units, te_cpu_even_grain(units, threads), gather_units, &job);
    return te_cpu_finish(exec, TE_OK);
}

/* --- scatter and scatter_add ------------------------------------------------------------------------------------- */

/* What one owner adds or stores in a row: elements first … end of the last dimension whose target along dim is in
 * low … high. */
typedef struct share {
    int64_t first, end, low, high;
} share;

/* dst += src, one element, in the arithmetic of its dtype. */
static void add_element(const te_copy_blocks *blocks, te_dtype dtype, void *dst, const void *src)
{
    switch (dtype) {
    case TE_F32: *(float *)dst += *(const float *)src; return;
    case TE_F64: *(double *)dst += *(const double *)src; return;
    case TE_I64: *(int64_t *)dst = (int64_t)(*(uint64_t *)dst + *(const uint64_t *)src); return;
    case TE_I32: *(int32_t *)dst = (int32_t)(*(uint32_t *)dst + *(const uint32_t *)src); return;
    case TE_U8: *(uint8_t *)dst = (uint8_t)(*(uint8_t *)dst + *(const uint8_t *)src); return;
    default: break;
    }
    float a, b;
    blocks->load[dtype](&a, dst, 1, 1);
    blocks->load[dtype](&b, src, 1, 1);
    a += b;
    blocks->store[TE_CLASS_F32][dtype](dst, 1, &a, 1, 1);
}

static void add_row(float *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) dst[i] += src[i];
}

static void scatter_row(te_exec *exec, const te_copy_blocks *blocks, const walk *w, const cursor *row, const share *s)
{
    int last = w->index->ndim - 1;
    te_dtype dtype = w->whole->dtype;
    size_t size = te_dtype_size(dtype);
    int64_t to = row->whole, from = row->part, at = row->index;
    int64_t along = w->whole->stride[w->dim], step = w->dim == last ? 0 : w->whole->stride[last];
    if (one_for_row(w) && (dtype == TE_F32 || !w->adds) && step == 1 && w->part->stride[last] == 1) {
        int64_t target = index_at(w->index, at);
        if (target < s->low || target >= s->high) return;
        if (!w->adds)
            memcpy(te_element(w->whole->data, dtype, to + target * along + s->first),
                   te_element(w->part->data, dtype, from + s->first), (size_t)(s->end - s->first) * size);
        else
            add_row((float *)w->whole->data + to + target * along + s->first,
                    (const float *)w->part->data + from + s->first, s->end - s->first);
        return;
    }
    for (int64_t i = s->first; i < s->end && !(i % POLL == 0 && te_cpu_stopping(exec)); i++) {
        int64_t target = index_at(w->index, at + i * w->index->stride[last]);
        if (target < s->low || target >= s->high) continue;
        void       *place = te_element(w->whole->data, dtype, to + i * step + target * along);
        const void *x = te_element(w->part->data, dtype, from + i * w->part->stride[last]);
        if (w->adds) add_element(blocks, dtype, place, x);
        else memcpy(place, x, size);
    }
}

static void scatter_share(const index_job *job, int64_t i)
{
    const walk *w = job->w;
    int64_t     shares = job->shares, rows = te_view_numel(w->index) / w->row;
    share       s = {0, w->row, 0, w->whole->shape[w->dim]};
    int64_t    *first = job->by_column ? &s.first : &s.low, *end = job->by_column ? &s.end : &s.high;
    if (!job->by_row) {
        int64_t n = *end;
        *first = n * i / shares;
        *end = n * (i + 1) / shares;
    }
    int64_t first_row = job->by_row ? rows * i / shares : 0, end_row = job->by_row ? rows * (i + 1) / shares : rows;
    cursor  row = cursor_at(w, first_row);
    for (int64_t r = first_row; r < end_row; r++, to_next_row(w, &row))
        scatter_row(job->exec, te_copy_blocks_of(job->exec), w, &row, &s);
}

static void scatter_shares(void *context, int64_t first, int64_t end, int thread)
{
    (void)thread;
    for (int64_t i = first; i < end; i++) scatter_share(context, i);
}

static te_status scatter(te_exec *exec, const char *op, walk w)
{
    const te_view *index = w.index;
    int dim = w.dim;
    te_status status = te_check_index(exec, op, w.whole, w.part, index, dim);
    int64_t numel = te_view_numel(index);
    if (status != TE_OK || numel == 0) return status;
    if (w.adds && w.whole->dtype == TE_BOOL)
        return te_exec_fail(exec, TE_ERROR_ARGUMENT, "%s: bool values cannot be added", op);
    w.row = index->shape[index->ndim - 1];
    status = check_indices(exec, op, &w);
    if (status != TE_OK) return status;

    int64_t rows = numel / w.row;
    /* Rows are independent of each other when dim is the last dimension, columns when it is not. */
    bool by_row = dim == index->ndim - 1, by_column = !by_row && w.row >= 16;
    int64_t shares = even_threads(exec, numel);
    by_row = by_row && rows >= shares;
    index_job job = {.exec = exec, .w = &w, .shares = shares, .by_row = by_row, .by_column = by_column};
    te_cpu_loop(exec, (int)shares, shares, 1, scatter_shares, &job);
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
