/* module.c - luaopen_te: the runtime of a Lua state and the table that `require "te"` returns.
 *
 * The engine's functions are registered here; everything else of `te` is Lua, beginning with lua/te/init.lua, and loads
 * when it is first used.
 */
#include "host.h"

#include "core/fuser/group.h"
#include "tetrain/tetrain.h"

#include <stdio.h>

static const char registry_key[] = "te.runtime", thread_key[] = "te.thread";
const char        te_lua_modules[] = "te.modules";

te_lua *te_lua_attached(lua_State *L)
{
    lua_getfield(L, LUA_REGISTRYINDEX, registry_key);
    te_lua *rt = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return rt;
}

void te_lua_keep(lua_State *L, const void *key)
{
    lua_pushlightuserdata(L, (void *)key);
    lua_insert(L, -2);
    lua_rawset(L, LUA_REGISTRYINDEX);
}

void te_lua_push_kept(lua_State *L, const void *key)
{
    lua_pushlightuserdata(L, (void *)key);
    lua_rawget(L, LUA_REGISTRYINDEX);
}

bool te_lua_push_metatable(lua_State *L, const void *key)
{
    te_lua_push_kept(L, key);
    if (!lua_isnil(L, -1)) return false;
    lua_pop(L, 1);
    lua_newtable(L);
    return true;
}

void te_lua_keep_copy(lua_State *L, const void *key)
{
    lua_pushvalue(L, -1);
    te_lua_keep(L, key);
}

void te_lua_push_anchor(lua_State *L) { lua_getfield(L, LUA_REGISTRYINDEX, registry_key); }

void te_lua_set_collector(lua_State *L, lua_CFunction collect)
{
    lua_createtable(L, 0, 2);
    te_lua_push_anchor(L);
    lua_pushcclosure(L, collect, 1);
    lua_setfield(L, -2, "__gc");
    lua_pushboolean(L, 0);
    lua_setfield(L, -2, "__metatable");
    lua_setmetatable(L, -2);
}

static int collect_owner(lua_State *L)
{
    const te_lua_kind *kind = lua_touserdata(L, lua_upvalueindex(1));
    te_lua_owner      *owner = te_lua_to_object(L, 1, kind, kind->size);
    if (!owner || !owner->ctx) return 0;
    kind->release(owner);
    te_context_unref(owner->ctx);
    *owner = (te_lua_owner){0};
    return 0;
}

void *te_lua_push_owner(te_lua *rt, lua_State *L, const te_lua_kind *kind, void (*fill)(te_lua *rt, lua_State *L))
{
    te_lua_owner *owner = memset(te_lua_scratch(L, kind->size), 0, kind->size);
    owner->tag = kind;
    if (te_lua_push_metatable(L, kind)) {
        lua_pushlightuserdata(L, (void *)kind);
        lua_pushcclosure(L, collect_owner, 1);
        lua_setfield(L, -2, "__gc");
        lua_pushboolean(L, false);
        lua_setfield(L, -2, "__metatable");
        if (fill) fill(rt, L);
        te_lua_keep_copy(L, kind);
    }
    lua_setmetatable(L, -2);
    te_context_retain(rt->ctx); /* not before it would be given back */
    owner->ctx = rt->ctx;
    return owner;
}

void te_lua_register(te_lua *rt, lua_State *L, const luaL_Reg *functions)
{
    (void)rt;
    for (; functions->name; functions++) {
        te_lua_push_anchor(L);
        lua_pushcclosure(L, functions->func, 1);
        lua_setfield(L, -2, functions->name);
    }
}

/* The state is closing (nothing else can drop the last reference: the registry holds one). */
static int close_runtime(lua_State *L)
{
    te_lua *rt = lua_touserdata(L, 1);
    if (!rt || !rt->ctx) return 0;
    te_context  *ctx = rt->ctx;
    te_lua_link *link = rt->link;
    ctx->collect = NULL;
    rt->ctx = NULL;
    if (rt->host) rt->host->rt = NULL; /* a signal may still come before the process has ended */
    if (link) {
        te_mem mem = link->mem;
        link->rt = NULL;
        if (--link->refs == 0) te_mem_free(&mem, link, sizeof *link);
    }
    te_context_unref(ctx);
    return 0;
}

te_lua *te_lua_attach(lua_State *L, const te_lua_options *options)
{
    te_lua *rt = lua_newuserdata(L, sizeof *rt);
    memset(rt, 0, sizeof *rt);
    rt->error_ref = LUA_NOREF;
    rt->restricted = options->restricted;
    snprintf(rt->device, sizeof rt->device, "%s", options->device ? options->device : "cpu");
    rt->device_told = options->device && *options->device;
    lua_createtable(L, 0, 2);
    lua_pushcfunction(L, close_runtime);
    lua_setfield(L, -2, "__gc");
    lua_pushliteral(L, "te.runtime");
    lua_setfield(L, -2, "__metatable");
    lua_setmetatable(L, -2);
    rt->thread = lua_newthread(L);
    te_lua_keep(L, thread_key);
    lua_newtable(L);
    te_lua_keep(L, te_lua_modules);
    if (options->ctx) te_context_retain(options->ctx);
    rt->ctx = options->ctx ? options->ctx : te_context_open(NULL);
    rt->link = rt->ctx ? te_mem_alloc(&rt->ctx->mem, sizeof *rt->link) : NULL;
    if (!rt->link) luaL_error(L, "te: out of host memory");
    rt->threads = te_context_threads(rt->ctx);
    *rt->link = (te_lua_link){.mem = rt->ctx->mem, .rt = rt, .refs = 1};
    lua_setfield(L, LUA_REGISTRYINDEX, registry_key);
    return rt;
}

/* _core.within(fn, ...): xpcall(fn, remember, ...) that a coroutine cannot leave by yielding, since there is C on its
 * stack. For what the engine records meanwhile. */
static int within(lua_State *L)
{
    te_lua_check_stack(te_lua_attached(L), L);
    luaL_checkany(L, 1);
    lua_pushcfunction(L, te_lua_remember);
    lua_insert(L, 1);
    bool ok = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 1) == 0;
    lua_pushboolean(L, ok);
    lua_replace(L, 1);
    return lua_gettop(L);
}

static void open_core(te_lua *rt, lua_State *L)
{
    lua_newtable(L);
    te_lua_register(rt, L, te_lua_autograd_functions);
    te_lua_register(rt, L, te_lua_custom_functions);
    te_lua_register(rt, L, te_lua_hook_functions);
    te_lua_register(rt, L, te_lua_group_functions);
    te_lua_register(rt, L, te_lua_graph_functions);
    te_lua_register(rt, L, te_lua_random_functions);
    te_lua_register(rt, L, te_lua_define_functions);
    te_lua_register(rt, L, te_lua_optim_functions);
    te_lua_register(rt, L, te_lua_optim_prepared_functions);
    te_lua_register(rt, L, te_lua_profile_functions);
    te_lua_register(rt, L, te_lua_quantized_functions);
    te_lua_register(rt, L, te_lua_quantized_parameter_functions);
    te_lua_register(rt, L, te_lua_recipe_kind_functions);
    te_lua_register(rt, L, te_lua_recipe_functions);
    te_lua_register(rt, L, te_lua_system_functions);
    te_lua_register(rt, L, te_lua_library_functions);
    lua_pushinteger(L, TE_GROUP_MAX_OUTPUTS);
    lua_setfield(L, -2, "group_most_outputs");
    lua_pushcfunction(L, te_lua_remember);
    lua_setfield(L, -2, "remember");
    lua_pushcfunction(L, within);
    lua_setfield(L, -2, "within");
    te_lua_push_kept(L, te_lua_tensor_methods);
    lua_setfield(L, -2, "tensor_methods");
    if (!rt->restricted) {
        te_lua_register(rt, L, te_lua_comm_functions);
        te_lua_register(rt, L, te_lua_process_functions);
        te_lua_register(rt, L, te_lua_file_functions);
        te_lua_register(rt, L, te_lua_json_functions);
        te_lua_register(rt, L, te_lua_token_functions);
        te_lua_register(rt, L, te_lua_tokenizer_functions);
        te_lua_register(rt, L, te_lua_words_functions);
    }
    lua_setfield(L, -2, "_core");
}

/* The runtime of a state that tetrain_open did not make: `require "te"` in a host's own Lua. */
static te_lua *attach_foreign(lua_State *L)
{
    te_lua *rt = te_lua_attach(L, &(te_lua_options){0});
    te_lua_open_library(L);
    return rt;
}

/* Fills and returns the library's table; the runtime is a light userdata at 1. */
static int open_library(lua_State *L)
{
    te_lua *rt = lua_touserdata(L, 1);
    lua_settop(L, 0);
    lua_newtable(L);
    te_lua_open_tensor(rt, L);
    te_lua_open_operations(rt, L);
    te_lua_register(rt, L, te_lua_create_functions);
    te_lua_register(rt, L, te_lua_runtime_functions);
    if (!rt->restricted) te_lua_register(rt, L, te_lua_create_file_functions);
    lua_pushstring(L, te_version());
    lua_setfield(L, -2, "version");
    open_core(rt, L);
    luaL_findtable(L, LUA_REGISTRYINDEX, "_LOADED", 16); /* modules that init.lua loads require "te" themselves */
    lua_pushvalue(L, 1);
    lua_setfield(L, -2, "te");
    if (!te_lua_load_source(L, "te")) return luaL_error(L, "te: the Lua library was not embedded in this build");
    lua_pushvalue(L, 1);
    lua_call(L, 1, 0);
    te_lua_push_kept(L, te_lua_modules);
    lua_pushvalue(L, 1);
    lua_setfield(L, -2, "te");
    lua_settop(L, 1);
    return 1;
}

/* Takes `te` and its modules out of the table on top, and pops it: they belong to a library that was not finished. */
static void forget_library(lua_State *L)
{
    for (lua_pushnil(L); lua_istable(L, -2) && lua_next(L, -2); lua_pop(L, 1)) {
        const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "";
        if (strcmp(name, "te") != 0 && strncmp(name, "te.", 3) != 0) continue;
        lua_pushvalue(L, -2);
        lua_pushnil(L);
        lua_rawset(L, -5);
    }
    lua_pop(L, 1);
}

/* A state has one library: opened again, it is the same. */
int luaopen_te(lua_State *L)
{
    te_lua *rt = te_lua_attached(L);
    if (!rt) rt = attach_foreign(L);
    lua_settop(L, 0);
    te_lua_push_kept(L, te_lua_modules);
    lua_getfield(L, 1, "te");
    if (!lua_isnil(L, 2)) return 1;
    lua_settop(L, 0);
    lua_pushcfunction(L, te_lua_remember);
    lua_pushcfunction(L, open_library);
    lua_pushlightuserdata(L, rt);
    if (lua_pcall(L, 1, 1, 1) == 0) return 1;
    lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
    forget_library(L); /* so that the next require begins anew */
    te_lua_push_kept(L, te_lua_modules);
    forget_library(L);
    lua_pushnil(L);
    te_lua_keep(L, te_lua_settle);
    return lua_error(L);
}
