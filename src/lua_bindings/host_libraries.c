/* host_libraries.c - the standard library of a runtime: what a restricted one leaves out, and what is replaced so that
 * a script can neither end the process nor escape what stops it.
 */
#include "host.h"

#include <luajit.h>
#include <string.h>

/* Zero bytes of the string on top become "\0". */
static void show_zeros(lua_State *L)
{
    size_t      size;
    const char *text = lua_tolstring(L, -1, &size);
    luaL_Buffer shown;
    if (!memchr(text, 0, size)) return;
    luaL_buffinit(L, &shown);
    for (size_t i = 0; i < size; i++) {
        if (!text[i]) luaL_addchar(&shown, '\\');
        luaL_addchar(&shown, text[i] ? text[i] : '0');
    }
    luaL_pushresult(&shown);
}

static int restricted_print(lua_State *L)
{
    tetrain    *host = te_lua_attached(L)->host;
    luaL_Buffer line;
    int         n = lua_gettop(L);
    lua_getglobal(L, "tostring");
    luaL_buffinit(L, &line);
    for (int i = 1; i <= n; i++) {
        if (i > 1) luaL_addchar(&line, '\t');
        lua_pushvalue(L, n + 1);
        lua_pushvalue(L, i);
        lua_call(L, 1, 1);
        if (!lua_isstring(L, -1)) return luaL_error(L, "'tostring' must return a string to 'print'");
        luaL_addvalue(&line);
    }
    luaL_pushresult(&line);
    show_zeros(L);
    if (host->options.log) host->options.log(host->options.user, 0, lua_tostring(L, -1));
    return 0;
}

/* At the first number of 64 bits, "1LL" in any script, LuaJIT opens the library itself and leaves it in package.loaded,
 * from which require would take it. It does so once: what has been opened here, and is where no script looks, is out of
 * reach. It has to live, for what LuaJIT keeps of such numbers is held by it alone. */
static void keep_ffi_away(lua_State *L)
{
    static const char key = 0;
    lua_pushlightuserdata(L, (void *)(uintptr_t)&key);
    lua_pushcfunction(L, luaopen_ffi);
    lua_pushliteral(L, LUA_FFILIBNAME);
    lua_call(L, 1, 1);
    lua_rawset(L, LUA_REGISTRYINDEX);
    luaL_findtable(L, LUA_REGISTRYINDEX, "_LOADED", 16);
    lua_pushnil(L);
    lua_setfield(L, -2, LUA_FFILIBNAME);
    lua_pop(L, 1);
}

static void open_restricted(lua_State *L)
{
    static const luaL_Reg libraries[] = {{"", luaopen_base},
                                         {LUA_TABLIBNAME, luaopen_table},
                                         {LUA_STRLIBNAME, luaopen_string},
                                         {LUA_MATHLIBNAME, luaopen_math},
                                         {LUA_BITLIBNAME, luaopen_bit},
                                         {NULL, NULL}};
    static const char *const removed[] = {"dofile", "loadfile", "module", "newproxy", "collectgarbage", NULL};
    for (const luaL_Reg *library = libraries; library->func; library++) {
        lua_pushcfunction(L, library->func);
        lua_pushstring(L, library->name);
        lua_call(L, 1, 0);
    }
    for (int i = 0; removed[i]; i++) {
        lua_pushnil(L);
        lua_setglobal(L, removed[i]);
    }
    lua_getglobal(L, "string");
    lua_pushnil(L);
    lua_setfield(L, -2, "dump");
    lua_pop(L, 1);
    keep_ffi_away(L);
    lua_pushcfunction(L, restricted_print);
    lua_setglobal(L, "print");
}

static int do_nothing(lua_State *L)
{
    (void)L;
    return 0;
}

static void replace_field(lua_State *L, const char *library, const char *name, lua_CFunction function)
{
    lua_getglobal(L, library);
    if (lua_istable(L, -1)) {
        lua_pushcfunction(L, function);
        lua_setfield(L, -2, name);
    }
    lua_pop(L, 1);
}

/* The original function, called from C; upvalue 1. */
static int call_original(lua_State *L)
{
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    return lua_gettop(L);
}

/* LuaJIT's fast functions that make strings leave the stack's top unset when the allocation fails, and unwinding then
 * crashes. Called by way of C they find it set. */
static void shield_fast_functions(lua_State *L)
{
    static const char *const names[] = {"sub", "char", "lower", "upper", "reverse", NULL};
    lua_getglobal(L, "tostring");
    lua_pushcclosure(L, call_original, 1);
    lua_setglobal(L, "tostring");
    lua_getglobal(L, "string");
    for (int i = 0; names[i]; i++) {
        lua_getfield(L, -1, names[i]);
        lua_pushcclosure(L, call_original, 1);
        lua_setfield(L, -2, names[i]);
    }
    lua_pop(L, 1);
}

/* The heap may fail: the collector keeps closer to what is live, since a full heap is no reason for LuaJIT to
 * collect. */
static void expect_failures(lua_State *L)
{
    enum { PAUSE = 110, STEP = 400 };
    shield_fast_functions(L);
    lua_gc(L, LUA_GCSETPAUSE, PAUSE);
    lua_gc(L, LUA_GCSETSTEPMUL, STEP);
}

static int refuse_exit(lua_State *L)
{
    return te_lua_fail(L, NULL, "os.exit: the script runs inside another program, which it cannot end");
}

/* The compiler is off for good: a script cannot turn it on, nor take away the hook that stops it. */
static void stay_interpreted(lua_State *L)
{
    luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF); /* opening the jit library turned it on */
    replace_field(L, "jit", "on", do_nothing);
    replace_field(L, "debug", "sethook", do_nothing);
}

void tetrain_open_libraries(tetrain *host, lua_State *L)
{
    if (host->options.flags & TETRAIN_RESTRICTED)
        open_restricted(L);
    else
        luaL_openlibs(L);
    if (!(host->options.flags & TETRAIN_MAY_EXIT)) replace_field(L, "os", "exit", refuse_exit);
    if (host->interpreted) stay_interpreted(L);
    if (host->arena) expect_failures(L);
}
