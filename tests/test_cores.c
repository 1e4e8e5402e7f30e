/* test_cores.c - threads are counted by what the process may use, not by what the machine has. */
#define _GNU_SOURCE /* sched_setaffinity */
#include "core/cores.h"
#include "test.h"

#include <sched.h>
#include <tetrain/te.h>

int main(void)
{
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0) abort();
    CHECK(te_cores() >= 1 && te_cores() <= CPU_COUNT(&all));
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(te_cores() == 1);
    te_context *ctx = te_context_open(NULL);
    CHECK(te_context_threads(ctx) == 1);
    te_context_set_threads(ctx, 3);
    CHECK(te_context_threads(ctx) == 3);
    te_context_set_threads(ctx, 0);
    CHECK(te_context_threads(ctx) == 1);
    te_context_release(ctx);
    return TEST_END();
}
