/* workers.h - the threads that share the loops of the CPU's kernels.
 *
 * A loop over 0 … n - 1 is cut into pieces of `grain`, and threads take pieces as they become free: the caller, who
 * begins at once, and workers as they arrive. The caller waits for workers that are inside a piece and for nobody else.
 * So where another process has the second core, the caller does all the work at the speed of one thread, instead of
 * waiting at the end of every loop for a thread that does not run.
 *
 * Pieces follow from n and grain alone, and kernels make what a piece computes independent of who does it.
 */
#ifndef TE_KERNELS_CPU_WORKERS_H
#define TE_KERNELS_CPU_WORKERS_H

#include "cpu.h"

/* Entries first … end of the loop; `thread` is below `threads`, and no two bodies have the same at one time. */
typedef void te_cpu_body(void *context, int64_t first, int64_t end, int thread);

/* Runs body over 0 … n - 1 and returns when all is done. Workers are started when first needed; where none can be, and
 * in a loop within a loop, the caller does all. */
void te_cpu_loop(te_exec *exec, int threads, int64_t n, int64_t grain, te_cpu_body *body, void *context);

/* The grain by which each thread gets one piece. */
static inline int64_t te_cpu_even_grain(int64_t n, int threads)
{
    return threads > 1 ? (n + threads - 1) / threads : n;
}

/* Ends the threads. */
void te_cpu_workers_free(te_exec *exec);

#endif
