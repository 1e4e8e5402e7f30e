/* run.c - blocks one after the other, their threads as fibers.
 *
 * The threads of a warp run until each of them waits or has returned; lanes that wait for each other go on as soon as
 * all of their mask are there. When every thread of the block waits at the barrier or has returned, the barrier opens.
 * A thread that never waits borrows a stack and gives it back, so most kernels need one stack. The memory of the stacks
 * is kept for the next launch: most launches are of a few elements, and would spend their time on fresh pages.
 *
 * Blocks, warps and lanes come by number, and a warp goes as far as it can. Under TE_SIM_STRICT they come
 * in another order and warps take turns at every wait: what a missing barrier or an order of blocks
 * decides has other results then.
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

typedef enum thread_status { THREAD_NEW, THREAD_READY, THREAD_AT_BARRIER, THREAD_IN_WARP, THREAD_DONE } thread_status;

typedef struct thread {
    te_fiber      fiber;
    thread_status status;
    int           stack; /* -1: none */
    unsigned      mask;  /* of the exchange it waits for */
    unsigned      round; /* exchanges it took part in */
    unsigned      place[3];
} thread;

typedef struct warp {
    unsigned long long values[2][WARP]; /* by the parity of the round */
} warp;

typedef struct launch {
    te_sim_state         state; /* first: the kernel gives it back to us */
    const te_sim_kernel *kernel;
    void *const         *params;
    te_fiber             scheduler;
    thread              *threads;
    warp                *warps;
    int                  n_threads, current;
    order                order;
    char                *stacks;
    int                 *free_stacks, n_free, n_stacks;
} launch;

/* The fiber that is about to start has no other way to know its launch. */
static _Thread_local launch *starting;

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

/* --- threads ----------------------------------------------------------------------------------------------------- */

static void place(launch *l, int index)
{
    l->current = index;
    memcpy(l->state.thread, l->threads[index].place, sizeof l->state.thread);
    l->state.lane = (unsigned)index % WARP;
}

static void wait_as(launch *l, thread_status status)
{
    thread *t = &l->threads[l->current];
    t->status = status;
    te_fiber_switch(&t->fiber, &l->scheduler);
}

static void fiber_main(void)
{
    launch *l = starting;
    l->kernel->run(l->params);
    wait_as(l, THREAD_DONE);
}

static void barrier(te_sim_state *state) { wait_as((launch *)(void *)state, THREAD_AT_BARRIER); }

static const unsigned long long *exchange(te_sim_state *state, unsigned mask, unsigned long long value)
{
    launch   *l = (launch *)(void *)state;
    thread   *t = &l->threads[l->current];
    warp     *w = &l->warps[l->current / WARP];
    unsigned  parity = t->round++ & 1u;
    t->mask = mask;
    w->values[parity][state->lane] = value;
    wait_as(l, THREAD_IN_WARP);
    return w->values[parity];
}

static void resume(launch *l, int index)
{
    thread *t = &l->threads[index];
    if (t->status == THREAD_NEW) {
        t->stack = l->n_free ? l->free_stacks[--l->n_free] : l->n_stacks++;
        te_fiber_prepare(&t->fiber, l->stacks + (size_t)t->stack * STACK_BYTES, STACK_BYTES, fiber_main);
        starting = l;
    }
    place(l, index);
    te_fiber_switch(&l->scheduler, &t->fiber);
    if (t->status == THREAD_DONE) l->free_stacks[l->n_free++] = t->stack;
}

/* --- warps and blocks -------------------------------------------------------------------------------------------- */

/* Lanes that wait as this one does: with its mask, in its round. */
static unsigned lanes_alike(const launch *l, int first, int end, const thread *t)
{
    unsigned alike = 0;
    for (int i = first; i < end; i++) {
        const thread *other = &l->threads[i];
        if (other->status == THREAD_IN_WARP && other->mask == t->mask && other->round == t->round)
            alike |= 1u << (i - first);
    }
    return alike;
}

/* Those go on whose whole mask is there, lanes that the block does not have left out. */
static bool release_lanes(launch *l, int first, int end)
{
    unsigned present = end - first == WARP ? ~0u : (1u << (end - first)) - 1, seen = 0, ready = 0;
    for (int i = first; i < end; i++) {
        const thread *t = &l->threads[i];
        if (t->status != THREAD_IN_WARP || seen >> (i - first) & 1u) continue;
        unsigned alike = lanes_alike(l, first, end, t);
        seen |= alike;
        if ((t->mask & present & ~alike) == 0) ready |= alike & t->mask;
    }
    for (int i = first; i < end; i++)
        if (ready >> (i - first) & 1u) l->threads[i].status = THREAD_READY;
    return ready != 0;
}

/* Every lane that can goes as far as it can; whether some may go on after that. */
static bool step_warp(launch *l, int first)
{
    int end = first + WARP < l->n_threads ? first + WARP : l->n_threads;
    unsigned turn = (unsigned)turned(&l->order) % WARP;
    for (unsigned k = 0; k < WARP; k++) {
        int i = first + (int)(k ^ turn);
        if (i < end && (l->threads[i].status == THREAD_NEW || l->threads[i].status == THREAD_READY)) resume(l, i);
    }
    return release_lanes(l, first, end);
}

/* All warps, until each thread has returned, is at the barrier or waits for lanes that are not there. */
static void run_warps(launch *l)
{
    unsigned warps = (unsigned)(l->n_threads + WARP - 1) / WARP, slots = (unsigned)power_above(warps);
    for (bool again = true; again;) {
        unsigned turn = (unsigned)turned(&l->order) % slots;
        again = false;
        for (unsigned k = 0; k < slots; k++) {
            int first = (int)(k ^ turn) * WARP;
            if (first >= l->n_threads) continue;
            while (step_warp(l, first) && !(again = l->order.strict)) {}
        }
    }
}

static int stuck(const launch *l, char *message, size_t size)
{
    int waiting = 0, in_warp = -1, done = 0;
    for (int i = 0; i < l->n_threads; i++) {
        waiting += l->threads[i].status == THREAD_AT_BARRIER;
        done += l->threads[i].status == THREAD_DONE;
        if (l->threads[i].status == THREAD_IN_WARP && in_warp < 0) in_warp = i;
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
    for (int i = 0; i < l->n_threads; i++) l->threads[i].status = THREAD_NEW, l->threads[i].round = 0;
    for (;;) {
        int waiting = 0, done = 0;
        run_warps(l);
        for (int i = 0; i < l->n_threads; i++) {
            waiting += l->threads[i].status == THREAD_AT_BARRIER;
            done += l->threads[i].status == THREAD_DONE;
        }
        if (waiting + done < l->n_threads) return stuck(l, message, size);
        if (waiting == 0) return 0;
        for (int i = 0; i < l->n_threads; i++)
            if (l->threads[i].status == THREAD_AT_BARRIER) l->threads[i].status = THREAD_READY;
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
    l->warps = calloc(n / WARP + 1, sizeof *l->warps);
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
        kernel->attach(&l.state);
        result = run_blocks(&l, grid, shared, message, message_size);
    } else {
        snprintf(message, message_size, "out of memory for %d simulated threads", l.n_threads);
        result = -1;
    }
    close_launch(&l);
    return result;
}
