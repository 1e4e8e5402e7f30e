/* limits.c - stopping scripts: interrupts and the instruction limit.
 *
 * Both raise from a hook, again at every instruction until the call of the host has ended, so that pcall cannot keep a
 * script alive. Compiled code calls no hooks: there the engine's own check fails the next operation, which also drops
 * all compiled code; runtimes with an instruction limit run interpreted. Compiled code that calls no operation is not
 * reached.
 *
 * LuaJIT calls no hooks while one runs, and the message handler of an xpcall is still part of it: a script's handler
 * that never ends would not be stopped. So where scripts can be stopped xpcall leaves handlers out for errors that
 * stop. Its `load` forgets that the hook is over when a hook's error ends the function that it reads from: there the
 * text is read beforehand. Finalizers run without hooks, and scripts get none.
 *
 * One hole remains in the instruction limit: next to the end of the stack a hook overflows it before it can count, so
 * a script that dwells there, like f = function() pcall(f) return f() end, is counted late or never. An interrupt ends
 * it, since its hook comes at every instruction and the overflows themselves take the stack down.
 */
#include "host.h"

#include <luajit.h>

enum { COUNT_STEP = 10000 };

static void stop_hook(lua_State *L, lua_Debug *frame)
{
    tetrain *host = te_lua_attached(L)->host;
    (void)frame;
    tetrain_count_work(host, L, host->limit_reached ? 0 : COUNT_STEP);
}

void tetrain_count_work(tetrain *host, lua_State *L, unsigned instructions)
{
    if (host->interrupted) luaL_error(L, "interrupted");
    if (!host->options.instruction_limit) return;
    host->executed += instructions;
    if (host->executed < host->options.instruction_limit && !host->limit_reached) return;
    host->limit_reached = true;
    lua_sethook(L, stop_hook, LUA_MASKCOUNT, 1);
    luaL_error(L, "instruction limit of %f reached", (double)host->options.instruction_limit);
}

/* The handler of guarded_xpcall; upvalue 1 is the script's. */
static int call_handler(lua_State *L)
{
    tetrain *host = te_lua_attached(L)->host;
    if (host->limit_reached || host->interrupted) return 1; /* the message */
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, lua_gettop(L) - 1, 1);
    return 1;
}

static int guard_handler(lua_State *L)
{
    lua_settop(L, 1);
    lua_pushcclosure(L, call_handler, 1);
    return 1;
}

/* In Lua, and with tail calls, so that coroutines can yield across it. */
static const char guarded_xpcall[] = "local xpcall, guard = ...\n"
                                     "return function(f, handler, ...) return xpcall(f, guard(handler), ...) end";

/* All that the function at 1 gives, as a string. */
static int read_all(lua_State *L)
{
    int n = 1;
    lua_newtable(L); /* at 2: the pieces; a buffer would stand in the way of the calls */
    for (;; n++) {
        lua_pushvalue(L, 1);
        lua_call(L, 0, 1);
        if (lua_isnil(L, -1) || (lua_isstring(L, -1) && lua_objlen(L, -1) == 0)) break;
        if (!lua_isstring(L, -1)) return luaL_error(L, "reader function must return a string");
        lua_rawseti(L, 2, n);
    }
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    for (int i = 1; i < n; i++) {
        lua_rawgeti(L, 2, i);
        luaL_addvalue(&text);
    }
    luaL_pushresult(&text);
    return 1;
}

/* load(chunk, name, mode, env) where chunk is read first; upvalue 1 is the original. */
static int guarded_load(lua_State *L)
{
    lua_settop(L, 4);
    if (lua_isfunction(L, 1)) {
        if (lua_isnil(L, 2)) {
            lua_pushliteral(L, "=(load)");
            lua_replace(L, 2);
        }
        lua_pushcfunction(L, read_all);
        lua_pushvalue(L, 1);
        if (lua_pcall(L, 1, 1, 0) != 0) {
            lua_pushnil(L);
            lua_insert(L, -2);
            return 2;
        }
        lua_replace(L, 1);
    }
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, 4, LUA_MULTRET);
    return lua_gettop(L);
}

void tetrain_guard_script(lua_State *L)
{
    lua_getglobal(L, "load");
    lua_pushcclosure(L, guarded_load, 1);
    lua_setglobal(L, "load");
    lua_pushnil(L);
    lua_setglobal(L, "newproxy"); /* the way to finalizers */
    if (luaL_loadbuffer(L, guarded_xpcall, sizeof guarded_xpcall - 1, "=tetrain") != 0) lua_error(L);
    lua_getglobal(L, "xpcall");
    lua_pushcfunction(L, guard_handler);
    lua_call(L, 2, 1);
    lua_setglobal(L, "xpcall");
}

void te_lua_leave_jit(te_lua *rt, lua_State *L)
{
    if (rt->left_jit) return;
    rt->left_jit = luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF) != 0;
    luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_FLUSH);
}

void tetrain_start_limits(tetrain *host)
{
    host->executed = 0;
    host->limit_reached = false;
    uint64_t limit = host->options.instruction_limit;
    if (limit && !host->interrupted) lua_sethook(host->L, stop_hook, LUA_MASKCOUNT, limit < COUNT_STEP ? (int)limit : COUNT_STEP);
}

void tetrain_stop_limits(tetrain *host)
{
    lua_sethook(host->L, NULL, 0, 0);
    if (host->rt->left_jit && !host->interpreted) luaJIT_setmode(host->L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_ON);
    host->rt->left_jit = false;
    host->limit_reached = false;
    host->interrupted = 0;
    host->rt->stop_requested = 0;
    host->rt->polls_stop = false;
    te_context_clear_interrupt(host->ctx);
}

void tetrain_interrupt(tetrain *host)
{
    host->interrupted = 1;
    te_context_interrupt(host->ctx);
    lua_sethook(host->L, stop_hook, LUA_MASKCOUNT, 1); /* a call hook would fail the message handler, too */
}

bool tetrain_request_stop(tetrain *host)
{
    bool listens = host->rt->polls_stop && !host->rt->stop_requested;
    host->rt->stop_requested = 1;
    return listens;
}
