/* limits.c - stopping scripts: interrupts, the instruction limit and, in restricted runtimes, limits of memory.
 *
 * A hook looks every so many instructions. Once a script is to stop, it raises at every instruction until the call of
 * the host has ended, so that pcall cannot keep a script alive; where memory is what ended, from the moment on in which
 * the allocation failed. What a script had C do as its last deed is looked at when it has ended. An interrupt only sets
 * flags: lua_sethook from another thread or from a signal handler changes what the interpreter and the compiler are
 * changing at the same moment, and then the hook is lost or never fires again. So the thread that runs the script sets
 * all hooks.
 *
 * Compiled code calls no hooks: there the engine's own check fails the next operation, which also drops all compiled
 * code; runtimes with an instruction limit run interpreted. Compiled code that calls no operation is not reached.
 *
 * LuaJIT calls no hooks while one runs, and the message handler of an xpcall is still part of it: a script's handler
 * that never ends would not be stopped. So where scripts can be stopped xpcall leaves handlers out for errors that
 * stop. Its `load` forgets that the hook is over when a hook's error ends the function that it reads from: there the
 * text is read beforehand. Finalizers run without hooks, and scripts get none but by the debug and ffi libraries, where
 * these are open.
 *
 * A hook counts a call of C as one instruction. Functions of the standard library that take long for it count their
 * work themselves: those that match patterns in patterns.c, the others here.
 *
 * Next to the end of the stack a hook overflows it before it can look, so a script that dwells there, like f =
 * function() pcall(f) return f() end, would not be stopped. It can only dwell there by catching errors: so pcall and
 * xpcall look, too. From then on every instruction has its hook, and the overflows of those take the stack down.
 */
#include "host.h"

#include <luajit.h>

/* A piece of work in C that takes about as long as an instruction: so many bytes. */
enum { BYTES = 64 };

/* Instructions between two looks: an interpreted script is stopped soon, even when each is a call of C that takes long,
 * and the compiler, whose recording a hook ends, gets to finish its traces. */
enum { STEP_INTERPRETED = 1000, STEP_COMPILED = 10000, CALL_COST = 4, HOST_CALL_COST = 100 };

static void look(lua_State *L, lua_Debug *frame)
{
    tetrain *host = te_lua_attached(L)->host;
    (void)frame;
    tetrain_count_work(host, L, host->now.limit_reached ? 0 : host->now.step);
}

void te_lua_stop(te_lua *rt, lua_State *L)
{
    if (tetrain_is_interrupted(rt->host)) rt->host->interrupt_seen = true;
    if (!rt->left_jit) {
        rt->left_jit = luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF) != 0;
        luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_FLUSH);
    }
    lua_sethook(L, look, LUA_MASKCOUNT, 1); /* a call hook would fail the message handler, too */
}

void te_lua_exhausted(te_lua *rt, const char *message)
{
    tetrain *host = rt ? rt->host : NULL;
    if (!host || !rt->restricted || !rt->stack_base) return; /* no call runs */
    host->now.exhausted = message;
    lua_sethook(host->L, look, LUA_MASKCOUNT, 1);
}

/* Messages are made of as little as can be, not by te_lua_fail: hooks, and pcall's first step, may be at the very end
 * of the stack, where the collector, which a new text may start, cannot call a finalizer and loses it. */
void tetrain_count_work(tetrain *host, lua_State *L, unsigned instructions)
{
    if (tetrain_is_interrupted(host)) {
        te_lua_stop(host->rt, L);
        luaL_error(L, "interrupted");
    }
    if (host->now.exhausted) luaL_error(L, "%s", host->now.exhausted);
    if (!host->now.limit) return;
    host->now.executed += instructions;
    if (host->now.executed < host->now.limit && !host->now.limit_reached) return;
    host->now.limit_reached = true;
    te_lua_stop(host->rt, L);
    luaL_error(L, "instruction limit of %f reached", (double)host->now.limit);
}

/* The heap has given a block, which the script's instruction now fills: a long text that is joined, cut or formatted.
 * Nothing can be raised there; the hook does it at the next instruction. */
void tetrain_count_large(tetrain *host, size_t bytes)
{
    if (!host->rt || !host->rt->stack_base || lua_gethook(host->L) != look) return; /* no call runs */
    if (host->now.limit) host->now.executed += bytes / BYTES;
    bool used_up = host->now.limit && host->now.executed >= host->now.limit;
    if (used_up || tetrain_is_interrupted(host)) lua_sethook(host->L, look, LUA_MASKCOUNT, 1);
}

/* pcall and xpcall begin with it. */
static int count_call(lua_State *L)
{
    tetrain_count_work(te_lua_attached(L)->host, L, CALL_COST);
    return 0;
}

/* The handler of guarded_xpcall; upvalue 1 is the script's. */
static int call_handler(lua_State *L)
{
    tetrain *host = te_lua_attached(L)->host;
    if (tetrain_is_stopping(host)) return 1; /* the message */
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

/* In Lua, and with tail calls, so that coroutines can yield across them. */
static const char guarded_calls[] =
    "local pcall, xpcall, guard, count = ...\n"
    "return function(...) count() return pcall(...) end,\n"
    "    function(f, handler, ...) count() return xpcall(f, guard(handler), ...) end";

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

/* --- functions of the library that take long ---------------------------------------------------------------------- */

/* Their work counts in advance, and interrupts are seen before it: a hook would count such a call as one instruction.
 * That of an element in instructions: */
enum { CONCAT_COST = 8, SORT_COST = 16, TEXT_COST = 16, LONG_SORT = 1000 };

static void count_size(lua_State *L, double instructions)
{
    unsigned most = 1u << 30;
    bool     some = instructions > 0;
    tetrain_count_work(te_lua_attached(L)->host, L,
                       CALL_COST + (!some ? 0 : instructions < most ? (unsigned)instructions : most));
}

static double size_of(lua_State *L, int index)
{
    int type = lua_type(L, index);
    return type == LUA_TTABLE || type == LUA_TSTRING ? (double)lua_objlen(L, index) : 0;
}

static int count_bytes(lua_State *L)
{
    count_size(L, size_of(L, 1) / BYTES);
    return 0;
}

/* Every text among the arguments. */
static int count_texts(lua_State *L)
{
    double bytes = 0;
    for (int i = lua_gettop(L); i > 0; i--) bytes += lua_type(L, i) == LUA_TSTRING ? size_of(L, i) : 0;
    count_size(L, TEXT_COST * bytes / BYTES);
    return 0;
}

/* sub(s, i, j): what it takes of the text. A text that is there already is compared with it, and nothing allocated. */
static int count_sub(lua_State *L)
{
    double size = size_of(L, 1), i = lua_tonumber(L, 2), j = lua_isnoneornil(L, 3) ? -1 : lua_tonumber(L, 3);
    if (i < 0) i += size + 1;
    if (j < 0) j += size + 1;
    count_size(L, ((j < size ? j : size) - (i > 1 ? i : 1)) / BYTES);
    return 0;
}

/* Of no bytes as well LuaJIT goes through all n. */
static int count_rep(lua_State *L)
{
    double size = size_of(L, 1) + size_of(L, 3);
    count_size(L, lua_tonumber(L, 2) * (size > 1 ? size : 1) / BYTES);
    return 0;
}

static int count_concat(lua_State *L)
{
    count_size(L, CONCAT_COST * size_of(L, 1));
    return 0;
}

/* insert(t, position, value): from a position before the first one on LuaJIT would move what is no element, all of it
 * in one go. */
static int count_insert(lua_State *L)
{
    if (!lua_istable(L, 1) || !lua_isnumber(L, 2)) return 0; /* an error */
    char   text[256];
    double at = lua_tonumber(L, 2);
    if (!(at >= 1 && at <= INT32_MAX))
        return te_lua_fail(L, NULL, "table.insert: position: expected one from 1 to %d, got %s", INT32_MAX,
                           te_lua_describe(L, 2, text, sizeof text));
    count_size(L, (double)lua_objlen(L, 1) - at);
    return 0;
}

/* Whether sort(t, less) would run long without an instruction of Lua's. */
static int count_sort(lua_State *L)
{
    bool of_c = lua_isnoneornil(L, 2) || lua_iscfunction(L, 2);
    count_size(L, SORT_COST * size_of(L, 1));
    lua_pushboolean(L, of_c && lua_istable(L, 1) && lua_objlen(L, 1) > LONG_SORT);
    return 1;
}

static const char guarded_work[] =
    "local globals, bytes, rep, concat, insert, sorts, texts, sub = ...\n"
    "local string, table, select = globals.string, globals.table, globals.select\n"
    "local function guard(library, name, count)\n"
    "    local call = library[name]\n"
    "    library[name] = function(...) count(...) return call(...) end\n"
    "end\n"
    "for _, name in ipairs { 'reverse', 'upper', 'lower' } do guard(string, name, bytes) end\n"
    "guard(string, 'rep', rep)\n"
    "guard(string, 'format', texts)\n"
    "for _, name in ipairs { 'load', 'loadstring' } do guard(globals, name, texts) end\n"
    "local function guard_long(library, name, count)\n"
    "    local call, kind = library[name], globals.type\n"
    "    library[name] = function(x, ...)\n"
    "        if kind(x) == 'string' and #x > 1000 then count(x, ...) end\n"
    "        return call(x, ...)\n"
    "    end\n"
    "end\n"
    "guard_long(globals, 'tonumber', texts)\n"
    "guard_long(string, 'sub', sub)\n"
    "guard(table, 'concat', concat)\n"
    "local sort, append, ascending = table.sort, table.insert, function(a, b) return a < b end\n"
    "function table.insert(...)\n"
    "    if select('#', ...) == 3 then insert(...) end\n"
    "    return append(...)\n"
    "end\n"
    "function table.sort(t, less)\n"
    "    if not sorts(t, less) then return sort(t, less) end\n"
    "    return sort(t, less and function(a, b) return less(a, b) end or ascending)\n"
    "end";

static void guard_work(lua_State *L)
{
    static const lua_CFunction counts[] = {count_bytes, count_rep, count_concat, count_insert, count_sort,
                                           count_texts, count_sub};
    enum { N = sizeof counts / sizeof *counts };
    if (luaL_loadbuffer(L, guarded_work, sizeof guarded_work - 1, "=te/limits") != 0) lua_error(L);
    lua_pushvalue(L, LUA_GLOBALSINDEX);
    for (int i = 0; i < N; i++) lua_pushcfunction(L, counts[i]);
    lua_call(L, 1 + N, 0);
}

/* The metatable of files is its own __index, and open: scripts get a table of the methods alone. */
static void hide_finalizer_of_files(lua_State *L)
{
    lua_getfield(L, LUA_REGISTRYINDEX, LUA_FILEHANDLE);
    if (lua_istable(L, -1)) {
        lua_newtable(L);
        for (lua_pushnil(L); lua_next(L, -3); lua_pop(L, 1)) {
            if (lua_type(L, -2) != LUA_TSTRING || strncmp(lua_tostring(L, -2), "__", 2) == 0) continue;
            lua_pushvalue(L, -2);
            lua_pushvalue(L, -2);
            lua_rawset(L, -5);
        }
        lua_setfield(L, -2, "__index");
        te_lua_flag_entry(L, "__metatable", false);
    }
    lua_pop(L, 1);
}

void tetrain_guard_script(lua_State *L)
{
    lua_getglobal(L, "load");
    lua_pushcclosure(L, guarded_load, 1);
    lua_setglobal(L, "load");
    lua_pushnil(L);
    lua_setglobal(L, "newproxy"); /* a way to finalizers */
    hide_finalizer_of_files(L);
    if (luaL_loadbuffer(L, guarded_calls, sizeof guarded_calls - 1, "=te/limits") != 0) lua_error(L);
    lua_getglobal(L, "pcall");
    lua_getglobal(L, "xpcall");
    lua_pushcfunction(L, guard_handler);
    lua_pushcfunction(L, count_call);
    lua_call(L, 4, 2);
    lua_setglobal(L, "xpcall");
    lua_setglobal(L, "pcall");
    guard_work(L);
}

/* A hook of the host's own stays where nothing else needs one. */
void tetrain_start_limits(tetrain *host, uint64_t instructions)
{
    unsigned step = host->interpreted ? STEP_INTERPRETED : STEP_COMPILED;
    host->now = (call_state){.limit = instructions};
    host->now.step = instructions && instructions < step ? (unsigned)instructions : step;
    host->interrupt_seen = false;
    host->ctx->limit_refused = false;
    bool     interrupted = tetrain_is_interrupted(host);
    lua_Hook hook = lua_gethook(host->L);
    if (instructions || interrupted || !hook || hook == look)
        lua_sethook(host->L, look, LUA_MASKCOUNT, interrupted ? 1 : (int)host->now.step);
}

void tetrain_stop_limits(tetrain *host, tetrain_status status)
{
    if (lua_gethook(host->L) == look) lua_sethook(host->L, NULL, 0, 0);
    if (host->rt->left_jit && !host->interpreted) luaJIT_setmode(host->L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_ON);
    host->rt->left_jit = false;
    host->now = (call_state){0}; /* what is put back does not count */
    host->rt->stop_requested = 0;
    host->rt->polls_stop = false;
    /* one that came too late for this call's script is the next one's */
    if (status == TETRAIN_ERROR_INTERRUPTED && host->interrupt_seen)
        atomic_fetch_and(&host->ctx->interrupted, ~TE_INTERRUPT_SCRIPTS);
    host->interrupt_seen = false;
}

outer_call tetrain_leave_limits(tetrain *host)
{
    lua_State *L = host->L;
    return (outer_call){.now = host->now, .interrupt_seen = host->interrupt_seen,
                        .limit_refused = host->ctx->limit_refused, .polls_stop = host->rt->polls_stop,
                        .status = host->rt->status, .hook = lua_gethook(L), .hook_mask = lua_gethookmask(L),
                        .hook_count = lua_gethookcount(L)};
}

/* The hook begins to count anew, so the call itself costs something, too. The compiler stays off where the inner call
 * turned it off: it did so for an interrupt. */
void tetrain_resume_limits(tetrain *host, const outer_call *outer)
{
    lua_State *L = host->L;
    uint64_t   inner = host->now.executed;
    host->now = outer->now;
    host->now.executed += inner + HOST_CALL_COST;
    host->interrupt_seen = outer->interrupt_seen;
    host->ctx->limit_refused = outer->limit_refused;
    host->rt->polls_stop = outer->polls_stop;
    host->rt->status = outer->status;
    if (lua_gethook(L) != look) return; /* the inner script's own */
    lua_sethook(L, outer->hook, outer->hook_mask, outer->hook_count);
    bool used_up = host->now.limit && host->now.executed >= host->now.limit;
    if (used_up || tetrain_is_stopping(host)) lua_sethook(L, look, LUA_MASKCOUNT, 1);
}

void tetrain_interrupt(tetrain *host)
{
    if (host) atomic_fetch_or(&host->ctx->interrupted, TE_INTERRUPT_SCRIPTS);
}

bool tetrain_interrupt_pending(tetrain *host)
{
    te_lua *rt = host ? host->rt : NULL;
    return rt && tetrain_is_interrupted(host) && !host->interrupt_seen && !rt->saving;
}

bool tetrain_request_stop(tetrain *host)
{
    te_lua *rt = host ? host->rt : NULL; /* NULL: the state is closing */
    return rt && !atomic_exchange(&rt->stop_requested, 1) && rt->polls_stop;
}
