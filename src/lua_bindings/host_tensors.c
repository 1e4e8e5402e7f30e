/* host_tensors.c - tetrain.h: calling functions with tensors, and tensors as globals. */
#include "host.h"

typedef struct call_job {
    tetrain          *host;
    const char       *name;
    te_tensor *const *in;
    te_tensor       **out;
    int               n_in, n_out;
    te_tensor        *tensor;
} call_job;

/* Pushes the global with a dotted name, nil when there is none. */
static void push_dotted(lua_State *L, const char *name)
{
    lua_pushvalue(L, LUA_GLOBALSINDEX);
    for (const char *at = name; at;) {
        const char *dot = strchr(at, '.');
        lua_pushlstring(L, at, dot ? (size_t)(dot - at) : strlen(at));
        if (lua_istable(L, -2)) {
            lua_gettable(L, -2);
        } else {
            lua_pop(L, 1);
            lua_pushnil(L);
        }
        lua_remove(L, -2);
        at = dot ? dot + 1 : NULL;
    }
}

static int call_function(lua_State *L)
{
    call_job *job = lua_touserdata(L, 1);
    luaL_checkstack(L, job->n_in + job->n_out + LUA_MINSTACK, "too many tensors");
    push_dotted(L, job->name);
    bool callable = lua_isfunction(L, -1);
    if (!callable && luaL_getmetafield(L, -1, "__call")) {
        lua_pop(L, 1);
        callable = true;
    }
    if (!callable) return luaL_error(L, "tetrain_call: \"%s\" is no function", job->name);
    for (int i = 0; i < job->n_in; i++) te_lua_push_tensor(L, &job->in[i]);
    tetrain_call_traced(job->host, job->n_in, job->n_out);
    for (int i = 0; i < job->n_out; i++) {
        te_lua_tensor *u = te_lua_to_tensor(L, i - job->n_out);
        if (!u || !u->t)
            return luaL_error(L, "tetrain_call: result %d of \"%s\" is no tensor but a %s", i + 1, job->name,
                              luaL_typename(L, i - job->n_out));
    }
    for (int i = 0; i < job->n_out; i++) job->out[i] = te_tensor_retain(te_lua_to_tensor(L, i - job->n_out)->t);
    return 0;
}

tetrain_status tetrain_call(tetrain *host, const char *function, te_tensor *const *in, int n_in, te_tensor **out,
                            int n_out)
{
    call_job job = {.host = host, .name = function, .in = in, .n_in = n_in, .out = out, .n_out = n_out};
    if (host && in && out && n_in > 0 && n_out > 0 && in < out + n_out && out < in + n_in)
        return tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_call: tensors and results overlap in memory");
    for (int i = 0; out && i < n_out; i++) out[i] = NULL;
    if (!host) return TETRAIN_ERROR_ARGUMENT;
    if (!function || n_in < 0 || n_out < 0 || (n_in && !in) || (n_out && !out))
        return tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_call: function %s, %d tensors%s, %d results%s",
                            function ? function : "NULL", n_in, in ? "" : " at NULL", n_out, out ? "" : " at NULL");
    for (int i = 0; i < n_in; i++)
        if (in[i] && te_tensor_context(in[i]) != host->ctx)
            return tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_call: tensor %d belongs to another context",
                                i + 1);
    return tetrain_protected(host, call_function, &job);
}

static int set_tensor(lua_State *L)
{
    call_job *job = lua_touserdata(L, 1);
    tetrain_count_work(job->host, L, 0);
    te_lua_push_tensor(L, &job->tensor);
    lua_setglobal(L, job->name);
    return 0;
}

tetrain_status tetrain_set_tensor(tetrain *host, const char *global, te_tensor *tensor)
{
    call_job job = {.host = host, .name = global, .tensor = tensor};
    if (!host) return TETRAIN_ERROR_ARGUMENT;
    if (!global || strchr(global, '.'))
        return tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_set_tensor: \"%s\" is no name of a global",
                            global ? global : "NULL");
    if (tensor && te_tensor_context(tensor) != host->ctx)
        return tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_set_tensor: the tensor belongs to another context");
    return tetrain_protected(host, set_tensor, &job);
}

static int get_tensor(lua_State *L)
{
    call_job *job = lua_touserdata(L, 1);
    push_dotted(L, job->name);
    te_lua_tensor *u = te_lua_to_tensor(L, -1);
    if (!u || !u->t) return luaL_error(L, "tetrain_get_tensor: \"%s\" is no tensor", job->name);
    job->tensor = te_tensor_retain(u->t);
    return 0;
}

te_tensor *tetrain_get_tensor(tetrain *host, const char *global)
{
    call_job job = {.host = host, .name = global};
    if (host && !global) tetrain_fail(host, TETRAIN_ERROR_ARGUMENT, "tetrain_get_tensor: the name is NULL");
    if (!host || !global) return NULL;
    return tetrain_protected(host, get_tensor, &job) == TETRAIN_OK ? job.tensor : NULL;
}
