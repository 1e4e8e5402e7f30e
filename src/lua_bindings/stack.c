/* stack.c - scripts whose calls nest too deeply.
 *
 * LuaJIT bounds the stack of a Lua state, not C's: a coroutine that resumes another one, or string.gsub whose
 * replacement calls string.gsub, takes C's stack down before Lua's is full, and with it the host. So what calls Lua
 * from C looks how much of the thread's stack is left: functions of the standard library by wrappers, and every
 * function of the engine where it begins.
 *
 * The wrappers are in Lua, and call on by tail calls: coroutines yield across them, and messages name the line of the
 * script.
 */
#define _GNU_SOURCE
#include "host.h"

#include <pthread.h>

/* Bytes: of the first calls, which nobody looks at; that kernels and what is around them take, 120 KiB at most; that
 * are left free where the stack is large, as drivers of devices want more; that calls may take where the stack is none
 * of the thread's own, as a fiber's; for coroutines inside coroutines, some hundred: each makes an error's message
 * longer; that opening takes. A call needs UNSEEN + KERNELS, on a fiber ELSEWHERE + KERNELS: tetrain.h promises that
 * 256 KiB are enough. */
enum {
    UNSEEN = 32 << 10,
    KERNELS = 160 << 10,
    MARGIN = 256 << 10,
    ELSEWHERE = 64 << 10,
    COROUTINES = 128 << 10,
    OPENING = 64 << 10
};

typedef struct stack_range {
    const char *low, *high; /* NULL, NULL: not known */
} stack_range;

static stack_range range_of_thread(void)
{
    pthread_attr_t attributes;
    void          *low = NULL;
    size_t         size = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        if (pthread_attr_getstack(&attributes, &low, &size) != 0) low = NULL;
        pthread_attr_destroy(&attributes);
    }
    return low ? (stack_range){low, (const char *)low + size} : (stack_range){NULL, NULL};
}

static bool is_within(stack_range range, const char *place) { return place > range.low && place < range.high; }

/* Bytes that calls may take below `base`. */
static size_t room_below(const char *base)
{
    stack_range range = range_of_thread();
    if (!is_within(range, base)) return ELSEWHERE;
    size_t quarter = (size_t)(range.high - range.low) / 4, margin = quarter < MARGIN ? quarter : MARGIN;
    size_t room = (size_t)(base - range.low);
    if (margin < KERNELS) margin = KERNELS;
    return room > margin + UNSEEN ? room - margin : UNSEEN;
}

/* Asking the system takes longer than a short call, so it is done once where one thread calls again and again. */
static stack_range range_of_caller(te_lua *rt)
{
    pthread_t self = pthread_self();
    if (!rt->stack_low || !pthread_equal(rt->stack_thread, self)) {
        stack_range range = range_of_thread();
        rt->stack_thread = self;
        rt->stack_low = range.low;
        rt->stack_high = range.high;
    }
    return (stack_range){rt->stack_low, rt->stack_high};
}

/* Whether both places are on one stack. */
static bool is_same(stack_range range, const char *base, const char *here)
{
    if (is_within(range, base) || is_within(range, here)) return is_within(range, base) && is_within(range, here);
    return here < base && (size_t)(base - here) < ELSEWHERE + KERNELS;
}

bool tetrain_begin_stack(te_lua *rt, const char *here, size_t *left)
{
    stack_range range = range_of_caller(rt);
    bool        inside = rt->stack_base && is_same(range, rt->stack_base, here), known = is_within(range, here);
    *left = known ? (size_t)(here - range.low) : SIZE_MAX;
    if (inside && !known) *left = ELSEWHERE + KERNELS - (size_t)(rt->stack_base - here);
    if (*left < (inside ? KERNELS : UNSEEN + KERNELS)) return false;
    if (inside) return true; /* each function that it calls looks */
    rt->stack_base = here;
    rt->stack_room = 0;
    return true;
}

bool tetrain_may_open(const char *here)
{
    stack_range range = range_of_thread();
    return !is_within(range, here) || here - range.low >= OPENING;
}

static void check(te_lua *rt, lua_State *L, size_t enough)
{
    const char *here = __builtin_frame_address(0), *base = rt->stack_base;
    if (!base || here >= base || (size_t)(base - here) < UNSEEN) return;
    if (!rt->stack_room) rt->stack_room = room_below(base);
    size_t used = (size_t)(base - here);
    if (used < rt->stack_room && used < enough) return;
    lua_pushliteral(L, "stack overflow: calls are nested too deeply");
    lua_error(L);
}

void te_lua_check_stack(te_lua *rt, lua_State *L) { check(rt, L, SIZE_MAX); }

/* check(coroutines) */
static int check_stack(lua_State *L)
{
    te_lua *rt = te_lua_attached(L);
    if (rt) check(rt, L, lua_toboolean(L, 1) ? COROUTINES : SIZE_MAX); /* there is none yet while the state opens */
    return 0;
}

static const char guards[] =
    "local check, globals = ...\n"
    "local function guard(library, name, coroutines)\n"
    "    local call = library and library[name]\n"
    "    if call then library[name] = function(...) check(coroutines) return call(...) end end\n"
    "end\n"
    "for _, name in ipairs { 'load', 'loadstring', 'require', 'dofile', 'print', 'tostring' } do\n"
    "    guard(globals, name)\n"
    "end\n"
    "for _, name in ipairs { 'gsub', 'format' } do guard(globals.string, name) end\n"
    "for _, name in ipairs { 'sort', 'foreach', 'foreachi' } do guard(globals.table, name) end\n"
    "guard(globals.coroutine, 'resume', true)\n"
    "local wrap = globals.coroutine.wrap\n"
    "globals.coroutine.wrap = function(...)\n"
    "    local resume = wrap(...)\n"
    "    return function(...) check(true) return resume(...) end\n"
    "end";

void tetrain_guard_stack(lua_State *L)
{
    if (luaL_loadbuffer(L, guards, sizeof guards - 1, "=tetrain") != 0) lua_error(L);
    lua_pushcfunction(L, check_stack);
    lua_pushvalue(L, LUA_GLOBALSINDEX);
    lua_call(L, 2, 0);
}
