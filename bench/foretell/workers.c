/* workers.c - what a machine of many cores would take, foretold on one core (TE_FORETELL; see bench/README.md).
 *
 * Stands in for src/kernels/cpu/workers.c. One thread plays all: each has a clock, and whose clock is earliest takes
 * the next piece, of its own share first, as workers do. The piece really runs, and its processor time goes on that
 * clock. A loop so takes until the last clock, and what calling that many threads costs. CLOCK_MONOTONIC is replaced by
 * the sum of such loops and of what runs between them, so every bench prints foretold times. Not foretold: that cores
 * share the bandwidth of memory and slow each other's clocks down, and what is nearer in a core's cache.
 *
 * At the end loops are listed on standard error, those first that lose most; without the first FORETELL_SKIP of them,
 * a number in the environment, which warm up. */
#define _GNU_SOURCE /* syscall */
#include "named_loops.h"

#undef te_cpu_loop

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_THREADS = 1024, MOST_ROWS = 512 };

/* What a loop costs beside its pieces, an assumption: a line that goes to every core and comes back changed. */
enum { LOOP_NANOSECONDS = 500, THREAD_NANOSECONDS = 100 };

typedef struct row {
    const char *file, *body;
    int64_t     n, pieces, calls;
    int         threads, size; /* half the logarithm of a call's work */
    double      before, work, last, cost; /* nanoseconds: since the last loop, of all pieces, the last clock, calling */
} row;

static struct {
    row     rows[MOST_ROWS];
    int     n_rows;
    int     asked; /* threads, of the context */
    int64_t skip;  /* so many loops more */
    bool    busy;
    int64_t ended;      /* when the last loop did */
    int64_t saved;      /* by all loops: real less foretold time */
    int64_t timer_cost; /* of reading the clock */
} loops;

static int64_t processor_time(void)
{
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* In place of the C library's. */
int clock_gettime(clockid_t clock, struct timespec *t)
{
    if (clock != CLOCK_MONOTONIC) return (int)syscall(SYS_clock_gettime, clock, t);
    int64_t now = processor_time() - loops.saved;
    t->tv_sec = now / 1000000000;
    t->tv_nsec = now % 1000000000;
    return 0;
}

static void list_loops(void);

static void begin(void)
{
    int64_t start = processor_time();
    for (int i = 0; i < 1000; i++) (void)processor_time();
    loops.ended = processor_time();
    loops.timer_cost = (loops.ended - start) / 1001;
    const char *skip = getenv("FORETELL_SKIP");
    loops.skip = skip ? atoll(skip) : 0;
    atexit(list_loops);
}

static row *row_of(const row *like)
{
    for (int i = 0; i < loops.n_rows; i++) {
        row *r = &loops.rows[i];
        bool same = r->body == like->body && r->file == like->file && r->n == like->n;
        if (same && r->threads == like->threads && r->size == like->size) return r;
    }
    if (loops.n_rows == MOST_ROWS) return &loops.rows[MOST_ROWS - 1];
    loops.rows[loops.n_rows] = *like;
    return &loops.rows[loops.n_rows++];
}

/* All pieces, as if by so many threads; the last clock, and the sum of all in *work. */
static int64_t play(int threads, int64_t n, int64_t grain, te_cpu_body *body, void *context, int64_t *work)
{
    static int64_t clocks[MOST_THREADS], next[MOST_THREADS], end[MOST_THREADS];
    int64_t        pieces = (n + grain - 1) / grain, last = 0;
    for (int i = 0; i < threads; i++) {
        int64_t each = pieces / threads, more = pieces % threads;
        clocks[i] = 0;
        next[i] = each * i + (i < more ? i : more);
        end[i] = each * (i + 1) + (i < more ? i + 1 : more);
    }
    for (int64_t left = pieces; left > 0; left--) {
        int thread = 0;
        for (int i = 1; i < threads; i++)
            if (clocks[i] < clocks[thread]) thread = i;
        int from = thread;
        while (next[from] == end[from]) from = (from + 1) % threads;
        int64_t first = next[from]++ * grain, start = processor_time();
        body(context, first, n - first < grain ? n : first + grain, thread);
        int64_t took = processor_time() - start - loops.timer_cost;
        if (took < 0) took = 0;
        *work += took;
        clocks[thread] += took;
        if (clocks[thread] > last) last = clocks[thread];
    }
    return last;
}

void te_cpu_loop_named(te_exec *exec, int threads, int64_t n, int64_t grain, te_cpu_body *body, void *context,
                       const char *file, const char *name)
{
    if (n < 1) return;
    if (!loops.timer_cost) begin();
    if (grain < 1) grain = 1;
    int64_t pieces = (n + grain - 1) / grain;
    if (threads > pieces) threads = (int)pieces;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (loops.busy || threads < 1) threads = 1;
    if (loops.busy) { /* part of the loop that it is in */
        body(context, 0, n, 0);
        return;
    }
    loops.busy = true;
    loops.asked = exec->threads > 1 ? exec->threads : 1;
    int64_t start = processor_time(), work = 0;
    int64_t last = threads > 1 ? play(threads, n, grain, body, context, &work) : 0;
    if (threads == 1) {
        body(context, 0, n, 0);
        work = last = processor_time() - start;
    }
    int64_t cost = threads > 1 ? LOOP_NANOSECONDS + THREAD_NANOSECONDS * threads : 0;
    int     size = (64 - __builtin_clzll((unsigned long long)work | 1)) / 2;
    static row skipped;
    row        like = {.file = file, .body = name, .n = n, .threads = threads, .size = size};
    row       *r = loops.skip-- > 0 ? &skipped : row_of(&like);
    r->calls++;
    r->pieces = threads > 1 ? pieces : 1;
    r->before += (double)(start - loops.ended);
    r->work += (double)work;
    r->last += (double)last;
    r->cost += (double)cost;
    loops.ended = processor_time();
    loops.saved += loops.ended - start - last - cost;
    loops.busy = false;
}

void te_cpu_loop(te_exec *exec, int threads, int64_t n, int64_t grain, te_cpu_body *body, void *context)
{
    te_cpu_loop_named(exec, threads, n, grain, body, context, "", "");
}

void te_cpu_workers_free(te_exec *exec) { (void)exec; }

/* --- the list ----------------------------------------------------------------------------------------------------- */

/* Time over what as many even threads as were asked for would take. */
static double lost(const row *r) { return r->before + r->last + r->cost - r->work / loops.asked; }

static int by_loss(const void *a, const void *b)
{
    double x = lost(a), y = lost(b);
    return (x < y) - (x > y);
}

static void list_loops(void)
{
    row sum = {0};
    qsort(loops.rows, (size_t)loops.n_rows, sizeof *loops.rows, by_loss);
    fprintf(stderr, "%-22s %-18s %9s %7s %4s %7s | ms: %9s %9s %9s %9s %9s %7s\n", "file", "loop", "n", "pieces", "thr",
            "calls", "before", "work", "last", "calling", "lost", "speedup");
    for (int i = 0; i < loops.n_rows; i++) {
        const row  *r = &loops.rows[i];
        const char *slash = strrchr(r->file, '/');
        sum.before += r->before, sum.work += r->work, sum.last += r->last, sum.cost += r->cost, sum.calls += r->calls;
        fprintf(stderr, "%-22s %-18s %9lld %7lld %4d %7lld |     %9.3f %9.3f %9.3f %9.3f %9.3f %7.2f\n",
                slash ? slash + 1 : r->file, r->body, (long long)r->n, (long long)r->pieces, r->threads,
                (long long)r->calls, r->before * 1e-6, r->work * 1e-6, r->last * 1e-6, r->cost * 1e-6, lost(r) * 1e-6,
                r->work / (r->last + r->cost));
    }
    fprintf(stderr, "all: %lld loops, between them %.3f ms, work %.3f, last clocks %.3f, calling %.3f\n",
            (long long)sum.calls, sum.before * 1e-6, sum.work * 1e-6, sum.last * 1e-6, sum.cost * 1e-6);
}
