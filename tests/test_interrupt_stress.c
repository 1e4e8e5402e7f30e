/* test_interrupt_stress.c - interrupts at random moments, from another thread and from a signal handler, of scripts
 * that are compiled and of such that are interpreted: none is lost, and the runtime answers afterwards. One that is
 * lost ends the program after DEADLINE seconds, naming the script. And, where they are not held back, products while
 * signals come all the time: a library's kernels may not care where the stack pointer points.
 *
 *     test_interrupt_stress [ROUNDS [SEED]]
 */
#include "test.h"

#include "tetrain/tetrain.h"

#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

enum { DEADLINE = 100 };

#ifdef __SANITIZE_THREAD__ /* it holds signals back until the next call that it watches, and a loop may make none */
enum { SIGNALS = 0, ROUNDS = 200 };
#else
enum { SIGNALS = 1, ROUNDS = 1000 };
#endif

/* Where the compiler is on, loops must call the engine: compiled code that does not is not reached. */
static const char *const compiled[] = {
    "while true do x = te.ones(4) + 1 end",
    "while true do pcall(function() x = te.ones(4) * 2 end) end",
    "local t = te.ones(3) for i = 1, math.huge do t = t + (i % 2) end",
    "while true do pcall(te.no_grad, function() for i = 1, 3 do te.ones(2):sum() end end) end",
    ("local f = coroutine.wrap(function() while true do pcall(coroutine.yield, te.ones(1)) end end) while true do f() "
     "end"),
    "local function f(n) if n > 0 then return f(n - 1) end return te.ones(2) end while true do pcall(f, 60) end",
    "local t = {} while true do for i = 1, 100 do t[i] = {i, tostring(i)} end collectgarbage 'step' te.ones(1) end",
};
static const char *const interpreted[] = {
    "while true do end",
    "while true do pcall(function() while true do end end) end",
    "local function f() pcall(f) return f() end f()",
    "local function f() pcall(f) pcall(f) end f()",
    "local function f() xpcall(f, function() end) return f() end f()",
    "local co = coroutine.wrap(function() while true do pcall(coroutine.yield) end end) while true do co() end",
    "while true do pcall(string.rep) x = ('x'):rep(10) .. 'y' end",
    "repeat xpcall(function() error('x') end, function() while true do end end) until false",
    "while true do te.ones(4):sum() end",
    "while true do pcall(te.no_grad, function() local y = te.ones(3) + 1 end) end",
};

static const char *running;

static void too_late(int number)
{
    static const char text[] = "not interrupted: ";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) > 0 && write(STDERR_FILENO, running, strlen(running)) > 0) _exit(1);
    _exit(2);
}

static tetrain *signalled;

static void on_signal(int number)
{
    (void)number;
    tetrain_interrupt(signalled);
}

typedef struct moment {
    tetrain  *rt;
    pthread_t runner;
    bool      by_signal;
    unsigned  delay; /* in microseconds */
} moment;

static void *interrupt_then(void *argument)
{
    moment *m = argument;
    usleep(m->delay);
    if (m->by_signal) pthread_kill(m->runner, SIGUSR1);
    else tetrain_interrupt(m->rt);
    return NULL;
}

static tetrain_status run(tetrain *rt, const char *text) { return tetrain_run_string(rt, text, strlen(text), "=test"); }

static void interrupt_once(tetrain *rt, const char *script, uint64_t *seed)
{
    moment    m = {.rt = rt, .runner = pthread_self(), .by_signal = SIGNALS && test_random(seed) % 2,
                   .delay = test_random(seed) % 400};
    pthread_t thread;
    running = script;
    alarm(DEADLINE);
    if (pthread_create(&thread, NULL, interrupt_then, &m) != 0) abort();
    tetrain_status status = run(rt, script);
    pthread_join(thread, NULL);
    CHECK_MSG(status == TETRAIN_ERROR_INTERRUPTED && strstr(tetrain_error(rt), "interrupted"), "%s: %d, %s", script,
              (int)status, tetrain_error(rt));
    CHECK_MSG(run(rt, "assert(te.ones(3):sum():item() == 3)") == TETRAIN_OK, "after %s: %s", script, tetrain_error(rt));
}

static void interrupt_many(uint32_t flags, const char *const *scripts, int n, long rounds, uint64_t seed)
{
    tetrain_options options = {.struct_size = sizeof options, .threads = 1, .flags = flags};
    tetrain        *rt = signalled = tetrain_open(&options);
    if (!rt || run(rt, "te = require 'te'") != TETRAIN_OK) abort();
    for (long i = 0; i < rounds; i++) interrupt_once(rt, scripts[test_random(&seed) % (uint32_t)n], &seed);
    alarm(0);
    tetrain_close(rt);
}

static volatile sig_atomic_t beats;

static void on_beat(int number)
{
    (void)number;
    beats = beats + 1;
}

static void multiply_under_signals(void)
{
    static const char script[] =
        "local te = require 'te' te.manual_seed(1)\n"
        "for _, dtype in ipairs { 'float32', 'bfloat16' } do\n"
        "  local a, b = te.randn(1500, 300):to(dtype), te.randn(1500, 300):to(dtype)\n"
        "  local first = te.matmul(a:transpose(1, 2), b)\n"
        "  for i = 1, 40 do assert(te.all(te.eq(te.matmul(a:transpose(1, 2), b), first)):item()) end\n"
        "  te.matmul(a, b:transpose(1, 2)) te.matmul(a, first)\n"
        "end";
    tetrain_options  options = {.struct_size = sizeof options, .threads = 1};
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    tetrain         *rt = tetrain_open(&options);
    signal(SIGALRM, on_beat);
    setitimer(ITIMER_REAL, &often, NULL);
    CHECK_MSG(run(rt, script) == TETRAIN_OK, "%s", tetrain_error(rt));
    setitimer(ITIMER_REAL, &never, NULL);
    CHECK(beats > 10);
    tetrain_close(rt);
}

int main(int argc, char **argv)
{
    long     rounds = argc > 1 ? atol(argv[1]) : ROUNDS;
    uint64_t seed = 88172645463325252u + (argc > 2 ? (uint64_t)atol(argv[2]) : 0);
    struct sigaction act = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &act, NULL);
    signal(SIGALRM, too_late);
    interrupt_many(0, compiled, sizeof compiled / sizeof *compiled, rounds, seed);
    /* slower */
    interrupt_many(TETRAIN_INTERPRETED, interpreted, sizeof interpreted / sizeof *interpreted, rounds / 4, seed);
    if (SIGNALS) multiply_under_signals();
    return TEST_END();
}
