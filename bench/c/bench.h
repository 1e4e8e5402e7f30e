/* bench.h - what the programs of this folder share: a clock, memory, and scratch as the engine's caching allocator gives it. Include
 * it first: it asks for POSIX's clock. */
#ifndef TE_BENCH_H
#define TE_BENCH_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Zeroed, so that its pages are there before anything is measured. */
static inline void *allocate(te_exec *exec, size_t bytes)
{
    void *p = te_cpu_memory_alloc(exec, bytes);
    if (!p) {
        fprintf(stderr, "out of memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(p, 0, bytes);
    return p;
}

/* Blocks are kept: new pages would take longer than what is measured. */
static struct {
    void  *block;
    size_t bytes;
    bool   taken;
} scratch_blocks[8];

static inline void *scratch(te_exec *exec, size_t bytes)
{
    for (size_t i = 0; i < sizeof scratch_blocks / sizeof scratch_blocks[0]; i++) {
        if (scratch_blocks[i].taken) continue;
        if (scratch_blocks[i].bytes < bytes) {
            te_cpu_memory_free(exec, scratch_blocks[i].block, scratch_blocks[i].bytes);
            scratch_blocks[i].block = allocate(exec, bytes);
            scratch_blocks[i].bytes = bytes;
        }
        scratch_blocks[i].taken = true;
        return scratch_blocks[i].block;
    }
    return NULL;
}

static inline void scratch_free(te_exec *exec, void *ptr)
{
    (void)exec;
    for (size_t i = 0; i < sizeof scratch_blocks / sizeof scratch_blocks[0]; i++)
        if (scratch_blocks[i].block == ptr) scratch_blocks[i].taken = false;
}

#endif
