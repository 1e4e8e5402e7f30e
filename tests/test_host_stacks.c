/* test_host_stacks.c - calls on small stacks of threads, and on fibers, whose stack is not the thread's: nesting ends
 * in an error, kernels have the room they need, and a stack that is too small is an error of the call. */
#define _GNU_SOURCE
#include "test.h"

#include "tetrain/tetrain.h"

#include <lauxlib.h>
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifdef SANITIZED
enum { SMALL = 1 << 20, LARGE = SMALL, FEWEST = 2 }; /* functions take more there, and much longer */
#else
enum { SMALL = 256 << 10, LARGE = 4 * SMALL, FEWEST = 1 };
#endif

static tetrain_status run(tetrain *rt, const char *code) { return tetrain_run_string(rt, code, strlen(code), "=test"); }

/* What takes most: random numbers, products, attention, recipes, sums of many rows, sorting. The first ones run on
 * every level of a nesting, so also where hardly anything is left; coroutines have Lua stacks of their own, which are
 * not full before. */
static const char *const scripts[] = {
    "local f f = function() te.randn{8192} return (coroutine.wrap(f))() end assert(not pcall(f))",
    "local f f = function() te.softmax(te.randn{64, 512}) coroutine.wrap(te.no_grad)(f) end assert(not pcall(f))",
    "local f f = function() te.matmul(te.randn{64, 64}, te.randn{64, 64})\n"
    "return (coroutine.wrap(te.checkpoint)(f, te.ones({2}, {requires_grad = true}))) end assert(not pcall(f))",
    "for _, name in ipairs{'MXFP8BlockScaling', 'Float8BlockScaling', 'NVFP4BlockScaling', 'Float8CurrentScaling'} do\n"
    "    local m = te.Sequential(te.LayerNorm(256), te.Linear(256, 256), te.GELU(), te.Linear(256, 256))\n"
    "    local scope = {dtype = 'bfloat16', recipe = te.recipe[name]{}}\n"
    "    te.autocast(scope, function() m(te.randn{512, 256}):sum():backward() end)\n"
    "end",
    "local q = te.randn({1, 4, 300, 64}, {requires_grad = true})\n"
    "te.scaled_dot_product_attention(q, q, q, {causal = true}):sum():backward()",
    "te.sort(te.randn{3, 5000}) te.topk(te.randn{3, 5000}, 9) te.multinomial(te.ones{4, 800}, 2)\n"
    "te.sum(te.randn{700, 30}, 1)",
    "local m = te.models.gpt {vocab_size = 50, n_layer = 2, n_head = 2, n_embd = 64, block_size = 32}\n"
    "m(te.zeros({4, 32}, {dtype = 'int32'})):sum():backward()",
};

static void run_all(int threads)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = threads, .flags = TETRAIN_RESTRICTED};
    tetrain        *rt = tetrain_open(&options);
    CHECK_MSG(run(rt, "te = require 'te'") == TETRAIN_OK, "%s", tetrain_error(rt));
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++)
        CHECK_MSG(run(rt, scripts[i]) == TETRAIN_OK, "%s: %s", scripts[i], tetrain_error(rt));
    tetrain_close(rt);
}

static void *on_thread(void *user)
{
    run_all(*(int *)user);
    return NULL;
}

static void start(size_t stack, void *(*function)(void *), void *user)
{
    pthread_attr_t attributes;
    pthread_t      thread;
    pthread_attr_init(&attributes);
    CHECK(pthread_attr_setstacksize(&attributes, stack) == 0);
    CHECK(pthread_create(&thread, &attributes, function, user) == 0);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
}

static void test_threads(void)
{
    for (int threads = FEWEST; threads <= 2; threads++)
        for (size_t stack = SMALL; stack <= LARGE; stack *= 2) start(stack, on_thread, &threads);
}

/* --- too small ---------------------------------------------------------------------------------------------------- */

static tetrain *shared;

static void *call_on_little(void *user)
{
    tetrain_status status = run(shared, "te.randn{8192}");
    CHECK_MSG(status == TETRAIN_ERROR_MEMORY && strstr(tetrain_error(shared), "the stack of this thread has"), "%d, %s",
              (int)status, tetrain_error(shared));
    tetrain *rt = tetrain_open(NULL);
    if (rt) CHECK(run(rt, "te = require 'te'") == TETRAIN_ERROR_MEMORY);
    tetrain_close(rt);
    return user;
}

static void test_little(void)
{
    shared = tetrain_open(NULL);
    CHECK(run(shared, "te = require 'te'") == TETRAIN_OK);
    size_t least = (size_t)PTHREAD_STACK_MIN > 32 << 10 ? (size_t)PTHREAD_STACK_MIN : 32 << 10;
    for (size_t stack = least; stack <= 160 << 10; stack += 32 << 10) {
        start(stack, call_on_little, NULL);
        CHECK_MSG(run(shared, "te.randn{8192}") == TETRAIN_OK, "%s", tetrain_error(shared));
    }
    tetrain_close(shared);
}

/* --- calls inside calls ------------------------------------------------------------------------------------------- */

static tetrain *nested;
static int      depth, refused;

/* A function of the host whose frame is not small: it runs a script, or reads a field that a function computes. */
static int again(lua_State *L)
{
    volatile char  frame[1024] = {0};
    tetrain_status status = TETRAIN_OK;
    if (depth++ % 2) te_tensor_release(tetrain_get_tensor(nested, "field.x"));
    else status = run(nested, "again()");
    refused += strstr(tetrain_error(nested), "the stack of this thread has") != NULL;
    lua_pushinteger(L, status + frame[0]);
    return 1;
}

static void *call_inside_calls(void *user)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = TETRAIN_RESTRICTED};
    nested = tetrain_open(&options);
    lua_register(tetrain_lua_state(nested), "again", again);
    CHECK(run(nested, "te = require 'te' field = setmetatable({}, {__index = function() again() end})") == TETRAIN_OK);
    for (int i = 0; i < 2; i++) {
        depth = 0;
        (void)run(nested, "again()");
        CHECK_MSG(depth > 8, "%d calls", depth);
        CHECK_MSG(run(nested, "te.randn({64, 64}):sum()") == TETRAIN_OK, "%s", tetrain_error(nested));
    }
    tetrain_close(nested);
    return user;
}

/* A function of the host that calls again goes down without end, past everything in Lua that looks. */
static void test_inside(void)
{
    for (size_t stack = SMALL; stack <= 8 * SMALL; stack *= 2) {
        refused = 0;
        start(stack, call_inside_calls, NULL);
        CHECK_MSG(refused > 0 || stack > 2 * SMALL, "%zu", stack);
    }
    call_inside_calls(NULL);
}

/* --- fibers ------------------------------------------------------------------------------------------------------- */

#ifndef SANITIZED
enum { FIBER = 256 << 10 };

static ucontext_t back, fiber;
static char      *fiber_stack;

static void on_fiber(void) { run_all(1); }

static void *switch_to_fiber(void *user)
{
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = fiber_stack;
    fiber.uc_stack.ss_size = FIBER;
    fiber.uc_link = &back;
    makecontext(&fiber, on_fiber, 0);
    CHECK(swapcontext(&back, &fiber) == 0);
    return user;
}

/* Mapped above the stack of a thread, or below the main thread's. */
static void test_fibers(void)
{
    fiber_stack = mmap(NULL, FIBER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fiber_stack == MAP_FAILED) abort();
    switch_to_fiber(NULL);
    start(1 << 20, switch_to_fiber, NULL);
    munmap(fiber_stack, FIBER);
}
#else
static void test_fibers(void) {} /* they would have to be told of each switch */
#endif

int main(void)
{
    test_little(); /* first: the C library gives a new thread the larger stack of one that has ended */
    test_threads();
    test_inside();
    test_fibers();
    return TEST_END();
}
