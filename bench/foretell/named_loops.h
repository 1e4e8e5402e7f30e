/* named_loops.h - included before the CPU's kernels by TE_FORETELL: their loops say where they are. */
#ifndef TE_BENCH_NAMED_LOOPS_H
#define TE_BENCH_NAMED_LOOPS_H

#include "kernels/cpu/workers.h"

void te_cpu_loop_named(te_exec *exec, int threads, int64_t n, int64_t grain, te_cpu_body *body, void *context,
                       const char *file, const char *name);

#define te_cpu_loop(exec, threads, n, grain, body, context)                                                            \
    te_cpu_loop_named(exec, threads, n, grain, body, context, __FILE__, #body)

#endif
