/* errors.c - messages: where, what, what was given instead, and what was probably meant. */
#include "bindings.h"

#include "core/nearest.h"
#include "kernels/numerals.h"

#include <math.h>

/* Sources of the library are named "=te/…" (see library.c). */
static bool is_library(const lua_Debug *frame) { return strncmp(frame->source, "=te/", 4) == 0; }

/* Pushes "file:line: " of the nearest Lua function outside the library. */
static void push_where(lua_State *L)
{
    lua_Debug frame;
    for (int level = 1; lua_getstack(L, level, &frame); level++) {
        lua_getinfo(L, "Sl", &frame);
        if (frame.currentline <= 0 || is_library(&frame)) continue;
        lua_pushfstring(L, "%s:%d: ", frame.short_src, frame.currentline);
        return;
    }
    lua_pushliteral(L, "");
}

int te_lua_fail(lua_State *L, const char *function, const char *format, ...)
{
    char    text[1024];
    va_list args;
    va_start(args, format);
    te_vsnprintf(text, sizeof text, format, args);
    va_end(args);
    push_where(L);
    if (function) lua_pushfstring(L, "te.%s: ", function);
    lua_pushstring(L, text);
    lua_concat(L, function ? 3 : 2);
    return lua_error(L);
}

int te_lua_raise(te_lua *rt, lua_State *L, const char *function, te_status status)
{
    const char *message = te_context_error(rt->ctx);
    rt->status = status;
    if (status == TE_ERROR_INTERRUPTED && rt->host && (rt->ctx->interrupted & TE_INTERRUPT_SCRIPTS)) te_lua_stop(rt, L);
    if (status == TE_ERROR_MEMORY && rt->ctx->limit_refused) te_lua_exhausted(rt, message);
    if (rt->error_ref != LUA_NOREF) { /* a Lua error went through the engine: raise that value itself */
        lua_rawgeti(L, LUA_REGISTRYINDEX, rt->error_ref);
        luaL_unref(L, LUA_REGISTRYINDEX, rt->error_ref);
        rt->error_ref = LUA_NOREF;
        return lua_error(L);
    }
    return te_lua_fail(L, strncmp(message, "te.", 3) == 0 ? NULL : function, "%s", message);
}

void te_lua_forget_error(te_lua *rt, lua_State *L)
{
    if (rt->error_ref != LUA_NOREF) luaL_unref(L, LUA_REGISTRYINDEX, rt->error_ref);
    rt->error_ref = LUA_NOREF;
}

int te_lua_raise_io(te_lua *rt, lua_State *L, const char *function, const te_io_error *error)
{
    if (!rt->ctx) return te_lua_fail(L, function, "%s", error->message);
    return te_lua_raise(rt, L, function, te_fail(rt->ctx, error->status, "%s", error->message));
}

/* --- nearest name ------------------------------------------------------------------------------------------------- */

const char *te_lua_nearest(const char *name, const char *const *names, int n)
{
    const char *best = NULL;
    te_nearest  nearest = te_nearest_to(name, strlen(name));
    for (int i = 0; n < 0 ? names[i] != NULL : i < n; i++)
        if (te_nearest_consider(&nearest, names[i])) best = names[i];
    return best;
}

/* --- values in messages ------------------------------------------------------------------------------------------- */

/* A table of a class, by the name of that. */
static bool describe_object(lua_State *L, int index, char *text, size_t size)
{
    if (!lua_istable(L, index) || !lua_getmetatable(L, index)) return false;
    bool named = false;
    if (lua_istable(L, -1)) {
        lua_pushliteral(L, "__name");
        lua_rawget(L, -2);
        named = lua_type(L, -1) == LUA_TSTRING;
        if (named) snprintf(text, size, "a table of class %.60s", lua_tostring(L, -1));
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    return named;
}

const char *te_lua_describe(lua_State *L, int index, char *text, size_t size)
{
    char           shape[160];
    te_lua_tensor *u = te_lua_to_tensor(L, index);
    int            type = lua_type(L, index);
    if (u && u->t)
        snprintf(text, size, "%s tensor %s", te_dtype_name(u->t->dtype),
                 te_shape_text(u->t->ndim, u->t->shape, shape, sizeof shape));
    else if (u || te_lua_to_object(L, index, te_lua_collected_tag, sizeof *u))
        snprintf(text, size, "a released tensor");
    else if (type == LUA_TNUMBER)
        te_snprintf(text, size, "number %.14g", isnan(lua_tonumber(L, index)) ? (double)NAN : lua_tonumber(L, index));
    else if (type == LUA_TSTRING)
        snprintf(text, size, "string \"%.40s\"", lua_tostring(L, index));
    else if (type == LUA_TBOOLEAN)
        snprintf(text, size, "%s", lua_toboolean(L, index) ? "true" : "false");
    else if (!describe_object(L, index, text, size))
        snprintf(text, size, "%s", type == LUA_TNONE ? "nothing" : lua_typename(L, type));
    return text;
}

/* --- tracebacks --------------------------------------------------------------------------------------------------- */

/* Pushes the line of one frame; false for frames that say nothing to the author of a script: those of C, and those of
 * the library unless the mistake is in the library itself. */
static bool push_frame(lua_State *L, lua_Debug *frame, bool library)
{
    lua_getinfo(L, "Snl", frame);
    if (strcmp(frame->what, "C") == 0 || frame->currentline <= 0 || (!library && is_library(frame))) return false;
    lua_pushfstring(L, "\n\t%s:%d: in ", frame->short_src, frame->currentline);
    if (frame->namewhat[0])
        lua_pushfstring(L, "function '%s'", frame->name);
    else if (strcmp(frame->what, "main") == 0)
        lua_pushliteral(L, "main chunk");
    else
        lua_pushfstring(L, "function <%s:%d>", frame->short_src, frame->linedefined);
    lua_concat(L, 2);
    return true;
}

/* Levels of the stack, those from `level` on. LuaJIT walks over all of them to find one, so not one after the other. */
static int stack_depth(lua_State *L, int level)
{
    lua_Debug frame;
    int       step = 1;
    for (; lua_getstack(L, level + step - 1, &frame); step *= 2) level += step;
    for (; step; step /= 2)
        if (lua_getstack(L, level + step - 1, &frame)) level += step;
    return level;
}

/* Pushes the frames from `level` on, one a line, for the error value at 1. Joined one by one: after an overflow the
 * stack has a few places left. */
static void push_frames(lua_State *L, int level)
{
    enum { FIRST = 12, LAST = 10 }; /* shown of a deep stack */
    lua_Debug frame;
    int       depth = stack_depth(L, level), first = level;
    bool      library = lua_isstring(L, 1) && strncmp(lua_tostring(L, 1), "te/", 3) == 0;
    lua_pushliteral(L, "\nstack traceback:");
    for (; lua_getstack(L, level, &frame); level++) {
        if (depth - first > FIRST + LAST && level == first + FIRST) {
            lua_pushliteral(L, "\n\t...");
            lua_concat(L, 2);
            level = depth - LAST;
            if (!lua_getstack(L, level, &frame)) break;
        }
        if (push_frame(L, &frame, library)) lua_concat(L, 2);
    }
}

static const char remembered_key[] = "te.remembered"; /* in the registry: {message, traceback} */

/* Pushes the traceback that was kept for the message at 1; false when there is none. */
static bool push_remembered(lua_State *L)
{
    lua_getfield(L, LUA_REGISTRYINDEX, remembered_key);
    if (!lua_istable(L, -1)) return false;
    lua_rawgeti(L, -1, 1);
    if (!lua_rawequal(L, -1, 1)) return false;
    lua_rawgeti(L, -2, 2);
    return true;
}

int te_lua_remember(lua_State *L)
{
    lua_settop(L, 1);
    if (lua_type(L, 1) != LUA_TSTRING || push_remembered(L)) {
        lua_settop(L, 1);
        return 1;
    }
    lua_createtable(L, 2, 0);
    lua_pushvalue(L, 1);
    lua_rawseti(L, -2, 1);
    push_frames(L, 1);
    lua_rawseti(L, -2, 2);
    lua_setfield(L, LUA_REGISTRYINDEX, remembered_key);
    lua_settop(L, 1);
    return 1;
}

const char te_lua_trace[] = "te.trace";

int te_lua_traceback(lua_State *L)
{
    lua_settop(L, 1);
    if (!push_remembered(L)) {
        lua_settop(L, 1);
        push_frames(L, 1);
    }
    if (!lua_isstring(L, 1)) { /* its __tostring may do anything, and may fail where errors cannot be handled */
        te_lua_keep(L, te_lua_trace);
        lua_settop(L, 1);
        return 1;
    }
    lua_pushvalue(L, 1);
    lua_insert(L, -2);
    lua_concat(L, 2);
    return 1;
}
