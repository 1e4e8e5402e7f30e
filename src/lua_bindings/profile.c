/* profile.c - te._core.profile(fn): runs fn and lists the kernels that ran (core/profile.h). */
#include "bindings.h"

#include "core/profile.h"

static void push_event(lua_State *L, const te_profile_event *event)
{
    lua_createtable(L, 0, 7);
    lua_pushstring(L, event->name);
    lua_setfield(L, -2, "name");
    lua_pushstring(L, event->kind);
    lua_setfield(L, -2, "kind");
    lua_pushstring(L, event->device);
    lua_setfield(L, -2, "device");
    lua_pushnumber(L, event->start);
    lua_setfield(L, -2, "start");
    lua_pushnumber(L, event->seconds);
    lua_setfield(L, -2, "seconds");
    lua_pushnumber(L, event->bytes);
    lua_setfield(L, -2, "bytes");
    lua_pushnumber(L, event->flops);
    lua_setfield(L, -2, "flops");
}

static const char recording_tag[] = "te.profile";

/* What was recorded is memory of Lua's heap and counts towards its limit, which kernels without end reach. */
typedef struct recording {
    const void       *tag;
    te_mem            mem;
    te_profile_event *events;
    size_t            n, capacity;
} recording;

static int release_recording(lua_State *L)
{
    recording *r = te_lua_to_object(L, 1, recording_tag, sizeof *r);
    if (!r) return 0;
    if (r->events) te_mem_free(&r->mem, r->events, r->capacity * sizeof *r->events);
    *r = (recording){0};
    return 0;
}

static int profile(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    te_lua_enter(rt, L, "profile");
    recording *r = lua_newuserdata(L, sizeof *r);
    *r = (recording){.tag = recording_tag};
    r->mem.realloc = lua_getallocf(L, &r->mem.user);
    te_lua_set_collector(L, release_recording);
    lua_pushcfunction(L, te_lua_remember);
    te_status status = te_profile_start(rt->ctx, r->mem);
    if (status != TE_OK) return te_lua_raise(rt, L, "profile", status);
    lua_pushvalue(L, 1);
    int failed = lua_pcall(L, 0, 0, 3);
    r->events = te_profile_stop(rt->ctx, &r->n, &r->capacity, &status);
    if (failed) return lua_error(L);
    if (status != TE_OK) return te_lua_raise(rt, L, "profile", status);
    lua_createtable(L, (int)r->n, 0);
    for (size_t i = 0; i < r->n; i++) {
        push_event(L, &r->events[i]);
        lua_rawseti(L, -2, (int)i + 1);
    }
    return 1;
}

/* profiling(): whether one is running, which waits for the device around every kernel. */
static int profiling(lua_State *L)
{
    lua_pushboolean(L, te_lua_runtime(L)->ctx->profiler != NULL);
    return 1;
}

const luaL_Reg te_lua_profile_functions[] = {{"profile", profile}, {"profiling", profiling}, {NULL, NULL}};
