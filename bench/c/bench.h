/* bench.h - what the programs of this folder share: their arguments, a clock, memory, and scratch as the engine's
 * caching allocator gives it. Include it first: it asks for POSIX's clock. */
#ifndef TE_BENCH_H
#define TE_BENCH_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The arguments of main, which stand by their places: one that is wrong ends the program with one line. */
typedef struct arguments {
    int    n;
    char **text;
} arguments;

static inline void refuse(const arguments *a, const char *name, const char *given, const char *expected)
{
    const char *slash = strrchr(a->text[0], '/');
    fprintf(stderr, "%s: %s: expected %s, got \"%s\"\n", slash ? slash + 1 : a->text[0], name, expected, given);
    exit(2);
}

static inline void at_most(const arguments *a, int n)
{
    if (a->n - 1 > n) refuse(a, "arguments", a->text[n + 1], "no more");
}

static inline double number_argument(const arguments *a, int at, const char *name, double otherwise, double least)
{
    char  *end, expected[64];
    double value = at < a->n ? strtod(a->text[at], &end) : otherwise;
    snprintf(expected, sizeof expected, "a number from %g on", least);
    if (at < a->n && (end == a->text[at] || *end || !isfinite(value) || value < least))
        refuse(a, name, a->text[at], expected);
    return value;
}

static inline int64_t whole_argument(const arguments *a, int at, const char *name, int64_t otherwise, int64_t least,
                                     int64_t most)
{
    char     *end, expected[64];
    long long value = at < a->n ? strtoll(a->text[at], &end, 10) : otherwise;
    snprintf(expected, sizeof expected, "a whole number from %lld to %lld", (long long)least, (long long)most);
    if (at < a->n && (end == a->text[at] || *end || value < least || value > most))
        refuse(a, name, a->text[at], expected);
    return value;
}

/* The place of the argument among `choices`, which end with NULL; -1 where it is absent. */
static inline int choice_argument(const arguments *a, int at, const char *name, const char *const *choices)
{
    char   expected[128] = "";
    size_t used = 0;
    for (int i = 0; at < a->n && choices[i]; i++) {
        if (strcmp(choices[i], a->text[at]) == 0) return i;
        used += (size_t)snprintf(expected + used, sizeof expected - used, "%s%s", i ? " or " : "", choices[i]);
    }
    if (at < a->n) refuse(a, name, a->text[at], expected);
    return -1;
}

enum { MOST_THREADS = 1024, MOST_EXTENT = 1 << 30 };

static inline int threads_argument(const arguments *a, int otherwise)
{
    return (int)whole_argument(a, 1, "threads", otherwise, 1, MOST_THREADS);
}

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
