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

/* Bytes: of the first calls, which nobody looks at; that a call may take besides; that are assumed where a thread's
 * stack cannot be found; for coroutines inside coroutines, some hundred: each makes an error's message longer. */
enum { UNSEEN = 32 << 10, MARGIN = 256 << 10, ASSUMED = 512 << 10, COROUTINES = 128 << 10 };

/* Bytes that calls may take below `base`, a place on this thread's stack. */
static size_t room_below(const char *base)
{
    pthread_attr_t attributes;
    void          *low = NULL;
    size_t         size = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        if (pthread_attr_getstack(&attributes, &low, &size) != 0) low = NULL;
        pthread_attr_destroy(&attributes);
    }
    if (!low || base <= (const char *)low) return ASSUMED;
    size_t room = (size_t)(base - (const char *)low), margin = size / 4 < MARGIN ? size / 4 : MARGIN;
    return room > margin ? room - margin : UNSEEN;
}

static void check(te_lua *rt, lua_State *L, size_t enough)
{
    const char here = 0, *base = rt->stack_base;
    if (!base || &here >= base || (size_t)(base - &here) < UNSEEN) return;
    if (!rt->stack_room) rt->stack_room = room_below(base);
    size_t used = (size_t)(base - &here);
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
    "for _, name in ipairs { 'load', 'loadstring', 'require', 'dofile', 'print' } do guard(globals, name) end\n"
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
