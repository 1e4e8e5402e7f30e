/* test_cores.c - threads are counted by what the process may use, not by what the machine has. */
#define _GNU_SOURCE /* sched_setaffinity */
#include "kernels/cores.h"
#include "test.h"

#include <sched.h>
#include <tetrain/te.h>

/* A thread goes elsewhere when told to leave its processor, and may run where it might before. */
static void check_leaving(const cpu_set_t *all)
{
    cpu_set_t after;
    int       moved = 0, tries = 20;
    for (int i = 0; i < tries; i++) {
        int here = te_cores_current();
        te_cores_leave(here);
        moved += te_cores_current() != here;
        CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(all, &after));
    }
    if (CPU_COUNT(all) > 1)
        CHECK_MSG(moved > 0, "%d of %d times", moved, tries); /* the system may move it back */
    else
        CHECK(moved == 0);
    te_cores_leave(-1);
    te_cores_leave(CPU_SETSIZE);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(all, &after));
}

/* Where OMP_NUM_THREADS is a number, or a list of them, its first one; otherwise the processors. */
static void check_wanted(void)
{
    static const struct {
        const char *asked;
        int         threads; /* 0: the processors */
    } cases[] = {{"1", 1}, {"7", 7}, {" 3 ", 3}, {"5,2", 5}, {"4 , 2", 4}, {"99999", 1024},
                 {"99999999999999999999", 1024}, {"", 0}, {"0", 0}, {"-2", 0}, {"many", 0}, {"2x", 0}, {"2x,3", 0},
                 {",2", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setenv("OMP_NUM_THREADS", cases[i].asked, 1);
        int threads = cases[i].threads ? cases[i].threads : te_cores();
        CHECK_MSG(te_cores_wanted() == threads, "\"%s\": %d threads", cases[i].asked, te_cores_wanted());
        te_context *ctx = te_context_open(NULL);
        CHECK(te_context_threads(ctx) == threads);
        te_context_release(ctx);
    }
    unsetenv("OMP_NUM_THREADS");
    CHECK(te_cores_wanted() == te_cores());
}

int main(void)
{
    cpu_set_t all, one;
    if (sched_getaffinity(0, sizeof all, &all) != 0) abort();
    check_leaving(&all);
    check_wanted();
    CHECK(te_cores() >= 1 && te_cores() <= CPU_COUNT(&all));
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(te_cores() == 1);
    check_leaving(&one);
    te_context *ctx = te_context_open(NULL);
    CHECK(te_context_threads(ctx) == 1);
    te_context_set_threads(ctx, 3);
    CHECK(te_context_threads(ctx) == 3);
    te_context_set_threads(ctx, 0);
    CHECK(te_context_threads(ctx) == 1);
    te_context_release(ctx);
    return TEST_END();
}
