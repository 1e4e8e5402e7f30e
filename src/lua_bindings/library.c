/* library.c - the Lua library inside the program, and loading that takes text only.
 *
 * Damaged bytecode can crash LuaJIT, so no way of loading code accepts it: load, loadstring, loadfile and dofile are
 * replaced, and so is the searcher of Lua files behind require. Modules of the library are embedded as source, parsed
 * when first required, and named "te/….lua" in messages.
 */
#include "bindings.h"

#include "tetrain/tetrain.h"

#include <stdio.h>

/* --- embedded sources --------------------------------------------------------------------------------------------- */

/* Pushes a block that begins with the text, for the length of a call. */
static const char *push_text(lua_State *L, const te_lua_source *source)
{
    unsigned char *text = te_lua_scratch(L, source->size);
    te_lua_unpack(source, text);
    return (const char *)text;
}

bool te_lua_load_source(lua_State *L, const char *name)
{
    const te_lua_source *s = te_lua_sources;
    char                 chunk[128];
    while (s->name && strcmp(s->name, name) != 0) s++;
    if (!s->name) return false;
    snprintf(chunk, sizeof chunk, "=%s", s->file);
    if (luaL_loadbufferx(L, push_text(L, s), s->size, chunk, "t") != 0) lua_error(L);
    lua_remove(L, -2);
    return true;
}

/* library_sources(): the text of every embedded file by its name. */
static int library_sources(lua_State *L)
{
    lua_newtable(L);
    for (const te_lua_source *s = te_lua_sources; s->name; s++) {
        lua_pushlstring(L, push_text(L, s), s->size);
        lua_setfield(L, -3, s->file);
        lua_pop(L, 1);
    }
    return 1;
}

/* nearest(name, list): the string of the list most like name, or nil. */
static int nearest(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    size_t       n = lua_objlen(L, 2);
    const char **names = te_lua_scratch(L, (n + 1) * sizeof *names);
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, 2, (int)i + 1);
        names[i] = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "";
        lua_pop(L, 1);
    }
    lua_pushstring(L, te_lua_nearest(name, names, (int)n));
    return 1;
}

/* dtype_hint(name): what a message says behind a name that is no dtype's. */
static int dtype_hint(lua_State *L)
{
    char text[256];
    lua_pushstring(L, te_lua_dtype_hint(luaL_checkstring(L, 1), text, sizeof text));
    return 1;
}

/* describe(value): how messages name it, a tensor by its dtype and shape. */
static int describe(lua_State *L)
{
    char text[256];
    luaL_checkany(L, 1);
    lua_pushstring(L, te_lua_describe(L, 1, text, sizeof text));
    return 1;
}

/* is_callable(value): whether it can be called, also where its metatable hides. */
static int is_callable(lua_State *L)
{
    luaL_checkany(L, 1);
    lua_pushboolean(L, lua_isfunction(L, 1) || (luaL_getmetafield(L, 1, "__call") && lua_isfunction(L, -1)));
    return 1;
}

/* fail(message): raises it at the line of the nearest caller outside the library. */
static int fail(lua_State *L) { return te_lua_fail(L, NULL, "%s", luaL_checkstring(L, 1)); }

/* fail_io(message): likewise what reading or writing a file failed with, which a host can tell by its status. */
static int fail_io(lua_State *L)
{
    te_io_error error = {.status = TE_ERROR_IO};
    snprintf(error.message, sizeof error.message, "%s", luaL_checkstring(L, 1));
    return te_lua_raise_io(te_lua_runtime(L), L, NULL, &error);
}

const luaL_Reg te_lua_library_functions[] = {
    {"library_sources", library_sources}, {"nearest", nearest}, {"dtype_hint", dtype_hint},
    {"describe", describe}, {"is_callable", is_callable}, {"fail", fail}, {"fail_io", fail_io}, {NULL, NULL},
};

/* Loads the module named at 1, upvalue 1 is its source. A script may take it out of package.loaded: it stays the same
 * module, since to the others of the library a second one would be a stranger. */
static int load_once(lua_State *L)
{
    lua_settop(L, 1);
    te_lua_push_kept(L, te_lua_modules);
    lua_pushvalue(L, 1);
    lua_rawget(L, 2);
    if (!lua_isnil(L, 3)) return 1;
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    if (lua_isnil(L, 4)) {
        lua_pushboolean(L, 1);
        lua_replace(L, 4);
    }
    lua_pushvalue(L, 1);
    lua_pushvalue(L, 4);
    lua_rawset(L, 2);
    return 1;
}

/* Pushes what loads a module of the library; false, and nothing is pushed, when there is none of that name. */
static bool push_loader(lua_State *L, const char *name)
{
    if (strcmp(name, "te") == 0) {
        lua_pushcfunction(L, luaopen_te);
        return true;
    }
    if (!te_lua_load_source(L, name)) return false;
    lua_pushcclosure(L, load_once, 1);
    return true;
}

/* A searcher for package.loaders. */
static int search_embedded(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    if (!push_loader(L, name)) lua_pushfstring(L, "\n\tno module '%s' in the library", name);
    return 1;
}

/* require(name) where there is no package library. No library that reaches memory is given away, whoever opened it. */
static int plain_require(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    lua_settop(L, 1);
    if (strcmp(name, LUA_FFILIBNAME) == 0) return luaL_error(L, "module '%s' not found", name);
    luaL_findtable(L, LUA_REGISTRYINDEX, "_LOADED", 16);
    lua_getfield(L, 2, name);
    if (lua_toboolean(L, -1)) return 1;
    if (!push_loader(L, name)) return luaL_error(L, "module '%s' not found", name);
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    if (lua_isnil(L, -1)) {
        lua_pushboolean(L, 1);
        lua_replace(L, -2);
    }
    lua_pushvalue(L, -1);
    lua_setfield(L, 2, name);
    return 1;
}

void te_lua_open_library(lua_State *L)
{
    lua_getglobal(L, "package");
    if (!lua_istable(L, -1)) {
        lua_pushcfunction(L, plain_require);
        lua_setglobal(L, "require");
        lua_pop(L, 1);
        return;
    }
    lua_getfield(L, -1, "loaders");
    for (int i = (int)lua_objlen(L, -1); i >= 2; i--) { /* after preload, before files: a file te.lua changes nothing */
        lua_rawgeti(L, -1, i);
        lua_rawseti(L, -2, i + 1);
    }
    lua_pushcfunction(L, search_embedded);
    lua_rawseti(L, -2, 2);
    lua_pop(L, 2);
}

/* --- text only ---------------------------------------------------------------------------------------------------- */

/* load(chunk, name, mode, env): the original with mode "t"; upvalue 1. */
static int text_load(lua_State *L)
{
    lua_settop(L, 4);
    lua_pushliteral(L, "t");
    lua_replace(L, 3);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, 4, LUA_MULTRET);
    return lua_gettop(L);
}

/* loadfile(name, mode, env) */
static int text_loadfile(lua_State *L)
{
    lua_settop(L, 3);
    lua_pushliteral(L, "t");
    lua_replace(L, 2);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, 3, LUA_MULTRET);
    return lua_gettop(L);
}

static int text_dofile(lua_State *L)
{
    const char *name = luaL_optstring(L, 1, NULL);
    lua_settop(L, 1);
    if (luaL_loadfilex(L, name, "t") != 0) return lua_error(L);
    lua_call(L, 0, LUA_MULTRET);
    return lua_gettop(L) - 1;
}

/* A searcher for Lua files along package.path. */
static int search_file(lua_State *L)
{
    luaL_checkstring(L, 1);
    lua_settop(L, 1);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "searchpath");
    lua_pushvalue(L, 1);
    lua_getfield(L, 2, "path");
    lua_call(L, 2, 2);
    if (lua_isnil(L, -2)) return 1; /* where it looked */
    lua_pop(L, 1);
    if (luaL_loadfilex(L, lua_tostring(L, -1), "t") == 0) return 1;
    return luaL_error(L, "error loading module '%s':\n\t%s", lua_tostring(L, 1), lua_tostring(L, -1));
}

static void wrap(lua_State *L, const char *name, lua_CFunction function)
{
    lua_getglobal(L, name);
    if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        return;
    }
    lua_pushcclosure(L, function, 1);
    lua_setglobal(L, name);
}

void te_lua_text_only(lua_State *L)
{
    wrap(L, "load", text_load);
    wrap(L, "loadstring", text_load);
    wrap(L, "loadfile", text_loadfile);
    wrap(L, "dofile", text_dofile);
    lua_getglobal(L, "package");
    if (lua_istable(L, -1)) {
        lua_getfield(L, -1, "loaders");
        lua_pushcfunction(L, search_file);
        lua_rawseti(L, -2, 2);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}
