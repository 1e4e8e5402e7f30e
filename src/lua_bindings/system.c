/* system.c - what scripts ask of the machine: time, terminal, memory, folders, and whether somebody wants them to
 * stop. */
#include "host.h"

#include <luajit.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* clock(): seconds of a clock that never jumps; only differences mean anything. */
static int system_clock(lua_State *L)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    lua_pushnumber(L, (double)now.tv_sec + (double)now.tv_nsec * 1e-9);
    return 1;
}

/* sleep(seconds): in short naps, so that an interrupt from another thread is noticed; a signal ends it at once, and may
 * have been one. */
static int system_sleep(lua_State *L)
{
    enum { NAP_NS = 20000000 };
    te_lua *rt = te_lua_runtime(L);
    double  seconds = luaL_checknumber(L, 1), left = seconds < 1e6 ? seconds : 1e6;
    for (;;) {
        struct timespec nap = {.tv_nsec = left * 1e9 < NAP_NS ? (long)(left * 1e9) : NAP_NS};
        te_lua_enter(rt, L, "sleep");
        te_status status = te_context_poll(rt->ctx);
        if (status != TE_OK) return te_lua_raise(rt, L, "sleep", status);
        if (!(left > 0)) return 0;
        left = nanosleep(&nap, NULL) == 0 ? left - NAP_NS * 1e-9 : 0;
    }
}

static int system_isatty(lua_State *L)
{
    lua_pushboolean(L, isatty((int)luaL_checkinteger(L, 1)));
    return 1;
}

/* terminal_width(): columns of the terminal, 80 where there is none. */
static int terminal_width(lua_State *L)
{
    struct winsize size;
    bool           known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    lua_pushinteger(L, known ? size.ws_col : 80);
    return 1;
}

/* rss(): bytes of memory that the process occupies now; 0 where the system does not say. */
static int system_rss(lua_State *L)
{
    unsigned long pages = 0;
    FILE         *file = fopen("/proc/self/statm", "r");
    if (file) {
        if (fscanf(file, "%*u %lu", &pages) != 1) pages = 0;
        fclose(file);
    }
    lua_pushnumber(L, (double)pages * (double)sysconf(_SC_PAGESIZE));
    return 1;
}

static int system_peak_rss(lua_State *L)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    lua_pushnumber(L, (double)usage.ru_maxrss * 1024);
    return 1;
}

/* Lets system calls go on behind a handler of the process, so that who only asks the script to stop takes nothing from
 * what it writes: stdio drops what a write that was cut short has left. */
static void restart_calls(int number)
{
    struct sigaction action;
    if (sigaction(number, NULL, &action) != 0 || action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) return;
    action.sa_flags |= SA_RESTART;
    sigaction(number, &action, NULL);
}

static bool owns_process(const te_lua *rt) { return rt->host && rt->host->options.flags & TETRAIN_MAY_EXIT; }

/* interrupt_flag(): whether the host asked the script to stop. A script that asks is expected to finish by itself, so
 * the first request is not raised as an error any more. */
static int interrupt_flag(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    bool first = !atomic_exchange(&rt->polls_stop, true);
    if (first && owns_process(rt)) {
        restart_calls(SIGINT);
        restart_calls(SIGTERM);
        restart_calls(SIGHUP);
    }
    lua_pushboolean(L, rt->stop_requested != 0);
    return 1;
}

/* ignore_sigpipe(): a pipe whose reader has left fails a write from here on, where the process is the script's and
 * nobody handles the signal, as a full disk does; else it would end the process, with what the script has yet to
 * save. */
static int ignore_sigpipe(lua_State *L)
{
    struct sigaction now;
    if (!owns_process(te_lua_runtime(L)) || sigaction(SIGPIPE, NULL, &now) != 0 || now.sa_handler != SIG_DFL) return 0;
    signal(SIGPIPE, SIG_IGN);
    return 0;
}

/* told(): whether an option or te.set_num_threads said how many threads, and whether an option or TE_DEVICE said on
 * which device tensors are made. */
static int told(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    lua_pushboolean(L, rt->ctx->threads_told);
    lua_pushboolean(L, rt->device_told);
    return 2;
}

/* cpu_info(): {cores =, threads =}. */
static int cpu_info(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_enter(rt, L, "cpu_info");
    lua_createtable(L, 0, 2);
    lua_pushinteger(L, (lua_Integer)sysconf(_SC_NPROCESSORS_ONLN));
    lua_setfield(L, -2, "cores");
    lua_pushinteger(L, te_context_threads(rt->ctx));
    lua_setfield(L, -2, "threads");
    return 1;
}

/* device_info(device): what it is and where its kernels come from; nil where there is nothing to say. */
static int device_info(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    char        text[512] = "";
    const char *name = luaL_checkstring(L, 1);
    te_lua_enter(rt, L, "device_info");
    te_device *device = te_context_device(rt->ctx, name);
    if (!device) return te_lua_raise(rt, L, "device_info", rt->ctx->status);
    if (!device->exec.backend->describe) return 0;
    device->exec.backend->describe(&device->exec, text, sizeof text);
    lua_pushstring(L, text);
    return 1;
}

/* device_traits(device): { host_memory = whether its memory is the host's, graphs = whether it records graphs,
 * narrow_products = whether it may multiply the bytes of quantized operands as they are }. */
static int device_traits(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    const char *name = luaL_checkstring(L, 1);
    te_lua_enter(rt, L, "device_traits");
    te_device *device = te_context_device(rt->ctx, name);
    if (!device) return te_lua_raise(rt, L, "device_traits", rt->ctx->status);
    lua_createtable(L, 0, 3);
    te_lua_flag_entry(L, "host_memory", device->exec.backend->host_memory);
    te_lua_flag_entry(L, "graphs", device->exec.backend->capture_begin != NULL);
    te_lua_flag_entry(L, "narrow_products", device->exec.backend->gemm_decline != NULL);
    return 1;
}

/* executable(): path of the running program, nil where the system does not say. */
static int executable(lua_State *L)
{
    char    path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path);
    if (n <= 0) return 0;
    lua_pushlstring(L, path, (size_t)n);
    return 1;
}

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "GCC " __VERSION__
#else
#define COMPILER "an unknown compiler"
#endif

static void set_text(lua_State *L, const char *name, const char *text)
{
    lua_pushstring(L, text);
    lua_setfield(L, -2, name);
}

/* build_info(): what this library was built with. */
static int build_info(lua_State *L)
{
    lua_createtable(L, 0, 3);
    set_text(L, "compiler", COMPILER);
    set_text(L, "lua", LUAJIT_VERSION);
#if TE_WITH_ONEDNN
    set_text(L, "matrix_products", "oneDNN and our own");
#else
    set_text(L, "matrix_products", "our own (built without oneDNN)");
#endif
    return 1;
}

const luaL_Reg te_lua_system_functions[] = {
    {"clock", system_clock}, {"interrupt_flag", interrupt_flag}, {"ignore_sigpipe", ignore_sigpipe},
    {"cpu_info", cpu_info}, {"told", told}, {"build_info", build_info}, {"device_info", device_info},
    {"device_traits", device_traits}, {NULL, NULL},
};

const luaL_Reg te_lua_process_functions[] = {
    {"sleep", system_sleep}, {"isatty", system_isatty}, {"terminal_width", terminal_width}, {"rss", system_rss},
    {"peak_rss", system_peak_rss}, {"executable", executable}, {NULL, NULL},
};
