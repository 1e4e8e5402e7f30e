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
 * Every thread has a share of neighbouring pieces, the same in every loop of as many, so that rows stay in the cache of
 * one core from one kernel to the next. Who is through with its share takes from those of others.
 *
 * Between the loops of a training step pass some microseconds, and waking a thread takes tens of them; so who waits
 * first spins for a while, unless there are more threads than processors. A worker that no loop needs spins no longer
 * because others are called.
 *
 * Many are woken by each other: the caller wakes the first ones, and each of these some more.
 *
 * A scheduler may wake a worker on the caller's processor, where it waits for the caller's time slice to end, some
 * milliseconds; a worker that finds itself there moves away while there are processors enough.
 */
#include "workers.h"

#include "kernels/cores.h"
#include "kernels/float_mode.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

enum { SPIN_NANOSECONDS = 100000, PAUSES = 32, LINE = 64, WAKES = 8 };

/* Those whom a thread wakes: WAKES * index + 1 and on; NULL: not started. */
typedef struct wakes {
    _Atomic(struct worker *) of[WAKES];
} wakes;

typedef struct worker {
    struct te_cpu_workers *all;
    struct worker         *next;
    pthread_t              thread;
    pthread_mutex_t        mutex; /* of its sleep: woken together, they need not wait for each other */
    pthread_cond_t         called;
    atomic_bool            sleeps;
    int                    index; /* from 1 on; 0 is the caller */
    unsigned               seen;  /* the call it looked at last */
    int64_t                spins_until;
    wakes                  wakes;
} worker;

/* The pieces next … end - 1 of a thread. */
typedef struct share {
    _Alignas(LINE) atomic_llong next;
    int64_t                     end;
} share;

typedef struct te_cpu_workers {
    /* the job */
    te_cpu_body *body;
    void        *context;
    int64_t      n, grain;
    share       *shares; /* of all threads */
    bool         busy;   /* of the caller: a loop within a loop finds it set */

    _Alignas(LINE) atomic_uint calls;
    atomic_int                 threads, processor; /* the caller's */
    atomic_bool                open, spins, ends;
    _Alignas(LINE) atomic_int  inside;
    atomic_bool                caller_sleeps;
    pthread_mutex_t            mutex; /* of the caller's sleep */
    pthread_cond_t             left;

    int     n_workers, capacity; /* there are shares for as many threads */
    worker *workers;             /* the last one first */
    int     processors; /* that the process may use */
    int     forks;      /* as many as there were before: the threads are this process's */
    void   *block, *shares_block; /* what this and the shares lie in */
    wakes   wakes;                /* the caller's */
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

/* Spins until it holds, false when it is later than `end`. */
static bool spin_until(te_cpu_workers *all, bool (*holds)(te_cpu_workers *, unsigned), unsigned seen, int64_t end)
{
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (holds(all, seen)) return true;
            pause_briefly();
        }
    } while (atomic_load_explicit(&all->spins, memory_order_relaxed) && nanoseconds() < end);
    return false;
}

static void wait_for_call(te_cpu_workers *all, worker *w)
{
    if (!spin_until(all, was_called, w->seen, w->spins_until)) {
        pthread_mutex_lock(&w->mutex);
        atomic_store(&w->sleeps, true);
        while (!was_called(all, w->seen)) pthread_cond_wait(&w->called, &w->mutex);
        atomic_store(&w->sleeps, false);
        pthread_mutex_unlock(&w->mutex);
    }
    w->seen = atomic_load(&all->calls);
}

static void wake_one(worker *w)
{
    if (!atomic_load(&w->sleeps)) return;
    pthread_mutex_lock(&w->mutex);
    pthread_cond_signal(&w->called);
    pthread_mutex_unlock(&w->mutex);
}

/* Wakes those of the first `threads` that sleep. It takes a microsecond or more for each, so all threads do a part. */
static void wake(wakes *mine, int threads)
{
    for (int i = 0; i < WAKES; i++) {
        worker *w = atomic_load_explicit(&mine->of[i], memory_order_acquire);
        if (w && w->index < threads) wake_one(w);
    }
}

static void call_workers(te_cpu_workers *all, int threads)
{
    atomic_fetch_add(&all->calls, 1);
    wake(&all->wakes, threads);
}

static void wait_until_left(te_cpu_workers *all)
{
    if (all_left(all, 0) || spin_until(all, all_left, 0, nanoseconds() + SPIN_NANOSECONDS)) return;
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

static void run_piece(te_cpu_workers *all, int64_t piece, int thread)
{
    int64_t first = piece * all->grain, left = all->n - first;
    all->body(all->context, first, first + (left < all->grain ? left : all->grain), thread);
}

static void take_pieces(te_cpu_workers *all, int thread)
{
    int threads = atomic_load_explicit(&all->threads, memory_order_relaxed);
    for (int i = 0; i < threads; i++) {
        share *s = &all->shares[(thread + i) % threads];
        while (atomic_load_explicit(&s->next, memory_order_relaxed) < s->end) {
            int64_t piece = atomic_fetch_add(&s->next, 1);
            if (piece < s->end) run_piece(all, piece, thread);
        }
    }
}

static void keep_off_caller(te_cpu_workers *all)
{
    int processor = atomic_load_explicit(&all->processor, memory_order_relaxed);
    if (processor < 0 || processor != te_cores_current()) return;
    if (atomic_load_explicit(&all->spins, memory_order_relaxed)) te_cores_leave(processor);
}

static void *work(void *argument)
{
    worker         *w = argument;
    te_cpu_workers *all = w->all;
    te_cores_bind(w->index);
    te_float_mode_begin(); /* a thread starts in the mode of the one that made it */
    for (;;) {
        wait_for_call(all, w);
        wake(&w->wakes, atomic_load(&all->threads));
        if (atomic_load(&all->ends)) return NULL;
        keep_off_caller(all);
        atomic_fetch_add(&all->inside, 1);
        if (atomic_load(&all->open) && w->index < atomic_load(&all->threads)) take_pieces(all, w->index);
        leave(all);
        bool wanted = w->index < atomic_load(&all->threads); /* were it too late this time */
        if (wanted) w->spins_until = nanoseconds() + SPIN_NANOSECONDS;
    }
}

/* --- the threads -------------------------------------------------------------------------------------------------- */

/* size bytes at a multiple of LINE within *block; NULL when there is no memory. */
static void *lines_new(const te_mem *mem, size_t size, void **block)
{
    *block = te_mem_zalloc(mem, size + LINE);
    return *block ? (void *)(((uintptr_t)*block + LINE - 1) & ~(uintptr_t)(LINE - 1)) : NULL;
}

/* Threads are not there in a child of fork, where the caller does everything and nobody is waited for. */
static bool are_here(const te_cpu_workers *all) { return all->forks == te_cores_forks(); }

static te_cpu_workers *workers_new(const te_mem *mem)
{
    void           *block;
    te_cpu_workers *all = lines_new(mem, sizeof *all, &block);
    if (!all) return NULL;
    all->block = block;
    all->processors = te_cores();
    all->forks = te_cores_forks();
    if (pthread_mutex_init(&all->mutex, NULL) == 0) {
        if (pthread_cond_init(&all->left, NULL) == 0) return all;
        pthread_mutex_destroy(&all->mutex);
    }
    te_mem_free(mem, block, sizeof *all + LINE);
    return NULL;
}

/* Signals are the host's: its handlers must not run on these threads. */
static bool start_thread(worker *w)
{
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    bool started = pthread_create(&w->thread, NULL, work, w) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

static wakes *wakes_of(te_cpu_workers *all, int index)
{
    worker *w = all->workers;
    while (w && w->index != index) w = w->next;
    return w ? &w->wakes : &all->wakes;
}

static bool start_worker(te_cpu_workers *all, const te_mem *mem)
{
    worker *w = te_mem_zalloc(mem, sizeof *w);
    if (!w) return false;
    *w = (worker){.all = all, .next = all->workers, .index = all->n_workers + 1, .seen = atomic_load(&all->calls)};
    bool waits = pthread_mutex_init(&w->mutex, NULL) == 0;
    if (waits && pthread_cond_init(&w->called, NULL) == 0) {
        if (start_thread(w)) {
            all->workers = w;
            all->n_workers++;
            atomic_store(&wakes_of(all, (w->index - 1) / WAKES)->of[(w->index - 1) % WAKES], w);
            return true;
        }
        pthread_cond_destroy(&w->called);
    }
    if (waits) pthread_mutex_destroy(&w->mutex);
    te_mem_free(mem, w, sizeof *w);
    return false;
}

/* Room for the shares of as many threads; nobody reads them while no job is open. */
static bool reserve_shares(te_cpu_workers *all, const te_mem *mem, int threads)
{
    if (threads <= all->capacity) return true;
    void  *block;
    share *shares = lines_new(mem, (size_t)threads * sizeof *shares, &block);
    if (!shares) return false;
    te_mem_free(mem, all->shares_block, (size_t)all->capacity * sizeof *shares + LINE);
    all->shares = shares;
    all->shares_block = block;
    all->capacity = threads;
    return true;
}

void te_cpu_workers_free(te_exec *exec)
{
    te_cpu_workers *all = te_cpu(exec)->workers;
    if (!all) return;
    bool here = are_here(all);
    atomic_store(&all->ends, true);
    atomic_fetch_add(&all->calls, 1);
    for (worker *w = all->workers; w && here; w = w->next) wake_one(w); /* those who end wake nobody */
    for (worker *w = all->workers; w && here; w = w->next) pthread_join(w->thread, NULL);
    for (worker *w = all->workers, *next; w; w = next) {
        next = w->next;
        if (here) pthread_cond_destroy(&w->called);
        if (here) pthread_mutex_destroy(&w->mutex);
        te_mem_free(exec->mem, w, sizeof *w);
    }
    if (here) pthread_cond_destroy(&all->left);
    if (here) pthread_mutex_destroy(&all->mutex);
    te_mem_free(exec->mem, all->shares_block, (size_t)all->capacity * sizeof *all->shares + LINE);
    te_mem_free(exec->mem, all->block, sizeof *all + LINE);
    te_cpu(exec)->workers = NULL;
}

/* NULL: the caller is alone. */
static te_cpu_workers *workers_for(te_exec *exec, int threads)
{
    te_cpu_device *device = te_cpu(exec);
    if (!device->workers) device->workers = workers_new(exec->mem);
    te_cpu_workers *all = device->workers;
    if (!all || all->busy || !are_here(all) || !reserve_shares(all, exec->mem, threads)) return NULL;
    while (all->n_workers < threads - 1 && start_worker(all, exec->mem)) continue;
    return all->n_workers ? all : NULL;
}

/* Of as many pieces, in shares of the threads. */
static void open_job(te_cpu_workers *all, int64_t pieces, int threads)
{
    all->busy = true;
    atomic_store(&all->threads, threads);
    for (int i = 0; i < threads; i++) {
        int64_t each = pieces / threads, more = pieces % threads;
        atomic_store_explicit(&all->shares[i].next, each * i + (i < more ? i : more), memory_order_relaxed);
        all->shares[i].end = each * (i + 1) + (i < more ? i + 1 : more);
    }
    atomic_store_explicit(&all->spins, threads <= all->processors, memory_order_relaxed);
    atomic_store_explicit(&all->processor, te_cores_current(), memory_order_relaxed);
    atomic_store(&all->open, true);
}

void te_cpu_loop(te_exec *exec, int threads, int64_t n, int64_t grain, te_cpu_body *body, void *context)
{
    if (n < 1) return;
    int64_t pieces = grain > 0 ? (n + grain - 1) / grain : n;
    if (threads > pieces) threads = (int)pieces;
    te_cpu_workers *all = threads > 1 ? workers_for(exec, threads) : NULL;
    if (!all) {
        body(context, 0, n, 0);
        return;
    }
    all->body = body;
    all->context = context;
    all->n = n;
    all->grain = grain > 0 ? grain : 1;
    open_job(all, pieces, threads);
    call_workers(all, threads);
    take_pieces(all, 0);
    atomic_store(&all->open, false);
    wait_until_left(all);
    all->busy = false;
}
