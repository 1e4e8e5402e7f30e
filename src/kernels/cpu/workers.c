/* workers.c - see workers.h.
 *
 *      caller                                        worker
 *        writes the job, opens it, calls               sees the call, or is woken
 *        takes pieces until there are none             enters; where the job is open, takes pieces
 *        closes the job                                leaves
 *        waits until nobody is inside
 *
 * The job may be written while it is closed and nobody is inside. A worker enters before it looks whether the job is
 * open, and the caller closes before it looks whether somebody is inside; in one order of all four (they are
 * sequentially consistent) one of the two sees the other. The same holds between who goes to sleep and who wakes.
 *
 * Between the loops of a training step pass some microseconds, and waking a thread takes tens of them; so who waits first
 * spins for a while, unless there are more threads than processors.
 */
#include "workers.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NANOSECONDS = 100000, PAUSES = 32 };

typedef struct worker {
    struct te_cpu_workers *all;
    struct worker         *next;
    pthread_t              thread;
    int                    index; /* from 1 on; 0 is the caller */
    unsigned               seen;  /* the call it answered last */
} worker;

typedef struct te_cpu_workers {
    /* the job */
    te_cpu_body *body;
    void        *context;
    int64_t      n, grain;
    int          threads;
    bool         busy; /* of the caller: a loop within a loop finds it set */
    atomic_bool  spins;

    _Alignas(64) atomic_llong piece; /* the next one */
    _Alignas(64) atomic_bool  open;
    atomic_uint               calls;
    atomic_bool               ends;
    _Alignas(64) atomic_int   inside;

    /* sleeping */
    _Alignas(64) atomic_int sleepers;
    atomic_bool             caller_sleeps;
    pthread_mutex_t         mutex;
    pthread_cond_t          called, left;

    int     n_workers;
    worker *workers;
    long    processors;
    void   *block; /* what this lies in */
    size_t  bytes;
} te_cpu_workers;

/* --- waiting ------------------------------------------------------------------------------------------------------ */

static int64_t nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool was_called(te_cpu_workers *all, unsigned seen) { return atomic_load(&all->calls) != seen; }

static bool all_left(te_cpu_workers *all, unsigned unused)
{
    (void)unused;
    return atomic_load(&all->inside) == 0;
}

/* Spins until it holds, false when that takes long. */
static bool spin_until(te_cpu_workers *all, bool (*holds)(te_cpu_workers *, unsigned), unsigned seen)
{
    if (holds(all, seen)) return true;
    if (!atomic_load_explicit(&all->spins, memory_order_relaxed)) return false;
    int64_t end = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (holds(all, seen)) return true;
            pause_briefly();
        }
    } while (nanoseconds() < end);
    return false;
}

static void wait_for_call(te_cpu_workers *all, worker *w)
{
    if (!spin_until(all, was_called, w->seen)) {
        pthread_mutex_lock(&all->mutex);
        atomic_fetch_add(&all->sleepers, 1);
        while (!was_called(all, w->seen)) pthread_cond_wait(&all->called, &all->mutex);
        atomic_fetch_sub(&all->sleepers, 1);
        pthread_mutex_unlock(&all->mutex);
    }
    w->seen = atomic_load(&all->calls);
}

static void call_workers(te_cpu_workers *all)
{
    atomic_fetch_add(&all->calls, 1);
    if (atomic_load(&all->sleepers) == 0) return;
    pthread_mutex_lock(&all->mutex);
    pthread_cond_broadcast(&all->called);
    pthread_mutex_unlock(&all->mutex);
}

static void wait_until_left(te_cpu_workers *all)
{
    if (spin_until(all, all_left, 0)) return;
    pthread_mutex_lock(&all->mutex);
    atomic_store(&all->caller_sleeps, true);
    while (!all_left(all, 0)) pthread_cond_wait(&all->left, &all->mutex);
    atomic_store(&all->caller_sleeps, false);
    pthread_mutex_unlock(&all->mutex);
}

static void leave(te_cpu_workers *all)
{
    if (atomic_fetch_sub(&all->inside, 1) != 1 || !atomic_load(&all->caller_sleeps)) return;
    pthread_mutex_lock(&all->mutex);
    pthread_cond_signal(&all->left);
    pthread_mutex_unlock(&all->mutex);
}

/* --- working ------------------------------------------------------------------------------------------------------ */

static void take_pieces(te_cpu_workers *all, int thread)
{
    for (;;) {
        int64_t first = atomic_fetch_add(&all->piece, 1) * all->grain;
        if (first >= all->n) return;
        int64_t left = all->n - first;
        all->body(all->context, first, first + (left < all->grain ? left : all->grain), thread);
    }
}

static void *work(void *argument)
{
    worker         *w = argument;
    te_cpu_workers *all = w->all;
    for (;;) {
        wait_for_call(all, w);
        if (atomic_load(&all->ends)) return NULL;
        atomic_fetch_add(&all->inside, 1);
        if (atomic_load(&all->open) && w->index < all->threads) take_pieces(all, w->index);
        leave(all);
    }
}

/* --- the threads -------------------------------------------------------------------------------------------------- */

static te_cpu_workers *workers_new(const te_mem *mem)
{
    size_t bytes = sizeof(te_cpu_workers) + 63;
    char  *block = te_mem_zalloc(mem, bytes);
    if (!block) return NULL;
    te_cpu_workers *all = (te_cpu_workers *)(((uintptr_t)block + 63) & ~(uintptr_t)63);
    all->block = block;
    all->bytes = bytes;
    all->processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (pthread_mutex_init(&all->mutex, NULL) != 0) goto no_mutex;
    if (pthread_cond_init(&all->called, NULL) != 0) goto no_called;
    if (pthread_cond_init(&all->left, NULL) != 0) goto no_left;
    return all;
no_left:
    pthread_cond_destroy(&all->called);
no_called:
    pthread_mutex_destroy(&all->mutex);
no_mutex:
    te_mem_free(mem, block, bytes);
    return NULL;
}

/* Signals are the host's: its handlers must not run on these threads. */
static bool start_worker(te_cpu_workers *all, const te_mem *mem)
{
    worker *w = te_mem_zalloc(mem, sizeof *w);
    if (!w) return false;
    *w = (worker){.all = all, .next = all->workers, .index = all->n_workers + 1, .seen = atomic_load(&all->calls)};
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    bool started = pthread_create(&w->thread, NULL, work, w) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started) {
        te_mem_free(mem, w, sizeof *w);
        return false;
    }
    all->workers = w;
    all->n_workers++;
    return true;
}

void te_cpu_workers_free(te_exec *exec)
{
    te_cpu_workers *all = te_cpu(exec)->workers;
    if (!all) return;
    atomic_store(&all->ends, true);
    call_workers(all);
    for (worker *w = all->workers, *next; w; w = next) {
        next = w->next;
        pthread_join(w->thread, NULL);
        te_mem_free(exec->mem, w, sizeof *w);
    }
    pthread_cond_destroy(&all->left);
    pthread_cond_destroy(&all->called);
    pthread_mutex_destroy(&all->mutex);
    te_mem_free(exec->mem, all->block, all->bytes);
    te_cpu(exec)->workers = NULL;
}

/* NULL: the caller is alone. */
static te_cpu_workers *workers_for(te_exec *exec, int threads)
{
    te_cpu_device *device = te_cpu(exec);
    if (!device->workers) device->workers = workers_new(exec->mem);
    te_cpu_workers *all = device->workers;
    if (!all || all->busy) return NULL;
    while (all->n_workers < threads - 1 && start_worker(all, exec->mem)) continue;
    return all->n_workers ? all : NULL;
}

void te_cpu_loop(te_exec *exec, int threads, int64_t n, int64_t grain, te_cpu_body *body, void *context)
{
    if (grain < 1) grain = 1;
    te_cpu_workers *all = threads > 1 && n > grain ? workers_for(exec, threads) : NULL;
    if (!all) {
        if (n > 0) body(context, 0, n, 0);
        return;
    }
    all->body = body;
    all->context = context;
    all->n = n;
    all->grain = grain;
    all->threads = threads;
    all->busy = true;
    atomic_store_explicit(&all->spins, threads <= all->processors, memory_order_relaxed);
    atomic_store(&all->piece, 0);
    atomic_store(&all->open, true);
    call_workers(all);
    take_pieces(all, 0);
    atomic_store(&all->open, false);
    wait_until_left(all);
    all->busy = false;
}
