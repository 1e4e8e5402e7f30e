/* test_workers.c - loops that threads share: every entry is done once and before the loop returns, no two bodies run
 * under one thread's number, and a loop ends whatever the workers do. */
#include "failing_memory.h"
#include "kernels/cpu/workers.h"
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

enum { ENTRIES = 5000, THREADS = 5, MANY = 40, PIECES = 4 };

typedef struct marks {
    te_exec   *exec;
    int        threads, depth;
    int64_t    grain, n;
    atomic_int done[ENTRIES];
    atomic_int under[MANY]; /* bodies that run under the thread's number */
    atomic_int wrong;
} marks;

static void expect(marks *m, bool holds)
{
    if (!holds) atomic_fetch_add(&m->wrong, 1);
}

static void mark(void *context, int64_t first, int64_t end, int thread)
{
    marks *m = context;
    expect(m, thread >= 0 && thread < m->threads && first < end && end <= m->n && first % m->grain == 0);
    expect(m, atomic_fetch_add(&m->under[thread], 1) == 0);
    for (int64_t i = first; i < end; i++) atomic_fetch_add(&m->done[i], 1);
    atomic_fetch_sub(&m->under[thread], 1);
}

static void check_loop(marks *m, int threads, int64_t n, int64_t grain)
{
    for (int i = 0; i < ENTRIES; i++) atomic_store(&m->done[i], 0);
    atomic_store(&m->wrong, 0);
    m->threads = threads > 1 ? threads : 1;
    m->n = n;
    m->grain = grain;
    te_cpu_loop(m->exec, threads, n, grain, mark, m);
    int wrong = atomic_load(&m->wrong);
    for (int i = 0; i < ENTRIES; i++) wrong += atomic_load(&m->done[i]) != (i < n);
    CHECK_MSG(wrong == 0, "%d threads, %lld entries by %lld: %d wrong", threads, (long long)n, (long long)grain, wrong);
}

/* Loops of every kind right after each other, so that late workers meet the next ones. */
static void check_many_loops(te_exec *exec)
{
    static marks m;
    uint64_t seed = 7;
    m.exec = exec;
    for (int i = 0; i < 2000; i++) {
        int64_t n = test_random(&seed) % (i % 10 == 0 ? ENTRIES + 1 : 40);
        check_loop(&m, (int)(test_random(&seed) % (THREADS + 1)), n, 1 + test_random(&seed) % 30);
    }
}

/* More threads than one of them wakes, called asleep and awake, and ended in both states. */
static void check_many_threads(te_exec *exec)
{
    static marks m;
    m.exec = exec;
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < 10; i++) check_loop(&m, MANY - i * 3, 200 + i, 1);
        if (round % 2) te_cpu_workers_free(exec);
        else usleep(2000);
    }
}

static void mark_again(void *context, int64_t first, int64_t end, int thread)
{
    marks *outer = context;
    (void)thread;
    for (int64_t i = first; i < end; i++) {
        marks *inner = &outer[i];
        te_cpu_loop(inner->exec, THREADS, inner->n, inner->grain, mark, inner);
    }
}

/* A loop within a loop is done by the thread that meets it. */
static void check_nested(te_exec *exec)
{
    marks *m = calloc(PIECES, sizeof *m);
    if (!m) abort();
    for (int i = 0; i < PIECES; i++) m[i] = (marks){.exec = exec, .threads = 1, .grain = 7, .n = ENTRIES};
    te_cpu_loop(exec, THREADS, PIECES, 1, mark_again, m);
    for (int i = 0; i < PIECES; i++) {
        int missing = 0;
        for (int e = 0; e < ENTRIES; e++) missing += atomic_load(&m[i].done[e]) != 1;
        CHECK_MSG(missing == 0 && atomic_load(&m[i].wrong) == 0, "inner loop %d: %d entries wrong", i, missing);
    }
    free(m);
}

/* Where memory for workers fails, the loop is done all the same, and nothing remains. */
static void check_memory(void)
{
    for (int at = 0; at < THREADS + 2; at++) {
        static marks   m;
        failing_memory memory = {.countdown = at};
        te_mem         mem = {failing_memory_realloc, &memory};
        te_cpu_device  device = {.isa = TE_CPU_PORTABLE};
        te_exec        exec = {.mem = &mem, .device = &device, .threads = THREADS};
        m.exec = &exec;
        check_loop(&m, THREADS, 100, 3);
        te_cpu_workers_free(&exec);
        CHECK_MSG(memory.live == 0, "%zu bytes remain after failure %d", memory.live, at);
    }
}

#ifndef __SANITIZE_THREAD__
/* Threads are not there in a child of fork: it does everything itself, and can close what it has. */
static void check_fork(te_exec *exec)
{
    static marks m = {.exec = NULL};
    m.exec = exec;
    check_loop(&m, THREADS, 1000, 3);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        check_loop(&m, THREADS, 1000, 3);
        te_cpu_workers_free(exec);
        check_loop(&m, THREADS, 1000, 3); /* with threads of its own */
        te_cpu_workers_free(exec);
        _exit(test_failures != 0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    check_loop(&m, THREADS, 1000, 3);
}
#endif

int main(void)
{
    te_cpu_device device = {.isa = TE_CPU_PORTABLE};
    te_exec       exec = {.mem = &te_mem_libc, .device = &device, .threads = THREADS};
    te_cpu_workers_free(&exec); /* of none */
    check_many_loops(&exec);
    check_nested(&exec);
    te_cpu_workers_free(&exec);
    CHECK(device.workers == NULL);
    check_many_loops(&exec); /* started again */
    te_cpu_workers_free(&exec);
#ifndef __SANITIZE_THREAD__ /* it knows no threads in a child */
    check_fork(&exec);
    te_cpu_workers_free(&exec);
#endif
    exec.threads = MANY;
    check_many_threads(&exec);
    te_cpu_workers_free(&exec);
    check_memory();
    return TEST_END();
}
