/* hook.c - functions of Lua that see gradients (core/autograd_hook.c).
 *
 * A hook holds a registry reference to a function, show(gradient), which returns the gradient to put in its place, nil
 * for none, or false when it is not to be called again (lua/te/hooks.lua). What the function refers to lives until the
 * graph has been used, or, of a leaf, as long as the hook.
 */
#include "bindings.h"

#include "core/autograd.h"

static const char title[] = "te.register_hook";

/* What a hook keeps. */
typedef struct shown {
    te_lua_link *link;
    int          ref;
} shown;

typedef struct show_job {
    te_lua_job   base;
    const shown *hook;
    te_tensor  **grad;
    bool        *gone;
} show_job;

static void release_shown(void *data)
{
    shown       *hook = data;
    te_lua_link *link = hook->link;
    te_mem       mem = link->mem;
    if (link->rt) luaL_unref(link->rt->thread, LUA_REGISTRYINDEX, hook->ref);
    te_mem_free(&mem, hook, sizeof *hook);
    if (--link->refs == 0) te_mem_free(&mem, link, sizeof *link);
}

/* Puts what fn returned in the gradient's place. fn may have released both. */
static void replace(show_job *job, te_tensor *given)
{
    te_tensor *grad = *job->grad;
    if (!given) {
        job->base.status =
            te_fail(job->base.ctx, TE_ERROR_ARGUMENT, "%s: fn returned a tensor that was released", title);
    } else if (given->dtype != grad->dtype || given->storage->device != grad->storage->device ||
               !te_same_shape(given, grad)) {
        job->base.status = te_fail(job->base.ctx, TE_ERROR_ARGUMENT,
                                   "%s: fn returned a %s tensor %s on %s for a gradient of %s %s on %s", title,
                                   te_dtype_name(given->dtype), TE_SHAPE_TEXT(given), te_tensor_device(given),
                                   te_dtype_name(grad->dtype), TE_SHAPE_TEXT(grad), te_tensor_device(grad));
    } else {
        *job->grad = te_tensor_retain(given);
        te_tensor_release(grad);
    }
}

static int run_show(lua_State *L)
{
    show_job *job = lua_touserdata(L, 1);
    lua_pushcfunction(L, te_lua_remember);
    int handler = lua_gettop(L);
    lua_rawgeti(L, LUA_REGISTRYINDEX, job->hook->ref);
    te_lua_push_tensor(L, job->grad);
    te_lua_job_call(&job->base, L, 1, handler);
    if (job->base.status != TE_OK || lua_gettop(L) == handler) return 0;
    const te_lua_tensor *u = te_lua_to_tensor(L, handler + 1);
    *job->gone = lua_isboolean(L, handler + 1);
    if (u) replace(job, u->t);
    return 0;
}

static te_status show(te_context *ctx, void *data, te_tensor **grad, bool *gone)
{
    const shown *hook = data;
    show_job     job = {
            .base = {.ctx = ctx, .rt = hook->link->rt, .title = title}, .hook = hook, .grad = grad, .gone = gone};
    return te_lua_job_run(&job.base, run_show);
}

/* hook_gradient(t, show): calls show with the gradient of t in every backward pass. */
static int hook_gradient(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_lua_check_tensor(L, 1, "register_hook", "self");
    luaL_checktype(L, 2, LUA_TFUNCTION);
    te_lua_enter(rt, L, "register_hook");
    te_tensor *t = te_lua_check_tensor(L, 1, "register_hook", "self");
    te_mem     mem = rt->link->mem;
    lua_settop(L, 2);
    int    ref = luaL_ref(L, LUA_REGISTRYINDEX);
    shown *hook = te_mem_alloc(&mem, sizeof *hook);
    if (!hook) {
        luaL_unref(L, LUA_REGISTRYINDEX, ref);
        return te_lua_raise(rt, L, "register_hook", te_fail_memory(rt->ctx, title));
    }
    *hook = (shown){.link = rt->link, .ref = ref};
    rt->link->refs++;
    te_status status = te_grad_hook_add(t, &(te_grad_hook){.run = show, .release = release_shown, .data = hook});
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "register_hook", status);
}

const luaL_Reg te_lua_hook_functions[] = {{"hook_gradient", hook_gradient}, {NULL, NULL}};
