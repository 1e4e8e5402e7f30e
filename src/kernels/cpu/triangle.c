/* triangle.c - matrices with zeros on one side of a diagonal. */
#include "copy.h"
#include "workers.h"

enum { PARALLEL_FROM = 1 << 15 /* elements */ };

typedef struct triangle {
    te_exec              *exec;
    const te_copy_blocks *blocks;
    const te_view        *dst, *src;
    int64_t               diagonal;
    bool                  upper;
} triangle;

static void copy_rows(void *context, int64_t first, int64_t end, int thread)
{
    const triangle *t = context;
    int             last = t->dst->ndim - 1, log2_size = te_dtype_log2_size(t->dst->dtype);
    int64_t         columns = t->dst->shape[last], step = t->src->stride[last];
    (void)thread;
    for (int64_t row = first; row < end && !te_cpu_stopping(t->exec); row++) {
        int64_t at = row % t->dst->shape[last - 1] + t->diagonal + (t->upper ? 0 : 1); /* where the kept ones change */
        if (at < 0) at = 0;
        if (at > columns) at = columns;
        char       *dst = te_element(t->dst->data, t->dst->dtype, row * columns);
        const char *src = te_element(t->src->data, t->src->dtype, te_offset_of(t->src, last, row));
        int64_t     from = t->upper ? at : 0, n = t->upper ? columns - at : at;
        memset(dst + ((t->upper ? 0 : at) << log2_size), 0, (size_t)(columns - n) << log2_size);
        src += from * step * ((int64_t)1 << log2_size);
        t->blocks->move[log2_size](dst + (from << log2_size), 1, src, step, n);
    }
}

te_status te_cpu_triangle(te_exec *exec, const te_view *dst, const te_view *src, int64_t diagonal, bool upper)
{
    triangle t = {exec, te_copy_blocks_of(exec), dst, src, diagonal, upper};
    int64_t  numel = te_view_numel(dst), rows = numel ? numel / dst->shape[dst->ndim - 1] : 0;
    int      threads = numel < PARALLEL_FROM ? 1 : exec->threads;
    te_cpu_loop(exec, threads, rows, te_cpu_even_grain(rows, threads), copy_rows, &t);
    return te_cpu_finish(exec, TE_OK);
}
