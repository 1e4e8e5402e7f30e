/* integers.c - whole numbers drawn at random. */
#include "program_exec.h"
#include "workers.h"

enum { PIECE = 1 << 14 }; /* numbers */

typedef struct integers_job {
    te_exec           *exec;
    const te_integers *drawn;
    int64_t           *values;
    int64_t            n;
} integers_job;

static void draw_pieces(void *context, int64_t first, int64_t end, int thread)
{
    const integers_job *job = context;
    const te_blocks    *blocks = te_job_blocks(job->exec, false);
    (void)thread;
    for (int64_t at = first * PIECE; at < job->n && at < end * PIECE && !te_cpu_stopping(job->exec); at += PIECE)
        blocks->integers(job->values + at, job->drawn, (uint64_t)at,
                         (size_t)(job->n - at < PIECE ? job->n - at : PIECE));
}

te_status te_cpu_integers(te_exec *exec, int64_t *values, int64_t n, const te_integers *drawn)
{
    integers_job job = {exec, drawn, values, n};
    int64_t      pieces = (n + PIECE - 1) / PIECE;
    te_cpu_loop(exec, pieces > 1 ? exec->threads : 1, pieces, 1, draw_pieces, &job);
    return te_cpu_finish(exec, TE_OK);
}
