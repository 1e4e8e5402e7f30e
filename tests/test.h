/* test.h - checks for the C tests: a failed one prints where and what, and the program ends with 1 after all have
 * run. */
#ifndef TE_TEST_H
#define TE_TEST_H

#include "kernels/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_checks, test_failures;

/* For what computes expected values: loops over memory of its own, which sanitizers would make many times slower. */
#define TEST_UNWATCHED __attribute__((no_sanitize("address", "undefined")))

#define CHECK(condition) CHECK_MSG(condition, "%s", #condition)
#define CHECK_MSG(condition, ...)                                    \
    do {                                                             \
        test_checks++;                                               \
        if (!(condition) && ++test_failures <= 40) {                 \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);          \
            fprintf(stderr, __VA_ARGS__);                            \
            fputc('\n', stderr);                                     \
        }                                                            \
    } while (0)

#define TEST_END()                                                                      \
    (printf("%d checks, %d failed\n", test_checks, test_failures), test_failures ? 1 : 0)

static inline void *test_scratch(te_exec *exec, size_t bytes)
{
    void *p = NULL;
    (void)exec;
    return posix_memalign(&p, 64, bytes ? bytes : 64) == 0 ? p : NULL;
}

static inline void test_scratch_free(te_exec *exec, void *ptr)
{
    (void)exec;
    free(ptr);
}

/* A CPU device with plain scratch memory. */
static inline te_exec test_exec_open(int threads)
{
    te_exec exec = {.backend = &te_backend_cpu, .mem = &te_mem_libc, .threads = threads, .scratch = test_scratch,
                    .scratch_free = test_scratch_free};
    if (te_backend_cpu.device_open(&exec, 0) != TE_OK) abort();
    return exec;
}

static inline void test_exec_close(te_exec *exec) { exec->backend->device_close(exec); }

/* xorshift: the same numbers in every run. */
static inline uint32_t test_random(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *state = x;
    return (uint32_t)(x >> 32);
}

static inline double test_uniform(uint64_t *state, double low, double high)
{
    return low + (high - low) * (test_random(state) / 4294967296.0);
}

/* A contiguous view. */
static inline te_view test_view(void *data, te_dtype dtype, int ndim, const int64_t *shape)
{
    te_view v = {.data = data, .dtype = dtype, .ndim = ndim};
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        v.shape[i] = shape[i];
        v.stride[i] = stride;
        stride *= shape[i];
    }
    return v;
}

#endif
