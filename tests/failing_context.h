/* failing_context.h - contexts whose n-th allocation fails: a scenario is run for n = 0, 1 … until it gets by without
 * reaching allocation n.
 *
 *     failing_memory memory;
 *     te_context *ctx = failing_context_open(&memory, 1);
 *     … what the scenario needs …
 *     memory.countdown = n;
 *     … the scenario, which may fail …
 *     bool reached = failing_memory_stop(&memory);
 *     … what must be true then …
 *     failing_context_close(ctx, &memory, n);
 */
#ifndef TE_TEST_FAILING_CONTEXT_H
#define TE_TEST_FAILING_CONTEXT_H

#include "failing_memory.h"
#include "test.h"

#include "tetrain/te.h"

/* A context of so many threads on that memory, of which nothing fails so far. NULL where it cannot be opened. */
static inline te_context *failing_context_open(failing_memory *memory, int threads)
{
    te_context_options options = {
        .struct_size = sizeof options, .threads = threads, .realloc = failing_memory_realloc, .realloc_user = memory};
    *memory = (failing_memory){.countdown = -1};
    return te_context_open(&options);
}

/* Nothing fails from here on; whether something has. */
static inline bool failing_memory_stop(failing_memory *memory)
{
    bool reached = memory->countdown < 0;
    memory->countdown = -1;
    return reached;
}

/* Releases the context; with it all of its memory must be back. */
static inline void failing_context_close(te_context *ctx, failing_memory *memory, long n)
{
    te_context_release(ctx);
    CHECK_MSG(memory->live == 0, "allocation %ld: %zu bytes leaked", n, memory->live);
}

#endif
