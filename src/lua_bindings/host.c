/* host.c - tetrain.h: opening and closing runtimes, running scripts. Tensors go across in host_tensors.c.
 *
 * Everything that can raise runs inside lua_cpcall or lua_pcall: an error that reached LuaJIT's panic function would
 * end the process. Where the Lua heap has a limit the JIT compiler is off: a failed allocation inside it crashes.
 */
#include "host.h"

#include "kernels/environment.h"
#include "kernels/float_mode.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const char *tetrain_version(void) { return te_version(); }

/* --- opening ------------------------------------------------------------------------------------------------------ */

static int collect(lua_State *L)
{
    lua_gc(L, LUA_GCCOLLECT, 0);
    return 0;
}

static const char collect_key[] = "te.collect"; /* in the registry: a function that collects */
static const char describe_key[] = "te.describe"; /* and describe_error */

static int describe_error(lua_State *L);

/* A collection when the heap is full: protected, since finalizers may raise, and without allocating itself. Twice,
 * because LuaJIT gives its string buffer back in steps. */
static void collect_protected(tetrain *host)
{
    for (int i = 0; i < 2; i++) {
        te_lua_push_kept(host->L, collect_key);
        if (lua_pcall(host->L, 0, 0, 0) != 0) lua_pop(host->L, 1);
    }
}

/* Fills a new state; the tetrain is a light userdata at 1. */
static int open_state(lua_State *L)
{
    tetrain *host = lua_touserdata(L, 1);
    bool     restricted = host->options.flags & TETRAIN_RESTRICTED;
    host->interpreted = (host->options.flags & (TETRAIN_RESTRICTED | TETRAIN_INTERPRETED)) ||
                        host->options.lua_memory_limit || host->options.instruction_limit || host->options.realloc;
    tetrain_open_libraries(host, L);
    te_lua_text_only(L);
    if (host->interpreted) {
        tetrain_guard_script(L);
        tetrain_bound_patterns(L);
    }
    tetrain_guard_stack(L);
    host->rt =
        te_lua_attach(L, &(te_lua_options){.ctx = host->ctx, .device = host->options.device, .restricted = restricted});
    host->rt->host = host;
    te_lua_open_library(L);
    lua_pushcfunction(L, luaopen_te); /* now: a script may do what it likes with `require` */
    lua_call(L, 0, 0);
    lua_pushcfunction(L, collect);
    te_lua_keep(L, collect_key);
    lua_pushcfunction(L, describe_error);
    te_lua_keep(L, describe_key);
    return 0;
}

static tetrain *open_host(const tetrain_options *options)
{
    tetrain_options given = {0};
    if (options && !options->struct_size)
        return NULL; /* forgotten: flags would go unseen, TETRAIN_RESTRICTED among them */
    if (!tetrain_may_open(__builtin_frame_address(0))) return NULL;
    if (options) te_copy_fields(&given, options, options->struct_size, sizeof given);
    if (!given.device && given.flags & TETRAIN_ENVIRONMENT) given.device = te_environment(TE_ENV_DEVICE);
    te_mem   mem = given.realloc ? (te_mem){given.realloc, given.realloc_user} : te_mem_libc;
    tetrain *host = te_mem_zalloc(&mem, sizeof *host);
    if (!host) return NULL;
    host->options = given;
    host->mem = mem;
    te_context_options context = {.struct_size = sizeof context, .threads = host->options.threads,
                                  .tensor_memory_limit = host->options.tensor_memory_limit,
                                  .realloc = host->mem.realloc, .realloc_user = host->mem.user};
    host->ctx = te_context_open(&context);
    bool hooked = host->options.lua_memory_limit || host->options.realloc;
    if (hooked && !tetrain_arena_open(host)) {
        tetrain_close(host);
        return NULL;
    }
    host->opening = true;
    if (host->ctx) host->L = hooked ? lua_newstate(tetrain_heap_alloc, host) : luaL_newstate();
    host->opening = false;
    if (!host->L || lua_cpcall(host->L, open_state, host) != 0) {
        tetrain_close(host);
        return NULL;
    }
    return host;
}

/* LuaJIT computes in the default floating-point mode as well: here, in tetrain_close and in tetrain_protected. */
tetrain *tetrain_open(const tetrain_options *options)
{
    te_float_mode mode = te_float_mode_begin();
    tetrain      *host = open_host(options);
    te_float_mode_end(&mode);
    return host;
}

void tetrain_close(tetrain *host)
{
    if (!host) return;
    te_float_mode mode = te_float_mode_begin();
    if (host->L) lua_close(host->L);
    te_context_release(host->ctx);
    te_float_mode_end(&mode);
    tetrain_arena_close(host);
    te_mem mem = host->mem;
    te_mem_free(&mem, host, sizeof *host);
}

struct lua_State *tetrain_lua_state(tetrain *host) { return host ? host->L : NULL; }
te_context       *tetrain_context(tetrain *host) { return host ? host->ctx : NULL; }
const char *tetrain_error(const tetrain *host)
{
    return host ? host->error : "there is no runtime: tetrain_open gave NULL";
}

/* --- running ------------------------------------------------------------------------------------------------------ */

tetrain_status tetrain_fail(tetrain *host, tetrain_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(host->error, sizeof host->error, format, args);
    va_end(args);
    return status;
}

/* A pcall or a coroutine on the way up turns LuaJIT's failure into a plain error of its words, with a position before
 * them. They count where the heap did run out; LuaJIT's own allocator does not say whether it did. */
static bool tells_of_full_heap(const tetrain *host, const char *message)
{
    size_t n = strcspn(message, "\n"), words = sizeof TETRAIN_HEAP_EXHAUSTED - 1;
    bool   said = n >= words && memcmp(message + n - words, TETRAIN_HEAP_EXHAUSTED, words) == 0;
    return said && (host->now.ran_out || !host->arena);
}

static tetrain_status status_of(tetrain *host, int failure, const char *message)
{
    const char *engine = te_context_error(host->ctx);
    if (host->now.limit_reached) return TETRAIN_ERROR_LIMIT;
    if (host->interrupt_seen) return TETRAIN_ERROR_INTERRUPTED;
    if (host->now.exhausted || failure == LUA_ERRMEM || tells_of_full_heap(host, message)) return TETRAIN_ERROR_MEMORY;
    if (failure == LUA_ERRFILE) return TETRAIN_ERROR_IO;
    if (host->rt->status == TE_OK || !engine[0] || !strstr(message, engine)) return TETRAIN_ERROR_SCRIPT;
    switch (host->rt->status) {
    case TE_ERROR_MEMORY: return TETRAIN_ERROR_MEMORY;
    case TE_ERROR_IO: return TETRAIN_ERROR_IO;
    case TE_ERROR_INTERRUPTED: return TETRAIN_ERROR_INTERRUPTED; /* te_context_interrupt */
    default: return TETRAIN_ERROR_SCRIPT;
    }
}

/* Keeps the text at `index` as the message, zero bytes as "\0". */
static void take_text(tetrain *host, lua_State *L, int index)
{
    size_t      size, n = 0;
    const char *text = lua_tolstring(L, index, &size);
    for (size_t i = 0; i < size && n + 2 < sizeof host->error; i++) {
        if (!text[i]) host->error[n++] = '\\';
        host->error[n++] = text[i] ? text[i] : '0';
    }
    host->error[n] = 0;
}

/* Keeps what the error value at 1 says of itself, and its traceback. */
static int describe_error(lua_State *L)
{
    te_lua_push_kept(L, te_lua_trace);
    lua_pushnil(L);
    te_lua_keep(L, te_lua_trace);
    if (lua_isnumber(L, 1))
        lua_pushvalue(L, 1);
    else if (!luaL_callmeta(L, 1, "__tostring"))
        lua_pushfstring(L, "(error value of type %s)", luaL_typename(L, 1));
    if (!lua_isstring(L, -1)) lua_pushliteral(L, "(error value whose __tostring gives no string)");
    if (lua_isstring(L, 2)) {
        lua_pushvalue(L, 2);
        lua_concat(L, 2);
    }
    take_text(te_lua_attached(L)->host, L, -1);
    return 0;
}

/* Keeps the message of the error value on top. Nothing here allocates outside a protected call. */
static tetrain_status take_error(tetrain *host, int failure)
{
    lua_State *L = host->L;
    if (lua_type(L, -1) == LUA_TSTRING) {
        take_text(host, L, -1);
        return status_of(host, failure, host->error);
    }
    te_lua_push_kept(L, describe_key);
    lua_insert(L, -2);
    if (lua_pcall(L, 1, 0, 0) != 0) tetrain_fail(host, TETRAIN_OK, "(error value that cannot be described)");
    return status_of(host, failure, host->error);
}

/* What `require` puts in the place of a module that it is loading: a light userdata, which Debian's LuaJIT shows as a
 * number next to zero. */
static bool is_unfinished(lua_State *L, int index)
{
    if (lua_islightuserdata(L, index)) return true;
    return lua_type(L, index) == LUA_TNUMBER && fpclassify(lua_tonumber(L, index)) == FP_SUBNORMAL;
}

/* Modules whose loading failed can be required again. */
static int forget_unfinished(lua_State *L)
{
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    if (!lua_istable(L, -1)) return 0;
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        if (!is_unfinished(L, -1)) continue;
        lua_pushvalue(L, -2);
        lua_pushnil(L);
        lua_rawset(L, -5);
    }
    return 0;
}

/* What the host had set when its call began; scopes of the script are closed then. */
typedef struct host_settings {
    bool     grad_enabled, recipe_enabled, calibrating;
    te_dtype compute_dtype;
} host_settings;

/* Instructions for putting the library back: a script may have its own functions called then. */
enum { SETTLE_LIMIT = 1000000 };

/* Puts the library back to where no scope is open, where a script may have been stopped inside of some. Where memory is
 * short, or an interrupt comes, the next call does it. */
static void settle(tetrain *host)
{
    lua_State *L = host->L;
    if (!host->unsettled) return;
    lua_Hook own = lua_gethook(L); /* the host's, between calls */
    int      mask = lua_gethookmask(L), count = lua_gethookcount(L);
    tetrain_start_limits(host, SETTLE_LIMIT);
    te_lua_push_kept(L, te_lua_settle);
    host->unsettled = lua_isfunction(L, -1) && lua_pcall(L, 0, 0, 0) != 0;
    if (host->now.ran_out) collect_protected(host);
    tetrain_stop_limits(host, TETRAIN_OK);
    lua_sethook(L, own, mask, count);
}

/* Also what a script set by other ways than scopes. */
static void restore(tetrain *host, const host_settings *before)
{
    te_context_set_grad_enabled(host->ctx, before->grad_enabled);
    te_context_set_compute_dtype(host->ctx, before->compute_dtype);
    host->ctx->recipe_enabled = before->recipe_enabled;
    host->ctx->calibrating = before->calibrating;
}

/* Runs the function within the limits of a call; `top` is the stack's. */
static tetrain_status run_limited(tetrain *host, lua_CFunction function, void *argument, int top)
{
    lua_State     *L = host->L;
    tetrain_status status = TETRAIN_OK;
    tetrain_start_limits(host, host->options.instruction_limit);
    host->rt->status = TE_OK;
    int failure = lua_cpcall(L, function, argument);
    if (host->now.failure) failure = host->now.failure;
    if (failure) status = take_error(host, failure);
    else host->error[0] = 0; /* a call inside it may have left its own */
    lua_settop(L, top + LUA_MINSTACK); /* nils: values of dead frames would keep what they hold */
    lua_settop(L, top);
    /* a full heap is no reason for LuaJIT to collect; pcall may have hidden that it was full */
    bool ran_out = host->now.ran_out;
    if (status == TETRAIN_ERROR_MEMORY || ran_out || host->rt->status == TE_ERROR_MEMORY) {
        collect_protected(host);
        te_context_empty_host_cache(host->ctx);
    }
    host->failed |= failure != 0;
    host->unsettled |= failure != 0 || ran_out;
    return status;
}

static tetrain_status run_inside(tetrain *host, lua_CFunction function, void *argument, int top)
{
    outer_call     outer = tetrain_leave_limits(host);
    tetrain_status status = run_limited(host, function, argument, top);
    tetrain_resume_limits(host, &outer);
    return status;
}

static tetrain_status run_outermost(tetrain *host, lua_CFunction function, void *argument, int top)
{
    host_settings before = {te_context_grad_enabled(host->ctx), host->ctx->recipe_enabled, host->ctx->calibrating,
                            host->ctx->compute_dtype};
    if (host->failed) { /* now, when there may be memory again */
        host->failed = lua_cpcall(host->L, forget_unfinished, NULL) != 0;
        lua_settop(host->L, top);
    }
    settle(host);
    restore(host, &before);
    tetrain_status status = run_limited(host, function, argument, top);
    tetrain_stop_limits(host, status);
    settle(host);
    restore(host, &before);
    return status;
}

static tetrain_status run_protected(tetrain *host, lua_CFunction function, void *argument)
{
    lua_State     *L = host->L, *caller = host->rt->L;
    int            top = lua_gettop(L);
    tetrain_status status;
    const char    *outer = host->rt->stack_base; /* of a call inside which the host calls again */
    size_t         outer_room = host->rt->stack_room, left;
    if (!tetrain_begin_stack(host->rt, __builtin_frame_address(0), &left))
        return tetrain_fail(host, TETRAIN_ERROR_MEMORY, "the stack of this thread has %zu KiB left, too few for a call",
                            left >> 10);
    host->error[0] = 0;
    te_lua_forget_error(host->rt, L); /* of a backward pass that the host ran: nobody raises it any more */
    if (!lua_checkstack(L, LUA_MINSTACK))
        status = tetrain_fail(host, TETRAIN_ERROR_MEMORY, "out of Lua stack");
    else
        status = (outer ? run_inside : run_outermost)(host, function, argument, top);
    host->rt->L = caller;
    host->rt->stack_base = outer;
    host->rt->stack_room = outer_room;
    lua_settop(L, top);
    return status;
}

tetrain_status tetrain_protected(tetrain *host, lua_CFunction function, void *argument)
{
    te_float_mode  mode = te_float_mode_begin();
    tetrain_status status = run_protected(host, function, argument);
    te_float_mode_end(&mode);
    return status;
}

void tetrain_call_traced(tetrain *host, int n_args, int n_results)
{
    lua_State *L = host->L;
    int        function = lua_gettop(L) - n_args;
    lua_pushcfunction(L, te_lua_traceback);
    lua_insert(L, function);
    host->now.failure = lua_pcall(L, n_args, n_results, function);
    if (host->now.failure) lua_error(L);
    tetrain_count_work(host, L, 0); /* it caught what was to stop it, and ended */
    lua_remove(L, function);
}

typedef struct run_job {
    tetrain           *host;
    const char        *path, *code, *name;
    size_t             size;
    int                argc;
    const char *const *argv;
} run_job;

static void push_arguments(lua_State *L, const run_job *job)
{
    lua_createtable(L, job->argc, 1);
    lua_pushstring(L, job->path ? job->path : "-");
    lua_rawseti(L, -2, 0);
    for (int i = 0; i < job->argc; i++) {
        lua_pushstring(L, job->argv[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setglobal(L, "arg");
    luaL_checkstack(L, job->argc + LUA_MINSTACK, "too many arguments");
    for (int i = 0; i < job->argc; i++) lua_pushstring(L, job->argv[i]);
}

/* Raises why a chunk was not loaded. */
static int raise_unloaded(lua_State *L, int failure, const char *name)
{
    static const char wrong_mode[] = "attempt to load chunk with wrong mode"; /* LuaJIT's, without the name */
    if (failure == LUA_ERRSYNTAX && strcmp(lua_tostring(L, -1), wrong_mode) == 0)
        lua_pushfstring(L, "%s: bytecode is not accepted", name);
    return lua_error(L);
}

static int run_file(lua_State *L)
{
    run_job *job = lua_touserdata(L, 1);
    job->host->now.failure = luaL_loadfilex(L, job->path, "t");
    if (job->host->now.failure) return raise_unloaded(L, job->host->now.failure, job->path ? job->path : "stdin");
    push_arguments(L, job);
    tetrain_call_traced(job->host, job->argc, 0);
    return 0;
}

tetrain_status tetrain_run_file(tetrain *host, const char *path, int argc, const char *const *argv)
{
    run_job job = {.host = host, .path = path, .argc = argc, .argv = argv};
    if (!host) return TETRAIN_ERROR_ARGUMENT;
    if (argc < 0 || (argc && !argv))
        return tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_run_file: %d arguments at NULL", argc);
    return tetrain_protected(host, run_file, &job);
}

static int run_string(lua_State *L)
{
    run_job *job = lua_touserdata(L, 1);
    bool     marked = job->name[0] == '=' || job->name[0] == '@'; /* otherwise it may be the code */
    int      failure = luaL_loadbufferx(L, job->code, job->size, job->name, "t");
    if (failure) return raise_unloaded(L, failure, marked ? job->name + 1 : "(string)");
    tetrain_call_traced(job->host, 0, 0);
    return 0;
}

tetrain_status tetrain_run_string(tetrain *host, const char *code, size_t size, const char *chunk_name)
{
    run_job job = {.host = host, .code = code, .size = size, .name = chunk_name ? chunk_name : "=(string)"};
    if (!host) return TETRAIN_ERROR_ARGUMENT;
    if (!code && size)
        return tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_run_string: %zu bytes of code at NULL", size);
    return tetrain_protected(host, run_string, &job);
}
