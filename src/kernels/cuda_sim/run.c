/* run.c - blocks one after the other, their threads as fibers.
 *
 * The threads of a warp run until each of them waits or has returned; lanes that wait for each other go on as soon as
 * all of their mask are there. When every thread of the block waits at the barrier or has returned, the barrier opens.
 * A thread that never waits borrows a stack and gives it back, so most kernels need one stack. The memory of the stacks
 * is kept for the next launch: most launches are of a few elements, and would spend their time on fresh pages.
 *
 * Blocks, warps and lanes come by number, and a warp goes as far as it can: a lane that waits gives way to the next one
 * itself, and one that has returned begins the next one. Under TE_SIM_STRICT they come in another order, each from the
 * scheduler, and warps take turns at every wait: what a missing barrier or an order of blocks decides has other results
 * then. So has what reads a copy to shared memory (te_sim_send) before its thread has waited for it.
 */
#include "run.h"

#include "abi.h"
#include "cuda_sim.h"
#include "fiber.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Numbers below 2^n are visited in the order of 0, 1, 2 … with some of their bits turned. */
typedef struct order {
    bool     strict, shuffled;
    uint64_t state; /* of the generator */
} order;

/* A few cache lines more than a power of two, so that the tops of stacks lie in different sets of the cache. */
enum { MAX_THREADS = 1024, WARP = 32, STACK_BYTES = (256 << 10) + 9 * 64 };

typedef struct thread {
    te_fiber fiber;
    int      stack; /* where it has begun */
    unsigned mask;  /* of the exchange it waits for */
    unsigned round; /* exchanges it took part in */
    unsigned place[3];
} thread;

/* Lanes are bits. Those that are in none of the sets have returned. */
typedef struct warp {
    unsigned           ready, exchanging, at_barrier;
    unsigned           fresh;       /* of those that are ready: have not begun */
    unsigned           present;     /* all that the block has */
    unsigned           mask, round; /* of the first that is exchanging */
    bool               mixed;       /* others have other ones */
    unsigned long long values[2][WARP]; /* by the parity of the round */
} warp;

typedef struct launch {
    te_sim_state         state; /* first: the kernel gives it back to us */
    const te_sim_kernel *kernel;
    void *const         *params;
    te_fiber             scheduler;
    thread              *threads;
    warp                *warps;
    int                  n_threads, n_warps, current;
    order                order;
    char                *stacks;
    int                 *free_stacks, n_free, n_stacks;
} launch;

/* The fiber that is about to start has no other way to know its launch. */
static _Thread_local launch *starting;
static void fiber_main(void);

/* --- order -------------------------------------------------------------------------------------------------------- */

static order order_wanted(void)
{
    const char *wish = getenv("TE_SIM_STRICT");
    return (order){
        .strict = wish != NULL, .shuffled = wish && strcmp(wish, "reverse") != 0, .state = 0x9e3779b97f4a7c15u};
}

/* The bits to turn in the next round of visits: none, all, or some. */
static uint64_t turned(order *o)
{
    o->state ^= o->state << 13;
    o->state ^= o->state >> 7;
    o->state ^= o->state << 17;
    return o->shuffled ? o->state >> 20 : o->strict ? ~UINT64_C(0) : 0;
}

static uint64_t power_above(uint64_t n)
{
    uint64_t power = 1;
    while (power < n) power *= 2;
    return power;
}

/* --- lanes ------------------------------------------------------------------------------------------------------- */

static void place(launch *l, int index)
{
    l->current = index;
    memcpy(l->state.thread, l->threads[index].place, sizeof l->state.thread);
    l->state.lane = (unsigned)index % WARP;
}

/* What to switch to for the thread to go on, or to begin. */
static te_fiber *enter(launch *l, int index)
{
    thread  *t = &l->threads[index];
    warp    *w = &l->warps[index / WARP];
    unsigned lane = 1u << index % WARP;
    if (w->fresh & lane) {
        w->fresh &= ~lane;
        t->stack = l->n_free ? l->free_stacks[--l->n_free] : l->n_stacks++;
        te_fiber_prepare(&t->fiber, l->stacks + (size_t)t->stack * STACK_BYTES, STACK_BYTES, fiber_main);
        starting = l;
    }
    place(l, index);
    return &t->fiber;
}

/* Lets all go on that wait for each other, if it is one exchange that they wait in and nobody else is to come. */
static bool release_all(warp *w)
{
    if (!w->exchanging || w->mixed || (w->mask & w->present) != w->exchanging) return false;
    w->ready |= w->exchanging;
    w->exchanging = 0;
    return true;
}

/* Who runs when the current thread does not: of its warp, -1 where that is the scheduler's to say. */
static int next_thread(launch *l)
{
    warp    *w = &l->warps[l->current / WARP];
    unsigned later = w->ready & ~((2u << l->current % WARP) - 1);
    if (l->order.strict) return -1;
    if (!later && release_all(w)) later = w->ready;
    return later ? l->current / WARP * WARP + __builtin_ctz(later) : -1;
}

static void wait_for_others(launch *l)
{
    int current = l->current, next = next_thread(l);
    if (next == current) return;
    te_fiber_switch(&l->threads[current].fiber, next < 0 ? &l->scheduler : enter(l, next));
}

/* A thread, and behind it those of its warp that have not begun. */
static void fiber_main(void)
{
    launch *l = starting;
    for (;;) {
        l->kernel->run(l->params);
        thread *t = &l->threads[l->current];
        warp   *w = &l->warps[l->current / WARP];
        w->ready &= ~(1u << l->current % WARP);
        int next = next_thread(l);
        if (next < 0 || !(w->fresh >> next % WARP & 1u)) {
            l->free_stacks[l->n_free++] = t->stack; /* which nobody takes before the switch */
            te_fiber_switch(&t->fiber, next < 0 ? &l->scheduler : enter(l, next));
        }
        w->fresh &= ~(1u << next % WARP);
        l->threads[next].stack = t->stack;
        place(l, next);
    }
}

static void barrier(te_sim_state *state)
{
    launch  *l = (launch *)(void *)state;
    warp    *w = &l->warps[l->current / WARP];
    unsigned lane = 1u << l->current % WARP;
    w->ready &= ~lane;
    w->at_barrier |= lane;
    wait_for_others(l);
}

static const unsigned long long *exchange(te_sim_state *state, unsigned mask, unsigned long long value)
{
    launch  *l = (launch *)(void *)state;
    thread  *t = &l->threads[l->current];
    warp    *w = &l->warps[l->current / WARP];
    unsigned parity = t->round++ & 1u, lane = 1u << state->lane;
    t->mask = mask;
    w->values[parity][state->lane] = value;
    if (!w->exchanging) w->mask = mask, w->round = t->round, w->mixed = false;
    else w->mixed |= mask != w->mask || t->round != w->round;
    w->ready &= ~lane;
    w->exchanging |= lane;
    wait_for_others(l);
    return w->values[parity];
}

/* --- warps and blocks -------------------------------------------------------------------------------------------- */

/* Lanes that wait as this one does: with its mask, in its round. */
static unsigned lanes_alike(const launch *l, const warp *w, int first, const thread *t)
{
    unsigned alike = 0;
    for (int i = 0; i < WARP; i++) {
        if (!(w->exchanging >> i & 1u)) continue;
        const thread *other = &l->threads[first + i];
        if (other->mask == t->mask && other->round == t->round) alike |= 1u << i;
    }
    return alike;
}

/* Those go on whose whole mask is there, lanes that the block does not have left out. */
static bool release_lanes(launch *l, warp *w, int first)
{
    unsigned seen = 0, ready = 0;
    if (release_all(w)) return true;
    for (int i = 0; i < WARP; i++) {
        const thread *t = &l->threads[first + i];
        if (!((w->exchanging & ~seen) >> i & 1u)) continue;
        unsigned alike = lanes_alike(l, w, first, t);
        seen |= alike;
        if ((t->mask & w->present & ~alike) == 0) ready |= alike & t->mask;
    }
    w->exchanging &= ~ready;
    w->ready |= ready;
    return ready != 0;
}

/* Every lane that can goes as far as it can; whether some may go on after that. */
static bool step_warp(launch *l, warp *w)
{
    int      first = (int)(w - l->warps) * WARP;
    unsigned turn = (unsigned)turned(&l->order) % WARP;
    for (unsigned k = 0; k < WARP && w->ready; k++)
        if (w->ready >> (k ^ turn) & 1u) te_fiber_switch(&l->scheduler, enter(l, first + (int)(k ^ turn)));
    return release_lanes(l, w, first);
}

/* All warps, until each thread has returned, is at the barrier or waits for lanes that are not there. */
static void run_warps(launch *l)
{
    unsigned slots = (unsigned)power_above((uint64_t)l->n_warps);
    for (bool again = true; again;) {
        unsigned turn = (unsigned)turned(&l->order) % slots;
        again = false;
        for (unsigned k = 0; k < slots; k++) {
            if ((k ^ turn) >= (unsigned)l->n_warps) continue;
            while (step_warp(l, &l->warps[k ^ turn]) && !(again = l->order.strict)) {}
        }
    }
}

static int stuck(const launch *l, char *message, size_t size)
{
    int waiting = 0, in_warp = -1, done = 0;
    for (int i = 0; i < l->n_warps; i++) {
        const warp *w = &l->warps[i];
        waiting += __builtin_popcount(w->at_barrier);
        done += __builtin_popcount(w->present & ~w->ready & ~w->exchanging & ~w->at_barrier);
        if (w->exchanging && in_warp < 0) in_warp = i * WARP + __builtin_ctz(w->exchanging);
    }
    snprintf(message, size,
             "block (%u, %u, %u) is stuck: thread %d waits for the lanes %08x of its warp, %d of %d threads are at the "
             "barrier, %d have returned",
             l->state.block[0], l->state.block[1], l->state.block[2], in_warp, l->threads[in_warp].mask, waiting,
             l->n_threads, done);
    return -1;
}

static int run_block(launch *l, char *message, size_t size)
{
    static _Atomic(unsigned long long) runs;
    l->state.run = ++runs;
    for (int i = 0; i < l->n_threads; i++) l->threads[i].round = 0;
    for (int i = 0; i < l->n_warps; i++) {
        warp *w = &l->warps[i];
        int   lanes = l->n_threads - i * WARP;
        w->ready = w->fresh = w->present = lanes < WARP ? (1u << lanes) - 1 : ~0u;
        w->exchanging = w->at_barrier = 0;
    }
    for (;;) {
        unsigned waiting = 0, exchanging = 0;
        run_warps(l);
        for (int i = 0; i < l->n_warps; i++) {
            waiting |= l->warps[i].at_barrier;
            exchanging |= l->warps[i].exchanging;
        }
        if (exchanging) return stuck(l, message, size);
        if (!waiting) return 0;
        for (int i = 0; i < l->n_warps; i++) {
            l->warps[i].ready = l->warps[i].at_barrier;
            l->warps[i].at_barrier = 0;
        }
    }
}

static int other_functions;

void te_cuda_sim_set_other_functions(int other) { other_functions = other; }

/* --- launches ---------------------------------------------------------------------------------------------------- */

static _Atomic(char *) spare_stacks; /* of a launch that has ended, or NULL */

static char *take_stacks(void)
{
    char *stacks = atomic_exchange(&spare_stacks, NULL);
    if (stacks) return stacks;
    return mmap(NULL, (size_t)MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static void leave_stacks(char *stacks)
{
    stacks = atomic_exchange(&spare_stacks, stacks);
    if (stacks) munmap(stacks, (size_t)MAX_THREADS * STACK_BYTES);
}

static bool open_launch(launch *l, uint32_t shared)
{
    size_t n = (size_t)l->n_threads;
    l->threads = calloc(n, sizeof *l->threads);
    l->n_warps = (l->n_threads + WARP - 1) / WARP;
    l->warps = calloc((size_t)l->n_warps, sizeof *l->warps);
    l->free_stacks = calloc(n, sizeof *l->free_stacks);
    l->state.shared = NULL;
    l->stacks = take_stacks();
    return posix_memalign(&l->state.shared, 1024, shared ? shared : 1) == 0 && l->threads && l->warps &&
           l->free_stacks && l->stacks != MAP_FAILED;
}

static void close_launch(launch *l)
{
    if (l->stacks != MAP_FAILED) leave_stacks(l->stacks);
    free(l->state.shared);
    free(l->free_stacks);
    free(l->warps);
    free(l->threads);
}

static int check_geometry(const uint32_t grid[3], const uint32_t block[3], uint32_t shared, char *message, size_t size)
{
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    bool     grid_fits = grid[0] && grid[1] && grid[2] && grid[0] <= INT32_MAX && grid[1] < 65536 && grid[2] < 65536;
    if (grid_fits && threads > 0 && threads <= MAX_THREADS && block[2] <= 64 && shared <= 227u << 10) return 0;
    snprintf(message, size, "no GPU takes a grid of %u x %u x %u, blocks of %u x %u x %u and %u shared bytes", grid[0],
             grid[1], grid[2], block[0], block[1], block[2], shared);
    return -1;
}

static int run_blocks(launch *l, const uint32_t grid[3], uint32_t shared, char *message, size_t size)
{
    uint64_t n = (uint64_t)grid[0] * grid[1] * grid[2], slots = power_above(n), turn = turned(&l->order) % slots;
    int      result = 0;
    for (uint64_t k = 0; k < slots && result == 0; k++) {
        uint64_t b = k ^ turn;
        if (b >= n) continue;
        l->state.block[0] = (unsigned)(b % grid[0]);
        l->state.block[1] = (unsigned)(b / grid[0] % grid[1]);
        l->state.block[2] = (unsigned)(b / grid[0] / grid[1]);
        if (shared) memset(l->state.shared, 0xff, shared); /* NaN: what is read must have been written */
        if (l->state.variables) memset(l->state.variables, 0xff, (size_t)(l->state.variables_end - l->state.variables));
        result = run_block(l, message, size);
    }
    return result;
}

int te_sim_run_grid(const te_sim_kernel *kernel, const uint32_t grid[3], const uint32_t block[3], uint32_t shared,
                    void *const *params, char *message, size_t message_size)
{
    launch l = {.kernel = kernel, .params = params, .order = order_wanted()};
    int    result = check_geometry(grid, block, shared, message, message_size);
    if (result != 0) return result;
    l.n_threads = (int)(block[0] * block[1] * block[2]);
    if (open_launch(&l, shared)) {
        memcpy(l.state.grid_dim, grid, sizeof l.state.grid_dim);
        memcpy(l.state.block_dim, block, sizeof l.state.block_dim);
        for (unsigned i = 0; i < (unsigned)l.n_threads; i++) {
            unsigned *at = l.threads[i].place;
            at[0] = i % block[0], at[1] = i / block[0] % block[1], at[2] = i / block[0] / block[1];
        }
        l.state.barrier = barrier;
        l.state.exchange = exchange;
        l.state.other_functions = other_functions;
        l.state.late = l.order.strict;
        kernel->attach(&l.state);
        result = run_blocks(&l, grid, shared, message, message_size);
    } else {
        snprintf(message, message_size, "out of memory for %d simulated threads", l.n_threads);
        result = -1;
    }
    close_launch(&l);
    return result;
}
