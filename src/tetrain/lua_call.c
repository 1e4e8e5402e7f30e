/* lua_call.c - see lua_call.h. Everything that can raise runs inside lua_cpcall. */
#include "lua_call.h"

#include <lua.h>
#include <stdlib.h>
#include <string.h>

typedef struct text_call {
    const char *module, *function, *text;
    size_t      size;
    lua_texts  *results;
} text_call;

static char *copy_text(lua_State *L, int index)
{
    size_t      size;
    const char *text = lua_isstring(L, index) ? lua_tolstring(L, index, &size) : NULL;
    char       *copy = text ? malloc(size + 1) : NULL;
    if (copy) memcpy(copy, text, size + 1);
    return copy;
}

static int call_text(lua_State *L)
{
    text_call *call = lua_touserdata(L, 1);
    lua_getglobal(L, "require");
    lua_pushstring(L, call->module);
    lua_call(L, 1, 1);
    lua_getfield(L, -1, call->function);
    lua_pushlstring(L, call->text, call->size);
    lua_call(L, 1, 2);
    call->results->first = copy_text(L, -2);
    call->results->second = copy_text(L, -1);
    return 0;
}

bool lua_call_text(tetrain *rt, const char *module, const char *function, const char *text, size_t size,
                   lua_texts *results)
{
    lua_State *L = tetrain_lua_state(rt);
    text_call  call = {module, function, text, size, results};
    int        top = lua_gettop(L);
    *results = (lua_texts){NULL, NULL};
    bool good = lua_cpcall(L, call_text, &call) == 0;
    lua_settop(L, top);
    return good;
}

void lua_texts_free(lua_texts *texts)
{
    free(texts->first);
    free(texts->second);
}

typedef struct arguments {
    const char        *name;
    int                argc;
    const char *const *argv;
} arguments;

static int set_arguments(lua_State *L)
{
    const arguments *given = lua_touserdata(L, 1);
    lua_createtable(L, given->argc, 1);
    for (int i = 0; i <= given->argc; i++) {
        lua_pushstring(L, i == 0 ? given->name : given->argv[i - 1]);
        lua_rawseti(L, -2, i);
    }
    lua_setglobal(L, "arg");
    return 0;
}

bool lua_set_arguments(tetrain *rt, const char *name, int argc, const char *const *argv)
{
    lua_State *L = tetrain_lua_state(rt);
    arguments  given = {name, argc, argv};
    int        top = lua_gettop(L);
    bool       good = lua_cpcall(L, set_arguments, &given) == 0;
    lua_settop(L, top);
    return good;
}
